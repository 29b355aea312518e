//! Where readers of a device wait until their bytes are there: fanotify's pre-content events.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, mpsc};
use std::thread;

use kernel::precontent::{EventBuffer, Group, PrecontentError, ReadEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::ahead::{Ahead, WORKERS};
use super::fill::LayerFiller;

/// Threads that wait for the bytes of readers, or fetch them. Each unit of a device is fetched by one of them.
const FETCHERS: usize = 32;
/// How long it may take until the end is seen, in milliseconds.
const PATIENCE: i64 = 50;

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
    /// By the numbers of file system and inode.
    devices: RwLock<HashMap<(u64, u64), Arc<LayerFiller<'a>>>>,
    ahead: Ahead<'a>,
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
        devices.insert(place, Arc::new(filler));
        Ok(())
    }

    /// Takes the marks from devices of which `is_free` says that nothing has them open, and returns how many are left.
    /// The fillers of the others are given to `gone`.
    ///
    /// # Errors
    /// [`DoorError`].
    pub fn disarm(
        &self,
        is_free: impl Fn(&LayerFiller<'a>) -> bool,
        mut gone: impl FnMut(&LayerFiller<'a>),
    ) -> Result<usize, DoorError> {
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        // A thread may be filling it still, for a reader that was killed.
        let is_free = |it: &Arc<LayerFiller<'a>>| Arc::strong_count(it) == 1 && is_free(it);
        let free = devices.iter().filter(|(_, filler)| is_free(filler));
        let free: Vec<_> = free.map(|(place, _)| *place).collect();
        for place in free {
            if let Some(filler) = devices.get(&place) {
                self.group.unmark(filler.device().file().as_fd())?;
            }
            if let Some(filler) = devices.remove(&place) {
                gone(&filler);
            }
        }
        Ok(devices.len())
    }

    /// The fillers of all devices that are armed.
    #[must_use]
    pub fn fillers(&self) -> Vec<Arc<LayerFiller<'a>>> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.values().cloned().collect()
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
        let (sender, receiver) = mpsc::channel::<ReadEvent>();
        let receiver = Mutex::new(receiver);
        thread::scope(|scope| {
            for _ in 0..FETCHERS {
                scope.spawn(|| {
                    loop {
                        let event = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                        let Ok(event) = event else { return };
                        self.answer(event);
                    }
                });
            }
            for _ in 0..WORKERS {
                scope.spawn(|| self.ahead.work());
            }
            // Dropped at the end, which ends the threads.
            let (sender, _end) = (sender, End(&self.ahead));
            let mut buffer = EventBuffer::default();
            while !stop.load(Ordering::Relaxed) {
                let patience = Timespec { tv_sec: 0, tv_nsec: PATIENCE * 1_000_000 };
                match poll(&mut [PollFd::new(&self.group, PollFlags::IN)], Some(&patience)) {
                    Ok(0) | Err(Errno::INTR) => continue,
                    Ok(_) => {}
                    Err(error) => return Err(DoorError::Wait(error)),
                }
                for event in self.events(&mut buffer)? {
                    if self.is_filled(&event) {
                        self.allow(event);
                    } else if let Err(mpsc::SendError(event)) = sender.send(event) {
                        self.deny(event);
                    }
                }
            }
            Ok(())
        })
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

    fn filler(&self, event: &ReadEvent) -> Option<Arc<LayerFiller<'a>>> {
        let stat = rustix::fs::fstat(&event.file).ok()?;
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.get(&(stat.st_dev, stat.st_ino)).cloned()
    }

    fn is_filled(&self, event: &ReadEvent) -> bool {
        let filler = self.filler(event).filter(|it| it.has(&event.range));
        filler.inspect(|it| it.touch(&event.range)).is_some()
    }

    fn answer(&self, event: ReadEvent) {
        let Some(filler) = self.filler(&event) else { return self.deny(event) };
        let begin = |soon| {
            self.ahead.soon(&filler, soon);
            self.ahead.behind_reader()
        };
        match filler.ensure(event.range.clone(), begin) {
            Ok(()) => self.allow(event),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, ?filler, "a reader gets an I/O error");
                self.deny(event);
            }
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

/// The numbers of a file's file system and inode.
pub(super) fn place(file: &File) -> Result<(u64, u64), DoorError> {
    let found = file.metadata().map_err(DoorError::Device)?;
    Ok((found.dev(), found.ino()))
}
