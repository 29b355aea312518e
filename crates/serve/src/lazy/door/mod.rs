//! Where readers of a device wait until their bytes are there: fanotify's pre-content events.

mod precontent;
mod waiting;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use image::verity::DeviceId;
use kernel::precontent::{Group, PrecontentError};
use rustix::io::Errno;

use self::waiting::WaitingReader;
use super::ahead::{Ahead, WORKERS};
use super::fill::LayerFiller;
use super::journal::{Journal, TakenEvent};

/// Threads that wait for the bytes of readers, or fetch them. Each unit of a device is fetched by one of them.
const FETCHERS: usize = 32;
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
    /// A device cannot be looked at.
    #[error("cannot look at a sparse device")]
    Device(#[source] io::Error),
    /// Waiting for events failed.
    #[error("cannot wait for readers")]
    Wait(#[source] Errno),
}

/// Lets readers of devices wait until the bytes that they want are filled.
///
/// As long as a mount of a device lives, its door has to be served, or be gone with all of its descriptors: then readers get
/// what is in the file, which may be zeros.
#[derive(Debug)]
pub struct Door<'a> {
    group: Group,
    journal: Journal,
    /// Events that an earlier door took and did not answer.
    inherited: Mutex<Vec<TakenEvent>>,
    devices: RwLock<HashMap<InodePlace, Armed<'a>>>,
    /// Whether a device may be marked that is not among them.
    has_unknown: AtomicBool,
    ahead: Ahead<'a>,
    /// Set to have all sources fail at once. Readers for which nothing comes any more are left to the next door then.
    cancel: Option<&'a AtomicBool>,
    /// Events that are left to the next door. Their numbers are in use as long as this door is.
    left: Mutex<Vec<TakenEvent>>,
}

/// The numbers of a file system and an inode.
pub(super) type InodePlace = (u64, u64);

/// A device whose readers may wait here.
#[derive(Debug)]
enum Armed<'a> {
    Filling(Arc<LayerFiller<'a>>),
    /// All bytes are there. The file is open as long as an event may be on its way.
    Complete(File),
    /// Its bytes are those of another device, or the disk did not keep them, or all ends before that is known.
    Broken(DeviceId, File),
}

/// Ends those who bring what nobody waits for.
struct End<'q, 'a>(&'q Ahead<'a>);

impl Drop for End<'_, '_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl<'a> Door<'a> {
    /// A door without devices, with a group of its own.
    ///
    /// # Errors
    /// [`DoorError::Kernel`].
    pub fn new() -> Result<Self, DoorError> {
        let journal = Journal::new().map_err(|it| DoorError::Journal(it.into()))?;
        Ok(Self::succeed(Group::new()?, journal, Vec::new()))
    }

