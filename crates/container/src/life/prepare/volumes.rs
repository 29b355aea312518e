//! Volumes of the store in a container: makes missing ones, copies the files of the image into new ones, and finds
//! their directories (decision 43).
//!
//! The image is hostile: its links never lead out of the root, and device files are not copied.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use kernel::mount::{MountError, Reach};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use store::{
    OperationError, Seconds, Store, VolumeDraft, VolumeError, VolumeFiles, VolumeLock, VolumeRecord,
};

use crate::backoff::GLANCE;
use crate::bundle::mounts::{MountSource, Volume};
use crate::bundle::spec::RuntimeSpec;
use crate::life::mount_staging::Stage;
use crate::snapshot::{CopyError, copy_tree};

/// Reason why a container cannot have a volume.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumesError {
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The files of the image cannot be copied.
    #[error("cannot copy the image's files at {destination} into volume {name}")]
    Copy { destination: String, name: String, source: CopyError },
    /// Other programs of the host need the owners of these files.
    #[error(
        "--volume {0}:…:U would change the owner of files that the host needs: use a directory below it, or leave U out"
    )]
    Danger(PathBuf),
    /// The directory of a volume cannot be shown to the runtime.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// A path is not UTF-8, which a runtime's configuration needs.
    #[error("the path {0:?} of a volume is not UTF-8, which runtimes need")]
    Name(PathBuf),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// Names of the container's volumes, which are not removed as long as this value exists.
#[derive(Debug, Default)]
pub(crate) struct HeldVolumes {
    pub(crate) names: Vec<String>,
    /// Volumes that the runtime finds at other paths.
    staged: Vec<StagedVolume>,
    pub(crate) lock: Option<VolumeLock>,
}

/// A volume that the runtime could not reach by its path, because it prepares the container as an unprivileged user.
#[derive(Debug)]
struct StagedVolume {
    path: String,
    /// Path for the runtime.
    place: String,
}

impl HeldVolumes {
    /// Replaces the paths of volumes in a configuration by those for the runtime. Destinations in the container are
    /// resolved before, in the directories themselves, which may have links.
    pub(crate) fn stage(&self, spec: &mut RuntimeSpec) {
        for mount in &mut spec.mounts {
            let is_of = |it: &&StagedVolume| mount.source.as_deref() == Some(&it.path);
            if let Some(staged) = self.staged.iter().find(is_of) {
                mount.source = Some(staged.place.clone());
            }
        }
    }
}

/// The container whose volumes are prepared.
pub(crate) struct VolumeUser<'a> {
    pub(crate) store: &'a Store,
    /// Root of the container, as the host sees it.
    pub(crate) root: BorrowedFd<'a>,
    /// User and group of the program, as ids of this process.
    pub(crate) owner: (u32, u32),
    /// Whether the container is made now: then missing volumes are made as well.
    pub(crate) is_new: bool,
    /// Whether the container's users have a map of ids, so that the runtime prepares it as another user of the host.
    pub(crate) is_mapped: bool,
    /// Whether the container's folder is kept after its end.
    pub(crate) keep: bool,
    pub(crate) now: Seconds,
    pub(crate) is_asked_to_end: &'a dyn Fn() -> bool,
}

/// Directories whose files belong to the host. Source: podman, `containers/common/pkg/chown`.
const OF_HOST: [&str; 23] = [
    "/", "/bin", "/boot", "/dev", "/etc", "/etc/pki", "/home", "/lib", "/lib64", "/media", "/opt",
    "/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/var/lib",
    "/var/log", "/mnt",
];

/// Permissions of the directory of a volume at a path that the image lacks.
const MODE: u32 = 0o755;

