//! Lends images to users who may not have the kernel read one (decision 26): a client sends an image's bytes and its user
//! namespace, and gets a mount of a copy that this service has written.
//!
//! `service` listens, and has a process speak with each client: `connection`, by the messages of `wire`. `users` says who may
//! ask, and how much; `namespace` looks at user namespaces, `writer` makes the copy in a process without rights, and `images`
//! keeps copies as long as somebody has them mounted. `client` asks, and `lender` does
//! so for containers.

mod client;
mod connection;
mod images;
mod lender;
mod namespace;
mod prepare;
mod service;
mod users;
mod wire;
mod writer;

pub use client::{MountClient, MountClientError};
pub use connection::speak_with_client;
pub use lender::{MountLender, access_to_mounts};
pub use prepare::{PrepareError, open_copies, unused_id};
pub use service::{MountServiceError, MountSurroundings, listen_for_mounts, serve_mounts};
pub use users::{MountLimits, MountPolicy};
pub use wire::{INTERFACE, LendAsk, MountsAsk, MountsError, read_ask};
pub use writer::{exercise_copy, write_for_user};

/// Where the service listens, unless something else is set.
pub const MOUNTS_SOCKET: &str = "/run/quire/mounts.sock";
