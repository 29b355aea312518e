//! Quire: with all layers, and lazily with and without a recorded start.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Result;

use super::containers::Containers;
use super::{Stage, Start, Way};
use crate::command::{cmd, more, run_all, wait_until};
use crate::mounts::is_mounted;
use crate::registry;
use crate::samples::Program;
use crate::service::{self, Service};
use rig::process::quiet;

/// How an image is downloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Whole,
    /// All layers, in the form of a completed lazy image.
    WholeTar,
    /// Lazily, with the recorded start of the program that runs.
    Lazy,
    /// Lazily, without a recorded start.
    Unrecorded,
    /// Lazily, with a download of the rest in the background.
    Completed,
}

pub(super) const KINDS: [Kind; 5] =
    [Kind::Whole, Kind::WholeTar, Kind::Lazy, Kind::Unrecorded, Kind::Completed];

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Whole => "quire pull",
            Self::WholeTar => "quire pull --form tar",
            Self::Lazy => "quire pull --lazy",
            Self::Unrecorded => "quire pull --lazy, without a recorded start",
            Self::Completed => "quire pull --lazy, completed",
        }
    }

    const fn pull(self) -> &'static [&'static str] {
        match self {
            Self::Whole => &[],
            Self::WholeTar => &["--form", "tar"],
            Self::Lazy | Self::Unrecorded | Self::Completed => &["--lazy=require"],
        }
    }

    const fn is_lazy(self) -> bool {
        !matches!(self, Self::Whole | Self::WholeTar)
    }
}

pub(super) struct Quire<'a> {
    stage: &'a Stage<'a>,
    kind: Kind,
    /// The containers at the path of whose root the image is mounted, and never run.
    containers: Option<&'a Containers<'a>>,
    service: RefCell<Option<Service>>,
}

impl<'a> Quire<'a> {
    pub(super) const fn new(stage: &'a Stage<'a>, kind: Kind) -> Self {
        Self { stage, kind, containers: None, service: RefCell::new(None) }
    }

    /// A lazy mount at the path of a container's root.
    pub(super) fn in_containers(stage: &'a Stage<'a>, containers: &'a Containers<'a>) -> Self {
        Self { containers: Some(containers), ..Self::new(stage, Kind::Unrecorded) }
    }

    fn serve(&self, start: &Start<'_>) -> Result<()> {
        if self.kind.is_lazy() {
            self.service.replace(Some(serve(self.stage, &start.options())?));
        }
        Ok(())
    }

    fn pull(&self, start: &Start<'_>, image: &str) -> Command {
        let (options, certs) = (self.kind.pull(), start.options());
        more!(quire(self.stage, "store"), "pull {options...} {certs...} {image}")
    }

    /// Options of `mount` and `run`.
    const fn lazily(&self) -> &'static [&'static str] {
        match self.kind {
            Kind::Whole | Kind::WholeTar => &[],
            Kind::Lazy | Kind::Unrecorded => &["--lazy"],
            Kind::Completed => &["--lazy", "--complete"],
        }
    }
}

