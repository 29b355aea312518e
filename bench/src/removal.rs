//! Removal of a container with many changed files: the time until the command returns, and until everything is
//! removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::import::{PODMAN_SOURCE, podman, remove_podman};
use super::report::{Sizes, Unit};
use super::writable::{overlay, rest};
use crate::Context;
use rig::process::{find, quiet};

/// Number of files that the image's job `files` creates.
const FILES: usize = 100_000;

/// Longest time that any step may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// Returns the medians and the findings.
pub(super) fn measure(
    context: &Context<'_>,
    layout: &Path,
    store: &Path,
    image: &Path,
) -> Result<(Sizes, Vec<String>)> {
    let podman_image = match find("podman").and(find("runc")) {
        Some(_) => Some(quiet(podman(context, layout)?.args(["pull", "--quiet", PODMAN_SOURCE]))?),
        None => None,
    };
    let kinds = ["memory", "self", "dir", "self,durable"];
    let mut times: Vec<(String, Vec<[Duration; 2]>)> = Vec::new();
    let mut add = |name: String, pair: [Duration; 2]| match times.iter_mut().find(|it| it.0 == name)
    {
        Some((_, pairs)) => pairs.push(pair),
        None => times.push((name, vec![pair])),
    };
    for _ in 0..context.runs.min(3) {
        for kind in kinds {
            add(format!("quire run, {kind}: its end"), at_its_end(context, store, kind)?);
            add(format!("quire rm --force, {kind}"), by_force(context, store, kind)?);
        }
        for (name, cold) in [("rm -r of the files", false), ("rm -r of the files, cold", true)] {
            add(format!("{name} on ext4"), of_a_tree(context, image, cold)?);
        }
        if let Some(image) = &podman_image {
            add(String::from("podman rm --force"), in_podman(context, layout, image.trim())?);
        }
    }
    remove_podman(context)?;
    let median = |mut all: Vec<Duration>| {
        all.sort_unstable();
        all[all.len() / 2]
    };
    let rows: Vec<_> = times
        .into_iter()
        .map(|(name, pairs)| {
            let columns = [0, 1].map(|at| median(pairs.iter().map(|pair| pair[at]).collect()));
            (name, columns)
        })
        .collect();
    let tree = rows.iter().find(|it| it.0 == "rm -r of the files on ext4").context("no tree")?.1[1];
    let ours = rows.iter().filter(|it| it.0.starts_with("quire"));
    let findings = ours.map(|(name, [returned, gone])| {
        let ratio = |it: &Duration| tree.as_secs_f64() / it.as_secs_f64();
        let (returned, gone) = (ratio(returned), ratio(gone));
        format!("removal, {name}: the command {returned:.0} times, all gone {gone:.1} times as fast as rm -r of the tree")
    });
    let findings = findings.collect();
    let nanoseconds = |it: Duration| u64::try_from(it.as_nanos()).unwrap_or(u64::MAX);
    let sizes = Sizes {
        title: format!("Removal of {FILES} changed files"),
        unit: Unit::Milliseconds,
        columns: vec!["until the command returns", "until all is gone"],
        rows: rows.into_iter().map(|(name, it)| (name, it.map(nanoseconds).to_vec())).collect(),
    };
    Ok((sizes, findings))
}

fn quire(context: &Context<'_>, store: &Path) -> Command {
    let mut quire = Command::new(context.quire);
    quire.arg("--store").arg(store).arg("--quiet");
    quire
}

const NAME: &str = "removal";

/// The container's script: creates its files, signals that it is ready, and waits.
const SCRIPT: &str = "sh /srv/run files && touch /srv/ready && exec sleep 1000";

/// Times a container whose program exits by itself once all files are created.
fn at_its_end(context: &Context<'_>, store: &Path, kind: &str) -> Result<[Duration; 2]> {
    rest()?;
    let mut run = quire(context, store);
    run.args(["run", "--name", NAME, "--writable", kind, "image", "--", "sh", "-c"]);
    // The container sleeps long enough for this process to find its program.
    let done = context.work.join("removal-done");
    run.arg("sh /srv/run files && echo done && sleep 1").stdout(fs::File::create(&done)?);
    let mut child = run.spawn()?;
    wait_until("the files of a container", || {
        child.try_wait().is_ok_and(|it| it.is_some())
            || fs::read(&done).is_ok_and(|it| !it.is_empty())
    })?;
    // The clock starts when the program's exit is seen in /proc, because only its parent process is notified of the
    // exit.
    let program = program_of(store)?;
    wait_until("a program's end", || !alive(program))?;
    let clock = Instant::now();
    let status = child.wait()?;
    let returned = clock.elapsed();
    if !status.success() {
        bail!("the job files: {status}");
    }
    wait_until("a container to go", || is_gone(context, store))?;
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
    let mut run = quire(context, store);
    run.args(["run", "--detach", "--name", NAME, "--writable", kind, "image", "--", "sh", "-c"]);
    quiet(run.arg(SCRIPT))?;
    let program = program_of(store)?;
    let ready = PathBuf::from(format!("/proc/{program}/root/srv/ready"));
    wait_until("the files of a container", || ready.exists())?;
    let clock = Instant::now();
    quiet(quire(context, store).args(["rm", "--container", "--force", NAME]))?;
    let returned = clock.elapsed();
    wait_until("a container to go", || is_gone(context, store))?;
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
    let made = quiet(Command::new("chroot").arg(&target).args(["sh", "/srv/run", "files"]));
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::DETACH)?;
    made?;
    rest()?;
    if cold {
        super::measure::drop_caches()?;
    }
    let clock = Instant::now();
    quiet(Command::new("rm").arg("-r").arg(upper.join("upper")))?;
    Ok([clock.elapsed(); 2])
}

fn in_podman(context: &Context<'_>, layout: &Path, image: &str) -> Result<[Duration; 2]> {
    rest()?;
    let mut run = podman(context, layout)?;
    run.args(["--runtime", "runc", "run", "--name", NAME, "--network=none"]);
    run.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
    quiet(run.args([image, "sh", "/srv/run", "files"]))?;
    let clock = Instant::now();
    quiet(podman(context, layout)?.args(["rm", "--force", "--time=0", NAME]))?;
    Ok([clock.elapsed(); 2])
}

fn wait_until(what: &str, is_so: impl FnMut() -> bool) -> Result<()> {
    let mut is_so = is_so;
    let since = Instant::now();
    while !is_so() {
        if since.elapsed() > PATIENCE {
            bail!("waited for {what} for {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    Ok(())
}
