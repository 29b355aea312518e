//! Root file systems: an image of the store, its objects or data blobs, and perhaps a writable layer.

mod assemble;
pub mod filestore;
pub mod headroom;
pub mod share;
pub(crate) mod upper;

pub use assemble::{Checked, Data, Layers, Root, RootError, Shape, Space, assemble};
pub use upper::{Doomed, UpperError, Writable};
