//! Runs tests on other kernels: Debian's, booted by QEMU without KVM, with a disk that has fs-verity.

mod architecture;
mod arm64;
mod boot;
mod contents;
mod disk;
mod fleet;
mod initramfs;
mod kernels;
mod machine;
mod plan;
mod root;
mod systemd;
mod verified;
mod virtiofs;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use self::architecture::Architecture;
pub use self::arm64::test as test_arm64;
use self::boot::Machine;
pub use self::boot::{Guest, Outcome, Step};
pub use self::fleet::{Access, Fleet, GuestRead};
use self::kernels::Kernel;
use self::plan::{Run, TESTS, Test};
pub use self::virtiofs::Server;
use crate::cache::{Cache, remove};
use crate::process::{need, repository, target_dir};
use crate::summary::Summary;
use crate::{Failed, Skipped, tools};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// `newest`, `lts`, `oldest`, or the beginning of a version that apt offers
    #[arg(required_unless_present = "list")]
    kernel: Option<String>,
    /// Names of tests, or `short` or `all`
    #[arg(default_value = "all")]
    tests: Vec<String>,
    /// List kernels and tests
    #[arg(long)]
    list: bool,
    /// Ask apt for a newer kernel, even if that was done recently
    #[arg(long)]
    refresh: bool,
    /// Run only tests whose names contain this text
    #[arg(long)]
    filter: Option<String>,
    /// Show the output of passing tests as well
    #[arg(long)]
    verbose: bool,
}

/// Programs for running guests, each with its Debian package.
pub const PACKAGES: [(&str, &str); 11] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("mkfs.ext4", "e2fsprogs"),
    ("depmod", "kmod"),
    ("cpio", "cpio"),
    ("xz", "xz-utils"),
    ("apparmor_parser", "apparmor"),
    ("veritysetup", "cryptsetup-bin"),
    // A file, which is found by its path.
    ("/usr/share/ovmf/OVMF.fd", "ovmf"),
    (tools::STUB, "systemd-boot-efi"),
    ("dmsetup", "dmsetup"),
];

pub fn run(args: &Args) -> Result<()> {
    let cache = Cache::open()?;
    let Some(name) = args.kernel.as_ref().filter(|_| !args.list) else {
        list(&cache);
        return Ok(());
    };
    tools::install(&PACKAGES)?;
    let kernel = kernels::find_kernel(&cache, name, Architecture::Amd64, args.refresh)?;
    let Chosen { mut runs, mut images } = chosen(&args.tests)?;
    if args.filter.is_some() {
        images.clear();
        // The filter replaces the plan's, so every program must run only once.
        let mut seen = BTreeSet::new();
        runs.retain(|(_, run)| run.harness && seen.insert(run.program));
    }
    let start = Instant::now();
    let mut tally = Tally { filtered: args.filter.is_some(), ..Tally::default() };
    let version = kernel.version().context("the kernel's release has no version")?;
    // The other tests only call Quire.
    let built = if runs.is_empty() { root::build_programs()? } else { root::build()? };
    let all = images.len() + usize::from(!runs.is_empty());
    let mut results = ImageResults::default();
    let mut say = |step: &Step, outcome: Outcome| tally.add(step, &outcome, version, args.verbose);
    for ImageTest { name, test, .. } in images {
        results.add(name, test(&cache, &kernel, &mut say));
    }
    let ImageResults { skipped, failed } = results;
    if !skipped.is_empty() && skipped.len() == all {
        bail!(Skipped(skipped.join("; ")));
    }
    skipped.iter().for_each(|it| println!("SKIPPED: {it}"));
    if !runs.is_empty() {
        boot_and_test(&cache, &kernel, &runs, &built, args.filter.as_deref(), &mut say)?;
    }
    tally.failed.extend(failed);
    tally.close(&kernel, start.elapsed())
}

/// Returns the folder in the cache with one of these kernels, downloaded if the cache lacks it.
pub(crate) fn kernel(cache: &Cache, name: &str) -> Result<PathBuf> {
    kernels::find_kernel(cache, name, Architecture::Amd64, false).map(|it| it.dir)
}

/// Downloads these kernels into the cache. Tests report missing kernels themselves.
pub fn fetch_kernels(cache: &Cache, names: &[&str]) {
    for name in names {
        if let Err(error) = kernels::find_kernel(cache, name, Architecture::Amd64, false) {
            println!("   Linux {name}: {error:#}");
        }
    }
}

