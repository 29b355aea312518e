//! Garbage collection: makes a plan, then carries it out.
//!
//! `docs/format/object-store.md`, "Collecting garbage", explains why this is safe while imports and mounts begin and
//! run.

mod data;
mod limits;
mod sweep;

pub use data::{Dead, Freeing};
pub use limits::GcLimits;

use std::borrow::Cow;
use std::collections::BTreeSet;

use image::verity::{DeviceId, ImageId, ObjectId};

use crate::disk::{DiskError, on_disk};
use crate::found::RunningImports;
use crate::inventory::Inventory;
use crate::record::RecordError;
use crate::shelf::blob_file::BlobFile;
use crate::shelf::container_snapshots::SeenContainerSnapshot;
use crate::shelf::containers::Liveness;
use crate::shelf::downloads::kept_index::KeptIndexError;
use crate::shelf::images::{self, Use};
use crate::shelf::item::StoreItem;
use crate::shelf::manifests::Links;
use crate::shelf::refs::{BadRef, Seconds};
use crate::shelf::snapshots::SeenSnapshot;
use crate::staging::{self, Owner};
use crate::store::Store;
use crate::trash;
use image::digest::Digest;

use data::{Indexes, NeededData, Trimming};
use limits::Listed;

/// An error while garbage is found or removed. Before any error except `Disk`, at most a few unneeded items were
/// removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GcError {
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(std::path::PathBuf),
    /// An item that is kept cannot be read, so it is unknown which other items it needs.
    #[error("cannot read {object}, so gc can remove no data; {advice}")]
    Unreadable {
        object: String,
        /// The commands that help.
        advice: Cow<'static, str>,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

impl GcError {
    /// Returns the error of an item that `fsck` removes, and that another import restores.
    fn unreadable<E>(object: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let advice = "run `quire fsck --repair`, then import its image again".into();
        |source| Self::Unreadable { object: object.into(), advice, source: source.into() }
    }
}

/// The reason why an image without a ref, or a device without an image, is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kept {
    /// A kernel mount or an open descriptor uses the image.
    InUse(ImageId),
    /// The container with this id uses the image.
    Container(ImageId, String),
    /// The container snapshot with this name, or this id if it has no name, uses the image.
    ContainerSnapshot(ImageId, String),
    /// A snapshot of a container engine with this instance name uses the image.
    Snapshot(ImageId, String),
    /// A kernel mount or an open descriptor uses a device that no image needs.
    Device(DeviceId),
}

/// The items that `gc` would remove, and the items that it keeps although no ref leads to them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcPlan {
    /// Items to remove, each with its bytes on disk.
    pub garbage: Vec<(StoreItem, u64)>,
    /// Images without a ref, and devices without an image, that are kept.
    pub kept: Vec<Kept>,
    /// Unneeded parts of devices that are kept, in the order of the devices.
    pub dead: Vec<Dead>,
    /// Bytes on disk of garbage that is kept because of [`GcLimits`].
    pub spared: u64,
}

impl GcPlan {
    /// Returns the bytes on disk of all garbage, without the dead parts of devices.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.garbage.iter().map(|it| it.1).sum()
    }
}

/// Amounts that `gc` removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Number of items removed or set aside.
    pub removed: u64,
    /// Bytes on disk freed.
    pub freed: u64,
    /// Part of `freed`: bytes of dead parts of devices that are kept.
    pub trimmed: u64,
    /// Bytes on disk that running imports may rely on. The next `gc` after the end of these imports frees them.
    pub set_aside: u64,
}

/// All items that are needed.
#[derive(Debug, Default)]
struct Needed {
    /// Sorted, each object once.
    objects: Vec<ObjectId>,
    images: BTreeSet<ImageId>,
    layers: BTreeSet<Digest>,
    manifests: BTreeSet<Digest>,
    blobs: BTreeSet<BlobFile>,
    data: NeededData,
    kept: Vec<Kept>,
}

