//! Where readers of a device wait until their bytes are there: fanotify's pre-content events.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use kernel::precontent::{EventBuffer, Group, PrecontentError, ReadEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::fill::LayerFiller;

/// Threads that fetch. Each device has one at a time.
const FETCHERS: usize = 4;
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
    devices: HashMap<(u64, u64), LayerFiller<'a>>,
}

impl<'a> Door<'a> {
    /// A door without devices.
    ///
    /// # Errors
    /// [`DoorError::Kernel`].
    pub fn new() -> Result<Self, DoorError> {
        Ok(Self { group: Group::new()?, devices: HashMap::new() })
    }

    /// Marks a device. Readers through descriptors that are opened afterwards wait for bytes that are not there. The mount has
    /// to open it afterwards: `device` itself never waits.
    ///
    /// # Errors
    /// [`DoorError`]; then nothing waits.
    pub fn arm(&mut self, device: &File, filler: LayerFiller<'a>) -> Result<(), DoorError> {
        let found = device.metadata().map_err(DoorError::Device)?;
        self.group.mark(device.as_fd())?;
        self.devices.insert((found.dev(), found.ino()), filler);
        Ok(())
    }

    /// Serves readers until `stop` is set. Readers that wait then get an I/O error.
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
                        self.answer(event, stop);
                    }
                });
            }
            // Dropped at the end, which ends the threads.
            let sender = sender;
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
            // No reader is left waiting.
            loop {
                let events = self.events(&mut buffer)?;
                if events.is_empty() {
                    return Ok(());
                }
                events.into_iter().for_each(|it| self.deny(it));
            }
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

    fn filler(&self, event: &ReadEvent) -> Option<&LayerFiller<'a>> {
        let stat = rustix::fs::fstat(&event.file).ok()?;
        self.devices.get(&(stat.st_dev, stat.st_ino))
    }

    fn is_filled(&self, event: &ReadEvent) -> bool {
        self.filler(event).is_some_and(|it| it.has(&event.range))
    }

    fn answer(&self, event: ReadEvent, stop: &AtomicBool) {
        let Some(filler) = self.filler(&event) else { return self.deny(event) };
        if stop.load(Ordering::Relaxed) {
            return self.deny(event);
        }
        match filler.ensure(event.range.clone()) {
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
