//! Indexes of lazy devices, and images whose devices are filled later.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use image::digest::Digest;
use image::gzip::Start;
use image::lazy::{BlobKind, Head, SpanPlace, UNIT, WindowGroup};
use image::verity::{DeviceId, ImageId};
use tempfile::TempDir;

use super::interrupted::crash::{Recorded, record};
use super::{Failure, NOW, check, import_as, name, open, sample};
use crate::trace::Change;
use crate::{
    Damage, DeviceKind, Form, FsckOptions, IndexWindows, LazyDeviceError, LazyDeviceFile,
    LazyDeviceState, LazyIndexDamage, OpenImageError, OpenOptions, Presence, Reference, Store,
    StoreItem, TransactionError,
};

/// A native image with everything that a store without its device needs.
pub(super) struct Lazy {
    pub(super) image: ImageId,
    bytes: Vec<u8>,
    documents: Vec<(Digest, Vec<u8>)>,
    pub(super) reference: Reference,
    pub(super) head: Head,
    windows: Vec<u8>,
    device: Vec<u8>,
}

pub(super) fn device(id: &str) -> DeviceId {
    image::verity::digest(image::verity::Algorithm::Sha256, id.as_bytes()).into()
}

/// Makes a head with the right lengths. It does not describe real compressed data.
pub(super) fn head(device: DeviceId, bytes: &[u8], diff_id: Digest, windows: &[u8]) -> Head {
    let start = SpanPlace { start: Start::Member, packed: 0, unpacked: 0, padding: 0 };
    let unit = |it: &[u8]| Digest::sha256(it).as_bytes().try_into().unwrap();
    Head {
        device,
        device_bytes: bytes.len() as u64,
        blob: Digest::sha256(b"a blob"),
        blob_bytes: 1000,
        kind: BlobKind::Gzip,
        diff_id,
        tar_bytes: bytes.len() as u64,
        tail: Vec::new(),
        units: bytes.chunks(usize::try_from(UNIT).unwrap()).map(unit).collect(),
        spans: vec![start],
        groups: vec![WindowGroup { first: 0, bytes: windows.len().try_into().unwrap() }],
    }
}

/// Makes a head of a device that does not exist.
fn some_head(id: &str, windows: &[u8]) -> Head {
    head(device(id), &[7; 1024], Digest::sha256(id.as_bytes()), windows)
}

impl Lazy {
    pub(super) fn new() -> Self {
        Self::of_sample("one")
    }

    pub(super) fn of_sample(text: &str) -> Self {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        let image = import_as(&store, text, &sample(text, 12), Form::Packed).unwrap();
        let device = store.open_image(&image).unwrap().devices[0].id;
        let read = |path: PathBuf| fs::read(directory.path().join(path)).unwrap();
        let bytes = read(Path::new("images").join(image.to_string()));
        let devices = read(Path::new("data").join(device.to_string()));
        let reference = store.refs.get(&name(text)).unwrap().unwrap();
        let documents = store.manifests.list().unwrap().names.into_iter();
        let documents = documents.map(|it| (it, store.manifests.read(&it).unwrap().unwrap()));
        let diff_id = *store.layers.diff_ids().unwrap().first().unwrap();
        let windows = b"windows".to_vec();
        Self {
            image,
            bytes,
            documents: documents.collect(),
            reference,
            head: head(device, &devices, diff_id, &windows),
            windows,
            device: devices,
        }
    }

    pub(super) fn groups(&self) -> IndexWindows {
        IndexWindows::Groups(self.windows.clone())
    }

    pub(super) fn publish(&self, store: &Store) -> Result<bool, TransactionError> {
        self.publish_as(store, "one", self.manifest())
    }

    /// Publishes the image under a name, as the image of a manifest.
    pub(super) fn publish_as(
        &self,
        store: &Store,
        text: &str,
        manifest: Digest,
    ) -> Result<bool, TransactionError> {
        self.publish_with(store, text, manifest, self.groups())
    }

