//! Finds the layers of an image in a source and reads them in parallel.

use std::fs::File;
use std::io::{Read, Seek as _, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use image::layer::{Layer, LayerError};
use image::tree::Builder;
use store::parallel::{self, thread_failed};
use store::{Committed, Form, LayerInfo};

use super::decode::pipeline;
use super::decode::read_index::ReadIndex;
use super::decode::{BlobReading, Claimed, Decoder, Expected};
use super::documents;
use super::failure::{LayerFailure, commit_failed};
use super::from_store::reuse::Here;
use super::layer::{self, ExpectedLayer, Shared, UnpackedLayer};
use super::objects::{BATCH, Keep, Queue};
use super::stop::Stop;
use super::tally::Totals;
use super::{
    DecodeError, Durable, ImportContext, ImportError, ImportOptions, ImportRun, Limits, Times,
    UncommittedImage, platform,
};
use crate::chunked::Tar;
use crate::progress::Event;
use crate::spool::Spool;
use image::digest::Digest;
use oci::blobs::BlobSource as _;
use oci::docker::Archive;
use oci::files::Stream;
use oci::layout::{Layout, LayoutImage};
use oci::source::{Choice, Input};

/// The source of a layer's blob.
pub(crate) trait LayerBlob: Send {
    /// Opens the blob at its first byte. `failure` is the reason why the last attempt failed. Returns `None` if there
    /// is no further way to get the blob.
    fn open(&mut self, failure: Option<&LayerFailure>) -> Option<Box<dyn Read + Send + '_>>;

    /// Opens the tar that is in the blob, if this is possible without reading the whole blob. It is called once,
    /// before [`open`](Self::open). The caller compares the tar's diff id. If it differs, the caller reads the blob.
    /// An error fails the layer.
    fn open_tar(&mut self) -> Result<Option<Tar<'_>>, LayerFailure> {
        Ok(None)
    }

    /// Called once the layer was read, from the blob or otherwise, and its digests match. With
    /// [`Durable::EachLayer`] the layer is already in the store.
    fn done(&mut self) {}
}

/// A reader that can be opened once.
pub(super) struct Once<'a>(Option<Box<dyn Read + Send + 'a>>);

impl<'a> Once<'a> {
    pub(super) fn new(reader: impl Read + Send + 'a) -> Self {
        Self(Some(Box::new(reader)))
    }
}

impl LayerBlob for Once<'_> {
    fn open(&mut self, _: Option<&LayerFailure>) -> Option<Box<dyn Read + Send + '_>> {
        self.0.take()
    }
}

/// A layer to read.
pub(crate) struct LayerSource<'a> {
    /// Name for messages.
    pub(crate) name: String,
    /// Locked by the thread that reads the layer.
    pub(crate) source: Mutex<Box<dyn LayerBlob + 'a>>,
    pub(crate) media_type: String,
    pub(crate) digest: Option<Digest>,
    pub(crate) size: Option<u64>,
    pub(crate) diff_id: Option<Digest>,
    /// Proof that the image may use the store's copy of the layer.
    pub(crate) title: LayerProof,
    /// Whether the blob itself is needed: it is read even if the store has the layer.
    pub(crate) is_wanted: bool,
}

/// Proof that an image may use a layer of the store. The diff id in its config proves nothing, because anyone who
/// knows a diff id can write it down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerProof {
    /// The layer belongs to an image of the store from which this image is made.
    Own,
    /// The manifest names a blob, [`LayerSource::digest`], that is known to contain the layer.
    Blob,
    /// There is no proof, so the layer's bytes are read.
    Bytes,
}

impl LayerSource<'_> {
    fn may_have(&self, layer: &LayerInfo) -> bool {
        match self.title {
            LayerProof::Own => true,
            LayerProof::Blob => self.digest.is_some_and(|blob| layer.is_in(&blob)),
            LayerProof::Bytes => false,
        }
    }
}

fn once<'a>(reader: impl Read + Send + 'a) -> Mutex<Box<dyn LayerBlob + 'a>> {
    Mutex::new(Box::new(Once::new(reader)))
}

