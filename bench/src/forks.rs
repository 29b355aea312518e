//! Snapshots, forks and rollbacks of a container that has written much, on several file systems.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::command::{cmd, more, run};
use super::measure::{nanoseconds, upper_median};
use super::podman::{self, podman};
use super::proc;
use super::report::{Report, Sizes, Unit};
use crate::Context;
use rig::cache::remove;
use rig::inputs;
use rig::process::{find_program, quiet};

/// Files of the container, by their description and the command that writes them.
const WRITTEN: [(&str, &str); 2] = [
    ("64 MiB in 2,000 files", "mkdir /w && head -c 64M /dev/urandom | split -b 32K -a 4 - /w/"),
    ("4 GiB in 100 files", "mkdir /w && head -c 4000M /dev/urandom | split -b 40M -a 4 - /w/"),
];

/// Size of the sparse file with each file system.
const DISK: u64 = 16 << 30;

/// Number of containers that are forked at once.
const CHILDREN: u32 = 64;

/// A file system for the store.
#[derive(Debug, Clone, Copy)]
enum Disk {
    Ext4,
    Xfs,
    Btrfs,
}

impl Disk {
    const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "XFS",
            Self::Btrfs => "btrfs",
        }
    }

    fn make(self, work: &Path) -> Result<Mounted> {
        let file = work.join("disk.img");
        let target = work.join("disk");
        File::create(&file)?.set_len(DISK)?;
        match self {
            Self::Ext4 => run!("mkfs.ext4 -q -F -m 0 {file}")?,
            Self::Xfs => run!("mkfs.xfs -q {file}")?,
            Self::Btrfs => run!("mkfs.btrfs -q {file}")?,
        };
        fs::create_dir_all(&target)?;
        run!("mount -o loop {file} {target}")?;
        Ok(Mounted { file, target })
    }
}

/// A mounted file system in a file, which is removed on drop.
struct Mounted {
    file: PathBuf,
    target: PathBuf,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let target = &self.target;
        if let Err(error) = run!("umount {target}").and_then(|_| Ok(fs::remove_file(&self.file)?)) {
            eprintln!("cannot remove {}: {error:#}", self.file.display());
        }
    }
}

/// A store on one of the disks.
struct Bench<'a> {
    quire: &'a Path,
    store: PathBuf,
    runs: usize,
}

