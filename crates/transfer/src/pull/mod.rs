//! Pulls images from a registry into the store.
//!
//! A pull is an import whose layers come from a [`Registry`]. Each layer becomes durable as soon as it is complete.
//! The downloaded part of an unfinished layer is kept, so that the next pull resumes there: see
//! `docs/decisions/0005-pull.md`.

mod blob;
mod lazy;
mod parts;
mod toc;
mod toc_image;
mod updates;

use std::io::Read as _;
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::thread;

use store::{
    Form, IndexWindows, OpenDevice, OpenImage, OperationError, Origin, Presence, RefName,
    Reference as StoredReference, Seconds, Store,
};

use crate::chunked::Toc;
use crate::evidence;
use crate::import::{
    self, Completed, Durable, ImportContext, ImportError, ImportOptions, LayerProof, LayerSource,
    Report, SourceImage, platform,
};
use crate::lazy::artifact::LazySubject;
use crate::lazy::{keep, stored_index};
use crate::stored::is_whole;
use image::digest::Digest;
use image::verity::ImageId;
use oci::manifest::{CONFIG_MAX, Config, Descriptor, Document, Manifest, Platform};
use oci::policy::{AdmitError, Evidence, Policies, Repository, Verdict, admit};
use oci::reference::Reference;
use oci::registry::Registry;

use blob::{PulledBlob, WRONG_MAX};
pub use lazy::{LazyPullError, LazyPulled, LazySource, UseTables, pull_lazy};
pub use toc_image::{TocImageError, TocLayerFlaw};

/// Maximum depth of indexes that are nested in indexes.
const DEPTH_MAX: usize = 4;

#[derive(Clone, Copy)]
pub struct PullSettings<'a> {
    /// Options of the import. `durable` is ignored, because each layer becomes durable separately.
    pub import: ImportOptions<'a>,
    /// Whether to keep the compressed layers as well.
    pub layers: Layers,
    /// Whether to keep an index of the image for other hosts.
    pub indexes: Indexes,
    /// Policies that must accept the image.
    pub policies: &'a Policies,
    /// When the changes of the store are synced. Only pulls without layers can do that later.
    pub syncs: Syncs,
}

/// Whether a pull makes the index of an image and keeps it, so that `serve --registry` has it for other hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Indexes {
    /// Keeps none.
    #[default]
    Forget,
    /// Makes the index in the pass over the blobs, as [`ImportOptions::index`] does, and keeps it. Requires the form
    /// `tar`. No layer is downloaded only for its index: if a layer is in the store without one, or can have none, no
    /// index of the image is kept.
    Keep,
}

/// When a pull makes its changes of the store durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Syncs {
    /// Before it returns.
    #[default]
    AtOnce,
    /// When [`Store::settle`] is called. If the system crashes before, the image is gone, and can be pulled again.
    Later,
}

impl std::fmt::Debug for PullSettings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut options = f.debug_struct("PullSettings");
        options.field("import", &self.import).field("layers", &self.layers).finish_non_exhaustive()
    }
}

/// Whether to keep the compressed layers in addition to their files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layers {
    /// Discards the compressed layers. They can be rebuilt from the files, but seldom with the same compressed bytes.
    #[default]
    Forget,
    /// Keeps the compressed layers, so that a push sends the same bytes.
    Keep,
}

/// Why a pull failed. The downloaded layers are kept for the next pull.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The size of the content differs from the size in its descriptor.
    #[error("{digest} of {reference} has {actual} bytes, not {expected} as in its manifest")]
    Size {
        /// The requested image.
        reference: Box<Reference>,
        /// Digest of the manifest or config.
        digest: Box<Digest>,
        /// Size in the descriptor, in bytes.
        expected: u64,
        /// Size of the content, in bytes.
        actual: u64,
    },
    /// The config has the wrong digest, from each mirror and after a second request to the registry.
    #[error(
        "the registry sent other bytes for the config {digest} of {reference}: their digest is \
        {actual}"
    )]
    Mismatch {
        /// The requested image.
        reference: Box<Reference>,
        /// Digest of the config.
        digest: Box<Digest>,
        /// Digest of the content.
        actual: Box<Digest>,
    },
    /// The image is in more than `DEPTH_MAX` nested indexes.
    #[error("{0} has more than {DEPTH_MAX} nested indexes")]
    Depth(Box<Reference>),
}

