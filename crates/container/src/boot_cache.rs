//! Notes that are valid until the next boot: small files in a folder that only its owner can write.
//!
//! The first line of a note is the digest of its name and content. A writer locks the only draft file, writes it and
//! renames it. If a writer is killed, the next writer reuses the draft.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, mkdirat, openat,
    renameat, statat, unlinkat,
};
use rustix::io::Errno;
use store::{Digest, Who};

/// Folder of root's notes, which is removed at the next boot.
pub const FOLDER: &str = "/run/quire";

/// Name of a note's file before it is complete.
const DRAFT: &str = "draft";

/// Maximum number of notes of a kind: most hosts need one or two, and each note of the largest kind takes 10 kB of
/// memory. The kind is the part of a name before its first hyphen.
pub(crate) const NOTES_MAX: usize = 64;

/// File whose lock protects the notes.
const LOCK: &str = "lock";

/// Timeout for that lock: a mount is attached in milliseconds.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_TURN: Duration = Duration::from_millis(2);

/// Kind of the notes of mounts, each of which has about 300 bytes.
const MOUNTS: &[u8] = b"mount";

/// Maximum number of notes of mounts.
const MOUNT_NOTES_MAX: usize = 4096;

/// Upper bound of the length of a line with a digest, in bytes.
const DIGEST_MAX: usize = 128;

#[derive(Debug, Clone)]
pub struct Notes {
    folder: PathBuf,
    user: u32,
}

impl Notes {
    /// Returns the notes in a folder, which is created with the first note.
    #[must_use]
    pub fn new(folder: &Path, user: u32) -> Self {
        Self { folder: folder.to_owned(), user }
    }

    /// Returns the notes of a user, which are removed at the next boot. Root's notes are in [`FOLDER`], those of other
    /// users below `XDG_RUNTIME_DIR`; `None` if that is not an absolute path. Source: XDG Base Directory
    /// Specification.
    #[must_use]
    pub fn of_user(who: Who, runtime_dir: Option<&OsStr>) -> Option<Self> {
        let user = who.user;
        if who.is_host_root() {
            return Some(Self::new(Path::new(FOLDER), user));
        }
        let folder = runtime_dir.map(Path::new).filter(|it| it.is_absolute())?;
        Some(Self::new(&folder.join("quire"), user))
    }

