//! Opens the inputs of an import without blocking on FIFOs or other special files.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::source::Input;

/// Interval at which a waiting read checks for cancellation.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Opens a regular file, and refuses any other type.
///
/// # Errors
/// The error of `open`, or `InvalidInput` for another type of file.
pub fn regular(path: &Path) -> io::Result<File> {
    check_regular(open(path)?)
}

/// Opens a regular file or a block device, and refuses any other type.
///
/// # Errors
/// As [`regular`].
pub fn regular_or_block(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    match file.metadata()?.file_type().is_block_device() {
        true => Ok(file),
        false => check_regular(file),
    }
}

/// Opens a regular file in an untrusted directory, and refuses links that lead out of the directory.
///
/// # Errors
/// The error of `open`, or `InvalidInput` for another type of file or such a link.
pub fn regular_in(folder: &Path, place: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let folder = directory(folder)?;
    let open = |flags| rustix::fs::openat2(&folder, place, flags, Mode::empty(), resolve);
    let opened = match open(flags | OFlags::NONBLOCK) {
        // Another process has a lease on the file, as in `open`, or has renamed a file during the call.
        Err(Errno::AGAIN) => open(flags),
        other => other,
    };
    match opened {
        Ok(fd) => check_regular(fd.into()),
        Err(Errno::XDEV) => {
            let refused = "it is a link that leads out of the directory: `cp -rL` copies the files to which links lead";
            Err(io::Error::new(io::ErrorKind::InvalidInput, refused))
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Reads a file of settings, which need not be a regular file (such as `/dev/null`). A pipe is refused, because it
/// could be read only once and may have no writer.
///
/// # Errors
/// The errors of `open` and `read`, `InvalidInput` for a pipe, and `FileTooLarge` for more than `most` bytes.
pub fn read_settings(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_fifo() {
        let refused = format!("it is {}, which can be read only once: use a file", name(kind));
        return Err(io::Error::new(io::ErrorKind::InvalidInput, refused));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let refused = format!("it has more than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, refused));
    }
    Ok(bytes)
}

fn check_regular(file: File) -> io::Result<File> {
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    let refused = format!("it is {}, not a regular file", name(kind));
    Err(io::Error::new(io::ErrorKind::InvalidInput, refused))
}

/// Opens a directory, and refuses any other type.
///
/// # Errors
/// The error of `open`, such as `NotADirectory`.
pub fn directory(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// Opens a file without waiting for the writer of a FIFO, and without getting a controlling terminal. The caller checks
/// the type of the opened file, because the file at a path may change between a check and the open.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::empty()) {
        Ok(fd) => Ok(fd.into()),
        // Another process has a lease on the file, which a blocking open makes it release. Only regular files have
        // leases.
        Err(Errno::AGAIN) => Ok(rustix::fs::open(path, flags, Mode::empty())?.into()),
        Err(errno) => Err(errno.into()),
    }
}

fn name(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_block_device() {
        "a block device"
    } else {
        "a socket"
    }
}

/// An input that is read from start to end: a file, a pipe, a device or standard input. Reading ends soon after the
/// import is cancelled, even if no data arrives.
#[derive(Debug)]
pub struct Stream<'a> {
    file: File,
    /// Size in bytes, if it is a regular file.
    size: Option<u64>,
    cancel: &'a AtomicBool,
}

impl<'a> Stream<'a> {
    /// Opens a file or standard input.
    ///
    /// # Errors
    /// The error of `open`, or `IsADirectory`.
    pub fn open(input: &Input, cancel: &'a AtomicBool) -> io::Result<Self> {
        match input {
            // This uses a duplicate of the descriptor, because poll does not see data in the buffer of Rust's standard
            // input.
            Input::Stdin => {
                Self::from_file(io::stdin().as_fd().try_clone_to_owned()?.into(), cancel)
            }
            Input::File(path) => Self::from_file(open(path)?, cancel),
        }
    }

    fn from_file(file: File, cancel: &'a AtomicBool) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Err(Errno::ISDIR.into());
        }
        let size = metadata.is_file().then_some(metadata.len());
        Ok(Self { file, size, cancel })
    }

    /// Returns the size in bytes, if the input is a regular file.
    #[must_use]
    pub const fn size(&self) -> Option<u64> {
        self.size
    }

    /// Duplicates the descriptor of the input. Both share one file offset.
    ///
    /// # Errors
    /// The error of `dup`.
    pub fn try_clone(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

impl Read for Stream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(io::Error::other("cancelled"));
            }
            if self.size.is_none() {
                let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
                // poll does not report a pipe as ready before it has a writer, but read would return end of file.
                match rustix::event::poll(&mut fds, Some(&PATIENCE)) {
                    Ok(0) | Err(Errno::INTR) => continue,
                    Ok(_) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            match self.file.read(into) {
                // Another reader of the same pipe took the data first.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::time::Duration;

    use super::*;

    fn check_regular(path: &str, expect: &str) {
        let got = match regular(Path::new(path)) {
            Ok(_) => "a file".to_owned(),
            Err(error) => error.to_string(),
        };
        assert_eq!(got, expect, "{path}");
    }

    #[test]
    fn kinds() {
        check_regular("/proc/self/status", "a file");
        check_regular("/", "it is a directory, not a regular file");
        check_regular("/dev/null", "it is a character device, not a regular file");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RWXU).unwrap();
        check_regular(path.to_str().unwrap(), "it is a FIFO, not a regular file");
        // The kernel does not open a socket by path.
        let path = folder.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        check_regular(path.to_str().unwrap(), "No such device or address (os error 6)");
    }

    #[test]
    fn settings_are_small_files_and_no_pipes() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("small"), "12345").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, path("pipe"), Mode::RWXU).unwrap();
        let check = |path: &Path, most, expect: Result<&[u8], &str>| {
            let found = read_settings(path, most).map_err(|error| error.to_string());
            assert_eq!(found.as_deref().map_err(|it| &**it), expect, "{}", path.display());
        };
        check(&path("small"), 5, Ok(b"12345"));
        check(&path("small"), 4, Err("it has more than 4 bytes"));
        check(Path::new("/dev/null"), 4, Ok(b""));
        check(Path::new("/dev/zero"), 4, Err("it has more than 4 bytes"));
        check(&path("pipe"), 4, Err("it is a FIFO, which can be read only once: use a file"));
        check(folder.path(), 4, Err("Is a directory (os error 21)"));
    }

    #[test]
    fn a_pipe_gives_all_that_comes_however_late() {
        let (reader, mut writer) = io::pipe().unwrap();
        let never = AtomicBool::new(false);
        let mut stream =
            Stream::from_file(std::os::fd::OwnedFd::from(reader).into(), &never).unwrap();
        assert_eq!(stream.size(), None);
        let writing = std::thread::spawn(move || {
            for piece in ["one", "two"] {
                std::thread::sleep(Duration::from_millis(150));
                writer.write_all(piece.as_bytes()).unwrap();
            }
        });
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        assert_eq!(all, "onetwo");
        writing.join().unwrap();
    }

    #[test]
    fn a_pipe_without_a_word_ends_when_cancelled() {
        let (reader, _writer) = io::pipe().unwrap();
        let cancel = AtomicBool::new(false);
        let mut stream =
            Stream::from_file(std::os::fd::OwnedFd::from(reader).into(), &cancel).unwrap();
        // The writer stays open, so only the cancellation ends the read.
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| stream.read(&mut [0; 8]).unwrap_err().to_string());
            std::thread::sleep(Duration::from_millis(200));
            cancel.store(true, Ordering::Relaxed);
            assert_eq!(reading.join().unwrap(), "cancelled");
        });
    }
}
