//! Runs a test program, and lists the processes, mounts, loop devices and files that it leaves.
//!
//! `cargo test` calls this for each test program, as cargo's `runner`. Processes are found reliably, because this
//! process is the subreaper of its descendants ([`set_child_subreaper`]), so that every process that outlives its
//! parent becomes its child. Mounts, devices and files are found by the name of the temporary directory, which each
//! program gets separately.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::iter::successors;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rig::cache::remove;
use rig::tools;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper};

/// State directories of container programs. They are checked only in continuous integration, where no other program
/// uses the machine.
const STATE: [&str; 2] = ["/run", "/run/lock"];
/// Further ones, which programs create once and keep. Only their contents count.
const STANDING: [&str; 10] = [
    "/run/containerd",
    "/run/containerd/fifo",
    "/run/containerd/runc",
    "/run/containerd/runc/default",
    "/run/containerd/s",
    "/run/crun",
    "/run/libpod",
    "/run/netns",
    "/run/quire",
    "/run/runc",
];
/// Prefixes of paths that are kept until the next boot: Quire's notes about runtimes, their fixes, filters, mounts
/// and user namespaces, and the state of podman, skopeo and buildah.
const KEPT: [&str; 8] = [
    "/run/containers",
    "/run/libpod/",
    "/run/quire/filter-",
    "/run/quire/fixes-",
    "/run/quire/lock",
    "/run/quire/mount-",
    "/run/quire/runtime-",
    "/run/quire/userns",
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Time limit in seconds for a process to end after the program that started it
    // Containers end one after another, on a machine that may be busy.
    #[arg(long, default_value_t = 20)]
    patience: u64,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let name = Path::new(&args.command[0]).file_name().unwrap_or_default().to_string_lossy();
    set_child_subreaper(Some(getpid())).context("cannot take over processes that are left")?;
    let folder = folder()?;
    let state = state();
    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]).env("TMPDIR", &folder);
    let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
    // The pid suffices: `wait` reaps every child, so the handle must not.
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("no process id")?;
    let code = until_ended(pid)?;
    let mut left = processes_left(Duration::from_secs(args.patience));
    left.extend(places_left(&folder)?);
    if tools::in_ci() {
        left.extend(self::state().difference(&state).map(|it| format!("the file {it}")));
    }
    for what in &left {
        println!("LEFT BEHIND by {name}: {what}");
    }
    Ok(if code == 0 && !left.is_empty() { ExitCode::from(1) } else { ExitCode::from(code) })
}

/// Creates a directory for the temporary files of one program, in which every user can create files, as in `/tmp`. It
/// is on a disk, if there is one, because the kernel does not mount images from a tmpfs.
fn folder() -> Result<PathBuf> {
    // Source: include/uapi/linux/magic.h, TMPFS_MAGIC.
    let is_memory = |path: &Path| rustix::fs::statfs(path).is_ok_and(|it| it.f_type == 0x0102_1994);
    let usual = env::temp_dir();
    let disk = PathBuf::from("/var/tmp");
    let parent = if is_memory(&usual) && !is_memory(&disk) { disk } else { usual };
    // The name is short, because the path of a socket in the directory has at most 107 bytes.
    let made = tempfile::Builder::new().prefix("q").rand_bytes(4).tempdir_in(parent)?;
    fs::set_permissions(made.path(), fs::Permissions::from_mode(0o1777))?;
    Ok(made.keep())
}

/// Waits for the program, and reaps all children.
fn until_ended(program: Pid) -> Result<u8> {
    loop {
        let ended = rustix::process::wait(WaitOptions::empty()).context("cannot wait")?;
        let Some((_, status)) = ended.filter(|(pid, _)| *pid == program) else { continue };
        let by_signal = status.terminating_signal().map(|it| 128 + it);
        let code = status.exit_status().or(by_signal).unwrap_or(2);
        return Ok(u8::try_from(code).unwrap_or(2));
    }
}

