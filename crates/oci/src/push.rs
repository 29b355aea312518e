//! From the store to a registry.
//!
//! What the registry has is not sent: neither what is in the repository, nor what it takes from another of its own. What is
//! sent are the bytes that the manifest names, where they can be had; see [`crate::export`] for what happens otherwise.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use store::Store;

use crate::Digest;
use crate::export::{self, Compression, ExportError, How, Plan, PlannedLayer};
use crate::import::Event;
use crate::manifest::{Document, Manifest};
use crate::reference::Reference;
use crate::registry::{Cause, Registry, RegistryError};

/// What to push.
#[derive(Debug, Clone)]
pub struct Wish<'a> {
    /// The manifest, which is in the store.
    pub manifest: &'a Digest,
    /// Where to: a repository, and what the image is called there.
    pub target: &'a Reference,
    /// Repositories of the same registry that may have its layers.
    pub sources: &'a [String],
    /// How layers are packed.
    pub compression: Compression,
}

/// Why an image was not pushed. Some of its layers may be in the registry, which nobody sees without a manifest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// The registry.
    #[error("cannot push {target}")]
    Registry {
        /// Where to.
        target: Box<Reference>,
        /// Why not.
        source: Box<RegistryError>,
    },
    /// The image cannot be made again from the store.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// It was to be pushed under the digest of another manifest.
    #[error(
        "the manifest to push is {actual}, not {expected}: push by a tag, or keep the layers as they came"
    )]
    Digest {
        /// As the reference says.
        expected: Box<Digest>,
        /// What would be pushed.
        actual: Box<Digest>,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// What a push did.
#[derive(Debug, Clone)]
pub struct Pushed {
    /// The manifest that was pushed.
    pub digest: Digest,
    /// It is the store's.
    pub is_unchanged: bool,
    /// For each layer: where its bytes came from, and whether they were sent.
    pub layers: Vec<(How, Sent)>,
}

/// What was done about a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// The repository has it.
    Not,
    /// The registry took it from another of its repositories.
    Mounted,
    /// So many bytes were sent.
    Bytes(u64),
}

/// Pushes an image. `told` hears of a plan that changes the manifest, before anything is sent.
///
/// # Errors
/// [`PushError`]; then no name stands for anything new in the registry.
pub fn push(
    store: &Store,
    registry: &Registry,
    wish: &Wish<'_>,
    options: &export::Options<'_>,
    told: &dyn Fn(&Plan),
) -> Result<Pushed, PushError> {
    let job = Job { store, registry, wish, options };
    let there = job.look()?;
    let plan = export::plan_for(store, wish.manifest, wish.compression, &there, options)?;
    if let Some(expected) = wish.target.digest().filter(|it| **it != plan.digest) {
        let (expected, actual) = (Box::new(*expected), Box::new(plan.digest));
        return Err(PushError::Digest { expected, actual });
    }
    if !plan.is_unchanged {
        told(&plan);
    }
    let sent = job.layers(&plan)?;
    let config = &plan.config;
    if !registry.has_blob(&config.digest).map_err(|error| job.failed(error))? {
        let sent = registry.upload_blob(&config.digest, config.size, &mut &plan.config_bytes[..]);
        sent.map_err(|error| job.failed(error))?;
    }
    let name = match (wish.target.tag(), wish.target.digest()) {
        (Some(tag), _) => tag.to_owned(),
        (None, Some(digest)) => digest.to_string(),
        (None, None) => crate::reference::LATEST.to_owned(),
    };
    let put = registry.put_manifest(&name, &plan.media_type, &plan.manifest);
    put.map_err(|error| job.failed(error))?;
    let layers = plan.layers.iter().map(|layer| layer.how).zip(sent).collect();
    Ok(Pushed { digest: plan.digest, is_unchanged: plan.is_unchanged, layers })
}

struct Job<'a> {
    store: &'a Store,
    registry: &'a Registry,
    wish: &'a Wish<'a>,
    options: &'a export::Options<'a>,
}

