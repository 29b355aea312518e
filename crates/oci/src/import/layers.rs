//! Sources that are made of layers: where the layers are, and reading them all at once.

use std::fs::File;
use std::io::{self, Read, Seek as _, Write as _};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use image::tree::Builder;

use super::decode::{Decoder, Expected};
use super::documents;
use super::layer::{self, Gathered, LayerFailure, Shared, Totals, Wanted};
use super::objects::{BATCH, Queue};
use super::stop::Stop;
use super::{DecodeError, Event, ImportError, Job, Made, Times, feed};
use crate::Digest;
use crate::docker::Archive;
use crate::layout::Layout;
use crate::manifest::Platform;
use crate::source::{Choice, Input};

/// A layer to read.
struct LayerSource {
    /// For messages.
    name: String,
    /// Taken by the thread that reads it.
    source: Mutex<Option<Box<dyn Read + Send>>>,
    media_type: String,
    digest: Option<Digest>,
    size: Option<u64>,
    diff_id: Option<Digest>,
}

/// An image that was found in a source.
pub(super) struct Found {
    /// Bytes of the manifest, or `None` for one to be made.
    manifest: Option<(Digest, Vec<u8>)>,
    /// Bytes of the config, or `None` for one to be made.
    config: Option<(Digest, Vec<u8>)>,
    layers: Vec<LayerSource>,
    name: Option<String>,
}

pub(super) fn open(input: &Input) -> Result<Box<dyn Read + Send>, io::Error> {
    Ok(match input {
        Input::Stdin => Box::new(io::stdin()),
        Input::File(path) => Box::new(File::open(path)?),
    })
}

pub(super) fn from_layout(
    layout: &Layout,
    choice: &Choice,
    platform: &Platform,
) -> Result<Found, ImportError> {
    let found = layout.find(choice, platform).map_err(ImportError::layout)?;
    let mut layers = Vec::new();
    for (layer, diff_id) in found.image.layers.iter().zip(found.settings.diff_ids()) {
        // Opened now, so that one that is not there is found before any work is done.
        let file = layout.open_blob(&layer.digest, layer.size).map_err(ImportError::layout)?;
        layers.push(LayerSource {
            name: layer.digest.to_string(),
            source: Mutex::new(Some(Box::new(file))),
            media_type: layer.media_type.clone(),
            digest: Some(layer.digest),
            size: Some(layer.size),
            diff_id: Some(*diff_id),
        });
    }
    Ok(Found {
        manifest: Some(found.manifest),
        config: Some(found.config),
        layers,
        name: found.name,
    })
}

pub(super) fn from_tar(input: &Input) -> Result<Found, ImportError> {
    let failed = |source| ImportError::Open { input: input.clone(), source };
    let source = open(input).map_err(failed)?;
    let size = match input {
        Input::Stdin => None,
        Input::File(path) => {
            let metadata = std::fs::metadata(path).map_err(failed)?;
            metadata.is_file().then_some(metadata.len())
        }
    };
    let layer = LayerSource {
        name: input.to_string(),
        source: Mutex::new(Some(source)),
        media_type: String::new(),
        digest: None,
        size,
        diff_id: None,
    };
    Ok(Found { manifest: None, config: None, layers: vec![layer], name: None })
}

