//! `composefs-dump`: reads an image, and writes it again.

use anyhow::Context as _;
use image::erofs::read::{Owners, View, to_tree};
use image::erofs::{Profile, Version, Versions, write};

use super::mkcomposefs::Output;
use super::{Arguments, Failure, read_image};

pub(super) const USAGE: &str = "SRC DEST";

pub(super) fn run(mut arguments: Arguments) -> Result<(), Failure> {
    let usage = |message: &str| Failure::Usage(message.to_owned());
    let source = arguments.next().ok_or_else(|| usage("No source path specified"))?;
    let destination = arguments.next().ok_or_else(|| usage("No destination path specified"))?;
    let image = read_image(&source)?;
    let load = || format!("Failed to load '{}'", source.display());
    let tree = to_tree(&image, View::Composefs(Owners::FirstMet)).with_context(load)?.tree;
    let version = match image.superblock().composefs.map(|header| header.version) {
        Some(0) => Version::V0,
        Some(1) => Version::V1,
        other => {
            let number = other.unwrap_or_default();
            return Err(anyhow::anyhow!("unknown format version {number}: use 0 or 1"))
                .with_context(load)
                .map_err(Failure::from);
        }
    };
    let profile = Profile::Composefs(Versions { min: version, max: version });
    Output::open(Some(&destination))?.fill(|out| {
        write(&tree, &profile, out).context("cannot write file")?;
        Ok(())
    })
}
