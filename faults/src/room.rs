//! The environment of the rounds: a private file system in a private mount namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use sha2::{Digest as _, Sha256};
use testing::faults::{self, Fault, Traced};

use super::verbs::{Base, Verb};
use rig::{Skipped, process};
use testing::daemon::Daemon;

/// Time after which a round is considered to hang.
const LATE: Duration = Duration::from_secs(60);

/// Time that containers and mounts may take to end by themselves.
const ENDING: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Room {
    /// A private file system in memory. A round sees its folder `room`, which is copied from `NAME.base`.
    folder: tempfile::TempDir,
    quire: PathBuf,
    registry: Daemon,
    /// Number of runs, for unique names.
    runs: u64,
    known: BTreeSet<i32>,
    /// Cgroups that an earlier process of this program left, because it was killed.
    others: Vec<PathBuf>,
}

/// The result of a command that ran without faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ran {
    pub(super) code: Option<i32>,
    pub(super) out: String,
    pub(super) err: String,
}

impl Room {
    pub(super) fn new(quire: &Path) -> Result<Self> {
        if !process::is_root() {
            bail!(Skipped(String::from("mounts and containers need root")));
        }
        for program in ["busybox", "crun", "setfattr"] {
            process::need(program)?;
        }
        let folder = tempfile::Builder::new().prefix("quire-faults-").tempdir()?;
        unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace")?;
        let nothing: Option<&str> = None;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(nothing, "/", nothing, private, nothing).context("cannot make mounts private")?;
        mount(
            Some("tmpfs"),
            folder.path(),
            Some("tmpfs"),
            MsFlags::empty(),
            Some("size=2g,mode=755"),
        )
        .context("cannot mount a tmpfs")?;
        nix::sys::prctl::set_child_subreaper(true)?;
        let registry = Daemon::start(folder.path(), "")?
            .ok_or_else(|| Skipped(String::from("docker-registry is not installed")))?;
        let (quire, others) = (quire.to_owned(), cgroups());
        let mut room = Self { folder, quire, registry, runs: 0, known: BTreeSet::new(), others };
        room.known = children();
        Ok(room)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the folder that rounds see.
    pub(super) fn live(&self) -> PathBuf {
        self.path("room")
    }

    /// Makes the bases that rounds are copied from, each from the previous one.
    pub(super) fn prepare(&mut self) -> Result<()> {
        fs::create_dir(self.live())?;
        fs::create_dir(self.path("bin"))?;
        for tool in ["mkcomposefs", "composefs-info", "mount.composefs"] {
            std::os::unix::fs::symlink(&self.quire, self.path("bin").join(tool))?;
        }
        for base in Base::ALL {
            if base != Base::Fresh {
                self.restore(Base::Fresh)?;
            }
            for line in base.lines() {
                self.must(line)?;
            }
            self.copy("room", &format!("{}.base", base.name()))?;
        }
        Ok(())
    }

    fn copy(&self, from: &str, to: &str) -> Result<()> {
        process::quiet(Command::new("cp").arg("-a").arg(self.path(from)).arg(self.path(to)))?;
        Ok(())
    }

    /// Restores the state before the first round.
    pub(super) fn restore(&mut self, base: Base) -> Result<()> {
        self.runs += 1;
        process::quiet(Command::new("rm").args(["-rf", "--one-file-system"]).arg(self.live()))?;
        self.copy(&format!("{}.base", base.name()), "room")
    }

    fn words(&self, line: &str) -> Vec<OsString> {
        let line =
            line.replace("{host}", &self.registry.host).replace("{n}", &self.runs.to_string());
        if let Some(script) = line.strip_prefix('!') {
            return ["/bin/sh", "-c", script].map(OsString::from).to_vec();
        }
        if let Some(line) = line.strip_prefix('@') {
            let mut words = split(line);
            words[0] = self.path("bin").join(&words[0]).into_os_string();
            return words;
        }
        let mut words = vec![self.quire.clone().into_os_string()];
        words.extend(split(&line));
        words
    }

    fn variables(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("PATH", env::var_os("PATH").unwrap_or_default()),
            ("HOME", self.live().join("home").into_os_string()),
            ("QUIRE_STORE", self.live().join("store").into_os_string()),
            ("QUIRE", self.quire.clone().into_os_string()),
            // The registry uses HTTP, and loading the host's hundreds of certificates would add many equal calls.
            ("SSL_CERT_FILE", OsString::from("/dev/null")),
        ]
    }

