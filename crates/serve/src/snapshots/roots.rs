//! Mounts roots of snapshots, and shares the mounts of their images.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use container::bundle::userns::IdMap;
use container::root::share::Superblock;
use container::root::{
    BetweenOwners, MakeRootError, Shape, Space, Trust, TrustedImage, Via, Writable, WritableChoice,
    make,
};
use image::digest::Digest;
use image::verity::ImageId;
use kernel::mount::{Detached, Durability, MountError, Reach, Unmount, bind, mounted, unmount};
use oci::policy::Policies;
use rustix::io::Errno;
use store::{OperationError, Resolved, SnapshotInstance, Store, UsePolicy};
use transfer::evidence::{UseError, check_use, check_use_by_engine};

use super::error::{SnapshotterError, unopened};
use super::lazy::pull::EngineImages;
use super::settings::SnapshotAccess;
use super::state::{Root, State};

/// The purpose of a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A container may run in the root, or a user may read it, so the policy is checked.
    Use,
    /// A layer is unpacked into the root.
    Unpack,
}

/// The policies in force, in the form that the store calls.
struct InForce<'a>(&'a Policies, Purpose);

impl UsePolicy for InForce<'_> {
    type Refusal = Box<UseError>;

    fn check(&self, store: &Store, found: &Resolved) -> Result<(), Box<UseError>> {
        match self.1 {
            Purpose::Use => {
                let checked = match found.manifest {
                    Some(_) => check_use(self.0, store, found),
                    None => check_use_by_engine(self.0, found),
                };
                checked.map(drop).map_err(Box::new)
            }
            Purpose::Unpack => Ok(()),
        }
    }
}

/// Mounts of images that roots share. Each is kept while a root that this service has mounted uses it.
#[derive(Debug, Default)]
pub(super) struct Roots {
    shared: Mutex<HashMap<ImageId, Shared>>,
}

#[derive(Debug)]
struct Shared {
    superblock: Superblock,
    uses: usize,
    /// Name of its mount below the instance, for the next service; `None` if it could not be attached.
    name: Option<String>,
}

/// The lower layers of a root.
#[derive(Debug, Clone)]
pub(super) struct Below {
    pub(super) image: ImageId,
    /// Manifest of the image, if its layers are not downloaded.
    pub(super) lazy: Option<Digest>,
    /// The snapshots whose directories are above the image, uppermost first.
    pub(super) directories: Vec<u64>,
}

/// The snapshot of a root, and the layers below it.
#[derive(Clone, Copy)]
pub(super) struct RootPlace<'a> {
    pub(super) instance: &'a SnapshotInstance,
    pub(super) number: u64,
    pub(super) below: &'a Below,
    /// Opens the image if its layers are not downloaded.
    pub(super) lazy: Option<&'a EngineImages>,
    /// Id map of the root; `None` for the image's owners.
    pub(super) map: Option<&'a IdMap>,
}

impl Roots {
    /// Mounts a root. Writes to the root survive a crash if the program has synced them.
    pub(super) fn mount(
        &self,
        store: &Store,
        policies: &Policies,
        place: RootPlace<'_>,
        purpose: Purpose,
        access: SnapshotAccess,
    ) -> Result<(), SnapshotterError> {
        let RootPlace { instance, number, below, lazy, map } = place;
        // If there are directories above the image, policies treat its origin as unknown.
        let manifest = below.lazy.filter(|_| below.directories.is_empty());
        let found = Resolved { image: below.image, name: None, manifest };
        let permitted = store.permit(&InForce(policies, purpose), found)?;
        let permitted = match lazy {
            None => {
                permitted.open(store).map_err(|error| SnapshotterError::Image(Box::new(error)))?
            }
            Some(lazy) => {
                let object = format_args!(
                    "image {}, whose layers are not downloaded: see `quire ps --lazy`",
                    below.image
                );
                lazy.open(store, permitted).map_err(OperationError::of("mount", object))?
            }
        };
        let changes = match access {
            SnapshotAccess::Read => None,
            SnapshotAccess::Write => {
                let path = instance.changes(number);
                Some(File::open(path).map_err(unopened)?)
            }
        };
        let writable = match &changes {
            None => Writable::None,
            Some(changes) => {
                Writable::Directory { directory: changes.as_fd(), durability: Durability::Durable }
            }
        };
        let upper = |number: &u64| File::open(instance.changes(*number).join("upper"));
        let between = below.directories.iter().map(upper).collect::<Result<Vec<_>, _>>();
        let between = between.map_err(unopened)?;
        let between: Vec<_> = between.iter().map(|it| it.as_fd()).collect();
        let wish = WritableChoice::None;
        let image = TrustedImage::to_mount(store, permitted, Trust::default(), Some(&wish));
        let image = image.map_err(MakeRootError::from)?;
        let shape = Shape {
            writable,
            map,
            space: Space::AsIs,
            places: &[],
            claimed: &[],
            between: &between,
            between_owners: BetweenOwners::Image,
            via: Via::Tree,
            source: None,
        };
        let made = make(store, &image, &shape, self.take(&below.image).into_iter())?;
        made.mount.attach_at(&instance.root(number)).map_err(unattached)?;
        self.keep(instance, below.image, made.image);
        Ok(())
    }

