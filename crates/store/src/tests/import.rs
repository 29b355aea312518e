//! Tests additions, lookups, counts and leftovers of imports.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use image::verity::{Algorithm, ObjectId, digest};
use tempfile::TempDir;

use super::{NOW, add, check, check_clean, eventually, import, name, open, sample};
use crate::{
    Create, Digest, Form, LayerInfo, OpenOptions, Reference, Seconds, Store, StoreError,
    TransactionError,
};

#[test]
fn what_is_imported_is_there() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let files = sample("one", 3);
    let transaction = store.begin().unwrap();
    let reference = add(&transaction, &files).unwrap();
    assert!(store.images.ids().unwrap().is_empty(), "visible before the commit");
    transaction.set_ref(name("one"), reference.clone());
    let committed = transaction.commit().unwrap();
    assert_eq!((committed.objects, committed.reused), (6, 0));
    let bytes: usize = files.values().map(Vec::len).filter(|it| *it > 64).sum();
    assert_eq!(committed.object_bytes, bytes as u64);

    assert_eq!(store.refs.get(&name("one")).unwrap(), Some(reference.clone()));
    assert_eq!(store.images.ids().unwrap(), [reference.image]);
    for bytes in files.values().filter(|it| it.len() > 64) {
        let id = digest(Algorithm::Sha256, bytes).into();
        assert!(store.has(&id, bytes.len() as u64).unwrap());
        assert!(!store.has(&id, 1).unwrap());
        let mut found = Vec::new();
        store.object(&id).unwrap().read_to_end(&mut found).unwrap();
        assert!(found == *bytes);
    }
    let image = store.open_image(&reference.image).unwrap();
    let mut bytes = vec![0; usize::try_from(image.image.size()).unwrap()];
    image.image.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(digest(Algorithm::Sha256, &bytes), *reference.image.digest());

    let [diff_id] = *store.layers.diff_ids().unwrap() else { panic!() };
    let layer = store.layers.open(&diff_id).unwrap().unwrap();
    assert_eq!(layer.info().objects.len(), 6);
    let mut recipe = Vec::new();
    layer.recipe().unwrap().read_to_end(&mut recipe).unwrap();
    // The header of 16 bytes, a record's type and its length precede the first verbatim record.
    assert!(recipe[18..].starts_with(b"own-0 "), "{}", recipe.escape_ascii());
    assert_eq!(recipe.len() as u64, layer.recipe_size());
    check_clean(&store).unwrap();

    // The same import again adds nothing new.
    let transaction = store.begin().unwrap();
    assert_eq!(add(&transaction, &files).unwrap(), reference);
    let committed = transaction.commit().unwrap();
    assert_eq!((committed.objects, committed.reused), (0, 6));
    check_clean(&store).unwrap();
}

#[test]
fn published_files_are_read_only_whatever_the_umask() {
    let directory = TempDir::new().unwrap();
    // The umask belongs to the process, so another umask needs another process.
    super::interrupted::kill::child(directory.path(), "import-once", Some("077"));
    let store =
        Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    assert_eq!(check(&store).unwrap().len(), 1);
    let mut seen = 0;
    let mut open = vec![directory.path().to_owned()];
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            // Other users must not be able to lock the entries that commands lock.
            let expected = match path.strip_prefix(directory.path()).unwrap().to_str().unwrap() {
                "gc.lock" => 0o600,
                "boot" => 0o1600,
                "refs" | "data" | "tmp" => 0o700,
                _ if metadata.is_dir() => 0o755,
                // A symlink in `absent/`.
                _ if metadata.is_symlink() => 0o777,
                _ => 0o444,
            };
            assert_eq!(metadata.permissions().mode() & 0o7777, expected, "{}", path.display());
            seen += 1;
            if metadata.is_dir() {
                open.push(path);
            }
        }
    }
    assert!(seen > 270, "{seen}");
}

