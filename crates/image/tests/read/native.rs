//! Compares images over devices, as the kernel mounts them, with their sources.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use quire_image::diff::diff;
use quire_image::erofs::read::{
    self, ByteOffset, DeviceRange, FileType, Image, ImageTree, Located, ReadAt, RunPlace, examine,
    native_tree,
};
use quire_image::erofs::{DeviceFile, Native, Placed, Stored, Summary, write_native};
use quire_image::tree::{Builder, Content, Inode, InodeId, Link, Node, Tree};
use quire_image::verity::{Algorithm, ObjectId, digest};
use sha2::{Digest as _, Sha256};

use crate::hostile::Random;
use crate::mkfs::{self, compare, compare_source, mounted, prepare};
use crate::source::{Fill, list};
use crate::standalone::{Objects, external, give, largest, links, random_tree, tree_of};
use crate::tools::{newer, not_made, run};

/// Devices, and the locations of objects on them.
#[derive(Default)]
pub struct Devices {
    pub bytes: Vec<Vec<u8>>,
    pub stored: BTreeMap<ObjectId, Stored>,
}

/// The way in which objects are placed on a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Way {
    /// At multiples of 4096.
    Packed,
    /// At multiples of 512, with the headers that tars have between files.
    Tar,
}

impl Devices {
    pub fn find_object(&self, id: &ObjectId) -> Option<Placed<'_>> {
        self.stored.get(id).copied().map(Placed::Whole)
    }

    pub fn add(&mut self, objects: &Objects, way: Way) {
        let number = self.bytes.len() as u16;
        let mut device = Vec::new();
        for (id, bytes) in objects {
            let fingerprint = Sha256::digest(bytes).into();
            let block = match way {
                Way::Packed => 4096,
                Way::Tar => {
                    device.extend_from_slice(&[0x77; 512]);
                    512
                }
            };
            let stored = Stored { device: number, offset: device.len() as u64, fingerprint };
            self.stored.insert(*id, stored);
            device.extend_from_slice(bytes);
            device.resize(device.len().next_multiple_of(block), 0);
        }
        if device.is_empty() {
            device = vec![0; 4096];
        }
        device.resize(device.len().next_multiple_of(4096), 0);
        self.bytes.push(device);
    }

    pub fn table(&self) -> Vec<DeviceFile> {
        let device = |bytes: &Vec<u8>| DeviceFile {
            id: digest(Algorithm::Sha256, bytes).into(),
            bytes: bytes.len() as u64,
        };
        self.bytes.iter().map(device).collect()
    }

    pub fn slices(&self) -> Vec<&[u8]> {
        self.bytes.iter().map(Vec::as_slice).collect()
    }

    /// Writes the devices to files.
    pub fn files(&self, dir: &Path) -> Vec<PathBuf> {
        let write = |(at, bytes): (usize, &Vec<u8>)| {
            let file = dir.join(format!("device-{at}"));
            fs::write(&file, bytes).unwrap();
            file
        };
        self.bytes.iter().enumerate().map(write).collect()
    }
}

pub fn sources<'a>(slices: &'a [&'a [u8]]) -> Vec<&'a dyn ReadAt> {
    slices.iter().map(|slice| slice as &dyn ReadAt).collect()
}

pub fn make(tree: &Tree, objects: &Objects, devices: &Devices) -> (Vec<u8>, Summary) {
    let mut contents = |file: Inode<'_>, piece, out: &mut dyn io::Write| {
        let Node::Regular(Content::External { object: Some(object), .. }) = file.node() else {
            panic!("{:?} has no contents to give", file.node());
        };
        give(&objects[&object], piece, out)
    };
    let table = devices.table();
    let find = |id: &ObjectId| devices.find_object(id);
    let uuid = *b"sixteen bytes id";
    let native = Native { uuid, ..Native::new(&table, &find) };
    let mut image = Vec::new();
    let summary = write_native(tree, &native, &mut contents, &mut image).unwrap();
    assert_eq!(summary.bytes, image.len() as u64);
    (image, summary)
}

/// Distributes objects at random over one device per way of `ways`, and the image itself.
pub fn spread(objects: &Objects, ways: &[Way], in_image: usize, random: &mut Random) -> Devices {
    let mut parts = vec![Objects::new(); ways.len() + in_image];
    let count = parts.len();
    for (id, bytes) in objects {
        parts[random.next(count)].insert(*id, bytes.clone());
    }
    let mut devices = Devices::default();
    for (part, way) in parts.iter().zip(ways) {
        devices.add(part, *way);
    }
    devices
}