impl Job<'_> {
    fn failed(&self, source: RegistryError) -> PushError {
        PushError::Registry { target: Box::new(self.wish.target.clone()), source: Box::new(source) }
    }

    /// Which layers the registry has, as they are.
    fn look(&self) -> Result<BTreeSet<Digest>, PushError> {
        let mut there = BTreeSet::new();
        if self.wish.compression != Compression::AsItWas {
            return Ok(there);
        }
        // What is wrong with the manifest is for the plan to say.
        let bytes = self.store.manifest(self.wish.manifest).ok().flatten().unwrap_or_default();
        let Ok(Document::Image(Manifest { layers, .. })) = Document::parse(&bytes) else {
            return Ok(there);
        };
        for layer in layers {
            if !there.contains(&layer.digest) && self.has(&layer.digest)?.is_some() {
                there.insert(layer.digest);
            }
        }
        Ok(there)
    }

    /// Whether the repository has a blob, perhaps from now on.
    fn has(&self, digest: &Digest) -> Result<Option<Sent>, PushError> {
        if self.registry.has_blob(digest).map_err(|error| self.failed(error))? {
            return Ok(Some(Sent::Not));
        }
        for source in self.wish.sources {
            match self.registry.mount_blob(digest, source) {
                Ok(true) => return Ok(Some(Sent::Mounted)),
                Ok(false) => {}
                Err(error) if error.is_cancelled() => return Err(self.failed(error)),
                // It is only to save work.
                Err(error) => tracing::debug!(%digest, source, %error, "not mounted"),
            }
        }
        Ok(None)
    }

    /// Sends the layers, several at once.
    fn layers(&self, plan: &Plan) -> Result<Vec<Sent>, PushError> {
        let sizes: Vec<_> = plan.layers.iter().map(|it| Some(it.descriptor.size)).collect();
        (self.options.progress)(Event::Layers(&sizes));
        let next = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<Sent>>> =
            plan.layers.iter().map(|_| Mutex::new(None)).collect();
        let failure: Mutex<Option<PushError>> = Mutex::new(None);
        let is_over = || lock(&failure).is_some();
        let work = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(layer) = plan.layers.get(at) else { return };
                if is_over() {
                    return;
                }
                // The same bytes twice in one image: the first of them is sent.
                let first = plan
                    .layers
                    .iter()
                    .position(|it| it.descriptor.digest == layer.descriptor.digest);
                let sent = match first == Some(at) {
                    true => self.layer(at, layer),
                    false => Ok(Sent::Not),
                };
                match sent {
                    Ok(sent) => *lock(&results[at]) = Some(sent),
                    Err(error) => {
                        lock(&failure).get_or_insert(error);
                    }
                }
            }
        };
        let threads = self.options.threads.get().min(plan.layers.len());
        thread::scope(|scope| {
            let mut sending = Vec::new();
            for _ in 0..threads {
                let named = thread::Builder::new().name("push".to_owned());
                match named.spawn_scoped(scope, work) {
                    Ok(thread) => sending.push(thread),
                    Err(error) => {
                        lock(&failure).get_or_insert(PushError::Thread(error));
                    }
                }
            }
            for thread in sending {
                if let Err(panic) = thread.join() {
                    resume_unwind(panic);
                }
            }
        });
        if let Some(error) = lock(&failure).take() {
            return Err(error);
        }
        let sent = results.into_iter().map(|it| {
            let sent = it.into_inner().unwrap_or_else(PoisonError::into_inner);
            sent.expect("every layer was sent, or a failure was kept")
        });
        Ok(sent.collect())
    }

    fn layer(&self, at: usize, layer: &PlannedLayer) -> Result<Sent, PushError> {
        let progress = self.options.progress;
        let descriptor = &layer.descriptor;
        let there = match layer.how {
            How::There => Some(Sent::Not),
            How::Kept | How::Plain | How::Compressed => self.has(&descriptor.digest)?,
        };
        if let Some(sent) = there {
            progress(Event::Reused { layer: at });
            return Ok(sent);
        }
        progress(Event::Started { layer: at });
        let mut is_last = false;
        loop {
            let bytes = layer.open(self.store)?;
            let mut reader =
                Counted { bytes, tell: &|bytes| progress(Event::Read { layer: at, bytes }) };
            match self.registry.upload_blob(&descriptor.digest, descriptor.size, &mut reader) {
                Ok(()) => break,
                // What it had of the blob is gone: from the first byte, once.
                Err(error)
                    if matches!(error.cause(), Cause::UploadLost(_))
                        && !std::mem::replace(&mut is_last, true) =>
                {
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
