//! `merge`: an image made of several.

use clap::Args;
use serde::Serialize;
use store::{OpenOptions, RefName};
use transfer::import::{BUDGET, ImportOptions};

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::resources::JobResources;
use crate::verbs::VerbArgs;
use crate::verbs::images::import::{ImportReport, tell};
use crate::verbs::images::sources::Sources;

// The images to merge.
#[derive(Debug, Args)]
pub(crate) struct Merge {
    /// Names, image ids or their first digits (6 or more), two images or more: the first is the lowest
    #[arg(required = true, num_args = 2.., value_name = "IMAGE")]
    pub(crate) images: Vec<String>,
    /// The new image's name
    pub(crate) name: String,
}

impl VerbArgs for Merge {
    const NAME: &'static str = "merge";
    const ABOUT: &'static str = "Make one image from several, each laid over the previous ones";
    const DETAILS: &'static str = "\
        If several images have a path, the last one wins, with its owner, permissions and times. Directories \
        are merged. A file replaces a directory and everything in it, and a directory replaces a file. The \
        root directory has the last image's metadata. There are no whiteouts: a character device 0:0 is an \
        ordinary file.\n\n\
        Quire reads and writes no file data, because the new image names the same objects. The new image has no \
        layers and no configuration (command, environment, user). `quire run NAME -- COMMAND` runs it, and `quire \
        export` writes it as tar:, erofs:, gvisor: or disk:. To push it, export it as a tar and import that: this \
        makes an image of one layer.";
    const EXAMPLES: &'static str = "quire merge runtime application whole";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        merge(context, self)
    }
}

/// Report of `merge --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct MergeReport {
    #[serde(flatten)]
    import: ImportReport,
    /// Ids of the images that were merged.
    images: Vec<String>,
}

pub(crate) fn merge(context: &Context, args: &Merge) -> anyhow::Result<Answer> {
    let name: RefName = args.name.parse()?;
    let store = context.open(OpenOptions::write())?;
    let sources = Sources::from_names(context, &store, &args.images)?;
    let images: Vec<_> = sources.found.iter().map(|it| it.image).collect();
    let options =
        ImportOptions { name: Some(&name), form: sources.form(), ..ImportOptions::default() };
    let done = JobResources::new(context, &store, BUDGET)
        .during(|environment| transfer::derive::merge(&store, &images, environment, &options))??;
    sources.tell_config(context, &name);
    if context.json {
        report::json(&MergeReport {
            import: ImportReport::from_report(&done),
            images: report::texts(&images),
        })?;
    } else {
        tell(context, &done)?;
    }
    Ok(Answer::Yes)
}
