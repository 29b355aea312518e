//! Number of data requests in one cold start: EROFS's reads of its devices for the pages that the program needs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{UnmountFlags, unmount};

use super::forms::{Files, Layer, Source, Way, import_form};
use super::measure::{drop_caches, upper_median};
use super::report::{Report, Sizes, Unit};
use crate::Context;
use rig::Skipped;
use rig::inputs;

/// `FAN_PRE_ACCESS` of `linux/fanotify.h`, since Linux 6.14: a part of a file is about to be read.
const PRE_ACCESS: MaskFlags = MaskFlags::from_bits_retain(0x0010_0000);
/// Read-ahead sizes in kB: the kernel's default, and the largest that Quire sets.
const READ_AHEAD: [u32; 2] = [128, 512];
/// Timeout of a wait for an event, after which the program's state is checked.
const PATIENCE: Duration = Duration::from_millis(20);

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::debian_postgres(context.cache, false)?;
    let source = format!("oci:{}:latest", layout.display());
    let target = context.work.join("root");
    let mut rows = Vec::new();
    for form in ["packed", "tar"] {
        let files = Files::of_store(&import_form(context, &source, form)?)?;
        let mut counts = Vec::new();
        for kilobytes in READ_AHEAD {
            let files = Files { read_ahead: Some(kilobytes), ..files.clone() };
            let runs = (0..context.runs).map(|_| count(&files, &target));
            counts.push(upper_median(runs.collect::<Result<Vec<_>>>()?));
        }
        rows.push((format!("quire {form}"), counts));
    }
    let sizes = Sizes::new(
        "Requests of one start, by size of read-ahead",
        Unit::Times,
        ["128 kB", "512 kB"],
        rows,
    );
    Ok(Report {
        name: "events",
        about: format!(
            "`postgres --version` of an image of 700 MB in a chroot, after dropping all caches: how often EROFS asks the \
             host's file system for a part of a device. Each request is one `FAN_PRE_ACCESS` event of fanotify, which is \
             what a service that fetches data when it is needed would be asked. Medians of {} runs.",
            context.runs
        ),
        sizes: vec![sizes],
        ..Report::default()
    })
}

/// Mounts an image, starts the program in it, and returns the number of events of the image's devices.
fn count(files: &Files, target: &Path) -> Result<u64> {
    let flags = InitFlags::FAN_CLASS_PRE_CONTENT
        | InitFlags::FAN_CLOEXEC
        | InitFlags::FAN_NONBLOCK
        | InitFlags::FAN_UNLIMITED_QUEUE;
    let group = Fanotify::init(flags, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)?;
    // Marks must come before the mount opens the devices: a file that is already open has no events.
    for device in &files.devices {
        match group.mark(MarkFlags::FAN_MARK_ADD, PRE_ACCESS, rustix::fs::CWD, Some(device)) {
            Err(Errno::EINVAL) => bail!(Skipped(String::from("the kernel is older than 6.14"))),
            marked => marked.with_context(|| device.display().to_string())?,
        }
    }
    Way::new("", Source::Erofs(files.clone())).mount(target, Layer::None)?;
    let counted = start(&group, target);
    unmount(target, UnmountFlags::empty())?;
    counted
}

fn start(group: &Fanotify, root: &Path) -> Result<u64> {
    let program = postgres(root)?;
    drop_caches()?;
    let mut chroot = Command::new("chroot");
    chroot.arg(root).arg(program).arg("--version").stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = chroot.spawn()?;
    let mut events = 0;
    loop {
        let ended = child.try_wait()?;
        let found = answer(group)?;
        events += found;
        match ended {
            Some(status) if status.success() => {}
            Some(status) => bail!("postgres: {status}"),
            None => continue,
        }
        if found == 0 {
            return Ok(events);
        }
    }
}

/// Allows the pending requests, or waits up to [`PATIENCE`] for one. Returns the number of requests.
fn answer(group: &Fanotify) -> Result<u64> {
    let mut fds = [PollFd::new(group, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::try_from(PATIENCE)?))?;
    let events = match group.read_events() {
        Err(Errno::EAGAIN) => Vec::new(),
        events => events?,
    };
    for event in &events {
        let fd = event.fd().context("the queue of events is full")?;
        group.write_response(FanotifyResponse::new(fd, Response::FAN_ALLOW))?;
    }
    Ok(u64::try_from(events.len())?)
}

/// Path of the server's program, relative to the image's root.
fn postgres(root: &Path) -> Result<PathBuf> {
    let versions = "usr/lib/postgresql";
    let version = fs::read_dir(root.join(versions))?.next().context("there is no PostgreSQL")??;
    Ok(Path::new("/").join(versions).join(version.file_name()).join("bin/postgres"))
}
