//! Containers from their start to their end, and the parts of them that are kept.

pub(crate) mod causes;
pub mod cgroups;
pub mod claim;
pub mod delegation;
pub mod detached;
pub mod ended;
pub mod filestores;
mod hierarchy;
pub mod kept;
pub mod known;
pub mod log;
pub mod look;
pub mod memory;
pub mod monitor;
pub mod pause;
pub mod prepare;
pub mod reap;
pub mod running;
pub mod signal;
pub(crate) mod spared;
pub mod stage;
pub mod state;
pub mod stop;
pub mod teardown;
pub mod terminal;
pub mod told;
