//! Tests images that came with an index, until an import of their layers has proven them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use image::digest::Digest;
use image::verity::ImageId;
use tempfile::TempDir;

use super::interrupted::crash::{Recorded, record};
use super::lazy::Lazy;
use super::{Failure, NOW, add_as, check, check_clean, import_as, name, open, sample};
use crate::shelf::downloads::unproven::MANIFESTS_MAX;
use crate::trace::Change;
use crate::{
    BlobFile, Damage, Form, FsckOptions, OpenImageError, OpenOptions, Presence, Store, StoreItem,
};

/// Imports the layers of the image of [`Lazy`], as a pull does.
pub(super) fn import_proven(store: &Store, text: &str) {
    let import = store.begin().unwrap();
    let reference = add_as(&import, &sample("one", 12), Form::Packed).unwrap();
    import.proven(reference.image, reference.manifest);
    import.set_ref(name(text), reference);
    import.commit().unwrap();
}

/// Imports the only device of the image of [`Lazy`], without a proof of that image.
fn bring_device(store: &Store) {
    import_as(store, "other", &sample("one", 12), Form::Packed).unwrap();
}

fn marked(store: &Store, image: &ImageId) -> Option<BTreeSet<Digest>> {
    store.downloads.unproven(image).unwrap()
}

#[test]
fn an_image_whose_last_device_another_import_brings_is_not_opened() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    lazy.publish(&store).unwrap();
    assert_eq!(marked(&store, &lazy.image), Some([lazy.manifest()].into()));
    bring_device(&store);
    assert_eq!(store.presence(&lazy.image).unwrap(), Presence::Unproven);
    let refused = store.open_image(&lazy.image).unwrap_err();
    assert!(matches!(refused, OpenImageError::Unproven(id) if id == lazy.image), "{refused}");
    assert!(refused.to_string().contains("quire pull"), "{refused}");
    // The names in the image may be read, as for any image whose devices are being filled.
    assert_eq!(store.open_names(&lazy.image).unwrap().presence, Presence::Unproven);
    assert!(store.du().unwrap().blobs > 0);

    import_proven(&store, "one");
    assert_eq!(marked(&store, &lazy.image), None);
    assert_eq!(store.open_image(&lazy.image).unwrap().presence, Presence::Complete);
    check(&store).unwrap();
}

/// An import has made the image. Then an index claims that the image also belongs to another manifest.
#[test]
fn a_claim_takes_nothing_from_an_image_that_was_imported() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    import_proven(&store, "one");
    let other = Digest::sha256(b"another manifest");
    let add = store.begin().unwrap();
    add.manifest(&other, b"another manifest").unwrap();
    add.unproven(lazy.image, other);
    add.commit().unwrap();
    assert_eq!(marked(&store, &lazy.image), Some([other].into()));
    let presence = |manifest: Option<&Digest>| store.presence_of(&lazy.image, manifest).unwrap();
    assert_eq!(presence(Some(&other)), Presence::Unproven);
    assert_eq!(presence(Some(&lazy.manifest())), Presence::Complete);
    assert_eq!(presence(None), Presence::Complete);
    check(&store).unwrap();
}

/// The layers of one manifest make the image, which proves nothing about another manifest.
#[test]
fn each_manifest_of_a_name_is_to_be_compared() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    let other = Digest::sha256(b"another manifest");
    let add = store.begin().unwrap();
    add.manifest(&other, b"another manifest").unwrap();
    add.commit().unwrap();
    lazy.publish(&store).unwrap();
    lazy.publish_as(&store, "two", other).unwrap();
    assert_eq!(marked(&store, &lazy.image), Some([lazy.manifest(), other].into()));
    import_proven(&store, "one");
    assert_eq!(marked(&store, &lazy.image), Some([other].into()));
    // The claim of the other manifest affects neither the proven manifest, nor uses of the image by its id.
    let presence = |manifest: Option<&Digest>| store.presence_of(&lazy.image, manifest).unwrap();
    assert_eq!(presence(Some(&other)), Presence::Unproven);
    assert_eq!(presence(Some(&lazy.manifest())), Presence::Complete);
    assert_eq!(presence(None), Presence::Complete);
    assert_eq!(store.open_image(&lazy.image).unwrap().presence, Presence::Complete);
    let of = |manifest| crate::Resolved { image: lazy.image, name: None, manifest };
    store.open_found(&of(Some(lazy.manifest()))).unwrap();
    let refused = store.open_found(&of(Some(other))).unwrap_err();
    assert!(matches!(refused, OpenImageError::Unproven(_)), "{refused}");
    // A second claim has no further effect.
    lazy.publish_as(&store, "two", other).unwrap();
    assert_eq!((presence(None), presence(Some(&other))), (Presence::Complete, Presence::Unproven));
    // The image has no name with that manifest any more.
    store.remove_ref(&name("two")).unwrap();
    import_proven(&store, "one");
    assert_eq!(marked(&store, &lazy.image), None);
}

