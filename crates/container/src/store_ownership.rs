//! Checks who can change a store: root must not mount or run files that another user can change after they were
//! checked.

use std::path::PathBuf;

use image::verity::ImageId;
use store::{DiskError, Exposure, OpenImage, Store};

/// Reason why a part of a store is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnerError {
    /// Another user can change the containers.
    #[error("refusing the containers of the store {}: {exposure}", store.display())]
    Containers {
        store: PathBuf,
        /// File or directory that another user can change.
        exposure: Exposure,
    },
    /// Another user can change the lazy devices.
    #[error(
        "refusing to fill lazy devices of the store {}: {exposure}. Pull into a store that only \
        you can write (without --store, the default one)",
        store.display()
    )]
    Lazy {
        store: PathBuf,
        /// File or directory that another user can change.
        exposure: Exposure,
    },
    /// Another user can change the image.
    #[error(
        "refusing to mount image {image}: {exposure}. Pull or import it into a store that only \
        you can write (without --store, the default one), or mount it from a file system with \
        fs-verity"
    )]
    Image {
        image: ImageId,
        /// File or directory that another user can change.
        exposure: Exposure,
    },
    /// The store's directories cannot be inspected.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Returns a file or directory of the store that another user can change, if there is one.
fn changeable(store: &Store) -> Result<Option<Exposure>, DiskError> {
    Ok(store.exposure()?.into_iter().find(Exposure::is_changeable))
}

/// Whether no other user can change the store.
#[must_use]
pub fn is_ours(store: &Store) -> bool {
    changeable(store).is_ok_and(|it| it.is_none())
}

/// Refuses to use the containers of a store that another user can change, because their folders name their processes,
/// and contain the input of a runtime.
pub fn check_containers(store: &Store) -> Result<(), OwnerError> {
    match changeable(store)? {
        None => Ok(()),
        Some(exposure) => Err(OwnerError::Containers { store: store.path().to_owned(), exposure }),
    }
}

/// Refuses to fill lazy devices of a store that another user can change, because its images would not be mounted.
pub fn check_lazy(store: &Store) -> Result<(), OwnerError> {
    match changeable(store)? {
        None => Ok(()),
        Some(exposure) => Err(OwnerError::Lazy { store: store.path().to_owned(), exposure }),
    }
}

/// Refuses to run an image that another user can change.
pub(crate) fn check_image(store: &Store, image: &OpenImage) -> Result<(), OwnerError> {
    match store.exposure_of(image)? {
        None => Ok(()),
        Some(exposure) => Err(OwnerError::Image { image: image.id, exposure }),
    }
}
