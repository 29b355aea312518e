//! Pulls an image without its layers: its devices are filled when they are read.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use image::digest::Digest;
use image::verity::ImageId;
use oci::manifest::Platform;
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::{AskedHosts, Fetched, Registry};
use store::{
    DEFAULT_TRACE, DiskError, Form, OpenImageError, OperationError, Origin, RefName, StartRecord,
    Store, Traces,
};

use super::toc_image::TocImageError;
use super::{
    Admitted, FoundManifest, PullError, PullSettings, Pulled, Remote, Syncs, not_imported,
    note_origin, tell_wrong_index, toc_image, unpin,
};
use crate::StoredImage;
use crate::import::{self, ImportContext, ImportOptions, Limits, Origins};
use crate::lazy::artifact::LazyParts;
use crate::lazy::{
    FetchedIndex, GuessedIndexes, IndexSearch, LazyFetch, LazyFetchError, LazyImage,
    LazyPublishError, LazyPublished, PreviousVersions, TrustIndex, index_tag, previous_start,
    publish,
};

/// How much longer a pull waits for the guessed manifest of the index than for the image's manifest.
const GUESS_WAIT: Duration = Duration::from_secs(1);

/// Requests for the manifest under the tag of an index, which are sent together with the request for the image's
/// manifest. A response that comes too late is not used.
struct Guess {
    own: Option<Receiver<Option<Fetched>>>,
    of_mirrors: Option<Receiver<Option<Fetched>>>,
}

impl Guess {
    fn begin(registry: &Registry, reference: &Reference, platform: &Platform) -> Self {
        let Some(tag) = index_tag(reference, &platform.os, &platform.architecture) else {
            return Self { own: None, of_mirrors: None };
        };
        let ask = |hosts: AskedHosts| {
            let (sender, receiver) = mpsc::channel();
            let (registry, tag) = (registry.clone(), tag.clone());
            let guess = move || {
                // The pull may have ended.
                let _sent = sender.send(registry.guess_manifest(&tag, hosts));
            };
            thread::Builder::new().spawn(guess).is_ok().then_some(receiver)
        };
        let of_mirrors = registry.has_resolving_mirrors().then(|| ask(AskedHosts::Mirrors));
        Self { own: ask(AskedHosts::Own), of_mirrors: of_mirrors.flatten() }
    }

    /// Returns the registry's manifest if it has arrived, or arrives soon. Those of mirrors are not awaited.
    fn manifests(&mut self) -> GuessedIndexes {
        let own = self.own.as_ref().and_then(|it| it.recv_timeout(GUESS_WAIT).ok()?);
        let of_mirrors = self.of_mirrors.take();
        GuessedIndexes { own, of_mirrors }
    }
}

/// Why a pull without layers failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyPullError {
    /// A cause that can occur in every kind of pull.
    #[error(transparent)]
    Pull(#[from] PullError),
    /// The image has no usable index. A pull with layers may succeed.
    #[error(transparent)]
    Index(#[from] LazyFetchError),
    /// The image has no usable index, and its layers announce tables of contents, but the image cannot be made from
    /// them. A pull with layers may succeed.
    #[error("{}, and cannot be made from its layers' tables of contents", without_index(.reference, .index))]
    Tables {
        /// The requested image.
        reference: Box<Reference>,
        /// Why no index is used.
        index: Box<LazyFetchError>,
        source: Box<TocImageError>,
    },
    /// Another image in the store claims other bytes for a device that both images share, and neither claim has been
    /// compared with the layers. A pull with layers still makes this image.
    #[error("cannot use the index of {reference} beside the devices of other images in the store")]
    Contradiction {
        /// The requested image.
        reference: Box<Reference>,
        /// The contradiction.
        source: Box<LazyPublishError>,
    },
    /// The image cannot be added to the store.
    #[error("cannot pull {reference}")]
    Publish {
        /// The requested image.
        reference: Box<Reference>,
        source: Box<LazyPublishError>,
    },
}

/// Says that an image has no usable index, and why if it has any.
fn without_index(reference: &Reference, error: &LazyFetchError) -> String {
    if error.is_absence() {
        return format!("{reference} has no index for lazy loading");
    }
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |it| it.source());
    let causes: Vec<_> = causes.map(ToString::to_string).collect();
    format!("{reference} has no usable index for lazy loading ({})", causes.join(": "))
}

