//! Images over data blobs: what the kernel shows of them is what they were made of.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use quire_image::erofs::read::{Image, ReadAt, examine};
use quire_image::erofs::{
    BlockSize, DataBlob, Fingerprints, Native, PACKED_TAIL_MAX, Stored, Summary, write_native,
};
use quire_image::tree::{Content, Inode, Node, Tree};
use quire_image::verity::{Algorithm, ObjectId, digest};
use sha2::{Digest as _, Sha256};

use crate::hostile::Random;
use crate::mkfs::{compare, compare_source, mounted, prepare, read};
use crate::source::{Fill, list};
use crate::standalone::{Objects, give, largest, links, random_tree, tree_of};
use crate::tools::{newer, run, skipped};

/// Data blobs, and where in them objects are.
#[derive(Default)]
pub struct Blobs {
    pub bytes: Vec<Vec<u8>>,
    pub stored: BTreeMap<ObjectId, Stored>,
}

/// How objects come into a blob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Way {
    /// In blocks of 4096, without ends of up to so many bytes.
    Packed(u16),
    /// In blocks of 512, with what tars have between files.
    Tar,
}

impl Blobs {
    pub fn add(&mut self, objects: &Objects, way: Way) {
        let device = self.bytes.len() as u16;
        let mut blob = Vec::new();
        for (id, bytes) in objects {
            let fingerprint = Sha256::digest(bytes).into();
            let (tail, block) = match way {
                Way::Tar => {
                    blob.extend_from_slice(&[0x77; 512]);
                    (0, 512)
                }
                Way::Packed(max) => match bytes.len() % 4096 {
                    end if end <= usize::from(max) => (end, 4096),
                    _ => (0, 4096),
                },
            };
            let stored =
                Stored { device, offset: blob.len() as u64, tail: tail as u16, fingerprint };
            self.stored.insert(*id, stored);
            blob.extend_from_slice(&bytes[..bytes.len() - tail]);
            blob.resize(blob.len().next_multiple_of(block), 0);
        }
        if blob.is_empty() {
            blob = vec![0; 4096];
        }
        blob.resize(blob.len().next_multiple_of(4096), 0);
        self.bytes.push(blob);
    }

    pub fn table(&self) -> Vec<DataBlob> {
        let blob = |bytes: &Vec<u8>| DataBlob {
            id: digest(Algorithm::Sha256, bytes),
            bytes: bytes.len() as u64,
        };
        self.bytes.iter().map(blob).collect()
    }

    pub fn slices(&self) -> Vec<&[u8]> {
        self.bytes.iter().map(Vec::as_slice).collect()
    }

    /// Writes them to files.
    pub fn files(&self, dir: &Path) -> Vec<PathBuf> {
        let write = |(at, bytes): (usize, &Vec<u8>)| {
            let file = dir.join(format!("blob-{at}"));
            fs::write(&file, bytes).unwrap();
            file
        };
        self.bytes.iter().enumerate().map(write).collect()
    }
}

pub fn sources<'a>(slices: &'a [&'a [u8]]) -> Vec<&'a dyn ReadAt> {
    slices.iter().map(|slice| slice as &dyn ReadAt).collect()
}

pub fn make(
    tree: &Tree,
    objects: &Objects,
    blobs: &Blobs,
    block_size: BlockSize,
    fingerprints: Fingerprints,
) -> (Vec<u8>, Summary) {
    let mut contents = |file: Inode<'_>, piece, out: &mut dyn io::Write| {
        let Node::Regular(Content::External { object: Some(object), .. }) = file.node() else {
            panic!("{:?} has no contents to give", file.node());
        };
        give(&objects[&object], piece, out)
    };
    let table = blobs.table();
    let find = |id: &ObjectId| blobs.stored.get(id).copied();
    let uuid = *b"sixteen bytes id";
    let native = Native { block_size, devices: &table, find: &find, fingerprints, uuid };
    let mut image = Vec::new();
    let summary = write_native(tree, &native, &mut contents, &mut image).unwrap();
    assert_eq!(summary.bytes, image.len() as u64);
    (image, summary)
}

