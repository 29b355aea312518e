//! The files of a container's further mounts (`type=self`), which are created before its folder exists and then named
//! in it.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use store::{ContainerDir, OperationError, Store};

use crate::bundle::mounts::{
    MountKind, MountRequest, MountSource, Restrictions, Volume, VolumeError, arrange,
};
use crate::bundle::userns::{IdMap, MapError};
use crate::folder;
use crate::life::mount_staging::{Filestore, Stage};
use crate::root::filestore::{self, FilestoreError};
use crate::root::headroom::Headroom;

/// The files, in the order of their mounts.
#[derive(Debug, Default)]
pub struct Filestores(Vec<OwnedFd>);

/// Reason why a container cannot have a mount.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountRequestError {
    /// The file cannot be created.
    #[error("--mount type=self,dst={destination}")]
    Make {
        /// Destination in the container.
        destination: String,
        source: FilestoreError,
    },
    /// The file needs a container's folder, but the caller has none.
    #[error(
        "--mount type=self needs the directory of a container, which only `run` makes: use \
        type=memory or type=dir"
    )]
    NoFolder,
    /// A volume of the store needs a container that is watched, but the caller has none.
    #[error(
        "volume {0}: volumes of the store are for containers of `run`; use a directory of the host"
    )]
    NoVolume(String),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The map lacks the owner of the file system.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A mount is invalid, or conflicts with another one.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

impl Filestores {
    /// Creates the files, without names.
    pub fn make(
        store: &Store,
        mounts: &[MountRequest],
        search: &OsStr,
    ) -> Result<Self, MountRequestError> {
        let make = |wish: &MountRequest| {
            let MountKind::Filestore { bytes, durability, .. } = wish.kind else { return None };
            let size = bytes.unwrap_or(filestore::SIZE);
            let backing = filestore::Backing::Ahead;
            let made = filestore::make(store.containers.fd(), size, durability, backing, search);
            let destination = || wish.destination.clone();
            Some(
                made.map_err(|source| MountRequestError::Make {
                    destination: destination(),
                    source,
                }),
            )
        };
        Ok(Self(mounts.iter().filter_map(make).collect::<Result<_, _>>()?))
    }

    /// Names the files in a container's folder.
    pub(crate) fn name(&self, folder: &ContainerDir) -> Result<(), Errno> {
        self.0.iter().enumerate().try_for_each(|(number, file)| {
            filestore::name(file.as_fd(), folder.fd(), &folder::filestore(number))
        })
    }

    /// Returns the reservers of disk space for the files.
    pub(crate) fn headrooms(path: &Path, stage: &Stage) -> Result<Vec<Headroom>, OperationError> {
        stage.headrooms(|number| path.join(folder::filestore(number)))
    }

    /// Removes the names.
    pub(crate) fn remove(path: &Path, stage: &Stage) {
        for name in (0..stage.filestores()).map(folder::filestore) {
            drop(std::fs::remove_file(path.join(name)));
        }
    }
}

/// Returns all mounts of a container besides its root, in order. Mounts its file systems and adds them to the stage.
pub fn volumes(
    mut volumes: Vec<Volume>,
    mounts: &[MountRequest],
    files: &Filestores,
    map: Option<&IdMap>,
    stage: &mut Stage,
) -> Result<Vec<Volume>, MountRequestError> {
    // The caller's volumes are checked before the container's own file systems are added, whose paths exist only in
    // its mount namespace.
    volumes.iter().try_for_each(Volume::check)?;
    let is_unnamed =
        |it: &Volume| matches!(it.source, MountSource::Named(_) | MountSource::Anonymous(_));
    if let Some(volume) = volumes.iter().find(|it| is_unnamed(it)) {
        return Err(MountRequestError::NoVolume(volume.destination.clone()));
    }
    let mut files = files.0.iter();
    for MountRequest { kind, destination, access, relabels: _ } in mounts {
        let source = match kind {
            MountKind::Host(path) => {
                let source = MountSource::Host(path.clone());
                let destination = destination.clone();
                let volume = Volume {
                    source,
                    destination,
                    access: *access,
                    chown: false,
                    restrictions: Restrictions::default(),
                };
                volume.check()?;
                volume.source
            }
            MountKind::Memory { bytes, mode, noexec } => {
                MountSource::Memory { bytes: *bytes, mode: *mode, noexec: *noexec }
            }
            MountKind::Filestore { mode, durability, .. } => {
                let file = files.next().ok_or(MountRequestError::NoFolder)?;
                let owner = map.map_or(Ok((0, 0)), IdMap::root)?;
                let mounted = Filestore::mount(file.as_fd(), *durability, *mode, owner);
                let mounted =
                    mounted.map_err(OperationError::of("mount a filestore for", destination))?;
                MountSource::Host(stage.add(mounted).display().to_string())
            }
        };
        let destination = destination.clone();
        volumes.push(Volume {
            source,
            destination,
            access: *access,
            chown: false,
            restrictions: Restrictions::default(),
        });
    }
    arrange(&mut volumes)?;
    Ok(volumes)
}