/// The ways of the devices, and the number of shares of the objects that are stored in the image.
const MIXTURES: [(&[Way], usize); 5] = [
    (&[Way::Packed], 0),
    (&[], 1),
    (&[Way::Packed, Way::Packed, Way::Packed], 1),
    (&[Way::Tar], 0),
    (&[Way::Packed, Way::Tar, Way::Tar, Way::Packed], 1),
];

pub fn check_with_fsck(image: &Path, devices: &[PathBuf]) {
    let Some(fsck) = newer("fsck.erofs") else {
        return not_made("a newer fsck.erofs", "sid");
    };
    let words = devices.iter().map(|device| format!("--device={}", device.display()));
    let words = words.chain(["-d1".to_owned(), "--extract".to_owned()]);
    run(&fsck, words.chain([image.display().to_string()]));
}

/// The image over devices is made from a directory with files of every kind. When the kernel mounts the image, it
/// shows that directory.
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
    for (ways, in_image) in MIXTURES {
        let devices = spread(&objects, ways, in_image, &mut random);
        let what = format!("{ways:?}");
        let (bytes, _) = make(&tree, &objects, &devices);
        fs::write(&image, &bytes).unwrap();
        let files = devices.files(dir.path());
        check_with_fsck(&image, &files);
        let shown = mounted(&image, files.iter().map(PathBuf::as_path), &mountpoint);
        compare_source(&what, &shown, &listing, &[]);
        assert_eq!(links(&shown), links(&listing), "{what}");
        let ours = mkfs::read(&Image::open(&bytes[..]).unwrap(), &sources(&devices.slices()));
        compare(&what, &ours, &shown);
        examine(&bytes, 1 << 24).unwrap();
    }
}

/// The kernel and the reader show the same for trees that are not made from a disk.
#[test]
fn the_kernel_shows_what_we_read() {
    let Some(dir) = prepare("native::the_kernel_shows_what_we_read") else { return };
    let (image, mountpoint) = (dir.path().join("i.img"), dir.path().join("m"));
    fs::create_dir(&mountpoint).unwrap();
    let mut random = Random(0x4c69_6e75_7802);
    let mut trees: Vec<_> = (0..12).map(|_| random_tree(&mut random)).collect();
    trees.push(largest());
    for (case, (tree, objects)) in trees.iter().enumerate() {
        let mixtures = if case < 12 { &MIXTURES[..] } else { &MIXTURES[4..5] };
        for (ways, in_image) in mixtures.iter().copied() {
            let devices = spread(objects, ways, in_image, &mut random);
            let (bytes, _) = make(tree, objects, &devices);
            fs::write(&image, &bytes).unwrap();
            let files = devices.files(dir.path());
            let ours = mkfs::read(&Image::open(&bytes[..]).unwrap(), &sources(&devices.slices()));
            let theirs = mounted(&image, files.iter().map(PathBuf::as_path), &mountpoint);
            compare(&format!("case {case}, {ways:?}"), &ours, &theirs);
            if case % 4 == 0 {
                check_with_fsck(&image, &files);
            }
        }
    }
}

/// Returns the objects on devices by address, like an index of each device.
fn by_address(devices: &Devices, objects: &Objects) -> BTreeMap<(u16, u64), ObjectId> {
    let on_device = |(id, stored): (&ObjectId, &Stored)| {
        let is_there = !objects[id].is_empty();
        is_there.then_some(((stored.device + 1, stored.offset), *id))
    };
    devices.stored.iter().filter_map(on_device).collect()
}

/// Checks that two trees have the same names with the same inodes.
#[track_caller]
fn check_same(what: &str, got: &Tree, expected: &Tree) {
    let mut differences = Vec::new();
    diff(expected, got, |difference| differences.push(format!("{difference:?}")));
    assert!(differences.is_empty(), "{what}: {differences:#?}");
    assert_eq!(got.inode_count(), expected.inode_count(), "{what}");
    let (mut one, mut other) = (got.walk(), expected.walk());
    let mut same = BTreeMap::new();
    while let Some((path, entry)) = one.next() {
        let (other_path, other_entry) = other.next().unwrap();
        assert_eq!(path, other_path, "{what}");
        let twin = *same.entry(entry.inode.id()).or_insert(other_entry.inode.id());
        assert_eq!(twin, other_entry.inode.id(), "{what}: links of {path:?}");
        assert_eq!(entry.inode.node(), other_entry.inode.node(), "{what}: {path:?}");
    }
}

