//! Images that are published without waiting for the disk, because they can be pulled again.
//!
//! `docs/format/object-store.md`, "Files that are not synced", has the argument for crashes.

use std::os::fd::AsFd as _;

use image::digest::Digest;
use image::verity::{Algorithm, ImageId};
use kernel::process::boot_id;
use rustix::fs::{Access as Permission, AtFlags};
use rustix::io::Errno;

use crate::disk::{ControlFile, DeferralSwitch, Directory, DiskError, MarkedFile};
use crate::meta::{BOOT, Sealing, UNSYNCED};
use crate::shelf::blob_file::BlobFile;
use crate::shelf::images::TORN;
use crate::shelf::lazy_device_file::LazyDeviceFile;
use crate::shelf::refs::RefName;
use crate::store::{LOCK_POLL, Lock, Sharing, Store};

/// Content of `unsynced` if files have the mark.
const WAITING: &[u8] = b"waiting";
/// Content of `unsynced` while the files are being synced.
const SYNCING: &[u8] = b"syncing";
/// Number of attempts to sync everything while other processes publish more.
const ROUNDS: usize = 16;
/// The action of a [`DiskError`] if a file cannot be synced.
const SYNC: &str = "sync";

/// A group of marked files, with their directory.
type MarkedGroup = (Directory, Vec<MarkedFile>);

/// As long as this exists, changes through the store's handle that made it are not synced, whichever thread makes them.
#[derive(Debug)]
pub struct UnsyncedPublication {
    _deferred: DeferralSwitch,
    _note: ControlFile,
    /// `gc` does not run, so it keeps everything that belongs to the image until the image is published.
    _lock: Option<Lock>,
}

impl Store {
    /// Begins to publish an image of a manifest under a name without syncs: [`settle`](Self::settle) makes them later.
    /// If the system crashes before, the next command on the store removes everything that was published.
    ///
    /// Returns `None` if a crash could remove more than that, because the store has something of the image already.
    /// Then the image must be published as usual, and also if the publication fails because the store got such a thing.
    ///
    /// # Errors
    /// [`DiskError`] if it cannot be recorded that there are files to be synced. Then the syncs are not deferred.
    pub fn publish_unsynced(
        &self,
        image: &ImageId,
        manifest: &Digest,
        name: &RefName,
    ) -> Result<Option<UnsyncedPublication>, DiskError> {
        // Others who read a shared store could not open files with the mark.
        if !self.is_recovered || self.sharing()? == Sharing::All {
            return Ok(None);
        }
        let lock = self.lock_shared()?;
        if self.has_any_of(image, manifest, name)? {
            return Ok(None);
        }
        let note = ControlFile::open(&self.root, UNSYNCED)?;
        // Some network file systems drop the mark.
        if !note.can_be_marked()? {
            return Ok(None);
        }
        note.lock_shared()?;
        if note.read()?.is_empty() {
            note.write(WAITING)?;
        }
        let deferred = self.root.deferral().switch(true);
        Ok(Some(UnsyncedPublication { _deferred: deferred, _note: note, _lock: lock }))
    }

    fn has_any_of(
        &self,
        image: &ImageId,
        manifest: &Digest,
        name: &RefName,
    ) -> Result<bool, DiskError> {
        let blobs = [
            BlobFile::Origins(*image),
            BlobFile::ImageSignatures(*image),
            BlobFile::Traces(*image),
            BlobFile::Unproven(*image),
            BlobFile::Hot(*manifest),
            BlobFile::Index(*manifest),
            BlobFile::Start(*manifest),
            BlobFile::Signatures(*manifest),
            BlobFile::Pin(*manifest),
        ];
        for file in blobs {
            if self.downloads.directory.stat(file.file_name())?.is_some() {
                return Ok(true);
            }
        }
        Ok(self.images.has(image)?
            || self.manifests.has(manifest)?
            || self.refs.directory.stat(name.file_name())?.is_some())
    }

    /// Whether [`settle`](Self::settle) has something to sync.
    ///
    /// # Errors
    /// [`DiskError`] if that cannot be looked up.
    pub fn has_unsynced(&self) -> Result<bool, DiskError> {
        Ok(self.root.stat(UNSYNCED)?.is_some_and(|it| it.st_size > 0))
    }

