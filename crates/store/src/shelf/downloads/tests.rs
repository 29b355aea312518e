use super::{BlobFile, PIN_SECONDS};
use crate::{Digest, OpenOptions, Seconds, Store};

pub(super) fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(
        &folder.path().join("store"),
        crate::Who::this_process(),
        OpenOptions::create(),
    )
    .unwrap();
    (folder, store)
}

fn check_name(name: &str, expected: Option<BlobFile>) {
    assert_eq!(BlobFile::parse(name), expected, "{name}");
    if let Some(file) = expected {
        assert_eq!(file.file_name(), name);
    }
}

#[test]
fn names() {
    let digest = Digest::sha256(b"");
    // SHA-256 of the empty message. Source: FIPS 180-4 test vectors.
    let name = "sha256-e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    check_name(name, Some(BlobFile::Whole(digest)));
    check_name(&format!("{name}.partial"), Some(BlobFile::Partial(digest)));
    check_name(&format!("{name}.pull"), Some(BlobFile::Pin(digest)));
    check_name(&format!("{name}.chunks"), Some(BlobFile::Chunks(digest)));
    check_name(&format!("{name}.signatures"), Some(BlobFile::Signatures(digest)));
    let image = "ab".repeat(32);
    let of_image = BlobFile::ImageSignatures(image.parse().unwrap());
    check_name(&format!("{image}.signatures"), Some(of_image));
    check_name(&format!("{name}.index"), Some(BlobFile::Index(digest)));
    check_name(&format!("{name}.start"), Some(BlobFile::Start(digest)));
    for bad in ["", ".partial", "sha256-00.pull", &format!("{name}.partial.pull"), "lost+found"] {
        check_name(bad, None);
    }
}

#[test]
fn what_was_added_is_found_again() {
    let (_folder, store) = store();
    let digest = Digest::sha256(b"0123456789");
    let mut partial = store.downloads.partial(&digest).unwrap().unwrap();
    partial.append(b"01234").unwrap();
    assert!(store.downloads.partial(&digest).unwrap().is_none(), "somebody else has it");
    drop(partial);
    let mut partial = store.downloads.partial(&digest).unwrap().unwrap();
    assert_eq!(partial.length(), 5);
    let mut bytes = [0; 10];
    assert_eq!(partial.read_at(&mut bytes, 2).unwrap(), 3);
    assert_eq!(&bytes[..3], b"234");
    assert!(store.downloads.blob(&digest).unwrap().is_none());
    partial.append(b"56789").unwrap();
    partial.finish().unwrap();
    let (file, length) = store.downloads.blob(&digest).unwrap().unwrap();
    assert_eq!((std::io::read_to_string(file).unwrap().as_str(), length), ("0123456789", 10));
    let partial = store.downloads.partial(&digest).unwrap().unwrap();
    assert_eq!(partial.length(), 0);
    partial.discard().unwrap();
    assert_eq!(store.downloads.list().unwrap().names, [BlobFile::Whole(digest)]);
}

#[test]
fn a_pin_keeps_what_a_pull_has() {
    let (_folder, store) = store();
    let now = Seconds(1_000_000_000);
    let layer = Digest::sha256(b"layer");
    let manifest = format!(r#"{{"layers":[{{"digest":"{layer}"}}]}}"#);
    let digest = Digest::sha256(manifest.as_bytes());
    let import = store.begin().unwrap();
    import.manifest(&digest, manifest.as_bytes()).unwrap();
    import.commit().unwrap();
    store.downloads.partial(&layer).unwrap().unwrap().append(b"lay").unwrap();
    let other = Digest::sha256(b"other");
    store.downloads.partial(&other).unwrap().unwrap().append(b"oth").unwrap();

    store.downloads.pin(&digest, now).unwrap();
    store.gc(now).unwrap();
    let both = [BlobFile::Partial(layer), BlobFile::Pin(digest)];
    assert_eq!(store.downloads.list().unwrap().names, both, "that of no pull is garbage");
    store.gc(Seconds(now.0 + PIN_SECONDS)).unwrap();
    assert_eq!(store.downloads.list().unwrap().names, both);
    let held = store.downloads.partial(&layer).unwrap().unwrap();
    store.gc(Seconds(now.0 + PIN_SECONDS + 1)).unwrap();
    assert_eq!(
        store.downloads.list().unwrap().names,
        [BlobFile::Partial(layer)],
        "a pull adds to it"
    );
    assert!(store.manifests.read(&digest).unwrap().is_none());
    drop(held);
    store.gc(now).unwrap();
    assert!(store.downloads.list().unwrap().names.is_empty());
    assert!(!store.downloads.unpin(&digest).unwrap());
}

#[test]
fn a_damaged_pin_holds_nothing() {
    let (folder, store) = store();
    let digest = Digest::sha256(b"manifest");
    store.downloads.pin(&digest, Seconds(5)).unwrap();
    let path = folder.path().join("store/blobs").join(BlobFile::Pin(digest).file_name());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"{}\n").unwrap();
    assert!(!store.downloads.is_pinned(&digest, Seconds(5)).unwrap());
}

