//! Copies of images in unnamed files. A copy is kept while it is mounted, and for a short time afterwards.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use container::root::mount_service::LentImage;
use image::verity::{Algorithm, Hasher, ImageId};
use kernel::mount::Acl;
use rustix::io::Errno;

use super::users::MountLimits;
use super::wire::MountsError;
use super::writer::{self, WrittenImage};
use crate::unpoisoned::lock;

/// How long an unmounted copy is kept, because another container of the image may start soon.
const IDLE: Duration = Duration::from_secs(60);
/// Largest number of copies for all users. Each needs two descriptors.
const COPIES_MAX: usize = 1024;
/// The total size of all copies is limited to this many times the limit of one user.
const USERS_MAX: u64 = 16;

/// The properties that determine a copy. Users do not share copies, so that users cannot find out which images others
/// use, and so that the copies of each user are counted separately.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CopyKey {
    pub(super) user: u32,
    pub(super) image: ImageId,
    /// The ranges of ids inside the namespace, as first id and count: of users, and of groups.
    pub(super) ids: [Vec<(u32, u32)>; 2],
    pub(super) places: Vec<String>,
}

#[derive(Debug)]
pub(super) struct Copy {
    pub(super) written: WrittenImage,
    /// A descriptor open for reading.
    file: OwnedFd,
    /// The service's own mount of the copy, from which the clients' mounts are made.
    mount: Mutex<Option<Arc<LentImage>>>,
    used: Mutex<Instant>,
}

impl Copy {
    pub(super) fn new(file: OwnedFd, written: WrittenImage) -> Self {
        Self { written, file, mount: Mutex::default(), used: Mutex::new(Instant::now()) }
    }

    /// Checks the copy against limits that may have changed since it was written.
    pub(super) fn check(&self, limits: &MountLimits) -> Result<(), MountsError> {
        writer::check_inodes(self.written.inodes, limits.inodes)
    }

    /// Returns the service's own mount of the copy, and creates it if necessary.
    pub(super) fn mount(&self) -> Result<Arc<LentImage>, MountsError> {
        *lock(&self.used) = Instant::now();
        let mut mount = lock(&self.mount);
        if let Some(mount) = &*mount {
            return Ok(Arc::clone(mount));
        }
        let acl = if self.written.has_acl { Acl::Keep } else { Acl::Ignore };
        let made = LentImage::mount(self.file.as_fd(), acl);
        let made = made.map_err(|error| MountsError::failed("cannot mount the image", &error))?;
        let made = Arc::new(made);
        *mount = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Drops the service's own mount, and returns whether the copy is mounted nowhere else.
    fn is_free(&self) -> bool {
        *lock(&self.mount) = None;
        // On an error, the copy counts as in use.
        !kernel::lease::in_use(self.file.as_fd()).unwrap_or(true)
    }

    fn is_idle(&self, now: Instant) -> bool {
        now.saturating_duration_since(*lock(&self.used)) > IDLE
    }
}

/// The copies of all users.
#[derive(Debug, Default)]
pub(super) struct Copies(Mutex<BTreeMap<CopyKey, Arc<Copy>>>);

impl Copies {
    pub(super) fn lookup(&self, key: &CopyKey) -> Option<Arc<Copy>> {
        lock(&self.0).get(key).cloned()
    }

    /// Checks whether a user may have another copy. If not, unmounted copies of this user are dropped first.
    pub(super) fn check_room(&self, user: u32, limits: &MountLimits) -> Result<(), MountsError> {
        let mut copies = lock(&self.0);
        if room(&copies, user, limits, 0).is_ok() {
            return Ok(());
        }
        copies
            .retain(|key, copy| key.user != user || Arc::strong_count(copy) > 1 || !copy.is_free());
        room(&copies, user, limits, 0)
    }

    /// Adds a copy, if the user's limits allow it.
    pub(super) fn keep(
        &self,
        key: CopyKey,
        copy: Copy,
        limits: &MountLimits,
    ) -> Result<Arc<Copy>, MountsError> {
        let mut copies = lock(&self.0);
        room(&copies, key.user, limits, copy.written.bytes)?;
        let copy = Arc::new(copy);
        copies.insert(key, Arc::clone(&copy));
        Ok(copy)
    }

    /// Drops copies that were not used for [`IDLE`] and are not mounted.
    pub(super) fn sweep(&self) {
        let now = Instant::now();
        lock(&self.0).retain(|_, copy| {
            let is_asked_for = Arc::strong_count(copy) > 1 || !copy.is_idle(now);
            is_asked_for || !copy.is_free()
        });
    }
}

fn room(
    copies: &BTreeMap<CopyKey, Arc<Copy>>,
    user: u32,
    limits: &MountLimits,
    more: u64,
) -> Result<(), MountsError> {
    let all = copies.values().map(|it| it.written.bytes).sum::<u64>().saturating_add(more);
    if copies.len() >= COPIES_MAX || all > limits.bytes.saturating_mul(USERS_MAX) {
        return Err(MountsError::too_much(
            "all users together have too many images mounted by the mount service: try again later",
        ));
    }
    let own = || copies.iter().filter(|(key, _)| key.user == user).map(|(_, copy)| copy);
    let (images, bytes) = (own().count() as u64, own().map(|it| it.written.bytes).sum::<u64>());
    if images >= limits.images {
        return Err(MountsError::too_much(format!(
            "user {user} has {images} images mounted by the mount service, and the limit is {}: \
            stop some containers, or raise `images-per-user` below [mounts] in \
            /etc/quire/serve.toml",
            limits.images
        )));
    }
    if bytes.saturating_add(more) > limits.bytes {
        return Err(MountsError::too_much(format!(
            "user {user} would exceed the limit of {} bytes of images mounted by the mount \
            service: stop some containers, or raise `bytes-per-user` below [mounts] in \
            /etc/quire/serve.toml",
            limits.bytes
        )));
    }
    Ok(())
}

/// Returns the id that an image has in a store with this algorithm.
pub(super) fn image_id(image: BorrowedFd<'_>, algorithm: Algorithm) -> Result<ImageId, Errno> {
    let mut hasher = Hasher::new(algorithm);
    let mut piece = vec![0; 1 << 18];
    let mut position = 0;
    loop {
        let read = kernel::files::read_full(image, &mut piece, position)?;
        hasher.update(&piece[..read]);
        position += read as u64;
        if read < piece.len() {
            return Ok(ImageId::new(hasher.finish()));
        }
    }
}