impl Way for Quire<'_> {
    fn is_rival(&self) -> bool {
        false
    }

    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn before_with(&self, start: &Start<'_>, prepare: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
        self.stage.context.set_aside("store")?;
        if let Some(containers) = self.containers {
            containers.before(&[])?;
        }
        prepare(&self.data())?;
        self.serve(start)
    }

    fn data(&self) -> PathBuf {
        self.stage.context.work.join("store")
    }

    fn again(&self, start: &Start<'_>) -> Result<()> {
        self.serve(start)?;
        // The first command pulls, which was done before.
        run_all(self.mount(start)?.split_off(1))
    }

    fn is_prepared(&self) -> bool {
        self.kind == Kind::Lazy
    }

    fn mount(&self, start: &Start<'_>) -> Result<Vec<Command>> {
        let (options, image, tree) = (self.lazily(), start.image(), self.tree());
        fs::create_dir_all(&tree)?;
        let mount = more!(quire(self.stage, "store"), "mount {options...} {image} {tree}");
        Ok(vec![self.pull(start, &image), mount])
    }

    fn tree(&self) -> PathBuf {
        match self.containers {
            Some(containers) => containers.place().join("root"),
            None => self.stage.context.work.join("tree"),
        }
    }

    fn settle(&self, start: &Start<'_>) -> Result<bool> {
        if self.kind == Kind::Completed {
            complete(self.stage, &start.image(), Duration::from_millis(100))?;
        }
        Ok(self.kind == Kind::Completed)
    }

    fn run(&self, start: &Start<'_>, program: &Program) -> Result<Vec<Command>> {
        if self.containers.is_some() {
            return self.mount(start);
        }
        let runtime = &self.stage.runtime;
        let run = quire(self.stage, "store");
        let run = more!(run, "run --rm --runtime {runtime}", ..self.lazily());
        if self.kind == Kind::Lazy {
            let image = start.image_of(program);
            return Ok(vec![self.pull(start, &image), more!(run, image)]);
        }
        let (Program { user, arguments, .. }, image) = (program, start.image());
        let pull = self.pull(start, &image);
        Ok(vec![pull, more!(run, "--user {user} {image}", ..*arguments)])
    }

    fn after(&self) -> Result<()> {
        if let Some(containers) = self.containers {
            containers.after()?;
        } else if is_mounted(&self.tree())? {
            let tree = self.tree();
            quiet(&mut more!(quire(self.stage, "store"), "umount {tree}"))?;
        }
        self.service.take();
        Ok(())
    }
}

pub(super) fn quire(stage: &Stage<'_>, store: &str) -> Command {
    let (quire, work) = (stage.context.quire, stage.context.work);
    cmd!("{quire} --store {work}/{store} --quiet")
}

/// Starts `quire serve --lazy`.
pub(super) fn serve(stage: &Stage<'_>, options: &[impl AsRef<OsStr>]) -> Result<Service> {
    let (quire, work) = (stage.context.quire, stage.context.work);
    let serve = cmd!("{quire} --store {work}/store serve --lazy {options...}");
    service::lazy(serve, &work.join("service"), Stdio::inherit())
}

/// Waits until an image that is mounted with `--complete` is downloaded.
pub(super) fn complete(stage: &Stage<'_>, image: &str, pause: Duration) -> Result<()> {
    let what = format!("{image} to become complete");
    wait_until(&what, Duration::from_secs(300), pause, || {
        let mut devices = more!(quire(stage, "store"), "ps --lazy --json");
        // The list of devices is empty once the store has the same image as after a pull.
        Ok(quiet(&mut devices)?.trim() == "[]")
    })
}

/// Pushes the indexes of an image: one without a recorded start, and one with the start of each program, for a copy of
/// the image whose command is the program. Returns the number of bytes sent.
pub(super) fn publish(
    stage: &Stage<'_>,
    start: &Start<'_>,
    store: &Path,
    programs: &[Program],
) -> Result<u64> {
    let (program, image) = (stage.context.quire, start.image());
    let quire = || cmd!("{program} --store {store}");
    registry::pull_with_index(quire(), &image)?;
    let mut sent = registry::push_index(quire(), &image)?;
    for wanted in programs {
        let copy = start.image_of(wanted);
        let command = (wanted.user, wanted.arguments);
        registry::with_command(stage.context, &image, &copy, command)?;
        // All copies have the same layers, so a store would keep one recorded start for all.
        let name = format!("maker-{}", wanted.trace);
        let other = stage.context.work.join(&name);
        let quire = || cmd!("{program} --store {other}");
        registry::pull_with_index(quire(), &copy)?;
        sent += registry::push_start(quire(), &copy)?;
        stage.context.set_aside(&name)?;
    }
    Ok(sent)
}
