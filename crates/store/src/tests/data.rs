//! Devices are made, found and read, and kept as long as they are needed.

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use image::erofs::read::Owners;
use image::erofs::{Native, Piece, Placed, Stored, write_native};
use image::tree::{Content, Inode, Node, Tree};
use image::verity::{Algorithm, DeviceId, ImageId, ObjectId, digest};

use super::{Failure, check, import, import_as, open, sample};
use crate::{
    DeviceKind, Digest, DraftError, Form, FsckOptions, ObjectLookupError, OpenOptions, Store,
    StoredDevice, Transaction, TransactionError, Where,
};

/// Adds files to one packed device, each in separate pages.
pub(crate) fn pack(import: &Transaction<'_>, files: &[Vec<u8>]) -> Result<StoredDevice, Failure> {
    let mut draft = import.device(DeviceKind::Packed)?;
    for bytes in files {
        let offset = draft.position();
        draft.write_all(bytes)?;
        draft.align_to(4096)?;
        draft.add(id(bytes), Sha256::digest(bytes).into(), offset, bytes.len() as u64);
    }
    Ok(draft.finish()?)
}

/// Adds an image over devices. Objects that are in no device are added to a new one.
pub(super) fn add_native(
    import: &Transaction<'_>,
    tree: &Tree,
    objects: &[Vec<u8>],
) -> Result<ImageId, Failure> {
    let mut new = Vec::new();
    for bytes in objects {
        if import.reuse_stored(&id(bytes), bytes.len() as u64)?.is_none() {
            new.push(bytes.clone());
        }
    }
    if !new.is_empty() {
        pack(import, &new)?;
    }
    let mut places = BTreeMap::new();
    let mut devices = Vec::new();
    for bytes in objects {
        let stored = find_again(import, bytes)?;
        if stored.size == 0 {
            continue;
        }
        let size = match import.store().devices.index_of(&stored.device)? {
            Some(index) => index.header.bytes,
            None => import.made_bytes(&stored.device).unwrap(),
        };
        let device = image::erofs::DeviceFile { id: stored.device, bytes: size };
        if !devices.contains(&device) {
            devices.push(device);
        }
        let device = devices.iter().position(|it| *it == device).unwrap_or_default();
        let device = u16::try_from(device)?;
        let (offset, fingerprint) = (stored.offset, stored.sha256);
        places.insert(id(bytes), Stored { device, offset, fingerprint });
    }
    let find = |id: &ObjectId| places.get(id).copied().map(Placed::Whole);
    let native = Native { has_tar: false, devices: &devices, find: &find, uuid: [0; 16] };
    let mut contents = |inode: Inode<'_>, piece, out: &mut dyn std::io::Write| {
        let Node::Regular(Content::External { object: Some(object), .. }) = inode.node() else {
            panic!()
        };
        let bytes = objects.iter().find(|it| id(it) == object).unwrap();
        let from = match piece {
            Piece::Whole => 0,
            Piece::From(from) => from,
        };
        out.write_all(&bytes[usize::try_from(from).unwrap()..])
    };
    let mut draft = import.image()?;
    write_native(tree, &native, &mut contents, &mut draft)?;
    Ok(draft.finish()?)
}

