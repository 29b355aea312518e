//! `filter`: an image with some files of another.

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;
use store::{OpenOptions, RefName};
use transfer::derive::{Filtered, Glob, Globs};
use transfer::import::{BUDGET, ImportOptions};

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::resources::JobResources;
use crate::verbs::VerbArgs;
use crate::verbs::images::import::{ImportReport, tell};
use crate::verbs::images::sources::Sources;

// The image, and the files to keep.
#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// The new image's name
    pub(crate) new: String,
    /// Keep only matches of this pattern; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<Glob>,
    /// Leave out matches of this pattern, with everything below them; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<Glob>,
}

impl VerbArgs for Filter {
    const NAME: &'static str = "filter";
    const ABOUT: &'static str = "Make an image with only some files of another";
    const DETAILS: &'static str = "\
        --exclude leaves out each match and everything below it. --include keeps each match, everything below \
        it, and the directories above it. Without --include everything is kept. --exclude always wins, in any \
        order of the options. A file with several names stays as long as one of its names does.\n\n\
        Globs work as in .gitignore. A glob without a slash matches names at any depth (`*.pyc`); one with a \
        slash matches paths from the image's root (`usr/share/doc`, `/etc`). A slash at the end matches \
        directories only. `*` and `?` match any bytes except a slash; `**` matches any number of directories; \
        `[a-z]`, `[!a]` and `{a,b}` work as well. `\\` takes the next character literally. Quire does not \
        follow links, and prints a remark about a glob without matches.\n\n\
        Quire reads and writes no file data. The new image has no layers and no configuration, like one of `quire \
        merge`.";
    const EXAMPLES: &'static str =
        "quire filter --exclude usr/share/doc --exclude '*.pyc' debian slim";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        filter(context, self)
    }
}

/// Report of `filter --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct FilterReport {
    #[serde(flatten)]
    import: ImportReport,
    /// Id of the image that was filtered.
    from: String,
    /// Number of entries in the new image.
    kept: u64,
    /// Number of entries in the old image.
    of: u64,
    /// Globs that matched nothing.
    unmatched: Vec<String>,
}

pub(crate) fn filter(context: &Context, args: &Filter) -> anyhow::Result<Answer> {
    let name: RefName = args.new.parse()?;
    let globs = Globs::new(args.include.clone(), args.exclude.clone());
    let store = context.open(OpenOptions::write())?;
    let sources = Sources::from_names(context, &store, std::slice::from_ref(&args.name))?;
    let found = sources.found.first().context("no image is given")?;
    let options =
        ImportOptions { name: Some(&name), form: sources.form(), ..ImportOptions::default() };
    let done = JobResources::new(context, &store, BUDGET).during(|environment| {
        transfer::derive::filter(&store, &found.image, &globs, environment, &options)
    })??;
    let Filtered { report: done, kept, of, unmatched } = done;
    for glob in &unmatched {
        context.remark(&format!("\"{glob}\" matches no file in {}", args.name));
    }
    sources.tell_config(context, &name);
    if context.json {
        report::json(&FilterReport {
            import: ImportReport::from_report(&done),
            from: found.image.to_string(),
            kept,
            of,
            unmatched: report::texts(&unmatched),
        })?;
        return Ok(Answer::Yes);
    }
    if !context.is_quiet() {
        report::line(&format!("{kept} of {} kept", report::count(of, "entry")))?;
    }
    tell(context, &done)?;
    Ok(Answer::Yes)
}
