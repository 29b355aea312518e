//! Fills parts of a device with verified bytes.

pub(super) mod cause;
mod check;
mod chunks;
mod claim;
mod completing;
pub(super) mod error;
mod hot;
mod parts;
mod source;
mod spans;
mod tags;
mod units;
mod window_cache;
mod windows;

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::lazy::UNIT;
use oci::blobs::BlobSource;
use rustix::fs::SeekFrom;
use store::{LazyDeviceError, LazyDeviceFill};
use transfer::lazy::LayerIndex;

use super::metrics::{Counts, LastFailure};
use super::partial_units::Seams;
use super::prefetch::files::DeviceFiles;
use super::prefetch::readahead::{Pace, Streams, block};
use super::retry::{DeniedUnit, Failures, SourcePatience};
use crate::unpoisoned::lock;
pub use cause::Cause;
use cause::{Fetch, Sources, Why, cause_of};
pub(super) use check::Check;
use chunks::LearnedUnits;
use claim::{Coming, UnitClaim, is_coming};
pub(super) use completing::Completing;
pub use error::FillError;
use hot::HotBlocks;
pub use parts::PartOutcome;
pub use source::LayerSource;
pub(super) use source::{ImageKey, SourceKey};
use tags::UnitTags;
use window_cache::WindowCache;
use windows::LaterWindows;

/// The default timeouts.
static USUAL: LazyLock<SourcePatience> = LazyLock::new(SourcePatience::default);
/// How often a reader checks its timeout while another thread fetches its bytes.
const LOOK: Duration = Duration::from_millis(500);

/// Largest part of a read, in bytes, that is fetched at once. It is limited because the blob's bytes and the inflated
/// bytes are in memory at the same time. Only direct reads of the device can be larger; programs read less at once.
const AT_ONCE: u64 = 4 << 20;

/// Number of locks for changes of units.
const WRITING: usize = 16;

/// A whole file is prefetched if this takes at most as long as this number of empty requests.
const FILE_REQUESTS: f64 = 4.0;

/// Number of times that a blob is fetched because its bytes were wrong.
const TRIES: usize = 8;

/// A device and its filled units, which all of its fillers share.
struct DeviceCore<'a> {
    device: LazyDeviceFill<'a>,
    /// Whether each unit was verified. Set after the unit was written.
    filled: Vec<AtomicBool>,
    /// The tags of each filled unit.
    tags: Vec<UnitTags>,
    /// The digests of the filled units, if the head has those of chunks instead.
    learned: LearnedUnits,
    /// Number of filled units.
    filled_count: AtomicUsize,
    /// Reason for prefetching each unit, as the number of a [`Why`]; cleared at the first read.
    untouched: Vec<AtomicU8>,
    files: DeviceFiles<'a>,
    counts: Counts,
    /// Locks of units, each for some of them. A unit's lock is held while its bytes change and until it counts as
    /// filled, so that blocks of a hot pack never replace bytes of a filled unit.
    writing: [Mutex<()>; WRITING],
}

/// Fills one device from its layer's blob, for one image. Other images with the same device have separate fillers,
/// with their indexes and sources: [`beside`](Self::beside).
pub struct LayerFiller<'a> {
    core: Arc<DeviceCore<'a>>,
    index: LayerIndex,
    windows: WindowCache,
    /// The groups of windows, if the index came without them.
    later: LaterWindows<'a>,
    blobs: Box<dyn BlobSource + 'a>,
    key: SourceKey,
    /// Whether the whole device should be fetched, as the number of a [`Completing`].
    completing: AtomicU8,
    /// Whether fetching the whole device failed too often.
    has_given_up: AtomicBool,
    /// Units that are being fetched.
    coming: Mutex<Coming>,
    /// Signalled when a fetch of units has succeeded or failed.
    came: Condvar,
    /// Blocks that came with the image's hot pack.
    hot: HotBlocks,
    /// Parts of units that fetched spans contained.
    seams: Mutex<Seams>,
    /// Ends of runs of units that came from peers while the device was completed.
    peer_ends: Mutex<BTreeSet<usize>>,
    /// The positions of sequential readers.
    streams: Mutex<Streams>,
    /// Speed of the source.
    pace: Mutex<Pace>,
    failures: Failures<'a>,
    /// The last failure of which a reader got an I/O error.
    last_failure: Mutex<Option<(Instant, String)>>,
}

