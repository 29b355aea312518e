//! Rebuilds the tars of layers from their recipes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;

use image::tar::recipe::RebuildError;
use image::verity::ObjectId;

use super::{Damage, FsckError, FsckOptions, FsckReport, chain, check_error};
use crate::mount_view::verified_reader::{BytesError, LayerTar};
use crate::parallel;
use crate::shelf::item::StoreItem;
use crate::shelf::layers::StoredLayer;
use crate::store::Store;
use image::digest::Digest;

/// A reason why a layer's tar cannot be rebuilt.
#[derive(Debug)]
enum Fault {
    /// The recipe and all objects are readable, but give another tar.
    Different(String),
    /// The recipe or an object is missing or unreadable.
    Failed(String),
    /// The check could not be completed.
    Unchecked(FsckError),
}

impl Fault {
    fn from_error(error: &(dyn std::error::Error + 'static)) -> Self {
        check_error::damage(error).map_or_else(Self::Unchecked, Self::Failed)
    }

    fn of_tar(error: BytesError) -> Self {
        match error {
            BytesError::Recipe(it @ (RebuildError::Corrupt { .. } | RebuildError::Version(_))) => {
                Self::Different(chain(&it))
            }
            BytesError::Layer(error) => Self::from_error(&error),
            error => Self::from_error(&error),
        }
    }
}

impl Store {
    /// Rebuilds the tars of these layers on several threads, except layers that are already reported as damaged.
    pub(super) fn check_tars(
        &self,
        diff_ids: &[Digest],
        options: FsckOptions,
        report: &mut FsckReport,
    ) -> Result<(), FsckError> {
        let known: BTreeSet<Digest> = report
            .damage
            .iter()
            .filter_map(|(damage, _)| match damage {
                Damage::Bad(StoreItem::Layer(diff_id), _) => Some(*diff_id),
                _ => None,
            })
            .collect();
        let sound: Vec<_> = diff_ids.iter().filter(|it| !known.contains(it)).collect();
        let look = |at: usize| Ok::<_, FsckError>(self.fault(sound[at]));
        let faults = parallel::each("fsck", options.threads, sound.len(), look)?;
        let faults = sound.into_iter().zip(faults).filter_map(|(id, fault)| Some((*id, fault?)));
        for (diff_id, fault) in faults.collect::<BTreeMap<_, _>>() {
            match fault {
                Fault::Different(why) | Fault::Failed(why) => {
                    report.add(Damage::Bad(StoreItem::Layer(diff_id), why));
                }
                Fault::Unchecked(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the layer's recipe is readable and has all of its objects, but gives another tar.
    pub(crate) fn gives_another_tar(&self, diff_id: &Digest) -> Result<bool, FsckError> {
        match self.fault(diff_id) {
            Some(Fault::Different(_)) => Ok(true),
            Some(Fault::Failed(_)) | None => Ok(false),
            Some(Fault::Unchecked(error)) => Err(error),
        }
    }

    fn fault(&self, diff_id: &Digest) -> Option<Fault> {
        match self.layers.open(diff_id) {
            Ok(Some(layer)) => self.rebuild(&layer).err(),
            // The holder of the lock removed the layer.
            Ok(None) => None,
            Err(error) => Some(Fault::from_error(&error)),
        }
    }

    fn rebuild(&self, layer: &StoredLayer) -> Result<(), Fault> {
        let info = layer.info();
        let listed: BTreeSet<_> = info.objects.iter().collect();
        let mut unlisted = None;
        let open = |id: &ObjectId| {
            if !listed.contains(id) {
                unlisted.get_or_insert(*id);
            }
            self.object_locked(id)
        };
        let mut tar = LayerTar::new(layer, open).map_err(Fault::of_tar)?;
        let mut hasher = info.diff_id.hasher();
        let mut length = 0;
        let mut buffer = vec![0; 256 << 10];
        loop {
            let read =
                tar.read(&mut buffer).map_err(|it| Fault::of_tar(BytesError::from_io(it)))?;
            if read == 0 {
                break;
            }
            hasher.update(&buffer[..read]);
            length += read as u64;
        }
        drop(tar);
        // The tar can be rebuilt only until `gc` removes the object, because `gc` does not know that the layer needs
        // it.
        if let Some(object) = unlisted {
            return Err(Fault::Different(format!("its list of objects lacks {object}")));
        }
        let actual = hasher.finish();
        if actual != info.diff_id {
            return Err(Fault::Different(format!("its rebuilt tar has the digest {actual}")));
        }
        if length != info.size {
            let stated = info.size;
            let why = format!("it states a tar of {stated} bytes, but the tar has {length}");
            return Err(Fault::Different(why));
        }
        Ok(())
    }
}
