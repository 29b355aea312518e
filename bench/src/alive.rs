//! Memory of each of many containers that run at once, and whether they delay the start of the next one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::mount::{UnmountFlags, unmount};

use super::command::{cmd, more};
use super::density::{measure, percentile, without_cgroup2};
use super::measure::{drop_caches, nanoseconds};
use super::proc::bytes;
use super::report::{Sizes, Unit};
use super::run::{KINDS, Runtime, quire_run};
use super::writable::overlay;
use crate::Context;
use rig::process::{quiet, shown};

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

    fn quire(&self) -> Command {
        let Setting { context: Context { quire, .. }, store, .. } = self.setting;
        cmd!("{quire} --store {store} --quiet")
    }

    fn start(&mut self) -> Result<()> {
        let name = &format!("alive-{}", self.names.len());
        let place = self.place(name);
        fs::create_dir_all(&place)?;
        self.names.push(name.clone());
        let Setting { runtime, folder, .. } = self.setting;
        let mut command = match self.way {
            Way::Quire(kind) => {
                let (runtime, run) = (&runtime.program, self.quire());
                let run = more!(run, "run --runtime {runtime} --writable {kind} --detach");
                more!(run, "--name {name} image -- {SLEEP...}")
            }
            Way::Folder | Way::Overlay => {
                let (bundle, root) = (place.join("bundle"), place.join("root"));
                let root = match self.way {
                    Way::Overlay => {
                        overlay(folder, &place, &root)?;
                        &*root
                    }
                    _ => folder,
                };
                runtime.bundle_for(&bundle, root, &SLEEP)?;
                more!(runtime.command(), "run --detach --bundle {bundle} {name}")
            }
            Way::Process => {
                let mut sleep = cmd!(SLEEP[0], ..&SLEEP[1..]);
                sleep.stdin(Stdio::null()).stdout(Stdio::null());
                self.processes.push(sleep.spawn()?);
                return Ok(());
            }
        };
        // A pipe would stay open, because the container inherits it.
        shown(command.stdin(Stdio::null()).stdout(Stdio::null()))
    }

    /// Private memory of all monitors together, in bytes.
    fn monitors(&self) -> Result<u64> {
        let Way::Quire(_) = self.way else { return Ok(0) };
        let mut sum = 0;
        for name in &self.names[1..] {
            let file = self.setting.store.join("containers").join(name).join("state.json");
            let state: serde_json::Value = serde_json::from_slice(&fs::read(file)?)?;
            let pid = state["monitor"].as_u64().context("a state without a monitor")?;
            let file = format!("/proc/{pid}/smaps_rollup");
            sum += bytes(file, &["Private_Clean", "Private_Dirty"])?;
        }
        Ok(sum)
    }
}

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        let told = |mut command: Command| {
            if let Err(error) = quiet(&mut command) {
                eprintln!("containers of the bench may be left: {error:#}");
            }
        };
        for process in &mut self.processes {
            let _ended_already = process.kill();
            let _waited = process.wait();
        }
        let names = &self.names;
        match self.way {
            Way::Quire(_) => told(more!(self.quire(), "rm --container --force {names...}")),
            Way::Folder | Way::Overlay => {
                for name in names {
                    told(more!(self.setting.runtime.command(), "delete --force {name}"));
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
    let ways = KINDS.map(Way::Quire).into_iter().chain([Way::Folder, Way::Overlay, Way::Process]);
    let (mut memory, mut starts) = (Vec::new(), Vec::new());
    for way in ways {
        let is_plain = matches!(way, Way::Folder | Way::Overlay);
        let measured = without_cgroup2(is_plain, || one(setting, &way));
        let (bytes, times) = measured.with_context(|| way.name())?;
        memory.push((way.name(), bytes));
        starts.extend(times.map(|it| (way.name(), it)));
    }
    let kernel = |name: &str| memory.iter().find(|it| it.0.ends_with(name)).map_or(0, |it| it.1[1]);
    let (plain, process) = (kernel("a plain folder"), kernel("a process that sleeps"));
    let findings = KINDS.map(|kind| {
        let added = kernel(&format!("detach, {kind}")).saturating_sub(plain);
        format!(
            "Kernel memory that Quire adds to a container with {kind}: {} kB, its monitor included, {} kB without what a \
             process takes that only sleeps",
            added / 1000,
            added.saturating_sub(process) / 1000
        )
    });
    let title = format!("Memory of each of {ALIVE} alive at once");
    let more = format!("One more `true`, {STARTS} runs");
    let columns = ["p50, none alive", "p50, 500 alive", "p99, none alive", "p99, 500 alive"];
    let sizes = vec![
        Sizes::new(title, Unit::Kilobytes, ["monitor", "kernel"], memory),
        Sizes::new(more, Unit::Milliseconds, columns, starts),
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
            measure(&|number| runtime.run(&bundle, &format!("{when}-{number}")), STARTS, 1)?
        }
        Way::Overlay | Way::Process => return Ok(None),
    };
    Ok(Some(times))
}

/// Kernel memory in bytes, after the droppable caches were dropped.
fn kernel_memory() -> Result<u64> {
    for _ in 0..3 {
        drop_caches()?;
        // The kernel frees some of it with a delay.
        std::thread::sleep(Duration::from_millis(200));
    }
    bytes("/proc/meminfo", &["Slab", "KernelStack", "PageTables", "Percpu"])
}
