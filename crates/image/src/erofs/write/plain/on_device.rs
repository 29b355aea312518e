//! Places of files on devices.

/// A file whose bytes are on devices.
#[derive(Debug, Clone, Copy)]
pub(super) struct OnDevice {
    pub(super) device: u16,
    /// In blocks of the device.
    pub(super) block: u64,
    /// By the tree.
    pub(super) size: u64,
    pub(super) form: DataForm,
}

/// What the table of chunks of a file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataForm {
    /// Chunks that follow each other, of which there are as few as can be: nearly always one.
    Consecutive,
    /// Runs that lie anywhere: [`Files::pieces`].
    Pieces(u32),
}
