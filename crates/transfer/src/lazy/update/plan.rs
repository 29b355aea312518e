//! Plans which spans of a blob are fetched, given the contents of the store.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;

use image::digest::Digest;
use image::gzip::Start;
use image::lazy::{BlobKind, HEAD_MAX, Head, SpanPlace};
use image::tar::Segment;
use image::tar::recipe::{Operation, Reader};
use image::verity::{Algorithm, DeviceId, ObjectId};
use oci::blobs::{BlobSource, Whole};
use oci::manifest::Descriptor;
use store::{ObjectLookupError, OperationError, Store};

use super::UpdateError;
use crate::chunked::Stats;
use crate::lazy::ZSTD_WINDOW_LOG;
use crate::lazy::artifact::{BlobName, HeadPlace, UpdateBlobs};

/// Number of the blob's bytes that are requested at once and held in memory.
pub(super) const BATCH: u64 = 8 << 20;

/// Shorter gaps between ranges of the blob are fetched instead of skipped. The limit is lower than in `chunked`,
/// because one request can ask for many ranges.
const HOLE: u64 = 64 << 10;
/// The same limit for the windows' blob, in bytes.
const WINDOWS_HOLE: u64 = 16 << 10;
/// If fewer bytes can be skipped, the whole blob is fetched, and its digest is compared.
const SKIPPED_MIN: u64 = 1 << 20;
/// An update must skip at least the blob's size divided by this number.
const SKIPPED_PARTS: u64 = 10;
/// Head and recipe may have at most one byte for this number of bytes of the blob. In practice they have one for
/// fifty.
const INDEX_PARTS: u64 = 4;
/// Maximum length of a recipe in bytes. A recipe is shorter than its tar.
const RECIPE_MAX: u64 = 1 << 30;
/// Maximum length of a part in bytes of the blob, unless a single span is longer.
const PART: u64 = 4 << 20;

/// Spans that are fetched together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    /// Range of span indexes.
    pub(super) spans: Range<usize>,
    /// Range of the blob that contains the spans.
    pub(super) blob: Range<u64>,
}

/// The steps that assemble a layer's tar.
pub struct UpdatePlan<'a> {
    pub(super) store: &'a Store,
    pub(super) head: Head,
    /// The recipe as a zstd frame.
    pub(super) recipe: Vec<u8>,
    /// Ranges of the tar that are fetched, in ascending order. `parts` also contains these ranges.
    pub(super) missing: Vec<Range<u64>>,
    pub(super) parts: Vec<Part>,
    /// The groups of windows that the spans need, as zstd frames by group index.
    pub(super) frames: BTreeMap<usize, Vec<u8>>,
    stats: Stats,
}

impl std::fmt::Debug for UpdatePlan<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut plan = f.debug_struct("UpdatePlan");
        plan.field("parts", &self.parts.len()).field("stats", &self.stats).finish_non_exhaustive()
    }
}

/// Returns an upper bound for the memory of a layer's plan and its reader, in bytes.
#[must_use]
pub fn memory(blobs: &UpdateBlobs) -> u64 {
    let UpdateBlobs { head, windows, recipe } = blobs;
    let head = head.size().saturating_mul(2);
    [windows.size, recipe.size, BATCH + PART].into_iter().fold(head, u64::saturating_add)
}

/// Plans a layer. Returns `None` if a plan would save too little.
///
/// # Errors
/// [`UpdateError`] if the index cannot be used.
pub fn plan<'a>(
    store: &'a Store,
    source: &dyn BlobSource,
    layer: &Descriptor,
    diff_id: &Digest,
    blobs: &UpdateBlobs,
) -> Result<Option<UpdatePlan<'a>>, UpdateError> {
    let UpdateBlobs { head, windows, recipe } = blobs;
    let first = head.size().saturating_add(recipe.size);
    if first > layer.size / INDEX_PARTS || head.size() > HEAD_MAX {
        return Ok(None);
    }
    let head = Head::decode(&head_bytes(source, head)?);
    let head = head.map_err(OperationError::of("use", "the head of the index"))?;
    if (head.blob, head.diff_id) != (layer.digest, *diff_id)
        || head.blob_bytes != layer.size
        || head.kind.is_of_chunks()
    {
        return Err(UpdateError::Layer);
    }
    let recipe = whole(source, recipe)?;
    let recipe_of = decompressed(&recipe)
        .map_err(OperationError::of("decompress", "the recipe of the index"))?;
    let has = |object: &ObjectId, segment| has(store, object, segment);
    let missing = missing(store.algorithm(), has, &head, recipe_of)?;
    let Some(missing) = missing else { return Ok(None) };
    let parts = parts(&head, &missing);
    let fetch = parts.iter().map(|it| it.blob.end - it.blob.start).sum::<u64>();
    let skip = layer.size.saturating_sub(fetch).saturating_sub(first);
    let requests = parts.len() as u64;
    tracing::debug!(blob = %layer.digest, fetch, skip, requests, "made a plan from a recipe");
    if skip < SKIPPED_MIN.max(layer.size / SKIPPED_PARTS) {
        return Ok(None);
    }
    let frames = frames(source, &head, windows, &missing)?;
    let stats = Stats { fetch, skip: layer.size.saturating_sub(fetch), requests };
    Ok(Some(UpdatePlan { store, head, recipe, missing, parts, frames, stats }))
}

