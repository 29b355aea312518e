//! Checks the store: finds every byte that differs from the import.

mod container_snapshots;
mod data;
mod harm;
mod hash;
mod lazy_devices;
mod networks;
mod rebuild;
mod users;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::PathBuf;

use image::verity::{DeviceId, ImageId, ObjectId};
use rustix::fs::FileType;

use data::{InDevices, Scope};
use hash::{Hashed, hash_all};
use users::{Contents, Users};

use crate::check::check_error;
use crate::check::check_error::{FsckError, chain};
use crate::check::exposure::Exposure;
use crate::disk::{Directory, DiskError};
use crate::inventory::Inventory;
use crate::record::RecordError;
use crate::shelf::Checked;
use crate::shelf::containers::Liveness;
use crate::shelf::images::{self, ImageFile, Use};
use crate::shelf::item::StoreItem;
use crate::shelf::layers::StoredLayerError;
use crate::shelf::manifests::Links;
use crate::shelf::refs::{RefError, RefName, Reference};
use crate::shelf::snapshots::{LazySnapshot, SeenSnapshot, SnapshotContent};
use crate::store::{LOST_AND_FOUND, Store, belongs};
use image::digest::Digest;

/// Options of a check.
#[derive(Debug, Clone, Copy)]
pub struct FsckOptions {
    /// Number of hashing threads, at least 1.
    pub threads: usize,
}

/// One thread, which suffices for a few files.
impl Default for FsckOptions {
    fn default() -> Self {
        Self { threads: 1 }
    }
}

/// A damaged or missing item of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// The bytes of an object do not match its id.
    Object {
        expected: ObjectId,
        /// Id that matches the bytes.
        actual: ObjectId,
        /// Length in bytes.
        size: u64,
    },
    /// An image or a layer needs this object, and the store lacks it.
    Missing(ObjectId),
    /// An image states another size for an object than the object has.
    Size {
        /// The object, which is sound.
        object: ObjectId,
        /// Length of the object in bytes.
        actual: u64,
        /// Length in bytes that the image states.
        stated: u64,
    },
    /// An object in a device does not match the device's index.
    Stored {
        object: ObjectId,
        device: DeviceId,
        /// A description of the damage.
        why: String,
    },
    /// The bytes of an image do not match its id.
    Image {
        expected: ImageId,
        /// Id that matches the bytes.
        actual: ImageId,
    },
    /// An image needs this lazy device, which is not known to be complete. The device is not damaged, but cannot be
    /// verified.
    Lazy(DeviceId),
    /// An item that is missing, unreadable or changed, and a description of the damage.
    Bad(StoreItem, String),
    /// Path of a file that does not belong in a store.
    Stray(String),
}

/// An image that damage affects, and the affected paths.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Harm {
    pub image: ImageId,
    pub refs: Vec<RefName>,
    /// Affected paths in the image's order, including every hard link; empty if the whole image is affected.
    pub paths: Vec<Vec<u8>>,
}

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FsckReport {
    /// Number of files checked.
    pub checked: u64,
    /// Bytes hashed, of objects and images.
    pub bytes: u64,
    /// Each damaged item once, with the images that it affects. The order is images, objects, layers, manifests, refs,
    /// and the rest.
    pub damage: Vec<(Damage, Vec<Harm>)>,
    /// Sound layers that cannot be rebuilt, with the objects in `damage` that are damaged or missing.
    pub hurt_layers: BTreeMap<Digest, BTreeSet<ObjectId>>,
    /// Files and directories that other users can reach. This is not damage, but others could cause damage.
    pub exposed: Vec<Exposure>,
}

impl FsckReport {
    /// Whether the check found no damage.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.damage.is_empty()
    }
}

/// How to check the tars of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tars {
    /// Trusts that an unchanged recipe rebuilds the tar that it was made from.
    Trusted,
    /// Rebuilds each tar.
    Rebuilt,
}

