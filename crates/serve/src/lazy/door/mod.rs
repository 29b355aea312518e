//! Where readers of a device wait until their bytes are there (decision 19).
//!
//! There are two ways in: reads of a file that is marked are events (`precontent`), and reads of a file on FUSE are requests
//! (`fuse`). Who waits, for what, and what becomes of devices is the same for both.

mod fetchers;
mod fuse;
mod precontent;
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
use kernel::fanotify::{Group, PrecontentError};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use self::fetchers::Fetchers;
use self::fuse::Connections;
pub use self::fuse::{ConnectionId, FuseDoorError};
use super::fill::{LayerFiller, SourceKey};
use super::journal::{Journal, TakenEvent};
use super::metrics::FailureCause;
use super::prefetch::{Ahead, WORKERS};
use super::wire::KeptState;

/// Bytes of a unit.
const UNIT_BYTES: usize = 64 << 10;
const _: () = assert!(UNIT_BYTES as u64 == image::lazy::UNIT);
/// How long it may take until the end is seen, in milliseconds.
const PATIENCE: i64 = 50;
/// How often it is looked whether a reader has waited long enough.
const LOOK: Duration = Duration::from_millis(200);
/// How long a door that ends waits for what is under way. The next one brings the rest.
const LAST: Duration = Duration::from_secs(1);

/// An error of a door.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DoorError {
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] PrecontentError),
    /// There is no memory for its journal.
    #[error("cannot have a journal of events")]
    Journal(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A file on FUSE cannot be made, or served.
    #[error(transparent)]
    Fuse(#[from] FuseDoorError),
    /// A device cannot be looked at.
    #[error("cannot look at a lazy device")]
    Device(#[source] io::Error),
    /// The device is not served here.
    #[error("device {0} is not served here")]
    Unknown(DeviceId),
    /// Waiting for events failed.
    #[error("cannot wait for readers")]
    Wait(#[source] Errno),
}

/// Lets readers of devices wait until the bytes that they want are filled.
///
/// As long as a mount of a marked device lives, its door has to be served, or be gone with all of its descriptors: then
/// readers get what is in the file, which may be zeros. Readers of files on FUSE get errors then.
#[derive(Debug)]
pub struct Door<'a> {
    group: Group,
    /// Readable at the end.
    wake: OwnedFd,
    connections: Connections,
    journal: Journal,
    /// Events that an earlier door took and did not answer.
    inherited: Mutex<Vec<TakenEvent>>,
    devices: RwLock<HashMap<InodePlace, Armed<'a>>>,
    /// Whether a device may be marked that is not among them.
    has_unknown: AtomicBool,
    ahead: Ahead<'a>,
    /// When a reader last got what it waited for, by whom was asked for it.
    gave: Mutex<HashMap<SourceKey, Instant>>,
    /// Set to have all sources fail at once. Readers for which nothing comes any more are left to the next door then.
    cancel: Option<&'a AtomicBool>,
    /// Events that are left to the next door. Their numbers are in use as long as this door is.
    left: Mutex<Vec<TakenEvent>>,
}

/// How readers of a device wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DoorKind {
    /// The device is marked.
    Fanotify,
    /// A file on FUSE stands for the device.
    Fuse,
}

/// Which of them a service uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DoorWish {
    /// The one that never gives bytes that are not right, whichever processes are killed: FUSE. Where it cannot be had, no
    /// device is lent.
    #[default]
    Auto,
    /// This one.
    Only(DoorKind),
}

/// The numbers of a file system and an inode.
pub(super) type InodePlace = (u64, u64);

/// A device whose readers may wait here.
#[derive(Debug)]
struct Armed<'a> {
    device: DeviceId,
    is_marked: bool,
    state: ArmedState<'a>,
}

/// How far it is.
#[derive(Debug)]
enum ArmedState<'a> {
    Filling(Ways<'a>),
    /// All units are filled, and it is hashed and synced as a whole. Its readers do not wait, but the disk may still lose what
    /// it has. The keeper has it.
    Sealing(Arc<LayerFiller<'a>>),
    /// All bytes are there. The file is open as long as a request may be on its way.
    Complete(Arc<File>),
    /// Its bytes are those of another device, or the disk did not keep them, or all ends before that is known.
    Broken(File),
}

/// The fillers of a device: one for each image that it was lent for.
#[derive(Debug)]
struct Ways<'a> {
    first: Arc<LayerFiller<'a>>,
    others: Vec<Arc<LayerFiller<'a>>>,
    /// The image that it was lent for last, of which readers behind a mark are believed to be.
    last: Option<Digest>,
}

