//! Tests the placement of objects in packed devices.

use std::fs;

use image::verity::{Algorithm, digest};

use super::{Home, usual_wishes};
use quire_transfer::import::ImportOptions;

/// Makes files with these lengths and different contents.
fn tree(home: &Home, lengths: impl Iterator<Item = usize>) -> Vec<Vec<u8>> {
    let root = home.path("tree");
    fs::create_dir(&root).unwrap();
    let mut all = Vec::new();
    for (number, length) in lengths.enumerate() {
        let mut bytes = vec![b'x'; length];
        bytes[..8].copy_from_slice(&(number as u64).to_le_bytes());
        // The names are chosen so that the order of the walk differs from the order of the lengths.
        fs::write(root.join(format!("{:02}-{number}", number * 7 % 83)), &bytes).unwrap();
        all.push(bytes);
    }
    all
}

fn import(home: &Home) {
    let options = ImportOptions { form: store::Form::Packed, ..usual_wishes() };
    home.import_with("dir", "tree", &options).unwrap();
}

#[test]
fn pages_of_files_are_pages_of_the_device_and_little_is_wasted() {
    let home = Home::new();
    // These are lengths at the limits of the rules, and many in between. All of them are below the size from which
    // objects are cut into pieces.
    let edges = [65, 511, 512, 513, 3583, 3584, 3585, 4095, 4096, 4097, 8192, 100_000];
    let between = (0..600_usize).map(|it| 66 + it * it * 31 % 5000);
    let all = tree(&home, edges.into_iter().chain(between));
    import(&home);
    let mut places = Vec::new();
    for bytes in &all {
        let object = digest(Algorithm::Sha256, bytes).into();
        let stored = home.store.devices.find_object(&object).unwrap().unwrap();
        assert_eq!(stored.size, bytes.len() as u64);
        let (first, last) = (stored.offset, stored.offset + stored.size - 1);
        if bytes.len() > 3584 {
            assert_eq!(first % 4096, 0, "{} bytes at {first}", bytes.len());
        } else {
            assert_eq!(first / 4096, last / 4096, "{} bytes at {first}", bytes.len());
            assert_eq!(first % 512, 0);
        }
        let file = fs::read(home.path("store/data").join(stored.device.to_string())).unwrap();
        let there = &file[usize::try_from(first).unwrap()..][..bytes.len()];
        assert!(there == bytes, "{} bytes at {first}", bytes.len());
        places.push((stored.device, stored.device_bytes));
    }
    places.dedup();
    let [(_, length)] = places[..] else { panic!("{} devices", places.len()) };
    // All small files fill gaps that exist anyway.
    let blocks = all.iter().map(|it| it.len().next_multiple_of(512) as u64).sum::<u64>();
    let pages = all.iter().map(|it| it.len().next_multiple_of(4096) as u64).sum::<u64>();
    assert!(length < blocks + blocks / 50, "{length} bytes for {blocks}; in pages, {pages}");
    assert!(pages > blocks + blocks / 5, "this shows nothing");
}

#[test]
fn small_files_alone_share_pages() {
    if !testing::long_tests() {
        return;
    }
    let home = Home::new();
    // More bytes than the queue of small objects may hold.
    let all = tree(&home, (0..3000).map(|it| 500 + it % 1000));
    import(&home);
    let blocks = all.iter().map(|it| it.len().next_multiple_of(512) as u64).sum::<u64>();
    assert!(blocks > 2 << 20);
    let stored = home
        .store
        .devices
        .find_object(&digest(Algorithm::Sha256, &all[0]).into())
        .unwrap()
        .unwrap();
    assert!(stored.device_bytes < blocks + blocks / 50, "{} for {blocks}", stored.device_bytes);
}

#[test]
fn the_same_tree_is_the_same_device() {
    if !testing::long_tests() {
        return;
    }
    let names: Vec<_> = (0..2)
        .map(|_| {
            let home = Home::new();
            tree(&home, (0..3000).map(|it| 66 + it * 31 % 6000));
            import(&home);
            let mut names: Vec<_> = fs::read_dir(home.path("store/data")).unwrap().collect();
            names.sort_by_key(|it| it.as_ref().unwrap().file_name());
            names.into_iter().map(|it| it.unwrap().file_name()).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(names[0], names[1]);
    assert_eq!(names[0].len(), 2);
}
