//! Benches: fixed inputs, rivals in the same run, and results that say what they were measured on.

mod cgroup;
mod density;
mod import;
mod measure;
mod mkcomposefs;
mod mount;
mod proxy;
mod pull;
mod report;
mod run;
mod versions;
mod walk;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use rustix::mount::{UnmountFlags, unmount};
use tempfile::TempDir;

use crate::Skipped;
use crate::cache::Cache;
use crate::process::{is_root, need, quiet, repository, shown, target_dir};
use report::{Machine, Report};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    name: Name,
    /// How often each contestant runs
    #[arg(long, default_value_t = 7)]
    runs: usize,
    /// Where the table and its numbers go instead of `docs/performance`
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// All of them
    All,
    /// A dump of 64,246 entries into an image
    Mkcomposefs,
    /// An OCI layout of two gzip layers into a store
    Import,
    /// An image from a registry on loopback into a store
    Pull,
    /// Consecutive versions of an application from a registry on loopback
    Versions,
    /// Mount and unmount, whole processes
    Mount,
    /// A container that runs `true`
    Run,
    /// Many containers: one after the other, eight at a time, and many alive at once
    Density,
    /// `ls -lR`, cold and warm
    Walk,
}

type Bench = fn(&Context<'_>) -> Result<Report>;

/// What every bench is given.
struct Context<'a> {
    cache: &'a Cache,
    quire: &'a Path,
    /// An empty folder on the cache's file system, removed at the end.
    work: &'a Path,
    runs: usize,
}

/// Set for the second life of this process, in the mount namespace of its own.
const INSIDE: &str = "QUIRE_BENCH_INSIDE";

pub(crate) fn run(args: &Args) -> Result<()> {
    if std::env::var_os(INSIDE).is_none() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--release", "--package", "quire-cli"]).current_dir(repository());
        shown(&mut cargo)?;
    }
    if is_root() && std::env::var_os(INSIDE).is_none() {
        // Whatever a contestant mounts is gone when the bench ends, however it ends.
        let mut again = Command::new(need("unshare")?);
        again.args(["--mount", "--propagation=private"]).arg(std::env::current_exe()?);
        let error = again.args(std::env::args_os().skip(1)).env(INSIDE, "1").exec();
        return Err(error).context("cannot start unshare");
    }
    let cache = Cache::open()?;
    let benches: [(Name, Bench); 8] = [
        (Name::Mkcomposefs, mkcomposefs::bench),
        (Name::Import, import::bench),
        (Name::Pull, pull::bench),
        (Name::Versions, versions::bench),
        (Name::Mount, mount::bench),
        (Name::Run, run::bench),
        (Name::Density, density::bench),
        (Name::Walk, walk::bench),
    ];
    let output = args.output.clone().unwrap_or_else(|| repository().join("docs/performance"));
    let quire = target_dir()?.join("release/quire");
    let machine = Machine::new(cache.dir())?;
    for (name, bench) in benches {
        if args.name != Name::All && args.name != name {
            continue;
        }
        let work = Work(tempfile::Builder::new().prefix("bench-").tempdir_in(cache.dir())?);
        let context =
            Context { cache: &cache, quire: &quire, work: work.0.path(), runs: args.runs };
        match bench(&context) {
            Ok(report) => println!("{}", report.write(&output, &machine)?),
            Err(error) if args.name == Name::All && error.is::<Skipped>() => println!("{error}"),
            Err(error) => return Err(error).with_context(|| format!("bench {name:?}")),
        }
    }
    Ok(())
}

/// The bench's folder; what is still mounted below it when the bench fails must not keep it from being removed.
struct Work(TempDir);

impl Drop for Work {
    fn drop(&mut self) {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let targets = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        let ours: Vec<_> = targets.filter(|it| Path::new(it).starts_with(self.0.path())).collect();
        for target in ours.iter().rev() {
            if let Err(error) = unmount(*target, UnmountFlags::DETACH) {
                eprintln!("cannot unmount {target}: {error}");
            }
        }
    }
}

/// Our binary under the name of a composefs tool.
fn named(context: &Context<'_>, tool: &str) -> Result<PathBuf> {
    let path = context.work.join(tool);
    symlink(context.quire, &path)?;
    Ok(path)
}

/// The first thing that looks like a version in what a rival says of itself.
fn version(program: &str, option: &str) -> Result<String> {
    let text = quiet(Command::new(program).arg(option))?;
    let mut words = text.split_whitespace().map(|it| it.trim_start_matches('v'));
    let version = words.find(|it| it.starts_with(|it: char| it.is_ascii_digit()));
    Ok(version.unwrap_or("?").to_owned())
}
