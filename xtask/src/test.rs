//! `make test`: every tier that this machine can run, and one last line that counts what really ran.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use crate::cache::Cache;
use crate::process::{self, repository, target_dir};
use crate::{Failed, Skipped, diff_walk, faults, fuzz, inputs, oracle, tools, vm};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only the tiers with these names
    tiers: Vec<String>,
}

/// What the tiers came to; a tier that is one command counts as one test.
#[derive(Debug, Default)]
struct Tally {
    passed: u64,
    failed: Vec<String>,
    /// They failed among the others and passed alone.
    unstable: Vec<String>,
    /// Reasons, each with the test that gave it.
    skipped: BTreeSet<(String, String)>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut tally = Tally::default();
    every_change(args, Rounds::Few, &mut tally)?;
    tally.close()
}

/// All of it, before a release; hours.
pub(crate) fn check_all() -> Result<()> {
    let mut tally = Tally::default();
    every_change(&Args { tiers: Vec::new() }, Rounds::Many, &mut tally)?;
    let nightly = |words: &str| {
        let mut command = Command::new("cargo");
        command.arg("+nightly").args(words.split(' ')).current_dir(repository());
        // Miri is some hundred times slower than the machine.
        command.env("PROPTEST_CASES", "4").env("MIRIFLAGS", "-Zmiri-disable-isolation");
        command
    };
    for target in ["x86_64-unknown-linux-gnu", "s390x-unknown-linux-gnu"] {
        tally.command(&format!("miri, {target}"), || {
            installed(&mut nightly("miri --version"), "Miri")?;
            let words = format!("miri test --package quire-image --lib --target {target}");
            process::shown(&mut nightly(&words))
        });
    }
    tally.command("the oldest Rust", || {
        let mut cargo = Command::new("cargo");
        installed(cargo.args(["+1.88", "--version"]), "Rust 1.88")?;
        let mut cargo = Command::new("cargo");
        cargo.args(["+1.88", "check", "--workspace", "--exclude", "xtask", "--all-targets"]);
        process::shown(cargo.current_dir(repository()))
    });
    tally.command("aarch64", || {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["check", "--target", "aarch64-unknown-linux-gnu"]);
        for package in ["image", "kernel"] {
            cargo.args(["--package", &format!("quire-{package}")]);
        }
        process::shown(cargo.current_dir(repository()))
    });
    tally.command("oracle, the composefs crate", || {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--release"]).current_dir(repository().join("oracle"));
        // A workspace of its own, where it is looked for.
        process::shown(build.env_remove("CARGO_TARGET_DIR"))?;
        oracle::with_composefs_crate()
    });
    tally.command("fuzz", || fuzz::run(&fuzz::Args::for_seconds(300)));
    tally.command("bench", || {
        // A process of its own, since it moves into a mount namespace.
        process::shown(Command::new(std::env::current_exe()?).args(["bench", "all"]))
    });
    tally.close()
}

/// Whether a program that only some machines have answers.
fn installed(command: &mut Command, name: &str) -> Result<()> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        _ => bail!(Skipped(format!("{name} is not installed"))),
    }
}

/// How long tests by chance go on.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rounds {
    /// As each test says, unless the environment does.
    Few,
    /// Ten times as long.
    Many,
}

fn every_change(args: &Args, rounds: Rounds, tally: &mut Tally) -> Result<()> {
    let cache = Cache::open()?;
    let cargo = |words: &str| {
        let mut command = process::cargo();
        command.args(words.split(' '));
        command
    };
    let tier = |name: &str| args.tiers.is_empty() || args.tiers.iter().any(|it| it == name);
    let lints = ["--workspace --all-targets", "--workspace --all-targets --no-default-features"];
    if tier("setup")
        && let Err(error) = tools::install_all()
    {
        // Each test that needs what is missing says so by itself.
        println!("{error:#}");
    }
    if tier("fmt") {
        tally.command("fmt", || process::shown(&mut cargo("fmt --all --check")));
    }
    for lint in lints.iter().filter(|_| tier("clippy")) {
        tally.command(&format!("clippy {lint}"), || {
            process::shown(&mut cargo(&format!("clippy --quiet {lint} -- -D warnings")))
        });
    }
    if tier("doc") {
        tally.command("doc", || {
            let mut doc = cargo("doc --quiet --workspace --no-deps");
            process::shown(doc.env("RUSTDOCFLAGS", "-D warnings"))
        });
    }
    if tier("deny") {
        tally.command("deny", || {
            let mut deny = Command::new(tools::cargo_deny(&cache)?);
            deny.args(["--log-level", "error", "check", "bans", "licenses", "sources"]);
            process::shown(deny.current_dir(repository()))
        });
    }
    if tier("inputs") {
        tally.command("inputs", || inputs::run(&inputs::Args::default()));
    }
    if tier("tests") {
        let mut tests = cargo("test --workspace --no-fail-fast -- --show-output");
        let mut again = cargo("test --workspace --no-fail-fast --tests -- --show-output");
        for cargo in [&mut tests, &mut again] {
            // Where tests find the images and sid's tools that the tier above made.
            cargo.env("QUIRE_CACHE", cache.dir());
            if rounds == Rounds::Many {
                cargo.env("QUIRE_TEST_ROUNDS", "10");
            }
        }
        tally.tests(&mut tests, &mut again)?;
    }
    if tier("diff-walk") {
        tally.command("diff-walk", || {
            process::quiet(&mut cargo("build --package quire-cli"))?;
            diff_walk::short(&cache)
        });
    }
    if tier("faults") {
        tally.command("faults", || {
            process::quiet(&mut cargo("build --package quire-cli"))?;
            faults::run(&match rounds {
                Rounds::Few => faults::Args::sample(),
                Rounds::Many => faults::Args::default(),
            })
        });
    }
    if tier("vm") {
        let kernels: &[&str] = match rounds {
            Rounds::Few => &["newest", "lts"],
            Rounds::Many => &["newest", "lts", "oldest"],
        };
        let tests = if rounds == Rounds::Few { "short" } else { "all" };
        for kernel in kernels {
            tally.command(&format!("vm, {kernel}"), || vm::tier(kernel, tests));
        }
    }
    if tier("oracle") {
        tally.command("oracle", || {
            process::quiet(&mut cargo("build --package quire-cli"))?;
            oracle::short()
        });
    }
    Ok(())
}

