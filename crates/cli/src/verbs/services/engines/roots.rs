//! `ps --engine`: lists mounted roots of engines, from the records in the store and the kernel's table of mounts.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use image::verity::ImageId;
use kernel::mount::Mounted;
use serde::Serialize;
use serve::snapshots::{ask_counts, snapshotter_metrics};
use store::{SnapshotKind, Store, StoredSnapshot};

use crate::Answer;
use crate::output::report::{self, Time};
use crate::output::table;
use crate::session::context::Context;
use crate::verbs::services::service_config::{ServeFile, SnapshotterChoices};

/// A snapshot of an engine.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct EngineRootReport {
    /// Name of the engine's instance.
    instance: String,
    /// The engine's name for the snapshot: a namespace, a number, and the name of a container or layer.
    snapshot: String,
    /// `active` (writable), `view` (read-only) or `committed` (can be a parent).
    kind: &'static str,
    /// Name of the parent snapshot. Null if there is none.
    parent: Option<String>,
    /// Id of the image below the snapshot. Null if none was made yet.
    image: Option<String>,
    /// Names of that image in the store.
    names: Vec<String>,
    /// Time at which the snapshot was made, in RFC 3339.
    created: Time,
    /// Path where the root is mounted. Null if it is not mounted.
    mount_point: Option<PathBuf>,
    /// Other mount points of the root, which the engine makes for containers.
    uses: Vec<PathBuf>,
}

/// Options of `ps --engine`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RootOptions<'a> {
    /// Lists snapshots whose roots are not mounted as well.
    pub(crate) all: bool,
    /// Prints metrics of the service instead.
    pub(crate) metrics: bool,
    /// Socket of the service; by default that of the settings.
    pub(crate) socket: Option<&'a Path>,
}

/// Lists the snapshots of all engines whose roots are mounted; with `--all`, all snapshots.
pub(crate) fn list_roots(
    context: &Context,
    store: &Store,
    options: &RootOptions<'_>,
) -> anyhow::Result<Answer> {
    let (snapshots, damaged) = store.snapshots.all()?;
    for error in damaged {
        context.remark(&report::chain(&error));
    }
    let mut names: HashMap<ImageId, Vec<String>> = HashMap::new();
    if !snapshots.is_empty() {
        for (name, reference) in store.refs.readable()?.0 {
            names.entry(reference.image).or_default().push(name.to_string());
        }
    }
    let mut found = roots(&snapshots, &kernel::mount::mounted()?, &names);
    if options.metrics {
        let set = ServeFile::new(None).load()?.snapshotter;
        let socket = options
            .socket
            .map(Path::to_owned)
            .unwrap_or_else(|| SnapshotterChoices::as_set(set).socket);
        let counts = ask_counts(&socket)
            .with_context(|| format!("cannot reach the service at {}", socket.display()))?;
        report::line(
            snapshotter_metrics(
                counts.as_ref(),
                found
                    .iter()
                    .filter(|it| it.mount_point.is_some())
                    .map(|it| (&*it.instance, it.kind)),
            )
            .trim_end(),
        )?;
        return Ok(Answer::Yes);
    }
    found.retain(|it| options.all || it.mount_point.is_some());
    report::print(context.json, &found, |found, out| {
        let titles = ["INSTANCE", "KIND", "SNAPSHOT", "IMAGE", "MOUNTED AT"];
        let rows: Vec<_> = found.iter().map(EngineRootReport::row).collect();
        table::print(out, &titles, &rows, &[])
    })?;
    Ok(Answer::Yes)
}

