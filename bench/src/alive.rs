//! Memory of each of many containers that run at once, and whether they delay the start of the next one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::mount::{UnmountFlags, unmount};

use super::density::{measure, nanoseconds, percentile};
use super::measure::drop_caches;
use super::report::{Sizes, Unit};
use super::run::{Runtime, hide_cgroup2, quire_run, show_cgroup2};
use super::writable::overlay;
use crate::Context;
use rig::process::{line, quiet};

/// Number of containers that run at once.
pub(super) const ALIVE: usize = 500;

/// Number of timed starts before the containers run, and again while they run.
const STARTS: usize = 60;

/// The command that each container runs.
const SLEEP: [&str; 2] = ["sleep", "100000"];

/// The inputs that all ways share.
pub(super) struct Setting<'a> {
    pub(super) context: &'a Context<'a>,
    pub(super) store: &'a Path,
    pub(super) runtime: &'a Runtime,
    /// The unpacked image.
    pub(super) folder: &'a Path,
}

/// A way to run many containers.
enum Way {
    Quire(&'static str),
    Folder,
    Overlay,
    /// A plain process, for comparison.
    Process,
}

impl Way {
    fn name(&self) -> String {
        match self {
            Self::Quire(kind) => format!("quire run --detach, {kind}"),
            Self::Folder => String::from("crun alone, a plain folder"),
            Self::Overlay => String::from("crun alone, plain overlayfs"),
            Self::Process => String::from("a process that sleeps"),
        }
    }
}

/// The running containers or processes of a way, which are stopped on drop.
struct Alive<'a> {
    setting: &'a Setting<'a>,
    way: &'a Way,
    names: Vec<String>,
    processes: Vec<std::process::Child>,
}

impl Alive<'_> {
    fn place(&self, name: &str) -> PathBuf {
        self.setting.context.work.join("alive").join(name)
    }

    fn crun(&self) -> Command {
        let mut crun = Command::new(&self.setting.runtime.program);
        crun.arg("--root").arg(self.setting.runtime.bundle.join("state"));
        crun
    }

    fn quire(&self) -> Command {
        let mut quire = Command::new(self.setting.context.quire);
        quire.arg("--store").arg(self.setting.store).arg("--quiet");
        quire
    }

    fn start(&mut self) -> Result<()> {
        let name = format!("alive-{}", self.names.len());
        let place = self.place(&name);
        fs::create_dir_all(&place)?;
        self.names.push(name.clone());
        let runtime = self.setting.runtime;
        let mut command = match self.way {
            Way::Quire(kind) => {
                let mut run = self.quire();
                run.arg("run").arg("--runtime").arg(&runtime.program).args(["--writable", kind]);
                run.args(["--detach", "--name", &name, "image", "--"]).args(SLEEP);
                run
            }
            Way::Folder | Way::Overlay => {
                let (bundle, root) = (place.join("bundle"), place.join("root"));
                let root = match self.way {
                    Way::Overlay => {
                        overlay(self.setting.folder, &place, &root)?;
                        &*root
                    }
                    _ => self.setting.folder,
                };
                runtime.bundle_for(&bundle, root, &SLEEP)?;
                let mut crun = self.crun();
                crun.args(["run", "--detach", "--bundle"]).arg(&bundle).arg(&name);
                crun
            }
            Way::Process => {
                let mut sleep = Command::new(SLEEP[0]);
                sleep.args(&SLEEP[1..]).stdin(Stdio::null()).stdout(Stdio::null());
                self.processes.push(sleep.spawn()?);
                return Ok(());
            }
        };
        // A pipe would stay open, because the container inherits it.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let status = command.status()?;
        if !status.success() {
            bail!("{}: {status}", line(&command));
        }
        Ok(())
    }

    /// Private memory of all monitors together, in bytes.
    fn monitors(&self) -> Result<u64> {
        let Way::Quire(_) = self.way else { return Ok(0) };
        let mut sum = 0;
        for name in &self.names[1..] {
            let file = self.setting.store.join("containers").join(name).join("state.json");
            let state: serde_json::Value = serde_json::from_slice(&fs::read(file)?)?;
            sum += private(state["monitor"].as_u64().context("a state without a monitor")?)?;
        }
        Ok(sum)
    }
}

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        let told = |result: Result<String>| {
            if let Err(error) = result {
                eprintln!("containers of the bench may be left: {error:#}");
            }
        };
        for process in &mut self.processes {
            let _ended_already = process.kill();
            let _waited = process.wait();
        }
        match self.way {
            Way::Quire(_) => {
                told(quiet(self.quire().args(["rm", "--container", "--force"]).args(&self.names)));
            }
            Way::Folder | Way::Overlay => {
                for name in &self.names {
                    told(quiet(self.crun().args(["delete", "--force", name])));
                    let _not_mounted = unmount(self.place(name).join("root"), UnmountFlags::DETACH);
                }
            }
            Way::Process => {}
        }
        drop(fs::remove_dir_all(self.setting.context.work.join("alive")));
    }
}

