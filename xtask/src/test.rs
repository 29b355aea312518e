//! `make test`: every tier that this machine can run, and one last line that counts what really ran.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use rig::cache::Cache;
use rig::process::{self, repository, target_dir};
use rig::summary::Summary;
use rig::{Failed, Skipped, inputs, tools, vm};

use crate::programs::PROGRAMS;
use crate::{diff_walk, fuzz, programs};

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
        programs::tier("oracle", &["mkcomposefs", "--composefs-crate", "--count=1000"])
    });
    tally.command("fuzz", || fuzz::run(&fuzz::Args::for_seconds(300)));
    tally.command("bench", || programs::tier("bench", &["all"]));
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
        tally.command("fmt", || {
            process::shown(&mut cargo("fmt --all --check"))?;
            PROGRAMS.iter().try_for_each(|it| {
                let manifest = format!("{it}/Cargo.toml");
                process::shown(cargo("fmt --check --manifest-path").arg(manifest))
            })
        });
    }
    for lint in lints.iter().filter(|_| tier("clippy")) {
        tally.command(&format!("clippy {lint}"), || {
            process::shown(&mut cargo(&format!("clippy --quiet {lint} -- -D warnings")))
        });
    }
    for program in PROGRAMS.iter().filter(|_| tier("programs")) {
        tally.command(&format!("clippy and tests of {program}"), || {
            let mut clippy = programs::cargo(program, &["clippy", "--quiet", "--all-targets"])?;
            process::shown(clippy.args(["--", "-D", "warnings"]))?;
            process::quiet(&mut programs::cargo(program, &["test", "--quiet"])?).map(drop)
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
            let program = tools::cargo_deny(&cache)?;
            // The `composefs` crate of the oracle needs OpenSSL, which nothing else may.
            for folder in [".", "bench", "faults", "fuzz", "oracle"] {
                let mut deny = Command::new(&program);
                deny.args(["--log-level", "error", "--exclude", "composefs-crate-oracle"]);
                deny.arg("--config").arg(repository().join("deny.toml"));
                deny.arg("--manifest-path").arg(repository().join(folder).join("Cargo.toml"));
                process::shown(deny.args(["check", "bans", "licenses", "sources"]))?;
            }
            Ok(())
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
            programs::tier("faults", if rounds == Rounds::Few { &["--sample"] } else { &[] })
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
            programs::tier("oracle", &["mkcomposefs", "--count=200"])
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
