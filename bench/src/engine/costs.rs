//! Costs of one image: bytes written to the disk, and memory of the services.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rig::process::quiet;

use super::node::Node;
use super::{Entry, Here, Stage};
use crate::command::run;
use crate::registry;
use crate::report::{Sizes, Unit};
use crate::samples::Sample;

/// Number of counts, of which the smallest is used, because other processes' writes only add to a count.
const COUNTS: usize = 3;

/// Bytes that a pull writes to the disk, counted after a sync.
pub(super) fn written(
    stage: &Stage<'_>,
    entries: &[Entry],
    sample: &Sample,
    title: String,
) -> Result<Sizes> {
    let layers = registry::layers(&sample.layout(stage.context.cache)?)?;
    let is_base_here = entries.iter().all(|it| it.here == Here::Base);
    let files = files(&layers[usize::from(is_base_here)..])?;
    let mut rows = Vec::new();
    for entry in entries.iter().filter(|it| it.kind.is_here(stage)) {
        let image = stage.image(sample, entry.kind, "1");
        let node = Node::new(stage, entry.kind);
        let mut least = [u64::MAX; 2];
        for _ in 0..COUNTS {
            node.start_anew()?;
            entry.here.prepare(stage, &node, sample)?;
            rustix::fs::sync();
            let device = device(stage.context.work)?;
            let before = [device_bytes(&device)?, blobs(&node)?];
            quiet(&mut node.pull(&image))?;
            rustix::fs::sync();
            let after = [device_bytes(&device)?, blobs(&node)?];
            let counted = [after[0] - before[0], after[1] - before[1]];
            least = if counted[0] < least[0] { counted } else { least };
            node.stop()?;
        }
        let [all, blobs] = least;
        rows.push((entry.name.to_owned(), vec![all, blobs, all.saturating_sub(blobs), files]));
    }
    let columns = ["all", "blobs that the engine keeps", "all but those", "new files"];
    Ok(Sizes::new(title, Unit::Megabytes, columns, rows))
}

/// Sum of the sizes of all files in these layers.
fn files(layers: &[PathBuf]) -> Result<u64> {
    const SUM: &str = r#"
        for it; do tar --list --verbose --gzip --file "$it"; done |
            awk '/^-/ { sum += $3 } END { print sum }'
    "#;
    let sum = run!("sh -euc {SUM} sh {layers...}")?;
    Ok(sum.trim().parse()?)
}

/// Sum of the sizes of all blobs in the engine's content store.
pub(super) fn blobs(node: &Node<'_>) -> Result<u64> {
    let folder = node.root().join("io.containerd.content.v1.content/blobs/sha256");
    let mut sum = 0;
    // The folder is created with the first blob.
    for entry in fs::read_dir(folder).into_iter().flatten() {
        sum += entry?.metadata()?.len();
    }
    Ok(sum)
}

/// Path of the kernel's I/O statistics of the device that a folder is on.
fn device(folder: &Path) -> Result<String> {
    let device = folder.metadata()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    Ok(format!("/sys/dev/block/{major}:{minor}/stat"))
}

fn device_bytes(device: &str) -> Result<u64> {
    let text = fs::read_to_string(device).with_context(|| format!("cannot read {device}"))?;
    // The seventh field counts sectors of 512 bytes on every device. Source: Linux `Documentation/block/stat.rst`.
    let sectors: u64 = text.split_whitespace().nth(6).context("too few fields")?.parse()?;
    Ok(sectors * 512)
}

/// Memory of the services before and after the pull of a database image.
pub(super) fn memory(stage: &Stage<'_>, entries: &[Entry], sample: &Sample) -> Result<Sizes> {
    let mut rows = Vec::new();
    for entry in entries.iter().filter(|it| it.kind.is_here(stage)) {
        let node = Node::new(stage, entry.kind);
        node.start_anew()?;
        entry.here.prepare(stage, &node, sample)?;
        let idle = node.resident()?;
        quiet(&mut node.pull(&stage.image(sample, entry.kind, "1")))?;
        for (idle, then) in idle.iter().zip(node.resident()?) {
            let name = match entry.here {
                Here::InStore => format!("{}: {}", entry.name, then.name),
                _ => format!("{}: {}", entry.kind.name(), then.name),
            };
            rows.push((name, vec![idle.now, then.most, then.now]));
        }
        node.stop()?;
    }
    let title = format!("Memory of services while {} is pulled", sample.name);
    Ok(Sizes::new(title, Unit::Megabytes, ["before", "most", "after"], rows))
}