/// Result of a pull.
#[derive(Debug, Clone)]
pub enum Pulled {
    /// The store already had this image under this name.
    UpToDate {
        image: ImageId,
        /// Digest of the image's manifest.
        manifest: Digest,
        /// Name of the image in the store.
        name: RefName,
    },
    /// The pull made an image.
    Image(Report),
}

/// An image in a registry: verified documents, and their parsed contents.
#[derive(Debug)]
struct Remote {
    manifest: (Digest, Vec<u8>),
    config: (Digest, Vec<u8>),
    image: Manifest,
    settings: Config,
}

impl Remote {
    fn subject(&self) -> LazySubject<'_> {
        LazySubject {
            digest: &self.manifest.0,
            bytes: &self.manifest.1,
            manifest: &self.image,
            config: &self.settings,
        }
    }

    /// Returns the settings for an import of this image: an index is kept only if the image can have one.
    fn with_index<'a>(&self, options: &PullSettings<'a>) -> PullSettings<'a> {
        let manifest = &self.manifest.0;
        if options.indexes == Indexes::Forget {
            return *options;
        }
        // OCI's media types and Docker's end alike. Most zstd layers without a table of contents are one frame.
        let may_have_index =
            |it: &Descriptor| it.media_type.ends_with("gzip") || Toc::is_announced(it);
        if !self.image.layers.iter().all(may_have_index) {
            tracing::info!(
                %manifest,
                "no index is kept: not all layers are compressed with gzip or as zstd:chunked"
            );
            return PullSettings { indexes: Indexes::Forget, ..*options };
        }
        let ImportOptions { index, index_again, .. } = options.import;
        let import =
            ImportOptions { index: true, index_again: index && index_again, ..options.import };
        PullSettings { import, ..*options }
    }

    /// Keeps the index of an image in the store, if that is wanted. Without it, other hosts only start more slowly. For
    /// an image that was here before, it is not said again why there is no index.
    fn keep_index(&self, store: &Store, image: &ImageId, options: &PullSettings<'_>, was: Arrival) {
        let manifest = &self.manifest.0;
        if options.indexes != Indexes::Keep || matches!(stored_index(store, manifest), Ok(Some(_)))
        {
            return;
        }
        match keep(store, image, &self.subject()) {
            Ok(index) => tracing::info!(%manifest, %index, "the index is kept for other hosts"),
            Err(cause) => {
                let error: &dyn std::error::Error = &cause;
                let text = "no index of the image is kept for other hosts";
                match (was, cause.is_of_image()) {
                    (Arrival::Before, true) => tracing::debug!(%manifest, error, "{text}"),
                    (Arrival::Now, true) => tracing::info!(%manifest, error, "{text}"),
                    (_, false) => tracing::warn!(%manifest, error, "{text}"),
                }
            }
        }
    }
}

/// When an image came into the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrival {
    /// Before this pull.
    Before,
    /// With this pull.
    Now,
}

/// Returns the default name of a pulled image in the store, which is the whole reference. For a reference with a
/// digest and no tag, the digest becomes the tag.
///
/// # Errors
/// [`store::RefNameError`] if the name is too long for the store.
pub fn default_name(reference: &Reference) -> Result<RefName, store::RefNameError> {
    let tag = match (reference.tag(), reference.digest()) {
        (None, Some(digest)) => digest.to_string().replace(':', "-"),
        (tag, _) => tag.unwrap_or("latest").to_owned(),
    };
    format!("{}:{tag}", reference.name()).parse()
}

