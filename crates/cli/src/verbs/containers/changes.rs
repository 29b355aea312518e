//! Changes of a container, for `commit`, `diff` and `export CONTAINER changes:FILE`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, anyhow};
use container::changes::Report;
use container::life::cgroup::cgroups;
use container::life::cgroup::pause::PauseError;
use container::life::layer_access::{LookError, LookedContainer, Meanwhile};
use container::life::lookup::{KnownContainer, KnownError};
use container::snapshot::take::LongWork;
use image::tree::Tree;
use serde::Serialize;
use store::{OpenOptions, Store};
use transfer::export::Output;

use crate::Answer;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::output_file::{check_output, output};
use crate::session::signals::until_signal;
use crate::verbs::images::file_listing;

/// Finds a container to read, and pauses it if possible. Must be called before there are other threads.
pub(crate) fn look(
    context: &Context,
    store: &Store,
    name: &str,
    no_pause: bool,
) -> anyhow::Result<LookedContainer> {
    // Only with a cgroup can all programs of a container be paused. A user's container has a cgroup only if the
    // service manager has delegated one to the user.
    let running = container::life::lookup::find_container(store, name)
        .ok()
        .filter(KnownContainer::is_watched);
    let is_users = context.who() == crate::session::own_namespace::INSIDE;
    let has_cgroup = |it: &KnownContainer| !is_users || cgroups::of_user(&it.folder).is_some();
    let goes_on = running.is_some_and(|it| !has_cgroup(&it));
    let warn = |why: &str| {
        context.remark(&format!(
            "{name} keeps running, because {why}: a file that changes during the read is an error"
        ));
    };
    if goes_on && !no_pause {
        warn("it has no cgroup for pausing it");
    }
    let meanwhile = if no_pause || goes_on { Meanwhile::GoesOn } else { Meanwhile::Stands };
    let others = match shared(store, name) {
        Some(path) => {
            Some(context.open_shared().find(|it| it.path() == path).with_context(|| {
                let path = path.display();
                format!(
                    "the image of {name} is in the store {path}: use --image-store {path}, if it \
                    is still shared"
                )
            })?)
        }
        None => None,
    };
    let images = others.as_ref().unwrap_or(store);
    let cancel = AtomicBool::new(false);
    let run = |work: &mut (dyn FnMut() + Send)| {
        until_signal(&cancel, work).map_err(std::io::Error::other)
    };
    let work = LongWork { cancel: &cancel, run: &run };
    let look = |meanwhile| {
        container::life::layer_access::look(store, images, name, meanwhile, &work, &|| now().0)
            .map_err(anyhow::Error::from)
    };
    match look(meanwhile) {
        // Some runtimes cannot pause a user's container.
        Err(error)
            if is_users
                && matches!(
                    error.downcast_ref(),
                    Some(LookError::Pause { source: PauseError::Refused, .. })
                ) =>
        {
            warn("its runtime cannot pause it");
            look(Meanwhile::GoesOn)
        }
        looked => looked,
    }
}

/// Returns the path of the shared store that has a container's image, if the image is not in the user's own store.
pub(crate) fn shared(store: &Store, name: &str) -> Option<PathBuf> {
    let found = container::life::lookup::find_container(store, name).ok()?;
    found.record?.shared.map(PathBuf::from)
}

/// Prints remarks about files that a layer cannot hold.
pub(crate) fn tell_skipped(context: &Context, report: &Report) {
    for path in &report.skipped {
        let path = file_listing::name(path);
        context.remark(&format!("leaving out a socket, which layers cannot contain: {path}"));
    }
}

/// Options of `export CONTAINER changes:FILE`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChangesOptions {
    /// Overwrites an existing file.
    pub(crate) force: bool,
    /// Leaves a running container running.
    pub(crate) no_pause: bool,
}

/// Writes the changes of a container as a tar, the layer that `commit` would make.
pub(crate) fn export_changes(
    context: &Context,
    name: &str,
    file: &Output,
    options: ChangesOptions,
) -> anyhow::Result<Answer> {
    let ChangesOptions { force, no_pause } = options;
    check_output(context, file, force)?;
    let store = context.open(OpenOptions::read())?;
    let mut looked = look(context, &store, name, no_pause)?;
    let paused = looked.paused.take();
    let cancel = AtomicBool::new(false);
    let work = || {
        let write = |out: &mut dyn std::io::Write| Ok(looked.write(&store, paused, out, &cancel)?);
        output(file, force, write, || {})
    };
    let done = until_signal(&cancel, work)??;
    tell_skipped(context, &done);
    if matches!(file, Output::Stdout) {
        return Ok(Answer::Yes);
    }
    let told = ChangesReport {
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

/// Report of `export changes:FILE --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ChangesReport {
    /// Id of the container.
    container: String,
    /// Number of entries in the tar.
    entries: u64,
    /// Size of the tar.
    bytes: report::Bytes,
    /// Paths of sockets, which a tar cannot hold.
    skipped: Vec<String>,
}

impl ChangesReport {
    fn text(&self) -> String {
        format!("{}, {}", report::count(self.entries, "entry"), report::size(self.bytes.0))
    }
}

/// Parses the target `changes:FILE`; `-` is standard output.
pub(crate) fn changes_file(target: &OsStr) -> Option<Output> {
    let file = target.as_bytes().strip_prefix(b"changes:")?;
    Some(match file {
        b"-" => Output::Stdout,
        path => Output::File(PathBuf::from(OsStr::from_bytes(path))),
    })
}

/// Returns the trees of a container's image, and of the image that `commit` would make.
pub(crate) fn preview(
    context: &Context,
    name: &OsStr,
    no_pause: bool,
) -> anyhow::Result<(Tree, Tree)> {
    let name = name.to_str().with_context(|| format!("{name:?} is not UTF-8"))?;
    let store = context.open(OpenOptions::read())?;
    let looked = look(context, &store, name, no_pause);
    let mut looked = looked.map_err(|error| match error.downcast_ref() {
        Some(LookError::Known(KnownError::Absent { .. }))
            if crate::session::resolve::resolve(&store, name).is_ok() =>
        {
            anyhow!("{name} is an image, and diff compares two: give another image, or a container")
        }
        _ => error,
    })?;
    let paused = looked.paused.take();
    let algorithm = store.algorithm();
    let cancel = AtomicBool::new(false);
    let (report, trees) = until_signal(&cancel, || {
        looked.through(&store, paused, &cancel, |tar| -> anyhow::Result<_> {
            Ok(transfer::import::preview(&looked.tree, tar, algorithm)?)
        })
    })??;
    tell_skipped(context, &report);
    Ok(trees)
}