/// Looks up an object that the store had a moment ago. If a `gc` in another process has set the object's device aside,
/// a read restores the device.
pub(super) fn find_again(
    import: &Transaction<'_>,
    bytes: &[u8],
) -> Result<crate::StoredObject, Failure> {
    // On a busy machine the other process may set the device aside many times in a row.
    for _ in 0..1000 {
        if let Some(stored) = import.reuse_stored(&id(bytes), bytes.len() as u64)? {
            return Ok(stored);
        }
        drop(import.read_object(&id(bytes)));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Err("what the import relies on is gone".into())
}

pub(super) fn id(bytes: &[u8]) -> ObjectId {
    digest(Algorithm::Sha256, bytes).into()
}

/// Files that end at a page boundary, and other files.
pub(super) fn files(name: &str) -> Vec<Vec<u8>> {
    let fill = |length: usize| name.bytes().cycle().take(length).collect::<Vec<u8>>();
    vec![fill(8192), fill(100), fill(20_000), fill(4097), fill(300_000), fill(4096)]
}

fn bytes_of(store: &Store, object: &ObjectId) -> Vec<u8> {
    let mut bytes = Vec::new();
    store.object(object).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn objects_in_a_device_are_found_and_read() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    // This store was opened before the device existed, and must notice the device.
    let other =
        Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    let files = files("device ");
    assert_eq!(other.devices.find_object(&id(&files[0])).unwrap(), None);

    let import = store.begin().unwrap();
    let device = pack(&import, &files).unwrap();
    // The last block identifies the device.
    assert_eq!(device.bytes, 8192 + 4096 + 20480 + 8192 + 74 * 4096 + 4096 + 512);
    for bytes in &files {
        // Before the commit, only the import itself sees the objects.
        let (object, size) = (id(bytes), bytes.len() as u64);
        let Some(Where::Device(stored)) = import.reuse_anywhere(&object, size).unwrap() else {
            panic!()
        };
        let mut read = Vec::new();
        import.stored_object(&stored).unwrap().read_to_end(&mut read).unwrap();
        assert_eq!(read, *bytes);
        assert_eq!(import.reuse_anywhere(&object, size + 1).unwrap(), None);
        assert_eq!(store.devices.find_object(&object).unwrap(), None);
    }
    import.commit().unwrap();

    // The name is an independently computed hash of the file.
    let file = std::fs::read(directory.path().join("data").join(device.id.to_string())).unwrap();
    assert_eq!((id(&file), file.len() as u64), (ObjectId::new(*device.id.digest()), device.bytes));
    for bytes in &files {
        let object = id(bytes);
        for store in [&store, &other] {
            assert!(store.has(&object, bytes.len() as u64).unwrap());
            assert!(!store.has(&object, 1).unwrap());
            assert_eq!(bytes_of(store, &object), *bytes);
        }
        let stored = other.devices.find_object(&object).unwrap().unwrap();
        assert_eq!((stored.device, stored.size), (device.id, bytes.len() as u64));
        assert_eq!(stored.sha256, *Sha256::digest(bytes));
        let start = usize::try_from(stored.offset).unwrap();
        assert_eq!(file[start..start + bytes.len()], *bytes);
        if !bytes.is_empty() {
            assert_eq!(
                other.devices.find_at(&device.id, stored.offset).unwrap(),
                Some(stored.clone())
            );
        }
        assert_eq!(other.devices.find_in(&object, [&device.id]).unwrap(), Some(stored));
        assert_eq!(
            other.devices.find_in(&object, [&DeviceId::new(*object.digest())]).unwrap(),
            None
        );
    }
    assert!(matches!(
        store.object(&ObjectId::new(*device.id.digest())),
        Err(ObjectLookupError::NoObject(_))
    ));
    check(&store).unwrap();
}

#[test]
fn a_reader_ends_where_its_object_does() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let bytes: Vec<u8> =
        (0..10_000_u32).map(|it| it.to_le_bytes()[0] ^ it.to_le_bytes()[1]).collect();
    let import = store.begin().unwrap();
    pack(&import, &[b"x".repeat(5000), bytes.clone()]).unwrap();
    import.commit().unwrap();
    let mut reader = store.object(&id(&bytes)).unwrap();
    assert_eq!(reader.size(), 10_000);
    assert!(reader.file().is_none());
    for (from, to) in [(0, 10_000), (8000, 9000), (8191, 8193), (8192, 10_000), (9999, 10_000)] {
        let mut read = vec![0; to - from];
        reader.read_exact_at(&mut read, from as u64).unwrap();
        assert_eq!(read, bytes[from..to], "{from}");
    }
    reader.read_exact_at(&mut [0; 2], 9999).unwrap_err();
    assert_eq!(reader.read_at(&mut [0; 2], 10_000).unwrap(), 0);
    assert_eq!(reader.read_at(&mut [0; 2], u64::MAX).unwrap(), 0);
    reader.seek(SeekFrom::End(-1)).unwrap();
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, bytes[9999..]);
}

