//! Images whose data is in devices, for EROFS without overlayfs: packing objects, and writing such images.
//!
//! The reasons are in `docs/decisions/0010-native.md`, the format of devices in `docs/format/object-store.md`.

mod pack;
mod waiting;
mod write;

pub use pack::PackError;
pub(crate) use pack::{Packed, Packer};
pub use write::NativeError;
pub(crate) use write::{Places, Written, copy, write, write_to};

/// Data that a packed device leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dedup {
    /// Data that any packed device of the store has: least space, but an image's bytes depend on the store.
    #[default]
    Store,
    /// Data that the same layer has already. An image's bytes depend on its layers alone.
    Layer,
}
