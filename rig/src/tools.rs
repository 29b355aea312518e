//! Installs programs that the test tiers need: Debian packages, and Rust and Go programs that are built into the
//! cache.

mod engines;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::cache::{Cache, remove};
use crate::inputs::layer::hex;
use crate::process::{find_program, is_root, quiet, target_dir};
use crate::{Skipped, vm};

pub use engines::{
    CONTAINERD, CONTAINERD_1_7, CONTAINERD_2_1, Containerd, containerd, crictl, docker, kubelet,
    soci,
};

/// systemd's stub of this processor. It is no program of this system, so it is found by its path.
pub(crate) const STUB: &str = if cfg!(target_arch = "aarch64") {
    "/usr/lib/systemd/boot/efi/linuxaa64.efi.stub"
} else {
    "/usr/lib/systemd/boot/efi/linuxx64.efi.stub"
};

/// podman's helpers for networks, which are not in `PATH`.
const NETAVARK: &str = "/usr/lib/podman/netavark";
const AARDVARK: &str = "/usr/lib/podman/aardvark-dns";

/// Programs for tests and the demo, each with its Debian package.
const PACKAGES: [(&str, &str); 51] = [
    ("crun", "crun"),
    ("runc", "runc"),
    ("newuidmap", "uidmap"),
    ("fusermount3", "fuse3"),
    ("pgrep", "procps"),
    ("pasta", "passt"),
    (NETAVARK, "netavark"),
    (AARDVARK, "aardvark-dns"),
    ("iptables", "iptables"),
    ("podman", "podman"),
    ("umoci", "umoci"),
    ("skopeo", "skopeo"),
    ("git", "git"),
    ("pax", "pax"),
    ("cpio", "cpio"),
    ("mkfs.erofs", "erofs-utils"),
    ("debootstrap", "debootstrap"),
    ("setfattr", "attr"),
    ("setfacl", "acl"),
    ("zstd", "zstd"),
    ("gzip", "gzip"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("tar", "tar"),
    ("bsdtar", "libarchive-tools"),
    ("python3", "python3"),
    ("openssl", "openssl"),
    ("docker-registry", "docker-registry"),
    ("strace", "strace"),
    ("unshare", "util-linux"),
    ("chattr", "e2fsprogs"),
    ("sfdisk", "fdisk"),
    ("sgdisk", "gdisk"),
    ("qemu-img", "qemu-utils"),
    ("tini-static", "tini"),
    ("ip", "iproute2"),
    ("curl", "curl"),
    ("systemd-analyze", "systemd"),
    ("systemd-dissect", "systemd-container"),
    ("veritysetup", "cryptsetup-bin"),
    ("fsverity", "fsverity"),
    ("fsck.vfat", "dosfstools"),
    ("mcopy", "mtools"),
    ("objcopy", "binutils"),
    (STUB, "systemd-boot-efi"),
    ("minisign", "minisign"),
    ("fish", "fish"),
    ("zsh", "zsh"),
    ("expect", "expect"),
    ("promtool", "prometheus"),
];

/// Additional programs for makers of images, engines and benches.
const ENGINES: [(&str, &str); 9] = [
    ("containerd", "containerd"),
    ("buildah", "buildah"),
    ("dockerd", "docker.io"),
    ("docker", "docker.io"),
    ("pigz", "pigz"),
    ("pip3", "python3-pip"),
    ("fio", "fio"),
    ("wrk", "wrk"),
    ("haproxy", "haproxy"),
];

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Fail if something remains missing
    #[arg(long)]
    strict: bool,
}

