//! `cargo xtask aarch64`: compiles a static `quire` for aarch64, and runs tests on an emulated processor.
//!
//! The compiler is Debian's ([`crate::debian_compiler`]). Unit tests run under sid's QEMU, which translates their system
//! calls for this machine's kernel. A virtual machine boots a kernel for arm64, on which the binary mounts images and
//! runs containers.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use rig::cache::Cache;
use rig::process::{quiet, repository, shown, target_dir};
use rig::summary::Summary;
use rig::{Failed, inputs, vm};

use crate::debian_compiler::DebianCompiler;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Tests to run; default: all
    parts: Vec<Part>,
    /// Profile of the binary
    #[arg(long, value_name = "NAME", default_value = "dev")]
    profile: String,
    /// Only compile the binary, and print its path
    #[arg(long)]
    build: bool,
    /// Test this binary, for example of a release, instead of compiling one
    #[arg(long, value_name = "PATH", conflicts_with_all = ["profile", "build"])]
    binary: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Unit tests of `image`, `oci` and `store`
    Units,
    /// The binary, on Debian's kernel for arm64
    Boot,
}

/// A crate whose unit tests run.
struct Tested {
    /// Its directory below `crates`.
    folder: &'static str,
    /// Tests that QEMU cannot run, each with the reason.
    but: &'static [(&'static str, &'static str)],
}

const CRATES: [Tested; 3] = [
    Tested { folder: "image", but: &[] },
    Tested { folder: "oci", but: &[] },
    Tested {
        folder: "store",
        but: &[
            ("tests::concurrency::two_processes_import_the_same", STARTS_ITSELF),
            ("tests::import::published_files_are_read_only_whatever_the_umask", STARTS_ITSELF),
            ("tests::interrupted::kill::the_kill_test_finds_a_store_that_is_broken", STARTS_ITSELF),
            ("tests::interrupted::kill::kill_9_at_random_moments_loses_nothing", STARTS_ITSELF),
        ],
    },
];

const STARTS_ITSELF: &str =
    "it starts its own program, which is for another machine than the kernel's";

/// Number of tests after which progress is shown.
const PROGRESS: usize = 50;

