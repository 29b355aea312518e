//! Containers from their start to their end, and the parts of them that are kept.

pub mod at_rest;
pub mod background;
pub(crate) mod causes;
pub mod cgroup;
pub mod end;
pub mod filestores;
pub mod id_allocation;
pub(crate) mod init_signals;
pub mod kept;
pub mod layer_access;
pub mod log;
pub mod lookup;
pub mod monitor;
pub mod monitor_report;
pub mod mount_staging;
pub mod prepare;
pub mod rollback;
pub mod running;
pub mod signal;
pub mod state;
pub mod terminal;
pub mod writable_layer;
