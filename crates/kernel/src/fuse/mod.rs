//! The FUSE protocol: requests, replies, and the connection that carries them. The server that takes the requests
//! decides their meaning.
//!
//! Sources: Linux `include/uapi/linux/fuse.h`, `fs/fuse/dev.c`, fuse(4). [`mount::fuse`](crate::mount::fuse) mounts.

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
