//! Tests images over devices, rule by rule.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

use quire_image::erofs::layout::incompat;
use quire_image::erofs::read::{ByteOffset, Device, Image, RunPlace};
use quire_image::erofs::{DEVICES_MAX, DeviceFile, Native, Placed, Stored, write_native};
use quire_image::tree::{Builder, Content, Inode, InodeId, Link, Location, Node, Tree, XattrsId};
use quire_image::verity::{Algorithm, ObjectId, digest};
use sha2::{Digest as _, Sha256};

use crate::hostile::{self, Random};
use crate::mkfs::{self, mounted, prepare};
use crate::native::{Devices, Way, canonical, check_with_fsck, make, sources, spread};
use crate::source::acl;
use crate::standalone::{METADATA, Objects, external, give, random_tree};

/// Makes a tree of files by name, without directories.
pub fn flat(files: &[(&str, usize)], objects: &mut Objects) -> Tree {
    let mut builder = Builder::new();
    for (at, (name, size)) in files.iter().enumerate() {
        let bytes = (0..*size).map(|byte| (byte * 31 + at + byte / 4096) as u8).collect();
        let node = match size {
            0 => Node::Regular(Content::Inline(&[])),
            _ => Node::Regular(external(objects, bytes)),
        };
        let inode = builder.inode(&METADATA, XattrsId::NONE, node).unwrap();
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    builder.finish()
}

pub const SIZES: [(&str, usize); 9] = [
    ("0", 0),
    ("1", 1),
    ("512", 512),
    ("4095", 4095),
    ("4096", 4096),
    ("4097", 4097),
    ("4608", 4608),
    ("8191", 8191),
    ("70000", 70_000),
];

/// The expected locations of files were computed by hand from the rules.
#[test]
fn where_files_are() {
    let mut objects = Objects::new();
    let tree = flat(&SIZES, &mut objects);
    let mut devices = Devices::default();
    devices.add(&objects, Way::Packed);
    let (bytes, _) = make(&tree, &objects, &devices);
    let image = Image::open(&bytes[..]).unwrap();
    let slot = &image.devices()[0];
    // Tags that are not device ids: a tag with upper-case digits, and an empty tag.
    let mut other = slot.clone();
    other.tag.make_ascii_uppercase();
    assert!(slot.device_id().is_some() && other.device_id().is_none());
    other.tag = [0; 64];
    assert_eq!(other.device_id(), None);
    assert_eq!(slot.first_block, bytes.len() as u64 / 512);
    assert_eq!(slot.blocks, devices.bytes[0].len() as u64 / 512);
    assert_eq!(slot.tag, *digest(Algorithm::Sha256, &devices.bytes[0]).to_string().as_bytes());
    let (mut found, mut nids) = (Vec::new(), Vec::new());
    for (name, size) in SIZES {
        let nid = image.lookup(&image.root().unwrap(), name.as_bytes()).unwrap().unwrap();
        let inode = image.inode(nid).unwrap();
        assert_eq!(inode.is_chunk_based(), size > 0);
        nids.push(nid.0);
        let place = |place| match place {
            RunPlace::Data(Device(1), at) => at.0,
            place => panic!("{place:?}"),
        };
        let extents = image.extents(&inode).map(Result::unwrap);
        found.push((name, extents.map(|it| (place(it.place), it.len)).collect::<Vec<_>>()));
    }
    // An empty file takes one slot of 32 bytes. Every other file takes two: 32 bytes for the inode and 16 for the
    // fingerprint's reference are 48, and the table takes 8 more. One of them fills a gap after the root.
    nids.sort_unstable();
    let mut slots: Vec<_> = nids.windows(2).map(|pair| pair[1] - pair[0]).collect();
    slots.sort_unstable();
    assert_eq!(slots[..7], [1, 2, 2, 2, 2, 2, 2]);
    // The objects are in the order of their ids, and each takes whole blocks.
    let mut at = 0;
    let places = objects.values().map(|bytes| {
        let place = (bytes.len() as u64, at);
        at += place.0.next_multiple_of(4096);
        place
    });
    let places: BTreeMap<_, _> = places.collect();
    let expected = SIZES.map(|(name, size)| match size as u64 {
        0 => (name, vec![]),
        size => (name, vec![(places[&size], size)]),
    });
    assert_eq!(found, expected);
}

/// The same tree with another order of insertion gives the same image.
#[test]
fn the_order_of_insertion_does_not_matter() {
    let image = |files: &[(&str, usize)], names: &[(&str, usize)]| {
        let mut objects = Objects::new();
        drop(flat(files, &mut objects));
        let mut builder = Builder::new();
        for (name, at) in names {
            let (_, bytes) = objects.iter().nth(*at).unwrap();
            let node = Node::Regular(external(&mut objects.clone(), bytes.clone()));
            let inode = builder.inode(&METADATA, XattrsId::NONE, node).unwrap();
            builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
        }
        let devices = spread(&objects, &[Way::Packed, Way::Packed], 1, &mut Random(9));
        let tree = builder.finish();
        make(&tree, &objects, &devices).0
    };
    let names: Vec<_> = SIZES[1..].iter().zip(0..).map(|((name, _), at)| (*name, at)).collect();
    let backwards: Vec<_> = names.iter().rev().copied().collect();
    assert!(image(&SIZES[1..], &names) == image(&SIZES[1..], &backwards));
}

/// Chunk tables refer to a device that does not fit in the common address space like to any other device.
#[test]
fn more_than_one_address_space_holds() {
    let Some(dir) = prepare("devices::more_than_one_address_space_holds") else { return };
    let (image, mountpoint) = (dir.path().join("i.img"), dir.path().join("m"));
    fs::create_dir(&mountpoint).unwrap();
    for way in [Way::Packed, Way::Tar] {
        let mut objects = Objects::new();
        let tree = flat(&SIZES, &mut objects);
        let mut devices = Devices::default();
        devices.add(&Objects::new(), Way::Packed);
        devices.add(&objects, way);
        let mut table = devices.table();
        // 2 TiB. The test checks that this device is not read.
        table[0].bytes = 512 * u64::from(u32::MAX);
        let find = |id: &ObjectId| devices.find_object(id);
        let uuid = [0; 16];
        let native = Native { uuid, ..Native::new(&table, &find) };
        let mut contents = |file: Inode<'_>, piece, out: &mut dyn io::Write| match file.node() {
            Node::Regular(Content::External { object, .. }) => {
                give(&objects[&object.unwrap()], piece, out)
            }
            node => panic!("{node:?}"),
        };
        let mut bytes = Vec::new();
        write_native(&tree, &native, &mut contents, &mut bytes).unwrap();
        let opened = Image::open(&bytes[..]).unwrap();
        let starts: Vec<_> = opened.devices().iter().map(|slot| slot.first_block).collect();
        assert_eq!(starts, [0, bytes.len() as u64 / 512]);
        assert_eq!(opened.superblock().incompat & incompat::CHUNKED_FILE, incompat::CHUNKED_FILE);
        fs::write(&image, &bytes).unwrap();
        let files = devices.files(dir.path());
        let ours = mkfs::read(&opened, &sources(&devices.slices()));
        let theirs = mounted(&image, files.iter().map(PathBuf::as_path), &mountpoint);
        mkfs::compare("chunks", &ours, &theirs);
        for bytes in objects.values() {
            let digest = Sha256::digest(bytes).to_vec();
            assert!(theirs.values().any(|seen| seen.content == digest));
        }
    }
}

