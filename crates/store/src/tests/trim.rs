//! Exactly the unneeded parts of devices are freed.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use image::verity::{ImageId, ObjectId};
use tempfile::TempDir;

use super::data::{files, id, pack};
use super::{NOW, check, check_clean, import, import_as, name, open, sample};
use crate::trace::{Holes, Recorder, Trace};
use crate::{Form, Freeing, GcPlan, OpenOptions, Store, StoreItem};

/// Returns the bytes on disk of all devices, without indexes.
fn allocated(store: &Store) -> u64 {
    let data = std::fs::read_dir(store.path().join("data")).unwrap();
    let devices = data.map(|it| it.unwrap().path()).filter(|it| it.extension().is_none());
    devices.map(|it| it.metadata().unwrap().blocks() * 512).sum()
}

fn names(store: &Store) -> usize {
    std::fs::read_dir(store.path().join("data")).unwrap().count()
}

fn own(name: &str) -> ObjectId {
    id(&sample(name, 12)["own-9"])
}

fn shared() -> ObjectId {
    id(&sample("any", 12)["shared-9"])
}

fn freeing(plan: &GcPlan) -> Vec<Freeing> {
    plan.dead.iter().map(|it| it.freeing).collect()
}

/// Makes a device that two images need, then removes one of them.
pub(super) fn half_dead(store: &Store) -> ImageId {
    import_as(store, "gone", &sample("gone", 12), Form::Packed).unwrap();
    let kept = import_as(store, "kept", &sample("kept", 12), Form::Packed).unwrap();
    store.remove_ref(&name("gone")).unwrap();
    kept
}

#[test]
fn what_nobody_needs_of_a_device_is_freed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let kept = half_dead(&store);
    let before = allocated(&store);
    let plan = store.plan_gc(NOW).unwrap();
    assert_eq!(freeing(&plan), [Freeing::Now]);
    // The sizes are computed by hand: "gone 0 " has 7 bytes, times 20 + 100 n, rounded up to whole pages.
    let whole = |it: usize| it.next_multiple_of(4096);
    let expected: usize =
        (0..12).map(|at| format!("gone {at} ").len() * (20 + at * 100)).map(whole).sum();
    assert_eq!(plan.dead[0].bytes, expected as u64);
    assert!(store.has(&own("gone"), sample("gone", 12)["own-9"].len() as u64).unwrap());
    let (_, swept) = store.gc(NOW).unwrap();
    assert_eq!(swept.trimmed, expected as u64);
    assert_eq!(before - allocated(&store), expected as u64);
    assert_eq!(store.devices.find_object(&own("gone")).unwrap(), None);
    assert!(store.devices.find_object(&own("kept")).unwrap().is_some());
    let mut bytes = Vec::new();
    store.object(&shared()).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, sample("any", 12)["shared-9"]);
    assert_eq!(store.open_image(&kept).unwrap().devices.len(), 2);
    check_clean(&store).unwrap();
    // The freed objects are not treated as present. When the image is imported again, the same device becomes
    // complete.
    import_as(&store, "gone", &sample("gone", 12), Form::Packed).unwrap();
    check(&store).unwrap();
    assert!(store.devices.find_object(&own("gone")).unwrap().is_some());
    store.remove_ref(&name("gone")).unwrap();
    store.remove_ref(&name("kept")).unwrap();
    check_clean(&store).unwrap();
    assert_eq!(names(&store), 0);
}

#[test]
fn an_equal_device_replaces_one_with_holes() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let kept = half_dead(&store);
    let mut all: Vec<Vec<u8>> = Vec::new();
    for bytes in sample("gone", 12).into_values().filter(|it| it.len() > 64) {
        if !all.contains(&bytes) {
            all.push(bytes);
        }
    }
    let old = store.devices.find_object(&shared()).unwrap().unwrap().device;
    store.gc(NOW).unwrap();
    let import = store.begin().unwrap();
    let device = pack(&import, &all).unwrap();
    assert_eq!(device.id, old, "the test makes the same device");
    // The device is not damaged, so no warning is logged.
    let commit = || {
        import.commit().unwrap();
    };
    assert_eq!(super::warnings(commit), 0);
    assert!(store.devices.find_object(&own("gone")).unwrap().is_some());
    check(&store).unwrap();
    store.open_image(&kept).unwrap();
    // At the second import, the store keeps its device.
    let inode =
        || std::fs::metadata(directory.path().join("data").join(old.to_string())).unwrap().ino();
    let before = inode();
    let import = store.begin().unwrap();
    pack(&import, &all).unwrap();
    import.commit().unwrap();
    assert_eq!(inode(), before);
}

#[test]
fn nothing_is_freed_while_somebody_reads() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let kept = half_dead(&store);
    let before = allocated(&store);
    let bytes = &sample("gone", 12)["own-9"];

    let mut reader = store.object(&own("gone")).unwrap();
    let (plan, swept) = store.gc(NOW).unwrap();
    assert_eq!((freeing(&plan), swept.trimmed), (vec![Freeing::InUse], 0));
    let mut read = Vec::new();
    reader.read_to_end(&mut read).unwrap();
    assert_eq!(read, *bytes);
    drop(reader);

    let opened = store.open_image(&kept).unwrap();
    assert_eq!(freeing(&store.gc(NOW).unwrap().0), [Freeing::InUse]);
    drop(opened);
    assert_eq!(allocated(&store), before);
    super::eventually(|| store.gc(NOW).unwrap().1.trimmed > 0);
    assert!(allocated(&store) < before);
}