/// Waits for remaining processes until the deadline, kills the others, and returns their names.
fn processes_left(patience: Duration) -> Vec<String> {
    let deadline = Instant::now() + patience;
    let mut left = Vec::new();
    let mut killed = 0;
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            // There are no children left.
            Err(_) => return left,
            Ok(Some(_)) => {}
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            Ok(None) => {
                for pid in children() {
                    left.push(format!("the process {}", shown(pid)));
                    // A process that has just ended is reaped above.
                    let _killed = kill_process(pid, Signal::KILL);
                }
                killed += 1;
                // Children of killed processes become children of this one. A process that cannot be killed is not
                // waited for.
                if killed > 50 {
                    return left;
                }
                thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

fn children() -> Vec<Pid> {
    let me = format!("PPid:\t{}", getpid().as_raw_nonzero());
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = numbers.filter_map(|it| it.file_name().to_str()?.parse().ok());
    let mine = |number: &i32| {
        let status = fs::read_to_string(format!("/proc/{number}/status")).unwrap_or_default();
        status.lines().any(|it| it == me) && !status.contains("\nState:\tZ")
    };
    numbers.filter(mine).filter_map(Pid::from_raw).collect()
}

fn shown(pid: Pid) -> String {
    let number = pid.as_raw_nonzero();
    let words = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
    let words = String::from_utf8_lossy(&words).replace('\0', " ");
    let name = fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
    format!("{number} ({}): {}", name.trim(), words.trim())
}

/// Finds mounts, loop devices and files below the directory, and removes it with them.
fn places_left(folder: &Path) -> Result<Vec<String>> {
    let name = folder.to_str().context("the folder of temporary files has no name in UTF-8")?;
    let mut left = Vec::new();
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let below = format!("{name}/");
    for line in mounts.lines().rev().filter(|it| it.contains(&below)) {
        let point = line.split(' ').nth(4).unwrap_or_default();
        left.push(format!("the mount on {point}: {line}"));
        if point.starts_with(&below) {
            // If unmounting fails, removing fails as well, which is an error below.
            let _unmounted = unmount(point, UnmountFlags::DETACH);
        }
    }
    for device in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
        if file.starts_with(&below) {
            left.push(format!("/dev/{} of {}", device.file_name().to_string_lossy(), file.trim()));
        }
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        left.push(format!("the file {}{}", path.display(), inside(&path)));
    }
    remove(folder)?;
    Ok(left)
}

/// Returns a path below a directory, for a message: the first entry of each directory, which shows the test that left
/// it.
fn inside(directory: &Path) -> String {
    let first = |path: &Path| {
        let entries = fs::read_dir(path).ok().filter(|_| !path.is_symlink())?;
        entries.flatten().map(|it| it.path()).min()
    };
    let deepest = successors(first(directory), |it| first(it)).last();
    deepest.map_or_else(String::new, |it| format!(" with {}", it.display()))
}

fn state() -> BTreeSet<String> {
    let entries =
        STATE.iter().chain(&STANDING).filter_map(|it| fs::read_dir(it).ok()).flatten().flatten();
    let paths = entries.map(|it| it.path().display().to_string());
    let is_kept =
        |path: &str| STANDING.contains(&path) || KEPT.iter().any(|kept| path.starts_with(kept));
    paths.filter(|path| !is_kept(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests complete processes, as cargo calls them, because each process has one reaper.
    #[test]
    fn what_is_left_is_named() {
        let program = env::current_exe().unwrap();
        // The test program is in `deps`, next to the tested program's directory.
        let xtask = program.parent().and_then(Path::parent).unwrap().join("xtask");
        if !xtask.is_file() {
            println!("SKIPPED: cargo has built no xtask: `cargo build --package xtask`");
            return;
        }
        let check = |script: &str, code: i32, expected: &str| {
            let mut command = Command::new(&xtask);
            command.args(["leftovers", "--patience=1", "sh", "-c", script]).env_remove("CI");
            let output = command.output().unwrap();
            let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            assert_eq!(output.status.code(), Some(code), "{script}: {text}");
            assert!(text.contains(expected), "{script}: {text}");
            assert_eq!(text.is_empty(), expected.is_empty(), "{script}: {text}");
        };
        check("exit 0", 0, "");
        check("exit 3", 3, "");
        check("kill -9 $$", 137, "");
        check("(sleep 0.1 &)", 0, "");
        check(": > $TMPDIR/a; rm $TMPDIR/a", 0, "");
        check(": > $TMPDIR/a", 1, "LEFT BEHIND by sh: the file ");
        check("mkdir $TMPDIR/a; : > $TMPDIR/a/b; exit 5", 5, "/a/b");
        if rig::process::is_root() {
            check("mkdir $TMPDIR/a; mount -t tmpfs a $TMPDIR/a", 1, "the mount on ");
        }
        // This process has left its session and its parent.
        check("setsid sleep 60 > /dev/null 2>&1 &", 1, "): sleep 60");
    }
}
