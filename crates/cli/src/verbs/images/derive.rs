//! `merge` and `filter`: images made of images.

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;
use store::{Form, OpenImage, OpenOptions, RefName, Resolved, Store};
use transfer::derive::{Filtered, Glob, Globs};
use transfer::import::{BUDGET, ImportWishes};

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::surroundings::Surroundings;
use crate::verbs::VerbArgs;
use crate::verbs::images::import::{ImportReport, tell};

// What to lay over each other.
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
    const ABOUT: &'static str = "Make one image from several, each laid over those before it";
    const DETAILS: &'static str = "\
        Where several images have a path, the last one wins, with its owner, permissions and times. Directories \
        are merged. A file replaces a directory and everything in it, and a directory replaces a file. The root \
        directory has the last image's metadata. There are no whiteouts: a character device 0:0 is a file like \
        others.\n\n\
        Quire reads and writes no file data, because the new image names the same objects. The new image has no \
        layers and no configuration (command, environment, user). `quire run NAME -- COMMAND` runs it, and `quire \
        export` writes it as tar:, erofs:, gvisor: or disk:. To push it, export it as a tar and import that: this \
        makes an image of one layer.";
    const EXAMPLES: &'static str = "quire merge runtime application whole";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        merge(context, self)
    }
}

// What to keep, of which image.
#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// The new image's name
    pub(crate) new: String,
    /// Keep what this matches, and no longer everything; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<Glob>,
    /// Leave out what this matches, with all that is below it; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<Glob>,
}

impl VerbArgs for Filter {
    const NAME: &'static str = "filter";
    const ABOUT: &'static str = "Make an image with only some files of another";
    const DETAILS: &'static str = "\
        --exclude leaves out each match and everything below it. --include keeps each match, everything below it, \
        and the directories above it. Without --include everything is kept. --exclude always wins, in any order \
        of the options. A file with several names stays as long as one of its names does.\n\n\
        Globs work as in .gitignore. A glob without a slash matches names at any depth (`*.pyc`); one with a \
        slash matches paths from the image's root (`usr/share/doc`, `/etc`). A slash at the end matches \
        directories only. `*` and `?` match any bytes except a slash; `**` matches any number of directories; \
        `[a-z]`, `[!a]` and `{a,b}` work too. `\\` takes the next character literally. Quire does not follow \
        links, and says when a glob matches nothing.\n\n\
        Quire reads and writes no file data. The new image has no layers and no configuration, as one of `quire \
        merge`.";
    const EXAMPLES: &'static str =
        "quire filter --exclude usr/share/doc --exclude '*.pyc' debian slim";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        filter(context, self)
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

/// Report of `filter --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct FilterReport {
    #[serde(flatten)]
    import: ImportReport,
    /// Id of the image that was filtered.
    from: String,
    /// Entries that the new image has.
    kept: u64,
    /// Entries that the old image has.
    of: u64,
    /// Globs that matched nothing.
    unmatched: Vec<String>,
}

pub(crate) fn merge(context: &Context, args: &Merge) -> anyhow::Result<Answer> {
    let name: RefName = args.name.parse()?;
    let store = context.open(OpenOptions::write())?;
    let sources = Sources::find(context, &store, &args.images)?;
    let images: Vec<_> = sources.found.iter().map(|it| it.image).collect();
    let wishes =
        ImportWishes { name: Some(&name), form: sources.form(), ..ImportWishes::default() };
    let done = Surroundings::new(context, &store, BUDGET)
        .during(|surroundings| transfer::derive::merge(&store, &images, surroundings, &wishes))??;
    sources.tell_config(context, &name);
    if context.json {
        report::json(&MergeReport {
            import: ImportReport::of(&done),
            images: report::texts(&images),
        })?;
    } else {
        tell(context, &done)?;
    }
    Ok(Answer::Yes)
}

pub(crate) fn filter(context: &Context, args: &Filter) -> anyhow::Result<Answer> {
    let name: RefName = args.new.parse()?;
    let globs = Globs::new(args.include.clone(), args.exclude.clone())?;
    let store = context.open(OpenOptions::write())?;
    let sources = Sources::find(context, &store, std::slice::from_ref(&args.name))?;
    let found = sources.found.first().context("no image was named")?;
    let wishes =
        ImportWishes { name: Some(&name), form: sources.form(), ..ImportWishes::default() };
    let done = Surroundings::new(context, &store, BUDGET).during(|surroundings| {
        transfer::derive::filter(&store, &found.image, &globs, surroundings, &wishes)
    })??;
    let Filtered { report: done, kept, of, unmatched } = done;
    for glob in &unmatched {
        context.remark(&format!("\"{glob}\" matches nothing in {}", args.name));
    }
    sources.tell_config(context, &name);
    if context.json {
        report::json(&FilterReport {
            import: ImportReport::of(&done),
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

/// The images that one is made of. `gc` keeps them, and their objects, while they are open.
struct Sources {
    found: Vec<Resolved>,
    open: Vec<OpenImage>,
}

impl Sources {
    fn find(context: &Context, store: &Store, names: &[String]) -> anyhow::Result<Self> {
        let (mut found, mut open) = (Vec::new(), Vec::new());
        for name in names {
            let resolved = crate::session::resolve::resolve(store, name)?;
            // What is in it would be used by another name.
            let permitted = crate::session::policy::permit(context, store, resolved)?;
            found.push(permitted.found().clone());
            open.push(store.open_found(permitted.found())?);
        }
        Ok(Self { found, open })
    }

    /// That of the sources, if it is one; else what all of them can be in.
    fn form(&self) -> Form {
        let has = |form| self.open.iter().any(|it| it.form == form);
        match (has(Form::Tar), has(Form::Packed)) {
            (true, _) => Form::Tar,
            (false, true) => Form::Packed,
            (false, false) => Form::Objects,
        }
    }

    fn tell_config(&self, context: &Context, new: &RefName) {
        if self.found.iter().any(|it| it.manifest.is_some()) {
            context.remark(&format!(
                "{new} has files only, and no configuration (command, environment, user): `quire run {new} -- \
                 COMMAND` chooses the command"
            ));
        }
    }
}
