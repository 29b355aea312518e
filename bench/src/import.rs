//! Import of an OCI layout into a store, ready to be mounted.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::report::{Report, Table, ratio};
use crate::Context;
use rig::cache::remove;
use rig::inputs;
use rig::process::{find, quiet};
use rig::tools;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::debian_postgres(context.cache, false)?;
    let place = |name: &str| context.work.join(name);
    let source = format!("oci:{}:latest", layout.display());
    let mut contestants = vec![
        Contestant::new("quire import", || {
            let mut quire = Command::new(context.quire);
            quire.arg("--store").arg(place("store")).arg("import").arg(&source).arg("postgres");
            Ok(vec![quire])
        })
        .before(|| context.set_aside("store")),
    ];
    let mut absent = Vec::new();
    if let Some(umoci) = find("umoci") {
        let image = format!("{}:latest", layout.display());
        let command = move || {
            let mut command = Command::new(&umoci);
            command.args(["unpack", "--image", &image]).arg(place("umoci"));
            Ok(vec![command])
        };
        let version = crate::version("umoci", "--version")?;
        contestants.push(
            Contestant::new(&format!("umoci unpack ({version})"), command)
                .before(|| context.set_aside("umoci")),
        );
    } else {
        absent.push("umoci");
    }
    if find("podman").is_some() {
        let command = || {
            let mut podman = podman(context, &layout)?;
            podman.args(["pull", "--quiet", PODMAN_SOURCE]);
            Ok(vec![podman])
        };
        let version = crate::version("podman", "--version")?;
        contestants.push(
            Contestant::new(&format!("podman pull ({version})"), command)
                .before(|| set_podman_aside(context)),
        );
    } else {
        absent.push("podman");
    }
    if let Some(cfsctl) = tools::built_cfsctl(context.cache) {
        let repository = place("cfsctl");
        let init = {
            let (cfsctl, repository) = (cfsctl.clone(), repository.clone());
            move || {
                context.set_aside("cfsctl")?;
                let mut init = Command::new(&cfsctl);
                init.arg("--repo").arg(&repository).args(["init", "--insecure"]);
                quiet(&mut init).map(drop)
            }
        };
        let source = &source;
        let command = move || {
            let mut command = Command::new(&cfsctl);
            command.arg("--insecure").arg("--repo").arg(&repository);
            command.args(["oci", "pull", source, "postgres"]);
            Ok(vec![command])
        };
        contestants
            .push(Contestant::new("cfsctl oci pull (composefs-rs 0.9.4)", command).before(init));
    } else {
        absent.push("cfsctl (cargo xtask inputs cfsctl)");
    }
    let (table, findings) =
        race(context, contestants, "debian-postgres", &absent, &["umoci", "podman", "cfsctl"])?;
    Ok(Report {
        name: "import",
        about: String::from(
            "Debian with PostgreSQL, two gzip layers, 22,500 entries, 700 MB unpacked, into an empty store. The layers are in \
             the page cache. A `syncfs` of the file system is on everybody's clock.",
        ),
        tables: vec![table],
        sizes: Vec::new(),
        findings,
    })
}

/// Measures ways to bring an image onto this machine, each with a sync on the clock, and compares Quire, which comes
/// first, with each of `rivals`, which are prefixes of contestants' names. podman's storage is removed at the end.
pub(super) fn race(
    context: &Context<'_>,
    mut contestants: Vec<Contestant<'_>>,
    title: &str,
    absent: &[&str],
    rivals: &[&str],
) -> Result<(Table, Vec<String>)> {
    let rules = Rules {
        runs: context.runs,
        sync: Some(context.work.to_owned()),
        cold: false,
        pace: Pace::Turns,
        memory: Memory::AllProcesses,
    };
    let outcomes = measure(&rules, &mut contestants)?;
    drop(contestants);
    remove_podman(context)?;
    let mut findings: Vec<_> = absent.iter().map(|it| format!("{it} is not installed")).collect();
    findings.extend(rivals.iter().filter_map(|it| ratio(&outcomes, "quire", it)));
    let (memory, runs) = (rules.memory, rules.runs);
    Ok((Table { title: title.to_owned(), memory, runs, outcomes }, findings))
}

/// podman's reference of the layout, by a link with a plain name, because podman derives the image's name from the
/// path and does not accept every path.
pub(super) const PODMAN_SOURCE: &str = "oci:layout:latest";

/// Returns a podman command with all of podman's state below the bench's folder, where the layout is linked as
/// `layout`.
pub(super) fn podman(context: &Context<'_>, layout: &Path) -> Result<Command> {
    let link = context.work.join("layout");
    if !link.exists() {
        symlink(layout, link)?;
    }
    let mut podman = Command::new("podman");
    podman.arg("--root").arg(context.work.join("podman"));
    podman.arg("--runroot").arg(context.work.join("podman-run"));
    podman.args(["--storage-driver=overlay", "--cgroup-manager=cgroupfs", "--events-backend=none"]);
    podman.current_dir(context.work);
    Ok(podman)
}

/// Moves podman's storage out of the way of the next run.
pub(super) fn set_podman_aside(context: &Context<'_>) -> Result<()> {
    unmount_podman(context)?;
    context.set_aside("podman")?;
    context.set_aside("podman-run")
}

pub(super) fn remove_podman(context: &Context<'_>) -> Result<()> {
    unmount_podman(context)?;
    remove(&context.work.join("podman"))?;
    remove(&context.work.join("podman-run"))
}

/// Unmounts the bind mount of its storage folder onto itself that podman leaves behind.
fn unmount_podman(context: &Context<'_>) -> Result<()> {
    match unmount(context.work.join("podman/overlay"), UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(error) => Err(error).context("cannot unmount podman's storage"),
    }
}