#[test]
fn large_drafts_go_to_a_file_and_are_the_same_object() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let bytes: Vec<u8> = (0..700_000_u32).flat_map(|it| it.to_le_bytes()).collect();
    for piece in [1 << 20, 65_536, 100_001] {
        let transaction = store.begin().unwrap();
        let mut draft = transaction.draft().unwrap();
        for piece in bytes.chunks(piece) {
            draft.write_all(piece).unwrap();
        }
        assert_eq!(draft.size(), bytes.len() as u64);
        assert_eq!(draft.finish().unwrap(), digest(Algorithm::Sha256, &bytes).into());
        let mut unfinished = transaction.draft().unwrap();
        unfinished.write_all(&bytes).unwrap();
        drop(unfinished);
        let mut twice = transaction.draft().unwrap();
        twice.write_all(&bytes).unwrap();
        twice.finish().unwrap();
        let committed = transaction.commit().unwrap();
        assert_eq!(committed.objects + committed.reused, 2);
    }
    let id = ObjectId::new(digest(Algorithm::Sha256, &bytes));
    assert!(store.has(&id, bytes.len() as u64).unwrap());
}

#[test]
fn a_dropped_import_leaves_nothing() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let transaction = store.begin().unwrap();
    add(&transaction, &sample("one", 3)).unwrap();
    assert_eq!(store.tmp.list().unwrap().len(), 1);
    drop(transaction);
    assert!(store.tmp.list().unwrap().is_empty());
    assert!(store.plan_gc(NOW).unwrap().garbage.is_empty());
}

/// The kernel may take seconds to remove large files. A caller that wants to end early does not wait for the removal.
#[test]
fn an_import_that_was_given_up_is_removed_later() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let is_time = Arc::new(AtomicBool::new(false));
    store.give_up_when({
        let is_time = Arc::clone(&is_time);
        move || is_time.load(Ordering::Relaxed)
    });
    for (gives_up, left) in [(false, 0), (true, 1)] {
        let transaction = store.begin().unwrap();
        add(&transaction, &sample("one", 3)).unwrap();
        is_time.store(gives_up, Ordering::Relaxed);
        drop(transaction);
        let is_work = |it: &crate::disk::Listed| it.text().is_some_and(crate::staging::is_name);
        assert_eq!(store.tmp.list().unwrap().iter().filter(|it| is_work(it)).count(), left);
    }
    // A child process of another test may hold the lock for a moment, as `eventually` explains.
    eventually(|| store.clear_work().unwrap() == 1);
    is_time.store(false, Ordering::Relaxed);
    check_clean(&store).unwrap();
}

#[test]
fn a_ref_names_what_is_there() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let image = digest(Algorithm::Sha256, b"no image");
    let reference =
        Reference { image: image.into(), manifest: None, form: Form::Objects, created: Seconds(0) };
    let transaction = store.begin().unwrap();
    transaction.set_ref(name("a"), reference.clone());
    let error = transaction.commit().unwrap_err();
    assert!(matches!(error, TransactionError::Dangling { .. }), "{error}");
    assert!(store.set_ref(&name("a"), &reference).is_err());
    assert!(store.refs.all().unwrap().is_empty());

    let image = import(&store, "b", &sample("b", 1)).unwrap();
    store.set_ref(&name("a"), &Reference { image, ..reference.clone() }).unwrap();
    let manifest = Some(Digest::sha256(b"no manifest"));
    assert!(store.set_ref(&name("a"), &Reference { image, manifest, ..reference }).is_err());
    assert_eq!(store.refs.get(&name("a")).unwrap().unwrap().manifest, None);
}

#[test]
fn a_damaged_layer_and_a_short_object_are_replaced_by_the_next_import() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let files = sample("one", 2);
    import(&store, "one", &files).unwrap();
    let object = super::damage::object_path(directory.path(), &files["own-1"]);
    super::damage::replace(&object, b"short");
    let layer = std::fs::read_dir(directory.path().join("layers")).unwrap();
    let layer = layer.into_iter().next().unwrap().unwrap().path();
    super::damage::flip(&layer, 100);
    check(&store).unwrap_err();
    import(&store, "one", &files).unwrap();
    check_clean(&store).unwrap();
}

