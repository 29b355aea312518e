//! EROFS images: the on-disk layout, the writer and the reader.
//!
//! The layout is the kernel's; `docs/format/erofs-profile.md` describes how Quire uses it.

pub mod layout;
pub mod read;
mod write;

pub use write::{
    Contents, DEVICES_MAX, DeviceFile, Flavor, Native, Piece, Placed, Profile, Run, Standalone,
    Stored, Summary, Version, Versions, WriteError, write, write_native, write_with,
};
