//! Pushes: from the store to a registry.
//!
//! A push neither sends nor compresses layers that the registry has, in the repository or in another one that it can
//! mount blobs from. A layer counts in each compressed form that it is known to have had. Other layers are sent as the
//! bytes that the manifest names, if these can be made; see [`crate::export`] for the other case.

mod known;
mod remember;

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::sync::Mutex;
use std::sync::PoisonError;

use store::parallel::{self, ThreadError};
use store::{Blob, Store};

use crate::export::{self, Compression, ExportError, How, Plan, PlannedLayer};
use crate::progress::Event;
use image::digest::Digest;
use known::Sources;
use oci::reference::Reference;
use oci::registry::{Cause, Registry, RegistryError};

/// A push to make.
#[derive(Debug, Clone)]
pub struct Wish<'a> {
    /// The manifest, which is in the store.
    pub manifest: &'a Digest,
    /// Repository to push to, and the tag or digest there.
    pub target: &'a Reference,
    /// How to compress layers. [`Compression::Usual`] leaves a manifest that came from a registry as it is.
    pub compression: Compression,
}

/// Why a push failed. Some layers may be in the registry by then, invisible without a manifest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// A request to the registry failed.
    #[error("cannot push {target}")]
    Registry {
        /// The target of the push.
        target: Box<Reference>,
        /// The cause.
        source: Box<RegistryError>,
    },
    /// The image cannot be read from the store.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The target names the digest of another manifest.
    #[error(
        "the manifest to push is {actual}, not {expected}: push to a tag, or pull the image with --keep-layers first"
    )]
    Digest {
        /// Digest in the target.
        expected: Box<Digest>,
        /// Digest of the manifest.
        actual: Box<Digest>,
    },
    /// A thread cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
}

/// Result of a push.
#[derive(Debug, Clone)]
pub struct Pushed {
    /// The manifest that was pushed.
    pub digest: Digest,
    /// Whether it is the manifest in the store.
    pub is_unchanged: bool,
    /// For each layer: where its bytes came from, and whether they were sent.
    pub layers: Vec<(How, Sent)>,
}

/// How a blob got into the repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// The repository had it.
    Not,
    /// The registry took it from another of its repositories.
    Mounted,
    /// It was sent, with this many bytes.
    Bytes(u64),
}

/// Pushes an image. `told` gets a plan that changes the manifest, before anything is sent.
///
/// # Errors
/// [`PushError`]; then no name in the registry has changed.
pub fn push(
    store: &Store,
    registry: &Registry,
    wish: &Wish<'_>,
    options: &export::Options<'_>,
    told: &dyn Fn(&Plan),
) -> Result<Pushed, PushError> {
    let compression = match wish.compression {
        Compression::Usual if known::is_pulled(store, wish.manifest) => Compression::AsItWas,
        other => other,
    };
    let blobs = known::blobs(store, wish.manifest, compression);
    let sources = Sources::known(store, wish.manifest, wish.target, &blobs);
    let mut job = Job {
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
    match job.push(told) {
        Err(PushError::Registry { source, .. })
            if matches!(source.cause(), Cause::BlobUnknown { .. }) =>
        {
            tracing::warn!(
                error = %source.cause(),
                "the registry lacks a blob that it claimed to have: sending everything"
            );
            job.trust = Trust::Nothing;
            job.push(told)
        }
        result => result,
    }
}

/// How often one layer is sent from its first byte again because the registry has lost what it had.
const RESTARTS: u32 = 3;

/// Whether a registry is believed that it has a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    Registry,
    /// It was believed, and took no manifest of it.
    Nothing,
}

struct Job<'a> {
    store: &'a Store,
    registry: &'a Registry,
    wish: &'a Wish<'a>,
    options: &'a export::Options<'a>,
    compression: Compression,
    /// For each layer those that may stand for it.
    blobs: Vec<Vec<Blob>>,
    sources: Sources,
    trust: Trust,
    /// What the registry took from another of its repositories.
    mounted: Mutex<BTreeSet<Digest>>,
    /// What it took from none of them, so that it is not asked again.
    refused: Mutex<BTreeSet<Digest>>,
}

impl Job<'_> {
    fn push(&self, told: &dyn Fn(&Plan)) -> Result<Pushed, PushError> {
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
        let name = match (wish.target.tag(), wish.target.digest()) {
            (Some(tag), _) => tag.to_owned(),
            (None, Some(digest)) => digest.to_string(),
            (None, None) => oci::reference::LATEST.to_owned(),
        };
        let put = registry.put_manifest(&name, &plan.media_type, &plan.manifest);
        put.map_err(|error| self.failed(error))?;
        remember::remember(store, wish.target, &plan.layers, &sent);
        let layers = plan.layers.iter().map(|layer| layer.how).zip(sent).collect();
        Ok(Pushed { digest: plan.digest, is_unchanged: plan.is_unchanged, layers })
    }

    fn failed(&self, source: RegistryError) -> PushError {
        PushError::Registry { target: Box::new(self.wish.target.clone()), source: Box::new(source) }
    }

    /// For each layer the blob that the registry has of it.
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

    /// Whether the repository has a blob, perhaps from now on.
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
        for source in self.sources.of(digest) {
            match self.registry.mount_blob(digest, source) {
                Ok(true) => {
                    lock(&self.mounted).insert(*digest);
                    return Ok(Some(Sent::Mounted));
                }
                Ok(false) => {}
                Err(error) if error.is_cancelled() => return Err(self.failed(error)),
                // It is only to save work.
                Err(error) => tracing::debug!(%digest, source, %error, "cannot mount the blob"),
            }
        }
        lock(&self.refused).insert(*digest);
        Ok(None)
    }

    /// How a blob came there that the repository has.
    fn sent(&self, digest: &Digest) -> Sent {
        if lock(&self.mounted).contains(digest) { Sent::Mounted } else { Sent::Not }
    }

    /// Sends the layers, several at once.
    fn layers(&self, plan: &Plan) -> Result<Vec<Sent>, PushError> {
        let sizes: Vec<_> = plan.layers.iter().map(|it| Some(it.descriptor.size)).collect();
        (self.options.progress)(Event::Layers(&sizes));
        parallel::each("push", self.options.threads.get(), plan.layers.len(), |at| {
            let layer = &plan.layers[at];
            // The same bytes twice in one image: the first of them is sent.
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
                // What it had of the blob is gone: from the first byte.
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

/// Tells how much was read.
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
