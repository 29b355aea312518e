//! Tests files whose bytes are at several locations on devices, or are not stored.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

use quire_image::erofs::read::{
    ByteOffset, Device, Image, Located, Objects as Wanted, RunPlace, examine, native_tree,
};
use quire_image::erofs::{DeviceFile, ErofsWriteError, Native, Placed, Run, write_native};
use quire_image::tree::{Builder, Content, Inode, InodeId, Link, Location, Node, Tree, XattrsId};
use quire_image::verity::{Algorithm, ObjectId, digest};
use sha2::{Digest as _, Sha256};

use crate::hostile::{self, Random};
use crate::mkfs::{self, compare, mounted, prepare};
use crate::native::{check_with_fsck, sources};
use crate::standalone::METADATA;

/// Files by name with their contents and locations, and the devices.
#[derive(Default)]
struct Case {
    devices: Vec<Vec<u8>>,
    files: BTreeMap<String, (Vec<u8>, Vec<Run>)>,
}

impl Case {
    /// Adds a file of runs, each with its number of blocks and its location (`None` for zeros). The last is `less`
    /// bytes shorter.
    fn add(&mut self, name: &str, block: u64, runs: &[(u64, Option<(u16, u64)>)], less: u64) {
        let (mut bytes, mut said) = (Vec::new(), Vec::new());
        for (at, (blocks, place)) in runs.iter().enumerate() {
            let len = blocks * block - if at + 1 == runs.len() { less } else { 0 };
            match place {
                None => bytes.resize(bytes.len() + len as usize, 0),
                Some((device, first)) => {
                    let from = (first * block) as usize;
                    bytes.extend_from_slice(
                        &self.devices[usize::from(*device)][from..from + len as usize],
                    );
                }
            }
            said.push(Run { len, place: place.map(|(device, first)| (device, first * block)) });
        }
        self.files.insert(name.to_owned(), (bytes, said));
    }

    fn id(name: &str) -> ObjectId {
        digest(Algorithm::Sha256, name.as_bytes()).into()
    }

    fn tree(&self) -> Tree {
        let mut builder = Builder::new();
        for (name, (bytes, _)) in &self.files {
            let (size, object) = (bytes.len() as u64, Some(Self::id(name)));
            let node =
                Node::Regular(Content::External { size, object, location: Location::Object });
            let inode = builder.inode(&METADATA, XattrsId::NONE, node).unwrap();
            builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
        }
        builder.finish()
    }

    fn write(&self) -> Result<Vec<u8>, ErofsWriteError> {
        let id = |bytes: &Vec<u8>| digest(Algorithm::Sha256, bytes);
        let device =
            |bytes: &Vec<u8>| DeviceFile { id: id(bytes).into(), bytes: bytes.len() as u64 };
        let devices: Vec<_> = self.devices.iter().map(device).collect();
        let find = |object: &ObjectId| {
            let (_, (bytes, runs)) =
                self.files.iter().find(|(name, _)| Self::id(name) == *object).unwrap();
            Some(Placed::Pieces { runs, fingerprint: Sha256::digest(bytes).into() })
        };
        let mut contents = |_: Inode<'_>, _, _: &mut dyn io::Write| panic!("all is on devices");
        let native = Native::new(&devices, &find);
        let mut image = Vec::new();
        write_native(&self.tree(), &native, &mut contents, &mut image).map(|_| image)
    }

    /// Checks that the reader returns the bytes at the runs' locations, and the same runs.
    fn check_tree(&self, image: &[u8]) {
        let image = Image::open(image).unwrap();
        let find = |at: &Located<'_>| {
            let mut bytes = Vec::new();
            for run in at.runs {
                match run.place {
                    RunPlace::Hole => bytes.resize(bytes.len() + run.len as usize, 0),
                    RunPlace::Data(Device(device @ 1..), from) => {
                        let device = &self.devices[usize::from(device) - 1];
                        let from = from.0 as usize;
                        bytes.extend_from_slice(&device[from..from + run.len as usize]);
                    }
                    place => panic!("{place:?}"),
                }
            }
            assert_eq!(at.fingerprint, Some(Sha256::digest(&bytes).into()));
            assert_eq!(at.size, bytes.len() as u64);
            let (name, _) = self.files.iter().find(|(_, it)| it.0 == bytes)?;
            Some(Self::id(name))
        };
        let wanted = Wanted { algorithm: Algorithm::Sha256, inline_max: 64, find: &find };
        let tree = native_tree(&image, wanted).unwrap().tree;
        for (name, (bytes, _)) in &self.files {
            let inode = tree.resolve(format!("/{name}").as_bytes()).unwrap();
            let Node::Regular(Content::External { object: Some(object), size, .. }) = inode.node()
            else {
                panic!("{name}: {:?}", inode.node())
            };
            assert_eq!(size, bytes.len() as u64);
            let same = |other: &str| Self::id(other) == object && self.files[other].0 == *bytes;
            assert!(self.files.keys().any(|it| same(it)), "{name}");
        }
    }
}

/// Makes devices without zero bytes.
fn devices(random: &mut Random, lengths: &[usize]) -> Vec<Vec<u8>> {
    let fill = |len: &usize| (0..*len).map(|_| 1 + random.next(255) as u8).collect();
    lengths.iter().map(fill).collect()
}

