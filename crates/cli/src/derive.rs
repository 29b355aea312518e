//! `merge` and `filter`: images made of images.

use anyhow::Context as _;
use serde::Serialize;
use store::{Form, OpenImage, OpenOptions, RefName, Resolved, Store};
use transfer::derive::{Filtered, Globs};
use transfer::import::{BUDGET, ImportWishes};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::import::{ImportReport, tell};
use crate::report;
use crate::surroundings::Surroundings;

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

pub(crate) fn merge(context: &Context, args: &args::Merge) -> anyhow::Result<Answer> {
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

pub(crate) fn filter(context: &Context, args: &args::Filter) -> anyhow::Result<Answer> {
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
            let resolved = crate::resolve::resolve(store, name)?;
            // What is in it would be used by another name.
            let permitted = crate::policy::permit(context, store, resolved)?;
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