/// Objects by turns in one of `ways`, or in the image itself.
pub fn spread(objects: &Objects, ways: &[Way], in_image: usize, random: &mut Random) -> Blobs {
    let mut parts = vec![Objects::new(); ways.len() + in_image];
    let count = parts.len();
    for (id, bytes) in objects {
        parts[random.next(count)].insert(*id, bytes.clone());
    }
    let mut blobs = Blobs::default();
    for (part, way) in parts.iter().zip(ways) {
        blobs.add(part, *way);
    }
    blobs
}

const PACKED: Way = Way::Packed(PACKED_TAIL_MAX);

/// Mixtures, with the block size of each.
const MIXTURES: [(BlockSize, &[Way], usize); 6] = [
    (BlockSize::B4096, &[PACKED], 0),
    (BlockSize::B4096, &[], 1),
    (BlockSize::B4096, &[PACKED, Way::Packed(0), Way::Packed(4031)], 1),
    (BlockSize::B512, &[Way::Tar], 0),
    (BlockSize::B512, &[PACKED, Way::Tar, Way::Tar, Way::Packed(4095)], 1),
    (BlockSize::B512, &[], 1),
];

fn check_with_fsck(image: &Path, devices: &[PathBuf]) {
    let Some(fsck) = newer("fsck.erofs") else {
        return skipped("there is no newer fsck.erofs in the cache: cargo xtask inputs sid");
    };
    let words = devices.iter().map(|device| format!("--device={}", device.display()));
    let words = words.chain(["-d1".to_owned(), "--extract".to_owned()]);
    run(&fsck, words.chain([image.display().to_string()]));
}

/// A directory with some of everything becomes an image over blobs, and the kernel shows that directory again.
#[test]
fn the_kernel_shows_the_source() {
    let Some(dir) = prepare("native::the_kernel_shows_the_source") else { return };
    let at = |name: &str| dir.path().join(name);
    let (source, mountpoint, image) = (at("s"), at("m"), at("i.img"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    Fill { is_root: true, narrow: false, name: 255, big: 700 }.make(&source);
    let listing = list(&source);
    let (tree, objects) = tree_of(&source, &listing);
    let mut random = Random(1);
    for (block_size, ways, in_image) in MIXTURES {
        let blobs = spread(&objects, ways, in_image, &mut random);
        for fingerprints in [Fingerprints::Omitted, Fingerprints::Inline, Fingerprints::Shared] {
            let what = format!("{block_size:?} {ways:?} {fingerprints:?}");
            let (bytes, _) = make(&tree, &objects, &blobs, block_size, fingerprints);
            fs::write(&image, &bytes).unwrap();
            let files = blobs.files(dir.path());
            check_with_fsck(&image, &files);
            let shown = mounted(&image, files.iter().map(PathBuf::as_path), &mountpoint);
            compare_source(&what, &shown, &listing, &[]);
            assert_eq!(links(&shown), links(&listing), "{what}");
            let ours = read(&Image::open(&bytes[..]).unwrap(), &sources(&blobs.slices()));
            compare(&what, &ours, &shown);
            examine(&bytes, 1 << 24).unwrap();
        }
    }
}

/// What our reader shows of trees that nobody made on a disk, the kernel shows too.
#[test]
fn the_kernel_shows_what_we_read() {
    let Some(dir) = prepare("native::the_kernel_shows_what_we_read") else { return };
    let (image, mountpoint) = (dir.path().join("i.img"), dir.path().join("m"));
    fs::create_dir(&mountpoint).unwrap();
    let mut random = Random(0x4c69_6e75_7802);
    let mut trees: Vec<_> = (0..12).map(|_| random_tree(&mut random)).collect();
    trees.push(largest());
    for (case, (tree, objects)) in trees.iter().enumerate() {
        for (block_size, ways, in_image) in MIXTURES {
            let blobs = spread(objects, ways, in_image, &mut random);
            let (bytes, _) = make(tree, objects, &blobs, block_size, Fingerprints::Shared);
            fs::write(&image, &bytes).unwrap();
            let files = blobs.files(dir.path());
            let ours = read(&Image::open(&bytes[..]).unwrap(), &sources(&blobs.slices()));
            let theirs = mounted(&image, files.iter().map(PathBuf::as_path), &mountpoint);
            compare(&format!("case {case}, {block_size:?} {ways:?}"), &ours, &theirs);
            if case % 4 == 0 {
                check_with_fsck(&image, &files);
            }
        }
    }
}
