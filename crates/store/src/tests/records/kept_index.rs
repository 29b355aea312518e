//! Indexes that are kept for other hosts.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use image::digest::Digest;
use tempfile::TempDir;

use crate::tests::{NOW, add, eventually, name, open, sample};
use crate::{FsckOptions, KeepIndexError, KeptIndex, KeptIndexError, Store};

const CONFIG: &[u8] = b"{\"version\":2}";
const START: &[u8] = b"start";
const WINDOWS: &[u8] = b"windows";

struct Kept {
    image: Digest,
    index: Digest,
}

/// Adds an image named `one`, and keeps an index of it.
fn keep(store: &Store) -> Kept {
    let import = store.begin().unwrap();
    let reference = add(&import, &sample("one", 2)).unwrap();
    let image = reference.manifest.unwrap();
    import.set_ref(name("one"), reference);
    import.commit().unwrap();
    let [config, start, windows] = [CONFIG, START, WINDOWS].map(Digest::sha256);
    let manifest = format!(
        r#"{{"config":{{"digest":"{config}"}},"layers":[{{"digest":"{start}"}},{{"digest":"{windows}"}}]}}"#
    );
    let index = Digest::sha256(manifest.as_bytes());
    let kept = KeptIndex {
        image: &image,
        index: &index,
        documents: &[(&config, CONFIG), (&index, manifest.as_bytes())],
        blobs: &[(&start, START), (&windows, WINDOWS)],
    };
    store.keep_index(&kept).unwrap();
    Kept { image, index }
}

fn files(directory: &TempDir, kept: &Kept) -> [PathBuf; 5] {
    let path = |folder: &str, name: String| directory.path().join(folder).join(name);
    [
        path("manifests", kept.index.file_name()),
        path("manifests", Digest::sha256(CONFIG).file_name()),
        path("blobs", Digest::sha256(START).file_name()),
        path("blobs", Digest::sha256(WINDOWS).file_name()),
        path("blobs", kept.image.file_name() + ".index"),
    ]
}

#[test]
fn a_kept_index_stays_with_its_image() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let kept = keep(&store);
    let all = files(&directory, &kept);
    eventually(|| {
        store.gc(NOW).unwrap();
        all.iter().all(|it| it.exists())
    });
    assert_eq!(store.downloads.kept_index(&kept.image).unwrap(), Some(kept.index));
    assert_eq!(store.downloads.kept_index(&kept.index).unwrap(), None);
    assert!(store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
    store.remove_ref(&name("one")).unwrap();
    eventually(|| {
        store.gc(NOW).unwrap();
        all.iter().all(|it| !it.exists())
    });
    assert_eq!(store.downloads.kept_index(&kept.image).unwrap(), None);
}

#[test]
fn damage_of_each_file_of_a_kept_index_is_found() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let kept = keep(&store);
    for file in files(&directory, &kept) {
        let right = fs::read(&file).unwrap();
        let mut wrong = right.clone();
        wrong[3] ^= 1;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, wrong).unwrap();
        let report = store.fsck_deep(FsckOptions::default()).unwrap();
        assert_eq!(report.damage.len(), 1, "{}: {:?}", file.display(), report.damage);
        if file.extension().is_some_and(|it| it == "index") {
            let found = store.downloads.kept_index(&kept.image);
            assert!(matches!(found, Err(KeptIndexError::Damaged { .. })));
            // A damaged record does not stop `gc`.
            store.plan_gc(NOW).unwrap();
        }
        fs::write(&file, right).unwrap();
    }
    assert!(store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
}

#[test]
fn only_blobs_with_their_digests_are_kept() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (image, blob) = (Digest::sha256(b"image"), Digest::sha256(b"blob"));
    let kept = KeptIndex { image: &image, index: &image, documents: &[], blobs: &[(&blob, b"x")] };
    let error = store.keep_index(&kept).unwrap_err();
    assert!(matches!(error, KeepIndexError::Blob { .. }), "{error}");
    assert_eq!(store.downloads.kept_index(&image).unwrap(), None);
}
