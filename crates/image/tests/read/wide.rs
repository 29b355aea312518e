//! Tests devices of 2^32 blocks and more, whose block numbers have 48 bits.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use quire_image::erofs::layout::incompat;
use quire_image::erofs::read::{ByteOffset, Image, ReadAt, examine};
use quire_image::erofs::{DeviceFile, Native, Placed, Run, Stored, write_native};
use quire_image::tree::{Builder, Content, Inode, InodeId, Link, Location, Node, XattrsId};
use quire_image::verity::{Algorithm, ObjectId, digest};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::mkfs::prepare;
use crate::standalone::METADATA;
use crate::tools::{newer, not_made, run, skipped};

const BLOCK: u64 = 512;
/// The first block number that does not fit in 32 bits. (The number before it means a hole in tables with 32 bits.)
const FIRST_WIDE: u64 = 1 << 32;
const BLOCKS: u64 = FIRST_WIDE + 4096;

/// A file: its runs, and whether its location is stated as a single run.
struct ExpectedFile {
    name: &'static str,
    runs: Vec<Run>,
    is_whole: bool,
}

/// A number of blocks of a file, and the device and block at which they begin.
type Blocks = (u64, Option<(u16, u64)>);

fn runs(blocks: &[Blocks], less: u64) -> Vec<Run> {
    let mut runs: Vec<_> = blocks
        .iter()
        .map(|(blocks, place)| Run {
            len: blocks * BLOCK,
            place: place.map(|(device, block)| (device, block * BLOCK)),
        })
        .collect();
    runs.last_mut().unwrap().len -= less;
    runs
}

fn files() -> Vec<ExpectedFile> {
    let wanted = |name, is_whole, list: &[Blocks], less| ExpectedFile {
        name,
        runs: runs(list, less),
        is_whole,
    };
    vec![
        wanted("begins", true, &[(8, Some((1, 0)))], 100),
        wanted("crosses", true, &[(16, Some((1, FIRST_WIDE - 8)))], 1),
        wanted("ends", true, &[(8, Some((1, BLOCKS - 8)))], 0),
        // More than one chunk, because a chunk has at most 2^31 blocks.
        wanted("huge", true, &[(FIRST_WIDE + 16, Some((1, 0)))], 0),
        wanted("narrow", true, &[(8, Some((0, 8)))], 7),
        wanted(
            "pieces",
            false,
            &[(8, Some((1, FIRST_WIDE))), (8, None), (8, Some((0, 0))), (8, Some((1, 16)))],
            3,
        ),
        // The low half of this block's number equals that of a hole.
        wanted("no hole", true, &[(1, Some((1, FIRST_WIDE - 1)))], 0),
    ]
}

impl ExpectedFile {
    fn size(&self) -> u64 {
        self.runs.iter().map(|run| run.len).sum()
    }

    fn id(&self) -> ObjectId {
        digest(Algorithm::Sha256, self.name.as_bytes()).into()
    }

    fn placed(&self) -> Placed<'_> {
        let fingerprint = [self.name.len() as u8; 32];
        match (self.is_whole, &self.runs[..]) {
            (true, [Run { place: Some((device, offset)), .. }]) => {
                Placed::Whole(Stored { device: *device, offset: *offset, fingerprint })
            }
            (_, runs) => Placed::Pieces { runs, fingerprint },
        }
    }

    /// Returns the file's bytes in this range, from the devices.
    fn bytes(&self, devices: &[File], from: u64, len: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut start = 0;
        for run in &self.runs {
            let (begin, end) = (from.max(start), (from + len).min(start + run.len));
            if begin < end {
                let mut part = vec![0; (end - begin) as usize];
                if let Some((device, offset)) = run.place {
                    let at = offset + (begin - start);
                    devices[usize::from(device)].read_exact_at(&mut part, at).unwrap();
                }
                bytes.extend_from_slice(&part);
            }
            start += run.len;
        }
        bytes
    }

    /// Returns the ranges to compare: a small file as a whole, and both ends and the middle of a huge one.
    fn places(&self) -> Vec<(u64, u64)> {
        let size = self.size();
        if size < 1 << 20 {
            return vec![(0, size)];
        }
        let middle = (FIRST_WIDE - 16) * BLOCK;
        vec![(0, 8192), (middle, size - middle), (size / 2 - 4096, 8192)]
    }
}

struct Disk<'f>(&'f File);

impl ReadAt for Disk<'_> {
    fn len(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }
}

/// Makes two devices, one narrow and one with more than 2^32 blocks, with data at the locations of files, and holes
/// elsewhere.
fn devices(dir: &Path) -> Vec<File> {
    let make = |name: &str, blocks: u64, written: &[(u64, u64)]| {
        let file = dir.join(name);
        let file = File::options().read(true).write(true).create_new(true).open(file).unwrap();
        file.set_len(blocks * BLOCK).unwrap();
        for (first, count) in written {
            let bytes: Vec<u8> =
                (0..count * BLOCK).map(|at| (1 + (first + at / 3 + at * 7) % 255) as u8).collect();
            file.write_all_at(&bytes, first * BLOCK).unwrap();
        }
        file
    };
    let wide = [(0, 64), ((1 << 31) - 8, 16), (FIRST_WIDE - 32, 64), (BLOCKS - 64, 64)];
    vec![make("narrow", 64, &[(0, 64)]), make("wide", BLOCKS, &wide)]
}

