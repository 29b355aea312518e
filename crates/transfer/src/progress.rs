//! Events of imports, exports, pulls and pushes.

use oci::manifest::Platform;

/// A step of an import, export, pull or push. Layers are numbered from 0.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The image is for another platform than this machine's, and the caller asked for no platform.
    OtherPlatform {
        /// The platform in the image's config.
        image: &'a Platform,
        /// The expected platform.
        wanted: &'a Platform,
    },
    /// The source was found. Has the number of bytes to read of each layer, if known.
    Layers(&'a [Option<u64>]),
    /// A layer is being read.
    Started { layer: usize },
    /// More bytes of a layer's blob were read.
    Read {
        layer: usize,
        /// Number of bytes since the last event.
        bytes: u64,
    },
    /// Some bytes of a layer's blob are not read, because their content is in the store.
    Skipped { layer: usize, bytes: u64 },
    /// The layer is in the store already.
    Reused { layer: usize },
    /// A layer did not match its digest, and is read again from its first byte.
    Again { layer: usize },
    /// A layer was read and verified.
    Done { layer: usize },
    /// A directory, a dump or an image without layers is being read.
    Walking,
    /// More bytes of the files were read.
    FileRead {
        /// Number of bytes since the last event.
        bytes: u64,
    },
    /// The image is being written.
    Writing,
    /// The data is being made durable and visible.
    Committing,
}
