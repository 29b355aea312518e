//! `commit`, and the changes of a container for `export` and `diff`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use container::changes::Report;
use container::life::known::{KnownContainer, KnownError};
use container::life::look::{LookError, LookedContainer, Meanwhile};
use container::life::stop::signal_number;
use image::tree::Tree;
use serde::Serialize;
use store::{Digest, OpenOptions, RefName, Resolved, Store};
use transfer::commit::{Change, Commit as ImageCommit, check};
use transfer::export::Output;
use transfer::import::{BUDGET, ImportWishes};

use crate::Answer;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::layers;
use crate::session::signals::until_signal;
use crate::session::surroundings::Surroundings;
use crate::verbs::VerbArgs;
use crate::verbs::images::describe;
use crate::verbs::images::export::{Export, check_output, output};
use crate::verbs::images::import::tell;

#[derive(Debug, Args)]
pub(crate) struct Commit {
    /// A container
    pub(crate) container: String,
    /// The new image's name
    pub(crate) name: String,
    /// Message for the image's history
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) message: Option<String>,
    /// Author of the image
    #[arg(short, long, value_name = "NAME")]
    pub(crate) author: Option<String>,
    /// Change the image's configuration by a line of a Dockerfile: CMD, ENTRYPOINT, ENV, EXPOSE, LABEL, STOPSIGNAL, USER,
    /// VOLUME or WORKDIR
    #[arg(short, long, value_name = "LINE")]
    pub(crate) change: Vec<Change>,
    /// Do not pause a running container; a file that changes meanwhile is an error
    #[arg(long)]
    pub(crate) no_pause: bool,
}

impl VerbArgs for Commit {
    const NAME: &'static str = "commit";
    const ABOUT: &'static str = "Make an image from a container and its changes";
    const DETAILS: &'static str = "\
        The new image is the container's image with one more layer, and runs the same way unless --change says \
        otherwise. Quire pauses a running container meanwhile. An ended container can be committed until `rm` \
        removes it, except that data written with --writable memory is gone when the container ends.";
    const EXAMPLES: &'static str =
        "quire commit -m 'configured' --change 'CMD [\"app\"]' web app:2";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        commit(context, self)
    }
}

/// Must be called before there are threads.
fn look(
    context: &Context,
    store: &Store,
    name: &str,
    no_pause: bool,
) -> anyhow::Result<LookedContainer> {
    // Only a cgroup stops all programs of a container, and those of users have none.
    let goes_on = context.who() == crate::verbs::containers::rootless::INSIDE;
    let is_running = container::life::known::find(store, name).is_ok_and(|it| it.is_watched());
    if goes_on && !no_pause && is_running {
        context.remark(&format!(
            "{name} goes on meanwhile, since it has no cgroup to be paused by: a file that changes is an error"
        ));
    }
    let meanwhile = if no_pause || goes_on { Meanwhile::GoesOn } else { Meanwhile::Stands };
    let others = match shared(store, name) {
        Some(path) => {
            Some(context.open_shared().find(|it| it.path() == path).with_context(|| {
                let path = path.display();
                format!(
                    "the image of {name} is in the store {path}: name that by --image-store {path}, if it is still shared"
                )
            })?)
        }
        None => None,
    };
    let images = others.as_ref().unwrap_or(store);
    Ok(container::life::look::look(store, images, name, meanwhile, &|| now().0)?)
}

/// The store of others that has a container's image, if it is not this one.
fn shared(store: &Store, name: &str) -> Option<PathBuf> {
    let found = container::life::known::find(store, name).ok()?;
    found.record?.shared.map(PathBuf::from)
}

/// What has no place in a layer.
fn tell_skipped(context: &Context, report: &Report) {
    for path in &report.skipped {
        let path = describe::name(path);
        context.remark(&format!("left out, no layer can hold a socket: {path}"));
    }
}

fn manifest_of(container: &KnownContainer) -> anyhow::Result<Digest> {
    let record = container.record.as_ref();
    let id = &container.id;
    record.and_then(|it| it.manifest).with_context(|| {
        let name = record.and_then(|it| it.name.as_deref()).unwrap_or("NAME");
        format!(
            "container {id}: its image {}; `quire export {id} changes:FILE` saves what the container changed",
            layers::none(name, "")
        )
    })
}

