//! Tests of containers on this kernel, with the runtimes of this machine. Needs root.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod fixture;
mod life;
mod restart;
mod run;
