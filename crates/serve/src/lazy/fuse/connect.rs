//! Makes files on FUSE that stand for devices, and passes their connections to the keeper and the next service.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::Ordering;

use image::digest::Digest;
use image::verity::DeviceId;
use kernel::fuse::FuseConnection;
use kernel::mount::{FuseAccess, FuseOptions};
use rustix::fs::{FileType, Mode, OFlags};

use super::connections::{Connection, ConnectionId, FuseDeviceError, ROOT, open_failed};
use super::devices::{InodePlace, ServedState};
use super::server::{DeviceServer, DeviceServerError};

/// Source of the mount in lists of mounts.
const NAME: &str = "quire";

impl<'a> DeviceServer<'a> {
    /// Creates a file that stands for a device, while the server is served. The device is in use as long as the file is
    /// open or mounted. The keeper must have the connection before the file is passed to a process that may outlive
    /// this process.
    pub fn connect(&self, device: &DeviceId) -> Result<(ConnectionId, File), DeviceServerError> {
        self.connect_for(device, None)
    }

    /// Like [`connect`](Self::connect), for readers of an image.
    pub(in crate::lazy) fn connect_for(
        &self,
        device: &DeviceId,
        manifest: Option<Digest>,
    ) -> Result<(ConnectionId, File), DeviceServerError> {
        let found = self.devices().iter().find(|it| it.1.device == *device).map(|it| *it.0);
        let place = found.ok_or(DeviceServerError::Unknown(*device))?;
        self.connects(place, manifest.as_ref());
        let (id, file) = self.connection((*device, manifest), place)?;
        match self.check(&file, place) {
            Ok(()) => Ok((id, file)),
            Err(error) => {
                self.connections.remove(id);
                Err(error)
            }
        }
    }

    fn connection(
        &self,
        device: (DeviceId, Option<Digest>),
        place: InodePlace,
    ) -> Result<(ConnectionId, File), FuseDeviceError> {
        let shared = FuseConnection::open()?;
        let options = FuseOptions {
            root: FileType::RegularFile,
            owner: ROOT,
            access: FuseAccess::Owner,
            name: NAME,
        };
        let mount = kernel::mount::fuse(shared.as_fd(), &options)?;
        let bytes = self.length(place);
        let start = device.1.as_ref().and_then(|it| self.starts.recording(it));
        let mut connection = Connection::new(shared, (device, place, bytes))?;
        connection.start = start;
        let id = self.connections.add(None, connection)?;
        // This open blocks until the thread that takes requests has replied.
        let path = format!("/proc/self/fd/{}", mount.as_fd().as_raw_fd());
        let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        match opened {
            Ok(file) => Ok((id, file.into())),
            Err(errno) => {
                self.connections.remove(id);
                Err(open_failed(errno.into()).into())
            }
        }
    }

    /// Records that readers of an image come.
    fn connects(&self, place: InodePlace, manifest: Option<&Digest>) {
        if let Some(ServedState::Filling(fillers)) = self.devices().get(&place).map(|it| &it.state)
        {
            fillers.connects(manifest);
        }
    }

    fn length(&self, place: InodePlace) -> u64 {
        let devices = self.devices();
        let file = devices.get(&place).map(|it| it.state.file().metadata());
        file.and_then(Result::ok).map_or(0, |it| it.len())
    }

    /// Checks the file's length, so that the kernel requests and caches the length. A file of length 0 would read as
    /// empty without an error.
    fn check(&self, file: &File, place: InodePlace) -> Result<(), DeviceServerError> {
        let metadata = file.metadata().map_err(open_failed).map_err(FuseDeviceError::from)?;
        let actual = metadata.len();
        let expected = self.length(place);
        if actual == expected {
            return Ok(());
        }
        Err(FuseDeviceError::Length { expected, actual }.into())
    }

    /// Records that the keeper has a connection.
    pub(in crate::lazy) fn is_kept(&self, id: ConnectionId) {
        if let Some(it) = self.connections.lookup(id) {
            it.is_kept.store(true, Ordering::Relaxed);
        }
    }

    /// Calls `give` with each connection that the keeper must hold.
    pub(in crate::lazy) fn connections<E>(
        &self,
        mut give: impl FnMut(
            ConnectionId,
            (&DeviceId, Option<Digest>),
            rustix::fd::BorrowedFd<'_>,
        ) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut give = |id, it: &Connection| give(id, (&it.device, it.manifest), it.shared.as_fd());
        self.connections.all().iter().try_for_each(|(id, it)| give(*id, it))
    }

    /// Returns the connections that have ended since the last call.
    pub(in crate::lazy) fn ended_connections(&self) -> Vec<ConnectionId> {
        self.connections.take_ended()
    }

    /// Returns whether a file that stands for a device is mounted or open.
    pub(in crate::lazy) fn is_connected(&self, device: &DeviceId) -> bool {
        let devices = self.devices();
        let found = devices.iter().find(|it| it.1.device == *device);
        found.is_some_and(|it| self.connections.has(*it.0))
    }

    /// Takes over a connection from a service that has died. The kernel resends or fails the requests that the dead
    /// service had taken. Add the device before this call; otherwise its readers get I/O errors.
    pub(in crate::lazy) fn adopt_connection(
        &self,
        id: ConnectionId,
        device: (DeviceId, Option<Digest>),
        shared: FuseConnection,
    ) -> Result<(), FuseDeviceError> {
        let found = self.devices().iter().find(|it| it.1.device == device.0).map(|it| *it.0);
        let place = found.unwrap_or_default();
        self.connects(place, device.1.as_ref());
        let connection = Connection::new(shared, (device, place, self.length(place)))?;
        connection.is_kept.store(true, Ordering::Relaxed);
        self.connections.add(Some(id), connection)?;
        Ok(())
    }
}
