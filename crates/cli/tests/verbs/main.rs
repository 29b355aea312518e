//! The verbs, called as a user calls them. Each verb has a few tests of behaviour that only the whole program
//! shows.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod command_line;
mod container_disk;
mod container_life;
mod container_network;
mod container_rights;
mod image_verbs;
mod mounting;
mod registry_verbs;
mod rootless;
mod services;

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use kernel::process::Signal;
use kernel::version::KernelVersion;

/// A folder with a store, and trees to import.
struct Place {
    folder: tempfile::TempDir,
}

/// Returns whether the files of this folder are only in memory.
fn is_memory(folder: &Path) -> bool {
    // Source: include/uapi/linux/magic.h.
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    rustix::fs::statfs(folder).unwrap().f_type == TMPFS_MAGIC
}

/// Exit code and output of a command.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    /// Returns the exit code of a failure with this text.
    fn failure(&self) -> Option<i32> {
        let absent = ["image", "container", "store"].map(|it| format!("there is no {it} "));
        let is_absent = absent.iter().any(|it| self.err.contains(it));
        let full = ["No space left on device", "would leave less than"];
        let is_full = full.iter().any(|it| self.err.contains(it));
        Some(if is_absent {
            3
        } else if is_full {
            6
        } else {
            2
        })
    }
}

impl Drop for Place {
    /// `TempDir` ignores errors of the removal, which would hide the test that has left files.
    fn drop(&mut self) {
        let folder = self.folder.path();
        let since = Instant::now();
        loop {
            let error = match std::fs::remove_dir_all(folder) {
                Ok(()) => return,
                Err(_) if std::thread::panicking() => return,
                Err(error) => error,
            };
            // A background process removes a container's files, and moves deep directories up for that.
            if error.kind() == ErrorKind::DirectoryNotEmpty && since.elapsed().as_secs() < 60 {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            let below: Vec<_> = mounts.lines().filter(|it| it.contains(&self.shown())).collect();
            let find = Command::new("find").arg(folder).args(["-maxdepth", "3"]).output();
            let left = find.map(|it| String::from_utf8_lossy(&it.stdout).into_owned());
            panic!("cannot remove the test's files: {error}; mounts: {below:?}; left: {left:?}");
        }
    }
}

impl Place {
    fn shown(&self) -> String {
        self.folder.path().display().to_string()
    }

    /// Uses a disk if there is one: on some machines `/tmp` is in memory, but `/var/tmp` is on a disk.
    fn new() -> Self {
        let usual = std::env::temp_dir();
        let disk = Path::new("/var/tmp");
        let folder = if is_memory(&usual) && disk.is_dir() { disk } else { &usual };
        Self { folder: tempfile::tempdir_in(folder).unwrap() }
    }

    /// Returns whether the files are on a disk, and notes a skipped test if not.
    fn is_on_disk(&self) -> bool {
        let is_memory = is_memory(self.folder.path());
        if is_memory {
            testing::skipped("temporary files are in memory");
        }
        !is_memory
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        // Behind nohup(1), or as a script's background job, this process ignores signals that its children would
        // inherit.
        for signal in [Signal::HUP, Signal::INT, Signal::QUIT] {
            kernel::process::die_of(signal).unwrap();
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
        command.arg("--store").arg(self.path("store")).args(arguments);
        command
            .env_remove("QUIRE_STORE")
            .env_remove("QUIRE_POLICY")
            .env_remove("QUIRE_SEAL")
            .env_remove("QUIRE_RUNTIME")
            .env_remove("QUIRE_LOG");
        command.env("PATH", std::env::join_paths(search_path()).unwrap());
        command.stdin(Stdio::null()).current_dir(self.folder.path());
        command
    }

    /// Runs a command line, split at spaces.
    fn run(&self, line: &str) -> Ran {
        let arguments: Vec<&str> = line.split(' ').collect();
        self.run_each(&arguments)
    }

    fn run_each(&self, arguments: &[&str]) -> Ran {
        Ran::from_output(&self.command(arguments).output().unwrap())
    }

    /// Runs a command line that must succeed, and returns its output.
    fn out(&self, line: &str) -> String {
        let mut ran = self.run(line);
        // A process that another test has forked has the files of this process open until its exec.
        let since = Instant::now();
        let is_busy = |ran: &Ran| ran.err.contains("Device or resource busy");
        while line.starts_with("umount ") && is_busy(&ran) && since.elapsed().as_secs() < 5 {
            std::thread::sleep(Duration::from_millis(20));
            ran = self.run(line);
        }
        assert_eq!(ran.code, Some(0), "{line}: {}", ran.err);
        ran.out
    }

    /// Makes a tree with a file that is too long to be kept inside images, a short one, a symlink and a directory.
    fn tree(&self, name: &str, long: &str) -> PathBuf {
        let tree = self.path(name);
        std::fs::create_dir_all(tree.join("etc/deep")).unwrap();
        write(&tree.join("etc/long"), long.repeat(100).as_bytes(), 0o644);
        write(&tree.join("etc/short"), b"short\n", 0o600);
        symlink("../etc/long", tree.join("etc/link")).unwrap();
        tree
    }
}

impl Ran {
    fn from_output(output: &Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

fn write(path: &Path, bytes: &[u8], mode: u32) {
    std::fs::write(path, bytes).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Lets every user pass through the folder of a test.
fn open_to_all(place: &Place) {
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.folder.path(), mode).unwrap();
}

/// Returns whether this is root, which mounts need, and notes a skipped test if not.
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        testing::skipped("mounts and containers need root");
    }
    root
}

/// Returns whether this kernel is older.
fn is_before(major: u32, minor: u32) -> bool {
    KernelVersion::running().unwrap() < KernelVersion { major, minor }
}

/// Returns the directories of `PATH`, and the one in which `cargo xtask inputs` puts a runtime that Debian lacks.
fn search_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let built = std::env::var_os("QUIRE_CACHE").map(|it| Path::new(&it).join("runsc/bin"));
    std::env::split_paths(OsStr::new(&path)).chain(built).collect()
}

/// Finds a program of this machine.
fn program(name: &str) -> Option<PathBuf> {
    search_path().into_iter().map(|it| it.join(name)).find(|it| it.is_file())
}

/// Copies programs of this machine to a tree, with the libraries that `ldd` lists.
fn add_programs(tree: &Path, programs: &[&str]) {
    for program in programs {
        let output = Command::new("ldd").arg(program).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let libraries = text.split_whitespace().filter(|word| word.starts_with('/'));
        for file in libraries.chain([*program]) {
            let to = tree.join(file.trim_start_matches('/'));
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(file, to).unwrap();
        }
    }
    for directory in ["proc", "sys", "dev", "tmp"] {
        std::fs::create_dir_all(tree.join(directory)).unwrap();
    }
}
