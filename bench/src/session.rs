//! Runs the benches in a child process with a separate mount namespace. However that process ends, by an error or
//! Ctrl-C, the parent removes its remaining containers, processes and files.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use kernel::process::{Exit, Setup, Signal, Signals, spawn};
use rustix::process::{Pid, kill_process};

use crate::command::{cmd, more};
use crate::podman::below;
use rig::cache::{Cache, remove};
use rig::process::{find_program, need, quiet};
use rig::{EXIT_SKIPPED, Skipped};

/// Environment variable of the child process: the folder of all its files.
const INSIDE: &str = "QUIRE_BENCH_INSIDE";

/// Name of the file in that folder that records the benches' mount namespace.
const NAMESPACE: &str = "namespace";

/// The folder, if this process is the child.
pub(super) fn inside() -> Result<Option<PathBuf>> {
    let Some(folder) = env::var_os(INSIDE).map(PathBuf::from) else { return Ok(None) };
    let namespace = fs::read_link("/proc/self/ns/mnt")?;
    fs::write(folder.join(NAMESPACE), namespace.as_os_str().as_encoded_bytes())?;
    Ok(Some(folder))
}

/// Runs this program again with the same arguments, and cleans up after it.
pub(super) fn again(cache: &Cache, quire: &Path) -> Result<()> {
    let signals = Signals::block(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(cache.dir())?.keep();
    let mut command = cmd!(need("unshare")?, "--mount --propagation=private", env::current_exe()?);
    command.args(env::args_os().skip(1)).env(INSIDE, &folder);
    let setup = Setup { signals: Some(&signals), ..Setup::default() };
    let ended = spawn(command, &setup)
        .and_then(|it| it.process.supervise(&signals, &mut |_| {}, &mut || None));
    clear(&folder, quire)?;
    match ended? {
        Exit::Code(0) => Ok(()),
        // The child has printed the reason.
        Exit::Code(code) if code == i32::from(EXIT_SKIPPED) => {
            bail!(Skipped("as said above".into()))
        }
        Exit::Code(code) => bail!("the bench ended with {code}"),
        Exit::Signal(signal) => bail!("the bench was ended by {signal:?}"),
    }
}

fn clear(folder: &Path, quire: &Path) -> Result<()> {
    for work in entries(folder).filter(|it| it.is_dir()) {
        end_containers(&work, quire);
    }
    let namespace = fs::read(folder.join(NAMESPACE)).unwrap_or_default();
    let processes = || {
        let of_ours = |it: &PathBuf| {
            let link = fs::read_link(it.join("ns/mnt"));
            link.is_ok_and(|it| it.as_os_str().as_encoded_bytes() == namespace)
        };
        let numbers = entries(Path::new("/proc")).filter(of_ours);
        let numbers = numbers.filter_map(|it| it.file_name()?.to_str()?.parse().ok());
        numbers.filter_map(Pid::from_raw).collect::<Vec<_>>()
    };
    // Some processes are about to exit. The mounts of the namespace disappear with its last process.
    for round in 0..500 {
        let left = if namespace.is_empty() { Vec::new() } else { processes() };
        if left.is_empty() {
            break;
        }
        if round == 100 {
            for pid in left {
                let _gone = kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    remove(folder).context("something of the bench is left")
}

/// Ends the containers of an interrupted bench below its folder: Quire's, the runtime's, and podman's.
fn end_containers(work: &Path, quire: &Path) {
    let store = work.join("store");
    let containers = store.join("containers");
    let ids = entries(&containers).filter_map(|it| it.file_name().map(OsStr::to_owned));
    let ids: Vec<_> = ids.filter(|it| !it.as_encoded_bytes().starts_with(b".")).collect();
    let told = |mut command: Command| {
        if let Err(error) = quiet(&mut command) {
            eprintln!("something of the bench may be left: {error:#}");
        }
    };
    if !ids.is_empty() {
        told(cmd!("{quire} --store {store} --quiet rm --container --force {ids...}"));
    }
    let bundles = entries(work).filter_map(|it| {
        let name = it.file_name()?.to_str()?.strip_prefix("bundle-")?.to_owned();
        Some((find_program(&name)?, it.join("state")))
    });
    for (runtime, state) in bundles {
        for id in entries(&state).filter(|it| it.is_dir()) {
            told(cmd!("{runtime} --root {state} delete --force", ..id.file_name()));
        }
    }
    if work.join("podman-run").exists() {
        told(more!(below(work), "rm --all --force --time=0"));
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path())
}
