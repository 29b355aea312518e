//! Makes Debian roots, and layers of changes to them with an overlay.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use rustix::fs::XattrFlags;

use super::apt;
use super::layer::{self, LayerFile, Mtime};
use crate::Skipped;
use crate::cache::{Cache, remove};
use crate::process::{is_root, need, quiet};

/// This machine, as Debian names it.
pub(crate) const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };

/// Debian's minimal system: the root as a directory, and its layer.
pub(crate) struct Base {
    dir: PathBuf,
}

impl Base {
    pub(crate) fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    pub(crate) fn layer(&self) -> Result<LayerFile> {
        LayerFile::open(&self.dir)
    }
}

pub(crate) fn base(cache: &Cache, refresh: bool) -> Result<Base> {
    let dir = cache.entry("debian-base", refresh, |draft| {
        let mirror = apt::mirror()?;
        let root = draft.join("root");
        bootstrap(&mirror.codename, &[], &mirror.address, &root)?;
        layer::write(&root, draft, Mtime::WholeSeconds)?;
        Ok(())
    })?;
    Ok(Base { dir })
}

/// Makes the root of a Debian release, without apt's downloads.
pub(crate) fn bootstrap(release: &str, packages: &[&str], mirror: &str, root: &Path) -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from("making a Debian root needs root")));
    }
    fs::create_dir_all(root)?;
    let mut debootstrap = Command::new(need("debootstrap")?);
    debootstrap.arg("--variant=minbase");
    if !packages.is_empty() {
        debootstrap.arg(format!("--include={}", packages.join(",")));
    }
    let made = quiet(debootstrap.arg(release).arg(root).arg(mirror));
    if let Err(error) = made {
        // This failure is not caused by this repository, so debootstrap's own message is shown.
        let text = format!("{error:#}");
        if text.contains("Failed getting release file") || text.contains("unable to resolve") {
            bail!(Skipped(format!("no Debian mirror can be reached for {release}")));
        }
        return Err(error);
    }
    // A chroot, or its end, must not leave the host's caches or incomplete downloads in the root.
    for dir in ["var/cache/apt/archives", "var/lib/apt/lists", "var/log", "var/cache/debconf"] {
        for entry in fs::read_dir(root.join(dir))? {
            remove(&entry?.path())?;
        }
    }
    Ok(())
}

/// Makes a root of Debian 13 for arm64, with the programs that tests call in a guest. No script of a package has run.
pub(crate) fn arm64(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    const PACKAGES: [&str; 24] = [
        "base-files",
        "bash",
        "busybox-static",
        "coreutils",
        "crun",
        "dash",
        "diffutils",
        "docker-registry",
        "e2fsprogs",
        "findutils",
        "fuse3",
        "grep",
        "gzip",
        "hostname",
        "iproute2",
        "libc-bin",
        "mount",
        "procps",
        "runc",
        "sed",
        "strace",
        "tar",
        "uidmap",
        "util-linux",
    ];
    cache.entry("debian-arm64", refresh, |draft| {
        let work = tempfile::tempdir_in(cache.dir())?;
        apt::Apt::open(work, &["trixie"], "arm64")?.unpack_all(&PACKAGES, draft)
    })
}

/// A change of one layer to the root below it: packages are installed, the shell script runs in the root, and then
/// files of the layer get xattrs (path, name, value).
pub(crate) struct Change<'a> {
    pub(crate) packages: &'a [&'a str],
    pub(crate) script: &'a str,
    pub(crate) xattrs: &'a [(&'a str, &'a str, &'a [u8])],
}

/// $1 lower, $2 upper, $3 work, $4 mount point of the overlay, $5 packages, $6 script. The script runs in a separate
/// mount namespace, so that no mount remains. All overlay features that mark the upper directory are off.
const INSTALL: &str = r#"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3,redirect_dir=off,metacopy=off,index=off,xino=off" "$4"
mount -t proc proc "$4/proc"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin
if [ -n "$5" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$4/usr/sbin/policy-rc.d"
    chmod 755 "$4/usr/sbin/policy-rc.d"
    chroot "$4" apt-get -q -o Acquire::Check-Valid-Until=false update
    chroot "$4" apt-get -q -y install $5
    chroot "$4" apt-get clean
    rm -r "$4/usr/sbin/policy-rc.d" "$4"/var/lib/apt/lists/*
fi
chroot "$4" /bin/sh -euc "$6"
umount "$4/proc" "$4"
"#;

/// Makes the layer of `change` on top of `base` and writes it below `dir`, which also holds all temporary
/// directories.
pub(crate) fn change(
    base: &Base,
    change: &Change<'_>,
    dir: &Path,
    mtime: Mtime,
) -> Result<LayerFile> {
    let overlay = tempfile::tempdir_in({
        fs::create_dir_all(dir)?;
        dir
    })?;
    let paths = ["upper", "work", "root"].map(|name| overlay.path().join(name));
    for path in &paths {
        fs::create_dir(path)?;
    }
    let mut script = Command::new(need("unshare")?);
    script.args(["--mount", "--propagation=private", "/bin/sh", "-euc", INSTALL, "install"]);
    script.arg(base.root()).args(&paths);
    quiet(script.arg(change.packages.join(" ")).arg(change.script))?;
    let [upper, ..] = &paths;
    for (path, name, value) in change.xattrs {
        rustix::fs::lsetxattr(upper.join(path), *name, value, XattrFlags::empty())?;
    }
    layer::overlay_to_oci(upper)?;
    layer::write(upper, dir, mtime)
}
