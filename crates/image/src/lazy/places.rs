//! Maps between the spans of a blob, the units of a device and the groups of windows.
//!
//! All ranges are half open. A number beyond the last item represents the end.

use std::ops::Range;

use super::{BlobKind, Head, UNIT};
use crate::gzip::{Checkpoint, Window};

fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Head {
    /// Returns the number of the span that contains this byte of the tar.
    #[must_use]
    pub fn span_of(&self, tar_byte: u64) -> Option<usize> {
        let behind = self.spans.partition_point(|it| it.unpacked <= tar_byte);
        (tar_byte < self.tar_bytes).then(|| behind.saturating_sub(1))
    }

    /// Returns the numbers of the spans that contain these bytes of the device; empty if all of them are in the tail.
    #[must_use]
    pub fn spans_of(&self, bytes: &Range<u64>) -> Range<usize> {
        let last = bytes.end.min(self.tar_bytes).saturating_sub(1);
        match (self.span_of(bytes.start), self.span_of(last)) {
            (Some(first), Some(last)) if bytes.start < bytes.end => first..last.saturating_add(1),
            _ => 0..0,
        }
    }

    /// Returns the range of the tar that these spans contain.
    #[must_use]
    pub fn unpacked(&self, spans: &Range<usize>) -> Range<u64> {
        let place = |span: usize| self.spans.get(span).map_or(self.tar_bytes, |it| it.unpacked);
        let start = place(spans.start);
        start..place(spans.end).max(start)
    }

    /// Returns whether spans refer to bytes before them. Spans of a zstd blob, and chunks, do not.
    #[must_use]
    pub const fn has_windows(&self) -> bool {
        matches!(self.kind, BlobKind::Gzip)
    }

    /// Returns the end in the blob of the last span, in bytes.
    #[must_use]
    pub const fn data_end(&self) -> u64 {
        match self.kind {
            BlobKind::Gzip => self.blob_bytes,
            BlobKind::Zstd { data_end }
            | BlobKind::GzipChunks { data_end }
            | BlobKind::ZstdChunks { data_end } => data_end,
        }
    }

    /// Returns the range of the blob that these spans, at least one, are inflated from. A byte that two spans share
    /// is in the ranges of both.
    #[must_use]
    pub fn packed(&self, spans: &Range<usize>) -> Range<u64> {
        let place = |span: usize| self.spans.get(span).map_or(self.data_end(), |it| it.packed);
        let end = place(spans.end);
        let first = self.checkpoint(spans.start, Window::default());
        first.map_or(end..end, |first| first.needs(end))
    }

    /// Returns the beginning of a span, or `None` if there is no such span. Only spans of gzip blobs are inflated by it.
    #[must_use]
    pub fn checkpoint(&self, span: usize, window: Window) -> Option<Checkpoint> {
        let place = self.spans.get(span)?;
        let (start, packed, unpacked) = (place.start, place.packed, place.unpacked);
        Some(Checkpoint { start, packed, unpacked, window })
    }

    /// Returns the number of the device's units.
    #[must_use]
    pub fn unit_count(&self) -> usize {
        count(self.device_bytes.div_ceil(UNIT))
    }

    /// Returns the numbers of the units that overlap these bytes of the device.
    #[must_use]
    pub fn units_of(&self, bytes: &Range<u64>) -> Range<usize> {
        let end = bytes.end.min(self.device_bytes).div_ceil(UNIT);
        count(bytes.start.checked_div(UNIT).unwrap_or(0))..count(end)
    }

    /// Returns the numbers of the units that overlap these spans. The tail counts as part of the last span.
    #[must_use]
    pub fn touched_units(&self, spans: &Range<usize>) -> Range<usize> {
        self.units_of(&self.with_tail(spans))
    }

    /// Returns the numbers of the units that lie entirely in these spans. The tail counts as part of the last span.
    #[must_use]
    pub fn whole_units(&self, spans: &Range<usize>) -> Range<usize> {
        let Range { start, end } = self.with_tail(spans);
        let is_all = end == self.device_bytes;
        let end = if is_all { end.div_ceil(UNIT) } else { end.checked_div(UNIT).unwrap_or(0) };
        let start = count(start.div_ceil(UNIT));
        start..count(end).max(start)
    }

    fn with_tail(&self, spans: &Range<usize>) -> Range<u64> {
        let Range { start, end } = self.unpacked(spans);
        start..if end == self.tar_bytes { self.device_bytes } else { end }
    }

    /// Returns the number of the group that contains a span's window.
    #[must_use]
    pub fn group_of(&self, span: usize) -> usize {
        let behind = self.groups.partition_point(|it| count(it.first.into()) <= span);
        behind.saturating_sub(1)
    }

    /// Returns the numbers of the spans whose windows are in a group.
    #[must_use]
    pub fn group_spans(&self, group: usize) -> Range<usize> {
        let first = |group: Option<usize>| {
            let group = group.and_then(|it| self.groups.get(it));
            group.map_or(self.spans.len(), |it| count(it.first.into()))
        };
        let start = first(Some(group));
        start..first(group.checked_add(1)).max(start)
    }

    /// Returns the range in bytes of each group in the file of windows.
    pub fn group_places(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.groups.iter().scan(0_u64, |at, group| {
            let start = *at;
            *at = start.saturating_add(group.bytes.into());
            Some(start..*at)
        })
    }

    /// Returns the length of the file of windows in bytes.
    #[must_use]
    pub fn windows_bytes(&self) -> u64 {
        self.groups.iter().map(|it| u64::from(it.bytes)).sum()
    }
}
