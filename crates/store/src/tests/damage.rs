//! Every flipped byte is found and reported with the affected names.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use image::verity::{Algorithm, ObjectId, digest};
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

use super::{NOW, Random, check, check_clean, fast_directory, import, name, open, sample};
use crate::check::check_error::chain;
use crate::{Damage, Digest, FsckOptions, Harm, LayerInfo, OpenOptions, Store};

pub(super) fn object_path(store: &Path, bytes: &[u8]) -> PathBuf {
    store.join("objects").join(ObjectId::new(digest(Algorithm::Sha256, bytes)).path())
}

/// Replaces a file, because files sealed by fs-verity cannot be written to.
pub(super) fn replace(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o444)).unwrap();
}

/// Flips one bit of a file.
pub(super) fn flip(path: &Path, bit: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[bit / 8] ^= 1 << (bit % 8);
    replace(path, &bytes);
}

fn rename(from: &Path, to: &Path) {
    rustix::fs::rename(from, to).unwrap();
}

fn fsck(store: &Store) -> Vec<(Damage, Vec<Harm>)> {
    store.fsck(FsckOptions { threads: 2 }).unwrap().damage
}

/// Returns the paths of all regular files of a store.
fn files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root.to_owned()];
    while let Some(path) = open.pop() {
        for entry in fs::read_dir(path).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

#[test]
fn every_flipped_bit_is_found() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "one", &sample("one", 2)).unwrap();
    check(&store).unwrap();
    let mut random = Random::new(7);
    let mut flipped = 0;
    for path in files(directory.path()) {
        let bits = path.metadata().unwrap().len() * 8;
        // `gc.lock` is empty, and `meta` is checked whenever the store is opened. The next command replaces `boot`.
        if bits == 0 || path.ends_with("boot") {
            continue;
        }
        for at in [0, bits - 1, random.below(bits), random.below(bits), random.below(bits)] {
            let at = usize::try_from(at).unwrap();
            flip(&path, at);
            match Store::open(
                directory.path(),
                crate::Who::this_process(),
                crate::OpenOptions::read(),
            ) {
                Ok(store) => {
                    let found = fsck(&store);
                    assert!(!found.is_empty(), "bit {at} of {}", path.display());
                }
                Err(_) => assert!(path.ends_with("meta")),
            }
            flip(&path, at);
            flipped += 1;
        }
    }
    assert!(flipped >= 9 * 5, "{flipped}");
    check(&store).unwrap();
}

#[test]
fn a_damaged_image_that_is_opened_names_the_way_out() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let image = import(&store, "one", &sample("one", 2)).unwrap();
    let path = directory.path().join("images").join(image.to_string());
    let sound = fs::read(&path).unwrap();
    let mut features = sound.clone();
    features[1100..1108].fill(b'X');
    for (bytes, why) in [
        (&features[..], "the image uses unsupported features 0x58585800"),
        (&sound[..2048], "the image is corrupt: "),
    ] {
        replace(&path, bytes);
        let text = chain(&store.open_image(&image).unwrap_err());
        let what = format!("cannot read the device table of image {image}; `quire fsck`");
        assert!(text.starts_with(&what), "{text}");
        assert!(text.contains(&format!("shows the damage: {why}")), "{text}");
    }
}

