//! Measures the memory of a process tree by a cgroup of version 1 or 2, whichever has the memory controller.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::command::cmd;

/// A cgroup that starts empty and is removed on drop.
#[derive(Debug)]
pub(super) struct Cgroup {
    dir: PathBuf,
    parent: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A cgroup with a limit of its memory.
#[derive(Debug)]
pub(super) struct Limited(Cgroup);

impl Limited {
    /// Creates a cgroup with a limit in bytes; none if the memory controller is not available.
    pub(super) fn new(bytes: u64) -> Result<Option<Self>> {
        let Some(cgroup) = Cgroup::new()? else {
            return Ok(None);
        };
        let file = match cgroup.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        fs::write(cgroup.dir.join(file), bytes.to_string()).context("cannot limit a cgroup")?;
        Ok(Some(Self(cgroup)))
    }

    /// The command, with all its children in the cgroup.
    pub(super) fn around(&self, command: &Command) -> Command {
        let procs = self.0.dir.join("cgroup.procs");
        let mut around = cmd!("sh -c {ENTER} sh {procs}");
        around.arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => around.env(key, value),
                None => around.env_remove(key),
            };
        }
        around
    }
}

/// $1 the file that a process enters the cgroup by; the rest is the command.
const ENTER: &str = r#"echo $$ > "$1"; shift; exec "$@""#;

/// Peak memory use, in bytes.
#[derive(Debug)]
pub(super) struct Peak {
    /// Anonymous memory of all processes, without shared memory and page cache.
    pub(super) anonymous: u64,
    /// All memory that was charged to the cgroup.
    pub(super) charged: u64,
}

impl Cgroup {
    /// Creates a cgroup; none if the memory controller is not available.
    pub(super) fn new() -> Result<Option<Self>> {
        let one = Path::new("/sys/fs/cgroup/memory");
        let two = Path::new("/sys/fs/cgroup");
        let controllers =
            fs::read_to_string(two.join("cgroup.subtree_control")).unwrap_or_default();
        let (parent, version) = if one.join("memory.stat").exists() {
            (one, Version::One)
        } else if controllers.split_whitespace().any(|it| it == "memory") {
            (two, Version::Two)
        } else {
            return Ok(None);
        };
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = parent.join(format!("quire-bench-{}-{number}", std::process::id()));
        match fs::create_dir(&dir) {
            Ok(()) => Ok(Some(Self { dir, parent: parent.to_owned(), version })),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
            Err(error) => Err(error).context("cannot make a memory cgroup"),
        }
    }

    /// Moves this process into the cgroup, so that each child is charged from its first page on.
    pub(super) fn enter(&self) -> Result<Sampler<'_>> {
        fs::write(self.dir.join("cgroup.procs"), "0").context("cannot enter a memory cgroup")?;
        let (stop, peak) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stat, version) = (self.dir.join("memory.stat"), self.version);
        let sample = {
            let (stop, peak) = (Arc::clone(&stop), Arc::clone(&peak));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Some(now) = anonymous(&stat, version) {
                        peak.fetch_max(now, Ordering::Relaxed);
                    }
                    thread::sleep(Duration::from_millis(2));
                }
            }
        };
        Ok(Sampler { cgroup: self, stop, peak, thread: thread::spawn(sample) })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Background processes of a contestant end soon. If the bench is killed, it leaves an empty cgroup, which
        // costs nothing.
        for _ in 0..500 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn anonymous(stat: &Path, version: Version) -> Option<u64> {
    let key = if version == Version::One { "total_rss " } else { "anon " };
    let text = fs::read_to_string(stat).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key))?.parse().ok()
}

/// Samples the cgroup while this process is in it.
#[derive(Debug)]
pub(super) struct Sampler<'a> {
    cgroup: &'a Cgroup,
    stop: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Sampler<'_> {
    pub(super) fn leave(self) -> Result<Peak> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the sampler does not panic");
        let file = match self.cgroup.version {
            Version::One => "memory.max_usage_in_bytes",
            Version::Two => "memory.peak",
        };
        let charged = fs::read_to_string(self.cgroup.dir.join(file))?;
        fs::write(self.cgroup.parent.join("cgroup.procs"), "0")?;
        let anonymous = self.peak.load(Ordering::Relaxed);
        Ok(Peak { anonymous, charged: charged.trim().parse()? })
    }
}
