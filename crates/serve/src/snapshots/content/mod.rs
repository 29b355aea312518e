//! The content store of an engine: the service reads blobs from it, and writes new layers to it.
//!
//! The content store is another process, which may hang, lie or exit. So each of its messages has a timeout, and its
//! replies are compared with the bytes that were sent.

mod call;
mod connection;
mod read;
mod write;

pub use call::{ContentError, PATIENCE};
pub(super) use call::{ContentStore, EngineHeaders};
pub(super) use write::{ContentWriter, NewContent};