#[test]
fn layers_are_reused_with_all_their_objects_or_not_at_all() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let files = sample("one", 2);
    import(&store, "one", &files).unwrap();
    let [diff_id] = *store.layers.diff_ids().unwrap() else { panic!() };
    let transaction = store.begin().unwrap();
    let layer = transaction.reuse_layer(&diff_id).unwrap().unwrap();
    assert_eq!(layer.info().diff_id, diff_id);
    assert!(transaction.reuse_layer(&Digest::sha256(b"another")).unwrap().is_none());
    drop(transaction);
    std::fs::remove_file(super::damage::object_path(directory.path(), &files["own-1"])).unwrap();
    let transaction = store.begin().unwrap();
    assert!(transaction.reuse_layer(&diff_id).unwrap().is_none());
}

#[test]
fn a_layer_is_read_as_it_was_written() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    for recipe in [Vec::new(), b"x".to_vec(), vec![7; 3_000_000]] {
        let transaction = store.begin().unwrap();
        let mut draft = transaction.layer().unwrap();
        draft.write_all(&recipe).unwrap();
        let info = LayerInfo {
            diff_id: Digest::sha256(&recipe),
            size: 5,
            blobs: Vec::new(),
            objects: vec![digest(Algorithm::Sha256, b"o").into()],
        };
        draft.finish(info.clone()).unwrap();
        transaction.commit().unwrap();
        let layer = store.layers.open(&info.diff_id).unwrap().unwrap();
        assert_eq!(*layer.info(), info);
        let mut read = Vec::new();
        layer.recipe().unwrap().read_to_end(&mut read).unwrap();
        assert!(read == recipe);
    }
}

#[test]
fn a_layer_is_known_to_be_in_one_more_blob() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "one", &sample("one", 2)).unwrap();
    let [diff_id] = *store.layers.diff_ids().unwrap() else { panic!() };
    let before = store.layers.open(&diff_id).unwrap().unwrap();
    let recipe = |layer: &crate::StoredLayer| {
        let mut recipe = Vec::new();
        layer.recipe().unwrap().read_to_end(&mut recipe).unwrap();
        recipe
    };
    let media_type = "x/y".to_owned();
    let blob = |text: &str, is_hashed| {
        let digest = Digest::sha256(text.as_bytes());
        let (media_type, repositories) = (media_type.clone(), Vec::new());
        crate::Blob { digest, size: 7, media_type, is_hashed, repositories }
    };
    let warned = super::warnings(|| {
        for number in 0..70 {
            let transaction = store.begin().unwrap();
            let layer = transaction.reuse_layer(&diff_id).unwrap().unwrap();
            let new = blob(&format!("{number}"), true);
            assert!(!layer.info().is_in(&new.digest));
            transaction.add_blob(&layer, new.clone()).unwrap();
            assert!(!store.layers.open(&diff_id).unwrap().unwrap().info().is_in(&new.digest));
            transaction.commit().unwrap();
            assert!(store.layers.open(&diff_id).unwrap().unwrap().info().is_in(&new.digest));
        }
    });
    assert_eq!(warned, 0, "nothing was damaged");
    let after = store.layers.open(&diff_id).unwrap().unwrap();
    assert!(recipe(&before) == recipe(&after));
    assert_eq!(
        (after.info().size, &after.info().objects),
        (before.info().size, &before.info().objects)
    );
    // The last 64 blobs are kept, the newest first.
    let known: Vec<_> = after.info().blobs.iter().map(|it| it.digest).collect();
    let expect: Vec<_> = (6..70).rev().map(|it| blob(&it.to_string(), true).digest).collect();
    assert_eq!(known, expect);

    // The layer is unpacked again from parts. This adds no information, so the record is not changed.
    let add = |blobs: Vec<crate::Blob>| {
        let transaction = store.begin().unwrap();
        let mut draft = transaction.layer().unwrap();
        draft.write_all(&recipe(&after)).unwrap();
        draft.finish(LayerInfo { blobs, ..after.info().clone() }).unwrap();
        for object in &after.info().objects {
            let size = store.object(object).unwrap().size();
            assert!(transaction.reuse(object, size).unwrap());
        }
        transaction.commit().unwrap();
        store.layers.open(&diff_id).unwrap().unwrap().info().blobs.clone()
    };
    assert_eq!(add(vec![blob("parts", false)]), after.info().blobs);
    assert_eq!(add(vec![blob("69", false)]), after.info().blobs);
    assert_eq!(add(vec![blob("whole", true)])[..2], [blob("whole", true), blob("69", true)]);
    check_clean(&store).unwrap();
}

