//! Where readers of a device wait until their bytes are there: fanotify's pre-content events.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use image::verity::DeviceId;
use kernel::precontent::{EventBuffer, Group, PrecontentError, ReadEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::ahead::{Ahead, WORKERS};
use super::fill::{FillError, LayerFiller};

/// Threads that wait for the bytes of readers, or fetch them. Each unit of a device is fetched by one of them.
const FETCHERS: usize = 32;
/// How long it may take until the end is seen, in milliseconds.
const PATIENCE: i64 = 50;
/// How often it is looked whether a reader has waited long enough.
const LOOK: Duration = Duration::from_millis(200);

/// An error of a door.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DoorError {
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] PrecontentError),
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
    devices: RwLock<HashMap<InodePlace, Armed<'a>>>,
    ahead: Ahead<'a>,
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

/// A reader that waits. It is answered once: by who has brought its bytes, or when it has waited long enough.
struct WaitingReader<'a> {
    event: Mutex<Option<ReadEvent>>,
    range: Range<u64>,
    filler: Arc<LayerFiller<'a>>,
    since: Instant,
}

impl WaitingReader<'_> {
    /// `None` if it was answered.
    fn take(&self) -> Option<ReadEvent> {
        self.event.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn is_answered(&self) -> bool {
        self.event.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

impl<'a> Door<'a> {
    /// A door without devices, with a group of its own.
    ///
    /// # Errors
    /// [`DoorError::Kernel`].
    pub fn new() -> Result<Self, DoorError> {
        Ok(Self::of(Group::new()?))
    }

    /// A door without devices, of a group that may have marks already.
    #[must_use]
    pub fn of(group: Group) -> Self {
        Self { group, devices: RwLock::default(), ahead: Ahead::default() }
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

    /// Serves readers until `stop` is set. Then it takes no more events: those that it took are answered, and the others wait
    /// for who serves the group next.
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
            self.take_in(&sender, &mut waiting, stop)?;
            // Which ends the threads, as soon as they have done what is under way.
            drop((sender, end));
            while !self.see_to(&mut waiting) {
                thread::sleep(LOOK / 10);
            }
            Ok(())
        })
    }

    /// Takes events until `stop` is set, and gives readers that have to wait to `fetchers`.
    fn take_in(
        &self,
        fetchers: &mpsc::Sender<Arc<WaitingReader<'a>>>,
        waiting: &mut Vec<Weak<WaitingReader<'a>>>,
        stop: &AtomicBool,
    ) -> Result<(), DoorError> {
        let mut buffer = EventBuffer::default();
        let mut looked = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if looked.elapsed() > LOOK {
                self.see_to(waiting);
                looked = Instant::now();
            }
            let patience = Timespec { tv_sec: 0, tv_nsec: PATIENCE * 1_000_000 };
            match poll(&mut [PollFd::new(&self.group, PollFlags::IN)], Some(&patience)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(DoorError::Wait(error)),
            }
            for event in self.events(&mut buffer)? {
                let Some(reader) = self.greet(event) else { continue };
                waiting.push(Arc::downgrade(&reader));
                if let Err(mpsc::SendError(reader)) = fetchers.send(reader) {
                    self.answer(&reader, false);
                }
            }
        }
        Ok(())
    }

    /// Answers a reader that need not wait, or returns it.
    fn greet(&self, event: ReadEvent) -> Option<Arc<WaitingReader<'a>>> {
        let filler = match self.find(&event) {
            Found::Filler(filler) => filler,
            Found::Complete => {
                self.allow(event);
                return None;
            }
            Found::Nothing => {
                self.deny(event);
                return None;
            }
        };
        if filler.has(&event.range) {
            filler.touch(&event.range);
            self.allow(event);
            return None;
        }
        let (range, since) = (event.range.clone(), Instant::now());
        let is_denied = filler.is_denied(&range);
        let reader = WaitingReader { event: Mutex::new(Some(event)), range, filler, since };
        if is_denied {
            // Also while no thread is free.
            self.answer(&reader, false);
            return None;
        }
        Some(Arc::new(reader))
    }

    /// Lets those go that have waited long enough, whoever still brings their bytes. Returns whether no reader waits.
    fn see_to(&self, waiting: &mut Vec<Weak<WaitingReader<'a>>>) -> bool {
        waiting.retain(|reader| {
            let Some(reader) = reader.upgrade().filter(|it| !it.is_answered()) else {
                return false;
            };
            let Some(silence) = reader.filler.overdue(reader.since) else { return true };
            let (filler, silence) = (&reader.filler, silence.as_secs());
            tracing::error!(
                ?filler,
                silence,
                "a reader gets an I/O error: no source gives anything"
            );
            self.answer(&reader, false);
            false
        });
        waiting.is_empty()
    }

    /// The events that are there. If there is no descriptor or no memory left for one, the kernel denies it and takes it from
    /// the queue: the next call gives those behind it.
    fn events(&self, buffer: &mut EventBuffer) -> Result<Vec<ReadEvent>, DoorError> {
        loop {
            match self.group.read(buffer) {
                Err(PrecontentError::Call {
                    source: source @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM),
                    ..
                }) => tracing::error!(%source, "a reader gets an I/O error"),
                events => return Ok(events?),
            }
        }
    }

    fn find(&self, event: &ReadEvent) -> Found<'a> {
        let Ok(stat) = rustix::fs::fstat(&event.file) else { return Found::Nothing };
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        match devices.get(&(stat.st_dev, stat.st_ino)) {
            Some(Armed::Filling(filler)) => Found::Filler(Arc::clone(filler)),
            Some(Armed::Complete(_)) => Found::Complete,
            Some(Armed::Broken(..)) | None => Found::Nothing,
        }
    }

    /// Brings what a reader waits for.
    fn bring(&self, reader: &WaitingReader<'a>) {
        if reader.is_answered() {
            return;
        }
        let filler = &reader.filler;
        let begin = |soon| {
            self.ahead.soon(filler, soon);
            self.ahead.behind_reader()
        };
        let done = filler.ensure(reader.range.clone(), begin);
        match &done {
            Ok(()) => {}
            Err(FillError::Silent(_)) if reader.is_answered() => {}
            // Why was said when it failed.
            Err(error @ FillError::Denied { .. }) => {
                tracing::debug!(%error, ?filler, "a reader gets an I/O error");
            }
            Err(error) => {
                let error: &dyn std::error::Error = error;
                tracing::error!(error, ?filler, "a reader gets an I/O error");
            }
        }
        self.answer(reader, done.is_ok());
    }

    fn answer(&self, reader: &WaitingReader<'a>, is_there: bool) {
        let Some(event) = reader.take() else { return };
        reader.filler.counts().waited(reader.since.elapsed(), is_there);
        if is_there {
            self.allow(event);
        } else {
            self.deny(event);
        }
    }

    fn allow(&self, event: ReadEvent) {
        if let Err(error) = self.group.allow(event) {
            tracing::debug!(%error, "its reader is gone");
        }
    }

    fn deny(&self, event: ReadEvent) {
        if let Err(error) = self.group.deny(event) {
            tracing::debug!(%error, "its reader is gone");
        }
    }
}

/// What has the bytes of an event.
enum Found<'a> {
    Filler(Arc<LayerFiller<'a>>),
    Complete,
    Nothing,
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
