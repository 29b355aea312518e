//! Notes of mounted images. Like the mounts, they are valid until the next boot.
//!
//! The kernel's mount table does not contain an image's id: for an overlay it shows none of the layers, and for an
//! EROFS mount the path that the kernel opened.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use image::verity::ImageId;
use kernel::mount::Mounted;
use rustix::fs::{fstat, major, minor};
use serde::{Deserialize, Serialize};

use crate::backoff::GLANCE;
use crate::boot_cache::Notes;

/// Maximum size of a note, in bytes. Paths in options have at most 4096 bytes.
const NOTE_MAX: usize = 16 << 10;

/// Timeout for other commands that write notes at the same time.
const PATIENCE: Duration = Duration::from_secs(1);

/// A note of a mounted image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountNote {
    pub image: String,
    /// Source of the mount in `mountinfo`.
    pub source: String,
    /// Options of the mount, for comparison only.
    pub options: String,
}

impl MountNote {
    /// Creates a note without writing it.
    #[must_use]
    pub fn new(image: &ImageId, source: &str, options: String) -> Self {
        Self { image: image.to_string(), source: source.to_owned(), options }
    }

    /// Whether notes can be written.
    #[must_use]
    pub fn is_possible(notes: &Notes) -> bool {
        notes.make().is_ok()
    }

    /// Writes the note for the file system of a mount.
    pub fn write(&self, notes: &Notes, mount: BorrowedFd<'_>) -> io::Result<()> {
        let device = fstat(mount)?.st_dev;
        let name = name(&format!("{}:{}", major(device), minor(device)));
        let text = serde_json::to_vec(self)?;
        let since = Instant::now();
        loop {
            match notes.write(&name, &text) {
                Err(error) if is_busy(&error) && since.elapsed() < PATIENCE => {
                    std::thread::sleep(GLANCE);
                }
                written => return written,
            }
        }
    }

    /// Removes the note for a file system that was unmounted.
    pub fn remove(notes: &Notes, mount: &Mounted) -> io::Result<()> {
        notes.remove(&name(&mount.device))
    }

    /// Reads the note of an attached mount; `None` if there is none. Device numbers are reused, so the note must have
    /// the mount's source.
    #[must_use]
    pub fn read_for(notes: &Notes, mount: &Mounted) -> Option<Self> {
        let text = notes.read(&name(&mount.device), NOTE_MAX).ok()?;
        let note: Self = serde_json::from_slice(&text).ok()?;
        (note.source == mount.source).then_some(note)
    }
}

/// Returns the name of the note for a device number, `MAJOR:MINOR`.
fn name(device: &str) -> String {
    format!("mount-{device}")
}

/// Whether another command is writing a note.
fn is_busy(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn a_note_is_of_one_device_and_source() {
        let folder = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let notes = Notes::new(&folder.path().join("notes"), user);
        assert!(MountNote::is_possible(&notes));
        let note = MountNote {
            image: "of an image".to_owned(),
            source: "debian".to_owned(),
            options: "ro".to_owned(),
        };
        let file = std::fs::File::open(folder.path()).unwrap();
        note.write(&notes, file.as_fd()).unwrap();
        let device = fstat(&file).unwrap().st_dev;
        let device = format!("{}:{}", major(device), minor(device));
        let mounted = |device: &str, source: &str| Mounted {
            point: "/mnt".into(),
            device: device.to_owned(),
            kind: "erofs".to_owned(),
            source: source.to_owned(),
        };
        assert_eq!(MountNote::read_for(&notes, &mounted(&device, "debian")), Some(note));
        assert_eq!(MountNote::read_for(&notes, &mounted(&device, "alpine")), None);
        assert_eq!(MountNote::read_for(&notes, &mounted("999:999", "debian")), None);
        MountNote::remove(&notes, &mounted(&device, "debian")).unwrap();
        MountNote::remove(&notes, &mounted(&device, "debian")).unwrap();
        assert_eq!(MountNote::read_for(&notes, &mounted(&device, "debian")), None);
    }
}