#[test]
fn a_manifest_is_checked_against_its_digest() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let transaction = store.begin().unwrap();
    let digest = Digest::sha256(b"{}");
    let error = transaction.manifest(&digest, b"[]").unwrap_err().to_string();
    assert!(error.contains("have the digest sha256:"), "{error}");
    transaction.manifest(&digest, b"{}").unwrap();
    assert_eq!(store.manifests.read(&digest).unwrap(), None);
    transaction.commit().unwrap();
    assert_eq!(store.manifests.read(&digest).unwrap().as_deref(), Some(&b"{}"[..]));
}

#[test]
fn sha512_stores_name_by_sha512() {
    let directory = TempDir::new().unwrap();
    let create = Create::IfAbsent(Algorithm::Sha512);
    let options = OpenOptions { create, ..OpenOptions::write() };
    let store = Store::open(directory.path(), crate::Who::this_process(), options).unwrap();
    let transaction = store.begin().unwrap();
    let id = transaction.object(b"text").unwrap();
    assert_eq!(id, digest(Algorithm::Sha512, b"text").into());
    let other = digest(Algorithm::Sha256, b"text").into();
    assert!(transaction.object_with_id(&other, b"text").is_err());
    drop(transaction);
    assert!(matches!(store.has(&other, 4), Err(crate::ObjectLookupError::Algorithm(..))));
    // An existing store keeps its hash.
    assert_eq!(open(directory.path()).algorithm(), Algorithm::Sha512);
}

#[test]
fn a_record_says_where_a_blob_was_pushed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "one", &sample("one", 2)).unwrap();
    let [diff_id] = *store.layers.diff_ids().unwrap() else { panic!() };
    let file = directory.path().join("layers").join(diff_id.file_name());
    let has_field = || {
        let bytes = std::fs::read(&file).unwrap();
        bytes.windows(14).any(|it| it == b"\"repositories\"")
    };
    let add = |text: &str, is_hashed, repositories: &[String]| {
        let transaction = store.begin().unwrap();
        let layer = transaction.reuse_layer(&diff_id).unwrap().unwrap();
        let (digest, media_type) = (Digest::sha256(text.as_bytes()), "x/y".to_owned());
        let repositories = repositories.to_vec();
        let blob = crate::Blob { digest, size: 7, media_type, is_hashed, repositories };
        transaction.add_blob(&layer, blob).unwrap();
        transaction.commit().unwrap();
        let layer = store.layers.open(&diff_id).unwrap().unwrap();
        let blobs = &layer.info().blobs;
        let blob = blobs.iter().find(|it| it.digest == digest).unwrap();
        assert!(blob.is_hashed, "it was before");
        let numbers = blob.repositories.iter().map(|it| it.strip_prefix("r.io/").unwrap());
        numbers.map(str::to_owned).collect::<Vec<_>>().join(" ")
    };
    let name = |number: usize| format!("r.io/{number}");
    assert_eq!(add("blob", true, &[]), "");
    assert!(!has_field(), "nothing new for what others wrote");
    for number in 0..10 {
        add("blob", false, &[name(number)]);
    }
    assert!(has_field());
    // The last eight repositories are kept, each once, the newest first.
    assert_eq!(add("blob", true, &[name(5)]), "5 9 8 7 6 4 3 2");
    // Values that Quire would not write are not accepted from a record either.
    let long = format!("r.io/{}", "x".repeat(600));
    let many: Vec<_> = [long].into_iter().chain((20..90).map(name)).collect();
    assert_eq!(add("another", true, &many), "20 21 22 23 24 25 26 27");
}