impl VolumeUser<'_> {
    /// Replaces the volumes of the store by directories at paths where the runtime finds them. Files of volumes with
    /// the option `U` get the program's owner.
    pub(crate) fn prepare(
        &self,
        volumes: &mut [Volume],
        stage: &mut Stage,
    ) -> Result<HeldVolumes, VolumesError> {
        let mut drafts = Vec::new();
        let mut names = Vec::new();
        for volume in volumes.iter() {
            let (name, is_anonymous) = match &volume.source {
                MountSource::Named(name) => (name, false),
                MountSource::Anonymous(Some(name)) => (name, true),
                _ => continue,
            };
            names.push(name.clone());
            let record = match self.store.volumes.get(name)? {
                Some(record) if !record.fresh => continue,
                None if !self.is_new => return Err(VolumeError::Absent(name.clone()).into()),
                record => record,
            };
            let (draft, files) = self.draft(&volume.destination, name)?;
            match record {
                Some(_) => self.store.fill_volume(&draft, name, files)?,
                None => drafts.push((name.clone(), draft, files, is_anonymous)),
            }
        }
        names.sort_unstable();
        names.dedup();
        let lock = match names.is_empty() {
            true => None,
            false => Some(self.store.hold_volumes()?),
        };
        for (name, draft, files, anonymous) in drafts {
            // A command that removes the container without its volumes changes this. If the container is never made,
            // the volume is removed.
            let ends_with_container = anonymous;
            let record =
                VolumeRecord { anonymous, ends_with_container, ..VolumeRecord::new(self.now) };
            // A container that is not kept does not survive a crash.
            let files = if anonymous && !self.keep { VolumeFiles::Unsynced } else { files };
            let Some(lock) = &lock else { break };
            match self.store.publish_volume(lock, draft, &name, &record, files) {
                // Another container has made it.
                Err(VolumeError::Exists(_)) => {}
                published => published?,
            }
        }
        let mut staged = Vec::new();
        for volume in volumes {
            let name = match &volume.source {
                MountSource::Named(name) | MountSource::Anonymous(Some(name)) => name,
                MountSource::Host(path) if volume.chown => {
                    self.own_path(Path::new(path))?;
                    continue;
                }
                _ => continue,
            };
            let Some(lock) = &lock else { break };
            let (directory, path) = lock.data(name)?;
            if volume.chown {
                self.own(&directory, &path)?;
            }
            let path = text(path)?;
            if self.is_mapped {
                let mount = kernel::mount::bind(directory.as_fd(), Reach::One)?;
                let place = text(stage.add_volume(mount))?;
                staged.push(StagedVolume { path: path.clone(), place });
            }
            volume.source = MountSource::Directory(path);
        }
        Ok(HeldVolumes { names, staged, lock })
    }

    /// Makes the files of a new volume: those of the image at its destination.
    fn draft(
        &self,
        destination: &str,
        name: &str,
    ) -> Result<(VolumeDraft, VolumeFiles), VolumesError> {
        let draft = self.store.volumes.draft()?;
        let data = draft.data()?;
        let failed = OperationError::of("make volume", name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let opened = kernel::files::open_resolved(self.root, destination, flags, resolve);
        let source = match opened {
            Ok(source) => source,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => {
                let (user, group) = (Uid::from_raw(self.owner.0), Gid::from_raw(self.owner.1));
                rustix::fs::fchown(&data, Some(user), Some(group))
                    .and_then(|()| rustix::fs::fchmod(&data, Mode::from_raw_mode(MODE)))
                    .map_err(failed)?;
                return Ok((draft, VolumeFiles::Unsynced));
            }
            Err(errno) => return Err(failed(errno).into()),
        };
        let copy_failed = |source| VolumesError::Copy {
            destination: destination.to_owned(),
            name: name.to_owned(),
            source,
        };
        let copied = copy(&source, &data, self.is_asked_to_end).map_err(copy_failed)?;
        let files = if copied { VolumeFiles::Synced } else { VolumeFiles::Unsynced };
        Ok((draft, files))
    }

    /// Gives the files of a directory or a file of the host the program's owner.
    fn own_path(&self, path: &Path) -> Result<(), VolumesError> {
        let failed = OperationError::at("change the owner of", path);
        let real = std::fs::canonicalize(path).map_err(failed)?;
        if OF_HOST.iter().any(|it| real == Path::new(it)) {
            return Err(VolumesError::Danger(path.to_owned()));
        }
        let failed = OperationError::at("change the owner of", path);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(&real, flags, Mode::empty()).map_err(failed)?;
        self.own(&file, path)
    }

    fn own(&self, file: &OwnedFd, path: &Path) -> Result<(), VolumesError> {
        let (user, group) = (Uid::from_raw(self.owner.0), Gid::from_raw(self.owner.1));
        let failed = OperationError::at("change the owner of", path);
        let stat = rustix::fs::fstat(file).map_err(std::io::Error::from).map_err(failed)?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Directory {
            let changed = rustix::fs::fchown(file, Some(user), Some(group));
            return Ok(changed.map_err(std::io::Error::from).map_err(failed)?);
        }
        let owned = kernel::depth::walk(file, &mut |directory, name, stat| {
            if (stat.st_uid, stat.st_gid) == self.owner {
                return Ok(());
            }
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            match rustix::fs::chownat(directory, name, Some(user), Some(group), flags) {
                // It was removed during the walk.
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(errno) => Err(errno.into()),
            }
        });
        owned.map(drop).map_err(failed).map_err(VolumesError::from)
    }
}

