//! `volume import` and `volume export`: the files of a volume as a tar.

use std::io::{BufReader, IsTerminal as _};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail};
use container::changes::Owners;
use container::copy::{Destination, LinkHandling, NewOwner, pack, unpack};
use oci::source::Input;
use rustix::fs::{Mode, OFlags};
use store::{DiskRoom, OpenOptions, VolumeError};
use transfer::export::Output;
use transfer::import::{Limits, read_archive};

use crate::Answer;
use crate::output::report;
use crate::output::stream::CancellableStream;
use crate::session::context::Context;
use crate::session::output_file::{check_output, output};
use crate::session::signals::until_signal;
use crate::verbs::containers::access::cp::tell;
use crate::verbs::images::archives::load::LimitedReader;

/// Adds the files of a tar, compressed or not, to a volume. They replace files of the same names.
pub(super) fn import(
    context: &Context,
    name: &str,
    source: Option<&str>,
) -> anyhow::Result<Answer> {
    let input = match source {
        Some(path) if path != "-" => Input::File(PathBuf::from(path)),
        _ if std::io::stdin().is_terminal() => {
            bail!("standard input is a terminal: redirect a tar to it, or name a file")
        }
        _ => Input::Stdin,
    };
    let Some(store) = context.open_for(OpenOptions::write(), true)? else {
        return Err(VolumeError::Absent(name.to_owned()).into());
    };
    if let Input::File(path) = &input {
        // A container would not copy the files of its image into a volume that was open for writing.
        let absent = || format!("cannot import {input} into volume {name}");
        std::fs::metadata(path).with_context(absent)?;
    }
    let data = store.open_volume_to_write(name)?;
    let room = DiskRoom::from_fd(data.as_fd())?;
    // The tar may be hostile: it cannot write outside of the volume.
    let to = Destination {
        root: data.as_fd(),
        directory: Vec::new(),
        links: LinkHandling::Refused,
        owner: NewOwner::OfTar(None),
        keeps_set_ids: true,
        is_mounted_file: false,
    };
    let cancel = AtomicBool::new(false);
    let imported = until_signal(&cancel, || -> anyhow::Result<_> {
        let read = |tar: &mut dyn std::io::Read| {
            let tar = LimitedReader { inner: BufReader::new(tar), room: &room, cancel: &cancel };
            unpack(tar, &to, &|| {})
        };
        let skipped = read_archive(&input, &Limits::default(), &cancel, read)??;
        rustix::fs::syncfs(&data).context("cannot sync the files to the disk")?;
        Ok(skipped)
    })?;
    let skipped = imported.with_context(|| format!("cannot import {input} into volume {name}"))?;
    tell(context, &skipped);
    Ok(Answer::Yes)
}

/// Writes the files of a volume as a tar.
pub(super) fn export(context: &Context, name: &str, file: &Output) -> anyhow::Result<Answer> {
    check_output(context, file, true)?;
    let absent = || VolumeError::Absent(name.to_owned());
    let store = context.open_for(OpenOptions::read(), true)?.ok_or_else(absent)?;
    store.volumes.get(name)?.ok_or_else(absent)?;
    let path = store.volumes.path(name);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let data = rustix::fs::open(&path, flags, Mode::empty())
        .with_context(|| format!("cannot open {}", path.display()))?;
    let cancel = AtomicBool::new(false);
    let exported = until_signal(&cancel, || -> anyhow::Result<_> {
        if matches!(file, Output::Stdout) {
            let mut out = report::cancellable_output(&cancel);
            let skipped = pack(&data, b"", &Owners::default(), &mut out)?;
            std::io::Write::flush(&mut out)?;
            return Ok(skipped);
        }
        let write = |out: &mut dyn std::io::Write| {
            let mut out = CancellableStream { inner: out, cancel: &cancel };
            Ok(pack(&data, b"", &Owners::default(), &mut out)?)
        };
        output(file, true, write, || {})
    })?;
    let skipped = exported.with_context(|| format!("cannot export volume {name}"))?;
    tell(context, &skipped);
    Ok(Answer::Yes)
}
