//! Objects in pieces are found, read, mounted, collected and checked.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};

use image::erofs::read::Owners;
use image::erofs::{Native, Placed, Run, write_native};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, XattrsId};
use image::verity::{ImageId, ObjectId};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::damage::{flip, replace};
use super::data::{find_again, id};
use super::{Failure, NOW, Random, check, check_clean, name, open};
use crate::{
    Damage, DeviceKind, Form, FsckOptions, ObjectPiece, OpenOptions, Reference, Seconds, Store,
    StoredDevice, StoredObject, Transaction,
};

/// Length of a piece in these tests, in bytes. The format allows any number of blocks.
const CHUNK: usize = 8192;

/// Makes a file from a pattern: a letter is a piece filled with that letter, a dot a piece of zeros, and `-` begins a
/// short last piece.
pub(super) fn bytes_of(pattern: &str) -> Vec<u8> {
    let (whole, last) = pattern.split_once('-').unwrap_or((pattern, ""));
    let piece = |letter: char, len: usize| -> Vec<u8> {
        match letter {
            '.' => vec![0; len],
            letter => format!("piece {letter} ").bytes().cycle().take(len).collect(),
        }
    };
    let whole = whole.chars().flat_map(|it| piece(it, CHUNK));
    whole.chain(last.chars().flat_map(|it| piece(it, 5000))).collect()
}

/// Adds objects in pieces to a new device. Pieces of zeros, and pieces that are already in a device, are left out.
pub(super) fn pack_pieces(
    import: &Transaction<'_>,
    files: &[Vec<u8>],
) -> Result<StoredDevice, Failure> {
    let mut draft = import.device(DeviceKind::Packed)?;
    let mut here = std::collections::BTreeSet::new();
    for bytes in files {
        let mut pieces: Vec<ObjectPiece> = Vec::new();
        for chunk in bytes.chunks(CHUNK) {
            let len = chunk.len() as u64;
            if chunk.iter().all(|it| *it == 0) {
                match pieces.last_mut() {
                    Some(hole) if hole.object.is_none() => hole.len += len,
                    _ => pieces.push(ObjectPiece { object: None, len }),
                }
                continue;
            }
            let object = id(chunk);
            if import.reuse_piece(&object, len)?.is_none() && here.insert(object) {
                let offset = draft.position();
                draft.write_all(chunk)?;
                draft.align_to(4096)?;
                draft.add(object, Sha256::digest(chunk).into(), offset, len);
            }
            pieces.push(ObjectPiece { object: Some(object), len });
        }
        let sha256 = Sha256::digest(bytes).into();
        draft.add_pieces(id(bytes), sha256, bytes.len() as u64, &pieces);
    }
    Ok(draft.finish()?)
}

/// Adds an image with only files in pieces.
fn add_image(
    import: &Transaction<'_>,
    files: &BTreeMap<String, Vec<u8>>,
) -> Result<ImageId, Failure> {
    let mut builder = Builder::new();
    let mut new = Vec::new();
    for (name, bytes) in files {
        let (object, size) = (id(bytes), bytes.len() as u64);
        if import.reuse_stored(&object, size)?.is_none() {
            new.push(bytes.clone());
        }
        let (object, location) = (Some(object), Location::Object);
        let node = Node::Regular(Content::External { size, object, location });
        let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node)?;
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal)?;
    }
    if !new.is_empty() {
        pack_pieces(import, &new)?;
    }
    let mut devices: Vec<image::erofs::DeviceFile> = Vec::new();
    let mut runs = BTreeMap::new();
    for bytes in files.values() {
        let stored = find_again(import, bytes)?;
        let mut number = |it: &StoredObject| -> u16 {
            let device = image::erofs::DeviceFile { id: it.device, bytes: it.device_bytes };
            let at = devices.iter().position(|it| *it == device).unwrap_or_else(|| {
                devices.push(device);
                devices.len() - 1
            });
            u16::try_from(at).unwrap()
        };
        let first = number(&stored);
        let run = |it: &crate::StoredPiece| Run {
            len: it.len,
            place: it.stored.as_ref().map(|it| (number(it), it.offset)),
        };
        // An object of a single piece is a whole object.
        let one = || vec![Run { len: stored.size, place: Some((first, stored.offset)) }];
        let all = match &stored.pieces {
            Some(pieces) => pieces.iter().map(run).collect(),
            None => one(),
        };
        runs.insert(id(bytes), (all, stored.sha256));
    }
    let find = |id: &ObjectId| {
        let (runs, fingerprint) = runs.get(id)?;
        Some(Placed::Pieces { runs, fingerprint: *fingerprint })
    };
    let native = Native::new(&devices, &find);
    let mut contents = |_: image::tree::Inode<'_>, _, _: &mut dyn std::io::Write| {
        Err(std::io::Error::other("all of it is on devices"))
    };
    let mut draft = import.image()?;
    write_native(&builder.finish(), &native, &mut contents, &mut draft)?;
    Ok(draft.finish()?)
}