impl<'a> Ways<'a> {
    fn all(&self) -> impl Iterator<Item = &Arc<LayerFiller<'a>>> {
        std::iter::once(&self.first).chain(&self.others)
    }

    fn find(&self, manifest: &Digest) -> Option<&Arc<LayerFiller<'a>>> {
        self.all().find(|it| it.manifest() == Some(manifest))
    }

    /// The one for an image, or any if nobody knows which it is.
    fn of(&self, manifest: Option<&Digest>) -> &Arc<LayerFiller<'a>> {
        manifest.and_then(|it| self.find(it)).unwrap_or(&self.first)
    }

    /// The one for readers of whom only the device is known.
    fn usual(&self) -> &Arc<LayerFiller<'a>> {
        self.of(self.last.as_ref())
    }

    /// Whether no thread fills the device.
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

/// Where a device's bytes are.
enum DeviceBytes<'a> {
    /// Some may be missing.
    Filling(Arc<LayerFiller<'a>>),
    /// In the file.
    Complete(Arc<File>),
}

impl DeviceBytes<'_> {
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

    /// What is read so that `range` can be compared: whole units. A device that is complete was compared as a whole.
    fn to_compare(&self, range: &Range<u64>) -> Range<u64> {
        match self {
            Self::Filling(filler) => filler.whole_units(range),
            Self::Complete(_) => range.clone(),
        }
    }

    /// Those bytes of `range` that were read as [`Self::to_compare`] says, if they are what they must be. Counted if not.
    fn compared<'b>(&self, range: &Range<u64>, bytes: &'b [u8]) -> Option<&'b [u8]> {
        let whole = self.to_compare(range);
        if let Self::Filling(filler) = self {
            if !are_kept([filler]) {
                return None;
            }
            if !filler.is_right(&whole, bytes) {
                filler.counts().failed(FailureCause::Disk);
                return None;
            }
        }
        let place = |it: u64| usize::try_from(it.saturating_sub(whole.start)).ok();
        bytes.get(place(range.start)?..place(range.end)?)
    }

    /// Whether a read of these bytes fails without another attempt, which is counted then.
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

/// Whether the disk has kept the bytes of these devices: else a read fails, which is counted.
fn are_kept<'f, 'a: 'f>(fillers: impl IntoIterator<Item = &'f Arc<LayerFiller<'a>>>) -> bool {
    let lost = fillers.into_iter().find(|it| !it.is_kept());
    lost.inspect(|it| it.counts().failed(FailureCause::Disk)).is_none()
}

/// Ends the threads that bring bytes.
struct End<'q, 'a> {
    ahead: &'q Ahead<'a>,
    fetchers: &'q Fetchers<'a>,
}

impl Drop for End<'_, '_> {
    fn drop(&mut self) {
        self.ahead.end();
        self.fetchers.end();
    }
}

impl<'a> Door<'a> {
    /// A door without devices, with a group of its own.
    ///
    /// # Errors
    /// [`DoorError`].
    pub fn new() -> Result<Self, DoorError> {
        let journal = Journal::new().map_err(|it| DoorError::Journal(it.into()))?;
        Self::succeed(Group::to_watch()?, journal, Vec::new())
    }

