//! The door of lazy devices: readers wait here until their bytes are downloaded (decision 19).
//!
//! A file on FUSE stands for each device (`fuse`), and reads of it are requests (`request_server`).

mod completion;
mod fetch_pool;
mod fuse;
mod request_server;
mod waiting;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::DeviceId;
use rustix::event::{EventfdFlags, eventfd};
use store::OperationError;

use self::fetch_pool::FetchPool;
use self::fuse::Connections;
pub use self::fuse::{ConnectionId, FuseDoorError};
use super::fill::{Check, Completing, LayerFiller, SourceKey};
use super::metrics::FailureCause;
use super::prefetch::{Ahead, COMPLETERS, WORKERS};
use super::wire::KeptState;

/// Size of a unit, in bytes.
const UNIT_BYTES: usize = 64 << 10;
const _: () = assert!(UNIT_BYTES as u64 == image::lazy::UNIT);
/// How often waiting readers are checked for their timeout: the longest time until a door notices its end.
const LOOK: Duration = Duration::from_millis(200);
/// How long a door that ends waits for running fetches. The next door handles the remaining readers.
const LAST: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DoorError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A file on FUSE cannot be created or served.
    #[error(transparent)]
    Fuse(#[from] FuseDoorError),
    /// The door does not serve the device.
    #[error("this service does not serve device {0}")]
    Unknown(DeviceId),
}

/// Makes readers of devices wait until their bytes are filled.
///
/// While a device is mounted, its door must be served. If all descriptors of a connection are closed, its readers get
/// I/O errors.
#[derive(Debug)]
pub struct Door<'a> {
    /// Readable when the door should end.
    wake: OwnedFd,
    connections: Connections,
    devices: RwLock<HashMap<InodePlace, Armed<'a>>>,
    ahead: Ahead<'a>,
    /// When a reader last got its bytes, for each source.
    gave: Mutex<HashMap<SourceKey, Instant>>,
    /// Set to make all fetches fail at once. Readers whose fetch fails are then left to the next door.
    cancel: Option<&'a AtomicBool>,
}

/// The device number and the inode number of a file.
pub(super) type InodePlace = (u64, u64);

/// A device that the door serves.
#[derive(Debug)]
struct Armed<'a> {
    device: DeviceId,
    /// Since when a file that stands for the device has been in use, if it is.
    used: Option<Instant>,
    state: ArmedState<'a>,
}

/// The progress of a device.
#[derive(Debug)]
enum ArmedState<'a> {
    Filling(Ways<'a>),
    /// All units are filled, and the whole device is being hashed and synced. Readers do not wait, but the disk may
    /// still lose bytes. The keeper has the device.
    Sealing(Arc<LayerFiller<'a>>),
    /// All bytes are verified and on the disk. The file is kept open for requests that may still come.
    Complete(Arc<File>),
    /// The bytes have another digest, or the disk lost some, or the door ended before this was known. Readers get
    /// errors.
    Broken(File),
}

/// The fillers of a device: one for each image that it was mounted for.
#[derive(Debug)]
struct Ways<'a> {
    first: Arc<LayerFiller<'a>>,
    others: Vec<Arc<LayerFiller<'a>>>,
    /// Manifest of the image that the device was mounted for last.
    last: Option<Digest>,
}

impl<'a> Ways<'a> {
    fn all(&self) -> impl Iterator<Item = &Arc<LayerFiller<'a>>> {
        std::iter::once(&self.first).chain(&self.others)
    }

    fn filler(&self, manifest: &Digest) -> Option<&Arc<LayerFiller<'a>>> {
        self.all().find(|it| it.manifest() == Some(manifest))
    }

    /// Returns the filler for an image, or the first one if the image is unknown.
    fn filler_or_first(&self, manifest: Option<&Digest>) -> &Arc<LayerFiller<'a>> {
        manifest.and_then(|it| self.filler(it)).unwrap_or(&self.first)
    }

    /// Records that readers of an image come. If they have no separate filler, the filler that they share with
    /// another image uses no hot pack.
    fn connects(&self, manifest: Option<&Digest>) {
        let filler = self.filler_or_first(manifest);
        if filler.manifest() != manifest {
            filler.stop_using_hot_pack();
        }
    }

    /// Returns the filler for the image that the device was mounted for last.
    fn usual(&self) -> &Arc<LayerFiller<'a>> {
        self.filler_or_first(self.last.as_ref())
    }

    /// Returns whether no thread is filling the device.
    fn is_idle(&self) -> bool {
        self.all().all(|it| Arc::strong_count(it) == 1)
    }
}

