//! Work in containers, on every kind of writable layer and on common alternatives.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::json;

use super::import::{PODMAN_SOURCE, podman, remove_podman};
use super::measure::{Contestant, Memory, Outcome, Pace, Rules, measure};
use super::mount::import;
use super::report::{Report, Table};
use super::run::{Runtime, hide_cgroup2, show_cgroup2};
use crate::Context;
use rig::Skipped;
use rig::cache::remove;
use rig::inputs;
use rig::process::{find, quiet};

/// Name and description of each job, and whether it syncs. Only the jobs that sync include the ways that promise
/// durability.
const JOBS: [(&str, &str, bool); 5] = [
    ("stress", "200,000 random file operations by 20 processes", false),
    ("compile", "Lua from its sources, make -j2", false),
    ("clone", "git clone of 3,315 files in 5 commits", false),
    ("dpkg", "dpkg --unpack of four packages over their own files", true),
    ("transactions", "5,000 inserts into SQLite, each a transaction", true),
];

/// A root for a job outside of Quire's containers.
struct Plain {
    name: &'static str,
    root: PathBuf,
    /// Folder of the overlay's upper directory, in which case `root` is the overlay; none if `root` is written
    /// directly.
    upper: Option<PathBuf>,
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::jobs::make(context.cache, false)?;
    let store = import(context, &layout)?;
    let program = find("crun").context(Skipped(String::from("crun is not installed")))?;
    let place = |name: &str| context.work.join(name);
    let (ext4, tmpfs) = (place("ext4"), place("tmpfs"));
    unpack(context, &store, &ext4)?;
    fs::create_dir(&tmpfs)?;
    mount("tmpfs", &tmpfs, "tmpfs", MountFlags::empty(), None)?;
    quiet(Command::new("cp").arg("-a").arg(&ext4).arg(tmpfs.join("root")))?;
    let plain = [
        Plain { name: "crun, tmpfs", root: tmpfs.join("root"), upper: None },
        Plain { name: "crun, ext4", root: ext4.clone(), upper: None },
        Plain {
            name: "crun, overlayfs by hand, upper on tmpfs",
            root: place("merged-tmpfs"),
            upper: Some(tmpfs.clone()),
        },
        Plain {
            name: "crun, overlayfs by hand, upper on ext4",
            root: place("merged-ext4"),
            upper: Some(place("by-hand")),
        },
    ];
    let runtime = Runtime::new(context, "crun", program, &store, &ext4)?;
    let podman_image = match find("podman").and(find("runc")) {
        Some(_) => Some(quiet(podman(context, &layout)?.args(["pull", "--quiet", PODMAN_SOURCE]))?),
        None => None,
    };
    let (mut tables, mut findings) = (Vec::new(), Vec::new());
    for (job, about, syncs) in JOBS {
        let contestants = contestants(context, &store, &runtime, &plain, &ext4, job, syncs);
        let mut contestants = contestants?;
        if let Some(image) = &podman_image {
            contestants.push(in_podman(context, &layout, image.trim(), job));
        }
        let runs = context.runs.min(RUNS_MAX);
        let memory = Memory::LargestProcess;
        let rules = Rules { runs, sync: None, cold: false, pace: Pace::Turns, memory };
        let outcomes = measure(&rules, &mut contestants)?;
        findings.extend(aims(&outcomes).map(|it| format!("{job}: {it}")));
        tables.push(Table { title: format!("{job}: {about}"), memory, runs, outcomes });
    }
    if podman_image.is_none() {
        findings.push(String::from("podman, or runc for it, is not installed"));
    }
    remove_podman(context)?;
    unmount(&tmpfs, UnmountFlags::DETACH)?;
    let (removal, more) = super::removal::measure(context, &layout, &store, &ext4)?;
    findings.extend(more);
    Ok(Report {
        name: "writable",
        about: String::from(
            "The same work in containers whose changes go to different places, from `fork` to the end of the command, start \
             and end of the container included. Every job checks what came of it against what it gave when the image was \
             made. With `memory`, `self` and `dir` nothing is synced to the disk whatever the program asks for; with \
             `durable`, and everywhere but on tmpfs, `fsync` is what it should be. `by hand` is `mount -t overlay` over the \
             image's unpacked root. What a job wrote is removed, and everything synced, before the next one's clock starts.",
        ),
        tables,
        sizes: vec![removal],
        findings,
    })
}

/// Largest number of runs, because the jobs are long.
const RUNS_MAX: usize = 3;

/// Pause after which overlayfs and the file system below have finished their background work.
const REST: Duration = Duration::from_millis(300);