    /// Does the same with these windows.
    pub(super) fn publish_with(
        &self,
        store: &Store,
        text: &str,
        manifest: Digest,
        windows: IndexWindows,
    ) -> Result<bool, TransactionError> {
        let import = store.begin()?;
        let is_lazy = import.lazy_device(self.head.clone(), windows, manifest).unwrap();
        let mut image = import.image().unwrap();
        image.write_all(&self.bytes).unwrap();
        assert!(image.finish().unwrap() == self.image);
        for (digest, bytes) in &self.documents {
            import.manifest(digest, bytes).unwrap();
        }
        import.unproven(self.image, manifest);
        let reference = Reference { manifest: Some(manifest), ..self.reference.clone() };
        import.set_ref(name(text), reference);
        import.commit().map(|_| is_lazy)
    }

    pub(super) fn manifest(&self) -> Digest {
        self.reference.manifest.unwrap()
    }

    pub(super) fn id(&self) -> &DeviceId {
        &self.head.device
    }
}

pub(super) fn damage(store: &Store) -> Vec<Damage> {
    let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
    report.damage.into_iter().map(|it| it.0).collect()
}

pub(super) fn path(directory: &TempDir, file: LazyDeviceFile) -> PathBuf {
    directory.path().join("lazy").join(file.file_name())
}

pub(super) fn in_lazy_devices(directory: &TempDir) -> Vec<String> {
    let names = fs::read_dir(directory.path().join("lazy")).unwrap();
    let mut names: Vec<_> =
        names.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn an_index_is_kept_and_replaced() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (first, second) = (some_head("a", b"first"), some_head("a", b"the second"));
    assert!(store.lazy_devices.index(&first.device).unwrap().is_none());
    store.put_index(&first, b"first").unwrap();
    let meta = crate::Meta::decode(&fs::read(directory.path().join("meta")).unwrap()).unwrap();
    assert!(meta.has_lazy_devices);
    for file in [LazyDeviceFile::Index(first.device), LazyDeviceFile::Windows(first.device)] {
        let mode = fs::metadata(path(&directory, file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o444);
    }
    let read = || open(directory.path()).lazy_devices.index(&first.device).unwrap().unwrap();
    assert!(read() == (first.clone(), IndexWindows::Groups(b"first".to_vec())));
    store.put_index(&second, b"the second").unwrap();
    store.put_index(&second, b"the second").unwrap();
    assert!(read() == (second, IndexWindows::Groups(b"the second".to_vec())));
    assert!(store.lazy_devices.index_head(&device("b")).unwrap().is_none());
    // Without a device, the index is garbage.
    store.gc(NOW).unwrap();
    assert!(in_lazy_devices(&directory).is_empty());

    let wrong = store.put_index(&first, b"of another length");
    let why = LazyIndexDamage::Windows { expected: 5, actual: 17 };
    assert!(matches!(wrong, Err(LazyDeviceError::Index { source, .. }) if source == why));
    let who = crate::Who::this_process();
    let store = Store::open(directory.path(), who, OpenOptions::read()).unwrap();
    assert!(matches!(store.put_index(&first, b"first"), Err(LazyDeviceError::ReadOnly(_))));
}

#[test]
fn a_damaged_index_is_told_and_removed() {
    type Spoil = fn(&Path, &Path);
    let cases: [(&str, Spoil); 5] = [
        ("its digest is wrong", |head, _| {
            let mut bytes = fs::read(head).unwrap();
            bytes[100] ^= 1;
            fs::write(head, bytes).unwrap();
        }),
        ("it is not an index", |head, _| fs::write(head, b"").unwrap()),
        ("its windows have 6 bytes, not 7", |_, windows| fs::write(windows, b"shorte").unwrap()),
        ("its windows are missing", |_, windows| fs::remove_file(windows).unwrap()),
        ("it belongs to device", |head, _| {
            fs::write(head, some_head("other", b"windows").encode().unwrap()).unwrap();
        }),
    ];
    let lazy = Lazy::new();
    for (expected, spoil) in cases {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        lazy.publish(&store).unwrap();
        assert_eq!(damage(&store), []);
        let claimed_by = Some(lazy.manifest());
        let [head, windows] =
            [LazyDeviceFile::index, LazyDeviceFile::windows].map(|it| it(*lazy.id(), claimed_by));
        for file in [head, windows] {
            let writable = fs::Permissions::from_mode(0o600);
            fs::set_permissions(path(&directory, file), writable).unwrap();
        }
        spoil(&path(&directory, head), &path(&directory, windows));
        let index = || store.lazy_devices.index_for(lazy.id(), claimed_by.as_ref());
        let error = index().unwrap_err();
        assert!(error.to_string().contains("quire index NAME"), "{error}");
        let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
        let told = report.damage.iter().find_map(|it| match &it.0 {
            Damage::Bad(item, why) if *item == StoreItem::LazyDevice(head) => Some(why.clone()),
            _ => None,
        });
        assert!(told.as_ref().is_some_and(|it| it.contains(expected)), "{expected}: {told:?}");
        // Without the index the device cannot be filled, so it is also reported, but not removed.
        assert_eq!(store.remove_damaged(&report).unwrap(), 1);
        assert!(index().unwrap().is_none());
        assert!(store.lazy_devices.stat(lazy.id()).unwrap().is_some());
        // Windows without a head are garbage. The image can be published again.
        store.gc(NOW).unwrap();
        assert_eq!(in_lazy_devices(&directory).len(), 2);
        assert!(!damage(&store).is_empty());
        lazy.publish(&store).unwrap();
        assert_eq!(damage(&store), []);
    }
}

#[test]
fn an_index_of_a_device_of_another_length_is_damage() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let head = some_head("a", b"");
    let _filling = store.create_lazy_device(&head.device, 512).unwrap();
    store.put_index(&head, b"").unwrap();
    let told = damage(&store);
    let [Damage::Bad(StoreItem::LazyDevice(LazyDeviceFile::Index(_)), why)] = told.as_slice()
    else {
        panic!("{told:?}")
    };
    assert_eq!(why, "it belongs to a device of 1024 bytes, not 512");
}

