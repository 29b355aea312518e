//! Lazy mounts of an image by a service: Quire's and third-party ones.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::nydus::Nydus;
use super::quire::Quire;
use super::stargz::Stargz;
use super::{Published, Stage, Start, Way};
use crate::command::{run_all, wait_until};
use crate::mounts::unmount_all;
use crate::service::processes;

/// Name of Quire's mount.
pub(super) const QUIRE: &str = "quire";

/// A lazy mount of an image.
pub(super) struct Mounted<'a> {
    pub(super) name: &'static str,
    /// Executable of its service.
    pub(super) program: PathBuf,
    pub(super) way: Box<dyn Way + 'a>,
    /// Folder of all of its files.
    work: PathBuf,
}

/// All lazy mounts that are available, Quire's first.
pub(super) fn mounts<'a>(stage: &'a Stage<'a>, published: &'a Published<'a>) -> Vec<Mounted<'a>> {
    let Published { containers, nydus, stargz, .. } = published;
    let mut all = Vec::new();
    let mut add = |name, program: &Path, way: Box<dyn Way + 'a>| {
        let work = stage.context.work.to_owned();
        all.push(Mounted { name, program: program.to_owned(), way, work });
    };
    add(QUIRE, stage.context.quire, Box::new(Quire::in_containers(stage, containers)));
    if let Some(converted) = nydus {
        let name = "Nydus v3, fanotify";
        let way = Nydus { name, containers, converted, is_optimized: false };
        add(name, &converted.program, Box::new(way));
    }
    if let Some(converted) = stargz {
        let way = Stargz::new("stargz", containers, converted, false);
        add("stargz", &converted.program, Box::new(way));
    }
    all
}

impl Mounted<'_> {
    /// Mounts the image at the path of the way's container roots.
    pub(super) fn mount(&self, start: &Start<'_>) -> Result<()> {
        self.mount_with(start, &|_| Ok(()))
    }

    /// Mounts the image like [`Mounted::mount`]; `prepare` gets the data folder while it is still empty.
    pub(super) fn mount_with(
        &self,
        start: &Start<'_>,
        prepare: &dyn Fn(&Path) -> Result<()>,
    ) -> Result<()> {
        self.way.before_with(start, prepare)?;
        let program = &start.sample.programs[0];
        // The first two commands mount the image.
        let mut commands = self.way.run(start, program)?;
        commands.truncate(2);
        run_all(commands)
    }

    /// Processes of the mount, the service first.
    pub(super) fn processes(&self) -> Result<Vec<Pid>> {
        let found = processes(&self.program, &self.work)?;
        if found.is_empty() {
            bail!("the service of {} does not run", self.name);
        }
        Ok(found)
    }

    /// Unmounts the image and stops its processes. A killed service may have left mounts.
    pub(super) fn end(&self, place: &Path, may_be_dead: bool) -> Result<()> {
        let left = self.way.after();
        let (limit, pause) = (Duration::from_secs(10), Duration::from_millis(20));
        // A process may just have started another one, so all of them are stopped before the first is killed.
        let _still_there = wait_until("the end of a service", limit, pause, || {
            let found = processes(&self.program, &self.work)?;
            for signal in [Signal::STOP, Signal::KILL] {
                for pid in &found {
                    let _gone = kill_process(*pid, signal);
                }
            }
            Ok(found.is_empty())
        });
        unmount_all(place)?;
        // The last process to exit releases the disk that its data was on.
        let data = self.way.data();
        let _busy = wait_until("a disk", limit, pause, || Ok(unmount_all(&data).is_ok()));
        unmount_all(&data)?;
        if may_be_dead { Ok(()) } else { left }
    }
}
