//! `import`: a source becomes an image in the store.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use image::erofs::Versions;
use oci::manifest::Platform;
use oci::source::Source;
use serde::Serialize;
use store::{OpenOptions, RefName, Store, walk};
use transfer::import::{Durable, Limits, Options, OtherPlatform, Report, Unsupported};
use transfer::progress::Event;

use crate::Answer;
use crate::args::{self, TreeOptions};
use crate::context::{Context, now};
use crate::progress::Progress;
use crate::report::{Bytes, Seconds};
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
    let told = ImportReport::of(done);
    if context.json {
        report::json(&told)
    } else if context.is_quiet() {
        Ok(())
    } else {
        report::line(&told.text())
    }
}

/// What verbs that make an image print.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImportReport {
    /// Image id.
    image: String,
    /// Its name. Null if it got none.
    name: Option<String>,
    /// Digest of the manifest. Null if the source has none.
    manifest: Option<String>,
    /// Inodes in the image.
    inodes: usize,
    /// Size of the EROFS image.
    image_bytes: Bytes,
    /// The layers, lowest first.
    layers: Vec<ImportedLayerReport>,
    /// Objects that are new in the store.
    objects_added: u64,
    /// Size of these.
    bytes_added: Bytes,
    /// Objects that the store had already.
    objects_reused: u64,
    /// Size of these.
    bytes_reused: Bytes,
    /// Time that it took.
    seconds: ImportTimesReport,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImportedLayerReport {
    /// Digest of the uncompressed tar.
    diff_id: String,
    /// Size of the uncompressed tar.
    tar_bytes: Bytes,
    /// Whether the store had the layer already.
    reused: bool,
    /// Paths that no image can hold. Bytes other than printable ASCII are `\xHH`.
    skipped: Vec<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImportTimesReport {
    /// Reading the source.
    data: Seconds,
    /// Making the image.
    image: Seconds,
    /// Waiting for the disk.
    commit: Seconds,
}

impl ImportReport {
    pub(crate) fn of(done: &Report) -> Self {
        let layers = done.layers.iter().map(|layer| ImportedLayerReport {
            diff_id: layer.diff_id.to_string(),
            tar_bytes: Bytes(layer.tar_bytes),
            reused: layer.is_reused,
            skipped: report::paths(&layer.skipped),
        });
        let seconds = |it: Duration| Seconds(it.as_secs_f64());
        Self {
            image: done.image.to_string(),
            name: done.name.as_ref().map(ToString::to_string),
            manifest: done.manifest.map(|it| it.to_string()),
            inodes: done.inodes,
            image_bytes: Bytes(done.image_bytes),
            layers: layers.collect(),
            objects_added: done.objects.objects,
            bytes_added: Bytes(done.objects.object_bytes),
            objects_reused: done.objects.reused,
            bytes_reused: Bytes(done.objects.reused_bytes),
            seconds: ImportTimesReport {
                data: seconds(done.times.data),
                image: seconds(done.times.image),
                commit: seconds(done.times.commit),
            },
        }
    }

    fn text(&self) -> String {
        let mut lines = vec![format!("image {}", self.image)];
        lines.extend(self.name.as_ref().map(|name| format!("name  {name}")));
        let reused = self.layers.iter().filter(|it| it.reused).count();
        if !self.layers.is_empty() {
            lines.push(format!("{} layers, {reused} here already", self.layers.len()));
        }
        lines.push(format!(
            "{} inodes; {} objects added ({}), {} here already ({})",
            self.inodes,
            self.objects_added,
            report::size(self.bytes_added.0),
            self.objects_reused,
            report::size(self.bytes_reused.0)
        ));
        if self.objects_added == 0 && (reused > 0 || self.objects_reused > 0) {
            // Lest somebody takes it for a repair.
            lines.push(
                "what is here already was not read again: `quire verify` reads it, and finds damage"
                    .to_owned(),
            );
        }
        let ImportTimesReport { data, image, commit } = &self.seconds;
        let whole = data.0 + image.0 + commit.0;
        lines.push(format!("{whole:.2} s, of which {:.2} to the disk", commit.0));
        lines.join("\n")
    }
}