/// The digest and the bytes of a manifest or config.
pub type Document = (Digest, Vec<u8>);

/// An image that was found in a source.
pub(crate) struct SourceImage<'a> {
    /// The manifest, or `None` if the import has to make one.
    pub(crate) manifest: Option<Document>,
    /// The config, or `None` if the import has to make one.
    pub(crate) config: Option<Document>,
    pub(crate) layers: Vec<LayerSource<'a>>,
    /// Name of the image in the source.
    pub(crate) name: Option<String>,
}

pub(super) fn from_layout<'a>(
    layout: &'a Layout,
    found: LayoutImage,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<SourceImage<'a>, ImportError> {
    platform::check(&found.settings, environment, options)
        .map_err(|it| ImportError::failed("import", "the image", it))?;
    let mut layers = Vec::new();
    for (layer, diff_id) in found.image.layers.iter().zip(found.settings.diff_ids()) {
        // All blobs are looked up before any work is done. A file that changes later fails its digest check.
        let found = layout.open_blob(&layer.digest, layer.size);
        found.map_err(|source| match layer.is_foreign() {
            true => {
                let object = format!("layer {}, from the layout", layer.title());
                ImportError::failed("import", object, source)
            }
            false => ImportError::layout(source),
        })?;
        layers.push(LayerSource {
            name: layer.title(),
            source: once(layout.blob(&layer.digest, layer.size, 0..layer.size)),
            media_type: layer.media_type.clone(),
            digest: Some(layer.digest),
            size: Some(layer.size),
            diff_id: Some(*diff_id),
            title: LayerProof::Blob,
            is_wanted: false,
        });
    }
    Ok(SourceImage {
        manifest: Some(found.manifest),
        config: Some(found.config),
        layers,
        name: found.name,
    })
}

pub(super) fn from_tar<'a>(
    input: &Input,
    cancel: &'a AtomicBool,
) -> Result<SourceImage<'a>, ImportError> {
    let failed = |source| ImportError::open(input, source);
    let stream = Stream::open(input, cancel).map_err(failed)?;
    // If standard input is a file, another process may have read its first bytes.
    let size = stream.size().filter(|_| *input != Input::Stdin);
    Ok(from_reader(input.to_string(), stream, size))
}

/// Makes an image of one layer, whose tar a reader returns. `name` is for messages.
pub(super) fn from_reader<'a>(
    name: String,
    tar: impl Read + Send + 'a,
    size: Option<u64>,
) -> SourceImage<'a> {
    let layer = LayerSource {
        name,
        source: once(tar),
        media_type: String::new(),
        digest: None,
        size,
        diff_id: None,
        title: LayerProof::Bytes,
        is_wanted: false,
    };
    SourceImage { manifest: None, config: None, layers: vec![layer], name: None }
}

/// Applies a layer to the layers below it, and stops when the import is cancelled.
pub(super) fn onto(
    layer: Layer,
    below: Option<Builder>,
    cancel: &AtomicBool,
    failed: impl FnOnce(LayerFailure) -> ImportError,
) -> Result<Builder, ImportError> {
    let is_cancelled = || cancel.load(Ordering::Relaxed);
    layer.onto_until(below, &is_cancelled).map_err(|error| match error {
        LayerError::Stopped => ImportError::Cancelled,
        error => failed(error.into()),
    })
}

