//! Whose a store is: root mounts and runs nothing that another user can change after it was checked.

use anyhow::{Context as _, bail};
use image::erofs::read::Owners;
use store::{Exposure, OpenImage, Store};

use crate::args::{Trust, VerityPolicy};
use crate::writable::Wish;

/// What somebody else could change in the store, if anything.
fn changeable(store: &Store) -> anyhow::Result<Option<Exposure>> {
    Ok(store.exposure()?.into_iter().find(Exposure::is_changeable))
}

/// Whether nobody else can change what is in the store.
pub(crate) fn is_ours(store: &Store) -> bool {
    changeable(store).is_ok_and(|it| it.is_none())
}

/// Refuses to use containers of a store that somebody else can change: their folders say which processes they are, and
/// what a runtime does.
pub(crate) fn check_containers(store: &Store) -> anyhow::Result<()> {
    match changeable(store)? {
        None => Ok(()),
        Some(found) => {
            bail!("containers of the store {} are not used: {found}", store.path().display())
        }
    }
}

/// Refuses to run an image that somebody else can change.
pub(crate) fn check_image(store: &Store, image: &OpenImage) -> anyhow::Result<()> {
    match store.exposure_of(image)? {
        None => Ok(()),
        Some(found) => refuse(image, &found),
    }
}

/// How an image is to be verified at its mount. One that somebody else could change is mounted only if the kernel holds it
/// to its digest: image and data are sealed, and were measured.
pub(crate) fn trust(
    store: &Store,
    image: &OpenImage,
    trust: &Trust,
    writable: Option<&Wish>,
) -> anyhow::Result<Trust> {
    let Some(found) = store.exposure_of(image)? else { return Ok(trust.clone()) };
    // The file of a writable layer is copied from one that the store has.
    let is_filestore =
        !matches!(writable, Some(Wish::None | Wish::Memory(_) | Wish::Directory(..)));
    if !image.kernel_verity || trust.verity == VerityPolicy::Off || is_filestore {
        refuse(image, &found)?;
    }
    // Sealed does not mean that Quire wrote it: what our reader refuses, the kernel does not see.
    let read = store.tree(image, Owners::FirstMet);
    read.with_context(|| format!("cannot read image {}", image.id))?;
    Ok(Trust { verity: VerityPolicy::Require, ..trust.clone() })
}

fn refuse(image: &OpenImage, found: &Exposure) -> anyhow::Result<()> {
    bail!(
        "image {} is not mounted: {found}. Pull or import it into a store of your own (without --store, the usual one), \
         or mount it from a file system with fs-verity",
        image.id
    )
}
