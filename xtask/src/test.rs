//! `make test`: runs every tier that this machine can run, and prints one last line that counts the tests that ran.

use std::collections::{BTreeSet, VecDeque};
use std::env;
use std::fs::File;
use std::num::NonZeroUsize;
use std::process::Command;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::builder::PossibleValuesParser;

use rig::cache::Cache;
use rig::process::{self, repository, target_dir};
use rig::{Failed, Skipped, inputs, tools, vm};

mod listen;

use self::listen::listen;
use crate::programs::PROGRAMS;
use crate::{fuzz, programs};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these tiers
    #[arg(value_name = "TIER", value_parser = PossibleValuesParser::new(TIERS))]
    tiers: Vec<String>,
}

/// All tiers, in order, except that jobs run in parallel. Tests come before linters, so that a newcomer sees them
/// first.
const TIERS: [&str; 15] = [
    "setup",
    "tests",
    "vm",
    "diff-walk",
    "faults",
    "oracle",
    "package",
    "book",
    "fmt",
    "clippy",
    "programs",
    "initramfs",
    "doc",
    "deny",
    "engines",
];

/// The tier that makes inputs which take minutes each, and then runs the tests that need them. It runs only if it is
/// named. In other tiers, these tests run if the cache has their inputs.
const ENGINES: &str = "engines";

/// Parts of the names of tests that need such inputs.
const NEED_INPUTS: [&str; 22] = [
    "_by_c",
    "_crane",
    "a_mirror_spoils",
    "composefs",
    "compressed::",
    "devices::",
    "engines::",
    "fingerprints",
    "gvisor::",
    "makers::",
    "mkfs::",
    "mount_of_systemd",
    "native::",
    "of_a_part_in_bad_weather",
    "pieces::",
    "real::",
    "share::",
    "standalone::",
    "suites::",
    "verified_disk::",
    "versions::",
    "wide::",
];

/// Results of the tiers. A tier that is one command counts as one test.
#[derive(Debug, Default)]
struct Tally {
    passed: u64,
    failed: Vec<String>,
    /// Tests that failed beside others, and passed without them.
    unsteady: Vec<String>,
    /// Reasons of skips, each with the test that reported it.
    skipped: BTreeSet<(String, String)>,
    /// Inputs that the cache had before the tests. Later tiers make more of them.
    made: BTreeSet<String>,
    /// The duration of each tier.
    times: Vec<(String, Duration)>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut tally = Tally::default();
    every_change(args, Rounds::Few, &mut tally)?;
    tally.close()
}