fn list(cache: &Cache) {
    for (name, suite, about) in kernels::NAMES {
        let kept = fs::read_to_string(cache.dir().join(format!("linux-{name}/release")));
        let kept =
            kept.map_or_else(|_| String::from("not fetched yet"), |it| format!("kept: {it}"));
        println!("{name:<10} {about} ({suite}; {kept})");
    }
    println!();
    for Test { name, about, runs } in TESTS {
        let short = if runs.iter().any(|it| it.short) { ", partly in `short`" } else { "" };
        println!("{name:<10} {about}{short}");
    }
    for ImageTest { name, about, short, .. } in &IMAGE_TESTS {
        println!("{name:<10} {about}{}", if *short { ", all in `short`" } else { "" });
    }
    println!("\nmay be skipped, besides what came with a later kernel:");
    for (text, why) in plan::SKIPS {
        println!("  {text:?}: {why}");
    }
}

/// Called with the result of each step.
type Each<'a> = &'a mut dyn FnMut(&Step, Outcome);

/// A test whose guest has its own root.
struct ImageTest {
    name: &'static str,
    about: &'static str,
    /// Whether the test is part of `short`, because its image is made in seconds.
    short: bool,
    test: fn(&Cache, &Kernel, Each<'_>) -> Result<()>,
}

const IMAGE_TESTS: [ImageTest; 6] = [
    ImageTest { name: disk::NAME, about: disk::ABOUT, short: true, test: disk::test },
    ImageTest { name: verified::NAME, about: verified::ABOUT, short: true, test: verified::test },
    ImageTest {
        name: verified::UKI_NAME,
        about: verified::UKI_ABOUT,
        short: false,
        test: verified::test_uki,
    },
    ImageTest { name: machine::NAME, about: machine::ABOUT, short: false, test: machine::test },
    ImageTest { name: virtiofs::NAME, about: virtiofs::ABOUT, short: true, test: virtiofs::test },
    ImageTest { name: systemd::NAME, about: systemd::ABOUT, short: false, test: systemd::test },
];

/// Reasons why image tests did not pass, each with the test's name. None of them ends the others.
#[derive(Debug, Default)]
struct ImageResults {
    /// Tests that this machine or kernel cannot run.
    skipped: Vec<String>,
    failed: Vec<String>,
}

impl ImageResults {
    fn add(&mut self, name: &str, result: Result<()>) {
        let Err(error) = result else { return };
        match error.downcast_ref::<Skipped>() {
            Some(Skipped(reason)) => self.skipped.push(format!("{name}: {reason}")),
            None => {
                println!("   {name}: FAILED: {error:#}");
                self.failed.push(format!("{name}: {error:#}"));
            }
        }
    }
}

/// The runs of the selected tests, each with the test's name.
#[derive(Default)]
struct Chosen {
    runs: Vec<(&'static str, &'static Run)>,
    /// Tests that do not run a test program.
    images: Vec<&'static ImageTest>,
}

fn chosen(names: &[String]) -> Result<Chosen> {
    let mut chosen = Chosen::default();
    for name in names {
        let tests = TESTS.iter().filter(|it| [it.name, "all", "short"].contains(&name.as_str()));
        let found = tests.flat_map(|it| it.runs.iter().map(|run| (it.name, run)));
        let before = chosen.runs.len();
        chosen.runs.extend(found.filter(|(_, run)| name != "short" || run.short));
        let named = |it: &&ImageTest| match name.as_str() {
            "all" => true,
            "short" => it.short,
            name => name == it.name,
        };
        let images: Vec<_> = IMAGE_TESTS.iter().filter(named).collect();
        let is_image = !images.is_empty();
        chosen.images.extend(images);
        if chosen.runs.len() == before && !is_image {
            bail!("there is no test {name}; `cargo xtask vm --list` has the names");
        }
    }
    Ok(chosen)
}

fn boot_and_test(
    cache: &Cache,
    kernel: &Kernel,
    runs: &[(&'static str, &'static Run)],
    built: &BTreeMap<root::Program, PathBuf>,
    filter: Option<&str>,
    say: &mut dyn FnMut(&Step, Outcome),
) -> Result<()> {
    let version = kernel.version().context("the kernel's release has no version")?;
    let runs = runs.iter().filter(|(test, run)| match run.since {
        Some((since, why)) if version < since => {
            println!("   LEFT OUT: {test}/{} {:?}: {why}", run.program.1, run.filters);
            false
        }
        _ => true,
    });
    let mut programs = Vec::new();
    let mut plan = Vec::new();
    for (number, (test, run)) in runs.enumerate() {
        let program =
            root::Program { package: run.program.0.to_owned(), target: run.program.1.to_owned() };
        let file = built.get(&program).with_context(|| format!("cargo builds no {program:?}"))?;
        plan.push(step(number, test, run, &program, filter));
        programs.push((program, file.clone()));
    }
    programs.sort();
    programs.dedup();
    let mut programs: Vec<_> =
        programs.into_iter().map(|(program, file)| (file, program.place().into())).collect();
    let quire = target_dir()?.join("debug/quire");
    programs.push((quire.clone(), quire));
    let hardware = Hardware { memory: 1536, data: None };
    life(cache, kernel, &hardware, &programs, &plan, say)
}

/// The hardware of a guest that varies.
#[derive(Debug)]
pub struct Hardware<'a> {
    /// Memory in MB.
    pub memory: u32,
    /// A second disk, `/dev/vdb`.
    pub data: Option<&'a Path>,
}