#[test]
fn a_draft_can_be_read_back() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let import = store.begin().unwrap();
    let mut draft = import.device(DeviceKind::Tar).unwrap();
    let bytes: Vec<u8> = (0..700_000_u32).flat_map(u32::to_le_bytes).collect();
    draft.write_all(&bytes).unwrap();
    let end = bytes.len();
    for (from, to) in [(0, 10), (0, end), (end - 10, end), (262_140, 262_150), (end, end)] {
        let mut read = vec![0; to - from];
        draft.read_exact_at(&mut read, from as u64).unwrap();
        assert_eq!(read, bytes[from..to], "{from}");
    }
    draft.read_exact_at(&mut [0; 2], end as u64 - 1).unwrap_err();
    draft.read_exact_at(&mut [0; 2], u64::MAX).unwrap_err();
    drop(draft);
    drop(import);
    assert!(store.tmp.list().unwrap().is_empty());
    assert!(!directory.path().join("data").exists());
}

#[test]
fn a_tar_says_which_layer_it_is() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let layer = Digest::sha256(b"layer");
    let make = |kind, layer: Option<Digest>| {
        let import = store.begin().unwrap();
        let mut draft = import.device(kind).unwrap();
        draft.write_all(&[b'h'; 512]).unwrap();
        draft.write_all(&[b'f'; 600]).unwrap();
        draft.align().unwrap();
        let file = [b'f'; 600];
        draft.add(id(&file), Sha256::digest(file).into(), 512, 600);
        if let Some(layer) = layer {
            draft.set_layer(layer);
        }
        let device = draft.finish()?;
        import.commit().unwrap();
        Ok::<StoredDevice, DraftError>(device)
    };
    assert!(matches!(make(DeviceKind::Tar, None), Err(DraftError::Layer { .. })));
    assert!(matches!(make(DeviceKind::Packed, Some(layer)), Err(DraftError::Layer { .. })));
    let device = make(DeviceKind::Tar, Some(layer)).unwrap();
    assert_eq!(device.bytes, 512 + 1024 + 512);
    assert_eq!(store.devices.index_of(&device.id).unwrap().unwrap().header.layer, Some(layer));
    assert_eq!(bytes_of(&store, &id(&[b'f'; 600])), [b'f'; 600]);
    // The store has a layer only with all of its objects. A tar does not contain a sparse file as one run of bytes.
    let (file, sparse, other) = (id(&[b'f'; 600]), vec![b's'; 9000], Digest::sha256(b"other"));
    let has = |layer: &Digest, objects: &[ObjectId]| {
        let import = store.begin().unwrap();
        import.has_tar(layer, objects).unwrap()
    };
    assert!(has(&layer, &[]) && has(&layer, &[file]));
    assert!(!has(&other, &[]) && !has(&other, &[file]));
    assert!(!has(&layer, &[file, id(&sparse)]));
    let import = store.begin().unwrap();
    pack(&import, std::slice::from_ref(&sparse)).unwrap();
    import.commit().unwrap();
    assert!(has(&layer, &[file, id(&sparse)]));
}

/// Images find their files by both digests, so a device with a wrong one would have files without contents.
#[test]
fn an_object_has_one_sha256_digest() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let file = [b'f'; 600];
    let right: [u8; 32] = Sha256::digest(file).into();
    let make = |import: &Transaction<'_>, digests: &[[u8; 32]]| {
        let mut draft = import.device(DeviceKind::Packed).unwrap();
        draft.write_all(&file).unwrap();
        draft.align().unwrap();
        digests.iter().for_each(|it| draft.add(id(&file), *it, 0, 600));
        draft.finish()
    };
    let import = store.begin().unwrap();
    let error = make(&import, &[right, [7; 32]]).unwrap_err();
    assert!(error.to_string().starts_with("cannot make the index of device "), "{error}");
    // The contradiction is within one import, and then with a device of the store.
    let import = store.begin().unwrap();
    let device = make(&import, &[right, right]).unwrap();
    assert_eq!(make(&import, &[right]).unwrap(), device);
    import.commit().unwrap();
    let import = store.begin().unwrap();
    assert_eq!(make(&import, &[right]).unwrap(), device);
    let error = make(&import, &[[7; 32]]).unwrap_err();
    let expect = (device.id, id(&file));
    assert!(
        matches!(&error, DraftError::OtherDigest { device, object } if (**device, **object) == expect),
        "{error}"
    );
    assert!(matches!(import.commit(), Err(TransactionError::Incomplete)));
    check(&store).unwrap();

    // If the wrong digest is the one in the store, the step in the message removes it.
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let import = store.begin().unwrap();
    make(&import, &[[7; 32]]).unwrap();
    import.commit().unwrap();
    let import = store.begin().unwrap();
    let error = make(&import, &[right]).unwrap_err();
    assert!(error.to_string().contains("run `quire fsck --repair`"), "{error}");
    drop(import);
    let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
    assert!(store.remove_damaged(&report).unwrap() > 0, "{report:?}");
    let import = store.begin().unwrap();
    assert_eq!(make(&import, &[right]).unwrap(), device);
    import.commit().unwrap();
    check(&store).unwrap();
}

