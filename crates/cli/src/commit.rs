//! `commit`, `snapshot`, and what `diff` shows of a container: what it changed against its image.

use std::ffi::OsStr;
use std::io::{BufWriter, PipeReader};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use container::bundle::spec::RuntimeSpec;
use container::changes::{self, ChangesError, Owners, Report, Upper};
use container::life::detached;
use container::life::kept::Changes;
use container::life::known::{KnownContainer, find};
use container::life::pause::{PauseError, Paused, pause};
use container::life::stop::signal_number;
use image::erofs::Versions;
use image::tar::write::WriteError;
use image::tree::Tree;
use oci::manifest::Platform;
use serde::Serialize;
use store::{ContainerDir, Digest, OpenImage, OpenOptions, RefName, Resolved, Store, walk};
use transfer::commit::{Change, Commit, check};
use transfer::export::Output;
use transfer::import::{BUDGET, Durable, Limits, Options, OtherPlatform, Unsupported};
use transfer::native::Dedup;
use transfer::progress::Event;

use crate::Answer;
use crate::args;
use crate::context::{Context, now};
use crate::export::{check_output, output};
use crate::import::{give_up_when, tell};
use crate::progress::Progress;
use crate::signals::until_signal;
use crate::{describe, report};

/// A container that is looked at, with all that this needs.
struct Looked {
    found: KnownContainer,
    tree: Tree,
    ids: Owners,
    changes: Changes,
    /// Until the changes are read.
    paused: Option<Paused>,
    /// Nobody starts to remove what has ended, and `gc` leaves the image.
    _lock: Option<ContainerDir>,
    image: OpenImage,
}

/// Whether a container that runs goes on while it is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Stands,
    GoesOn,
}

impl Meanwhile {
    const fn of(no_pause: bool) -> Self {
        if no_pause { Self::GoesOn } else { Self::Stands }
    }
}

/// Must be called before there are threads.
fn look(store: &Store, name: &str, meanwhile: Meanwhile) -> anyhow::Result<Looked> {
    let found = find(store, name)?;
    let id = &found.id;
    let record = found.record.as_ref().with_context(|| format!("container {id} is damaged"))?;
    let image = store.open_image(&record.image)?;
    let tree = crate::target::read(store, &image)?;
    let spec = RuntimeSpec::load(&found.folder);
    let spec = spec.with_context(|| format!("cannot read what container {id} is"))?;
    let failed = || format!("cannot look at what container {id} changed");
    let (changes, paused, lock) = match found.is_running() {
        true => {
            let changes = Changes::of_running(&found.folder).with_context(failed)?;
            let paused = match meanwhile {
                Meanwhile::GoesOn => None,
                Meanwhile::Stands => stand(store, &found)?,
            };
            (changes, paused, None)
        }
        false => {
            let lock = lock(store, id)?;
            // Its monitor may have been killed, and the container with it or not.
            detached::bury(lock.path(), id, now().0).with_context(failed)?;
            (Changes::of_ended(lock.path()).with_context(failed)?, None, Some(lock))
        }
    };
    let ids = Owners::of_bundle(&spec.linux);
    Ok(Looked { tree, ids, changes, paused, _lock: lock, image, found })
}

/// Pauses a container; none if it has ended.
fn stand(store: &Store, found: &KnownContainer) -> anyhow::Result<Option<Paused>> {
    let id = &found.id;
    match pause(&found.folder, id) {
        Ok(paused) => Ok(Some(paused)),
        // What it wrote is held already, and changes no more.
        Err(PauseError::Refused) if !find(store, id).is_ok_and(|it| it.is_running()) => Ok(None),
        Err(error) => Err(error).with_context(|| {
            format!("cannot pause container {id}: with --no-pause it goes on, and what changes meanwhile is an error")
        }),
    }
}

