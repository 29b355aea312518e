//! A thousand containers of ten images: the machine's memory, the time of starts, of a list and of the removal, and
//! the remains.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::command::{cmd, more};
use super::density::{measure, without_cgroup2};
use super::measure::{drop_caches, nanoseconds, upper_median};
use super::mounts::mounts;
use super::podman::{self, podman};
use super::proc::bytes;
use super::report::{Report, Sizes, Unit};
use crate::Context;
use rig::Skipped;
use rig::cache::remove;
use rig::inputs::{self, layer, layout};
use rig::process::{find_program, quiet};

/// Number of images. Each has the same base, and another layer above it.
const IMAGES: usize = 10;

/// Number of containers of all images together.
const COUNT: usize = 1000;

/// The same for podman, which takes several times as long.
const COUNT_PODMAN: usize = 200;

/// Number of containers that start at the same time.
const AT_ONCE: usize = 8;

/// Maximum number of runs, because each takes minutes.
const RUNS_MAX: usize = 3;

/// Time after the last start until the memory is read. Processes that wait give back memory in this time.
const REST: Duration = Duration::from_secs(10);

/// Maximum time after the removal's end until nothing is left.
const LEAVE_MAX: Duration = Duration::from_secs(20);

/// Number of timed lists in a run.
const LISTS: usize = 5;

/// The command that each container runs.
const SLEEP: [&str; 2] = ["sleep", "100000"];

/// Names of the processes that a tool may leave behind, beside the program of the containers.
const PROCESSES: [&str; 5] = ["quire", "crun", "podman", "conmon", "catatonit"];

/// Size of an image's own layer: files, and bytes of each.
const OWN: (usize, usize) = (100, 16 << 10);

/// A tool that runs the containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Quire, with changes in the default place.
    Default,
    /// Quire, with changes in memory.
    Memory,
    Podman,
}

const WAYS: [Way; 3] = [Way::Default, Way::Memory, Way::Podman];

impl Way {
    fn name(self) -> String {
        match self {
            Self::Default => String::from("quire, default"),
            Self::Memory => String::from("quire, memory"),
            Self::Podman => format!("podman {}, {COUNT_PODMAN} only", crate::version("podman")),
        }
    }

    const fn count(self) -> usize {
        match self {
            Self::Default | Self::Memory => COUNT,
            Self::Podman => COUNT_PODMAN,
        }
    }
}

/// Names of the containers of a bench.
fn container(number: usize) -> String {
    format!("thousand-{number}")
}

/// The containers of a way, which are removed on drop.
struct Containers<'a> {
    context: &'a Context<'a>,
    way: Way,
    /// The images, by names that the tool knows.
    images: Vec<String>,
    runtime: PathBuf,
}

/// Measurements of one run.
struct Sample {
    /// Nanoseconds of all starts, of a list, of the removal, and until nothing of the containers is left.
    times: [u64; 4],
    /// Bytes of memory of each container.
    memory: u64,
    left: Present,
}

