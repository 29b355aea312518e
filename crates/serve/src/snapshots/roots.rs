//! Roots of snapshots: where they are mounted, and what they share.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use container::root::share::Superblock;
use container::root::{Shape, Space, Trust, TrustedImage, Writable, WritableWish, make};
use image::verity::ImageId;
use kernel::mount::{Detached, Durability, MountError, Reach, Unmount, bind, mounted, unmount};
use oci::policy::Policies;
use rustix::io::Errno;
use store::{Resolved, SnapshotInstance, Store, UsePolicy};
use transfer::evidence::{UseError, check_use};

use super::error::SnapshotterError;
use super::snapshotter::SnapshotAccess;

/// What a root is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Something may run in it, or look at it: the policy is asked.
    Use,
    /// A layer is unpacked on it.
    Unpack,
}

/// The policies in force, as the store asks them.
struct InForce<'a>(&'a Policies, Purpose);

impl UsePolicy for InForce<'_> {
    type Refusal = Box<UseError>;

    fn check(&self, store: &Store, found: &Resolved) -> Result<(), Box<UseError>> {
        match self.1 {
            Purpose::Use => check_use(self.0, store, found).map(drop).map_err(Box::new),
            Purpose::Unpack => Ok(()),
        }
    }
}

/// Mounts of images that roots share. As long as a root is mounted that this service has made, its image's is here.
#[derive(Debug, Default)]
pub(super) struct Roots {
    shared: Mutex<HashMap<ImageId, Shared>>,
}

#[derive(Debug)]
struct Shared {
    superblock: Superblock,
    uses: usize,
}

/// Where a root is mounted, and what it is made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct RootPlace<'a> {
    pub(super) instance: &'a SnapshotInstance,
    pub(super) number: u64,
    pub(super) image: ImageId,
}

impl Roots {
    /// Mounts a root. Every byte that is written to it outlives a crash as far as its writer has synced it.
    pub(super) fn mount(
        &self,
        store: &Store,
        policies: &Policies,
        place: RootPlace<'_>,
        (purpose, access): (Purpose, SnapshotAccess),
    ) -> Result<(), SnapshotterError> {
        let RootPlace { instance, number, image } = place;
        let found = Resolved { image, name: None, manifest: None };
        let permitted = store.permit(&InForce(policies, purpose), found)?;
        let opened = permitted.open(store);
        let permitted = opened.map_err(|error| SnapshotterError::Image(Box::new(error)))?;
        let changes = match access {
            SnapshotAccess::Read => None,
            SnapshotAccess::Write => {
                let path = instance.changes(number);
                Some(File::open(path).map_err(SnapshotterError::Directory)?)
            }
        };
        let writable = match &changes {
            None => Writable::None,
            Some(changes) => {
                Writable::Directory { directory: changes.as_fd(), durability: Durability::Durable }
            }
        };
        let wish = WritableWish::None;
        let root = |error| SnapshotterError::Root(Box::new(error));
        let image = TrustedImage::to_mount(store, permitted, Trust::default(), Some(&wish));
        let image = image.map_err(|error| root(error.into()))?;
        let shape = Shape { writable, map: None, space: Space::AsIs, places: &[] };
        let made =
            make(store, &image, &shape, self.take(&place.image).into_iter()).map_err(root)?;
        made.mount.attach_at(&instance.root(number))?;
        self.keep(place.image, made.image);
        Ok(())
    }

    /// A mount that another root has.
    fn take(&self, image: &ImageId) -> Option<Superblock> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.get(image)?.superblock.again()
    }

    fn keep(&self, image: ImageId, superblock: Superblock) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.entry(image).or_insert(Shared { superblock, uses: 0 }).uses += 1;
    }

    /// A root of this image that this service had made is unmounted.
    pub(super) fn release(&self, image: &ImageId) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_image) = shared.get_mut(image) {
            of_image.uses -= 1;
            if of_image.uses == 0 {
                shared.remove(image);
            }
        }
    }
}

/// Unmounts a root, and answers it by a descriptor. When the last mount of a root goes, the kernel syncs the file system that
/// it was written to. That may take long: whoever drops this waits for it.
pub(super) fn detach_later(path: &Path) -> Result<Option<Detached>, MountError> {
    let root = File::open(path).and_then(|root| {
        let is_mount = root.metadata()?.dev() != path.parent().unwrap_or(path).metadata()?.dev();
        Ok(is_mount.then_some(root))
    });
    let kept = match root {
        Ok(Some(root)) => Some(bind(root.as_fd(), Reach::One)?),
        // Nothing is mounted there, or it was never made.
        Ok(None) | Err(_) => None,
    };
    detach(path)?;
    Ok(kept)
}

/// Unmounts what is mounted at a path; at once, unless somebody is in there. What others have mounted of it stays theirs.
fn detach(path: &Path) -> Result<(), MountError> {
    match unmount(path, Unmount::Now) {
        Err(error) if error.errno() == Some(Errno::BUSY) => unmount(path, Unmount::Lazy),
        // Nothing is mounted there, or never was.
        Err(error) if matches!(error.errno(), Some(Errno::INVAL | Errno::NOENT)) => Ok(()),
        done => done,
    }
}

/// The numbers of the snapshots whose roots are mounted, of those that may have one. What else is mounted in the folder of
/// the instance is unmounted: a service that was killed has left it.
pub(super) fn adopt(
    instance: &SnapshotInstance,
    may_have: &dyn Fn(u64) -> bool,
) -> Result<Vec<u64>, SnapshotterError> {
    // Paths in the table have no links in them.
    let folder = instance.path().canonicalize().map_err(SnapshotterError::Directory)?;
    let (mut found, mut strays) = (Vec::new(), Vec::new());
    for mount in mounted().map_err(SnapshotterError::Directory)? {
        let Ok(below) = mount.point.strip_prefix(&folder) else { continue };
        let number = below.iter().next().and_then(|it| it.to_str()?.parse().ok());
        match number.filter(|it| may_have(*it)) {
            Some(number) if mount.point == folder.join(root_of(instance, number)) => {
                found.push(number);
            }
            _ => strays.push(mount.point),
        }
    }
    // What was mounted on another mount comes later in the table.
    for stray in strays.into_iter().rev() {
        tracing::warn!(mount = %stray.display(), "unmounting what a service has left");
        detach(&stray)?;
    }
    Ok(found)
}

/// The path of a root below its instance.
fn root_of(instance: &SnapshotInstance, number: u64) -> std::path::PathBuf {
    let root = instance.root(number);
    root.strip_prefix(instance.path()).map(Path::to_owned).unwrap_or(root)
}
