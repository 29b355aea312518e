//! Whose a store is: root mounts and runs nothing that another user can change after it was checked.

use std::path::PathBuf;

use image::verity::ImageId;
use store::{DiskError, Exposure, OpenImage, Store};

/// Why something of a store is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnerError {
    /// Containers that another user can change.
    #[error("containers of the store {} are not used: {exposure}", store.display())]
    Containers {
        /// The store's directory.
        store: PathBuf,
        /// The file or directory that another user can change.
        exposure: Exposure,
    },
    /// Lazy devices that another user can change.
    #[error(
        "lazy devices of the store {} are not filled: {exposure}. Pull into a store of your own (without --store, the \
         usual one)",
        store.display()
    )]
    Lazy {
        /// The store's directory.
        store: PathBuf,
        /// The file or directory that another user can change.
        exposure: Exposure,
    },
    /// An image that another user can change.
    #[error(
        "image {image} is not mounted: {exposure}. Pull or import it into a store of your own (without --store, the usual \
         one), or mount it from a file system with fs-verity"
    )]
    Image {
        /// The image.
        image: ImageId,
        /// The file or directory that another user can change.
        exposure: Exposure,
    },
    /// The store's directories cannot be looked at.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// What somebody else could change in the store, if anything.
fn changeable(store: &Store) -> Result<Option<Exposure>, DiskError> {
    Ok(store.exposure()?.into_iter().find(Exposure::is_changeable))
}

/// Returns whether no other user can change the store.
#[must_use]
pub fn is_ours(store: &Store) -> bool {
    changeable(store).is_ok_and(|it| it.is_none())
}

/// Refuses to use containers of a store that another user can change: their folders name their processes, and give
/// orders to a runtime.
///
/// # Errors
/// [`OwnerError`].
pub fn check_containers(store: &Store) -> Result<(), OwnerError> {
    match changeable(store)? {
        None => Ok(()),
        Some(exposure) => Err(OwnerError::Containers { store: store.path().to_owned(), exposure }),
    }
}

/// Refuses to fill lazy devices of a store that another user can change: nothing of it would be mounted.
///
/// # Errors
/// [`OwnerError`].
pub fn check_lazy(store: &Store) -> Result<(), OwnerError> {
    match changeable(store)? {
        None => Ok(()),
        Some(exposure) => Err(OwnerError::Lazy { store: store.path().to_owned(), exposure }),
    }
}

/// Refuses to run an image that another user can change.
///
/// # Errors
/// [`OwnerError`].
pub(crate) fn check_image(store: &Store, image: &OpenImage) -> Result<(), OwnerError> {
    match store.exposure_of(image)? {
        None => Ok(()),
        Some(exposure) => Err(OwnerError::Image { image: image.id, exposure }),
    }
}