/// Any user who may push can make any number of manifests for an image.
#[test]
fn a_mark_has_room_for_what_it_takes() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    lazy.publish(&store).unwrap();
    let claim = |count: usize| {
        let add = store.begin().unwrap();
        for number in 0..count {
            let mut longest = [0; 64];
            longest[..8].copy_from_slice(&(number as u64).to_le_bytes());
            add.unproven(lazy.image, Digest::from_sha512(&longest));
        }
        add.commit()
    };
    claim(MANIFESTS_MAX - 1).unwrap();
    assert_eq!(marked(&store, &lazy.image).unwrap().len(), MANIFESTS_MAX);
    let own = lazy.manifest();
    assert_eq!(store.presence_of(&lazy.image, Some(&own)).unwrap(), Presence::Partial);
    // If manifests lose their names, the mark has space again.
    let other = Digest::sha256(b"another manifest");
    let add = store.begin().unwrap();
    add.manifest(&other, b"another manifest").unwrap();
    add.commit().unwrap();
    lazy.publish_as(&store, "two", other).unwrap();
    assert_eq!(marked(&store, &lazy.image), Some([own, other].into()));
    // A mark that would be too long is refused before any name is set, and the old mark stays.
    let refused = claim(MANIFESTS_MAX - 1).unwrap_err();
    assert!(format!("{refused:?}").contains("4097 manifests"), "{refused:?}");
    assert_eq!(marked(&store, &lazy.image), Some([own, other].into()));
    import_proven(&store, "one");
    assert_eq!(marked(&store, &lazy.image), Some([other].into()));
    check(&store).unwrap();
}

#[test]
fn a_mark_goes_with_its_image() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    lazy.publish(&store).unwrap();
    store.gc(NOW).unwrap();
    assert!(marked(&store, &lazy.image).is_some());
    store.remove_ref(&name("one")).unwrap();
    // A running import may have found the image, and then restores it.
    let import = store.begin().unwrap();
    assert!(import.reuse_image(&lazy.image).unwrap());
    store.gc(NOW).unwrap();
    assert!(store.images.has(&lazy.image).unwrap() && marked(&store, &lazy.image).is_some());
    import.forget_lists();
    super::eventually(|| {
        store.gc(NOW).unwrap();
        !store.images.has(&lazy.image).unwrap()
    });
    assert!(marked(&store, &lazy.image).is_some());
    import.commit().unwrap();
    assert!(store.images.has(&lazy.image).unwrap() && marked(&store, &lazy.image).is_some());
    super::eventually(|| {
        store.gc(NOW).unwrap();
        marked(&store, &lazy.image).is_none()
    });
    assert!(!store.images.has(&lazy.image).unwrap());
    check_clean(&store).unwrap();
}

fn spoil(directory: &TempDir, image: &ImageId, bytes: &[u8]) {
    let path = directory.path().join("blobs").join(BlobFile::Unproven(*image).file_name());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_mark_is_told_and_made_again() {
    let lazy = Lazy::new();
    for (bytes, expected) in [
        (&b""[..], "it is empty"),
        (b"{}\nsha256:0\n", "checksum"),
        (&crate::record::encode(&"another record"), "its contents are invalid"),
    ] {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        lazy.publish(&store).unwrap();
        bring_device(&store);
        spoil(&directory, &lazy.image, bytes);
        // A damaged mark suffices to refuse the image.
        assert!(matches!(store.open_image(&lazy.image), Err(OpenImageError::Unproven(_))));
        let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
        let item = StoreItem::Blob(BlobFile::Unproven(lazy.image));
        let [(Damage::Bad(told, why), _)] = &report.damage[..] else { panic!("{report:?}") };
        assert!(*told == item && why.contains(expected), "{why}");
        assert_eq!(store.remove_damaged(&report).unwrap(), 1);
        // The name shows which manifest it was.
        assert_eq!(marked(&store, &lazy.image), Some([lazy.manifest()].into()));
        assert_eq!(store.presence(&lazy.image).unwrap(), Presence::Unproven);
        check(&store).unwrap();
        // Imports work without a repair.
        spoil(&directory, &lazy.image, bytes);
        lazy.publish(&store).unwrap();
        assert_eq!(marked(&store, &lazy.image), Some([lazy.manifest()].into()));
        spoil(&directory, &lazy.image, bytes);
        for each in ["one", "other"] {
            import_proven(&store, each);
        }
        assert_eq!(marked(&store, &lazy.image), None);
    }
}

#[test]
fn a_mark_of_another_image_is_damage() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    lazy.publish(&store).unwrap();
    let blobs = directory.path().join("blobs");
    let other: ImageId = super::data::id(b"another image").to_string().parse().unwrap();
    let [from, to] = [lazy.image, other].map(|it| blobs.join(BlobFile::Unproven(it).file_name()));
    fs::copy(from, to).unwrap();
    let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
    let [(Damage::Bad(_, why), _)] = &report.damage[..] else { panic!("{report:?}") };
    assert!(why.contains(&lazy.image.to_string()), "{why}");
    // A crash may leave a mark without its image, which is not damage.
    store.remove_damaged(&report).unwrap();
    check(&store).unwrap();
    store.gc(NOW).unwrap();
    assert_eq!((marked(&store, &other), marked(&store, &lazy.image).is_some()), (None, true));
}