impl std::fmt::Debug for LayerFiller<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerFiller")
            .field("device", &self.index.head.device)
            .finish_non_exhaustive()
    }
}

impl<'a> LayerFiller<'a> {
    /// Creates a filler of `device`. The device may already have bytes, right or wrong: each unit is hashed before it
    /// is used.
    #[must_use]
    pub fn new(index: LayerIndex, blobs: &'a dyn BlobSource, device: LazyDeviceFill<'a>) -> Self {
        let source = LayerSource { blobs: Box::new(blobs), manifest: None, host: None };
        Self::from_source(index, source, device)
    }

    /// Creates a filler for an image's source.
    #[must_use]
    pub fn from_source(
        index: LayerIndex,
        source: LayerSource<'a>,
        device: LazyDeviceFill<'a>,
    ) -> Self {
        let units = 0..index.head.unit_count();
        let filled = units.clone().map(|_| AtomicBool::new(false)).collect();
        let untouched = units.clone().map(|_| AtomicU8::new(Why::Wanted.number())).collect();
        let core = DeviceCore {
            device,
            filled,
            tags: units.map(|_| UnitTags::default()).collect(),
            learned: LearnedUnits::new(&index.head),
            filled_count: AtomicUsize::new(0),
            untouched,
            files: DeviceFiles::default(),
            counts: Counts::default(),
            writing: Default::default(),
        };
        Self::of_core(Arc::new(core), index, source)
    }

    /// Creates another filler of the same device, for another image. The two share the filled units, but each uses a
    /// separate source, index and failure state. Returns `None` if the two indexes describe different bytes of the
    /// device.
    #[must_use]
    pub fn beside(&self, index: LayerIndex, source: LayerSource<'a>) -> Option<Self> {
        let (head, there) = (&index.head, &self.index.head);
        let is_same = head.device == there.device
            && head.device_bytes == there.device_bytes
            && head.tar_bytes == there.tar_bytes
            && head.tail == there.tail
            && head.units == there.units
            // Chunks are verified before units are made of them, so they must be the same chunks.
            && head.kind.is_of_chunks() == there.kind.is_of_chunks()
            && (!head.kind.is_of_chunks() || head == there);
        is_same.then(|| Self::of_core(Arc::clone(&self.core), index, source))
    }

    fn of_core(core: Arc<DeviceCore<'a>>, index: LayerIndex, source: LayerSource<'a>) -> Self {
        let LayerSource { blobs, manifest, host } = source;
        let image = manifest.map_or(ImageKey::Device(index.head.device), ImageKey::Manifest);
        Self {
            core,
            index,
            windows: WindowCache::default(),
            later: LaterWindows::default(),
            blobs,
            key: SourceKey { image, host: host.map(Into::into) },
            completing: AtomicU8::new(Completing::No.number()),
            has_given_up: AtomicBool::new(false),
            coming: Mutex::default(),
            came: Condvar::new(),
            hot: HotBlocks::default(),
            seams: Mutex::default(),
            peer_ends: Mutex::default(),
            streams: Mutex::default(),
            pace: Mutex::default(),
            failures: Failures::new(&USUAL),
            last_failure: Mutex::default(),
        }
    }

    /// Returns the image and the host of the filler's source.
    pub(super) const fn key(&self) -> &SourceKey {
        &self.key
    }

    /// Returns the manifest of the image that the device is filled for, if known.
    #[must_use]
    pub const fn manifest(&self) -> Option<&Digest> {
        match &self.key.image {
            ImageKey::Manifest(manifest) => Some(manifest),
            ImageKey::Device(_) => None,
        }
    }

