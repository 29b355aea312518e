//! Runs contestants in turns: each round runs each of them once, so that disturbances of the machine affect all of
//! them.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read as _, Seek as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use wait4::Wait4 as _;

use super::cgroup::Cgroup;
use super::command::Commands;
use super::report::Table;
use rig::process;

/// A step before or after the timed part.
type Step<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// A program, or a way to call it.
pub(super) struct Contestant<'a> {
    pub(super) name: String,
    /// Restores the state before the first run, not timed.
    before: Step<'a>,
    /// The timed commands. Each must end with exit code 0.
    commands: Box<dyn FnMut() -> Result<Vec<Command>> + 'a>,
    until: Until,
    /// Processor time so far of the services that work for the commands.
    services: Box<dyn FnMut() -> Result<Duration> + 'a>,
    /// Cleans up after a run, not timed.
    after: Step<'a>,
}

impl<'a> Contestant<'a> {
    pub(super) fn new<C: Commands>(
        name: impl Into<String>,
        mut commands: impl FnMut() -> C + 'a,
    ) -> Self {
        Self {
            name: name.into(),
            before: Box::new(|| Ok(())),
            commands: Box::new(move || commands().list()),
            until: Until::End,
            services: Box::new(|| Ok(Duration::ZERO)),
            after: Box::new(|| Ok(())),
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

    pub(super) fn before<T>(mut self, mut step: impl FnMut() -> Result<T> + 'a) -> Self {
        self.before = Box::new(move || step().map(drop));
        self
    }

    pub(super) fn after<T>(mut self, mut step: impl FnMut() -> Result<T> + 'a) -> Self {
        self.after = Box::new(move || step().map(drop));
        self
    }
}

/// The event that stops a contestant's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// The exit of the last command.
    End,
    /// The last command's first byte on standard output. The command is still waited for.
    FirstOutput,
}

/// Settings of a measurement that concern all contestants.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) runs: usize,
    /// Folder whose file system is synced after the last command, on the clock, for each contestant.
    pub(super) sync: Option<PathBuf>,
    /// Whether the page cache is dropped before each run, not timed.
    pub(super) cold: bool,
    pub(super) pace: Pace,
    pub(super) memory: Memory,
}

impl Rules {
    /// Contestants in turns, with warm caches and without a sync.
    pub(super) const fn new(runs: usize) -> Self {
        let memory = Memory::LargestProcess;
        Self { runs, sync: None, cold: false, pace: Pace::Turns, memory }
    }

    /// The rules for reads and listings: with cold caches, all memory counts that the kernel charges.
    pub(super) fn reads(runs: usize, cold: bool) -> Self {
        let memory = if cold { Memory::WithCache } else { Memory::LargestProcess };
        Self { cold, memory, ..Self::new(runs) }
    }

    /// Measures the contestants of one table.
    pub(super) fn race(
        &self,
        title: impl Into<String>,
        mut contestants: Vec<Contestant<'_>>,
    ) -> Result<Table> {
        let outcomes = measure(self, &mut contestants)?;
        Ok(Table { title: title.into(), memory: self.memory, runs: self.runs, outcomes })
    }
}

/// "cold" or "warm", for titles.
pub(super) const fn warmth(cold: bool) -> &'static str {
    if cold { "cold" } else { "warm" }
}

/// The time between two timed runs. It matters if the kernel makes a process wait for an RCU grace period: a process
/// that starts right after another one has waited does not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// Another contestant's run.
    Turns,
    /// A run of the same contestant, not timed.
    OwnLeadIn,
    /// A pause of this length.
    Rested(Duration),
}

/// Definition of a contestant's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// The largest resident set of any of its processes, from the kernel's `ru_maxrss`.
    LargestProcess,
    /// The largest total of its processes' anonymous memory at one time, sampled in a separate run in a memory
    /// cgroup.
    AllProcesses,
    /// All memory that the kernel charges to the run's cgroup: processes, page cache, inodes and dentries.
    WithCache,
}

/// Measurements of one run.
#[derive(Debug, Clone, Copy)]
struct Sample {
    wall: Duration,
    cpu: Duration,
    /// Largest resident set, in bytes.
    largest_process: u64,
}