    /// Reads a note of at most `most` bytes.
    pub(crate) fn read(&self, name: &str, most: usize) -> io::Result<Vec<u8>> {
        let folder = self.open()?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&folder, name, flags, Mode::empty())?);
        let found = file.metadata()?;
        if !found.is_file() || !self.is_ours(found.uid(), found.mode()) {
            return Err(odd("it is not a regular file that only this user can write"));
        }
        let mut bytes = Vec::new();
        file.take((most + DIGEST_MAX) as u64).read_to_end(&mut bytes)?;
        let end = bytes
            .iter()
            .position(|it| *it == b'\n')
            .ok_or_else(|| odd("the file has no digest"))?;
        let text = bytes.split_off(end + 1);
        if bytes[..end] != *digest(name, &text).as_bytes() {
            return Err(odd("the file does not match its digest"));
        }
        Ok(text)
    }

    /// Writes a note. If there are too many notes of its kind, replaces the oldest.
    pub(crate) fn write(&self, name: &str, text: &[u8]) -> io::Result<()> {
        let folder = self.make()?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let mode = Mode::RUSR | Mode::WUSR;
        let mut draft = File::from(openat(&folder, DRAFT, flags | OFlags::CLOEXEC, mode)?);
        // If another process holds the lock, it is about to rename the draft. This note can be written at another
        // time.
        flock(&draft, FlockOperation::NonBlockingLockExclusive)?;
        let (found, named) = (fstat(&draft)?, statat(&folder, DRAFT, AtFlags::SYMLINK_NOFOLLOW)?);
        if (found.st_dev, found.st_ino) != (named.st_dev, named.st_ino) {
            return Err(io::Error::other("another process has just written a note"));
        }
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile
            || !self.is_ours_by(&found)
        {
            return Err(odd("the draft is not a regular file that only this user can write"));
        }
        draft.set_len(0)?;
        writeln!(draft, "{}", digest(name, text))?;
        draft.write_all(text)?;
        make_room(folder.as_fd(), name)?;
        Ok(renameat(&folder, DRAFT, &folder, name)?)
    }

    /// Whether this is the first call with this text since the boot. Always true if notes cannot be written.
    #[must_use]
    pub fn is_news(&self, text: &str) -> bool {
        let name = format!(
            "remark-{}",
            &Digest::sha256(text.as_bytes()).to_string()["sha256:".len()..][..16]
        );
        if self.read(&name, text.len()).is_ok_and(|it| it == text.as_bytes()) {
            return false;
        }
        if let Err(error) = self.write(&name, text.as_bytes()) {
            tracing::debug!(%error, "a remark may be printed again");
        }
        true
    }

    /// Removes a note, if it exists.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(self.open()?, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens the folder, and creates it if it does not exist, independent of the umask. Fails if other users can
    /// write to it.
    pub(crate) fn make(&self) -> io::Result<OwnedFd> {
        let mode = Mode::from_raw_mode(0o755);
        match mkdirat(CWD, &self.folder, mode) {
            Ok(()) => {
                let folder = self.open()?;
                rustix::fs::fchmod(&folder, mode)?;
                Ok(folder)
            }
            Err(Errno::EXIST) => self.open(),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits for the lock of the notes, at most 5 s. The lock is released when the descriptor is closed.
    ///
    /// # Errors
    /// If the folder cannot be used, or the timeout is over.
    pub fn lock(&self) -> io::Result<OwnedFd> {
        let folder = self.make()?;
        // Other users can open the folder, and thus lock it, but they cannot open this file.
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let mode = Mode::RUSR | Mode::WUSR;
        let lock = openat(&folder, LOCK, flags | OFlags::CLOEXEC, mode)?;
        let since = Instant::now();
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(lock),
                Err(Errno::WOULDBLOCK | Errno::INTR) if since.elapsed() < LOCK_PATIENCE => {
                    std::thread::sleep(LOCK_TURN);
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = openat(CWD, &self.folder, flags, Mode::empty())?;
        if !self.is_ours_by(&fstat(&folder)?) {
            let path = self.folder.display();
            return Err(odd(&format!("{path} is not a directory that only this user can write")));
        }
        Ok(folder)
    }

    fn is_ours(&self, user: u32, mode: u32) -> bool {
        user == self.user && mode & 0o22 == 0
    }

    fn is_ours_by(&self, found: &Stat) -> bool {
        self.is_ours(found.st_uid, found.st_mode)
    }
}

fn make_room(folder: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let kind = |name: &[u8]| name.split(|it| *it == b'-').next().map(<[u8]>::to_vec);
    let mut others = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let other = entry.file_name();
        if kind(other.to_bytes()) == kind(name.as_bytes()) && other.to_bytes() != name.as_bytes() {
            let found = statat(folder, other, AtFlags::SYMLINK_NOFOLLOW)?;
            others.push((found.st_mtime, found.st_mtime_nsec, other.to_owned()));
        }
    }
    others.sort();
    let most =
        if kind(name.as_bytes()).as_deref() == Some(MOUNTS) { MOUNT_NOTES_MAX } else { NOTES_MAX };
    let many = (others.len() + 1).saturating_sub(most);
    for (_, _, other) in &others[..many] {
        unlinkat(folder, other, AtFlags::empty())?;
    }
    Ok(())
}

fn digest(name: &str, text: &[u8]) -> String {
    Digest::sha256(&[name.as_bytes(), b"\n", text].concat()).to_string()
}

fn odd(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use kernel::process::UserNamespace;

    use super::*;

    #[test]
    fn news_is_news_once() {
        let folder = tempfile::tempdir().unwrap();
        let notes = notes_in(folder.path());
        assert!(notes.is_news("no newuidmap") && !notes.is_news("no newuidmap"));
        assert!(notes.is_news("no subuid"), "it is another text");
        // If notes cannot be written, the remark is printed each time.
        let nowhere = notes_in(Path::new("/proc"));
        assert!(nowhere.is_news("a") && nowhere.is_news("a"));
    }

    /// Other users can open root's folder, which is readable by all.
    #[test]
    fn only_the_owner_can_take_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let notes = notes_in(folder.path());
        let opened = File::open(folder.path()).unwrap();
        flock(&opened, FlockOperation::NonBlockingLockExclusive).unwrap();
        let lock = notes.lock().unwrap();
        let mode = fstat(&lock).unwrap().st_mode & 0o777;
        assert_eq!(mode, 0o600);
        let other = File::open(folder.path().join(LOCK)).unwrap();
        let taken = flock(&other, FlockOperation::NonBlockingLockExclusive);
        assert_eq!(taken, Err(Errno::WOULDBLOCK));
    }

    #[test]
    fn whose_notes_are_where() {
        let of = |user, namespace, runtime_dir: Option<&str>| {
            let who = Who { user, group: user, namespace };
            Notes::of_user(who, runtime_dir.map(OsStr::new))
        };
        let check = |user, runtime_dir: Option<&str>, expect: Option<&str>| {
            let notes = of(user, UserNamespace::Initial, runtime_dir);
            assert_eq!(notes.map(|it| it.folder), expect.map(PathBuf::from), "{runtime_dir:?}");
        };
        check(0, None, Some(FOLDER));
        check(0, Some("/run/user/0"), Some(FOLDER));
        check(7, Some("/run/user/7"), Some("/run/user/7/quire"));
        // Root of a user namespace counts as a user.
        let inside = of(0, UserNamespace::Other, Some("/run/user/7")).unwrap();
        assert_eq!(inside.folder, Path::new("/run/user/7/quire"));
        check(7, Some("run"), None);
        check(7, Some(""), None);
        check(7, None, None);
    }

    fn notes_in(folder: &Path) -> Notes {
        Notes::new(folder, rustix::process::geteuid().as_raw())
    }

    fn read(folder: &Path, name: &str, most: usize) -> io::Result<Vec<u8>> {
        notes_in(folder).read(name, most)
    }

    fn write(folder: &Path, name: &str, text: &[u8]) -> io::Result<()> {
        notes_in(folder).write(name, text)
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn only_what_was_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let notes = folder.path().join("notes");
        let read = || read(&notes, "kind-x", 3);
        assert_eq!(read().unwrap_err().kind(), io::ErrorKind::NotFound);
        write(&notes, "kind-x", b"abc").unwrap();
        assert_eq!(read().unwrap(), b"abc");
        let note = notes.join("kind-x");
        let good = std::fs::read(&note).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&note, bad).unwrap();
            assert!(read().is_err(), "byte {at}");
        }
        for end in 0..good.len() {
            std::fs::write(&note, &good[..end]).unwrap();
            assert!(read().is_err(), "{end} bytes");
        }
        std::fs::write(&note, &good).unwrap();
        set_mode(&note, 0o666);
        assert!(read().is_err(), "others can write it");
        set_mode(&note, 0o600);
        assert!(read().is_ok());
        let aside = folder.path().join("aside");
        std::fs::copy(&note, &aside).unwrap();
        std::fs::remove_file(&note).unwrap();
        symlink(&aside, &note).unwrap();
        assert!(read().is_err(), "a link");
    }

    #[test]
    fn a_note_is_no_other_notes() {
        let folder = tempfile::tempdir().unwrap();
        let notes = folder.path().join("notes");
        write(&notes, "kind-x", b"abc").unwrap();
        std::fs::copy(notes.join("kind-x"), notes.join("kind-y")).unwrap();
        set_mode(&notes.join("kind-y"), 0o600);
        assert_eq!(read(&notes, "kind-y", 3).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_folder_that_others_can_write_has_no_notes() {
        let folder = tempfile::tempdir().unwrap();
        let notes = folder.path().join("notes");
        write(&notes, "kind-x", b"abc").unwrap();
        for mode in [0o775, 0o757, 0o1777] {
            set_mode(&notes, mode);
            assert!(read(&notes, "kind-x", 3).is_err(), "{mode:o}");
            assert!(write(&notes, "kind-x", b"abc").is_err(), "{mode:o}");
        }
        set_mode(&notes, 0o755);
        let link = folder.path().join("link");
        symlink(&notes, &link).unwrap();
        assert!(read(&link, "kind-x", 3).is_err() && write(&link, "kind-x", b"abc").is_err());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&notes, Some(1), None).unwrap();
            assert!(read(&notes, "kind-x", 3).is_err(), "somebody else's");
            assert!(write(&notes, "kind-x", b"abc").is_err(), "somebody else's");
        }
    }

    #[test]
    fn there_are_not_many_notes_and_the_newest_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let notes = folder.path().join("notes");
        write(&notes, "other-1", b"").unwrap();
        for number in 0..NOTES_MAX + 3 {
            // A process was killed after writing half of a draft.
            std::fs::write(notes.join(DRAFT), "half").unwrap();
            set_mode(&notes.join(DRAFT), 0o600);
            let name = format!("kind-{number}");
            write(&notes, &name, b"abc").unwrap();
            assert!(read(&notes, &name, 3).is_ok(), "{name}");
        }
        let names = std::fs::read_dir(&notes).unwrap().map(|it| it.unwrap().file_name());
        assert_eq!(names.count(), NOTES_MAX + 1);
        assert!(read(&notes, "other-1", 0).is_ok(), "of another kind");
        // An existing note does not replace another one.
        write(&notes, &format!("kind-{}", NOTES_MAX + 2), b"abc").unwrap();
        assert_eq!(std::fs::read_dir(&notes).unwrap().count(), NOTES_MAX + 1);
    }

    #[test]
    fn one_writes_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let notes = folder.path().join("notes");
        drop(notes_in(&notes).make().unwrap());
        let draft = File::create(notes.join(DRAFT)).unwrap();
        set_mode(&notes.join(DRAFT), 0o600);
        flock(&draft, FlockOperation::LockExclusive).unwrap();
        assert!(write(&notes, "kind-x", b"abc").is_err());
        drop(draft);
        write(&notes, "kind-x", b"abc").unwrap();
        // A symbolic link would redirect the write to another file.
        symlink(folder.path().join("aside"), notes.join(DRAFT)).unwrap();
        assert!(write(&notes, "kind-x", b"abc").is_err());
        assert!(!folder.path().join("aside").exists());
    }
}