/// Expected values were computed by hand: a chunk is as large as the locations allow, and adjacent runs are joined.
#[test]
fn chunks_are_as_large_as_they_can_be() {
    let mut case = Case { devices: devices(&mut Random(5), &[64 * 4096; 2]), ..Case::default() };
    case.add("one", 4096, &[(3, Some((0, 1))), (5, Some((0, 4))), (1, Some((0, 9)))], 7);
    case.add("one hole", 4096, &[(100, None)], 5);
    case.add("sixteens", 4096, &[(16, Some((0, 3))), (16, None), (9, Some((1, 1)))], 4000);
    case.add("fours", 4096, &[(12, None), (8, Some((1, 0))), (2, Some((0, 0)))], 0);
    case.add("ones", 4096, &[(1, Some((0, 0))), (1, Some((0, 0))), (1, None)], 0);
    case.add("joined", 4096, &[(4, Some((1, 8))), (4, Some((1, 12))), (8, None), (8, None)], 0);
    let bytes = case.write().unwrap();
    let image = Image::open(&bytes[..]).unwrap();
    let first = |name: &str| {
        let nid = image.lookup(&image.root().unwrap(), name.as_bytes()).unwrap().unwrap();
        let inode = image.inode(nid).unwrap();
        let extent = image.map(&inode, ByteOffset(0)).unwrap().unwrap();
        assert!(inode.is_chunk_based());
        extent.len
    };
    assert_eq!(first("one"), 9 * 4096 - 7);
    // A chunk of 128 blocks holds the file.
    assert_eq!(first("one hole"), 100 * 4096 - 5);
    assert_eq!(first("sixteens"), 16 * 4096);
    assert_eq!(first("fours"), 4 * 4096);
    assert_eq!(first("ones"), 4096);
    assert_eq!(first("joined"), 8 * 4096);
    case.check_tree(&bytes);
}

#[test]
fn pieces_that_cannot_be_are_refused() {
    let refused = |runs: &[Run], size: usize| {
        let devices = devices(&mut Random(5), &[4 * 4096]);
        let files = BTreeMap::from([("a".to_owned(), (vec![0; size], runs.to_vec()))]);
        let written = Case { devices, files }.write();
        matches!(written, Err(ErofsWriteError::MisplacedPieces { size: said, .. }) if said == size as u64)
    };
    let run = |len, place| Run { len, place };
    assert!(!refused(&[run(4096, Some((0, 12288))), run(1, Some((0, 0)))], 4097));
    // The runs are beyond the device, on no device, not at a block boundary, not whole blocks, empty, too short, or
    // too long.
    assert!(refused(&[run(4097, Some((0, 12288)))], 4097));
    assert!(refused(&[run(4096, Some((1, 0)))], 4096));
    assert!(refused(&[run(4096, Some((0, 256)))], 4096));
    assert!(refused(&[run(4095, None), run(1, None)], 4096));
    assert!(refused(&[run(4096, None), run(0, None)], 4096));
    assert!(refused(&[], 4096));
    assert!(refused(&[run(4095, None)], 4096));
    assert!(refused(&[run(4097, None)], 4096));
    assert!(refused(&[run(4096, Some((0, u64::MAX - 4095)))], 4096));
}

/// Reads files with pieces at arbitrary locations through the kernel, `fsck.erofs` and the reader.
#[test]
fn the_kernel_reads_pieces() {
    let Some(dir) = prepare("pieces::the_kernel_reads_pieces") else { return };
    let (image, mountpoint) = (dir.path().join("i.img"), dir.path().join("m"));
    fs::create_dir(&mountpoint).unwrap();
    let mut random = Random(0x7069_6563_6573);
    for round in 0..12 {
        let block = if round % 3 == 0 { 512 } else { 4096 };
        let blocks = 40;
        let devices = devices(&mut random, &[blocks * block; 3]);
        let mut case = Case { devices, ..Case::default() };
        for file in 0..12 {
            let mut runs = Vec::new();
            let unit = 1 << random.next(4);
            for _ in 0..=random.next(12) {
                let count = unit * (1 + random.next(2)) as u64;
                let place = (random.next(3) > 0).then(|| {
                    let first = random.next(blocks - count as usize);
                    (random.next(3) as u16, first as u64)
                });
                runs.push((count, place));
            }
            case.add(&format!("f{file}"), block as u64, &runs, random.next(block) as u64);
        }
        case.add("large hole", block as u64, &[(20_000, None), (1, Some((2, 7)))], 3);
        let bytes = case.write().unwrap();
        assert_eq!(bytes, case.write().unwrap());
        case.check_tree(&bytes);
        examine(&bytes, 1 << 24).unwrap();
        fs::write(&image, &bytes).unwrap();
        let write = |(at, bytes): (usize, &Vec<u8>)| {
            let file = dir.path().join(format!("device-{at}"));
            fs::write(&file, bytes).unwrap();
            file
        };
        let files: Vec<PathBuf> = case.devices.iter().enumerate().map(write).collect();
        check_with_fsck(&image, &files);
        let slices: Vec<&[u8]> = case.devices.iter().map(Vec::as_slice).collect();
        let ours = mkfs::read(&Image::open(&bytes[..]).unwrap(), &sources(&slices));
        let theirs = mounted(&image, files.iter().map(PathBuf::as_path), &mountpoint);
        compare(&format!("round {round}"), &ours, &theirs);
        for (name, (bytes, _)) in &case.files {
            let seen = theirs.iter().find(|(path, _)| path.ends_with(name.as_bytes())).unwrap();
            assert_eq!(seen.1.content, Sha256::digest(bytes).to_vec(), "{name}");
        }
    }
}

/// Damaged chunk tables cause a result or an error soon.
#[test]
fn damaged_tables_of_chunks() {
    let mut case = Case { devices: devices(&mut Random(5), &[64 * 4096; 2]), ..Case::default() };
    case.add("sixteens", 4096, &[(16, Some((0, 3))), (16, None), (9, Some((1, 1)))], 4000);
    case.add("ones", 4096, &[(1, Some((0, 0))), (1, Some((0, 0))), (1, None)], 0);
    hostile::damage(&case.write().unwrap(), 2000, 11);
}