/// A hard link outside of the store has the same bytes, so none of them are freed. It also keeps the bytes of a device
/// that the store removes.
#[test]
fn nothing_is_freed_that_a_hard_link_has() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory.path().join("store"));
    half_dead(&store);
    // Holes cannot be punched into files with fs-verity, and immutable files have no other links.
    let data = directory.path().join("store/data");
    for file in std::fs::read_dir(&data).unwrap() {
        let path = file.unwrap().path();
        super::damage::replace(&path, &std::fs::read(&path).unwrap());
    }
    let [dead] = store.plan_gc(NOW).unwrap().dead.try_into().unwrap();
    assert_eq!(dead.freeing, Freeing::Now);
    let device = data.join(dead.device.to_string());
    let (link, bytes) = (directory.path().join("link"), std::fs::read(&device).unwrap());
    std::fs::hard_link(&device, &link).unwrap();
    assert_eq!(freeing(&store.plan_gc(NOW).unwrap()), [Freeing::Linked]);
    let (plan, swept) = store.gc(NOW).unwrap();
    assert_eq!((freeing(&plan), swept.trimmed), (vec![Freeing::Linked], 0));
    assert!(std::fs::read(&link).unwrap() == bytes);
    // The store removes its name, which frees nothing of this device.
    store.remove_ref(&name("kept")).unwrap();
    let expected = allocated(&store) - link.metadata().unwrap().blocks() * 512;
    let (plan, _) = store.gc(NOW).unwrap();
    let of_devices = plan.garbage.iter().filter(|it| matches!(it.0, StoreItem::Device(_)));
    assert_eq!(of_devices.map(|it| it.1).sum::<u64>(), expected);
    assert!(!device.exists());
    assert!(std::fs::read(&link).unwrap() == bytes);
    assert_eq!(link.metadata().unwrap().nlink(), 1);
}

#[test]
fn what_the_file_system_cannot_free_is_not_counted_as_freed() {
    for holes in [Holes::None, Holes::NoneAtLast] {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        half_dead(&store);
        // The devices are replaced by unsealed files, because holes cannot be punched into files with fs-verity.
        for file in std::fs::read_dir(directory.path().join("data")).unwrap() {
            let path = file.unwrap().path();
            super::damage::replace(&path, &std::fs::read(&path).unwrap());
        }
        let before = allocated(&store);
        let recorder = Arc::new(Recorder { holes, ..Recorder::default() });
        let trace = Trace::to(&recorder);
        let store = Store::open_traced(
            directory.path(),
            crate::Who::this_process(),
            OpenOptions::write(),
            trace,
        )
        .unwrap();
        for _ in 0..2 {
            let (plan, swept) = store.gc(NOW).unwrap();
            assert_eq!(freeing(&plan), [Freeing::Unsupported], "{holes:?}");
            assert_eq!(swept.trimmed, 0);
            assert_eq!(allocated(&store), before);
            let offered = freeing(&store.plan_gc(NOW).unwrap());
            assert_eq!(offered == [Freeing::Unsupported], holes == Holes::None);
        }
        // If the check in advance shows that the parts cannot be freed, they stay usable.
        assert_eq!(
            store.devices.find_object(&own("gone")).unwrap().is_some(),
            holes == Holes::None
        );
        check(&store).unwrap();
    }
}

#[test]
fn an_import_keeps_what_it_has_found_in_a_device() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    half_dead(&store);
    let files = sample("gone", 12);
    // One object is in a device that is kept, and one is in a device that is removed.
    import_as(&store, "other", &sample("other", 12), Form::Packed).unwrap();
    store.remove_ref(&name("other")).unwrap();
    let transaction = store.begin().unwrap();
    let size = files["own-9"].len() as u64;
    assert!(transaction.reuse_stored(&own("gone"), size).unwrap().is_some());
    assert!(transaction.reuse_stored(&own("gone"), size + 1).unwrap().is_none());
    let size = sample("other", 12)["own-9"].len() as u64;
    let other = transaction.reuse_stored(&own("other"), size).unwrap().unwrap();
    assert!(transaction.reuse_device(&other.device).unwrap());
    // Devices do not change while an import looks up data in them.
    let (plan, swept) = store.gc(NOW).unwrap();
    assert_eq!((freeing(&plan), swept.trimmed), (vec![Freeing::Imports], 0));
    assert!(plan.garbage.iter().any(|it| it.0 == StoreItem::Device(other.device)));
    assert!(swept.set_aside > 0, "{swept:?}");
    assert!(store.devices.find_object(&own("other")).unwrap().is_some());
    // This also holds for an import without readable lists, which may have looked up data in any device.
    transaction.forget_lists();
    let (plan, swept) = store.gc(NOW).unwrap();
    assert_eq!((freeing(&plan), swept.trimmed), (vec![Freeing::Imports], 0));
    assert!(plan.garbage.iter().any(|it| it.0 == StoreItem::Device(other.device)));
    assert_eq!(store.devices.find_object(&own("other")).unwrap(), None);
    transaction.commit().unwrap();
    assert_eq!(store.devices.find_object(&own("other")).unwrap().unwrap().device, other.device);
    let mut read = Vec::new();
    store.object(&own("other")).unwrap().read_to_end(&mut read).unwrap();
    assert_eq!(read, sample("other", 12)["own-9"]);
    check(&store).unwrap();
    check_clean(&store).unwrap();
    assert_eq!(store.devices.find_object(&own("other")).unwrap(), None);
}

