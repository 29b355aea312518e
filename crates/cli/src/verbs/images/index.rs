//! `index`: makes the indexes with which parts of layers can be read.

mod index_start;

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;
use store::{OpenOptions, Presence, Resolved, Store};
use transfer::StoredImage;
use transfer::lazy::{IndexOptions, IndexedReport, NoIndex};

use self::index_start::{OwnStart, RecordedStart};

use crate::Answer;
use crate::output::report::{self, Bytes};
use crate::session::context::Context;
use crate::session::layers;
use crate::session::resources::JobResources;
#[cfg(feature = "registry")]
use crate::session::signals::until_signal;
use crate::verbs::VerbArgs;
#[cfg(feature = "registry")]
use crate::verbs::images::registry::pull::{pauses, settings};
#[cfg(feature = "registry")]
use oci::manifest::Config;
#[cfg(feature = "registry")]
use oci::reference::Reference;
#[cfg(feature = "registry")]
use oci::registry::Registry;
#[cfg(feature = "registry")]
use std::sync::Arc;
#[cfg(feature = "registry")]
use std::sync::atomic::AtomicBool;
#[cfg(feature = "registry")]
use store::OpenImage;
#[cfg(feature = "registry")]
use transfer::lazy::artifact::{LazyParts, LazySubject};

// The image to index.
#[derive(Debug, Args)]
pub(crate) struct Index {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// A command whose reads are recorded, instead of the image's entrypoint and command. Can be repeated
    #[arg(long, value_name = "COMMAND", conflicts_with = "no_start")]
    pub(crate) start: Vec<String>,
    /// Run nothing. If the image has no traces, it then always gets the same index
    #[arg(long)]
    pub(crate) no_start: bool,
    /// Add image and index to this image in a registry, so that `pull --lazy` needs no layers
    #[cfg(feature = "registry")]
    #[arg(long, value_name = "REFERENCE")]
    pub(crate) push: Option<String>,
    #[cfg(feature = "registry")]
    #[command(flatten)]
    pub(crate) registry: crate::args::RegistryOptions,
}

impl VerbArgs for Index {
    const NAME: &'static str = "index";
    const ABOUT: &'static str = "Index the layers of an image, for lazy loading";
    const DETAILS: &'static str = "The image must have the form `tar`, and the store must have \
        its compressed layers (`pull --keep-layers`). Layers that are compressed with gzip, or \
        with zstd in several frames such as zstd:chunked, get an index; for the others, Quire \
        prints the reason why they have none. An index has the digests \
        of a layer's parts, and takes 1 to 2 % of the layer's size. The same layer always gets the \
        same index. If the store does not have a compressed layer, an index that an import or a pull \
        made of it stays as it is.\n\nAs root, Quire also runs the start of the image once: its \
        entrypoint and command, for at most ten seconds, without network and volumes, and within a \
        quarter of the available memory (512 MiB to 2 GiB). The data that it reads is recorded as the trace `default`, unless the image has \
        one. An index in a registry has this data in a hot pack, so that containers which start with \
        `--lazy` get it with one request.";
    const EXAMPLES: &'static str = "quire index debian\n  quire index --start 'cat /etc/os-release' debian\n  quire index --no-start debian";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        index(context, self)
    }
}

pub(crate) fn index(context: &Context, args: &Index) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = crate::session::resolve::resolve(&store, &args.name)?;
    let permitted = crate::session::policy::permit(context, &store, found)?;
    let found = permitted.found();
    let name = &args.name;
    let starts = match args.no_start {
        true => Vec::new(),
        false => record_start(context, args, &store, found)?,
    };
    // From here on, `gc` keeps the image.
    let open = store.open_found(found)?;
    let manifest = found.manifest.with_context(|| {
        format!(
            "{}, which `quire push` sends to a registry: an index needs layers from a registry",
            layers::none(name, "")
        )
    })?;
    let way = || layers::way_to_index(&store, name, &found.image, manifest);
    anyhow::ensure!(
        layers::is_tar(open.form, open.devices.len()),
        "{name} has the form {}, but an index needs the form tar: {}",
        open.form,
        way()
    );
    let documents = StoredImage::load(&store, &manifest)?;
    // The budget is 0, because only a part of each blob is in memory.
    let made = JobResources::new(context, &store, 0).during(|it| {
        let options =
            IndexOptions { threads: it.threads, progress: it.progress, cancel: it.cancel };
        transfer::lazy::index(&store, &open, &documents, &options)
    })??;
    let is_made = made.iter().any(|it| it.index.is_ok());
    let is_wanted = made.iter().any(|it| !matches!(it.index, Err(NoIndex::Unused)));
    let is_damaged = made.iter().any(|it| matches!(it.index, Err(NoIndex::DamagedIndex(_))));
    let is_done = !is_damaged && (is_made || !is_wanted);
    let told = IndexReport {
        image: found.image.to_string(),
        #[cfg(feature = "registry")]
        pushed: if is_done { push(context, args, &store, &open, &documents)? } else { None },
        layers: made.into_iter().map(LayerIndexReport::from_indexed).collect(),
        starts,
    };
    if context.json {
        report::json(&told)?;
    } else if !context.is_quiet() {
        report::line(&told.text())?;
    }
    anyhow::ensure!(
        !is_damaged,
        "an index of {name} is damaged: run `quire fsck --repair`, then {}",
        layers::remedy_for_index(&store, name, &found.image, manifest)
    );
    anyhow::ensure!(is_done, "cannot make an index of {name}: {}", way());
    Ok(Answer::Yes)
}

