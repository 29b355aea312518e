//! Many short-lived containers: their start times, and their memory while they run.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::alive::{ALIVE, Setting, alive};
use super::forms::import_layout;
use super::measure::nanoseconds;
use super::report::{Report, Sizes, Unit};
use super::run::{KINDS, Runtime, hide_cgroup2, quire_run, show_cgroup2};
use crate::Context;
use rig::process::{find_program, line};
use rig::{Skipped, inputs};

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
    let store = &import_layout(context, &layout)?;
    let folder = &inputs::base_root(context.cache)?;
    let program = find_program("crun").context(Skipped(String::from("crun is not installed")))?;
    let runtime = &Runtime::new(context, "crun", program, store, folder)?;
    let ours = KINDS.map(|kind| Way {
        name: format!("quire run, {kind}"),
        command: Box::new(move |_| quire_run(context, store, kind, &runtime.program)),
        alone: false,
    });
    let alone = Way {
        name: String::from("crun alone, a plain folder"),
        command: Box::new(|number| runtime.run(&runtime.bundle, &format!("density-{number}"))),
        alone: true,
    };
    let ways: Vec<_> = ours.into_iter().chain([alone]).collect();
    let mut sizes = vec![
        latencies("One after the other", &ways, SEQUENCE, 1)?,
        latencies("Eight at a time", &ways, SEQUENCE / 2, AT_ONCE)?,
    ];
    let mut findings = shares(&sizes);
    let (more, found) = alive(&Setting { context, store, runtime, folder })?;
    sizes.extend(more);
    findings.extend(found);
    Ok(Report {
        name: "density",
        about: format!(
            "`true` in containers of one Debian image by crun: from `fork` to the end of the command, whose exit \
             code is checked. `crun alone` gets the config.json that Quire wrote and a plain folder for the root. \
             With `self`, a separate process then unmounts the file system and removes its file; the time that this \
             takes from the next run is in the next run's time. {ALIVE} detached containers that sleep, at once: of \
             each, the monitor's own memory (private pages), and what the kernel's memory (slab, page tables, \
             stacks, per CPU, caches dropped) grew by. With a runtime alone that is the container itself: its \
             process, namespaces and cgroups."
        ),
        sizes,
        findings,
        ..Report::default()
    })
}

fn latencies(title: &str, ways: &[Way<'_>], runs: usize, at_once: usize) -> Result<Sizes> {
    let mut rows = Vec::new();
    for way in ways {
        let times = without_cgroup2(way.alone, || measure(&*way.command, runs, at_once))?;
        let tenth = times.len() / 10;
        let (first, last) = (&times[..tenth], &times[times.len() - tenth..]);
        let row = [(&times[..], 50), (&times, 99), (&times, 100), (first, 50), (last, 50)];
        let row = row.map(|(times, percent)| nanoseconds(percentile(times, percent)));
        rows.push((way.name.clone(), row.to_vec()));
    }
    let columns = ["p50", "p99", "max", "p50 of the first tenth", "p50 of the last tenth"];
    Ok(Sizes::new(format!("{title}, {runs} runs"), Unit::Milliseconds, columns, rows))
}

/// Hides the host's cgroup version 2 hierarchy during a measurement if the runtime runs without Quire.
pub(super) fn without_cgroup2<T>(hides: bool, measure: impl FnOnce() -> Result<T>) -> Result<T> {
    if hides {
        hide_cgroup2()?;
    }
    let measured = measure();
    if hides {
        show_cgroup2()?;
    }
    measured
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
/// Ratios of Quire's medians to those of the other ways.
fn shares(sizes: &[Sizes]) -> Vec<String> {
    let mut findings = Vec::new();
    for table in sizes {
        let of = |name: &str| {
            let row = table.rows.iter().find(|(it, _)| it.starts_with(name));
            row.map(|(_, values)| Duration::from_nanos(values[0]).as_secs_f64() * 1e3)
        };
        for kind in KINDS {
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