    /// A door without devices, of a group that may have marks already, and of readers that wait already.
    pub(super) fn succeed(group: Group, journal: Journal, inherited: Vec<TakenEvent>) -> Self {
        Self {
            group,
            journal,
            inherited: Mutex::new(inherited),
            devices: RwLock::default(),
            has_unknown: AtomicBool::new(false),
            ahead: Ahead::default(),
            cancel: None,
            left: Mutex::default(),
        }
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

    /// Marks a filler's device. Readers through descriptors that are opened afterwards wait for bytes that are not there. The
    /// mount has to open it afterwards: the filler's own descriptor never waits. A second mark changes nothing.
    ///
    /// # Errors
    /// [`DoorError`]; then nothing waits.
    pub fn arm(&self, filler: LayerFiller<'a>) -> Result<(), DoorError> {
        let place = place(filler.device().file())?;
        // The filler has to be there when the first event comes.
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        self.group.mark(filler.device().file().as_fd())?;
        devices.insert(place, Armed::Filling(Arc::new(filler)));
        Ok(())
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
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        let may_go = |it: &Arc<LayerFiller<'a>>| {
            // A thread may be filling it still, for a reader that was killed.
            Arc::strong_count(it) == 1 && (unread == Unread::Go || !it.is_completing())
        };
        let is_free = |armed: &Armed<'a>| match armed {
            Armed::Filling(filler) => may_go(filler) && is_free(filler.device().file()),
            Armed::Complete(file) | Armed::Broken(_, file) => is_free(file),
        };
        let free = devices.iter().filter(|(_, armed)| is_free(armed));
        let free: Vec<_> = free.map(|(place, _)| *place).collect();
        for place in free {
            match devices.get(&place) {
                Some(Armed::Filling(filler)) => {
                    self.group.unmark(filler.device().file().as_fd())?;
                }
                Some(Armed::Broken(_, file)) => self.group.unmark(file.as_fd())?,
                Some(Armed::Complete(_)) | None => {}
            }
            match devices.remove(&place) {
                Some(Armed::Filling(filler)) => gone(filler.device().id()),
                Some(Armed::Broken(device, _)) => gone(&device),
                Some(Armed::Complete(_)) | None => {}
            }
        }
        Ok(devices.values().filter(|it| !matches!(it, Armed::Complete(_))).count())
    }

    /// The fillers of all devices that are armed, and not complete.
    #[must_use]
    pub fn fillers(&self) -> Vec<Arc<LayerFiller<'a>>> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        let filling = |armed: &Armed<'a>| match armed {
            Armed::Filling(filler) => Some(Arc::clone(filler)),
            Armed::Complete(_) | Armed::Broken(..) => None,
        };
        devices.values().filter_map(filling).collect()
    }

    /// Brings all of a device, behind all else.
    pub fn complete(&self, filler: &Arc<LayerFiller<'a>>) {
        if filler.begin_completing() {
            self.ahead.complete(filler);
        }
    }

    /// Brings what did not come although all of a device is wanted: another thread was at it, and failed.
    pub fn complete_again(&self) {
        let filling = self.fillers();
        let left = filling.iter().filter(|it| it.is_completing() && !it.is_full());
        left.for_each(|it| self.ahead.complete_rest(it));
    }

    /// Takes out a device all units of which are filled. From now on its readers do not wait.
    ///
    /// # Errors
    /// [`DoorError::Device`].
    pub fn take_full(&self) -> Result<Option<LayerFiller<'a>>, DoorError> {
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        let is_full = |(_, armed): &(&InodePlace, &Armed<'a>)| matches!(armed, Armed::Filling(it) if it.is_full() && Arc::strong_count(it) == 1);
        let Some((&found, armed)) = devices.iter().find(is_full) else { return Ok(None) };
        let Armed::Filling(filler) = armed else { return Ok(None) };
        // The same open file, which the keeper has, too: so a lease still tells of others.
        let file = filler.device().file().try_clone().map_err(DoorError::Device)?;
        match devices.insert(found, Armed::Complete(file)) {
            Some(Armed::Filling(filler)) => Ok(Arc::into_inner(filler)),
            _ => Ok(None),
        }
    }

    /// Says that a device that was [taken out](Self::take_full) is not sealed: its readers get I/O errors from now on.
    pub fn refuse(&self, found: InodePlace, device: DeviceId) {
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(Armed::Complete(file)) = devices.remove(&found) {
            devices.insert(found, Armed::Broken(device, file));
        }
    }

    /// Whether the device whose file this is was [taken out](Self::take_full), and is not known to be wrong.
    ///
    /// # Errors
    /// [`DoorError::Device`].
    pub fn is_complete(&self, file: &File) -> Result<bool, DoorError> {
        let place = place(file)?;
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        Ok(matches!(devices.get(&place), Some(Armed::Complete(_))))
    }

    /// Takes the mark from a sealed device, whose file this is, open to read.
    ///
    /// # Errors
    /// [`DoorError`].
    pub fn pass(&self, file: File) -> Result<(), DoorError> {
        let place = place(&file)?;
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        match self.group.unmark(file.as_fd()) {
            // An earlier service did, and died before it could say so.
            Ok(()) | Err(PrecontentError::Call { source: Errno::NOENT, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        devices.insert(place, Armed::Complete(file));
        Ok(())
    }

    /// Brings what a trace has, behind what readers wait for: bytes of devices, in the order in which they are wanted.
    pub fn bring_ahead(&self, runs: Vec<(Arc<LayerFiller<'a>>, Range<usize>)>) {
        self.ahead.trace(runs);
    }

    /// Serves readers until `stop` is set. Then it takes no more events, which wait for who serves the group next. Those that it
    /// took are answered, or are in the journal if that is to be another door.
    ///
    /// # Errors
    /// [`DoorError`]. Readers that wait for a door that is not served wait on.
    pub fn serve(&self, stop: &AtomicBool) -> Result<(), DoorError> {
        let (sender, receiver) = mpsc::channel::<Arc<WaitingReader<'a>>>();
        let receiver = Mutex::new(receiver);
        thread::scope(|scope| {
            for _ in 0..FETCHERS {
                scope.spawn(|| {
                    loop {
                        let reader = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                        let Ok(reader) = reader else { return };
                        self.bring(&reader);
                    }
                });
            }
            for _ in 0..WORKERS {
                scope.spawn(|| self.ahead.work());
            }
            let end = End(&self.ahead);
            let mut waiting = Vec::new();
            self.take_over(&sender, &mut waiting);
            self.take_in(&sender, &mut waiting, stop)?;
            // Which ends the threads, as soon as they have done what is under way.
            drop((sender, end));
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
