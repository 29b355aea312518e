//! Transfers images between sources and the store: import, pull, export, push, convert, derive and commit. This crate
//! opens no sockets.
#![forbid(unsafe_code)]

pub mod chunked;
pub mod commit;
mod config_change;
pub mod derive;
pub mod directory_layer;
pub mod evidence;
pub mod export;
pub mod import;
pub mod lazy;
pub mod native;
pub mod progress;
#[cfg(feature = "registry")]
pub mod pull;
#[cfg(feature = "registry")]
pub mod push;
mod root_types;
#[cfg(feature = "signatures")]
pub mod signing;
mod spool;
mod stored;

pub use stored::{StoredError, StoredImage, image_of_layers, is_whole};