/// Records the start of an image that can be mounted.
fn record_start(
    context: &Context,
    args: &Index,
    store: &Store,
    found: &Resolved,
) -> anyhow::Result<Vec<RecordedStart>> {
    let opened = store.open_names(&found.image)?;
    let Some(manifest) = &found.manifest else { return Ok(Vec::new()) };
    let can_run =
        layers::is_tar(opened.form, opened.devices.len()) && opened.presence == Presence::Complete;
    drop(opened);
    // Another image is an error of the index itself, which comes later.
    if !can_run {
        return Ok(Vec::new());
    }
    let own = OwnStart::of(&StoredImage::load(store, manifest)?);
    index_start::record(context, store, &found.image, &args.name, &args.start, &own)
}

/// Pushes the index if `--push` was given.
#[cfg(feature = "registry")]
fn push(
    context: &Context,
    args: &Index,
    store: &Store,
    image: &OpenImage,
    documents: &StoredImage,
) -> anyhow::Result<Option<PushedIndexReport>> {
    let Some(target) = &args.push else { return Ok(None) };
    index_start::forget_recording(store, &image.id)?;
    let target: Reference = target.parse()?;
    let mut parts = LazyParts::stored(store, image, &documents.digest)?;
    let recorded = store.downloads.traces_time(&image.id)?;
    parts.created = recorded.map(|it| report::rfc3339(it.0));
    let cancel = Arc::new(AtomicBool::new(false));
    let subject = LazySubject {
        digest: &documents.digest,
        bytes: &documents.manifest_bytes,
        manifest: &documents.manifest,
        config: &documents.config,
    };
    let work = || -> anyhow::Result<_> {
        // The client is created now, while signals are blocked, because its thread inherits the signal mask.
        let settings = settings(context.who(), &args.registry, &cancel, pauses(context))?;
        let registry = Registry::new(&target, &settings)?;
        let Config { os, architecture, .. } = &documents.config;
        let tag = transfer::lazy::index_tag(&target, os, architecture);
        Ok(transfer::lazy::push(&registry, &subject, &parts, tag.as_deref())?)
    };
    let pushed = until_signal(&cancel, work)??;
    Ok(Some(PushedIndexReport {
        artifact: pushed.artifact.to_string(),
        index: pushed.index.to_string(),
        sent: Bytes(pushed.sent),
    }))
}

/// An index in a registry.
#[cfg(feature = "registry")]
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct PushedIndexReport {
    /// Digest of the index's manifest, which refers to the image's manifest.
    artifact: String,
    /// Digest of the index's config. A manifest may name it, so that the index is trusted.
    index: String,
    /// Number of bytes that were sent; 0 if the registry had the index.
    sent: Bytes,
}

/// Report of `index --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct IndexReport {
    /// Image id.
    image: String,
    /// The index in the registry. Null without `--push`.
    #[cfg(feature = "registry")]
    pushed: Option<PushedIndexReport>,
    /// The layers, lowest first. A layer that occurs twice is listed once.
    layers: Vec<LayerIndexReport>,
    /// The starts that were recorded now.
    starts: Vec<RecordedStart>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct LayerIndexReport {
    /// Digest of the compressed layer.
    digest: String,
    /// Size of the compressed layer.
    bytes: Bytes,
    /// Digest of the uncompressed tar.
    diff_id: String,
    /// Id of the device that can be filled with the index. Null if there is no index.
    device: Option<String>,
    /// Size of the index. Null if there is none.
    index_bytes: Option<Bytes>,
    /// Whether the index was made now. False if there is none, or if the store had it and not the layer as it came.
    made: bool,
    /// Number of positions from which the layer can be read. Null if there is no index.
    spans: Option<usize>,
    /// Reason why there is no index. Null if there is one.
    reason: Option<String>,
}

impl LayerIndexReport {
    fn from_indexed(layer: IndexedReport) -> Self {
        let (made, reason) = match layer.index {
            Ok(made) => (Some(made), None),
            Err(reason) => (None, Some(format!("{:#}", anyhow::Error::from(reason)))),
        };
        Self {
            digest: layer.blob.to_string(),
            bytes: Bytes(layer.blob_bytes),
            diff_id: layer.diff_id.to_string(),
            device: made.as_ref().map(|it| it.device.to_string()),
            index_bytes: made
                .as_ref()
                .map(|it| Bytes(it.head_bytes.saturating_add(it.windows_bytes))),
            made: made.as_ref().is_some_and(|it| it.is_new),
            spans: made.map(|it| it.spans),
            reason,
        }
    }
}

impl IndexReport {
    fn text(&self) -> String {
        let lines = self.layers.iter().map(|layer| {
            let LayerIndexReport { digest, bytes, .. } = layer;
            let how = match (&layer.index_bytes, &layer.reason) {
                (Some(index), _) => {
                    let share = index.0.saturating_mul(1000) / bytes.0.max(1);
                    let size = report::size(index.0);
                    let has = if layer.made { "index" } else { "has an index already," };
                    format!("{has} {size} ({}.{} % of it)", share / 10, share % 10)
                }
                (None, reason) => format!("no index: {}", reason.as_deref().unwrap_or_default()),
            };
            format!("layer {digest}, {}: {how}", report::size(bytes.0))
        });
        let lines = lines.chain(self.starts.iter().map(RecordedStart::line));
        let lines = lines.collect::<Vec<_>>();
        #[cfg(feature = "registry")]
        let lines = {
            let pushed = self
                .pushed
                .iter()
                .map(|it| format!("pushed {}, {} sent", it.artifact, report::size(it.sent.0)));
            lines.into_iter().chain(pushed).collect::<Vec<_>>()
        };
        lines.join("\n")
    }
}
