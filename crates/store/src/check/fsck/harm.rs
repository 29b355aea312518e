//! Finds the images that damaged objects in devices affect.

use std::collections::BTreeMap;

use image::verity::{DeviceId, ObjectId};

use super::{Damage, FsckError, FsckReport, Harm, Users};
use crate::shelf::devices::{Entry, Ranges};
use crate::shelf::images::{DevicePart, Use};
use crate::shelf::item::StoreItem;
use crate::store::Store;

/// An object of a device that does not match the device's index.
pub(super) struct Bad {
    /// Device to which the index belongs.
    pub(super) device: DeviceId,
    pub(super) object: ObjectId,
    /// Location of the object, or of its first piece.
    pub(super) at: (DeviceId, Entry),
    pub(super) why: String,
}

/// Locations of damaged objects, per device, sorted because all objects of a device may be damaged.
struct Places(BTreeMap<DeviceId, (Ranges, Vec<usize>)>);

impl Places {
    fn from_bad(bad: &[Bad]) -> Self {
        let mut devices: BTreeMap<DeviceId, Vec<(u64, u64, usize)>> = BTreeMap::new();
        for (number, Bad { at: (device, entry), .. }) in bad.iter().enumerate() {
            if entry.size > 0 {
                devices.entry(*device).or_default().push((entry.offset, entry.until(), number));
            }
        }
        let sorted = devices.into_iter().map(|(device, mut places)| {
            // In the order of `Ranges`.
            places.sort_unstable();
            let (ranges, numbers) = places.into_iter().map(|it| ((it.0, it.1), it.2)).unzip();
            (device, (Ranges::new(ranges), numbers))
        });
        Self(sorted.collect())
    }

    /// Returns the numbers of the damaged objects that overlap a range.
    fn hit(&self, range: &DevicePart) -> impl Iterator<Item = usize> + use<'_> {
        let (from, until) = (range.offset, range.offset.saturating_add(range.len));
        let device = self.0.get(&range.device);
        device.into_iter().flat_map(move |(ranges, numbers)| {
            ranges.meeting(from, until).filter_map(|at| numbers.get(at).copied())
        })
    }
}

impl Store {
    /// Reports the damaged objects with the images and paths that use their bytes.
    pub(super) fn tell_harm(
        &self,
        bad: Vec<Bad>,
        users: &Users<'_>,
        report: &mut FsckReport,
    ) -> Result<(), FsckError> {
        let places = Places::from_bad(&bad);
        let mut harm: Vec<Vec<Harm>> = vec![Vec::new(); bad.len()];
        for (image, contents) in &users.images {
            if !contents.ranges.iter().any(|range| places.hit(range).next().is_some()) {
                continue;
            }
            let mut paths: BTreeMap<usize, Vec<Vec<u8>>> = BTreeMap::new();
            let mut visit = |path: &[u8], used: Use| {
                let Use::Range(range) = used else { return };
                for at in places.hit(&range) {
                    let paths = paths.entry(at).or_default();
                    if paths.last().is_none_or(|last| last != path) {
                        paths.push(path.to_vec());
                    }
                }
            };
            if let Err(why) = self.read_uses(image, &mut visit)? {
                // The image could be read a moment ago.
                report.add(Damage::Bad(StoreItem::Image(*image), why));
            }
            let refs = users.names(image);
            for (at, paths) in paths {
                harm[at].push(Harm { image: *image, refs: refs.clone(), paths });
            }
        }
        for (Bad { device, object, why, .. }, harm) in bad.into_iter().zip(harm) {
            report.damage.push((Damage::Stored { object, device, why }, harm));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use image::verity::Algorithm;
    use tempfile::TempDir;

    use super::super::Contents;
    use super::*;
    use crate::OpenOptions;

    /// A test of `Ranges` counts the necessary comparisons.
    #[test]
    fn everything_may_be_damaged_at_once() {
        const COUNT: u64 = 20_000;
        let directory = TempDir::new().unwrap();
        let store =
            Store::open(directory.path(), crate::Who::this_process(), OpenOptions::create())
                .unwrap();
        let id = |text: &str| image::verity::digest(Algorithm::Sha256, text.as_bytes());
        let device = id("device");
        let entry = |number: u64| Entry {
            id: *id("object").as_bytes().first_chunk().unwrap(),
            offset: number * 8192,
            size: 4096,
            sha256: [0; 32],
        };
        let bad = (0..COUNT).map(|it| Bad {
            device: device.into(),
            object: id("object").into(),
            at: (device.into(), entry(it)),
            why: String::new(),
        });
        // Each range is next to a damaged object, so that each range is compared.
        let ranges = (0..COUNT).map(|it| DevicePart {
            device: device.into(),
            offset: it * 8192 + 4096,
            len: 4096,
            size: 4096,
        });
        let contents = Contents { ranges: ranges.collect(), ..Contents::default() };
        let refs = BTreeMap::new();
        let images = [(id("image").into(), contents)].into();
        let users = Users { refs: &refs, images, layers: BTreeMap::new() };
        let mut report = FsckReport::default();
        store.tell_harm(bad.collect(), &users, &mut report).unwrap();
        assert_eq!(report.damage.len(), usize::try_from(COUNT).unwrap());
        assert!(report.damage.iter().all(|it| it.1.is_empty()));
    }
}
