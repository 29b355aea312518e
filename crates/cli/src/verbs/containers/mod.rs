//! Verbs on containers, and the options that they share.

pub(crate) mod access;
pub(crate) mod bundle;
pub(crate) mod changes;
pub(crate) mod commit;
pub(crate) mod container_options;
pub(crate) mod create;
pub(crate) mod exec;
pub(crate) mod logs;
pub(crate) mod machine;
pub(crate) mod named_items;
pub(crate) mod networks;
pub(crate) mod ps;
pub(crate) mod restart;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod security;
pub(crate) mod snapshots;
pub(crate) mod start;
pub(crate) mod stop;
#[cfg(feature = "serve")]
pub(crate) mod trace;
pub(crate) mod volumes;
pub(crate) mod wait;
