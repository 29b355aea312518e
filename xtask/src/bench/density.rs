//! Many short-lived containers: what each waits for, and what each costs as long as it lives.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::Context;
use super::mount::import;
use super::report::{Report, Sizes, Unit};
use super::run::{Runtime, hide_cgroup2, quire_run, show_cgroup2};
use crate::Skipped;
use crate::inputs;
use crate::process::{find, line, quiet};

/// How many runs one after the other, how many at a time in the second part, and how many are alive at once in the third.
const SEQUENCE: usize = 1000;
const AT_ONCE: usize = 8;
const ALIVE: usize = 200;

/// One way to run `true` in a container: a fresh command each time, by a number that no other run has.
struct Way<'a> {
    name: String,
    command: Box<dyn Fn(usize) -> Command + Sync + 'a>,
    /// Whether the host's second cgroup hierarchy has to be out of sight.
    alone: bool,
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::debian_small(context.cache, false)?;
    let store = import(context, &layout)?;
    let folder = inputs::base_root(context.cache)?;
    let program = find("crun").context(Skipped(String::from("crun is not installed")))?;
    let runtime = Runtime::new(context, "crun", program, &store, &folder)?;
    let mut ways = Vec::new();
    for kind in ["memory", "self"] {
        let (store, program) = (&store, &runtime.program);
        ways.push(Way {
            name: format!("quire run, {kind}"),
            command: Box::new(move |_| quire_run(context, store, kind, program)),
            alone: false,
        });
    }
    ways.push(Way {
        name: String::from("crun alone, a plain folder"),
        command: Box::new(|number| {
            let mut crun = Command::new(&runtime.program);
            crun.arg("--root").arg(runtime.bundle.join("state")).args(["run", "--bundle"]);
            crun.arg(&runtime.bundle).arg(format!("density-{number}"));
            crun
        }),
        alone: true,
    });
    let mut sizes = vec![
        latencies("One after the other", &ways, SEQUENCE, 1)?,
        latencies("Eight at a time", &ways, SEQUENCE / 2, AT_ONCE)?,
    ];
    let findings = shares(&sizes);
    sizes.push(alive(context, &store, &runtime.program)?);
    Ok(Report {
        name: "density",
        about: format!(
            "`true` in containers of one Debian image by crun: from `fork` to the end of the command, whose exit code is \
             checked. `crun alone` gets the config.json that Quire wrote and a plain folder for the root. With `self` a \
             process of its own unmounts and removes after that; what it takes from the next run is in the next run's \
             time. The last table has {ALIVE} detached containers that sleep, at once: of each, the monitor's own memory \
             (private pages), and what the kernel's memory (slab, page tables, stacks, per CPU) grew by, all that the \
             container's process itself takes included."
        ),
        tables: Vec::new(),
        sizes,
        findings,
    })
}

fn latencies(title: &str, ways: &[Way<'_>], runs: usize, at_once: usize) -> Result<Sizes> {
    let mut rows = Vec::new();
    for way in ways {
        if way.alone {
            hide_cgroup2()?;
        }
        let measured = measure(way, runs, at_once);
        if way.alone {
            show_cgroup2()?;
        }
        let measured = measured?;
        let tenth = measured.len() / 10;
        let (first, last) = (&measured[..tenth], &measured[measured.len() - tenth..]);
        let row = [
            percentile(&measured, 50),
            percentile(&measured, 99),
            percentile(&measured, 100),
            percentile(first, 50),
            percentile(last, 50),
        ];
        rows.push((way.name.clone(), row.map(nanoseconds).to_vec()));
    }
    Ok(Sizes {
        title: format!("{title}, {runs} runs"),
        unit: Unit::Milliseconds,
        columns: vec!["p50", "p99", "max", "p50 of the first tenth", "p50 of the last tenth"],
        rows,
    })
}

/// The times in the order in which the runs began.
fn measure(way: &Way<'_>, runs: usize, at_once: usize) -> Result<Vec<Duration>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut times = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= runs {
                return anyhow::Ok(times);
            }
            let mut command = (way.command)(number);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let clock = Instant::now();
            let status = command.status()?;
            times.push((number, clock.elapsed()));
            if !status.success() {
                bail!("{}: {status}", line(&command));
            }
        }
    };
    let mut times = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        let ended = threads.into_iter().map(|it| it.join().expect("no panic"));
        ended.collect::<Result<Vec<_>>>()
    })?
    .concat();
    times.sort_unstable();
    Ok(times.into_iter().map(|(_, time)| time).collect())
}

fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    // The smallest that so many percent are not above.
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank - 1]
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Quire's share of each median.
fn shares(sizes: &[Sizes]) -> Vec<String> {
    let mut findings = Vec::new();
    for table in sizes {
        let of = |name: &str| {
            let row = table.rows.iter().find(|(it, _)| it.starts_with(name));
            row.map(|(_, values)| Duration::from_nanos(values[0]).as_secs_f64() * 1e3)
        };
        for kind in ["memory", "self"] {
            if let (Some(total), Some(alone)) =
                (of(&format!("quire run, {kind}")), of("crun alone"))
            {
                let (share, title) = (total - alone, &table.title);
                findings.push(format!("{title}: Quire's share with {kind} at p50: {share:.1} ms"));
            }
        }
    }
    findings
}

/// Containers that sleep, until they are removed.
struct Alive<'a> {
    quire: &'a Path,
    store: PathBuf,
    names: Vec<String>,
}

impl Alive<'_> {
    fn command(&self) -> Command {
        let mut quire = Command::new(self.quire);
        quire.arg("--store").arg(&self.store).arg("--quiet");
        quire
    }
}

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        let mut rm = self.command();
        if let Err(error) = quiet(rm.args(["rm", "--container", "--force"]).args(&self.names)) {
            eprintln!("containers of the bench may be left: {error:#}");
        }
    }
}

fn alive(context: &Context<'_>, store: &Path, runtime: &Path) -> Result<Sizes> {
    let mut rows = Vec::new();
    for kind in ["memory", "self"] {
        let mut alive = Alive { quire: context.quire, store: store.to_owned(), names: Vec::new() };
        let mut before = 0;
        // The first pays for what all share, and so does not count.
        for number in 0..=ALIVE {
            let name = format!("density-{kind}-{number}");
            let mut run = alive.command();
            run.arg("run").arg("--runtime").arg(runtime).args(["--writable", kind, "--detach"]);
            run.args(["--name", &name, "image", "--", "sleep", "1000"]);
            alive.names.push(name);
            quiet(&mut run)?;
            if number == 0 {
                before = kernel_memory()?;
            }
        }
        let grown = kernel_memory()?.saturating_sub(before);
        let mut monitors = 0;
        for name in &alive.names[1..] {
            let state = fs::read(store.join("containers").join(name).join("state.json"))?;
            let state: serde_json::Value = serde_json::from_slice(&state)?;
            let pid = state["monitor"].as_u64().context("a state without a monitor")?;
            monitors += private(pid)?;
        }
        let count = u64::try_from(ALIVE)?;
        rows.push((format!("quire run --detach, {kind}"), vec![monitors / count, grown / count]));
    }
    Ok(Sizes {
        title: format!("Each of {ALIVE} alive at once"),
        unit: Unit::Kilobytes,
        columns: vec!["monitor", "kernel"],
        rows,
    })
}

/// Bytes of a file of `Name: NUMBER kB` lines that the lines of these names say.
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

fn kernel_memory() -> Result<u64> {
    sum("/proc/meminfo", &["Slab", "KernelStack", "PageTables", "Percpu"])
}

fn private(pid: u64) -> Result<u64> {
    sum(&format!("/proc/{pid}/smaps_rollup"), &["Private_Clean", "Private_Dirty"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let times: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        let cases = [(50, 100), (99, 198), (100, 200), (0, 1)];
        for (percent, expect) in cases {
            assert_eq!(percentile(&times, percent), Duration::from_millis(expect));
        }
        assert_eq!(percentile(&times[..1], 50), Duration::from_millis(200));
    }
}