/// Runs all checks, for a release; takes hours.
pub(crate) fn check_all() -> Result<()> {
    let mut tally = Tally::default();
    tally.command("inputs", make_inputs);
    every_change(&Args { tiers: Vec::new() }, Rounds::Many, &mut tally)?;
    let nightly = |words: &str| {
        let mut command = Command::new("cargo");
        command.arg("+nightly").args(words.split(' ')).current_dir(repository());
        // Miri is about a hundred times slower than the machine.
        command.env("PROPTEST_CASES", "4").env("MIRIFLAGS", "-Zmiri-disable-isolation");
        command
    };
    for target in ["x86_64-unknown-linux-gnu", "s390x-unknown-linux-gnu"] {
        tally.command(&format!("miri, {target}"), || {
            installed(&mut nightly("miri --version"), "Miri")?;
            let words = format!("miri test --package quire-image --lib --target {target}");
            process::shown(&mut nightly(&words)).map(|()| Vec::new())
        });
    }
    tally.command("the oldest Rust", || {
        let mut cargo = Command::new("cargo");
        installed(cargo.args(["+1.89", "--version"]), "Rust 1.89")?;
        let mut cargo = Command::new("cargo");
        cargo.args(["+1.89", "check", "--workspace", "--exclude", "xtask", "--all-targets"]);
        process::shown(cargo.current_dir(repository())).map(|()| Vec::new())
    });
    for (name, part) in [("aarch64", "units"), ("aarch64, with its kernel", "boot")] {
        tally.command(name, || {
            let mut command = Command::new(env::current_exe()?);
            command.args(["aarch64", part]);
            programs::ended(command, show)
        });
    }
    tally.command("reproducible release", || {
        let mut command = Command::new(env::current_exe()?);
        command.args(["release", "--check"]);
        programs::ended(command, show)
    });
    tally.command("a new user", || {
        let program = env::current_exe()?;
        let files = process::target_dir()?.join("release-files");
        let mut release = Command::new(&program);
        let target = format!("{}-unknown-linux-gnu", env::consts::ARCH);
        release.args(["release", "--target", &target]);
        process::shown(release.arg("--output").arg(&files))?;
        let mut newcomer = Command::new(program);
        newcomer.args(["newcomer", "--files"]).arg(&files);
        programs::ended(newcomer, show)
    });
    tally.command("the initramfs tool", || {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--release", "--package", "quire-cli", "--no-default-features"]);
        let folder = process::target_dir()?.join("initramfs");
        process::shown(cargo.arg("--target-dir").arg(&folder).current_dir(repository()))?;
        let bytes = std::fs::metadata(folder.join("release/quire"))?.len();
        println!("   {bytes} bytes, not stripped of anything");
        Ok(Vec::new())
    });
    tally.command("oracle, the composefs crate", || {
        let words = ["mkcomposefs", "--composefs-crate", "--count=1000"];
        programs::ended(programs::tier("oracle", &words)?, show)
    });
    tally.command("fuzz", || fuzz::run(&fuzz::Args::for_seconds(300)).map(|()| Vec::new()));
    tally.command("bench", || programs::ended(programs::tier("bench", &["all"])?, show));
    tally.close()
}

/// Checks that an optional program is installed and runs.
fn installed(command: &mut Command, name: &str) -> Result<()> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        _ => bail!(Skipped(format!("{name} is not installed"))),
    }
}

/// Duration of randomized tests.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rounds {
    /// As each test defines, unless the environment is set.
    Few,
    /// Ten times as long.
    Many,
}

fn every_change(args: &Args, rounds: Rounds, tally: &mut Tally) -> Result<()> {
    let cache = Cache::open()?;
    tally.made = inputs::made(&cache);
    let tier = |name: &str| {
        let is_named = args.tiers.iter().any(|it| it == name);
        is_named || args.tiers.is_empty() && name != ENGINES
    };
    if tier("setup") {
        tally.command("setup", || {
            // Tests that need a missing program report this themselves.
            if let Err(error) = tools::install_all() {
                println!("{error:#}");
            }
            Ok(Vec::new())
        });
    }
    if tier("tests") {
        let mut command = tests(&cache, rounds, &[])?;
        thread::scope(|scope| {
            // Downloading the guests' kernels costs little time while the compiler works.
            if tier("vm") {
                scope.spawn(|| vm::fetch_kernels(&cache, &["newest"]));
            }
            tally.tests("tests", &mut command)?;
            tally.again(&cache, rounds)
        })?;
    }
    if tier(ENGINES) {
        tally.command("inputs", make_inputs);
        tally.made = inputs::made(&cache);
        tally.tests(ENGINES, &mut tests(&cache, rounds, &NEED_INPUTS)?)?;
    }
    let jobs = jobs(rounds).into_iter().filter(|it| {
        let needs = it.input.is_some() && tier(ENGINES);
        tier(it.tier) || needs
    });
    let jobs: Vec<_> = jobs.collect();
    if !jobs.is_empty() {
        // Builds the `quire` of the tests. A separate build would select other features of dependencies, and rebuild
        // them.
        process::quiet(&mut cargo("test --quiet --workspace --no-run"))?;
    }
    tally.jobs(&cache, jobs, |tally| lints(&cache, &tier, tally));
    Ok(())
}

/// Makes the inputs that take minutes.
fn make_inputs() -> Result<Vec<String>> {
    if let Err(error) = tools::install_engines() {
        println!("{error:#}");
    }
    inputs::run(&inputs::Args::default()).map(|()| Vec::new())
}

fn cargo(words: &str) -> Command {
    let mut command = process::cargo();
    command.args(words.split(' '));
    command
}

