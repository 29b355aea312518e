//! Probes the features of this kernel by trying them. Each result has a reason.

mod probe;
mod sample;

use std::fmt;
use std::os::fd::BorrowedFd;

use crate::process::Who;

pub(crate) use sample::empty_image;

/// Whether the caller can use a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Can {
    /// The attempt succeeded.
    Yes,
    /// The kernel refused.
    No,
    /// The feature could not be tried, usually because of missing privileges.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    pub can: Can,
    /// Outcome of the attempt, or the kernel's error and a remedy.
    pub reason: String,
}

/// The mounted versions of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cgroups {
    /// Version 1 only.
    V1,
    /// Version 1 together with a version 2 tree, which some runtimes refuse.
    Hybrid,
    /// Version 2 only.
    V2,
    /// `/sys/fs/cgroup` has no control groups.
    Absent,
}

impl fmt::Display for Cgroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1 => "v1",
            Self::Hybrid => "hybrid",
            Self::V2 => "v2",
            Self::Absent => "absent",
        })
    }
}

/// The features that the caller can use, with files in one directory.
#[derive(Clone, Debug)]
pub struct Features {
    /// Kernel release, such as `6.12.43-amd64`.
    pub release: String,
    pub cgroups: Cgroups,
    /// EROFS mounts from a regular file, without a loop device.
    pub erofs_from_file: Feature,
    /// Page sharing: pages of equal files in the EROFS images of a domain are in memory only once.
    pub page_sharing: Feature,
    /// Direct I/O on files in units of 512 bytes, the block size of native images.
    pub direct_io: Feature,
    pub loop_devices: Feature,
    /// Overlays whose layers are given as descriptors, including detached mounts.
    pub overlay_by_descriptor: Feature,
    /// Overlays with data-only layers, by descriptor or by path.
    pub overlay_data_layers: Feature,
    pub fs_verity: Feature,
    pub immutable_flag: Feature,
    /// fanotify's pre-content events, for `quire trace`.
    pub pre_content_events: Feature,
    /// FUSE mounts of single files, the alternative for lazy loading.
    pub files_on_fuse: Feature,
    pub user_namespaces: Feature,
}

impl Features {
    /// Returns the features with their names, in the order for display.
    #[must_use]
    pub fn rows(&self) -> [(&'static str, &Feature); 11] {
        [
            ("erofs-from-file", &self.erofs_from_file),
            ("erofs-page-sharing", &self.page_sharing),
            ("direct-io", &self.direct_io),
            ("loop-devices", &self.loop_devices),
            ("overlay-by-descriptor", &self.overlay_by_descriptor),
            ("overlay-data-layers", &self.overlay_data_layers),
            ("fs-verity", &self.fs_verity),
            ("immutable-flag", &self.immutable_flag),
            ("pre-content-events", &self.pre_content_events),
            ("files-on-fuse", &self.files_on_fuse),
            ("user-namespaces", &self.user_namespaces),
        ]
    }
}

/// Tries every feature, with unnamed files in this directory and with detached mounts, so that nothing is left
/// behind. Without privileges most results are [`Can::Unknown`].
#[must_use]
pub fn probe(directory: BorrowedFd<'_>, who: Who) -> Features {
    Features {
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        cgroups: probe::cgroups(),
        erofs_from_file: probe::erofs_from_file(directory),
        page_sharing: probe::page_sharing(),
        direct_io: probe::direct_io(directory),
        loop_devices: probe::loop_devices(directory),
        overlay_by_descriptor: probe::overlay_by_descriptor(directory),
        overlay_data_layers: probe::overlay_data_layers(directory),
        fs_verity: probe::fs_verity(directory),
        immutable_flag: probe::immutable_flag(directory),
        pre_content_events: probe::pre_content_events(directory),
        files_on_fuse: probe::files_on_fuse(who),
        user_namespaces: probe::user_namespaces(who),
    }
}

/// Probes whether EROFS images of a domain share the pages of equal files.
#[must_use]
pub fn page_sharing() -> Feature {
    probe::page_sharing()
}

/// Probes whether files of a directory can be sealed by fs-verity, with an unnamed file.
#[must_use]
pub fn fs_verity(directory: BorrowedFd<'_>) -> Feature {
    probe::fs_verity(directory)
}

/// Probes whether files of a directory support direct I/O in units of 512 bytes, with an unnamed file.
#[must_use]
pub fn direct_io(directory: BorrowedFd<'_>) -> Feature {
    probe::direct_io(directory)
}