/// Result of a pull without layers.
#[derive(Debug, Clone)]
pub enum LazyPulled {
    /// The store already had the image under this name, with its layers or without.
    UpToDate {
        image: ImageId,
        /// Digest of the image's manifest.
        manifest: Digest,
        /// Name of the image in the store.
        name: RefName,
    },
    /// The image was pulled.
    Image {
        image: ImageId,
        /// Digest of the image's manifest.
        manifest: Digest,
        /// Where the description of the devices came from.
        source: LazySource,
        /// Why tables replace the index, unless the image has no index.
        unusable_index: Option<Arc<LazyFetchError>>,
        /// Number of layers.
        layers: usize,
        /// Number of devices that are filled when they are read.
        devices: usize,
        /// Total length of these devices, in bytes.
        device_bytes: u64,
    },
}

/// Whether tables of contents may replace a missing index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UseTables {
    IfNoIndex,
    /// For engines: their images share snapshots of equal layers, and a table is never compared with the layer.
    Never,
}

/// Where the description of an image's devices came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LazySource {
    /// An index: the digest of its manifest.
    Index(Digest),
    /// The layers' own tables of contents.
    Tables,
}

/// Pulls an image by its index, without fetching a layer. If the image has no usable index, the tables of contents of
/// its layers are used instead, if they have such tables. The image always gets the form `tar`: `options.import.form`
/// is ignored.
///
/// # Errors
/// [`LazyPullError`]; in this case no name in the store is set or changed.
pub fn pull_lazy(
    store: &Store,
    registry: &Registry,
    reference: &Reference,
    environment: &ImportContext<'_>,
    options: &PullSettings<'_>,
    name: &RefName,
    (trust, tables): (TrustIndex, UseTables),
) -> Result<LazyPulled, LazyPullError> {
    let import =
        ImportOptions { form: Form::Tar, name: Some(name), index: false, ..options.import };
    let options = PullSettings { import, ..*options };
    let mut guess = Guess::begin(registry, reference, options.import.platform);
    let find = |found: &FoundManifest<'_>| {
        let mut search = IndexSearch::new(guess.manifests());
        search.find(registry, &found.index(reference, options.policies, trust));
        search
    };
    let (admitted, search) =
        Admitted::find_and_check(store, registry, reference, environment, &options, find)?;
    admitted.prove(store, registry, reference, environment, &options);
    if let Some(Pulled::UpToDate { image, manifest, name }) =
        admitted.here(store, reference, &options)?
    {
        return Ok(LazyPulled::UpToDate { image, manifest, name });
    }
    let Remote { manifest: (manifest, bytes), config, image, settings, .. } = &admitted.remote;
    if let Some(image) = partial(store, name, manifest) {
        admitted.keep(store)?;
        let noted = note_origin(store, &image, manifest, &admitted.repository);
        noted.map_err(|source| not_imported(reference, source))?;
        let (manifest, name) = (*manifest, name.clone());
        return Ok(LazyPulled::UpToDate { image, manifest, name });
    }
    let found = FoundManifest { digest: manifest, bytes, image };
    let search = search.unwrap_or_else(|| IndexSearch::new(guess.manifests()));
    let wanted = found.index(reference, options.policies, trust);
    let (source, unusable_index, parts) = match search.fetch(registry, &wanted, settings) {
        Ok(FetchedIndex { artifact, parts }) => (LazySource::Index(artifact), None, parts),
        // A user who names an index wants that one, and a service that requires signatures wants one of the index.
        Err(error)
            if tables == UseTables::Never
                || matches!(trust, TrustIndex::Digest(_) | TrustIndex::Signed) =>
        {
            return Err(error.into());
        }
        Err(error) if !toc_image::have_tables(image) => return Err(error.into()),
        Err(index) => match from_tables(registry, &admitted, environment, &options.import.limits) {
            Ok(parts) => {
                let unusable = Some(Arc::new(index)).filter(|it| !it.is_absence());
                (LazySource::Tables, unusable, parts)
            }
            Err(source) => {
                let (reference, index) = (Box::new(reference.clone()), Box::new(index));
                return Err(LazyPullError::Tables { reference, index, source: Box::new(source) });
            }
        },
    };
    // The version that the image replaces may be garbage as soon as the name has moved.
    let has_start = parts.traces.get(DEFAULT_TRACE).is_some();
    let start = if has_start { None } else { start_before(store, &admitted, name) };
    let origin =
        Origin { manifest: Some(*manifest), repository: Some(admitted.repository.to_string()) };
    let image_layers = image.layers.len();
    let lazy = LazyImage {
        image: &parts.image,
        id: &parts.id,
        manifest,
        documents: &[(manifest, bytes), (&config.0, &config.1)],
        indexes: &parts.indexes,
        name,
        origin: &origin,
        now: environment.now,
    };
    let publish = || -> Result<LazyPublished, LazyPullError> {
        let published = publish(store, &lazy).map_err(|source| {
            let is_contradiction = source.is_contradiction();
            let (reference, source) = (Box::new(reference.clone()), Box::new(source));
            match is_contradiction {
                true => LazyPullError::Contradiction { reference, source },
                false => LazyPullError::Publish { reference, source },
            }
        })?;
        if matches!(published, LazyPublished::Lazy(_)) {
            keep_start(store, manifest, &parts, &parts.id);
            inherit_start(store, manifest, start.as_ref());
        }
        Ok(published)
    };
    let unsynced = match options.syncs {
        Syncs::AtOnce => None,
        Syncs::Later => publish_unsynced(store, &parts.id, manifest, name, || {
            admitted.keep(store)?;
            publish()
        }),
    };
    let published = match unsynced {
        Some(published) => published,
        None => {
            admitted.note(store, reference, environment.now)?;
            publish()?
        }
    };
    let (image, lazy) = match published {
        LazyPublished::Lazy(lazy) => (parts.id, lazy),
        LazyPublished::AllIsHere => {
            let made =
                import_here(store, registry, reference, environment, &admitted, &parts, &options);
            let made = made?;
            keep_start(store, manifest, &parts, &made);
            (made, Vec::new())
        }
    };
    unpin(store, manifest);
    let heads = parts.indexes.iter().map(|it| &it.head);
    let filled = heads.filter(|it| lazy.contains(&it.device));
    Ok(LazyPulled::Image {
        image,
        manifest: *manifest,
        source,
        unusable_index,
        layers: image_layers,
        devices: lazy.len(),
        device_bytes: filled.map(|it| it.device_bytes).sum(),
    })
}

