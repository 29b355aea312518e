//! Parts of blobs and tars are the bytes of the whole, or an error.

use std::fs;
use std::io::Read as _;

use tempfile::TempDir;

use super::damage::{flip, object_path};
use super::{import, open, sample};
use crate::{BytesError, CheckedSource, Digest, Store};

/// Returns the range of `source`, or the error of the first read that fails.
fn read(store: &Store, source: CheckedSource, from: u64, end: u64) -> Result<Vec<u8>, BytesError> {
    let checked = store.check_ranges(source, 0, || false)?;
    let mut bytes = Vec::new();
    let mut part = store.read_range(&checked, from..end)?;
    part.read_to_end(&mut bytes).map_err(BytesError::from_io)?;
    Ok(bytes)
}

#[test]
fn any_part_of_a_tar_can_be_read() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let mut files = sample("one", 3);
    files.insert("large".into(), (0..200_000_u32).map(|it| it.to_le_bytes()[1]).collect());
    import(&store, "one", &files).unwrap();
    let [diff_id] = *store.layers.diff_ids().unwrap() else { panic!("one layer") };
    let mut whole = Vec::new();
    store.layer_tar(&diff_id).unwrap().read_to_end(&mut whole).unwrap();
    let size = whole.len() as u64;
    let source = CheckedSource::Tar(diff_id);
    let inner = [1, 4095, 4096, 65_536, 70_000, size / 2, size - 1];
    let ranges = inner.iter().flat_map(|from| [(*from, size), (0, *from), (*from, from + 1)]);
    for (from, end) in ranges.chain([(0, size), (size, size), (size, size + 9), (0, size + 9)]) {
        let [start, stop] = [from, end.min(size)].map(|it| usize::try_from(it).unwrap());
        assert!(read(&store, source, from, end).unwrap() == whole[start..stop], "{from} {end}");
    }
    let nothing = CheckedSource::Tar(Digest::sha256(b"no layer"));
    assert!(matches!(store.check_ranges(nothing, 0, || false), Err(BytesError::NoLayer(_))));
}

#[test]
fn a_comparison_ends_when_nobody_needs_it() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let mut files = sample("one", 1);
    files.insert("large".into(), (0..3 << 20_u32).map(|it: u32| it.to_le_bytes()[1]).collect());
    import(&store, "one", &files).unwrap();
    let [diff_id] = *store.layers.diff_ids().unwrap() else { panic!("one layer") };
    let asked = std::cell::Cell::new(0);
    let result = store.check_ranges(CheckedSource::Tar(diff_id), 0, || {
        asked.set(asked.get() + 1);
        asked.get() == 2
    });
    assert!(matches!(result, Err(BytesError::GivenUp)));
    assert_eq!(asked.get(), 2, "it continued");
}

#[test]
fn a_part_that_has_changed_is_not_returned() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let mut files = sample("one", 1);
    let large: Vec<u8> = (0..200_000_u32).map(|it| it.to_le_bytes()[1]).collect();
    files.insert("large".into(), large.clone());
    import(&store, "one", &files).unwrap();
    let [diff_id] = *store.layers.diff_ids().unwrap() else { panic!("one layer") };
    let checked = store.check_ranges(CheckedSource::Tar(diff_id), 0, || false).unwrap();
    flip(&object_path(directory.path(), &large), 150_000 * 8);
    // The parts before the changed one are still right.
    let (mut bytes, mut part) =
        (Vec::new(), store.read_range(&checked, 0..checked.size()).unwrap());
    let error = part.read_to_end(&mut bytes).unwrap_err();
    assert!(matches!(BytesError::from_io(error), BytesError::Changed(it) if it == diff_id));
    assert!(bytes.len() > 60_000 && bytes.len() < 160_000, "{}", bytes.len());
    assert!(part.read(&mut [0]).is_err(), "it has forgotten its error");
    assert!(
        store.check_ranges(CheckedSource::Tar(diff_id), 0, || false).is_err(),
        "compared again"
    );
}

#[test]
fn parts_of_a_blob() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let bytes: Vec<u8> = (0..100_000_u32).map(|it| it.to_le_bytes()[1]).collect();
    let digest = Digest::sha256(&bytes);
    let path = directory.path().join("blobs").join(digest.file_name());
    fs::write(&path, &bytes).unwrap();
    let source = CheckedSource::Blob(digest);
    assert!(store.check_ranges(source, 99, || false).is_err(), "another size");
    let checked = store.check_ranges(source, 100_000, || false).unwrap();
    let mut part = Vec::new();
    store.read_range(&checked, 70_001..70_004).unwrap().read_to_end(&mut part).unwrap();
    assert_eq!(part, bytes[70_001..70_004]);
    flip(&path, 70_002 * 8);
    let mut changed = store.read_range(&checked, 70_001..70_004).unwrap();
    assert!(changed.read(&mut [0; 3]).is_err());
}