#[test]
fn a_damaged_object_is_told_with_the_paths_that_it_hurts() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let mut files = sample("one", 2);
    files.insert("twin".into(), files["shared-1"].clone());
    let one = import(&store, "one", &files).unwrap();
    store.set_ref(&name("also"), &store.refs.get(&name("one")).unwrap().unwrap()).unwrap();
    let two = import(&store, "two", &sample("two", 2)).unwrap();

    let path = object_path(directory.path(), &files["shared-1"]);
    flip(&path, 4321);
    let actual = digest(Algorithm::Sha256, &fs::read(&path).unwrap());
    let expected = ObjectId::new(digest(Algorithm::Sha256, &files["shared-1"]));
    let mut harm = vec![
        Harm {
            image: one,
            refs: vec![name("also"), name("one")],
            paths: vec![b"/shared-1".to_vec(), b"/twin".to_vec()],
        },
        Harm { image: two, refs: vec![name("two")], paths: vec![b"/shared-1".to_vec()] },
    ];
    harm.sort();
    let size = files["shared-1"].len() as u64;
    let object = Damage::Object { expected, actual: actual.into(), size };
    let found = fsck(&store);
    assert_eq!(found[0], (object.clone(), harm.clone()));
    assert_eq!(found.len(), 1, "however many layers need it: {found:?}");
    let report = store.fsck(FsckOptions { threads: 2 }).unwrap();
    assert_eq!(report.hurt_layers.len(), 2);
    assert!(report.hurt_layers.values().all(|it| it.iter().eq([&expected])));

    // Verifies only one image.
    let found = store.verify(&two, FsckOptions { threads: 1 }).unwrap();
    let hurt = harm.iter().find(|it| it.image == two).unwrap().clone();
    assert_eq!(found.damage, [(object, vec![hurt])]);
    // These are the image file and four objects, shared and unshared.
    assert_eq!(found.checked, 5);

    // There are two images, one of which is passed twice: two image files, two shared objects, and two unshared
    // objects of each image.
    let found = store.verify_all(&[two, one, two], FsckOptions { threads: 1 }).unwrap();
    assert_eq!((found.checked, found.damage.len()), (2 + 2 + 2 * 2, 1), "{:?}", found.damage);

    fs::remove_file(&path).unwrap();
    assert_eq!(fsck(&store)[0], (Damage::Missing(expected), harm));
}

#[test]
fn each_kind_of_damage_is_told_as_what_it_is() {
    let check = |break_it: &dyn Fn(&Path), expected: &str| {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        import(&store, "one", &sample("one", 1)).unwrap();
        break_it(directory.path());
        let found = fsck(&store);
        let text = format!("{:?}", found.iter().map(|it| &it.0).collect::<Vec<_>>());
        assert!(text.contains(expected), "{expected}: {text}");
    };
    let only = |store: &Path, directory: &str| {
        fs::read_dir(store.join(directory)).unwrap().next().unwrap().unwrap().path()
    };
    let object = |store: &Path| object_path(store, &sample("one", 1)["own-0"]);
    check(&|store| flip(&only(store, "images"), 9000), "Image {");
    check(&|store| fs::remove_file(only(store, "images")).unwrap(), "its image");
    check(&|store| replace(&object(store), b""), "size: 0");
    check(
        &|store| {
            fs::remove_file(object(store)).unwrap();
            fs::create_dir(object(store)).unwrap();
        },
        "not a regular file",
    );
    check(&|store| flip(&only(store, "layers"), 8), "Layer(");
    check(&|store| fs::remove_file(only(store, "layers")).unwrap(), "its layer sha256:");
    check(&|store| flip(&only(store, "manifests"), 8), "Manifest(");
    check(&|store| flip(&only(store, "refs"), 8), "Ref(\"one:latest\"");
    check(
        &|store| rename(&only(store, "refs"), &store.join("refs/two:latest")),
        "it names one:latest",
    );
    check(&|store| fs::write(store.join("objects/x"), "").unwrap(), "Stray(");
    check(&|store| fs::write(store.join("objects/00/x"), "").unwrap(), "Stray(");
    check(&|store| fs::write(store.join("images/x"), "").unwrap(), "Stray(");
    check(&|store| fs::write(store.join("refs/UP"), "").unwrap(), "Stray(");
    check(&|store| fs::write(store.join("x"), "").unwrap(), "Stray(");
    check(&|store| fs::write(store.join("tmp/x"), "").unwrap(), "Stray(");
    // Only directories can be work directories.
    check(&|store| fs::write(store.join("tmp/work-1-1"), "").unwrap(), "work-1-1");
    check(
        &|store| {
            fs::create_dir(store.join("containers/c")).unwrap();
            fs::write(store.join("containers/c/container.json"), "x").unwrap();
        },
        "Container(\"c\"",
    );
    // A sound object under a wrong name.
    check(
        &|store| {
            let wrong = store.join("objects/00").join("0".repeat(62));
            rename(&object(store), &wrong);
        },
        "Object { expected: 00000",
    );
}