impl Containers<'_> {
    fn command(&self) -> Result<Command> {
        let Context { quire, work, .. } = self.context;
        match self.way {
            Way::Default | Way::Memory => Ok(cmd!("{quire} --store {work}/store --quiet")),
            Way::Podman => podman(self.context, &layout_of(self.context, 0)),
        }
    }

    /// Brings the images into the tool's storage.
    fn store(&mut self) -> Result<()> {
        for number in 0..IMAGES {
            let source = format!("oci:{}:latest", layout_name(number));
            let name = match self.way {
                Way::Default | Way::Memory => {
                    let name = format!("image:{number}");
                    let mut import = more!(self.command()?, "import {source} {name}");
                    quiet(import.current_dir(self.context.work))?;
                    name
                }
                Way::Podman => {
                    let mut pull = more!(self.command()?, "pull --quiet {source}");
                    quiet(pull.current_dir(self.context.work))?.trim().to_owned()
                }
            };
            self.images.push(name);
        }
        Ok(())
    }

    /// The command that starts a container. Consecutive containers have different images.
    fn start(&self, number: usize) -> Result<Command> {
        let (name, image) = (container(number), &self.images[number % IMAGES]);
        let runtime = &self.runtime;
        let run = match self.way {
            Way::Default => more!(self.command()?, "run --runtime {runtime} --detach"),
            Way::Memory => {
                more!(self.command()?, "run --runtime {runtime} --writable memory --detach")
            }
            Way::Podman => {
                let runtime = runtime.display().to_string();
                let layout = layout_of(self.context, 0);
                podman::run_by(&runtime, self.context, &layout, "--detach")?
            }
        };
        Ok(more!(run, "--name {name} {image} {SLEEP...}"))
    }

    fn list(&self) -> Result<Command> {
        Ok(more!(self.command()?, "ps --all --quiet"))
    }

    /// Removes all containers that exist, with one command.
    fn remove(&self) -> Result<()> {
        let mut rm = match self.way {
            Way::Default | Way::Memory => {
                let folder = self.context.work.join("store/containers");
                let names = (0..=self.way.count()).map(container);
                let names: Vec<_> = names.filter(|it| folder.join(it).exists()).collect();
                if names.is_empty() {
                    return Ok(());
                }
                more!(self.command()?, "rm --container --force {names...}")
            }
            Way::Podman => more!(self.command()?, "rm --all --force --time=0"),
        };
        quiet(&mut rm).map(drop)
    }

    fn run(&self) -> Result<Sample> {
        let before = Present::now(self)?;
        let count = self.way.count();
        drop_caches()?;
        // One container of each image pays for the memory that all of them share: programs, caches, names of files.
        let starts: Vec<_> = (0..=count).map(|it| self.start(it)).collect::<Result<_>>()?;
        let command = |number: usize| again(&starts[number]);
        measure(&command, IMAGES, 1)?;
        self.remove()?;
        std::thread::sleep(REST);
        let available = available()?;
        let clock = Instant::now();
        measure(&command, count, AT_ONCE)?;
        let started = clock.elapsed();
        std::thread::sleep(REST);
        let memory = available.saturating_sub(self::available()?);
        let mut lists = Vec::new();
        for _ in 0..LISTS {
            let mut list = self.list()?;
            let clock = Instant::now();
            let listed = quiet(&mut list)?;
            lists.push(nanoseconds(clock.elapsed()));
            if listed.lines().count() != count {
                bail!("{} of {count} containers are listed", listed.lines().count());
            }
        }
        let clock = Instant::now();
        self.remove()?;
        let removed = clock.elapsed();
        let left = loop {
            let left = Present::now(self)?.without(&before);
            if left.is_nothing() || clock.elapsed() - removed > LEAVE_MAX {
                break left;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let gone = clock.elapsed();
        let times =
            [nanoseconds(started), upper_median(lists), nanoseconds(removed), nanoseconds(gone)];
        Ok(Sample { times, memory: memory / u64::try_from(count)?, left })
    }
}

impl Drop for Containers<'_> {
    fn drop(&mut self) {
        let mut removed = self.remove();
        match self.way {
            Way::Default | Way::Memory => {
                let collected =
                    self.command().and_then(|it| quiet(&mut more!(it, "gc --wait")).map(drop));
                removed = removed.and(collected);
                removed = removed.and(remove(&self.context.work.join("store")));
            }
            Way::Podman => removed = removed.and(podman::remove_all(self.context)),
        }
        if let Err(error) = removed {
            eprintln!("containers of the bench may be left: {error:#}");
        }
    }
}

/// Another command with the same words and working directory.
fn again(command: &Command) -> Command {
    let mut other = Command::new(command.get_program());
    other.args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        other.current_dir(folder);
    }
    other
}

/// Bytes of memory that the kernel could give to programs.
fn available() -> Result<u64> {
    rustix::fs::sync();
    bytes("/proc/meminfo", &["MemAvailable"])
}

/// Things of containers that exist on the machine.
#[derive(Debug, Default, PartialEq, Eq)]
struct Present {
    /// Processes, as `PID NAME`.
    processes: BTreeSet<String>,
    mounts: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    /// Files below `/run`.
    files: BTreeSet<String>,
    /// Directories of containers.
    folders: BTreeSet<String>,
}

