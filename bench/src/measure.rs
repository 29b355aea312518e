//! Rivals in turn: each round runs every contestant once, so that what disturbs the machine disturbs all of them.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read as _, Seek as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use wait4::Wait4 as _;

use super::cgroup::Cgroup;
use rig::process;

/// What is run before or behind the clock.
pub(super) type Step<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// One program, or one way to call it.
pub(super) struct Contestant<'a> {
    pub(super) name: String,
    /// Not timed: makes the place as it was before the first run.
    before: Step<'a>,
    /// Timed from the first one's start; each must end with exit code 0.
    commands: Box<dyn FnMut() -> Result<Vec<Command>> + 'a>,
    until: Until,
    /// The processor time so far of services that the commands give work to.
    services: Box<dyn FnMut() -> Result<Duration> + 'a>,
    /// Not timed.
    after: Step<'a>,
}

impl<'a> Contestant<'a> {
    pub(super) fn new(name: &str, commands: impl FnMut() -> Result<Vec<Command>> + 'a) -> Self {
        let nothing = || -> Step<'a> { Box::new(|| Ok(())) };
        Self {
            name: name.to_owned(),
            before: nothing(),
            commands: Box::new(commands),
            until: Until::End,
            services: Box::new(|| Ok(Duration::ZERO)),
            after: nothing(),
        }
    }

    pub(super) const fn until(mut self, until: Until) -> Self {
        self.until = until;
        self
    }

    pub(super) fn services(mut self, spent: impl FnMut() -> Result<Duration> + 'a) -> Self {
        self.services = Box::new(spent);
        self
    }

    pub(super) fn before(mut self, step: impl FnMut() -> Result<()> + 'a) -> Self {
        self.before = Box::new(step);
        self
    }

    pub(super) fn after(mut self, step: impl FnMut() -> Result<()> + 'a) -> Self {
        self.after = Box::new(step);
        self
    }
}

/// When a contestant's clock stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// The last command has ended.
    End,
    /// The last command has printed its first byte to standard output. It is still waited for.
    FirstOutput,
}

/// What a bench asks for besides its contestants.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) runs: usize,
    /// The file system of this folder is synced behind the last command, on the clock, for every contestant.
    pub(super) sync: Option<PathBuf>,
    /// Before every run, not timed: nothing of an earlier one is in the page cache.
    pub(super) cold: bool,
    pub(super) pace: Pace,
    pub(super) memory: Memory,
}

/// What lies between two timed runs. It matters where the kernel makes a process wait until others have let go (an
/// RCU grace period): whoever comes right behind somebody who has waited does not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// Another contestant's run.
    Turns,
    /// A run of the same contestant, not timed.
    OwnLeadIn,
    /// A rest of this length.
    Rested(Duration),
}

/// What counts as a contestant's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// The largest resident set that one of its processes had, from the kernel's `ru_maxrss`.
    LargestProcess,
    /// The anonymous memory that all of its processes had at once, sampled in a run of its own in a memory cgroup.
    AllProcesses,
    /// All that the kernel charges for the run in a memory cgroup: processes, page cache, inodes and dentries.
    WithCache,
}

/// One run.
#[derive(Debug, Clone, Copy)]
struct Sample {
    wall: Duration,
    cpu: Duration,
    /// Bytes.
    largest_process: u64,
}

/// A contestant's runs, summed up.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) name: String,
    pub(super) median: Duration,
    pub(super) min: Duration,
    pub(super) max: Duration,
    /// User and system time, the median.
    pub(super) cpu: Duration,
    /// Bytes, the largest; none where this machine cannot tell.
    pub(super) memory: Option<u64>,
}

pub(super) fn measure(rules: &Rules, contestants: &mut [Contestant<'_>]) -> Result<Vec<Outcome>> {
    let mut samples = vec![Vec::new(); contestants.len()];
    for round in 0..rules.runs {
        // Each begins a round in its turn: a run that leaves the next one more work does so to several.
        let mut order: Vec<_> = contestants.iter_mut().zip(&mut samples).collect();
        let count = order.len().max(1);
        order.rotate_left(round % count);
        for (contestant, samples) in order {
            progress(&format!("{}: run {} of {}", contestant.name, round + 1, rules.runs));
            samples.push(run(rules, contestant, || Ok(()))?);
        }
    }
    let mut outcomes = Vec::new();
    for (contestant, samples) in contestants.iter_mut().zip(&samples) {
        let memory = match rules.memory {
            Memory::LargestProcess => samples.iter().map(|it| it.largest_process).max(),
            kind => {
                progress(&format!("{}: memory", contestant.name));
                memory(rules, contestant, kind)?
            }
        };
        let sorted = |of: fn(&Sample) -> Duration| {
            let mut all: Vec<_> = samples.iter().map(of).collect();
            all.sort_unstable();
            all
        };
        let (wall, cpu) = (sorted(|it| it.wall), sorted(|it| it.cpu));
        outcomes.push(Outcome {
            name: contestant.name.clone(),
            median: median(&wall),
            min: wall[0],
            max: wall[wall.len() - 1],
            cpu: median(&cpu),
            memory,
        });
    }
    progress("");
    Ok(outcomes)
}

/// One line that is written over again, on a terminal only.
fn progress(text: &str) {
    if std::io::stderr().is_terminal() {
        eprint!("\r{text:70}{}", if text.is_empty() { "\r" } else { "" });
    }
}

fn median(sorted: &[Duration]) -> Duration {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2 }
}