#[test]
fn what_is_damaged_can_be_removed_and_imported_again() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let files = sample("one", 2);
    import(&store, "one", &files).unwrap();
    import(&store, "two", &sample("two", 2)).unwrap();
    flip(&object_path(directory.path(), &files["shared-1"]), 4321);
    for file in fs::read_dir(directory.path().join("images")).unwrap() {
        flip(&file.unwrap().path(), 10_000);
    }
    let manifests = fs::read_dir(directory.path().join("manifests")).unwrap();
    manifests.into_iter().for_each(|it| flip(&it.unwrap().path(), 3));
    let report = store.fsck(FsckOptions { threads: 2 }).unwrap();
    // Imports reuse objects with the right length without checking their bytes, so they might rely on a damaged one.
    let running = store.begin().unwrap();
    assert!(store.remove_damaged(&report).unwrap_err().to_string().contains("while imports run"));
    drop(running);
    assert_eq!(store.remove_damaged(&report).unwrap(), 1 + 2 + 4);
    assert_eq!(store.remove_damaged(&report).unwrap(), 0);
    import(&store, "one", &files).unwrap();
    import(&store, "two", &sample("two", 2)).unwrap();
    check_clean(&store).unwrap();
}

#[test]
fn a_directory_in_place_of_a_file_keeps_nothing_from_being_repaired() {
    let break_it = |path: &Path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
        fs::write(path.join("x"), "").unwrap();
    };
    let check_repair = |repair: bool| {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        let files = sample("one", 2);
        import(&store, "one", &files).unwrap();
        let mut broken = vec![object_path(directory.path(), &files["shared-1"])];
        for part in ["images", "layers", "manifests"] {
            let listed = fs::read_dir(directory.path().join(part)).unwrap();
            broken.extend(listed.map(|it| it.unwrap().path()));
        }
        broken.iter().for_each(|path| break_it(path));
        if repair {
            let report = store.fsck(FsckOptions { threads: 2 }).unwrap();
            let removed = usize::try_from(store.remove_damaged(&report).unwrap()).unwrap();
            assert_eq!(removed, broken.len());
            broken.iter().for_each(|path| assert!(!path.exists()));
        }
        import(&store, "one", &files).unwrap();
        check_clean(&store).unwrap();
    };
    check_repair(true);
    // An import also replaces a directory in the place of a file without a repair, because it is not a regular file.
    check_repair(false);
}

#[test]
fn gc_removes_nothing_when_it_cannot_tell_what_is_needed() {
    let check = |break_it: &dyn Fn(&Path), expected: &str| {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        import(&store, "one", &sample("one", 1)).unwrap();
        import(&store, "gone", &sample("gone", 1)).unwrap();
        store.remove_ref(&name("gone")).unwrap();
        break_it(directory.path());
        let before = files(directory.path());
        let error = store.gc(NOW).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("gc can remove no data"), "{error}");
        assert!(error.contains("`quire "), "no way out: {error}");
        assert_eq!(files(directory.path()), before);
    };
    let each = |store: &Path, directory: &str, bit: usize| {
        for file in fs::read_dir(store.join(directory)).unwrap() {
            flip(&file.unwrap().path(), bit);
        }
    };
    // Damages the superblock's magic number. Other damage to an image may not be noticed by this test, and is
    // harmless.
    check(&|store| each(store, "images", 1024 * 8), "the references of image ");
    check(&|store| each(store, "layers", 80), "the references of layer sha256:");
    check(&|store| each(store, "manifests", 8), "the references of manifest sha256:");
    check(&|store| each(store, "refs", 8), "`quire rmi one:latest`");
}