impl Tally {
    /// A tier that is one command: it passes, fails, or says that it cannot be run here.
    fn command(&mut self, name: &str, tier: impl FnOnce() -> Result<()>) {
        let start = Instant::now();
        println!("== {name}");
        match tier() {
            Ok(()) => self.passed += 1,
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
        println!("== {name}: {:.1} s", start.elapsed().as_secs_f64());
    }

    /// Runs `cargo test`, shows what went wrong and what was skipped, and adds its own summaries up.
    fn tests(&mut self, cargo: &mut Command, again: &mut Command) -> Result<()> {
        let start = Instant::now();
        println!("== tests");
        let log = target_dir()?.join("test.log");
        let ran = listen(cargo, &mut File::create(&log)?)?;
        // A skipped test tells cargo that it passed.
        let skipped = u64::try_from(ran.summary.skipped_tests.len() + ran.uncaptured.len())?;
        self.passed += ran.summary.passed.saturating_sub(skipped);
        self.skipped.extend(ran.summary.skipped.into_iter().chain(ran.uncaptured));
        let mut failed = ran.summary.failed;
        if !ran.success && failed.is_empty() {
            self.failed.push(format!("cargo test ({})", ran.status));
        }
        // A test that waits for other processes may be starved by its neighbours: it may show that alone, once, and is
        // named then. Many that fail do not fail by chance.
        if (1..=STARVED_MAX).contains(&failed.len()) {
            println!("== again, alone");
            again.args(["--test-threads=1", "--exact"]).args(&failed);
            let again = listen(again, &mut File::options().append(true).open(&log)?)?;
            let count = u64::try_from(failed.len())?;
            if again.success && again.summary.passed >= count {
                self.passed += count;
                self.unstable.append(&mut failed);
            }
        }
        self.failed.append(&mut failed);
        println!(
            "== tests: {:.1} s, all output in {}",
            start.elapsed().as_secs_f64(),
            log.display()
        );
        Ok(())
    }

    fn close(mut self) -> Result<()> {
        for (test, reason) in &self.skipped {
            let test = if test.is_empty() { String::new() } else { format!(" ({test})") };
            println!("SKIPPED: {reason}{test}");
            // Continuous integration can install a tool; only what the machine lacks may be missing there.
            if tools::in_ci() && reason.contains("not installed") {
                self.failed.push(format!("{test} (skipped in CI: {reason})"));
            }
        }
        for name in &self.unstable {
            println!("UNSTABLE: {name}: failed among the others, passed alone");
        }
        for name in &self.failed {
            println!("FAILED: {name}");
        }
        let (passed, failed, skipped) = (self.passed, self.failed.len(), self.skipped.len());
        let unstable = match self.unstable.len() {
            0 => String::new(),
            count => format!(" ({count} of them unstable)"),
        };
        println!("{passed} passed{unstable}, {failed} failed, {skipped} skipped");
        if failed > 0 { bail!(Failed(String::from("some tests failed"))) } else { Ok(()) }
    }
}

/// More failed tests than this are not run again.
const STARVED_MAX: usize = 3;

/// What `cargo test` said.
struct Ran {
    summary: Summary,
    /// Reasons that tests gave past libtest.
    uncaptured: BTreeSet<(String, String)>,
    success: bool,
    status: std::process::ExitStatus,
}

/// Runs `cargo test` and shows what is worth it; all that it writes goes to `log`.
fn listen(cargo: &mut Command, log: &mut File) -> Result<Ran> {
    cargo.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = cargo.spawn().context("cannot start cargo test")?;
    let stderr = BufReader::new(child.stderr.take().expect("stderr is piped"));
    // cargo's own lines, and what tests say past libtest.
    let uncaptured = thread::spawn(move || {
        let mut skipped = BTreeSet::new();
        for line in stderr.split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            eprintln!("{line}");
            if let Some(reason) = line.strip_prefix("SKIPPED: ") {
                skipped.insert((String::new(), reason.to_owned()));
            }
        }
        skipped
    });
    let mut summary = Summary::default();
    for line in BufReader::new(child.stdout.take().expect("stdout is piped")).split(b'\n') {
        let line = line?;
        log.write_all(&[&line[..], b"\n"].concat())?;
        if let Some(shown) = summary.line(&String::from_utf8_lossy(&line)) {
            println!("{shown}");
        }
    }
    let status = child.wait()?;
    let uncaptured = uncaptured.join().expect("reading lines does not panic");
    Ok(Ran { summary, uncaptured, success: status.success(), status })
}