    /// Returns the mount of an image that another root uses.
    fn take(&self, image: &ImageId) -> Option<Superblock> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.get(image)?.superblock.again()
    }

    fn keep(&self, instance: &SnapshotInstance, image: ImageId, superblock: Superblock) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let of_image = shared.entry(image).or_insert_with(|| {
            let name = attach_shared(instance, &image, &superblock);
            Shared { superblock, uses: 0, name }
        });
        of_image.uses += 1;
    }

    /// Records that a root of this image was unmounted.
    pub(super) fn release(&self, instance: &SnapshotInstance, image: &ImageId) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_image) = shared.get_mut(image) {
            of_image.uses -= 1;
            if of_image.uses == 0
                && let Some(Shared { name: Some(name), .. }) = shared.remove(image)
                && let Err(error) = detach_shared(instance, &name)
            {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, name, "cannot unmount an unused image");
            }
        }
    }

    /// Takes over the mounts of images below roots that stay mounted, and records the roots in `state`. Unmounts the
    /// others.
    pub(super) fn adopt(
        instance: &SnapshotInstance,
        state: &mut State,
    ) -> Result<Self, SnapshotterError> {
        let mut shared = HashMap::new();
        for name in &instance.shared_names()? {
            let users = |image: &ImageId| -> Vec<u64> {
                let adopted = state.entries.iter().filter(|it| it.1.root == Root::Adopted);
                let of_image = adopted.filter(|it| state.image_below(it.1) == Some(*image));
                of_image.map(|it| *it.0).collect()
            };
            let taken = read_name(name).and_then(|(image, identity)| {
                let users = Some(users(&image)).filter(|it| !it.is_empty())?;
                let superblock = Superblock::attached(&instance.shared().join(name), identity)?;
                Some((image, users, superblock))
            });
            let Some((image, users, superblock)) = taken else {
                detach_shared(instance, name)?;
                continue;
            };
            let uses = users.len();
            for number in users {
                if let Some(entry) = state.entries.get_mut(&number) {
                    entry.root = Root::Ours(image);
                }
            }
            shared.insert(image, Shared { superblock, uses, name: Some(name.clone()) });
        }
        Ok(Self { shared: Mutex::new(shared) })
    }
}

/// Attaches an image's mount below the instance, because an attached mount outlives the process. If this fails, the
/// next service mounts the image again.
fn attach_shared(
    instance: &SnapshotInstance,
    image: &ImageId,
    superblock: &Superblock,
) -> Option<String> {
    // The mount of an image with a loop device is not attached, because the next service would need the device as
    // well.
    let (again, identity) = (superblock.again()?, superblock.file_identity()?);
    let name = format!("{image}{MARK}{}", identity.replace(':', "-"));
    let attached = instance.make_shared(&name).map_err(SnapshotterError::from);
    let attached = attached.and_then(|()| {
        Ok(again.mount.attach_at(&instance.shared().join(&name)).map_err(unattached)?)
    });
    match attached {
        Ok(()) => Some(name),
        Err(error) => {
            let error: &dyn std::error::Error = &error;
            tracing::debug!(error, "the next service will mount this image again");
            None
        }
    }
}