impl ArmedState<'_> {
    fn file(&self) -> &File {
        match self {
            Self::Filling(ways) => ways.first.device().file(),
            Self::Sealing(filler) => filler.device().file(),
            Self::Complete(file) => file,
            Self::Broken(file) => file,
        }
    }
}

/// The source of a device's bytes.
enum DeviceBytes<'a> {
    /// A device whose bytes may be incomplete.
    Filling(Arc<LayerFiller<'a>>),
    /// A complete device.
    Complete(Arc<File>),
}

impl<'a> DeviceBytes<'a> {
    /// Returns the filler of a device whose bytes may be incomplete.
    const fn filler(&self) -> Option<&Arc<LayerFiller<'a>>> {
        match self {
            Self::Filling(filler) => Some(filler),
            Self::Complete(_) => None,
        }
    }

    fn file(&self) -> &File {
        match self {
            Self::Filling(filler) => filler.device().file(),
            Self::Complete(file) => file,
        }
    }

    fn has(&self, range: &Range<u64>) -> bool {
        match self {
            Self::Filling(filler) => filler.has(range),
            Self::Complete(_) => true,
        }
    }

    fn touch(&self, range: &Range<u64>) {
        if let Self::Filling(filler) = self {
            filler.touch(range);
        }
    }

    /// Returns the bytes that must be read to verify `range`: blocks with tags, blocks of the hot pack, or whole units. A
    /// complete device was verified as a whole.
    fn to_compare(&self, range: &Range<u64>) -> Range<u64> {
        match self {
            Self::Filling(filler) => filler.verifiable(range),
            Self::Complete(_) => range.clone(),
        }
    }

    /// Compares the bytes of `whole`, which [`Self::to_compare`] returned before they were read, with their tags or
    /// digests, and returns those of `range`. Counts a failure.
    fn compared<'b>(
        &self,
        range: &Range<u64>,
        whole: &Range<u64>,
        bytes: &'b [u8],
    ) -> Compared<'b> {
        if let Self::Filling(filler) = self {
            if !is_kept(filler) {
                return Compared::Wrong;
            }
            match filler.check(whole, bytes) {
                Check::Right => {}
                Check::Changed => return Compared::Changed,
                Check::Wrong => {
                    filler.counts().failed(FailureCause::Disk);
                    filler.record_failure("the disk changed data of the device".to_owned());
                    return Compared::Wrong;
                }
            }
        }
        let place = |it: u64| usize::try_from(it.saturating_sub(whole.start)).unwrap_or(usize::MAX);
        match bytes.get(place(range.start)..place(range.end)) {
            Some(bytes) => Compared::Right(bytes),
            None => Compared::Wrong,
        }
    }

    /// Returns whether a read of this range must fail at once, because fetching failed a moment ago. Counts the
    /// failure.
    fn denies(&self, range: &Range<u64>) -> bool {
        let Self::Filling(filler) = self else { return false };
        let is_denied = filler.is_denied(range);
        if is_denied {
            filler.counts().failed(FailureCause::Denied);
        }
        is_denied
    }

    fn asked(&self) {
        if let Self::Filling(filler) = self {
            filler.counts().asked();
        }
    }
}

/// The outcome of [`DeviceBytes::compared`].
enum Compared<'b> {
    Right(&'b [u8]),
    /// The bytes were replaced while they were read: read them again.
    Changed,
    Wrong,
}

/// Returns whether the disk has kept the bytes of a device. Counts a failure.
fn is_kept(filler: &LayerFiller<'_>) -> bool {
    let is_kept = filler.is_kept();
    if !is_kept {
        filler.counts().failed(FailureCause::Disk);
        filler.record_failure("the disk lost data of the device".to_owned());
    }
    is_kept
}

