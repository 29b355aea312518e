//! Plans, which define the parts of a layer to download and the parts that come from the store.

use std::ops::Range;
use std::sync::Arc;

use store::{Chunk, ChunkKey, ObjectPart, Store};

use super::Toc;
use super::toc::{Contents, Format};
use image::digest::Digest;

/// Thresholds that decide whether a plan is worthwhile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Costs {
    /// Runs of bytes that are shorter than this are downloaded instead of skipped, because another request takes as
    /// long.
    pub(super) hole: u64,
    /// If fewer bytes can be skipped, the whole blob is downloaded, and its digest is compared.
    pub(super) skipped: u64,
}

impl Default for Costs {
    /// `hole` is the amount that 100 Mbit/s transfer in the 20 ms of a request.
    fn default() -> Self {
        Self { hole: 256 << 10, skipped: 1 << 20 }
    }
}

/// Minimum to skip, as a part of the blob: one in this many bytes.
const SKIPPED_PARTS: u64 = 10;

/// Maximum memory for the tar headers of all plans of one pull, in bytes.
const BYTES_MAX: usize = 32 << 20;

/// Statistics of a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of the blob to download, without its table of contents.
    pub fetch: u64,
    /// Bytes of the blob that come from the store.
    pub skip: u64,
    /// Number of parts to download.
    pub requests: u64,
}

/// One step of assembling the tar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Download this range of the blob and decompress it.
    Fetch(Range<u64>),
    /// The store has the contents of this range of the blob.
    Known { blob: Range<u64>, chunk: Option<Known>, gap: Option<Range<usize>> },
}

/// A chunk of a file, and its location in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) key: ChunkKey,
    pub(super) place: ChunkPlace,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ChunkPlace {
    Object(ObjectPart),
    /// A range of [`AssemblyPlan::bytes`].
    Bytes(Range<usize>),
}

/// The steps that assemble a layer's tar.
pub struct AssemblyPlan<'a> {
    pub(super) toc: Arc<Toc>,
    pub(super) store: &'a Store,
    pub(super) steps: Vec<Step>,
    /// Tar headers and small files, shared by all plans of one pull.
    pub(super) bytes: Arc<Vec<u8>>,
    stats: Stats,
}

impl std::fmt::Debug for AssemblyPlan<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut plan = f.debug_struct("AssemblyPlan");
        plan.field("steps", &self.steps.len()).field("stats", &self.stats).finish_non_exhaustive()
    }
}

/// Makes a plan for each table that saves enough. The store's list of chunks is read once for all tables. At most
/// `room` bytes of tar headers are kept in memory.
#[must_use]
pub fn plans<'a>(
    store: &'a Store,
    tocs: &[Arc<Toc>],
    room: usize,
) -> Vec<Option<AssemblyPlan<'a>>> {
    plans_for(store, tocs, room, Costs::default())
}

pub(super) fn plans_for<'a>(
    store: &'a Store,
    tocs: &[Arc<Toc>],
    room: usize,
    costs: Costs,
) -> Vec<Option<AssemblyPlan<'a>>> {
    let (found, bytes) = find_pieces(tocs, store, room.min(BYTES_MAX));
    let bytes = Arc::new(bytes);
    tocs.iter().map(|toc| toc.plan(store, &found, &bytes, costs)).collect()
}

impl Toc {
    fn plan<'a>(
        self: &Arc<Self>,
        store: &'a Store,
        found: &ChunkPlaces,
        bytes: &Arc<Vec<u8>>,
        costs: Costs,
    ) -> Option<AssemblyPlan<'a>> {
        let spans = spans(&self.contents, self.format);
        let known = |span: &Span| {
            let chunk = match span.chunk {
                None => None,
                Some(at) => {
                    let piece = &self.contents.pieces[at];
                    Some(Known { key: piece.key?, place: found.get(piece.key?, piece.length)? })
                }
            };
            let gap = match span.gap {
                None => None,
                Some(key) => Some(found.bytes(key?)?),
            };
            Some(Step::Known { blob: span.blob.clone(), chunk, gap })
        };
        let mut steps = Vec::new();
        let mut run = Vec::new();
        for span in &spans {
            match known(span) {
                Some(step) => run.push(step),
                None => {
                    flush(&mut steps, &mut run, costs.hole);
                    fetch(&mut steps, span.blob.clone());
                }
            }
        }
        flush(&mut steps, &mut run, costs.hole);
        let mut stats = Stats::default();
        for step in &steps {
            match step {
                Step::Fetch(range) => {
                    stats.fetch += range.end - range.start;
                    stats.requests += 1;
                }
                Step::Known { blob, .. } => stats.skip += blob.end - blob.start,
            }
        }
        let enough = costs.skipped.max(self.size / SKIPPED_PARTS);
        tracing::debug!(?stats, enough, "made a plan from a table of contents");
        steps.shrink_to_fit();
        (stats.skip >= enough).then(|| AssemblyPlan {
            toc: Arc::clone(self),
            store,
            steps,
            bytes: Arc::clone(bytes),
            stats,
        })
    }
}