#[test]
fn what_cannot_be_is_refused() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let import = store.begin().unwrap();
    let mut draft = import.device(DeviceKind::Packed).unwrap();
    draft.write_all(&[1; 5000]).unwrap();
    draft.add(id(b"a"), [0; 32], 0, 9000);
    let error = draft.finish().unwrap_err();
    assert!(error.to_string().starts_with("cannot make the index of device "), "{error}");
    assert!(matches!(import.commit(), Err(TransactionError::Incomplete)));

    let directory = TempDir::new().unwrap();
    let create = crate::Create::IfAbsent(Algorithm::Sha512);
    let store = Store::open(
        directory.path(),
        crate::Who::this_process(),
        OpenOptions { create, ..OpenOptions::create() },
    )
    .unwrap();
    let import = store.begin().unwrap();
    assert!(matches!(import.device(DeviceKind::Packed), Err(DraftError::NoDevices(_))));
}

/// All contents of a native image are found.
#[test]
fn a_native_image_is_opened_with_its_devices() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (one, two) = (sample("one", 12), sample("two", 12));
    let first = import_as(&store, "one", &one, Form::Packed).unwrap();
    let second = import_as(&store, "two", &two, Form::Packed).unwrap();
    check(&store).unwrap();
    // All shared objects are in the device of the first image.
    assert_eq!(store.open_image(&first).unwrap().devices.len(), 1);
    let opened = store.open_image(&second).unwrap();
    assert_eq!((opened.form, opened.devices.len()), (Form::Packed, 2));
    for device in &opened.devices {
        let mut bytes = Vec::new();
        (&device.file).read_to_end(&mut bytes).unwrap();
        assert_eq!(
            (id(&bytes), bytes.len() as u64),
            (ObjectId::new(*device.id.digest()), device.bytes)
        );
    }
    assert_eq!(
        std::fs::read_dir(directory.path().join("objects"))
            .unwrap()
            .flatten()
            .filter(|it| std::fs::read_dir(it.path()).unwrap().next().is_some())
            .count(),
        0
    );
    // The tree equals that of the composefs image of the same files.
    let composefs = import(&store, "composefs", &two).unwrap();
    let dump = |id: &ImageId| {
        let tree = store.tree(&store.open_image(id).unwrap(), Owners::AsWritten).unwrap().tree;
        let mut found = Vec::new();
        let mut walk = tree.walk();
        while let Some((path, entry)) = walk.next() {
            found.push((path.to_vec(), format!("{:?}", entry.inode.node())));
        }
        found
    };
    assert_eq!(dump(&second), dump(&composefs));
    assert!(dump(&second).len() > 24);
}

/// A native image from before the first release cannot be opened. It is not damaged, and the items that it needs are
/// kept.
#[test]
fn an_image_of_an_earlier_version_is_refused() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let files = sample("old", 12);
    let image = import_as(&store, "old", &files, Form::Packed).unwrap();
    let devices = || store.devices.directory.existing().unwrap().list().unwrap().len();
    let before = devices();
    let bytes = std::fs::read(directory.path().join("images").join(image.to_string())).unwrap();
    // Without a header, and with a header of version 1.
    for (at, other) in [(0, 0), (8, 1)] {
        let mut bytes = bytes.clone();
        bytes[at] = other;
        let import = store.begin().unwrap();
        for file in files.values().filter(|it| it.len() > 64) {
            find_again(&import, file).unwrap();
        }
        let mut draft = import.image().unwrap();
        draft.write_all(&bytes).unwrap();
        let image = draft.finish().unwrap();
        let (form, created) = (Form::Packed, crate::Seconds(1));
        let reference = crate::Reference { image, manifest: None, form, created };
        import.set_ref("old".parse().unwrap(), reference);
        import.commit().unwrap();
        super::check_clean(&store).unwrap();
        assert_eq!(store.images.ids().unwrap(), [image]);
        assert_eq!(devices(), before);
        let memory = store.memory().unwrap().finish().unwrap();
        assert!(memory.unreadable.is_empty(), "{:?}", memory.unreadable);
        let error = store.open_image(&image).unwrap_err().to_string();
        let expected = format!(
            "image {image} has no header of this version: it is damaged, or an earlier \
             version of Quire wrote it; pull or import it again"
        );
        assert_eq!(error, expected);
    }
}

