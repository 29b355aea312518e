//! Compares images over devices with the images and the output of other programs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use quire_image::erofs::Stored;
use quire_image::erofs::layout::{compat, incompat};
use quire_image::erofs::read::Image;
use quire_image::tree::{Content, Node};
use quire_image::verity::{Algorithm, digest};
use sha2::{Digest as _, Sha256};

use crate::devices::{SIZES, flat};
use crate::hostile::Random;
use crate::mkfs::{self, mounted, prepare};
use crate::native::{Devices, Way, make, spread};
use crate::source::list;
use crate::standalone::{Objects, tree_of};
use crate::tools::{find_program, folder, newer, not_made, run, skipped};

/// The prefix and the fingerprints have the same bytes as those of `mkfs.erofs --xattr-inode-digest`.
#[test]
fn fingerprints_are_those_of_mkfs() {
    let Some(mkfs) = newer("mkfs.erofs") else {
        return not_made("a newer mkfs.erofs", "sid");
    };
    let dir = folder();
    let (source, theirs) = (dir.path().join("s"), dir.path().join("i.img"));
    fs::create_dir(&source).unwrap();
    let mut objects = Objects::new();
    let tree = flat(&SIZES, &mut objects);
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        let bytes = match entry.inode.node() {
            Node::Regular(Content::External { object, .. }) => objects[&object.unwrap()].clone(),
            _ => Vec::new(),
        };
        fs::write(source.join(std::str::from_utf8(entry.name).unwrap()), bytes).unwrap();
    }
    let words = ["--xattr-inode-digest", "-Exattr-name-filter"].map(Path::new);
    run(&mkfs, words.into_iter().chain([&*theirs, &source]));
    let theirs = fs::read(&theirs).unwrap();
    let mut devices = Devices::default();
    devices.add(&objects, Way::Packed);
    let (ours, _) = make(&tree, &objects, &devices);
    // The bytes compared begin at the length of the prefix, and include its padding to 4 bytes.
    let prefix = |image: &[u8]| {
        assert_eq!((image[1024 + 91], image[1024 + 105]), (1, 0));
        let start = image[1024 + 92..1024 + 96].try_into().unwrap();
        let start = u32::from_le_bytes(start) as usize * 4;
        image[start..start + 24].to_vec()
    };
    assert_eq!(prefix(&ours), b"\x15\0\0erofs.fingerprint.v1\0");
    assert_eq!(prefix(&ours), prefix(&theirs));
    let [one, other] = [&ours, &theirs].map(|bytes| Image::open(&bytes[..]).unwrap());
    for image in [&one, &other] {
        let superblock = image.superblock();
        let has = (superblock.compat & compat::ISHARE_XATTRS, superblock.fingerprint_prefix);
        assert_eq!(has, (compat::ISHARE_XATTRS, Some(0)));
        assert_eq!(superblock.incompat & incompat::XATTR_PREFIXES, incompat::XATTR_PREFIXES);
    }
    for bytes in objects.values() {
        let entry = [b"\0\x80\x27\0sha256:", &Sha256::digest(bytes)[..], b"\0"].concat();
        let count = |image: &[u8]| image.windows(44).filter(|it| **it == entry).count();
        assert_eq!((count(&ours), count(&theirs)), (1, 1));
    }
    for (name, size) in SIZES {
        let fingerprint = |image: &Image<&[u8]>| {
            let nid = image.lookup(&image.root().unwrap(), name.as_bytes()).unwrap().unwrap();
            image.fingerprint(&image.inode(nid).unwrap()).unwrap()
        };
        assert_eq!(fingerprint(&one), fingerprint(&other), "{name}");
        assert_eq!(fingerprint(&one).is_some(), size > 0, "{name}");
    }
}

/// A tar made by GNU tar is the device, with the blocks of files as GNU tar lists them.
#[test]
fn a_tar_of_gnu_tar() {
    let Some(dir) = prepare("others::a_tar_of_gnu_tar") else { return };
    let Some(tar) = find_program("tar") else { return skipped("tar is not installed") };
    let at = |name: &str| dir.path().join(name);
    let (source, mountpoint, archive, image) = (at("s"), at("m"), at("t.tar"), at("i.img"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    let mut made = Objects::new();
    let tree = flat(&SIZES, &mut made);
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        let bytes = match entry.inode.node() {
            Node::Regular(Content::External { object, .. }) => made[&object.unwrap()].clone(),
            _ => Vec::new(),
        };
        fs::write(source.join(std::str::from_utf8(entry.name).unwrap()), bytes).unwrap();
    }
    let words = ["--sort=name", "--format=ustar", "-C"].map(Path::new);
    run(&tar, words.into_iter().chain([&*source, Path::new("-cf"), &archive, Path::new(".")]));
    let listing = list(&source);
    let (tree, objects) = tree_of(&source, &listing);
    // "block 3: ./1" is the block of a header; the next block is the first of the file.
    let text = run(&tar, [Path::new("-tRf"), &archive]);
    let mut devices = Devices { bytes: vec![fs::read(&archive).unwrap()], stored: BTreeMap::new() };
    for line in String::from_utf8(text).unwrap().lines() {
        let Some((block, name)) = line.strip_prefix("block ").unwrap().split_once(": ./") else {
            continue;
        };
        let Ok(bytes) = fs::read(source.join(name)) else { continue };
        let offset = (block.parse::<u64>().unwrap() + 1) * 512;
        let fingerprint = Sha256::digest(&bytes).into();
        let stored = Stored { device: 0, offset, fingerprint };
        devices.stored.insert(digest(Algorithm::Sha256, &bytes).into(), stored);
    }
    assert_eq!(devices.stored.len(), SIZES.len());
    let (bytes, _) = make(&tree, &objects, &devices);
    fs::write(&image, &bytes).unwrap();
    let shown = mounted(&image, [&*archive], &mountpoint);
    mkfs::compare_source("mounted", &shown, &listing, &[]);
    // All files are on the device, and none is in the image.
    let opened = Image::open(&bytes[..]).unwrap();
    let mut ranges = Vec::new();
    opened.device_ranges(|range| ranges.push(range.len)).unwrap();
    ranges.sort_unstable();
    let sizes: Vec<_> = SIZES[1..].iter().map(|(_, size)| *size as u64).collect();
    assert_eq!(ranges, sizes);
}

/// The tag identifies a wrong device.
#[test]
fn devices_have_names_and_lengths() {
    let mut objects = Objects::new();
    let tree = flat(&SIZES, &mut objects);
    let devices = spread(&objects, &[Way::Packed, Way::Packed], 1, &mut Random(5));
    let (bytes, _) = make(&tree, &objects, &devices);
    let opened = Image::open(&bytes[..]).unwrap();
    assert_eq!(opened.devices().len(), devices.bytes.len());
    for (slot, bytes) in opened.devices().iter().zip(&devices.bytes) {
        assert_eq!(slot.device_id(), Some(digest(Algorithm::Sha256, bytes).into()));
        assert_eq!(slot.bytes(), Some(bytes.len() as u64));
    }
}
