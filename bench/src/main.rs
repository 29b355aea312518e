//! Benchmarks with fixed inputs, competitors in the same run, and results that describe the machine.
//!
//! `cargo xtask bench NAME` builds and runs this program. It is a separate workspace, so that builds of Quire do not
//! compile it.
#![forbid(unsafe_code)]

mod alive;
mod cgroup;
mod command;
mod compare;
mod density;
mod derived;
mod engine;
mod events;
mod fio;
mod forks;
mod forms;
mod gvisor;
mod import;
mod index;
mod lazy;
mod machines;
mod measure;
mod metadata;
mod mkcomposefs;
mod mount;
mod mounts;
mod pagecache;
mod podman;
mod proc;
mod proxy;
mod pull;
mod push;
mod read;
mod registry;
mod removal;
mod report;
mod rootless;
mod run;
mod samples;
mod service;
mod session;
mod storing;
mod thousand;
mod tls;
mod tree;
mod updates;
mod versions;
mod walk;
mod writable;

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use clap::builder::{PossibleValue, PossibleValuesParser};
use tempfile::TempDir;

use command::run;
use report::{Machine, Report};
use rig::Skipped;
use rig::cache::Cache;
use rig::process::{is_root, repository, shown, target_dir};

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench",
    about = "Times Quire and its rivals",
    disable_version_flag = true
)]
struct Args {
    #[arg(required_unless_present = "read_ahead")]
    #[arg(value_parser = PossibleValuesParser::new(names()))]
    name: Option<String>,
    /// How often each contestant runs
    #[arg(long, default_value_t = 7)]
    runs: usize,
    /// Where the table and its numbers go instead of `docs/performance`
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Only tables whose titles begin with this, in the benches metadata, rootless, read, lazy, outages, engine, pods
    /// and compare, or rows, in the bench thousand; may be repeated
    #[arg(long, value_name = "TEXT", requires = "output")]
    only: Vec<String>,
    /// Another build of Quire, for the bench that compares two
    #[arg(long, value_name = "PROGRAM", requires = "before_name")]
    before: Option<PathBuf>,
    /// Description of that build, for the page
    #[arg(long, value_name = "TEXT", requires = "before")]
    before_name: Option<String>,
    /// Ask the kernel to read a file ahead, as `--warm metadata` does; some benches time this
    #[arg(long, value_name = "FILE", hide = true)]
    read_ahead: Option<PathBuf>,
}

/// All benches, and the picture of their figures.
const ALL: &str = "all";
const FIGURES: &str = "figures";