    /// Runs a line without faults.
    pub(super) fn run(&self, line: &str, input: &str) -> Result<Ran> {
        let words = self.words(line);
        let mut command = Command::new("timeout");
        command.arg("60").args(&words).current_dir(self.live());
        command.env_clear().envs(self.variables());
        // Use files instead of pipes, which a remaining process would keep open.
        let (out, err) = (self.path("out"), self.path("err"));
        command.stdout(File::create(&out)?).stderr(File::create(&err)?);
        let given = self.path("in");
        fs::write(&given, self.input(input)?)?;
        let status = command.stdin(File::open(&given)?).status()?;
        let read = |path: &Path| -> Result<String> {
            Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
        };
        Ok(Ran { code: status.code(), out: read(&out)?, err: read(&err)? })
    }

    /// Returns the content of standard input: `text`, or the content of a file if `text` is `<` and its name.
    fn input(&self, text: &str) -> Result<Vec<u8>> {
        Ok(match text.strip_prefix('<') {
            Some(file) => fs::read(self.live().join(file))?,
            None => text.into(),
        })
    }

    /// Runs a line that must succeed.
    pub(super) fn must(&self, line: &str) -> Result<()> {
        let ran = self.run(line, "")?;
        let is_wait = line.starts_with("wait ");
        if ran.code != Some(0) && !is_wait {
            bail!("{line}: {:?}: {}", ran.code, ran.err);
        }
        Ok(())
    }

    /// Runs the verb, with a failing call if `fault` is given.
    pub(super) fn traced(&self, verb: &Verb, fault: Option<Fault<'_>>) -> Result<(Traced, Ran)> {
        let words = self.words(verb.line);
        let words: Vec<&OsStr> = words.iter().map(OsString::as_os_str).collect();
        let (out, err, live) = (self.path("out"), self.path("err"), self.live());
        let variables = self.variables();
        let variables: Vec<_> =
            variables.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
        let input = self.input(verb.input)?;
        let place = faults::RunEnvironment {
            folder: &live,
            input: &input,
            output: &out,
            errors: &err,
            variables: &variables,
        };
        let traced = faults::run(&words, &place, fault, LATE)?;
        let (out, err) = (fs::read(&out)?, fs::read(&err)?);
        let ran = Ran {
            code: traced.code,
            out: String::from_utf8_lossy(&out).into_owned(),
            err: String::from_utf8_lossy(&err).into_owned(),
        };
        Ok((traced, ran))
    }

    /// Lists the folder `out`: each file's type, and the digest of its content.
    pub(super) fn output(&self) -> Result<BTreeMap<PathBuf, String>> {
        list(&self.live().join("out"), Contents::Hashed)
    }

    /// Lists the store: each file's type and length.
    pub(super) fn store(&self) -> Result<BTreeMap<PathBuf, String>> {
        let found = list(&self.live().join("store"), Contents::Measured)?;
        Ok(found.into_iter().map(|(path, text)| (without_random_id(path), text)).collect())
    }

    /// Returns the mount points below the folder that rounds see.
    pub(super) fn mounts(&self) -> Result<Vec<String>> {
        let text = fs::read_to_string("/proc/self/mountinfo")?;
        let points = text.lines().filter_map(|line| line.split(' ').nth(4));
        let live = self.live();
        Ok(points.filter(|it| Path::new(it).starts_with(&live)).map(String::from).collect())
    }

