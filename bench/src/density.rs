//! Many short-lived containers: their start times, and their memory while they run.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::alive::{ALIVE, Setting, alive};
use super::mount::import;
use super::report::{Report, Sizes, Unit};
use super::run::{Runtime, hide_cgroup2, quire_run, show_cgroup2};
use crate::Context;
use rig::Skipped;
use rig::inputs;
use rig::process::{find, line};

/// Number of sequential runs, and number of concurrent runs in the second part.
const SEQUENCE: usize = 1000;
const AT_ONCE: usize = 8;

/// A way to run `true` in a container. `command` builds the command of a run from the run's unique number.
struct Way<'a> {
    name: String,
    command: Box<dyn Fn(usize) -> Command + Sync + 'a>,
    /// Whether the host's cgroup version 2 hierarchy must be hidden, because the runtime runs without Quire.
    alone: bool,
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::debian_small(context.cache, false)?;
    let store = import(context, &layout)?;
    let folder = inputs::base_root(context.cache)?;
    let program = find("crun").context(Skipped(String::from("crun is not installed")))?;
    let runtime = Runtime::new(context, "crun", program, &store, &folder)?;
    let mut ways = Vec::new();
    for kind in ["memory", "self", "dir"] {
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
    let mut findings = shares(&sizes);
    drop(ways);
    let setting = Setting { context, store: &store, runtime: &runtime, folder: &folder };
    let (more, found) = alive(&setting)?;
    sizes.extend(more);
    findings.extend(found);
    Ok(Report {
        name: "density",
        about: format!(
            "`true` in containers of one Debian image by crun: from `fork` to the end of the command, whose exit code is \
             checked. `crun alone` gets the config.json that Quire wrote and a plain folder for the root. With `self` a \
             process of its own unmounts and removes after that; what it takes from the next run is in the next run's \
             time. {ALIVE} detached containers that sleep, at once: of each, the \
             monitor's own memory (private pages), and what the kernel's memory (slab, page tables, stacks, per CPU, caches \
             dropped) grew by. With a runtime alone that is the container itself: its process, namespaces and cgroups."
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
        let measured = measure(&*way.command, runs, at_once);
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

/// Returns the durations in the order in which the runs began.
pub(super) fn measure(
    command: &(dyn Fn(usize) -> Command + Sync),
    runs: usize,
    at_once: usize,
) -> Result<Vec<Duration>> {
    let make = command;
    let next = AtomicUsize::new(0);
    let work = || {
        let mut times = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= runs {
                return anyhow::Ok(times);
            }
            let mut command = make(number);
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

pub(super) fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    // Nearest rank: the smallest value that at least `percent` percent of the values do not exceed.
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank - 1]
}

pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Ratios of Quire's medians to those of the other ways.
fn shares(sizes: &[Sizes]) -> Vec<String> {
    let mut findings = Vec::new();
    for table in sizes {
        let of = |name: &str| {
            let row = table.rows.iter().find(|(it, _)| it.starts_with(name));
            row.map(|(_, values)| Duration::from_nanos(values[0]).as_secs_f64() * 1e3)
        };
        for kind in ["memory", "self", "dir"] {
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
