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

/// A volume that does not exist yet.
struct NewVolume<'a> {
    name: &'a str,
    draft: VolumeDraft,
    files: VolumeFiles,
    is_anonymous: bool,
    /// Whether its files get the program's owner.
    chown: bool,
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
    ///
    /// Everything that takes long happens before the lock of volumes is taken, because each end of a container with
    /// volumes waits for that lock.
    pub(crate) fn prepare(
        &self,
        volumes: &mut [Volume],
        stage: &mut Stage,
    ) -> Result<HeldVolumes, VolumesError> {
        let mut drafts = Vec::new();
        let mut names = Vec::new();
        for (at, volume) in volumes.iter().enumerate() {
            let (name, is_anonymous) = match &volume.source {
                MountSource::Named(name) => (name, false),
                MountSource::Anonymous(Some(name)) => (name, true),
                MountSource::Host(path) if volume.chown => {
                    self.own_path(Path::new(path))?;
                    continue;
                }
                _ => continue,
            };
            names.push(name.clone());
            let record = match self.store.volumes.get(name)? {
                Some(record) if !record.fresh => {
                    self.own_volume(volume, name)?;
                    continue;
                }
                None if !self.is_new => return Err(VolumeError::Absent(name.clone()).into()),
                record => record,
            };
            let (draft, files) = self.draft(volumes, at, name)?;
            if record.is_some() {
                self.store.fill_volume(&draft, name, files)?;
                self.own_volume(volume, name)?;
                continue;
            }
            if volume.chown {
                self.own(&draft.data()?, Path::new(name))?;
            }
            drafts.push(NewVolume { name, draft, files, is_anonymous, chown: volume.chown });
        }
        names.sort_unstable();
        names.dedup();
        let lock = match names.is_empty() {
            true => None,
            false => Some(self.store.hold_volumes()?),
        };
        for NewVolume { name, draft, files, is_anonymous: anonymous, chown } in drafts {
            // A command that removes the container without its volumes changes this. If the container is never made,
            // the volume is removed.
            let ends_with_container = anonymous;
            let record =
                VolumeRecord { anonymous, ends_with_container, ..VolumeRecord::new(self.now) };
            // A container that is not kept does not survive a crash.
            let files = if anonymous && !self.keep { VolumeFiles::Unsynced } else { files };
            let Some(lock) = &lock else { break };
            match self.store.publish_volume(lock, draft, name, &record, files) {
                // Another container has made it in the meantime, or it is mounted twice.
                Err(VolumeError::Exists(_)) if chown => {
                    let (directory, path) = lock.data(name)?;
                    self.own(&directory, &path)?;
                }
                Err(VolumeError::Exists(_)) => {}
                published => published?,
            }
        }
        let mut staged = Vec::new();
        for volume in volumes {
            let (MountSource::Named(name) | MountSource::Anonymous(Some(name))) = &volume.source
            else {
                continue;
            };
            let Some(lock) = &lock else { break };
            let (directory, path) = lock.data(name)?;
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

    /// Gives the files of an existing volume with the option `U` the program's owner.
    fn own_volume(&self, volume: &Volume, name: &str) -> Result<(), VolumesError> {
        if !volume.chown {
            return Ok(());
        }
        let path = self.store.volumes.path(name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(directory) => self.own(&directory, &path),
            // It was removed just now, which is found under the lock.
            Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(OperationError::at("open", &path)(errno).into()),
        }
    }

    /// Opens the directories of the image over which other volumes are mounted. Their files are not copied into a
    /// volume above them: the container does not see these copies, and each further volume of a hostile image below
    /// others would add one more.
    fn covered(&self, volumes: &[Volume], at: usize) -> Vec<OwnedFd> {
        let others = volumes.iter().enumerate().filter(|(other, _)| *other != at);
        let open = |it: &Volume| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            kernel::files::open_resolved(self.root, &it.destination, flags, resolve).ok()
        };
        others.filter_map(|(_, it)| open(it)).collect()
    }

    /// Makes the files of a new volume: those of the image at its destination.
    fn draft(
        &self,
        volumes: &[Volume],
        at: usize,
        name: &str,
    ) -> Result<(VolumeDraft, VolumeFiles), VolumesError> {
        let destination = volumes.get(at).map_or("", |it| &it.destination);
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
        let covered = self.covered(volumes, at);
        let copied = copy(&source, &data, &covered, self.is_asked_to_end).map_err(copy_failed)?;
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
        let file = open_real(&real).map_err(failed)?;
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
            if (self.is_asked_to_end)() {
                return Err(std::io::Error::other("interrupted"));
            }
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

/// Opens a path that has no symlinks. If another user has exchanged a directory of it for a link since it was resolved,
/// it could lead to files of the host, and is refused.
fn open_real(real: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    kernel::files::open_resolved(rustix::fs::CWD, real, flags, ResolveFlags::NO_SYMLINKS)
}

fn text(path: PathBuf) -> Result<String, VolumesError> {
    path.into_os_string().into_string().map_err(|path| VolumesError::Name(path.into()))
}

/// Copies a directory of an image into an empty one. Returns whether there were files. A signal that ends programs also
/// ends the copy.
fn copy(
    from: &OwnedFd,
    to: &OwnedFd,
    covered: &[OwnedFd],
    is_asked_to_end: &dyn Fn() -> bool,
) -> Result<bool, CopyError> {
    let cancel = AtomicBool::new(false);
    if is_empty(from) {
        return copy_tree(from.as_fd(), to.as_fd(), covered, &cancel).map(|it| it.entries > 0);
    }
    let copied = std::thread::scope(|scope| {
        let copying = scope.spawn(|| copy_tree(from.as_fd(), to.as_fd(), covered, &cancel));
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

    #[test]
    fn a_directory_that_became_a_link_keeps_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        fs::create_dir_all(folder.join("a/b")).unwrap();
        assert!(open_real(&folder.join("a/b")).is_ok());
        fs::create_dir_all(folder.join("c/b")).unwrap();
        fs::remove_dir_all(folder.join("a")).unwrap();
        symlink("c", folder.join("a")).unwrap();
        assert_eq!(open_real(&folder.join("a/b")).unwrap_err(), Errno::LOOP);
    }

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
        prepare_all(store, root, &[text], is_new)
    }

    fn prepare_all(
        store: &Store,
        root: &Path,
        texts: &[&str],
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
        let volumes = texts.iter().map(|it| it.parse::<Volume>().unwrap());
        let mut volumes: Vec<_> = volumes.collect();
        for (at, volume) in volumes.iter_mut().enumerate() {
            if let MountSource::Anonymous(name) = &mut volume.source {
                *name = Some(format!("a{}", at + 1));
            }
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

    /// The files below each of the volumes are copied once.
    #[test]
    fn volumes_in_volumes_do_not_multiply_copies() {
        let folder = tempfile::tempdir().unwrap();
        let (root, store) = (folder.path().join("root"), store(folder.path()));
        fs::create_dir_all(root.join("a/b/c")).unwrap();
        symlink("/a/b", root.join("link")).unwrap();
        for path in ["a/file", "a/b/file", "a/b/c/file"] {
            fs::write(root.join(path), path).unwrap();
        }
        fs::set_permissions(root.join("a/b"), fs::Permissions::from_mode(0o2751)).unwrap();
        let texts = ["one:/a", "two:/link", "/a/b/c", "four:/a/absent"];
        let (volumes, _held) = prepare_all(&store, &root, &texts, true).unwrap();
        let data: Vec<_> = volumes.iter().map(path).collect();
        assert_eq!(fs::read_to_string(data[0].join("file")).unwrap(), "a/file");
        assert_eq!(fs::read_to_string(data[1].join("file")).unwrap(), "a/b/file");
        assert_eq!(fs::read_to_string(data[2].join("file")).unwrap(), "a/b/c/file");
        // The mount points exist, and are empty.
        let mount_point = fs::metadata(data[0].join("b")).unwrap();
        assert_eq!(mount_point.mode() & 0o7777, 0o2751);
        for empty in [data[0].join("b"), data[1].join("c"), data[3].clone()] {
            assert_eq!(fs::read_dir(&empty).unwrap().count(), 0, "{}", empty.display());
        }
        // A volume of the same directory twice has all files twice.
        let (volumes, _held) = prepare_all(&store, &root, &["x:/a/b", "y:/link"], true).unwrap();
        for volume in &volumes {
            assert!(path(volume).join("c/file").exists());
        }
    }

    /// An image cannot write xattrs that mean something to the host.
    #[test]
    fn volumes_get_only_some_xattrs() {
        let folder = tempfile::tempdir().unwrap();
        let (root, store) = (folder.path().join("root"), store(folder.path()));
        fs::create_dir_all(root.join("a")).unwrap();
        let file = root.join("a/file");
        fs::write(&file, "").unwrap();
        let set = |name: &str, value: &[u8]| {
            rustix::fs::setxattr(&file, name, value, rustix::fs::XattrFlags::empty())
        };
        // Version 2 with CAP_CHOWN. Source: Linux `include/uapi/linux/capability.h`.
        let capability = [1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let names = [
            ("user.kept", &b"1"[..], true),
            ("security.capability", &capability, true),
            ("user.overlay.opaque", b"y", false),
            ("trusted.overlay.opaque", b"y", false),
            ("trusted.own", b"1", false),
            ("security.own", b"1", false),
        ];
        let set: Vec<_> = names.iter().filter(|it| set(it.0, it.1).is_ok()).collect();
        if set.len() < names.len() {
            testing::skipped("some xattrs cannot be set");
        }
        let (volumes, _held) = prepare(&store, &root, "one:/a", true).unwrap();
        for (name, value, is_kept) in set {
            let mut found = [0; 64];
            let path = path(&volumes[0]).join("file");
            let found =
                rustix::fs::getxattr(&path, *name, &mut found).map(|it| found[..it].to_vec());
            let expect = if *is_kept { Ok(value.to_vec()) } else { Err(Errno::NODATA) };
            assert_eq!(found, expect, "{name}");
        }
    }

    #[test]
    fn owners_change_without_the_lock_of_volumes() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        fs::create_dir_all(folder.path().join("mine")).unwrap();
        prepare(&store, folder.path(), "one:/x", true).unwrap();
        let root = fs::File::open(folder.path()).unwrap();
        let who = store.who();
        let has_been_asked = AtomicBool::new(false);
        let user = VolumeUser {
            store: &store,
            root: root.as_fd(),
            owner: (who.user, who.group),
            is_new: true,
            is_mapped: false,
            keep: true,
            now: Seconds(7),
            // Called during the change of the owners.
            is_asked_to_end: &|| {
                has_been_asked.store(true, Ordering::Relaxed);
                let shelf = fs::File::open(folder.path().join("store/volumes")).unwrap();
                let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
                rustix::fs::flock(&shelf, exclusive).unwrap();
                false
            },
        };
        let mine = format!("{}:/z:U", folder.path().join("mine").display());
        let texts = ["one:/x:U", "two:/y:U", &mine];
        let mut volumes: Vec<Volume> = texts.iter().map(|it| it.parse().unwrap()).collect();
        let mut stage = Stage::new(Path::new("/nowhere"), who.user, None);
        user.prepare(&mut volumes, &mut stage).unwrap();
        assert!(has_been_asked.load(Ordering::Relaxed));
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
