//! Reads one layer: turns its blob into tree entries, objects and a recipe.

mod erofs;

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use image::layer::{Layer, LayerError};
use image::tar::recipe::{Skeleton, object_at};
use image::tar::{Entry, Event, Kind, Reader, TarError, XattrRecords};
use image::tree::{Content, InodeId, Location, Node, Timestamp, XattrsId};
use image::verity::{Algorithm, DeviceId, Hasher, ObjectId};
use store::{Blob, Committed, DeviceDraft, DeviceKind, LayerDraft, LayerInfo, walk};

use super::decode::pipeline::{DecodedTar, Feed, Tar, decode_and_read};
use super::decode::{BlobReading, Claimed, Compression, DecodeError, Decoded, Decoder, Expected};
use super::failure::{LayerFailure, copy_failed, data_failed};
use super::limits::Limits;
use super::objects::{
    BATCH, Batch, FileDigests, FilePiece, Keep, Known, Large, PIECE, Queue, Target,
};
use super::recipe::Pending;
use super::stop::Stop;
use super::tally::{Amounts, Attempt, TallyError, Totals};
use super::{LayerIndexed, LayerReport, LostAcl, Unsupported};
use crate::lazy::{IndexParts, SpansError};
use image::digest::Digest;
use oci::manifest::is_erofs_layer;

pub(super) use erofs::is_read_as;

/// Files of up to this many bytes are stored in the image itself, as in images made from directories.
const INLINE_MAX: usize = {
    assert!(walk::COMPOSEFS_INLINE_MAX == 64);
    64
};

/// Maximum number of verbatim bytes of the tar that wait until the object ids of preceding files are known.
const WAITING_MAX: usize = 8 << 20;

/// Data that all layers of one import share.
#[derive(Clone, Copy)]
pub(super) struct Shared<'t, 'a, 'q> {
    /// Transaction to which the layer is added.
    pub(super) target: &'t Target<'q>,
    pub(super) queue: &'a Queue<'q>,
    pub(super) stop: &'a Stop<'q>,
    pub(super) limits: &'a Limits,
    pub(super) totals: &'a Totals,
    pub(super) keep: Keep,
    pub(super) unsupported: Unsupported,
    pub(super) xattrs: walk::KeptXattrs,
    pub(super) times: walk::Times,
    pub(super) reading: BlobReading,
    /// Directory for temporary files.
    pub(super) scratch: &'a Path,
}

impl Shared<'_, '_, '_> {
    /// Begins to count the content of a layer.
    fn attempt(&self) -> Attempt<'_> {
        self.totals.begin(self.limits, self.stop)
    }
}

/// A layer that was read.
#[derive(Debug)]
pub(super) struct UnpackedLayer<'t> {
    pub(super) layer: Layer,
    pub(super) report: LayerReport,
    /// The blob as read, or as recorded in the store.
    pub(super) blob: Blob,
    /// The tar that holds the data of the layer's files, if they are not stored as objects.
    pub(super) tar: Option<KeptTar<'t>>,
    /// Parts of the layer's index; only for compressed blobs that were read, if indexes are wanted.
    pub(super) index: Option<Result<IndexParts, SpansError>>,
    /// Data that was committed for this layer separately.
    pub(super) committed: Committed,
}

/// A stored tar of a layer, and the positions of its files' data.
#[derive(Debug)]
pub(super) struct KeptTar<'t> {
    pub(super) draft: DeviceDraft<'t>,
    /// In the tar's order.
    pub(super) files: Vec<TarFile>,
    /// Files whose data is not contiguous in the tar, with their sizes in bytes. They are stored as objects.
    pub(super) sparse: Vec<(ObjectId, u64)>,
}

/// The data of a file in a layer's tar.
#[derive(Debug, Clone, Copy)]
pub(super) struct TarFile {
    pub(super) object: ObjectId,
    pub(super) sha256: [u8; 32],
    /// Offset in the tar, in bytes.
    pub(super) offset: u64,
    /// Size in bytes.
    pub(super) size: u64,
}

