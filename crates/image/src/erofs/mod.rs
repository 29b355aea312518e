//! EROFS images: the on-disk layout, the writer and the reader.
//!
//! The layout is the kernel's; what Quire makes of it is written in `docs/format/erofs-profile.md`.

pub mod layout;
pub mod read;
mod write;

pub use write::{Profile, Summary, Version, Versions, WriteError, write};