impl Bench<'_> {
    fn quire(&self) -> Command {
        let (quire, store) = (self.quire, &self.store);
        cmd!("{quire} --store {store} --quiet")
    }

    /// Nanoseconds of a command.
    fn time(&self, command: Command) -> Result<u64> {
        let mut command = command;
        let clock = Instant::now();
        quiet(&mut command)?;
        Ok(nanoseconds(clock.elapsed()))
    }

    /// Medians of: pause, snapshot, `run`, fork of a snapshot with a first command, restart, rollback.
    fn small_steps(&self) -> Result<[u64; 6]> {
        let mut all: [Vec<u64>; 6] = Default::default();
        for _ in 0..self.runs {
            let clock = Instant::now();
            let told = quiet(&mut more!(self.quire(), "--json snapshot create parent point"))?;
            let whole = nanoseconds(clock.elapsed());
            let told: Value = serde_json::from_str(&told)?;
            let paused = told["paused"].as_u64().context("no pause is reported")?;
            // Its data is written in the background, which must not disturb the next steps.
            rustix::fs::sync();
            let ran = self.time(more!(self.quire(), "run small true"))?;
            let fork = more!(self.quire(), "fork --from point --name child --hook :", "parent");
            let forked = self.time(fork)?;
            quiet(&mut more!(self.quire(), "rm --container --force child"))?;
            let restarted = self.time(more!(self.quire(), "restart --time 0 other"))?;
            let rolled = self.time(more!(self.quire(), "rollback --time 0 other origin"))?;
            quiet(&mut more!(self.quire(), "snapshot rm point"))?;
            let values = [paused.saturating_mul(1000), whole, ran, forked, restarted, rolled];
            all.iter_mut().zip(values).for_each(|(all, value)| all.push(value));
        }
        Ok(all.map(upper_median))
    }

    /// Nanoseconds, bytes of the disk and bytes of memory of many forks that sleep.
    fn many(&self) -> Result<[u64; 3]> {
        rustix::fs::sync();
        let used = || -> Result<u64> {
            let numbers = rustix::fs::statvfs(&self.store)?;
            Ok((numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize)
        };
        let available = || proc::bytes("/proc/meminfo", &["MemAvailable"]);
        quiet(&mut more!(self.quire(), "snapshot create parent many"))?;
        rustix::fs::sync();
        let (disk, memory) = (used()?, available()?);
        let count = CHILDREN.to_string();
        let fork = more!(self.quire(), "fork --from many --count {count} --name many parent");
        let time = self.time(fork)?;
        rustix::fs::sync();
        let taken = used()?.saturating_sub(disk);
        let memory = memory.saturating_sub(available()?);
        for number in 1..=CHILDREN {
            let name = format!("many-{number}");
            quiet(&mut more!(self.quire(), "rm --container --force {name}"))?;
        }
        quiet(&mut more!(self.quire(), "snapshot rm many"))?;
        Ok([time, taken, memory])
    }
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::debian_small(context.cache, false)?;
    let (mut steps, mut times, mut sizes, mut findings) = (vec![], vec![], vec![], vec![]);
    for disk in [Disk::Ext4, Disk::Xfs, Disk::Btrfs] {
        let mounted = disk.make(context.work)?;
        for (what, script) in WRITTEN {
            let store = mounted.target.join("store");
            let bench = Bench { quire: context.quire, store, runs: context.runs };
            let row = format!("{}, {what}", disk.name());
            let done = measure(&bench, &layout, script);
            quiet(&mut more!(bench.quire(), "rm --container --force parent other"))?;
            quiet(&mut more!(bench.quire(), "gc --wait"))?;
            remove(&bench.store)?;
            let (small, many) = done?;
            steps.push((row.clone(), small.to_vec()));
            let [time, taken, memory] = many;
            times.push((row.clone(), vec![time]));
            sizes.push((row, vec![taken, memory]));
        }
    }
    let commits = match find_program("podman").and(find_program("runc")) {
        Some(_) => vec![of_podman(context, &layout)?],
        None => {
            findings.push(String::from(podman::ABSENT));
            Vec::new()
        }
    };
    let columns =
        ["pause", "snapshot create", "run true", "fork, first command", "restart", "rollback"];
    Ok(Report {
        name: "forks",
        about: format!(
            "A container has written random data into its writable layer, in the default directory on a file system in a \
             sparse file. *Pause*: how long `snapshot create` froze it. *Snapshot create*, *run true*, *restart*, \
             *rollback*: whole processes; rollbacks of a container that sleeps, to a snapshot with nothing. *Fork, first \
             command*: `quire fork --from` of the snapshot, and a command in the new container. Medians of {} runs. \
             *Forks*: {CHILDREN} containers that sleep, by one call; growth of the disk, and of the used memory of the \
             machine, once.",
            context.runs
        ),
        sizes: vec![
            Sizes::new("Quire", Unit::Milliseconds, columns, steps),
            Sizes::new(format!("{CHILDREN} forks: time"), Unit::Milliseconds, ["time"], times),
            Sizes::new(
                format!("{CHILDREN} forks: space"),
                Unit::Megabytes,
                ["disk", "memory"],
                sizes,
            ),
            Sizes::new(
                "podman: commit of the container with 64 MiB, which pauses it, and a run of the new image",
                Unit::Milliseconds,
                ["commit", "run true"],
                commits,
            ),
        ],
        findings,
        ..Report::default()
    })
}

fn measure(bench: &Bench<'_>, layout: &Path, script: &str) -> Result<([u64; 6], [u64; 3])> {
    let layout = format!("oci:{}:latest", layout.display());
    quiet(&mut more!(bench.quire(), "import {layout} small"))?;
    for name in ["parent", "other"] {
        quiet(&mut more!(bench.quire(), "run --detach --name {name} small sleep 100000"))?;
    }
    quiet(&mut more!(bench.quire(), "exec --user 0 parent sh -ec {script}"))?;
    quiet(&mut more!(bench.quire(), "snapshot create other origin"))?;
    let done = bench.small_steps();
    let many = bench.many();
    quiet(&mut more!(bench.quire(), "snapshot rm origin"))?;
    Ok((done?, many?))
}

/// Medians of podman's commit and of a run of the new image.
fn of_podman(context: &Context<'_>, layout: &Path) -> Result<(String, Vec<u64>)> {
    let (_, script) = WRITTEN[0];
    let image = podman::pulled(context, layout)?.context("podman is not installed")?;
    let start =
        more!(podman::run(context, layout, "--detach")?, "--name parent {image} sleep 100000");
    quiet(&mut { start })?;
    quiet(&mut more!(podman(context, layout)?, "exec --user 0 parent sh -ec {script}"))?;
    let (mut commits, mut runs) = (Vec::new(), Vec::new());
    for _ in 0..context.runs {
        let clock = Instant::now();
        quiet(&mut more!(podman(context, layout)?, "commit --quiet parent committed"))?;
        commits.push(nanoseconds(clock.elapsed()));
        let clock = Instant::now();
        quiet(&mut more!(podman::run(context, layout, "--rm")?, "committed true"))?;
        runs.push(nanoseconds(clock.elapsed()));
        quiet(&mut more!(podman(context, layout)?, "rmi --force committed"))?;
    }
    podman::rm(context, layout, "parent")?;
    podman::remove_all(context)?;
    let name = format!("podman {}, runc", crate::version("podman"));
    Ok((name, vec![upper_median(commits), upper_median(runs)]))
}
