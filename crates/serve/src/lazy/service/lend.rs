//! Hands out devices, and takes over those of an earlier service.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::str::FromStr as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use image::digest::Digest;
use image::verity::DeviceId;
use kernel::fuse::FuseError;
use rustix::fs::SeekFrom;
use store::{LazyDeviceError, LazyDeviceFill};
use transfer::lazy::LayerIndex;

use super::{Completion, LazyResources, Service, forget, kept};
use crate::any_error::AnyError;
use crate::lazy::fill::{LayerFiller, LayerSource};
use crate::lazy::fuse::{ConnectionId, DeviceServerError, FuseDeviceError};
use crate::lazy::keeper::{Keeper, KeptConnection, KeptDevice};
use crate::lazy::retry::READERS_WAIT;
use crate::lazy::wire::{KeptState, ToKeeper};

/// Why a device is not handed out. The text is sent to the client.
#[derive(Debug, thiserror::Error)]
pub(super) enum LendError {
    #[error("\"{}\" is not a device id", .0.escape_debug())]
    Id(String),
    #[error("the store has no lazy device {0}, or another process fills it")]
    Absent(DeviceId),
    #[error("device {0} has no index: `quire pull --lazy` or `quire index` makes one")]
    NoIndex(DeviceId),
    #[error("cannot use the index of device {device}")]
    Index { device: DeviceId, source: AnyError },
    #[error("the index of device {device} is for a device of {index} bytes, not {actual}")]
    Length { device: DeviceId, index: u64, actual: u64 },
    /// Readers of the device itself see zeros instead of missing bytes, and may have them in their caches.
    #[error(
        "another program has device {0} open without the service, so its readers may have seen \
        zeros: unmount its image and stop its containers first"
    )]
    Poisoned(DeviceId),
    #[error("device {device} was filled by an earlier service, and cannot be used unchanged")]
    Complete { device: DeviceId, source: AnyError },
    #[error(transparent)]
    LazyDevice(#[from] LazyDeviceError),
    /// The store refuses such an index, unless it replaces one of the same manifest.
    #[error(
        "device {0} is in use for another image, whose index contradicts this one: stop the \
        containers and unmount the images that use it, or pull the image without --lazy"
    )]
    Contradiction(DeviceId),
    #[error("the keeper cannot hold device {device}")]
    Keeper { device: DeviceId, source: io::Error },
    #[error(transparent)]
    Devices(#[from] DeviceServerError),
    #[error(
        "cannot make files on FUSE, by which programs wait for device {device}: load the kernel's \
        module fuse (`modprobe fuse`), or pull the image without --lazy"
    )]
    NoFuse { device: DeviceId, source: Box<FuseDeviceError> },
}

/// Pause between two checks whether another process has a device open.
const MOMENT: Duration = Duration::from_millis(5);

/// The state of a device that was taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Adopted {
    /// The device is being filled.
    Filled,
    /// The device is complete, so the keeper need not hold it.
    Complete,
}

