//! Mounts images for users who may not mount EROFS in the kernel (decision 26): a client sends an image's bytes and
//! its user namespace, and gets a mount of a copy that this service has written.
//!
//! `service` accepts connections and starts a process for each client: `connection`, which uses the messages of
//! `wire`. `users` contains the policy and the limits of users; `namespace` checks user namespaces, `writer` makes the
//! copy in a process without privileges, and `images` keeps copies while they are mounted. `client` is the client of
//! the service, and `lender` uses it for containers.

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
pub use service::{MountResources, MountServiceError, listen_for_mounts, serve_mounts};
pub use users::{MountLimits, MountPolicy};
pub use wire::{INTERFACE, LendAsk, MountsAsk, MountsError, read_ask};
pub use writer::{exercise_copy, write_for_user};

/// Default socket of the service.
pub const MOUNTS_SOCKET: &str = "/run/quire/mounts.sock";