/// Makes an image from the tables of contents of its layers.
fn from_tables(
    registry: &Registry,
    admitted: &Admitted,
    environment: &ImportContext<'_>,
    limits: &Limits,
) -> Result<LazyParts, TocImageError> {
    let Remote { image, settings, .. } = &admitted.remote;
    let ImportContext { budget, threads, .. } = *environment;
    let diff_ids = settings.diff_ids_of(image.layers.len());
    let diff_ids = diff_ids.map_err(OperationError::of("use", "the image's config"))?;
    toc_image::fetch(registry, image, diff_ids, budget, threads.get(), limits)
}

impl<'a> FoundManifest<'a> {
    const fn index(
        &self,
        reference: &'a Reference,
        policies: &'a Policies,
        trust: TrustIndex,
    ) -> LazyFetch<'a> {
        let Self { digest, bytes, image } = *self;
        LazyFetch { reference, digest, bytes, manifest: image, policies, trust }
    }
}

/// Imports an image from its devices, all of which are in the store. No data has to be fetched, so the image is
/// compared with its layers at once.
fn import_here(
    store: &Store,
    registry: &Registry,
    reference: &Reference,
    environment: &ImportContext<'_>,
    admitted: &Admitted,
    parts: &LazyParts,
    options: &PullSettings<'_>,
) -> Result<ImageId, PullError> {
    let failed = |source| not_imported(reference, source);
    let documents = StoredImage::load(store, &admitted.remote.manifest.0);
    let documents = documents.map_err(|source| failed(source.into()))?;
    let heads = parts.indexes.iter().map(|it| &it.head);
    let origins = Origins::Pulled(admitted.repository.to_string());
    let made = import::import_here(
        store,
        &documents,
        heads,
        registry,
        environment,
        &options.import,
        origins,
    );
    let made = made.map_err(failed)?;
    if made != parts.id {
        tell_wrong_index(reference, &made, &parts.id);
    }
    Ok(made)
}

/// Publishes an image without syncs. Returns `None` if that failed, or if a crash could remove something else with the
/// image: then the image must be published as usual.
fn publish_unsynced(
    store: &Store,
    image: &ImageId,
    manifest: &Digest,
    name: &RefName,
    publish: impl FnOnce() -> Result<LazyPublished, LazyPullError>,
) -> Option<LazyPublished> {
    let published = match store.publish_unsynced(image, manifest, name) {
        Ok(Some(_deferred)) => publish(),
        Ok(None) => return None,
        Err(error) => {
            tracing::debug!(%error, "publishing an image with syncs");
            return None;
        }
    };
    match published {
        // The image is imported from its devices, with syncs.
        Ok(LazyPublished::AllIsHere) => None,
        Ok(published) => Some(published),
        Err(error) => {
            let error: &dyn std::error::Error = &error;
            tracing::debug!(error, "publishing an image with syncs");
            None
        }
    }
}

