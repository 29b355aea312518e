//! A container that runs `true`. Quire's share is its total time minus that of the runtime with the same config.json.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::{Value, json};

use super::command::{cmd, more};
use super::forms::import_layout;
use super::measure::{Contestant, Memory, Pace, Rules};
use super::podman;
use super::report::{Report, Table};
use crate::Context;
use rig::process::{find_program, quiet};
use rig::{Skipped, inputs};

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = &inputs::debian_postgres(context.cache, false)?;
    let store = &import_layout(context, layout)?;
    let folder = inputs::base_root(context.cache)?;
    let mut runtimes = Vec::new();
    for name in ["crun", "runc"] {
        if let Some(program) = find_program(name) {
            runtimes.push(Runtime::new(context, name, program, store, &folder)?);
        }
    }
    if runtimes.is_empty() {
        bail!(Skipped(String::from("neither crun nor runc is installed")));
    }
    let pulled = podman::pulled(context, layout)?;
    // The tables share the numbers of containers.
    let numbers = std::cell::Cell::new(0);
    let contestants = || {
        let mut contestants = Vec::new();
        for runtime in &runtimes {
            for kind in KINDS {
                let run = || quire_run(context, store, kind, &runtime.program);
                contestants
                    .push(Contestant::new(format!("quire run, {kind}, {}", runtime.name), run));
            }
            let alone = || {
                numbers.set(numbers.get() + 1);
                runtime.run(&runtime.bundle, &format!("bench-{}", numbers.get()))
            };
            let name = format!("{} alone, a plain folder", runtime.name);
            let contestant = Contestant::new(name, alone);
            contestants.push(match runtime.name {
                "crun" => contestant.before(hide_cgroup2).after(show_cgroup2),
                _ => contestant,
            });
        }
        contestants.extend(pulled.as_ref().map(|image| {
            Contestant::new("podman run, runc", move || {
                anyhow::Ok(more!(podman::run(context, layout, "--rm")?, "{image} true"))
            })
        }));
        contestants
    };
    let mut findings = Vec::new();
    if pulled.is_none() {
        findings.push(String::from(podman::ABSENT));
    }
    let runs = context.runs.max(15);
    let mut tables = Vec::new();
    for (title, pace) in [("right after another one", Pace::OwnLeadIn), ("after a rest", RESTED)] {
        let rules = Rules { pace, memory: Memory::AllProcesses, ..Rules::new(runs) };
        let table = rules.race(title, contestants())?;
        let pairs = runtimes.iter().flat_map(|it| KINDS.map(|kind| (kind, it.name)));
        findings.extend(pairs.filter_map(|(kind, runtime)| share(&table, kind, runtime)));
        tables.push(table);
    }
    podman::remove_all(context)?;
    Ok(Report {
        name: "run",
        about: String::from(
            "`run true` in Debian with PostgreSQL, warm. Every contestant makes the root, runs the program through a \
             runtime, and has removed everything when its clock stops; but with `self` a separate process unmounts \
             the file system and removes its file after that, whose time is not in the table. A runtime alone gets \
             the config.json that Quire wrote, with a plain folder for the root. Runtimes put the container into \
             cgroups, for which the kernel waits out an RCU grace period unless another process has just done the \
             same; so each contestant is timed right after another run of the same contestant, and after a rest of \
             100 ms.",
        ),
        tables,
        findings,
        ..Report::default()
    })
}

/// Kinds of the writable layer.
pub(super) const KINDS: [&str; 3] = ["memory", "self", "dir"];

/// A pause longer than the RCU grace period of a busy machine.
pub(super) const RESTED: Pace = Pace::Rested(Duration::from_millis(100));

fn share(table: &Table, kind: &str, runtime: &str) -> Option<String> {
    let total = table.find(&format!("quire run, {kind}, {runtime}"))?;
    let share = total.milliseconds() - table.find(&format!("{runtime} alone"))?.milliseconds();
    Some(format!(
        "{}: Quire's share with {kind} and {runtime}, the total minus {runtime} alone: {share:.1} ms",
        table.title
    ))
}

pub(super) fn quire_run(
    context: &Context<'_>,
    store: &Path,
    kind: &str,
    runtime: &Path,
) -> Command {
    let quire = context.quire;
    cmd!("{quire} --store {store} run --runtime {runtime} --writable {kind} image -- true")
}

pub(super) struct Runtime {
    name: &'static str,
    pub(super) program: PathBuf,
    /// Bundle of Quire's config.json with another root.
    pub(super) bundle: PathBuf,
}
impl Runtime {
    pub(super) fn new(
        context: &Context<'_>,
        name: &'static str,
        program: PathBuf,
        store: &Path,
        root: &Path,
    ) -> Result<Self> {
        let bundle = context.work.join(format!("bundle-{name}"));
        fs::create_dir(&bundle)?;
        let (script, config) = keeper(&bundle, name, &program)?;
        // The second run passes crun's compiled filter, which Quire learns from the first run, to the runtime.
        for _ in 0..2 {
            quiet(&mut quire_run(context, store, "memory", &script))?;
        }
        let mut value = kept(&config, store, root, &bundle)?;
        value["root"] = json!({ "path": root, "readonly": true });
        fs::write(&config, value.to_string())?;
        Ok(Self { name, program, bundle })
    }