/// Installs missing packages, or prints which packages to install.
pub fn run(args: &Args) -> Result<()> {
    match install_all().and_then(|()| install_engines()) {
        Err(error) if args.strict => Err(error),
        Err(error) => {
            println!("{error:#}");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Installs the programs for makers of images, engines and benches.
pub fn install_engines() -> Result<()> {
    install(&ENGINES)
}

/// Installs all programs for tests.
pub fn install_all() -> Result<()> {
    install(&[&PACKAGES[..], &vm::PACKAGES[..]].concat())?;
    // Without this file `fusermount3` does not unmount. systemd creates the file at boot.
    let mtab = Path::new("/etc/mtab");
    if is_root() && fs::symlink_metadata(mtab).is_err() {
        std::os::unix::fs::symlink("../proc/self/mounts", mtab).context("cannot make /etc/mtab")?;
    }
    Ok(())
}

/// Returns the packages whose programs are missing.
fn missing<'a>(packages: &[(&'a str, &'a str)]) -> Vec<&'a str> {
    let missing = packages.iter().filter(|(program, _)| find_program(program).is_none());
    let names: BTreeSet<_> = missing.map(|(_, package)| *package).collect();
    names.into_iter().collect()
}

/// Ensures that these programs are installed, with apt if this process is root on Debian. Otherwise the error lists
/// the packages to install, and work that needs them is skipped.
pub fn install(packages: &[(&str, &str)]) -> Result<()> {
    let wanted = missing(packages);
    if wanted.is_empty() {
        return Ok(());
    }
    if !is_root() || find_program("apt-get").is_none() {
        let names = wanted.join(" ");
        bail!(Skipped(format!("not installed; please install these Debian packages: {names}")));
    }
    let result = apt_install(&wanted);
    let missing = missing(packages).join(" ");
    match result {
        _ if missing.is_empty() => Ok(()),
        Ok(_) => bail!("apt installed {missing}, but they lack the programs"),
        Err(error) => {
            bail!(Skipped(format!(
                "not installed, and apt cannot install them: {missing}: {error:#}"
            )))
        }
    }
}

/// Installs Debian packages, as root.
fn apt_install(names: &[&str]) -> Result<()> {
    println!("installing {}", names.join(" "));
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(["-q", "-y", "-o", "DPkg::Lock::Timeout=120"]).args(words);
        quiet(command.env("DEBIAN_FRONTEND", "noninteractive")).map(drop)
    };
    let install = |names: &[&str]| apt(&[&["install", "--no-install-recommends"], names].concat());
    let mut result = apt(&["update"]).and_then(|()| install(names));
    if result.is_err() && names.len() > 1 {
        // A package that this release lacks, or that is broken, does not prevent the others.
        for name in names {
            if let Err(error) = install(&[name]) {
                result = Err(error);
            }
        }
    }
    result
}

/// The version that deny.toml was written for.
const CARGO_DENY: &str = "cargo-deny@0.20.2";

/// The version whose failures on tmpfs and overlayfs the tests expect.
const PJDFSTEST: &str = "pjdfstest@0.2.2";

/// The version that `fuzz/` was made with.
const CARGO_FUZZ: &str = "cargo-fuzz@0.13.2";

/// Makes the Debian package.
const CARGO_DEB: &str = "cargo-deb@3.8.0";

/// Writes the notices of a release.
const CARGO_ABOUT: &str = "cargo-about@0.9.3";

/// Writes the bill of materials of a release.
const CARGO_CYCLONEDX: &str = "cargo-cyclonedx@0.5.9";

/// Builds the book, without the server and its dependencies.
const MDBOOK: &str = "mdbook@0.5.4";

/// An alternative to `quire import`.
const COMPOSEFS_CTL: &str = "composefs-ctl@0.9.4";

/// Whether cargo-deb is installed, so that it need not be built.
pub(crate) fn has_cargo_deb(cache: &Cache) -> bool {
    find_program("cargo-deb").is_some() || cache.dir().join(CARGO_DEB.replace('@', "-")).is_dir()
}

/// Whether mdbook is installed, so that it need not be built.
pub(crate) fn has_mdbook(cache: &Cache) -> bool {
    find_program("mdbook").is_some() || cache.dir().join(MDBOOK.replace('@', "-")).is_dir()
}

/// Whether cargo-deny is installed, so that it need not be built.
pub(crate) fn has_cargo_deny(cache: &Cache) -> bool {
    find_program("cargo-deny").is_some() || cache.dir().join(CARGO_DENY.replace('@', "-")).is_dir()
}

pub fn cargo_deny(cache: &Cache) -> Result<PathBuf> {
    cargo_tool(cache, CARGO_DENY, &["--debug"])
}

/// # Errors
/// [`Skipped`] if cargo-deb cannot be obtained.
pub fn cargo_deb(cache: &Cache) -> Result<PathBuf> {
    cargo_tool(cache, CARGO_DEB, &["--debug", "--no-default-features"])
}

/// Returns cargo-about, optimized because it compares all files of all crates with the texts of licenses.
///
/// # Errors
/// [`Skipped`] if cargo-about cannot be obtained.
pub fn cargo_about(cache: &Cache) -> Result<PathBuf> {
    cargo_tool(cache, CARGO_ABOUT, &["--features", "cli"])
}

/// # Errors
/// [`Skipped`] if cargo-cyclonedx cannot be obtained.
pub fn cargo_cyclonedx(cache: &Cache) -> Result<PathBuf> {
    cargo_tool(cache, CARGO_CYCLONEDX, &["--debug"])
}

/// # Errors
/// [`Skipped`] if mdbook cannot be obtained.
pub fn mdbook(cache: &Cache) -> Result<PathBuf> {
    cargo_tool(cache, MDBOOK, &["--debug", "--no-default-features", "--features=search"])
}

/// Returns a test suite for file systems, always from the cache and not from `PATH`, because the tests depend on its
/// version.
pub fn pjdfstest(cache: &Cache) -> Result<PathBuf> {
    let library = "libacl1-dev";
    let is_there = || Path::new("/usr/include/sys/acl.h").exists();
    let entry = PJDFSTEST.replace('@', "-");
    if !cache.dir().join(&entry).is_dir() && !is_there() {
        let installs = is_root() && find_program("apt-get").is_some();
        if !installs || apt_install(&[library]).is_err() || !is_there() {
            bail!(Skipped(format!("not installed; please install this Debian package: {library}")));
        }
    }
    cargo_program(cache, &entry, &["--debug", PJDFSTEST])
}

pub fn cargo_fuzz(cache: &Cache) -> Result<PathBuf> {
    cargo_tool(cache, CARGO_FUZZ, &["--debug"])
}

/// Returns composefs-rs's `cfsctl`, optimized because it is measured. The build takes a quarter of an hour and needs
/// the headers of openssl.
pub fn cfsctl(cache: &Cache) -> Result<PathBuf> {
    Ok(cargo_tool(cache, COMPOSEFS_CTL, &[])?.with_file_name("cfsctl"))
}

/// Returns `cfsctl` if it was built before.
pub fn built_cfsctl(cache: &Cache) -> Option<PathBuf> {
    let built = cache.dir().join(COMPOSEFS_CTL.replace('@', "-")).join("bin/cfsctl");
    built.is_file().then_some(built)
}

/// Returns the writer of the `composefs` crate, if `cargo xtask oracle` has built it: `PROGRAM DUMP IMAGE`.
pub fn built_composefs_crate() -> Result<Option<PathBuf>> {
    let built = target_dir()?.join("release/composefs-crate-oracle");
    Ok(built.is_file().then_some(built))
}

/// Nydus v3, from the branch `v3`, which has no release: the repository, and the last commit of July 2026.
const NYDUS: (&str, &str) =
    ("https://github.com/dragonflyoss/nydus", "3f9e12edc26c88484ba7f91f09ad1f58f7d9e559");

/// Returns an alternative for lazy images, optimized because it is measured. The build takes a few minutes, and
/// includes the services for FUSE and for fanotify.
pub fn nydus(cache: &Cache) -> Result<PathBuf> {
    let (repository, commit) = NYDUS;
    let name = format!("nydus-{}", &commit[..8]);
    let is_built = cache.dir().join(&name).join("bin/nydus").is_file();
    if !is_built {
        fuse_headers()?;
    }
    let options = ["--git", repository, "--rev", commit, "--features", "cli,fanotify"];
    let dir = cargo_program(cache, &name, &[&options[..], &["--bin", "nydus", "nydus"]].concat())?;
    Ok(dir.join("bin/nydus"))
}

/// Checks for the headers of libfuse, with which Nydus is linked. [`install`] cannot detect them, because they have
/// no program.
fn fuse_headers() -> Result<()> {
    install(&[("pkg-config", "pkg-config")])?;
    if quiet(Command::new("pkg-config").args(["--exists", "fuse3"])).is_ok() {
        return Ok(());
    }
    if !is_root() || find_program("apt-get").is_none() {
        bail!(Skipped("not installed; please install this Debian package: libfuse3-dev".into()));
    }
    apt_install(&["libfuse3-dev"])
}

/// Makes eStargz layers, and is a second client of registries. This version can be built with Debian's Go.
const CRANE: &str = "github.com/google/go-containerregistry/cmd/crane@v0.14.0";

/// gVisor's runtime, from the branch `go`, which the Go toolchain can build without other tools. Needs Go 1.26.3.
const RUNSC: &str = "gvisor.dev/gvisor/runsc@v0.0.0-20260905035102-160fafc42237";

/// Returns `crane`, built into the cache as `crane/bin/crane`. Go is installed for the build.
pub fn crane(cache: &Cache) -> Result<PathBuf> {
    go_tool(cache, "crane", CRANE)
}

/// The Go toolchain for the build if the installed one is too old: a module from the module proxy, whose digest Go
/// verifies. Source: go.dev/doc/toolchain, "Downloading toolchains".
const GO: &str = "golang.org/toolchain@v0.0.1-go1.26.6.linux-";

/// Returns `runsc`, built into the cache as `runsc/bin/runsc`.
pub fn runsc(cache: &Cache) -> Result<PathBuf> {
    go_tool(cache, "runsc", RUNSC)
}

/// Returns a program that makes eStargz layers, and mounts them like stargz-snapshotter: a program of this repository
/// with its library, because the module of stargz-snapshotter's own programs has no release.
pub fn stargz(cache: &Cache) -> Result<PathBuf> {
    const FILES: [(&str, &str); 3] = [
        ("go.mod", include_str!("tools/stargz/go.mod")),
        ("go.sum", include_str!("tools/stargz/go.sum")),
        ("main.go", include_str!("tools/stargz/main.go")),
    ];
    let dir = sources(cache, "stargz", "stargz-snapshotter 0.19.1", &FILES, |go, bin| {
        go.args(["build", "-o"]).arg(bin.join("stargz")).arg(".");
    })?;
    Ok(dir.join("bin/stargz"))
}

/// Returns the entry of a Go program in this repository: `NAME-DIGEST`, with the digest of its source files.
fn sources(
    cache: &Cache,
    name: &str,
    title: &str,
    files: &[(&str, &str)],
    words: impl Fn(&mut Command, &Path),
) -> Result<PathBuf> {
    let all: String = files.iter().map(|it| it.1).collect();
    let name = format!("{name}-{}", &hex(&Sha256::digest(all))[..12]);
    go_program(cache, &name, title, |go, bin, build| {
        let sources = build.join("sources");
        fs::create_dir_all(&sources)?;
        files.iter().try_for_each(|(name, text)| fs::write(sources.join(name), text))?;
        let mut go = go();
        words(go.current_dir(sources), bin);
        Ok(go)
    })
}

/// Returns containerd's own tests of snapshotters, as a program: `snapshotter-suite-DIGEST/bin/suite`.
pub fn suite(cache: &Cache) -> Result<PathBuf> {
    const FILES: [(&str, &str); 3] = [
        ("go.mod", include_str!("tools/suite/go.mod")),
        ("go.sum", include_str!("tools/suite/go.sum")),
        ("suite_test.go", include_str!("tools/suite/suite_test.go")),
    ];
    sources(cache, "snapshotter-suite", "containerd's tests of snapshotters", &FILES, |go, bin| {
        go.args(["test", "-c", "-o"]).arg(bin.join("suite")).arg(".");
    })
}

/// Returns a program that decodes manifests with Kubernetes' types, and renders charts with Helm's engine:
/// `kubernetes-manifests-DIGEST/bin/manifests`.
pub fn manifests(cache: &Cache) -> Result<PathBuf> {
    const FILES: [(&str, &str); 3] = [
        ("go.mod", include_str!("tools/manifests/go.mod")),
        ("go.sum", include_str!("tools/manifests/go.sum")),
        ("main.go", include_str!("tools/manifests/main.go")),
    ];
    let dir = sources(cache, "kubernetes-manifests", "Kubernetes' types", &FILES, |go, bin| {
        go.args(["build", "-o"]).arg(bin.join("manifests")).arg(".");
    })?;
    Ok(dir.join("bin/manifests"))
}

/// Returns a program from the Go module proxy, built into the cache as `NAME/bin/NAME`. Go is installed for the
/// build.
fn go_tool(cache: &Cache, name: &str, module: &str) -> Result<PathBuf> {
    let dir = go_program(cache, name, module, |go, _, _| {
        let mut go = go();
        go.args(["install", module]);
        Ok(go)
    })?;
    Ok(dir.join("bin").join(name))
}

/// Returns an entry of the cache whose directory `bin` has the results of a Go command. `command` gets Go, this
/// directory, and a temporary directory for the build.
fn go_program(
    cache: &Cache,
    name: &str,
    title: &str,
    command: impl Fn(&dyn Fn() -> Command, &Path, &Path) -> Result<Command>,
) -> Result<PathBuf> {
    cache.entry(name, false, |draft| {
        install(&[("go", "golang-go")])?;
        println!("building {title}, once");
        let (bin, build) = (draft.join("bin"), draft.join("build"));
        fs::create_dir_all(&bin)?;
        let go = |program: &Path| {
            let mut go = Command::new(program);
            // Modules are read-only files by default, which only root can remove.
            go.env("GOFLAGS", "-modcacherw").env("GOBIN", &bin);
            go.env("GOPATH", build.join("path")).env("GOCACHE", build.join("cache"));
            // Static, because runsc executes itself in empty roots.
            go.env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local");
            go
        };
        let make = |go: &dyn Fn() -> Command| quiet(&mut command(go, &bin, &build)?);
        let mut made = make(&|| go(Path::new("go")));
        let is_too_old =
            |error: &str| error.contains("requires go >=") || error.contains("invalid go version");
        if made.as_ref().is_err_and(|error| is_too_old(&format!("{error:#}"))) {
            made = newer_go(&mut go(Path::new("go"))).and_then(|root| {
                make(&|| {
                    let mut go = go(&root.join("bin/go"));
                    go.env("GOROOT", &root);
                    go
                })
            });
        }
        remove(&build)?;
        // Without a network, Go reports this in several ways.
        let offline = |error: &str| error.contains("dial tcp") || error.contains("lookup ");
        match made {
            Err(error) if offline(&format!("{error:#}")) => {
                bail!(Skipped(format!("{title} is not there and cannot be downloaded")))
            }
            made => made.map(drop),
        }
    })
}

/// Downloads [`GO`] and returns its path. Files in modules are not executable, and nested modules are renamed; Go
/// itself corrects both when it downloads a toolchain. Source: Go `src/cmd/go/internal/toolchain/select.go`.
fn newer_go(go: &mut Command) -> Result<PathBuf> {
    let machine = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let module = format!("{GO}{machine}");
    println!("downloading {module}, for this build alone");
    let said = quiet(go.args(["mod", "download", "-json", &module]))?;
    let said: serde_json::Value = serde_json::from_str(&said)?;
    let root =
        said["Dir"].as_str().map(PathBuf::from).context("Go does not say where it put it")?;
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        let is_programs = folder.ends_with("bin") || folder.starts_with(root.join("pkg/tool"));
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else if entry.file_name() == "_go.mod" {
                fs::copy(&path, path.with_file_name("go.mod"))?;
            } else if is_programs {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
            }
        }
    }
    Ok(root)
}

