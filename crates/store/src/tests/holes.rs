//! Runs of zeros take no space on the disk, and leave bytes and ids unchanged.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use tempfile::TempDir;

use image::verity::{Algorithm, digest};

use super::{Random, check, check_clean, import, import_as, open, sample};
use crate::{Form, Store};

const MIB: usize = 1 << 20;

/// Returns the bytes that the store takes on the disk.
fn room(store: &Store) -> u64 {
    fn add(path: &std::path::Path) -> u64 {
        let entries = fs::read_dir(path).unwrap().map(|it| it.unwrap());
        let sizes = entries.map(|entry| {
            let metadata = entry.metadata().unwrap();
            metadata.blocks() * 512 + if metadata.is_dir() { add(&entry.path()) } else { 0 }
        });
        sizes.sum()
    }
    add(store.path())
}

/// Returns files with zeros at various offsets. Each has the maximum number of bytes that may be outside of holes.
fn files() -> Vec<(Vec<u8>, usize)> {
    let zeros = |length: usize| vec![0; length];
    let data = |length: usize| vec![7; length];
    let mut all = vec![
        (zeros(64 << 10), 0),
        (zeros((64 << 10) - 1), 64 << 10),
        (zeros(3 * MIB + 5), 4096),
        ([data(1), zeros(3 * MIB)].concat(), (64 << 10) + 4096),
        ([zeros(3 * MIB), data(1)].concat(), 4096),
        ([zeros(MIB), data(100_000), zeros(MIB + 77), data(3), zeros(MIB)].concat(), 400 << 10),
        (data(MIB), MIB),
    ];
    let mut random = Random::new(5);
    for _ in 0..20 {
        let mut bytes = Vec::new();
        let mut most = 0;
        for _ in 0..=random.below(6) {
            let length = usize::try_from(random.below(400_000)).unwrap();
            bytes.extend(vec![u8::try_from(random.below(2)).unwrap(); length]);
        }
        for piece in bytes.chunks(64 << 10) {
            let is_hole = piece.len() == 64 << 10 && piece.iter().all(|it| *it == 0);
            most += if is_hole { 0 } else { 64 << 10 };
        }
        all.push((bytes, most));
    }
    all
}

#[test]
fn runs_of_zeros_are_holes() {
    for pieces in [usize::MAX, 100_000, 5000] {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        for (number, (bytes, most)) in files().into_iter().enumerate() {
            let transaction = store.begin().unwrap();
            let id = match pieces {
                usize::MAX => transaction.object(&bytes).unwrap(),
                _ => {
                    let mut draft = transaction.draft().unwrap();
                    bytes.chunks(pieces).for_each(|it| draft.write_all(it).unwrap());
                    draft.finish().unwrap()
                }
            };
            assert_eq!(id, digest(Algorithm::Sha256, &bytes).into(), "{number}");
            transaction.commit().unwrap();
            let mut read = Vec::new();
            store.object(&id).unwrap().read_to_end(&mut read).unwrap();
            assert!(read == bytes, "{number}: other bytes");
            let path = super::damage::object_path(directory.path(), &bytes);
            let metadata = fs::metadata(path).unwrap();
            assert_eq!(metadata.size(), bytes.len() as u64);
            let taken = usize::try_from(metadata.blocks() * 512).unwrap();
            assert!(taken <= most, "{number}: {taken} bytes, at most {most}");
        }
        assert!(store.fsck(crate::FsckOptions { threads: 1 }).unwrap().is_sound());
    }
}

/// `gc` also punches holes into devices. It must not disturb these holes, and they are not damage.
#[test]
fn holes_of_zeros_are_none_of_gc() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let mut kept = sample("kept", 3);
    let mut gone = sample("gone", 3);
    let zeros =
        |last: u8| [vec![0; 8 * MIB], vec![last; 5000], vec![0; 8 * MIB], vec![last]].concat();
    kept.insert("zeros-kept".to_owned(), zeros(1));
    gone.insert("zeros-gone".to_owned(), zeros(2));
    let both: super::Files = kept.clone().into_iter().chain(gone.clone()).collect();
    import_as(&store, "both", &both, Form::Packed).unwrap();
    assert!(room(&store) < 4 * MIB as u64, "{}", room(&store));
    check_clean(&store).unwrap();
    import_as(&store, "kept", &kept, Form::Packed).unwrap();
    store.remove_ref(&super::name("both")).unwrap();
    check_clean(&store).unwrap();
    assert!(room(&store) < 4 * MIB as u64, "{}", room(&store));
    for (_, bytes) in kept.iter().filter(|it| it.1.len() > 64) {
        let mut read = Vec::new();
        store
            .object(&digest(Algorithm::Sha256, bytes).into())
            .unwrap()
            .read_to_end(&mut read)
            .unwrap();
        assert!(read == *bytes);
    }
    // A byte in a hole is damage, as anywhere else.
    let objects = TempDir::new().unwrap();
    let store = open(objects.path());
    import(&store, "kept", &kept).unwrap();
    assert!(room(&store) < 4 * MIB as u64);
    let path = super::damage::object_path(objects.path(), &kept["zeros-kept"]);
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(&path, permissions).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"x", 5 * MIB as u64).unwrap();
    check(&store).unwrap_err();
}