/// Name, description and function of each bench.
#[rustfmt::skip]
const BENCHES: [(&str, &str, Bench); 29] = [
    ("mkcomposefs", "A dump of 64,246 entries into an image", mkcomposefs::bench),
    ("import", "An OCI layout of two gzip layers into a store; 3 GB of disk for each run", import::bench),
    ("storing", "An image's import and removal, in every form; 6 GB of disk for each run", storing::bench),
    ("pull", "An image from a registry on loopback into a store; 3 GB of disk for each run", pull::bench),
    ("push", "A committed image, and an unchanged one, to a registry on loopback that has their base", push::bench),
    ("versions", "Consecutive versions of an application from a registry on loopback", versions::bench),
    ("updates", "The next version of a Debian image by the recipes of its index, from a near or distant registry",
     updates::bench),
    ("mount", "Mount and unmount, whole processes", mount::bench),
    ("run", "A container that runs `true`", run::bench),
    ("rootless", "Images of users who are not root: listings, reads, starts, memory", rootless::bench),
    ("derived", "Twenty images of one base, each with a container: time, disk, page cache", derived::bench),
    ("forks", "Snapshots, forks and rollbacks of a container that has written 64 MiB or 4 GiB; 16 GB of disk", forks::bench),
    ("density", "Many containers: one after the other, eight at a time, and many alive at once", density::bench),
    ("thousand", "A thousand containers of ten images: memory, starts, `ps`, removal, remains", thousand::bench),
    ("writable", "Work in containers whose changes go to different places, and their removal", writable::bench),
    ("gvisor", "The same work in crun and in gVisor, by the root that it gets; needs runsc of the inputs", gvisor::bench),
    ("pagecache", "Memory for two images a minor version apart, in a virtual machine with the newest kernel",
     pagecache::bench),
    ("machines",
     "One image for eight virtual machines in QEMU without KVM: time, disk space, page cache; 7 GB of memory, half an hour",
     machines::bench),
    ("walk", "`ls -lR`, cold and warm", walk::bench),
    ("metadata", "Names and inodes of two large trees in every form: sizes, listings, memory; 20 GB of disk, an hour",
     metadata::bench),
    ("read", "Reads by fio and by a compiler on every form of an image, and on ext4", read::bench),
    ("events", "Number of requests for parts of a device in one cold start", events::bench),
    ("lazy", "From an empty store to the end of a program, out of a near or distant registry", lazy::bench),
    ("outages", "Reads from lazy mounts during faults: correct data, an error, or wrong data", lazy::outages),
    ("served", "Costs of the service of lazy mounts: for each request and mount, when it dies, and when it is replaced",
     lazy::served),
    ("engine", "Images in containerd, with its snapshotters, with Quire, and with third-party ones; an hour",
     engine::bench),
    ("pods", "Pods in containerd with the same snapshotters; needs crictl of the inputs", engine::pods),
    ("index", "An import with the index of its layers beside one without, and the bytes of indexes", index::bench),
    ("compare", "Comparison with another build of Quire; needs --before", compare::bench),
];

fn names() -> impl Iterator<Item = PossibleValue> {
    let figures = "Only make `overview.svg` and `figures.md` in `docs/performance` again from the recorded figures, as every bench does";
    let others = [(ALL, "All benches"), (FIGURES, figures)];
    let benches = BENCHES.iter().map(|(name, about, _)| (*name, *about));
    others.into_iter().chain(benches).map(|(name, about)| PossibleValue::new(name).help(about))
}

type Bench = fn(&Context<'_>) -> Result<Report>;

/// The settings of every bench.
struct Context<'a> {
    cache: &'a Cache,
    quire: &'a Path,
    /// An initially empty folder on the cache's file system, removed at the end.
    work: &'a Path,
    runs: usize,
    /// Prefixes of the titles of the wanted tables; empty for all tables.
    only: &'a [String],
    /// Another build of Quire, and its description.
    before: Option<(&'a Path, &'a str)>,
}

impl Context<'_> {
    /// Whether a table with this title, or with a title that begins with it, is wanted.
    fn wants(&self, title: &str) -> bool {
        let is_this = |it: &String| title.starts_with(it.as_str()) || it.starts_with(title);
        self.only.is_empty() || self.only.iter().any(is_this)
    }

    /// Moves a folder of `work`, if it exists, out of the way of the next run. The folder is removed after the bench,
    /// because a removal now would slow down the next run: see [`FORGOTTEN`].
    fn set_aside(&self, name: impl AsRef<Path>) -> Result<()> {
        let name = name.as_ref();
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        match fs::rename(self.work.join(name), self.work.join(format!("aside-{number}"))) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            result => {
                result.with_context(|| format!("cannot move {} out of the way", name.display()))
            }
        }
    }

    /// Removes the folders that were moved away once they take more than `most` bytes of the disk, and waits until
    /// the removal no longer slows down other work.
    fn make_room(&self, most: u64) -> Result<()> {
        let aside: Vec<_> = fs::read_dir(self.work)?.collect::<Result<_, _>>()?;
        let aside =
            aside.iter().filter(|it| it.file_name().as_encoded_bytes().starts_with(b"aside-"));
        let aside: Vec<_> = aside.map(fs::DirEntry::path).collect();
        if aside.is_empty() {
            return Ok(());
        }
        let said = run!("du --summarize --total --block-size=1 --", ..&aside)?;
        let total = said.lines().last().and_then(|it| it.split('\t').next()?.parse().ok());
        if total.unwrap_or(0) <= most {
            return Ok(());
        }
        aside.iter().try_for_each(|it| rig::cache::remove(it))?;
        rustix::fs::sync();
        std::thread::sleep(FORGOTTEN);
        Ok(())
    }
}