pub(super) fn import_pieces(
    store: &Store,
    ref_name: &str,
    files: &[(&str, &str)],
) -> Result<ImageId, Failure> {
    let files = files.iter().map(|(name, it)| ((*name).to_owned(), bytes_of(it))).collect();
    let import = store.begin()?;
    let image = add_image(&import, &files)?;
    let reference = Reference { image, manifest: None, form: Form::Packed, created: Seconds(1) };
    import.set_ref(name(ref_name), reference);
    import.commit()?;
    Ok(image)
}

/// Returns the bytes that devices take on the disk.
fn allocated(store: &Store) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let files = fs::read_dir(store.path().join("data")).unwrap().map(|it| it.unwrap().path());
    let devices = files.filter(|it| it.extension().is_none());
    devices.map(|it| it.metadata().unwrap().blocks() * 512).sum()
}

fn read(store: &Store, object: &ObjectId) -> Vec<u8> {
    let mut bytes = Vec::new();
    store.object(object).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

/// Checks every file of an image through the objects in its tree.
#[track_caller]
fn check_files(store: &Store, image: &ImageId, files: &[(&str, &str)]) {
    let tree = store.tree(&store.open_image(image).unwrap(), Owners::AsWritten).unwrap().tree;
    for (name, pattern) in files {
        let inode = tree.resolve(format!("/{name}").as_bytes()).unwrap();
        let Node::Regular(Content::External { object: Some(object), size, .. }) = inode.node()
        else {
            panic!("{name}: {:?}", inode.node())
        };
        let bytes = bytes_of(pattern);
        assert_eq!((object, size), (id(&bytes), bytes.len() as u64), "{name}");
        assert!(read(store, &object) == bytes, "{name}");
    }
}

const ONE: [(&str, &str); 3] = [("changed", "abcd-e"), ("holes", "..a..b..-."), ("zeros", "...")];
const TWO: [(&str, &str); 3] = [("changed", "abXd-e"), ("moved", "d.cX"), ("short", "ab-a")];

#[test]
fn pieces_are_stored_once_and_zeros_never() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let one = import_pieces(&store, "one", &ONE).unwrap();
    // These are a, b, c, d, 5000 bytes of e in two blocks, and the last block, which identifies the device.
    let expected = 5 * 8192 + 512;
    let devices: Vec<_> =
        store.open_image(&one).unwrap().devices.iter().map(|it| it.bytes).collect();
    assert_eq!(devices, [expected]);
    check_files(&store, &one, &ONE);
    let two = import_pieces(&store, "two", &TWO).unwrap();
    let devices: Vec<_> =
        store.open_image(&two).unwrap().devices.iter().map(|it| it.bytes).collect();
    // X, and the short a.
    assert_eq!(devices.iter().sum::<u64>() - expected, 2 * 8192 + 512);
    check_files(&store, &two, &TWO);
    check(&store).unwrap();
    check_clean(&store).unwrap();
    check_files(&store, &two, &TWO);
    // A file that fits into one piece is a whole object.
    assert_eq!(read(&store, &id(&bytes_of("a"))), bytes_of("a"));
}

