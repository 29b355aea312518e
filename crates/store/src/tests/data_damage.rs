//! Damage to devices is found and reported, and repaired by later imports.

use std::fs;
use std::path::PathBuf;

use image::verity::{DeviceId, ImageId};
use tempfile::TempDir;

use super::damage::{flip, replace};
use super::data::id;
use super::{NOW, check, check_clean, import, import_as, name, open, sample};
use crate::{Damage, Form, FsckOptions, FsckReport, Store, StoreItem};

struct Damaged {
    directory: TempDir,
    store: Store,
    one: ImageId,
    two: ImageId,
    device: DeviceId,
}

/// Makes two images that share a device.
fn two_images() -> Damaged {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let one = import_as(&store, "one", &sample("one", 12), Form::Packed).unwrap();
    let two = import_as(&store, "two", &sample("two", 12), Form::Packed).unwrap();
    let device =
        store.devices.find_object(&id(&sample("one", 12)["own-9"])).unwrap().unwrap().device;
    check(&store).unwrap();
    Damaged { directory, store, one, two, device }
}

/// Replaces the devices by unsealed files, because holes cannot be punched into files with fs-verity.
fn unseal(it: &Damaged) {
    for file in fs::read_dir(it.directory.path().join("data")).unwrap() {
        let path = file.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        replace(&path, &bytes);
    }
}

impl Damaged {
    fn device(&self) -> PathBuf {
        self.directory.path().join("data").join(self.device.to_string())
    }

    fn index(&self) -> PathBuf {
        self.directory.path().join("data").join(format!("{}.index", self.device))
    }

    fn fsck(&self) -> FsckReport {
        self.store.fsck(FsckOptions { threads: 2 }).unwrap()
    }

    /// Repairs the store, and imports everything again.
    fn mend(&self) {
        let removed = self.store.remove_damaged(&self.fsck()).unwrap();
        assert!(removed > 0);
        self.again();
    }

    fn again(&self) {
        for name in ["one", "two"] {
            import_as(&self.store, name, &sample(name, 12), Form::Packed).unwrap();
        }
        check_clean(&self.store).unwrap();
    }
}

/// Returns the affected images and paths, by name of the image.
fn told(report: &FsckReport, damaged: &Damaged) -> Vec<String> {
    let mut told = Vec::new();
    for (damage, harm) in &report.damage {
        let what = match damage {
            Damage::Stored { object, device, .. } if *device == damaged.device => {
                format!("object {object}")
            }
            Damage::Bad(StoreItem::Device(device), why) if *device == damaged.device => {
                format!("device {why}")
            }
            Damage::Bad(StoreItem::DeviceIndex(device), why) if *device == damaged.device => {
                format!("index {why}")
            }
            other => panic!("{other:?}"),
        };
        told.push(what);
        let first = told.len();
        for harm in harm {
            let paths: Vec<_> = harm.paths.iter().map(|it| String::from_utf8_lossy(it)).collect();
            let image = if harm.image == damaged.one { "one" } else { "two" };
            assert!(harm.image == damaged.one || harm.image == damaged.two);
            assert_eq!(harm.refs, [name(image)]);
            told.push(format!("{image} {}", paths.join(" ")).trim().to_owned());
        }
        // The report has them in the order of the images' ids.
        told[first..].sort_unstable();
    }
    told
}

#[test]
fn a_flipped_bit_in_a_device_is_told_with_paths() {
    for (file, expected) in
        [("own-9", &["one /own-9"][..]), ("shared-9", &["one /shared-9", "two /shared-9"])]
    {
        let it = two_images();
        let object = id(&sample("one", 12)[file]);
        let stored = it.store.devices.find_object(&object).unwrap().unwrap();
        flip(&it.device(), usize::try_from(stored.offset).unwrap() * 8 + 8011);
        let report = it.fsck();
        let mut wanted = vec![format!("object {object}")];
        wanted.extend(expected.iter().map(ToString::to_string));
        assert_eq!(told(&report, &it), wanted);
        let layers: Vec<_> = report.hurt_layers.values().collect();
        assert_eq!(layers, vec![&[object].into(); expected.len()]);
        let one = it.store.verify(&it.one, FsckOptions { threads: 1 }).unwrap();
        assert_eq!(one.damage.len(), 1);
        let two = it.store.verify(&it.two, FsckOptions { threads: 1 }).unwrap();
        assert_eq!(two.damage.len(), expected.len() - 1);
        it.mend();
    }
}

#[test]
fn a_hole_that_something_needs_is_damage() {
    let it = two_images();
    let object = id(&sample("one", 12)["shared-9"]);
    let stored = it.store.devices.find_object(&object).unwrap().unwrap();
    let range = (stored.offset, stored.offset + 4096);
    unseal(&it);
    let data = it.store.devices.directory.existing().unwrap();
    data.to_punch(it.device.to_string()).unwrap().punch(&[range]).unwrap();
    let told = told(&it.fsck(), &it);
    assert_eq!(told, [format!("object {object}"), "one /shared-9".into(), "two /shared-9".into()]);
    it.mend();
}

