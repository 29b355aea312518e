//! Objects in pieces that do not match their index, and checks while the lock is held.

mod kept_index;
mod start;
mod volumes;

use image::verity::DeviceId;

use super::data::id;
use super::pieces::{bytes_of, import_pieces};
use super::{check_clean, import_as, open, sample};
use crate::{Damage, Form, FsckOptions, Store};

const ONE_THREAD: FsckOptions = FsckOptions { threads: 1 };

/// Changes the only record of the only device, with its hashes corrected. Returns the device.
fn change_record(store: &Store, change: impl Fn(&mut crate::shelf::devices::Record)) -> DeviceId {
    let indexes = store.devices.indexes().unwrap();
    let (device, index) = indexes.first_key_value().unwrap();
    let mut records = index.records.clone();
    assert_eq!((indexes.len(), records.len()), (1, 1));
    change(&mut records[0]);
    let _lock = store.lock_exclusive().unwrap();
    store.devices.drop_entries(device, index, &index.entries, &records).unwrap();
    *device
}

#[test]
fn an_object_is_compared_with_its_pieces() {
    let bytes = bytes_of("abc.d-e");
    let changes: [fn(&mut crate::shelf::devices::Record); 4] = [
        // All pieces are sound, but in the wrong order.
        |record| record.pieces.swap(0, 1),
        |record| record.pieces.swap(2, 3),
        |record| record.sha256[0] ^= 1,
        |record| {
            record.pieces[3].len += 1 << 52;
            record.size += 1 << 52;
        },
    ];
    for change in changes {
        let folder = tempfile::tempdir().unwrap();
        let store = open(&folder.path().join("store"));
        let image = import_pieces(&store, "one", &[("file", "abc.d-e")]).unwrap();
        check_clean(&store).unwrap();
        let device = change_record(&store, change);
        for report in [store.fsck(ONE_THREAD), store.verify(&image, ONE_THREAD)] {
            let report = report.unwrap();
            let [(damage, harm)] = &report.damage[..] else { panic!("{:#?}", report.damage) };
            assert!(
                matches!(damage, Damage::Stored { object, device: told, .. } if (*object, *told) == (id(&bytes), device)),
                "{damage:?}"
            );
            assert_eq!(harm.len(), 1);
            assert_eq!((harm[0].image, &harm[0].paths[..]), (image, &[b"/file".to_vec()][..]));
        }
        let report = store.fsck(ONE_THREAD).unwrap();
        assert_eq!(store.remove_damaged(&report).unwrap(), 1);
        assert!(store.devices.find_object(&id(&bytes)).unwrap().is_none());
        import_pieces(&store, "one", &[("file", "abc.d-e")]).unwrap();
        let mut read = Vec::new();
        std::io::Read::read_to_end(&mut store.object(&id(&bytes)).unwrap(), &mut read).unwrap();
        assert!(read == bytes);
        check_clean(&store).unwrap();
    }
}

#[test]
fn layers_are_made_again_while_the_store_is_locked() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("store"));
    import_as(&store, "one", &sample("one", 12), Form::Packed).unwrap();
    let layers = store.layers.diff_ids().unwrap();
    assert!(!layers.is_empty());
    let _lock = store.lock_exclusive().unwrap();
    for layer in &layers {
        // In an earlier version, this deadlocked, because the check waited for a lock that its caller held.
        assert!(!store.gives_another_tar(layer).unwrap());
    }
}
