//! Events of imports, exports, pulls and pushes.

use oci::manifest::Platform;

/// What happens during an import. Layers are counted from 0.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The image is for another platform than this machine's, and none was asked for.
    OtherPlatform {
        /// The platform that its config names.
        image: &'a Platform,
        /// The platform that is wanted.
        wanted: &'a Platform,
    },
    /// The source was found. Bytes to read of each layer, if known.
    Layers(&'a [Option<u64>]),
    /// A layer is being read.
    Started {
        /// Number of the layer.
        layer: usize,
    },
    /// More bytes of a layer's blob were read.
    Read {
        /// Number of the layer.
        layer: usize,
        /// How many more.
        bytes: u64,
    },
    /// Some bytes of a layer's blob are not read, because the store has their content.
    Skipped {
        /// Number of the layer.
        layer: usize,
        /// How many.
        bytes: u64,
    },
    /// The store has the layer already.
    Reused {
        /// Number of the layer.
        layer: usize,
    },
    /// A layer was wrong, and is read again from its first byte.
    Again {
        /// Number of the layer.
        layer: usize,
    },
    /// A layer was read and checked.
    Done {
        /// Number of the layer.
        layer: usize,
    },
    /// A directory, a dump or an image without layers is being read.
    Walking,
    /// More bytes of its files were read.
    FileRead {
        /// How many more.
        bytes: u64,
    },
    /// The image is being written.
    Writing,
    /// Everything is being made durable and visible.
    Committing,
}
