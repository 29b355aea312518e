//! Verbs that talk to registries.

#[cfg(feature = "registry")]
pub(crate) mod credentials;
#[cfg(feature = "registry")]
pub(crate) mod image_verifier;
#[cfg(feature = "registry")]
pub(crate) mod login;
#[cfg(feature = "registry")]
pub(crate) mod logout;
#[cfg(feature = "registry")]
pub(crate) mod pull;
#[cfg(feature = "registry")]
pub(crate) mod push;
#[cfg(feature = "registry")]
pub(crate) mod referrers;