#[test]
fn an_index_lives_as_long_as_its_device() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (a, b) = (some_head("a", b"1"), some_head("b", b"2"));
    let filling = store.create_lazy_device(&a.device, a.device_bytes).unwrap();
    for (head, windows) in [(&a, b"1"), (&b, b"2")] {
        store.put_index(head, windows).unwrap();
    }
    store.gc(NOW).unwrap();
    assert_eq!(in_lazy_devices(&directory).len(), 4, "of one that is filled, and of none");
    // A crash may leave windows without a head.
    fs::remove_file(path(&directory, LazyDeviceFile::Index(a.device))).unwrap();
    store.gc(NOW).unwrap();
    assert_eq!(in_lazy_devices(&directory).len(), 2);
    store.put_index(&a, b"1").unwrap();
    drop(filling);
    super::eventually(|| {
        store.gc(NOW).unwrap();
        in_lazy_devices(&directory).is_empty()
    });

    // The index of a complete device is kept until the device is removed.
    let image = import_as(&store, "full", &sample("full", 12), Form::Packed).unwrap();
    let whole = store.open_image(&image).unwrap().devices[0].id;
    store.put_index(&head(whole, &[0; 512], Digest::sha256(b"x"), b"3"), b"3").unwrap();
    store.gc(NOW).unwrap();
    assert_eq!(in_lazy_devices(&directory).len(), 2);
    store.remove_ref(&name("full")).unwrap();
    super::eventually(|| {
        store.gc(NOW).unwrap();
        in_lazy_devices(&directory).is_empty()
    });
}

