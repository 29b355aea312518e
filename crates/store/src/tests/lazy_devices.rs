//! Lazy devices are created, filled and sealed, and reported by all functions that inspect a store.

use std::fs;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use image::digest::Digest;
use image::gzip::Start;
use image::lazy::{BlobKind, Head, SpanPlace, UNIT, WindowGroup};
use image::verity::{Algorithm, DeviceId, ImageId, digest};
use tempfile::TempDir;

use super::{NOW, import_as, open, sample};
use crate::{
    Damage, Form, FsckOptions, IndexWindows, LazyDeviceError, LazyDeviceFile, LazyDeviceFill,
    LazyDeviceState, Meta, OpenOptions, Store, StoreItem, TransactionError,
};

const LENGTH: u64 = 1 << 20;

/// Some data between holes.
fn content() -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(LENGTH).unwrap()];
    bytes[300_000..400_000].fill(7);
    bytes
}

fn device() -> DeviceId {
    digest(Algorithm::Sha256, &content()).into()
}

fn path(directory: &TempDir, file: LazyDeviceFile) -> PathBuf {
    directory.path().join("lazy").join(file.file_name())
}

fn damage(store: &Store) -> Vec<Damage> {
    let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
    report.damage.into_iter().map(|it| it.0).collect()
}

fn is_damaged(store: &Store, why: &str) -> bool {
    let device = StoreItem::LazyDevice(LazyDeviceFile::Device(device()));
    matches!(damage(store).as_slice(), [Damage::Bad(item, text)] if *item == device && text.contains(why))
}

/// Makes a native image whose only device is a lazy one with the right bytes.
fn image_over_lazy_device(
    directory: &TempDir,
    store: &Store,
    is_sealed: bool,
) -> (ImageId, DeviceId) {
    let image = import_as(store, "one", &sample("one", 12), Form::Packed).unwrap();
    let device = store.open_image(&image).unwrap().devices[0].id;
    let data = directory.path().join("data");
    let bytes = fs::read(data.join(device.to_string())).unwrap();
    let filling = store.create_lazy_device(&device, bytes.len() as u64).unwrap();
    filling.write_at(&bytes, 0).unwrap();
    if is_sealed {
        filling.seal().unwrap();
    }
    fs::remove_file(data.join(device.to_string())).unwrap();
    fs::remove_file(data.join(format!("{device}.index"))).unwrap();
    (image, device)
}

/// Opens the device for filling, as soon as child processes of other tests no longer hold its lock.
fn eventually_filled<'s>(store: &'s Store) -> LazyDeviceFill<'s> {
    let mut filling = None;
    super::eventually(|| {
        filling = store.fill_lazy_device(&device()).unwrap();
        filling.is_some()
    });
    filling.unwrap()
}

#[test]
fn a_device_is_made_filled_and_sealed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let device = device();
    assert_eq!(store.lazy_devices.stat(&device).unwrap(), None);
    assert!(store.fill_lazy_device(&device).unwrap().is_none());
    let filling = store.create_lazy_device(&device, LENGTH).unwrap();
    let info = store.lazy_devices.stat(&device).unwrap().unwrap();
    assert_eq!((info.state, info.bytes, info.on_disk), (LazyDeviceState::Partial, LENGTH, 0));
    assert!(matches!(store.create_lazy_device(&device, LENGTH), Err(LazyDeviceError::Exists(_))));
    assert!(store.fill_lazy_device(&device).unwrap().is_none(), "one fills it");
    assert!(matches!(filling.write_at(&[1], LENGTH), Err(LazyDeviceError::Outside { .. })));
    drop(filling);

    let filling = store.fill_lazy_device(&device).unwrap().unwrap();
    filling.write_at(&content()[300_000..400_000], 300_000).unwrap();
    filling.seal().unwrap();
    let again = open(directory.path());
    let (file, info) = again.lazy_devices.open(&device).unwrap().unwrap();
    assert_eq!(info.state, LazyDeviceState::Sealed);
    assert!(info.on_disk > 0 && info.on_disk < LENGTH, "{info:?}");
    let mut bytes = vec![1; content().len()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == content());
    let mode = file.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o444);
    let refused = again.fill_lazy_device(&device).unwrap_err();
    assert!(
        matches!(refused, LazyDeviceError::Ended { state: LazyDeviceState::Sealed, .. }),
        "{refused}"
    );
    assert!(damage(&again).is_empty());
}