#[test]
fn a_ref_that_cannot_be_read_hides_nothing_else_and_can_be_removed() {
    let check = |break_it: &dyn Fn(&Path), repair: bool| {
        let directory = fast_directory();
        let store = open(directory.path());
        import(&store, "one", &sample("one", 1)).unwrap();
        let two = import(&store, "two", &sample("two", 1)).unwrap();
        let path = directory.path().join("refs/one:latest");
        break_it(&path);
        assert!(store.refs.all().is_err());
        let (good, bad) = store.refs.readable().unwrap();
        assert_eq!(good.keys().collect::<Vec<_>>(), [&name("two")]);
        assert_eq!(bad.iter().map(|it| &it.name).collect::<Vec<_>>(), [&name("one")]);
        assert_eq!(store.resolve("two").unwrap().image, two);
        let used = store.du().unwrap();
        assert_eq!((used.images.len(), used.unreadable.len()), (2, 1), "{used:?}");
        if repair {
            let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
            assert_eq!(store.remove_damaged(&report).unwrap(), 1);
        } else {
            assert_eq!(store.remove_ref(&name("one")).unwrap(), None);
        }
        assert!(fs::symlink_metadata(&path).is_err());
        check_clean(&store).unwrap();
    };
    for repair in [false, true] {
        check(&|path| flip(path, 8), repair);
        check(
            &|path| {
                fs::remove_file(path).unwrap();
                let mode = rustix::fs::Mode::RUSR;
                rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0)
                    .unwrap();
            },
            repair,
        );
        check(
            &|path| {
                fs::remove_file(path).unwrap();
                std::os::unix::fs::symlink("/nowhere", path).unwrap();
            },
            repair,
        );
        check(
            &|path| {
                fs::remove_file(path).unwrap();
                fs::create_dir(path).unwrap();
            },
            repair,
        );
    }
}

#[test]
fn du_counts_every_byte_once() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let one = import(&store, "one", &sample("one", 3)).unwrap();
    let two = import(&store, "two", &sample("two", 3)).unwrap();
    import(&store, "gone", &sample("gone", 1)).unwrap();
    store.remove_ref(&name("gone")).unwrap();
    let used = store.du().unwrap();
    let on_disk = |path: &Path| -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        files(path).iter().map(|it| it.metadata().unwrap().blocks() * 512).sum()
    };
    for (found, part) in [
        (used.objects, "objects"),
        (used.image_files, "images"),
        (used.layers, "layers"),
        (used.manifests, "manifests"),
    ] {
        assert_eq!(found, on_disk(&directory.path().join(part)), "{part}");
    }
    assert_eq!(used.images.len(), 3);
    let own: u64 = used.images.iter().map(|it| it.own).sum();
    let find = |image| used.images.iter().find(|it| it.image == image).unwrap();
    assert_eq!(find(one).refs, [name("one")]);
    assert_eq!(find(one).shared_with[0].image, two);
    assert_eq!(find(one).shared_with[0].bytes, find(one).shared);
    assert_eq!(own + find(one).shared + used.unused_objects, used.objects + used.image_files);
}

#[test]
fn a_directory_that_is_gone_is_named_and_can_be_made_again() {
    for name in ["objects", "images", "layers", "manifests", "refs", "containers", "tmp"] {
        let directory = fast_directory();
        import(&open(directory.path()), "one", &sample("one", 2)).unwrap();
        let path = directory.path().join(name);
        fs::remove_dir_all(&path).unwrap();
        for options in [OpenOptions::read(), OpenOptions::write(), OpenOptions::create()] {
            let error =
                Store::open(directory.path(), crate::Who::this_process(), options).unwrap_err();
            let expect = format!(
                "the store {} is damaged: its directory \"{name}\" is missing. `mkdir {}` makes \
                 the store usable again; then `quire fsck` shows the lost data",
                directory.path().display(),
                path.display()
            );
            assert_eq!(error.to_string(), expect);
        }
        // The fix in the error message works.
        fs::create_dir(&path).unwrap();
        let store = Store::open(directory.path(), crate::Who::this_process(), OpenOptions::write())
            .unwrap();
        let lost = ["objects", "images", "layers", "manifests"].contains(&name);
        let found = fsck(&store);
        assert_eq!(!found.is_empty(), lost, "{name}: {found:?}");
        import(&store, "one", &sample("one", 2)).unwrap();
        check(&store).unwrap();
    }
}

