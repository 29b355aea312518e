//! Stops and removes containers.

pub mod ended;
pub mod own_volumes;
pub mod reap;
pub mod stop;
pub mod teardown;