const PRESENT: [&str; 5] = ["processes", "mounts", "cgroups", "files in /run", "containers"];

impl Present {
    fn now(containers: &Containers<'_>) -> Result<Self> {
        let folder = match containers.way {
            Way::Default | Way::Memory => "store/containers",
            Way::Podman => "podman/overlay-containers",
        };
        let is_folder = |it: &PathBuf| {
            // Names that start with a dot are templates.
            let name = it.file_name().unwrap_or_default();
            it.is_dir() && !name.as_encoded_bytes().starts_with(b".")
        };
        let folders = entries(&containers.context.work.join(folder)).into_iter().filter(is_folder);
        let below = |it: &str, is_wanted: fn(&Path) -> bool| {
            let mut found = BTreeSet::new();
            walk(Path::new(it), is_wanted, &mut found);
            found
        };
        Ok(Self {
            processes: processes(),
            mounts: mounts()?.iter().map(|it| it.display().to_string()).collect(),
            cgroups: below("/sys/fs/cgroup", Path::is_dir),
            files: below("/run", |_| true),
            folders: folders.map(|it| it.display().to_string()).collect(),
        })
    }

    fn without(self, before: &Self) -> Self {
        let less = |now: &BTreeSet<String>, before| now.difference(before).cloned().collect();
        Self {
            processes: less(&self.processes, &before.processes),
            mounts: less(&self.mounts, &before.mounts),
            cgroups: less(&self.cgroups, &before.cgroups),
            files: less(&self.files, &before.files),
            folders: less(&self.folders, &before.folders),
        }
    }

    fn all(&self) -> [&BTreeSet<String>; 5] {
        [&self.processes, &self.mounts, &self.cgroups, &self.files, &self.folders]
    }

    fn is_nothing(&self) -> bool {
        self.all().iter().all(|it| it.is_empty())
    }

    /// A few names of each kind.
    fn examples(&self) -> String {
        let names = self.all().into_iter().flat_map(|it| it.iter().take(3).cloned());
        names.collect::<Vec<_>>().join(", ")
    }
}

/// The processes that a tool may leave, as `PID NAME`. A process that ends in between is not one of them.
fn processes() -> BTreeSet<String> {
    let named = entries(Path::new("/proc")).into_iter().filter_map(|it| {
        let name = fs::read_to_string(it.join("comm")).ok()?;
        let name = name.trim();
        let pid = it.file_name()?.to_str()?.to_owned();
        // Other programs may also call `sleep`.
        let words = format!("{}\0", SLEEP.join("\0"));
        let is_ours = || fs::read(it.join("cmdline")).is_ok_and(|it| it == words.as_bytes());
        let is_one = PROCESSES.contains(&name) || (name == SLEEP[0] && is_ours());
        is_one.then(|| format!("{pid} {name}"))
    });
    named.collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path()).collect()
}

/// Collects the paths below a directory, without following links. Others may remove some of them at the same time.
fn walk(folder: &Path, is_wanted: fn(&Path) -> bool, found: &mut BTreeSet<String>) {
    for path in entries(folder) {
        if is_wanted(&path) {
            found.insert(path.display().to_string());
        }
        if path.is_dir() && !path.is_symlink() {
            walk(&path, is_wanted, found);
        }
    }
}

/// Name of an image's layout in the bench's folder.
fn layout_name(number: usize) -> String {
    format!("layout-{number}")
}

fn layout_of(context: &Context<'_>, number: usize) -> PathBuf {
    context.work.join(layout_name(number))
}