#[test]
fn what_is_not_as_named_is_condemned() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let filling = store.create_lazy_device(&device(), LENGTH).unwrap();
    let actual: DeviceId = digest(Algorithm::Sha256, &vec![0; content().len()]).into();
    match filling.seal() {
        Err(LazyDeviceError::Mismatch { actual: told, .. }) => assert_eq!(*told, actual),
        other => panic!("{other:?}"),
    }
    let info = store.lazy_devices.stat(&device()).unwrap().unwrap();
    assert_eq!(info.state, LazyDeviceState::Condemned);
    assert!(matches!(store.fill_lazy_device(&device()), Err(LazyDeviceError::Ended { .. })));
}

#[test]
fn what_was_condemned_while_it_was_filled_is_not_sealed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let filling = store.create_lazy_device(&device(), LENGTH).unwrap();
    filling.write_at(&content(), 0).unwrap();
    filling.check_written().unwrap();
    assert!(filling.condemn().unwrap());
    assert!(!filling.condemn().unwrap(), "it is not new");
    assert!(matches!(filling.check_written(), Err(LazyDeviceError::Lost(id)) if id == device()));
    // Sealing fails although all bytes are right.
    assert!(matches!(filling.seal(), Err(LazyDeviceError::Lost(id)) if id == device()));
    let info = store.lazy_devices.stat(&device()).unwrap().unwrap();
    assert_eq!(info.state, LazyDeviceState::Condemned);
}

#[test]
fn what_is_condemned_makes_way() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    store.create_lazy_device(&device(), LENGTH).unwrap().seal().unwrap_err();
    assert!(is_damaged(&store, "condemned"));
    let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
    let opened = store.lazy_devices.open(&device()).unwrap();
    assert_eq!(store.remove_damaged(&report).unwrap(), 0, "it is in use");
    drop(opened);
    super::eventually(|| store.remove_damaged(&report).unwrap() == 1);
    let filling = store.create_lazy_device(&device(), LENGTH).unwrap();
    filling.write_at(&content(), 0).unwrap();
    filling.seal().unwrap();
    assert!(damage(&store).is_empty());
}

#[test]
fn a_file_that_lost_its_name_is_not_sealed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    for is_right in [true, false] {
        let first = store.create_lazy_device(&device(), LENGTH).unwrap();
        for file in [LazyDeviceFile::Device(device()), LazyDeviceFile::State(device())] {
            fs::remove_file(path(&directory, file)).unwrap();
        }
        let second = store.create_lazy_device(&device(), LENGTH).unwrap();
        if is_right {
            first.write_at(&content(), 0).unwrap();
        }
        assert!(matches!(first.seal(), Err(LazyDeviceError::Replaced(id)) if id == device()));
        assert_eq!(
            store.lazy_devices.stat(&device()).unwrap().unwrap().state,
            LazyDeviceState::Partial
        );
        // A device whose name is gone is not sealed either.
        fs::remove_file(path(&directory, LazyDeviceFile::Device(device()))).unwrap();
        assert!(matches!(second.seal(), Err(LazyDeviceError::Replaced(_))));
    }
}

#[test]
fn a_device_that_a_crash_left_protected_is_filled_further() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    drop(store.create_lazy_device(&device(), LENGTH).unwrap());
    let file = path(&directory, LazyDeviceFile::Device(device()));
    let mode = || fs::metadata(&file).unwrap().permissions().mode() & 0o777;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).unwrap();
    let filling = eventually_filled(&store);
    assert_eq!(mode(), 0o600);
    filling.write_at(&content(), 0).unwrap();
    filling.seal().unwrap();
    assert_eq!(mode(), 0o444);
    assert!(store.fill_lazy_device(&device()).is_err());
    assert_eq!(mode(), 0o444);
}

#[test]
fn garbage_is_decided_once_for_both_files() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let filling = store.create_lazy_device(&device(), LENGTH).unwrap();
    let (filling, asked) = (std::cell::Cell::new(Some(filling)), std::cell::Cell::new(false));
    let is_needed = |_: &DeviceId| {
        if asked.replace(true) {
            // The filler ends between the checks of the two files.
            drop(filling.take());
        }
        false
    };
    let garbage = store.lazy_devices.garbage(is_needed, |_| false, |_| false);
    assert_eq!(garbage.unwrap(), []);
}

