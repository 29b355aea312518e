//! Containers on this kernel, with the runtimes that are here. Needs root.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod fixture;
mod life;
mod run;
