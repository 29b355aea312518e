//! Finds directories and files of a store that users other than its owner can reach.

use std::fmt;
use std::path::PathBuf;

use rustix::fs::{Mode, Stat};

use crate::disk::{Directory, DiskError};
use crate::inventory::Inventory;
use crate::mount_view::open::OpenImage;
use crate::shelf::absent::ABSENT;
use crate::shelf::refs::Form;
use crate::store::{Sharing, Store};

/// A file or directory of a store that another user can read, change or replace.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exposure {
    Owner {
        path: PathBuf,
        /// User id of its owner.
        user: u32,
    },
    /// A directory or a file that group or others may write to.
    Writable {
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The store's own directory, which group or others may access.
    Open {
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

impl Exposure {
    /// Whether another user can change the contents of the store. If not, others can only read them.
    #[must_use]
    pub const fn is_changeable(&self) -> bool {
        matches!(self, Self::Owner { .. } | Self::Writable { .. })
    }
}

impl fmt::Display for Exposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owner { path, user } => {
                write!(f, "{} belongs to user {user}, who can change it", path.display())
            }
            Self::Writable { path, mode } => {
                let path = path.display();
                write!(
                    f,
                    "{path} has the mode {mode:04o}, so others can change it: `chmod go-w {path}`"
                )
            }
            Self::Open { path, mode } => {
                let path = path.display();
                write!(
                    f,
                    "{path} has the mode {mode:04o}, so others can read the files of every image, even those that \
                     only root may read in the image: `chmod 700 {path}`"
                )
            }
        }
    }
}

/// The users who may own a store besides root: this user and the owner of a shared store.
#[derive(Clone, Copy)]
struct Trusted([u32; 2]);

/// Returns the exposure of a file or directory whose owner is not trusted or whose mode lets group or others write.
/// Root is always trusted.
fn exposure(stat: &Stat, who: Trusted, path: impl FnOnce() -> PathBuf) -> Option<Exposure> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    if stat.st_uid != 0 && !who.0.contains(&stat.st_uid) {
        return Some(Exposure::Owner { path: path(), user: stat.st_uid });
    }
    mode.intersects(Mode::WGRP | Mode::WOTH)
        .then(|| Exposure::Writable { path: path(), mode: permissions(stat) })
}

fn permissions(stat: &Stat) -> u32 {
    Mode::from_raw_mode(stat.st_mode).as_raw_mode()
}

fn of_directory(directory: &Directory, who: Trusted) -> Result<Option<Exposure>, DiskError> {
    let stat = directory.stat_self()?;
    Ok(exposure(&stat, who, || directory.path().to_owned()))
}

impl Store {
    fn trusted(&self) -> Trusted {
        let user = self.who.user;
        Trusted([user, self.sharer.unwrap_or(user)])
    }

    /// Returns the store's directories that other users can reach, except the directories of objects. The list is
    /// empty if only the owner, this user and root can reach them.
    ///
    /// # Errors
    /// [`DiskError`] if a directory cannot be inspected.
    pub fn exposure(&self) -> Result<Vec<Exposure>, DiskError> {
        let (mut found, who) = (Vec::new(), self.trusted());
        let late = [
            self.devices.directory.get()?,
            self.lazy_devices.directory.get()?,
            self.container_snapshots.directory.get()?,
            self.snapshots.directory.get()?,
            self.volumes.directory.get()?,
            self.networks.directory.get()?,
        ];
        let parts = [
            &self.root,
            &self.downloads.directory,
            &self.objects.directory,
            &self.images.directory,
            &self.layers.directory,
            &self.manifests.directory,
            &self.refs.directory,
            &self.containers.directory,
            &self.tmp,
        ];
        for directory in parts.into_iter().chain(late.into_iter().flatten()) {
            found.extend(of_directory(directory, who)?);
        }
        let stat = self.root.stat_self()?;
        let others = Mode::RWXG | Mode::RWXO;
        if Mode::from_raw_mode(stat.st_mode).intersects(others) && self.sharing()? == Sharing::Owner
        {
            let path = self.root.path().to_owned();
            found.push(Exposure::Open { path, mode: permissions(&stat) });
        }
        Ok(found)
    }

    /// Returns a way for another user to change the contents of a mount of this image, if there is one: through the
    /// image file, its devices, or the directories of the store. Only [`fsck`](Self::fsck) checks single objects,
    /// because others cannot change objects in directories to which they cannot write.
    ///
    /// # Errors
    /// [`DiskError`] if a file or directory cannot be inspected.
    pub fn exposure_of(&self, image: &OpenImage) -> Result<Option<Exposure>, DiskError> {
        if let Some(found) = self.exposure()?.into_iter().find(Exposure::is_changeable) {
            return Ok(Some(found));
        }
        let who = self.trusted();
        let failed = |errno| self.images.directory.failed("stat", image.id.to_string(), errno);
        let stat = rustix::fs::fstat(image.image.fd()).map_err(failed)?;
        if let Some(found) =
            exposure(&stat, who, || self.images.directory.path_of(image.id.to_string()))
        {
            return Ok(Some(found));
        }
        if let Some(data) = self.devices.directory.get()? {
            for device in &image.devices {
                let name = device.id.to_string();
                let failed = |errno| data.failed("stat", &name, errno);
                let stat = rustix::fs::fstat(&device.file).map_err(failed)?;
                if let Some(found) = exposure(&stat, who, || data.path_of(&name)) {
                    return Ok(Some(found));
                }
            }
        }
        if image.form == Form::Objects {
            // Overlayfs also looks up objects in `absent/`.
            if let Some(absent) = &image.absent {
                let failed = |errno| self.root.failed("stat", ABSENT, errno);
                let stat = rustix::fs::fstat(absent).map_err(failed)?;
                if let Some(found) = exposure(&stat, who, || self.root.path_of(ABSENT)) {
                    return Ok(Some(found));
                }
            }
            for shard in 0..=u8::MAX {
                let name = format!("{shard:02x}");
                let stat = self.objects.directory.stat(&name)?;
                let found = stat
                    .and_then(|it| exposure(&it, who, || self.objects.directory.path_of(&name)));
                if found.is_some() {
                    return Ok(found);
                }
            }
        }
        Ok(None)
    }

    /// Returns everything in the store that other users can reach, down to single files.
    pub(crate) fn exposure_of_all(&self, all: &Inventory) -> Result<Vec<Exposure>, DiskError> {
        let (mut found, who) = (self.exposure()?, self.trusted());
        let mut look = |directory: &Directory, name: &str| -> Result<(), DiskError> {
            let stat = directory.stat(name)?;
            found.extend(stat.and_then(|it| exposure(&it, who, || directory.path_of(name))));
            Ok(())
        };
        look(&self.root, ABSENT)?;
        for image in &all.images {
            look(&self.images.directory, &image.to_string())?;
        }
        if let Some(data) = self.devices.directory.get()? {
            all.devices.iter().try_for_each(|it| look(data, &it.to_string()))?;
        }
        for shard in 0..=u8::MAX {
            look(&self.objects.directory, &format!("{shard:02x}"))?;
        }
        for object in &all.objects {
            let (_, rest) = crate::shelf::objects::split(object);
            if let Some(shard) = self.objects.shard(object)? {
                look(shard, &rest)?;
            }
        }
        Ok(found)
    }
}