fn contestants<'a>(
    context: &'a Context<'a>,
    store: &'a Path,
    runtime: &'a Runtime,
    plain: &'a [Plain; 4],
    image: &'a Path,
    job: &'static str,
    syncs: bool,
) -> Result<Vec<Contestant<'a>>> {
    let mut contestants = Vec::new();
    for kind in ["memory", "self", "dir", "self,durable", "dir,durable"] {
        if kind.ends_with("durable") && !syncs {
            continue;
        }
        let command = move || {
            let mut quire = Command::new(context.quire);
            quire.arg("--store").arg(store).args(["--quiet", "run", "--runtime"]);
            quire.arg(&runtime.program).args(["--writable", kind]);
            quire.args(["image", "--", "sh", "/srv/run", job]);
            Ok(vec![quire])
        };
        // A background process removes the changes of the previous container after its end.
        let before = move || {
            quiet(Command::new(context.quire).arg("--store").arg(store).args(["gc", "--wait"]))?;
            rest()
        };
        contestants.push(Contestant::new(&format!("quire run, {kind}"), command).before(before));
    }
    for plain in plain {
        let bundle = context.work.join(format!("bundle-{}-{job}", contestants.len()));
        runtime.bundle_for(&bundle, &plain.root, &["sh", "/srv/run", job])?;
        let number = Cell::new(0);
        let command = move || {
            number.set(number.get() + 1);
            let mut crun = Command::new(&runtime.program);
            crun.arg("--root").arg(runtime.bundle.join("state"));
            crun.args(["run", "--bundle"]).arg(&bundle);
            crun.arg(format!("writable-{}-{}", std::process::id(), number.get()));
            Ok(vec![crun])
        };
        let before = || {
            match &plain.upper {
                None => remove_output(&plain.root)?,
                Some(upper) => overlay(image, upper, &plain.root)?,
            }
            rest()?;
            hide_cgroup2()
        };
        let after = || {
            show_cgroup2()?;
            match &plain.upper {
                None => remove_output(&plain.root),
                Some(_) => Ok(unmount(&plain.root, UnmountFlags::DETACH)?),
            }
        };
        contestants.push(Contestant::new(plain.name, command).before(before).after(after));
    }
    Ok(contestants)
}

fn in_podman<'a>(
    context: &'a Context<'a>,
    layout: &'a Path,
    image: &'a str,
    job: &'static str,
) -> Contestant<'a> {
    let command = move || {
        let mut podman = podman(context, layout)?;
        podman.args(["--runtime", "runc", "run", "--name=writable", "--network=none"]);
        // podman raises these limits by default, which is not permitted everywhere.
        podman.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
        podman.args([image, "sh", "/srv/run", job]);
        Ok(vec![podman])
    };
    let after = move || {
        quiet(podman(context, layout)?.args(["rm", "--force", "--time=0", "writable"])).map(drop)
    };
    Contestant::new("podman run, runc", command).before(rest).after(after)
}

/// Unpacks the image into a plain folder.
pub(super) fn unpack(context: &Context<'_>, store: &Path, to: &Path) -> Result<()> {
    let mounted = context.work.join("mounted");
    fs::create_dir_all(&mounted)?;
    let quire = |verb: &str| {
        let mut quire = Command::new(context.quire);
        quire.arg("--store").arg(store).args(["--quiet", verb]);
        quire
    };
    quiet(quire("mount").args(["--writable", "none", "image"]).arg(&mounted))?;
    let copied = quiet(Command::new("cp").arg("-a").arg(&mounted).arg(to));
    quiet(quire("umount").arg(&mounted))?;
    copied.map(drop)
}

/// Removes the files that jobs write into `/srv`.
fn remove_output(root: &Path) -> Result<()> {
    remove(&root.join("srv/out"))?;
    remove(&root.join("srv/answer"))
}

/// Mounts a new overlay over `image` at `target`, with its changes below `upper`.
pub(super) fn overlay(image: &Path, upper: &Path, target: &Path) -> Result<()> {
    let (changes, work) = (upper.join("upper"), upper.join("work"));
    for folder in [&changes, &work] {
        remove(folder)?;
        fs::create_dir_all(folder)?;
    }
    fs::create_dir_all(target)?;
    let mut mount = Command::new("mount");
    mount.args(["-t", "overlay", "overlay", "-o"]);
    mount.arg(format!(
        "lowerdir={},upperdir={},workdir={}",
        image.display(),
        changes.display(),
        work.display()
    ));
    quiet(mount.arg(target)).map(drop)
}

/// Syncs and pauses, so that the next run does not pay for the work of previous ones.
pub(super) fn rest() -> Result<()> {
    rustix::fs::sync();
    std::thread::sleep(REST);
    Ok(())
}

/// Ratios for the targets of one job.
fn aims(outcomes: &[Outcome]) -> impl Iterator<Item = String> {
    const PAIRS: [(&str, &str); 7] = [
        ("quire run, memory", "crun, tmpfs"),
        ("quire run, memory", "crun, overlayfs by hand, upper on tmpfs"),
        ("quire run, self", "quire run, dir"),
        ("quire run, self", "crun, ext4"),
        ("quire run, self", "podman run, runc"),
        ("quire run, dir", "crun, overlayfs by hand, upper on ext4"),
        ("quire run, self,durable", "quire run, dir,durable"),
    ];
    PAIRS.into_iter().filter_map(|(ours, theirs)| {
        let find = |name: &str| outcomes.iter().find(|it| it.name == name);
        let (one, other) = (find(ours)?, find(theirs)?);
        let ratio = one.median.as_secs_f64() / other.median.as_secs_f64();
        Some(format!("{ours}: {ratio:.2} of the time of {theirs}"))
    })
}

impl Runtime {
    /// Writes a bundle of Quire's config.json with another, writable root and another program.
    pub(super) fn bundle_for(&self, bundle: &Path, root: &Path, program: &[&str]) -> Result<()> {
        let text = fs::read(self.bundle.join("config.json"))?;
        let mut config: serde_json::Value = serde_json::from_slice(&text)?;
        config["root"] = json!({ "path": root, "readonly": false });
        config["process"]["args"] = json!(program);
        fs::create_dir(bundle)?;
        Ok(fs::write(bundle.join("config.json"), config.to_string())?)
    }
}
