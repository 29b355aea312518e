//! Time of the same work in gVisor's sandboxes and in crun, for several kinds of roots.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::{Value, json};

use super::command::{cmd, more, run};
use super::forms::import_form;
use super::measure::{Contestant, Rules};
use super::report::{Report, Table};
use super::run::{Runtime, hide_cgroup2, show_cgroup2};
use super::writable::{overlay, rest, unpack};
use crate::Context;
use rig::cache::remove;
use rig::process::find_program;
use rig::{Skipped, inputs, tools};

/// Name and description of each job.
const JOBS: [(&str, &str); 2] = [
    ("stress-nolinks", "200,000 random file operations by 20 processes, without hard links"),
    ("compile", "Lua from its sources, make -j2"),
];
const NATIVE: &str = "crun, ext4";
const RUNS_MAX: usize = 3;

/// A root that gVisor gets without Quire.
struct Alone {
    name: &'static str,
    /// Value of runsc's `--overlay2`.
    overlay: &'static str,
    root: Root,
}

/// Where the root's files are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Root {
    /// The host's folder.
    Folder,
    /// An overlay of the host over this folder, with its upper directory on ext4.
    Overlay,
    /// An EROFS that gVisor reads itself.
    Erofs,
}

const ALONE: [Alone; 5] = [
    Alone { name: "runsc, ext4, --overlay2=none", overlay: "none", root: Root::Folder },
    Alone { name: "runsc, ext4, --overlay2=root:self", overlay: "root:self", root: Root::Folder },
    Alone {
        name: "runsc, ext4, --overlay2=root:memory",
        overlay: "root:memory",
        root: Root::Folder,
    },
    Alone {
        name: "runsc, the host's overlayfs, upper on ext4",
        overlay: "none",
        root: Root::Overlay,
    },
    Alone {
        name: "runsc, its EROFS of `quire export gvisor:`, overlay in memory",
        overlay: "none",
        root: Root::Erofs,
    },
];

/// Paths that the contestants share.
struct Setting<'a> {
    context: &'a Context<'a>,
    runsc: PathBuf,
    store: PathBuf,
    /// The unpacked image.
    folder: PathBuf,
    /// The image for gVisor's EROFS.
    erofs: PathBuf,
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let runsc = tools::runsc(context.cache)?;
    let layout = inputs::jobs::make(context.cache, false)?;
    let store = import_form(context, &format!("oci:{}:latest", layout.display()), "objects")?;
    let crun = find_program("crun").context(Skipped(String::from("crun is not installed")))?;
    let folder = context.work.join("ext4");
    unpack(context, &store, &folder)?;
    let erofs = context.work.join("gvisor.erofs");
    let quire = context.quire;
    run!("{quire} --store {store} --quiet export image gvisor:{erofs}")?;
    let runtime = Runtime::new(context, "crun", crun, &store, &folder)?;
    let setting = Setting { context, runsc, store, folder, erofs };
    let (mut tables, mut findings) = (Vec::new(), Vec::new());
    for (job, about) in JOBS {
        let rules = Rules::new(context.runs.min(RUNS_MAX));
        let contestants = contestants(&setting, &runtime, job)?;
        let table = rules.race(format!("{job}: {about}"), contestants)?;
        findings.extend(overheads(&table).map(|it| format!("{job}: {it}")));
        tables.push(table);
    }
    Ok(Report {
        name: "gvisor",
        about: String::from(
            "The same work in crun and in gVisor (runsc, systrap), start and end of the container included. Every job \
             checks its result. *Overhead*: (s - n) / n, with n the time in crun on a plain folder of ext4. \
             `quire run` gives runsc the kernel's root, with its own writable layer. With runsc alone, the config.json \
             is the same for all rows.",
        ),
        tables,
        findings,
        ..Report::default()
    })
}