/// A file of a layer whose tar is kept.
#[derive(Debug, Clone, Copy)]
struct KeptFile {
    /// Offset of the data in the tar, in bytes; `None` if the data is not contiguous.
    offset: Option<u64>,
    size: u64,
    /// Set once the digests are computed.
    named: Option<FileDigests>,
}

/// Known facts of a layer that is not yet read.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpectedLayer<'a> {
    pub(super) expected: Expected<'a>,
    pub(super) media_type: &'a str,
    pub(super) diff_id: Option<&'a Digest>,
    /// The blob that contains the tar, if the source is that tar instead of a blob.
    pub(super) tar_of: Option<Claimed>,
    /// The sealed device that contains the tar.
    pub(super) sealed: Option<DeviceId>,
}

impl ExpectedLayer<'_> {
    /// Returns the size of the blob in bytes, if known.
    fn packed(&self) -> Option<u64> {
        self.expected.size.or(self.tar_of.map(|it| it.size))
    }
}

/// Unpacks a blob and stores its content.
pub(super) fn decode_layer<'t>(
    source: impl Read + Send,
    wanted: &ExpectedLayer<'_>,
    shared: &Shared<'t, '_, '_>,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<UnpackedLayer<'t>, LayerFailure> {
    let attempt = shared.attempt();
    let decoder = decoder(source, wanted, shared, &attempt, progress)?;
    let copy = match (shared.keep, &wanted.sealed) {
        (Keep::Object, _) => None,
        (Keep::InTar, sealed) => {
            let find = |id| shared.target.sealed_device(id).map_err(data_failed);
            let found = sealed.as_ref().map(find).transpose()?.flatten();
            let make = || shared.target.device(DeviceKind::Tar).map_err(data_failed);
            Some(found.map_or_else(make, Ok)?)
        }
    };
    let read = match is_erofs_layer(wanted.media_type) {
        true => Gatherer::read_erofs,
        false => Gatherer::read,
    };
    let read = |feed: &mut Feed<'t>| read(feed, wanted.packed(), shared, &attempt);
    let DecodedTar { tar, outcome: gatherer, decoded, index } =
        decode_and_read(decoder, wanted.diff_id, copy, read)?;
    let gathered = gatherer.store(tar, &decoded, wanted)?;
    attempt.keep().map_err(DecodeError::Limit)?;
    Ok(UnpackedLayer { index, ..gathered })
}

/// Reads the blob of a layer that the store has, and checks the digests of the blob and its tar. Stores no data.
pub(super) fn check(
    source: impl Read + Send,
    wanted: &ExpectedLayer<'_>,
    shared: &Shared<'_, '_, '_>,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(Blob, Option<Result<IndexParts, SpansError>>), LayerFailure> {
    let attempt = shared.attempt();
    let mut decoder = decoder(source, wanted, shared, &attempt, progress)?;
    let expected = wanted.diff_id.ok_or(LayerFailure::Endless)?;
    let (diff_id, decoded, index) = if decoder.is_hashed_as(expected) {
        // The blob is the tar, so one hash is enough.
        let mut piece = vec![0; PIECE];
        while decoder.fill(&mut piece)? > 0 {}
        let decoded = decoder.finish()?;
        (decoded.digest, decoded, None)
    } else {
        let read = |mut feed: &mut Feed<'_>| {
            Ok(std::io::copy(&mut feed, &mut std::io::sink()).map_err(copy_failed)?)
        };
        let DecodedTar { tar, decoded, index, .. } =
            decode_and_read(decoder, wanted.diff_id, None, read)?;
        (tar.diff_id, decoded, index)
    };
    if diff_id != *expected {
        let (expected, actual) = (Box::new(*expected), Box::new(diff_id));
        return Err(LayerFailure::DiffId { expected, actual });
    }
    attempt.keep().map_err(DecodeError::Limit)?;
    Ok((blob(&decoded, wanted), index))
}

