//! Differential tests: Quire's programs against ones that others wrote, on inputs that a seed generates.
//!
//! `cargo xtask oracle` builds this program and calls it.
#![forbid(unsafe_code)]

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
    /// `mkcomposefs --from-file` and `composefs-info` against the C tools of Debian sid
    Mkcomposefs(mkcomposefs::Args),
    /// The code for containerd's messages against what its generators make of the `.proto` files
    Messages(messages::Args),
    /// Print the dump of one seed
    Dump {
        /// As the harness prints it with a difference
        seed: u64,
    },
}

fn main() -> ExitCode {
    let result = match Oracle::parse() {
        Oracle::Mkcomposefs(args) => mkcomposefs::run(&args),
        Oracle::Messages(args) => messages::run(&args),
        Oracle::Dump { seed } => mkcomposefs::print(seed),
    };
    rig::exit("oracle", result)
}
