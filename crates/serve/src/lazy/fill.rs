//! Fills parts of a device with verified bytes.

pub(super) mod cause;
pub(super) mod error;
mod fetch;
mod source;
mod spans;
mod window_cache;

use std::collections::{BTreeMap, BTreeSet};
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

use super::files::DeviceFiles;
use super::metrics::Counts;
use super::partial_units::Seams;
use super::readahead::{Pace, Streams, block};
use super::retry::{DeniedUnit, Failures, SourcePatience};
pub use cause::Cause;
use cause::{Fetch, Why, cause_of, lock};
pub use error::FillError;
pub use source::LayerSource;
pub(super) use source::{ImageKey, SourceKey};
use window_cache::WindowCache;

/// The patience of a filler that is given none.
static USUAL: LazyLock<SourcePatience> = LazyLock::new(SourcePatience::default);
/// How often a reader whose bytes another thread brings looks whether it has waited long enough.
const LOOK: Duration = Duration::from_millis(500);

/// So much of a read is brought at once: its blob's bytes and its own are in memory meanwhile. Programs read less; only the
/// device itself can be asked for more.
const AT_ONCE: u64 = 4 << 20;

/// A file is brought as a whole if that takes no longer than so many requests.
const FILE_REQUESTS: f64 = 4.0;

/// A device, and what is here of it, whoever has brought it.
struct DeviceCore<'a> {
    device: LazyDeviceFill<'a>,
    /// The units that had their digest. Set after they were written.
    filled: Vec<AtomicBool>,
    /// How many they are.
    filled_count: AtomicUsize,
    /// Why units were brought before anybody wanted them, until somebody does: a number of [`Why`].
    untouched: Vec<AtomicU8>,
    files: DeviceFiles<'a>,
    counts: Counts,
}

/// Fills one device from its layer's blob, for one image. Other images that have the device have fillers of their own, by
/// their own indexes and from their own sources: [`beside`](Self::beside).
pub struct LayerFiller<'a> {
    core: Arc<DeviceCore<'a>>,
    index: LayerIndex,
    windows: WindowCache,
    blobs: Box<dyn BlobSource + 'a>,
    key: SourceKey,
    /// Whether all of it is to come, though nobody reads it.
    is_completing: AtomicBool,
    /// The units that threads are bringing, each with the number of threads: one that lies in the spans of two requests is
    /// brought by both.
    coming: Mutex<BTreeMap<usize, usize>>,
    /// Told when some of them came, or failed.
    came: Condvar,
    /// Parts of units.
    seams: Mutex<Seams>,
    /// Where readers read on.
    streams: Mutex<Streams>,
    /// How long the source takes.
    pace: Mutex<Pace>,
    failures: Failures<'a>,
}

/// Units that one thread brings. At the end all who wait for some of them look again.
struct Claim<'f, 'a> {
    filler: &'f LayerFiller<'a>,
    units: Range<usize>,
}

impl<'f, 'a> Claim<'f, 'a> {
    fn new(
        filler: &'f LayerFiller<'a>,
        units: Range<usize>,
        mut coming: MutexGuard<'_, BTreeMap<usize, usize>>,
    ) -> Self {
        for unit in units.clone() {
            *coming.entry(unit).or_default() += 1;
        }
        Self { filler, units }
    }
}

impl Drop for Claim<'_, '_> {
    fn drop(&mut self) {
        let mut coming = lock(&self.filler.coming);
        for unit in self.units.clone() {
            match coming.get_mut(&unit) {
                Some(2..) => *coming.entry(unit).or_default() -= 1,
                _ => drop(coming.remove(&unit)),
            }
        }
        self.filler.came.notify_all();
    }
}

impl std::fmt::Debug for LayerFiller<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerFiller")
            .field("device", &self.index.head.device)
            .finish_non_exhaustive()
    }
}

impl<'a> LayerFiller<'a> {
    /// Fills `device` by its index. Its bytes may be there or not, right or wrong: each unit is hashed before it is used.
    #[must_use]
    pub fn new(index: LayerIndex, blobs: &'a dyn BlobSource, device: LazyDeviceFill<'a>) -> Self {
        let source = LayerSource { blobs: Box::new(blobs), manifest: None, host: None };
        Self::from_source(index, source, device)
    }