    /// Replaces the default timeouts.
    #[must_use]
    pub fn with_patience(self, patience: &'a SourcePatience) -> Self {
        Self { failures: Failures::new(patience), ..self }
    }

    /// Sets the function that finds the byte ranges of files in the device, in order of their offsets.
    #[must_use]
    pub fn with_files(mut self, find: impl Fn() -> Vec<Range<u64>> + Send + Sync + 'a) -> Self {
        // Another filler of the device has already set one.
        if let Some(core) = Arc::get_mut(&mut self.core) {
            core.files = DeviceFiles::new(find);
        }
        self
    }

    /// Sets the function that keeps the windows of the index, if they are fetched for this filler. A reader waits for
    /// its call.
    #[must_use]
    pub fn with_windows_kept(mut self, keep: impl Fn(&Arc<Vec<u8>>) + Send + Sync + 'a) -> Self {
        self.later.keep_by(keep);
        self
    }

    pub(super) fn files(&self) -> &DeviceFiles<'a> {
        &self.core.files
    }

    /// Returns how long no source has sent bytes, if the timeout of a reader that came at `since` is over.
    #[must_use]
    pub fn overdue(&self, since: Instant) -> Option<Duration> {
        self.failures.overdue(since, Instant::now())
    }

    /// Returns whether a unit of this range failed a moment ago, so that [`ensure`](Self::ensure) does not try it.
    #[must_use]
    pub fn is_denied(&self, range: &Range<u64>) -> bool {
        self.missing(range).is_some_and(|it| self.denied(&it).is_some())
    }

    /// Returns whether a failure should be logged, with the number of failures that were not logged since the last
    /// one.
    #[must_use]
    pub(super) fn may_log(&self) -> Option<u64> {
        self.failures.may_log(Instant::now())
    }

    /// Makes reads of missing units of a range fail for a while, because the kernel repeats a read whose reader timed
    /// out.
    pub(super) fn deny(&self, range: &Range<u64>) {
        if let Some(units) = self.missing(range) {
            self.failures.failed(units, Instant::now());
        }
    }

    /// Returns the last error of the disk, unless a write has succeeded since.
    #[must_use]
    pub fn disk_error(&self) -> Option<String> {
        self.failures.disk_error()
    }

    /// Records why a reader gets an I/O error.
    pub(super) fn record_failure(&self, cause: String) {
        *lock(&self.last_failure) = Some((Instant::now(), cause));
    }

    /// Returns the last failure of which a reader got an I/O error.
    #[must_use]
    pub fn last_failure(&self) -> Option<LastFailure> {
        let (time, cause) = lock(&self.last_failure).clone()?;
        let age = u64::try_from(time.elapsed().as_millis()).unwrap_or(u64::MAX);
        Some(LastFailure { age, cause })
    }

    /// Fails while the disk cannot take the result of a fetch.
    fn check_disk(&self) -> Result<(), FillError> {
        // `f_bfree` includes the blocks that are reserved for root, which this process may use. Some file systems
        // report no sizes.
        let has_room = || {
            let found = rustix::fs::fstatvfs(self.core.device.file());
            found.is_ok_and(|it| it.f_blocks == 0 || it.f_bfree.saturating_mul(it.f_frsize) >= UNIT)
        };
        let pause = self.failures.disk_pause(has_room, Instant::now());
        pause.map_or(Ok(()), |it| Err(FillError::DiskPause(it)))
    }

    fn denied(&self, units: &Range<usize>) -> Option<FillError> {
        let DeniedUnit { unit, left } = self.failures.denied(units, Instant::now())?;
        Some(FillError::Denied { unit, left })
    }

    /// Returns the counters of the device.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.core.counts
    }

    #[must_use]
    pub fn device(&self) -> &LazyDeviceFill<'a> {
        &self.core.device
    }

    #[must_use]
    pub const fn index(&self) -> &LayerIndex {
        &self.index
    }

    /// Returns when all bytes of `range` are present and verified. While the blob is fetched, `begin` is called with
    /// the spans that may be needed soon. Its return value is dropped when the fetch ends.
    ///
    /// # Errors
    /// After an error, another attempt may succeed.
    pub fn ensure<T>(
        &self,
        range: Range<u64>,
        begin: impl Fn(Vec<Range<usize>>) -> T,
    ) -> Result<(), FillError> {
        let begun = Instant::now();
        let end = range.end.min(self.index.head.device_bytes);
        let mut start = range.start;
        while start < end {
            // Each part ends at the end of a unit.
            let next = (start / AT_ONCE + 1).saturating_mul(AT_ONCE).min(end);
            self.ensure_part(&(start..next), begun, &begin)?;
            start = next;
        }
        self.touch(&range);
        Ok(())
    }

    /// Does the same for a part of a read that has waited since `begun`.
    fn ensure_part<T>(
        &self,
        range: &Range<u64>,
        begun: Instant,
        begin: &impl Fn(Vec<Range<usize>>) -> T,
    ) -> Result<(), FillError> {
        self.load_hot(range);
        loop {
            let coming = lock(&self.coming);
            let Some(units) = self.missing(range) else { return Ok(()) };
            if let Some(error) = self.denied(&units) {
                return Err(error);
            }
            // A reader does not wait for a thread of low priority. It fetches the units as well.
            if units.clone().any(|it| is_coming(&coming, it, Cause::Reader)) {
                if let Some(time) = self.overdue(begun) {
                    self.deny(range);
                    return Err(FillError::Silent(time));
                }
                // Another thread is fetching some of the units.
                drop(self.came.wait_timeout(coming, LOOK).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            let around = self.around(&units, &coming);
            let _claim = UnitClaim::new(self, around.clone(), coming, Cause::Reader);
            if let Err(error) = self.bring_wanted(range, &around, begin) {
                // Another image's filler may have fetched the units in the meantime.
                let Some(units) = self.missing(range) else { return Ok(()) };
                // The failure is recorded before other threads look for it. During a pause of the disk, no source was
                // asked, so the units have not failed.
                if !matches!(error, FillError::DiskPause(_)) {
                    self.failures.failed(units, Instant::now());
                }
                return Err(error);
            }
        }
    }

    /// Fetches the missing units of these spans, except those that another thread is fetching. Returns whether
    /// something was fetched.
    ///
    /// # Errors
    /// Another attempt may succeed.
    pub fn bring_ahead(&self, spans: Range<usize>, cause: Cause) -> Result<bool, FillError> {
        let mut has_fetched = false;
        let mut rest = spans.start..spans.end.min(self.index.head.spans.len());
        if cause == Cause::Stream {
            self.core.counts.begun(self.unpacked_bytes(&rest));
        }
        loop {
            let coming = lock(&self.coming);
            let is_open = |span: &usize| self.is_open(*span, &coming, cause);
            let Some(first) = rest.clone().find(is_open) else { return Ok(has_fetched) };
            let next = (first..rest.end).find(|it| !is_open(it)).unwrap_or(rest.end);
            let units = self.index.head.touched_units(&(first..next));
            let _claim = UnitClaim::new(self, units.clone(), coming, cause);
            self.recall(&units)?;
            rest.start = next;
            if units.clone().all(|it| self.is_there(it)) {
                continue;
            }
            self.check_space(&units, cause)?;
            self.bring_spans(self.with_unit(first..next, &units), cause)?;
            has_fetched = true;
        }
    }

    /// Fails unless the disk can take these units in addition to the reserve for programs.
    fn check_space(&self, units: &Range<usize>, cause: Cause) -> Result<(), FillError> {
        self.check_disk()?;
        let room = self.core.device.check_room(units.len() as u64 * UNIT);
        room.map_err(|error| {
            // No program needs the room as long as only its use has begun the completion.
            if cause != Cause::Completion || self.is_completing(Completing::Asked) {
                self.failures.no_room(cause_of(&error));
            }
            FillError::Room(error)
        })
    }

    /// Fetches the units that a reader needs together with those around them. If bytes of the surrounding units are
    /// wrong, fetches only the needed units.
    fn bring_wanted<T>(
        &self,
        range: &Range<u64>,
        around: &Range<usize>,
        begin: impl Fn(Vec<Range<usize>>) -> T,
    ) -> Result<(), FillError> {
        self.recall(around)?;
        let Some(wanted) = self.missing(range) else { return Ok(()) };
        self.check_disk()?;
        let all = self.missing(&(around.start as u64 * UNIT..around.end as u64 * UNIT));
        let all = all.unwrap_or_else(|| wanted.clone());
        tracing::debug!(device = %self.core.device.id(), ?wanted, ?all, "a reader waits for units");
        let _first = begin(self.soon(range, &wanted, &all));
        if all != wanted {
            match self.bring(&all, &wanted, Cause::Reader, Sources::All) {
                Ok(()) => return Ok(()),
                Err(error) if error.is_of_the_blob() || matches!(error, FillError::Windows(_)) => {
                    tracing::debug!(%error, "retrying with a smaller range");
                }
                // A failing source or disk would also fail for the smaller request.
                Err(error) => return Err(error),
            }
        }
        self.bring_missing(range, Cause::Reader)
    }

    fn is_there(&self, unit: usize) -> bool {
        self.core.filled.get(unit).is_none_or(|it| it.load(Ordering::Acquire))
    }

    /// Records that a reader got these bytes.
    pub fn touch(&self, range: &Range<u64>) {
        self.touch_hot(range);
        for unit in self.index.head.units_of(range) {
            let Some(untouched) = self.core.untouched.get(unit) else { return };
            let wanted = Why::Wanted.number();
            if untouched.load(Ordering::Relaxed) != wanted {
                self.core
                    .counts
                    .touched(Why::from_number(untouched.swap(wanted, Ordering::Relaxed)));
            }
        }
    }

    /// Extends the units that a reader needs by neighbours that are worth fetching in the same request.
    fn around(&self, units: &Range<usize>, coming: &Coming) -> Range<usize> {
        let head = &self.index.head;
        // In KiB, so that the numbers fit into `u32`; an estimate suffices.
        let part = |it: u64| f64::from(u32::try_from(it >> 10).unwrap_or(u32::MAX));
        let unit_bytes = part(head.blob_bytes) / part(head.device_bytes.max(UNIT)) * 65_536.0;
        let block = block(units, lock(&self.pace).free_bytes(), unit_bytes);
        let is_open = |it: &usize| !self.is_there(*it) && !is_coming(coming, *it, Cause::Reader);
        let end = block.end.min(self.core.filled.len());
        let behind = (units.end..end).take_while(is_open).count();
        let before = (block.start..units.start).rev().take_while(is_open).count();
        // Units that may never be read are limited to the number of units that readers have used.
        let most = usize::try_from(self.core.counts.may_waste()).unwrap_or(usize::MAX);
        let behind = behind.min(most);
        units.start - before.min(most - behind)..units.end + behind
    }

    /// Returns whether a unit of a span is neither filled nor being fetched for this cause or a more urgent one.
    fn is_open(&self, span: usize, coming: &Coming, cause: Cause) -> bool {
        let mut units = self.index.head.touched_units(&(span..span + 1));
        units.any(|it| !self.is_there(it) && !is_coming(coming, it, cause))
    }

    /// Returns the spans that a reader of `range` may need soon, apart from those of its current request `all`. These
    /// are the spans behind `wanted` if the reader reads sequentially, and the spans of the same file.
    fn soon(
        &self,
        range: &Range<u64>,
        wanted: &Range<usize>,
        all: &Range<usize>,
    ) -> Vec<Range<usize>> {
        let window = lock(&self.streams).read(wanted, all.end);
        let own = self.spans_of(all);
        let end = (wanted.end + window).min(self.core.filled.len()).max(all.end);
        let behind = own.end..self.spans_of(&(all.start..end)).end;
        let file = self.core.files.around(range).map(|it| self.index.head.spans_of(&it));
        // Prefetching a larger file, which takes longer than a few requests, would delay other readers.
        let free = lock(&self.pace).free_bytes() * FILE_REQUESTS;
        let packed = |it: &Range<usize>| u32::try_from(self.packed_bytes(it)).unwrap_or(u32::MAX);
        let file = file.filter(|it| !it.is_empty() && f64::from(packed(it)) <= free);
        let coming = lock(&self.coming);
        let mut left = self.core.counts.may_waste().saturating_mul(UNIT);
        let (mut seen, mut chosen, mut planned) = (BTreeSet::new(), Vec::new(), 0);
        for span in behind.chain(file.unwrap_or_default()) {
            if own.contains(&span)
                || !self.is_open(span, &coming, Cause::Stream)
                || !seen.insert(span)
            {
                continue;
            }
            let bytes = self.unpacked_bytes(&(span..span + 1));
            let Some(rest) = left.checked_sub(bytes) else { break };
            (left, planned) = (rest, planned + bytes);
            match chosen.last_mut() {
                Some(Range { end, .. }) if *end == span => *end += 1,
                _ => chosen.push(span..span + 1),
            }
        }
        self.core.counts.planned(planned);
        chosen
    }

    /// Finds units that the device already contains, because an earlier filler wrote them, perhaps before a reboot.
    /// Also copies units from the whole device, if an import has stored it.
    fn recall(&self, units: &Range<usize>) -> Result<(), FillError> {
        if self.index.head.kind.is_of_chunks() {
            return self.recall_chunks(units);
        }
        let (head, mut bytes) =
            (&self.index.head, vec![0; usize::try_from(UNIT).unwrap_or_default()]);
        let whole = self.core.device.whole();
        for unit in units.clone().filter(|it| !self.core.filled[*it].load(Ordering::Acquire)) {
            let place = unit as u64 * UNIT;
            let length = head.device_bytes.saturating_sub(place).min(UNIT);
            // Most units are holes, and are not hashed. `lseek` is safe, because the file offset is not used otherwise.
            let is_hole = match rustix::fs::seek(self.core.device.file(), SeekFrom::Data(place)) {
                Ok(data) => data >= place + length,
                Err(errno) => errno == rustix::io::Errno::NXIO,
            };
            let Ok(length) = usize::try_from(length) else { continue };
            let bytes = &mut bytes[..length];
            let _writing = self.writing(unit);
            if !is_hole {
                self.core.device.read_at(bytes, place).map_err(FillError::Read)?;
            }
            let is_here = !is_hole && head.is_unit(unit, bytes);
            if is_here || self.copy_whole(whole.as_ref(), unit, bytes) {
                self.tag(unit, bytes);
                self.set_filled(unit);
                self.core.counts.recalled();
            }
        }
        Ok(())
    }

    /// Locks a unit for a change.
    fn writing(&self, unit: usize) -> MutexGuard<'_, ()> {
        lock(&self.core.writing[unit % WRITING])
    }

    /// Copies a unit of the whole device, if it is valid there and the write succeeds. Otherwise it is fetched.
    fn copy_whole(&self, whole: Option<&File>, unit: usize, bytes: &mut [u8]) -> bool {
        let place = unit as u64 * UNIT;
        let read = whole.is_some_and(|it| it.read_exact_at(bytes, place).is_ok());
        read && self.index.head.is_unit(unit, bytes)
            && self.core.device.write_at(bytes, place).is_ok()
    }

    fn bring_missing(&self, range: &Range<u64>, cause: Cause) -> Result<(), FillError> {
        let Some(units) = self.missing(range) else { return Ok(()) };
        self.until_right(|sources| self.bring(&units, &units, cause, sources))
    }

    /// Returns whether all bytes of `range` are present.
    #[must_use]
    pub fn has(&self, range: &Range<u64>) -> bool {
        self.missing(range).is_none()
    }

    /// Returns whether the disk has not reported that filled bytes were lost. This is checked before each reader
    /// continues, because lost bytes read as zeros after the kernel has failed to write them.
    pub(super) fn is_kept(&self) -> bool {
        let Err(error) = self.core.device.check_written() else { return true };
        if !matches!(error, LazyDeviceError::Lost(_)) {
            let (device, error) = (self.core.device.id(), &error as &dyn std::error::Error);
            tracing::error!(%device, error, "the disk lost data: readers get I/O errors; unmount the image");
        }
        false
    }

    /// Extends a range to whole units.
    pub(super) fn whole_units(&self, range: &Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return range.clone();
        }
        let units = self.index.head.units_of(range);
        let end = (units.end as u64 * UNIT).min(self.index.head.device_bytes);
        (units.start as u64 * UNIT).min(end)..end
    }

    /// Returns the number of filled units.
    #[must_use]
    pub fn filled(&self) -> usize {
        self.core.filled_count.load(Ordering::Acquire)
    }

    /// Returns whether all units are filled.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.filled() == self.core.filled.len()
    }

    fn set_filled(&self, unit: usize) {
        if !self.core.filled[unit].swap(true, Ordering::AcqRel) {
            self.core.filled_count.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Returns the units of a range from the first missing one to the last missing one. A unit is not missing if its
    /// blocks in the range came with the hot pack.
    fn missing(&self, range: &Range<u64>) -> Option<Range<usize>> {
        let Range { start, end } = self.index.head.units_of(range);
        let units = self.core.filled.get(start..end)?;
        let is_missing = |(unit, filled): (usize, &AtomicBool)| {
            !filled.load(Ordering::Acquire) && !self.has_hot(start + unit, range)
        };
        let mut missing = units.iter().enumerate().filter(|it| is_missing(*it)).map(|it| it.0);
        let first = missing.next()?;
        let last = missing.next_back().unwrap_or(first);
        Some(start + first..start + last + 1)
    }

    /// Fetches these units, some of which a reader may need.
    fn bring(
        &self,
        units: &Range<usize>,
        wanted: &Range<usize>,
        cause: Cause,
        sources: Sources,
    ) -> Result<(), FillError> {
        self.take_in(self.plan(units), units, wanted, cause, sources)?;
        match units.clone().find(|it| !self.is_there(*it)) {
            None => Ok(()),
            Some(unit) => Err(FillError::Digest(unit)),
        }
    }

    /// Fetches the units of these spans.
    fn bring_spans(&self, spans: Range<usize>, cause: Cause) -> Result<(), FillError> {
        let units = self.index.head.whole_units(&spans);
        let from = self.index.head.spans.get(spans.start);
        let from = from.map_or(self.index.head.tar_bytes, |it| it.unpacked);
        let fetch = || Fetch { spans: spans.clone(), before: Vec::new(), behind: Vec::new(), from };
        self.until_right(|sources| self.take_in(fetch(), &units, &(0..0), cause, sources))
    }

    /// Runs `work`, and runs it again if the bytes of the blob were wrong: as long as there is another source, and then
    /// once more without peers.
    fn until_right(
        &self,
        work: impl Fn(Sources) -> Result<(), FillError>,
    ) -> Result<(), FillError> {
        let mut sources = Sources::All;
        for _ in 1..TRIES {
            match work(sources) {
                Err(error) if error.is_of_the_blob() => {
                    let blob = &self.index.head.blob;
                    if let Some(unlogged) = self.may_log() {
                        tracing::warn!(%blob, %error, unlogged, "fetching a blob again");
                    }
                    let is_another_there = self.blobs.distrust(blob);
                    match sources {
                        Sources::All if !is_another_there => sources = Sources::OfBlob,
                        Sources::OfBlob if !is_another_there => return Err(error),
                        Sources::All | Sources::OfBlob => {}
                    }
                }
                done => return done,
            }
        }
        work(Sources::OfBlob)
    }
}
