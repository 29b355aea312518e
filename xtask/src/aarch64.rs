//! `cargo xtask aarch64`: compiles a static `quire` for aarch64, and runs unit tests on an emulated processor.
//!
//! rustup's library for another machine cannot be had everywhere, so the compiler is Debian's, in a separate root.
//! The programs that it makes are static, so they need nothing of that root, and run outside it under
//! `qemu-aarch64-static`. QEMU translates system calls too, so tests of the kernel are skipped or left out.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use rig::cache::Cache;
use rig::process::{cargo, is_root, quiet, repository, shown, target_dir};
use rig::summary::Summary;
use rig::{Failed, Skipped, inputs, tools};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Profile of the binary
    #[arg(long, value_name = "NAME", default_value = "dev")]
    profile: String,
    /// Only compile the binary, and print its path
    #[arg(long)]
    build: bool,
}

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Runs a program for aarch64 on this machine.
const EMULATOR: (&str, &str) = ("qemu-aarch64-static", "qemu-user-static");

/// Crates whose unit tests run. They need no kernel but that of this machine.
const CRATES: [&str; 2] = ["quire-image", "quire-oci"];
/// Why tests of the third crate do not run.
const STORE: &str =
    "the tests of quire-store: they open files by openat2, which QEMU 7.2 does not translate";

/// $1 the root with the compiler, $2 a temporary directory, $3 the sources, $4 the target directory, $5 the directory
/// of downloaded crates; cargo's arguments follow. The root is not changed. Directories have the same paths in it as
/// outside, because test programs contain the path of the sources.
const COMPILE: &str = r#"
lower=$1 place=$2 sources=$3 target=$4 crates=$5
shift 5
mount -t tmpfs tmpfs "$place"
mkdir "$place/upper" "$place/work" "$place/root"
root=$place/root
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$place/upper,workdir=$place/work" "$root"
mkdir -p "$root$sources" "$root$target" "$root/crates/registry"
mount --bind "$sources" "$root$sources"
mount --bind "$target" "$root$target"
mount --bind "$crates" "$root/crates/registry"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
exec env -i PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8 CARGO_HOME=/crates CARGO_INCREMENTAL=0 \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS=-Ctarget-feature=+crt-static \
    chroot "$root" sh -euc 'cd "$1"; shift; exec cargo "$@"' sh "$sources" "$@"
"#;

pub(crate) fn run(args: &Args) -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from(
            "the compiler for aarch64 runs in a root of Debian, which needs root"
        )));
    }
    tools::install(&[EMULATOR])?;
    let compiler = Compiler::new(&Cache::open()?)?;
    let binary = compiler.binary(&args.profile)?;
    println!("{}, {} bytes", binary.display(), fs::metadata(&binary)?.len());
    if args.build {
        return Ok(());
    }
    starts(&binary)?;
    let mut summary = Summary::default();
    let programs = compiler.tests()?;
    if programs.len() != CRATES.len() {
        let (made, all) = (programs.len(), CRATES.len());
        bail!(Failed(format!("cargo made {made} programs of tests, not {all}")));
    }
    for program in programs {
        test(&program, &mut summary)?;
    }
    for reason in summary.reasons() {
        println!("SKIPPED: {reason}");
    }
    println!("SKIPPED: {STORE}");
    if !summary.failed.is_empty() {
        bail!(Failed(format!("on aarch64: {}", summary.failed.join(", "))));
    }
    println!("{} tests pass on aarch64", summary.passed());
    Ok(())
}

/// Checks that the binary runs without a C library of its machine.
fn starts(binary: &Path) -> Result<()> {
    let version = quiet(emulated(binary).arg("--version"))?;
    if !version.starts_with("quire ") {
        bail!(Failed(format!("`quire --version` prints {version}")));
    }
    Ok(())
}

fn emulated(program: &Path) -> Command {
    let mut command = Command::new(EMULATOR.0);
    command.arg(program);
    command
}

/// Runs a test program, and shows its failures and skips.
fn test(program: &Path, summary: &mut Summary) -> Result<()> {
    let failed = summary.failed.len();
    let output = emulated(program).arg("--show-output").output();
    let output = output.with_context(|| format!("cannot start {}", EMULATOR.0))?;
    for text in [&output.stdout, &output.stderr] {
        for line in String::from_utf8_lossy(text).lines() {
            // The reasons of skips are printed once, at the end.
            match summary.line(line) {
                Some(shown) if !shown.contains("SKIPPED: ") => println!("{shown}"),
                _ => {}
            }
        }
    }
    if !output.status.success() && summary.failed.len() == failed {
        bail!(Failed(format!("{}: {}", program.display(), output.status)));
    }
    Ok(())
}

/// A Rust compiler for aarch64.
struct Compiler {
    root: PathBuf,
    target: PathBuf,
    registry: PathBuf,
}

impl Compiler {
    fn new(cache: &Cache) -> Result<Self> {
        let root = inputs::sid::make_rust(cache, false)?.join("root");
        // The compiler's version is not that of the other builds, so it gets a separate target directory.
        let target = target_dir()?.join("aarch64");
        fs::create_dir_all(&target)?;
        let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
        let home = env::var_os("CARGO_HOME").map_or_else(|| home.join(".cargo"), PathBuf::from);
        Ok(Self { root, target: target.canonicalize()?, registry: home.join("registry") })
    }

    /// Returns a command for cargo in the root.
    fn cargo(&self, place: &Path, words: &[&str]) -> Result<Command> {
        // In the root nothing is downloaded.
        shown(cargo().args(["fetch", "--quiet", "--locked", "--target", TARGET]))?;
        let mut script = Command::new("unshare");
        script.args(["--mount", "--propagation=private", "/bin/sh", "-euc", COMPILE, "compile"]);
        script.args([&self.root, place, repository(), &self.target, &self.registry]);
        script.args(words).args(["--locked", "--offline", "--target", TARGET, "--target-dir"]);
        script.arg(&self.target);
        Ok(script)
    }

    /// Compiles the binary, and returns its path.
    fn binary(&self, profile: &str) -> Result<PathBuf> {
        let place = tempfile::tempdir()?;
        let words = ["build", "--quiet", "--package=quire-cli", "--profile", profile];
        shown(&mut self.cargo(place.path(), &words)?)?;
        let folder = if profile == "dev" { "debug" } else { profile };
        Ok(self.target.join(TARGET).join(folder).join("quire"))
    }

    /// Compiles unit tests, and returns the paths of their programs.
    fn tests(&self) -> Result<Vec<PathBuf>> {
        let place = tempfile::tempdir()?;
        let mut words = vec!["test", "--no-run", "--lib", "--message-format=json"];
        words.extend(CRATES.iter().flat_map(|it| ["--package", it]));
        Ok(programs(&quiet(&mut self.cargo(place.path(), &words)?)?))
    }
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