/// Data gives the same object, and reads the same, whether it is written as bytes or as data and holes of a file.
#[test]
fn holes_of_files_become_holes_of_objects() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder.path().join("store"));
    let transaction = store.begin().unwrap();
    for (at, (bytes, _)) in files().into_iter().enumerate() {
        let path = folder.path().join(format!("file{at}"));
        let file = fs::File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        for (piece, place) in bytes.chunks(4096).zip((0_u64..).step_by(4096)) {
            if piece.iter().any(|byte| *byte != 0) {
                file.write_all_at(piece, place).unwrap();
            }
        }
        file.set_len(bytes.len() as u64).unwrap();
        let (mut read, mut holes, mut draft) = (Vec::new(), 0, transaction.draft().unwrap());
        crate::walk::parts(&file, bytes.len() as u64, &mut Vec::new(), |part| match part {
            crate::walk::FilePart::Data(data) => {
                read.extend_from_slice(data);
                draft.write_all(data)
            }
            crate::walk::FilePart::Hole(count) => {
                read.resize(read.len() + usize::try_from(count).unwrap(), 0);
                holes += count;
                draft.zeros(count)
            }
        })
        .unwrap();
        assert!(read == bytes, "file {at}");
        let on_disk = file.metadata().unwrap().blocks() * 512;
        assert!(holes + on_disk + 8192 >= bytes.len() as u64 || holes == 0, "file {at}: {holes}");
        let object = draft.finish().unwrap();
        assert_eq!(object, digest(Algorithm::Sha256, &bytes).into(), "file {at}");
        // A file that became shorter is an error, not a hole.
        let longer = bytes.len() as u64 + 1;
        let result = crate::walk::parts(&file, longer, &mut Vec::new(), |_| Ok(()));
        assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof, "file {at}");
    }
    // The data is passed in parts, so that the caller can stop.
    let path = folder.path().join("large");
    fs::write(&path, vec![1; 3 * MIB]).unwrap();
    let mut asked = 0;
    let file = fs::File::open(&path).unwrap();
    let stopped = crate::walk::parts(&file, 3 << 20, &mut Vec::new(), |_| {
        asked += 1;
        if asked < 3 { Ok(()) } else { Err(std::io::Error::other("stop")) }
    });
    assert_eq!((stopped.unwrap_err().to_string(), asked), ("stop".to_owned(), 3));
    let stopped = transaction.share(&file, 3 << 20, || Err(std::io::Error::other("stop")));
    assert!(stopped.is_err() || stopped.is_ok_and(|it| it.is_none()));
}

/// A reader of an object that is a sparse file does not read the holes.
#[test]
fn holes_of_objects_are_not_read() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder.path().join("store"));
    let transaction = store.begin().unwrap();
    let mut draft = transaction.draft().unwrap();
    let size = (1_u64 << 40) + 5;
    draft.zeros(1 << 39).unwrap();
    draft.write_all(b"data").unwrap();
    draft.zeros(size - (1 << 39) - 5).unwrap();
    draft.write_all(b"!").unwrap();
    let object = draft.finish().unwrap();
    transaction.commit().unwrap();
    let reader = store.object(&object).unwrap();
    assert_eq!(reader.size(), size);
    assert!(reader.file().is_some(), "the kernel can copy it");
    let read = |offset: u64, length: usize| {
        let mut bytes = vec![1; length];
        reader.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    assert_eq!(read((1 << 39) - 2, 8), b"\0\0data\0\0");
    assert_eq!(read(size - 3, 3), b"\0\0!");
    assert_eq!(read(1 << 38, MIB), vec![0; MIB]);
    assert_eq!(reader.read_at(&mut [0; 9], size).unwrap(), 0);
}
