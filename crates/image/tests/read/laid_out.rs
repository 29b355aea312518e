//! Reads images that are laid out by hand.

use quire_image::erofs::read::{
    ByteOffset, Cached, Device, Extent, FileType, Image, Inode, Nid, Owners, ReadAt, ReadError,
    RunPlace, View, examine, to_tree,
};
use quire_image::tree::Timestamp;

use crate::small::{
    COMPACT, DIR, FILE, LINK, LONG, MAP, Options, ROOT, SHARED, SPARSE, Small, TAIL, at, pattern,
};

fn every() -> impl Iterator<Item = Small> {
    let apart = Options { metadata_apart: true, ..Options::default() };
    let wide = Options { wide: true, ..Options::default() };
    let plain = (9..=16).map(|bits| Small::new(bits, Options::default()));
    plain.chain((9..=11).map(move |bits| Small::new(bits, apart))).chain([Small::new(12, wide)])
}

fn inode<S: ReadAt>(image: &Image<S>, small: &Small, slot: usize) -> Inode {
    image.inode(Nid(small.nid(slot))).unwrap()
}

fn content<S: ReadAt>(image: &Image<S>, inode: &Inode, device: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xEE; inode.size() as usize + 9];
    let read = image.read(inode, ByteOffset(0), &mut bytes, &[&device]).unwrap();
    bytes.truncate(read);
    bytes
}

#[test]
fn names_metadata_and_types() {
    for small in every() {
        let image = Image::open(&small.bytes[..]).unwrap();
        let mut walk = image.walk();
        let mut seen = Vec::new();
        while let Some(step) = walk.next().unwrap() {
            let path = String::from_utf8(step.path.to_vec()).unwrap();
            seen.push((path, step.inode.mode(), step.inode.nid().0, step.is_new));
        }
        let nid = |slot| small.nid(slot);
        let expect = [
            ("/", 0o40_755, nid(0), true),
            ("/block", 0o60_660, nid(7), true),
            ("/dir", 0o40_700, nid(1), true),
            ("/dir/a", 0o100_644, nid(2), true),
            ("/dir/b", 0o100_644, nid(2), false),
            ("/fifo", 0o10_600, nid(8), true),
            ("/file", 0o100_644, nid(2), false),
            ("/link", 0o120_777, nid(6), true),
            ("/long", 0o100_644, nid(10), true),
            ("/map", 0o100_600, nid(5), true),
            ("/socket", 0o140_600, nid(9), true),
            ("/sparse", 0o100_600, nid(4), true),
            ("/tail", 0o104_755, nid(3), true),
        ];
        let expect = expect.map(|(path, mode, nid, new)| (path.to_owned(), mode, nid, new));
        assert_eq!(seen, expect);

        let compact = inode(&image, &small, ROOT);
        let mtime = Timestamp { seconds: 1_000_000_000, nanoseconds: 5 };
        assert_eq!((compact.uid(), compact.gid(), compact.nlink()), (7, 8, 3));
        assert_eq!(compact.mtime(), mtime);
        let extended = inode(&image, &small, FILE);
        let mtime = Timestamp { seconds: -5, nanoseconds: 999_999_999 };
        assert_eq!((extended.uid(), extended.gid(), extended.nlink()), (70_000, 80_000, 3));
        assert_eq!(extended.mtime(), mtime);
        let block = inode(&image, &small, 7);
        assert_eq!(block.file_type(), FileType::BlockDevice);
        // The value of glibc's makedev(8, 300).
        assert_eq!(block.device_number(), 0x0010_082c);
        assert_eq!(image.superblock().inodes, 11);
        assert_eq!(image.devices()[0].tag[..5], *b"blob\0");
    }
}

#[test]
fn contents_wherever_they_are() {
    for small in every() {
        let (image, size) = (Image::open(&small.bytes[..]).unwrap(), small.block_size);
        let read = |slot| content(&image, &inode(&image, &small, slot), &small.device);
        assert_eq!(read(FILE), pattern(1, size + 100));
        assert_eq!(read(TAIL), [pattern(2, size), pattern(3, 10)].concat());
        let sparse = [&small.device[size..], &vec![0; size], &pattern(4, 50)].concat();
        assert_eq!(read(SPARSE), sparse);
        let mut map = pattern(1, size + 100);
        map.resize(4 * size, 0);
        assert_eq!(read(MAP), map);
        assert_eq!(image.read_link(&inode(&image, &small, LINK)).unwrap(), b"target");

        // Read from the middle, across locations.
        let sparse_inode = inode(&image, &small, SPARSE);
        let mut middle = vec![0; size];
        let start = ByteOffset(size as u64 / 2);
        image.read(&sparse_inode, start, &mut middle, &[&&small.device[..]]).unwrap();
        assert_eq!(middle, sparse[size / 2..size / 2 * 3]);
        let missing = image.read(&sparse_inode, ByteOffset(0), &mut middle, &[]).unwrap_err();
        assert_eq!(missing.to_string(), "the data is on device 1, which is not open");
        // Data that is not on the device can be read without the device.
        image.read(&sparse_inode, ByteOffset(size as u64), &mut middle, &[]).unwrap();
    }
}