fn check_refused(prepare: impl FnOnce(&Path), expected: &str) {
    let directory = TempDir::new().unwrap();
    prepare(directory.path());
    for options in [OpenOptions::create(), OpenOptions::write(), OpenOptions::read()] {
        let error = Store::open(directory.path(), crate::Who::this_process(), options).unwrap_err();
        let text = match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn what_is_no_store_is_refused() {
    check_refused(|path| std::fs::write(path.join("notes.txt"), "x").unwrap(), "\"notes.txt\"");
    check_refused(
        |path| {
            open(path);
            super::damage::replace(&path.join("meta"), b"{\"format\":1}\n");
        },
        "file \"meta\" is damaged",
    );
    check_refused(
        |path| {
            open(path);
            std::fs::remove_dir(path.join("refs")).unwrap();
            std::os::unix::fs::symlink("/etc", path.join("refs")).unwrap();
        },
        "cannot open directory",
    );
    // The root of a disk has this directory from mkfs.ext4, and it is not damage.
    let disk = TempDir::new().unwrap();
    std::fs::create_dir(disk.path().join("lost+found")).unwrap();
    let store = open(disk.path());
    import(&store, "one", &sample("one", 1)).unwrap();
    check_clean(&store).unwrap();
    let nowhere = Path::new("/nonexistent/store");
    let error = Store::open(nowhere, crate::Who::this_process(), OpenOptions::read()).unwrap_err();
    assert_eq!(error.to_string(), "there is no store in /nonexistent/store");
    let empty = TempDir::new().unwrap();
    let error =
        Store::open(empty.path(), crate::Who::this_process(), OpenOptions::write()).unwrap_err();
    assert!(matches!(error, StoreError::Absent(_)), "{error}");
}

#[test]
fn a_store_with_features_to_come_can_only_be_read() {
    let directory = TempDir::new().unwrap();
    open(directory.path());
    let meta = serde_json::json!({
        "format": 2, "algorithm": "sha256", "needed_to_write": ["packs"]
    });
    super::damage::replace(&directory.path().join("meta"), &crate::record::encode(&meta));
    Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    let error = Store::open(directory.path(), crate::Who::this_process(), OpenOptions::write())
        .unwrap_err()
        .to_string();
    assert!(error.contains("is usable only for reading") && error.contains("packs"), "{error}");
}

#[test]
fn nothing_is_written_through_a_symlink() {
    let outside = TempDir::new().unwrap();
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let bytes = b"some bytes".repeat(10);
    let id = ObjectId::new(digest(Algorithm::Sha256, &bytes));
    let shard = directory.path().join("objects").join(&id.to_string()[..2]);
    std::fs::remove_dir(&shard).unwrap();
    std::os::unix::fs::symlink(outside.path(), &shard).unwrap();
    let transaction = store.begin().unwrap();
    transaction.object(&bytes).unwrap_err();
    assert!(matches!(transaction.commit(), Err(TransactionError::Incomplete)));
    store.has(&id, 100).unwrap_err();
    store.object(&id).unwrap_err();
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);

    // An object that is a symlink to the right bytes is not accepted.
    std::fs::remove_file(&shard).unwrap();
    std::fs::create_dir(&shard).unwrap();
    let elsewhere = outside.path().join("bytes");
    std::fs::write(&elsewhere, &bytes).unwrap();
    std::os::unix::fs::symlink(&elsewhere, shard.join(&id.to_string()[2..])).unwrap();
    assert!(!store.has(&id, 100).unwrap());
    store.object(&id).unwrap_err();
    assert!(!store.fsck(crate::FsckOptions { threads: 1 }).unwrap().is_sound());
}

#[test]
fn a_new_store_is_private() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("deep/er/store");
    open(&path);
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o700);
}