#[test]
fn an_image_is_there_before_its_devices() {
    let lazy = Lazy::new();
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    assert!(lazy.publish(&store).unwrap());
    assert_eq!(check(&store).unwrap(), [("one:latest".to_owned(), lazy.image)].into());
    assert_eq!(store.presence(&lazy.image).unwrap(), Presence::Partial);
    assert_eq!(store.lazy_devices(&lazy.image).unwrap(), [*lazy.id()]);
    let refused = store.open_image(&lazy.image).unwrap_err();
    assert!(matches!(refused, OpenImageError::Partial(id) if id == lazy.image), "{refused}");
    // A verification of this image reports that bytes are not downloaded.
    assert_eq!(store.verify(&lazy.image, FsckOptions::default()).unwrap().damage.len(), 1);
    let info = store.lazy_devices.stat(lazy.id()).unwrap().unwrap();
    assert_eq!((info.state, info.on_disk), (LazyDeviceState::Partial, 0));
    let (_, swept) = store.gc(NOW).unwrap();
    assert_eq!(swept.removed, 0);
    let index = store.lazy_devices.index_for(lazy.id(), Some(&lazy.manifest()));
    assert!(index.unwrap().unwrap().0 == lazy.head);
    assert!(store.du().unwrap().lazy_devices > 0);

    // The image is published again although the device exists and is partly filled.
    store.fill_lazy_device(lazy.id()).unwrap().unwrap().write_at(&lazy.device[..512], 0).unwrap();
    assert!(lazy.publish(&store).unwrap());
    let (file, _) = store.lazy_devices.open(lazy.id()).unwrap().unwrap();
    let mut first = vec![0; 512];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut first, 0).unwrap();
    assert!(first == lazy.device[..512]);
    drop(file);

    store.remove_ref(&name("one")).unwrap();
    super::eventually(|| {
        store.gc(NOW).unwrap();
        in_lazy_devices(&directory).is_empty()
    });
    assert!(store.images.list().unwrap().names.is_empty());
    assert!(store.manifests.list().unwrap().names.is_empty());
    assert_eq!(damage(&store), []);
}

/// A device that an import has found complete is not created again. A complete device that is imported later replaces
/// an empty device.
#[test]
fn a_complete_device_takes_precedence() {
    let lazy = Lazy::new();
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    lazy.publish(&store).unwrap();
    super::unproven::import_proven(&store, "one");
    assert_eq!(store.presence(&lazy.image).unwrap(), Presence::Complete);
    store.open_image(&lazy.image).unwrap();
    super::eventually(|| {
        store.gc(NOW).unwrap();
        in_lazy_devices(&directory).len() == 2
    });
    let index = store.lazy_devices.index_for(lazy.id(), Some(&lazy.manifest()));
    assert!(index.unwrap().is_some());
    assert!(!lazy.publish(&store).unwrap());
    assert!(store.lazy_devices.stat(lazy.id()).unwrap().is_none());
    store.open_names(&lazy.image).unwrap();
    check(&store).unwrap();
}

/// A device from which `gc` has freed parts has holes, and a program would read them as zeros.
#[test]
fn a_device_with_holes_is_not_used_for_a_lazy_image() {
    let lazy = Lazy::of_sample("gone");
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    super::trim::half_dead(&store);
    let (_, swept) = store.gc(NOW).unwrap();
    assert!(swept.trimmed > 0, "{swept:?}");
    let published = lazy.publish(&store);
    assert!(
        matches!(&published, Err(TransactionError::LazyDevice(LazyDeviceError::Trimmed(id))) if id == lazy.id()),
        "{published:?}"
    );
    check(&store).unwrap();
}

/// A repair may have removed the index of a device with holes.
#[test]
fn a_filled_lazy_device_replaces_one_with_holes() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let import = store.begin().unwrap();
    let mut draft = import.device(DeviceKind::Tar).unwrap();
    draft.write_all(&[7; 8192]).unwrap();
    draft.set_layer(Digest::sha256(b"layer"));
    let device = draft.finish().unwrap();
    import.commit().unwrap();
    let path = directory.path().join("data").join(device.id.to_string());
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::remove_file(path.with_added_extension("index")).unwrap();
    fs::File::create(&path).unwrap().set_len(bytes.len() as u64).unwrap();
    let filling = open(directory.path());
    let filling = filling.create_lazy_device(&device.id, bytes.len() as u64).unwrap();
    filling.write_at(&bytes, 0).unwrap();
    filling.seal().unwrap();
    let store = open(directory.path());
    let import = store.begin().unwrap();
    let mut draft = import.sealed_device(&device.id).unwrap().unwrap();
    draft.write_all(&[7; 8192]).unwrap();
    draft.set_layer(Digest::sha256(b"layer"));
    assert_eq!(draft.finish().unwrap().id, device.id);
    import.commit().unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
}