    /// Returns the processes, loop devices and cgroups that remain after the round but should not.
    pub(super) fn left(&self) -> Result<Vec<String>> {
        let since = Instant::now();
        loop {
            let mut left = Vec::new();
            reap();
            for pid in children().difference(&self.known) {
                let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let words = String::from_utf8_lossy(&words).replace('\0', " ");
                left.push(format!("process {pid}: {words}"));
            }
            for device in loop_devices(self.folder.path()) {
                left.push(format!("loop device {device}"));
            }
            for group in self.own_cgroups() {
                left.push(format!("cgroup {}", group.display()));
            }
            if left.is_empty() || since.elapsed() > ENDING {
                if !left.is_empty() {
                    self.clean();
                }
                return Ok(left);
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// Returns the cgroups of the rounds' containers.
    fn own_cgroups(&self) -> impl Iterator<Item = PathBuf> {
        cgroups().into_iter().filter(|it| !self.others.contains(it))
    }

    /// Cleans up after a round that left something, so that the next round is not affected.
    fn clean(&self) {
        for pid in children().difference(&self.known) {
            // The process may have ended just now.
            let _ended =
                nix::sys::signal::kill(Pid::from_raw(*pid), nix::sys::signal::Signal::SIGKILL);
        }
        sleep(Duration::from_millis(100));
        reap();
        for device in loop_devices(self.folder.path()) {
            let _detached =
                Command::new("losetup").args(["-d", &format!("/dev/{device}")]).status();
        }
        for group in self.own_cgroups() {
            let _removed = fs::remove_dir(group);
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // The namespace ends with this process, and the folder below the mount is then empty.
        let _unmounted = Command::new("umount").args(["-R", "-l"]).arg(self.folder.path()).status();
    }
}

/// Splits a line into words at spaces outside single quotes.
fn split(line: &str) -> Vec<OsString> {
    let mut words = Vec::new();
    for (number, part) in line.split('\'').enumerate() {
        if number % 2 == 1 {
            words.push(OsString::from(part));
        } else {
            words.extend(part.split_whitespace().map(OsString::from));
        }
    }
    words
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contents {
    Hashed,
    Measured,
}

fn list(top: &Path, contents: Contents) -> Result<BTreeMap<PathBuf, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![top.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            let meta = path.symlink_metadata()?;
            let kind = meta.file_type();
            let text = if kind.is_dir() {
                // The content of a mount does not belong to the folder.
                if !is_mount_point(&path) {
                    folders.push(path.clone());
                }
                String::from("directory")
            } else if kind.is_file() && contents == Contents::Hashed {
                let mut bytes = Vec::new();
                File::open(&path)?.read_to_end(&mut bytes)?;
                format!("{:o} {:x?}", meta.permissions().mode(), &Sha256::digest(&bytes)[..8])
            } else if kind.is_file() {
                format!("{} bytes", meta.len())
            } else if kind.is_fifo() {
                String::from("pipe")
            } else {
                String::from("other")
            };
            found.insert(path.strip_prefix(top)?.to_owned(), text);
        }
    }
    Ok(found)
}

/// Replaces the id of a container snapshot, which is random. A round makes at most one.
fn without_random_id(path: PathBuf) -> PathBuf {
    const SNAPSHOTS: &str = "container-snapshots";
    let mut parts = path.components();
    if parts.next().is_none_or(|it| it.as_os_str() != SNAPSHOTS) || parts.next().is_none() {
        return path;
    }
    Path::new(SNAPSHOTS).join("ID").join(parts.as_path())
}

fn is_mount_point(path: &Path) -> bool {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    text.lines().filter_map(|line| line.split(' ').nth(4)).any(|it| Path::new(it) == path)
}

/// Returns the children of this process, including orphans that it adopted.
fn children() -> BTreeSet<i32> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = tasks.filter_map(|it| fs::read_to_string(it.path().join("children")).ok());
    lists
        .flat_map(|it| it.split_whitespace().filter_map(|it| it.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Reaps exited children.
fn reap() {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL)) {
            Err(_) | Ok(WaitStatus::StillAlive) => return,
            Ok(_) => {}
        }
    }
}

fn loop_devices(folder: &Path) -> Vec<String> {
    let all = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    all.filter(|it| {
        let file = fs::read_to_string(it.path().join("loop/backing_file")).unwrap_or_default();
        Path::new(file.trim()).starts_with(folder)
    })
    .filter_map(|it| it.file_name().into_string().ok())
    .collect()
}

/// Returns the cgroups of containers of this program, in every hierarchy.
fn cgroups() -> Vec<PathBuf> {
    let folders =
        fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|it| it.path());
    let folders: Vec<_> = folders.chain([PathBuf::from("/sys/fs/cgroup")]).collect();
    let below = folders.iter().flat_map(|it| fs::read_dir(it).into_iter().flatten().flatten());
    let names = below.filter(|it| it.file_name().to_string_lossy().starts_with("quire-flt-"));
    names.map(|it| it.path()).collect()
}