impl Store {
    /// Plans a `gc` at the time `now`, without any change.
    ///
    /// # Errors
    /// [`GcError`] if an item that is kept cannot be read.
    pub fn plan_gc(&self, now: Seconds) -> Result<GcPlan, GcError> {
        self.plan_gc_within(now, &GcLimits::default())
    }

    /// Plans a `gc` within these limits, without any change.
    ///
    /// # Errors
    /// As [`plan_gc`](Self::plan_gc).
    pub fn plan_gc_within(&self, now: Seconds, limits: &GcLimits) -> Result<GcPlan, GcError> {
        let _lock = self.lock_shared()?;
        let imports = RunningImports::from_store(self)?;
        self.plan_within(now, &imports, limits).map(|plan| self.describe(&plan))
    }

    /// Finds the roots of the search: all items that names lead to, and images that are in use and would otherwise be
    /// garbage.
    fn roots(&self, found: &Inventory, now: Seconds) -> Result<Roots, GcError> {
        let seen = self.containers.see_all()?;
        let mut images = BTreeSet::new();
        let mut kept = Vec::new();
        let mut containers = Vec::new();
        let mut snapshots = BTreeSet::new();
        let mut manifests = Vec::new();
        let (refs, bad) = self.refs.readable()?;
        if let Some(BadRef { name, error: source }) = bad.into_iter().next() {
            let advice = format!("`quire rmi {name}` removes the name").into();
            let object = format!("the image of the name {name}");
            return Err(GcError::Unreadable { object, advice, source: source.into() });
        }
        for (_, reference) in refs {
            images.insert(reference.image);
            manifests.extend(reference.manifest);
        }
        for container in seen {
            if container.is_garbage() {
                containers.push(container.id);
                continue;
            }
            if let Ok(record) = &container.record {
                snapshots.extend(record.snapshot.clone());
            }
            match container.record {
                // The image is in a shared store of another user, which keeps the image as long as it is open.
                Ok(record) if record.shared.is_some() => {}
                Ok(record) => {
                    manifests.extend(record.manifest);
                    if images.insert(record.image) {
                        kept.push(Kept::Container(record.image, container.id));
                    }
                }
                // A process is creating the container. That process has checked, or will check, that the image exists.
                Err(RecordError::Unwritten) if container.liveness == Liveness::Alive => {}
                Err(source) => {
                    let object = format!("the references of container {}", container.id);
                    let advice = format!("`quire rm --force {}` removes it", container.id);
                    let (advice, source) = (advice.into(), source.into());
                    return Err(GcError::Unreadable { object, advice, source });
                }
            }
        }
        let seen = self.container_snapshots.see_all()?;
        let container_snapshots = self.unneeded_container_snapshots(&seen, &snapshots)?;
        // Lost snapshots that something needs stay, but their records may be damaged.
        let is_kept =
            |it: &SeenContainerSnapshot| !it.is_lost && !container_snapshots.contains(&it.id);
        for snapshot in seen.into_iter().filter(is_kept) {
            let SeenContainerSnapshot { id, record, .. } = snapshot;
            let record = record.map_err(|source| GcError::Unreadable {
                object: format!("the references of container snapshot {id}"),
                advice: "run `quire fsck --repair`".into(),
                source: source.into(),
            })?;
            if record.shared.is_some() {
                continue;
            }
            manifests.extend(record.manifest);
            if images.insert(record.image) {
                kept.push(Kept::ContainerSnapshot(record.image, record.name.unwrap_or(id)));
            }
        }
        let mut layers = BTreeSet::new();
        for SeenSnapshot { instance, number, record } in self.snapshots.see_all()? {
            let record = record.map_err(|source| GcError::Unreadable {
                object: format!("the references of snapshot {number} of instance {instance}"),
                advice: "run `quire fsck --repair`".into(),
                source: source.into(),
            })?;
            let Some(content) = record.content() else { continue };
            match &content.lazy {
                None => drop(layers.insert(content.layer)),
                Some(lazy) => manifests.push(lazy.manifest),
            }
            for image in content.image.into_iter().chain(content.lazy.map(|it| it.image)) {
                if images.insert(image) {
                    kept.push(Kept::Snapshot(image, instance.clone()));
                }
            }
        }
        for image in &found.images {
            if !images.contains(image) && self.images.is_in_use(image) {
                images.insert(*image);
                kept.push(Kept::InUse(*image));
            }
        }
        let mut pinned = BTreeSet::new();
        for file in self.downloads.list()?.names {
            if let BlobFile::Pin(manifest) = file
                && self.downloads.is_pinned(&manifest, now)?
            {
                pinned.insert(manifest);
                manifests.push(manifest);
            }
        }
        let container_snapshots = container_snapshots.into_iter().collect();
        Ok(Roots { images, layers, manifests, pinned, kept, containers, container_snapshots })
    }

