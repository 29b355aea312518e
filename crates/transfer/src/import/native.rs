//! Imports into devices: the data of files goes into a tar or a packed device.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use image::tree::{Content, Node, Tree};
use image::verity::{DeviceId, ObjectId};
use store::{DraftError, Form, ObjectReader, StoredDevice, StoredObject, Transaction};

use super::layer::{KeptTar, TarFile};
use super::{ImportError, ImportRun, check_paths};
use crate::native::{self, Dedup, Packed, Packer, Places, Written};
use image::digest::Digest;

/// Finds an object of this size in a device.
type Find<'f> = dyn Fn(&ObjectId, u64) -> Result<Option<StoredObject>, ImportError> + 'f;

/// A layer's diff id and its tar.
type Tar<'t> = (Digest, KeptTar<'t>);

/// Locations of objects.
type ObjectLocations = HashMap<ObjectId, StoredObject>;

/// The files of a layer's tar.
enum LayerFiles {
    /// The files of a tar that this import has read.
    Read(ObjectLocations),
    /// The store's index of this device lists the files.
    Stored(DeviceId),
}

/// Keeps the first location of each object.
fn first_of_each(files: impl Iterator<Item = (ObjectId, StoredObject)>) -> ObjectLocations {
    let mut first = HashMap::new();
    for (object, stored) in files {
        first.entry(object).or_insert(stored);
    }
    first
}

impl ImportRun<'_> {
    /// Writes an image over devices, if one is wanted. `tars` has the tars of the layers that were read; the other
    /// layers are in the store.
    pub(super) fn native(
        &self,
        tree: &Tree,
        layers: &[Digest],
        tars: Vec<Option<Tar<'_>>>,
    ) -> Result<Option<Written>, ImportError> {
        if self.options.form == Form::Objects {
            return Ok(None);
        }
        check_paths(tree)?;
        let transaction = &*self.transaction;
        let mut found = HashMap::new();
        let mut read = HashMap::new();
        let dedup = match self.options.form {
            // Little data is outside the tars, and an image of tars must be the same on every host.
            Form::Tar => Dedup::Import,
            Form::Objects | Form::Packed => Dedup::Store,
        };
        let mut packer = Packer::new(transaction, dedup, self.environment.cancel);
        for (diff_id, KeptTar { mut draft, files, sparse }) in tars.into_iter().flatten() {
            if self.options.form == Form::Tar {
                draft.set_layer(diff_id);
                for TarFile { object, sha256, offset, size } in &files {
                    draft.add(*object, *sha256, *offset, *size);
                }
                let device = draft.finish().map_err(ImportError::Object)?;
                let files = files.into_iter().map(|it| (it.object, it.stored(&device)));
                read.entry(diff_id).or_insert_with(|| first_of_each(files));
                continue;
            }
            for TarFile { object, sha256, offset, size } in &files {
                let file = Packed { object, size: *size, sha256: Some(*sha256) };
                let read = |into: &mut [u8], at| draft.read_exact_at(into, offset + at);
                packer.add(&file, read)?;
            }
            self.pack_own(&mut packer, &sparse)?;
            packer.end_layer()?;
            // All files are in devices now, so the tar can be freed.
            drop(draft);
        }
        if self.options.form == Form::Tar {
            let tars = self.tars(layers, read)?;
            self.place(&mut packer, tree, &tars, &mut found)?;
        }
        found.extend(packer.finish()?);
        let places = DataLocations { transaction, found };
        let written = native::write(transaction, tree, &places)?;
        // The objects' data is in the devices.
        transaction.forget_objects();
        Ok(Some(written))
    }

    /// Returns the tars of these layers, from the lowest layer on, each tar once. This import has read some of them;
    /// the others are in the store.
    fn tars(
        &self,
        layers: &[Digest],
        mut read: HashMap<Digest, ObjectLocations>,
    ) -> Result<Vec<LayerFiles>, ImportError> {
        let mut tars = Vec::new();
        let mut seen = HashSet::new();
        for layer in layers.iter().filter(|it| seen.insert(**it)) {
            tars.extend(match read.remove(layer) {
                Some(files) => Some(LayerFiles::Read(files)),
                None => {
                    let stored = self.transaction.reuse_tar(layer).map_err(ImportError::Object)?;
                    stored.map(|it| LayerFiles::Stored(it.id))
                }
            });
        }
        Ok(tars)
    }

    /// Finds a location for each object of a tree: its first location in the lowest tar that contains it, so that the
    /// image does not depend on the earlier content of the store. Packs objects that are not contiguous in any tar
    /// (sparse files).
    fn place(
        &self,
        packer: &mut Packer<'_>,
        tree: &Tree,
        tars: &[LayerFiles],
        found: &mut ObjectLocations,
    ) -> Result<(), ImportError> {
        let mut others = Vec::new();
        each_object(tree, |object, size| {
            for tar in tars {
                let stored = match tar {
                    LayerFiles::Read(files) => files.get(object).cloned(),
                    LayerFiles::Stored(device) => {
                        let stored = self.transaction.find_in_device(object, device);
                        stored.map_err(ImportError::Object)?
                    }
                };
                if let Some(stored) = stored {
                    found.insert(*object, stored);
                    return Ok(());
                }
            }
            others.push((*object, size));
            Ok(())
        })?;
        self.pack_own(packer, &others)
    }

    /// Packs objects that this import made. They are no longer stored as objects once the image is written.
    fn pack_own(
        &self,
        packer: &mut Packer<'_>,
        objects: &[(ObjectId, u64)],
    ) -> Result<(), ImportError> {
        for (object, size) in objects {
            let mut reader = None;
            let read = |into: &mut [u8], at| {
                let reader = match &mut reader {
                    Some(reader) => reader,
                    empty => {
                        let opened = self.transaction.read_object(object);
                        empty.insert(opened.map_err(io::Error::other)?)
                    }
                };
                ObjectReader::read_exact_at(reader, into, at)
            };
            let file = Packed { object, size: *size, sha256: None };
            packer.add(&file, read)?;
        }
        Ok(())
    }

    /// Packs the objects of a tree, in the tree's order, and writes its image.
    pub(super) fn pack(&self, tree: &Tree) -> Result<Written, ImportError> {
        let written = self.over_devices(tree, &|_, _| Ok(None))?;
        // The objects' data is in the devices.
        self.transaction.forget_objects();
        Ok(written)
    }

    /// Writes the image of a tree. Uses the objects that are in devices of the store, of any kind, and packs the
    /// others.
    pub(crate) fn derived(&self, tree: &Tree) -> Result<Written, ImportError> {
        check_paths(tree)?;
        self.over_devices(tree, &|object, size| {
            self.transaction.reuse_stored(object, size).map_err(ImportError::Object)
        })
    }

    fn over_devices(&self, tree: &Tree, find: &Find<'_>) -> Result<Written, ImportError> {
        let transaction = &*self.transaction;
        let mut packer = Packer::new(transaction, Dedup::Store, self.environment.cancel);
        let (mut found, mut objects) = (HashMap::new(), Vec::new());
        each_object(tree, |object, size| {
            match find(object, size)? {
                Some(stored) => drop(found.insert(*object, stored)),
                None => objects.push((*object, size)),
            }
            Ok(())
        })?;
        self.pack_own(&mut packer, &objects)?;
        found.extend(packer.finish()?);
        let places = DataLocations { transaction, found };
        Ok(native::write(transaction, tree, &places)?)
    }
}