    /// A command of the runtime, whose state is in its bundle.
    pub(super) fn command(&self) -> Command {
        let (program, bundle) = (&self.program, &self.bundle);
        cmd!("{program} --root {bundle}/state")
    }

    /// Runs a bundle in a container of this name.
    pub(super) fn run(&self, bundle: &Path, name: &str) -> Command {
        more!(self.command(), "run --bundle {bundle} {name}")
    }

    /// Writes a bundle of Quire's config.json with another, writable root and another program.
    pub(super) fn bundle_for(&self, bundle: &Path, root: &Path, program: &[&str]) -> Result<()> {
        let text = fs::read(self.bundle.join("config.json"))?;
        let mut config: Value = serde_json::from_slice(&text)?;
        config["root"] = json!({ "path": root, "readonly": false });
        config["process"]["args"] = json!(program);
        fs::create_dir(bundle)?;
        Ok(fs::write(bundle.join("config.json"), config.to_string())?)
    }
}

/// Writes a script that Quire calls under the runtime's name. The script saves the config and executes the runtime.
/// Returns the paths of the script and of the saved config.
pub(super) fn keeper(bundle: &Path, name: &str, program: &Path) -> Result<(PathBuf, PathBuf)> {
    let (script, config) = (bundle.join(name), bundle.join("config.json"));
    let text = format!(
        "#!/bin/sh\nfor word; do\n    [ \"$last\" = --bundle ] && cp \"$word/config.json\" '{}'\n    last=$word\ndone\n\
         exec '{}' \"$@\"\n",
        config.display(),
        program.display()
    );
    fs::write(&script, text)?;
    fs::set_permissions(&script, Permissions::from_mode(0o755))?;
    Ok((script, config))
}
/// The config that [`keeper`] saved, without the settings of that single container. `root` is a folder with the
/// image's files.
pub(super) fn kept(config: &Path, store: &Path, root: &Path, bundle: &Path) -> Result<Value> {
    let text = fs::read(config).context("quire did not call the runtime with --bundle")?;
    let mut value: Value = serde_json::from_slice(&text)?;
    own_files(&mut value, store, root, bundle)?;
    // Without this path, the runtime creates separate cgroups for each run, as it does by default.
    if let Some(linux) = value["linux"].as_object_mut() {
        linux.remove("cgroupsPath");
    }
    Ok(value)
}
/// Replaces the files that Quire mounts over some of the image's, such as `/etc/hosts`, and removes with the
/// container. The runtime mounts equivalent files from the bundle, except those whose mount point the plain folder
/// lacks, because the runtime would create it.
fn own_files(config: &mut Value, store: &Path, root: &Path, bundle: &Path) -> Result<()> {
    let Some(mounts) = config["mounts"].as_array_mut() else { return Ok(()) };
    let of_container = store.join("containers");
    // Where Quire's mounts are in memory, so are these files.
    let in_memory = |source: &Path| source.parent().is_some_and(|it| it.ends_with("mount-names"));
    let made = |it: &Value| {
        let source = it["source"].as_str().map(Path::new);
        source.is_some_and(|it| it.starts_with(&of_container) || in_memory(it))
    };
    let place =
        |it: &Value| it["destination"].as_str().map(|to| to.trim_start_matches('/').to_owned());
    mounts.retain(|it| !made(it) || place(it).is_some_and(|to| root.join(to).is_file()));
    for mount in mounts.iter_mut().filter(|it| made(it)) {
        let name = place(mount).unwrap_or_default().replace('/', "-");
        let file = bundle.join(name);
        fs::write(&file, "127.0.0.1 localhost\n")?;
        mount["source"] = json!(file);
    }
    Ok(())
}
/// Mount point of cgroup version 2 on hosts that have both versions.
const UNIFIED: &str = "/sys/fs/cgroup/unified";
/// Unmounts cgroup version 2 in the bench's mount namespace, because crun refuses hosts with both versions.
pub(super) fn hide_cgroup2() -> Result<()> {
    if Path::new(UNIFIED).join("cgroup.procs").exists() {
        unmount(UNIFIED, UnmountFlags::DETACH)?;
    }
    Ok(())
}
/// Mounts cgroup version 2 again for the other contestants.
pub(super) fn show_cgroup2() -> Result<()> {
    if Path::new(UNIFIED).exists() {
        mount("none", UNIFIED, "cgroup2", MountFlags::empty(), None)?;
    }
    Ok(())
}
