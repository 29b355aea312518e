//! Ten images with much in common: their disk use, and the memory of a container of each.

use anyhow::Result;
use rig::cache::remove;
use rig::inputs::layout;
use rig::inputs::versions::{self, Cut};
use rig::process::quiet;

use super::Stage;
use super::costs::blobs;
use super::kind::Kind;
use super::node::Node;
use crate::measure::drop_caches;
use crate::proc::page_cache;
use crate::registry;
use crate::report::{Sizes, Unit};
use crate::versions::disk;

pub(super) const IMAGES: usize = 10;

/// The command of each container, which reads the application and its runtime.
const READ: &str = "find /opt/app /usr/lib/python3* -type f -exec cat {} + > /dev/null";

/// Pushes the images to the registry.
fn publish(stage: &Stage<'_>) -> Result<()> {
    let versions = versions::make(stage.context.cache, false)?;
    let draft = stage.context.work.join("draft");
    for version in 1..=IMAGES {
        layout::write(
            &draft,
            &layout::Config::default(),
            &versions.layers(Cut::Layered, version)?,
        )?;
        registry::copy(&draft, &name(stage, version))?;
        remove(&draft)?;
    }
    Ok(())
}

fn name(stage: &Stage<'_>, version: usize) -> String {
    format!("{}/related:{version}", stage.registry.host)
}

/// Measures disk use and page cache.
pub(super) fn related(stage: &Stage<'_>, kinds: &[Kind]) -> Result<[Sizes; 2]> {
    publish(stage)?;
    let (mut disks, mut pages) = (Vec::new(), Vec::new());
    for kind in kinds {
        stage.context.make_room(super::MOST_ASIDE)?;
        let node = Node::new(stage, *kind);
        node.start_anew()?;
        for version in 1..=IMAGES {
            quiet(&mut node.pull(&name(stage, version)))?;
        }
        rustix::fs::sync();
        let blobs = blobs(&node)?;
        let all = disk(&node.place())?;
        disks.push((kind.name().to_owned(), vec![all, blobs, all - blobs]));
        drop_caches()?;
        let before = page_cache()?;
        let read = || -> Result<u64> {
            for version in 1..=IMAGES {
                quiet(&mut node.run_detached(&name(stage, version), version, &["sleep", "1000"]))?;
                quiet(&mut node.exec(version, &["sh", "-ec", READ]))?;
            }
            Ok(page_cache()?.saturating_sub(before))
        };
        let grown = read();
        (1..=IMAGES).for_each(|version| node.end(version));
        pages.push((kind.name().to_owned(), vec![grown?]));
        node.stop()?;
    }
    let (title, columns) = (
        format!("{IMAGES} related images on the disk"),
        ["all", "blobs that the engine keeps", "all but those"],
    );
    let read = format!("{IMAGES} containers, one of each, that have read their files");
    Ok([
        Sizes::new(title, Unit::Megabytes, columns, disks),
        Sizes::new(read, Unit::Megabytes, ["page cache"], pages),
    ])
}