impl ImportRun<'_> {
    /// Reads all layers and applies them in order.
    pub(super) fn layers(&self, found: &SourceImage<'_>) -> Result<UncommittedImage, ImportError> {
        let sizes: Vec<_> = found.layers.iter().map(|layer| layer.size).collect();
        (self.environment.progress)(Event::Layers(&sizes));
        let stop = Stop::new(self.environment.cancel);
        let totals = Totals::default();
        let gathered = self.gather(&found.layers, 0, &stop, &totals)?;
        let names: Vec<_> = found.layers.iter().map(|it| it.name.as_str()).collect();
        let (manifest, config) = (found.manifest.clone(), found.config.clone());
        self.lay(gathered, &names, manifest, config, found.name.clone())
    }

    /// Applies layers in order, and stores the given documents of their image or makes them.
    pub(super) fn lay(
        &self,
        mut gathered: Vec<UnpackedLayer<'_>>,
        names: &[&str],
        manifest: Option<Document>,
        config: Option<Document>,
        name: Option<String>,
    ) -> Result<UncommittedImage, ImportError> {
        let tars = gathered.iter_mut().map(|it| Some((it.report.diff_id, it.tar.take()?)));
        let tars: Vec<_> = tars.collect();
        let read: Vec<_> = gathered
            .iter_mut()
            .map(|it| ReadIndex { blob: it.blob.clone(), parts: it.index.take() })
            .collect();
        let mut reports = Vec::new();
        let mut blobs = Vec::new();
        let mut committed = Committed::default();
        let mut tree: Option<Builder> = None;
        let count = gathered.len();
        for (number, gathered) in (1..).zip(gathered) {
            let failed = |failure| ImportError::Layer {
                number,
                count,
                name: names[number - 1].to_owned(),
                source: Box::new(failure),
            };
            tree = Some(onto(gathered.layer, tree, self.environment.cancel, failed)?);
            reports.push(gathered.report);
            blobs.push(gathered.blob);
            committed += gathered.committed;
        }
        let (config_digest, config) = match config {
            Some(config) => config,
            None => documents::config(self.options.platform, &reports, self.options.changes),
        };
        let (digest, manifest) = match manifest {
            Some(manifest) => manifest,
            None => documents::manifest(&config_digest, config.len(), &blobs),
        };
        for (digest, bytes) in [(config_digest, config), (digest, manifest)] {
            self.transaction.manifest(&digest, &bytes).map_err(ImportError::manifest)?;
        }
        let tree = tree.unwrap_or_default().finish();
        let diff_ids: Vec<_> = reports.iter().map(|it| it.diff_id).collect();
        let written = self.native(&tree, &diff_ids, tars)?;
        if let Some(written) = written.as_ref().filter(|_| self.options.index) {
            self.put_indexes(read, &mut reports, &written.devices)?;
        }
        Ok(UncommittedImage {
            tree,
            written,
            manifest: Some(digest),
            layers: reports,
            name,
            committed,
            times: Times::default(),
        })
    }

    pub(super) fn docker(
        &self,
        input: &Input,
        choice: &Choice,
    ) -> Result<SourceImage<'static>, ImportError> {
        let failed =
            |source| ImportError::failed("import from", format!("the archive {input}"), source);
        let archive = Archive::open(self.archive(input)?).map_err(failed)?;
        let found = archive.find_image(choice).map_err(failed)?;
        platform::check(&found.settings, &self.environment, &self.options)
            .map_err(|it| ImportError::failed("import", "the image", it))?;
        let layers = found.layers.into_iter().zip(found.settings.diff_ids());
        let layers = layers.map(|(layer, diff_id)| LayerSource {
            name: diff_id.to_string(),
            media_type: String::new(),
            digest: layer.digest,
            size: Some(layer.size),
            diff_id: Some(*diff_id),
            // An archive has no manifest, and a file name in it does not prove the digest of the file.
            title: LayerProof::Bytes,
            is_wanted: false,
            source: once(layer.open()),
        });
        let layers = layers.collect();
        Ok(SourceImage { layers, manifest: None, config: Some(found.config), name: found.name })
    }

    /// Opens an archive as a seekable file. Unpacks it to a temporary file if it is compressed or not a regular file.
    fn archive(&self, input: &Input) -> Result<File, ImportError> {
        open_archive(input, &self.options.limits, &self.environment)
    }

    /// Reads layers in parallel, at most one per thread, the largest first. `before` is the number of layers that
    /// were read earlier; the numbers of these layers continue from it.
    pub(super) fn gather<'t>(
        &'t self,
        sources: &[LayerSource<'_>],
        before: usize,
        stop: &'t Stop<'t>,
        totals: &Totals,
    ) -> Result<Vec<UnpackedLayer<'t>>, ImportError> {
        let Self { environment, options, .. } = self;
        let readers = environment.threads.get().min(sources.len());
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|at| std::cmp::Reverse(sources[*at].size.unwrap_or(u64::MAX)));
        let largest = order.iter().take(readers).map(|at| sources[*at].size.unwrap_or(0));
        let indexes = largest.map(|it| if options.index { pipeline::index_cost(it) } else { 0 });
        let taken = indexes.fold(readers * pipeline::LAYER_COST, usize::saturating_add);
        let budget = environment.budget.saturating_sub(taken).max(BATCH);
        let queue = Queue::new(budget, stop);
        let shared = Shared {
            target: &self.transaction,
            queue: &queue,
            stop,
            limits: &options.limits,
            totals,
            keep: match options.form {
                Form::Objects => Keep::Object,
                Form::Packed | Form::Tar => Keep::InTar,
            },
            unsupported: options.unsupported,
            xattrs: options.xattrs,
            times: options.times,
            reading: if options.index { BlobReading::Indexing } else { BlobReading::Plain },
            scratch: environment.scratch,
        };
        let read = |number: usize| {
            let at = order[number];
            if stop.is_set() {
                return Err(ImportError::Cancelled);
            }
            self.layer(before + at, &sources[at], &shared).map_err(|failure| {
                // If a layer was stopped, another failure is the cause, and that failure is already recorded.
                if !matches!(
                    failure,
                    LayerFailure::Stopped | LayerFailure::Blob(DecodeError::Stopped)
                ) {
                    stop.fail(ImportError::Layer {
                        number: before + at + 1,
                        count: before + sources.len(),
                        name: sources[at].name.clone(),
                        source: Box::new(failure),
                    });
                }
                ImportError::Cancelled
            })
        };
        let read = thread::scope(|scope| {
            for _ in 0..environment.threads.get() {
                let named = thread::Builder::new().name("store".to_owned());
                if let Err(error) = named.spawn_scoped(scope, || queue.work()) {
                    stop.fail(thread_failed(error).into());
                }
            }
            // The threads end only when the queue is closed, and the scope waits for them even on a panic.
            let all = || parallel::each("layer", readers, order.len(), read);
            let read = catch_unwind(AssertUnwindSafe(all));
            queue.close();
            read.unwrap_or_else(|panic| resume_unwind(panic))
        });
        // Only the first failure is reported, because later ones are its consequences.
        let read = read.map_err(|error| stop.fail(error));
        stop.result()?;
        let read = read.expect("a failure was kept");
        let mut all: Vec<_> = order.into_iter().zip(read).collect();
        all.sort_unstable_by_key(|(at, _)| *at);
        Ok(all.into_iter().map(|(_, gathered)| gathered).collect())
    }

    /// Gets one layer. Uses the layer in the store if the image may use it; otherwise reads the layer from its source.
    fn layer<'t>(
        &self,
        at: usize,
        source: &LayerSource<'_>,
        shared: &Shared<'t, '_, '_>,
    ) -> Result<UnpackedLayer<'t>, LayerFailure> {
        let progress = self.environment.progress;
        let known = match &source.diff_id {
            Some(diff_id) => self.transaction.reuse_layer(diff_id)?,
            None => None,
        };
        let lacks_index = self.lacks_index(source)?;
        let is_named = known.as_ref().is_some_and(|layer| source.may_have(layer.info()));
        let is_read_for_index = lacks_index && self.options.index_again;
        if !source.is_wanted
            && !is_read_for_index
            && is_named
            && let Some(layer) = &known
            && let Some(gathered) = self.stored(layer, &source.media_type, shared)?
        {
            progress(Event::Reused { layer: at });
            return Ok(gathered);
        }
        progress(Event::Started { layer: at });
        shared.totals.add_blob(source.size.unwrap_or(0));
        // If the tree is known, the blob only has to be compared.
        let mut here = match known {
            Some(layer) => self.here(layer, &source.media_type, shared)?,
            None => None,
        };
        let mut blob = lock(&source.source);
        let wanted = ExpectedLayer {
            expected: Expected { digest: source.digest.as_ref(), size: source.size },
            media_type: &source.media_type,
            diff_id: source.diff_id.as_ref(),
            tar_of: None,
            sealed: None,
        };
        // An index needs the whole blob.
        if !lacks_index
            && let Some(gathered) = self.parts(at, &mut **blob, &wanted, &mut here, shared)?
        {
            self.read(&mut **blob);
            progress(Event::Done { layer: at });
            return Ok(gathered);
        }
        let read = |bytes| progress(Event::Read { layer: at, bytes });
        let mut failure = None;
        loop {
            let Some(reader) = blob.open(failure.as_ref()) else {
                return Err(failure.expect("each layer is readable once"));
            };
            if failure.is_some() {
                progress(Event::Again { layer: at });
            }
            match self.take(reader, &wanted, &mut here, shared, &read) {
                Ok(gathered) => {
                    self.read(&mut **blob);
                    progress(Event::Done { layer: at });
                    return Ok(gathered);
                }
                Err(error) if shared.stop.is_set() || !error.is_of_the_blob() => return Err(error),
                Err(error) => failure = Some(error),
            }
        }
    }

    /// Calls [`LayerBlob::done`] for a layer that was read.
    fn read(&self, blob: &mut dyn LayerBlob) {
        // Devices are committed only when all layers are complete.
        if self.options.form == Form::Objects {
            blob.done();
        }
    }

    /// Reads a layer by downloading only a part of it. Returns `None` if this is impossible or if the result is wrong.
    fn parts<'t>(
        &self,
        at: usize,
        blob: &mut dyn LayerBlob,
        wanted: &ExpectedLayer<'_>,
        here: &mut Option<Here<'t>>,
        shared: &Shared<'t, '_, '_>,
    ) -> Result<Option<UnpackedLayer<'t>>, LayerFailure> {
        let progress = self.environment.progress;
        let Expected { digest: Some(digest), size: Some(size) } = wanted.expected else {
            return Ok(None);
        };
        // Only the diff id proves that the tar is the right one, and only the manifest has the blob's media type.
        if wanted.diff_id.is_none() || wanted.media_type.is_empty() {
            return Ok(None);
        }
        let Some(tar) = blob.open_tar()? else { return Ok(None) };
        let Tar { reader, sealed, skipped, fetched } = tar;
        if skipped > 0 {
            progress(Event::Skipped { layer: at, bytes: skipped });
        }
        let told = AtomicU64::new(0);
        let read = |_| {
            let now = fetched.load(Ordering::Relaxed);
            let bytes = now.saturating_sub(told.swap(now, Ordering::Relaxed));
            progress(Event::Read { layer: at, bytes });
        };
        let tar_of = Some(Claimed { digest: *digest, size });
        let wanted = ExpectedLayer { tar_of, sealed, ..*wanted };
        match self.take(reader, &wanted, here, shared, &read) {
            Ok(gathered) => Ok(Some(gathered)),
            Err(error) if shared.stop.is_set() || !error.is_of_parts() => Err(error),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(blob = %digest, error, "downloading the whole blob");
                progress(Event::Again { layer: at });
                Ok(None)
            }
        }
    }

    /// Unpacks one blob into the transaction of all layers, or into a separate transaction.
    pub(super) fn store_layer<'t>(
        &self,
        reader: impl Read + Send,
        wanted: &ExpectedLayer<'_>,
        shared: &Shared<'t, '_, '_>,
        read: &(dyn Fn(u64) + Sync),
    ) -> Result<UnpackedLayer<'t>, LayerFailure> {
        match (self.options.durable, shared.keep) {
            // Devices are made from all tars, once all of these are complete.
            (Durable::Together, _) | (Durable::EachLayer, Keep::InTar) => {
                layer::decode_layer(reader, wanted, shared, read)
            }
            (Durable::EachLayer, Keep::Object) => {
                // The layer of the inner transaction must be kept until the image of all layers is committed.
                let own = shared.target.begin_inner().map_err(commit_failed)?;
                let own = Arc::new(own);
                let shared = Shared { target: &own, ..*shared };
                let (layer, report, blob) = {
                    let UnpackedLayer { layer, report, blob, .. } =
                        layer::decode_layer(reader, wanted, &shared, read)?;
                    (layer, report, blob)
                };
                // A worker drops its reference before it reports the object id, and all ids have been received.
                let own = Arc::into_inner(own).expect("all files of the layer are stored");
                let committed = own.commit().map_err(commit_failed)?;
                Ok(UnpackedLayer { layer, report, blob, tar: None, index: None, committed })
            }
        }
    }
}