    /// A door without devices, of a group that may have marks already, and of readers that wait already.
    ///
    /// # Errors
    /// [`DoorError::Fuse`].
    pub(super) fn succeed(
        group: Group,
        journal: Journal,
        inherited: Vec<TakenEvent>,
    ) -> Result<Self, DoorError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(DoorError::Wait)?;
        let connections = Connections::new(wake.as_fd())?;
        Ok(Self {
            group,
            wake,
            connections,
            journal,
            inherited: Mutex::new(inherited),
            devices: RwLock::default(),
            has_unknown: AtomicBool::new(false),
            ahead: Ahead::default(),
            gave: Mutex::default(),
            cancel: None,
            left: Mutex::default(),
        })
    }

    /// The same, which leaves readers to the door after it. `cancel` has all sources fail.
    pub(super) fn with_cancel(self, cancel: &'a AtomicBool) -> Self {
        Self { cancel: Some(cancel), ..self }
    }

    pub(super) const fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Says that a device may be marked that cannot be armed: its readers get I/O errors.
    pub(super) fn has_unknown(&self) {
        self.has_unknown.store(true, Ordering::Relaxed);
    }

    /// Its group.
    #[must_use]
    pub const fn group(&self) -> &Group {
        &self.group
    }

    fn devices(&self) -> RwLockReadGuard<'_, HashMap<InodePlace, Armed<'a>>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn devices_mut(&self) -> RwLockWriteGuard<'_, HashMap<InodePlace, Armed<'a>>> {
        self.devices.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a filler. Nothing waits for it yet.
    ///
    /// # Errors
    /// [`DoorError::Device`].
    pub fn fill(&self, filler: LayerFiller<'a>) -> Result<(), DoorError> {
        let place = place(filler.device().file())?;
        let device = *filler.device().id();
        let last = filler.manifest().copied();
        let ways = Ways { first: Arc::new(filler), others: Vec::new(), last };
        let state = ArmedState::Filling(ways);
        self.devices_mut().insert(place, Armed { device, is_marked: false, state });
        Ok(())
    }

    /// Says that a device is lent for the image of a manifest from now on. Returns whether it has a filler for that.
    pub(super) fn is_for(&self, device: &DeviceId, manifest: &Digest) -> bool {
        let mut devices = self.devices_mut();
        let armed = devices.values_mut().find(|it| it.device == *device);
        let Some(ArmedState::Filling(ways)) = armed.map(|it| &mut it.state) else { return true };
        let is_there = ways.find(manifest).is_some();
        if is_there {
            ways.last = Some(*manifest);
        }
        is_there
    }

    /// Takes in one more filler of a device that is filled here: for another image.
    pub(super) fn fill_beside(&self, filler: LayerFiller<'a>) {
        let mut devices = self.devices_mut();
        let armed = devices.values_mut().find(|it| it.device == *filler.device().id());
        if let Some(ArmedState::Filling(ways)) = armed.map(|it| &mut it.state) {
            ways.last = filler.manifest().copied();
            ways.others.push(Arc::new(filler));
        }
    }

    /// Marks a device that was [filled](Self::fill) here. Readers through descriptors that are opened afterwards wait for bytes
    /// that are not there. The mount has to open it afterwards: the filler's own descriptor never waits. A second mark changes
    /// nothing.
    ///
    /// # Errors
    /// [`DoorError`]; then nothing waits.
    pub fn mark(&self, device: &DeviceId) -> Result<(), DoorError> {
        let mut devices = self.devices_mut();
        let armed = devices.values_mut().find(|it| it.device == *device);
        let armed = armed.ok_or(DoorError::Unknown(*device))?;
        self.group.mark(armed.state.file().as_fd())?;
        armed.is_marked = true;
        Ok(())
    }

    /// Takes in a filler, and marks its device.
    ///
    /// # Errors
    /// As [`mark`](Self::mark).
    pub fn arm(&self, filler: LayerFiller<'a>) -> Result<(), DoorError> {
        let device = *filler.device().id();
        self.fill(filler)?;
        self.mark(&device).inspect_err(|_| self.devices_mut().retain(|_, it| it.device != device))
    }

    /// How readers of a device wait here.
    #[must_use]
    pub fn kinds(&self, device: &DeviceId) -> Vec<DoorKind> {
        let devices = self.devices();
        let found = devices.iter().find(|it| it.1.device == *device);
        let marked = found.filter(|it| it.1.is_marked).map(|_| DoorKind::Fanotify);
        let served = found.filter(|it| self.connections.has(*it.0)).map(|_| DoorKind::Fuse);
        marked.into_iter().chain(served).collect()
    }

    /// Takes the marks from devices of which `is_free` says that nothing has them open, and returns how many are left that
    /// somebody has to serve. The ids of the others are given to `gone`.
    ///
    /// # Errors
    /// [`DoorError`].
    pub fn disarm(
        &self,
        is_free: impl Fn(&File) -> bool,
        mut gone: impl FnMut(&DeviceId),
        unread: Unread,
    ) -> Result<usize, DoorError> {
        let mut devices = self.devices_mut();
        let is_served = |place: InodePlace| self.connections.has(place);
        let is_free = |(place, armed): &(&InodePlace, &Armed<'a>)| {
            let may_go = match &armed.state {
                // A thread may be filling it still, for a reader that was killed.
                ArmedState::Filling(ways) => {
                    ways.is_idle()
                        && (unread == Unread::Go || !ways.all().any(|it| it.is_completing()))
                }
                ArmedState::Sealing(_) | ArmedState::Complete(_) | ArmedState::Broken(_) => true,
            };
            may_go && !is_served(**place) && is_free(armed.state.file())
        };
        let free: Vec<_> = devices.iter().filter(is_free).map(|(place, _)| *place).collect();
        let mut released = Vec::new();
        for place in free {
            if let Some(armed) = devices.get(&place)
                && armed.is_marked
            {
                self.group.unmark(armed.state.file().as_fd())?;
            }
            released.extend(devices.remove(&place).map(|it| it.device));
        }
        let is_left = |(place, armed): &(&InodePlace, &Armed<'a>)| {
            !matches!(armed.state, ArmedState::Complete(_)) || is_served(**place)
        };
        let left = devices.iter().filter(is_left).count();
        // Who is told may be slow, and readers need the devices.
        drop(devices);
        released.iter().for_each(&mut gone);
        Ok(left)
    }

    /// Where the bytes of a device are, for an image; `None` if its readers get errors.
    fn find(&self, place: InodePlace, manifest: Option<&Digest>) -> Option<DeviceBytes<'a>> {
        match &self.devices().get(&place)?.state {
            ArmedState::Filling(ways) => Some(DeviceBytes::Filling(Arc::clone(ways.of(manifest)))),
            ArmedState::Sealing(filler) => Some(DeviceBytes::Filling(Arc::clone(filler))),
            ArmedState::Complete(file) => Some(DeviceBytes::Complete(Arc::clone(file))),
            ArmedState::Broken(_) => None,
        }
    }

    /// A filler of each device that is not complete.
    #[must_use]
    pub fn fillers(&self) -> Vec<Arc<LayerFiller<'a>>> {
        self.fillers_for(None)
    }

    /// The same, for an image where it has one of its own.
    pub(super) fn fillers_for(&self, manifest: Option<&Digest>) -> Vec<Arc<LayerFiller<'a>>> {
        let filling = |armed: &Armed<'a>| match &armed.state {
            ArmedState::Filling(ways) => Some(Arc::clone(ways.of(manifest))),
            ArmedState::Sealing(_) | ArmedState::Complete(_) | ArmedState::Broken(_) => None,
        };
        self.devices().values().filter_map(filling).collect()
    }

    /// The files of all devices that a keeper has to hold, and what the next service has to know of them.
    pub(super) fn files<E>(
        &self,
        mut give: impl FnMut(&DeviceId, &File, KeptState) -> Result<(), E>,
    ) -> Result<(), E> {
        let to_keep = |(place, it): (&InodePlace, &Armed<'a>)| {
            let state = match &it.state {
                ArmedState::Filling(ways) => {
                    let completing = ways.all().find(|it| it.is_completing());
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
            // Without a descriptor for it, the keeper has it from before, or not at all.
            Some((it.device, it.state.file().try_clone().ok()?, state))
        };
        // Who is given them may be slow, and readers need the devices.
        let files: Vec<_> = self.devices().iter().filter_map(to_keep).collect();
        files.iter().try_for_each(|(device, file, state)| give(device, file, *state))
    }

    /// Brings all of a device, behind all else.
    pub fn complete(&self, filler: &Arc<LayerFiller<'a>>) {
        if filler.begin_completing() {
            self.ahead.complete(filler);
        }
    }

    /// Brings what did not come although all of a device is wanted: another thread was at it, and failed.
    pub fn complete_again(&self) {
        let filling: Vec<_> = self.devices().values().flat_map(all_ways).collect();
        let left = filling.iter().filter(|it| it.is_completing() && !it.is_full());
        left.for_each(|it| self.ahead.complete_rest(it));
    }

    /// A device all units of which are filled, to be sealed. From now on its readers do not wait.
    pub fn take_full(&self) -> Option<Arc<LayerFiller<'a>>> {
        let mut devices = self.devices_mut();
        let is_full = |armed: &&mut Armed<'a>| matches!(&armed.state, ArmedState::Filling(it) if it.first.is_full() && it.is_idle());
        let armed = devices.values_mut().find(is_full)?;
        let ArmedState::Filling(ways) = &armed.state else { return None };
        let filler = Arc::clone(&ways.first);
        armed.state = ArmedState::Sealing(Arc::clone(&filler));
        Some(filler)
    }

    /// Looks whether the disk has kept what was filled. Readers of a device whose bytes it has lost get I/O errors.
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

    /// Says that a device that was [taken out](Self::take_full) is not sealed: its readers get I/O errors from now on.
    ///
    /// # Errors
    /// [`DoorError::Device`].
    pub fn refuse(&self, device: &DeviceId) -> Result<(), DoorError> {
        let mut devices = self.devices_mut();
        let Some(armed) = devices.values_mut().find(|it| it.device == *device) else {
            return Ok(());
        };
        if let state @ (ArmedState::Sealing(_) | ArmedState::Complete(_)) = &armed.state {
            armed.state = ArmedState::Broken(state.file().try_clone().map_err(DoorError::Device)?);
        }
        Ok(())
    }

    /// Whether the device whose file this is was [taken out](Self::take_full), and is not known to be wrong.
    ///
    /// # Errors
    /// [`DoorError::Device`].
    pub fn is_complete(&self, file: &File) -> Result<bool, DoorError> {
        let place = place(file)?;
        let devices = self.devices();
        Ok(devices
            .get(&place)
            .is_some_and(|it| matches!(it.state, ArmedState::Sealing(_) | ArmedState::Complete(_))))
    }

    /// Takes the mark from a sealed device, whose file this is, open to read.
    ///
    /// # Errors
    /// [`DoorError`].
    pub fn pass(&self, device: DeviceId, file: File) -> Result<(), DoorError> {
        let place = place(&file)?;
        let mut devices = self.devices_mut();
        match self.group.unmark(file.as_fd()) {
            // It has none, or an earlier service took it away, and died before it could say so.
            Ok(()) | Err(PrecontentError::Call { source: Errno::NOENT, .. }) => {}
            // Nor can it have one.
            Err(PrecontentError::Unsupported | PrecontentError::FileSystem { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let state = ArmedState::Complete(Arc::new(file));
        devices.insert(place, Armed { device, is_marked: false, state });
        Ok(())
    }

    /// Brings what a trace has, behind what readers wait for: bytes of devices, in the order in which they are wanted.
    pub fn bring_ahead(&self, runs: Vec<(Arc<LayerFiller<'a>>, Range<usize>)>) {
        self.ahead.trace(runs);
    }

    /// Has [`serve`](Self::serve) see at once that it is to end. Without it, it takes a moment.
    pub(super) fn wake(&self) {
        // It can be full only if it was woken already.
        let _written = rustix::io::write(&self.wake, &[1; 8]);
    }

    /// Serves readers until `stop` is set. Then it takes no more events, which wait for who serves the group next. Those that it
    /// took are answered, or are in the journal if that is to be another door.
    ///
    /// # Errors
    /// [`DoorError`]. Readers that wait for a door that is not served wait on.
    pub fn serve(&self, stop: &AtomicBool) -> Result<(), DoorError> {
        let fetchers = Fetchers::default();
        thread::scope(|scope| {
            fetchers.start(scope, |reader| self.bring_or_deny(reader));
            for _ in 0..WORKERS {
                scope.spawn(|| self.ahead.work());
            }
            let end = End { ahead: &self.ahead, fetchers: &fetchers };
            // If one of the two fails, the other one ends, too.
            let failed = AtomicBool::new(false);
            let is_over = || stop.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed);
            let (events, requests) = thread::scope(|both| {
                let requests = both.spawn(|| {
                    let served = self.take_requests(&fetchers, &is_over);
                    failed.fetch_or(served.is_err(), Ordering::Relaxed);
                    served
                });
                let events = self.take_events(&fetchers, &is_over);
                failed.fetch_or(events.is_err(), Ordering::Relaxed);
                let requests = requests.join();
                (events, requests.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            });
            let mut waiting = [events?, requests?].concat();
            // Which ends the threads, as soon as they have done what is under way.
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

/// All fillers of a device that is filled.
fn all_ways<'a>(armed: &Armed<'a>) -> Vec<Arc<LayerFiller<'a>>> {
    match &armed.state {
        ArmedState::Filling(ways) => ways.all().cloned().collect(),
        ArmedState::Sealing(_) | ArmedState::Complete(_) | ArmedState::Broken(_) => Vec::new(),
    }
}

/// What becomes of a device that is to be complete, and that nothing has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unread {
    /// It is filled on.
    Stay,
    /// It is left as it is.
    Go,
}

/// The numbers of a file's file system and inode.
pub(super) fn place(file: &File) -> Result<InodePlace, DoorError> {
    let found = file.metadata().map_err(DoorError::Device)?;
    Ok((found.dev(), found.ino()))
}
