//! Tests imports of small sources that claim to be large: they take almost no disk space, or are refused.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use store::{Form, FsckOptions};

use super::{Home, chain, usual_wishes};
use crate::build::{Layout, Pack, Tar, pack};
use quire_transfer::import::{ImportError, ImportOptions, Limits, Report};

const MIB: u64 = 1 << 20;

/// Makes a GNU sparse file of this size without data, as `tar --sparse` writes it. Source: GNU tar's manual, "Old GNU
/// Format".
fn hole(name: &str, size: u64) -> Vec<u8> {
    let mut tar = Tar::default();
    tar.header(name, b'S', "", 0);
    let mut bytes = tar.bytes();
    bytes[257..265].copy_from_slice(b"ustar  \0");
    bytes[483..495].copy_from_slice(format!("{size:011o}\0").as_bytes());
    bytes[148..156].fill(b' ');
    let sum: u32 = bytes[..512].iter().copied().map(u32::from).sum();
    bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    bytes
}

fn room(path: &Path) -> u64 {
    let entries = fs::read_dir(path).unwrap().map(|it| it.unwrap());
    let sizes = entries.map(|entry| {
        let metadata = entry.metadata().unwrap();
        metadata.blocks() * 512 + if metadata.is_dir() { room(&entry.path()) } else { 0 }
    });
    sizes.sum()
}

fn import(
    home: &Home,
    layers: &[(Vec<u8>, Pack)],
    options: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let (image, _) = layout.image(layers);
    layout.add(image, None, None);
    home.import_with("oci", "layout", options)
}

#[test]
fn zeros_take_no_room_in_any_form() {
    if !testing::long_tests() {
        return;
    }
    let zeros = Tar::default().file("zeros", &vec![0; 100 << 20]).bytes();
    for form in [Form::Objects, Form::Packed, Form::Tar] {
        for (what, layers) in [
            (
                "sparse files",
                vec![(hole("one", 300 * MIB), Pack::Gzip), (hole("two", 301 * MIB), Pack::Plain)],
            ),
            ("gzip'd zeros", vec![(zeros.clone(), Pack::Gzip)]),
        ] {
            let home = Home::new();
            let before = room(&home.path("store"));
            let report = import(&home, &layers, &ImportOptions { form, ..usual_wishes() }).unwrap();
            let taken = room(&home.path("store")) - before;
            assert!(taken < MIB, "{form:?}: {what}: {taken} bytes");
            assert!(home.store.fsck_deep(FsckOptions { threads: 2 }).unwrap().is_sound());
            for (layer, (tar, _)) in report.layers.iter().zip(&layers) {
                assert!(home.rebuilt(&layer.diff_id) == *tar, "{form:?}: {what}");
            }
        }
    }
}

/// Each layer is within the limit, but all layers together exceed it.
#[test]
fn bombs_in_many_parts_are_refused() {
    let limits = Limits { ratio_from: MIB, ratio: 250, ..Limits::default() };
    let zeros = |name: &str| Tar::default().file(name, &vec![0; 700_000]).bytes();
    let names = ["a", "b", "c", "d", "e", "f"];
    let check = |layers: Vec<(Vec<u8>, Pack)>, expect: &str| {
        let home = Home::new();
        let options = ImportOptions { limits, ..usual_wishes() };
        let packed: usize = layers.iter().map(|(tar, how)| pack(tar, *how).len()).sum();
        assert!(packed < 20_000);
        let one = Home::new();
        import(&one, &layers[..1], &ImportOptions { limits, ..usual_wishes() }).unwrap();
        let before = home.files();
        let error = chain(&import(&home, &layers, &options).unwrap_err());
        assert!(error.contains(expect), "{error}");
        assert_eq!(home.files(), before);
    };
    let layers = names.map(|name| (zeros(name), Pack::Zstd)).to_vec();
    check(layers, "all layers together unpack to more than 250 times their ");
    let layers = names.map(|name| (hole(name, 700_000), Pack::Gzip)).to_vec();
    check(layers, "the holes of all files are more than 250 times the ");
}
