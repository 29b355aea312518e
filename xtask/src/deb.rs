//! `cargo xtask deb`: a package for Debian and its relatives, of what `install` installs.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use rig::cache::{Cache, remove};
use rig::process::{repository, shown};
use rig::tools;

use crate::install;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The folder of the package
    #[arg(long, default_value = "target/debian")]
    output: PathBuf,
    /// Build without optimization, to try the package
    #[arg(long)]
    debug: bool,
}

/// Where `crates/cli/Cargo.toml` has it.
const STAGE: &str = "target/deb";

pub(crate) fn run(args: &Args) -> Result<()> {
    let cargo_deb = tools::cargo_deb(&Cache::open()?)?;
    let stage = repository().join(STAGE);
    remove(&stage)?;
    install::install(&install::Args {
        prefix: "/usr".into(),
        destination: stage.clone(),
        composefs: false,
        debug: args.debug,
    })?;
    fs::create_dir_all(&args.output)
        .with_context(|| format!("cannot make {}", args.output.display()))?;
    let mut command = Command::new(cargo_deb);
    command.args(["--no-build", "--no-strip", "--manifest-path", "crates/cli/Cargo.toml"]);
    command.arg("--output").arg(std::path::absolute(&args.output)?).current_dir(repository());
    shown(&mut command)
}