/// Fetches a blob and verifies its digest.
fn whole(source: &dyn BlobSource, name: &BlobName) -> Result<Vec<u8>, UpdateError> {
    let BlobName { digest, size } = name;
    let mut bytes = Vec::new();
    let read = source.blob(digest, *size, 0..*size).take(size + 1).read_to_end(&mut bytes);
    let object = format_args!("blob {digest} of the index");
    read.map_err(OperationError::of("read", object))?;
    if bytes.len() as u64 == *size && digest.matches(&bytes) {
        return Ok(bytes);
    }
    Err(UpdateError::Blob(Box::new(*digest)))
}

/// Fetches a head and verifies its digest. A registry that sends whole blobs instead of parts is an error, because the
/// blob is much larger than the head.
fn head_bytes(source: &dyn BlobSource, head: &HeadPlace) -> Result<Vec<u8>, UpdateError> {
    let HeadPlace { blob: BlobName { digest, size }, range, digest: expected } = head;
    let parts = source.ranges(digest, *size, std::slice::from_ref(range), Whole::Refuse);
    let object = format_args!("blob {digest} of the index");
    let bytes = parts.map_err(OperationError::of("read", object))?.concat();
    if bytes.len() as u64 == head.size() && expected.matches(&bytes) {
        return Ok(bytes);
    }
    Err(UpdateError::Blob(Box::new(*digest)))
}

/// Decompresses a recipe, up to the maximum length of a real one.
pub(super) fn decompressed(recipe: &[u8]) -> io::Result<impl Read + Send + '_> {
    let mut decoder = zstd::Decoder::with_buffer(recipe)?;
    decoder.window_log_max(ZSTD_WINDOW_LOG)?;
    Ok(decoder.take(RECIPE_MAX))
}

/// Returns the ranges of the tar whose objects the store lacks, at most one for each span. Returns `None` if the
/// recipe uses another algorithm for object ids than the store.
fn missing(
    algorithm: Algorithm,
    has: impl Fn(&ObjectId, Segment) -> bool,
    head: &Head,
    recipe: impl Read,
) -> Result<Option<Vec<Range<u64>>>, UpdateError> {
    let failed = OperationError::of("use", "the recipe of the index");
    let mut recipe = Reader::new(recipe).map_err(failed)?;
    if recipe.algorithm() != algorithm {
        return Ok(None);
    }
    let expected = head.tar_bytes;
    let mut missing: Vec<Range<u64>> = Vec::new();
    loop {
        let start = recipe.length();
        let Some(operation) = recipe.next_operation().map_err(failed)? else { break };
        let Operation::Range { object, segment } = operation else { continue };
        let is_here = has(object, segment);
        let end = start.saturating_add(segment.length);
        let (Some(first), Some(_)) = (head.span_of(start), head.span_of(end - 1)) else {
            return Err(UpdateError::Length { expected, actual: end });
        };
        if is_here {
            continue;
        }
        match missing.last_mut() {
            // The span is fetched as a whole, so the range may include bytes that the store has.
            Some(last) if head.span_of(last.end - 1) == Some(first) => last.end = end,
            _ => missing.push(start..end),
        }
    }
    let actual = recipe.length();
    if actual != expected {
        return Err(UpdateError::Length { expected, actual });
    }
    Ok(Some(missing))
}

/// Returns whether the store has these bytes of an object. An error counts as false.
fn has(store: &Store, object: &ObjectId, segment: Segment) -> bool {
    let Segment { offset, length } = segment;
    let found = || -> Result<bool, ObjectLookupError> {
        if offset == 0 {
            return store.has(object, length);
        }
        // The file is sparse, so its length is unknown.
        Ok(store.object(object)?.size() >= offset.saturating_add(length))
    };
    found().unwrap_or(false)
}

/// Returns the spans that contain each of these ranges of the tar.
fn spans<'h>(head: &'h Head, missing: &'h [Range<u64>]) -> impl Iterator<Item = Range<usize>> + 'h {
    missing.iter().map(|it| head.spans_of(it))
}

