//! `make demo`: makes and runs a root from nothing, shows the effect of one flipped bit, and keeps the store for the
//! next steps.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use rig::cache::{Cache, remove};
use rig::process::{find_program, is_root, quiet, repository, shown, target_dir};
use rig::{Failed, Skipped, inputs, tools};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Show this binary instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from(
            "the demo makes a Debian image and mounts it, which needs root: `sudo make demo`, or as root. It installs \
             debootstrap, tar and crun by apt-get if they are missing (elsewhere: install them first)"
        )));
    }
    let mut steps = Steps::default();
    steps.step("install missing programs", || {
        let runtime =
            ["crun", "runc"].into_iter().find(|it| find_program(it).is_some()).unwrap_or("crun");
        tools::install(&[("debootstrap", "debootstrap"), ("tar", "tar"), (runtime, runtime)])
    })?;
    let cache = Cache::open()?;
    let image = || inputs::debian_small(&cache, false);
    let (binary, layout) = match &args.binary {
        Some(binary) => {
            let layout = steps.step("a small Debian image, from its packages", image)?;
            (binary.canonicalize().with_context(|| format!("no {}", binary.display()))?, layout)
        }
        // Downloads and a compiler rarely wait for the same thing.
        None => steps.step("build Quire, and a small Debian image from its packages", || {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["build", "--profile", "demo"]).current_dir(repository());
            let cargo = cargo.spawn().context("cannot start cargo")?;
            let mut cargo = Child(cargo);
            let layout = image();
            let status = cargo.0.wait()?;
            if !status.success() {
                bail!(Failed(format!("cargo build: {status}")));
            }
            Ok((target_dir()?.join("demo/quire"), layout?))
        })?,
    };
    let mut place = Place::new(&cache, binary)?;
    let quire = |words: &[&str]| {
        // Printed as a user would type it, with QUIRE_STORE set.
        let typed =
            words.iter().map(|it| if it.contains(' ') { format!("'{it}'") } else { (*it).into() });
        println!("$ quire {}", typed.collect::<Vec<_>>().join(" "));
        let mut quire = Command::new(&place.quire);
        quire.args(words).env("QUIRE_STORE", place.path("store"));
        quire
    };
    let source = format!("oci:{}:latest", layout.display());
    let root = place.path("root");
    let root_text = root.to_str().context("the cache folder's name is no text")?;
    fs::create_dir(&root)?;
    steps.step("import", || shown(&mut quire(&["import", &source, "small"])))?;
    steps.step("mount", || shown(&mut quire(&["mount", "small", root_text])))?;
    steps.step("look at the mounted root", || {
        let release = fs::read_to_string(root.join("etc/os-release"))?;
        println!("{}", release.lines().next().context("an empty etc/os-release")?);
        Ok(())
    })?;
    steps.step("unmount", || shown(&mut quire(&["umount", root_text])))?;
    steps.step("run a command in a container", || {
        // The image's entrypoint is env(1), which shows the environment of a program.
        shown(&mut quire(&["run", "small", "--", "sh", "-c", "id; pwd; echo $QUIRE_SAMPLE"]))
    })?;
    steps.step("verify", || shown(&mut quire(&["verify", "small"])))?;
    let object =
        steps.step("flip one bit of an object", || flip_bit(&place.path("store/objects")))?;
    println!("flipped: {}", object.display());
    steps.step("verify finds it", || {
        let output = quire(&["verify", "small"]).output()?;
        print!("{}", String::from_utf8_lossy(&output.stdout));
        print!("{}", String::from_utf8_lossy(&output.stderr));
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let name = object.file_name().context("an object without a name")?.to_string_lossy();
        match output.status.code() {
            Some(1) if text.contains(&*name) => Ok(()),
            _ => bail!(Failed(format!("verify did not name the object: {}", output.status))),
        }
    })?;
    steps.step("repair", || {
        // It exits with 1 because the store was damaged.
        let status = quire(&["fsck", "--repair"]).status()?;
        if status.code() != Some(1) {
            bail!(Failed(format!("fsck --repair: {status}")));
        }
        shown(&mut quire(&["import", &source, "small"]))?;
        shown(&mut quire(&["verify", "small"]))
    })?;
    place.is_kept = true;
    place.unmount()?;
    steps.print();
    println!(
        "\nTry this next. The store and its image are kept until you remove {}.\n\
         $ export QUIRE_STORE={}\n\
         $ alias quire={}\n\
         $ quire run --rm -it small sh        # a shell in a container; exit ends it\n\
         $ quire ls -l small:/etc             # look inside without mounting\n\
         $ quire tag small mine; quire images # a second name costs nothing\n\
         $ quire help run                     # networks, volumes, limits",
        place.dir.display(),
        place.path("store").display(),
        place.quire.display(),
    );
    Ok(())
}

/// A program that ends when it is dropped.
#[derive(Debug)]
struct Child(std::process::Child);

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// The steps done so far, with their durations in seconds.
#[derive(Debug, Default)]
struct Steps(Vec<(&'static str, f64)>);

impl Steps {
    fn step<T>(&mut self, name: &'static str, step: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("\n== {name}");
        let start = Instant::now();
        let done = step().with_context(|| format!("step \"{name}\""));
        self.0.push((name, start.elapsed().as_secs_f64()));
        done
    }

    fn print(&self) {
        println!("\nDuration of each step:");
        for (name, seconds) in &self.0 {
            println!("{seconds:9.3} s  {name}");
        }
    }
}

/// The directory of the demo, which is removed unless the demo ran to its end.
struct Place {
    dir: PathBuf,
    quire: PathBuf,
    is_kept: bool,
}

impl Place {
    fn new(cache: &Cache, quire: PathBuf) -> Result<Self> {
        let place = Self { dir: cache.dir().join("demo"), quire, is_kept: false };
        place.clean()?;
        fs::create_dir(&place.dir)?;
        Ok(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Unmounts and removes the root.
    fn unmount(&self) -> Result<()> {
        let root = self.path("root");
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        if mounts.lines().any(|line| line.split(' ').nth(1) == root.to_str()) {
            quiet(Command::new("umount").arg(&root))?;
        }
        remove(&root)
    }

    fn clean(&self) -> Result<()> {
        self.unmount()?;
        remove(&self.dir)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Err(error) = self.clean() {
            eprintln!("cannot clean up {}: {error:#}", self.dir.display());
        }
    }
}

/// Replaces the largest object by a copy that differs in one bit, because a sealed file cannot be changed in place.
fn flip_bit(objects: &Path) -> Result<PathBuf> {
    let mut largest: Option<(u64, PathBuf)> = None;
    for folder in fs::read_dir(objects)? {
        for object in fs::read_dir(folder?.path())? {
            let object = object?;
            let size = object.metadata()?.len();
            if largest.as_ref().is_none_or(|(most, _)| size > *most) {
                largest = Some((size, object.path()));
            }
        }
    }
    let (_, object) = largest.context("the store has no object id")?;
    let mut bytes = fs::read(&object)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    remove(&object)?;
    fs::write(&object, &bytes)?;
    fs::set_permissions(&object, fs::Permissions::from_mode(0o444))?;
    Ok(object)
}