impl<'a> Service<'_, 'a> {
    /// Opens a device for a client. Reads of the result wait for missing bytes.
    pub(super) fn lend(
        &self,
        device: &str,
        manifest: Option<Digest>,
        keeper: &Keeper,
    ) -> Result<File, LendError> {
        let id = DeviceId::from_str(device).map_err(|_error| LendError::Id(device.to_owned()))?;
        let mut is_written = false;
        if let Some(first) = self.filler_of(&id) {
            self.fill_for(&first, manifest.as_ref())?;
        } else if !self.devices.is_sealing(&id) {
            // This check comes first, because a device that is being sealed may be renamed at any time.
            if let Some((file, _)) = self.store.lazy_devices.open(&id)?
                && self.devices.is_complete(&file)?
            {
                return Ok(file);
            }
            if let Some(file) = self.completer.ended(&id)? {
                self.completer.is_sealed(id);
                return Ok(file);
            }
            let fill = self.store.fill_lazy_device(&id)?.ok_or(LendError::Absent(id))?;
            let held_off = fill.hold_readers_off()?;
            if is_open_elsewhere(fill.file()) {
                return Err(LendError::Poisoned(id));
            }
            drop(held_off);
            let filler = self.filler(&id, fill, manifest.as_ref())?;
            is_written = filler.is_sealable() && has_no_hole(filler.device().file());
            // The device is passed to the keeper first, because from now on another process must hold it in case this
            // process dies.
            let (device, file) = kept(&filler);
            let state = KeptState { manifest, ..KeptState::default() };
            keeper
                .tell(&ToKeeper::Keep { device, state }, Some(file))
                .map_err(|source| LendError::Keeper { device: id, source })?;
            self.devices.fill(filler)?;
        }
        let file = self.lend_on_fuse(id, manifest, keeper).map_err(|error| match error {
            LendError::Devices(DeviceServerError::Fuse(
                source @ (FuseDeviceError::Connection(FuseError::Open(_))
                | FuseDeviceError::Mount(_)),
            )) => LendError::NoFuse { device: id, source: Box::new(source) },
            error => error,
        })?;
        let fillers = self.devices.fillers_for(manifest.as_ref());
        if let Some(filler) = fillers.iter().find(|it| it.device().id() == &id) {
            if is_written || (self.environment.complete)() == Completion::Always {
                self.complete_device(filler, keeper);
            }
            self.connect_ahead(filler);
        }
        Ok(file)
    }

    /// Connects to the source of a device that lacks bytes, while the caller makes the mount.
    fn connect_ahead(&self, filler: &LayerFiller<'a>) {
        if has_no_hole(filler.device().file()) {
            return;
        }
        let LazyResources { supply, patience, .. } = self.environment;
        let limit = patience.wait().unwrap_or(READERS_WAIT);
        supply.connect_ahead(filler.index(), filler.manifest(), limit);
    }

    /// Makes sure that a device that is being filled has a filler for this image.
    fn fill_for(
        &self,
        first: &LayerFiller<'a>,
        manifest: Option<&Digest>,
    ) -> Result<(), LendError> {
        let id = *first.device().id();
        let Some(manifest) = manifest.filter(|it| !self.devices.is_for(&id, it)) else {
            return Ok(());
        };
        let Some((index, source)) = self.index(&id, Some(manifest))? else { return Ok(()) };
        let filler = first.beside(index, source).ok_or(LendError::Contradiction(id))?;
        let filler = filler.with_patience(self.environment.patience);
        self.devices.fill_beside(self.keeping_windows(filler));
        Ok(())
    }

    fn index(
        &self,
        id: &DeviceId,
        manifest: Option<&Digest>,
    ) -> Result<Option<(LayerIndex, LayerSource<'a>)>, LendError> {
        let supply = self.environment.supply;
        let index = supply.index(id, manifest);
        let index = index.map_err(|source| LendError::Index { device: *id, source })?;
        Ok(index.map(|index| {
            let source = supply.source(&index, manifest);
            (index, source)
        }))
    }

    fn filler_of(&self, id: &DeviceId) -> Option<Arc<LayerFiller<'a>>> {
        self.devices.fillers().into_iter().find(|it| it.device().id() == id)
    }

    /// Creates a file on FUSE that stands for a device.
    fn lend_on_fuse(
        &self,
        id: DeviceId,
        manifest: Option<Digest>,
        keeper: &Keeper,
    ) -> Result<File, LendError> {
        let (connection, file) = self.devices.connect_for(&id, manifest)?;
        self.devices
            .connections(|found, (device, manifest), descriptor| {
                let message =
                    ToKeeper::Connect { connection, device: device.to_string(), manifest };
                if found == connection { keeper.tell(&message, Some(descriptor)) } else { Ok(()) }
            })
            .map_err(|source| LendError::Keeper { device: id, source })?;
        self.devices.is_kept(connection);
        Ok(file)
    }

    /// Takes over all devices and connections of an earlier service.
    pub(super) fn take_over(
        &self,
        keeper: &Keeper,
        devices: Vec<KeptDevice>,
        connections: Vec<(ConnectionId, KeptConnection)>,
    ) {
        let mut complete = Vec::new();
        for KeptDevice { device, file, state } in devices {
            match self.adopt(&device, file, state) {
                Ok(Adopted::Filled) => {}
                Ok(Adopted::Complete) => complete.push(device),
                // Without a filler, readers of the device get I/O errors. The keeper continues to hold the device.
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(device, error, "readers of a device get I/O errors");
                }
            }
        }
        for (id, KeptConnection { device, manifest, connection }) in connections {
            // Without a device, the readers get I/O errors.
            let known = DeviceId::from_str(&device).map_err(|_error| LendError::Id(device.clone()));
            if let Ok(device) = &known
                && let Some(first) = self.filler_of(device)
                && let Err(error) = self.fill_for(&first, manifest.as_ref())
            {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(%device, error, "an index of another image fills a device");
            }
            let adopted = known.and_then(|it| {
                let adopted = self.devices.adopt_connection(id, (it, manifest), connection);
                Ok(adopted.map_err(DeviceServerError::from)?)
            });
            if let Err(error) = adopted {
                let error: &dyn std::error::Error = &error;
                tracing::error!(device, error, "readers of a device wait for another service");
            }
        }
        for device in complete {
            self.is_complete(keeper, &device);
        }
    }

    /// Records that a device is complete. The keeper continues to hold it only if it has connections.
    pub(super) fn is_complete(&self, keeper: &Keeper, device: &str) {
        let id = DeviceId::from_str(device).ok();
        let Some(id) = id.filter(|it| self.devices.is_connected(it)) else {
            return forget(keeper, device.to_owned());
        };
        let kept = self.devices.files(|found, file, state| {
            let message = ToKeeper::Keep { device: device.to_owned(), state };
            if *found == id { keeper.tell(&message, Some(file.as_fd())) } else { Ok(()) }
        });
        if let Err(error) = kept {
            tracing::warn!(%error, "the keeper holds a device unnecessarily");
        }
    }

    /// Takes over a device of an earlier service.
    fn adopt(&self, device: &str, file: File, state: KeptState) -> Result<Adopted, LendError> {
        let id = DeviceId::from_str(device).map_err(|_error| LendError::Id(device.to_owned()))?;
        if state.is_complete {
            // The file may have another name by now, or none.
            self.devices.pass(id, file)?;
            return Ok(Adopted::Complete);
        }
        let passed = self.completer.pass(&id, &file);
        if passed.map_err(|source| LendError::Complete { device: id, source })? {
            return Ok(Adopted::Complete);
        }
        let fill = self.store.adopt_lazy_device(&id, file)?.ok_or(LendError::Absent(id))?;
        let filler = self.filler(&id, fill, state.manifest.as_ref())?;
        let is_written = filler.is_sealable() && has_no_hole(filler.device().file());
        self.devices.fill(filler)?;
        if is_written || state.is_completing || (self.environment.complete)() == Completion::Always
        {
            self.filler_of(&id).inspect(|it| self.devices.complete(it));
        }
        Ok(Adopted::Filled)
    }

    /// Makes a filler queue the windows that it fetches, to be kept.
    fn keeping_windows(&self, filler: LayerFiller<'a>) -> LayerFiller<'a> {
        let (id, windows) = (*filler.device().id(), Arc::clone(&self.windows));
        match filler.manifest().copied() {
            Some(manifest) => {
                filler.with_windows_kept(move |groups| windows.push(id, manifest, groups))
            }
            None => filler,
        }
    }

    fn filler(
        &self,
        id: &DeviceId,
        fill: LazyDeviceFill<'a>,
        manifest: Option<&Digest>,
    ) -> Result<LayerFiller<'a>, LendError> {
        let (index, source) = self.index(id, manifest)?.ok_or(LendError::NoIndex(*id))?;
        let (expected, actual) = (index.head.device_bytes, fill.bytes());
        if expected != actual || index.head.device != *id {
            return Err(LendError::Length { device: *id, index: expected, actual });
        }
        let (id, patience, supply) = (*id, self.environment.patience, self.environment.supply);
        let filler = LayerFiller::from_source(index, source, fill).with_patience(patience);
        Ok(self.keeping_windows(filler.with_files(move || supply.files(&id))))
    }
}

/// Returns whether a device has no holes. If it can be sealed, it may be complete, because an earlier service may have
/// ended before it could seal the device. Its bytes are not yet verified.
fn has_no_hole(file: &File) -> bool {
    // `lseek` is safe, because the file offset is not used otherwise.
    let hole = rustix::fs::seek(file, SeekFrom::Hole(0)).ok();
    hole.is_some() && hole == file.metadata().ok().map(|it| it.len())
}

/// Returns whether another process has had a device open for longer than a moment.
fn is_open_elsewhere(file: &File) -> bool {
    let mut tries = (0..20).map(|_| kernel::lease::in_use(file.as_fd()).unwrap_or(true));
    tries.all(|it| {
        if it {
            thread::sleep(MOMENT);
        }
        it
    })
}
