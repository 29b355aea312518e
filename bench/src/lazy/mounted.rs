//! Lazy mounts of an image by a service: Quire's and third-party ones.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::nydus::Nydus;
use super::stargz::Stargz;
use super::{Published, Stage, Start, Way, quire};
use crate::mounts::unmount_all;
use crate::service::processes;
use rig::process::quiet;

/// Quire with fanotify marks.
pub(super) const MARKED: &str = "quire, --door fanotify";
/// Quire with files on FUSE, which is its default.
pub(super) const OVER_FUSE: &str = "quire, --door fuse";

/// A lazy mount of an image.
pub(super) struct Mounted<'a> {
    pub(super) name: &'static str,
    /// Executable of its service.
    pub(super) program: PathBuf,
    pub(super) way: Box<dyn Way + 'a>,
    /// Number of the way's commands that mount the image.
    commands: usize,
    /// Folder of all of its files.
    work: PathBuf,
}

/// All lazy mounts that are available, Quire's first.
pub(super) fn mounts<'a>(stage: &'a Stage<'a>, published: &'a Published<'a>) -> Vec<Mounted<'a>> {
    let Published { containers, nydus, stargz, .. } = published;
    let work = || stage.context.work.to_owned();
    let quires: [(&str, &[&str]); 2] =
        [(MARKED, &["--door", "fanotify"]), (OVER_FUSE, &["--door", "fuse"])];
    let mut all = Vec::new();
    for (name, options) in quires {
        let way = Box::new(quire::LazyMount::new(stage, containers, options));
        let program = stage.context.quire.to_owned();
        all.push(Mounted { name, program, way, commands: 2, work: work() });
    }
    if let Some(converted) = nydus {
        let name = "Nydus v3, fanotify";
        let way = Box::new(Nydus { name, containers, converted, is_optimized: false });
        let program = converted.program.clone();
        all.push(Mounted { name, program, way, commands: 2, work: work() });
    }
    if let Some(converted) = stargz {
        let name = "stargz";
        let way = Box::new(Stargz::new(name, containers, converted, false));
        let program = converted.program.clone();
        all.push(Mounted { name, program, way, commands: 2, work: work() });
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
        let mut commands = self.way.run(start, program)?;
        commands.iter_mut().take(self.commands).try_for_each(|it: &mut Command| quiet(it).map(drop))
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
        // A process may just have started another one, so all of them are stopped before the first is killed.
        let begun = Instant::now();
        loop {
            let found = processes(&self.program, &self.work)?;
            if found.is_empty() || begun.elapsed() > Duration::from_secs(10) {
                break;
            }
            for signal in [Signal::STOP, Signal::KILL] {
                for pid in &found {
                    let _gone = kill_process(*pid, signal);
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        unmount_all(place)?;
        // The last process to exit releases the disk that its data was on.
        let begun = Instant::now();
        while let Err(error) = unmount_all(&self.way.data()) {
            if begun.elapsed() > Duration::from_secs(10) {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if may_be_dead { Ok(()) } else { left }
    }
}