#[test]
fn a_reader_reads_across_pieces() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import_pieces(&store, "one", &[("one", "ab")]).unwrap();
    let pattern = ".a..bX-a";
    import_pieces(&store, "two", &[("two", pattern)]).unwrap();
    let bytes = bytes_of(pattern);
    let reader = store.object(&id(&bytes)).unwrap();
    assert_eq!(reader.size(), bytes.len() as u64);
    assert!(reader.file().is_none());
    let mut random = Random::new(7);
    for _ in 0..200 {
        let from = random.below(bytes.len() as u64);
        let len = random.below(bytes.len() as u64 - from + 1);
        let mut got = vec![1; usize::try_from(len).unwrap()];
        reader.read_exact_at(&mut got, from).unwrap();
        let from = usize::try_from(from).unwrap();
        assert!(got == bytes[from..from + got.len()]);
    }
    reader.read_exact_at(&mut [0; 2], bytes.len() as u64 - 1).unwrap_err();
    assert_eq!(reader.read_at(&mut [0; 2], u64::MAX).unwrap(), 0);
}

#[test]
fn an_import_reads_its_own_pieces_before_they_are_committed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import_pieces(&store, "one", &ONE).unwrap();
    let import = store.begin().unwrap();
    let (bytes, more) = (bytes_of("bYa.-e"), bytes_of("Y"));
    pack_pieces(&import, std::slice::from_ref(&bytes)).unwrap();
    let mut got = Vec::new();
    import.read_object(&id(&bytes)).unwrap().read_to_end(&mut got).unwrap();
    assert!(got == bytes);
    assert!(import.reuse_piece(&id(&more), more.len() as u64).unwrap().is_some());
    assert!(import.reuse_piece(&id(&more), 1).unwrap().is_none());
    assert!(store.devices.find_object(&id(&bytes)).unwrap().is_none());
    drop(import);
    assert!(store.devices.find_object(&id(&bytes)).unwrap().is_none());
}

/// The first image is removed. The parts of its device that the second image needs are kept, and the rest is freed.
#[test]
fn gc_keeps_the_pieces_that_others_need() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import_pieces(&store, "one", &ONE).unwrap();
    // Only the names are new: all data is zeros, or is in the device of the other image.
    let files = [("turned", "d.ba-e"), ("zeros", "....")];
    let two = import_pieces(&store, "two", &files).unwrap();
    let before = allocated(&store);
    store.remove_ref(&name("one")).unwrap();
    let (_, swept) = store.gc(NOW).unwrap();
    // Only c is freed.
    assert_eq!((swept.trimmed, before - allocated(&store)), (8192, 8192));
    check_files(&store, &two, &files);
    check_clean(&store).unwrap();
    check_files(&store, &two, &files);
    for gone in ["abcd-e", "c"] {
        assert!(store.devices.find_object(&id(&bytes_of(gone))).unwrap().is_none(), "{gone}");
    }
    // The image is imported again: only the piece c is missing, and all other data is found in devices.
    let one = import_pieces(&store, "one", &ONE).unwrap();
    check_files(&store, &one, &ONE);
    check_files(&store, &two, &files);
    check(&store).unwrap();
    store.remove_ref(&name("one")).unwrap();
    store.remove_ref(&name("two")).unwrap();
    check_clean(&store).unwrap();
    assert_eq!(fs::read_dir(directory.path().join("data")).unwrap().count(), 0);
}

/// The device contains no data of files, but its index lists the pieces of a file.
#[test]
fn what_says_which_pieces_is_kept_as_long_as_the_image() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import_pieces(&store, "one", &ONE).unwrap();
    let files = [("turned", "dcba-e")];
    let two = import_pieces(&store, "two", &files).unwrap();
    assert_eq!(store.open_image(&two).unwrap().devices.len(), 2);
    store.remove_ref(&name("one")).unwrap();
    check_clean(&store).unwrap();
    check_files(&store, &two, &files);
    // If the image of such a device is removed, the device is removed as well.
    import_pieces(&store, "three", &[("again", "abab")]).unwrap();
    let three = store.devices.find_object(&id(&bytes_of("abab"))).unwrap().unwrap().device;
    store.remove_ref(&name("three")).unwrap();
    check_clean(&store).unwrap();
    assert!(!directory.path().join(format!("data/{three}")).exists());
    check_files(&store, &two, &files);
}