    /// Plans a collection. With a time `until`, also keeps all items added since then, and the items that these need.
    fn plan(
        &self,
        now: Seconds,
        imports: &RunningImports,
        until: Option<Seconds>,
    ) -> Result<CollectionPlan, GcError> {
        let found = Inventory::from_store(self)?;
        let roots = self.roots(&found, now)?;
        let indexes = self.readable_indexes(&found)?;
        let mut listed = Listed::from_imports(imports);
        if let Some(until) = until {
            self.list_newer(&mut listed, &found, until)?;
        }
        let mut needed = self.needed(&roots, &listed, &found, &indexes)?;
        for device in &found.devices {
            if !needed.data.devices.contains_key(device) && self.devices.is_in_use(device)? {
                needed.kept.push(Kept::Device(*device));
            }
        }
        let mut trimmings = self.trimmings(&needed.data, &indexes, imports.need_devices())?;
        let mut leftovers = Vec::new();
        for name in staging::names(&self.tmp)?.into_iter().chain(trash::names(&self.tmp)?) {
            if matches!(staging::owner(&self.tmp, &name)?, Owner::Dead(_)) {
                leftovers.push(name);
            }
        }
        let mut items = garbage(&found, &needed, |it| imports.has_object(it));
        if imports.has_unlisted() {
            // An import may restore an image that is removed now, and would then need the mark.
            items.retain(|it| !is_mark(it));
        }
        if let Some(until) = until {
            self.retain_older(&mut items, &mut trimmings, until)?;
        }
        items.extend(self.garbage_of_lazy_devices(&needed, &found, &indexes)?);
        Ok(CollectionPlan { items, leftovers, trimmings, roots, needed, found, indexes, spared: 0 })
    }

    /// Returns the unneeded files of lazy devices.
    fn garbage_of_lazy_devices(
        &self,
        needed: &Needed,
        found: &Inventory,
        indexes: &Indexes,
    ) -> Result<Vec<StoreItem>, DiskError> {
        let is_needed = |it: &DeviceId| needed.data.devices.contains_key(it);
        let is_here = |it: &DeviceId| found.devices.binary_search(it).is_ok();
        let is_complete = |it: &DeviceId| {
            is_here(it) && (is_needed(it) || needed.kept.contains(&Kept::Device(*it)))
        };
        // A complete device is no longer filled.
        let is_lazy = |it: &DeviceId| is_needed(it) && !(is_here(it) && indexes.has(it));
        let is_manifest = |it: &Digest| needed.manifests.contains(it);
        self.lazy_devices.garbage(is_lazy, is_complete, is_manifest)
    }

    /// Returns the manifest of the index that was kept with a manifest. A damaged record counts as absent, because an
    /// index can be made again.
    fn kept_index_of(&self, manifest: &Digest) -> Result<Option<Digest>, DiskError> {
        match self.downloads.kept_index(manifest) {
            Ok(index) => Ok(index),
            Err(KeptIndexError::Disk(error)) => Err(error),
            Err(error) => {
                tracing::warn!(%manifest, %error, "a kept index is not used");
                Ok(None)
            }
        }
    }

