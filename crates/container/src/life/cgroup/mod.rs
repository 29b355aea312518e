//! Cgroups of containers: paths, delegation, limits and freezing.

pub mod cgroups;
pub mod delegation;
pub(super) mod hierarchy;
pub mod memory;
pub mod pause;
