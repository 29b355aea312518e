//! Data blobs: made, found, read, and kept as long as something needs them.

use std::io::{Read as _, Seek as _, SeekFrom, Write as _};

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use image::verity::{Algorithm, ObjectId, digest};

use super::{Failure, check, open};
use crate::{
    BlobKind, DataBlob, Digest, DraftError, OpenOptions, Store, StoreError, Transaction,
    TransactionError, Where,
};

/// Puts files into one packed blob: whole blocks there, ends in the index.
pub(super) fn pack(import: &Transaction<'_>, files: &[Vec<u8>]) -> Result<DataBlob, Failure> {
    let mut draft = import.data_blob(BlobKind::Packed)?;
    for bytes in files {
        let (whole, end) = bytes.split_at(bytes.len() / 4096 * 4096);
        let offset = draft.position();
        draft.write_all(whole)?;
        draft.align()?;
        let sha256 = Sha256::digest(bytes).into();
        draft.add(id(bytes), sha256, offset, bytes.len() as u64, end);
    }
    Ok(draft.finish()?)
}

pub(super) fn id(bytes: &[u8]) -> ObjectId {
    digest(Algorithm::Sha256, bytes)
}

/// Files that are whole blocks, blocks and an end, and all end.
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
fn objects_in_a_blob_are_found_and_read() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    // Opened before there is a blob: it must notice.
    let other = Store::open(directory.path(), OpenOptions::read()).unwrap();
    let files = files("blob ");
    assert_eq!(other.stored(&id(&files[0])).unwrap(), None);

    let import = store.begin().unwrap();
    let blob = pack(&import, &files).unwrap();
    assert_eq!(blob.bytes, 8192 + 16384 + 4096 + 73 * 4096 + 4096);
    for bytes in &files {
        // Before the commit, only for the import itself.
        let (object, size) = (id(bytes), bytes.len() as u64);
        let Some(Where::Blob(stored)) = import.reuse_anywhere(&object, size).unwrap() else {
            panic!()
        };
        let mut read = Vec::new();
        import.stored_object(&stored).unwrap().read_to_end(&mut read).unwrap();
        assert_eq!(read, *bytes);
        assert_eq!(import.reuse_anywhere(&object, size + 1).unwrap(), None);
        assert_eq!(store.stored(&object).unwrap(), None);
    }
    import.commit().unwrap();

    // The name is what an independent hash of the file says.
    let file = std::fs::read(directory.path().join("data").join(blob.id.to_string())).unwrap();
    assert_eq!((id(&file), file.len() as u64), (blob.id, blob.bytes));
    for bytes in &files {
        let object = id(bytes);
        for store in [&store, &other] {
            assert!(store.has(&object, bytes.len() as u64).unwrap());
            assert!(!store.has(&object, 1).unwrap());
            assert_eq!(bytes_of(store, &object), *bytes);
        }
        let stored = other.stored(&object).unwrap().unwrap();
        assert_eq!((stored.blob, stored.size), (blob.id, bytes.len() as u64));
        assert_eq!(stored.sha256, *Sha256::digest(bytes));
        let start = usize::try_from(stored.offset).unwrap();
        let whole = bytes.len() - usize::try_from(stored.end_len).unwrap();
        assert_eq!(file[start..start + whole], bytes[..whole]);
        if whole > 0 {
            assert_eq!(other.stored_at(&blob.id, stored.offset).unwrap(), Some(stored));
        }
        assert_eq!(other.stored_in(&object, [&blob.id]).unwrap(), Some(stored));
        assert_eq!(other.stored_in(&object, [&object]).unwrap(), None);
    }
    assert!(matches!(store.object(&blob.id), Err(StoreError::NoObject(_))));
    check(&store).unwrap();
}

#[test]
fn a_reader_reads_across_blob_and_end() {
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
    let mut draft = import.data_blob(BlobKind::Tar).unwrap();
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
        let mut draft = import.data_blob(kind).unwrap();
        draft.write_all(&[b'h'; 512]).unwrap();
        draft.write_all(&[b'f'; 600]).unwrap();
        draft.align().unwrap();
        let file = [b'f'; 600];
        draft.add(id(&file), Sha256::digest(file).into(), 512, 600, b"");
        if let Some(layer) = layer {
            draft.set_layer(layer);
        }
        let blob = draft.finish()?;
        import.commit().unwrap();
        Ok::<DataBlob, DraftError>(blob)
    };
    assert!(matches!(make(BlobKind::Tar, None), Err(DraftError::Layer { .. })));
    assert!(matches!(make(BlobKind::Packed, Some(layer)), Err(DraftError::Layer { .. })));
    let blob = make(BlobKind::Tar, Some(layer)).unwrap();
    assert_eq!(blob.bytes, 512 + 1024);
    assert_eq!(store.index_of(&blob.id).unwrap().unwrap().header.layer, Some(layer));
    assert_eq!(bytes_of(&store, &id(&[b'f'; 600])), [b'f'; 600]);
}

#[test]
fn what_cannot_be_is_refused() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let import = store.begin().unwrap();
    let mut draft = import.data_blob(BlobKind::Packed).unwrap();
    draft.write_all(&[1; 5000]).unwrap();
    draft.add(id(b"a"), [0; 32], 0, 9000, b"");
    let error = draft.finish().unwrap_err();
    assert!(matches!(error, DraftError::Index { .. }), "{error}");
    assert!(matches!(import.commit(), Err(TransactionError::Incomplete)));

    let directory = TempDir::new().unwrap();
    let create = crate::Create::IfAbsent(Algorithm::Sha512);
    let store =
        Store::open(directory.path(), OpenOptions { create, ..OpenOptions::create() }).unwrap();
    let import = store.begin().unwrap();
    assert!(matches!(import.data_blob(BlobKind::Packed), Err(DraftError::NoDataBlobs(_))));
}

#[test]
fn the_store_says_that_it_has_data_blobs() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let meta = || std::fs::read_to_string(directory.path().join("meta")).unwrap();
    assert!(!meta().contains("data-blobs"));
    let import = store.begin().unwrap();
    import.object(b"object").unwrap();
    import.commit().unwrap();
    assert!(!meta().contains("data-blobs"));
    let import = store.begin().unwrap();
    pack(&import, &files("a")).unwrap();
    import.commit().unwrap();
    assert!(meta().contains(r#""needed_to_write":["data-blobs"]"#), "{}", meta());
    let store = Store::open(directory.path(), OpenOptions::write()).unwrap();
    assert!(store.meta().data_blobs);
    let import = store.begin().unwrap();
    pack(&import, &files("b")).unwrap();
    import.commit().unwrap();
}