/// Summary of a contestant's runs.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) name: String,
    pub(super) median: Duration,
    pub(super) min: Duration,
    /// The quartiles below and above the median.
    pub(super) quartiles: [Duration; 2],
    pub(super) max: Duration,
    /// Median of user and system time.
    pub(super) cpu: Duration,
    /// Largest memory in bytes; none if this machine cannot measure it.
    pub(super) memory: Option<u64>,
}

impl Outcome {
    pub(super) fn milliseconds(&self) -> f64 {
        self.median.as_secs_f64() * 1e3
    }
}

fn measure(rules: &Rules, contestants: &mut [Contestant<'_>]) -> Result<Vec<Outcome>> {
    let mut samples = vec![Vec::new(); contestants.len()];
    for round in 0..rules.runs {
        // The order rotates, so that a run that leaves more work to the next one affects several contestants.
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
            quartiles: quartiles(&wall),
            max: wall[wall.len() - 1],
            cpu: median(&cpu),
            memory,
        });
    }
    progress("");
    Ok(outcomes)
}

/// Prints a line that the next one overwrites, if standard error is a terminal.
fn progress(text: &str) {
    if std::io::stderr().is_terminal() {
        eprint!("\r{text:70}{}", if text.is_empty() { "\r" } else { "" });
    }
}

fn median(sorted: &[Duration]) -> Duration {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2 }
}

/// The medians of the lower and of the upper half, each with the middle value if there is one.
fn quartiles(sorted: &[Duration]) -> [Duration; 2] {
    let half = sorted.len().div_ceil(2);
    [&sorted[..half], &sorted[sorted.len() - half..]].map(median)
}

/// The middle value, or the upper one of two.
pub(super) fn upper_median<T: Ord + Copy>(values: impl IntoIterator<Item = T>) -> T {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_unstable();
    values[values.len() / 2]
}

pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Measures memory in an additional run in a separate cgroup, which is not timed because sampling slows it down.
fn memory(rules: &Rules, contestant: &mut Contestant<'_>, kind: Memory) -> Result<Option<u64>> {
    let Some(cgroup) = Cgroup::new()? else {
        return Ok(None);
    };
    let mut sampler = None;
    run(rules, contestant, || {
        // The cgroup is entered after the untimed steps, so that they are not charged.
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
    // This run must not pay for deletions and writes of other runs.
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

/// Resources that the commands used, except wall-clock time, and the time of the last one's first output if [`Until`]
/// asks for it.
fn execute(commands: &mut [Command], until: Until) -> Result<(Sample, Option<Instant>)> {
    let mut sample = Sample { wall: Duration::ZERO, cpu: Duration::ZERO, largest_process: 0 };
    let mut printed = None;
    // Errors go to a file, because a pipe would need a reader during the timed part.
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
    fn quartiles_are_medians_of_halves() {
        for (all, expect) in
            [(vec![7], [7, 7]), (vec![1, 3], [1, 3]), (vec![1, 2, 4, 6, 90], [2, 6])]
        {
            let all: Vec<_> = all.into_iter().map(Duration::from_millis).collect();
            assert_eq!(quartiles(&all), expect.map(Duration::from_millis));
        }
    }

    #[test]
    fn medians() {
        check_median(&[7], 7);
        check_median(&[1, 3], 2);
        check_median(&[1, 5, 100], 5);
    }

    fn check_refused(contestant: Contestant<'_>, expect: &str) {
        let error = Rules::new(1).race("", vec![contestant]).unwrap_err();
        assert_eq!(error.to_string(), expect);
    }

    #[test]
    fn a_failing_command_is_no_result() {
        let fails = Contestant::new("fails", || [Command::new("true"), Command::new("false")]);
        check_refused(fails, "false: exit status: 1: ");
    }

    #[test]
    fn a_silent_command_has_no_first_output() {
        let silent = Contestant::new("silent", || Command::new("true"));
        check_refused(silent.until(Until::FirstOutput), "true: it printed nothing");
    }
}
