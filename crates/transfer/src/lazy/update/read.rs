//! Assembles the tar of a plan.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use image::gzip::Window;
use image::tar::recipe::{Objects, TarReader};
use image::verity::ObjectId;
use oci::blobs::{BlobSource, Whole};
use store::{ObjectReader, OperationError};

use super::UpdateError;
use super::plan::{BATCH, UpdatePlan, decompressed};
use crate::chunked::Tar;
use crate::lazy::{group_windows, inflate_span};

/// Maximum number of parts per request.
const PARTS: usize = 64;

pub(super) fn tar<'p>(
    plan: &'p UpdatePlan<'_>,
    recipe: impl Read + Send + 'p,
    source: &'p dyn BlobSource,
) -> Result<Tar<'p>, UpdateError> {
    let fetched = Arc::new(AtomicU64::new(0));
    let contents = Contents {
        plan,
        source,
        position: 0,
        first: None,
        missing: 0,
        is_missing: false,
        open: None,
        next: 0,
        batch: VecDeque::new(),
        span: None,
        group: None,
        fetched: Arc::clone(&fetched),
    };
    let reader = TarReader::new(recipe, contents);
    let reader = Box::new(reader.map_err(OperationError::of("use", "the recipe of the index"))?);
    Ok(Tar { reader, sealed: None, skipped: plan.stats().skip, fetched })
}

/// The contents of a recipe's files, from objects in the store or from spans of the blob.
struct Contents<'p, 'a> {
    plan: &'p UpdatePlan<'a>,
    source: &'p dyn BlobSource,
    /// Offset in the tar at which the current range begins. `first` is its offset in the object, once that is known.
    position: u64,
    first: Option<u64>,
    /// Index of the plan's first missing range that does not end before the current range.
    missing: usize,
    is_missing: bool,
    /// The object that was used last.
    open: Option<(ObjectId, ObjectReader)>,
    /// Index of the plan's first part that has not been requested.
    next: usize,
    /// The parts that were requested, with their indexes.
    batch: VecDeque<(usize, Vec<u8>)>,
    /// The span that was used last.
    span: Option<(usize, Vec<u8>)>,
    /// The group of windows that was used last.
    group: Option<(usize, Vec<Window>)>,
    fetched: Arc<AtomicU64>,
}

impl Objects for Contents<'_, '_> {
    fn read_at(&mut self, object: &ObjectId, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let first = *self.first.get_or_insert(offset);
        if self.is_missing {
            let position = self.position.saturating_add(offset.saturating_sub(first));
            return self.fetched(into, position);
        }
        if self.open.as_ref().is_none_or(|(open, _)| open != object) {
            let file = self.plan.store.object(object).map_err(io::Error::other)?;
            self.open = Some((*object, file));
        }
        self.open.as_ref().map_or(Ok(0), |(_, file)| file.read_at(into, offset))
    }

    fn found(&mut self, _: &ObjectId, position: u64) {
        (self.position, self.first) = (position, None);
        let missing = &self.plan.missing;
        while missing.get(self.missing).is_some_and(|it| it.end <= position) {
            self.missing += 1;
        }
        self.is_missing = missing.get(self.missing).is_some_and(|it| it.start <= position);
    }
}

fn bad(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Contents<'_, '_> {
    /// Reads bytes of the tar at `position` from the downloaded spans.
    fn fetched(&mut self, into: &mut [u8], position: u64) -> io::Result<usize> {
        let head = &self.plan.head;
        let wanted = head.span_of(position).ok_or_else(|| bad("the recipe's tar is too long"))?;
        let span = match self.span.take() {
            Some(span) if span.0 == wanted => span,
            _ => (wanted, self.inflate(wanted)?),
        };
        let start = position.saturating_sub(head.spans[wanted].unpacked);
        let rest = usize::try_from(start).ok().and_then(|start| span.1.get(start..));
        let mut rest = rest.unwrap_or_default();
        let read = rest.read(into);
        self.span = Some(span);
        read
    }

    fn inflate(&mut self, span: usize) -> io::Result<Vec<u8>> {
        self.load(span)?;
        let head = &self.plan.head;
        let group = head.group_of(span);
        let of_group = head.group_spans(group);
        if self.group.as_ref().is_none_or(|it| it.0 != group) {
            let frame = self.plan.frames.get(&group);
            let windows = frame.and_then(|it| group_windows(it, of_group.len()));
            let windows = windows.ok_or_else(|| bad("the windows of the index are damaged"))?;
            self.group = Some((group, windows));
        }
        let window = self.group.as_mut().and_then(|it| it.1.get_mut(span - of_group.start));
        // Each span is used once, in order.
        let window = window.map(std::mem::take).unwrap_or_default();
        let part = self.batch.front().map(|(number, bytes)| (&self.plan.parts[*number], bytes));
        let (part, bytes) = part.ok_or_else(|| bad("the plan lacks a span"))?;
        let needs = head.packed(&(span..span + 1));
        let inside = [needs.start, needs.end].map(|it| it.checked_sub(part.blob.start));
        let packed = match inside {
            [Some(start), Some(end)] => {
                let [start, end] = [start, end].map(|it| usize::try_from(it).unwrap_or(usize::MAX));
                bytes.get(start..end)
            }
            _ => None,
        };
        let packed = packed.ok_or_else(|| bad("the plan lacks a span"))?;
        inflate_span(head, span, window, packed).map_err(io::Error::other)
    }

    /// Moves the part that contains a span to the front of the batch, and fetches it if needed.
    fn load(&mut self, span: usize) -> io::Result<()> {
        let parts = &self.plan.parts;
        loop {
            while self.batch.front().is_some_and(|(number, _)| parts[*number].spans.end <= span) {
                self.batch.pop_front();
            }
            if !self.batch.is_empty() {
                return Ok(());
            }
            let (mut bytes, mut ranges) = (0_u64, Vec::new());
            for part in parts.iter().skip(self.next).take(PARTS) {
                bytes = bytes.saturating_add(part.blob.end - part.blob.start);
                if bytes > BATCH && !ranges.is_empty() {
                    break;
                }
                ranges.push(part.blob.clone());
            }
            if ranges.is_empty() {
                return Err(bad("the plan lacks a span"));
            }
            let head = &self.plan.head;
            let fetched =
                self.source.ranges(&head.blob, head.blob_bytes, &ranges, Whole::Refuse)?;
            let bytes: usize = fetched.iter().map(Vec::len).sum();
            self.fetched.fetch_add(bytes as u64, Ordering::Relaxed);
            self.batch.extend((self.next..).zip(fetched));
            self.next += ranges.len();
        }
    }
}

impl UpdatePlan<'_> {
    /// Opens the tar, whose missing parts come from `source`. The caller must verify the layer's diff id once all of
    /// the tar has been read.
    pub fn open<'p>(&'p self, source: &'p dyn BlobSource) -> Result<Tar<'p>, UpdateError> {
        let recipe = decompressed(&self.recipe)
            .map_err(OperationError::of("decompress", "the recipe of the index"))?;
        tar(self, recipe, source)
    }
}