/// What libtest prints, read line by line.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    passed: u64,
    failed: Vec<String>,
    skipped: BTreeSet<(String, String)>,
    skipped_tests: BTreeSet<(usize, String)>,
    /// How many test programs ended so far: two may have tests of one name.
    programs: usize,
    /// The test whose output is being read.
    test: String,
    in_failures: bool,
}

impl Summary {
    /// Tests that passed, without those that said they were skipped.
    pub(crate) fn passed(&self) -> u64 {
        let skipped = u64::try_from(self.skipped_tests.len()).unwrap_or(u64::MAX);
        self.passed.saturating_sub(skipped)
    }

    /// The reasons that tests gave.
    pub(crate) fn skipped(&self) -> impl Iterator<Item = &str> {
        self.skipped.iter().map(|(_, reason)| reason.as_str())
    }

    /// What is worth showing of this line.
    pub(crate) fn line<'a>(&mut self, line: &'a str) -> Option<&'a str> {
        if let Some(name) =
            line.strip_prefix("---- ").and_then(|it| it.strip_suffix(" stdout ----"))
        {
            name.clone_into(&mut self.test);
        }
        if let Some((_, reason)) = line.split_once("SKIPPED: ") {
            self.skipped.insert((self.test.clone(), reason.trim().to_owned()));
            self.skipped_tests.insert((self.programs, self.test.clone()));
        }
        if let Some(counts) = line.strip_prefix("test result: ") {
            let count = |what: &str| {
                let words: Vec<_> = counts.split([' ', ';']).collect();
                let at = words.iter().position(|it| *it == what)?;
                words[at.checked_sub(1)?].parse::<u64>().ok()
            };
            self.passed += count("passed").unwrap_or(0);
            self.programs += 1;
            self.in_failures = false;
            self.test.clear();
            return Some(line);
        }
        if let Some(name) = line.strip_prefix("test ").and_then(|it| it.strip_suffix(" ... FAILED"))
        {
            self.failed.push(name.to_owned());
            return Some(line);
        }
        if let Some((name, reason)) =
            line.strip_prefix("test ").and_then(|it| it.split_once(" ... ignored"))
        {
            let reason = reason.trim_start_matches(", ");
            self.skipped.insert((name.to_owned(), format!("#[ignore]: {reason}")));
        }
        self.in_failures |= line == "failures:";
        (self.in_failures || line.contains("SKIPPED: ")).then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_read_as_libtest_writes_them() {
        let text = "\nrunning 4 tests\ntest a ... ok\ntest b ... FAILED\ntest c ... ok\ntest d ... ignored, a measurement\n\n\
            successes:\n\n---- c stdout ----\nSKIPPED: mkfs.erofs is not installed\nSKIPPED: and more\n\n\
            successes:\n    a\n    c\n\nfailures:\n\n---- b stdout ----\nthread panicked\n\nfailures:\n    b\n\n\
            test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        let mut summary = Summary::default();
        let shown: Vec<_> = text.lines().filter_map(|line| summary.line(line)).collect();
        assert_eq!(summary.passed, 2);
        assert_eq!(summary.failed, ["b"]);
        let skipped: Vec<_> =
            summary.skipped.iter().map(|(test, why)| format!("{test}: {why}")).collect();
        assert_eq!(
            skipped,
            ["c: and more", "c: mkfs.erofs is not installed", "d: #[ignore]: a measurement",]
        );
        assert_eq!(summary.skipped_tests.len(), 1);
        assert!(shown.contains(&"thread panicked"));
        assert!(!shown.contains(&"test a ... ok"));
    }
}
