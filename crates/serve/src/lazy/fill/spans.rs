//! Maps units of a device to spans of its blob, and inflates spans.

use std::ops::Range;

use image::gzip::{SpanError, Window};
use image::lazy::UNIT;
use transfer::lazy::{group_windows, inflate_span};

use super::{FillError, LayerFiller};

/// Bytes of a device that count like one byte of a blob. Contents that are compressed better than this are counted by
/// their length, because it bounds the memory of a request: 32 MiB for the largest one.
const RATIO: u64 = 32;

impl LayerFiller<'_> {
    /// Returns the numbers of the blob's spans that these units need.
    #[must_use]
    pub fn spans_of(&self, units: &Range<usize>) -> Range<usize> {
        self.index.head.spans_of(&(units.start as u64 * UNIT..units.end as u64 * UNIT))
    }

    /// Returns the number of the blob's bytes that these spans need.
    #[must_use]
    pub fn packed_bytes(&self, spans: &Range<usize>) -> u64 {
        let packed = self.index.head.packed(spans);
        packed.end.saturating_sub(packed.start)
    }

    /// Returns the cost of a request for spans, in bytes of the blob. Spans of zeros have few bytes there, but many in
    /// memory.
    pub fn cost(&self, spans: &Range<usize>) -> u64 {
        self.packed_bytes(spans).max(self.unpacked_bytes(spans) / RATIO)
    }

    /// Returns the number of the tar's bytes in these spans.
    pub(super) fn unpacked_bytes(&self, spans: &Range<usize>) -> u64 {
        let unpacked = self.index.head.unpacked(spans);
        unpacked.end - unpacked.start
    }

    /// Inflates a span. `blob` contains the blob's bytes from `from` on.
    pub(super) fn inflate(
        &self,
        span: usize,
        blob: &[u8],
        from: u64,
    ) -> Result<Vec<u8>, FillError> {
        let head = &self.index.head;
        let range = head.packed(&(span..span + 1));
        let [start, end] =
            [range.start, range.end].map(|it| usize::try_from(it - from).unwrap_or(usize::MAX));
        let short = || FillError::Span { span, source: SpanError::Short };
        let bytes = blob.get(start..end).ok_or_else(short)?;
        let window = self.window(span)?;
        let tar = inflate_span(head, span, window, bytes);
        let tar = tar.map_err(|source| FillError::Span { span, source })?;
        // The head has no digests of the units of chunks, so these bytes are verified here.
        match head.kind.is_of_chunks() && !head.is_chunk(span, &tar) {
            true => Err(FillError::Chunk(span)),
            false => Ok(tar),
        }
    }

    fn window(&self, span: usize) -> Result<Window, FillError> {
        let missing = || FillError::Windows(span);
        let head = &self.index.head;
        if !head.has_windows() {
            return Ok(Window::default());
        }
        let group = head.group_of(span);
        let groups = self.window_groups()?;
        let windows = self.windows.get(group, || self.group(group, groups)).ok_or_else(missing)?;
        let within = span.checked_sub(head.group_spans(group).start);
        within.and_then(|it| windows.get(it)).cloned().ok_or_else(missing)
    }

    fn group(&self, group: usize, groups: &[u8]) -> Option<Vec<Window>> {
        let head = &self.index.head;
        let Range { start, end } = head.group_places().nth(group)?;
        let frame = groups.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)?;
        group_windows(frame, head.group_spans(group).len())
    }
}