    /// Follows images and manifests to all items that they need.
    fn needed(
        &self,
        roots: &Roots,
        other: &Listed,
        found: &Inventory,
        indexes: &Indexes,
    ) -> Result<Needed, GcError> {
        let Roots { images, pinned, .. } = roots;
        let mut manifests = roots.manifests.clone();
        for manifest in &other.manifests {
            manifests.extend(self.kept_index_of(manifest)?);
        }
        let mut needed =
            Needed { layers: roots.layers.clone(), kept: roots.kept.clone(), ..Needed::default() };
        // A pull writes its pin before the manifest.
        needed.blobs.extend(pinned.iter().map(|it| BlobFile::Pin(*it)));
        while let Some(digest) = manifests.pop() {
            if !needed.manifests.insert(digest) {
                continue;
            }
            let Some(bytes) = self
                .manifests
                .read(&digest)
                .map_err(GcError::unreadable(format!("the references of manifest {digest}")))?
            else {
                continue;
            };
            let links = Links::parse(&bytes);
            manifests.extend(links.manifests);
            needed.layers.extend(links.layers);
            needed.blobs.extend([
                BlobFile::Signatures(digest),
                BlobFile::Hot(digest),
                BlobFile::Index(digest),
                BlobFile::Start(digest),
            ]);
            manifests.extend(self.kept_index_of(&digest)?);
            needed.blobs.extend(links.blobs.iter().map(|it| BlobFile::Whole(*it)));
            if pinned.contains(&digest) {
                needed.blobs.extend(links.blobs.iter().map(|it| BlobFile::Partial(*it)));
            }
        }
        needed.manifests.extend(&other.manifests);
        needed.blobs.extend(other.manifests.iter().map(|it| BlobFile::Signatures(*it)));
        needed.blobs.extend(other.manifests.iter().map(|it| BlobFile::Hot(*it)));
        needed.blobs.extend(other.manifests.iter().map(|it| BlobFile::Index(*it)));
        needed.blobs.extend(other.manifests.iter().map(|it| BlobFile::Start(*it)));
        // Objects of layers may be files or in any device.
        let mut wanted = BTreeSet::new();
        for layer in &needed.layers {
            let opened = self.layers.open(layer);
            let opened =
                opened.map_err(GcError::unreadable(format!("the references of layer {layer}")))?;
            if let Some(opened) = opened {
                wanted.extend(&opened.info().objects);
            }
        }
        for layer in &other.layers - &needed.layers {
            // The import replaces the layer if it is damaged.
            if let Ok(Some(layer)) = self.layers.open(&layer) {
                wanted.extend(&layer.info().objects);
            }
            needed.layers.insert(layer);
        }
        needed.blobs.extend(needed.layers.iter().map(|it| BlobFile::Chunks(*it)));
        let mut files = BTreeSet::new();
        let listed = &other.images - images;
        for image in images.iter().chain(&listed).copied() {
            // A ref whose image is gone keeps nothing; `fsck` reports it.
            if let Some(file) = self.images.open(&image)? {
                let mut visit = |_: &[u8], it| match it {
                    Use::Object { object, .. } => drop(files.insert(object)),
                    Use::Range(range) => needed.data.range(&range),
                };
                let read = images::uses(&file, &mut visit)
                    .and_then(|()| Self::needed_of_native(&file, &mut needed.data, &mut wanted));
                match read {
                    // The import replaces the image if it is damaged.
                    Err(_) if listed.contains(&image) => {}
                    read => read
                        .map_err(GcError::unreadable(format!("the references of image {image}")))?,
                }
                needed.images.insert(image);
                needed.blobs.extend([BlobFile::Origins(image), BlobFile::Traces(image)]);
                needed.blobs.extend([BlobFile::Unproven(image), BlobFile::Lacking(image)]);
                needed.blobs.insert(BlobFile::ImageSignatures(image));
            }
        }
        files.extend(needed.data.place(&wanted, &found.objects, &files, indexes));
        needed.objects.extend(files);
        Ok(needed)
    }