/// Ends the fetching threads when it is dropped.
struct End<'q, 'a> {
    ahead: &'q Ahead<'a>,
    pool: &'q FetchPool<'a>,
}

impl Drop for End<'_, '_> {
    fn drop(&mut self) {
        self.ahead.end();
        self.pool.end();
    }
}

impl<'a> Door<'a> {
    /// Creates a door without devices.
    pub fn new() -> Result<Self, DoorError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(OperationError::of("wait", "for readers"))?;
        let connections = Connections::new(wake.as_fd())?;
        Ok(Self {
            wake,
            connections,
            devices: RwLock::default(),
            ahead: Ahead::default(),
            gave: Mutex::default(),
            cancel: None,
        })
    }

    /// Makes this door leave its readers to the next door when it ends. `cancel` makes all sources fail.
    pub(super) fn with_cancel(self, cancel: &'a AtomicBool) -> Self {
        Self { cancel: Some(cancel), ..self }
    }

    fn devices(&self) -> RwLockReadGuard<'_, HashMap<InodePlace, Armed<'a>>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn devices_mut(&self) -> RwLockWriteGuard<'_, HashMap<InodePlace, Armed<'a>>> {
        self.devices.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a filler and its device. Its readers come by [`connect`](Self::connect).
    pub fn fill(&self, filler: LayerFiller<'a>) -> Result<(), DoorError> {
        let place = place(filler.device().file())?;
        let device = *filler.device().id();
        let last = filler.manifest().copied();
        let ways = Ways { first: Arc::new(filler), others: Vec::new(), last };
        let state = ArmedState::Filling(ways);
        self.devices_mut().insert(place, Armed { device, used: None, state });
        Ok(())
    }

    /// Records that a device is now mounted for an image. Returns whether it has a filler for that image.
    pub(super) fn is_for(&self, device: &DeviceId, manifest: &Digest) -> bool {
        let mut devices = self.devices_mut();
        let armed = devices.values_mut().find(|it| it.device == *device);
        let Some(ArmedState::Filling(ways)) = armed.map(|it| &mut it.state) else { return true };
        let is_there = ways.filler(manifest).is_some();
        if is_there {
            ways.last = Some(*manifest);
        }
        is_there
    }

    /// Adds another filler of a device, for another image.
    pub(super) fn fill_beside(&self, filler: LayerFiller<'a>) {
        let mut devices = self.devices_mut();
        let armed = devices.values_mut().find(|it| it.device == *filler.device().id());
        if let Some(ArmedState::Filling(ways)) = armed.map(|it| &mut it.state) {
            ways.last = filler.manifest().copied();
            ways.others.push(Arc::new(filler));
        }
    }

    /// Removes the devices that are not in use. Returns the number of devices that must still be served. Calls `gone`
    /// with the ids of the removed ones.
    pub fn disarm(&self, mut gone: impl FnMut(&DeviceId), unread: Unread) -> usize {
        let mut devices = self.devices_mut();
        let is_served = |place: InodePlace| self.connections.has(place);
        let is_free = |(place, armed): &(&InodePlace, &Armed<'a>)| {
            let may_go = match &armed.state {
                // A thread may still be filling the device for a reader that was killed.
                ArmedState::Filling(ways) => {
                    ways.is_idle()
                        && (unread == Unread::Go
                            || !ways.all().any(|it| it.is_completing(Completing::Asked)))
                }
                ArmedState::Sealing(_) | ArmedState::Complete(_) | ArmedState::Broken(_) => true,
            };
            may_go && !is_served(**place)
        };
        let free: Vec<_> = devices.iter().filter(is_free).map(|(place, _)| *place).collect();
        let mut released = Vec::new();
        for place in free {
            released.extend(devices.remove(&place).map(|it| it.device));
        }
        let is_left = |(place, armed): &(&InodePlace, &Armed<'a>)| {
            !matches!(armed.state, ArmedState::Complete(_)) || is_served(**place)
        };
        let left = devices.iter().filter(is_left).count();
        // The callback may be slow, and readers need the lock.
        drop(devices);
        released.iter().for_each(&mut gone);
        left
    }

    /// Returns the source of a device's bytes for an image, or `None` if its readers get errors.
    fn bytes_of_device(
        &self,
        place: InodePlace,
        manifest: Option<&Digest>,
    ) -> Option<DeviceBytes<'a>> {
        match &self.devices().get(&place)?.state {
            ArmedState::Filling(ways) => {
                Some(DeviceBytes::Filling(Arc::clone(ways.filler_or_first(manifest))))
            }
            ArmedState::Sealing(filler) => Some(DeviceBytes::Filling(Arc::clone(filler))),
            ArmedState::Complete(file) => Some(DeviceBytes::Complete(Arc::clone(file))),
            ArmedState::Broken(_) => None,
        }
    }

    /// Returns one filler of each incomplete device.
    #[must_use]
    pub fn fillers(&self) -> Vec<Arc<LayerFiller<'a>>> {
        self.fillers_for(None)
    }

    /// Like [`fillers`](Self::fillers), but prefers the fillers for an image.
    pub(super) fn fillers_for(&self, manifest: Option<&Digest>) -> Vec<Arc<LayerFiller<'a>>> {
        let filling = |armed: &Armed<'a>| match &armed.state {
            ArmedState::Filling(ways) => Some(Arc::clone(ways.filler_or_first(manifest))),
            ArmedState::Sealing(_) | ArmedState::Complete(_) | ArmedState::Broken(_) => None,
        };
        self.devices().values().filter_map(filling).collect()
    }

    /// Calls `give` with the file and the state of each device that the keeper must hold for the next service.
    pub(super) fn files<E>(
        &self,
        mut give: impl FnMut(&DeviceId, &File, KeptState) -> Result<(), E>,
    ) -> Result<(), E> {
        let to_keep = |(place, it): (&InodePlace, &Armed<'a>)| {
            let state = match &it.state {
                ArmedState::Filling(ways) => {
                    let completing = ways.all().find(|it| it.is_completing(Completing::Asked));
                    let manifest = completing.unwrap_or(&ways.first).manifest().copied();
                    let is_completing = completing.is_some();
                    KeptState { is_completing, manifest, ..KeptState::default() }
                }
                ArmedState::Complete(_) if self.connections.has(*place) => {
                    KeptState { is_complete: true, ..KeptState::default() }
                }
                ArmedState::Complete(_) => return None,
                ArmedState::Sealing(_) | ArmedState::Broken(_) => KeptState::default(),
            };
            // If the descriptor cannot be duplicated, the keeper continues to hold the descriptor that it may already
            // have.
            Some((it.device, it.state.file().try_clone().ok()?, state))
        };
        // The callback may be slow, and readers need the lock.
        let files: Vec<_> = self.devices().iter().filter_map(to_keep).collect();
        files.iter().try_for_each(|(device, file, state)| give(device, file, *state))
    }

    /// Returns a device that is full, for sealing. From then on, its readers do not wait.
    pub fn take_full(&self) -> Option<Arc<LayerFiller<'a>>> {
        let mut devices = self.devices_mut();
        let is_full = |armed: &&mut Armed<'a>| matches!(&armed.state, ArmedState::Filling(it) if it.first.is_full() && it.is_idle());
        let armed = devices.values_mut().find(is_full)?;
        let ArmedState::Filling(ways) = &armed.state else { return None };
        let filler = Arc::clone(&ways.first);
        armed.state = ArmedState::Sealing(Arc::clone(&filler));
        Some(filler)
    }

    /// Checks whether the disk has kept the filled bytes. Readers of a device with lost bytes get I/O errors.
    pub(super) fn check_written(&self) {
        for filler in self.fillers().into_iter().filter(|it| !it.is_kept()) {
            let device = *filler.device().id();
            let mut devices = self.devices_mut();
            let armed = devices.values_mut().find(|it| it.device == device);
            if let Some(armed) = armed
                && let Ok(file) = armed.state.file().try_clone()
            {
                armed.state = ArmedState::Broken(file);
            }
        }
    }

    /// Records that sealing a device from [`take_full`](Self::take_full) failed. Its readers get I/O errors from then
    /// on.
    pub fn refuse(&self, device: &DeviceId) -> Result<(), DoorError> {
        let mut devices = self.devices_mut();
        let Some(armed) = devices.values_mut().find(|it| it.device == *device) else {
            return Ok(());
        };
        if let state @ (ArmedState::Sealing(_) | ArmedState::Complete(_)) = &armed.state {
            let file = state.file().try_clone().map_err(unexamined)?;
            armed.state = ArmedState::Broken(file);
        }
        Ok(())
    }

    /// Returns whether the device with this file was returned by [`take_full`](Self::take_full) and has not failed
    /// since.
    pub fn is_complete(&self, file: &File) -> Result<bool, DoorError> {
        let place = place(file)?;
        let devices = self.devices();
        Ok(devices
            .get(&place)
            .is_some_and(|it| matches!(it.state, ArmedState::Sealing(_) | ArmedState::Complete(_))))
    }

    /// Records that a device is sealed. `file` is its file, open for reading.
    pub fn pass(&self, device: DeviceId, file: File) -> Result<(), DoorError> {
        let place = place(&file)?;
        let state = ArmedState::Complete(Arc::new(file));
        self.devices_mut().insert(place, Armed { device, used: None, state });
        Ok(())
    }

    /// Loads frames of a hot pack.
    pub(super) fn load(&self, frames: Vec<(Arc<LayerFiller<'a>>, usize)>) {
        self.ahead.load(frames);
    }

    /// Prefetches byte ranges of devices in the order of a trace, with less priority than waiting readers.
    pub fn bring_ahead(&self, runs: Vec<(Arc<LayerFiller<'a>>, Range<usize>)>) {
        self.ahead.trace(runs);
    }

    /// Wakes [`serve`](Self::serve) so that it notices the end at once. Without this, `serve` notices it within 200 ms.
    pub(super) fn wake(&self) {
        // This write fails only if the counter of the eventfd is full, and then the descriptor is readable anyway.
        let _written = rustix::io::write(&self.wake, &[1; 8]);
    }

    /// Serves readers until `stop` is set. Then it takes no more requests, so further requests wait for the next process
    /// that serves the connections. Requests that were already taken get replies, or, if another door follows, the
    /// kernel sends them again.
    ///
    /// # Errors
    /// On an error, readers keep waiting until the connections are served again or closed.
    pub fn serve(&self, stop: &AtomicBool) -> Result<(), DoorError> {
        let pool = FetchPool::default();
        thread::scope(|scope| {
            pool.start(scope, |reader| self.bring_or_deny(reader));
            for _ in 0..WORKERS {
                scope.spawn(|| self.ahead.work());
            }
            for _ in 0..COMPLETERS {
                scope.spawn(|| self.ahead.complete_devices());
            }
            let end = End { ahead: &self.ahead, pool: &pool };
            let mut waiting = self.take_requests(&pool, &|| stop.load(Ordering::Relaxed))?;
            // Dropping `end` makes the threads exit after their current work.
            drop(end);
            let ending = Instant::now();
            while !self.see_to(&mut waiting) {
                if let Some(cancel) = self.cancel
                    && ending.elapsed() > LAST
                {
                    cancel.store(true, Ordering::Relaxed);
                }
                thread::sleep(LOOK / 100);
            }
            Ok(())
        })
    }
}

/// Returns all fillers of a device that is being filled.
fn all_ways<'a>(armed: &Armed<'a>) -> Vec<Arc<LayerFiller<'a>>> {
    match &armed.state {
        ArmedState::Filling(ways) => ways.all().cloned().collect(),
        ArmedState::Sealing(_) | ArmedState::Complete(_) | ArmedState::Broken(_) => Vec::new(),
    }
}

/// How to treat a device that should become complete but is not open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unread {
    /// Continue to fill the device.
    Stay,
    /// Leave it incomplete.
    Go,
}

/// Returns the device number and the inode number of a file.
pub(super) fn place(file: &File) -> Result<InodePlace, DoorError> {
    let found = file.metadata().map_err(unexamined)?;
    Ok((found.dev(), found.ino()))
}

pub(super) fn unexamined(error: io::Error) -> OperationError {
    OperationError::of("examine", "a lazy device")(error)
}
