//! Quire: with all layers, lazily, and lazily with a trace.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::containers::Containers;
use super::{Stage, Start, Way};
use crate::mounts::is_mounted;
use crate::registry;
use crate::samples::{Program, Sample};
use crate::service::Service;
use rig::process::quiet;

/// How an image is downloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Whole,
    /// All layers, in the form of a completed lazy image.
    WholeTar,
    Lazy,
    /// Lazily, with a trace of the program that runs.
    Traced,
    /// Lazily, with a download of the rest in the background.
    Completed,
}

pub(super) const KINDS: [Kind; 5] =
    [Kind::Whole, Kind::WholeTar, Kind::Lazy, Kind::Traced, Kind::Completed];

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Whole => "quire pull",
            Self::WholeTar => "quire pull --form tar",
            Self::Lazy => "quire pull --lazy",
            Self::Traced => "quire pull --lazy, traced",
            Self::Completed => "quire pull --lazy, completed",
        }
    }

    const fn pull(self) -> &'static [&'static str] {
        match self {
            Self::Whole => &[],
            Self::WholeTar => &["--form", "tar"],
            Self::Lazy | Self::Traced | Self::Completed => &["--lazy=require"],
        }
    }

    const fn is_lazy(self) -> bool {
        !matches!(self, Self::Whole | Self::WholeTar)
    }
}

pub(super) struct Quire<'a> {
    stage: &'a Stage<'a>,
    kind: Kind,
    service: RefCell<Option<Service>>,
}

impl<'a> Quire<'a> {
    pub(super) const fn new(stage: &'a Stage<'a>, kind: Kind) -> Self {
        Self { stage, kind, service: RefCell::new(None) }
    }
}

impl Way for Quire<'_> {
    fn is_rival(&self) -> bool {
        false
    }

    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn before_with(&self, _: &Start<'_>, prepare: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
        self.stage.context.set_aside("store")?;
        prepare(&self.data())?;
        if self.kind.is_lazy() {
            self.service.replace(Some(serve(self.stage, &[])?));
        }
        Ok(())
    }

    fn data(&self) -> PathBuf {
        self.stage.context.work.join("store")
    }

    fn again(&self, start: &Start<'_>) -> Result<()> {
        if self.kind.is_lazy() {
            self.service.replace(Some(serve(self.stage, &[])?));
        }
        // The first command pulls, which was done before.
        self.mount(start)?.iter_mut().skip(1).try_for_each(|it| quiet(it).map(drop))
    }

    fn is_prepared(&self) -> bool {
        self.kind == Kind::Traced
    }

    fn mount(&self, start: &Start<'_>) -> Result<Vec<Command>> {
        fs::create_dir_all(self.tree())?;
        let mut mount = quire(self.stage, "store");
        mount.arg("mount").args(self.lazily("none")).arg(start.image()).arg(self.tree());
        Ok(vec![self.pull(start), mount])
    }

    fn tree(&self) -> PathBuf {
        self.stage.context.work.join("tree")
    }

    fn settle(&self, start: &Start<'_>) -> Result<bool> {
        if self.kind != Kind::Completed {
            return Ok(false);
        }
        let begun = Instant::now();
        let mut devices = quire(self.stage, "store");
        devices.args(["ps", "--lazy", "--json"]);
        // The list of devices is empty once the store has the same image as after a pull.
        while quiet(&mut devices)?.trim() != "[]" {
            if begun.elapsed() > Duration::from_secs(300) {
                bail!("{} does not become complete", start.image());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(true)
    }

    fn run(&self, start: &Start<'_>, program: &Program) -> Result<Vec<Command>> {
        let mut run = quire(self.stage, "store");
        run.args(["run", "--rm", "--user", program.user, "--runtime"]).arg(&self.stage.runtime);
        run.args(self.lazily(program.trace)).arg(start.image()).args(program.arguments);
        Ok(vec![self.pull(start), run])
    }

    fn after(&self) -> Result<()> {
        if is_mounted(&self.tree())? {
            quiet(quire(self.stage, "store").arg("umount").arg(self.tree()))?;
        }
        self.service.take();
        Ok(())
    }
}

impl Quire<'_> {
    fn pull(&self, start: &Start<'_>) -> Command {
        let mut pull = quire(self.stage, "store");
        pull.arg("pull").args(self.kind.pull()).arg(start.image());
        pull
    }

    /// Options of `mount` and `run`.
    fn lazily<'b>(&self, trace: &'b str) -> Vec<&'b str> {
        match self.kind {
            Kind::Whole | Kind::WholeTar => Vec::new(),
            Kind::Lazy => vec!["--lazy", "--prefetch", "none"],
            Kind::Traced => vec!["--lazy", "--prefetch", trace],
            Kind::Completed => vec!["--lazy", "--prefetch", "none", "--complete"],
        }
    }
}

