//! Images as file systems on FUSE: for users who may not have the kernel read an image.
//!
//! [`FileTree`] is the core: a request goes in, and a reply comes out. It holds no file numbers and counts nothing, so a server
//! that dies is followed by another one, which knows as much. `session` takes requests and replies to them, and
//! `holder` has the connection besides, and starts the next server. Every byte is compared with a digest first.

pub mod fusermount;
mod open;
mod server;
mod session;
mod start;
mod supervisor;
mod tree;
mod xattr_layer;

pub use open::{OpenTreeError, StoreData, StoreTree, open};
pub use server::{FuseServer, check_device};
pub use start::{Mounts, StartError, start};
pub use tree::{AnswerMemory, FileData, FileTree, FuseAnswer, FuseView};
pub use xattr_layer::{ApartError, set_apart};
