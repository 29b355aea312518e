//! Pushes images from the store to a registry.
//!
//! A push neither sends nor compresses layers that the registry has, in this repository or in another repository from
//! which the registry can mount blobs. This applies to all compressed forms of a layer that the store has recorded.
//! Other layers are sent as the bytes that the manifest names, if these can be rebuilt; see [`crate::export`] for the
//! other case.

mod known;
mod remember;
mod signatures;

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::sync::Mutex;
use std::sync::PoisonError;

use store::parallel;
use store::{Blob, OperationError, Store};

use crate::export::{self, Compression, ExportError, ExportPlan, How, PlannedLayer};
use crate::progress::Event;
use image::digest::Digest;
use known::Sources;
use oci::reference::Reference;
use oci::registry::{Cause, Registry, RegistryError};
use oci::signing::SigningKey;
use signatures::SignaturePush;
pub use signatures::SignaturesError;

/// Parameters of a push.
#[derive(Debug, Clone)]
pub struct PushOptions<'a> {
    /// Digest of the manifest, which must be in the store.
    pub manifest: &'a Digest,
    /// Repository to push to, with a tag or digest.
    pub target: &'a Reference,
    /// Compression of the layers. [`Compression::Usual`] leaves a manifest that came from a registry unchanged.
    pub compression: Compression,
    /// Key that signs the image for the target. Signatures of the store for this repository are sent in any case.
    pub key: Option<&'a SigningKey>,
}

/// Why a push failed. Some layers may already be in the registry, but they are invisible without a manifest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// A request to the registry failed.
    #[error("cannot push {target}")]
    Registry { target: Box<Reference>, source: Box<RegistryError> },
    /// The image in the store cannot be read.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The target has the digest of another manifest.
    #[error(
        "the manifest to push is {actual}, not {expected}: push to a tag, or pull the image with --keep-layers first"
    )]
    Digest {
        /// Digest in the target.
        expected: Box<Digest>,
        actual: Box<Digest>,
    },
    /// The image cannot be signed, or its signatures cannot be sent.
    #[error("cannot push the signatures of {target}")]
    Signatures { target: Box<Reference>, source: Box<SignaturesError> },
    #[error(transparent)]
    Failed(#[from] OperationError),
}

#[derive(Debug, Clone)]
pub struct Pushed {
    /// Digest of the pushed manifest.
    pub digest: Digest,
    /// Whether the pushed manifest is the one in the store.
    pub is_unchanged: bool,
    /// For each layer, the source of its bytes, and whether they were sent.
    pub layers: Vec<(How, Sent)>,
    /// Number of signatures for the target: sent ones, and those that the registry already had.
    pub signatures: usize,
}

/// How the repository got a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// The repository had the blob already.
    Not,
    /// The registry mounted the blob from another of its repositories.
    Mounted,
    /// The blob was sent, with this number of bytes.
    Bytes(u64),
}

/// Pushes an image. `told` is called before any data is sent, with a plan that changes the manifest.
///
/// # Errors
/// A [`PushError`]; no tag in the registry has changed then.
pub fn push(
    store: &Store,
    registry: &Registry,
    wish: &PushOptions<'_>,
    options: &export::Options<'_>,
    told: &dyn Fn(&ExportPlan),
) -> Result<Pushed, PushError> {
    let compression = match wish.compression {
        Compression::Usual if known::is_pulled(store, wish.manifest) => Compression::AsItWas,
        other => other,
    };
    let blobs = known::blobs(store, wish.manifest, compression);
    let sources = Sources::known(store, wish.manifest, wish.target, &blobs);
    let mut run = PushRun {
        store,
        registry,
        wish,
        options,
        compression,
        blobs,
        sources,
        trust: Trust::Registry,
        mounted: Mutex::default(),
        refused: Mutex::default(),
    };
    match run.push(told) {
        Err(PushError::Registry { source, .. })
            if matches!(source.cause(), Cause::BlobUnknown { .. }) =>
        {
            tracing::warn!(
                error = %source.cause(),
                "the registry lacks a blob that it confirmed: sending all layers"
            );
            run.trust = Trust::Nothing;
            run.push(told)
        }
        result => result,
    }
}

/// Maximum number of times that one layer is sent again from its first byte after the registry lost an upload.
const RESTARTS: u32 = 3;

/// Whether the registry is trusted when it claims to have a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    Registry,
    /// The registry claimed to have a blob, and then refused a manifest because it lacks the blob.
    Nothing,
}

struct PushRun<'a> {
    store: &'a Store,
    registry: &'a Registry,
    wish: &'a PushOptions<'a>,
    options: &'a export::Options<'a>,
    compression: Compression,
    /// For each layer, the blobs that may represent it.
    blobs: Vec<Vec<Blob>>,
    sources: Sources,
    trust: Trust,
    /// Blobs that the registry mounted from other repositories.
    mounted: Mutex<BTreeSet<Digest>>,
    /// Blobs that the registry could not mount, so that the requests are not repeated.
    refused: Mutex<BTreeSet<Digest>>,
}

