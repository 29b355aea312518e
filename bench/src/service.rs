//! Services that run beside the timed commands, and the kernel's accounting of their processes.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::command::wait_until;
use crate::proc::{bytes, field};

/// Longest time from a service's start to its first accepted request.
const BEGIN: Duration = Duration::from_secs(20);

/// A service that runs before the clock starts, like a container engine. It is stopped and waited for on drop.
pub(super) struct Service(Child);

impl Service {
    /// Starts a program and waits until it accepts requests.
    pub(super) fn start(
        mut command: Command,
        name: &str,
        can_be_asked: impl Fn() -> Result<bool>,
    ) -> Result<Self> {
        let child = command.stdin(Stdio::null()).spawn();
        let service = Self(child.with_context(|| format!("cannot start {name}"))?);
        wait_until(name, BEGIN, Duration::from_millis(5), can_be_asked)?;
        Ok(service)
    }

    pub(super) fn process(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed()).expect("the kernel numbers processes from 1")
    }
}

/// Starts `quire serve --lazy`, which prints a line to the file `said` as soon as it accepts requests.
pub(super) fn lazy(mut serve: Command, said: &Path, errors: Stdio) -> Result<Service> {
    serve.stdout(File::create(said)?).stderr(errors);
    Service::start(serve, "quire serve --lazy", || Ok(fs::metadata(said)?.len() > 0))
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            let _gone = kill_process(pid, Signal::TERM);
        }
        let _ended = self.0.wait();
    }
}

/// Processes of a program that were started for a folder, the service first.
pub(super) fn processes(program: &Path, work: &Path) -> Result<Vec<Pid>> {
    let program = program.canonicalize()?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let name = path.file_name().and_then(|it| it.to_str());
        let Some(pid) = name.and_then(|it| it.parse().ok()).and_then(Pid::from_raw) else {
            continue;
        };
        let is_it = fs::read_link(path.join("exe")).is_ok_and(|it| it == program);
        let words = fs::read(path.join("cmdline")).unwrap_or_default();
        let has = |part: &[u8]| words.windows(part.len()).any(|it| it == part);
        if is_it && has(work.as_os_str().as_bytes()) {
            found.push((has(b"--keeper"), pid));
        }
    }
    found.sort_by_key(|it| (it.0, it.1.as_raw_nonzero()));
    Ok(found.into_iter().map(|it| it.1).collect())
}

/// The kernel's accounting of several processes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counted {
    /// Processor time of all running threads.
    pub(super) cpu: Duration,
    /// Number of write calls. A service that fetches no data only writes responses, each by one call.
    pub(super) writes: u64,
    /// Memory in bytes, with a proportional share of memory that is shared with other processes.
    pub(super) memory: u64,
    pub(super) descriptors: u64,
}

impl Counted {
    pub(super) fn of(processes: &[Pid]) -> Result<Self> {
        let mut sum = Self::default();
        for pid in processes {
            let folder = Path::new("/proc").join(pid.as_raw_nonzero().to_string());
            for task in fs::read_dir(folder.join("task"))? {
                // A thread may just have exited.
                let text = fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
                let nanoseconds = text.split(' ').next().and_then(|it| it.parse().ok());
                sum.cpu += Duration::from_nanos(nanoseconds.unwrap_or(0));
            }
            sum.writes += field(folder.join("io"), "syscw")?;
            sum.memory += bytes(folder.join("smaps_rollup"), &["Pss"])?;
            sum.descriptors += fs::read_dir(folder.join("fd"))?.count() as u64;
        }
        Ok(sum)
    }

    pub(super) fn since(self, before: Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(before.cpu),
            writes: self.writes.saturating_sub(before.writes),
            memory: self.memory.saturating_sub(before.memory),
            descriptors: self.descriptors.saturating_sub(before.descriptors),
        }
    }
}

/// Processor time of a process and of the children that it has reaped.
pub(super) fn spent(process: Pid) -> Result<Duration> {
    let file = format!("/proc/{}/stat", process.as_raw_nonzero());
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    // The fields from the third on follow the name, which may contain any character. Source: proc(5), `utime` to
    // `cstime`.
    let fields = text.rsplit(") ").next().unwrap_or_default();
    let ticks: u64 =
        fields.split(' ').skip(11).take(4).filter_map(|it| it.parse::<u64>().ok()).sum();
    Ok(Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second())?)
}

/// Largest and current resident memory of a process in bytes, including mapped pages of files.
pub(super) fn resident(process: Pid) -> Result<(u64, u64)> {
    let status = format!("/proc/{}/status", process.as_raw_nonzero());
    Ok((bytes(&status, &["VmHWM"])?, bytes(&status, &["VmRSS"])?))
}