#[test]
fn extents_are_whole() {
    let small = Small::new(12, Options::default());
    let image = Image::open(&small.bytes[..]).unwrap();
    let extents = |slot: usize| -> Vec<Extent> {
        image.extents(&inode(&image, &small, slot)).map(Result::unwrap).collect()
    };
    let extent = |start, len, place| Extent { start: ByteOffset(start), len, place };
    let data = |device, at: usize| RunPlace::Data(Device(device), ByteOffset(at as u64));
    assert_eq!(extents(FILE), [extent(0, 4196, data(0, small.data + 2 * 4096))]);
    let tail = RunPlace::Inline(ByteOffset((at(TAIL) + COMPACT) as u64));
    let expect = [extent(0, 4096, data(0, small.data + 4 * 4096)), extent(4096, 10, tail)];
    assert_eq!(extents(TAIL), expect);
    let expect = [
        extent(0, 4096, data(1, 4096)),
        extent(4096, 4096, RunPlace::Hole),
        extent(8192, 50, data(0, small.data + 5 * 4096)),
    ];
    assert_eq!(extents(SPARSE), expect);
    assert_eq!(extents(8), []);

    // Adjacent chunks: the third chunk now follows the first.
    let table = at(SPARSE) + COMPACT;
    let near = small.clone().patch(table + 10, &[1, 0, 0, 0, 0, 0]);
    let near = near.patch(table, &[0, 0, 1, 0, 0, 0, 0, 0]).patch(table + 12, &[1, 0, 0, 0]);
    let image = Image::open(&near.bytes[..]).unwrap();
    let all: Vec<_> = image.extents(&inode(&image, &near, SPARSE)).map(Result::unwrap).collect();
    let expect = [extent(0, 8192, data(1, 0)), extent(8192, 50, data(0, small.data + 5 * 4096))];
    assert_eq!(all, expect);
}

/// Devices in a common address space with the image: `file` moves to the device, and `sparse` is read after the image
/// if no device is given.
#[test]
fn one_address_space() {
    use crate::small::DEVICE_TABLE;
    let small = Small::new(12, Options::default());
    let first = (small.bytes.len() / 4096) as u32;
    let small = small.patch(DEVICE_TABLE + 68, &first.to_le_bytes());
    let small = small.patch(at(FILE) + 16, &first.to_le_bytes());
    let small = small.patch(at(FILE) + 8, &8192_u64.to_le_bytes());
    let image = Image::open(&small.bytes[..]).unwrap();
    assert_eq!(content(&image, &inode(&image, &small, FILE), &small.device), small.device);

    let joined = [&small.bytes[..], &small.device].concat();
    let image = Image::open(&joined[..]).unwrap();
    let mut bytes = vec![0; 4096];
    image.read(&inode(&image, &small, SPARSE), ByteOffset(0), &mut bytes, &[]).unwrap();
    assert_eq!(bytes, small.device[4096..]);
}

#[test]
fn xattrs_of_all_kinds() {
    for small in every() {
        let image = Image::open(&small.bytes[..]).unwrap();
        let list = |slot| {
            let xattrs = image.xattrs(&inode(&image, &small, slot)).unwrap();
            let pairs = xattrs.iter().map(|it| (it.name.to_vec(), it.value.to_vec()));
            pairs.collect::<Vec<_>>()
        };
        let pair = |name: &str, value: &str| (name.as_bytes().to_vec(), value.as_bytes().to_vec());
        assert_eq!(list(DIR), [pair("user.a", "1"), pair("security.selinux", "label")]);
        assert_eq!(list(LONG), [pair("user.long.prefix.x", "yz")]);
        assert_eq!(list(FILE), []);

        let dir = inode(&image, &small, DIR);
        let get = |name: &[u8]| image.xattr(&dir, name).unwrap();
        assert_eq!(get(b"security.selinux").unwrap(), b"label");
        assert_eq!(get(b"user.b"), None);
    }
}

/// A name that the filter excludes is absent without reading the xattrs, which are damaged in this image.
#[test]
fn the_filter_is_asked_first() {
    let small = Small::new(12, Options::default()).patch(SHARED + 2, &[0xff, 0xff]);
    let image = Image::open(&small.bytes[..]).unwrap();
    let dir = inode(&image, &small, DIR);
    assert!(image.xattr(&dir, b"user.a").is_err());
    assert_eq!(image.xattr(&dir, b"user.denied").unwrap(), None);
    // The filter is ignored if the superblock states that filters have another meaning.
    let small = small.patch(1024 + 104, &[1]);
    let image = Image::open(&small.bytes[..]).unwrap();
    assert!(image.xattr(&dir, b"user.denied").is_err());
}