fn parts(head: &Head, missing: &[Range<u64>]) -> Vec<Part> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for spans in spans(head, missing) {
        match runs.last_mut() {
            Some(run) if head.packed(&spans).start <= head.packed(run).end.saturating_add(HOLE) => {
                run.end = run.end.max(spans.end);
            }
            _ => runs.push(spans),
        }
    }
    let mut parts: Vec<Part> = Vec::new();
    for run in runs {
        let first = parts.len();
        for span in run {
            let blob = head.packed(&(span..span + 1));
            match parts.get_mut(first..).and_then(<[Part]>::last_mut) {
                Some(part) if blob.end - part.blob.start <= PART => {
                    part.spans.end = span + 1;
                    part.blob.end = blob.end;
                }
                _ => parts.push(Part { spans: span..span + 1, blob }),
            }
        }
    }
    parts
}

/// Fetches the groups of windows that the missing ranges need.
fn frames(
    source: &dyn BlobSource,
    head: &Head,
    windows: &BlobName,
    missing: &[Range<u64>],
) -> Result<BTreeMap<usize, Vec<u8>>, UpdateError> {
    if head.windows_bytes() != windows.size {
        return Err(UpdateError::Windows);
    }
    let places: Vec<_> = head.group_places().collect();
    let mut groups: Vec<usize> = Vec::new();
    for spans in spans(head, missing) {
        for group in head.group_of(spans.start)..=head.group_of(spans.end - 1) {
            if groups.last() != Some(&group) {
                groups.push(group);
            }
        }
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for group in &groups {
        let place = &places[*group];
        match ranges.last_mut() {
            Some(last) if place.start <= last.end + WINDOWS_HOLE => last.end = place.end,
            _ => ranges.push(place.clone()),
        }
    }
    let object = format!("blob {} of the index", windows.digest);
    let failed = OperationError::of("read", &object);
    let fetched = match &ranges[..] {
        [] => return Ok(BTreeMap::new()),
        [all] if *all == (0..windows.size) => vec![whole(source, windows)?],
        some => {
            source.ranges(&windows.digest, windows.size, some, Whole::Refuse).map_err(failed)?
        }
    };
    let cut = |group: usize| {
        let place = &places[group];
        let at = ranges.partition_point(|it| it.start <= place.start).checked_sub(1)?;
        let [start, end] = [place.start, place.end].map(|it| it - ranges[at].start);
        let inside = usize::try_from(start).ok()?..usize::try_from(end).ok()?;
        Some((group, fetched.get(at)?.get(inside)?.to_vec()))
    };
    groups.into_iter().map(|group| cut(group).ok_or(UpdateError::Windows)).collect()
}

/// Makes a plan from `bytes` as a recipe, for fuzzers, and asserts that all missing ranges are fetched, and each only
/// once.
pub(super) fn exercise(bytes: &[u8]) {
    /// Distance between two spans, in bytes of the tar.
    const SPAN: u64 = 100;
    /// Maximum number of spans. More would only be slow.
    const SPANS: u64 = 1000;
    let Some((first, recipe)) = bytes.split_first() else { return };
    // The length of the recipe is set in the head, because fuzzers cannot guess it.
    let length = |recipe: &[u8]| -> Option<u64> {
        let mut reader = Reader::new(recipe).ok()?;
        while reader.next_operation().ok()?.is_some() {}
        Some(reader.length())
    };
    let tar_bytes = length(recipe).filter(|it| *it <= SPAN * SPANS).unwrap_or(SPAN * SPANS);
    let starts = (0..tar_bytes.div_ceil(SPAN)).map(|it| it * SPAN);
    let places: Vec<_> = starts
        .map(|it| SpanPlace { start: Start::Member, packed: it * 1000, unpacked: it, padding: 0 })
        .collect();
    let head = Head {
        device: DeviceId::from_bytes(&[1; 32]).expect("32 bytes are an id"),
        device_bytes: tar_bytes,
        blob: Digest::sha256(b""),
        blob_bytes: places.len() as u64 * SPAN * 1000,
        kind: BlobKind::Gzip,
        diff_id: Digest::sha256(b""),
        tar_bytes,
        tail: Vec::new(),
        units: Vec::new(),
        spans: places,
        groups: Vec::new(),
    };
    let has = |object: &ObjectId, _: Segment| object.as_bytes()[0] < *first;
    let Ok(Some(missing)) = missing(Algorithm::Sha256, has, &head, recipe) else { return };
    let is_apart = missing.windows(2).all(|it| it[0].end <= it[1].start);
    assert!(is_apart && missing.iter().all(|it| it.start < it.end), "{missing:?}");
    let parts = parts(&head, &missing);
    let apart = parts.windows(2).all(|it| it[0].spans.end <= it[1].spans.start);
    assert!(apart, "{parts:?}");
    for spans in spans(&head, &missing) {
        let has = |span: usize| parts.iter().any(|it| it.spans.contains(&span));
        assert!(spans.clone().all(has), "{spans:?} of {parts:?}");
    }
}

impl UpdatePlan<'_> {
    /// Returns statistics of the plan, without the bytes of the index.
    #[must_use]
    pub const fn stats(&self) -> Stats {
        self.stats
    }
}