fn decoder<'a, R: Read>(
    source: R,
    wanted: &ExpectedLayer<'a>,
    shared: &'a Shared<'_, '_, '_>,
    attempt: &'a Attempt<'a>,
    progress: &'a (dyn Fn(u64) + Sync),
) -> Result<Decoder<'a, R>, LayerFailure> {
    let Shared { stop, limits, .. } = *shared;
    let decoder = match wanted.tar_of {
        None => Decoder::new(source, wanted.expected, shared.reading, limits, stop, progress)?,
        // Only a diff id can show that the tar is the right one.
        Some(_) if wanted.diff_id.is_none() => return Err(LayerFailure::Endless),
        Some(blob) => Decoder::of_tar(source, blob, limits, stop, progress),
    };
    Ok(decoder.counted(attempt))
}

/// Makes the record of a blob.
fn blob(decoded: &Decoded, wanted: &ExpectedLayer<'_>) -> Blob {
    let media_type = match (wanted.media_type, decoded.compression) {
        ("", Compression::None) => "application/vnd.oci.image.layer.v1.tar",
        ("", Compression::Gzip) => "application/vnd.oci.image.layer.v1.tar+gzip",
        ("", Compression::Zstd) => "application/vnd.oci.image.layer.v1.tar+zstd",
        (stated, _) => stated,
    };
    Blob {
        digest: decoded.digest,
        size: decoded.size,
        media_type: media_type.to_owned(),
        // If the tar was assembled from parts, the blob's digest is only a claim of the manifest.
        is_hashed: wanted.tar_of.is_none(),
        repositories: Vec::new(),
    }
}

/// Makes a tar layer's tree from its recipe in the store. Returns `None` if the recipe is incomplete.
pub(super) fn replay<'t>(
    stored: &store::StoredLayer,
    shared: &Shared<'t, '_, '_>,
) -> Result<Option<UnpackedLayer<'t>>, LayerFailure> {
    let info = stored.info();
    let Some(blob) = info.blobs.first() else { return Ok(None) };
    if info.blobs.iter().any(|it| is_erofs_layer(&it.media_type)) {
        return Ok(None);
    }
    let mut skipped = Vec::new();
    let attempt = shared.attempt();
    let (replay, places) = Skeleton::with_positions(stored.recipe()?)?;
    let mut reader = Reader::new(replay).taking(records(shared.xattrs));
    let mut layer = Layer::new();
    let mut lost_acls = Vec::new();
    let mut last = None;
    loop {
        if shared.stop.is_set() {
            return Err(LayerFailure::Stopped);
        }
        let next = match reader.next_entry() {
            Err(TarError::Unsupported { entry, .. }) if shared.unsupported == Unsupported::Skip => {
                skipped.push(entry);
                continue;
            }
            next => next?,
        };
        // The object is known only after the entry's content was passed.
        if let Some((position, inode)) = last.take() {
            let Some(object) = object_at(&places, position) else { return Ok(None) };
            layer.set_object(inode, &object).map_err(LayerFailure::Tree)?;
        }
        let Some(mut entry) = next else { break };
        lost_acls.extend(LostAcl::from_entry(&entry));
        count(&entry, &attempt)?;
        if let Body::Object(Some(inode)) = add(&mut layer, &mut entry, shared.times)? {
            // A file that consists of holes only has no bytes in the tar, so the recipe does not name its object.
            if entry.segments.is_empty() {
                return Ok(None);
            }
            last = Some((entry.position, inode));
        }
    }
    attempt.keep().map_err(DecodeError::Limit)?;
    let report = LayerReport {
        diff_id: info.diff_id,
        tar_bytes: info.size,
        is_reused: true,
        skipped,
        lost_acls,
        index: LayerIndexed::NotWanted,
    };
    let (blob, committed) = (blob.clone(), Committed::default());
    Ok(Some(UnpackedLayer { layer, report, blob, tar: None, index: None, committed }))
}

