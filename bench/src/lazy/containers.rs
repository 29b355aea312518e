//! Containers for third-party snapshotters: Quire's configuration for the same program, over an overlay of their
//! mounts.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

use super::Stage;
use crate::command::{cmd, more, run, wait_until};
use crate::mounts::unmount_all;
use crate::run::{keeper, kept};
use crate::samples::Program;
use rig::inputs;
use rig::process::quiet;

/// Name of a run's folder, below the bench's folder.
const PLACE: &str = "rival";

/// Runtime configurations by trace name, with the image's environment and the program's arguments.
pub(super) struct Containers<'a> {
    stage: &'a Stage<'a>,
    configs: BTreeMap<&'static str, Value>,
    /// Folder of the programs' bundles and the runtime's state.
    bundle: PathBuf,
}

impl<'a> Containers<'a> {
    /// Runs each program once with Quire, whose store has the image, to record the configurations.
    pub(super) fn learn(
        stage: &'a Stage<'a>,
        store: &Path,
        image: &str,
        programs: &[Program],
    ) -> Result<Self> {
        let runtime = stage.runtime.file_name().and_then(|it| it.to_str());
        let runtime = runtime.context("a runtime has a name")?;
        // The session looks here for containers of an interrupted bench.
        let bundle = stage.context.work.join(format!("bundle-{runtime}"));
        fs::create_dir_all(&bundle)?;
        let (script, config) = keeper(&bundle, runtime, &stage.runtime)?;
        let root = inputs::base_root(stage.context.cache)?;
        let quire = stage.context.quire;
        let mut configs = BTreeMap::new();
        for program in programs {
            let Program { user, arguments, .. } = program;
            let run = cmd!("{quire} --store {store} --quiet run --rm --user {user}");
            quiet(&mut more!(run, "--runtime {script} {image}", ..*arguments))?;
            configs.insert(program.trace, kept(&config, store, &root, &bundle)?);
        }
        Ok(Self { stage, configs, bundle })
    }

    /// Folder of all files of a run.
    pub(super) fn place(&self) -> PathBuf {
        self.stage.context.work.join(PLACE)
    }

    /// Moves the files of the previous run away and creates empty folders.
    pub(super) fn before(&self, folders: &[&str]) -> Result<()> {
        self.stage.context.set_aside(PLACE)?;
        for folder in [&["upper", "work", "root"], folders].concat() {
            fs::create_dir_all(self.place().join(folder))?;
        }
        Ok(())
    }

    /// Mounts an overlay of these folders, the uppermost first, with an upper directory on the disk, and runs the
    /// program.
    pub(super) fn run(&self, lowers: &[PathBuf], program: &Program) -> Result<Vec<Command>> {
        let place = self.place();
        let mut config = self.configs.get(program.trace).context("it was learned")?.clone();
        config["root"] = json!({ "path": place.join("root"), "readonly": false });
        let bundle = self.bundle.join(program.trace);
        fs::create_dir_all(&bundle)?;
        fs::write(bundle.join("config.json"), config.to_string())?;
        let (lowers, runtime, trace) = (join(lowers), &self.stage.runtime, program.trace);
        let layers = cmd!("mount -t overlay overlay -o");
        let overlay = more!(
            layers,
            "lowerdir={lowers},upperdir={place}/upper,workdir={place}/work {place}/root"
        );
        let run = cmd!(runtime, "--root", self.bundle.join("state"), "run --bundle {bundle}");
        Ok(vec![overlay, more!(run, "bench-{trace}")])
    }

    /// Mounts a read-only overlay of these folders, the uppermost first, at the path of containers' roots.
    pub(super) fn join(&self, folders: &[PathBuf]) -> Command {
        let (folders, place) = (join(folders), self.place());
        cmd!("mount -t overlay overlay -o ro,lowerdir={folders} {place}/root")
    }

    /// Unmounts the overlays over the snapshotter's mounts.
    pub(super) fn after(&self) -> Result<()> {
        unmount_all(&self.place().join("root"))
    }
}

/// Paths with colons between them, as overlayfs has them.
fn join(folders: &[PathBuf]) -> OsString {
    let folders: Vec<_> = folders.iter().map(|it| it.as_os_str()).collect();
    folders.join(OsStr::new(":"))
}

/// Kills the process whose pid is in a file, and waits until it has exited. The process need not be a child of this
/// one.
pub(super) fn end(file: &Path) -> Result<()> {
    let text = fs::read_to_string(file).with_context(|| format!("no {}", file.display()))?;
    let pid = text.trim().parse().ok().and_then(Pid::from_raw).context("no number of a process")?;
    kill_process(pid, Signal::TERM)?;
    let (what, limit) = (format!("the end of {}", text.trim()), Duration::from_secs(20));
    wait_until(&what, limit, Duration::from_millis(5), || {
        Ok(test_kill_process(pid).is_err() || is_dead(pid))
    })
}

/// Whether a process has exited, even if it was not reaped.
fn is_dead(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |it| it.rsplit(") ").next().is_some_and(|it| it.starts_with('Z')))
}

/// Returns a command that runs a shell script with these arguments.
pub(super) fn script(text: &str, words: &[&OsStr]) -> Command {
    cmd!("bash -euc {text} bash {words...}")
}

/// Uploads a blob to a repository of a registry. The repository needs no manifest that refers to the blob.
pub(super) fn send(file: &Path, repository: &str, digest: &str) -> Result<()> {
    const SEND: &str = r#"
        uploads=$(curl -sSf -X POST -o /dev/null -w '%header{location}' "$2/blobs/uploads/")
        case $uploads in *\?*) uploads="$uploads&" ;; *) uploads="$uploads?" ;; esac
        curl -sSf -T "$1" -H 'Content-Type: application/octet-stream' "${uploads}digest=sha256:$3"
    "#;
    quiet(&mut script(SEND, &[file.as_os_str(), repository.as_ref(), digest.as_ref()])).map(drop)
}

/// SHA-256 of a file, in hexadecimal.
pub(super) fn digest(file: &Path) -> Result<String> {
    let said = run!("sha256sum {file}")?;
    said.split(' ').next().map(String::from).context("sha256sum says nothing")
}