/// Invalid locations are refused before anything is written.
#[test]
fn what_cannot_be_is_refused() {
    let mut objects = Objects::new();
    let tree = flat(&[("a", 10_000)], &mut objects);
    let (&id, content) = objects.iter().next().unwrap();
    let device = |bytes| DeviceFile { id: digest(Algorithm::Sha256, b"device").into(), bytes };
    let refused = |devices: &[DeviceFile], place: Option<(u16, u64)>| {
        let find = |asked: &ObjectId| {
            assert_eq!(*asked, id);
            let (device, offset) = place?;
            Some(Placed::Whole(Stored { device, offset, fingerprint: [7; 32] }))
        };
        let native = Native { has_tar: false, devices, find: &find, uuid: [0; 16] };
        let mut image = Vec::new();
        let mut contents = |_: Inode<'_>, piece, out: &mut dyn io::Write| give(content, piece, out);
        let written = write_native(&tree, &native, &mut contents, &mut image);
        assert!(written.is_ok() || image.is_empty());
        written.map(|_| ()).map_err(|error| error.to_string())
    };
    let good = [device(8 * 4096)];
    assert_eq!(refused(&good, None), Ok(()));
    assert_eq!(refused(&good, Some((0, 0))), Ok(()));
    assert_eq!(refused(&good, Some((0, 44 * 512))), Ok(()));
    let misplaced = |offset, device| {
        Err(format!("\"/a\" has 10000 bytes, which cannot be at byte {offset} of device {device}"))
    };
    for (device, offset) in [
        // The file ends beyond the device, first by one block.
        (0, 45 * 512),
        (0, 7 * 4096),
        (0, u64::MAX - 4095),
        (1, 0),
        (0, 256),
    ] {
        assert_eq!(refused(&good, Some((device, offset))), misplaced(offset, device));
    }
    let name = digest(Algorithm::Sha256, b"device");
    for bytes in [0, 4095, 4097, 1 << 60] {
        let expected = format!("device {name} has {bytes} bytes, not 1 to 2^48 - 1 blocks of 512");
        assert_eq!(refused(&[device(bytes)], None), Err(expected));
    }
    let wide = DeviceFile { id: digest(Algorithm::Sha512, b"device").into(), bytes: 4096 };
    let expected =
        format!("device {} has a sha512 id, but a device table has room only for sha256", wide.id);
    assert_eq!(refused(&[wide], None), Err(expected));
    assert_eq!(refused(&vec![device(3 * 4096); DEVICES_MAX], Some((4095, 0))), Ok(()));
    let many = refused(&vec![device(4096); DEVICES_MAX + 1], None);
    assert_eq!(many, Err("the image is too large: it has more than 4096 devices".to_owned()));
}