fn roots(
    snapshots: &[StoredSnapshot],
    mounted: &[Mounted],
    names: &HashMap<ImageId, Vec<String>>,
) -> Vec<EngineRootReport> {
    let records: BTreeMap<_, _> =
        snapshots.iter().map(|it| ((it.instance.as_str(), it.number), &it.record)).collect();
    let report = |snapshot: &StoredSnapshot| {
        let StoredSnapshot { instance, record, root, .. } = snapshot;
        let parent = record.parent.and_then(|it| records.get(&(instance.as_str(), it)));
        let own = record.content();
        let below = own.or_else(|| parent.and_then(|it| it.content()));
        let image = below.and_then(|it| it.image);
        // A later mount covers earlier ones. Paths in the mount table have no symlinks.
        let path = root.canonicalize().unwrap_or_else(|_| root.clone());
        let mount = mounted.iter().rfind(|it| it.point == path);
        EngineRootReport {
            instance: instance.clone(),
            snapshot: record.name.clone(),
            kind: match record.kind {
                SnapshotKind::View => "view",
                SnapshotKind::Active(_) => "active",
                SnapshotKind::Committed(_) | SnapshotKind::Directory(_) => "committed",
            },
            parent: parent.map(|it| it.name.clone()),
            image: image.map(|it| it.to_string()),
            names: image.and_then(|it| names.get(&it).cloned()).unwrap_or_default(),
            created: Time(record.created.seconds),
            mount_point: mount.map(|_| root.clone()),
            uses: mount.map(|it| uses(it, mounted, &path)).unwrap_or_default(),
        }
    };
    snapshots.iter().map(report).collect()
}

/// Returns the other mount points of a file system. Each root is a separate file system, which engines bind.
fn uses(mount: &Mounted, mounted: &[Mounted], path: &Path) -> Vec<PathBuf> {
    let same = mounted.iter().filter(|it| it.device == mount.device && it.kind == mount.kind);
    same.filter(|it| it.point != path).map(|it| it.point.clone()).collect()
}

impl EngineRootReport {
    fn row(&self) -> Vec<String> {
        let image = self.names.first().cloned();
        let image = image.or_else(|| self.image.as_ref().map(|it| report::short(it)));
        vec![
            self.instance.clone(),
            self.kind.to_owned(),
            self.snapshot.clone(),
            image.or_else(|| self.parent.clone()).unwrap_or_else(|| "-".to_owned()),
            self.mount_point.as_ref().map_or_else(|| "-".to_owned(), |it| it.display().to_string()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use store::{Moment, SnapshotContent, SnapshotRecord};

    use super::*;

    fn snapshot(number: u64, kind: SnapshotKind, parent: Option<u64>) -> StoredSnapshot {
        let now = Moment { seconds: 0, nanoseconds: 0 };
        let record = SnapshotRecord {
            name: format!("s{number}"),
            kind,
            parent,
            labels: BTreeMap::new(),
            created: now,
            updated: now,
        };
        let root = format!("/none/{number}/root").into();
        StoredSnapshot { instance: "e".to_owned(), number, record, root }
    }

    fn mount(point: &str, device: &str) -> Mounted {
        let (kind, source) = ("overlay".to_owned(), String::new());
        Mounted { point: point.into(), device: device.to_owned(), kind, source }
    }

    #[test]
    fn roots_are_found_in_the_table_of_mounts() {
        let image: ImageId = "ab".repeat(32).parse().unwrap();
        let layer = store::Digest::sha256(b"");
        let content =
            SnapshotContent { layer, image: Some(image), lazy: None, bytes: 0, inodes: 0 };
        let snapshots = [
            snapshot(1, SnapshotKind::Committed(content), None),
            snapshot(2, SnapshotKind::Active(None), Some(1)),
            snapshot(3, SnapshotKind::View, Some(1)),
            snapshot(4, SnapshotKind::Active(None), Some(9)),
        ];
        let mounted = [
            mount("/none/2/root", "0:1"),
            mount("/run/other", "0:2"),
            mount("/none/2/root", "0:3"),
            mount("/run/container", "0:3"),
            mount("/none/2", "0:3"),
        ];
        let names = HashMap::from([(image, vec!["app:1".to_owned()])]);
        let found = roots(&snapshots, &mounted, &names);
        let mounted: Vec<_> = found.iter().map(|it| it.mount_point.is_some()).collect();
        assert_eq!(mounted, [false, true, false, false]);
        // This mount covers the other one.
        assert_eq!(found[1].uses, [Path::new("/run/container"), Path::new("/none/2")]);
        assert_eq!(found[1].row(), ["e", "active", "s2", "app:1", "/none/2/root"]);
        assert_eq!(found[2].row(), ["e", "view", "s3", "app:1", "-"]);
        // The parent is gone or damaged.
        assert_eq!(found[3].row(), ["e", "active", "s4", "-", "-"]);
    }
}
