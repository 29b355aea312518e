//! Makes Debian sid in a directory: the C composefs tools, the current erofs-utils, and systemd's tools for storage
//! providers, which run from outside with their own loader.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::{apt, rootfs};
use crate::cache::Cache;
use crate::process::{need, quiet};

/// The tools that get a wrapper script, and their directories in Debian.
const TOOLS: [(&str, &str); 9] = [
    ("mkcomposefs", "usr/bin"),
    ("composefs-info", "usr/bin"),
    ("mount.composefs", "usr/sbin"),
    ("mkfs.erofs", "usr/bin"),
    ("fsck.erofs", "usr/bin"),
    ("dump.erofs", "usr/bin"),
    ("storagectl", "usr/bin"),
    ("mount.storage", "usr/sbin"),
    ("mount", "usr/bin"),
];

/// A sid root. Its programs need no chroot, so they start as fast as Quire and see the same paths.
#[derive(Debug)]
pub struct Sid {
    dir: PathBuf,
}

impl Sid {
    /// Returns the directory with `root/`, and with `bin/` for the wrapper scripts.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the wrapper script of one of `TOOLS`.
    pub fn script(&self, tool: &str) -> PathBuf {
        self.dir.join("bin").join(tool)
    }

    /// Returns a command for one of `TOOLS` without the wrapper's shell, for measurements. Only the loader runs
    /// before the tool.
    pub fn command(&self, tool: &str) -> Result<Command> {
        let mut words = words(&self.dir.join("root"), tool)?.into_iter();
        let mut command = Command::new(words.next().expect("the loader comes first"));
        command.args(words);
        Ok(command)
    }
}

/// Returns the sid root in the cache, and makes it if it is absent.
pub fn make(cache: &Cache, refresh: bool) -> Result<Sid> {
    // A root made earlier may lack tools that were added to the list since.
    let place = cache.dir().join("sid");
    let is_whole = TOOLS.iter().all(|(tool, _)| place.join("bin").join(tool).is_file());
    let dir = cache.entry("sid", refresh || !is_whole, |draft| {
        let mirror = apt::mirror()?;
        let packages = ["composefs", "erofs-utils", "systemd-container"];
        rootfs::bootstrap("sid", &packages, &mirror.address, &draft.join("root"))?;
        fs::create_dir(draft.join("bin"))?;
        for (tool, _) in TOOLS {
            // The scripts contain the final path, to which the draft is renamed.
            let place = cache.dir().join("sid/root");
            let words = words_at(&draft.join("root"), &place, tool)?;
            let words: Vec<_> = words.iter().map(|it| format!("'{}'", it.display())).collect();
            let script = draft.join("bin").join(tool);
            fs::write(&script, format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" ")))?;
            fs::set_permissions(&script, Permissions::from_mode(0o755))?;
        }
        Ok(())
    })?;
    Ok(Sid { dir })
}

/// Makes a second sid root with podman 5 and its dependencies. It needs a chroot, because podman starts other
/// programs.
pub fn make_podman(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    cache.entry("sid-podman", refresh, |draft| {
        let mirror = apt::mirror()?;
        let packages = ["podman", "crun", "ca-certificates"];
        rootfs::bootstrap("sid", &packages, &mirror.address, &draft.join("root"))
    })
}

/// Makes a third sid root, which a machine can boot: systemd with the packages for logins, and programs that Quire
/// calls for users.
pub fn make_booted(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    const PACKAGES: [&str; 10] = [
        "systemd-sysv",
        "systemd-container",
        "libpam-systemd",
        "dbus",
        "dbus-user-session",
        "crun",
        "uidmap",
        "fuse3",
        "busybox-static",
        // systemd-nsresourced loads it when it starts.
        "libbpf1",
    ];
    let status = cache.dir().join("sid-booted/root/var/lib/dpkg/status");
    let status = fs::read_to_string(status).unwrap_or_default();
    // A root made from an earlier list is made again.
    let is_there =
        |name: &&str| status.lines().any(|it| it.strip_prefix("Package: ") == Some(name));
    let is_whole = PACKAGES.iter().all(is_there);
    cache.entry("sid-booted", refresh || !is_whole, |draft| {
        let mirror = apt::mirror()?;
        rootfs::bootstrap("sid", &PACKAGES, &mirror.address, &draft.join("root"))
    })
}