/// Measures memory and start times, and derives the findings.
pub(super) fn alive(setting: &Setting<'_>) -> Result<(Vec<Sizes>, Vec<String>)> {
    let ways = [
        Way::Quire("memory"),
        Way::Quire("self"),
        Way::Quire("dir"),
        Way::Folder,
        Way::Overlay,
        Way::Process,
    ];
    let (mut memory, mut starts) = (Vec::new(), Vec::new());
    for way in &ways {
        let is_plain = matches!(way, Way::Folder | Way::Overlay);
        if is_plain {
            hide_cgroup2()?;
        }
        let measured = one(setting, way);
        if is_plain {
            show_cgroup2()?;
        }
        let (bytes, times) = measured.with_context(|| way.name())?;
        memory.push((way.name(), bytes));
        if let Some(times) = times {
            starts.push((way.name(), times));
        }
    }
    let kernel = |name: &str| memory.iter().find(|it| it.0.ends_with(name)).map_or(0, |it| it.1[1]);
    let (plain, process) = (kernel("a plain folder"), kernel("a process that sleeps"));
    let findings = ["memory", "self", "dir"].map(|kind| {
        let added = kernel(&format!("detach, {kind}")).saturating_sub(plain);
        format!(
            "Kernel memory that Quire adds to a container with {kind}: {} kB, its monitor included, {} kB without what a \
             process takes that only sleeps",
            added / 1000,
            added.saturating_sub(process) / 1000
        )
    });
    let sizes = vec![
        Sizes {
            title: format!("Memory of each of {ALIVE} alive at once"),
            unit: Unit::Kilobytes,
            columns: vec!["monitor", "kernel"],
            rows: memory,
        },
        Sizes {
            title: format!("One more `true`, {STARTS} runs"),
            unit: Unit::Milliseconds,
            columns: vec!["p50, none alive", "p50, 500 alive", "p99, none alive", "p99, 500 alive"],
            rows: starts,
        },
    ];
    Ok((sizes, findings.to_vec()))
}

type Measured = (Vec<u64>, Option<Vec<u64>>);

fn one(setting: &Setting<'_>, way: &Way) -> Result<Measured> {
    let mut alive = Alive { setting, way, names: Vec::new(), processes: Vec::new() };
    let before = starts(setting, way, "before")?;
    // The first container is not counted, because it pays for the memory that all of them share.
    alive.start()?;
    let memory = kernel_memory()?;
    for _ in 0..ALIVE {
        alive.start()?;
    }
    let grown = kernel_memory()?.saturating_sub(memory);
    let monitors = alive.monitors()?;
    let after = starts(setting, way, "after")?;
    let times = before.zip(after).map(|(before, after)| {
        let p50_and_p99 = [(&before, 50), (&after, 50), (&before, 99), (&after, 99)];
        p50_and_p99.map(|(times, percent)| nanoseconds(percentile(times, percent))).to_vec()
    });
    let count = u64::try_from(ALIVE)?;
    Ok((vec![monitors / count, grown / count], times))
}

/// Durations of [`STARTS`] runs of `true`; none for plain overlayfs and for plain processes.
fn starts(setting: &Setting<'_>, way: &Way, when: &str) -> Result<Option<Vec<Duration>>> {
    let Setting { context, store, runtime, folder } = setting;
    let bundle = context.work.join(format!("starts-{when}"));
    let times = match way {
        Way::Quire(kind) => {
            measure(&|_| quire_run(context, store, kind, &runtime.program), STARTS, 1)?
        }
        Way::Folder => {
            runtime.bundle_for(&bundle, folder, &["true"])?;
            let command = |number| {
                let mut crun = Command::new(&runtime.program);
                crun.arg("--root").arg(runtime.bundle.join("state"));
                crun.args(["run", "--bundle"]).arg(&bundle).arg(format!("{when}-{number}"));
                crun
            };
            measure(&command, STARTS, 1)?
        }
        Way::Overlay | Way::Process => return Ok(None),
    };
    Ok(Some(times))
}

/// Sums the values of the named lines of a file of `Name: NUMBER kB` lines, in bytes.
fn sum(path: &str, names: &[&str]) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let mut sum = 0;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next().is_some_and(|it| names.contains(&it.trim_end_matches(':'))) {
            sum += words.next().context("a line without a number")?.parse::<u64>()? * 1024;
        }
    }
    Ok(sum)
}

/// Kernel memory in bytes, after the droppable caches were dropped.
fn kernel_memory() -> Result<u64> {
    for _ in 0..3 {
        drop_caches()?;
        // The kernel frees some of it with a delay.
        std::thread::sleep(Duration::from_millis(200));
    }
    sum("/proc/meminfo", &["Slab", "KernelStack", "PageTables", "Percpu"])
}

fn private(pid: u64) -> Result<u64> {
    sum(&format!("/proc/{pid}/smaps_rollup"), &["Private_Clean", "Private_Dirty"])
}
