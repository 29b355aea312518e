use std::collections::HashSet;
use std::sync::Arc;

use image::verity::{Algorithm, Id, digest, kind};

use super::{Cut, Indexes, NeededData, NeededParts, live};
use crate::DeviceKind;
use crate::shelf::devices::{Builder, DATA_BLOCK, Entry, Header, Index};

fn id<K>(text: &str) -> Id<K> {
    digest(Algorithm::Sha256, text.as_bytes()).into()
}

/// Builds an index of objects, each with its name, offset and bytes in the device.
fn index(kind: DeviceKind, dropped: u64, objects: &[(&str, u64, u64)]) -> Index {
    use std::io::Write as _;
    let mut builder = Builder::default();
    let mut until = 0;
    for (name, offset, size) in objects {
        let key = id::<kind::Object>(name).as_bytes().try_into().unwrap();
        builder.add(Entry { id: key, offset: *offset, size: *size, sha256: [0; 32] });
        until = until.max(offset + size);
    }
    let layer = (kind == DeviceKind::Tar).then(|| image::digest::Digest::sha256(b"layer"));
    // Includes the block that identifies the device.
    let unit = if kind == DeviceKind::Tar { DATA_BLOCK } else { 4096 };
    let bytes = until.next_multiple_of(unit) + DATA_BLOCK;
    let bytes = builder.encode(&Header { kind, bytes, dropped, layer }).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    Index::read(&file, bytes.len() as u64).unwrap()
}

/// Expected names of kept objects, and free ranges.
type Expected<'a> = (&'a [&'a str], &'a [(u64, u64)]);

fn check(index: &Index, ranges: &[(u64, u64)], objects: &[&str], expected: Option<Expected<'_>>) {
    let objects =
        objects.iter().map(|it| id::<kind::Object>(it).as_bytes().try_into().unwrap()).collect();
    let needed = NeededParts { ranges: ranges.to_vec(), objects };
    let cut = Cut::from_index(index, &needed, live(index, &needed), &HashSet::new());
    let found = cut.map(|cut| {
        let mut kept: Vec<_> = cut.kept.iter().map(|it| it.object()).collect();
        kept.sort_unstable();
        (kept, cut.free)
    });
    let expected = expected.map(|(kept, free)| {
        let mut kept: Vec<_> = kept.iter().map(|it| id::<kind::Object>(it)).collect();
        kept.sort_unstable();
        (kept, free.to_vec())
    });
    assert_eq!(found, expected, "{ranges:?}");
}

#[test]
fn what_nobody_needs_is_cut() {
    let objects = [("a", 0, 8192), ("b", 8192, 5000), ("c", 16384, 4096), ("empty", 0, 0)];
    let packed = index(DeviceKind::Packed, 0, &objects);
    check(&packed, &[(0, 8192), (8192, 13192), (16384, 20480)], &["empty"], None);
    check(&packed, &[], &[], Some((&[], &[(0, 20480)])));
    check(&packed, &[], &["b", "empty"], Some((&["b", "empty"], &[(0, 8192), (16384, 20480)])));
    // If one byte of an object is used, the whole object is kept. Ranges may overlap, and may be in any order.
    check(
        &packed,
        &[(16390, 16391), (100, 200), (0, 4096)],
        &[],
        Some((&["a", "c"], &[(8192, 16384)])),
    );
    // A long range before a short one.
    check(&packed, &[(0, 13000), (1, 2)], &[], Some((&["a", "b"], &[(16384, 20480)])));
    // An object that ends in a page without other data.
    check(&packed, &[(8192, 8193)], &[], Some((&["b"], &[(0, 8192), (16384, 20480)])));
    // If a `gc` crashed after it had dropped an object, the space between objects is also free.
    let again = index(DeviceKind::Packed, 1, &[("c", 16384, 4096)]);
    check(&again, &[], &["c"], Some((&["c"], &[(0, 16384)])));
}

#[test]
fn only_whole_pages_of_a_tar_are_cut() {
    let objects = [("a", 512, 10_000), ("b", 11_264, 100), ("c", 12_288, 9000)];
    let tar = index(DeviceKind::Tar, 0, &objects);
    // Headers between objects are kept as long as all objects are kept.
    check(&tar, &[(512, 10_512), (11_264, 11_364), (12_288, 21_288)], &[], None);
    check(&tar, &[(11_264, 11_364)], &[], Some((&["b"], &[(0, 8192), (12_288, 20_480)])));
    check(&tar, &[], &["a"], Some((&["a"], &[(12_288, 20_480)])));
}

#[test]
fn objects_of_layers_are_where_they_are_kept_anyway() {
    let indexes: Indexes = [
        (
            id("1"),
            Arc::new(index(
                DeviceKind::Packed,
                0,
                &[("a", 0, 10), ("b", 4096, 10), ("x", 8192, 1)],
            )),
        ),
        (id("2"), Arc::new(index(DeviceKind::Packed, 0, &[("a", 0, 10), ("c", 4096, 10)]))),
    ]
    .into_iter()
    .collect();
    let wanted =
        ["a", "b", "c", "f", "both", "lost"].iter().map(|it| id::<kind::Object>(it)).collect();
    let mut files = vec![id("f"), id("both"), id("a")];
    files.sort_unstable();
    let composefs = [id("both")].into();
    let place = |devices: &[&str]| {
        let mut needed = NeededData::default();
        devices.iter().for_each(|it| needed.device(id(it)));
        let as_files = needed.place(&wanted, &files, &composefs, &indexes);
        let mut as_files: Vec<_> = ["a", "b", "c", "f", "both", "lost", "x"]
            .iter()
            .filter(|it| as_files.contains(&id(it)))
            .copied()
            .collect();
        as_files.sort_unstable();
        let has = |device: &str, object: &str| {
            let key: [u8; 32] = id::<kind::Object>(object).as_bytes().try_into().unwrap();
            needed.devices.get(&id(device)).is_some_and(|it| it.objects.contains(&key))
        };
        let mut found = as_files.join(" ");
        for device in ["1", "2"] {
            if needed.devices.contains_key(&id(device)) {
                found += &format!(", {device}:");
            }
            for object in ["a", "b", "c", "x"].iter().filter(|it| has(device, it)) {
                found += object;
            }
        }
        found
    };
    // An object that is already a file keeps no device.
    assert_eq!(place(&[]), "a f lost, 1:b, 2:c");
    // If a device is kept anyway, the file is unnecessary.
    assert_eq!(place(&["1"]), "f lost, 1:ab, 2:c");
    assert_eq!(place(&["2"]), "f lost, 1:b, 2:ac");
}