fn contestants<'a>(
    setting: &'a Setting<'a>,
    runtime: &'a Runtime,
    job: &'static str,
) -> Result<Vec<Contestant<'a>>> {
    let Setting { context, runsc, store, folder, .. } = setting;
    let (quire, work) = (context.quire, context.work);
    let clean = || {
        remove(&folder.join("srv/out"))?;
        remove(&folder.join("srv/answer"))
    };
    let bundle = work.join(format!("bundle-native-{job}"));
    runtime.bundle_for(&bundle, folder, &["sh", "/srv/run", job])?;
    let native = move || runtime.run(&bundle, &name());
    let before = move || {
        clean()?;
        rest()?;
        hide_cgroup2()
    };
    let mut contestants = vec![Contestant::new(NATIVE, native).before(before).after(show_cgroup2)];
    for kind in ["memory", "self", "dir"] {
        let run = move || {
            cmd!(
                "{quire} --store {store} --quiet run --runtime {runsc} --writable {kind}",
                "image -- sh /srv/run {job}"
            )
        };
        let before = move || {
            run!("{quire} --store {store} gc --wait")?;
            rest()
        };
        contestants.push(Contestant::new(format!("quire run, runsc, {kind}"), run).before(before));
    }
    for (number, alone) in ALONE.iter().enumerate() {
        let bundle = work.join(format!("bundle-runsc-{number}-{job}"));
        let merged = work.join("merged");
        let root = match alone.root {
            Root::Folder => folder.clone(),
            Root::Overlay => merged.clone(),
            Root::Erofs => bundle.join("rootfs"),
        };
        fs::create_dir_all(bundle.join("rootfs"))?;
        fs::write(bundle.join("config.json"), config(setting, alone, &root, job).to_string())?;
        let run = move || runsc_run(runsc, work, &bundle, alone.overlay);
        let upper = work.join("by-hand");
        let over = merged.clone();
        let before = move || {
            clean()?;
            if alone.root == Root::Overlay {
                // A run that failed has left its overlay.
                let _was_mounted = unmount(&over, UnmountFlags::DETACH);
                overlay(folder, &upper, &over)?;
            }
            rest()
        };
        let after = move || {
            if alone.root == Root::Overlay {
                unmount(&merged, UnmountFlags::DETACH)?;
            }
            clean()
        };
        contestants.push(Contestant::new(alone.name, run).before(before).after(after));
    }
    Ok(contestants)
}

fn runsc_run(runsc: &Path, work: &Path, bundle: &Path, overlay: &str) -> Command {
    let name = name();
    let command = cmd!("{runsc} --root {work}/runsc-state --network=none --ignore-cgroups");
    more!(command, "--overlay2={overlay} run --bundle {bundle} {name}")
}

/// A name that no other container has.
fn name() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("bench-gvisor-{}-{number}", std::process::id())
}

fn config(setting: &Setting<'_>, alone: &Alone, root: &Path, job: &str) -> Value {
    let capabilities = [
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FOWNER",
        "CAP_FSETID",
        "CAP_KILL",
        "CAP_SETGID",
        "CAP_SETUID",
    ];
    let annotations = match alone.root {
        Root::Folder | Root::Overlay => json!({}),
        Root::Erofs => json!({
            "dev.gvisor.spec.rootfs.type": "erofs",
            "dev.gvisor.spec.rootfs.source": setting.erofs,
            "dev.gvisor.spec.rootfs.overlay": "memory",
        }),
    };
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["sh", "/srv/run", job],
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root"],
            "capabilities": {
                "effective": capabilities, "permitted": capabilities, "bounding": capabilities,
            },
        },
        "root": {"path": root},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "mount"}]},
        "annotations": annotations,
    })
}

/// The overhead of each contestant against the first.
fn overheads(table: &Table) -> impl Iterator<Item = String> {
    let native = table.find(NATIVE).map_or(f64::NAN, |it| it.milliseconds());
    table.outcomes.iter().filter(|it| it.name != NATIVE).map(move |it| {
        let share = (it.milliseconds() - native) / native;
        format!("{}: overhead {share:.2}", it.name)
    })
}
