//! The next step after an error: a command to call, or a setting to change.

use std::error::Error;

use container::life::layer_access::LookError;
use container::life::lookup::KnownError;
use container::life::monitor::RunError;
use container::root::filestore::FilestoreError;
use container::{ProgramError, Within};
use image::erofs::read::{ReadError, Unsupported};
use kernel::mount::{MountError, Step};
use kernel::process::Who;
use oci::manifest::ManifestError;
use oci::source::SourceError;
use rustix::io::Errno;
use store::{ResolveError, StoreError};
use transfer::StoredError;
use transfer::export::ExportError;
use transfer::import::PlatformMismatch;

use crate::session::resolve::{LIST, NoContainer, Unresolved, meant};
use crate::session::source_hint::source_hint;

/// An error for which the command line has advice. The lower crates do not know verbs and options, so the advice for
/// their errors is in this module.
trait Hint: Error + 'static {
    fn hint(&self) -> Option<String>;
}

/// Returns the hint of an error of type `E`, or of one in a box.
fn hint_of<E: Hint>(cause: &(dyn Error + 'static)) -> Option<String> {
    let boxed = || cause.downcast_ref::<Box<E>>().map(AsRef::as_ref);
    cause.downcast_ref().or_else(boxed).and_then(E::hint)
}

/// One function for each error with a hint; a test compares this with the implementations of [`Hint`].
const HINTS: &[fn(&(dyn Error + 'static)) -> Option<String>] = &[
    hint_of::<Unresolved>,
    hint_of::<NoContainer>,
    hint_of::<ResolveError>,
    hint_of::<LookError>,
    hint_of::<KnownError>,
    hint_of::<RunError>,
    hint_of::<SourceError>,
    hint_of::<MountError>,
    hint_of::<StoreError>,
    hint_of::<PlatformMismatch>,
    hint_of::<ManifestError>,
    #[cfg(feature = "registry")]
    hint_of::<oci::registry::Cause>,
    hint_of::<StoredError>,
    hint_of::<ExportError>,
    hint_of::<ReadError>,
];

/// Returns the next step for an error: the hint of the first of its causes that has one.
pub(crate) fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| HINTS.iter().find_map(|hint| hint(cause)))
}

/// Suggests options that need no filestore if making one failed. It is printed in addition to the other hints.
pub(crate) fn filestore_hint(error: &anyhow::Error, who: Who) -> Option<&'static str> {
    match error.chain().find_map(|cause| cause.downcast_ref())? {
        FilestoreError::Size(_) => None,
        // Root of a user namespace may not mount an ext4 file system either. Source: Linux `fs/ext4/super.c`, without
        // `FS_USERNS_MOUNT`.
        FilestoreError::Mount(_) if !who.is_host_root() => Some(
            "only root can mount the file system in a file: without root, --writable dir, --writable memory and \
             --mount type=memory work",
        ),
        _ => {
            Some("--writable memory and --mount type=memory work without a file system on the disk")
        }
    }
}

impl Hint for Unresolved {
    fn hint(&self) -> Option<String> {
        self.hint.clone()
    }
}

impl Hint for NoContainer {
    fn hint(&self) -> Option<String> {
        Some(self.hint.clone())
    }
}

impl Hint for ResolveError {
    fn hint(&self) -> Option<String> {
        let absent = matches!(self, Self::Absent { .. });
        absent.then(|| meant(self).unwrap_or_else(|| LIST.to_owned()))
    }
}

impl Hint for LookError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Known(error) => error.hint(),
            _ => None,
        }
    }
}

impl Hint for KnownError {
    fn hint(&self) -> Option<String> {
        let Self::Absent { nearest, .. } = self else { return None };
        Some(match nearest.join(" or ") {
            meant if meant.is_empty() => "`quire ps --all` lists all containers".to_owned(),
            meant => format!("did you mean {meant}?"),
        })
    }
}

impl Hint for RunError {
    fn hint(&self) -> Option<String> {
        let Self::Program(ProgramError::NotFound { within, program, .. }) = self else {
            return None;
        };
        let before = match within {
            Within::Image => "image",
            Within::Container => "container",
        };
        program.starts_with('-').then(|| format!("options of Quire come before the {before}"))
    }
}

impl Hint for SourceError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Kind(text) => source_hint(text),
            _ => None,
        }
    }
}

impl Hint for MountError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Call { step: Step::Unmount, source: Errno::BUSY, .. } => Some(
                "a process uses it: `quire umount --lazy` unmounts it when the last process stops using it"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

impl Hint for StoreError {
    fn hint(&self) -> Option<String> {
        let absent = matches!(self, Self::Absent(_));
        let first = if cfg!(feature = "registry") {
            "`quire pull` or `quire import`"
        } else {
            "`quire import`"
        };
        absent.then(|| format!("{first} makes one; --store names its directory"))
    }
}

impl Hint for PlatformMismatch {
    fn hint(&self) -> Option<String> {
        Some("without --platform Quire uses it; its programs then need an emulator".to_owned())
    }
}

impl Hint for ManifestError {
    fn hint(&self) -> Option<String> {
        matches!(self, Self::Artifact { .. } | Self::LayerType { .. }).then(|| {
            "it has no files to mount: fetch it with the tool that made it, or with `oras pull`"
                .to_owned()
        })
    }
}

#[cfg(feature = "registry")]
impl Hint for oci::registry::Cause {
    fn hint(&self) -> Option<String> {
        match self {
            Self::NoCredentials { host, .. } => {
                Some(format!("`quire login {host}` saves a user name and a password"))
            }
            _ => None,
        }
    }
}

impl Hint for ReadError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Unsupported(feature) => feature_hint(*feature),
            Self::NoDevice(_) => Some(by_kernel("the kernel can", "loop,device=OTHER_FILE")),
            Self::NotErofs
            | Self::NotComposefs
            | Self::Corrupt(_)
            | Self::Names(_)
            | Self::Cancelled
            | Self::Io { .. } => None,
        }
    }
}

