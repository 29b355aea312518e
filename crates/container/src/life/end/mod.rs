//! Stops and removes containers.

pub mod ended;
pub mod reap;
pub mod stop;
pub mod teardown;