/// Returns `cargo test` of the workspace, or of the tests whose names contain one of these.
fn tests(cache: &Cache, rounds: Rounds, names: &[&str]) -> Result<Command> {
    let mut cargo = cargo("test --workspace --no-fail-fast");
    // Each test program runs under `leftovers`, which checks for remains.
    let program = env::current_exe()?;
    let runner = [program.to_str().context("this program's path is not UTF-8")?, "leftovers"];
    cargo.args(["--config", &format!("target.'cfg(all())'.runner = {runner:?}")]);
    // The cache, in which tests find inputs.
    cargo.env("QUIRE_CACHE", cache.dir());
    if env::var_os("RUST_TEST_THREADS").is_none() {
        // Most tests wait for processes half of their time.
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        cargo.env("RUST_TEST_THREADS", (2 * cores).to_string());
    }
    match rounds {
        Rounds::Many => cargo.env("QUIRE_TEST_ROUNDS", "10"),
        Rounds::Few if env::var_os("QUIRE_TEST_ROUNDS").is_some() => &mut cargo,
        Rounds::Few => cargo.env("QUIRE_TEST_ROUNDS", "1"),
    };
    cargo.args(["--", "--show-output"]).args(names);
    Ok(cargo)
}

/// Runs the tiers that only read the sources.
fn lints(cache: &Cache, tier: &dyn Fn(&str) -> bool, tally: &mut Tally) {
    if tier("fmt") {
        tally.command("fmt", || {
            process::shown(&mut cargo("fmt --all --check"))?;
            PROGRAMS.iter().try_for_each(|it| {
                let manifest = format!("{it}/Cargo.toml");
                process::shown(cargo("fmt --check --manifest-path").arg(manifest))
            })?;
            Ok(Vec::new())
        });
    }
    let all = ["--workspace --all-targets", "--workspace --all-targets --no-default-features"];
    for lint in all.iter().filter(|_| tier("clippy")) {
        tally.command(&format!("clippy {lint}"), || {
            process::shown(&mut cargo(&format!("clippy --quiet {lint} -- -D warnings")))?;
            Ok(Vec::new())
        });
    }
    for program in PROGRAMS.iter().filter(|_| tier("programs")) {
        let name = format!("clippy and tests of {program}");
        tally.command(&name, || {
            // The dependencies of the oracle take minutes, and it compares with programs of this input.
            if *program == "oracle" && !inputs::is_made(cache, "sid") {
                bail!(Skipped(not_made(&name, "sid")));
            }
            let mut clippy = programs::cargo(program, &["clippy", "--quiet", "--all-targets"])?;
            process::shown(clippy.args(["--", "-D", "warnings"]))?;
            process::quiet(&mut programs::cargo(program, &["test", "--quiet"])?)?;
            Ok(Vec::new())
        });
    }
    if tier("initramfs") {
        tally.command("policies without signatures", || {
            let words = "test --quiet --package quire-oci --no-default-features --lib policy";
            process::quiet(&mut cargo(words))?;
            Ok(Vec::new())
        });
    }
    if tier("doc") {
        tally.command("doc", || {
            let mut doc = cargo("doc --quiet --workspace --no-deps");
            process::shown(doc.env("RUSTDOCFLAGS", "-D warnings"))?;
            Ok(Vec::new())
        });
    }
    if tier("deny") {
        tally.command("deny", || {
            if !inputs::is_made(cache, "cargo-deny") {
                bail!(Skipped(not_made("deny", "cargo-deny")));
            }
            let program = tools::cargo_deny(cache)?;
            // The `composefs` crate of the oracle needs OpenSSL, which no other program may use.
            for folder in [".", "bench", "faults", "fuzz", "oracle"] {
                let mut deny = Command::new(&program);
                deny.args(["--log-level", "error", "--exclude", "composefs-crate-oracle"]);
                deny.arg("--config").arg(repository().join("deny.toml"));
                deny.arg("--manifest-path").arg(repository().join(folder).join("Cargo.toml"));
                process::shown(deny.args(["check", "bans", "licenses", "sources"]))?;
            }
            Ok(Vec::new())
        });
    }
}

