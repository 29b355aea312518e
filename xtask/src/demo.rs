//! `make demo`: makes and runs a root from nothing, and shows the effect of one flipped bit.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use rig::cache::{Cache, remove};
use rig::process::{find_program, is_root, quiet, repository, shown, target_dir};
use rig::{Failed, Skipped, inputs, tools};

pub(crate) fn run() -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from(
            "the demo makes a Debian image and mounts it, which needs root: `sudo make demo`, or as root. It installs \
             debootstrap, tar and crun by apt-get if they are missing (elsewhere: install them first)"
        )));
    }
    let mut steps = Steps::default();
    steps.step("install missing programs", || {
        let runtime =
            if find_program("crun").is_some() { ("crun", "crun") } else { ("runc", "runc") };
        tools::install(&[("debootstrap", "debootstrap"), ("tar", "tar"), runtime])
    })?;
    steps.step("quire gets built", || {
        let mut cargo = Command::new(env!("CARGO"));
        shown(cargo.args(["build", "--quiet", "--release"]).current_dir(repository()))
    })?;
    let cache = Cache::open()?;
    let layout = steps
        .step("a small Debian image, from its packages", || inputs::debian_small(&cache, false))?;
    let place = Place::new(&cache)?;
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
    steps.step("clean up", || place.clean())?;
    steps.print();
    Ok(())
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

/// The directory of the demo, which is removed in all cases.
struct Place {
    dir: PathBuf,
    quire: PathBuf,
}

impl Place {
    fn new(cache: &Cache) -> Result<Self> {
        let dir = cache.dir().join("demo");
        let place = Self { dir, quire: target_dir()?.join("release/quire") };
        place.clean()?;
        fs::create_dir(&place.dir)?;
        Ok(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn clean(&self) -> Result<()> {
        let root = self.path("root");
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        if mounts.lines().any(|line| line.split(' ').nth(1) == root.to_str()) {
            quiet(Command::new("umount").arg(&root))?;
        }
        remove(&self.dir)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
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
