//! EROFS images: the on-disk layout, the writer and the reader.
//!
//! The layout is the kernel's; what Quire makes of it is written in `docs/format/erofs-profile.md`.

pub mod layout;
pub mod read;
mod write;

pub use write::{
    Contents, Flavor, Piece, Profile, Standalone, Summary, Version, Versions, WriteError, write,
    write_with,
};
