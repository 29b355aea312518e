//! What needs root and a real kernel. Every test has a mount namespace of its own, so nothing can
//! be left mounted; a test that cannot run says `SKIPPED:` and why.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which clippy takes for more")]

// As the other crates call it.
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