impl Store {
    /// Checks everything in the store. `gc` waits until the check ends; imports do not.
    ///
    /// # Errors
    /// [`FsckError`] if the store cannot be read. Damage is not an error.
    pub fn fsck(&self, options: FsckOptions) -> Result<FsckReport, FsckError> {
        self.check(options, Tars::Trusted)
    }

    /// As [`fsck`](Self::fsck), and also rebuilds the tar of every layer from its recipe and its objects and compares
    /// it with the diff id. This takes about as long as hashing all objects of all layers once more.
    ///
    /// # Errors
    /// As [`fsck`](Self::fsck).
    pub fn fsck_deep(&self, options: FsckOptions) -> Result<FsckReport, FsckError> {
        self.check(options, Tars::Rebuilt)
    }

    fn check(&self, options: FsckOptions, tars: Tars) -> Result<FsckReport, FsckError> {
        let _lock = self.lock_shared()?;
        let mut report = FsckReport::default();
        let refs = self.check_refs(&mut report)?;
        let found = Inventory::from_store(self)?;
        report.exposed = self.exposure_of_all(&found)?;
        let images = self.check_images(&found.images, &refs, options, &mut report)?;
        let mut users = Users { refs: &refs, images, layers: BTreeMap::new() };

        let mut other = FsckReport::default();
        self.check_layers(&found.layers, &mut users, &mut other)?;
        other.take(self.manifests.check(&found.manifests)?);
        other.take(self.downloads.check(&found.blobs)?);
        let in_devices = self.check_data(&users, Scope::Everything, options, &mut report)?;
        let (checked, lazy_devices) = self.lazy_devices.check(&in_devices.lazy_devices)?;
        other.take(checked);
        self.check_objects(&found.objects, &users, &in_devices, options, &mut report)?;
        report.damage.append(&mut other.damage);
        report.checked += other.checked;
        if tars == Tars::Rebuilt {
            self.check_tars(&found.layers, options, &mut report)?;
        }

        for seen in self.containers.see_all()? {
            if let Some(why) = self.damage_of_chain(&seen)? {
                report.add(Damage::Bad(StoreItem::Container(seen.id.clone()), why));
            }
            let id = seen.id;
            let why = match (seen.record, seen.liveness) {
                (Ok(record), _) if record.shared.is_some() => continue,
                (Ok(record), _) if !found.images.contains(&record.image) => {
                    format!("its image {} is not in the store", record.image)
                }
                (Err(RecordError::Unwritten), _) | (Ok(_), _) => continue,
                (Err(source), Liveness::Alive | Liveness::Dead) => {
                    format!("its record is damaged: {}", chain(&source))
                }
            };
            report.add(Damage::Bad(StoreItem::Container(id), why));
        }
        self.check_container_snapshots(&mut report)?;
        self.check_volumes(&mut report)?;
        self.check_networks(&mut report)?;
        for SeenSnapshot { instance, number, record } in self.snapshots.see_all()? {
            report.checked += 1;
            let why = match record {
                Err(source) => format!("its record is damaged: {}", chain(&source)),
                Ok(record) => match record.content() {
                    Some(content)
                        if content.lazy.is_none() && !found.layers.contains(&content.layer) =>
                    {
                        format!("its layer {} is not in the store", content.layer)
                    }
                    Some(SnapshotContent { lazy: Some(LazySnapshot { manifest, .. }), .. })
                        if !found.manifests.contains(manifest) =>
                    {
                        format!("its manifest {manifest} is not in the store")
                    }
                    Some(content) => match content.lazy.map(|it| it.image).or(content.image) {
                        Some(image) if !found.images.contains(&image) => {
                            format!("its image {image} is not in the store")
                        }
                        _ => continue,
                    },
                    None => continue,
                },
            };
            report.add(Damage::Bad(StoreItem::Snapshot(instance, number), why));
        }
        let strays = found.strays.into_iter().chain(lazy_devices.strays);
        for path in strays.chain(self.other_strays()?) {
            report.add(Damage::Stray(path.display().to_string()));
        }
        report.damage.sort_by_key(|(damage, _)| damage.rank());
        Ok(report)
    }