#[test]
fn a_device_that_is_not_as_the_image_says_is_never_mounted() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let image = import_as(&store, "one", &sample("one", 12), Form::Packed).unwrap();
    let opened = store.open_image(&image).unwrap();
    let (device, bytes) = (opened.devices[0].id, opened.devices[0].bytes);
    drop(opened);
    let path = directory.path().join("data").join(device.to_string());
    let mut permissions = std::fs::metadata(&path).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o644);
    std::fs::set_permissions(&path, permissions).unwrap();
    let why = || {
        let error = store.open_image(&image).unwrap_err();
        crate::check::check_error::chain(&error)
    };
    for length in [0, bytes - 4096, bytes - 1, bytes + 4096] {
        std::fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        let text = why();
        let wanted = format!("device {device} has {length} bytes, not {bytes}");
        assert!(text.contains(&wanted) && text.contains("quire fsck"), "{text}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(why().contains(&format!("device {device} is not in the store")), "{}", why());
    std::fs::create_dir(&path).unwrap();
    assert!(why().contains("not a regular file"), "{}", why());
    std::fs::remove_dir(&path).unwrap();
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    assert!(why().contains("not a regular file"), "{}", why());
}

/// All data is inside the image.
#[test]
fn a_native_image_of_small_files_has_no_devices() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let files = sample("small", 0);
    let image = import_as(&store, "small", &files, Form::Packed).unwrap();
    let opened = store.open_image(&image).unwrap();
    assert_eq!((opened.form, opened.devices.len()), (Form::Packed, 0));
    drop(opened);
    super::check_clean(&store).unwrap();
    store.remove_ref(&"small".parse().unwrap()).unwrap();
    super::check_clean(&store).unwrap();
    assert!(store.devices.directory.get().unwrap().is_none());
}

#[test]
fn an_image_without_its_device_is_not_committed() {
    let (here, there) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let store = open(here.path());
    let image = import_as(&store, "one", &sample("one", 12), Form::Packed).unwrap();
    let bytes = std::fs::read(here.path().join("images").join(image.to_string())).unwrap();
    let import = open(there.path());
    let import = import.begin().unwrap();
    let mut draft = import.image().unwrap();
    draft.write_all(&bytes).unwrap();
    draft.finish().unwrap();
    let error = import.commit().unwrap_err();
    assert!(matches!(error, TransactionError::NoDevice { .. }), "{error}");
}

/// Two versions of a file share most pieces, so the images use different parts of the same device.
#[test]
fn pieces_of_two_images_are_in_memory_for_both() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let one = super::pieces::import_pieces(&store, "one", &[("file", "abcd")]).unwrap();
    let two = super::pieces::import_pieces(&store, "two", &[("file", "abXd")]).unwrap();
    for file in std::fs::read_dir(directory.path().join("data")).unwrap() {
        std::fs::read(file.unwrap().path()).unwrap();
    }
    let used = store.memory().unwrap().finish().unwrap();
    let of = |image| {
        let it = used.images.iter().find(|it| it.image == image).unwrap();
        (it.bytes - it.metadata, it.shared, it.twice)
    };
    // A piece has 8192 bytes. Both images use a, b and d; one of them uses c and the other X.
    assert_eq!((of(one), of(two)), ((4 * 8192, 3 * 8192, 0), (4 * 8192, 3 * 8192, 0)));
    let metadata: u64 = used.images.iter().map(|it| it.metadata).sum();
    assert_eq!((used.total - metadata, used.shared, used.twice), (5 * 8192, 3 * 8192, 0));
}