/// Returns `NAME@VERSION`: the program in `PATH`, or one that is built into the cache. A debug build of cargo-deny
/// takes one or two minutes, a release build ten, and cargo-deny runs for a second.
fn cargo_tool(cache: &Cache, tool: &str, options: &[&str]) -> Result<PathBuf> {
    let (name, _) = tool.split_once('@').expect("the constants above have a version");
    if let Some(found) = find_program(name) {
        return Ok(found);
    }
    let dir = cargo_program(cache, &tool.replace('@', "-"), &[options, &[tool]].concat())?;
    Ok(dir.join("bin").join(name))
}

/// Returns an entry of the cache whose directory `bin` has the result of `cargo install` with these arguments.
fn cargo_program(cache: &Cache, entry: &str, words: &[&str]) -> Result<PathBuf> {
    cache.entry(entry, false, |draft| {
        println!("building {entry}, once");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["install", "--quiet", "--locked"]).args(words).arg("--root").arg(draft);
        let build = draft.join("build");
        cargo.env("CARGO_TARGET_DIR", &build).env_remove("RUSTFLAGS");
        // Repositories are fetched with the configuration of this machine's git.
        cargo.env("CARGO_NET_GIT_FETCH_WITH_CLI", "true");
        let made = quiet(&mut cargo);
        remove(&build)?;
        let offline =
            ["failed to download", "Could not resolve", "failed to clone", "failed to fetch"];
        match made {
            Err(error) if offline.iter().any(|it| format!("{error:#}").contains(it)) => {
                bail!(Skipped(format!("{entry} is not there and cannot be downloaded")))
            }
            made => made.map(drop),
        }
    })
}

/// Whether this is continuous integration, where a missing tool is a failure.
pub fn in_ci() -> bool {
    env::var_os("CI").is_some_and(|it| it == "true")
}