/// Writes the changes of a container as a tar, the layer that `commit` would make.
pub(crate) fn export_changes(context: &Context, args: &Export) -> anyhow::Result<Answer> {
    let file = changes_file(&args.target).context("the target is changes:FILE")?;
    check_output(context, &file, args.force)?;
    let store = context.open(OpenOptions::read())?;
    let mut looked = look(context, &store, &args.name, args.no_pause)?;
    let paused = looked.paused.take();
    let cancel = AtomicBool::new(false);
    let work = || {
        let write = |out: &mut dyn std::io::Write| Ok(looked.write(&store, paused, out, &cancel)?);
        output(&file, args.force, write, || {})
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
    /// The container.
    container: String,
    /// Entries in the tar.
    entries: u64,
    /// Size of the tar.
    bytes: report::Bytes,
    /// Paths that no tar can hold: sockets.
    skipped: Vec<String>,
}

impl ChangesReport {
    fn text(&self) -> String {
        format!("{}, {}", report::count(self.entries, "entry"), report::size(self.bytes.0))
    }
}

/// The file of the target `changes:FILE`, where `-` is standard output.
pub(crate) fn changes_file(target: &OsStr) -> Option<Output> {
    let file = target.as_bytes().strip_prefix(b"changes:")?;
    Some(match file {
        b"-" => Output::Stdout,
        path => Output::File(PathBuf::from(OsStr::from_bytes(path))),
    })
}

/// The trees of a container's image, and of the image that `commit` would make.
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
            anyhow!("{name} is an image, and diff compares two: give the other one, or a container")
        }
        _ => error,
    })?;
    let paused = looked.paused.take();
    let algorithm = store.algorithm();
    // A signal ends this process at once: nothing is stored, and the child of `paused` resumes the container.
    let never = AtomicBool::new(false);
    let (report, trees) = looked.through(&store, paused, &never, |tar| -> anyhow::Result<_> {
        Ok(transfer::import::preview(&looked.tree, tar, algorithm)?)
    })?;
    tell_skipped(context, &report);
    Ok(trees)
}

pub(crate) fn commit(context: &Context, args: &Commit) -> anyhow::Result<Answer> {
    let name: RefName = args.name.parse()?;
    for change in &args.change {
        if let Change::StopSignal(signal) = change {
            signal_number(signal).context("--change STOPSIGNAL")?;
        }
    }
    let store = context.open(OpenOptions::write())?;
    let mut looked = look(context, &store, &args.container, args.no_pause)?;
    if let Some(path) = shared(&store, &args.container) {
        bail!(
            "the image of container {0} is in the store {1}, and a new image needs its layers here: pull it, and run a \
             container of it; `quire export {0} changes:FILE` saves what this one changed",
            looked.found.id,
            path.display()
        );
    }
    let manifest = manifest_of(&looked.found)?;
    // The new image is local, and has all that is in the one below.
    let below = Resolved { image: looked.image.id, name: None, manifest: Some(manifest) };
    drop(crate::session::policy::permit(context, &store, below)?);
    check(&store, &manifest)?;
    let paused = looked.paused.take();
    let surroundings = Surroundings::new(context, &store, BUDGET);
    let created = report::time(surroundings.now.0).replace(' ', "T") + "Z";
    let command = looked.found.command().join(" ");
    let made = ImageCommit {
        manifest: &manifest,
        tree: &looked.tree,
        created: &created,
        author: args.author.as_deref(),
        message: args.message.as_deref(),
        command: &command,
        changes: &args.change,
    };
    // What is below is in this form already.
    let form = looked.image.form;
    let wishes = ImportWishes { name: Some(&name), form, ..ImportWishes::default() };
    let (report, done) = surroundings.during(|surroundings| {
        looked.through(&store, paused, surroundings.cancel, |tar| -> anyhow::Result<_> {
            Ok(transfer::commit::commit(&store, &made, tar, surroundings, &wishes)?)
        })
    })??;
    tell_skipped(context, &report);
    tell(context, &done)?;
    Ok(Answer::Yes)
}
