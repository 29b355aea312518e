//! The `composefs` crate with the command line of `mkcomposefs`, as a second, independent writer.
//!
//! `[--min-version=N] [--max-version=N] --from-file DUMP IMAGE`. The crate does not support all images that C
//! supports: payloads other than the digest's path, hard links whose target sorts after them, and more. `cargo xtask
//! oracle mkcomposefs --composefs-crate` generates only dumps that both support.

use std::fs;

use anyhow::{Context as _, Result, bail};
use composefs::dumpfile::dumpfile_to_validated_filesystem;
use composefs::erofs::format::FormatVersion;
use composefs::erofs::writer::mkfs_erofs_versioned;
use composefs::fsverity::Sha256HashValue;

fn main() -> Result<()> {
    let mut version = FormatVersion::V0;
    let mut paths = Vec::new();
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--from-file" | "--min-version=0" | "--max-version=0" | "--max-version=1" => {}
            "--min-version=1" => version = FormatVersion::V1,
            option if option.starts_with("--") => bail!("unknown option {option}"),
            _ => paths.push(argument),
        }
    }
    let [dump, image] = &paths[..] else {
        bail!("a dump and an image are needed");
    };
    let text = fs::read_to_string(dump).with_context(|| format!("cannot read {dump}"))?;
    let tree = dumpfile_to_validated_filesystem::<Sha256HashValue>(&text)?;
    fs::write(image, mkfs_erofs_versioned(&tree, version))
        .with_context(|| format!("cannot write {image}"))
}
