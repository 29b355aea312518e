//! Makes units from spans that are fetched and inflated, and from parts of units that earlier spans contained.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use image::lazy::UNIT;
use oci::blobs::{AskedPeers, PeerPart, Whole};

use super::cause::{Cause, Fetch, Sources, Why, cause_of};
use super::{FillError, LayerFiller, TRIES};
use crate::lazy::partial_units::Side;
use crate::unpoisoned::lock;

/// Maximum number of bytes of a tar that are fetched from a peer at once. Longer parts are compressed to little, so the
/// blob is fetched instead.
const PEER_PART_MAX: u64 = 16 << 20;

impl LayerFiller<'_> {
    /// Fetches the spans and fills all units that are complete afterwards. A unit with a wrong digest is an error only
    /// if it belongs to `units`.
    pub(super) fn take_in(
        &self,
        fetch: Fetch,
        units: &Range<usize>,
        wanted: &Range<usize>,
        cause: Cause,
        sources: Sources,
    ) -> Result<(), FillError> {
        let tries = if sources == Sources::All { TRIES } else { 0 };
        for _ in 0..tries {
            let found = self.units_of_peer(&fetch.spans, units, cause);
            let Some((from, PeerPart { bytes, host })) = found else { break };
            match self.take_bytes((from, &bytes), units, wanted, cause) {
                Err(FillError::Digest(unit)) => self.distrust_peer(unit, &host),
                done => return done,
            }
        }
        let from = fetch.from;
        let bytes = self.inflated(fetch, cause)?;
        self.take_bytes((from, &bytes), units, wanted, cause)
    }

    /// Fills all units that are complete with these bytes of the device, which begin at an offset.
    fn take_bytes(
        &self,
        (from, bytes): (u64, &[u8]),
        units: &Range<usize>,
        wanted: &Range<usize>,
        cause: Cause,
    ) -> Result<(), FillError> {
        let head = &self.index.head;
        let end = from + bytes.len() as u64;
        let with_them = head.whole_units(&self.spans_of(wanted));
        let why = |unit: usize| match cause {
            Cause::Reader if wanted.contains(&unit) => Why::Wanted,
            Cause::Reader if with_them.contains(&unit) => Why::WithOthers,
            Cause::Trace => Why::Traced,
            Cause::Completion => Why::Completed,
            Cause::Reader | Cause::Stream => Why::Guessed,
        };
        // Complete neighbouring units in the same spans are filled as well.
        for unit in head.units_of(&(from..end)) {
            let place = unit as u64 * UNIT;
            let until = (place + UNIT).min(head.device_bytes);
            let [start, stop] = [place.max(from), until.min(end)]
                .map(|it| usize::try_from(it - from).unwrap_or(usize::MAX));
            let Some(part) = bytes.get(start..stop).filter(|_| !self.is_there(unit)) else {
                continue;
            };
            let side = match (place < from, until > end) {
                (false, false) => {
                    if !self.fill(unit, part, why(unit))? && units.contains(&unit) {
                        return Err(FillError::Digest(unit));
                    }
                    continue;
                }
                (true, false) => Side::End,
                (false, true) => Side::Beginning,
                // The span lies inside one unit.
                (true, true) => continue,
            };
            let length = usize::try_from(until - place).unwrap_or(usize::MAX);
            let whole = lock(&self.seams).keep(unit, side, part, length);
            if let Some(whole) = whole {
                // If a part was wrong, a later request fetches the whole unit again.
                let _is_right = self.fill(unit, &whole, why(unit))?;
            }
        }
        Ok(())
    }

    /// Fetches spans of the blob, and returns the device's bytes that they and the known parts contain.
    fn inflated(&self, fetch: Fetch, cause: Cause) -> Result<Vec<u8>, FillError> {
        let head = &self.index.head;
        let Fetch { spans, before, behind, from } = fetch;
        let mut bytes = before;
        if !spans.is_empty() {
            let packed = head.packed(&spans);
            let blob = self.with_windows(|| self.fetch(packed.clone(), cause))?;
            self.core.counts.fetched(packed.end - packed.start, cause);
            for number in spans {
                bytes.extend(self.inflate(number, &blob, packed.start)?);
            }
        }
        if behind.is_empty() && from + bytes.len() as u64 == head.tar_bytes {
            bytes.extend(&head.tail);
        }
        bytes.extend(behind);
        Ok(bytes)
    }

    /// Fetches the units of these spans from a peer that lacks the blob, if there is one. Returns their offset in the
    /// device, and their bytes.
    fn units_of_peer(
        &self,
        spans: &Range<usize>,
        units: &Range<usize>,
        cause: Cause,
    ) -> Option<(u64, PeerPart)> {
        if spans.is_empty() {
            return None;
        }
        let head = &self.index.head;
        // A peer that has fetched the same spans has the units that lie in them. If no reader waits, this request also
        // fetches the units at the edges: further requests for spans would not complete them.
        let of_spans = match cause {
            Cause::Reader => head.whole_units(spans),
            Cause::Stream | Cause::Trace | Cause::Completion => head.touched_units(spans),
        };
        let of_spans = if of_spans.is_empty() { units.clone() } else { of_spans };
        let mut wanted = of_spans.start.min(units.start)..of_spans.end.max(units.end);
        while wanted.end > wanted.start && self.is_there(wanted.end - 1) {
            wanted.end -= 1;
        }
        while wanted.start < wanted.end && self.is_there(wanted.start) {
            wanted.start += 1;
        }
        let part = self.ask_peers(&wanted, cause, AskedPeers::Likely)?;
        Some((wanted.start as u64 * UNIT, part))
    }

    /// Asks peers for units. The digests of the units are compared afterwards, like those of inflated units.
    pub(super) fn ask_peers(
        &self,
        units: &Range<usize>,
        cause: Cause,
        asked: AskedPeers,
    ) -> Option<PeerPart> {
        let head = &self.index.head;
        // A device of chunks is not a tar, and its units have no digests before they are filled.
        if head.kind.is_of_chunks() {
            return None;
        }
        let start = units.start as u64 * UNIT;
        let end = (units.end as u64 * UNIT).min(head.device_bytes);
        let range = start..end.min(head.tar_bytes);
        let length = range.end.saturating_sub(start);
        if length == 0 || length > PEER_PART_MAX {
            return None;
        }
        let mut part = self.blobs.tar_part(&head.blob, &head.diff_id, range.clone(), asked)?;
        if part.bytes.len() as u64 != length {
            return None;
        }
        self.core.counts.fetched(length, cause);
        self.failures.gave(Instant::now());
        let tail = usize::try_from(end - range.end).ok()?;
        part.bytes.extend(head.tail.get(..tail)?);
        Some(part)
    }

    /// Does not ask a peer for parts of this layer again, because it sent a wrong unit. Each part comes from one peer, so
    /// the others are still asked.
    pub(super) fn distrust_peer(&self, unit: usize, host: &str) {
        let blob = &self.index.head.blob;
        if let Some(unlogged) = self.may_log() {
            tracing::warn!(%blob, unit, host, unlogged, "a peer sent wrong bytes of a layer");
        }
        self.blobs.distrust_peer(blob, host);
    }

    /// Writes a unit. Returns `false` if its digest differs from the index.
    pub(super) fn fill(&self, unit: usize, bytes: &[u8], why: Why) -> Result<bool, FillError> {
        if !self.is_right_or_new(unit, bytes) {
            return Ok(false);
        }
        let writing = self.writing(unit);
        // A thread of low priority may fetch the same unit as a reader.
        if self.is_there(unit) {
            drop(writing);
            lock(&self.seams).forget(unit);
            return Ok(true);
        }
        self.core.device.write_at(bytes, unit as u64 * UNIT).map_err(|error| {
            self.failures.disk_failed(cause_of(&error), Instant::now());
            FillError::Write(error)
        })?;
        self.core.counts.filled(why);
        self.core.untouched[unit].store(why.number(), Ordering::Relaxed);
        self.tag(unit, bytes);
        self.set_filled(unit);
        drop(writing);
        self.failures.came(&(unit..unit + 1));
        lock(&self.seams).forget(unit);
        Ok(true)
    }

    /// Finds the parts that these units are made of: known parts of the first and the last one, and spans.
    pub(super) fn plan(&self, units: &Range<usize>) -> Fetch {
        let head = &self.index.head;
        let place = |span: usize| head.spans.get(span).map_or(head.tar_bytes, |it| it.unpacked);
        let start = units.start as u64 * UNIT;
        let end = (units.end as u64 * UNIT).min(head.device_bytes);
        let mut seams = lock(&self.seams);
        let before = seams.take(units.start, Side::Beginning);
        let behind = seams.take(units.end.saturating_sub(1), Side::End);
        drop(seams);
        let [from, until] = [start + before.len() as u64, end - behind.len() as u64];
        let spans = head.spans_of(&(from..until));
        // The known parts can be used only if they end where a span begins, or begin where a span ends.
        if !spans.is_empty()
            && (before.is_empty() || place(spans.start) == from)
            && (behind.is_empty() || place(spans.end) == until)
        {
            let from = if before.is_empty() { place(spans.start) } else { start };
            return Fetch { spans, before, behind, from };
        }
        let spans = self.spans_of(units);
        let from = if spans.is_empty() { head.tar_bytes } else { place(spans.start) };
        Fetch { spans, before: Vec::new(), behind: Vec::new(), from }
    }

    fn fetch(&self, range: Range<u64>, cause: Cause) -> Result<Vec<u8>, FillError> {
        let (head, asked) = (&self.index.head, std::slice::from_ref(&range));
        let (blob, size, blobs) = (&head.blob, head.blob_bytes, &self.blobs);
        let begun = Instant::now();
        let parts = match cause {
            Cause::Reader => blobs.ranges(blob, size, asked, Whole::Read),
            Cause::Stream | Cause::Trace | Cause::Completion => {
                blobs.ranges_in_background(blob, size, asked, Whole::Read)
            }
        };
        let wanted = range.end - range.start;
        if parts.is_ok() {
            lock(&self.pace).took(wanted, begun.elapsed());
        }
        let parts = parts.and_then(|parts| match parts.concat() {
            bytes if bytes.len() as u64 == wanted => Ok(bytes),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        });
        if parts.is_ok() {
            self.failures.gave(Instant::now());
        }
        let blob = || Box::new(head.blob);
        parts.map_err(|source| FillError::Blob { blob: blob(), range, source })
    }
}