/// An import that has found a piece protects it from `gc`.
#[test]
fn pieces_that_an_import_has_found_stay() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import_pieces(&store, "one", &ONE).unwrap();
    store.remove_ref(&name("one")).unwrap();
    let files: BTreeMap<_, _> = [("turned".to_owned(), bytes_of("dc.a"))].into();
    let import = store.begin().unwrap();
    let image = add_image(&import, &files).unwrap();
    store.gc(NOW).unwrap();
    let reference = Reference { image, manifest: None, form: Form::Packed, created: Seconds(1) };
    import.set_ref(name("two"), reference);
    import.commit().unwrap();
    check_files(&store, &image, &[("turned", "dc.a")]);
    check_clean(&store).unwrap();
    check_files(&store, &image, &[("turned", "dc.a")]);
}

/// The machine stops at any moment of an import: every name has its old or its new image.
#[test]
fn an_import_of_pieces_survives_a_crash_at_any_moment() {
    let recorded = super::interrupted::crash::record(
        |store| {
            super::import(store, "kept", &super::sample("kept", 2)).unwrap();
        },
        |store| {
            import_pieces(store, "one", &ONE).unwrap();
            import_pieces(store, "two", &TWO).unwrap();
        },
    );
    let seen = recorded.replay(&|directory, _| {
        let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
        check_names(&store)
    });
    let seen = seen.unwrap();
    assert!(seen > 25, "{seen} states");
}

#[test]
fn taking_pieces_out_of_a_device_survives_a_crash_at_any_moment() {
    let recorded = super::interrupted::crash::record(
        |store| {
            import_pieces(store, "one", &ONE).unwrap();
            import_pieces(store, "two", &TWO).unwrap();
            store.remove_ref(&name("one")).unwrap();
            unseal(store);
        },
        |store| {
            import_pieces(store, "two", &[("changed", "abXd"), ("moved", "d.cX")]).unwrap();
            assert!(store.gc(NOW).unwrap().1.trimmed >= 4096);
        },
    );
    assert!(recorded.changes.iter().any(|it| matches!(it, crate::trace::Change::Punch(..))));
    let seen = recorded.replay(&|directory, _| {
        let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
        check(&store)?;
        check_clean(&store)?;
        let image = store.refs.get(&name("two"))?.ok_or("two is lost")?.image;
        let tree = store.tree(&store.open_image(&image)?, Owners::AsWritten)?.tree;
        for path in ["/changed", "/moved"] {
            let inode = tree.resolve(path.as_bytes()).ok_or("a file is lost")?;
            let Node::Regular(Content::External { object: Some(object), .. }) = inode.node() else {
                return Err("a file has no name".into());
            };
            if id(&read(&store, &object)) != object {
                return Err("a file has other bytes".into());
            }
        }
        Ok(())
    });
    assert!(seen.unwrap() > 5);
}

/// Checks the two names, if they exist, and everything before and after `gc`.
fn check_names(store: &Store) -> Result<(), Failure> {
    let found = check(store)?;
    for _ in 0..2 {
        for (ref_name, files) in [("one:latest", &ONE), ("two:latest", &TWO)] {
            if let Some(image) = found.get(ref_name) {
                check_files(store, image, files);
            }
        }
        if check_clean(store)? != found {
            return Err("gc changed a ref".into());
        }
    }
    Ok(())
}

/// Imports, readers and `gc` run at the same time, each as a separate process would.
#[test]
fn readers_imports_and_gc_of_pieces_do_not_hurt_each_other() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let kept = import_pieces(&open(path), "kept", &ONE).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            scope.spawn(move || {
                let store = open(path);
                let mut random = Random::new(thread + 1);
                for round in 0..24 {
                    let mut letter = || {
                        let letters = ['a', 'b', 'c', 'd', 'x', 'y', '.'];
                        letters[usize::try_from(random.below(7)).unwrap()]
                    };
                    let pattern: String = (0..5).map(|_| letter()).collect();
                    let own = format!("own-{thread}-{}", round % 3);
                    let image = import_pieces(&store, &own, &[("file", &pattern)]).unwrap();
                    check_files(&store, &image, &[("file", &pattern)]);
                    if round % 2 == 1 {
                        store.remove_ref(&name(&own)).unwrap();
                    }
                }
            });
        }
        scope.spawn(move || {
            let store = open(path);
            for _ in 0..25 {
                store.gc(NOW).unwrap();
            }
        });
        scope.spawn(move || {
            let store = open(path);
            for _ in 0..40 {
                check_files(&store, &kept, &ONE);
            }
        });
    });
    let store = open(path);
    check(&store).unwrap();
    check_clean(&store).unwrap();
    check_files(&store, &kept, &ONE);
}