#[test]
fn an_image_is_told_whose_device_is_not_what_it_needs() {
    type Spoil = fn(&Path, &Store, &DeviceId);
    let cases: [(bool, &str, Spoil); 4] = [
        (false, "its data may be incomplete", |_, _, _| {}),
        (false, "it is condemned", |_, store, id| {
            let filling = store.fill_lazy_device(id).unwrap().unwrap();
            filling.write_at(&[1; 4096], 0).unwrap();
            filling.seal().unwrap_err();
        }),
        (true, "its digest is", |shelf, _, id| {
            let file = shelf.join(id.to_string());
            let length = fs::metadata(&file).unwrap().len();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
            fs::write(&file, vec![1; usize::try_from(length).unwrap()]).unwrap();
        }),
        (false, "as an image states", |shelf, store, id| {
            for file in [LazyDeviceFile::Device(*id), LazyDeviceFile::State(*id)] {
                fs::remove_file(shelf.join(file.file_name())).unwrap();
            }
            drop(store.create_lazy_device(id, 4096).unwrap());
        }),
    ];
    for (is_sealed, expected, spoil) in cases {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        let (image, device) = image_over_lazy_device(&directory, &store, is_sealed);
        spoil(&directory.path().join("lazy"), &store, &device);
        let all = store.fsck(FsckOptions { threads: 1 }).unwrap();
        let one = store.verify(&image, FsckOptions { threads: 1 }).unwrap();
        for report in [all, one] {
            let told: Vec<_> =
                report.damage.iter().filter(|it| matches!(it.0, Damage::Bad(..))).collect();
            match told.as_slice() {
                [(Damage::Bad(StoreItem::LazyDevice(file), why), harm)] => {
                    assert!(*file.device() == device && why.contains(expected), "{why}");
                    assert_eq!(harm[0].image, image);
                }
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
    // As long as a filler can provide the remaining bytes, a full check reports no damage of the device.
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (_, device) = image_over_lazy_device(&directory, &store, false);
    let _filling = store.fill_lazy_device(&device).unwrap().unwrap();
    assert!(damage(&store).iter().all(|it| matches!(it, Damage::Missing(_))));
}

#[test]
fn a_store_without_lazy_devices_stays_what_it_is() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let meta = || fs::read(directory.path().join("meta")).unwrap();
    let before = meta();
    assert!(!String::from_utf8_lossy(&before).contains("lazy"));
    super::import(&store, "one", &sample("one", 3)).unwrap();
    store.gc(NOW).unwrap();
    assert!(meta() == before && !directory.path().join("lazy").exists());

    drop(store.create_lazy_device(&device(), LENGTH).unwrap());
    let after = Meta::decode(&meta()).unwrap();
    assert!(after.has_lazy_devices && after.unknown_to_write.is_empty());
    assert!(String::from_utf8_lossy(&meta()).contains(r#""needed_to_write":["lazy-devices"]"#));
    let mode = fs::metadata(directory.path().join("lazy")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let noted = meta();
    store.gc(NOW).unwrap();
    drop(store.create_lazy_device(&device(), LENGTH).unwrap());
    assert!(meta() == noted);
}

#[test]
fn gc_keeps_what_is_open_or_an_image_needs() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (_, needed) = image_over_lazy_device(&directory, &store, false);
    let filling = store.create_lazy_device(&device(), LENGTH).unwrap();
    let told = |store: &Store| -> Vec<StoreItem> {
        let garbage = store.plan_gc(NOW).unwrap().garbage.into_iter().map(|it| it.0);
        garbage.filter(|it| matches!(it, StoreItem::LazyDevice(_))).collect()
    };
    assert_eq!(told(&store), []);
    drop(filling);
    let both = [LazyDeviceFile::Device(device()), LazyDeviceFile::State(device())]
        .map(StoreItem::LazyDevice);
    assert_eq!(told(&store), both);
    // The device is also removed while an import runs, because imports do not rely on such devices.
    let running = store.begin().unwrap();
    store.gc(NOW).unwrap();
    drop(running);
    for file in [LazyDeviceFile::Device(device()), LazyDeviceFile::State(device())] {
        assert!(!path(&directory, file).exists());
    }
    assert!(store.lazy_devices.stat(&needed).unwrap().is_some());

    // These files are left by a crash while a device is created or removed.
    drop(store.create_lazy_device(&device(), LENGTH).unwrap());
    fs::remove_file(path(&directory, LazyDeviceFile::Device(device()))).unwrap();
    assert_eq!(told(&store), [StoreItem::LazyDevice(LazyDeviceFile::State(device()))]);
    assert!(store.create_lazy_device(&device(), 4096).is_ok(), "it is in nobody's way");

    store.remove_ref(&"one".parse().unwrap()).unwrap();
    store.gc(NOW).unwrap();
    assert!(fs::read_dir(directory.path().join("lazy")).unwrap().next().is_none());
}

#[test]
fn fsck_checks_states_and_hashes_what_is_sealed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let filling = store.create_lazy_device(&device(), LENGTH).unwrap();
    assert!(damage(&store).is_empty(), "nothing is promised of its bytes");
    filling.write_at(&content(), 0).unwrap();
    filling.seal().unwrap();
    let file = path(&directory, LazyDeviceFile::Device(device()));
    let state = path(&directory, LazyDeviceFile::State(device()));
    let good = fs::read(&state).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&file, vec![1; content().len()]).unwrap();
    assert!(is_damaged(&store, "its digest is"));
    fs::write(&file, b"short").unwrap();
    assert!(is_damaged(&store, "it has 5 bytes, not 1048576"));
    fs::write(&file, content()).unwrap();
    assert!(damage(&store).is_empty());
    fs::remove_file(&state).unwrap();
    assert!(is_damaged(&store, "has no state"));
    fs::write(&state, &good[1..]).unwrap();
    assert!(is_damaged(&store, "its checksum is wrong"));
    fs::write(directory.path().join("lazy/other"), b"").unwrap();
    assert!(
        matches!(damage(&store).as_slice(), [_, Damage::Stray(it)] if it.ends_with("lazy/other"))
    );
    fs::remove_file(directory.path().join("lazy/other")).unwrap();
    let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
    assert_eq!(store.remove_damaged(&report).unwrap(), 1);
    assert!(damage(&store).is_empty() && !file.exists());
}

#[test]
fn an_image_is_not_verified_by_bytes_that_nobody_knows() {
    for is_sealed in [false, true] {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        let (image, device) = image_over_lazy_device(&directory, &store, is_sealed);
        // The layer's objects were in the device that is gone.
        let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
        let (missing, told): (Vec<_>, Vec<_>) =
            report.damage.iter().partition(|it| matches!(it.0, Damage::Missing(_)));
        assert!(!missing.is_empty());
        assert_eq!(told.len(), usize::from(!is_sealed), "{told:?}");
        for (_, harm) in told {
            assert_eq!(harm[0].image, image);
        }
        let report = store.verify(&image, FsckOptions { threads: 1 }).unwrap();
        let told: Vec<_> = report.damage.iter().map(|it| &it.0).collect();
        match told.as_slice() {
            [] => assert!(is_sealed),
            [Damage::Bad(StoreItem::LazyDevice(file), _)] => {
                assert!(!is_sealed && *file.device() == device);
                assert_eq!(report.damage[0].1[0].image, image);
            }
            other => panic!("{other:?}"),
        }
        // The image cannot be mounted yet.
        assert!(store.open_image(&image).is_err());
    }
}

#[test]
fn du_and_memory_count_it() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (image, device) = image_over_lazy_device(&directory, &store, true);
    let on_disk = store.lazy_devices.stat(&device).unwrap().unwrap().on_disk;
    let used = store.du().unwrap();
    assert!(
        used.lazy_devices >= on_disk && used.data == used.lazy_devices && on_disk > 0,
        "{used:?}"
    );
    assert!(used.images[0].own >= on_disk, "{used:?}");

    fs::read(path(&directory, LazyDeviceFile::Device(device))).unwrap();
    let used = store.memory().unwrap().finish().unwrap();
    let of = used.images.iter().find(|it| it.image == image).unwrap();
    assert!(of.bytes - of.metadata > 0, "{used:?}");
}

#[test]
fn a_store_for_reading_gets_none() {
    let directory = TempDir::new().unwrap();
    drop(open(directory.path()));
    let store =
        Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    let refused = store.create_lazy_device(&device(), LENGTH);
    assert!(matches!(refused, Err(LazyDeviceError::ReadOnly(_))));
    assert!(matches!(store.fill_lazy_device(&device()), Err(LazyDeviceError::ReadOnly(_))));
}

/// The index of a tar that names a device of chunks agrees in all fields that two indexes of the same tar have in common.
/// Whichever head comes second is refused.
#[test]
fn an_index_cannot_claim_a_device_of_chunks() {
    let (blob, diff_id) = (Digest::sha256(b"blob"), Digest::sha256(b"tar"));
    let spans = vec![SpanPlace { start: Start::Member, packed: 0, unpacked: 0, padding: 0 }];
    let chunk = Digest::sha256(&[7; 8192]).as_bytes().try_into().unwrap();
    let kind = BlobKind::GzipChunks { data_end: 900 };
    let of_chunks =
        Head::of_chunks(blob, 1000, kind, diff_id, 8192, spans.clone(), vec![chunk]).unwrap();
    let groups = vec![WindowGroup { first: 0, bytes: 7 }];
    let of_tar = Head { kind: BlobKind::Gzip, groups, ..of_chunks.clone() };
    let of_zstd = Head { kind: BlobKind::Zstd { data_end: 900 }, ..of_tar.clone() };
    let chunks = (&of_chunks, Digest::sha256(b"a"), Vec::new());
    for other in [&of_tar, &of_zstd] {
        let other = (other, Digest::sha256(b"b"), b"windows".to_vec());
        for (first, second) in [(&chunks, &other), (&other, &chunks)] {
            let directory = TempDir::new().unwrap();
            let store = open(directory.path());
            let claim = |(head, manifest, windows): &(&Head, Digest, Vec<u8>)| {
                let import = store.begin().unwrap();
                let windows = IndexWindows::Groups(windows.clone());
                import.lazy_device((*head).clone(), windows, *manifest).unwrap();
                import.commit().map(drop)
            };
            claim(first).unwrap();
            let refused = claim(second).unwrap_err();
            let is_right = matches!(
                &refused,
                TransactionError::LazyDevice(LazyDeviceError::OtherIndex(id)) if *id == of_chunks.device
            );
            assert!(is_right, "{refused:?}");
            // The first claim is unchanged, and another image may have the same one.
            let (head, manifest, _) = first;
            let found = store.lazy_devices.index_for(&head.device, Some(manifest)).unwrap();
            assert!(found.unwrap().0 == **head);
            claim(&(head, Digest::sha256(b"c"), first.2.clone())).unwrap();
        }
    }
}

/// Returns the bytes of a device of six units, and an index for it. The tar ends 700 bytes before the device.
fn indexed() -> (Vec<u8>, Head) {
    let bytes: Vec<_> = (0..5 * UNIT + 9 * 512).map(|it| u8::try_from(it % 251).unwrap()).collect();
    let id = digest(Algorithm::Sha256, &bytes).into();
    let head = super::lazy::head(id, &bytes, Digest::sha256(b"tar"), b"");
    let tar = bytes.len() - 700;
    (bytes.clone(), Head { tar_bytes: tar as u64, tail: bytes[tar..].to_vec(), ..head })
}

#[test]
fn a_part_of_a_tar_is_read_if_all_of_its_units_are_right() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (bytes, head) = indexed();
    let check = |part: Range<u64>, is_there: bool| {
        let found = store.lazy_tar_part(&head, &part).unwrap();
        let [start, end] =
            [part.start, part.end.min(head.tar_bytes)].map(|it| usize::try_from(it).unwrap());
        assert!(found.as_deref() == is_there.then_some(&bytes[start..end]), "{part:?}");
        // A quick look finds the same holes.
        assert!(store.may_have_lazy_tar_part(&head, &part).unwrap() || !is_there, "{part:?}");
    };
    let may_have = |part| store.may_have_lazy_tar_part(&head, &part).unwrap();
    let last = 5 * UNIT..head.device_bytes;
    check(0..1, false);
    let filling = store.create_lazy_device(&head.device, head.device_bytes).unwrap();
    check(0..1, false);
    let fill = |range: Range<u64>| {
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        filling.write_at(&bytes[start..end], range.start).unwrap();
    };
    fill(UNIT..3 * UNIT);
    fill(last.clone());
    for (part, is_there) in [
        (UNIT..3 * UNIT, true),
        (UNIT + 5..UNIT + 6, true),
        (2 * UNIT - 1..2 * UNIT + 1, true),
        (UNIT - 1..UNIT + 1, false),
        (3 * UNIT - 1..3 * UNIT + 1, false),
        (4 * UNIT..head.device_bytes, false),
        // The tail is compared, and not a part of the tar.
        (last.clone(), true),
        (head.tar_bytes - 1..head.device_bytes, true),
    ] {
        check(part, is_there);
    }
    // A hole is found without its digest.
    for (part, is_there) in [
        (0..1, false),
        (UNIT - 1..UNIT + 1, false),
        (UNIT..3 * UNIT, true),
        (UNIT..3 * UNIT + 1, false),
        (UNIT..head.device_bytes, false),
        (last.clone(), true),
        (head.tar_bytes..head.tar_bytes + 1, true),
    ] {
        assert_eq!(may_have(part.clone()), is_there, "{part:?}");
    }
    // The disk has changed a byte since then, of the tail as well.
    let file = path(&directory, LazyDeviceFile::Device(head.device));
    let file = fs::File::options().write(true).open(file).unwrap();
    file.write_all_at(&[bytes[0] ^ 1], 2 * UNIT + 9).unwrap();
    file.write_all_at(&[9], head.device_bytes - 1).unwrap();
    check(2 * UNIT..2 * UNIT + 1, false);
    assert!(may_have(2 * UNIT..2 * UNIT + 1), "it is there, and wrong");
    check(UNIT..2 * UNIT, true);
    check(last, false);
    drop(file);
    fill(0..head.device_bytes);
    check(0..head.device_bytes, true);
    filling.condemn().unwrap();
    check(0..head.device_bytes, false);
    drop(filling);
    super::eventually(|| {
        store.gc(NOW).unwrap();
        store.lazy_devices.stat(&head.device).unwrap().is_none()
    });
    check(0..1, false);
    let filling = store.create_lazy_device(&head.device, head.device_bytes).unwrap();
    filling.write_at(&bytes, 0).unwrap();
    filling.seal().unwrap();
    check(0..head.device_bytes, true);
}