/// The folder of a container that has ended; waits until what it wrote is on the disk.
fn lock(store: &Store, id: &str) -> anyhow::Result<ContainerDir> {
    loop {
        match store.lock_container(id)? {
            Some(folder) => return Ok(folder),
            None => std::thread::sleep(container::pace::GLANCE),
        }
    }
}

impl Looked {
    /// Reads the changes, and lets the container go on.
    fn write(
        &self,
        store: &Store,
        paused: Option<Paused>,
        out: &mut dyn std::io::Write,
        cancel: &AtomicBool,
    ) -> Result<Report, ChangesError> {
        let upper = Upper {
            directory: self.changes.directory(),
            image: &self.tree,
            store,
            ids: &self.ids,
            cancel,
        };
        let report = changes::write(&upper, out);
        drop(paused);
        report
    }

    /// Gives the tar of the changes to `take`, which reads it to its end.
    fn through<T: Send>(
        &self,
        store: &Store,
        paused: Option<Paused>,
        cancel: &AtomicBool,
        take: impl FnOnce(PipeReader) -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<(Report, T)> {
        let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
        std::thread::scope(|scope| {
            let writing = scope.spawn(move || {
                let mut out = BufWriter::with_capacity(256 << 10, writer);
                self.write(store, paused, &mut out, cancel)
            });
            let taken = take(reader);
            let written = match writing.join() {
                Ok(written) => written,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            match (written, taken) {
                // Whoever takes it had enough of it first.
                (Err(error), Err(cause)) if is_unwanted(&error) => Err(cause),
                (Err(error), _) => Err(error.into()),
                (Ok(report), Ok(taken)) => Ok((report, taken)),
                (Ok(_), Err(error)) => Err(error),
            }
        })
    }

    /// What has no place in a layer.
    fn tell_skipped(&self, context: &Context, report: &Report) {
        for path in &report.skipped {
            let path = describe::name(path);
            context.remark(&format!("left out, no layer can hold a socket: {path}"));
        }
    }

    fn manifest(&self) -> anyhow::Result<Digest> {
        let record = self.found.record.as_ref();
        let id = &self.found.id;
        record.and_then(|it| it.manifest).with_context(|| {
            let name = record.and_then(|it| it.name.as_deref()).unwrap_or("NAME");
            format!(
                "the image of container {id} came from a directory or a dump, or was merged or filtered, and has no layers to add one to: `quire export \
                 {name} tar:FILE` and `quire import tar:FILE` make an image of one layer of it; `quire snapshot {id} FILE` \
                 saves what the container changed"
            )
        })
    }
}

fn is_unwanted(error: &ChangesError) -> bool {
    matches!(error, ChangesError::Write(WriteError::Write(error)) if error.kind() == std::io::ErrorKind::BrokenPipe)
}

pub(crate) fn snapshot(context: &Context, args: &args::Snapshot) -> anyhow::Result<Answer> {
    let file = match args.file.as_os_str() == "-" {
        true => Output::Stdout,
        false => Output::File(args.file.clone()),
    };
    check_output(context, &file, args.force)?;
    let store = context.open(OpenOptions::read())?;
    let mut looked = look(&store, &args.container, Meanwhile::of(args.no_pause))?;
    let paused = looked.paused.take();
    let cancel = AtomicBool::new(false);
    let work = || {
        let write = |out: &mut dyn std::io::Write| Ok(looked.write(&store, paused, out, &cancel)?);
        output(&file, args.force, write, || {})
    };
    let done = until_signal(&cancel, work)??;
    looked.tell_skipped(context, &done);
    if matches!(file, Output::Stdout) {
        return Ok(Answer::Yes);
    }
    let told = SnapshotReport {
        container: looked.found.id,
        entries: done.entries,
        bytes: report::Bytes(done.bytes),
        skipped: report::paths(&done.skipped),
    };
    if context.json {
        report::json(&told)?;
    } else if !context.is_quiet() {
        report::line(&told.text())?;
    }
    Ok(Answer::Yes)
}

/// What `snapshot --json` prints.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotReport {
    /// The container.
    container: String,
    /// Entries in the tar.
    entries: u64,
    /// Size of the tar.
    bytes: report::Bytes,
    /// Paths that no tar can hold: sockets.
    skipped: Vec<String>,
}

impl SnapshotReport {
    fn text(&self) -> String {
        format!("{} entries, {}", self.entries, report::size(self.bytes.0))
    }
}

/// The trees of a container's image, and of the image that `commit` would make.
pub(crate) fn preview(
    context: &Context,
    name: &OsStr,
    no_pause: bool,
) -> anyhow::Result<(Tree, Tree)> {
    let name = name.to_str().with_context(|| format!("{name:?} is not UTF-8"))?;
    let store = context.open(OpenOptions::read())?;
    let looked = look(&store, name, Meanwhile::of(no_pause));
    let mut looked = looked.map_err(|error| match crate::names::resolve(&store, name) {
        Ok(_) => error.context(format!(
            "{name} is an image, and diff compares two: say the other one, or a container"
        )),
        Err(_) => error,
    })?;
    let paused = looked.paused.take();
    let cancel = AtomicBool::new(false);
    let algorithm = store.algorithm();
    let work = || {
        looked.through(&store, paused, &cancel, |tar| {
            Ok(transfer::import::preview(&looked.tree, tar, algorithm)?)
        })
    };
    let (report, trees) = until_signal(&cancel, work)??;
    looked.tell_skipped(context, &report);
    Ok(trees)
}

pub(crate) fn commit(context: &Context, args: &args::Commit) -> anyhow::Result<Answer> {
    let name: RefName = args.name.parse()?;
    for change in &args.change {
        if let Change::StopSignal(signal) = change {
            signal_number(signal).context("--change STOPSIGNAL")?;
        }
    }
    let store = context.open(OpenOptions::write())?;
    let mut looked = look(&store, &args.container, Meanwhile::of(args.no_pause))?;
    let manifest = looked.manifest()?;
    // The new image is local, and has all that is in the one below.
    let below = Resolved { image: looked.image.id, name: None, manifest: Some(manifest) };
    drop(crate::policy::permit(context, &store, below)?);
    check(&store, &manifest)?;
    let paused = looked.paused.take();
    let progress = Progress::new(context);
    let cancel = Arc::new(AtomicBool::new(false));
    give_up_when(&store, &cancel);
    let now = now();
    let created = report::time(now.0).replace(' ', "T") + "Z";
    let command = looked.found.command().join(" ");
    let made = Commit {
        manifest: &manifest,
        tree: &looked.tree,
        created: &created,
        author: args.author.as_deref(),
        message: args.message.as_deref(),
        command: &command,
        changes: &args.change,
    };
    let (platform, scratch) = (Platform::linux(std::env::consts::ARCH), std::env::temp_dir());
    let options = Options {
        name: Some(&name),
        now,
        platform: &platform,
        other_platform: OtherPlatform::Tell,
        limits: Limits::default(),
        budget: BUDGET,
        durable: Durable::Together,
        // What is below is in this form already.
        form: looked.image.form,
        dedup: Dedup::Store,
        threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        unsupported: Unsupported::Refuse,
        xattrs: walk::Xattrs::All,
        times: walk::Times::Exact,
        versions: Versions::default(),
        objects: None,
        scratch: &scratch,
        progress: &|event: Event<'_>| progress.tell(event),
        cancel: &cancel,
    };
    let work = || {
        looked.through(&store, paused, &cancel, |tar| {
            Ok(transfer::commit::commit(&store, &made, tar, &options)?)
        })
    };
    let result = until_signal(&cancel, work)?;
    progress.finish();
    let (report, done) = result?;
    looked.tell_skipped(context, &report);
    tell(context, &done)?;
    Ok(Answer::Yes)
}