/// The image's header states whether an inode has an ACL, wherever the inode is. The header of an earlier version
/// does not state it, and that of a later version is refused.
#[test]
fn a_native_image_says_whether_it_has_acls() {
    let acl: &[u8] = &[2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255];
    let cases: [(&[u8], u8); 4] = [
        (b"user.posix_acl_access", 0),
        (b"security.ima", 0),
        (b"system.posix_acl_access", 1),
        (b"system.posix_acl_default", 1),
    ];
    for (name, flag) in cases {
        // The ACL is inline after one inode, or shared by many.
        for count in [1, 40] {
            let mut builder = Builder::new();
            let xattrs = builder.xattrs([(name, acl)]).unwrap();
            for at in 0..count {
                let inode = builder.inode(&METADATA, xattrs, Node::Fifo).unwrap();
                let file = format!("{at}");
                builder.insert(InodeId::ROOT, file.as_bytes(), inode, Link::Equal).unwrap();
            }
            let (none, devices) = (Objects::new(), Devices::default());
            let tree = builder.finish();
            let (mut image, _) = make(&tree, &none, &devices);
            let expected = [&b"quireimg"[..], &[2, 0, 0, 0, flag, 0, 0, 0], &[0; 1008]].concat();
            assert!(image[..1024] == expected, "{}", String::from_utf8_lossy(name));
            let read = |image: &Vec<u8>| Image::open(&image[..]).unwrap().superblock().clone();
            assert_eq!(read(&image).native.map(|header| header.has_acl), Some(flag == 1));
            assert_eq!(read(&image).may_have_acl(), flag == 1);
            for (at, other) in [(0, b'Q'), (8, 0), (8, 1)] {
                let before = std::mem::replace(&mut image[at], other);
                assert_eq!(read(&image).native, None);
                assert!(read(&image).may_have_acl());
                image[at] = before;
            }
            image[8] = 3;
            let error = Image::open(&image[..]).unwrap_err().to_string();
            assert_eq!(error, "the image uses unsupported native header version 3");
        }
    }
}

#[test]
fn a_native_image_says_whether_a_device_is_a_tar() {
    let tree = Builder::new().finish();
    let find = |_: &ObjectId| None;
    for has_tar in [true, false] {
        let native = Native { has_tar, ..Native::new(&[], &find) };
        let mut nothing = |_: Inode<'_>, _, _: &mut dyn io::Write| panic!("there is no file");
        let mut image = Vec::new();
        write_native(&tree, &native, &mut nothing, &mut image).unwrap();
        let read = |image: &[u8]| Image::open(image).unwrap().superblock().native.unwrap();
        assert_eq!(read(&image).has_tar, has_tar);
        assert_eq!(image[12], if has_tar { 2 } else { 0 });
    }
}