fn reopen(directory: &Path) -> Result<Store, Failure> {
    Ok(Store::open(directory, crate::Who::this_process(), OpenOptions::write())?)
}

/// Checks that an image which its layers may not make never exists without its mark.
fn judge_marked(recorded: &Recorded, lazy: &Lazy) -> Result<usize, Failure> {
    recorded.replay(&|directory, _| {
        let store = reopen(directory)?;
        if store.images.has(&lazy.image)? && !store.downloads.is_unproven(&lazy.image)? {
            return Err("it is taken for one that was compared with its layers".into());
        }
        check(&store)?;
        check_clean(&store)?;
        Ok(())
    })
}

fn is_mark(change: &Change) -> bool {
    let is = |path: &Path| path.extension().is_some_and(|it| it == "unproven");
    matches!(change, Change::Rename(_, path) | Change::Unlink(path) if is(path))
}

#[test]
fn a_mark_is_there_before_its_image_whenever_the_machine_stops() {
    let lazy = Lazy::new();
    let recorded = || record(|_| {}, |store| assert!(lazy.publish(store).unwrap()));
    let seen = judge_marked(&recorded(), &lazy).unwrap();
    assert!(seen > 10, "{seen} states");
    // The test detects a mark that is set last, or that is not synced before its image gets its name.
    let mut late = recorded();
    let mark = late.changes.iter().position(is_mark).unwrap();
    let change = late.changes.remove(mark);
    late.changes.push(change);
    judge_marked(&late, &lazy).unwrap_err();
    let mut unsynced = recorded();
    assert!(
        matches!(&unsynced.changes[mark + 1], Change::SyncDirectory(it) if it.ends_with("blobs"))
    );
    unsynced.changes.remove(mark + 1);
    judge_marked(&unsynced, &lazy).unwrap_err();
}

#[test]
fn a_mark_goes_after_its_image_whenever_the_machine_stops() {
    let lazy = Lazy::new();
    let prepare = |store: &Store| {
        lazy.publish(store).unwrap();
        store.remove_ref(&name("one")).unwrap();
    };
    let collect = |store: &Store| {
        super::eventually(|| {
            store.gc(NOW).unwrap();
            !store.downloads.is_unproven(&lazy.image).unwrap()
        });
    };
    judge_marked(&record(prepare, collect), &lazy).unwrap();
    let mut wrong = record(prepare, collect);
    let is_sync = |it: &Change| matches!(it, Change::SyncDirectory(it) if it.ends_with("images"));
    let sync = wrong.changes.iter().position(is_sync).unwrap();
    wrong.changes.remove(sync);
    judge_marked(&wrong, &lazy).unwrap_err();
}

/// A name whose manifest was not compared is never restored without the mark.
#[test]
fn a_proof_goes_no_further_than_it_should_whenever_the_machine_stops() {
    let lazy = Lazy::new();
    let other = Digest::sha256(b"another manifest");
    let prepare = |store: &Store| {
        let add = store.begin().unwrap();
        add.manifest(&other, b"another manifest").unwrap();
        add.commit().unwrap();
        lazy.publish_as(store, "one", other).unwrap();
    };
    // The name is set to the proven manifest.
    let recorded = || record(prepare, |store| import_proven(store, "one"));
    let judge = |recorded: &Recorded| {
        recorded.replay(&|directory, at| {
            let store = reopen(directory)?;
            let is_unproven = store.downloads.is_unproven(&lazy.image)?;
            let named = store.refs.get(&name("one"))?.ok_or("no name")?;
            if named.manifest == Some(other) && !is_unproven {
                return Err("nobody has compared it with these layers".into());
            }
            if at == recorded.changes.len() && is_unproven {
                return Err("it was compared, and has its mark".into());
            }
            Ok(())
        })
    };
    let seen = judge(&recorded()).unwrap();
    assert!(seen > 10, "{seen} states");
    let mut wrong = recorded();
    let is_sync = |it: &Change| matches!(it, Change::SyncDirectory(it) if it.ends_with("refs"));
    let sync = wrong.changes.iter().position(is_sync).unwrap();
    wrong.changes.remove(sync);
    judge(&wrong).unwrap_err();
}