/// However many parts are read, a filler that holds readers off sees no other program that has the device open.
#[test]
fn readers_of_parts_do_not_look_like_another_program() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (bytes, head) = indexed();
    let filling = store.create_lazy_device(&head.device, head.device_bytes).unwrap();
    filling.write_at(&bytes, 0).unwrap();
    let is_used = || kernel::lease::in_use(filling.file().as_fd()).unwrap();
    let (is_over, read) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        // If the test fails, the readers end as well.
        let _ends = OnDrop(|| is_over.store(true, Ordering::Relaxed));
        for _ in 0..8 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(store.lazy_tar_part(&head, &(0..head.tar_bytes)).unwrap().is_some());
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Readers that are not held off do look like one.
        let mut seen = 0;
        super::eventually(|| {
            seen += usize::from(is_used());
            seen > 20
        });
        let mut used = 0;
        for _ in 0..100 {
            let before = read.load(Ordering::Relaxed);
            let held_off = filling.hold_readers_off().unwrap();
            used += usize::from(is_used());
            drop(held_off);
            // Readers continue.
            super::eventually(|| read.load(Ordering::Relaxed) > before);
        }
        // A child process of another test may have inherited a descriptor, until it runs its program.
        assert!(used < 10, "{used}");
    });
}

/// A pull syncs files while it has the lock of the directory. A mount does not wait for it.
#[test]
fn a_filler_holds_readers_off_while_a_pull_syncs_files() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (bytes, head) = indexed();
    let filling = store.create_lazy_device(&head.device, head.device_bytes).unwrap();
    filling.write_at(&bytes, 0).unwrap();
    let lock = fs::File::open(directory.path().join("lazy")).unwrap();
    lock.lock().unwrap();
    std::thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        scope.spawn(|| {
            let sender = sender;
            drop(filling.hold_readers_off().unwrap());
            sender.send(()).unwrap();
        });
        let done = receiver.recv_timeout(std::time::Duration::from_secs(20));
        // If the test fails, the thread ends as well.
        drop(lock);
        assert!(done.is_ok(), "it waits for the lock");
    });
    assert!(store.lazy_tar_part(&head, &(0..head.tar_bytes)).unwrap().is_some());
}

/// Runs a function at the end, also if the test fails.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
