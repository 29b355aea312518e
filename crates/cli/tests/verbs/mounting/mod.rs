//! Mounts of images.

pub(super) mod acls;
pub(super) mod direct;
pub(super) mod memory;
pub(super) mod mount_helper;
pub(super) mod mounts;
pub(super) mod pages;
#[cfg(feature = "serve")]
pub(super) mod storage;
pub(super) mod verity;
