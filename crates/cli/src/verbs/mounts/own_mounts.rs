//! Finds mounts of images in the kernel's table and in the notes of this boot, and attaches new ones.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use container::boot_cache::Notes;
use container::mounted::MountNote;
use container::root::SOURCE;
use kernel::mount::{Detached, Expired, Mounted, Unmount};
use kernel::process::Who;
use rustix::fs::FlockOperation;

use crate::session::context::Context;
#[cfg(feature = "serve")]
use rustix::fs::{Mode, OFlags};

/// Mounts of images that this user can see.
#[derive(Debug)]
pub(crate) struct OwnMounts {
    who: Who,
    notes: Option<Notes>,
}

#[derive(Debug)]
pub(crate) struct OwnMount {
    pub(crate) mount: Mounted,
    /// Image and options of the mount, if they were noted.
    note: Option<MountNote>,
}

impl OwnMounts {
    pub(crate) fn for_user(who: Who) -> Self {
        let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR");
        Self { who, notes: Notes::of_user(who, runtime_dir.as_deref()) }
    }

    /// Returns all mounts of images, in the order of the kernel's table.
    pub(crate) fn all(&self) -> anyhow::Result<Vec<OwnMount>> {
        Ok(all_mounted()?.into_iter().filter_map(|it| self.own(it).ok()).collect())
    }

    /// Returns the uppermost mount on a path without symlinks: `Ok` if it is ours, `Err` if it is another
    /// program's.
    pub(crate) fn at(&self, path: &Path) -> anyhow::Result<Option<Result<OwnMount, Mounted>>> {
        let found = all_mounted()?.into_iter().rfind(|it| it.point == path);
        Ok(found.map(|it| self.own(it)))
    }

    /// Unmounts a mount and removes its note.
    pub(crate) fn unmount(&self, own: &OwnMount, how: Unmount) -> anyhow::Result<()> {
        let path = &own.mount.point;
        match self.who.user {
            #[cfg(feature = "serve")]
            1.. if own.is_on_fuse() => {
                let program = crate::session::system_programs::fusermount()?;
                serve::fuse::fusermount::unmount(&program, path, matches!(how, Unmount::Lazy))?;
            }
            _ => kernel::mount::unmount(path, how)?,
        }
        self.forget(own)
    }

    /// Removes the note of an unmounted file system.
    fn forget(&self, own: &OwnMount) -> anyhow::Result<()> {
        // A bind mount elsewhere may still show the file system.
        let is_gone = all_mounted()?.iter().all(|it| it.device != own.mount.device);
        if let Some(notes) = self.notes.as_ref().filter(|_| is_gone && own.note.is_some())
            && let Err(error) = MountNote::remove(notes, &own.mount)
        {
            tracing::debug!(%error, "cannot remove the record of a mount");
        }
        Ok(())
    }

    fn own(&self, mount: Mounted) -> Result<OwnMount, Mounted> {
        let note = self.notes.as_ref().and_then(|notes| MountNote::read_for(notes, &mount));
        if note.is_some() || is_ours(&mount) { Ok(OwnMount { mount, note }) } else { Err(mount) }
    }

    /// Returns the source of a new mount of the image of this name. If a mount has neither a note nor Quire's file
    /// system type, only the source distinguishes it from mounts of other programs.
    pub(crate) fn source(&self, name: &str) -> String {
        let is_noted = self.notes.as_ref().is_some_and(MountNote::is_possible);
        if is_noted || !self.who.can_mount_in_its_namespace() {
            return name.to_owned();
        }
        format!("{SOURCE}{name}")
    }
}

impl OwnMount {
    /// Returns the id of the image, or a name under which it was mounted.
    pub(crate) fn image_text(&self) -> Option<&str> {
        match &self.note {
            Some(note) => Some(&note.image),
            None => self.mount.source.strip_prefix(SOURCE),
        }
    }

    /// Compares the mount with a new mount, which would have this note.
    ///
    /// A user may mount a FUSE file system with any source, and the kernel may reuse the device number of a mount that
    /// has a note. So root trusts only notes, and for FUSE mounts not even these. For users without notes, the source
    /// is compared.
    fn compare(&self, new: &MountNote, who: Who) -> Compared {
        let note = self.note.as_ref().filter(|_| !who.is_host_root() || !self.is_on_fuse());
        match note {
            Some(note) if note.image != new.image => Compared::OtherImage,
            Some(note) if note.options != new.options => Compared::OtherOptions,
            Some(_) => Compared::Same,
            None if who.is_host_root() => Compared::Unknown,
            None if self.mount.source == new.source => Compared::Same,
            None => Compared::OtherImage,
        }
    }