fn image(files: &[ExpectedFile]) -> Vec<u8> {
    let mut builder = Builder::new();
    for file in files {
        let (size, object) = (file.size(), Some(file.id()));
        let node = Node::Regular(Content::External { size, object, location: Location::Object });
        let inode = builder.inode(&METADATA, XattrsId::NONE, node).unwrap();
        builder.insert(InodeId::ROOT, file.name.as_bytes(), inode, Link::Equal).unwrap();
    }
    let device = |name: &str, blocks| DeviceFile {
        id: digest(Algorithm::Sha256, name.as_bytes()).into(),
        bytes: blocks * BLOCK,
    };
    let devices = [device("narrow", 64), device("wide", BLOCKS)];
    let find = |id: &ObjectId| Some(files.iter().find(|it| it.id() == *id).unwrap().placed());
    let mut contents = |_: Inode<'_>, _, _: &mut dyn io::Write| panic!("all is on devices");
    let native = Native::new(&devices, &find);
    let mut bytes = Vec::new();
    write_native(&builder.finish(), &native, &mut contents, &mut bytes).unwrap();
    bytes
}

/// The reader and the kernel find the bytes on the devices, on both sides of 2^32 blocks.
#[test]
fn blocks_beyond_32_bits_are_found() {
    let Some(dir) = prepare("wide::blocks_beyond_32_bits_are_found") else { return };
    let devices = devices(dir.path());
    let files = files();
    let bytes = image(&files);
    examine(&bytes, 1 << 24).unwrap();
    let opened = Image::open(&bytes[..]).unwrap();
    let disks: Vec<_> = devices.iter().map(Disk).collect();
    let sources: Vec<_> = disks.iter().map(|it| it as &dyn ReadAt).collect();
    let at = |name: &str| dir.path().join(name);
    let (file, root) = (at("i.img"), at("root"));
    fs::write(&file, &bytes).unwrap();
    fs::create_dir(&root).unwrap();
    let options = format!("device={},device={}", at("narrow").display(), at("wide").display());
    let options = std::ffi::CString::new(options).unwrap();
    let mounted = mount(&file, &root, "erofs", MountFlags::RDONLY, options.as_c_str());
    if !takes_48_bits() {
        assert!(mounted.is_err(), "kernels before 6.15 refuse what they do not know");
        skipped("this kernel is older than 6.15, which 48-bit addresses need");
    } else {
        mounted.unwrap();
    }
    for wanted in &files {
        let nid = opened.lookup(&opened.root().unwrap(), wanted.name.as_bytes()).unwrap();
        let inode = opened.inode(nid.unwrap()).unwrap();
        assert_eq!(inode.size(), wanted.size());
        for (from, len) in wanted.places() {
            let expected = wanted.bytes(&devices, from, len);
            let some = expected.iter().any(|byte| *byte != 0);
            assert!(some, "{} at {from}: nothing was put there", wanted.name);
            let mut ours = vec![0; len as usize];
            let count = opened.read(&inode, ByteOffset(from), &mut ours, &sources).unwrap();
            assert!(count as u64 == len && ours == expected, "{} at {from}", wanted.name);
            if takes_48_bits() {
                let mut kernels = vec![0; len as usize];
                let file = File::open(root.join(wanted.name)).unwrap();
                file.read_exact_at(&mut kernels, from).unwrap();
                assert!(kernels == expected, "{} at {from}, by the kernel", wanted.name);
            }
        }
    }
    if takes_48_bits() {
        unmount(&root, UnmountFlags::empty()).unwrap();
    }
    let Some(fsck) = newer("fsck.erofs") else {
        return not_made("a newer fsck.erofs", "sid");
    };
    let devices = ["narrow", "wide"].map(|it| format!("--device={}", at(it).display()));
    run(&fsck, devices.into_iter().chain([file.display().to_string()]));
}

/// An image requires a newer kernel only if a device is wide.
#[test]
fn narrow_devices_take_no_feature() {
    let narrow: Vec<_> = files().into_iter().filter(|it| it.name == "narrow").collect();
    let devices = |blocks| {
        let id = digest(Algorithm::Sha256, b"one");
        [DeviceFile { id: id.into(), bytes: blocks * BLOCK }]
    };
    let has_feature = |blocks| {
        let devices = devices(blocks);
        let find = |_: &ObjectId| Some(narrow[0].placed());
        let mut contents = |_: Inode<'_>, _, _: &mut dyn io::Write| panic!("all is on devices");
        let mut bytes = Vec::new();
        let native = Native::new(&devices, &find);
        let tree = Builder::new().finish();
        write_native(&tree, &native, &mut contents, &mut bytes).map(|_| {
            let image = Image::open(&bytes[..]).unwrap();
            let slot = &image.devices()[0];
            assert_eq!(slot.blocks, blocks);
            image.superblock().incompat & incompat::ADDRESS_48BIT != 0
        })
    };
    assert!(!has_feature(FIRST_WIDE - 1).unwrap());
    assert!(has_feature(FIRST_WIDE).unwrap());
    assert!(has_feature((1 << 48) - 1).unwrap());
    has_feature(1 << 48).unwrap_err();
}

fn takes_48_bits() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|it| it.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap_or(0)) >= (6, 15)
}
