//! Work in containers, on every kind of writable layer and on common alternatives.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::command::{cmd, more, run};
use super::forms::import_layout;
use super::measure::{Contestant, Rules};
use super::podman;
use super::report::{Report, Table};
use super::run::{Runtime, hide_cgroup2, show_cgroup2};
use crate::Context;
use rig::cache::remove;
use rig::process::find_program;
use rig::{Skipped, inputs};

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
    let work = context.work;
    let layout = &inputs::jobs::make(context.cache, false)?;
    let store = &import_layout(context, layout)?;
    let program = find_program("crun").context(Skipped(String::from("crun is not installed")))?;
    let (ext4, tmpfs) = (&work.join("ext4"), &work.join("tmpfs"));
    unpack(context, store, ext4)?;
    fs::create_dir(tmpfs)?;
    mount("tmpfs", tmpfs, "tmpfs", MountFlags::empty(), None)?;
    run!("cp -a {ext4} {tmpfs}/root")?;
    let plain = |name, root, upper| Plain { name, root, upper };
    let plain = [
        plain("crun, tmpfs", tmpfs.join("root"), None),
        plain("crun, ext4", ext4.clone(), None),
        plain(
            "crun, overlayfs by hand, upper on tmpfs",
            work.join("merged-tmpfs"),
            Some(tmpfs.clone()),
        ),
        plain(
            "crun, overlayfs by hand, upper on ext4",
            work.join("merged-ext4"),
            Some(work.join("by-hand")),
        ),
    ];
    let runtime = Runtime::new(context, "crun", program, store, ext4)?;
    let podman_image = podman::pulled(context, layout)?;
    let (mut tables, mut findings) = (Vec::new(), Vec::new());
    for (job, about, syncs) in JOBS {
        let mut contestants = contestants(context, store, &runtime, &plain, ext4, job, syncs)?;
        contestants.extend(podman_image.as_ref().map(|image| {
            let run = move || {
                let run = podman::run(context, layout, "--name=writable")?;
                anyhow::Ok(more!(run, "{image} sh /srv/run {job}"))
            };
            let contestant = Contestant::new("podman run, runc", run).before(rest);
            contestant.after(|| podman::rm(context, layout, "writable"))
        }));
        let rules = Rules::new(context.runs.min(RUNS_MAX));
        let table = rules.race(format!("{job}: {about}"), contestants)?;
        findings.extend(aims(&table).map(|it| format!("{job}: {it}")));
        tables.push(table);
    }
    if podman_image.is_none() {
        findings.push(String::from(podman::ABSENT));
    }
    podman::remove_all(context)?;
    unmount(tmpfs, UnmountFlags::DETACH)?;
    let (removal, more) = super::removal::measure(context, layout, store, ext4)?;
    findings.extend(more);
    Ok(Report {
        name: "writable",
        about: String::from(
            "The same work in containers whose changes go to different places, from `fork` to the end of the \
             command, start and end of the container included. Every job checks what came of it against what it gave \
             when the image was made. With `memory`, `self` and `dir` nothing is synced to the disk whatever the \
             program asks for; with `durable`, and everywhere but on tmpfs, `fsync` is what it should be. `by hand` \
             is `mount -t overlay` over the image's unpacked root. The files that a job wrote are removed, and \
             everything is synced, before the next job's clock starts.",
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
    let (quire, crun) = (context.quire, &runtime.program);
    let mut contestants = Vec::new();
    for kind in ["memory", "self", "dir", "self,durable", "dir,durable"] {
        if kind.ends_with("durable") && !syncs {
            continue;
        }
        let run = move || {
            cmd!(
                "{quire} --store {store} --quiet run --runtime {crun} --writable {kind}",
                "image -- sh /srv/run {job}"
            )
        };
        // A background process removes the changes of the previous container after its end.
        let before = move || {
            run!("{quire} --store {store} gc --wait")?;
            rest()
        };
        contestants.push(Contestant::new(format!("quire run, {kind}"), run).before(before));
    }
    for plain in plain {
        let bundle = context.work.join(format!("bundle-{}-{job}", contestants.len()));
        runtime.bundle_for(&bundle, &plain.root, &["sh", "/srv/run", job])?;
        let number = Cell::new(0);
        let run = move || {
            number.set(number.get() + 1);
            let name = format!("writable-{}-{}", std::process::id(), number.get());
            runtime.run(&bundle, &name)
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
        contestants.push(Contestant::new(plain.name, run).before(before).after(after));
    }
    Ok(contestants)
}

/// Unpacks the image into a plain folder.
pub(super) fn unpack(context: &Context<'_>, store: &Path, to: &Path) -> Result<()> {
    let (quire, mounted) = (context.quire, context.work.join("mounted"));
    fs::create_dir_all(&mounted)?;
    run!("{quire} --store {store} --quiet mount --writable none image {mounted}")?;
    let copied = run!("cp -a {mounted} {to}");
    run!("{quire} --store {store} --quiet umount {mounted}")?;
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
    run!(
        "mount -t overlay overlay -o lowerdir={image},upperdir={changes},workdir={work} {target}"
    )?;
    Ok(())
}

/// Syncs and pauses, so that the next run does not pay for the work of previous ones.
pub(super) fn rest() -> Result<()> {
    rustix::fs::sync();
    std::thread::sleep(REST);
    Ok(())
}
/// Ratios for the targets of one job.
fn aims(table: &Table) -> impl Iterator<Item = String> {
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
        let outcome = |name: &str| table.outcomes.iter().find(|it| it.name == name);
        let ratio = outcome(ours)?.milliseconds() / outcome(theirs)?.milliseconds();
        Some(format!("{ours}: {ratio:.2} of the time of {theirs}"))
    })
}