/// Reads a tar into a layer with object ids, and stores nothing. The default limits of imports apply.
pub(super) fn look(tar: impl Read, algorithm: Algorithm) -> Result<Layer, LayerFailure> {
    let mut reader = Reader::new(tar);
    let mut layer = Layer::new();
    let mut buffer = vec![0; PIECE];
    // A layer's tar contains the bytes of its files, so the limit on the tar also limits the files.
    let all = Limits::default();
    let limits = Limits { content_bytes: all.layer_bytes, ..all };
    let (totals, cancel) = (Totals::default(), AtomicBool::new(false));
    let stop = Stop::new(&cancel);
    let attempt = totals.begin(&limits, &stop);
    while let Some(mut entry) = reader.next_entry()? {
        count(&entry, &attempt)?;
        let body = add(&mut layer, &mut entry, walk::Times::Exact)?;
        let Body::Object(Some(inode)) = body else { continue };
        let mut hasher = Hasher::new(algorithm);
        loop {
            match entry.content.read(&mut buffer)? {
                0 => break,
                count => hasher.update(&buffer[..count]),
            }
        }
        layer.set_object(inode, &hasher.finish().into()).map_err(LayerFailure::Tree)?;
    }
    Ok(layer)
}

const fn records(xattrs: walk::KeptXattrs) -> XattrRecords {
    match xattrs {
        walk::KeptXattrs::All => XattrRecords::All,
        walk::KeptXattrs::UserOnly => XattrRecords::UserOnly,
        walk::KeptXattrs::None => XattrRecords::None,
    }
}

impl LostAcl {
    fn from_entry<R>(entry: &Entry<'_, R>) -> Option<Self> {
        entry.lost_acl.map(|line| Self { path: entry.path.to_vec(), line: line.to_vec() })
    }
}

fn count<R>(entry: &Entry<'_, R>, attempt: &Attempt<'_>) -> Result<(), LayerFailure> {
    let target = match entry.kind {
        Kind::Hardlink(target) | Kind::Symlink(target) => target.len(),
        _ => 0,
    };
    let inline = if entry.size <= INLINE_MAX as u64 { entry.size } else { 0 };
    let xattrs: usize = entry.xattrs.clone().map(|(name, value)| name.len() + value.len()).sum();
    let metadata_bytes = (entry.path.len() + target + xattrs) as u64 + inline;
    let added =
        Amounts { entries: 1, metadata_bytes, content_bytes: entry.size, ..Amounts::default() };
    attempt.add(added).map_err(|error| beyond(entry.path, error))
}

fn beyond(path: &[u8], error: TallyError) -> LayerFailure {
    match error {
        TallyError::Limit(source) => LayerFailure::Limit { entry: path.to_vec(), source },
        TallyError::Stopped => LayerFailure::Stopped,
    }
}

/// Where an entry's content is stored.
enum Body {
    /// The entry has no content.
    None,
    /// In the tree and the recipe: the bytes and their number.
    Inline([u8; INLINE_MAX], usize),
    /// In an object, for this inode if the entry is in the tree.
    Object(Option<InodeId>),
}