    /// Makes everything durable that was published without a sync before this call. Returns whether there was anything.
    ///
    /// # Errors
    /// [`DiskError`] if a file cannot be synced. Everything that is not synced is removed then, because the kernel
    /// reports lost bytes only once.
    pub fn settle(&self) -> Result<bool, DiskError> {
        if self.is_deferring() || !(self.has_unsynced()? || self.images.may_be_torn) {
            return Ok(false);
        }
        if !self.is_recovered {
            // `unsynced` may be older than a crash.
            if !self.has_marked()? {
                return Ok(false);
            }
            let torn = std::io::Error::other(TORN);
            return Err(self.root.failed("sync", "", torn));
        }
        let boot = ControlFile::open(&self.root, BOOT)?;
        self.lock_boot(&boot)?;
        self.settle_alone(&ControlFile::open(&self.root, UNSYNCED)?)?;
        Ok(true)
    }

    /// Waits for the lock of `boot`.
    fn lock_boot(&self, boot: &ControlFile) -> Result<(), DiskError> {
        while !boot.try_lock()? {
            if self.is_given_up() {
                return Err(self.root.failed("lock", BOOT, Errno::INTR));
            }
            std::thread::sleep(LOCK_POLL);
        }
        Ok(())
    }

    /// The caller has the lock of `boot`.
    fn settle_alone(&self, note: &ControlFile) -> Result<(), DiskError> {
        if note.read()? == SYNCING {
            // A process that was killed may have removed marks without syncing that.
            self.tmp.sync_everything()?;
        }
        note.write(SYNCING)?;
        for _ in 0..ROUNDS {
            // `lazy/` itself may be new.
            self.root.sync()?;
            for (shelf, names) in self.marked()? {
                if let Err(error) = shelf.sync_published(&names) {
                    if error.action == SYNC {
                        // The next sync of the file would succeed, although the kernel has dropped its bytes.
                        self.remove_marked()?;
                    }
                    return Err(error);
                }
                if shelf.path() == self.images.directory.path() {
                    names.iter().for_each(|it| self.protect(&shelf, &it.name));
                }
            }
            if !note.try_lock()? {
                // Another process is publishing an image, which is left to the next call.
                break;
            }
            if !self.has_marked()? {
                return note.write(b"");
            }
            note.lock_shared()?;
        }
        note.write(WAITING)
    }

    /// Returns the files that have the mark, in groups. A file needs only files of the groups before its own.
    fn marked(&self) -> Result<Vec<MarkedGroup>, DiskError> {
        // The groups are listed in the opposite order. So if this finds a file that is published during the listing, it
        // also finds all files that this one needs.
        let mut groups = Vec::new();
        for shelf in [
            &self.refs.directory,
            &self.images.directory,
            &self.manifests.directory,
            &self.downloads.directory,
        ] {
            groups.push((shelf.try_clone()?, shelf.unsynced()?));
        }
        if let Some(lazy) = self.lazy_devices.directory.get()? {
            for kind in LazyDeviceFile::NEEDED_LAST {
                let mut names = lazy.unsynced()?;
                names.retain(|it| LazyDeviceFile::is_of(&it.name, kind));
                groups.push((lazy.try_clone()?, names));
            }
        }
        groups.reverse();
        Ok(groups)
    }

    fn has_marked(&self) -> Result<bool, DiskError> {
        Ok(self.marked()?.iter().any(|(_, files)| !files.is_empty()))
    }

    /// Removes all files with the mark.
    pub(crate) fn remove_marked(&self) -> Result<u64, DiskError> {
        let mut removed = 0;
        // Names go first, so that no name leads to an image that is gone.
        for (shelf, names) in self.marked()?.into_iter().rev() {
            for MarkedFile { name, .. } in &names {
                removed += u64::from(shelf.unlink_sealed(name)?);
            }
            if !names.is_empty() {
                shelf.sync()?;
            }
        }
        Ok(removed)
    }

