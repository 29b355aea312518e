//! Networks of containers: the verb `network`, and the options of containers that join networks.

pub(crate) mod connect;
pub(crate) mod join;
pub(crate) mod verb;