#[test]
fn gc_beside_the_import_takes_nothing_from_it() {
    let lazy = Lazy::new();
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    lazy.publish(&store).unwrap();
    store.remove_ref(&name("one")).unwrap();
    let import = store.begin().unwrap();
    assert!(import.lazy_device(lazy.head.clone(), lazy.groups(), lazy.manifest()).unwrap());
    assert!(import.reuse_image(&lazy.image).unwrap());
    for (digest, bytes) in &lazy.documents {
        import.manifest(digest, bytes).unwrap();
    }
    // The import has listed the image, so the image and everything that it needs are kept.
    store.gc(NOW).unwrap();
    assert!(!in_lazy_devices(&directory).is_empty() && store.images.has(&lazy.image).unwrap());
    import.forget_lists();
    super::eventually(|| {
        store.gc(NOW).unwrap();
        in_lazy_devices(&directory).is_empty()
    });
    import.set_ref(name("one"), lazy.reference.clone());
    import.commit().unwrap();
    check(&store).unwrap();
    assert_eq!(store.presence(&lazy.image).unwrap(), Presence::Partial);
    assert!(store.downloads.is_unproven(&lazy.image).unwrap(), "its mark went before it came back");
}

#[test]
fn what_contradicts_the_store_is_refused() {
    let lazy = Lazy::new();
    let error = |published| match published {
        Err(TransactionError::LazyDevice(error)) => error,
        other => panic!("{other:?}"),
    };
    let refused = |store: &Store, lazy: &Lazy| error(lazy.publish(store));
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    lazy.publish(&store).unwrap();
    let manifest = Digest::sha256(b"another manifest");
    let add = store.begin().unwrap();
    add.manifest(&manifest, b"another manifest").unwrap();
    add.commit().unwrap();
    // The index has other digests for the same device. It is unknown which of the two indexes is wrong.
    let mut lying = Lazy::new();
    lying.head.units[0][0] ^= 1;
    let lied = error(lying.publish_as(&store, "two", manifest));
    assert!(matches!(lied, LazyDeviceError::OtherIndex(id) if id == *lazy.id()));
    // Another blob with the same tar is not a contradiction. The index of each manifest is kept, and counts only for
    // that manifest.
    let mut other = Lazy::new();
    other.head.blob = Digest::sha256(b"another blob");
    other.publish_as(&store, "two", manifest).unwrap();
    let of =
        |manifest| store.lazy_devices.index_for(lazy.id(), Some(&manifest)).unwrap().unwrap().0;
    assert!(of(lazy.manifest()) == lazy.head && of(manifest) == other.head);
    assert_eq!(store.lazy_devices.heads(lazy.id()).unwrap().len(), 2);
    assert!(
        store.lazy_devices.index(lazy.id()).unwrap().is_none(),
        "nobody has read the layer here"
    );
    // A later claim of the same manifest replaces its earlier one.
    other.head.blob = Digest::sha256(b"a third blob");
    other.publish_as(&store, "two", manifest).unwrap();
    assert!(of(lazy.manifest()) == lazy.head && of(manifest) == other.head);
    // The claimed index is removed with its manifest.
    store.remove_ref(&name("two")).unwrap();
    super::eventually(|| {
        store.gc(NOW).unwrap();
        store.lazy_devices.heads(lazy.id()).unwrap().len() == 1
    });
    assert!(of(lazy.manifest()) == lazy.head);
    check(&store).unwrap();

    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    store.create_lazy_device(lazy.id(), lazy.head.device_bytes).unwrap().seal().unwrap_err();
    assert!(matches!(refused(&store, &lazy), LazyDeviceError::Condemned(_)));
    assert!(store.refs.names().unwrap().is_empty());

    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    drop(store.create_lazy_device(lazy.id(), 512).unwrap());
    assert!(matches!(refused(&store, &lazy), LazyDeviceError::Indexed { actual: 512, .. }));

    // The index is for another device than that of the image, or for another length than the image states.
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    for spoil in [
        |it: &mut Head| it.device = device("x"),
        |it: &mut Head| {
            it.device_bytes += 512;
            it.tar_bytes += 512;
            it.units.resize(usize::try_from(it.device_bytes.div_ceil(UNIT)).unwrap(), [0; 32]);
        },
    ] {
        let mut wrong = Lazy::new();
        spoil(&mut wrong.head);
        let refused = wrong.publish(&store);
        assert!(matches!(refused, Err(TransactionError::NoDevice { .. })), "{refused:?}");
    }
}

