//! Seals devices whose bytes are all downloaded, which makes them normal devices.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use image::verity::DeviceId;
use store::{LazyDeviceError, Store};

use super::fill::LayerFiller;
use super::fuse::{DeviceServer, place};
use super::supply::Supply;
use crate::any_error::{AnyError, text};

/// How often full devices are looked for.
const LOOK: Duration = Duration::from_millis(100);
/// How often it is checked whether readers that began before the sealing still use the filler.
const MOMENT: Duration = Duration::from_millis(1);
/// Pause after a failure to complete images. It doubles with each further failure.
const PAUSE: Duration = Duration::from_secs(2);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// A sealed device whose images must still be completed.
#[derive(Debug)]
struct Pending {
    device: DeviceId,
    next: Instant,
    pause: Duration,
}

/// Seals devices, and completes images.
pub(super) struct Completer<'s, 'a> {
    pub(super) store: &'a Store,
    pub(super) supply: &'a Supply<'a>,
    pub(super) devices: &'s DeviceServer<'a>,
    pending: Mutex<Vec<Pending>>,
    is_at_work: AtomicBool,
}

impl<'s, 'a> Completer<'s, 'a> {
    pub(super) fn new(
        store: &'a Store,
        supply: &'a Supply<'a>,
        devices: &'s DeviceServer<'a>,
    ) -> Self {
        Self {
            store,
            supply,
            devices,
            pending: Mutex::default(),
            is_at_work: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a device is sealed, so that its images are checked.
    pub(super) fn is_sealed(&self, device: DeviceId) {
        let mut pending = self.lock();
        if pending.iter().all(|it| it.device != device) {
            pending.push(Pending { device, next: Instant::now(), pause: PAUSE });
        }
    }

    /// Opens a device that is no longer filled. Returns `None` if the device does not exist.
    pub(super) fn ended(&self, device: &DeviceId) -> Result<Option<File>, LazyDeviceError> {
        let sealed = self.store.lazy_devices.open(device)?;
        let sealed = sealed.filter(|it| it.1.state == store::LazyDeviceState::Sealed);
        Ok(sealed.map(|it| it.0).or_else(|| self.store.devices.bytes_of(device)))
    }

    /// Seals full devices and completes images until `end` is set. `forget` makes the keeper release a device, and
    /// returns when the keeper has done so.
    pub(super) fn work(&self, end: &AtomicBool, forget: &dyn Fn(&DeviceId)) {
        let is_over = || end.load(Ordering::Relaxed);
        match self.store.lazy_devices.sealed() {
            // An earlier service may have ended before it was done.
            Ok(sealed) => sealed.into_iter().for_each(|it| self.is_sealed(it)),
            Err(error) => tracing::warn!(%error, "cannot find sealed devices"),
        }
        while !is_over() {
            self.is_at_work.store(true, Ordering::Release);
            if let Some(filler) = self.devices.take_full() {
                self.seal(filler, end, forget);
                continue;
            }
            match self.due() {
                Some(due) => self.finish(&due, end),
                None => {
                    self.is_at_work.store(false, Ordering::Release);
                    // The service unparks this thread at the end.
                    thread::park_timeout(LOOK);
                }
            }
        }
    }

    fn open(&self, device: &DeviceId) -> io::Result<File> {
        let found = self.store.lazy_devices.open(device).map_err(io::Error::other)?;
        Ok(found.ok_or(io::ErrorKind::NotFound)?.0)
    }

    fn seal(&self, filler: Arc<LayerFiller<'a>>, end: &AtomicBool, forget: &dyn Fn(&DeviceId)) {
        let device = *filler.device().id();
        let sealed = self.sealed(&filler, end);
        // Dropping the filler closes its file, which is open for writing.
        drop(filler);
        match sealed {
            Ok(()) => {
                tracing::info!(%device, "a device is complete");
                forget(&device);
                self.is_sealed(device);
            }
            Err(error) => {
                let error: &dyn std::error::Error = &*error;
                // If this service ends, the next one continues.
                if !end.load(Ordering::Relaxed) {
                    tracing::error!(%device, error, "readers of the device get I/O errors from now on: unmount it");
                }
            }
        }
    }

    fn sealed(&self, filler: &Arc<LayerFiller<'a>>, end: &AtomicBool) -> Result<(), AnyError> {
        let device = *filler.device().id();
        let sealed = filler.device().seal_unless(end).map_err(AnyError::from);
        let sealed = sealed.and_then(|()| Ok(self.devices.pass(device, self.open(&device)?)?));
        // If this service ends, the next one hashes the device. Until then, each unit was verified.
        if let Err(error) = &sealed
            && !end.load(Ordering::Relaxed)
        {
            let refused = self.devices.refuse(filler, text(&**error));
            // The cause of the first error matters more, and is returned.
            if let Err(error) = refused {
                let error: &dyn std::error::Error = &error;
                tracing::error!(%device, error, "cannot record that a device is broken");
            }
        }
        // A thread that still uses the filler has the file open for writing, and fs-verity cannot be enabled then.
        while sealed.is_ok() && Arc::strong_count(filler) > 1 && !end.load(Ordering::Relaxed) {
            thread::sleep(MOMENT);
        }
        sealed
    }

    /// Returns whether there is no work left. Failed work does not count, because the next service finds and retries
    /// it.
    pub(super) fn is_idle(&self) -> bool {
        let is_at_work = self.is_at_work.load(Ordering::Acquire);
        !is_at_work && self.lock().iter().all(|it| it.pause > PAUSE)
    }

    fn due(&self) -> Option<Pending> {
        let now = Instant::now();
        let mut pending = self.lock();
        let due = pending.iter().position(|it| it.next <= now)?;
        Some(pending.swap_remove(due))
    }

    fn finish(&self, due: &Pending, end: &AtomicBool) {
        let Err(error) = self.supply.sealed(&due.device, end) else { return };
        if end.load(Ordering::Relaxed) {
            return;
        }
        let (device, pause) = (due.device, due.pause);
        let error: &dyn std::error::Error = &*error;
        tracing::warn!(%device, error, seconds = pause.as_secs(), "cannot complete an image yet");
        let next = Instant::now() + pause;
        self.lock().push(Pending { device, next, pause: (pause * 2).min(PAUSE_MAX) });
    }

    /// Returns whether a device of an earlier service need not be filled any more.
    pub(super) fn pass(&self, device: &DeviceId, file: &File) -> Result<bool, AnyError> {
        let Some(ended) = self.ended(device)? else { return Ok(false) };
        if place(&ended)? != place(file)? {
            return Ok(false);
        }
        self.devices.pass(*device, ended)?;
        self.is_sealed(*device);
        Ok(true)
    }
}