    fn describe(&self, plan: &CollectionPlan) -> GcPlan {
        let bytes = |item: &StoreItem| match item {
            StoreItem::Container(id) => self.containers.directory.tree_bytes(id),
            StoreItem::ContainerSnapshot(id) => {
                self.place(item).map_or(0, |place| place.tree_bytes(id))
            }
            StoreItem::Leftover(name) => self.tmp.tree_bytes(name),
            item => {
                let stat = self.place(item).and_then(|place| place.stat(item.file_name()));
                // A file with another hard link stays on the disk.
                let stat = stat.ok().flatten().filter(|stat| stat.st_nlink <= 1);
                stat.map_or(0, |stat| on_disk(&stat))
            }
        };
        let containers = plan.roots.containers.iter().map(|it| StoreItem::Container(it.clone()));
        let snapshots = &plan.roots.container_snapshots;
        let snapshots = snapshots.iter().map(|it| StoreItem::ContainerSnapshot(it.clone()));
        let leftovers = plan.leftovers.iter().map(|it| StoreItem::Leftover(it.clone()));
        let garbage =
            plan.items.iter().cloned().chain(containers).chain(snapshots).chain(leftovers);
        let garbage = garbage.map(|item| {
            let bytes = bytes(&item);
            (item, bytes)
        });
        let dead = plan.trimmings.iter().map(|it| it.dead).collect();
        let garbage = garbage.collect();
        GcPlan { garbage, kept: plan.needed.kept.clone(), dead, spared: plan.spared }
    }
}

#[derive(Debug, Default)]
struct Roots {
    images: BTreeSet<ImageId>,
    layers: BTreeSet<Digest>,
    manifests: Vec<Digest>,
    /// Manifests that a pull has pinned.
    pinned: BTreeSet<Digest>,
    /// The reason why each image without a name is a root.
    kept: Vec<Kept>,
    /// Containers that are garbage.
    containers: Vec<String>,
    /// Container snapshots that are garbage.
    container_snapshots: Vec<String>,
}

/// A plan, and the state of the store that it is based on.
#[derive(Debug)]
struct CollectionPlan {
    items: Vec<StoreItem>,
    leftovers: Vec<String>,
    trimmings: Vec<Trimming>,
    roots: Roots,
    needed: Needed,
    found: Inventory,
    indexes: Indexes,
    /// Bytes on disk of garbage that is kept because of limits.
    spared: u64,
}

/// Returns all unneeded items in the store: images, layers and manifests before objects.
fn garbage(
    found: &Inventory,
    needed: &Needed,
    is_listed: impl Fn(&ObjectId) -> bool,
) -> Vec<StoreItem> {
    let is_needed = |id: &DeviceId| {
        needed.data.devices.contains_key(id) || needed.kept.contains(&Kept::Device(*id))
    };
    // A crash may leave an index without its device.
    let has_device = |id: &DeviceId| found.devices.binary_search(id).is_ok();
    let is_object = |id: &ObjectId| needed.objects.binary_search(id).is_ok() || is_listed(id);
    let mut items = unneeded(&found.images, |it| needed.images.contains(it), StoreItem::Image);
    items.extend(unneeded(&found.layers, |it| needed.layers.contains(it), StoreItem::Layer));
    let manifests =
        unneeded(&found.manifests, |it| needed.manifests.contains(it), StoreItem::Manifest);
    items.extend(manifests);
    items.extend(unneeded(&found.blobs, |it| needed.blobs.contains(it), StoreItem::Blob));
    let indexes = unneeded(
        &found.device_indexes,
        |it| is_needed(it) && has_device(it),
        StoreItem::DeviceIndex,
    );
    items.extend(indexes);
    items.extend(unneeded(&found.devices, is_needed, StoreItem::Device));
    items.extend(unneeded(&found.objects, is_object, StoreItem::Object));
    items
}