/// Makes files whose tails are in the image after as many xattrs as possible, with all critical lengths.
fn large_xattrs() -> (Tree, Objects) {
    let mut objects = Objects::new();
    let mut builder = Builder::new();
    let mut number = 0_usize;
    for xattr in [0, 1, 300, 450, 3000, 4000, 4030, 4090, 4096, 65_535] {
        for end in [0, 1, 400, 447, 448, 449, 511, 2048, 2049, 4031, 4032, 4033, 4095] {
            let value = vec![b'v'; xattr];
            let name = format!("user.{number}");
            let pair = [(name.as_bytes(), &value[..])];
            let xattrs = builder.xattrs(pair.into_iter().take(xattr)).unwrap();
            let bytes = (0..8192 + end).map(|at| (at / 7 + number) as u8).collect();
            let node = Node::Regular(external(&mut objects, bytes));
            let inode = builder.inode(&METADATA, xattrs, node).unwrap();
            let name = format!("{xattr}-{end}");
            builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
            number += 1;
        }
    }
    (builder.finish(), objects)
}

#[test]
fn ends_behind_large_xattrs() {
    let (tree, objects) = large_xattrs();
    let (bytes, _) = make(&tree, &objects, &Devices::default());
    let image = Image::open(&bytes[..]).unwrap();
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        let Node::Regular(Content::External { object, .. }) = entry.inode.node() else {
            panic!("only files")
        };
        let nid = image.lookup(&image.root().unwrap(), &path[1..]).unwrap().unwrap();
        let inode = image.inode(nid).unwrap();
        let mut got = vec![0; inode.size() as usize];
        image.read(&inode, ByteOffset(0), &mut got, &[]).unwrap();
        assert!(got == objects[&object.unwrap()], "{path:?}");
        let name = entry.inode.xattrs().next();
        let (name, value) = name.unwrap_or((b"user.none", b""));
        let expected = (!value.is_empty()).then(|| value.to_vec());
        assert_eq!(image.xattr(&inode, name).unwrap(), expected, "{path:?}");
    }
}

#[test]
fn the_kernel_reads_ends_behind_large_xattrs() {
    let Some(dir) = prepare("devices::the_kernel_reads_ends_behind_large_xattrs") else { return };
    let (image, mountpoint) = (dir.path().join("i.img"), dir.path().join("m"));
    fs::create_dir(&mountpoint).unwrap();
    let (tree, objects) = large_xattrs();
    let (bytes, _) = make(&tree, &objects, &Devices::default());
    fs::write(&image, &bytes).unwrap();
    check_with_fsck(&image, &[]);
    let ours = mkfs::read(&Image::open(&bytes[..]).unwrap(), &[]);
    let theirs = mounted(&image, None, &mountpoint);
    mkfs::compare("large xattrs", &ours, &theirs);
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        let Node::Regular(Content::External { object, .. }) = entry.inode.node() else {
            panic!("only files")
        };
        let digest = Sha256::digest(&objects[&object.unwrap()]).to_vec();
        assert_eq!(theirs[&path[1..]].content, digest, "{path:?}");
    }
}

/// Tests a file of more than 4 GiB on a device, and the maximum number of devices.
#[test]
fn large_files_and_many_devices() {
    let mut builder = Builder::new();
    let id = digest(Algorithm::Sha256, b"a file of that size");
    let size = (1 << 32) + 5000;
    let node = Content::External { size, object: Some(id.into()), location: Location::Object };
    let inode = builder.inode(&METADATA, XattrsId::NONE, Node::Regular(node)).unwrap();
    builder.insert(InodeId::ROOT, b"a", inode, Link::Equal).unwrap();
    let tree = builder.finish();
    let device = |at: usize| DeviceFile {
        id: digest(Algorithm::Sha256, &at.to_le_bytes()).into(),
        bytes: if at == DEVICES_MAX - 1 { 1 << 33 } else { 4096 },
    };
    let devices: Vec<_> = (0..DEVICES_MAX).map(device).collect();
    let device = u16::try_from(DEVICES_MAX - 1).unwrap();
    // The file has 8388617 blocks and 392 bytes.
    let stored = Stored { device, offset: 3 * 4096, fingerprint: [1; 32] };
    let find = |_: &ObjectId| Some(Placed::Whole(stored));
    let native = Native::new(&devices, &find);
    let mut contents = |_: Inode<'_>, _, _: &mut dyn io::Write| panic!("all is on the device");
    let mut bytes = Vec::new();
    write_native(&tree, &native, &mut contents, &mut bytes).unwrap();
    let image = Image::open(&bytes[..]).unwrap();
    assert_eq!(image.devices().len(), DEVICES_MAX);
    let nid = image.lookup(&image.root().unwrap(), b"a").unwrap().unwrap();
    let inode = image.inode(nid).unwrap();
    let places: Vec<_> = image.extents(&inode).map(|it| it.unwrap()).collect();
    assert_eq!((inode.size(), places.len()), (size, 1));
    let start = RunPlace::Data(Device(4096), ByteOffset(3 * 4096));
    assert_eq!((places[0].place, places[0].len), (start, size));
}