/// Replaces the devices by unsealed files, because holes cannot be punched into files with fs-verity.
fn unseal(store: &Store) {
    for file in fs::read_dir(store.path().join("data")).unwrap() {
        let path = file.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        replace(&path, &bytes);
    }
}

#[test]
fn damage_to_a_piece_is_told_of_all_who_have_it() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let one = import_pieces(&store, "one", &ONE).unwrap();
    let two = import_pieces(&store, "two", &TWO).unwrap();
    unseal(&store);
    let piece = store.devices.find_object(&id(&bytes_of("b"))).unwrap().unwrap();
    let path = directory.path().join("data").join(piece.device.to_string());
    flip(&path, usize::try_from(piece.offset).unwrap() * 8 + 8011);
    let report = store.fsck(FsckOptions { threads: 2 }).unwrap();
    let [(damage, harm)] = report.damage.as_slice() else { panic!("{:#?}", report.damage) };
    assert!(
        matches!(damage, Damage::Stored { object, device, .. } if (*object, *device) == (piece.object, piece.device))
    );
    let mut told: Vec<_> = harm
        .iter()
        .map(|it| {
            let paths = it.paths.iter().map(|it| String::from_utf8_lossy(it).into_owned());
            (it.refs[0].to_string(), paths.collect::<Vec<_>>())
        })
        .collect();
    told.sort_unstable();
    let paths = |paths: &[&str]| paths.iter().map(ToString::to_string).collect::<Vec<_>>();
    let expected = [
        (name("one").to_string(), paths(&["/changed", "/holes"])),
        (name("two").to_string(), paths(&["/changed", "/short"])),
    ];
    assert_eq!(told, expected);
    for image in [one, two] {
        let report = store.verify(&image, FsckOptions { threads: 1 }).unwrap();
        assert_eq!(report.damage.len(), 1);
    }
    // An import restores the piece, and thereby the objects that contain it.
    assert_eq!(store.remove_damaged(&report).unwrap(), 1);
    assert!(store.devices.find_object(&id(&bytes_of("abcd-e"))).unwrap().is_none());
    let one = import_pieces(&store, "one", &ONE).unwrap();
    let two = import_pieces(&store, "two", &TWO).unwrap();
    check_clean(&store).unwrap();
    check_files(&store, &one, &ONE);
    check_files(&store, &two, &TWO);
}

/// One image's device also contains a file of another image, and a large file that the other image does not use, or of
/// which it uses a part.
#[test]
fn an_image_is_sound_whatever_is_damaged_beside_its_files() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let large = import_pieces(&store, "large", &[("large", "abcd"), ("small", "x")]).unwrap();
    let small = import_pieces(&store, "small", &[("small", "x")]).unwrap();
    let part = import_pieces(&store, "part", &[("file", "ab")]).unwrap();
    let damaged = store.devices.find_object(&id(&bytes_of("c"))).unwrap().unwrap();
    let device = directory.path().join(format!("data/{}", damaged.device));
    flip(&device, usize::try_from(damaged.offset).unwrap() * 8 + 9);
    let verify = |image| store.verify(image, FsckOptions { threads: 1 }).unwrap();
    let report = verify(&small);
    assert_eq!(report.damage, []);
    // These are the image, its only device, the piece in it, and the file, which consists of that piece.
    assert_eq!(report.checked, 4);
    assert_eq!(verify(&part).damage, []);
    let report = verify(&large);
    assert!(
        matches!(report.damage.as_slice(), [(Damage::Stored { object, .. }, _)] if *object == damaged.object),
        "{report:?}"
    );
}

