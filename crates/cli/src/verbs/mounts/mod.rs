//! Verbs on mounts.

pub(crate) mod mount;
pub(crate) mod mount_helper;
pub(crate) mod own_mounts;
pub(crate) mod specification;
pub(crate) mod umount;