/// Returns the hint for an EROFS image with a feature that Quire does not support.
fn feature_hint(feature: Unsupported) -> Option<String> {
    match feature {
        Unsupported::Fragments(_) | Unsupported::Metabox => {
            Some(by_kernel("a recent kernel can", "loop"))
        }
        Unsupported::Features(_)
        | Unsupported::Algorithms(_)
        | Unsupported::Algorithm(..)
        | Unsupported::AlgorithmFormat(..)
        | Unsupported::MapFormat(..)
        | Unsupported::ClusterSize(..)
        | Unsupported::InodeFormat(..)
        | Unsupported::DataLayout(..)
        | Unsupported::ChunkFormat(..) => Some(by_kernel("a later kernel may", "loop")),
        // The data is in blobs of Nydus, so the kernel cannot read the image without its service.
        Unsupported::Rafs => {
            Some("`nydus-image unpack` writes a tar of it, which tar:FILE imports".to_owned())
        }
        // Linux refuses these as well. Source: `erofs_read_superblock` in `fs/erofs/super.c`.
        Unsupported::DirectoryBlocks(_) => None,
        Unsupported::ComposefsHeader(_) | Unsupported::NativeHeader(_) => {
            Some("a later version of Quire may read it".to_owned())
        }
    }
}

/// Returns the commands with which the kernel reads an EROFS image that Quire cannot read.
fn by_kernel(who: &str, options: &str) -> String {
    format!(
        "if you trust the image, {who} read it: `mount -t erofs -o ro,{options} FILE DIRECTORY`, and import \
        dir:DIRECTORY (for a disk, mount the partition's device, which `losetup --read-only --partscan --find --show \
        FILE` makes)"
    )
}

/// Hint for data that the store lacks.
const BACK: &str = "import the same image again to restore it";

impl Hint for StoredError {
    fn hint(&self) -> Option<String> {
        matches!(self, Self::Absent { .. }).then(|| BACK.to_owned())
    }
}

impl Hint for ExportError {
    fn hint(&self) -> Option<String> {
        let hint = match self {
            _ if self.is_damage() => {
                "`quire fsck` lists the damage; `quire fsck --repair` removes it, and a new import restores the data"
            }
            Self::Absent(_) | Self::Documents(StoredError::Absent { .. }) => BACK,
            Self::DockerZstd => "use --compression gzip or none",
            Self::Unsupported { .. } => "--skip-unsupported leaves out such files, and lists them",
            Self::Untagged(_) => "use oci:DIR:TAG for a tag",
            Self::NotEmpty(_) => "use an empty directory, or one that does not exist yet",
            Self::Scratch { .. } => "set TMPDIR to another directory for temporary files",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hint that is not in [`HINTS`] would never be printed.
    #[test]
    fn every_hint_is_found() {
        let source = include_str!("hints.rs");
        let names = |before: &str, after: &str| {
            let parts = source.lines().filter_map(|it| it.trim().strip_prefix(before));
            parts.filter_map(|it| it.split_once(after)).map(|it| it.0.to_owned()).collect()
        };
        let mut made: Vec<String> = names("impl Hint for ", " {");
        let mut listed: Vec<String> = names("hint_of::<", ">");
        made.sort_unstable();
        listed.sort_unstable();
        assert_eq!(made, listed);
        assert!(made.len() > 10, "{made:?}");
    }

    /// The kernel reads neither RAFS without a service, nor large directory blocks.
    #[test]
    fn only_what_the_kernel_reads_is_mounted() {
        let check = |feature, expect: Option<&str>| {
            let found = hint(&anyhow::Error::new(ReadError::from(feature)));
            let is_expected = |it: &str| expect.is_some_and(|expect| it.contains(expect));
            assert!(found.as_deref().map_or(expect.is_none(), is_expected), "{feature}: {found:?}");
        };
        check(Unsupported::Metabox, Some("a recent kernel can read it: `mount -t erofs"));
        check(Unsupported::Features(1 << 20), Some("a later kernel may read it"));
        check(Unsupported::Features(1 << 20), Some("losetup --read-only --partscan"));
        check(Unsupported::Rafs, Some("`nydus-image unpack` writes a tar of it"));
        check(Unsupported::NativeHeader(9), Some("a later version of Quire"));
        check(Unsupported::DirectoryBlocks(1), None);
    }

    #[test]
    fn the_hint_of_a_cause_is_found_in_a_box_and_below_others() {
        let error = ManifestError::LayerType { number: 1, media_type: "a/b".to_owned() };
        let error = anyhow::Error::new(Box::new(error)).context("cannot import").context("outer");
        assert!(hint(&error).is_some_and(|it| it.contains("oras pull")));
        let error = anyhow::Error::new(StoreError::Absent("/no".into()));
        assert!(hint(&error).is_some_and(|it| it.contains("quire import")));
        assert_eq!(hint(&anyhow::anyhow!("any other")), None);
    }
}
