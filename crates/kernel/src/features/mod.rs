//! Features of this kernel, found by trying them, each result with its reason.

mod probe;
mod sample;

use std::fmt;
use std::os::fd::BorrowedFd;

use crate::process::Who;

pub(crate) use sample::empty_image;

/// Whether something can be done here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Can {
    /// It was done just now.
    Yes,
    /// It was refused.
    No,
    /// It could not be tried, usually for want of privilege.
    Unknown,
}

/// A result and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The answer.
    pub can: Can,
    /// Outcome of the try, or the kernel's refusal and the way out.
    pub reason: String,
}

/// How control groups are mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cgroups {
    /// Version 1 only.
    V1,
    /// Version 1 with a version 2 tree beside it, which some runtimes refuse.
    Hybrid,
    /// Version 2 only.
    V2,
    /// Not at all where they belong.
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

/// Features of this kernel for the caller, with files in one directory.
#[derive(Clone, Debug)]
pub struct Features {
    /// The kernel's release, such as `6.12.43-amd64`.
    pub release: String,
    /// How control groups are mounted.
    pub cgroups: Cgroups,
    /// EROFS from a regular file, without a loop device.
    pub erofs_from_file: Feature,
    /// Pages of equal files in memory once, for all EROFS images of a domain.
    pub page_sharing: Feature,
    /// Reads of a file past its page cache, in units of 512 bytes, as the blocks of native images are.
    pub direct_io: Feature,
    /// Loop devices.
    pub loop_devices: Feature,
    /// Overlays whose layers are descriptors, detached mounts among them.
    pub overlay_by_descriptor: Feature,
    /// Overlays with data-only layers, by whichever way.
    pub overlay_data_layers: Feature,
    /// fs-verity.
    pub fs_verity: Feature,
    /// The immutable flag.
    pub immutable_flag: Feature,
    /// fanotify pre-content events, for lazy loading.
    pub pre_content_events: Feature,
    /// Files that a process of ours has, without a place in any tree: the other way for lazy loading.
    pub files_on_fuse: Feature,
    /// User namespaces.
    pub user_namespaces: Feature,
}

impl Features {
    /// The answers with their names, in the order a person would want them.
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

/// Tries everything, with unnamed files in this directory and mounts that are attached nowhere.
/// Nothing is left behind. Without privilege most answers are [`Can::Unknown`].
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

/// Whether EROFS images of a domain have the pages of equal files in memory once here.
#[must_use]
pub fn page_sharing() -> Feature {
    probe::page_sharing()
}

/// Whether files of a directory can be sealed by fs-verity. An unnamed one is made for it.
#[must_use]
pub fn fs_verity(directory: BorrowedFd<'_>) -> Feature {
    probe::fs_verity(directory)
}

/// Whether files of a directory can be read past their page cache in units of 512 bytes. An unnamed one is made for it.
#[must_use]
pub fn direct_io(directory: BorrowedFd<'_>) -> Feature {
    probe::direct_io(directory)
}
