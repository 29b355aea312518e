//! Published files cannot be changed by accident.

use std::os::fd::AsFd as _;

use image::verity::{Algorithm, digest};
use kernel::seal::{Sealed, sealed};
use tempfile::TempDir;

use super::{NOW, check, check_clean, import, import_as, name, sample};
use crate::{Form, OpenOptions, Sealing, Store};

/// A temporary store that can be removed at the end of the test.
struct Unsealed(TempDir);

impl Drop for Unsealed {
    fn drop(&mut self) {
        if let Ok(store) =
            Store::open(self.0.path(), crate::Who::this_process(), OpenOptions::read())
        {
            store.unseal().unwrap();
        }
    }
}

#[test]
fn objects_and_images_are_sealed_and_gc_unseals_what_it_removes() {
    let directory = Unsealed(TempDir::new().unwrap());
    let sealing = Some(Sealing::VerityOrImmutable);
    let options = OpenOptions { sealing, ..OpenOptions::create() };
    let store = Store::open(directory.0.path(), crate::Who::this_process(), options).unwrap();
    let files = sample("one", 2);
    let image = import(&store, "one", &files).unwrap();
    let object = store.object(&digest(Algorithm::Sha256, &files["own-1"]).into()).unwrap();
    let opened = store.open_image(&image).unwrap();
    let found = sealed(object.file().unwrap().as_fd()).unwrap();
    assert_eq!(sealed(opened.image.fd()).unwrap(), found);
    match found {
        Sealed::Verity => assert!(opened.kernel_verity),
        Sealed::Immutable => {
            let path = super::damage::object_path(directory.0.path(), &files["own-1"]);
            let error = std::fs::write(&path, "x").unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
            assert!(std::fs::remove_file(&path).is_err());
        }
        Sealed::No => {
            testing::skipped("sealing: no fs-verity here, and no right to set the immutable flag");
            return;
        }
    }
    drop((object, opened));
    check(&store).unwrap();
    // One object is set aside and restored, and the other items are removed.
    store.remove_ref(&name("one")).unwrap();
    let transaction = store.begin().unwrap();
    let bytes = files["own-1"].len() as u64;
    let id = digest(Algorithm::Sha256, &files["own-1"]).into();
    assert!(transaction.reuse(&id, bytes).unwrap());
    transaction.forget_lists();
    store.gc(NOW).unwrap();
    assert!(!store.has(&id, bytes).unwrap());
    transaction.commit().unwrap();
    assert_eq!(sealed(store.object(&id).unwrap().file().unwrap().as_fd()).unwrap(), found);
    store.clear_dead().unwrap();
    check_clean(&store).unwrap();
    assert!(!store.has(&id, bytes).unwrap());
}

#[test]
fn a_device_is_sealed_and_sealed_again_when_it_has_lost_something() {
    let directory = Unsealed(TempDir::new().unwrap());
    let sealing = Some(Sealing::VerityOrImmutable);
    let options = OpenOptions { sealing, ..OpenOptions::create() };
    let store = Store::open(directory.0.path(), crate::Who::this_process(), options).unwrap();
    let gone = import_as(&store, "gone", &sample("gone", 12), Form::Packed).unwrap();
    let kept = import_as(&store, "kept", &sample("kept", 12), Form::Packed).unwrap();
    let state = |image| {
        let opened = store.open_image(image).unwrap();
        let device = &opened.devices[0];
        (device.id, sealed(device.file.as_fd()).unwrap(), opened.kernel_verity)
    };
    let (device, found, kernel_verity) = state(&gone);
    assert_eq!(kernel_verity, found == Sealed::Verity);
    store.remove_ref(&name("gone")).unwrap();
    let (plan, swept) = store.gc(NOW).unwrap();
    match found {
        Sealed::Verity => {
            assert_eq!((plan.dead[0].freeing, swept.trimmed), (crate::Freeing::Sealed, 0));
        }
        Sealed::Immutable => {
            assert_eq!(swept.trimmed, plan.dead[0].bytes);
            let path = directory.0.path().join("data").join(device.to_string());
            assert!(std::fs::remove_file(&path).is_err());
        }
        Sealed::No => {
            testing::skipped("sealing: no fs-verity here, and no right to set the immutable flag");
        }
    }
    let devices = store.open_image(&kept).unwrap().devices;
    let file = &devices.iter().find(|it| it.id == device).unwrap().file;
    assert_eq!(sealed(file.as_fd()).unwrap(), found);
    drop(devices);
    check(&store).unwrap();
    // The device is set aside while an import runs, restored, and removed at the end.
    store.remove_ref(&name("kept")).unwrap();
    let transaction = store.begin().unwrap();
    assert!(transaction.reuse_device(&device).unwrap());
    store.gc(NOW).unwrap();
    transaction.commit().unwrap();
    let (file, _) =
        store.devices.directory.existing().unwrap().read(device.to_string()).unwrap().unwrap();
    assert_eq!(sealed(file.as_fd()).unwrap(), found);
    drop(file);
    check_clean(&store).unwrap();
    assert!(store.devices.directory.existing().unwrap().list().unwrap().is_empty());
}

#[test]
fn a_store_that_was_made_with_the_flag_keeps_setting_it() {
    let directory = Unsealed(TempDir::new().unwrap());
    let open = |options| {
        Store::open(directory.0.path(), crate::Who::this_process(), options).unwrap().sealing
    };
    let wish = |sealing| OpenOptions { sealing: Some(sealing), ..OpenOptions::create() };
    assert_eq!(open(wish(Sealing::VerityOrImmutable)), Sealing::VerityOrImmutable);
    assert_eq!(open(OpenOptions::create()), Sealing::VerityOrImmutable);
    assert_eq!(open(wish(Sealing::Verity)), Sealing::Verity);
    assert_eq!(open(OpenOptions::write()), Sealing::VerityOrImmutable);
}

#[test]
fn a_store_can_be_unsealed_to_be_removed() {
    let directory = Unsealed(TempDir::new().unwrap());
    let options =
        OpenOptions { sealing: Some(Sealing::VerityOrImmutable), ..OpenOptions::create() };
    let store = Store::open(directory.0.path(), crate::Who::this_process(), options).unwrap();
    import(&store, "one", &sample("one", 2)).unwrap();
    store.unseal().unwrap();
    assert_eq!(store.unseal().unwrap(), 0);
    std::fs::remove_dir_all(directory.0.path()).unwrap();
    std::fs::create_dir(directory.0.path()).unwrap();
}