/// Adds a layer with any description, even a wrong one.
fn add_layer(store: &Store, recipe: &[u8], info: &LayerInfo) {
    let transaction = store.begin().unwrap();
    let mut layer = transaction.layer().unwrap();
    layer.write_all(recipe).unwrap();
    layer.finish(info.clone()).unwrap();
    transaction.commit().unwrap();
}

/// Checks a layer whose file is intact but does not match its name, so that only rebuilding its tar shows the damage.
fn check_deep(tar: &[u8], recipe: &[u8], size: u64, objects: &[ObjectId], expect: &str) {
    let directory = fast_directory();
    let store = open(directory.path());
    import(&store, "one", &sample("one", 2)).unwrap();
    let diff_id = Digest::sha256(tar);
    let (blobs, objects) = (Vec::new(), objects.to_vec());
    add_layer(&store, recipe, &LayerInfo { diff_id, size, blobs, objects });
    assert_eq!(fsck(&store), []);
    let report = store.fsck_deep(FsckOptions { threads: 2 }).unwrap();
    assert_eq!(
        report.damage,
        [(Damage::Bad(crate::StoreItem::Layer(diff_id), expect.to_owned()), Vec::new())]
    );
    // The layer is removed, so that an import adds a correct layer. Other layers stay.
    assert_eq!(store.remove_damaged(&report).unwrap(), 1);
    check(&store).unwrap();
}

#[test]
fn a_layer_that_gives_another_tar() {
    let files = sample("one", 2);
    let object = digest(Algorithm::Sha256, &files["shared-1"]);
    let header = b"QUIREREC\x01\x01\0\0\0\0\0\0";
    // Three bytes verbatim, then the end record with the tar's length. Source: `docs/format/recipe.md`.
    let recipe = [&header[..], b"\x01\x03abc", b"\0\x03\0\0\0\0\0\0\0"].concat();
    let other = Digest::sha256(b"abc");
    let different = format!("its rebuilt tar has the digest {other}");
    check_deep(b"abd", &recipe, 3, &[], &different);
    check_deep(b"abc", &recipe, 4, &[], "it states a tar of 4 bytes, but the tar has 3");
    let magic = "the recipe is corrupt at byte 0: it is not a recipe";
    check_deep(b"abc", b"something else entirely", 3, &[], magic);
    // The first 5 bytes of an object that the layer does not list, so `gc` would remove the object.
    let whole = [&header[..], b"\x02", object.as_bytes(), b"\x05"].concat();
    let recipe = [&whole[..], b"\0\x05\0\0\0\0\0\0\0"].concat();
    let tar = &files["shared-1"][..5];
    check_deep(tar, &recipe, 5, &[], &format!("its list of objects lacks {object}"));
}

/// A container can create directories at a depth that no path reaches, where a recursive walk would need one
/// descriptor per level.
#[test]
fn du_counts_at_any_depth() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let containers = directory.path().join("containers");
    let mut here = rustix::fs::open(&containers, flags, Mode::empty()).unwrap();
    let before = store.du().unwrap().containers;
    for name in std::iter::once("c".to_owned()).chain((0..60).map(|_| "d".repeat(255))) {
        rustix::fs::mkdirat(&here, &name, Mode::RWXU).unwrap();
        here = rustix::fs::openat(&here, &name, flags, Mode::empty()).unwrap();
    }
    let write = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&here, "file", write, Mode::RUSR).unwrap();
    rustix::io::write(&file, &[1; 1 << 20]).unwrap();
    rustix::fs::fsync(&file).unwrap();
    assert!(store.du().unwrap().containers >= before + (1 << 20));
}