#[test]
fn a_device_that_is_cut_off_or_gone_is_told_with_its_images() {
    for cut in [true, false] {
        let it = two_images();
        let bytes = fs::read(it.device()).unwrap();
        let length = bytes.len() - 4096;
        let why = match cut {
            true => {
                replace(&it.device(), &bytes[..length]);
                format!("device it has {length} bytes, not {}", bytes.len())
            }
            false => {
                fs::remove_file(it.device()).unwrap();
                "device it is missing".to_owned()
            }
        };
        let report = it.fsck();
        let about = |it: &&(Damage, _)| matches!(it.0, Damage::Bad(StoreItem::Device(_), _));
        let report =
            FsckReport { damage: report.damage.iter().filter(about).cloned().collect(), ..report };
        assert_eq!(told(&report, &it), [why, "one".into(), "two".into()]);
        it.store.open_image(&it.one).unwrap_err();
        // An import must not treat the device as present, repaired or not.
        match cut {
            true => it.mend(),
            false => it.again(),
        }
        it.store.open_image(&it.one).unwrap();
    }
}

#[test]
fn every_flipped_bit_of_an_index_is_found() {
    let it = two_images();
    let good = fs::read(it.index()).unwrap();
    let mut bits: Vec<usize> = (0..good.len() * 8).step_by(4001).collect();
    bits.extend([0, good.len() * 8 - 1, 130 * 8, (good.len() - 80) * 8]);
    for bit in bits {
        flip(&it.index(), bit);
        let report = it.fsck();
        let is_told = report
            .damage
            .iter()
            .any(|(damage, _)| matches!(damage, Damage::Bad(StoreItem::DeviceIndex(device), _) if *device == it.device));
        assert!(is_told, "bit {bit}: {:?}", report.damage);
        replace(&it.index(), &good);
    }
    check(&it.store).unwrap();
    flip(&it.index(), 130 * 8);
    it.store.gc(NOW).unwrap_err();
    it.mend();
    // An index that lacks an object of an image.
    let it = two_images();
    let index = it.store.devices.index_of(&it.device).unwrap().unwrap();
    it.store.devices.drop_entries(&it.device, &index, &index.entries[1..], &[]).unwrap();
    let report = it.fsck();
    let why = |damage: &Damage| match damage {
        Damage::Bad(StoreItem::DeviceIndex(_), why) => why.clone(),
        _ => String::new(),
    };
    let found = report.damage.iter().any(|it| why(&it.0).contains("lacks an object at byte"));
    assert!(found, "{:?}", report.damage);
}

/// The device is undamaged, so its objects are found again as soon as an import lists them.
#[test]
fn an_import_writes_a_damaged_index_again() {
    let it = two_images();
    let object = id(&sample("one", 12)["own-9"]);
    for repairs in [false, true] {
        flip(&it.index(), 130 * 8);
        let error = it.store.devices.index_damage(&it.device).unwrap().unwrap().to_string();
        assert!(error.contains(&it.device.to_string()), "{error}");
        assert!(error.contains("import its image again to rewrite the index"));
        assert_eq!(it.store.devices.find_object(&object).unwrap(), None);
        if repairs {
            assert_eq!(it.store.remove_damaged(&it.fsck()).unwrap(), 1);
        }
        it.again();
        assert_eq!(it.store.devices.find_object(&object).unwrap().unwrap().device, it.device);
        it.store.open_image(&it.one).unwrap();
    }
}

#[test]
fn strays_beside_devices_are_told() {
    let it = two_images();
    let stray = it.directory.path().join("data").join("stray");
    fs::write(&stray, b"").unwrap();
    let report = it.fsck();
    let [(Damage::Stray(path), _)] = report.damage.as_slice() else { panic!("{report:?}") };
    assert_eq!(*path, stray.display().to_string());
    fs::remove_file(stray).unwrap();
}

#[test]
fn du_counts_devices_once() {
    use std::os::unix::fs::MetadataExt as _;
    let it = two_images();
    import(&it.store, "three", &sample("three", 3)).unwrap();
    unseal(&it);
    let used = it.store.du().unwrap();
    let files = fs::read_dir(it.directory.path().join("data")).unwrap();
    let sizes: Vec<_> = files
        .map(|it| it.unwrap())
        .map(|it| (it.path(), it.metadata().unwrap().blocks() * 512))
        .collect();
    assert_eq!(used.data, sizes.iter().map(|it| it.1).sum::<u64>());
    let devices: u64 = sizes.iter().filter(|it| it.0.extension().is_none()).map(|it| it.1).sum();
    let find = |image| used.images.iter().find(|it| it.image == image).unwrap();
    let (one, two) = (find(it.one), find(it.two));
    assert_eq!((one.shared, one.shared_with[0].image), (two.shared, it.two));
    assert!(one.shared >= 8192, "{one:?}");
    assert_eq!(used.unused_data, 0);
    let own: u64 = used.images.iter().map(|it| it.own).sum();
    assert_eq!(own + one.shared, used.objects - used.unused_objects + used.image_files + devices);
    it.store.remove_ref(&name("one")).unwrap();
    let plan = it.store.plan_gc(NOW).unwrap();
    assert_eq!(used.unused_data, 0);
    it.store.gc(NOW).unwrap();
    let after = it.store.du().unwrap();
    assert_eq!(used.data - after.data, plan.dead[0].bytes + index_shrunk(&it, &sizes));
    assert_eq!(after.unused_data, 0);
}

/// Returns the number of bytes on disk by which the index of the device became smaller.
fn index_shrunk(it: &Damaged, before: &[(PathBuf, u64)]) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let before = before.iter().find(|(path, _)| *path == it.index()).unwrap().1;
    before - it.index().metadata().unwrap().blocks() * 512
}
