//! The types and ids of a disk's partitions.

use image::erofs::Flavor;
use image::verity::ImageId;
use uuid::Uuid;

use super::super::ErofsReport;
use super::super::erofs::{PMEM_ALIGN, derived};
use super::table::MIB;
use crate::root_types::{ROOT_TYPES, RootTypes, root_types};

/// Name of the root partition, for `root=PARTLABEL=root`.
pub(super) const ROOT_NAME: &str = "root";

/// Types of a root partition and of the partitions that verify it. They identify the processor architecture of the
/// root.
#[derive(Debug, Clone, Copy)]
pub struct RootType(&'static RootTypes);

impl RootType {
    /// Returns the types for an architecture, named as in Go; `None` if it has none.
    #[must_use]
    pub fn for_architecture(architecture: &str) -> Option<Self> {
        root_types(architecture).map(Self)
    }

    /// Returns the architectures that have types.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        ROOT_TYPES.iter().map(|it| it.architecture)
    }

    /// Returns the type of the root partition.
    pub(super) fn root(self) -> Uuid {
        Uuid::from_u128(self.0.root)
    }

    /// Returns the type of the partition with the hash tree.
    pub(super) fn verity(self) -> Uuid {
        Uuid::from_u128(self.0.verity)
    }

    /// Returns the type of the partition with the signature.
    pub(super) fn signature(self) -> Uuid {
        Uuid::from_u128(self.0.signature)
    }
}

/// Result of writing a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskReport {
    /// The image, which begins at the partition's first byte.
    pub image: ErofsReport,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// UUID of the partition, for `root=PARTUUID=`.
    pub partition: Uuid,
}

/// The differences between disks of two flavors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Variant {
    /// Disks with different bytes have different ids, so this is in the texts that ids are derived from.
    pub(super) suffix: &'static str,
    /// Alignment of the disk's length in bytes, a multiple of [`MIB`]. With DAX, it is that of pmem devices.
    pub(super) align: u64,
}

impl Variant {
    pub(super) fn of(flavor: Flavor) -> Self {
        match flavor {
            Flavor::Dax => Self { suffix: " dax", align: PMEM_ALIGN },
            Flavor::Linux | Flavor::Gvisor => Self { suffix: "", align: MIB },
        }
    }

    /// Derives a UUID from its purpose, the image, and `more`, which is empty or begins with a space.
    pub(super) fn guid(self, what: &str, root: RootType, id: &ImageId, more: &str) -> Uuid {
        let (root, suffix) = (root.root(), self.suffix);
        Uuid::from_bytes(derived(&format!("quire {what} {root} {id}{suffix}{more}")))
    }
}