/// Separates image and identity in the name of a shared mount.
const MARK: char = '+';

fn read_name(name: &str) -> Option<(ImageId, String)> {
    let (image, identity) = name.split_once(MARK)?;
    Some((image.parse().ok()?, identity.replacen('-', ":", 1)))
}

fn detach_shared(instance: &SnapshotInstance, name: &str) -> Result<(), SnapshotterError> {
    detach(&instance.shared().join(name))?;
    Ok(instance.drop_shared(name)?)
}

/// Unmounts a root and returns a descriptor that keeps it alive. When the last mount of a root is closed, the kernel
/// syncs the file system with its changes. This may take long, so dropping the descriptor may block.
pub(super) fn detach_later(path: &Path) -> Result<Option<Detached>, OperationError> {
    let kept = match mounted_at(path) {
        Ok(Some(root)) => Some(bind(root.as_fd(), Reach::One).map_err(unattached)?),
        // The root is not mounted, or was never made.
        Ok(None) | Err(_) => None,
    };
    detach(path)?;
    Ok(kept)
}

/// Opens the mount at a path, if it is of another file system than its parent directory.
fn mounted_at(path: &Path) -> std::io::Result<Option<File>> {
    let root = File::open(path)?;
    let is_mount = root.metadata()?.dev() != path.parent().unwrap_or(path).metadata()?.dev();
    Ok(is_mount.then_some(root))
}

/// Whether a directory is a mount point, so that it is on another file system than its parent. If one of the two
/// directories cannot be examined, the result is `false`.
pub(super) fn is_mounted(path: &Path) -> bool {
    let device = |it: &Path| it.metadata().map(|it| it.dev()).ok();
    let (here, above) = (device(path), path.parent().and_then(device));
    here.zip(above).is_some_and(|(here, above)| here != above)
}

/// Unmounts a path: at once, or lazily if it is in use. Mounts in other namespaces stay.
pub(super) fn detach(path: &Path) -> Result<(), OperationError> {
    let done = match unmount(path, Unmount::Now) {
        Err(error) if error.errno() == Some(Errno::BUSY) => unmount(path, Unmount::Lazy),
        // The path is not a mount point, or does not exist.
        Err(error) if matches!(error.errno(), Some(Errno::INVAL | Errno::NOENT)) => Ok(()),
        done => done,
    };
    done.map_err(unattached)
}

fn unattached(error: MountError) -> OperationError {
    OperationError::of("attach or detach", "the root of a snapshot")(error)
}

/// Returns the numbers of the snapshots whose roots are mounted, among those that may have a root. Unmounts all other
/// mounts in the folder of the instance, which a killed service has left, except for mounts of images.
pub(super) fn adopt(
    instance: &SnapshotInstance,
    may_have: &dyn Fn(u64) -> bool,
) -> Result<Vec<u64>, SnapshotterError> {
    // Paths in the mount table are resolved.
    let folder = instance.path().canonicalize().map_err(unopened)?;
    let shared = below_folder(instance, &instance.shared());
    let (mut found, mut strays) = (Vec::new(), Vec::new());
    for mount in mounted().map_err(unopened)? {
        let Ok(below) = mount.point.strip_prefix(&folder) else { continue };
        if below.parent() == Some(&*shared) {
            continue;
        }
        let number = below.iter().next().and_then(|it| it.to_str()?.parse().ok());
        match number.filter(|it| may_have(*it)) {
            Some(number) if *below == below_folder(instance, &instance.root(number)) => {
                found.push(number);
            }
            Some(number)
                if *below == below_folder(instance, &instance.changes(number))
                    && instance.filestore(number).exists() => {}
            _ => strays.push(mount.point),
        }
    }
    // A mount on another mount comes later in the table.
    for stray in strays.into_iter().rev() {
        tracing::warn!(mount = %stray.display(), "unmounting a leftover mount of a service");
        detach(&stray)?;
    }
    Ok(found)
}

/// Returns a path relative to the folder of its instance.
fn below_folder(instance: &SnapshotInstance, path: &Path) -> PathBuf {
    path.strip_prefix(instance.path()).map(Path::to_owned).unwrap_or_else(|_other| path.to_owned())
}
