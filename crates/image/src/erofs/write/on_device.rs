//! The locations of files on devices.

/// A file whose bytes are on devices.
#[derive(Debug, Clone, Copy)]
pub(super) struct OnDevice {
    pub(super) device: u16,
    /// Offset on the device in blocks.
    pub(super) block: u64,
    /// Size of the file in bytes, as in the tree.
    pub(super) size: u64,
    pub(super) form: DataForm,
}

/// The kind of a file's chunk table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataForm {
    /// Consecutive chunks, as few as possible. In nearly all cases this is one chunk.
    Consecutive,
    /// Runs at any locations, in [`Files::pieces`](super::files::FileTable::pieces) at this index.
    Pieces(u32),
}