fn show(line: &str) {
    println!("{line}");
}

/// A tier that is one command, and mostly keeps one processor busy.
struct Job {
    tier: &'static str,
    name: String,
    /// The job is skipped if the cache lacks this input, because making it would take minutes.
    input: Option<&'static str>,
    command: Box<dyn FnOnce() -> Result<Command> + Send>,
}

impl Job {
    fn new(
        tier: &'static str,
        name: &str,
        command: impl FnOnce() -> Result<Command> + Send + 'static,
    ) -> Self {
        Self { tier, name: name.to_owned(), input: None, command: Box::new(command) }
    }

    fn needs(self, input: &'static str) -> Self {
        Self { input: Some(input), ..self }
    }

    /// Returns a job that is a task of this program.
    fn task(tier: &'static str, name: &str, words: &'static [&'static str]) -> Self {
        Self::new(tier, name, move || {
            let mut command = Command::new(env::current_exe()?);
            command.args(words);
            Ok(command)
        })
    }
}

/// Returns the jobs, the longest first, so that the last ones end together.
fn jobs(rounds: Rounds) -> Vec<Job> {
    let sample: &[&str] = if rounds == Rounds::Few { &["--sample"] } else { &[] };
    let mut jobs = match rounds {
        Rounds::Few => vec![
            Job::task("vm", "vm, newest", &["vm", "newest", "short"]),
            Job::task("vm", "vm, lts", &["vm", "lts", "short"]).needs("linux-lts"),
            Job::task("vm", "vm, systemd", &["vm", "newest", "systemd"]).needs("sid-booted"),
        ],
        Rounds::Many => vec![
            Job::task("vm", "vm, newest", &["vm", "newest", "all"]),
            Job::task("vm", "vm, lts", &["vm", "lts", "all"]),
            Job::task("vm", "vm, oldest", &["vm", "oldest", "all"]),
        ],
    };
    jobs.push(Job::task("diff-walk", "diff-walk", &["diff-walk", "--short"]));
    jobs.push(Job::new("faults", "faults", move || programs::tier("faults", sample)));
    jobs.push(Job::task("package", "package", &["deb", "--trial"]).needs("cargo-deb"));
    let book = Job::new("book", "book", || {
        // The `quire` of the tests.
        let mut command = Command::new(env::current_exe()?);
        command.args(["book", "--binary"]).arg(target_dir()?.join("debug/quire"));
        Ok(command)
    });
    jobs.push(book.needs("mdbook"));
    let words = &["mkcomposefs", "--count=200"];
    let oracle = Job::new("oracle", "oracle", move || programs::tier("oracle", words));
    jobs.push(oracle.needs("sid"));
    let words = &["composefs-ids", "--count=20", "--short"];
    jobs.push(Job::new("oracle", "oracle, composefs ids", move || programs::tier("oracle", words)));
    let words = &["messages"];
    let messages = Job::new("oracle", "oracle, messages", move || programs::tier("oracle", words));
    jobs.push(messages.needs("sid"));
    jobs
}

/// A job's name, result, duration and output.
type Finished = (String, Result<Vec<String>>, Duration, String);

/// Maximum number of failed tests that are run again. More have a cause in the code.
const UNSTEADY_MAX: usize = 3;

/// Number of jobs in parallel. A guest has one processor and 1.5 GB.
const JOBS_AT_ONCE: usize = 2;

impl Tally {
    /// Runs a tier that is one command, and can pass, fail or be skipped.
    fn command(&mut self, name: &str, tier: impl FnOnce() -> Result<Vec<String>>) {
        let start = Instant::now();
        println!("== {name}");
        self.end(name, tier(), start.elapsed());
    }