    /// The same, for a certain image.
    #[must_use]
    pub fn from_source(
        index: LayerIndex,
        source: LayerSource<'a>,
        device: LazyDeviceFill<'a>,
    ) -> Self {
        let units = &index.head.units;
        let filled = units.iter().map(|_| AtomicBool::new(false)).collect();
        let untouched = units.iter().map(|_| AtomicU8::new(Why::Wanted.number())).collect();
        let core = DeviceCore {
            device,
            filled,
            filled_count: AtomicUsize::new(0),
            untouched,
            files: DeviceFiles::default(),
            counts: Counts::default(),
        };
        Self::of_core(Arc::new(core), index, source)
    }

    /// Another filler of the same device, for another image. What one of them has brought the other one has, too; but each
    /// asks its own source by its own index, and has failures of its own. `None` if the two indexes say different things of
    /// the device's bytes.
    #[must_use]
    pub fn beside(&self, index: LayerIndex, source: LayerSource<'a>) -> Option<Self> {
        let (head, there) = (&index.head, &self.index.head);
        let is_same = head.device == there.device
            && head.device_bytes == there.device_bytes
            && head.tar_bytes == there.tar_bytes
            && head.tail == there.tail
            && head.units == there.units;
        is_same.then(|| Self::of_core(Arc::clone(&self.core), index, source))
    }

    fn of_core(core: Arc<DeviceCore<'a>>, index: LayerIndex, source: LayerSource<'a>) -> Self {
        let LayerSource { blobs, manifest, host } = source;
        let image = manifest.map_or(ImageKey::Device(index.head.device), ImageKey::Manifest);
        Self {
            core,
            index,
            windows: WindowCache::default(),
            blobs,
            key: SourceKey { image, host: host.map(Into::into) },
            is_completing: AtomicBool::new(false),
            coming: Mutex::default(),
            came: Condvar::new(),
            seams: Mutex::default(),
            streams: Mutex::default(),
            pace: Mutex::default(),
            failures: Failures::new(&USUAL),
        }
    }

    /// Whose bytes it asks for, and where.
    pub(super) const fn key(&self) -> &SourceKey {
        &self.key
    }

    /// The manifest of the image that it fills the device for, if that is known.
    #[must_use]
    pub const fn manifest(&self) -> Option<&Digest> {
        match &self.key.image {
            ImageKey::Manifest(manifest) => Some(manifest),
            ImageKey::Device(_) => None,
        }
    }

    /// With a patience that is not the usual one.
    #[must_use]
    pub fn with_patience(self, patience: &'a SourcePatience) -> Self {
        Self { failures: Failures::new(patience), ..self }
    }

    /// With a way to find out where the device's files are, in bytes and in their order.
    #[must_use]
    pub fn with_files(mut self, find: impl Fn() -> Vec<Range<u64>> + Send + Sync + 'a) -> Self {
        // Another filler of the device has brought one.
        if let Some(core) = Arc::get_mut(&mut self.core) {
            core.files = DeviceFiles::new(find);
        }
        self
    }