/// Writes a layout of each image: the same base, and a layer with other files.
fn publish(context: &Context<'_>) -> Result<()> {
    for number in 0..IMAGES {
        let root = context.work.join("own-root");
        let files = root.join("opt/own");
        fs::create_dir_all(&files)?;
        let (count, size) = OWN;
        for file in 0..count {
            let text = format!("image {number}, file {file}\n").repeat(size / 16);
            fs::write(files.join(format!("file-{file}")), &text.as_bytes()[..size])?;
        }
        let dir = context.work.join("own-layer");
        fs::create_dir_all(&dir)?;
        let own = layer::write(&root, &dir, layer::Mtime::WholeSeconds)?;
        let layers = [inputs::base_layer(context.cache)?, own];
        layout::write(&layout_of(context, number), &layout::Config::default(), &layers)?;
        [root, dir].iter().try_for_each(|it| remove(it))?;
    }
    Ok(())
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let crun = find_program("crun").context(Skipped(String::from("crun is not installed")))?;
    publish(context)?;
    let runs = context.runs.clamp(1, RUNS_MAX);
    let (mut times, mut memory, mut left, mut findings) = (vec![], vec![], vec![], vec![]);
    for way in WAYS.into_iter().filter(|it| context.wants(&it.name())) {
        let is_podman = way == Way::Podman;
        if is_podman && find_program("podman").is_none() {
            findings.push(String::from("podman is not installed"));
            continue;
        }
        let runtime = crun.clone();
        let mut containers = Containers { context, way, images: Vec::new(), runtime };
        let samples = without_cgroup2(is_podman, || {
            containers.store()?;
            (0..runs).map(|_| containers.run()).collect::<Result<Vec<_>>>()
        });
        // podman removes its containers in the same view of cgroups in which it started them.
        without_cgroup2(is_podman, || {
            drop(containers);
            Ok(())
        })?;
        let (samples, name) = (samples.with_context(|| way.name())?, way.name());
        let column = |at: usize| upper_median(samples.iter().map(|it| it.times[at]));
        times.push((name.clone(), (0..4).map(column).collect()));
        memory.push((name.clone(), vec![upper_median(samples.iter().map(|it| it.memory))]));
        let most = |at: usize| samples.iter().map(|it| it.left.all()[at].len()).max().unwrap_or(0);
        let counts = (0..PRESENT.len()).map(|it| u64::try_from(most(it)));
        left.push((name.clone(), counts.collect::<Result<Vec<_>, _>>()?));
        let examples = samples.iter().find(|it| !it.left.is_nothing());
        findings.extend(examples.map(|it| format!("{name}: left behind: {}", it.left.examples())));
    }
    let columns = ["start of all", "ps", "removal", "until nothing is left"];
    Ok(Report {
        name: "thousand",
        about: format!(
            "{COUNT} containers that sleep, of {IMAGES} images with the same base, each with another layer; \
             without a network. `run --detach` starts {AT_ONCE} at a time by crun. *Memory of each*: MemAvailable \
             before the starts and {} s after the last one, divided by the number of containers; a container of each \
             image ran before. *ps*: `ps --all --quiet`, {LISTS} times. *Removal*: one `rm --force` of all \
             containers. *Left behind*: what did not exist before the starts, at most {} s after the end of the \
             removal; the highest of all runs. podman runs {COUNT_PODMAN} containers. Medians of {runs} runs.",
            REST.as_secs(),
            LEAVE_MAX.as_secs()
        ),
        sizes: vec![
            Sizes::new("Time", Unit::Milliseconds, columns, times),
            Sizes::new("Memory of each container", Unit::Kilobytes, ["memory"], memory),
            Sizes::new("Left behind", Unit::Times, PRESENT, left),
        ],
        findings,
        ..Report::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_new_is_left_behind() {
        let set = |names: &[&str]| names.iter().map(|&it| it.to_owned()).collect();
        let before = Present { mounts: set(&["/a", "/b"]), ..Present::default() };
        let after =
            Present { mounts: set(&["/b", "/c"]), files: set(&["/run/x"]), ..Present::default() };
        let left = after.without(&before);
        assert_eq!(left.all().map(BTreeSet::len), [0, 1, 0, 1, 0]);
        assert_eq!(left.examples(), "/c, /run/x");
        assert!(!left.is_nothing());
        assert!(
            before
                .without(&Present { mounts: set(&["/a", "/b"]), ..Present::default() })
                .is_nothing()
        );
    }

    #[test]
    fn another_command_has_the_same_words_and_folder() {
        let mut command = cmd!("a b");
        command.current_dir("/c");
        assert_eq!(format!("{:?}", again(&command)), format!("{command:?}"));
    }
}
