//! Notes of images that are mounted. They hold until the next start of the machine, as the mounts do.
//!
//! The kernel's table of mounts has no room for an image's id: an overlay shows none of its layers, and an EROFS shows the
//! path that the kernel opened.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use image::verity::ImageId;
use kernel::mount::Mounted;
use rustix::fs::{fstat, major, minor};
use serde::{Deserialize, Serialize};

use crate::notes::Notes;
use crate::pace::GLANCE;

/// Largest note, in bytes. Paths in options have at most 4096 bytes.
const NOTE_MAX: usize = 16 << 10;

/// How long other commands may take to write their notes.
const PATIENCE: Duration = Duration::from_secs(1);

/// An image that is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountNote {
    /// Image id.
    pub image: String,
    /// Source of the mount in `mountinfo`.
    pub source: String,
    /// Options of the mount, for comparison only.
    pub options: String,
}

impl MountNote {
    /// A note that is not written yet.
    #[must_use]
    pub fn new(image: &ImageId, source: &str, options: String) -> Self {
        Self { image: image.to_string(), source: source.to_owned(), options }
    }

    /// Whether notes can be written.
    #[must_use]
    pub fn is_possible(notes: &Notes) -> bool {
        notes.make().is_ok()
    }

    /// Writes the note of the file system of a mount.
    ///
    /// # Errors
    /// An error of the file system of the notes.
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

    /// Removes the note of a file system that is not mounted any more.
    ///
    /// # Errors
    /// An error of the file system of the notes.
    pub fn remove(notes: &Notes, mount: &Mounted) -> io::Result<()> {
        notes.remove(&name(&mount.device))
    }

    /// Reads the note of an attached mount; `None` if there is none. Numbers of devices are used again, so the source counts.
    #[must_use]
    pub fn of(notes: &Notes, mount: &Mounted) -> Option<Self> {
        let text = notes.read(&name(&mount.device), NOTE_MAX).ok()?;
        let note: Self = serde_json::from_slice(&text).ok()?;
        (note.source == mount.source).then_some(note)
    }
}

/// Name of the note for a device number, `MAJOR:MINOR`.
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
        assert_eq!(MountNote::of(&notes, &mounted(&device, "debian")), Some(note));
        assert_eq!(MountNote::of(&notes, &mounted(&device, "alpine")), None);
        assert_eq!(MountNote::of(&notes, &mounted("999:999", "debian")), None);
        MountNote::remove(&notes, &mounted(&device, "debian")).unwrap();
        MountNote::remove(&notes, &mounted(&device, "debian")).unwrap();
        assert_eq!(MountNote::of(&notes, &mounted(&device, "debian")), None);
    }
}
