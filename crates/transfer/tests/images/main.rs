//! Tests images that are imported from files and registries into separate stores, and exported again.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod build;
mod closure;
mod export;
mod home;
mod import;
mod lazy;
#[cfg(feature = "registry")]
mod registry;