/// A lazy mount at the path of a container's root.
pub(super) struct LazyMount<'a> {
    stage: &'a Stage<'a>,
    containers: &'a Containers<'a>,
    /// Options of the service.
    options: &'static [&'static str],
    service: RefCell<Option<Service>>,
}

impl<'a> LazyMount<'a> {
    pub(super) const fn new(
        stage: &'a Stage<'a>,
        containers: &'a Containers<'a>,
        options: &'static [&'static str],
    ) -> Self {
        Self { stage, containers, options, service: RefCell::new(None) }
    }
}

impl Way for LazyMount<'_> {
    fn name(&self) -> &'static str {
        "quire mount --lazy"
    }

    fn before_with(&self, _: &Start<'_>, prepare: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
        self.stage.context.set_aside("store")?;
        self.containers.before(&[])?;
        prepare(&self.data())?;
        self.service.replace(Some(serve(self.stage, self.options)?));
        Ok(())
    }

    fn data(&self) -> PathBuf {
        self.stage.context.work.join("store")
    }

    fn again(&self, start: &Start<'_>) -> Result<()> {
        self.service.replace(Some(serve(self.stage, self.options)?));
        // The first command pulls, which was done before.
        self.mount(start)?.iter_mut().skip(1).try_for_each(|it| quiet(it).map(drop))
    }

    fn is_prepared(&self) -> bool {
        false
    }

    fn tree(&self) -> PathBuf {
        self.containers.place().join("root")
    }

    fn mount(&self, start: &Start<'_>) -> Result<Vec<Command>> {
        let mut pull = quire(self.stage, "store");
        pull.args(["pull", "--lazy=require"]).arg(start.image());
        let mut mount = quire(self.stage, "store");
        mount.args(["mount", "--lazy", "--prefetch", "none"]).arg(start.image());
        mount.arg(self.tree());
        Ok(vec![pull, mount])
    }

    fn run(&self, start: &Start<'_>, _: &Program) -> Result<Vec<Command>> {
        self.mount(start)
    }

    fn after(&self) -> Result<()> {
        self.containers.after()?;
        self.service.take();
        Ok(())
    }
}

pub(super) fn quire(stage: &Stage<'_>, store: &str) -> Command {
    let mut quire = Command::new(stage.context.quire);
    quire.arg("--store").arg(stage.context.work.join(store)).arg("--quiet");
    quire
}

/// Starts `quire serve --lazy`.
pub(super) fn serve(stage: &Stage<'_>, options: &[&str]) -> Result<Service> {
    let work = stage.context.work;
    let said = work.join("service");
    let mut command = Command::new(stage.context.quire);
    command.arg("--store").arg(work.join("store")).args(["serve", "--lazy"]).args(options);
    command.stdout(File::create(&said)?);
    // The service prints a line as soon as it accepts requests.
    Service::start(command, "quire serve --lazy", || Ok(fs::metadata(&said)?.len() > 0))
}

/// Pushes an image's index and traces to the registry that has the image, and returns the number of bytes sent.
pub(super) fn publish(
    stage: &Stage<'_>,
    sample: &Sample,
    image: &str,
    store: &Path,
) -> Result<u64> {
    let quire = || {
        let mut quire = Command::new(stage.context.quire);
        quire.arg("--store").arg(store);
        quire
    };
    registry::pull_with_index(quire(), image)?;
    for program in sample.programs {
        let mut traced = quire();
        traced.args(["--quiet", "trace", "--as", program.trace, "--user", program.user]);
        traced.arg("--runtime").arg(&stage.runtime).arg(image).args(program.arguments);
        quiet(&mut traced)?;
    }
    registry::push_index(quire(), image)
}