    /// Where its files are.
    pub(super) fn files(&self) -> &DeviceFiles<'a> {
        &self.core.files
    }

    /// For how long no source has given anything, if a reader that came then is not to wait any longer.
    #[must_use]
    pub fn overdue(&self, since: Instant) -> Option<Duration> {
        self.failures.overdue(since, Instant::now())
    }

    /// Whether something of this range failed a moment ago, so that [`ensure`](Self::ensure) does not try.
    #[must_use]
    pub fn is_denied(&self, range: &Range<u64>) -> bool {
        self.missing(range).is_some_and(|it| self.denied(&it).is_some())
    }

    /// Whether a line about a failure is to be logged, and how many were not since the last one.
    #[must_use]
    pub(super) fn may_log(&self) -> Option<u64> {
        self.failures.may_log(Instant::now())
    }

    /// Denies what is missing of a range for a while: who waited for it waits no longer, and the kernel asks for it again.
    pub(super) fn deny(&self, range: &Range<u64>) {
        if let Some(units) = self.missing(range) {
            self.failures.failed(units, Instant::now());
        }
    }

    /// Why the disk has taken nothing since it was last asked.
    #[must_use]
    pub fn disk_error(&self) -> Option<String> {
        self.failures.disk_error()
    }

    /// Before anything is fetched that the disk would not take.
    fn check_disk(&self) -> Result<(), FillError> {
        // Root may take what is reserved, and of some file systems nothing is known.
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

    /// What it has done so far.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.core.counts
    }

    /// The device that is filled.
    #[must_use]
    pub fn device(&self) -> &LazyDeviceFill<'a> {
        &self.core.device
    }

    /// Its index.
    #[must_use]
    pub const fn index(&self) -> &LayerIndex {
        &self.index
    }

    /// Returns once all bytes of `range` that the device has are there, and had their digests. `begin` gets spans that may be
    /// wanted soon, as the blob is asked for others, and what it gives lives meanwhile.
    ///
    /// # Errors
    /// [`FillError`]; another attempt may succeed.
    pub fn ensure<T>(
        &self,
        range: Range<u64>,
        begin: impl Fn(Vec<Range<usize>>) -> T,
    ) -> Result<(), FillError> {
        let begun = Instant::now();
        let end = range.end.min(self.index.head.device_bytes);
        let mut start = range.start;
        while start < end {
            // Parts end where units do.
            let next = (start / AT_ONCE + 1).saturating_mul(AT_ONCE).min(end);
            self.ensure_part(&(start..next), begun, &begin)?;
            start = next;
        }
        self.touch(&range);
        Ok(())
    }

    /// The same for a part of a read, which has waited since then.
    fn ensure_part<T>(
        &self,
        range: &Range<u64>,
        begun: Instant,
        begin: &impl Fn(Vec<Range<usize>>) -> T,
    ) -> Result<(), FillError> {
        loop {
            let coming = lock(&self.coming);
            let Some(units) = self.missing(range) else { return Ok(()) };
            if let Some(error) = self.denied(&units) {
                return Err(error);
            }
            if coming.range(units.clone()).next().is_some() {
                if let Some(time) = self.overdue(begun) {
                    self.deny(range);
                    return Err(FillError::Silent(time));
                }
                // Another thread brings some of them.
                drop(self.came.wait_timeout(coming, LOOK).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            let around = self.around(&units, &coming);
            let _claim = Claim::new(self, around.clone(), coming);
            if let Err(error) = self.bring_wanted(range, &around, begin) {
                // Another image's filler may have brought them meanwhile.
                let Some(units) = self.missing(range) else { return Ok(()) };
                // Before others that want them look. These were not asked for.
                if !matches!(error, FillError::DiskPause(_)) {
                    self.failures.failed(units, Instant::now());
                }
                return Err(error);
            }
        }
    }

    /// Brings what is missing of these spans of the blob, but for what other threads bring already. Returns whether it has
    /// fetched something.
    ///
    /// # Errors
    /// [`FillError`]; another attempt may succeed.
    pub fn bring_ahead(&self, spans: Range<usize>, cause: Cause) -> Result<bool, FillError> {
        let mut has_fetched = false;
        let mut rest = spans.start..spans.end.min(self.index.head.spans.len());
        if cause == Cause::Stream {
            self.core.counts.begun(self.unpacked_bytes(&rest));
        }
        loop {
            let coming = lock(&self.coming);
            let is_open = |span: &usize| self.is_open(*span, &coming);
            let Some(first) = rest.clone().find(is_open) else { return Ok(has_fetched) };
            let next = (first..rest.end).find(|it| !is_open(it)).unwrap_or(rest.end);
            let units = self.index.head.touched_units(&(first..next));
            let _claim = Claim::new(self, units.clone(), coming);
            self.recall(&units)?;
            rest.start = next;
            if units.clone().all(|it| self.is_there(it)) {
                continue;
            }
            self.check_disk()?;
            let room = self.core.device.check_room(units.len() as u64 * UNIT);
            room.map_err(|error| {
                self.failures.no_room(cause_of(&error));
                FillError::Room(error)
            })?;
            self.bring_spans(first..next, cause)?;
            has_fetched = true;
        }
    }

    /// Brings what a reader wants, and what is around it in one request: but if bytes of that are wrong, what it wants alone.
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
            match self.bring(&all, &wanted, Cause::Reader) {
                Ok(()) => return Ok(()),
                Err(error) if error.is_of_the_blob() || matches!(error, FillError::Windows(_)) => {
                    tracing::debug!(%error, "it is tried with less");
                }
                // A source or a disk that fails does so again.
                Err(error) => return Err(error),
            }
        }
        self.bring_missing(range, Cause::Reader)
    }

    fn is_there(&self, unit: usize) -> bool {
        self.core.filled.get(unit).is_none_or(|it| it.load(Ordering::Acquire))
    }

    /// Notes that a reader has these bytes.
    pub fn touch(&self, range: &Range<u64>) {
        for unit in self.index.head.units_of(range) {
            let Some(untouched) = self.core.untouched.get(unit) else { return };
            let wanted = Why::Wanted.number();
            if untouched.load(Ordering::Relaxed) != wanted {
                self.core.counts.touched(Why::of(untouched.swap(wanted, Ordering::Relaxed)));
            }
        }
    }

    /// These units that a reader wants, and those around them that are worth bringing with them.
    fn around(&self, units: &Range<usize>, coming: &BTreeMap<usize, usize>) -> Range<usize> {
        let head = &self.index.head;
        // Of a size that is exact enough as it is.
        let part = |it: u64| f64::from(u32::try_from(it >> 10).unwrap_or(u32::MAX));
        let unit_bytes = part(head.blob_bytes) / part(head.device_bytes.max(UNIT)) * 65_536.0;
        let block = block(units, lock(&self.pace).free_bytes(), unit_bytes);
        let is_open = |it: &usize| !self.is_there(*it) && !coming.contains_key(it);
        let end = block.end.min(self.core.filled.len());
        let behind = (units.end..end).take_while(is_open).count();
        let before = (block.start..units.start).rev().take_while(is_open).count();
        // Not more in vain than readers have wanted.
        let most = usize::try_from(self.core.counts.may_waste()).unwrap_or(usize::MAX);
        let behind = behind.min(most);
        units.start - before.min(most - behind)..units.end + behind
    }

    /// Whether something of a span is neither here nor brought by another thread.
    fn is_open(&self, span: usize, coming: &BTreeMap<usize, usize>) -> bool {
        let mut units = self.index.head.touched_units(&(span..span + 1));
        units.any(|it| !self.is_there(it) && !coming.contains_key(&it))
    }

    /// Spans that may be wanted soon by a reader of `range`, which waits for the units `wanted`, apart from those that bring
    /// `all` of its request: what is behind them if it has read what is before them, and the file.
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
        // What takes longer than some requests would keep readers from the line.
        let free = lock(&self.pace).free_bytes() * FILE_REQUESTS;
        let packed = |it: &Range<usize>| u32::try_from(self.packed_bytes(it)).unwrap_or(u32::MAX);
        let file = file.filter(|it| !it.is_empty() && f64::from(packed(it)) <= free);
        let coming = lock(&self.coming);
        let mut left = self.core.counts.may_waste().saturating_mul(UNIT);
        let (mut seen, mut chosen, mut planned) = (BTreeSet::new(), Vec::new(), 0);
        for span in behind.chain(file.unwrap_or_default()) {
            if own.contains(&span) || !self.is_open(span, &coming) || !seen.insert(span) {
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

    /// Takes the units that the device has already, from an earlier filler or an earlier boot, and those of the whole device
    /// that an import has brought meanwhile.
    fn recall(&self, units: &Range<usize>) -> Result<(), FillError> {
        let head = &self.index.head;
        let mut bytes = vec![0; usize::try_from(UNIT).unwrap_or_default()];
        let whole = self.core.device.whole();
        for unit in units.clone().filter(|it| !self.core.filled[*it].load(Ordering::Acquire)) {
            let place = unit as u64 * UNIT;
            let length = head.device_bytes.saturating_sub(place).min(UNIT);
            // Nothing but holes: the usual case needs no hash. Nobody uses the file's position.
            let is_hole = match rustix::fs::seek(self.core.device.file(), SeekFrom::Data(place)) {
                Ok(data) => data >= place + length,
                Err(errno) => errno == rustix::io::Errno::NXIO,
            };
            let Ok(length) = usize::try_from(length) else { continue };
            let bytes = &mut bytes[..length];
            if !is_hole {
                self.core.device.read_at(bytes, place).map_err(FillError::Read)?;
            }
            let is_here = !is_hole && head.is_unit(unit, bytes);
            if is_here || self.copy_whole(whole.as_ref(), unit, bytes) {
                self.set_filled(unit);
                self.core.counts.recalled();
            }
        }
        Ok(())
    }

    /// Copies a unit of the whole device, if it is right there and the disk takes it. Otherwise it is fetched.
    fn copy_whole(&self, whole: Option<&File>, unit: usize, bytes: &mut [u8]) -> bool {
        let place = unit as u64 * UNIT;
        let read = whole.is_some_and(|it| it.read_exact_at(bytes, place).is_ok());
        read && self.index.head.is_unit(unit, bytes)
            && self.core.device.write_at(bytes, place).is_ok()
    }

    fn bring_missing(&self, range: &Range<u64>, cause: Cause) -> Result<(), FillError> {
        let Some(units) = self.missing(range) else { return Ok(()) };
        self.once_more(|| self.bring(&units, &units, cause))
    }

    /// Whether all bytes of `range` are there.
    #[must_use]
    pub fn has(&self, range: &Range<u64>) -> bool {
        self.missing(range).is_none()
    }

    /// Whether the disk has kept all that was filled, as far as is known now. It is asked before each reader goes on: what the
    /// disk has lost reads as zeros, as soon as the kernel has tried to write it.
    pub(super) fn is_kept(&self) -> bool {
        let Err(error) = self.core.device.check_written() else { return true };
        if !matches!(error, LazyDeviceError::Lost(_)) {
            let (device, error) = (self.core.device.id(), &error as &dyn std::error::Error);
            tracing::error!(%device, error, "the disk lost bytes: readers get I/O errors, unmount it");
        }
        false
    }

    /// Where the units are that have a part in `range`.
    pub(super) fn whole_units(&self, range: &Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return range.clone();
        }
        let units = self.index.head.units_of(range);
        let end = (units.end as u64 * UNIT).min(self.index.head.device_bytes);
        (units.start as u64 * UNIT).min(end)..end
    }

    /// Whether bytes that were read back are these filled units. A file system may lose bytes and say so too late, or never: one
    /// whose journal ended forgets that blocks were written, and the file has no error. If not, nobody gets more of the device.
    pub(super) fn is_right(&self, whole: &Range<u64>, bytes: &[u8]) -> bool {
        let units = self.index.head.units_of(whole);
        let mut chunks = bytes.chunks(usize::try_from(UNIT).unwrap_or(usize::MAX));
        let wrong = units
            .clone()
            .find(|unit| !chunks.next().is_some_and(|bytes| self.index.head.is_unit(*unit, bytes)));
        let Some(unit) = wrong else { return true };
        let condemned = self.core.device.condemn();
        if !matches!(condemned, Ok(false)) {
            let (device, error) =
                (self.core.device.id(), condemned.err().map(tracing::field::display));
            tracing::error!(%device, unit, error, "the disk changed bytes: readers get I/O errors, unmount it");
        }
        false
    }

    /// The number of units that are filled.
    #[must_use]
    pub fn filled(&self) -> usize {
        self.core.filled_count.load(Ordering::Acquire)
    }

    /// Whether all units are filled.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.filled() == self.core.filled.len()
    }

    fn set_filled(&self, unit: usize) {
        if !self.core.filled[unit].swap(true, Ordering::AcqRel) {
            self.core.filled_count.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Says that all of it is to come. Returns whether that is new.
    pub(super) fn begin_completing(&self) -> bool {
        !self.is_completing.swap(true, Ordering::AcqRel)
    }

    /// Says that nothing more is fetched but what readers want.
    pub(super) fn end_completing(&self) {
        self.is_completing.store(false, Ordering::Release);
    }

    /// Whether all of it is to come.
    pub(super) fn is_completing(&self) -> bool {
        self.is_completing.load(Ordering::Acquire)
    }

    /// From the first unit of a range that is not there to the last one.
    fn missing(&self, range: &Range<u64>) -> Option<Range<usize>> {
        let Range { start, end } = self.index.head.units_of(range);
        let units = self.core.filled.get(start..end)?;
        let is_missing = |it: &AtomicBool| !it.load(Ordering::Acquire);
        let first = units.iter().position(is_missing)?;
        let last = units.iter().rposition(is_missing)?;
        Some(start + first..start + last + 1)
    }

    /// Brings these units, some of which a reader may want.
    fn bring(
        &self,
        units: &Range<usize>,
        wanted: &Range<usize>,
        cause: Cause,
    ) -> Result<(), FillError> {
        self.take_in(self.plan(units), units, wanted, cause)?;
        match units.clone().find(|it| !self.is_there(*it)) {
            None => Ok(()),
            Some(unit) => Err(FillError::Digest(unit)),
        }
    }

    /// Brings the units of these spans.
    fn bring_spans(&self, spans: Range<usize>, cause: Cause) -> Result<(), FillError> {
        let units = self.index.head.whole_units(&spans);
        let from = self.index.head.spans.get(spans.start);
        let from = from.map_or(self.index.head.tar_bytes, |it| it.unpacked);
        let fetch = || Fetch { spans: spans.clone(), before: Vec::new(), behind: Vec::new(), from };
        self.once_more(|| self.take_in(fetch(), &units, &(0..0), cause))
    }

    /// Does `work`, which fetches something; again, if that was wrong.
    fn once_more(&self, work: impl Fn() -> Result<(), FillError>) -> Result<(), FillError> {
        match work() {
            Err(error) if error.is_of_the_blob() => {
                let blob = &self.index.head.blob;
                if let Some(unlogged) = self.may_log() {
                    tracing::warn!(%blob, %error, unlogged, "it is fetched once more");
                }
                let _is_another_there = self.blobs.distrust(blob);
                work()
            }
            done => done,
        }
    }
}