/// Looks up all file pieces and gaps of these layers in the store.
fn find_pieces(tocs: &[Arc<Toc>], store: &Store, room: usize) -> (ChunkPlaces, Vec<u8>) {
    let mut keys = Vec::new();
    for contents in tocs.iter().map(|toc| &toc.contents) {
        keys.extend(contents.pieces.iter().filter_map(|piece| piece.key));
        keys.extend(contents.files.iter().filter_map(|file| file.gap).chain([contents.first]));
    }
    keys.sort_unstable();
    keys.dedup();
    let mut places: Vec<Option<ChunkPlace>> = vec![None; keys.len()];
    let mut bytes = Vec::new();
    if keys.is_empty() {
        return (ChunkPlaces { keys, places }, bytes);
    }
    let outcome = store.downloads.find_chunks(&keys, &mut |at, chunk| {
        if places[at].is_some() {
            return;
        }
        places[at] = match chunk {
            Chunk::Object(part) => Some(ChunkPlace::Object(part)),
            Chunk::Bytes(more) if bytes.len() + more.len() <= room => {
                let start = bytes.len();
                bytes.extend_from_slice(&more);
                Some(ChunkPlace::Bytes(start..bytes.len()))
            }
            Chunk::Bytes(_) => None,
        };
    });
    if let Err(error) = outcome {
        tracing::debug!(%error, "cannot look up chunks in the store");
    }
    (ChunkPlaces { keys, places }, bytes)
}

impl AssemblyPlan<'_> {
    /// Returns statistics of the plan.
    #[must_use]
    pub const fn stats(&self) -> Stats {
        self.stats
    }

    /// Returns the memory that the plan takes, in bytes, apart from the tar headers, which all plans share.
    #[must_use]
    pub fn memory(&self) -> usize {
        size_of_val(&self.steps[..])
    }

    /// Returns the length in bytes of the tar headers, which all plans of one pull share.
    #[must_use]
    pub fn shared_memory(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether bytes from the store have the SHA-256 `key`.
    pub(super) fn matches(key: &ChunkKey, bytes: &[u8]) -> bool {
        Digest::sha256(bytes).as_bytes() == key.0
    }
}

/// The locations of the chunks in the store.
struct ChunkPlaces {
    keys: Vec<ChunkKey>,
    places: Vec<Option<ChunkPlace>>,
}

impl ChunkPlaces {
    fn place(&self, key: ChunkKey) -> Option<&ChunkPlace> {
        self.places[self.keys.binary_search(&key).ok()?].as_ref()
    }

    fn get(&self, key: ChunkKey, expected: u64) -> Option<ChunkPlace> {
        let place = self.place(key)?;
        let length = match place {
            ChunkPlace::Object(part) => part.length,
            ChunkPlace::Bytes(range) => range.len() as u64,
        };
        (length == expected).then(|| place.clone())
    }

    fn bytes(&self, key: ChunkKey) -> Option<Range<usize>> {
        match self.place(key)? {
            ChunkPlace::Bytes(range) => Some(range.clone()),
            ChunkPlace::Object(_) => None,
        }
    }
}

/// A part of the blob that can be decompressed separately, and its contents: a piece of a file, then a gap. If the
/// table does not describe the gap, `gap` is `Some(None)`.
struct Span {
    blob: Range<u64>,
    chunk: Option<usize>,
    gap: Option<Option<ChunkKey>>,
}

/// Returns spans that cover the blob up to the end of its files.
fn spans(contents: &Contents, format: Format) -> Vec<Span> {
    let mut spans = Vec::with_capacity(contents.pieces.len() + 1);
    let mut at = 0;
    let mut gap = Some(contents.first);
    for file in &contents.files {
        for index in file.pieces.clone() {
            let blob = contents.pieces[index].blob.clone();
            if blob.start > at {
                spans.push(Span { blob: at..blob.start, chunk: None, gap: Some(gap) });
            }
            at = blob.end;
            let is_last = index + 1 == file.pieces.end;
            let gap = (format == Format::Estargz && is_last).then_some(file.gap);
            spans.push(Span { blob, chunk: Some(index), gap });
        }
        gap = file.gap;
    }
    if at < contents.end {
        spans.push(Span { blob: at..contents.end, chunk: None, gap: Some(None) });
    }
    spans
}

/// Adds a run of steps that need no download, or downloads the run if it is short.
fn flush(steps: &mut Vec<Step>, run: &mut Vec<Step>, hole: u64) {
    let (Some(Step::Known { blob: first, .. }), Some(Step::Known { blob: last, .. })) =
        (run.first(), run.last())
    else {
        return;
    };
    let range = first.start..last.end;
    if range.end - range.start < hole {
        run.clear();
        fetch(steps, range);
    } else {
        steps.append(run);
    }
}

fn fetch(steps: &mut Vec<Step>, range: Range<u64>) {
    match steps.last_mut() {
        Some(Step::Fetch(last)) if last.end == range.start => last.end = range.end,
        _ => steps.push(Step::Fetch(range)),
    }
}
