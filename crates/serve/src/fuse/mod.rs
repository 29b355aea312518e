//! Serves images by FUSE, for users who may not mount EROFS in the kernel.
//!
//! [`FileTree`] is the core and turns a request into a reply. It keeps no file handles and no counts, so a new server
//! can replace one that died. `session` takes requests and sends replies. `holder` also keeps the connection open and
//! starts the next server. Every byte is compared with a digest before it is sent.

pub mod fusermount;
mod open;
mod places;
mod server;
mod session;
mod start;
mod supervisor;
mod tree;
mod xattr_layer;

pub use open::{OpenTreeError, StoreData, StoreTree, open};
pub use server::{FuseServer, NoFuseDevice, check_device};
pub use start::{Mounts, StartError, start};
pub use tree::{AnswerMemory, FileData, FileTree, FuseAnswer, FuseView};
pub use xattr_layer::{ApartError, set_apart};
