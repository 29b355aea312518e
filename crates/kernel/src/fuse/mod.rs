//! FUSE as the kernel speaks it: requests, replies, and the descriptor that they go through. A server is whoever takes
//! requests; it decides what they mean.
//!
//! Sources: Linux `include/uapi/linux/fuse.h`, `fs/fuse/dev.c`, fuse(4). Mounts are made by [`mount::fuse`](crate::mount::fuse).

mod connection;
mod layout;
mod reply;
mod request;

pub use connection::{FuseConnection, FuseError, RequestBuffer, Resent, TakenRequest};
pub use reply::{
    Caching, DirectoryReply, ListedEntry, NodeAttributes, READ_MAX, ReplyBody, Served,
};
pub use request::{
    FileHandle, Forgotten, FuseOperation, FuseRequest, FuseRequestError, InitOffer, NodeNumber,
    Requester, Unique,
};