    fn is_on_fuse(&self) -> bool {
        self.mount.kind.starts_with("fuse")
    }
}

/// Result of comparing an existing mount with a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compared {
    Same,
    OtherOptions,
    OtherImage,
    Unknown,
}

/// The directory for a new mount.
#[derive(Debug)]
pub(crate) struct MountTarget<'a> {
    directory: &'a Path,
    /// Canonical path of the directory.
    path: PathBuf,
    own: OwnMounts,
    note: MountNote,
    /// Whether the new mount replaces another one.
    replaces: bool,
    /// The mount that the new one replaces.
    old: Option<OwnMount>,
}

/// A lock. While it is held, no other `quire mount` of this user attaches a mount.
pub(crate) struct Turn {
    lock: Option<OwnedFd>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A server that was started since then may have inherited the descriptor, so closing it would perhaps not
        // release the lock.
        if let Some(lock) = &self.lock {
            let _unlocked = rustix::fs::flock(lock, FlockOperation::Unlock);
        }
    }
}

impl<'a> MountTarget<'a> {
    /// Checks whether an image is mounted on the directory; returns `None` if it is the same image. As with
    /// mount(8), mounts of other programs are covered.
    ///
    /// # Errors
    /// If another image is mounted, or the image has other options, and `replaces` is false.
    pub(crate) fn for_directory(
        directory: &'a Path,
        own: OwnMounts,
        note: MountNote,
        replaces: bool,
    ) -> anyhow::Result<Option<Self>> {
        let path = std::fs::canonicalize(directory);
        let path = path.with_context(|| format!("cannot find \"{}\"", directory.display()))?;
        let mut found = Self { directory, path, own, note, replaces, old: None };
        Ok(found.look()?.then_some(found))
    }

    /// Finds the mount to replace; returns false if the same image is mounted already.
    fn look(&mut self) -> anyhow::Result<bool> {
        let shown = self.directory.display();
        let old = self.own.at(&self.path)?.and_then(Result::ok);
        match old.as_ref().map(|old| (old.compare(&self.note, self.own.who), &old.mount.source)) {
            Some((Compared::Same, _)) => return Ok(false),
            None => {}
            Some(_) if self.replaces => {}
            Some((Compared::OtherOptions, _)) => bail!(
                "the image is mounted on \"{shown}\" with other options: --replace replaces the \
                mount, and `quire umount {shown}` unmounts it"
            ),
            Some((Compared::OtherImage, source)) => bail!(
                "another image, {source}, is mounted on \"{shown}\": --replace replaces the \
                mount, and `quire umount {shown}` unmounts it"
            ),
            Some((Compared::Unknown, source)) => bail!(
                "{source} is mounted on \"{shown}\", but its image is unknown: --replace replaces \
                the mount, and `quire umount {shown}` unmounts it"
            ),
        }
        self.old = old;
        Ok(true)
    }

    /// Waits for other processes that mount, and checks again; returns `None` if one of them has mounted the same
    /// image.
    pub(crate) fn turn(&mut self, context: &Context) -> anyhow::Result<Option<Turn>> {
        let lock = self.own.notes.as_ref().and_then(|notes| {
            let lock = notes.lock();
            lock.inspect_err(
                |error| tracing::debug!(%error, "cannot wait for other commands that mount"),
            )
            .ok()
        });
        if self.look()? {
            return Ok(Some(Turn { lock }));
        }
        context.remark(&format!(
            "{} is already mounted on \"{}\"",
            self.source(),
            self.directory.display()
        ));
        Ok(None)
    }

    #[cfg(feature = "serve")]
    pub(crate) fn directory(&self) -> &Path {
        self.directory
    }

    pub(crate) fn source(&self) -> &str {
        &self.note.source
    }

    /// Unmounts the mount that the new one replaces.
    pub(crate) fn clear(&mut self) -> anyhow::Result<()> {
        self.old.take().map_or(Ok(()), |old| self.own.unmount(&old, Unmount::Now))
    }

    /// Attaches a mount and writes its note. If the kernel supports it, programs see either the old or the new
    /// mount at any time.
    pub(crate) fn attach(&mut self, context: &Context, mount: &Detached) -> anyhow::Result<()> {
        let Some(_turn) = self.turn(context)? else { return Ok(()) };
        self.write_note(context, mount.as_fd());
        if let Some(old) = self.old.take() {
            match kernel::mount::expire(&self.path)? {
                Expired::Unused if mount.attach_beneath(&self.path).is_ok() => {
                    // If a process has opened a file in the old mount since then, the old mount is still busy.
                    let now = self.own.unmount(&old, Unmount::Now);
                    return now.or_else(|_busy| self.own.unmount(&old, Unmount::Lazy));
                }
                Expired::Unused => self.own.unmount(&old, Unmount::Now)?,
                Expired::Gone => self.own.forget(&old)?,
            }
        }
        Ok(mount.attach_at(self.directory)?)
    }