/// Calls [`LayerBlob::done`] for all layers of an image that is in the store, if devices hold its data (see
/// [`ImportRun::read`]).
#[cfg(any(test, feature = "registry"))]
pub(super) fn kept(found: &SourceImage<'_>, form: Form) {
    if form != Form::Objects {
        found.layers.iter().for_each(|layer| lock(&layer.source).done());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens an archive as a seekable file. Unpacks it to a temporary file if it is compressed or not a regular file.
///
/// # Errors
/// [`ImportError`] if the archive cannot be read or unpacked.
pub fn open_archive(
    input: &Input,
    limits: &Limits,
    environment: &ImportContext<'_>,
) -> Result<File, ImportError> {
    let opened = |source| ImportError::open(input, source);
    let unpacked = |source| undecoded(input, source);
    let stop = Stop::new(environment.cancel);
    let stream = Stream::open(input, environment.cancel).map_err(opened)?;
    let file = match (input, stream.size()) {
        (Input::File(_), Some(_)) => Some(stream.try_clone().map_err(opened)?),
        // If standard input is a file, another process may have read its first bytes.
        _ => None,
    };
    let decoder =
        Decoder::new(stream, Expected::default(), BlobReading::Plain, limits, &stop, &|_| {});
    let mut decoder = decoder.map_err(unpacked)?;
    if let Some(mut file) = file.filter(|_| !decoder.is_compressed()) {
        file.rewind().map_err(opened)?;
        return Ok(file);
    }
    let scratch = environment.scratch;
    let failed = |source| {
        let object = format!("a temporary file in {}", scratch.display());
        ImportError::failed("write", object, source)
    };
    let mut spool = Spool::new(scratch).map_err(failed)?;
    let mut buffer = vec![0; 256 << 10];
    loop {
        match decoder.fill(&mut buffer) {
            Ok(0) => break,
            Ok(length) => spool.write_all(&buffer[..length]).map_err(failed)?,
            Err(error) => return Err(unpacked(error)),
        }
    }
    decoder.finish().map_err(unpacked)?;
    let mut file = spool.into_file();
    file.rewind().map_err(failed)?;
    Ok(file)
}

fn undecoded(input: &Input, source: DecodeError) -> ImportError {
    match source {
        DecodeError::Stopped => ImportError::Cancelled,
        source => ImportError::failed("unpack", format!("the archive {input}"), source),
    }
}

/// Lets `read` read an archive once, from its first byte on, unpacked if it is compressed.
///
/// # Errors
/// [`ImportError`] if the archive cannot be opened. Later errors are those of `read`.
pub fn read_archive<T>(
    input: &Input,
    limits: &Limits,
    cancel: &AtomicBool,
    read: impl FnOnce(&mut dyn Read) -> T,
) -> Result<T, ImportError> {
    let stop = Stop::new(cancel);
    let stream = Stream::open(input, cancel).map_err(|source| ImportError::open(input, source))?;
    let decoder =
        Decoder::new(stream, Expected::default(), BlobReading::Plain, limits, &stop, &|_| {});
    let decoder = decoder.map_err(|source| undecoded(input, source))?;
    Ok(read(&mut UnpackedArchive(decoder)))
}

/// The bytes of an archive, unpacked.
struct UnpackedArchive<'a, R>(Decoder<'a, R>);

impl<R: Read> Read for UnpackedArchive<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.0.read_part(into).map_err(std::io::Error::other)
    }
}
