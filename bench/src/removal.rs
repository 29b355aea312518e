//! Removal of a container with many changed files: the time until the command returns, and until everything is
//! removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::command::{cmd, more, run, wait_until};
use super::measure::{drop_caches, nanoseconds, upper_median};
use super::podman;
use super::report::{Sizes, Unit};
use super::writable::{overlay, rest};
use crate::Context;
use rig::process::quiet;

/// Number of files that the image's job `files` creates.
const FILES: usize = 100_000;

/// Returns the medians and the findings.
pub(super) fn measure(
    context: &Context<'_>,
    layout: &Path,
    store: &Path,
    image: &Path,
) -> Result<(Sizes, Vec<String>)> {
    let podman_image = podman::pulled(context, layout)?;
    let mut times: Vec<(String, Vec<[Duration; 2]>)> = Vec::new();
    let mut add = |name: String, pair: [Duration; 2]| match times.iter_mut().find(|it| it.0 == name)
    {
        Some((_, pairs)) => pairs.push(pair),
        None => times.push((name, vec![pair])),
    };
    for _ in 0..context.runs.min(3) {
        for kind in ["memory", "self", "dir", "self,durable"] {
            add(format!("quire run, {kind}: its end"), at_its_end(context, store, kind)?);
            add(format!("quire rm --force, {kind}"), by_force(context, store, kind)?);
        }
        for (name, cold) in [("rm -r of the files", false), ("rm -r of the files, cold", true)] {
            add(format!("{name} on ext4"), of_a_tree(context, image, cold)?);
        }
        if let Some(image) = &podman_image {
            add(String::from("podman rm --force"), in_podman(context, layout, image)?);
        }
    }
    podman::remove_all(context)?;
    let medians = times.into_iter().map(|(name, pairs)| {
        (name, [0, 1].map(|at| upper_median(pairs.iter().map(|pair| pair[at]))))
    });
    let rows: Vec<_> = medians.collect();
    let tree = rows.iter().find(|it| it.0 == "rm -r of the files on ext4").context("no tree")?.1[1];
    let ours = rows.iter().filter(|it| it.0.starts_with("quire"));
    let findings = ours.map(|(name, [returned, gone])| {
        let ratio = |it: &Duration| tree.as_secs_f64() / it.as_secs_f64();
        let (returned, gone) = (ratio(returned), ratio(gone));
        format!("removal, {name}: the command {returned:.0} times, all gone {gone:.1} times as fast as rm -r of the tree")
    });
    let findings = findings.collect();
    let title = format!("Removal of {FILES} changed files");
    let columns = ["until the command returns", "until all is gone"];
    let rows = rows.into_iter().map(|(name, it)| (name, it.map(nanoseconds).to_vec()));
    Ok((Sizes::new(title, Unit::Milliseconds, columns, rows.collect()), findings))
}

fn quire(context: &Context<'_>, store: &Path) -> Command {
    let quire = context.quire;
    cmd!("{quire} --store {store} --quiet")
}

const NAME: &str = "removal";

/// The container's script: creates its files, signals that it is ready, and waits.
const SCRIPT: &str = "sh /srv/run files && touch /srv/ready && exec sleep 1000";
/// The script of a container that ends by itself. It sleeps long enough for this process to find its program.
const ENDS: &str = "sh /srv/run files && echo done && sleep 1";

/// Times a container whose program exits by itself once all files are created.
fn at_its_end(context: &Context<'_>, store: &Path, kind: &str) -> Result<[Duration; 2]> {
    rest()?;
    let quire = quire(context, store);
    let mut run = more!(quire, "run --name {NAME} --writable {kind} image -- sh -c {ENDS}");
    let done = context.work.join("removal-done");
    let mut child = run.stdout(fs::File::create(&done)?).spawn()?;
    wait_for("the files of a container", || {
        child.try_wait().is_ok_and(|it| it.is_some())
            || fs::read(&done).is_ok_and(|it| !it.is_empty())
    })?;
    // The clock starts when the program's exit is seen in /proc, because only its parent process is notified of the
    // exit.
    let program = program_of(store)?;
    wait_for("a program's end", || !alive(program))?;
    let clock = Instant::now();
    let status = child.wait()?;
    let returned = clock.elapsed();
    if !status.success() {
        bail!("the job files: {status}");
    }
    wait_for("a container to go", || is_gone(context, store))?;
    Ok([returned, clock.elapsed()])
}

/// The pid of the container's first process.
fn program_of(store: &Path) -> Result<u32> {
    let file = store.join("containers").join(NAME).join("container.pid");
    let text =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(text.trim().parse()?)
}
/// Whether a process runs. A process that has exited but was not reaped does not count.
fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
    state.is_some_and(|it| it != "Z" && it != "X")
}
fn by_force(context: &Context<'_>, store: &Path, kind: &str) -> Result<[Duration; 2]> {
    rest()?;
    quiet(&mut more!(
        quire(context, store),
        "run --detach --name {NAME} --writable {kind} image -- sh -c {SCRIPT}"
    ))?;
    let program = program_of(store)?;
    let ready = PathBuf::from(format!("/proc/{program}/root/srv/ready"));
    wait_for("the files of a container", || ready.exists())?;
    let mut rm = more!(quire(context, store), "rm --container --force {NAME}");
    let clock = Instant::now();
    quiet(&mut rm)?;
    let returned = clock.elapsed();
    wait_for("a container to go", || is_gone(context, store))?;
    Ok([returned, clock.elapsed()])
}

/// Whether the store has no container, no temporary files and no loop device.
fn is_gone(context: &Context<'_>, store: &Path) -> bool {
    let is_empty = |folder: &str| {
        let entries = fs::read_dir(store.join(folder)).into_iter().flatten().flatten();
        entries.filter(|it| !it.file_name().as_encoded_bytes().starts_with(b".")).count() == 0
    };
    let loops = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let ours = |file: String| Path::new(file.trim()).starts_with(context.work);
    let mut files =
        loops.filter_map(|it| fs::read_to_string(it.path().join("loop/backing_file")).ok());
    is_empty("containers") && is_empty("tmp") && !files.any(ours)
}
/// Times the removal of the same files from an overlay's upper directory on ext4, without a container.
fn of_a_tree(context: &Context<'_>, image: &Path, cold: bool) -> Result<[Duration; 2]> {
    let (upper, target) = (context.work.join("by-hand"), context.work.join("merged-ext4"));
    overlay(image, &upper, &target)?;
    let made = run!("chroot {target} sh /srv/run files");
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::DETACH)?;
    made?;
    rest()?;
    if cold {
        drop_caches()?;
    }
    let mut rm = cmd!("rm -r {upper}/upper");
    let clock = Instant::now();
    quiet(&mut rm)?;
    Ok([clock.elapsed(); 2])
}

fn in_podman(context: &Context<'_>, layout: &Path, image: &str) -> Result<[Duration; 2]> {
    rest()?;
    let run = podman::run(context, layout, &format!("--name={NAME}"))?;
    quiet(&mut more!(run, "{image} sh /srv/run files"))?;
    let clock = Instant::now();
    podman::rm(context, layout, NAME)?;
    Ok([clock.elapsed(); 2])
}

/// Waits up to five minutes.
fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
    wait_until(what, Duration::from_secs(300), Duration::from_micros(500), || Ok(is_so()))
}