/// Time for which ext4 does not reuse a removed inode's number, once the removal is on the disk. Until then, ext4
/// checks each such inode whenever it allocates one. Source: Linux `fs/ext4/ialloc.c`, `recently_deleted`,
/// `RECENTCY_MIN`.
const FORGOTTEN: Duration = Duration::from_secs(61);

fn main() -> ExitCode {
    rig::exit("bench", run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    if let Some(file) = &args.read_ahead {
        let file = fs::File::open(file)?;
        return Ok(kernel::cache::read_ahead(file.as_fd(), &(0..file.metadata()?.len()))?);
    }
    let figures = repository().join("docs/performance");
    if args.name.as_deref() == Some(FIGURES) {
        return rig::figures::write(&figures);
    }
    let cache = Cache::open()?;
    let inside = session::inside()?;
    let quire = target_dir()?.join("release/quire");
    if inside.is_none() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--release", "--package", "quire-cli"]).current_dir(repository());
        shown(&mut cargo)?;
        if is_root() {
            return session::again(&cache, &quire);
        }
    }
    let folder = inside.as_deref().unwrap_or_else(|| cache.dir());
    // podman needs short paths.
    let (prefix, random) = if inside.is_some() { ("", 2) } else { ("bench-", 6) };
    let output = args.output.clone().unwrap_or_else(|| figures.clone());
    let machine = Machine::new(cache.dir())?;
    let is_all = args.name.as_deref() == Some(ALL);
    let mut is_first = true;
    for (name, _, bench) in BENCHES {
        if !is_all && args.name.as_deref() != Some(name) {
            continue;
        }
        if !std::mem::take(&mut is_first) {
            rustix::fs::sync();
            std::thread::sleep(FORGOTTEN);
        }
        let work =
            Work(tempfile::Builder::new().prefix(prefix).rand_bytes(random).tempdir_in(folder)?);
        let (work, runs, only) = (work.0.path(), args.runs, &*args.only);
        let before = args.before.as_deref().zip(args.before_name.as_deref());
        let context = Context { cache: &cache, quire: &quire, work, runs, only, before };
        match bench(&context) {
            Ok(report) => {
                println!("{}", report.write(&output, &machine)?);
                if args.output.is_none() {
                    rig::figures::write(&figures)?;
                }
            }
            Err(error) if is_all && error.is::<Skipped>() => println!("{error}"),
            Err(error) => return Err(error).with_context(|| format!("bench {name}")),
        }
    }
    Ok(())
}

/// The bench's folder. Mounts that a failed bench left below it are detached on drop, so that it can be removed.
struct Work(TempDir);

impl Drop for Work {
    fn drop(&mut self) {
        if let Err(error) = mounts::detach_all(self.0.path()) {
            eprintln!("cannot unmount the mounts below {}: {error}", self.0.path().display());
        }
    }
}

/// A rival's program, or the reason why this machine cannot have it.
fn rival<T>(built: Result<T>) -> Result<Result<T, Skipped>> {
    match built {
        Ok(program) => Ok(Ok(program)),
        Err(error) => Ok(Err(error.downcast()?)),
    }
}

/// Links Quire's program under the name of a composefs tool.
fn named(context: &Context<'_>, tool: &str) -> Result<PathBuf> {
    let path = context.work.join(tool);
    symlink(context.quire, &path)?;
    Ok(path)
}

/// The first word in a program's output that looks like a version.
fn version(program: &str) -> String {
    let text = run!("{program} --version").unwrap_or_default();
    let mut words = text.split_whitespace().map(|it| it.trim_start_matches('v'));
    let version = words.find(|it| it.starts_with(|it: char| it.is_ascii_digit()));
    version.unwrap_or("?").to_owned()
}
