//! Names and labels that engines give snapshots.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use container::bundle::userns::{IdMap, MapError, parse_ranges};
use container::root::filestore::{SIZE_MAX, SIZE_MIN};
use image::digest::Digest;

use super::error::SnapshotterError;
use super::lengths::{LABEL_MAX, LABELS_MAX, NAME_MAX};

/// The labels of a snapshot.
pub type Labels = BTreeMap<String, String>;

/// Returns whether containerd unpacks a layer on this snapshot. The name of such a snapshot ends with `extract-…
/// DIGEST`, after a namespace and a number. Containers cannot have such a name, because it contains a space. Source:
/// containerd's `core/unpack/unpacker.go`.
pub(super) fn is_unpacked(name: &str) -> bool {
    let name = name.rsplit('/').next().and_then(|it| it.strip_prefix("extract-"));
    name.and_then(|it| it.split_once(' ')).is_some_and(|it| it.1.parse::<Digest>().is_ok())
}

pub(super) fn check_name(name: &str) -> Result<(), SnapshotterError> {
    match (1..=NAME_MAX).contains(&name.len()) {
        true => Ok(()),
        false => Err(SnapshotterError::Name),
    }
}

pub(super) fn check_labels(labels: &Labels) -> Result<(), SnapshotterError> {
    // A record must stay small enough to be read again.
    if labels.iter().map(|it| it.0.len() + it.1.len()).sum::<usize>() > LABELS_MAX {
        return Err(SnapshotterError::Labels);
    }
    match labels.iter().find(|it| it.0.len() + it.1.len() > LABEL_MAX) {
        Some((label, _)) => Err(SnapshotterError::Label(label.chars().take(64).collect())),
        None => Ok(()),
    }
}

/// Changes labels like containerd: a label in `fields` that `new` lacks is removed.
pub(super) fn change_labels(
    labels: &mut Labels,
    new: &Labels,
    fields: &[String],
) -> Result<(), SnapshotterError> {
    if fields.is_empty() {
        labels.clone_from(new);
        return Ok(());
    }
    let mut changed = labels.clone();
    for field in fields {
        if field == "labels" {
            changed.clone_from(new);
            continue;
        }
        let label = field.strip_prefix("labels.");
        let label = label.ok_or_else(|| SnapshotterError::Field(field.clone()))?;
        match new.get(label) {
            Some(value) => drop(changed.insert(label.to_owned(), value.clone())),
            None => drop(changed.remove(label)),
        }
    }
    *labels = changed;
    Ok(())
}

/// Label with the chain id of the future snapshot. Source: containerd's `unpacker.go`, `labelSnapshotRef`.
const TARGET: &str = "containerd.io/snapshot.ref";

/// Label with the digest of the layer's blob. Source: containerd's `pkg/snapshotters/annotations.go`.
const BLOB: &str = "containerd.io/snapshot/cri.layer-digest";

pub(super) fn target(labels: &Labels) -> Option<Digest> {
    labels.get(TARGET)?.parse().ok()
}

pub(super) fn layer_blob(labels: &Labels) -> Option<Digest> {
    labels.get(BLOB)?.parse().ok()
}

/// Label with the map of user ids: `CONTAINER:HOST:SIZE`, several separated by commas. Source: containerd's
/// `core/snapshots/snapshotter.go`, `LabelSnapshotUIDMapping` and `LabelSnapshotGIDMapping`.
const USERS: &str = "containerd.io/snapshot/uidmapping";

/// Label with the map of group ids, in the same form.
const GROUPS: &str = "containerd.io/snapshot/gidmapping";

/// Returns the id map in labels, or `None` for a root on which a layer is unpacked, because its labels may come from
/// the image's manifest.
///
/// # Errors
/// [`SnapshotterError::Map`].
pub(super) fn asked_map(name: &str, labels: &Labels) -> Result<Option<IdMap>, SnapshotterError> {
    if is_unpacked(name) {
        return Ok(None);
    }
    let failed = |source| SnapshotterError::Map { name: name.to_owned(), source };
    let ranges = |label| labels.get(label).map(|it| parse_ranges(it)).transpose().map_err(failed);
    match (ranges(USERS)?, ranges(GROUPS)?) {
        (None, None) => Ok(None),
        (Some(users), Some(groups)) => {
            let map = IdMap::new(users, groups);
            map.root().map_err(failed)?;
            Ok(Some(map))
        }
        _ => Err(failed(MapError::NoRoot)),
    }
}

/// Label with a limit in bytes. Source: containerd's `core/snapshots/snapshotter.go`, `LabelSnapshotMaxSize`.
const SIZE: &str = "containerd.io/snapshot/max-size";

/// Returns the limit in labels, or `None` for a root on which a layer is unpacked, because its labels may come from the
/// image's manifest.
pub(super) fn asked_size(
    name: &str,
    labels: &Labels,
) -> Result<Option<NonZeroU64>, SnapshotterError> {
    let Some(text) = labels.get(SIZE).filter(|_| !is_unpacked(name)) else { return Ok(None) };
    let bytes = text.parse().ok().filter(|it| (SIZE_MIN..=SIZE_MAX).contains(it));
    let bytes = bytes.and_then(NonZeroU64::new);
    let failed = || SnapshotterError::Size { name: name.to_owned(), size: text.clone() };
    bytes.map(Some).ok_or_else(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_bytes() {
        let asked = |name: &str, size: &str| {
            let labels = [(SIZE.to_owned(), size.to_owned())].into();
            asked_size(name, &labels).map(|it| it.map(NonZeroU64::get)).ok()
        };
        assert_eq!(asked("default/1/one", "16777216"), Some(Some(16 << 20)));
        for wrong in ["", "0", "-1", "16777215", "17592186044417", "1G", "99999999999999999999"] {
            assert_eq!(asked("default/1/one", wrong), None, "{wrong}");
        }
        // The label may come from a manifest.
        let unpacked = format!("default/1/extract-1-a {}", image::digest::Digest::sha256(b""));
        assert_eq!(asked(&unpacked, "1"), Some(None));
        assert_eq!(asked_size("default/1/one", &Labels::new()).unwrap(), None);
    }
}
