//! Mounts the root of a container that has ended, or was only created, for commands that copy files.

use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use store::{ContainerSnapshot, ContainerSnapshotError, OperationError, Store};

use crate::bundle::userns::IdMap;
use crate::folder::{self, FILESTORE};
use crate::life::end::ended::{Ended, LOST};
use crate::life::kept::KeptContainer;
use crate::life::mount_staging::Stage;
use crate::life::prepare::{AdmittedImage, snapshots};
use crate::life::writable_layer::KeptError;
use crate::root::headroom::Headroom;
use crate::root::{BetweenOwners, MakeRootError, Shape, Space, TrustedImage, Via, make};
use crate::store_ownership::OwnerError;

/// Reason why the root of a container at rest cannot be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AtRestError {
    /// Another user can change the image.
    #[error(transparent)]
    Owner(#[from] OwnerError),
    /// A snapshot below the writable layer cannot be used.
    #[error(transparent)]
    Snapshot(#[from] ContainerSnapshotError),
    /// The writable layer cannot be used.
    #[error("cannot use the changes of container {id}")]
    Kept { id: String, source: KeptError },
    /// The root cannot be made.
    #[error(transparent)]
    Root(#[from] MakeRootError),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// The mounted root of a container at rest, whose folder stays locked. No other process sees the mount. Dropping it
/// unmounts the root, as [`rest`](Self::rest) does. If this process is killed, the kernel unmounts the root, and the
/// next start may refuse the changes.
pub struct RestingRoot {
    mounted: MountedRoot,
    map: Option<IdMap>,
}

/// The mount, until it is taken down.
struct MountedRoot(Option<Ended>);

impl MountedRoot {
    fn ended(&self) -> &Ended {
        self.0.as_ref().expect("only `rest` takes the mount, and nothing uses it afterwards")
    }

    /// Returns whether the disk has lost some of the changes.
    fn rest(&mut self) -> bool {
        let Some(ended) = self.0.take() else { return false };
        let has_lost = ended.root.doomed.has_lost(ended.root.mount.as_fd());
        ended.rest(has_lost, false);
        has_lost
    }
}

impl Drop for MountedRoot {
    fn drop(&mut self) {
        if self.rest() {
            tracing::warn!("{LOST}");
        }
    }
}

impl fmt::Debug for RestingRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RestingRoot").field("id", &self.mounted.ended().id).finish_non_exhaustive()
    }
}

impl RestingRoot {
    /// Mounts the root, with the container's own changes. `remark` receives sentences for the user.
    ///
    /// # Errors
    /// [`AtRestError`]; the container stays as it was.
    pub fn mount(
        store: &Store,
        image: AdmittedImage<'_>,
        kept: KeptContainer,
        via: Via<'_>,
        remark: &dyn Fn(&str),
    ) -> Result<Self, AtRestError> {
        let id = kept.id().to_owned();
        let AdmittedImage { store: images, image } = image;
        let image = TrustedImage::to_run(images, image, kept.request().trust.clone())?;
        let below = snapshots(store, kept.record().snapshot.as_deref())?;
        let uppers = below.iter().map(ContainerSnapshot::upper).collect::<Result<Vec<_>, _>>()?;
        let between: Vec<_> = uppers.iter().map(|it| it.as_fd()).collect();
        let place = kept.place(remark);
        let place = place.map_err(|source| AtRestError::Kept { id: id.clone(), source })?;
        let map = kept.claim().map(|it| it.map);
        let shape = Shape {
            writable: place.writable(),
            map: map.as_ref(),
            space: Space::AsIs,
            places: &[],
            claimed: &[],
            between: &between,
            between_owners: BetweenOwners::Host,
            via,
            source: None,
        };
        let root = make(store, &image, &shape, std::iter::empty())?;
        let path = folder::path(store, &id);
        let headrooms = root.doomed.headroom(&path.join(FILESTORE))?.into_iter().collect();
        let stage = Stage::new(&path, store.who().user, map.as_ref());
        let (folder, lock) = kept.into_folder();
        let (_image, _directory, _lock) = (image, place.into_locked(), lock);
        let ended = Ended { id, folder, path, root, stage, headrooms, _image, _directory, _lock };
        Ok(Self { mounted: MountedRoot(Some(ended)), map })
    }

    /// Returns the root.
    #[must_use]
    pub fn root(&self) -> BorrowedFd<'_> {
        self.mounted.ended().root.mount.as_fd()
    }

    /// Returns the map of the container's users to the host's.
    #[must_use]
    pub const fn map(&self) -> Option<&IdMap> {
        self.map.as_ref()
    }

    /// Returns the container's folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.mounted.ended().path
    }

    /// Reserves disk space for the next writes. Call it at least for each megabyte that is written.
    pub fn look(&self) {
        let _next: Option<std::time::Duration> =
            self.mounted.ended().headrooms.iter().map(Headroom::look).min();
    }

    /// Unmounts the root, and keeps its changes. Returns whether the disk has lost some of them.
    #[must_use]
    pub fn rest(mut self) -> bool {
        self.mounted.rest()
    }
}