    /// Writes the note of a mount that another program has attached.
    #[cfg(feature = "serve")]
    pub(crate) fn note(&self, context: &Context) {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(self.directory, flags, Mode::empty()) {
            Ok(mount) => self.write_note(context, mount.as_fd()),
            Err(errno) => tracing::debug!(%errno, "cannot record the mount"),
        }
    }

    fn write_note(&self, context: &Context, mount: BorrowedFd<'_>) {
        let Some(notes) = &self.own.notes else { return };
        if let Err(error) = self.note.write(notes, mount) {
            context.remark(&format!(
                "cannot record the mount on \"{}\": {error}; use umount to unmount it",
                self.directory.display()
            ));
        }
    }
}

/// Returns whether the kernel's table shows that a mount is Quire's. The source of an overlay may have Quire's prefix.
/// The source of an EROFS mount without a name is the file that the kernel opened: a descriptor, which is a source
/// only with the new mount API, or a loop device of an image file.
fn is_ours(mount: &Mounted) -> bool {
    if mount.source.starts_with(SOURCE) || mount.kind == "fuse.quire" {
        return true;
    }
    if mount.kind != "erofs" {
        return false;
    }
    let Some(device) = mount.source.strip_prefix("/dev/loop") else {
        return mount.source.starts_with("/proc/self/fd/");
    };
    let file = std::fs::read_to_string(format!("/sys/block/loop{device}/loop/backing_file"));
    let name = file.unwrap_or_default();
    let name = name.trim_end().rsplit('/').next().unwrap_or_default();
    image::verity::ImageId::from_hex(name.as_bytes()).is_ok()
}

/// Returns all mounts in this process's mount namespace.
fn all_mounted() -> anyhow::Result<Vec<Mounted>> {
    kernel::mount::mounted().context("cannot read mountinfo")
}

#[cfg(test)]
mod tests {
    use image::verity::ImageId;
    use kernel::process::UserNamespace;

    use super::*;

    /// If a user can forge a source, root must not mistake that mount for an image.
    #[test]
    fn a_mount_is_the_same_if_that_is_certain() {
        let [one, two] = [1, 2].map(|it| ImageId::from_bytes(&[it; 32]).unwrap());
        let note = |image| MountNote::new(image, "debian", "ro".to_owned());
        let check = |user, kind: &str, source: &str, noted: Option<MountNote>, expect| {
            let who = Who { user, group: user, namespace: UserNamespace::Initial };
            let mount = Mounted {
                point: "/mnt".into(),
                device: "0:52".to_owned(),
                kind: kind.to_owned(),
                source: source.to_owned(),
            };
            let own = OwnMount { mount, note: noted };
            assert_eq!(own.compare(&note(&one), who), expect, "{user} {own:?}");
        };
        let other_options = MountNote::new(&one, "debian", "rw".to_owned());
        check(0, "erofs", "debian", Some(note(&one)), Compared::Same);
        check(0, "erofs", "debian", Some(note(&two)), Compared::OtherImage);
        check(0, "erofs", "debian", Some(other_options), Compared::OtherOptions);
        check(0, "overlay", "debian", None, Compared::Unknown);
        check(0, "fuse.quire", "debian", None, Compared::Unknown);
        check(0, "fuse", "debian", Some(note(&one)), Compared::Unknown);
        check(7, "fuse.quire", "debian", Some(note(&two)), Compared::OtherImage);
        check(7, "fuse.quire", "debian", None, Compared::Same);
        check(7, "fuse.quire", "alpine", None, Compared::OtherImage);
    }

    #[test]
    fn mounts_of_ours() {
        let cases = [
            ("ext3", "/dev/root", false),
            ("overlay", "quire:y:1", true),
            ("erofs", "/proc/self/fd/5", true),
            ("erofs", "debian", false),
            ("fuse.quire", "debian", true),
            ("fuse.other", "debian", false),
            ("erofs", "/dev/sda1", false),
        ];
        for (kind, source, expect) in cases {
            let (kind, source) = (kind.to_owned(), source.to_owned());
            let mount = Mounted { point: "/mnt".into(), device: "0:52".to_owned(), kind, source };
            assert_eq!(is_ours(&mount), expect, "{mount:?}");
        }
    }
}