/// One run more, in a cgroup of its own; it is not timed, since the sampling disturbs.
fn memory(rules: &Rules, contestant: &mut Contestant<'_>, kind: Memory) -> Result<Option<u64>> {
    let Some(cgroup) = Cgroup::new()? else {
        return Ok(None);
    };
    let mut sampler = None;
    run(rules, contestant, || {
        // From here on, so that the steps before the clock are not charged.
        sampler = Some(cgroup.enter()?);
        Ok(())
    })?;
    let peak = sampler.expect("the run has started").leave()?;
    Ok(Some(if kind == Memory::AllProcesses { peak.anonymous } else { peak.charged }))
}

fn run(
    rules: &Rules,
    contestant: &mut Contestant<'_>,
    start: impl FnOnce() -> Result<()>,
) -> Result<Sample> {
    (contestant.before)()?;
    if rules.pace == Pace::OwnLeadIn {
        execute(&mut (contestant.commands)()?, Until::End)?;
    }
    let mut commands = (contestant.commands)()?;
    // Deletions and writes of other runs must not be paid for in this one.
    if let Some(dir) = &rules.sync {
        sync(dir)?;
    }
    if rules.cold {
        drop_caches()?;
    }
    if let Pace::Rested(time) = rules.pace {
        std::thread::sleep(time);
    }
    start()?;
    let spent = (contestant.services)()?;
    let clock = Instant::now();
    let (used, printed) = execute(&mut commands, contestant.until)?;
    if let Some(dir) = &rules.sync {
        sync(dir)?;
    }
    let end = printed.unwrap_or_else(Instant::now);
    let cpu = used.cpu + (contestant.services)()?.saturating_sub(spent);
    let sample = Sample { wall: end.duration_since(clock), cpu, ..used };
    (contestant.after)()?;
    Ok(sample)
}

/// What the commands used, but for the time; and when the last one printed something, if that is waited for.
fn execute(commands: &mut [Command], until: Until) -> Result<(Sample, Option<Instant>)> {
    let mut sample = Sample { wall: Duration::ZERO, cpu: Duration::ZERO, largest_process: 0 };
    let mut printed = None;
    // A file, not a pipe: nobody reads while the clock runs.
    let mut errors = tempfile::tempfile()?;
    let last = commands.len().saturating_sub(1);
    for (number, command) in commands.iter_mut().enumerate() {
        let is_watched = until == Until::FirstOutput && number == last;
        let output = if is_watched { Stdio::piped() } else { Stdio::null() };
        command.stdin(Stdio::null()).stdout(output).stderr(errors.try_clone()?);
        let child = command.spawn();
        let mut child =
            child.with_context(|| format!("cannot start {}", process::line(command)))?;
        if let Some(mut output) = child.stdout.take() {
            if output.read(&mut [0])? != 0 {
                printed = Some(Instant::now());
            }
            io::copy(&mut output, &mut io::sink())?;
        }
        let used = child.wait4().context("cannot wait")?;
        if !used.status.success() {
            let mut text = String::new();
            errors.rewind()?;
            errors.read_to_string(&mut text)?;
            bail!("{}: {}: {}", process::line(command), used.status, text.trim());
        }
        sample.cpu += used.rusage.utime + used.rusage.stime;
        if is_watched && printed.is_none() {
            bail!("{}: it printed nothing", process::line(command));
        }
        sample.largest_process = sample.largest_process.max(used.rusage.maxrss);
    }
    Ok((sample, printed))
}

fn sync(dir: &Path) -> Result<()> {
    rustix::fs::syncfs(File::open(dir)?.as_fd())?;
    Ok(())
}

pub(super) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    let dropped = std::fs::write("/proc/sys/vm/drop_caches", "3");
    dropped.context("cannot drop the page cache")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_median(milliseconds: &[u64], expect: u64) {
        let durations: Vec<_> = milliseconds.iter().copied().map(Duration::from_millis).collect();
        assert_eq!(median(&durations), Duration::from_millis(expect));
    }

    #[test]
    fn medians() {
        check_median(&[7], 7);
        check_median(&[1, 3], 2);
        check_median(&[1, 5, 100], 5);
    }

    #[test]
    fn a_failing_command_is_no_result() {
        let rules = Rules {
            runs: 1,
            sync: None,
            cold: false,
            pace: Pace::Turns,
            memory: Memory::LargestProcess,
        };
        let fails = || Ok(vec![Command::new("true"), Command::new("false")]);
        let error = measure(&rules, &mut [Contestant::new("fails", fails)]).unwrap_err();
        assert_eq!(error.to_string(), "false: exit status: 1: ");
    }

    #[test]
    fn a_silent_command_has_no_first_output() {
        let rules = Rules {
            runs: 1,
            sync: None,
            cold: false,
            pace: Pace::Turns,
            memory: Memory::LargestProcess,
        };
        let silent = Contestant::new("silent", || Ok(vec![Command::new("true")]));
        let error = measure(&rules, &mut [silent.until(Until::FirstOutput)]).unwrap_err();
        assert_eq!(error.to_string(), "true: it printed nothing");
    }
}