/// Pulls an image.
///
/// # Errors
/// [`PullError`]; in this case no name in the store is set or changed.
pub fn pull(
    store: &Store,
    registry: &Registry,
    reference: &Reference,
    environment: &ImportContext<'_>,
    options: &PullSettings<'_>,
) -> Result<Pulled, PullError> {
    let (admitted, _) =
        Admitted::find_and_check(store, registry, reference, environment, options, |_| ())?;
    let not_imported = |source| not_imported(reference, source);
    admitted.prove(store, registry, reference, environment, options);
    if let Some(done) = admitted.here(store, reference, options)? {
        if let Pulled::UpToDate { image, .. } = &done {
            admitted.remote.keep_index(store, image, options, Arrival::Before);
        }
        return Ok(done);
    }
    let options = &admitted.remote.with_index(options);
    admitted.note(store, reference, environment.now)?;
    let Admitted { remote, repository, .. } = admitted;
    let manifest = remote.manifest.0;
    let layers: Vec<_> = remote.image.layers.iter().zip(remote.settings.diff_ids()).collect();
    let wanted = |layer: &Descriptor| options.layers == Layers::Keep && !is_kept(store, layer);
    let ImportContext { budget, threads, .. } = *environment;
    let (tables, memory) = toc::fetch(store, registry, &layers, wanted, budget, threads.get())
        .map_err(|error| not_imported(error.into()))?;
    let budget = budget.saturating_sub(memory);
    let subject = remote.subject();
    // An index can be made only from the whole blob.
    let whole = |layer: &Descriptor| options.import.index || wanted(layer);
    let (updates, memory) =
        updates::fetch(store, registry, &layers, &subject, whole, budget, threads.get())
            .map_err(|error| not_imported(error.into()))?;
    let ways = tables.into_iter().zip(updates);
    let layers =
        layers.into_iter().zip(ways).map(|((layer, diff_id), (table, update))| LayerSource {
            name: layer.title(),
            source: Mutex::new(Box::new(PulledBlob::new(
                registry, store, layer, diff_id, options, table, update,
            ))),
            media_type: layer.media_type.clone(),
            digest: Some(layer.digest),
            size: Some(layer.size),
            diff_id: Some(*diff_id),
            title: LayerProof::Blob,
            // The blob itself is required, because it cannot be restored from the layer's files in the store.
            is_wanted: wanted(layer),
        });
    let found = SourceImage {
        layers: layers.collect(),
        manifest: Some(remote.manifest.clone()),
        config: Some(remote.config.clone()),
        name: None,
    };
    let budget = budget.saturating_sub(memory);
    let environment = ImportContext { budget, ..*environment };
    let import = ImportOptions { durable: Durable::EachLayer, ..options.import };
    let origins = import::Origins::Pulled(repository.to_string());
    let report = import::import_found(store, &found, origins, &environment, &import)
        .map_err(not_imported)?;
    remote.keep_index(store, &report.image, options, Arrival::Now);
    unpin(store, &manifest);
    Ok(Pulled::Image(report))
}

fn not_imported(reference: &Reference, source: ImportError) -> PullError {
    OperationError::of("pull", reference)(source).into()
}

/// The result of evaluating the policies for a manifest.
type Verified = Result<(Verdict, Evidence), AdmitError>;

/// The documents of an image, and the result of the work beside the download of its config.
struct Documents<T> {
    remote: Remote,
    admitted: Verified,
    /// `None` if the config was in the store, or the policies refuse the image.
    beside: Option<T>,
}

/// A verified manifest that the policies accept. The config is not known yet.
#[derive(Clone, Copy)]
struct FoundManifest<'a> {
    digest: &'a Digest,
    /// The encoded manifest.
    bytes: &'a [u8],
    /// The parsed manifest.
    image: &'a Manifest,
}

