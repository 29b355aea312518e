//! Networks of containers.

pub(crate) mod connect;
