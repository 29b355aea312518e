//! The files of a container's further mounts, `type=self`: made before its folder is there, then named in it.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use store::{ContainerDir, Store};

use crate::bundle::mounts::{MountKind, MountWish, Source, Volume, VolumeError, arrange};
use crate::bundle::userns::{IdMap, MapError};
use crate::folder;
use crate::life::stage::{Filestore, Stage};
use crate::root::UpperError;
use crate::root::filestore::{self, FilestoreError};
use crate::root::headroom::{Headroom, HeadroomError};

/// The files, in the order of their mounts.
#[derive(Debug, Default)]
pub struct Filestores(Vec<OwnedFd>);

/// A mount that a container cannot have.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountWishError {
    /// Its file cannot be made.
    #[error("--mount type=self,dst={destination}")]
    Make {
        /// Where it was to be.
        destination: String,
        /// Why.
        source: FilestoreError,
    },
    /// No folder is given for its file.
    #[error(
        "--mount type=self needs the folder of a container, which only `run` makes: use type=memory or type=dir"
    )]
    NoFolder,
    /// Its file cannot be mounted.
    #[error("cannot mount a filestore for {destination}")]
    Mount {
        /// Where it was to be.
        destination: String,
        /// The kernel's answer.
        source: UpperError,
    },
    /// It has no owner.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Two of them are in each other's way.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

impl Filestores {
    /// Makes them, without names.
    ///
    /// # Errors
    /// [`MountWishError`].
    pub fn make(
        store: &Store,
        mounts: &[MountWish],
        search: &OsStr,
    ) -> Result<Self, MountWishError> {
        let make = |wish: &MountWish| {
            let MountKind::Filestore { bytes, durability, .. } = wish.kind else { return None };
            let size = bytes.unwrap_or(filestore::SIZE);
            let backing = filestore::Backing::Ahead;
            let made = filestore::make(store.containers.fd(), size, durability, backing, search);
            let destination = || wish.destination.clone();
            Some(made.map_err(|source| MountWishError::Make { destination: destination(), source }))
        };
        Ok(Self(mounts.iter().filter_map(make).collect::<Result<_, _>>()?))
    }

    /// Gives them their names in a container's folder.
    pub(crate) fn name(&self, folder: &ContainerDir) -> Result<(), Errno> {
        self.0.iter().enumerate().try_for_each(|(number, file)| {
            filestore::name(file.as_fd(), folder.fd(), &folder::filestore(number))
        })
    }

    /// Who takes room for them.
    pub(crate) fn headrooms(path: &Path, stage: &Stage) -> Result<Vec<Headroom>, HeadroomError> {
        stage.headrooms(|number| path.join(folder::filestore(number)))
    }

    /// Removes those names again.
    pub(crate) fn remove(path: &Path, stage: &Stage) {
        for name in (0..stage.filestores()).map(folder::filestore) {
            drop(std::fs::remove_file(path.join(name)));
        }
    }
}

/// All that a container sees besides its root, in order. File systems of its own are mounted, and added to the stage.
///
/// # Errors
/// [`MountWishError`].
pub fn volumes(
    mut volumes: Vec<Volume>,
    mounts: &[MountWish],
    files: &Filestores,
    map: Option<&IdMap>,
    stage: &mut Stage,
) -> Result<Vec<Volume>, MountWishError> {
    // Before those of the container's own are among them: their paths are there only in its mount namespace.
    volumes.iter().try_for_each(Volume::check)?;
    let mut files = files.0.iter();
    for MountWish { kind, destination, access, relabels: _ } in mounts {
        let source = match kind {
            MountKind::Host(path) => {
                let source = Source::Host(path.clone());
                let destination = destination.clone();
                let volume = Volume { source, destination, access: *access };
                volume.check()?;
                volume.source
            }
            MountKind::Memory { bytes, mode } => Source::Memory { bytes: *bytes, mode: *mode },
            MountKind::Filestore { mode, durability, .. } => {
                let file = files.next().ok_or(MountWishError::NoFolder)?;
                let owner = map.map_or(Ok((0, 0)), IdMap::root)?;
                let mounted = Filestore::mount(file.as_fd(), *durability, *mode, owner);
                let mounted = mounted.map_err(|source| MountWishError::Mount {
                    destination: destination.clone(),
                    source,
                })?;
                Source::Host(stage.add(mounted).display().to_string())
            }
        };
        volumes.push(Volume { source, destination: destination.clone(), access: *access });
    }
    arrange(&mut volumes)?;
    Ok(volumes)
}
