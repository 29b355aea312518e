//! Differential tests: compares Quire's programs with those of others, on inputs that a seed generates.
//!
//! `cargo xtask oracle` builds this program and calls it.
#![forbid(unsafe_code)]

mod composefs_ids;
mod generate;
mod messages;
mod mkcomposefs;
mod mutate;

use std::process::ExitCode;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(
    bin_name = "cargo xtask oracle",
    about = "Compares Quire's programs with those of others"
)]
enum Oracle {
    /// Compare `mkcomposefs --from-file` and `composefs-info` with the C tools of Debian sid
    Mkcomposefs(mkcomposefs::Args),
    /// Compare the ids of `quire show --composefs-id` with those of composefs-rs's `cfsctl`
    ComposefsIds(composefs_ids::Args),
    /// Compare the code for containerd's messages with the output of its generators for the `.proto` files
    Messages(messages::Args),
    /// Print the dump of one seed
    Dump {
        /// Seed, which the harness prints with a difference
        seed: u64,
    },
}

fn main() -> ExitCode {
    let result = match Oracle::parse() {
        Oracle::Mkcomposefs(args) => mkcomposefs::run(&args),
        Oracle::ComposefsIds(args) => composefs_ids::run(&args),
        Oracle::Messages(args) => messages::run(&args),
        Oracle::Dump { seed } => mkcomposefs::print(seed),
    };
    rig::exit("oracle", result)
}