    /// Checks one image and every object that it needs.
    ///
    /// # Errors
    /// [`FsckError`] if the image is absent, or the store cannot be read.
    pub fn verify(&self, image: &ImageId, options: FsckOptions) -> Result<FsckReport, FsckError> {
        self.verify_all(&[*image], options)
    }

    /// Checks these images and every object that they need, each object once.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn verify_all(
        &self,
        images: &[ImageId],
        options: FsckOptions,
    ) -> Result<FsckReport, FsckError> {
        let _lock = self.lock_shared()?;
        let images: Vec<ImageId> =
            images.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        for image in &images {
            if !self.images.has(image)? {
                return Err(FsckError::Absent(*image));
            }
        }
        let mut report = FsckReport::default();
        let mut refs = BTreeMap::new();
        for name in self.refs.names()? {
            if let Ok(Some(reference)) = self.refs.get(&name)
                && images.binary_search(&reference.image).is_ok()
            {
                refs.insert(name, reference);
            }
        }
        let images = self.check_images(&images, &refs, options, &mut report)?;
        let users = Users { refs: &refs, images, layers: BTreeMap::new() };
        let in_devices = self.check_data(&users, Scope::Images, options, &mut report)?;
        let present = users.needed(&in_devices);
        let present: Vec<_> =
            present.into_iter().filter(|object| self.object_is_there(object)).collect();
        self.check_objects(&present, &users, &in_devices, options, &mut report)?;
        report.damage.sort_by_key(|(damage, _)| damage.rank());
        Ok(report)
    }

    pub(crate) fn is_sound_object(&self, id: &ObjectId) -> Result<bool, FsckError> {
        let open = |id: &ObjectId| self.open_to_hash(id);
        let hashed = hash_all(&[*id], self.algorithm(), FsckOptions::default(), &open)?;
        Ok(matches!(hashed.as_slice(), [Hashed::Sound(_)]))
    }

    pub(crate) fn is_sound_image(&self, id: &ImageId) -> Result<bool, FsckError> {
        let open = |id: &ImageId| self.images.open(id).map(|it| it.map(ImageFile::into_file));
        let hashed = hash_all(&[*id], self.algorithm(), FsckOptions::default(), &open)?;
        Ok(matches!(hashed.as_slice(), [Hashed::Sound(_)]))
    }

    fn open_to_hash(&self, id: &ObjectId) -> Result<Option<File>, DiskError> {
        Ok(self.objects.open(id)?.map(|it| it.0))
    }

    fn object_is_there(&self, object: &ObjectId) -> bool {
        // An error of `stat` is reported when the object is read.
        !matches!(self.objects.stat(object), Ok(None))
    }

    /// Returns the refs that can be read. Other refs, and refs without a target, are reported as damage.
    fn check_refs(
        &self,
        report: &mut FsckReport,
    ) -> Result<BTreeMap<RefName, Reference>, FsckError> {
        let mut refs = BTreeMap::new();
        for name in self.refs.names()? {
            report.checked += 1;
            match self.refs.get(&name) {
                Ok(Some(reference)) => {
                    for why in self.check_ref(&reference)? {
                        report.add(Damage::Bad(StoreItem::Ref(name.to_string()), why));
                    }
                    refs.insert(name, reference);
                }
                Ok(None) => {}
                Err(error) => {
                    let why = match &error {
                        RefError::Damaged { source, .. } => chain(source),
                        RefError::NotAFile { source, .. } => check_error::damage(source)?,
                        RefError::Wrong { says, .. } => format!("it names {}", says.escape_debug()),
                        other => check_error::damage(other)?,
                    };
                    report.add(Damage::Bad(StoreItem::Ref(name.to_string()), why));
                }
            }
        }
        Ok(refs)
    }

    /// Returns the items that a ref needs and the store lacks. Damage to items in the store is found by other checks.
    fn check_ref(&self, reference: &Reference) -> Result<Vec<String>, FsckError> {
        let mut wrong = Vec::new();
        let image = reference.image;
        if matches!(self.images.has(&image), Ok(false)) {
            wrong.push(format!("its image {image} is not in the store"));
        }
        let Some(manifest) = reference.manifest else { return Ok(wrong) };
        let mut links = |digest: &Digest, what: &str| match self.manifests.read(digest) {
            Ok(Some(bytes)) => Links::parse(&bytes),
            Ok(None) => {
                wrong.push(format!("its {what} {digest} is not in the store"));
                Links::default()
            }
            Err(_) => Links::default(),
        };
        let mut layers = Vec::new();
        for config in links(&manifest, "manifest").manifests {
            layers.extend(links(&config, "config").layers);
        }
        for layer in layers {
            if matches!(self.layers.directory.stat(layer.file_name()), Ok(None))
                && !self.is_indexed(&image)?
            {
                wrong.push(format!("its layer {layer} is not in the store"));
            }
        }
        Ok(wrong)
    }

    /// Hashes images and reads the lists of objects and devices that they need.
    fn check_images(
        &self,
        ids: &[ImageId],
        refs: &BTreeMap<RefName, Reference>,
        options: FsckOptions,
        report: &mut FsckReport,
    ) -> Result<BTreeMap<ImageId, Contents>, FsckError> {
        let open = |id: &ImageId| self.images.open(id).map(|it| it.map(ImageFile::into_file));
        let hashed = hash_all(ids, self.algorithm(), options, &open)?;
        let mut images = BTreeMap::new();
        for (id, hashed) in ids.iter().zip(hashed) {
            report.checked += 1;
            let mut contents = Contents::default();
            let damage = match hashed {
                Hashed::Different(actual, size) => {
                    report.bytes += size;
                    Some(Damage::Image { expected: *id, actual })
                }
                Hashed::Damaged(why) => Some(Damage::Bad(StoreItem::Image(*id), why)),
                Hashed::Sound(size) => {
                    report.bytes += size;
                    let read = self.read_contents(id, &mut contents)?;
                    read.err().map(|why| Damage::Bad(StoreItem::Image(*id), why))
                }
            };
            if let Some(damage) = damage {
                let names = refs.iter().filter(|it| it.1.image == *id).map(|it| it.0.clone());
                let harm = Harm { image: *id, refs: names.collect(), paths: Vec::new() };
                report.damage.push((damage, vec![harm]));
            }
            images.insert(*id, contents);
        }
        Ok(images)
    }

    /// Reads the objects and devices that an image needs. The inner error describes why the image cannot be read.
    fn read_contents(
        &self,
        image: &ImageId,
        contents: &mut Contents,
    ) -> Result<Result<(), String>, FsckError> {
        let file = match check_error::found(self.images.open(image))? {
            Ok(Some(file)) => file,
            Ok(None) => return Ok(Ok(())),
            Err(why) => return Ok(Err(why)),
        };
        let devices = match check_error::found(images::devices(&file))? {
            Ok(devices) => devices,
            Err(why) => return Ok(Err(why)),
        };
        for device in devices.uses {
            let Some(id) = device.device else {
                return Ok(Err("its device table has an entry without a device id".to_owned()));
            };
            contents.devices.insert(id, device.bytes);
        }
        let mut visit = |_: &[u8], it| match it {
            Use::Object { object, size } => drop(contents.needs.insert((object, size))),
            Use::Range(range) => contents.ranges.push(range),
        };
        check_error::found(images::uses(&file, &mut visit))
    }

    /// Calls `visit` for each use of data in an image, with errors as [`read_contents`](Self::read_contents).
    fn read_uses(
        &self,
        image: &ImageId,
        visit: &mut dyn FnMut(&[u8], Use),
    ) -> Result<Result<(), String>, FsckError> {
        match check_error::found(self.images.open(image))? {
            Ok(Some(file)) => check_error::found(images::uses(&file, visit)),
            Ok(None) => Ok(Ok(())),
            Err(why) => Ok(Err(why)),
        }
    }

    /// Hashes objects, finds needed objects that are missing, and reports the affected images and layers.
    fn check_objects(
        &self,
        ids: &[ObjectId],
        users: &Users<'_>,
        in_devices: &InDevices,
        options: FsckOptions,
        report: &mut FsckReport,
    ) -> Result<(), FsckError> {
        let open = |id: &ObjectId| self.open_to_hash(id);
        let hashed = hash_all(ids, self.algorithm(), options, &open)?;
        let mut damaged: BTreeMap<ObjectId, Vec<Damage>> = BTreeMap::new();
        let mut sizes = BTreeMap::new();
        for (id, hashed) in ids.iter().zip(hashed) {
            report.checked += 1;
            let damage = match hashed {
                Hashed::Sound(size) => {
                    report.bytes += size;
                    sizes.insert(*id, size);
                    continue;
                }
                Hashed::Different(actual, size) => {
                    report.bytes += size;
                    Damage::Object { expected: *id, actual, size }
                }
                Hashed::Damaged(why) => Damage::Bad(StoreItem::Object(*id), why),
            };
            damaged.entry(*id).or_default().push(damage);
        }
        users.add_hurt_layers(ids, in_devices, report);
        for object in users.needed(in_devices) {
            if ids.binary_search(&object).is_err() {
                damaged.entry(object).or_default().push(Damage::Missing(object));
            }
        }
        for contents in users.images.values() {
            for (object, stated) in &contents.needs {
                let Some(actual) = sizes.get(object).filter(|size| *size != stated) else {
                    continue;
                };
                let damage = Damage::Size { object: *object, actual: *actual, stated: *stated };
                let found = damaged.entry(*object).or_default();
                if !found.contains(&damage) {
                    found.push(damage);
                }
            }
        }
        if !damaged.is_empty() {
            self.add_harm(damaged, users, report)?;
        }
        Ok(())
    }

    fn add_harm(
        &self,
        damaged: BTreeMap<ObjectId, Vec<Damage>>,
        users: &Users<'_>,
        report: &mut FsckReport,
    ) -> Result<(), FsckError> {
        let mut harm: BTreeMap<ObjectId, Vec<Harm>> = BTreeMap::new();
        for (image, contents) in &users.images {
            if !contents.needs.iter().any(|(object, _)| damaged.contains_key(object)) {
                continue;
            }
            let mut paths: BTreeMap<ObjectId, Vec<Vec<u8>>> = BTreeMap::new();
            let read = self.read_uses(image, &mut |path, used| match used {
                Use::Object { object, .. } if damaged.contains_key(&object) => {
                    paths.entry(object).or_default().push(path.to_vec());
                }
                Use::Object { .. } | Use::Range(_) => {}
            })?;
            if let Err(why) = read {
                // The image could be read a moment ago.
                report.add(Damage::Bad(StoreItem::Image(*image), why));
            }
            for (object, paths) in paths {
                let refs = users.names(image);
                harm.entry(object).or_default().push(Harm { image: *image, refs, paths });
            }
        }
        for (layer, objects) in &users.layers {
            let wrong = |damage: &Damage| !matches!(damage, Damage::Size { .. });
            let hurt = |object: &&ObjectId| {
                damaged.get(object).is_some_and(|found| found.iter().any(wrong))
            };
            let hurt: BTreeSet<_> = objects.iter().filter(hurt).copied().collect();
            if !hurt.is_empty() {
                report.hurt_layers.entry(*layer).or_default().extend(hurt);
            }
        }
        for (object, found) in damaged {
            let images = harm.remove(&object).unwrap_or_default();
            report.damage.extend(found.into_iter().map(|damage| (damage, images.clone())));
        }
        Ok(())
    }

    fn check_layers(
        &self,
        ids: &[Digest],
        users: &mut Users<'_>,
        report: &mut FsckReport,
    ) -> Result<(), FsckError> {
        for diff_id in ids {
            report.checked += 1;
            let why = match self.layers.open(diff_id) {
                Ok(None) => continue,
                Ok(Some(layer)) => {
                    let objects = layer.info().objects.iter().copied().collect();
                    users.layers.insert(*diff_id, objects);
                    let read = layer.recipe().and_then(|mut recipe| {
                        io::copy(&mut recipe, &mut io::sink())
                            .map_err(|source| StoredLayerError::Recipe { action: "read", source })
                    });
                    match read {
                        Ok(size) if size == layer.recipe_size() => continue,
                        Ok(size) => {
                            format!("its recipe has {size} bytes, not {}", layer.recipe_size())
                        }
                        Err(error) => check_error::damage(&error)?,
                    }
                }
                Err(StoredLayerError::Damaged { reason, .. }) => reason.to_string(),
                Err(error) => check_error::damage(&error)?,
            };
            report.add(Damage::Bad(StoreItem::Layer(*diff_id), why));
        }
        Ok(())
    }

    /// Returns misplaced files in the directories that [`Inventory`] does not list.
    fn other_strays(&self) -> Result<Vec<PathBuf>, DiskError> {
        let mut strays = self.container_snapshots.strays()?;
        strays.extend(self.volumes.strays()?);
        strays.extend(self.networks.strays()?);
        let mut look = |directory: &Directory, good: &dyn Fn(&str, FileType) -> bool| {
            for listed in directory.list()? {
                if !listed.text().is_some_and(|name| good(name, listed.kind)) {
                    strays.push(directory.path_of(&listed.name));
                }
            }
            Ok::<(), DiskError>(())
        };
        look(&self.root, &|name, _| belongs(name) || name == LOST_AND_FOUND)?;
        look(&self.refs.directory, &|name, _| RefName::from_file_name(name).is_some())?;
        let work = |name: &str, kind| {
            let is_ours =
                name.starts_with(crate::staging::PREFIX) || name.starts_with(crate::trash::PREFIX);
            // Some file systems do not report the type of an entry.
            is_ours && matches!(kind, FileType::Directory | FileType::Unknown)
        };
        look(&self.tmp, &work)?;
        Ok(strays)
    }
}

impl FsckReport {
    fn take(&mut self, checked: Checked) {
        self.checked += checked.count;
        for (item, why) in checked.damage {
            self.add(Damage::Bad(item, why));
        }
    }

    fn add(&mut self, damage: Damage) {
        self.damage.push((damage, Vec::new()));
    }
}

impl Damage {
    /// Order of the damage in a report.
    const fn rank(&self) -> u8 {
        match self {
            Self::Image { .. } | Self::Bad(StoreItem::Image(_), _) => 0,
            Self::Stored { .. }
            | Self::Object { .. }
            | Self::Missing(_)
            | Self::Size { .. }
            | Self::Lazy(_) => 1,
            Self::Bad(item, _) => match item {
                StoreItem::Layer(_) => 2,
                StoreItem::Manifest(_) | StoreItem::Blob(_) => 3,
                StoreItem::Ref(_) => 4,
                StoreItem::Container(_) => 5,
                StoreItem::ContainerSnapshot(_)
                | StoreItem::Snapshot(..)
                | StoreItem::Volume(_)
                | StoreItem::Network(_) => 6,
                _ => 1,
            },
            Self::Stray(_) => 6,
        }
    }
}
