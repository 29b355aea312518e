//! Runs the fuzz targets. New inputs go into the cache; useful ones are copied to `fuzz/corpus` by hand.

use std::fs;
use std::process::Command;

use anyhow::{Result, bail};

use rig::cache::Cache;
use rig::process::{find_program, repository, shown};
use rig::{Skipped, tools};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Targets to run; default: all
    targets: Vec<String>,
    /// Duration of each target in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u32,
}

impl Args {
    /// Returns arguments for all targets.
    pub(crate) fn for_seconds(seconds: u32) -> Self {
        Self { targets: Vec::new(), seconds }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let cache = Cache::open()?;
    let fuzz = repository().join("fuzz");
    let mut nightly = Command::new("cargo");
    let nightly = nightly.args(["+nightly", "--version"]).output();
    if find_program("cargo").is_none() || !nightly.is_ok_and(|it| it.status.success()) {
        bail!(Skipped(String::from("a nightly Rust, which fuzzing needs, is not installed")));
    }
    let program = tools::cargo_fuzz(&cache)?;
    let mut targets = args.targets.clone();
    if targets.is_empty() {
        for file in fs::read_dir(fuzz.join("fuzz_targets"))? {
            let name = file?.file_name().to_string_lossy().into_owned();
            targets.extend(name.strip_suffix(".rs").map(String::from));
        }
        targets.sort_unstable();
    }
    for target in targets {
        let found = cache.dir().join("fuzz").join(&target);
        fs::create_dir_all(&found)?;
        println!("== fuzz {target}, {} s", args.seconds);
        let mut command = Command::new(&program);
        command.args(["fuzz", "run", &target]).arg(&found).arg(fuzz.join("corpus").join(&target));
        command.args(["--", &format!("-max_total_time={}", args.seconds)]);
        command.args([
            "-rss_limit_mb=1024",
            "-timeout=10",
            "-max_len=65536",
            "-print_final_stats=1",
        ]);
        // cargo-fuzz calls the `cargo` of this toolchain, regardless of xtask's toolchain.
        command.env("RUSTUP_TOOLCHAIN", "nightly").env_remove("CARGO").env_remove("RUSTC");
        shown(command.current_dir(&fuzz))?;
    }
    Ok(())
}