/// Checks that after a crash either the image exists with all files that are needed to fill it, or none of them
/// exists.
fn judge(recorded: &Recorded, lazy: &Lazy) -> Result<usize, Failure> {
    recorded.replay(&|directory, at| {
        let who = crate::Who::this_process();
        let store = Store::open(directory, who, OpenOptions::write())?;
        let refs = check(&store)?;
        if at == recorded.changes.len() && refs.is_empty() {
            return Err("published, and not there".into());
        }
        if !refs.is_empty()
            && store.lazy_devices.index_for(lazy.id(), Some(&lazy.manifest()))?.is_none()
        {
            return Err("an image that nothing fills".into());
        }
        if super::check_clean(&store)? != refs {
            return Err("gc changed a ref".into());
        }
        if at.is_multiple_of(4) {
            lazy.publish(&store)?;
            if check(&store)?.len() != 1 {
                return Err("it is not published again".into());
            }
        }
        Ok(())
    })
}

fn record_publishing(lazy: &Lazy) -> Recorded {
    record(|_| {}, |store| assert!(lazy.publish(store).unwrap()))
}

#[test]
fn a_lazy_image_survives_a_crash_at_any_moment() {
    let lazy = Lazy::new();
    let seen = judge(&record_publishing(&lazy), &lazy).unwrap();
    assert!(seen > 10, "{seen} states");
}

#[test]
fn a_lazy_image_before_its_index_is_found_out() {
    let lazy = Lazy::new();
    let mut wrong = record_publishing(&lazy);
    let is_index = |it: &Change| matches!(it, Change::Rename(_, to) if to.extension().is_some_and(|it| it == "index"));
    let index = wrong.changes.iter().position(is_index).unwrap();
    let index = wrong.changes.remove(index);
    let refs = wrong.changes.iter().rposition(|it| matches!(it, Change::Rename(..))).unwrap();
    wrong.changes.insert(refs + 1, index);
    judge(&wrong, &lazy).unwrap_err();
}

/// Records an import of this many devices, and of an image that uses none of them.
fn record_devices(count: usize) -> Recorded {
    let publish = |store: &Store| {
        let import = store.begin().unwrap();
        for number in 0..count {
            let windows = number.to_string().into_bytes();
            let head = some_head(&format!("device {number}"), &windows);
            let windows = IndexWindows::Groups(windows);
            assert!(import.lazy_device(head, windows, Digest::sha256(b"manifest")).unwrap());
        }
        import.commit().unwrap();
    };
    record(|_| {}, publish)
}

#[test]
fn devices_of_one_import_are_synced_together() {
    let syncs = |recorded: &Recorded| {
        let is_sync = |it: &&Change| {
            matches!(it, Change::SyncFile(_) | Change::SyncDirectory(_) | Change::SyncEverything)
        };
        recorded.changes.iter().filter(is_sync).count()
    };
    let three = record_devices(3);
    assert!(three.changes.iter().any(|it| matches!(it, Change::SyncEverything)));
    assert_eq!(syncs(&three), syncs(&record_devices(7)));
}