/// Returns the tree as it is read back: files of up to `inline_max` bytes are inline, and larger ones are objects.
pub fn canonical(tree: &Tree, objects: &mut Objects, inline_max: usize) -> Tree {
    let mut builder = Builder::new();
    let mut ids = BTreeMap::from([(InodeId::ROOT, InodeId::ROOT)]);
    let root = tree.root();
    let xattrs = builder.xattrs(root.xattrs()).unwrap();
    builder.describe(InodeId::ROOT, &root.metadata(), xattrs).unwrap();
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        let inode = entry.inode;
        let id = *ids.entry(inode.id()).or_insert_with(|| {
            let xattrs = builder.xattrs(inode.xattrs()).unwrap();
            let bytes = match inode.node() {
                Node::Regular(Content::External { object, .. }) => {
                    objects[&object.unwrap()].clone()
                }
                Node::Regular(Content::Inline(bytes)) => bytes.to_vec(),
                _ => Vec::new(),
            };
            let node = match inode.node() {
                Node::Regular(_) if bytes.len() <= inline_max => {
                    Node::Regular(Content::Inline(&bytes))
                }
                Node::Regular(_) => Node::Regular(external(objects, bytes.clone())),
                node => node,
            };
            builder.inode(&inode.metadata(), xattrs, node).unwrap()
        });
        let end = path.len() - entry.name.len() - 1;
        let parent = ids[&tree.resolve(&path[..end.max(1)]).unwrap().id()];
        builder.insert(parent, entry.name, id, Link::Equal).unwrap();
    }
    builder.finish()
}

fn check_fingerprints(what: &str, image: &Image<&[u8]>, devices: &Devices) {
    let (slices, mut walk) = (devices.slices(), image.walk());
    while let Some(step) = walk.next().unwrap() {
        let mut bytes = vec![0; step.inode.size() as usize];
        let is_file = step.inode.file_type() == FileType::Regular && !bytes.is_empty();
        let expected = is_file.then(|| {
            image.read(&step.inode, ByteOffset(0), &mut bytes, &sources(&slices)).unwrap();
            Sha256::digest(&bytes).into()
        });
        assert_eq!(image.fingerprint(&step.inode).unwrap(), expected, "{what}: {:?}", step.path);
    }
}

/// Checks that the used ranges of devices are those of the tree's objects.
fn check_ranges(what: &str, image: &Image<&[u8]>, read: &ImageTree, devices: &Devices) {
    let mut expected = BTreeMap::new();
    let mut walk = read.tree.walk();
    while let Some((_, entry)) = walk.next() {
        let Node::Regular(Content::External { size, object, .. }) = entry.inode.node() else {
            continue;
        };
        let Some(stored) = devices.stored.get(&object.unwrap()) else { continue };
        if size > 0 {
            let nid = read.nids[entry.inode.id().index()];
            expected.insert(nid, (stored.device + 1, stored.offset, size));
        }
    }
    let mut got = BTreeMap::new();
    let tell = |range: DeviceRange| {
        let first = (range.device.0, range.offset.0, 0);
        let (device, start, len) = got.entry(range.nid).or_insert(first);
        assert_eq!((*device, *start + *len), (range.device.0, range.offset.0), "{what}");
        *len += range.len;
    };
    image.device_ranges(tell).unwrap();
    assert_eq!(got, expected, "{what}");
}

/// A tree that is written and read back is unchanged for all locations of objects, and each file has its fingerprint.
#[test]
fn trees_come_back() {
    let mut random = Random(0x4e41_5449_5645);
    for case in 0..60 {
        let (tree, mut objects) = random_tree(&mut random);
        let tree = canonical(&tree, &mut objects, 64);
        for (ways, in_image) in MIXTURES {
            let what = format!("case {case}, {ways:?}");
            let devices = spread(&objects, ways, in_image, &mut random);
            let addresses = by_address(&devices, &objects);
            let find = |at: &Located<'_>| {
                let RunPlace::Data(device, offset) = at.runs[0].place else {
                    panic!("{what}: {at:?}")
                };
                let id = *addresses.get(&(device.0, offset.0))?;
                let bytes = &objects[&id];
                assert_eq!(at.size, bytes.len() as u64, "{what}");
                assert_eq!(at.fingerprint, Some(Sha256::digest(bytes).into()), "{what}");
                Some(id)
            };
            let (bytes, _) = make(&tree, &objects, &devices);
            let image = Image::open(&bytes[..]).unwrap();
            let wanted =
                read::Objects { algorithm: Algorithm::Sha256, inline_max: 64, find: &find };
            let read = native_tree(&image, wanted).unwrap();
            check_same(&what, &read.tree, &tree);
            check_fingerprints(&what, &image, &devices);
            let table: Vec<_> = image.devices().iter().map(|slot| slot.device_id()).collect();
            let expected: Vec<_> = devices.table().iter().map(|device| Some(device.id)).collect();
            assert_eq!(table, expected, "{what}");
            check_ranges(&what, &image, &read, &devices);
        }
    }
}
