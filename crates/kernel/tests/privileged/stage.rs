//! The environment of a test: a directory, a private mount namespace, and images made by mkfs.erofs.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kernel::mount::{MountError, Propagation, Unmount, unmount};
use kernel::version::KernelVersion;
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

pub(crate) struct Stage {
    dir: TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// Serialises the tests: between fork and exec, a child of one test holds copies of all tests' descriptors, and keeps
/// their mounts and files in use.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stage {
    /// Returns `None`, and prints the reason, if the test cannot run.
    pub(crate) fn new(tools: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skipped("needs root");
            return None;
        }
        let alone = alone();
        for tool in tools {
            if testing::find_program(tool).is_none() {
                skipped(&format!("{tool} is not installed"));
                return None;
            }
        }
        kernel::process::own_mounts(Propagation::Private).unwrap();
        // Avoids /tmp, which may be a tmpfs, on which image files need a loop device.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Some(Self { dir, _alone: alone })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a directory.
    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// Whether the kernel mounts image files in this directory without a loop device.
    pub(crate) fn backs_files(&self) -> bool {
        let kind = rustix::fs::statfs(self.dir.path()).unwrap().f_type;
        if is_before(6, 12) {
            skipped("this kernel is older than Linux 6.12");
            return false;
        }
        let backs = ![0x0102_1994, 0x794c_7630].contains(&kind);
        if !backs {
            skipped("the target directory is on tmpfs or overlayfs");
        }
        backs
    }

    /// Makes an image of a directory.
    pub(crate) fn mkfs(&self, image: &str, options: &[&str], source: &Path) -> PathBuf {
        let image = self.path(image);
        let mkfs = testing::find_program("mkfs.erofs").expect("the test asked for it");
        let output = Command::new(mkfs).args(options).arg(&image).arg(source).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        image
    }

    /// Makes an image with a file `hello` that contains "hello\n", and a directory `sub` with a file.
    pub(crate) fn hello(&self) -> PathBuf {
        let source = self.dir("hello.d");
        fs::write(source.join("hello"), "hello\n").unwrap();
        fs::create_dir_all(source.join("sub")).unwrap();
        fs::write(source.join("sub/deep"), "deep\n").unwrap();
        self.mkfs("hello.erofs", &[], &source)
    }

    /// Makes a composefs image by hand. Its file `big` redirects to the object `/ab/cdef` in the directory `objects`,
    /// its file `lost` to an object that does not exist.
    pub(crate) fn composefs(&self) -> Composefs {
        let objects = self.dir("objects");
        fs::create_dir_all(objects.join("ab")).unwrap();
        let content = "an object's content\n".repeat(1000);
        fs::write(objects.join("ab/cdef"), &content).unwrap();

        let source = self.dir("composefs.d");
        for (name, object) in [("big", "/ab/cdef"), ("lost", "/00/00")] {
            let file = File::create(source.join(name)).unwrap();
            file.set_len(content.len() as u64).unwrap();
            set_xattr(&file, "trusted.overlay.metacopy", b"");
            set_xattr(&file, "trusted.overlay.redirect", object.as_bytes());
        }
        fs::write(source.join("small"), "inline\n").unwrap();
        fs::create_dir_all(source.join("etc")).unwrap();
        // Every composefs image hides its objects by whiteouts, for kernels without data-only layers.
        for name in ["ab", "00"] {
            let whiteout = rustix::fs::FileType::CharacterDevice;
            let none = rustix::fs::makedev(0, 0);
            let path = source.join(name);
            rustix::fs::mknodat(rustix::fs::CWD, path, whiteout, Mode::empty(), none).unwrap();
        }
        let image = self.mkfs("composefs.erofs", &[], &source);
        Composefs { image, objects, content }
    }
}

pub(crate) use testing::skipped;

pub(crate) fn is_before(major: u32, minor: u32) -> bool {
    KernelVersion::running().unwrap() < KernelVersion { major, minor }
}

/// Checks that a kernel older than the given version fails with [`MountError::Unsupported`], and then returns `None`.
/// On newer kernels, returns the result of the call.
#[track_caller]
pub(crate) fn since<T>(
    major: u32,
    minor: u32,
    result: Result<T, MountError>,
) -> Option<Result<T, MountError>> {
    let since = KernelVersion { major, minor };
    if !is_before(major, minor) {
        return Some(result);
    }
    match result {
        Err(MountError::Unsupported { since: said, .. }) => assert_eq!(said, since),
        Err(other) => panic!("{}", chain(&other)),
        Ok(_) => panic!("this kernel can do what Linux {since} is said to have brought"),
    }
    skipped(&format!("this kernel is older than Linux {since}"));
    None
}

impl Drop for Stage {
    /// Unmounts the mounts in the directory, last first, before it is removed.
    fn drop(&mut self) {
        let own = self.dir.path().to_str().unwrap();
        for line in mountinfo(own).iter().rev() {
            // The fifth field is the mountpoint (proc_pid_mountinfo(5)).
            let at = Path::new(line.split(' ').nth(4).unwrap());
            if at.starts_with(own) {
                unmount(at, Unmount::Lazy).unwrap();
            }
        }
    }
}

pub(crate) struct Composefs {
    pub(crate) image: PathBuf,
    pub(crate) objects: PathBuf,
    pub(crate) content: String,
}

pub(crate) fn set_xattr(file: &File, name: &str, value: &[u8]) {
    rustix::fs::fsetxattr(file, name, value, rustix::fs::XattrFlags::empty()).unwrap();
}

pub(crate) fn open_directory(path: &Path) -> OwnedFd {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).unwrap()
}

/// Reads a file below a descriptor, such as a detached mount.
pub(crate) fn read_at(root: impl AsFd, path: &str) -> rustix::io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(root, path, flags, Mode::empty())?);
    let mut text = String::new();
    file.read_to_string(&mut text)
        .map_err(|error| rustix::io::Errno::from_io_error(&error).unwrap())?;
    Ok(text)
}

/// Writes a file below a descriptor.
pub(crate) fn write_at(root: impl AsFd, path: &str, text: &str) -> rustix::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let file = rustix::fs::openat(root, path, flags, Mode::RUSR | Mode::WUSR)?;
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    Ok(())
}

/// Returns the lines of this thread's mountinfo that contain a text.
pub(crate) fn mountinfo(needle: &str) -> Vec<String> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    table.lines().filter(|line| line.contains(needle)).map(str::to_owned).collect()
}

/// Returns an error's message with all of its causes, as users see it.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}