#[test]
fn several_devices_survive_a_crash_at_any_moment() {
    let judge = |recorded: &Recorded| {
        recorded.replay(&|directory, at| {
            let who = crate::Who::this_process();
            let store = Store::open(directory, who, OpenOptions::write())?;
            let mut found = 0;
            for number in 0..3 {
                let device = device(&format!("device {number}"));
                let index = store.lazy_devices.index_for(&device, None)?;
                if let Some((_, windows)) = &index
                    && *windows != IndexWindows::Groups(number.to_string().into_bytes())
                {
                    return Err("windows of another head".into());
                }
                if store.lazy_devices.stat(&device)?.is_some() {
                    found += 1;
                    if index.is_none() {
                        return Err("a device that nothing fills".into());
                    }
                }
            }
            if at == recorded.changes.len() && found != 3 {
                return Err("published, and not there".into());
            }
            super::check_clean(&store)?;
            Ok(())
        })
    };
    let right = record_devices(3);
    let seen = judge(&right).unwrap();
    assert!(seen > 10, "{seen} states");
    let is_sync = |it: &Change| matches!(it, Change::SyncDirectory(path) if path.ends_with("lazy"));
    // These are the sync of windows before heads, the sync of heads before devices, and the final sync.
    let places: Vec<_> =
        (0..right.changes.len()).filter(|it| is_sync(&right.changes[*it])).collect();
    assert_eq!(places.len(), 3);
    for place in places {
        let mut wrong = record_devices(3);
        wrong.changes.remove(place);
        judge(&wrong).unwrap_err();
    }
    let mut wrong = record_devices(3);
    let everything = wrong.changes.iter().position(|it| matches!(it, Change::SyncEverything));
    wrong.changes.remove(everything.unwrap());
    judge(&wrong).unwrap_err();
}

/// A head must never have the windows of another index: a crash leaves the old index, the new one, or none.
#[test]
fn replacing_an_index_survives_a_crash_at_any_moment() {
    let lazy = Lazy::new();
    let mut other = lazy.head.clone();
    other.groups[0].bytes = 3;
    let recorded = || {
        record(
            |store| {
                assert!(lazy.publish(store).unwrap());
                store.put_index(&lazy.head, &lazy.windows).unwrap();
            },
            |store| store.put_index(&other, b"new").unwrap(),
        )
    };
    let seen = std::cell::Cell::new([false; 3]);
    let judge = |recorded: &Recorded| {
        recorded.replay(&|directory, _| {
            let who = crate::Who::this_process();
            let store = Store::open(directory, who, OpenOptions::write())?;
            let mut found = seen.get();
            match store.lazy_devices.index(lazy.id())? {
                None => found[0] = true,
                Some((head, _)) => found[if head == other { 2 } else { 1 }] = true,
            }
            seen.set(found);
            Ok(())
        })
    };
    judge(&recorded()).unwrap();
    assert_eq!(seen.get(), [true; 3], "none, old, new");
    // If the removal of the old head is not synced, it may still exist together with the new windows.
    let mut wrong = recorded();
    let sync = wrong
        .changes
        .iter()
        .position(|it| matches!(it, Change::SyncDirectory(path) if path.ends_with("lazy")));
    wrong.changes.remove(sync.unwrap());
    judge(&wrong).unwrap_err();
}

#[test]
fn removing_a_lazy_image_survives_a_crash_at_any_moment() {
    let lazy = Lazy::new();
    let recorded = || {
        record(
            |store| {
                lazy.publish(store).unwrap();
                store.remove_ref(&name("one")).unwrap();
            },
            // A child process of another test may have the device open for a moment.
            |store| super::eventually(|| store.gc(NOW).unwrap().1.removed >= 4),
        )
    };
    let judge = |recorded: &Recorded| {
        recorded.replay(&|directory, _| {
            let who = crate::Who::this_process();
            let store = Store::open(directory, who, OpenOptions::write())?;
            check(&store)?;
            super::check_clean(&store)?;
            Ok(())
        })
    };
    let right = recorded();
    assert!(judge(&right).unwrap() > 1);
    // If the directory is not synced in between, the windows may be removed before the head.
    let mut wrong = recorded();
    wrong.changes.retain(|it| !matches!(it, Change::SyncDirectory(path) if path.ends_with("lazy")));
    judge(&wrong).unwrap_err();
}
