//! Twenty images of one base, each with a container that runs: time, disk and page cache.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result};

use super::command::{cmd, more};
use super::measure::{drop_caches, nanoseconds};
use super::podman::{self, podman};
use super::proc::page_cache;
use super::report::{Report, Sizes, Unit};
use super::versions::disk;
use crate::Context;
use rig::cache::remove;
use rig::inputs::layout;
use rig::inputs::versions::{self, COUNT, Cut, Versions};
use rig::process::{find_program, quiet};

/// The files that each container reads: the application and its runtime.
const READ: &str = "find /opt/app /usr/lib/python3* -type f -exec cat {} + > /dev/null";

/// A tool that runs images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Quire, with its form of the images.
    Quire(&'static str),
    Podman,
}

const WAYS: [Way; 4] =
    [Way::Quire("objects"), Way::Quire("packed"), Way::Quire("tar"), Way::Podman];

impl Way {
    fn name(self) -> String {
        match self {
            Self::Quire(form) => format!("quire, {form}"),
            Self::Podman => format!("podman, runc ({})", crate::version("podman")),
        }
    }

    fn command(self, context: &Context<'_>) -> Result<Command> {
        let (quire, work) = (context.quire, context.work);
        match self {
            Self::Quire(form) => Ok(cmd!("{quire} --store {work}/store-{form} --quiet")),
            Self::Podman => podman(context, &work.join("layout-1")),
        }
    }

    /// Brings the images into the tool's storage.
    fn store(self, context: &Context<'_>) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for version in 1..=COUNT {
            let layout = format!("oci:layout-{version}:latest");
            let command = self.command(context)?;
            match self {
                Self::Quire(form) => {
                    let name = format!("app:{version}");
                    let mut import = more!(command, "import --form {form} {layout} {name}");
                    quiet(import.current_dir(context.work))?;
                    names.push(name);
                }
                Self::Podman => {
                    let mut pull = more!(command, "pull --quiet {layout}");
                    names.push(quiet(pull.current_dir(context.work))?.trim().to_owned());
                }
            }
        }
        Ok(names)
    }

    /// Starts a container that sleeps.
    fn start(self, context: &Context<'_>, name: &str, image: &str) -> Result<()> {
        let command = match self {
            Self::Quire(_) => more!(self.command(context)?, "run --detach --name {name} {image}"),
            Self::Podman => {
                let layout = context.work.join("layout-1");
                more!(podman::run(context, &layout, "--detach")?, "--name {name} {image}")
            }
        };
        quiet(&mut more!(command, "sleep 100000")).map(drop)
    }

    fn read(self, context: &Context<'_>, name: &str) -> Result<()> {
        quiet(&mut more!(self.command(context)?, "exec {name} sh -ec {READ}")).map(drop)
    }

    fn remove(self, context: &Context<'_>, name: &str) -> Result<()> {
        let command = self.command(context)?;
        quiet(&mut match self {
            Self::Quire(_) => more!(command, "rm --container --force {name}"),
            Self::Podman => more!(command, "rm --force --time=0 {name}"),
        })
        .map(drop)
    }
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let versions = versions::make(context.cache, false)?;
    publish(context, &versions)?;
    let (mut rows, mut findings) = (Vec::new(), Vec::new());
    for way in WAYS {
        if way == Way::Podman && find_program("podman").and(find_program("runc")).is_none() {
            findings.push(String::from(podman::ABSENT));
            continue;
        }
        rows.push((way.name(), measure(context, way)?));
    }
    podman::remove_all(context)?;
    let (mut times, mut bytes) = (Vec::new(), Vec::new());
    for (name, [disk, cached, first, second]) in rows {
        times.push((name.clone(), vec![first, second]));
        bytes.push((name, vec![disk, cached]));
    }
    let what = format!("{COUNT} derived images, a container of each");
    Ok(Report {
        name: "derived",
        about: format!(
            "{COUNT} consecutive releases of an application on one base and runtime (the images of the bench \
             `versions`, *layered*), each with one container that sleeps. *Start*: all containers, one after the \
             other, with cold caches, except for the tool's own programs and one image's metadata, which another container has \
             read before. *Read*: in one container after the other, `cat` of the application and its \
             runtime. *Page cache*: growth of the machine's page cache, with all containers running. *Disk*: blocks of the \
             tool's storage before the start. One run of each."
        ),
        sizes: vec![
            Sizes::new(format!("{what}: time"), Unit::Milliseconds, ["start", "read"], times),
            Sizes::new(format!("{what}: space"), Unit::Megabytes, ["disk", "page cache"], bytes),
        ],
        findings,
        ..Report::default()
    })
}

/// Writes a layout of each version.
fn publish(context: &Context<'_>, versions: &Versions) -> Result<()> {
    for version in 1..=COUNT {
        let layers = versions.layers(Cut::Layered, version)?;
        let to = context.work.join(format!("layout-{version}"));
        layout::write(&to, &layout::Config::default(), &layers)?;
    }
    Ok(())
}

/// Bytes on the disk and in the page cache, and nanoseconds of the starts and of the reads.
fn measure(context: &Context<'_>, way: Way) -> Result<[u64; 4]> {
    let images = way.store(context)?;
    rustix::fs::sync();
    let place = match way {
        Way::Quire(form) => context.work.join(format!("store-{form}")),
        Way::Podman => context.work.join("podman"),
    };
    let disk = disk(&place)?;
    let names: Vec<_> = (1..=COUNT).map(|it| format!("derived-{it}")).collect();
    drop_caches()?;
    // The programs of the tools are not part of the images, so they are in the cache before.
    let warm = "derived-warm";
    way.start(context, warm, &images[0])?;
    way.remove(context, warm)?;
    let before = page_cache()?;
    let run = || -> Result<[u64; 3]> {
        let clock = Instant::now();
        for (name, image) in names.iter().zip(&images) {
            way.start(context, name, image)?;
        }
        let started = clock.elapsed();
        let clock = Instant::now();
        names.iter().try_for_each(|it| way.read(context, it))?;
        let read = clock.elapsed();
        Ok([page_cache()?.saturating_sub(before), nanoseconds(started), nanoseconds(read)])
    };
    let measured = run();
    let removed: Vec<_> = names.iter().map(|it| way.remove(context, it)).collect();
    match way {
        Way::Quire(_) => {
            quiet(&mut more!(way.command(context)?, "gc --wait"))?;
            remove(&place)?;
        }
        Way::Podman => podman::remove_all(context)?,
    }
    let [cached, started, read] = measured?;
    removed.into_iter().collect::<Result<()>>().context("cannot remove a container")?;
    Ok([disk, cached, started, read])
}
