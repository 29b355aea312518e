//! `commit`: an image made of a container and its changes.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use container::life::lookup::KnownContainer;
use store::{Digest, OpenOptions, RefName, Resolved, Store};
use transfer::commit::{Commit as ImageCommit, check};
use transfer::import::{BUDGET, ImportOptions, Report};

use crate::Answer;
use crate::args::ChangeOptions;
use crate::output::report;
use crate::session::context::Context;
use crate::session::layers;
use crate::session::resources::JobResources;
use crate::verbs::VerbArgs;
use crate::verbs::containers::changes::{look, shared, tell_skipped};
use crate::verbs::images::import::tell;

#[derive(Debug, Args)]
pub(crate) struct Commit {
    /// A container
    pub(crate) container: String,
    /// The new image's name; without it, the image has only its id or digest, which Quire prints
    pub(crate) name: Option<String>,
    /// Message for the image's history
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) message: Option<String>,
    /// Author of the image
    #[arg(short, long, value_name = "NAME")]
    pub(crate) author: Option<String>,
    /// Write the new image's id to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) iidfile: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) changes: ChangeOptions,
    /// Do not freeze a running container; a file that changes during the commit is an error
    #[arg(long)]
    pub(crate) no_pause: bool,
}

impl VerbArgs for Commit {
    const NAME: &'static str = "commit";
    const ABOUT: &'static str = "Make an image from a container and its changes";
    const DETAILS: &'static str = "The new image is the container's image with one more layer, \
        and runs the same way unless --change states otherwise. Quire copies the changes of a \
        running container while it runs, and freezes it for a moment, in which it copies later changes. An ended container can be committed until `rm` removes it, except that data \
        written with --writable memory is lost when the container ends.\n\n\
        Quire prints the new image's id with -q or without NAME, or the digest of its manifest if an image with the \
        same files has the id already. Without NAME, `quire images` lists the image as <none>. `quire tag` names it, and `quire image prune` removes it \
        if no container uses it.";
    const EXAMPLES: &'static str = "quire commit -m 'configured' --change 'CMD [\"app\"]' web app:2\n  \
        quire commit -q web";
    const HAS_SHORT_QUIET: bool = true;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        commit(context, self)
    }
}

fn manifest_of(container: &KnownContainer) -> anyhow::Result<Digest> {
    let record = container.record.as_ref();
    let id = &container.id;
    record.and_then(|it| it.manifest).with_context(|| {
        let name = record.and_then(|it| it.name.as_deref()).unwrap_or("NAME");
        format!(
            "container {id}: its image {}; `quire export {id} changes:FILE` saves the container's \
            changes",
            layers::none(name, "")
        )
    })
}

/// Returns the id of a new image, or the digest of its manifest if the id also stands for another image: one with the
/// same files and another configuration.
fn short_reference(store: &Store, done: &Report) -> anyhow::Result<String> {
    let found = store.resolve(&done.image.to_string())?;
    Ok(match done.manifest.filter(|it| found.manifest != Some(*it)) {
        Some(manifest) => manifest.to_string(),
        None => done.image.to_string(),
    })
}

pub(crate) fn commit(context: &Context, args: &Commit) -> anyhow::Result<Answer> {
    let name: Option<RefName> = args.name.as_deref().map(str::parse).transpose()?;
    args.changes.check()?;
    let store = context.open(OpenOptions::write())?;
    let mut looked = look(context, &store, &args.container, args.no_pause)?;
    if let Some(path) = shared(&store, &args.container) {
        bail!(
            "the image of container {0} is in the store {1}, but a new image needs its layers in \
            this store: pull it, and run a container of it; `quire export {0} changes:FILE` saves \
            the changes of this container",
            looked.found.id,
            path.display()
        );
    }
    let manifest = manifest_of(&looked.found)?;
    // The new image counts as local and contains the base image, so the policies must accept the base image.
    let below = Resolved { image: looked.image.id, name: None, manifest: Some(manifest) };
    drop(crate::session::policy::permit(context, &store, below)?);
    check(&store, &manifest)?;
    let paused = looked.paused.take();
    let environment = JobResources::new(context, &store, BUDGET);
    let created = report::time(environment.now.0).replace(' ', "T") + "Z";
    let command = looked.found.command().join(" ");
    let made = ImageCommit {
        manifest: &manifest,
        tree: &looked.tree,
        created: &created,
        author: args.author.as_deref(),
        message: args.message.as_deref(),
        command: &command,
        changes: &args.changes.change,
    };
    // The image below has this form already.
    let form = looked.image.form;
    let options =
        ImportOptions { name: name.as_ref(), kept_unnamed: true, form, ..ImportOptions::default() };
    let (report, done) = environment.during(|environment| {
        looked.through(&store, paused, environment.cancel, |tar| -> anyhow::Result<_> {
            Ok(transfer::commit::commit(&store, &made, tar, environment, &options)?)
        })
    })??;
    tell_skipped(context, &report);
    let id = short_reference(&store, &done)?;
    if let Some(path) = &args.iidfile {
        std::fs::write(path, &id).with_context(|| format!("--iidfile {}", path.display()))?;
    }
    if (name.is_none() || context.is_quiet()) && !context.json {
        // As podman does.
        report::line(&id)?;
        return Ok(Answer::Yes);
    }
    tell(context, &done)?;
    Ok(Answer::Yes)
}
