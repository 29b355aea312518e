//! Writes images whose data is in devices, for EROFS without overlayfs, and packs objects into such devices.
//!
//! The reasons are in `docs/decisions/0010-native.md`, and the format of devices is in `docs/format/object-store.md`.

mod pack;
mod waiting;
mod write;

pub use pack::PackError;
pub(crate) use pack::{Packed, Packer};
pub use write::NativeError;
pub(crate) use write::{Places, Written, copy, write, write_to};

/// Scope in which a packed device omits duplicate data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dedup {
    /// Omits data that is in any packed device of the store. This takes the least space, but the bytes of an image
    /// depend on the store.
    Store,
    /// Omits only data that the same import has packed already. The bytes of an image depend only on its layers.
    Import,
}