#[test]
fn signatures_live_as_long_as_their_manifest() {
    let (folder, store) = store();
    let (now, manifest) = (Seconds(5), b"{\"a\":1}");
    let digest = Digest::sha256(manifest);
    assert_eq!(store.downloads.signatures(&digest).unwrap(), None);
    store.downloads.pin(&digest, now).unwrap();
    let import = store.begin().unwrap();
    import.manifest(&digest, manifest).unwrap();
    import.commit().unwrap();
    store.downloads.set_signatures(&digest, b"one").unwrap();
    store.downloads.set_signatures(&digest, b"two").unwrap();
    let path = folder.path().join("store/blobs").join(BlobFile::Signatures(digest).file_name());
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
    assert_eq!(mode & 0o7777, 0o444);
    store.downloads.set_signatures(&Digest::sha256(b"another"), b"lost").unwrap();
    store.gc(now).unwrap();
    assert_eq!(store.downloads.signatures(&digest).unwrap().as_deref(), Some(&b"two"[..]));
    assert_eq!(store.downloads.signatures(&Digest::sha256(b"another")).unwrap(), None);
    assert!(store.downloads.set_signatures(&digest, &vec![0; (16 << 20) + 1]).is_err());
    assert!(store.fsck(Default::default()).unwrap().is_sound());
    store.downloads.unpin(&digest).unwrap();
    store.gc(now).unwrap();
    assert!(store.downloads.list().unwrap().names.is_empty());
}

#[test]
fn signatures_of_an_image_live_as_long_as_the_image() {
    let (_folder, store) = store();
    let import = store.begin().unwrap();
    let tree =
        image::dump::parse(&b"/ 0 40755 2 0 0 0 0.0 - - -\n"[..], image::dump::Strictness::Strict)
            .unwrap();
    let mut draft = import.image().unwrap();
    let profile = image::erofs::Profile::Composefs(image::erofs::Versions::default());
    image::erofs::write(&tree, &profile, &mut draft).unwrap();
    let image = draft.finish().unwrap();
    let reference =
        crate::Reference { image, manifest: None, form: crate::Form::Objects, created: Seconds(1) };
    let name: crate::RefName = "name".parse().unwrap();
    import.set_ref(name.clone(), reference);
    import.commit().unwrap();
    assert_eq!(store.downloads.image_signatures(&image).unwrap(), None);
    store.downloads.set_image_signatures(&image, b"one").unwrap();
    let lost = "ab".repeat(32).parse().unwrap();
    store.downloads.set_image_signatures(&lost, b"lost").unwrap();
    assert!(store.downloads.set_image_signatures(&image, &vec![0; (16 << 20) + 1]).is_err());
    store.gc(Seconds(2)).unwrap();
    assert_eq!(store.downloads.image_signatures(&image).unwrap().as_deref(), Some(&b"one"[..]));
    assert_eq!(store.downloads.image_signatures(&lost).unwrap(), None);
    assert!(store.fsck(Default::default()).unwrap().is_sound());
    store.remove_ref(&name).unwrap();
    store.gc(Seconds(2)).unwrap();
    assert!(store.downloads.list().unwrap().names.is_empty());
}
