//! Imports whose data goes into devices.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use image::tree::{Content, Node, Tree};
use image::verity::{DeviceId, ObjectId};
use store::{DraftError, Form, ObjectReader, StoredDevice, StoredObject, Transaction};

use super::layer::{KeptTar, TarFile};
use super::{ImportError, Job, check_paths};
use crate::native::{self, Dedup, Packed, Packer, Places, Written};
use image::digest::Digest;

/// Finds an object of a size in a device.
type Find<'f> = dyn Fn(&ObjectId, u64) -> Result<Option<StoredObject>, ImportError> + 'f;

/// A layer's tar, by its digest.
type Tar<'t> = (Digest, KeptTar<'t>);

/// Where objects are.
type Files = HashMap<ObjectId, StoredObject>;

/// The files of a layer's tar.
enum LayerFiles {
    /// Those of one that was read just now.
    Read(Files),
    /// The store's index of this device has them.
    Stored(DeviceId),
}

/// Of each object its first place.
fn first_of_each(files: impl Iterator<Item = (ObjectId, StoredObject)>) -> Files {
    let mut first = HashMap::new();
    for (object, stored) in files {
        first.entry(object).or_insert(stored);
    }
    first
}

impl Job<'_> {
    /// Writes an image over devices, if one is wanted: of these layers, of which some have their tars here, and the
    /// others are in the store.
    pub(super) fn native(
        &self,
        tree: &Tree,
        layers: &[Digest],
        tars: Vec<Option<Tar<'_>>>,
    ) -> Result<Option<Written>, ImportError> {
        if self.wishes.form == Form::Objects {
            return Ok(None);
        }
        check_paths(tree)?;
        let transaction = &*self.transaction;
        let mut found = HashMap::new();
        let mut read = HashMap::new();
        let dedup = match self.wishes.form {
            // What is beside the tars is little, and an image of tars is the same on every host.
            Form::Tar => Dedup::Layer,
            _ => self.wishes.dedup,
        };
        let mut packer = Packer::new(transaction, dedup, self.surroundings.cancel);
        for (diff_id, KeptTar { mut draft, files, sparse }) in tars.into_iter().flatten() {
            if self.wishes.form == Form::Tar {
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
            // All of it is in devices: the tar takes room no longer.
            drop(draft);
        }
        if self.wishes.form == Form::Tar {
            let tars = self.tars(layers, read)?;
            self.place(&mut packer, tree, &tars, &mut found)?;
        }
        found.extend(packer.finish()?);
        let places = Found { transaction, found };
        let written = native::write(transaction, tree, &places)?;
        // They are in the devices.
        transaction.forget_objects();
        Ok(Some(written))
    }

    /// The tars of these layers, from the lowest, each once: those that were read just now, and those of the store.
    fn tars(
        &self,
        layers: &[Digest],
        mut read: HashMap<Digest, Files>,
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

    /// Finds a place for each object of a tree: the first in the lowest tar that has it. So the image is the same, whatever
    /// the store had before. Packs what no tar has as a whole: sparse files, whose zeros are nowhere then.
    fn place(
        &self,
        packer: &mut Packer<'_>,
        tree: &Tree,
        tars: &[LayerFiles],
        found: &mut Files,
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

    /// Packs objects that this import has made, which are no objects any more when the image is written.
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

    /// Packs the objects of a tree, in its order, and writes its image.
    pub(super) fn pack(&self, tree: &Tree) -> Result<Written, ImportError> {
        let written = self.over_devices(tree, &|_, _| Ok(None))?;
        // They are in the devices.
        self.transaction.forget_objects();
        Ok(written)
    }

    /// Writes the image of a tree whose objects are in devices of the store, of whatever kind; those that are not are
    /// packed.
    pub(crate) fn derived(&self, tree: &Tree) -> Result<Written, ImportError> {
        check_paths(tree)?;
        self.over_devices(tree, &|object, size| {
            self.transaction.reuse_stored(object, size).map_err(ImportError::Object)
        })
    }

    fn over_devices(&self, tree: &Tree, find: &Find<'_>) -> Result<Written, ImportError> {
        let transaction = &*self.transaction;
        let mut packer = Packer::new(transaction, self.wishes.dedup, self.surroundings.cancel);
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
        let places = Found { transaction, found };
        Ok(native::write(transaction, tree, &places)?)
    }
}

/// Calls `visit` for each object of a tree, once.
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

/// Where the data of an import's files is.
struct Found<'t> {
    transaction: &'t Transaction<'t>,
    /// What is in the devices of this import, or was found for them.
    found: HashMap<ObjectId, StoredObject>,
}

impl Places for Found<'_> {
    fn find(&self, object: &ObjectId) -> Result<Option<StoredObject>, DraftError> {
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