/// An image that the policies accept.
struct Admitted {
    remote: Remote,
    repository: Repository,
    evidence: Evidence,
}

impl Admitted {
    /// Finds an image and checks it against the policies. If the config has to be downloaded and the policies accept
    /// the image, `beside` is called during the download.
    fn find_and_check<T>(
        store: &Store,
        registry: &Registry,
        reference: &Reference,
        environment: &ImportContext<'_>,
        options: &PullSettings<'_>,
        beside: impl FnOnce(&FoundManifest<'_>) -> T,
    ) -> Result<(Self, Option<T>), PullError> {
        // The policies are evaluated first, because a refused image must not be downloaded, and because an image in
        // the store may have new signatures.
        let repository = Repository::new(reference.registry(), reference.repository());
        let check = |manifest: &Digest, indexes| {
            admit(options.policies, registry, &repository, manifest, indexes)
        };
        let Documents { remote, admitted, beside: done } =
            fetch_documents(store, registry, reference, options.import.platform, check, beside)?;
        let fits = platform::check(&remote.settings, environment, &options.import);
        fits.map_err(OperationError::of("pull", reference))?;
        let (verdict, evidence) = admitted.map_err(OperationError::of("pull", reference))?;
        for key in verdict.signed_by {
            tracing::info!(%reference, key = %key.display(), "signature verified");
        }
        Ok((Self { remote, repository, evidence }, done))
    }

    fn keep(&self, store: &Store) -> Result<(), PullError> {
        let kept = evidence::keep(&self.evidence, store, &self.remote.manifest.0);
        let object = "the origin and signatures of the image";
        Ok(kept.map_err(OperationError::of("record", object))?)
    }

    /// Compares the image with its layers, if it came with an index and all its devices have been filled since. If
    /// the comparison fails, the image is pulled.
    fn prove(
        &self,
        store: &Store,
        registry: &Registry,
        reference: &Reference,
        environment: &ImportContext<'_>,
        options: &PullSettings<'_>,
    ) {
        let manifest = &self.remote.manifest.0;
        let named = options.import.name.and_then(|it| store.refs.get(it).ok().flatten());
        let is_it = |it: &StoredReference| {
            it.manifest == Some(*manifest)
                && it.form == Form::Tar
                && options.import.form == Form::Tar
        };
        let Some(StoredReference { image, .. }) = named.filter(is_it) else { return };
        if !matches!(store.presence_of(&image, Some(manifest)), Ok(Presence::Unproven)) {
            return;
        }
        match import::prove(store, &image, Some(manifest), registry, environment) {
            Ok(Completed::Other(right)) => tell_wrong_index(reference, &right, &image),
            Ok(Completed::Same | Completed::NotYet) => {}
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(%image, error, "cannot compare the image with its layers");
            }
        }
    }

    /// Returns the image if the store has everything that the pull needs.
    fn here(
        &self,
        store: &Store,
        reference: &Reference,
        options: &PullSettings<'_>,
    ) -> Result<Option<Pulled>, PullError> {
        let manifest = &self.remote.manifest.0;
        let done = here(store, options, manifest, &self.remote.image.layers);
        if done.is_some() {
            self.keep(store)?;
        }
        if let Some(Pulled::UpToDate { image, .. }) = &done {
            let noted = note_origin(store, image, manifest, &self.repository);
            noted.map_err(|source| not_imported(reference, source))?;
        }
        Ok(done)
    }

    /// Puts manifest, config and evidence into the store. `gc` keeps them until the pull's pin is removed.
    fn note(&self, store: &Store, reference: &Reference, now: Seconds) -> Result<(), PullError> {
        let Remote { manifest, config, .. } = &self.remote;
        // The manifest is pinned first, so that `gc` never finds these documents without a pin.
        let pinned = store.downloads.pin(&manifest.0, now);
        pinned.map_err(OperationError::of("record", "the pull in the store"))?;
        let note = || -> Result<(), ImportError> {
            let transaction = store.begin().map_err(ImportError::transaction)?;
            for (digest, bytes) in [config, manifest] {
                transaction.manifest(digest, bytes).map_err(ImportError::manifest)?;
            }
            transaction.commit().map(drop).map_err(ImportError::transaction)
        };
        note().map_err(|source| not_imported(reference, source))?;
        self.keep(store)
    }
}