impl PushRun<'_> {
    fn push(&self, told: &dyn Fn(&ExportPlan)) -> Result<Pushed, PushError> {
        let Self { store, registry, wish, options, .. } = *self;
        let there = self.look()?;
        let plan = export::plan_for(store, wish.manifest, self.compression, &there, options)?;
        if let Some(expected) = wish.target.digest().filter(|it| **it != plan.digest) {
            let (expected, actual) = (Box::new(*expected), Box::new(plan.digest));
            return Err(PushError::Digest { expected, actual });
        }
        if !plan.is_unchanged {
            told(&plan);
        }
        let sent = self.layers(&plan)?;
        let config = &plan.config;
        if self.has(&config.digest, config.size)?.is_none() {
            let sent =
                registry.upload_blob(&config.digest, config.size, &mut &plan.config_bytes[..]);
            sent.map_err(|error| self.failed(error))?;
        }
        // They are sent first, so that readers of the tag always find them.
        let signatures = SignaturePush {
            store,
            registry,
            target: wish.target,
            manifest: &plan.digest,
            key: wish.key,
        };
        let signatures = signatures.send()?;
        let name = match (wish.target.tag(), wish.target.digest()) {
            (Some(tag), _) => tag.to_owned(),
            (None, Some(digest)) => digest.to_string(),
            (None, None) => oci::reference::LATEST.to_owned(),
        };
        let put = registry.put_manifest(&name, &plan.media_type, &plan.manifest);
        put.map_err(|error| self.failed(error))?;
        remember::remember(store, wish.target, &plan.layers, &sent);
        let layers = plan.layers.iter().map(|layer| layer.how).zip(sent).collect();
        Ok(Pushed { digest: plan.digest, is_unchanged: plan.is_unchanged, layers, signatures })
    }

    fn failed(&self, source: RegistryError) -> PushError {
        PushError::Registry { target: Box::new(self.wish.target.clone()), source: Box::new(source) }
    }

    /// Returns, for each layer, a blob of it that the registry has.
    fn look(&self) -> Result<Vec<Option<Blob>>, PushError> {
        if self.trust == Trust::Nothing {
            return Ok(Vec::new());
        }
        parallel::each("push", self.options.threads.get(), self.blobs.len(), |at| {
            for blob in &self.blobs[at] {
                if self.has(&blob.digest, blob.size)?.is_some() {
                    return Ok(Some(blob.clone()));
                }
            }
            Ok(None)
        })
    }

    /// Checks whether the repository has a blob, and tries to mount the blob if not.
    fn has(&self, digest: &Digest, size: u64) -> Result<Option<Sent>, PushError> {
        if self.trust == Trust::Nothing {
            return Ok(None);
        }
        if self.registry.has_blob(digest, Some(size)).map_err(|error| self.failed(error))? {
            return Ok(Some(self.sent(digest)));
        }
        if lock(&self.refused).contains(digest) {
            return Ok(None);
        }
        for source in self.sources.repositories_for(digest) {
            match self.registry.mount_blob(digest, source) {
                Ok(true) => {
                    lock(&self.mounted).insert(*digest);
                    return Ok(Some(Sent::Mounted));
                }
                Ok(false) => {}
                Err(error) if error.is_cancelled() => return Err(self.failed(error)),
                // Mounting only saves work, so errors are ignored.
                Err(error) => tracing::debug!(%digest, source, %error, "cannot mount the blob"),
            }
        }
        lock(&self.refused).insert(*digest);
        Ok(None)
    }

    /// Returns how a blob has got into the repository.
    fn sent(&self, digest: &Digest) -> Sent {
        if lock(&self.mounted).contains(digest) { Sent::Mounted } else { Sent::Not }
    }

    /// Sends the layers in parallel.
    fn layers(&self, plan: &ExportPlan) -> Result<Vec<Sent>, PushError> {
        let sizes: Vec<_> = plan.layers.iter().map(|it| Some(it.descriptor.size)).collect();
        (self.options.progress)(Event::Layers(&sizes));
        parallel::each("push", self.options.threads.get(), plan.layers.len(), |at| {
            let layer = &plan.layers[at];
            // If two layers of an image have the same blob, only the first is sent.
            let same = |it: &PlannedLayer| it.descriptor.digest == layer.descriptor.digest;
            match plan.layers.iter().position(same) {
                Some(first) if first < at => Ok(Sent::Not),
                _ => self.layer(at, layer),
            }
        })
    }

    fn layer(&self, at: usize, layer: &PlannedLayer) -> Result<Sent, PushError> {
        let progress = self.options.progress;
        let descriptor = &layer.descriptor;
        let there = match layer.how {
            How::There => Some(self.sent(&descriptor.digest)),
            How::Kept | How::Plain | How::Compressed | How::New => {
                self.has(&descriptor.digest, descriptor.size)?
            }
        };
        if let Some(sent) = there {
            progress(Event::Reused { layer: at });
            return Ok(sent);
        }
        progress(Event::Started { layer: at });
        let mut left = RESTARTS;
        loop {
            let bytes = layer.open(self.store)?;
            let mut reader =
                Counted { bytes, tell: &|bytes| progress(Event::Read { layer: at, bytes }) };
            match self.registry.upload_blob(&descriptor.digest, descriptor.size, &mut reader) {
                Ok(()) => break,
                // The registry has lost the uploaded part, so the blob is sent again from its first byte.
                Err(error) if matches!(error.cause(), Cause::UploadLost(_)) && left > 0 => {
                    left -= 1;
                    progress(Event::Again { layer: at });
                }
                Err(error) => return Err(self.failed(error)),
            }
        }
        progress(Event::Done { layer: at });
        Ok(Sent::Bytes(descriptor.size))
    }
}

/// A reader that reports the number of bytes of each read.
struct Counted<'a, R> {
    bytes: R,
    tell: &'a (dyn Fn(u64) + Sync),
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.bytes.read(into)?;
        (self.tell)(read as u64);
        Ok(read)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
