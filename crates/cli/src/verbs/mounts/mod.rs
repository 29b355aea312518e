//! Verbs on mounts.

pub(crate) mod mount;
pub(crate) mod mount_helper;
pub(crate) mod mount_spec;
pub(crate) mod own_mounts;
pub(crate) mod umount;
