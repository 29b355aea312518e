//! A Rust compiler of Debian for aarch64, in a separate root.
//!
//! rustup's library for another machine is not available everywhere. Programs that are compiled here are static, so they
//! need nothing of that root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use rig::cache::Cache;
use rig::process::{cargo, cargo_home, is_root, shown};
use rig::{Skipped, inputs};

/// The target of all builds.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Cargo's home in the root. No path of Quire's sources contains this name.
pub(crate) const CARGO_HOME: &str = "/cargo-home";

/// $1 the root with the compiler, $2 a temporary directory, $3 the sources, $4 the target directory, $5 the directory
/// of downloaded crates; variables and a command follow. The root is not changed. Sources and target have the same
/// paths in it as outside, because test programs contain the path of the sources.
const ENTER: &str = r#"
lower=$1 place=$2 sources=$3 target=$4 crates=$5
shift 5
mount -t tmpfs tmpfs "$place"
mkdir "$place/upper" "$place/work" "$place/root"
root=$place/root
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$place/upper,workdir=$place/work" "$root"
mkdir -p "$root$sources" "$root$target" "$root/cargo-home/registry"
mount --bind "$sources" "$root$sources"
mount --bind "$target" "$root$target"
mount --bind "$crates" "$root/cargo-home/registry"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
exec env -i PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8 CARGO_HOME=/cargo-home CARGO_INCREMENTAL=0 \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc chroot "$root" env "$@"
"#;

/// Runs cargo in the sources, whose path is the first argument.
const CARGO: &str = r#"cd "$1"; shift; exec cargo "$@""#;

/// A Rust compiler for aarch64.
#[derive(Debug)]
pub(crate) struct DebianCompiler {
    root: PathBuf,
    sources: PathBuf,
    target: PathBuf,
}

impl DebianCompiler {
    /// Returns the compiler for these sources, which writes below the directory `target`.
    pub(crate) fn new(cache: &Cache, sources: &Path, target: &Path) -> Result<Self> {
        if !is_root() {
            let text = "the compiler for aarch64 runs in a root of Debian, which needs root";
            bail!(Skipped(text.to_owned()));
        }
        let root = inputs::sid::make_rust(cache, false)?.join("root");
        fs::create_dir_all(target)?;
        let (sources, target) = (sources.canonicalize()?, target.canonicalize()?);
        Ok(Self { root, sources, target })
    }

    /// Returns a command for cargo with these variables and arguments. `place` is an empty temporary directory.
    pub(crate) fn cargo(
        &self,
        place: &Path,
        variables: &[(&str, String)],
        words: &[&str],
    ) -> Result<Command> {
        // In the root nothing is downloaded.
        let mut fetch = cargo();
        fetch.args(["fetch", "--quiet", "--locked", "--target", TARGET]);
        shown(fetch.current_dir(&self.sources))?;
        let registry = cargo_home().join("registry");
        let mut script = Command::new("unshare");
        script.args(["--mount", "--propagation=private", "/bin/sh", "-euc", ENTER, "enter"]);
        script.args([&self.root, place, &self.sources, &self.target, &registry]);
        script.args(variables.iter().map(|(name, value)| format!("{name}={value}")));
        script.args(["sh", "-euc", CARGO, "sh"]).arg(&self.sources);
        script.args(words).args(["--locked", "--offline", "--target", TARGET, "--target-dir"]);
        script.arg(&self.target);
        Ok(script)
    }

    /// Returns the path of the `quire` that cargo has compiled with this profile.
    pub(crate) fn binary(&self, profile: &str) -> PathBuf {
        let folder = if profile == "dev" { "debug" } else { profile };
        self.target.join(TARGET).join(folder).join("quire")
    }
}
