//! Tests of tar layers: reading, refusals, and rebuilding from recipes.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests, which clippy does not see as tests"
)]

// The name that other crates use for this crate.
extern crate quire_image as image;

mod build;
mod describe;
mod differential;
mod property;
mod quirks;
mod recipes;
mod refused;
mod speed;
mod write;