/// An object has only one size.
#[test]
fn files_of_one_object_and_other_sizes_are_refused() {
    let id = digest(Algorithm::Sha256, b"two");
    let mut builder = Builder::new();
    for (name, size) in [(b"a", 5000), (b"b", 5001)] {
        let node = Content::External { size, object: Some(id.into()), location: Location::Object };
        let inode = builder.inode(&METADATA, XattrsId::NONE, Node::Regular(node)).unwrap();
        builder.insert(InodeId::ROOT, name, inode, Link::Equal).unwrap();
    }
    let stored = Stored { device: 0, offset: 0, fingerprint: [1; 32] };
    let (devices, find) =
        ([DeviceFile { id: id.into(), bytes: 8192 }], |_: &ObjectId| Some(Placed::Whole(stored)));
    let native = Native::new(&devices, &find);
    let mut contents = |_: Inode<'_>, _, _: &mut dyn io::Write| panic!("all is on the device");
    let error = write_native(&builder.finish(), &native, &mut contents, &mut io::sink());
    let expected = "the length of \"/b\" is not 5001 bytes";
    assert_eq!(error.unwrap_err().to_string(), expected);
}

/// If many pairs have a name, the name becomes a long prefix if this makes the image smaller. The kernel shows such
/// names unchanged.
#[test]
fn long_names_are_prefixes() {
    let Some(dir) = prepare("devices::long_names_are_prefixes") else { return };
    let (image, mountpoint) = (dir.path().join("i.img"), dir.path().join("m"));
    fs::create_dir(&mountpoint).unwrap();
    let make_with = |name: &str, count: usize| {
        let mut builder = Builder::new();
        for number in 0..count {
            let value = number.to_string();
            let pairs: [(&[u8], &[u8]); 2] =
                [(name.as_bytes(), value.as_bytes()), (b"system.posix_acl_access", &acl())];
            let xattrs = builder.xattrs(pairs).unwrap();
            let node = Node::Regular(Content::Inline(&[]));
            let inode = builder.inode(&METADATA, xattrs, node).unwrap();
            builder.insert(InodeId::ROOT, value.as_bytes(), inode, Link::Equal).unwrap();
        }
        let (tree, none) = (builder.finish(), Devices::default());
        let made = make(&tree, &Objects::new(), &none);
        fs::write(&image, &made.0).unwrap();
        let ours = mkfs::read(&Image::open(&made.0[..]).unwrap(), &[]);
        let shown = mounted(&image, None, &mountpoint);
        mkfs::compare("prefixes", &ours, &shown);
        for (path, seen) in &shown {
            let value = seen.xattrs.get(name.as_bytes());
            assert_eq!(value, Some(path).filter(|path| !path.is_empty()), "{path:?}");
        }
        check_with_fsck(&image, &[]);
        made.0[1024 + 91]
    };
    // With a value of one byte, a pair has 14 bytes, which are padded to 16. Without the name, it takes 4 bytes, so
    // each use saves 12. The prefix takes 17 bytes, which are padded to 20.
    let name = "user.fourteen bytes";
    assert_eq!(make_with(name, 1), 1);
    assert_eq!(make_with(name, 2), 2);
    assert_eq!(make_with("security.selinux", 50), 2);
    assert_eq!(make_with("trusted.none.of.a.prefix.but.this", 100), 2);
}

/// Damaged images cause errors, never a panic.
#[test]
fn damaged() {
    let (tree, mut objects) = random_tree(&mut Random(98));
    let tree = canonical(&tree, &mut objects, 64);
    for (seed, ways) in [(6, [Way::Packed, Way::Packed]), (7, [Way::Tar, Way::Packed])] {
        let devices = spread(&objects, &ways, 1, &mut Random(seed));
        let (bytes, _) = make(&tree, &objects, &devices);
        hostile::damage(&bytes, 250, seed);
    }
}