const fn is_of_device(item: &StoreItem) -> bool {
    matches!(item, StoreItem::Device(_) | StoreItem::DeviceIndex(_))
}

/// Whether the item is a mark that an image has not been compared with its layers, or lacks data.
const fn is_mark(item: &StoreItem) -> bool {
    matches!(item, StoreItem::Blob(BlobFile::Unproven(_) | BlobFile::Lacking(_)))
}

/// Returns the unneeded items of one kind.
fn unneeded<T: Copy>(
    names: &[T],
    is_needed: impl Fn(&T) -> bool,
    item: fn(T) -> StoreItem,
) -> Vec<StoreItem> {
    names.iter().filter(|it| !is_needed(it)).map(|it| item(*it)).collect()
}

#[cfg(test)]
mod tests {
    use image::verity::{Algorithm, Id, digest};

    use super::{Kept, Needed, NeededData, Seconds, garbage};
    use crate::Digest;
    use crate::StoreItem;
    use crate::inventory::Inventory;
    use crate::shelf::blob_file::BlobFile;
    use crate::shelf::downloads::PIN_SECONDS;
    use crate::tests::{NOW, open};

    /// A pull writes the pin before the manifest. Without the pin, `gc` would remove the pull's layers before the
    /// pull ends.
    #[test]
    fn a_pin_does_not_wait_for_its_manifest() {
        let directory = tempfile::TempDir::new().unwrap();
        let (store, manifest) = (open(directory.path()), Digest::sha256(b"manifest"));
        store.downloads.pin(&manifest, NOW).unwrap();
        for (age, is_pinned) in [(0, true), (PIN_SECONDS, true), (PIN_SECONDS + 1, false)] {
            store.gc(Seconds(NOW.0 + age)).unwrap();
            assert_eq!(store.downloads.is_pinned(&manifest, NOW).unwrap(), is_pinned, "{age}");
        }
    }

    #[test]
    fn what_is_not_needed_is_garbage() {
        fn id<K>(name: &str) -> Id<K> {
            digest(Algorithm::Sha256, name.as_bytes()).into()
        }
        let (a, b) = (Digest::sha256(b"a"), Digest::sha256(b"b"));
        let found = Inventory {
            objects: vec![id("1"), id("2"), id("3")],
            images: vec![id("x"), id("y")],
            layers: vec![a, b],
            manifests: vec![a, b],
            blobs: vec![BlobFile::Whole(a), BlobFile::Partial(a), BlobFile::Pin(b)],
            devices: vec![id("d"), id("e")],
            device_indexes: vec![id("d"), id("f")],
            strays: vec!["stray".into()],
        };
        let needed = Needed {
            objects: vec![id("2"), id("4")]
                .into_iter()
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect(),
            images: [id("y")].into(),
            layers: [a].into(),
            manifests: [b].into(),
            blobs: [BlobFile::Whole(a)].into(),
            data: {
                let mut data = NeededData::default();
                data.device(id("e"));
                data.device(id("f"));
                data
            },
            kept: vec![Kept::Device(id("x"))],
        };
        let expected = [
            StoreItem::Image(id("x")),
            StoreItem::Layer(b),
            StoreItem::Manifest(a),
            StoreItem::Blob(BlobFile::Partial(a)),
            StoreItem::Blob(BlobFile::Pin(b)),
            StoreItem::DeviceIndex(id("d")),
            // Needed, but the device of this index is gone.
            StoreItem::DeviceIndex(id("f")),
            StoreItem::Device(id("d")),
            StoreItem::Object(id("3")),
        ];
        assert_eq!(garbage(&found, &needed, |it| *it == id("1")), expected);
    }
}