/// Logs that the layers make another image than the index claims.
fn tell_wrong_index(reference: &Reference, image: &ImageId, says: &ImageId) {
    tracing::error!(
        %image,
        %says,
        "the index of {reference} is wrong, or was made with other options: its layers make \
        another image, which now has the name"
    );
}

/// Removes the pin of a pull that has succeeded.
fn unpin(store: &Store, manifest: &Digest) {
    if let Err(error) = store.downloads.unpin(manifest) {
        tracing::warn!(%error, "cannot remove the record of the pull: gc removes it in a week");
    }
}

/// Adds an origin to an image that the store already has.
fn note_origin(
    store: &Store,
    image: &ImageId,
    manifest: &Digest,
    repository: &Repository,
) -> Result<(), ImportError> {
    let origin = Origin { manifest: Some(*manifest), repository: Some(repository.to_string()) };
    // A damaged record is replaced.
    if store.downloads.origins(image).is_ok_and(|it| it.contains(&origin)) {
        return Ok(());
    }
    let transaction = store.begin().map_err(ImportError::transaction)?;
    transaction.add_origin(*image, origin);
    transaction.commit().map(drop).map_err(ImportError::transaction)
}

/// Returns the image if the store has everything that the pull needs.
fn here(
    store: &Store,
    options: &PullSettings<'_>,
    manifest: &Digest,
    layers: &[Descriptor],
) -> Option<Pulled> {
    let name = options.import.name?;
    let StoredReference { image, manifest: named, form, .. } = store.refs.get(name).ok()??;
    let has_layers = match options.layers {
        Layers::Forget => true,
        Layers::Keep => layers.iter().all(|layer| is_kept(store, layer)),
    };
    let is_so = named == Some(*manifest) && form == options.import.form;
    let is_indexed = |image: OpenImage| {
        let lacks = |device: &OpenDevice| {
            let is_tar = matches!(store.devices.layer_of(&device.id), Ok(Some(_)));
            is_tar
                && !matches!(
                    store.lazy_devices.index_for(&device.id, Some(manifest)),
                    Ok(Some((_, IndexWindows::Groups(_))))
                )
        };
        !options.import.index || !image.devices.iter().any(lacks)
    };
    let same = is_so
        && has_layers
        && store.open_image(&image).is_ok_and(is_indexed)
        && is_whole(store, &image, Some(manifest));
    same.then(|| Pulled::UpToDate { image, manifest: *manifest, name: name.clone() })
}

/// Returns whether the store has the layer's compressed blob.
fn is_kept(store: &Store, layer: &Descriptor) -> bool {
    matches!(store.downloads.blob(&layer.digest), Ok(Some((_, size))) if size == layer.size)
}

/// Returns a manifest or config that the store has from an earlier pull. Returns `None` for a damaged document, so
/// that it is fetched again.
fn stored(store: &Store, descriptor: &Descriptor) -> Option<Vec<u8>> {
    let bytes = store.manifests.read(&descriptor.digest).ok().flatten()?;
    (bytes.len() as u64 == descriptor.size).then_some(bytes)
}

