//! Images whose data is in devices, for EROFS by itself: packing objects, and writing such images.
//!
//! `docs/decisions/0010-native.md` says why, `docs/format/object-store.md` what a device is.

mod pack;
mod waiting;
mod write;

pub use pack::PackError;
pub(crate) use pack::{Packed, Packer};
pub use write::NativeError;
pub(crate) use write::{Places, Written, copy, write};

/// What a packed device leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dedup {
    /// All that is in any packed device of the store: least on the disk. An image's bytes then depend on what the store had.
    #[default]
    Store,
    /// What is in the same layer already. An image's bytes then depend on its layers alone.
    Layer,
}