/// Makes a fourth sid root, with a Rust compiler and the libraries of Rust and C for aarch64. It needs a chroot,
/// because the compiler calls other programs.
pub fn make_rust(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    /// $1 is the root. debootstrap knows neither virtual packages nor other architectures, so apt installs the
    /// packages.
    const INSTALL: &str = r#"
mount -t proc proc "$1/proc"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin
chroot "$1" dpkg --add-architecture arm64
chroot "$1" apt-get -q -o Acquire::Check-Valid-Until=false update
chroot "$1" apt-get -q -y --no-install-recommends install rustc cargo gcc libc6-dev gcc-aarch64-linux-gnu \
    libc6-dev-arm64-cross libstd-rust-dev:arm64
chroot "$1" apt-get clean
rm -r "$1"/var/lib/apt/lists/*
"#;
    cache.entry("sid-rust", refresh, |draft| {
        let mirror = apt::mirror()?;
        let root = draft.join("root");
        rootfs::bootstrap("sid", &[], &mirror.address, &root)?;
        let mut script = Command::new(need("unshare")?);
        script.args(["--mount", "--propagation=private", "/bin/sh", "-euc", INSTALL, "install"]);
        quiet(script.arg(root)).map(drop)
    })
}

/// Returns QEMU's program that runs programs for aarch64. It is static, so it needs no root.
pub fn emulator(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    // The package has programs for all machines, which are large.
    program_of(cache, "sid-qemu-user", "qemu-user", "usr/bin/qemu-aarch64", refresh)
}

/// Returns systemd's `ukify`, which Debian 12 lacks. It is a script, so it needs no root.
pub fn ukify(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    program_of(cache, "ukify", "systemd-ukify", "usr/bin/ukify", refresh)
}

/// Returns a program of a package of sid, which is alone in the cache's entry.
fn program_of(
    cache: &Cache,
    entry: &str,
    package: &str,
    program: &str,
    refresh: bool,
) -> Result<PathBuf> {
    let dir = cache.entry(entry, refresh, |draft| {
        let work = tempfile::tempdir_in(cache.dir())?;
        let apt = apt::Apt::open(work, &["sid"], rootfs::ARCHITECTURE)?;
        let unpacked = apt.dir().join("unpacked");
        apt.unpack(&[package], &unpacked)?;
        let place = draft.join(program);
        fs::create_dir_all(place.with_file_name(""))?;
        fs::copy(unpacked.join(program), place)?;
        Ok(())
    })?;
    Ok(dir.join(program))
}

fn words(root: &Path, tool: &str) -> Result<Vec<PathBuf>> {
    words_at(root, root, tool)
}

/// Returns the command line that runs `tool`. The tool is looked up below `root`, and the paths begin with `place`,
/// to which the root will be moved.
fn words_at(root: &Path, place: &Path, tool: &str) -> Result<Vec<PathBuf>> {
    let Some((_, folder)) = TOOLS.iter().find(|(name, _)| *name == tool) else {
        bail!("the sid root has no wrapper for {tool}");
    };
    let program = Path::new(folder).join(tool);
    if !root.join(&program).is_file() {
        bail!("Debian's packages have no /{}", program.display());
    }
    let libraries = fs::read_dir(root.join("usr/lib"))?.filter_map(Result::ok);
    let mut libraries =
        libraries.filter(|it| it.file_name().as_encoded_bytes().ends_with(b"-linux-gnu"));
    let libraries = libraries.next().context("no folder of libraries in the sid root")?;
    let libraries = Path::new("usr/lib").join(libraries.file_name());
    // systemd's own library is in a separate directory.
    let all = [place.join(&libraries), place.join(&libraries).join("systemd")];
    let mut loaders = fs::read_dir(root.join(&libraries))?.filter_map(Result::ok);
    let loader = loaders.find(|it| it.file_name().as_encoded_bytes().starts_with(b"ld-linux"));
    let loader = loader.context("no dynamic loader in the sid root")?.file_name();
    Ok(vec![
        place.join(&libraries).join(loader),
        PathBuf::from("--argv0"),
        PathBuf::from(tool),
        PathBuf::from("--library-path"),
        PathBuf::from(std::env::join_paths(all)?),
        place.join(program),
    ])
}