impl Job<'_> {
    /// Reads all layers and lays them one over the other.
    pub(super) fn layers(&self, found: Found) -> Result<Made, ImportError> {
        let sizes: Vec<_> = found.layers.iter().map(|layer| layer.size).collect();
        (self.options.progress)(Event::Layers(&sizes));
        let gathered = self.gather(&found.layers)?;
        let mut reports = Vec::new();
        let mut blobs = Vec::new();
        let mut tree: Option<Builder> = None;
        let count = gathered.len();
        for (number, gathered) in (1..).zip(gathered) {
            tree = Some(gathered.layer.onto(tree).map_err(|source| ImportError::Layer {
                number,
                count,
                name: found.layers[number - 1].name.clone(),
                source: Box::new(source.into()),
            })?);
            reports.push(gathered.report);
            blobs.push(gathered.blob);
        }
        let (config_digest, config) = match found.config {
            Some(config) => config,
            None => documents::config(self.options.platform, &reports),
        };
        let (digest, manifest) = match found.manifest {
            Some(manifest) => manifest,
            None => documents::manifest(&config_digest, config.len(), &blobs),
        };
        for (digest, bytes) in [(config_digest, config), (digest, manifest)] {
            self.transaction.manifest(&digest, &bytes).map_err(ImportError::Manifest)?;
        }
        Ok(Made {
            tree: tree.unwrap_or_default().finish(),
            manifest: Some(digest),
            layers: reports,
            name: found.name,
            times: Times::default(),
        })
    }

    pub(super) fn docker(&self, input: &Input, choice: &Choice) -> Result<Found, ImportError> {
        let failed =
            |source| ImportError::Docker { input: input.clone(), source: Box::new(source) };
        let archive = Archive::open(self.archive(input)?).map_err(failed)?;
        let found = archive.find(choice).map_err(failed)?;
        let layers = found.layers.into_iter().zip(found.settings.diff_ids());
        let layers = layers.map(|(layer, diff_id)| LayerSource {
            name: diff_id.to_string(),
            media_type: String::new(),
            digest: layer.digest,
            size: Some(layer.size),
            diff_id: Some(*diff_id),
            source: Mutex::new(Some(Box::new(layer.open()))),
        });
        let layers = layers.collect();
        Ok(Found { layers, manifest: None, config: Some(found.config), name: found.name })
    }

    /// An archive as a file that can be read at any place: unpacked to a temporary one where it can not.
    fn archive(&self, input: &Input) -> Result<File, ImportError> {
        let opened = |source| ImportError::Open { input: input.clone(), source };
        let unpacked =
            |source| ImportError::Unpack { input: input.clone(), source: Box::new(source) };
        let stop = Stop::new(self.options.cancel);
        let unpack = |source: Box<dyn Read + Send>| {
            let limits = &self.options.limits;
            let decoder = Decoder::new(source, Expected::default(), limits, &stop, &|_| {});
            decoder.map_err(unpacked)
        };
        let mut decoder = match input {
            Input::Stdin => unpack(open(input).map_err(opened)?)?,
            Input::File(path) => {
                let file = File::open(path).map_err(opened)?;
                let decoder = unpack(Box::new(file.try_clone().map_err(opened)?))?;
                if !decoder.is_compressed() && file.metadata().map_err(opened)?.is_file() {
                    (&file).rewind().map_err(opened)?;
                    return Ok(file);
                }
                decoder
            }
        };
        let scratch = self.options.scratch;
        let failed = |source| ImportError::Scratch { directory: scratch.to_owned(), source };
        let mut file = tempfile::tempfile_in(scratch).map_err(failed)?;
        let mut buffer = vec![0; 256 << 10];
        loop {
            match decoder.fill(&mut buffer) {
                Ok(0) => break,
                Ok(length) => file.write_all(&buffer[..length]).map_err(failed)?,
                Err(DecodeError::Stopped) => return Err(ImportError::Cancelled),
                Err(error) => return Err(unpacked(error)),
            }
        }
        decoder.finish().map_err(unpacked)?;
        file.rewind().map_err(failed)?;
        Ok(file)
    }

    /// Reads all layers at once, as many as there are threads, the largest first.
    fn gather(&self, sources: &[LayerSource]) -> Result<Vec<Gathered>, ImportError> {
        let options = self.options;
        let readers = options.threads.get().min(sources.len());
        let budget = options.budget.saturating_sub(readers * feed::LAYER_COST).max(BATCH);
        let stop = Stop::new(options.cancel);
        let queue = Queue::new(budget, &stop);
        let totals = Totals::default();
        let shared = Shared {
            transaction: self.transaction,
            queue: &queue,
            stop: &stop,
            limits: &options.limits,
            totals: &totals,
            unsupported: options.unsupported,
            xattrs: options.xattrs,
            times: options.times,
        };
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|at| std::cmp::Reverse(sources[*at].size.unwrap_or(u64::MAX)));
        let next = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<Gathered>>> =
            sources.iter().map(|_| Mutex::new(None)).collect();
        let read = || {
            while let Some(&at) = order.get(next.fetch_add(1, Ordering::Relaxed))
                && !stop.is_set()
            {
                match self.layer(at, &sources[at], &shared) {
                    Ok(gathered) => *lock(&results[at]) = Some(gathered),
                    // Its cause is known already.
                    Err(LayerFailure::Stopped | LayerFailure::Blob(DecodeError::Stopped)) => break,
                    Err(failure) => stop.fail(ImportError::Layer {
                        number: at + 1,
                        count: sources.len(),
                        name: sources[at].name.clone(),
                        source: Box::new(failure),
                    }),
                }
            }
        };
        thread::scope(|scope| {
            let named = |name: &str| thread::Builder::new().name(name.to_owned());
            for _ in 0..options.threads.get() {
                let work = || queue.work(self.transaction);
                if let Err(error) = named("store").spawn_scoped(scope, work) {
                    stop.fail(ImportError::Thread(error));
                }
            }
            let mut reading = Vec::new();
            for _ in 0..readers {
                match named("layer").spawn_scoped(scope, read) {
                    Ok(thread) => reading.push(thread),
                    Err(error) => stop.fail(ImportError::Thread(error)),
                }
            }
            let outcomes: Vec<_> =
                reading.into_iter().map(thread::ScopedJoinHandle::join).collect();
            queue.close();
            for outcome in outcomes {
                if let Err(panic) = outcome {
                    resume_unwind(panic);
                }
            }
        });
        stop.result()?;
        let results = results.into_iter().map(|result| {
            let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
            result.expect("every layer was read, or a failure was kept")
        });
        Ok(results.collect())
    }

    /// One layer, from the store if it is there.
    fn layer(
        &self,
        at: usize,
        source: &LayerSource,
        shared: &Shared<'_>,
    ) -> Result<Gathered, LayerFailure> {
        let progress = self.options.progress;
        if let Some(diff_id) = &source.diff_id
            && let Some(stored) = self.transaction.reuse_layer(diff_id)?
            && let Some(gathered) = layer::replay(&stored, shared)?
        {
            progress(Event::Reused { layer: at });
            return Ok(gathered);
        }
        progress(Event::Started { layer: at });
        let reader = lock(&source.source).take().expect("each layer is read once");
        let wanted = Wanted {
            expected: Expected { digest: source.digest.as_ref(), size: source.size },
            media_type: &source.media_type,
            diff_id: source.diff_id.as_ref(),
        };
        let read = |bytes| progress(Event::Read { layer: at, bytes });
        let gathered = layer::unpack(reader, &wanted, shared, &read)?;
        progress(Event::Done { layer: at });
        Ok(gathered)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
