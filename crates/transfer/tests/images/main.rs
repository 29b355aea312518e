//! Images that come from files and registries into stores of their own, and go out again.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod build;
mod export;
mod home;
mod import;
mod lazy;
#[cfg(feature = "registry")]
mod registry;
