//! The rights of a container.

pub(super) mod confined;
pub(super) mod escapes;
pub(super) mod gvisor;
pub(super) mod hostile;
pub(super) mod labels;
pub(super) mod rights;
pub(super) mod userns;
