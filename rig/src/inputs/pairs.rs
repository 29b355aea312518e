//! Makes pairs of images that are one minor version apart: Debian's release, with and without its security updates,
//! and two versions of a Python package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::rootfs::{self, Base, Change};
use super::{apt, layer, layout};
use crate::cache::{Cache, remove};
use crate::process::{need, quiet};

/// Names of the pairs, and their packages, the main one first.
pub const PAIRS: [(&str, &[&str]); 5] = [
    ("nginx", &["nginx-core", "nginx"]),
    ("redis", &["redis-server"]),
    ("postgresql", &["postgresql-15", "postgresql"]),
    ("tomcat", &["tomcat10"]),
    ("mariadb", &["mariadb-server"]),
];

/// An image of a pair.
#[derive(Debug)]
pub struct Version {
    /// Debian version of the main package.
    pub version: String,
    /// An OCI layout with the tag `latest`: the system and a layer of packages.
    pub layout: PathBuf,
    /// The same files as a directory.
    pub tree: PathBuf,
}

/// Name of the wheels, and their versions.
pub const WHEELS: (&str, [&str; 2]) = ("tensorflow", ["2.11.0", "2.11.1"]);

/// Downloads two versions of a large Python package from PyPI, each as a wheel.
pub fn wheels(cache: &Cache, refresh: bool) -> Result<[PathBuf; 2]> {
    let (name, versions) = WHEELS;
    let dir = cache.entry(&format!("pair-{name}"), refresh, |draft| {
        for version in versions {
            let mut pip = Command::new(need("pip3")?);
            pip.args(["download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]);
            pip.args(["--python-version", "310", "--platform", "manylinux2014_x86_64"]);
            pip.arg("--dest").arg(draft.join(version)).arg(format!("{name}=={version}"));
            quiet(&mut pip)?;
        }
        Ok(())
    })?;
    let wheel = |version: &str| -> Result<PathBuf> {
        let mut files = fs::read_dir(dir.join(version))?;
        Ok(files.next().context("pip has downloaded nothing")??.path())
    };
    Ok([wheel(versions[0])?, wheel(versions[1])?])
}

/// Makes the images of a pair, the older one first. Both have the same version if the mirror has only one.
pub fn make(cache: &Cache, name: &str, packages: &[&str], refresh: bool) -> Result<[Version; 2]> {
    let base = rootfs::base(cache, false)?;
    let dir = cache.entry(&format!("pair-{name}"), refresh, |draft| {
        fs::create_dir_all(draft)?;
        version(&base, packages, Packing::Layered, "", &draft.join("1"))?;
        let mirror = apt::security()?;
        version(&base, packages, Packing::Layered, &mirror, &draft.join("2"))
    })?;
    open(&dir)
}

/// Makes Debian with usual packages, as one layer: its last point release, and the same with all security updates
/// since.
pub fn release(cache: &Cache, refresh: bool) -> Result<[Version; 2]> {
    let packages =
        ["base-files", "ca-certificates", "curl", "git", "openssh-client", "python3", "gnupg"];
    let base = rootfs::base(cache, false)?;
    let dir = cache.entry("pair-release", refresh, |draft| {
        fs::create_dir_all(draft)?;
        let sources = [String::new(), apt::security()?];
        for (name, source) in ["1", "2"].iter().zip(&sources) {
            version(&base, &packages, Packing::Flat, source, &draft.join(name))?;
        }
        Ok(())
    })?;
    open(&dir)
}

/// Opens the versions in a directory.
fn open(dir: &Path) -> Result<[Version; 2]> {
    let version = |number: &str| -> Result<Version> {
        let dir = dir.join(number);
        let version = fs::read_to_string(dir.join("version"))?.trim().to_owned();
        Ok(Version { version, layout: dir.join("layout"), tree: dir.join("tree") })
    };
    Ok([version("1")?, version("2")?])
}

/// $1 the base, $2 the layer's tar, $3 the tree. Whiteouts are applied. Opaque marks are removed, because overlayfs
/// marks every new directory, which has no effect if the base has no such directory.
const TREE: &str = r#"
cp -a "$1" "$3"
tar --extract --gzip --numeric-owner --xattrs --xattrs-include='*' --file "$2" --directory "$3"
find "$3" -name .wh..wh..opq -delete
find "$3" -name '.wh.*' | while read -r mark; do
    rm -rf "$mark" "${mark%/*}/${mark##*/.wh.}"
done
"#;

/// Installs packages. The source of newer versions is removed again afterwards, so that both images have the same
/// list of sources. Databases that packages create are removed, because they differ each time and images do not
/// contain them.
const INSTALL: &str = r"
export DEBIAN_FRONTEND=noninteractive
cp -a /etc/apt/sources.list /run/sources.list
printf '%s\n' 'SOURCE' >> /etc/apt/sources.list
printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
apt-get -q -o Acquire::Check-Valid-Until=false update
UPGRADE
apt-get -q -y --no-install-recommends install PACKAGES
apt-get clean
rm -r /usr/sbin/policy-rc.d /var/lib/apt/lists/*
cp -a /run/sources.list /etc/apt/sources.list
rm /run/sources.list
find /var/log /var/cache/ldconfig /var/cache/apt -type f -delete
rm -rf /var/lib/postgresql/* /var/lib/mysql/*
";

/// How an image is divided into layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    /// A layer of packages on the unchanged system.
    Layered,
    /// One layer, in which the system is upgraded as well.
    Flat,
}

fn version(
    base: &Base,
    packages: &[&str],
    packing: Packing,
    source: &str,
    dir: &Path,
) -> Result<()> {
    fs::create_dir_all(dir)?;
    let upgrade = match packing {
        Packing::Layered => "",
        Packing::Flat => "apt-get -q -y upgrade",
    };
    let script = INSTALL.replace("SOURCE", source).replace("UPGRADE", upgrade);
    let script = script.replace("PACKAGES", &packages.join(" "));
    let change = Change { packages: &[], script: &script, xattrs: &[] };
    let top = rootfs::change(base, &change, dir, layer::Mtime::WholeSeconds)?;
    let tree = dir.join("tree");
    let mut unpack = Command::new("sh");
    unpack.args(["-euc", TREE, "tree"]).arg(base.root()).arg(&top.file).arg(&tree);
    quiet(&mut unpack)?;
    let mut query = Command::new("dpkg-query");
    query.arg(format!("--admindir={}", tree.join("var/lib/dpkg").display()));
    query.args(["--show", "--showformat=${Version}", packages[0]]);
    fs::write(dir.join("version"), quiet(&mut query)?)?;
    let (file, facts) = (dir.join("layer.tar.gz"), dir.join("layer.json"));
    let layers = match packing {
        Packing::Layered => vec![base.layer()?, top],
        Packing::Flat => vec![layer::write(&tree, dir, layer::Mtime::WholeSeconds)?],
    };
    layout::write(&dir.join("layout"), &layout::Config::default(), &layers)?;
    remove(&file)?;
    remove(&facts)
}