/// Calls `visit` once for each object of a tree.
pub(super) fn each_object(
    tree: &Tree,
    mut visit: impl FnMut(&ObjectId, u64) -> Result<(), ImportError>,
) -> Result<(), ImportError> {
    let mut seen = HashSet::new();
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        if let Node::Regular(Content::External { object: Some(object), size, .. }) =
            entry.inode.node()
            && seen.insert(object)
        {
            visit(&object, size)?;
        }
    }
    Ok(())
}

impl TarFile {
    fn stored(&self, device: &StoredDevice) -> StoredObject {
        StoredObject {
            object: self.object,
            device: device.id,
            device_bytes: device.bytes,
            kind: device.kind,
            offset: self.offset,
            size: self.size,
            sha256: self.sha256,
            pieces: None,
        }
    }
}

/// The locations of an import's file data.
struct DataLocations<'t> {
    transaction: &'t Transaction<'t>,
    /// Objects in the devices of this import, or found in other devices.
    found: HashMap<ObjectId, StoredObject>,
}

impl Places for DataLocations<'_> {
    fn find_object(&self, object: &ObjectId) -> Result<Option<StoredObject>, DraftError> {
        if let Some(found) = self.found.get(object) {
            return Ok(Some(found.clone()));
        }
        self.transaction.reuse_packed(object)
    }

    fn give(&self, object: &ObjectId, start: u64, out: &mut dyn Write) -> io::Result<()> {
        let reader = self.transaction.read_object(object).map_err(io::Error::other)?;
        native::copy(start..reader.size(), out, |into, at| reader.read_exact_at(into, at))
    }
}