#[test]
fn lookup_finds_what_is_there() {
    for small in every() {
        let image = Image::open(&small.bytes[..]).unwrap();
        let (root, dir) = (inode(&image, &small, ROOT), inode(&image, &small, DIR));
        let check = |directory: &Inode, name: &str, slot: Option<usize>| {
            let found = image.lookup(directory, name.as_bytes()).unwrap();
            assert_eq!(found, slot.map(|slot| Nid(small.nid(slot))), "{name}");
        };
        check(&root, "block", Some(7));
        check(&root, "tail", Some(TAIL));
        check(&root, "..", Some(ROOT));
        check(&root, "", None);
        check(&root, "tai", None);
        check(&root, "z", None);
        check(&dir, "a", Some(FILE));
        check(&dir, "b", Some(FILE));
        check(&dir, "aa", None);
        check(&dir, "c", None);
        check(&inode(&image, &small, FILE), "a", None);
    }
}

/// A source that counts the reads.
struct Counting<'a> {
    bytes: &'a [u8],
    reads: std::cell::Cell<usize>,
}

impl ReadAt for Counting<'_> {
    fn len(&self) -> u64 {
        ReadAt::len(self.bytes)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.reads.set(self.reads.get() + 1);
        self.bytes.read_at(offset, buffer)
    }
}

#[test]
fn the_cache_reads_once_and_the_same() {
    let small = Small::new(16, Options::default());
    let source = Counting { bytes: &small.bytes, reads: 0.into() };
    let image = Image::open(Cached::new(&source)).unwrap();
    for _ in 0..3 {
        let mut walk = image.walk();
        while let Some(step) = walk.next().unwrap() {
            image.xattrs(&step.inode).unwrap();
        }
    }
    // The reads of 64 KiB contain all metadata, and the two blocks of `dir`. (The second block is read as a whole,
    // which bypasses the cache.)
    assert!(source.reads.get() <= 6, "{} reads", source.reads.get());
    let read = content(&image, &inode(&image, &small, FILE), &[]);
    assert_eq!(read, pattern(1, (1 << 16) + 100));
    // Read across chunks, up to the last byte, and not beyond.
    let cached = Cached::new(&small.bytes[..]);
    let mut bytes = vec![0; 1000];
    cached.read_at(65_536 - 500, &mut bytes).unwrap();
    assert_eq!(bytes, small.bytes[65_536 - 500..65_536 + 500]);
    let end = small.bytes.len() as u64;
    cached.read_at(end - 1000, &mut bytes).unwrap();
    assert_eq!(bytes, small.bytes[small.bytes.len() - 1000..]);
    assert!(cached.read_at(end - 999, &mut bytes).is_err());
    assert!(cached.read_at(u64::MAX - 5, &mut bytes).is_err());
}

#[test]
fn more_chunks_than_the_cache_keeps() {
    let bytes = pattern(5, 300 << 16);
    let source = Counting { bytes: &bytes, reads: 0.into() };
    let cached = Cached::new(&source);
    let mut buffer = [0; 10];
    for chunk in (0..300_u64).chain([299, 60]).chain([0]) {
        cached.read_at(chunk << 16, &mut buffer).unwrap();
        assert_eq!(buffer, bytes[(chunk as usize) << 16..][..10]);
    }
    // Chunks 299 and 60 are still in the cache, but chunk 0 is not.
    assert_eq!(source.reads.get(), 301);
}

#[test]
fn examine_counts() {
    for small in every() {
        let found = examine(&small.bytes, 1 << 30).unwrap();
        assert_eq!((found.names, found.inodes, found.xattrs), (13, 11, 3));
        // The image contains all files except the first chunk of `sparse`, which is on a device.
        let size = small.block_size as u64;
        assert_eq!(found.bytes, (size + 100) + (size + 10) + (size + 50) + 4 * size);
        assert_eq!(examine(&small.bytes, 7).unwrap().bytes, 7);
    }
}

#[test]
fn a_plain_tree() {
    let small = Small::new(12, Options::default());
    let image = Image::open(&small.bytes[..]).unwrap();
    let read = to_tree(&image, View::Plain).unwrap();
    assert_eq!(read.tree.inode_count(), 11);
    let file = read.tree.resolve(b"/file").unwrap();
    assert_eq!(file.path(), b"/dir/a");
    assert_eq!(file.nlink(), 3);
    assert_eq!(read.nids[file.id().index()].0, small.nid(FILE));
    assert_eq!(read.sizes[file.id().index()], 4196);
    let dir = read.tree.resolve(b"/dir").unwrap();
    assert_eq!(read.sizes[dir.id().index()], 4096 + 13);
    let error = to_tree(&image, View::Composefs(Owners::FirstMet)).unwrap_err();
    assert!(matches!(error, ReadError::NotComposefs), "{error}");
}