/// Adds an entry to the layer.
fn add<R: Read>(
    layer: &mut Layer,
    entry: &mut Entry<'_, R>,
    times: walk::Times,
) -> Result<Body, LayerFailure> {
    let (path, mut metadata) = (entry.path, entry.metadata);
    match times {
        walk::Times::Exact => {}
        walk::Times::WholeSeconds => metadata.mtime.nanoseconds = 0,
        walk::Times::Epoch => metadata.mtime = Timestamp::default(),
    }
    let mut bytes = [0; INLINE_MAX];
    let node = match entry.kind {
        Kind::Hardlink(target) => {
            layer.link(path, target)?;
            return Ok(Body::None);
        }
        Kind::Regular => match usize::try_from(entry.size) {
            Ok(size) if size <= INLINE_MAX => {
                fill(entry, &mut bytes[..size])?;
                Node::Regular(Content::Inline(&bytes[..size]))
            }
            _ => Node::Regular(Content::External {
                size: entry.size,
                object: None,
                location: Location::None,
            }),
        },
        Kind::Symlink(target) => Node::Symlink(target),
        Kind::CharDevice(number) => Node::CharDevice(number),
        Kind::BlockDevice(number) => Node::BlockDevice(number),
        Kind::Fifo => Node::Fifo,
        Kind::Directory => Node::Directory,
    };
    let xattrs = if entry.xattrs.len() == 0 {
        XattrsId::NONE
    } else {
        let xattrs = layer.xattrs(entry.xattrs.clone());
        xattrs.map_err(|source| LayerError::Entry { path: path.to_vec(), source })?
    };
    let inode = layer.entry(path, &metadata, xattrs, node)?;
    Ok(match node {
        Node::Regular(Content::Inline(inline)) => {
            let length = inline.len();
            Body::Inline(bytes, length)
        }
        Node::Regular(Content::External { .. }) => Body::Object(inode),
        _ => Body::None,
    })
}

fn fill<R: Read>(entry: &mut Entry<'_, R>, mut into: &mut [u8]) -> Result<(), TarError> {
    while !into.is_empty() {
        let read = entry.content.read(into)?;
        into = &mut into[read..];
    }
    Ok(())
}

/// A layer whose tar is being read.
struct Gatherer<'t, 'a, 'q> {
    layer: Layer,
    recipe: Pending<LayerDraft<'t>>,
    batch: Batch,
    known: Arc<Known>,
    ids: Vec<(u32, FileDigests)>,
    /// Indexed by the files' numbers; empty if the tar is not kept.
    files: Vec<KeptFile>,
    skipped: Vec<Vec<u8>>,
    lost_acls: Vec<LostAcl>,
    /// Size of the blob in bytes, if known.
    packed: Option<u64>,
    /// Total number of bytes in the holes of all files so far.
    holes: u64,
    /// Length of the current run of zero bytes since the last entry's content.
    zeros: u64,
    /// Whether a block of zeros followed the last entry, which is the tar's end marker.
    ended: bool,
    shared: &'a Shared<'t, 'a, 'q>,
    attempt: &'a Attempt<'a>,
}

impl<'t, 'a, 'q> Gatherer<'t, 'a, 'q> {
    /// Reads the tar to its end.
    fn read(
        feed: &mut Feed<'_>,
        packed: Option<u64>,
        shared: &'a Shared<'t, 'a, 'q>,
        attempt: &'a Attempt<'a>,
    ) -> Result<Self, LayerFailure> {
        let mut gatherer = Self::new(packed, shared, attempt)?;
        let mut reader = Reader::new(feed).taking(records(shared.xattrs));
        loop {
            match reader.next_event() {
                Ok(Some(Event::Verbatim(bytes))) => {
                    gatherer.look_for_end(bytes);
                    gatherer.recipe.verbatim(bytes)?;
                    gatherer.bound()?;
                }
                Ok(Some(Event::Entry(entry))) => gatherer.entry(entry)?,
                Ok(None) => break,
                Err(TarError::Unsupported { entry, .. })
                    if shared.unsupported == Unsupported::Skip =>
                {
                    gatherer.skipped.push(entry);
                }
                Err(error) => return Err(error.into()),
            }
        }
        gatherer.settle()?;
        Ok(gatherer)
    }

