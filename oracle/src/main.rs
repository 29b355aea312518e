//! Differential tests: Quire's programs against ones that others wrote, on inputs that a seed generates.

mod generate;
mod mkcomposefs;
mod mutate;
pub(crate) mod random;

use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;

use crate::process::repository;
pub(crate) use generate::unescaped;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    oracle: Oracle,
}

#[derive(Debug, Subcommand)]
enum Oracle {
    /// `mkcomposefs --from-file` and `composefs-info` against the C tools of Debian sid
    Mkcomposefs(mkcomposefs::Args),
    /// Print the dump of one seed
    Dump {
        /// As the harness prints it with a difference
        seed: u64,
    },
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.oracle {
        Oracle::Mkcomposefs(args) => mkcomposefs::run(args),
        Oracle::Dump { seed } => mkcomposefs::print(*seed),
    }
}

/// The part that belongs to the tests of every change.
pub(crate) fn short() -> Result<()> {
    mkcomposefs::run(&mkcomposefs::Args::short())
}

/// Against the writer that others have in Rust, on what it can say.
pub(crate) fn with_composefs_crate() -> Result<()> {
    mkcomposefs::run(&mkcomposefs::Args::composefs_crate())
}

/// The writer of the `composefs` crate, if the oracle workspace is built: `PROGRAM DUMP IMAGE`.
pub(crate) fn composefs_crate() -> Option<PathBuf> {
    let built = repository().join("oracle/target/release/composefs-crate-oracle");
    built.is_file().then_some(built)
}
