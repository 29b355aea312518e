//! Tests that need root and a real kernel. Each test has its own mount namespace, so no mount can be left behind. A
//! test that cannot run prints `SKIPPED:` and the reason.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which clippy takes for more")]

// The name that the other crates use.
extern crate quire_kernel as kernel;

mod death;
mod features;
mod fuse;
mod layers;
mod lease;
mod loopdev;
mod mounts;
mod precontent;
mod process;
mod seal;
mod share;
mod stage;
mod timing;