/// If an image claims other bytes than the index, the object from the index is returned, or none.
#[test]
fn what_an_image_claims_is_believed_as_far_as_indexes_say() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import_pieces(&store, "one", &ONE).unwrap();
    let stored = store.devices.find_object(&id(&bytes_of("abcd-e"))).unwrap().unwrap();
    let pieces = stored.pieces.clone().unwrap();
    let device = [image::erofs::DeviceFile { id: stored.device, bytes: stored.device_bytes }];
    let at = |it: usize| pieces[it].stored.as_ref().unwrap().offset;
    let run = |len, place: Option<u64>| Run { len, place: place.map(|it| (0, it)) };
    let named = |runs: &[Run], fingerprint: [u8; 32]| {
        let size = runs.iter().map(|it| it.len).sum();
        let object = Some(id(b"whatever"));
        let mut builder = Builder::new();
        let node = Content::External { size, object, location: Location::Object };
        let inode =
            builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Regular(node)).unwrap();
        builder.insert(InodeId::ROOT, b"file", inode, Link::Equal).unwrap();
        let find = |_: &ObjectId| Some(Placed::Pieces { runs, fingerprint });
        let native = Native::new(&device, &find);
        let import = store.begin().unwrap();
        assert!(import.reuse_device(&stored.device).unwrap());
        let mut draft = import.image().unwrap();
        let mut contents = |_: image::tree::Inode<'_>, _, _: &mut dyn std::io::Write| panic!();
        write_native(&builder.finish(), &native, &mut contents, &mut draft).unwrap();
        let image = draft.finish().unwrap();
        import.commit().unwrap();
        let tree = store.tree(&store.open_image(&image).unwrap(), Owners::AsWritten).unwrap().tree;
        let Node::Regular(Content::External { object, .. }) =
            tree.resolve(b"/file").unwrap().node()
        else {
            panic!()
        };
        object
    };
    let own: Vec<Run> = (0..5).map(|it| run(pieces[it].len, Some(at(it)))).collect();
    assert_eq!(named(&own, stored.sha256), Some(stored.object));
    // These have another fingerprint, another order, a hole, a shorter end, and an offset at which no piece begins.
    assert_eq!(named(&own, [7; 32]), None);
    let turned: Vec<Run> =
        [1, 0, 2, 3, 4].iter().map(|it| run(pieces[*it].len, Some(at(*it)))).collect();
    assert_eq!(named(&turned, stored.sha256), None);
    let mut holed = own.clone();
    holed[1].place = None;
    assert_eq!(named(&holed, stored.sha256), None);
    let mut short = own.clone();
    short[4].len -= 1;
    assert_eq!(named(&short, stored.sha256), None);
    let mut odd = own;
    odd[2].place = Some((0, at(2) + 4096));
    assert_eq!(named(&odd, stored.sha256), None);
    // This file begins like a whole object and continues differently.
    let first = id(&bytes_of("a"));
    let whole = |runs: &[Run]| named(runs, Sha256::digest(bytes_of("a")).into());
    assert_eq!(whole(&[run(8192, Some(at(0)))]), Some(first));
    assert_eq!(whole(&[run(4096, Some(at(0))), run(4096, Some(at(1)))]), None);
    assert_eq!(whole(&[run(4096, Some(at(0))), run(4096, None)]), None);
}

/// Imports and removes files that share pieces, and compares each name with its expected files.
#[test]
fn names_lead_to_their_files_whatever_goes() {
    let directory = super::fast_directory();
    let store = open(directory.path());
    let mut random = Random::new(0x7069_6563_6573);
    let mut expected: BTreeMap<String, (ImageId, String)> = BTreeMap::new();
    for round in 0..150 {
        let ref_name = format!("n{}", random.below(5));
        match random.below(3) {
            0 => {
                if expected.remove(&ref_name).is_some() {
                    store.remove_ref(&name(&ref_name)).unwrap();
                }
                store.gc(NOW).unwrap();
            }
            _ => {
                let letters = ['a', 'b', 'c', 'd', 'e', 'f', '.', '.'];
                let count = 1 + random.below(7);
                let mut letter = || letters[usize::try_from(random.below(8)).unwrap()];
                let mut pattern: String = (0..count).map(|_| letter()).collect();
                if letter() != '.' {
                    pattern.push('-');
                    pattern.push(letter());
                }
                let image = import_pieces(&store, &ref_name, &[("file", &pattern)]).unwrap();
                expected.insert(ref_name, (image, pattern));
            }
        }
        for (image, pattern) in expected.values() {
            check_files(&store, image, &[("file", pattern)]);
        }
        if round % 25 == 24 {
            check_clean(&store).unwrap();
        }
    }
    check(&store).unwrap();
}
