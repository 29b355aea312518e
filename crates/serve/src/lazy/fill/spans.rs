//! Where the spans of a blob and the units of a device are, and how one becomes the other.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use image::gzip::{Checkpoint, SpanError, Window};
use image::lazy::UNIT;
use transfer::lazy::{LayerIndex, group_windows};

use super::{FillError, LayerFiller, lock};

/// Groups of windows that a filler keeps: some hundred kilobytes in sound indexes.
const GROUPS: usize = 16;

/// The windows that were used last, by their group.
#[derive(Debug, Default)]
pub(super) struct WindowCache(Mutex<VecDeque<(usize, Arc<[Window]>)>>);

impl WindowCache {
    /// Those of a group. `make` gets them if they are not here.
    fn get(
        &self,
        group: usize,
        make: impl FnOnce() -> Option<Vec<Window>>,
    ) -> Option<Arc<[Window]>> {
        let mut kept = lock(&self.0);
        let found = kept.iter().position(|it| it.0 == group).and_then(|at| kept.remove(at));
        let (_, windows) = match found {
            Some(found) => found,
            None => {
                // Others need not wait.
                drop(kept);
                let made = make()?;
                kept = lock(&self.0);
                (group, made.into())
            }
        };
        kept.truncate(GROUPS - 1);
        kept.push_front((group, Arc::clone(&windows)));
        Some(windows)
    }
}

impl LayerFiller<'_> {
    /// The numbers of the units that have these bytes.
    pub(super) fn units_of(&self, range: &Range<u64>) -> Range<usize> {
        let end = range.end.min(self.index.head.device_bytes).div_ceil(UNIT);
        let [start, end] =
            [range.start / UNIT, end].map(|it| usize::try_from(it).unwrap_or(usize::MAX));
        start..end
    }

    /// The units that lie in these spans alone.
    pub(super) fn whole_units(&self, spans: Range<usize>) -> Range<usize> {
        let head = &self.index.head;
        let place = |span: usize| head.spans.get(span).map_or(head.device_bytes, |it| it.unpacked);
        let [start, end] = [place(spans.start).div_ceil(UNIT), place(spans.end).div_ceil(UNIT)]
            .map(|it| usize::try_from(it).unwrap_or(usize::MAX));
        start..end
    }

    /// The units that have a part in these spans.
    pub(super) fn touched_units(&self, spans: &Range<usize>) -> Range<usize> {
        let head = &self.index.head;
        let place = |span: usize| head.spans.get(span).map(|it| it.unpacked);
        let start = place(spans.start).unwrap_or(head.tar_bytes);
        self.units_of(&(start..place(spans.end).unwrap_or(head.device_bytes)))
    }

    /// The spans of the blob that these units need, by number.
    #[must_use]
    pub fn spans_of(&self, units: &Range<usize>) -> Range<usize> {
        self.spans_between(units.start as u64 * UNIT, units.end as u64 * UNIT)
    }

    /// Bytes of the blob that these spans need.
    #[must_use]
    pub fn packed_bytes(&self, spans: &Range<usize>) -> u64 {
        let packed = self.packed(spans);
        packed.end.saturating_sub(packed.start)
    }

    /// Bytes of the tar that these spans have.
    pub(super) fn unpacked_bytes(&self, spans: &Range<usize>) -> u64 {
        let head = &self.index.head;
        let place = |span: usize| head.spans.get(span).map_or(head.tar_bytes, |it| it.unpacked);
        place(spans.end).saturating_sub(place(spans.start))
    }

    /// The spans that have these bytes of the device; none for bytes that the tail has.
    pub(super) fn spans_between(&self, start: u64, end: u64) -> Range<usize> {
        let head = &self.index.head;
        let last = end.min(head.tar_bytes).saturating_sub(1);
        match (head.span_of(start), head.span_of(last)) {
            (Some(first), Some(last)) if start < end => first..last + 1,
            _ => 0..0,
        }
    }

    /// The bytes of the blob that these spans need, of which there is at least one.
    pub(super) fn packed(&self, spans: &Range<usize>) -> Range<u64> {
        let start = self.packed_of(spans.start).start;
        start..self.packed_of(spans.end.saturating_sub(1)).end.max(start)
    }

    /// The bytes of the blob that a span needs.
    fn packed_of(&self, span: usize) -> Range<u64> {
        let head = &self.index.head;
        let end = head.spans.get(span + 1).map_or(head.blob_bytes, |it| it.packed);
        self.checkpoint(span, Window::default()).needs(end)
    }

    fn checkpoint(&self, span: usize, window: Window) -> Checkpoint {
        let place = self.index.head.spans[span];
        Checkpoint { start: place.start, packed: place.packed, unpacked: place.unpacked, window }
    }

    /// The tar's bytes of a span, where `blob` has the blob's from `from` on.
    pub(super) fn inflate(
        &self,
        span: usize,
        blob: &[u8],
        from: u64,
    ) -> Result<Vec<u8>, FillError> {
        let head = &self.index.head;
        let range = self.packed_of(span);
        let [start, end] =
            [range.start, range.end].map(|it| usize::try_from(it - from).unwrap_or(usize::MAX));
        let short = || FillError::Span { span, source: SpanError::Short };
        let bytes = blob.get(start..end).ok_or_else(short)?;
        let checkpoint = self.checkpoint(span, self.window(span)?);
        let until = head.spans.get(span + 1).map_or(head.tar_bytes, |it| it.unpacked);
        let length = until - checkpoint.unpacked;
        checkpoint.inflate(bytes, length).map_err(|source| FillError::Span { span, source })
    }

    fn window(&self, span: usize) -> Result<Window, FillError> {
        let missing = || FillError::Windows(span);
        let groups = &self.index.head.groups;
        let number = u32::try_from(span).map_err(|_error| missing())?;
        let group = groups.partition_point(|it| it.first <= number).checked_sub(1);
        let group = group.ok_or_else(missing)?;
        let windows = self.windows.get(group, || self.group(group)).ok_or_else(missing)?;
        let within = usize::try_from(number - groups[group].first).ok();
        within.and_then(|it| windows.get(it)).cloned().ok_or_else(missing)
    }

    fn group(&self, group: usize) -> Option<Vec<Window>> {
        let LayerIndex { head, windows } = &self.index;
        let start: u64 = head.groups[..group].iter().map(|it| u64::from(it.bytes)).sum();
        let start = usize::try_from(start).ok()?;
        let length = usize::try_from(head.groups[group].bytes).ok()?;
        let frame = windows.get(start..start.checked_add(length)?)?;
        let all = u32::try_from(head.spans.len()).ok()?;
        let next = head.groups.get(group + 1).map_or(all, |it| it.first);
        group_windows(frame, head.groups[group].spans(next))
    }
}