/// Fetches a config and verifies its digest.
fn read_config(
    registry: &Registry,
    reference: &Reference,
    config: &Descriptor,
) -> Result<Vec<u8>, PullError> {
    let (reference, digest) = (Box::new(reference.clone()), Box::new(config.digest));
    let (mut is_last, mut wrong) = (false, 0);
    loop {
        let mut bytes = Vec::new();
        let mut blob = registry.blob(&digest, Some(config.size), 0).as_document();
        let read = blob.read_to_end(&mut bytes);
        let object = format_args!("the config {digest} of {reference}");
        read.map_err(OperationError::of("read", object))?;
        let mut hasher = digest.hasher();
        hasher.update(&bytes);
        let actual = hasher.finish();
        if actual == *digest {
            return Ok(bytes);
        }
        wrong += 1;
        let may_try = registry.distrust(&digest) && wrong < WRONG_MAX;
        if !may_try && std::mem::replace(&mut is_last, true) {
            return Err(PullError::Mismatch { reference, digest, actual: Box::new(actual) });
        }
    }
}

/// Fetches an image's documents, and checks the manifest by `admit`, which gets the indexes that led to it. If the
/// config has to be downloaded and the check succeeds, calls `beside` during the download.
fn fetch_documents<T>(
    store: &Store,
    registry: &Registry,
    reference: &Reference,
    platform: &Platform,
    admit: impl FnOnce(&Digest, Vec<Vec<u8>>) -> Verified,
    beside: impl FnOnce(&FoundManifest<'_>) -> T,
) -> Result<Documents<T>, PullError> {
    let failed = OperationError::of("pull", reference);
    let object = format!("the manifest of {reference}");
    let wrong = OperationError::of("use", &object);
    let size = |descriptor: &Descriptor, bytes: &[u8]| {
        let actual = bytes.len() as u64;
        if actual == descriptor.size {
            return Ok(());
        }
        let digest = Box::new(descriptor.digest);
        let (reference, expected) = (Box::new(reference.clone()), descriptor.size);
        Err(PullError::Size { reference, digest, expected, actual })
    };
    let which = match (reference.digest(), reference.tag()) {
        (Some(digest), _) => digest.to_string(),
        (None, tag) => tag.unwrap_or("latest").to_owned(),
    };
    let first = registry.manifest(&which).map_err(failed)?;
    let mut fetched = (first.digest, first.bytes);
    let mut indexes = Vec::new();
    for _ in 0..=DEPTH_MAX {
        match Document::parse(&fetched.1).map_err(wrong)? {
            Document::Index(index) => {
                let chosen = index.choose(platform).map_err(wrong)?;
                let next = match stored(store, chosen) {
                    Some(bytes) => (chosen.digest, bytes),
                    None => {
                        let next = registry.manifest(&chosen.digest.to_string()).map_err(failed)?;
                        size(chosen, &next.bytes)?;
                        (next.digest, next.bytes)
                    }
                };
                indexes.push(std::mem::replace(&mut fetched, next).1);
            }
            Document::Image(image) => {
                let config = &image.config;
                oci::manifest::check_size("config", config.size, CONFIG_MAX).map_err(wrong)?;
                let (bytes, admitted, done) = match stored(store, config) {
                    Some(bytes) => (bytes, admit(&fetched.0, indexes), None),
                    None => {
                        let found =
                            FoundManifest { digest: &fetched.0, bytes: &fetched.1, image: &image };
                        let (bytes, admitted, done) = thread::scope(|scope| {
                            let read = || read_config(registry, reference, config);
                            let thread = thread::Builder::new().spawn_scoped(scope, read);
                            let admitted = admit(found.digest, indexes);
                            let done = admitted.is_ok().then(|| beside(&found));
                            let bytes = match thread {
                                Ok(thread) => thread.join().unwrap_or_else(|it| resume_unwind(it)),
                                Err(_) => read(),
                            };
                            (bytes, admitted, done)
                        });
                        (bytes?, admitted, done)
                    }
                };
                let settings = Config::parse(&bytes).map_err(wrong)?;
                settings.diff_ids_of(image.layers.len()).map_err(wrong)?;
                let config = (config.digest, bytes);
                let remote = Remote { manifest: fetched, config, image, settings };
                return Ok(Documents { remote, admitted, beside: done });
            }
        }
    }
    Err(PullError::Depth(Box::new(reference.clone())))
}
