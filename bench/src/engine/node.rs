//! A contestant's containerd, the snapshotter beside it, and its client.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rig::process::quiet;

use super::Stage;
use super::kind::Kind;
use crate::command::{cmd, more, run};
use crate::mounts::detach_all;
use crate::samples::Program;
use crate::service::{self, Service, resident, spent};

/// Name of the running node's folder, below the bench's folder.
const PLACE: &str = "node";

/// Name of the container when only one runs at a time, and prefix of the names of several.
const CONTAINER: &str = "quire-bench";

/// A contestant's engine. All contestants use the same folder, one after the other.
pub(super) struct Node<'a> {
    stage: &'a Stage<'a>,
    pub(super) kind: Kind,
    /// Additional configuration tables for pods.
    pods: Option<String>,
    /// The running services. The snapshotter comes first: it starts before the engine, which connects to it, and stops
    /// after it.
    running: RefCell<Vec<(&'static str, Service)>>,
}

/// Memory of a service, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    pub(super) name: &'static str,
    pub(super) most: u64,
    pub(super) now: u64,
}

impl<'a> Node<'a> {
    pub(super) const fn new(stage: &'a Stage<'a>, kind: Kind) -> Self {
        Self { stage, kind, pods: None, running: RefCell::new(Vec::new()) }
    }

    /// Creates an engine that runs pods.
    pub(super) const fn for_pods(stage: &'a Stage<'a>, kind: Kind, tables: String) -> Self {
        Self { stage, kind, pods: Some(tables), running: RefCell::new(Vec::new()) }
    }

    pub(super) fn place(&self) -> PathBuf {
        self.stage.context.work.join(PLACE)
    }

    /// The folder of the engine's state.
    pub(super) fn root(&self) -> PathBuf {
        self.place().join("root")
    }

    /// Starts an engine without any image.
    pub(super) fn start_anew(&self) -> Result<()> {
        self.stop()?;
        self.stage.context.set_aside(PLACE)?;
        fs::create_dir_all(self.place())?;
        self.start()
    }

    fn start(&self) -> Result<()> {
        let place = self.place();
        let socket = place.join("snapshotter");
        let mut services = Vec::new();
        if self.kind == Kind::QuireLazy {
            services.push(("quire serve --lazy", self.begin_lazy()?));
        }
        if let Some(command) = self.kind.service(self.stage, &place, &socket)? {
            let name = self.kind.snapshotter();
            let service = self.begin(command, name, || Ok(socket.exists()))?;
            services.push((name, service));
        }
        let config = self.kind.config(self.stage, &place, &socket, self.pods.as_deref())?;
        fs::write(place.join("config.toml"), config)?;
        let mut containerd = Command::new(self.stage.programs.join("containerd"));
        containerd.arg("--config").arg(place.join("config.toml")).env("PATH", self.stage.path()?);
        let answers = || Ok(quiet(more!(self.ctr(), "version").stdout(Stdio::null())).is_ok());
        services.push(("containerd", self.begin(containerd, "containerd", answers)?));
        self.running.replace(services);
        Ok(())
    }

    fn begin(
        &self,
        mut command: Command,
        name: &str,
        can_be_asked: impl Fn() -> Result<bool>,
    ) -> Result<Service> {
        let log = self.place().join(format!("{name}.log"));
        command.stdout(Stdio::null()).stderr(File::create(&log)?);
        let begun = Service::start(command, name, can_be_asked);
        begun.with_context(|| fs::read_to_string(&log).unwrap_or_default())
    }

    /// Starts the lazy service, which the snapshotter would start with the first image, so that its processor time is
    /// counted.
    fn begin_lazy(&self) -> Result<Service> {
        let place = self.place();
        let log = File::create(place.join("lazy.log"))?;
        let serve = cmd!(self.stage.context.quire, "--store {place}/store serve --lazy");
        service::lazy(serve, &place.join("lazy"), log.into())
    }

    /// Stops the services, and unmounts the mounts that they left.
    pub(super) fn stop(&self) -> Result<()> {
        let mut services = self.running.take();
        while let Some((_, service)) = services.pop() {
            drop(service);
        }
        detach_all(&self.place())
    }

    /// Returns a command of the engine's client.
    pub(super) fn ctr(&self) -> Command {
        let (programs, place) = (&self.stage.programs, self.place());
        cmd!("{programs}/ctr --address {place}/socket")
    }

    pub(super) fn pull(&self, image: &str) -> Command {
        let snapshotter = self.kind.snapshotter();
        more!(self.ctr(), "image pull --plain-http --snapshotter {snapshotter} {image}")
    }