/// Boots the named kernel with these programs, each with its path on the host and in the guest, and runs the steps.
/// Returns the kernel's release, and the results in the order of the steps.
pub fn measure(
    cache: &Cache,
    name: &str,
    hardware: &Hardware<'_>,
    programs: &[(PathBuf, PathBuf)],
    steps: &[Step],
) -> Result<(String, Vec<Outcome>)> {
    tools::install(&PACKAGES)?;
    let kernel = kernels::find_kernel(cache, name, Architecture::Amd64, false)?;
    let mut outcomes = Vec::new();
    life(cache, &kernel, hardware, programs, steps, |_, outcome| outcomes.push(outcome))?;
    Ok((kernel.release, outcomes))
}

/// Makes the disk, and boots.
fn life(
    cache: &Cache,
    kernel: &Kernel,
    hardware: &Hardware<'_>,
    programs: &[(PathBuf, PathBuf)],
    steps: &[Step],
    each: impl FnMut(&Step, Outcome),
) -> Result<()> {
    let work = work(cache)?;
    let plan = plan_text(steps);
    let mut environment =
        format!("export CI=true QUIRE_TEST_ROUNDS=1 QUIRE_CACHE='{}'\n", cache.dir().display());
    if let Some(data) = root::data() {
        environment += &format!("export QUIRE_TEST_DATA='{}'\n", data.display());
    }
    let [initramfs, disk] = ["initramfs.cpio", "disk"].map(|it| work.path().join(it));
    let start = Instant::now();
    initramfs::write(kernel, &need("busybox")?, &initramfs::DISK, work.path(), &initramfs)?;
    root::write(cache, work.path(), programs, &plan, &environment, &disk)?;
    println!("   made the disk in {:.1} s", start.elapsed().as_secs_f64());
    let &Hardware { memory, data } = hardware;
    let disks: Vec<_> = [Some(&*disk), data].into_iter().flatten().collect();
    let machine = Machine { disks: &disks, memory, ..Machine::new(kernel, &initramfs, "")? };
    boot::run(&machine, steps, each)?;
    Ok(())
}

/// Returns a command for the tests' Quire with this store.
fn quire(store: &Path) -> Result<Command> {
    let mut quire = Command::new(target_dir()?.join("debug/quire"));
    quire.arg("--store").arg(store);
    Ok(quire)
}

/// Returns the plan in the format of the guest's script.
fn plan_text(steps: &[Step]) -> String {
    steps.iter().map(|it| format!("{} {} {}\n", it.name, it.limit.as_secs(), it.command)).collect()
}

/// Creates a directory for this run in the cache, because /tmp may be memory. Removes the directories of killed runs.
fn work(cache: &Cache) -> Result<tempfile::TempDir> {
    const PREFIX: &str = ".vm-";
    for entry in fs::read_dir(cache.dir())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let process = name.strip_prefix(PREFIX).and_then(|it| it.split('-').next());
        if let Some(process) = process
            && !Path::new("/proc").join(process).exists()
        {
            remove(&entry.path())?;
        }
    }
    let prefix = format!("{PREFIX}{}-", std::process::id());
    Ok(tempfile::Builder::new().prefix(&prefix).tempdir_in(cache.dir())?)
}

