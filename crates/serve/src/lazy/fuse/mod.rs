//! Serves lazy devices as files on FUSE, whose readers wait until their bytes are downloaded (decision 19).
//!
//! A file on FUSE stands for each device, with a separate connection ([`connections`], `connect`). Each read of it is a
//! request (`requests`), which waits if bytes are missing (`waiting`) until a thread has fetched them (`fetch_pool`).

mod broken;
mod completion;
mod connect;
pub(super) mod connections;
mod devices;
mod fetch_pool;
mod requests;
mod server;
mod waiting;

pub(super) use broken::BrokenDevice;
pub use connections::{ConnectionId, FuseDeviceError};
pub(super) use server::place;
pub use server::{DeviceServer, DeviceServerError, Unread};
