//! Archives of several images, for docker and podman.

pub(crate) mod load;
pub(crate) mod save;
