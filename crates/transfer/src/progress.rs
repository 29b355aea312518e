//! What imports, exports, pulls and pushes tell of their progress.

use oci::manifest::Platform;

/// What happens during an import. Layers are counted from 0.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The image is for another platform than the one that is wanted, which is this machine's.
    OtherPlatform {
        /// The platform that its config names.
        image: &'a Platform,
        /// The platform that is wanted.
        wanted: &'a Platform,
    },
    /// The source was found. For each layer the bytes to read, where that is known.
    Layers(&'a [Option<u64>]),
    /// A layer is being read.
    Started {
        /// Which one.
        layer: usize,
    },
    /// More bytes of a layer's blob were read.
    Read {
        /// Which one.
        layer: usize,
        /// How many more.
        bytes: u64,
    },
    /// So many bytes of a layer's blob need not be read: the store has what is in them.
    Skipped {
        /// Which one.
        layer: usize,
        /// How many.
        bytes: u64,
    },
    /// The store has the layer already.
    Reused {
        /// Which one.
        layer: usize,
    },
    /// A layer was not what it should be, and is read once more from its first byte.
    Again {
        /// Which one.
        layer: usize,
    },
    /// A layer was read, and checked.
    Done {
        /// Which one.
        layer: usize,
    },
    /// A directory or a dump is being read.
    Walking,
    /// The image is being written.
    Writing,
    /// All is being made durable and visible.
    Committing,
}