    /// Downloads the blobs of an image without unpacking them.
    pub(super) fn fetch(&self, image: &str) -> Command {
        more!(self.ctr(), "content fetch --plain-http {image}")
    }

    /// Returns a command of the client for the snapshotter.
    fn snapshot(&self) -> Command {
        let snapshotter = self.kind.snapshotter();
        more!(self.ctr(), "snapshot --snapshotter {snapshotter}")
    }

    /// Name of the image's snapshot: the only one that is no other snapshot's parent.
    pub(super) fn top(&self) -> Result<String> {
        let listed = quiet(&mut more!(self.snapshot(), "ls"))?;
        // The columns are the name, the parent, which may be missing, and the kind.
        let rows = listed.lines().skip(1).map(|it| it.split_whitespace().collect::<Vec<_>>());
        let rows: Vec<_> = rows.filter(|it| it.last() == Some(&"Committed")).collect();
        let is_parent = |name: &str| rows.iter().any(|it| it.len() == 3 && it[1] == name);
        let mut tops = rows.iter().filter_map(|it| it.first()).filter(|it| !is_parent(it));
        let top = tops.next().context("the engine has no image")?;
        Ok((*top).to_owned())
    }

    /// Prepares a container's root, named by a number.
    pub(super) fn prepare(&self, number: usize, parent: &str) -> Command {
        more!(self.snapshot(), "prepare", container(number), parent)
    }

    /// Removes a root that [`Node::prepare`] made.
    pub(super) fn drop_root(&self, number: usize) -> Command {
        more!(self.snapshot(), "rm", container(number))
    }

    /// Runs a program in a container that is removed afterwards.
    pub(super) fn run(&self, image: &str, program: &Program) -> Command {
        let Program { user, arguments, .. } = program;
        let run = self.run_in_node("--rm");
        more!(run, "--user {user} {image} {CONTAINER}", ..*arguments)
    }

    /// The beginning of a command that runs a container, with an option.
    fn run_in_node(&self, option: &str) -> Command {
        let (place, snapshotter) = (self.place(), self.kind.snapshotter());
        let run = more!(self.ctr(), "run {option} --snapshotter {snapshotter}");
        more!(run, "--runc-root {place}/runc")
    }

    /// Starts a container in the background, named by a number.
    pub(super) fn run_detached(&self, image: &str, number: usize, program: &[&str]) -> Command {
        more!(self.run_in_node("--detach"), image, container(number), ..program)
    }

    /// Starts many containers in the background, some at a time, by one command that fails if any of them does.
    pub(super) fn run_at_once(
        &self,
        image: &str,
        count: usize,
        at_a_time: usize,
        program: &[&str],
    ) -> Result<Command> {
        let (numbers, at_a_time) = (self.place().join("numbers"), at_a_time.to_string());
        let lines: String = (0..count).map(|it| format!("{it}\n")).collect();
        fs::write(&numbers, lines)?;
        let one = more!(self.run_in_node("--detach"), "{image} {CONTAINER}-@", ..program);
        let all = cmd!("xargs --arg-file {numbers} --max-procs={at_a_time} -I@");
        Ok(more!(all, one.get_program(), ..one.get_args()))
    }

    /// Runs a program in a running container.
    pub(super) fn exec(&self, number: usize, program: &[&str]) -> Command {
        more!(self.ctr(), "task exec --exec-id reader", container(number), ..program)
    }

    /// Stops and removes a container, if it exists.
    pub(super) fn end(&self, number: usize) {
        let name = container(number);
        let _gone = quiet(&mut more!(self.ctr(), "task delete --force {name}"));
        let _gone = quiet(&mut more!(self.ctr(), "container delete {name}"));
    }

    /// Processor time of all services so far, including that of children that have exited.
    pub(super) fn spent(&self) -> Result<Duration> {
        self.running.borrow().iter().map(|(_, it)| spent(it.process())).sum()
    }

    pub(super) fn resident(&self) -> Result<Vec<Resident>> {
        let of = |(name, service): &(&'static str, Service)| {
            let (most, now) = resident(service.process())?;
            Ok(Resident { name, most, now })
        };
        self.running.borrow().iter().map(of).collect()
    }

    /// Pulls an image into Quire's store without the engine.
    pub(super) fn pull_into_store(&self, image: &str) -> Result<()> {
        let place = self.place();
        run!(self.stage.context.quire, "--store {place}/store --quiet pull {image}").map(drop)
    }
}

/// Name of a container, by its number.
fn container(number: usize) -> String {
    format!("{CONTAINER}-{number}")
}

impl Drop for Node<'_> {
    fn drop(&mut self) {
        // Stops the services even if the bench fails.
        let _stopped = self.stop();
    }
}

/// Quotes a path for TOML.
pub(super) fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}
