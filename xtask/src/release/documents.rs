//! Documents on the crates in the binary: their notices, and a bill of materials.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use rig::cache::Cache;
use rig::process::{cargo, quiet};
use rig::tools;

use super::{Commit, Place};

/// The documents of one target, as files.
#[derive(Debug)]
pub(super) struct Documents {
    /// Licences and copyright notices of all crates, and of the C library.
    pub(super) notices: PathBuf,
    /// Software bill of materials: CycloneDX, as JSON.
    pub(super) bill: PathBuf,
}

/// Files in the sources.
const ABOUT: [&str; 3] =
    ["dist/notices/about.toml", "dist/notices/about.hbs", "dist/notices/linked.txt"];

/// The licence of the C library. `linked.txt` refers to it.
const LGPL: &str = "dist/notices/LGPL-2.1.txt";

impl Documents {
    pub(super) fn make(
        cache: &Cache,
        place: &Place,
        target: &str,
        commit: &Commit,
    ) -> Result<Self> {
        let folder = place.built.join("documents");
        fs::create_dir_all(&folder)?;
        let notices = folder.join(format!("{target}.txt"));
        let bill = folder.join(format!("{target}.json"));
        let [config, template, linked] = ABOUT.map(|it| place.sources.join(it));
        let manifest = place.sources.join("crates/cli/Cargo.toml");
        // The next program looks at the crates for all systems, and a build gets only those for one.
        quiet(cargo().args(["fetch", "--locked"]).current_dir(&place.sources))?;
        let mut about = Command::new(tools::cargo_about(cache)?);
        // Offline: the texts come from the crates' sources, so that they are the same each time.
        about.args(["generate", "--offline", "--locked", "--fail", "--target", target]);
        about.arg("--manifest-path").arg(&manifest).arg("--config").arg(config);
        let crates = quiet(about.arg(template).current_dir(&place.sources))?;
        let texts = [fs::read_to_string(linked)?, fs::read_to_string(place.sources.join(LGPL))?];
        fs::write(&notices, format!("{crates}{}", texts.concat()))?;

        let mut cyclonedx = Command::new(tools::cargo_cyclonedx(cache)?);
        cyclonedx.args(["cyclonedx", "--format=json", "--describe=binaries", "--target", target]);
        cyclonedx.arg("--manifest-path").arg(&manifest);
        cyclonedx.env("SOURCE_DATE_EPOCH", &commit.seconds);
        // It writes beside the manifest of each crate.
        quiet(cyclonedx.current_dir(&place.sources))?;
        let written = place.sources.join("crates/cli/quire_bin.cdx.json");
        let text = fs::read_to_string(&written)
            .with_context(|| format!("cargo-cyclonedx has not written {}", written.display()))?;
        fs::write(&bill, without_paths(&text, &place.sources))?;
        Ok(Self { notices, bill })
    }
}

/// Removes the path of the sources from the identifiers of Quire's crates.
fn without_paths(text: &str, sources: &Path) -> String {
    text.replace(&format!("{}/", sources.display()), "")
}
