//! Quire's services, and engines that use them.

#[cfg(feature = "serve")]
pub(super) mod engines;
#[cfg(feature = "serve")]
pub(super) mod fuse_devices;
#[cfg(feature = "serve")]
mod index_start;
#[cfg(feature = "serve")]
pub(super) mod peers;
#[cfg(feature = "serve")]
pub(super) mod served;
#[cfg(feature = "serve")]
pub(super) mod units;
#[cfg(feature = "serve")]
pub(super) mod unproven;
#[cfg(feature = "serve")]
pub(super) mod varlink;
#[cfg(feature = "serve")]
pub(super) mod versions;
