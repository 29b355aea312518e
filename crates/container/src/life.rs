//! Containers from their start to their end, and the parts of them that are kept.

pub mod background;
pub(crate) mod causes;
pub mod cgroups;
pub mod delegation;
pub mod ended;
pub mod filestores;
mod hierarchy;
pub mod id_allocation;
pub(crate) mod init_signals;
pub mod layer_access;
pub mod log;
pub mod lookup;
pub mod memory;
pub mod monitor;
pub mod monitor_report;
pub mod mount_staging;
pub mod pause;
pub mod prepare;
pub mod reap;
pub mod running;
pub mod signal;
pub mod state;
pub mod stop;
pub mod teardown;
pub mod terminal;
pub mod writable_layer;
