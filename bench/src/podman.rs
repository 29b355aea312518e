//! podman, with all of its state below the bench's folder.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::Context;
use crate::command::{cmd, more};
use rig::cache::remove;
use rig::process::{find_program, quiet};

/// podman's reference of the layout, by a link with a plain name, because podman derives the image's name from the
/// path and does not accept every path.
const SOURCE: &str = "oci:layout:latest";

/// Returns a podman command. The layout is linked as `layout`.
pub(super) fn podman(context: &Context<'_>, layout: &Path) -> Result<Command> {
    let link = context.work.join("layout");
    if !link.exists() {
        symlink(layout, link)?;
    }
    let mut podman = below(context.work);
    podman.current_dir(context.work);
    Ok(podman)
}

/// Returns a podman command for the state below a bench's folder.
pub(super) fn below(work: &Path) -> Command {
    cmd!(
        "podman --root {work}/podman --runroot {work}/podman-run",
        "--storage-driver=overlay --cgroup-manager=cgroupfs --events-backend=none"
    )
}

/// The finding without podman.
pub(super) const ABSENT: &str = "podman, or runc for it, is not installed";

/// The command that pulls the layout.
pub(super) fn pull(context: &Context<'_>, layout: &Path) -> Result<Command> {
    Ok(more!(podman(context, layout)?, "pull --quiet {SOURCE}"))
}

/// Name of podman's image of the layout, which is pulled; none if podman, or runc for it, is not installed.
pub(super) fn pulled(context: &Context<'_>, layout: &Path) -> Result<Option<String>> {
    if find_program("podman").and(find_program("runc")).is_none() {
        return Ok(None);
    }
    Ok(Some(quiet(&mut pull(context, layout)?)?.trim().to_owned()))
}

/// The beginning of a command that runs a container by runc, with one more option.
pub(super) fn run(context: &Context<'_>, layout: &Path, option: &str) -> Result<Command> {
    run_by("runc", context, layout, option)
}

/// The beginning of a command that runs a container by a runtime, with one more option.
pub(super) fn run_by(
    runtime: &str,
    context: &Context<'_>,
    layout: &Path,
    option: &str,
) -> Result<Command> {
    // podman raises the limits by default, which is not permitted everywhere.
    Ok(more!(
        podman(context, layout)?,
        "--runtime {runtime} run {option} --network=none",
        "--ulimit nofile=1024:1024 --ulimit nproc=1024:1024"
    ))
}

/// Removes a container.
pub(super) fn rm(context: &Context<'_>, layout: &Path, name: &str) -> Result<()> {
    quiet(&mut more!(podman(context, layout)?, "rm --force --time=0 {name}")).map(drop)
}

/// Moves podman's storage out of the way of the next run.
pub(super) fn set_aside(context: &Context<'_>) -> Result<()> {
    unmount_podman(context)?;
    context.set_aside("podman")?;
    context.set_aside("podman-run")
}
pub(super) fn remove_all(context: &Context<'_>) -> Result<()> {
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