/// Flags of compilers, as variables.
fn flags() -> [(&'static str, String); 1] {
    let name = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS";
    [(name, "-Ctarget-feature=+crt-static".to_owned())]
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let cache = Cache::open()?;
    // The compiler's version is not that of the other builds, so it gets a separate target directory.
    let compiler = || DebianCompiler::new(&cache, repository(), &target_dir()?.join("aarch64"));
    let binary = match &args.binary {
        Some(binary) => binary.clone(),
        None => binary(&compiler()?, &args.profile)?,
    };
    let length = fs::metadata(&binary).with_context(|| binary.display().to_string())?.len();
    println!("{}, {length} bytes", binary.display());
    if args.build {
        return Ok(());
    }
    let has = |part| args.parts.is_empty() || args.parts.contains(&part);
    if has(Part::Units) {
        let emulator = inputs::sid::emulator(&cache, false)?;
        starts(&emulator, &binary)?;
        units(&emulator, &compiler()?)?;
    }
    if has(Part::Boot) {
        vm::test_arm64(&cache, &binary)?;
    }
    Ok(())
}

/// Runs the unit tests.
fn units(emulator: &Path, compiler: &DebianCompiler) -> Result<()> {
    let programs = tests(compiler)?;
    let mut summary = Summary::default();
    for tested in &CRATES {
        let package = format!("quire-{}", tested.folder);
        let program = programs.iter().find(|it| is_of(it, &package));
        let program = program.with_context(|| format!("cargo made no tests of {package}"))?;
        test(emulator, program, tested, &mut summary)?;
    }
    for reason in summary.reasons() {
        println!("SKIPPED: {reason}");
    }
    for (name, why) in CRATES.iter().flat_map(|it| it.but) {
        println!("SKIPPED: {name} on aarch64: {why}");
    }
    if !summary.failed.is_empty() {
        bail!(Failed(format!("on aarch64: {}", summary.failed.join(", "))));
    }
    println!("{} tests pass on aarch64", summary.passed());
    Ok(())
}

/// Whether cargo named this program after the package, followed by a hash.
fn is_of(program: &Path, package: &str) -> bool {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    name.rsplit_once('-').is_some_and(|(name, _)| name == package.replace('-', "_"))
}

/// Checks that the binary runs without a C library of its machine.
fn starts(emulator: &Path, binary: &Path) -> Result<()> {
    let version = quiet(Command::new(emulator).arg(binary).arg("--version"))?;
    if !version.starts_with("quire ") {
        bail!(Failed(format!("`quire --version` prints {version}")));
    }
    Ok(())
}

/// Runs a test program, and shows its progress and failures.
fn test(emulator: &Path, program: &Path, tested: &Tested, summary: &mut Summary) -> Result<()> {
    let all = quiet(Command::new(emulator).arg(program).arg("--list"))?;
    for (name, _) in tested.but {
        if !all.lines().any(|it| it.strip_suffix(": test") == Some(*name)) {
            bail!(Failed(format!("{} has no test {name}, which is left out", tested.folder)));
        }
    }
    let start = Instant::now();
    let (failed, passed) = (summary.failed.len(), summary.passed);
    let mut command = Command::new(emulator);
    command.arg(program).args(["--show-output", "--exact"]);
    command.args(tested.but.iter().flat_map(|(name, _)| ["--skip", name]));
    // Cargo starts a package's tests in the same directory.
    command.current_dir(repository().join("crates").join(tested.folder));
    let child = command.stdout(Stdio::piped()).spawn();
    let mut child = child.with_context(|| format!("cannot start {}", emulator.display()))?;
    let mut count = 0;
    for line in BufReader::new(child.stdout.take().expect("stdout is piped")).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        // The reasons of skips are printed once, at the end.
        match summary.line(&line) {
            Some(shown) if !shown.contains("SKIPPED: ") => println!("{shown}"),
            _ => {}
        }
        if line.starts_with("test ") && line.contains(" ... ") {
            count += 1;
            if count % PROGRESS == 0 {
                println!("   {}: {count} tests", tested.folder);
            }
        }
    }
    let status = child.wait()?;
    let took = start.elapsed().as_secs_f64();
    println!("   {}: {} passed, {took:.1} s", tested.folder, summary.passed - passed);
    if !status.success() && summary.failed.len() == failed {
        bail!(Failed(format!("{}: {status}", program.display())));
    }
    if summary.passed == passed {
        bail!(Failed(format!("{}: no test passed", program.display())));
    }
    Ok(())
}

/// Compiles the binary, and returns its path.
fn binary(compiler: &DebianCompiler, profile: &str) -> Result<PathBuf> {
    let place = tempfile::tempdir()?;
    let words = ["build", "--quiet", "--package=quire-cli", "--profile", profile];
    shown(&mut compiler.cargo(place.path(), &flags(), &words)?)?;
    Ok(compiler.binary(profile))
}

/// Compiles unit tests, and returns the paths of their programs.
fn tests(compiler: &DebianCompiler) -> Result<Vec<PathBuf>> {
    let place = tempfile::tempdir()?;
    let packages = CRATES.map(|it| format!("--package=quire-{}", it.folder));
    let mut words = vec!["test", "--no-run", "--lib", "--message-format=json"];
    words.extend(packages.iter().map(String::as_str));
    Ok(programs(&quiet(&mut compiler.cargo(place.path(), &flags(), &words)?)?))
}

/// Returns the test programs in cargo's messages.
fn programs(messages: &str) -> Vec<PathBuf> {
    let messages = messages.lines().filter_map(|it| serde_json::from_str(it).ok());
    let programs = messages.filter_map(|it: serde_json::Value| {
        it["profile"]["test"].as_bool()?.then(|| it["executable"].as_str().map(PathBuf::from))?
    });
    programs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_of_packages() {
        let program = Path::new("/target/debug/deps/quire_store-5f0e");
        assert!(is_of(program, "quire-store"));
        assert!(!is_of(program, "quire"));
    }

    /// Messages as in cargo's reference, "External tools", "JSON messages".
    #[test]
    fn programs_of_tests_are_found() {
        let artifact = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let messages = [
            artifact(true, r#""/target/one-1""#),
            artifact(false, r#""/target/quire""#),
            artifact(true, "null"),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
            "no message".to_owned(),
        ];
        assert_eq!(programs(&messages.join("\n")), [PathBuf::from("/target/one-1")]);
    }
}