fn text(path: PathBuf) -> Result<String, VolumesError> {
    path.into_os_string().into_string().map_err(|path| VolumesError::Name(path.into()))
}

/// Copies a directory of an image into an empty one. Returns whether there were files. A signal that ends programs also
/// ends the copy.
fn copy(
    from: &OwnedFd,
    to: &OwnedFd,
    is_asked_to_end: &dyn Fn() -> bool,
) -> Result<bool, CopyError> {
    let cancel = AtomicBool::new(false);
    if is_empty(from) {
        return copy_tree(from.as_fd(), to.as_fd(), &cancel).map(|it| it.entries > 0);
    }
    let copied = std::thread::scope(|scope| {
        let copying = scope.spawn(|| copy_tree(from.as_fd(), to.as_fd(), &cancel));
        while !copying.is_finished() {
            if is_asked_to_end() {
                cancel.store(true, Ordering::Relaxed);
            }
            std::thread::sleep(GLANCE);
        }
        copying.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    copied.map(|it| it.entries > 0)
}

/// Whether a directory has no entries.
fn is_empty(directory: &OwnedFd) -> bool {
    let Ok(entries) = rustix::fs::Dir::read_from(directory) else { return false };
    let mut names = entries.flatten();
    names.all(|it| matches!(it.file_name().to_bytes(), b"." | b".."))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use store::OpenOptions;

    use super::*;

    fn store(folder: &Path) -> Store {
        let who = kernel::process::Who::this_process();
        Store::open(&folder.join("store"), who, OpenOptions::create()).unwrap()
    }

    fn prepare(
        store: &Store,
        root: &Path,
        text: &str,
        is_new: bool,
    ) -> Result<(Vec<Volume>, HeldVolumes), VolumesError> {
        let root = fs::File::open(root).unwrap();
        let who = store.who();
        let user = VolumeUser {
            store,
            root: root.as_fd(),
            owner: (who.user, who.group),
            is_new,
            is_mapped: false,
            keep: true,
            now: Seconds(7),
            is_asked_to_end: &|| false,
        };
        let mut volumes = vec![text.parse::<Volume>().unwrap()];
        if let MountSource::Anonymous(name) = &mut volumes[0].source {
            *name = Some("a1".to_owned());
        }
        let mut stage = Stage::new(Path::new("/nowhere"), who.user, None);
        let held = user.prepare(&mut volumes, &mut stage)?;
        Ok((volumes, held))
    }

    fn path(volume: &Volume) -> PathBuf {
        match &volume.source {
            MountSource::Directory(path) => path.into(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_new_volume_has_the_files_of_the_image() {
        let folder = tempfile::tempdir().unwrap();
        let (root, store) = (folder.path().join("root"), store(folder.path()));
        fs::create_dir_all(root.join("var/data/sub")).unwrap();
        fs::write(root.join("var/data/sub/file"), "image").unwrap();
        fs::set_permissions(root.join("var/data"), fs::Permissions::from_mode(0o2750)).unwrap();
        symlink("/etc/passwd", root.join("var/data/link")).unwrap();
        let (volumes, held) = prepare(&store, &root, "one:/var/data", true).unwrap();
        assert_eq!(held.names, ["one"]);
        let data = path(&volumes[0]);
        assert_eq!(data, folder.path().join("store/volumes/one/data"));
        assert_eq!(fs::read_to_string(data.join("sub/file")).unwrap(), "image");
        assert_eq!(fs::read_link(data.join("link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(fs::metadata(&data).unwrap().mode() & 0o7777, 0o2750);
        drop(held);
        // The second container gets the files as they are.
        fs::write(data.join("sub/file"), "changed").unwrap();
        let (volumes, _held) = prepare(&store, &root, "one:/var/data", true).unwrap();
        assert_eq!(path(&volumes[0]), data);
        assert_eq!(fs::read_to_string(data.join("sub/file")).unwrap(), "changed");
        let record = store.volumes.get("one").unwrap().unwrap();
        assert_eq!(record, VolumeRecord::new(Seconds(7)));
    }

    /// Links of a hostile image must not lead to files of the host.
    #[test]
    fn links_of_the_image_stay_in_its_root() {
        let folder = tempfile::tempdir().unwrap();
        let (root, store) = (folder.path().join("root"), store(folder.path()));
        let outside = folder.path().join("outside");
        fs::create_dir_all(&outside).unwrap();
        fs::write(outside.join("secret"), "host").unwrap();
        fs::create_dir_all(root.join("inside")).unwrap();
        fs::write(root.join("inside/file"), "image").unwrap();
        symlink(&outside, root.join("absolute")).unwrap();
        symlink("../outside", root.join("relative")).unwrap();
        symlink("/inside", root.join("within")).unwrap();
        for (name, text) in [("a", "a:/absolute"), ("b", "b:/relative"), ("c", "c:/absent")] {
            let (volumes, _held) = prepare(&store, &root, text, true).unwrap();
            let data = path(&volumes[0]);
            assert_eq!(fs::read_dir(&data).unwrap().count(), 0, "{name}");
            assert_eq!(fs::metadata(&data).unwrap().mode() & 0o7777, MODE, "{name}");
        }
        let (volumes, _held) = prepare(&store, &root, "d:/within", true).unwrap();
        assert_eq!(fs::read_to_string(path(&volumes[0]).join("file")).unwrap(), "image");
    }

    #[test]
    fn a_volume_that_was_created_is_filled_once() {
        let folder = tempfile::tempdir().unwrap();
        let (root, store) = (folder.path().join("root"), store(folder.path()));
        fs::create_dir_all(root.join("data")).unwrap();
        fs::write(root.join("data/file"), "image").unwrap();
        let lock = store.hold_volumes().unwrap();
        let fresh = VolumeRecord { fresh: true, ..VolumeRecord::new(Seconds(1)) };
        for name in ["empty", "full"] {
            let draft = store.volumes.draft().unwrap();
            let files = VolumeFiles::Synced;
            store.publish_volume(&lock, draft, name, &fresh, files).unwrap();
        }
        drop(lock);
        // The user has put a file into it.
        fs::write(store.volumes.path("full").join("own"), "").unwrap();
        for (name, expect) in [("empty", "file"), ("full", "own")] {
            for _ in 0..2 {
                prepare(&store, &root, &format!("{name}:/data"), true).unwrap();
                let mut names = fs::read_dir(store.volumes.path(name)).unwrap();
                assert_eq!(names.next().unwrap().unwrap().file_name(), expect);
                assert!(names.next().is_none(), "{name}");
                assert!(!store.volumes.get(name).unwrap().unwrap().fresh, "{name}");
            }
        }
    }

    #[test]
    fn a_container_at_rest_does_not_lose_its_volume_silently() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        let error = prepare(&store, folder.path(), "/own", false).unwrap_err();
        assert!(matches!(error, VolumesError::Volume(VolumeError::Absent(_))), "{error}");
        prepare(&store, folder.path(), "/own", true).unwrap();
        assert!(store.volumes.get("a1").unwrap().unwrap().anonymous);
        prepare(&store, folder.path(), "/own", false).unwrap();
    }

    #[test]
    fn owners_of_the_host_are_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        symlink("/etc", folder.path().join("link")).unwrap();
        let link = folder.path().join("link");
        for path in [Path::new("/"), Path::new("/usr"), Path::new("/usr/../home"), &link] {
            let text = format!("{}:/x:U", path.display());
            let error = prepare(&store, folder.path(), &text, true).unwrap_err();
            assert!(matches!(error, VolumesError::Danger(_)), "{text}: {error}");
        }
        fs::create_dir(folder.path().join("mine")).unwrap();
        let text = format!("{}:/x:U", folder.path().join("mine").display());
        prepare(&store, folder.path(), &text, true).unwrap();
    }
}