    /// Protects an image as a commit does. An image that cannot be protected is still usable.
    fn protect(&self, images: &Directory, name: &[u8]) {
        let Ok(Some((file, _))) = images.read(name) else { return };
        let algorithm = match self.algorithm() {
            Algorithm::Sha256 => kernel::verity::Algorithm::Sha256,
            Algorithm::Sha512 => kernel::verity::Algorithm::Sha512,
        };
        let is_unsupported = match kernel::verity::enable(file.as_fd(), algorithm) {
            Ok(_) => false,
            Err(error) if error.is_unsupported() => true,
            Err(error) => {
                tracing::warn!(%error, "cannot enable fs-verity for an image");
                false
            }
        };
        if is_unsupported
            && self.sealing == Sealing::VerityOrImmutable
            && let Err(error) = kernel::seal::set_immutable(file.as_fd())
        {
            tracing::debug!(%error, "cannot set the immutable flag of an image");
        }
    }

    /// Removes the files that a crash may have damaged, because they were not synced before. The first command of the
    /// owner after each boot does this, if it can write to the store.
    pub(crate) fn recover(&mut self) -> Result<(), DiskError> {
        let is_owner = self.root.stat_self()?.st_uid == self.who.user;
        if !is_owner && !self.who.is_host_root() {
            // Files with the mark are readable for the owner only.
            return Ok(());
        }
        // Without /proc, nothing shows whether the marks are from this boot.
        let boot = boot_id().filter(|_| is_owner);
        // A file that cannot be read is like that of another boot.
        let found = self.root.read_all(BOOT, ControlFile::MAX).unwrap_or_default();
        if boot.as_ref().is_some_and(|it| found.as_deref() == Some(it.as_bytes())) {
            self.is_recovered = true;
            return Ok(());
        }
        let may = Permission::WRITE_OK;
        let may_write = rustix::fs::accessat(&self.root, "tmp", may, AtFlags::EACCESS).is_ok();
        self.is_recovered = match boot {
            Some(boot) if may_write => self.recover_in(&boot).unwrap_or_else(|error| {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(
                    error,
                    "cannot remove files that a crash may have damaged: they are not used"
                );
                false
            }),
            _ => false,
        };
        // A directory that cannot be listed may have such files.
        self.images.may_be_torn = !self.is_recovered && self.has_marked().unwrap_or(true);
        Ok(())
    }

    /// Recovers the store, and writes `boot`. Returns `false` if another process could do that at the same time.
    fn recover_in(&self, boot: &str) -> Result<bool, DiskError> {
        let note = match ControlFile::open(&self.root, BOOT) {
            Ok(note) => note,
            Err(error) => {
                tracing::warn!(%error, "cannot note that the store is recovered: each command looks for lost files");
                return Ok(false);
            }
        };
        self.lock_boot(&note)?;
        if note.read()? == boot.as_bytes() {
            return Ok(true);
        }
        self.recover_alone()?;
        if let Err(error) = note.write(boot.as_bytes()) {
            // The next command would take files that are not synced for those of a crash, so there must be none.
            tracing::warn!(%error, "cannot note that the store is recovered");
            return Ok(false);
        }
        Ok(true)
    }

    fn recover_alone(&self) -> Result<(), DiskError> {
        if !self.has_marked()? {
            return Ok(());
        }
        let note = ControlFile::open(&self.root, UNSYNCED)?;
        // While a process of this kernel publishes or fills these files, they are of this boot: then the boot id is
        // that of a container that has its own.
        let is_publishing = !note.try_lock()?;
        let mut is_alive = is_publishing;
        if let Some(lazy) = self.lazy_devices.directory.get()? {
            for MarkedFile { name, .. } in lazy.unsynced()? {
                let name = std::str::from_utf8(&name).ok();
                is_alive |= name.is_some_and(|it| lazy.is_file_locked(it).unwrap_or(false));
            }
        }
        if is_alive {
            return self.settle_alone(&note);
        }
        let files = self.remove_marked()?;
        tracing::warn!(
            files,
            "removed files of lazy images that were not synced when the system stopped: `run --lazy` pulls the images \
            again"
        );
        note.write(b"")
    }

    /// Whether changes through this handle are not synced now.
    pub(crate) fn is_deferring(&self) -> bool {
        self.root.deferral().is_on()
    }
}
