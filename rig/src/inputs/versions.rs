//! Makes layers of consecutive versions of an application: a system, a runtime, and the application's releases.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use super::layer::{self, LayerFile, Mtime};
use super::rootfs;
use crate::Skipped;
use crate::cache::{Cache, remove};
use crate::process::{need, quiet};

/// Number of versions, which are counted from 1: Django 4.2.1 and the releases after it.
pub const COUNT: usize = 20;

/// The application's dependencies, the same for all versions.
const DEPENDENCIES: [&str; 4] =
    ["asgiref==3.8.1", "sqlparse==0.5.3", "gunicorn==23.0.0", "packaging==24.2"];

/// The layers of all versions.
pub struct Versions {
    base: rootfs::Base,
    dir: PathBuf,
}

/// How an image is divided into layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// System, runtime and application: only the last one differs between versions.
    Layered,
    /// One layer, so that versions have no layer in common.
    Flat,
}

impl Versions {
    /// Opens the layers of one version, the lowest first.
    pub fn layers(&self, cut: Cut, version: usize) -> Result<Vec<LayerFile>> {
        let open = |name: String| LayerFile::open(&self.dir.join(name));
        match cut {
            Cut::Flat => Ok(vec![open(format!("flat-{version}"))?]),
            Cut::Layered => Ok(vec![
                self.base.layer()?,
                open(String::from("runtime"))?,
                open(format!("app-{version}"))?,
            ]),
        }
    }

    /// Returns the directory of the layers.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// $1 wheels, $2 version, $3 the root that gets the application. All times are constant, as in reproducible builds.
const UNPACK: &str = r#"
rm -rf "$3/opt/app"
mkdir -p "$3/opt/app"
for wheel in "$1"/[Dd]jango-4.2."$2"-*.whl "$1"/asgiref-*.whl "$1"/sqlparse-*.whl "$1"/gunicorn-*.whl "$1"/packaging-*.whl; do
    python3 -m zipfile -e "$wheel" "$3/opt/app"
done
find "$3/opt" -exec touch --no-dereference --date=@1767225600 {} +
"#;

pub fn make(cache: &Cache, refresh: bool) -> Result<Versions> {
    let base = rootfs::base(cache, false)?;
    let dir = cache.entry("versions", refresh, |draft| {
        fs::create_dir(draft)?;
        let wheels = draft.join("wheels");
        for version in 1..=COUNT {
            download(&wheels, &[&format!("django==4.2.{version}")])?;
        }
        download(&wheels, &DEPENDENCIES)?;
        let runtime = draft.join("runtime");
        let packages = rootfs::Change { packages: &["python3"], script: "", xattrs: &[] };
        let runtime = rootfs::change(&base, &packages, &runtime, Mtime::WholeSeconds)?;
        let merged = draft.join("merged");
        quiet(Command::new("cp").arg("-a").arg(base.root()).arg(&merged))?;
        let mut extract = Command::new("tar");
        extract.args(["--extract", "--numeric-owner", "--file"]).arg(&runtime.file);
        quiet(extract.arg("--directory").arg(&merged))?;
        // overlayfs marks every new directory as opaque.
        let find = |words: &[&str]| quiet(Command::new("find").arg(&merged).args(words));
        find(&["-name", ".wh..wh..opq", "-delete"])?;
        let whiteouts = find(&["-name", ".wh.*"])?;
        if !whiteouts.is_empty() {
            bail!("the runtime deletes files, which a flat image would have: {whiteouts}");
        }
        let app = draft.join("app");
        for version in 1..=COUNT {
            for (root, name) in [(&app, "app"), (&merged, "flat")] {
                let mut unpack = Command::new("sh");
                unpack.args(["-euc", UNPACK, "unpack"]).arg(&wheels).arg(version.to_string());
                quiet(unpack.arg(root))?;
                let layer = draft.join(format!("{name}-{version}"));
                fs::create_dir(&layer)?;
                layer::write(root, &layer, Mtime::WholeSeconds)?;
            }
        }
        [wheels, merged, app].iter().try_for_each(|it| remove(it))
    })?;
    Ok(Versions { base, dir })
}

/// Downloads wheels from the index that this machine's pip is configured for.
fn download(wheels: &Path, packages: &[&str]) -> Result<()> {
    let mut pip = Command::new(need("pip3")?);
    pip.args(["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]).arg(wheels);
    match quiet(pip.args(packages)) {
        Err(error) if format!("{error:#}").contains("No matching distribution") => {
            bail!(Skipped(format!("pip has no {}", packages.join(", "))))
        }
        done => done.map(drop),
    }
}