/// Stores the traces and the hot pack of a manifest. They belong to the image that the index claims, so they are useless
/// if the layers make another image.
fn keep_start(store: &Store, manifest: &Digest, parts: &LazyParts, image: &ImageId) {
    if *image == parts.id
        && let Err(error) = keep_traces(store, parts)
    {
        // Without traces, programs start more slowly, but still start.
        let error: &dyn std::error::Error = &error;
        tracing::warn!(%image, error, "cannot store the traces of the image");
    }
    // A pack of an earlier index of the manifest is removed, because that index may have had another author.
    let hot = parts.hot.as_deref().filter(|_| *image == parts.id);
    if let Err(error) = store.downloads.set_hot_pack(manifest, hot) {
        let error: &dyn std::error::Error = &error;
        tracing::warn!(%image, error, "cannot store the hot pack of the image");
    }
}

/// Returns what an earlier version of the image read at its start.
fn start_before(store: &Store, admitted: &Admitted, name: &RefName) -> Option<StartRecord> {
    let replaced = store.refs.get(name).ok().flatten();
    let repositories = [admitted.repository.to_string()];
    let (manifest, replaced) = (&admitted.remote.manifest.0, replaced.as_ref());
    let wanted = PreviousVersions { manifest, repositories: &repositories, replaced };
    previous_start(store, &wanted).unwrap_or_else(|error| {
        let error: &dyn std::error::Error = &error;
        tracing::debug!(%manifest, error, "cannot look for the start of an earlier version");
        None
    })
}

/// Records the start of an earlier version for the image of a manifest. Without it, programs only start more slowly.
fn inherit_start(store: &Store, manifest: &Digest, start: Option<&StartRecord>) {
    if let Some(start) = start
        && let Err(error) = store.downloads.set_start(manifest, start)
    {
        let error: &dyn std::error::Error = &error;
        tracing::debug!(%manifest, error, "cannot record the start of an earlier version");
    }
}

/// Stores the traces that came with an index. Earlier traces of the image are kept if they still fit.
fn keep_traces(store: &Store, parts: &LazyParts) -> Result<(), DiskError> {
    let before = store.downloads.traces(&parts.id).unwrap_or_default();
    let traces = with_earlier(&parts.traces, &before);
    if traces == before { Ok(()) } else { store.downloads.set_traces(&parts.id, &traces) }
}

/// Adds the earlier traces to the new traces `came`. The new traces take precedence, because the earlier traces may
/// belong to another manifest of the image.
fn with_earlier(came: &Traces, before: &Traces) -> Traces {
    let mut all = came.clone();
    for trace in before.iter().filter(|it| came.get(&it.name).is_none()) {
        if let Err(error) = all.set(trace.clone()) {
            tracing::info!(trace = trace.name, %error, "dropping an earlier trace");
        }
    }
    all
}

/// Returns the image with this name if it has this manifest, if some of its devices are not complete yet, and if each
/// of these devices has an index.
fn partial(store: &Store, name: &RefName, manifest: &Digest) -> Option<ImageId> {
    let named = store.refs.get(name).ok()??;
    if named.manifest != Some(*manifest) || named.form != Form::Tar {
        return None;
    }
    let opened = store.open_image(&named.image);
    let Err(OpenImageError::Partial(_)) = opened else { return None };
    // If an index was damaged, and perhaps removed, the indexes are fetched again.
    let has_index =
        |it| store.lazy_devices.index_for(it, Some(manifest)).is_ok_and(|it| it.is_some());
    store.lazy_devices(&named.image).ok()?.iter().all(has_index).then_some(named.image)
}

#[cfg(test)]
mod tests {
    use store::{Trace, Traces};

    use super::with_earlier;

    /// Tests that new traces replace earlier ones even if the traces of another manifest have reached the maximum.
    #[test]
    fn earlier_traces_take_no_room_from_later_ones() {
        let trace = |name: String| Trace { name, runs: Vec::new(), start: None };
        let mut before = Traces::default();
        let mut count = 0;
        while before.set(trace(format!("a{count}"))).is_ok() {
            count += 1;
        }
        let mut came = Traces::default();
        came.set(trace("default".to_owned())).unwrap();
        let all = with_earlier(&came, &before);
        assert!(all.get("default").is_some() && all.iter().count() == count);
        // Earlier traces that fit are kept.
        assert_eq!(with_earlier(&Traces::default(), &before), before);
    }
}
