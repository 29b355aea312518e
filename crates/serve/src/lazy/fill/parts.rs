//! Completes a device, also together with peers that complete the same device (decision 34).
//!
//! All hosts divide a layer into the same parts, and fetch them in different orders. A part is a run of spans. It has the
//! units that begin in these spans, so each unit belongs to one part. A peer that has fetched the part can send all of
//! these units but perhaps the last one, which ends in the next part.

use std::cell::Cell;
use std::ops::Range;

use image::lazy::UNIT;
use oci::blobs::{AskedPeers, PeerPart};

use super::cause::{Cause, Fetch, Sources, Why};
use super::claim::{UnitClaim, is_coming};
use super::{FillError, LayerFiller, TRIES};
use crate::unpoisoned::lock;

/// A part follows another one, which came from a peer, if at most this number of units is between them. Several requests
/// run at a time.
const NEAR: usize = 256;

/// The result of fetching a part of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartOutcome {
    /// All of its units were filled before, or other threads fetch them.
    Present,
    /// Some of its units were fetched.
    Fetched,
    /// Peers have sent the parts before this one, and lack this one. One of them probably fetches it now, so this host
    /// should fetch other parts first.
    Later,
}

/// The result of asking peers for a part.
enum TakenPart {
    Right,
    /// No peer has it.
    Absent,
    /// A peer sent wrong bytes, and is not asked again.
    Wrong,
}

impl LayerFiller<'_> {
    /// Whether other hosts that fetch the same layer may have parts of it.
    #[must_use]
    pub fn may_have_peers(&self) -> bool {
        self.is_sealable() && self.blobs.may_have_peers(&self.index.head.blob)
    }

    /// Fetches the missing units of a part, except those that another thread is fetching: from peers, or from the blob.
    ///
    /// # Errors
    /// Another attempt may succeed.
    pub fn bring_part(
        &self,
        spans: &Range<usize>,
        may_be_later: bool,
    ) -> Result<PartOutcome, FillError> {
        let mut outcome = PartOutcome::Present;
        let mut rest = self.units_of_part(spans);
        loop {
            let coming = lock(&self.coming);
            let is_open =
                |it: &usize| !self.is_there(*it) && !is_coming(&coming, *it, Cause::Completion);
            let Some(first) = rest.clone().find(is_open) else { return Ok(outcome) };
            let next = (first..rest.end).find(|it| !is_open(it)).unwrap_or(rest.end);
            let _claim = UnitClaim::new(self, first..next, coming, Cause::Completion);
            rest.start = next;
            self.recall(&(first..next))?;
            let mut missing = (first..next).filter(|it| !self.is_there(*it));
            let Some(start) = missing.next() else { continue };
            let units = start..missing.next_back().unwrap_or(start) + 1;
            self.check_space(&units, Cause::Completion)?;
            if !self.bring_run(&units, spans, may_be_later)? {
                return Ok(PartOutcome::Later);
            }
            outcome = PartOutcome::Fetched;
        }
    }

    /// Returns the units that begin in these spans.
    fn units_of_part(&self, spans: &Range<usize>) -> Range<usize> {
        let head = &self.index.head;
        let count = self.core.filled.len();
        let first_at = |span: usize| {
            let place = head.spans.get(span).map(|it| it.unpacked.div_ceil(UNIT));
            place.map_or(count, |it| usize::try_from(it).unwrap_or(count).min(count))
        };
        first_at(spans.start)..first_at(spans.end)
    }

    /// Fetches a run of units of a part. Returns `false` if it should be fetched later.
    fn bring_run(
        &self,
        units: &Range<usize>,
        spans: &Range<usize>,
        may_be_later: bool,
    ) -> Result<bool, FillError> {
        let is_done = Cell::new(true);
        self.until_right(|sources| {
            if sources == Sources::All {
                if self.take_from_peers(units)? {
                    return Ok(());
                }
                if may_be_later && self.follows_peer(units.start) {
                    is_done.set(false);
                    return Ok(());
                }
            }
            self.take_from_blob(units, spans)
        })?;
        Ok(is_done.get())
    }

    /// Fetches units from peers. Returns `false` if none has them.
    fn take_from_peers(&self, units: &Range<usize>) -> Result<bool, FillError> {
        for _ in 0..TRIES {
            match self.take_from_peer(units)? {
                TakenPart::Right => return Ok(true),
                TakenPart::Absent => return Ok(false),
                TakenPart::Wrong => {}
            }
        }
        Ok(false)
    }

    /// Fetches units from the first peer that has them.
    fn take_from_peer(&self, units: &Range<usize>) -> Result<TakenPart, FillError> {
        let asked =
            |units: &Range<usize>| self.ask_peers(units, Cause::Completion, AskedPeers::All);
        let mut units = units.clone();
        let mut found = asked(&units);
        // The last unit ends in the next part, which the peer may lack.
        if found.is_none() && units.len() > 1 && units.end < self.core.filled.len() {
            units.end -= 1;
            found = asked(&units);
        }
        let Some(PeerPart { bytes, host }) = found else { return Ok(TakenPart::Absent) };
        let mut rest = &bytes[..];
        for unit in units.clone() {
            let length = usize::try_from(UNIT).unwrap_or(usize::MAX).min(rest.len());
            let (bytes, behind) = rest.split_at(length);
            rest = behind;
            if !self.fill(unit, bytes, Why::Completed)? {
                self.distrust_peer(unit, &host);
                return Ok(TakenPart::Wrong);
            }
        }
        lock(&self.peer_ends).insert(units.end);
        Ok(TakenPart::Right)
    }

    /// Whether the units shortly before this one came from a peer.
    fn follows_peer(&self, unit: usize) -> bool {
        let ends = lock(&self.peer_ends);
        ends.range(unit.saturating_sub(NEAR)..=unit).next().is_some()
    }

    /// Fetches units of a part from the blob. The beginning of a unit that ends in the next part is kept until that part
    /// is fetched as well. If only this unit is missing, the next part came from a peer, so its first span is fetched.
    fn take_from_blob(&self, units: &Range<usize>, part: &Range<usize>) -> Result<(), FillError> {
        let head = &self.index.head;
        let mut spans = self.spans_of(units);
        spans.end = spans.end.min(part.end);
        let whole = head.whole_units(&spans);
        let inside = units.start.max(whole.start)..units.end.min(whole.end);
        if inside.is_empty() {
            return self.bring(units, &(0..0), Cause::Completion, Sources::OfBlob);
        }
        let from = head.unpacked(&spans).start;
        let fetch = Fetch { spans, before: Vec::new(), behind: Vec::new(), from };
        self.take_in(fetch, &inside, &(0..0), Cause::Completion, Sources::OfBlob)
    }
}