fn step(
    number: usize,
    test: &str,
    run: &Run,
    program: &root::Program,
    filter: Option<&str>,
) -> Step {
    // Cargo starts a package's tests in the same directory.
    let folder = repository().join("crates").join(program.package.trim_start_matches("quire-"));
    let mut command = format!("cd {} && {}", folder.display(), program.place());
    if run.harness {
        command += " --test-threads=1 --show-output";
        for only in filter.as_slice().iter().chain(run.filters.iter().filter(|_| filter.is_none()))
        {
            command += &format!(" {only}");
        }
        for other in run.but.iter().filter(|_| filter.is_none()) {
            command += &format!(" --skip {other}");
        }
    }
    let name = format!("{number}:{test}/{}", run.program.1);
    Step { name, limit: run.limit, command, harness: run.harness }
}

/// Whether guests cannot have this program. In continuous integration, the host must have all programs.
fn host_lacks(program: &str) -> bool {
    root::installed(program).is_none() && !tools::in_ci()
}

/// Maximum number of characters shown of a line.
const LONGEST_LINE: usize = 400;

#[derive(Debug, Default)]
struct Tally {
    /// Whether a filter is set, so that it is acceptable if no test runs.
    filtered: bool,
    passed: u64,
    skipped: usize,
    failed: Vec<String>,
}

impl Tally {
    fn add(&mut self, step: &Step, outcome: &Outcome, version: (u32, u32), verbose: bool) {
        let mut summary = Summary::default();
        let mut shown: Vec<&str> = Vec::new();
        // A program without libtest counts as one test.
        if !step.harness && outcome.code == 0 {
            summary.line("test result: ok. 1 passed");
        }
        for line in &outcome.output {
            shown.extend(summary.line(line));
        }
        let (allowed, refused): (Vec<_>, Vec<_>) =
            summary.reasons().partition(|reason| plan::may_skip(reason, version, host_lacks));
        let mut wrong: Vec<String> =
            refused.iter().map(|it| format!("skipped what this kernel should do: {it}")).collect();
        match outcome.code {
            0 if summary.passed() == 0 && !self.filtered => wrong.push(String::from("no test ran")),
            0 => {}
            // Exit codes of timeout(1).
            124 | 137 => wrong.push(format!("took more than {} s", step.limit.as_secs())),
            code => wrong.push(format!("exit code {code}")),
        }
        let name = &step.name;
        println!(
            "   {name}: {} passed, {} skipped, {:.1} s{}",
            summary.passed(),
            allowed.len(),
            outcome.took.as_secs_f64(),
            if wrong.is_empty() { "" } else { ", FAILED" }
        );
        if verbose || outcome.code != 0 {
            let all = verbose || shown.is_empty() || matches!(outcome.code, 124 | 137);
            let lines: Vec<&str> =
                if all { outcome.output.iter().map(String::as_str).collect() } else { shown };
            for line in lines {
                println!("      {}", line.chars().take(LONGEST_LINE).collect::<String>());
            }
        }
        for reason in &allowed {
            println!("      skipped: {reason}");
        }
        self.passed += summary.passed();
        self.skipped += allowed.len();
        self.failed.extend(wrong.into_iter().map(|it| format!("{name}: {it}")));
    }

    fn close(self, kernel: &Kernel, took: Duration) -> Result<()> {
        for failed in &self.failed {
            println!("   FAILED on Linux {}: {failed}", kernel.release);
        }
        println!(
            "   Linux {}: {} passed, {} skipped, {} failed, {:.1} s",
            kernel.release,
            self.passed,
            self.skipped,
            self.failed.len(),
            took.as_secs_f64()
        );
        match self.failed.is_empty() {
            true => Ok(()),
            false => {
                let consoles = boot::console(kernel, "*")?;
                let consoles = consoles.display();
                bail!(Failed(format!("some tests failed; the kernel's messages are in {consoles}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_cannot_run_is_no_failure() {
        let mut results = ImageResults::default();
        results.add("a", Ok(()));
        results.add("b", Err(Skipped("mounts need root".to_owned()).into()));
        results.add("c", Err(Failed("the guest went down".to_owned()).into()));
        results.add("d", Err(anyhow::anyhow!("no space").context("cannot write")));
        assert_eq!(results.skipped, ["b: mounts need root"]);
        assert_eq!(results.failed, ["c: the guest went down", "d: cannot write: no space"]);
    }
}
