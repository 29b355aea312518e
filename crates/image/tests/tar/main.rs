//! Tar layers: what is read from them, what is refused, and that they come back from their recipes.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests, which clippy does not see as tests"
)]

// The name that other crates know it by.
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