#[test]
fn a_layer_keeps_its_objects_wherever_they_are() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let files = sample("one", 12);
    let size = files["own-9"].len() as u64;
    let file = |name: &str| store.objects.open(&own(name)).unwrap().is_some();
    // The import changes the image's form from files to a device, so the files are removed.
    import(&store, "one", &files).unwrap();
    import_as(&store, "one", &files, Form::Packed).unwrap();
    assert!(file("one") && store.devices.find_object(&own("one")).unwrap().is_some());
    check_clean(&store).unwrap();
    assert!(!file("one") && store.has(&own("one"), size).unwrap());
    // The image changes back to files, so the device is removed.
    import(&store, "one", &files).unwrap();
    check_clean(&store).unwrap();
    assert!(file("one"));
    assert_eq!(names(&store), 0);
    // The store keeps a layer without its image.
    import_as(&store, "two", &sample("two", 12), Form::Packed).unwrap();
    let (one, two) = (store.refs.get(&name("one")).unwrap().unwrap(), name("two"));
    let manifest = store.refs.get(&two).unwrap().unwrap().manifest;
    store.set_ref(&two, &crate::Reference { manifest, ..one }).unwrap();
    check_clean(&store).unwrap();
    assert!(store.devices.find_object(&own("two")).unwrap().is_some());
    // The device need not contain objects that are files because of the other image.
    assert_eq!(store.devices.find_object(&shared()).unwrap(), None);
    let transaction = store.begin().unwrap();
    let layers = store.layers.diff_ids().unwrap();
    assert_eq!(layers.len(), 2);
    for layer in &layers {
        assert!(transaction.reuse_layer(layer).unwrap().is_some());
    }
}

#[test]
fn objects_that_a_native_image_has_in_itself_stay_in_the_index() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let image = import_as(&store, "one", &sample("one", 12), Form::Packed).unwrap();
    // Without a manifest, the layer is removed.
    let reference = store.refs.get(&name("one")).unwrap().unwrap();
    store.set_ref(&name("one"), &crate::Reference { manifest: None, ..reference }).unwrap();
    check_clean(&store).unwrap();
    assert!(store.layers.diff_ids().unwrap().is_empty());
    for bytes in sample("one", 12).into_values().filter(|it| it.len() > 64) {
        let mut read = Vec::new();
        store.object(&id(&bytes)).unwrap().read_to_end(&mut read).unwrap();
        assert_eq!(read, bytes);
    }
    store.open_image(&image).unwrap();
}

#[test]
fn gc_does_nothing_when_an_index_is_damaged() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let import = store.begin().unwrap();
    let device = pack(&import, &files("a")).unwrap();
    import.commit().unwrap();
    let path = directory.path().join("data").join(format!("{}.index", device.id));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[140] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let error = store.gc(NOW).unwrap_err();
    let crate::GcError::Unreadable { object, .. } = &error else { panic!("{error}") };
    assert_eq!(*object, format!("the index of device {}", device.id));
    assert_eq!(names(&store), 2);
}

/// Imports of all forms, readers and `gc` run at the same time, each as a separate process would.
#[test]
fn readers_imports_and_gc_do_not_hurt_each_other() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let kept = import_as(&open(path), "kept", &sample("kept", 12), Form::Packed).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2_usize {
            scope.spawn(move || {
                let store = open(path);
                for round in 0..12 {
                    let form = if round % 3 == 0 { Form::Objects } else { Form::Packed };
                    let own = format!("own-{thread}-{}", round % 4);
                    import_as(&store, &own, &sample(&own, 12), form).unwrap();
                    if round % 2 == 1 {
                        store.remove_ref(&name(&own)).unwrap();
                    }
                }
            });
        }
        scope.spawn(move || {
            let store = open(path);
            for _ in 0..20 {
                store.gc(NOW).unwrap();
            }
        });
        scope.spawn(move || {
            let store = open(path);
            for _ in 0..40 {
                store.open_image(&kept).unwrap();
                for bytes in sample("kept", 12).into_values().filter(|it| it.len() > 64) {
                    let mut read = Vec::new();
                    store.object(&id(&bytes)).unwrap().read_to_end(&mut read).unwrap();
                    assert_eq!(read, bytes);
                }
            }
        });
    });
    let store = open(path);
    check(&store).unwrap();
    check_clean(&store).unwrap();
}
