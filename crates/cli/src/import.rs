//! `import`: a source becomes an image in the store.

use std::io::Write as _;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use image::erofs::Versions;
use oci::manifest::Platform;
use oci::source::Source;
use serde_json::{Value, json};
use store::{OpenOptions, RefName, Store, walk};
use transfer::import::{Durable, Limits, Options, OtherPlatform, Report, Unsupported};
use transfer::progress::Event;

use crate::Answer;
use crate::args::{self, TreeOptions};
use crate::context::{Context, now};
use crate::progress::Progress;
use crate::signals::until_signal;
use crate::{describe, report};

pub(crate) fn import(context: &Context, args: &args::Import) -> anyhow::Result<Answer> {
    let source = Source::parse(&args.source)?;
    let name: Option<RefName> = args.name.as_deref().map(str::parse).transpose()?;
    let store = context.open(OpenOptions::create())?;
    let wishes = Wishes {
        name: name.as_ref(),
        tree: &args.tree,
        form: crate::forms::choose(&args.form, &store)?,
        platform: args.platform.as_deref(),
        budget: usize::try_from(args.memory << 20).context("--memory is too much")?,
    };
    let done = work(context, &store, &source, &wishes)?;
    if done.name.is_none() {
        context
            .remark("the image has no name: `quire tag` gives it one before `quire gc` frees it");
    }
    tell(context, &done)?;
    Ok(Answer::Yes)
}

/// What the user wants of an import, or a build.
pub(crate) struct Wishes<'a> {
    pub(crate) name: Option<&'a RefName>,
    pub(crate) tree: &'a TreeOptions,
    pub(crate) form: crate::forms::Choice,
    pub(crate) platform: Option<&'a str>,
    /// Bytes.
    pub(crate) budget: usize,
}

/// Imports with progress shown, until done or told to stop.
pub(crate) fn work(
    context: &Context,
    store: &Store,
    source: &Source,
    wishes: &Wishes<'_>,
) -> anyhow::Result<Report> {
    let import = |options: &Options<'_>| transfer::import::import(store, source, options);
    Ok(with_options(context, store, wishes, import)??)
}

/// Does what takes the options of an import, with progress shown, until done or told to stop.
pub(crate) fn with_options<T: Send, E: Send>(
    context: &Context,
    store: &Store,
    wishes: &Wishes<'_>,
    work: impl FnOnce(&Options<'_>) -> Result<T, E> + Send,
) -> anyhow::Result<Result<T, E>> {
    let platform = match wishes.platform {
        Some(text) => text.parse()?,
        None => Platform::linux(std::env::consts::ARCH),
    };
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let progress = Progress::new(context);
    let cancel = Arc::new(AtomicBool::new(false));
    give_up_when(store, &cancel);
    let scratch = std::env::temp_dir();
    let options = Options {
        name: wishes.name,
        now: now(),
        platform: &platform,
        other_platform: match wishes.platform {
            Some(_) => OtherPlatform::Refuse,
            None => OtherPlatform::Tell,
        },
        limits: Limits::default(),
        budget: wishes.budget,
        durable: Durable::Together,
        form: wishes.form.form,
        dedup: wishes.form.dedup,
        threads,
        unsupported: match wishes.tree.skip_unsupported {
            true => Unsupported::Skip,
            false => Unsupported::Refuse,
        },
        xattrs: match (wishes.tree.xattrs.skip_xattrs, wishes.tree.xattrs.user_xattrs) {
            (true, _) => walk::Xattrs::None,
            (false, true) => walk::Xattrs::UserOnly,
            (false, false) => walk::Xattrs::All,
        },
        times: match wishes.tree.whole_seconds {
            true => walk::Times::WholeSeconds,
            false => walk::Times::Exact,
        },
        versions: Versions::default(),
        objects: wishes.tree.objects.as_deref(),
        scratch: &scratch,
        progress: &|event: Event<'_>| progress.tell(event),
        cancel: &cancel,
    };
    let result = until_signal(&cancel, || work(&options))?;
    progress.finish();
    Ok(result)
}

/// Nobody has to wait for a lock of the store to be heard.
pub(crate) fn give_up_when(store: &Store, cancel: &Arc<AtomicBool>) {
    let cancel = Arc::clone(cancel);
    store.give_up_when(move || cancel.load(Ordering::Relaxed));
}

pub(crate) fn tell(context: &Context, done: &Report) -> anyhow::Result<()> {
    for layer in &done.layers {
        for path in &layer.skipped {
            context.remark(&format!("left out, no tree can hold it: {}", describe::name(path)));
        }
    }
    if context.json {
        return report::json(&summary(done));
    }
    say(context, done)
}

/// For programs.
pub(crate) fn summary(done: &Report) -> Value {
    let layers = done.layers.iter().map(|layer| {
            json!({
                "diffId": layer.diff_id.to_string(),
                "tarBytes": layer.tar_bytes,
                "reused": layer.is_reused,
                "skipped": layer.skipped.iter().map(|it| it.escape_ascii().to_string()).collect::<Vec<_>>(),
            })
        });
    json!({
        "image": done.image.to_string(),
        "name": done.name.as_ref().map(ToString::to_string),
        "manifest": done.manifest.map(|it| it.to_string()),
        "inodes": done.inodes,
        "imageBytes": done.image_bytes,
        "layers": layers.collect::<Vec<Value>>(),
        "objectsAdded": done.objects.objects,
        "bytesAdded": done.objects.object_bytes,
        "objectsReused": done.objects.reused,
        "bytesReused": done.objects.reused_bytes,
        "seconds": {
            "data": done.times.data.as_secs_f64(),
            "image": done.times.image.as_secs_f64(),
            "commit": done.times.commit.as_secs_f64(),
        },
    })
}

fn say(context: &Context, done: &Report) -> anyhow::Result<()> {
    if context.is_quiet() {
        return Ok(());
    }
    let mut out = report::standard_output();
    writeln!(out, "image {}", done.image)?;
    if let Some(name) = &done.name {
        writeln!(out, "name  {name}")?;
    }
    let reused = done.layers.iter().filter(|it| it.is_reused).count();
    if !done.layers.is_empty() {
        writeln!(out, "{} layers, {reused} here already", done.layers.len())?;
    }
    writeln!(
        out,
        "{} inodes; {} objects added ({}), {} here already ({})",
        done.inodes,
        done.objects.objects,
        report::size(done.objects.object_bytes),
        done.objects.reused,
        report::size(done.objects.reused_bytes)
    )?;
    if done.objects.objects == 0 && (reused > 0 || done.objects.reused > 0) {
        // Lest somebody takes it for a repair.
        writeln!(
            out,
            "what is here already was not read again: `quire verify` reads it, and finds damage"
        )?;
    }
    let times = done.times;
    let whole = times.data + times.image + times.commit;
    writeln!(
        out,
        "{:.2} s, of which {:.2} to the disk",
        whole.as_secs_f64(),
        times.commit.as_secs_f64()
    )?;
    out.flush()?;
    Ok(())
}