    /// Runs jobs in parallel, and `beside` as soon as only one job remains, because a job keeps one processor busy.
    /// The output of a job is shown at its end.
    fn jobs(&mut self, cache: &Cache, jobs: Vec<Job>, beside: impl FnOnce(&mut Self)) {
        let names: Vec<_> = jobs.iter().map(|it| it.name.as_str()).collect();
        if !names.is_empty() {
            println!("== side by side: {}", names.join("; "));
        }
        let others = names.len().saturating_sub(1);
        let queue = Mutex::new(VecDeque::from(jobs));
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..JOBS_AT_ONCE {
                let (queue, sender) = (&queue, sender.clone());
                scope.spawn(move || {
                    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    while let Some(job) = next() {
                        let (start, mut text) = (Instant::now(), String::new());
                        let missing = job.input.filter(|it| !inputs::is_made(cache, it));
                        let ended = match missing {
                            Some(input) => Err(Skipped(not_made(&job.name, input)).into()),
                            None => (job.command)().and_then(|command| {
                                programs::ended(command, |line| text += &format!("{line}\n"))
                            }),
                        };
                        if sender.send((job.name, ended, start.elapsed(), text)).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            let tell = |this: &mut Self, (name, ended, took, text): Finished| {
                print!("== {name}\n{text}");
                this.end(&name, ended, took);
            };
            receiver.iter().take(others).for_each(|it| tell(self, it));
            beside(self);
            receiver.iter().for_each(|it| tell(self, it));
        });
    }

    /// Counts the result of a tier.
    fn end(&mut self, name: &str, ended: Result<Vec<String>>, took: Duration) {
        self.times.push((name.to_owned(), took));
        match ended {
            Ok(skipped) => {
                self.passed += 1;
                self.skipped.extend(skipped.into_iter().map(|it| (name.to_owned(), it)));
            }
            Err(error) => match error.downcast_ref::<Skipped>() {
                Some(Skipped(reason)) => {
                    println!("SKIPPED: {reason}");
                    self.skipped.insert((name.to_owned(), reason.clone()));
                }
                None => {
                    println!("FAILED: {name}: {error:#}");
                    self.failed.push(name.to_owned());
                }
            },
        }
        println!("== {name}: {:.1} s", took.as_secs_f64());
    }

    /// Runs `cargo test`, shows failures and skips, and adds up its summaries.
    fn tests(&mut self, name: &str, cargo: &mut Command) -> Result<()> {
        let start = Instant::now();
        println!("== {name}");
        let log = target_dir()?.join("test.log");
        let ran = listen(cargo, &mut File::create(&log)?)?;
        // For cargo, a skipped test has passed.
        let skipped = u64::try_from(ran.summary.skipped_tests.len() + ran.uncaptured.len())?;
        self.passed += ran.summary.passed.saturating_sub(skipped);
        let skipped: BTreeSet<_> = ran.summary.skipped.into_iter().chain(ran.uncaptured).collect();
        let left_out = skipped.iter().filter(|(test, reason)| is_left_out(test, reason));
        self.failed.extend(left_out.map(|(test, _)| format!("{test} (not among NEED_INPUTS)")));
        self.skipped.extend(skipped);
        if !ran.success && ran.summary.failed.is_empty() {
            self.failed.push(format!("cargo test ({})", ran.status));
        }
        self.failed.extend(ran.summary.failed);
        let took = start.elapsed();
        self.times.push((name.to_owned(), took));
        println!("== {name}: {:.1} s, all output in {}", took.as_secs_f64(), log.display());
        Ok(())
    }

    /// Runs failed tests again, one after another, without other tests beside them. The load of a shared
    /// machine varies, and forks of one test can disturb another. A test that passes then is listed as unsteady.
    /// `check-all` does not do this.
    fn again(&mut self, cache: &Cache, rounds: Rounds) -> Result<()> {
        let is_test = |it: &String| !it.contains(' ');
        let few = self.failed.len() <= UNSTEADY_MAX && self.failed.iter().all(is_test);
        if rounds == Rounds::Many || self.failed.is_empty() || !few {
            return Ok(());
        }
        println!("== once more, alone: {}", self.failed.join(", "));
        let log = target_dir()?.join("test-again.log");
        let mut log = File::create(log)?;
        for name in std::mem::take(&mut self.failed) {
            let ran = listen(&mut tests(cache, rounds, &["--exact", &name])?, &mut log)?;
            let steady = ran.success && ran.summary.passed() > 0;
            let list = if steady { &mut self.unsteady } else { &mut self.failed };
            list.push(name);
        }
        self.passed += u64::try_from(self.unsteady.len())?;
        Ok(())
    }

    fn close(mut self) -> Result<()> {
        for (test, reason) in &self.skipped {
            let test = if test.is_empty() { String::new() } else { format!(" ({test})") };
            println!("SKIPPED: {reason}{test}");
            if tools::in_ci() && could_have_run(reason, |input| self.made.contains(input)) {
                self.failed.push(format!("{test} (skipped in CI: {reason})"));
            }
        }
        for name in &self.unsteady {
            println!("UNSTEADY: {name} failed beside other tests, and passed alone");
        }
        println!("== how long it took:");
        for (name, took) in &self.times {
            println!("{:9.1} s  {name}", took.as_secs_f64());
        }
        for name in &self.failed {
            println!("FAILED: {name}");
        }
        let (passed, failed, skipped) = (self.passed, self.failed.len(), self.skipped.len());
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        if failed > 0 { bail!(Failed(String::from("some tests failed"))) } else { Ok(()) }
    }
}

/// Text before the name of an input in the reason for a skip; `testing::not_made` writes the same.
const MAKES: &str = "`make test-engines` makes the input ";

fn not_made(what: &str, input: &str) -> String {
    format!("{what} is not run: {MAKES}{input}")
}

/// Whether a test was skipped although it could have run. Continuous integration can install tools, but does not make
/// inputs that take minutes. Only hardware, kernel features and uncached inputs may be missing there.
fn could_have_run(reason: &str, is_made: impl Fn(&str) -> bool) -> bool {
    match reason.split_once(MAKES) {
        Some((_, input)) => is_made(input.trim()),
        None => reason.contains("not installed"),
    }
}

/// Whether a test that was skipped because an input is missing would not run in the tier that makes inputs.
fn is_left_out(test: &str, reason: &str) -> bool {
    let is_named = !test.is_empty();
    is_named && reason.contains(MAKES) && !NEED_INPUTS.iter().any(|part| test.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_machine_lacks_is_skipped_in_ci() {
        let check = |reason: &str, expected| {
            assert_eq!(could_have_run(reason, |it| it == "sid"), expected, "{reason}");
        };
        check("crun is not installed", true);
        check("this kernel is older than Linux 6.15", false);
        check("containerd is missing: `make test-engines` installs it", false);
        check(&not_made("the oracle", "sid"), true);
        check(&not_made("gvisor", "runsc"), false);
        // The reason as tests print it.
        let said = "runsc is not in QUIRE_CACHE: `make test-engines` makes the input ";
        check(&format!("{said}runsc"), false);
        check(&format!("{said}sid"), true);
    }

    #[test]
    fn tests_that_need_inputs_run_when_these_are_made() {
        let check = |test: &str, reason: &str, expected| {
            assert_eq!(is_left_out(test, reason), expected, "{test}: {reason}");
        };
        let reason = not_made("crane", "crane");
        check("registry::faults::pulls_in_bad_weather_from_crane", &reason, false);
        check("engines::lazy::an_image_starts_before_its_layers_are_here", &reason, false);
        check("runs::a_runtimes_error_appears_once", &reason, true);
        check("runs::a_runtimes_error_appears_once", "crun is not installed", false);
    }

    /// Tests use the names of inputs on the command line.
    #[test]
    fn inputs_that_tests_name_are_there() {
        let sources = crate::tidy::tracked();
        let sources = sources.iter().filter(|it| it.starts_with("crates/") && it.ends_with(".rs"));
        let mut count = 0;
        for path in sources {
            let text = std::fs::read_to_string(repository().join(path)).unwrap_or_default();
            for call in
                ["not_made(", "testing::built("].iter().flat_map(|it| text.split(it).skip(1))
            {
                let Some((arguments, _)) = call.split_once(')') else { continue };
                let Some(input) = arguments.rsplit('"').nth(1) else { continue };
                count += 1;
                assert!(inputs::is_input(input), "{path}: {arguments}");
            }
        }
        assert!(count > 20, "{count}");
    }
}