    fn new(
        packed: Option<u64>,
        shared: &'a Shared<'t, 'a, 'q>,
        attempt: &'a Attempt<'a>,
    ) -> Result<Self, LayerFailure> {
        let draft = shared.target.layer()?;
        let known = Arc::new(Known::default());
        Ok(Self {
            layer: Layer::new(),
            recipe: Pending::new(draft, shared.target.store().algorithm())?,
            batch: shared.queue.batch_for(shared.keep, &known),
            known,
            ids: Vec::new(),
            files: Vec::new(),
            skipped: Vec::new(),
            lost_acls: Vec::new(),
            packed,
            holes: 0,
            zeros: 0,
            ended: false,
            shared,
            attempt,
        })
    }

    /// Looks for the end marker of a tar, a block of 512 zeros. Padding is shorter.
    fn look_for_end(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.zeros = if byte == 0 { self.zeros + 1 } else { 0 };
            self.ended |= self.zeros >= 512;
        }
    }

    fn entry<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Result<(), LayerFailure> {
        (self.zeros, self.ended) = (0, false);
        if self.shared.stop.is_set() {
            return Err(LayerFailure::Stopped);
        }
        self.lost_acls.extend(LostAcl::from_entry(&entry));
        count(&entry, self.attempt)?;
        self.count_holes(&entry)?;
        match add(&mut self.layer, &mut entry, self.shared.times)? {
            Body::None => Ok(()),
            Body::Inline(bytes, length) => {
                Ok(self.recipe.inline(entry.segments, &bytes[..length])?)
            }
            Body::Object(inode) => {
                let number = self.recipe.file(entry.segments, inode);
                let keep = self.keep(&entry);
                match usize::try_from(entry.size) {
                    Ok(size) if size <= BATCH && keep == self.shared.keep => {
                        self.small(entry, size, number)
                    }
                    _ => self.large(entry, number, keep),
                }
            }
        }
    }

    /// Counts the holes of sparse files against the limits, because they are read and hashed as zeros.
    fn count_holes<R>(&mut self, entry: &Entry<'_, R>) -> Result<(), LayerFailure> {
        let in_tar = entry.segments.iter().map(|it| it.length).sum::<u64>();
        let holes = entry.size.saturating_sub(in_tar);
        self.holes = self.holes.saturating_add(holes);
        let packed = self.packed.unwrap_or(entry.position.saturating_add(in_tar));
        let checked = self.shared.limits.check_holes(packed, self.holes);
        let added = Amounts { holes, ..Amounts::default() };
        let added = checked.map_err(TallyError::Limit).and_then(|()| self.attempt.add(added));
        added.map_err(|error| beyond(entry.path, error))
    }

    /// Decides where an entry's content is stored.
    fn keep<R>(&mut self, entry: &Entry<'_, R>) -> Keep {
        let is_together =
            matches!(entry.segments, [it] if it.offset == 0 && it.length == entry.size);
        if self.shared.keep == Keep::Object {
            return Keep::Object;
        }
        let offset = is_together.then_some(entry.position);
        self.files.push(KeptFile { offset, size: entry.size, named: None });
        // The data of a sparse file is not contiguous in the tar.
        if is_together { Keep::InTar } else { Keep::Object }
    }

    fn small<R: Read>(
        &mut self,
        mut entry: Entry<'_, R>,
        size: usize,
        number: u32,
    ) -> Result<(), LayerFailure> {
        if self.used() + size > BATCH {
            self.send()?;
        }
        let start = self.used();
        fill(&mut entry, &mut self.batch.bytes[start..start + size])?;
        self.batch.files.push((number, start + size));
        Ok(())
    }

    /// Returns the number of bytes that files take in the batch.
    fn used(&self) -> usize {
        self.batch.files.last().map_or(0, |(_, end)| *end)
    }

    fn large<R: Read>(
        &mut self,
        mut entry: Entry<'_, R>,
        number: u32,
        keep: Keep,
    ) -> Result<(), LayerFailure> {
        // Workers take tasks in order, so earlier files must be queued first.
        self.send()?;
        let queue = self.shared.queue;
        let file = Large { number, size: entry.size, keep, known: Arc::clone(&self.known) };
        let pieces = queue.large(file, self.shared.target)?;
        let mut left = entry.size;
        while left > 0 {
            let used = usize::try_from(left).map_or(PIECE, |left| left.min(PIECE));
            let mut bytes = queue.buffer();
            fill(&mut entry, &mut bytes[..used])?;
            left -= used as u64;
            // The receiver is dropped early only if the import failed elsewhere.
            pieces.send(FilePiece { bytes, used }).map_err(|_gone| LayerFailure::Stopped)?;
        }
        drop(pieces);
        self.resolve()
    }

    /// Queues the batch of files.
    fn send(&mut self) -> Result<(), LayerFailure> {
        if !self.batch.files.is_empty() {
            let next = self.shared.queue.batch_for(self.shared.keep, &self.known);
            let batch = std::mem::replace(&mut self.batch, next);
            self.shared.queue.batch(batch, self.shared.target)?;
        }
        self.known.take(&mut self.ids);
        self.resolve()
    }

    /// Bounds the verbatim bytes that wait for object ids.
    fn bound(&mut self) -> Result<(), LayerFailure> {
        if self.recipe.waiting() > WAITING_MAX {
            self.settle()?;
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<(), LayerFailure> {
        self.send()?;
        while !self.recipe.is_settled() {
            if self.shared.stop.is_set() {
                return Err(LayerFailure::Stopped);
            }
            self.known.wait(self.shared.stop, &mut self.ids);
            self.resolve()?;
        }
        Ok(())
    }

    fn resolve(&mut self) -> Result<(), LayerFailure> {
        for (number, named) in &self.ids {
            if let Some(file) = self.files.get_mut(*number as usize) {
                file.named = Some(*named);
            }
        }
        let layer = &mut self.layer;
        self.recipe.resolve(&mut self.ids, |inode, object| {
            layer.set_object(inode, object).map_err(LayerFailure::Tree)
        })
    }

    /// Stores the recipe of a layer whose blob was read to its end.
    fn store(
        self,
        tar: Tar<'t>,
        decoded: &Decoded,
        wanted: &ExpectedLayer<'_>,
    ) -> Result<UnpackedLayer<'t>, LayerFailure> {
        let Tar { diff_id, length, copy } = tar;
        let diff_id = &diff_id;
        // Without a digest to compare, a truncated input could be imported as a smaller image.
        let is_whole = self.ended || decoded.is_whole_gzip && length > 0;
        if wanted.diff_id.is_none() && wanted.expected.digest.is_none() && !is_whole {
            return Err(LayerFailure::Endless);
        }
        if let Some(expected) = wanted.diff_id.filter(|expected| *expected != diff_id) {
            let (expected, actual) = (Box::new(*expected), Box::new(*diff_id));
            return Err(LayerFailure::DiffId { expected, actual });
        }
        let (draft, objects) = self.recipe.finish()?;
        let blob = blob(decoded, wanted);
        draft.finish(LayerInfo {
            diff_id: *diff_id,
            size: length,
            blobs: vec![blob.clone()],
            objects,
        })?;
        let report = LayerReport {
            diff_id: *diff_id,
            tar_bytes: length,
            is_reused: false,
            skipped: self.skipped,
            lost_acls: self.lost_acls,
            index: LayerIndexed::NotWanted,
        };
        let (mut files, mut sparse) = (Vec::new(), Vec::new());
        for KeptFile { offset, size, named } in self.files {
            let FileDigests { object, sha256 } = named.expect("all are settled");
            match offset.zip(sha256) {
                Some((offset, sha256)) => files.push(TarFile { object, sha256, offset, size }),
                None => sparse.push((object, size)),
            }
        }
        let tar = copy.map(|draft| KeptTar { draft, files, sparse });
        let (layer, committed) = (self.layer, Committed::default());
        Ok(UnpackedLayer { layer, report, blob, tar, index: None, committed })
    }
}
