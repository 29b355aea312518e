//! Verbs that talk to registries.

#[cfg(feature = "registry")]
pub(super) mod attached;
#[cfg(feature = "registry")]
pub(super) mod layout_signatures;
pub(super) mod lazy;
#[cfg(feature = "registry")]
pub(super) mod logins;
#[cfg(feature = "registry")]
pub(super) mod makers;
#[cfg(feature = "registry")]
pub(super) mod progress;
#[cfg(feature = "registry")]
mod protection;
#[cfg(feature = "registry")]
pub(super) mod registries;
#[cfg(feature = "registry")]
pub(super) mod signatures;
