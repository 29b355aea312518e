//! Compares the bytes of compressed files with the kernel's mount and with the source.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use quire_image::erofs::layout::{LAYOUT_COMPRESSED_FULL, LAYOUT_FLAT_INLINE};
use quire_image::erofs::read::{ByteOffset, FileType, Image, ReadError, examine};

use crate::hostile::{Maker, entries, inode};
use crate::mkfs::{compare, compare_source, mkfs, mounted, prepare, read};
use crate::source::{Fill, Listing, list};
use crate::tools::{newer, not_made, run};

/// An image to make: the version of mkfs.erofs, and its options.
struct Case {
    /// Whether it requires a newer mkfs.erofs than 1.5.
    newer: bool,
    words: &'static str,
}

const fn old(words: &'static str) -> Case {
    Case { newer: false, words }
}

const fn new(words: &'static str) -> Case {
    Case { newer: true, words }
}

/// `HINTS` stands for a file that chooses the size of physical clusters by the file's name.
const CASES: &[Case] = &[
    old("-zlz4"),
    old("-zlz4hc"),
    old("-zlz4hc,12 -C65536"),
    old("-zlz4 -C1048576"),
    old("-zlz4 -Eztailpacking"),
    old("-zlz4hc -C16384 -Eztailpacking"),
    old("-zlz4 -Elegacy-compress"),
    old("-zlz4 -Elegacy-compress -C65536"),
    old("-zlz4 --max-extent-bytes=8192"),
    new("-zlz4"),
    new("-zlz4hc,12 -C65536 -Ededupe"),
    new("-zlz4 -Eztailpacking,dedupe"),
    new("-zlz4 -Elegacy-compress"),
    new("-zlz4 -b512"),
    new("-zlz4hc -b1024 -C65536 -Eztailpacking"),
    new("-zlz4 -E48bit"),
    new("-zlz4 -E48bit -C65536"),
    new("-zlz4 -E48bit,dedupe -C65536"),
    new("-zlz4 -E48bit --max-extent-bytes=65536 -C16384"),
    new("-zlz4 -E48bit,ztailpacking"),
    new("-zlz4 --zD=1"),
    new("-zzstd --zD=1 -E48bit -C16384"),
    new("-zlzma"),
    new("-zlzma,9 -C1048576"),
    new("-zlzma -C65536 -Eztailpacking"),
    new("-zlzma -C65536 -Ededupe"),
    new("-zlzma -b512"),
    new("-zlzma -E48bit -C65536"),
    new("-zdeflate"),
    new("-zdeflate,9 -C65536 -Eztailpacking"),
    new("-zdeflate -C65536 -Ededupe"),
    new("-zdeflate -b1024 -E48bit"),
    new("-zzstd"),
    new("-zzstd,9 -C1048576"),
    new("-zzstd -C65536 -Eztailpacking"),
    new("-zzstd -C65536 -Ededupe"),
    new("-zzstd -b512 -E48bit"),
    // mkfs.erofs 1.9.4 crashes if hints choose algorithms, so only the first algorithm is used, but all have settings.
    new("-zlz4:lzma:deflate:zstd --compress-hints=HINTS"),
    new("-zzstd:deflate:lzma:lz4 --compress-hints=HINTS -E48bit"),
];

/// Returns text that compresses to about a third, and in which no block is repeated.
pub fn words(len: usize) -> Vec<u8> {
    const WORDS: [&str; 16] = [
        "image", "layer", "the", "kernel", "of", "reads", "file", "a", "block", "and", "cluster",
        "is", "unpacked", "in", "order", "to",
    ];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut text = Vec::with_capacity(len + 32);
    while text.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        text.extend_from_slice(WORDS[(state >> 20) as usize % 16].as_bytes());
        text.push(if state.is_multiple_of(11) { b'\n' } else { b' ' });
    }
    text.truncate(len);
    text
}

/// Adds files of many lengths, which compress well, badly, in parts or not at all.
fn fill(folder: &Path) {
    Fill { is_root: true, narrow: false, name: 254, big: 100 }.make(folder);
    let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
    let (text, noise) = (words(1 << 20), testing::noise(300_001));
    for len in [1, 100, 511, 513, 4095, 4096, 4097, 12_000, 65_535, 65_536, 300_001, 1 << 20] {
        write(&format!("words-{len}.txt"), &text[..len]);
    }
    for len in [1, 4096, 100_000, 2 << 20] {
        write(&format!("zeros-{len}"), &vec![0; len]);
    }
    write("noise.bin", &noise);
    // Compressed and uncompressed extents follow each other, at any offset in a block.
    let mut mixed = Vec::new();
    for part in 0..40 {
        mixed.extend_from_slice(&text[part * 7919..][..3000 + part * 231]);
        mixed.extend_from_slice(&noise[part * 4001..][..1000 + part * 457]);
        mixed.resize(mixed.len() + part * 101, 7);
    }
    write("mixed.dat", &mixed);
    // Parts of other files, at other offsets, which `-Ededupe` finds.
    let again = [&text[100_003..300_003], &noise[..100_000], &text[50_001..100_001]].concat();
    write("again.dat", &again);
    write("again.log", &[&b"a few bytes before"[..], &again[..]].concat());
    write("repeated.log", &[&text[..10_000]; 20].concat());
}

#[test]
fn images_of_every_algorithm() {
    let Some(dir) = prepare("compressed::images_of_every_algorithm") else { return };
    let at = |name: &str| dir.path().join(name);
    let (source, mountpoint, image, hints) = (at("s"), at("m"), at("i.img"), at("hints"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    fill(&source);
    fs::write(&hints, "65536 \\.txt$\n16384 \\.log$\n4096 \\.dat$\n").unwrap();
    let listing = list(&source);
    for Case { newer, words } in CASES {
        let Some(mkfs) = mkfs(*newer) else {
            not_made("mkfs.erofs, or a newer one,", "sid");
            continue;
        };
        let what = format!("mkfs.erofs {}{words}", if *newer { "(new) " } else { "" });
        let words = words.replace("HINTS", hints.to_str().unwrap());
        let files = [image.to_str().unwrap(), source.to_str().unwrap()];
        run(&mkfs, words.split(' ').chain(files));
        let bytes = fs::read(&image).unwrap();
        let opened = Image::open(&bytes[..]).unwrap_or_else(|error| panic!("{what}: {error}"));
        let ours = read(&opened, &[]);
        // Times of compact inodes before 1970 are wrong with 48-bit addresses.
        let lost: &[_] = match words.contains("48bit") {
            true => &[crate::mkfs::Lost::Mtime],
            false => &[],
        };
        compare_source(&what, &ours, &listing, lost);
        compare(&what, &ours, &mounted(&image, None, &mountpoint));
        examine(&bytes, 1 << 26).unwrap();
        assert!(compressed_files(&opened) >= 8, "{what}: few files are compressed");
        at_any_offset(&what, &opened, &source);
        fs::remove_file(&image).unwrap();
    }
}

fn compressed_files(image: &Image<&[u8]>) -> usize {
    let (mut walk, mut count) = (image.walk(), 0);
    while let Some(step) = walk.next().unwrap() {
        count += usize::from(step.inode.is_compressed());
    }
    count
}

/// Reads parts of each file, from the back to the front, and one byte at a time around extents.
fn at_any_offset(what: &str, image: &Image<&[u8]>, source: &Path) {
    use std::os::unix::ffi::OsStrExt as _;
    let mut walk = image.walk();
    while let Some(step) = walk.next().unwrap() {
        if !step.inode.is_compressed() || step.inode.file_type() != FileType::Regular {
            continue;
        }
        let path = std::ffi::OsStr::from_bytes(&step.path[1..]);
        let expected = fs::read(source.join(path)).unwrap();
        let mut reader = image.reader(&step.inode);
        let mut from = expected.len();
        while let Some(before) = from.checked_sub(40_009) {
            let mut part = [0; 500];
            let read = reader.read(ByteOffset(before as u64), &mut part, &[]).unwrap();
            assert_eq!(read, 500, "{what}: {path:?} at {before}");
            assert!(part == expected[before..][..500], "{what}: {path:?} at {before}");
            from = before;
        }
        let mut last = [0; 2];
        let end = step.inode.size() - 1;
        assert_eq!(image.read(&step.inode, ByteOffset(end), &mut last, &[]).unwrap(), 1);
        assert_eq!(last[0], expected[end as usize], "{what}: {path:?}");
        assert_eq!(image.read(&step.inode, ByteOffset(end + 1), &mut last, &[]).unwrap(), 0);
    }
}

/// Files with fragments are listed like the kernel lists them, and reading them fails with an error that names them.
/// Other files of such an image can be read.
#[test]
fn fragments_and_other_unsupported_features() {
    let Some(dir) = prepare("compressed::fragments_and_other_unsupported_features") else { return };
    let at = |name: &str| dir.path().join(name);
    let (source, mountpoint, image) = (at("s"), at("m"), at("i.img"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    fill(&source);
    let Some(mkfs) = newer("mkfs.erofs") else { return not_made("a newer mkfs.erofs", "sid") };
    let make = |words: &str| {
        let files = [image.to_str().unwrap(), source.to_str().unwrap()];
        run(&mkfs, words.split(' ').chain(files));
        fs::read(&image).unwrap()
    };
    for words in ["-zlz4 -Efragments", "-zzstd -Eall-fragments", "-zlzma -Efragments,dedupe"] {
        let bytes = make(words);
        let opened = Image::open(&bytes[..]).unwrap();
        let mut theirs = mounted(&image, None, &mountpoint);
        let (mut ours, mut walk, mut refused) = (Listing::new(), opened.walk(), 0);
        while let Some(step) = walk.next().unwrap() {
            let path = step.path[1..].to_vec();
            let mut bytes = vec![0; step.inode.size() as usize];
            if step.inode.file_type() != FileType::Regular {
                continue;
            }
            match opened.read(&step.inode, ByteOffset(0), &mut bytes, &[]) {
                Ok(_) => {
                    let mut seen = theirs[&path].clone();
                    seen.content = sha2::Digest::finalize(sha2::Digest::chain_update(
                        <sha2::Sha256 as sha2::Digest>::new(),
                        &bytes,
                    ))
                    .to_vec();
                    ours.insert(path, seen);
                }
                Err(ReadError::Unsupported(error)) => {
                    let nid = step.inode.nid();
                    assert_eq!(error.to_string(), format!("fragments (inode {nid})"), "{words}");
                    theirs.remove(&path);
                    refused += 1;
                }
                Err(error) => panic!("{words}: {error}"),
            }
        }
        theirs.retain(|_, seen| seen.mode & 0o170_000 == 0o100_000);
        compare(words, &ours, &theirs);
        assert!(refused >= 3, "{words}: {refused} files have fragments");
    }
    let error = Image::open(&make("-m4096")[..]).unwrap_err().to_string();
    assert_eq!(error, "the image uses unsupported metadata compression");
    // The table of prefixes is in the packed inode, which is compressed as well.
    let bytes = make("-zlz4 -Eall-fragments --xattr-prefix=user.prefixed.");
    let opened = Image::open(&bytes[..]).unwrap();
    let theirs = mounted(&image, None, &mountpoint);
    let mut walk = opened.walk();
    while let Some(step) = walk.next().unwrap() {
        let names: Vec<Vec<u8>> =
            opened.xattrs(&step.inode).unwrap().iter().map(|it| it.name.to_vec()).collect();
        for name in theirs[&step.path[1..]].xattrs.keys() {
            assert!(names.contains(name), "{:?}", name.escape_ascii().to_string());
        }
    }
}

/// Returns a block whose data follows zeros.
fn padded(data: &[u8]) -> Vec<u8> {
    [&vec![0; 4096 - data.len()], data].concat()
}

/// Returns 4096 times a byte as an LZ4 block: a literal, 4090 times the same, and 5 literals.
fn lz4_of(byte: u8) -> Vec<u8> {
    let mut data = vec![0x1f, byte, 1, 0];
    data.extend([255; 15]);
    data.extend([246, 0x50, byte, byte, byte, byte, byte]);
    data
}

fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An entry of a full index: the type with flags, the offset in the cluster, and the block or the distances.
type Entry = (u16, u16, u32);

/// A compressed file with a full index, in an image whose settings state LZ4 and deflate.
struct Laid {
    size: usize,
    /// `h_idata_size`, `h_advise`, `h_algorithmtype` and `h_clusterbits`.
    header: (u16, u16, u8, u8),
    entries: Vec<Entry>,
    /// Blocks from block 1 on.
    blocks: Vec<Vec<u8>>,
}

impl Laid {
    /// A file of four clusters: LZ4, deflate, and bytes that are not compressed, which begin in the third cluster. The
    /// last entry states where the file ends.
    fn new() -> Self {
        let text = [vec![b'b'; 4096], vec![b'c'; 100]].concat();
        let blocks = vec![padded(&lz4_of(b'a')), padded(&deflated(&text)), words(4096)];
        let entries = vec![(1, 0, 1), (3, 0, 2), (0, 100, 3), (0, 50, 0)];
        Self { size: 3 * 4096 + 50, header: (0, 0, 0x20, 0), entries, blocks }
    }

    fn image(&self) -> Vec<u8> {
        let mut maker = Maker::new();
        for block in &self.blocks {
            maker.block(block);
        }
        let (inline, flags, algorithms, bits) = self.header;
        let mut index = [&[0; 2][..], &inline.to_le_bytes(), &flags.to_le_bytes()].concat();
        index.extend([algorithms, bits]);
        index.extend([0; 8]);
        for (kind, offset, value) in &self.entries {
            index.extend(kind.to_le_bytes());
            index.extend(offset.to_le_bytes());
            index.extend(value.to_le_bytes());
        }
        let raw = inode(LAYOUT_COMPRESSED_FULL, 0o100_644, self.size, 0);
        let file = maker.inode(&raw, &index);
        let list = entries(&[(".".into(), 0, 0), ("..".into(), 0, 0), ("f".into(), file, 1)]);
        let mut raw = inode(LAYOUT_FLAT_INLINE, 0o40_755, list.len(), 0);
        raw.i_nb = 2.into();
        let root = maker.inode(&raw, &list);
        // The kernel checks `.` and `..` when it lists the directory.
        let mut bytes = maker.finish(root);
        let at = (root as usize) * 32 + 32;
        bytes[at..at + 8].copy_from_slice(&root.to_le_bytes());
        bytes[at + 12..at + 20].copy_from_slice(&root.to_le_bytes());
        // Padding first, settings, and a second type of clusters.
        bytes[1024 + 80] |= 0x1 | 0x2 | 0x8;
        bytes[1024 + 84] = 0b101;
        bytes[1152] = 14;
        bytes[1168] = 6;
        bytes[1170] = 15;
        bytes
    }

    fn read(&self) -> Result<Vec<u8>, String> {
        read_f(&self.image())
    }
}

/// Reads the file `f` of an image from front to back.
fn read_f(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let image = Image::open(bytes).map_err(|error| error.to_string())?;
    let nid = image.lookup(&image.root().unwrap(), b"f").unwrap().unwrap();
    let inode = image.inode(nid).unwrap();
    let shown = |error: ReadError| error.to_string().replace(&nid.to_string(), "N");
    // A reader that begins at the end needs the distances to the heads.
    let last = ByteOffset(inode.size() - 1);
    image.read(&inode, last, &mut [0], &[]).map_err(shown)?;
    let (mut reader, mut all) = (image.reader(&inode), Vec::new());
    let mut part = [0; 1000];
    loop {
        match reader.read(ByteOffset(all.len() as u64), &mut part, &[]) {
            Ok(0) => return Ok(all),
            Ok(len) => all.extend_from_slice(&part[..len]),
            Err(error) => return Err(shown(error)),
        }
    }
}

fn expected() -> Vec<u8> {
    [vec![b'a'; 4096], vec![b'b'; 4096], vec![b'c'; 100], words(4096)[..4046].to_vec()].concat()
}

#[test]
fn a_file_of_two_algorithms() {
    let laid = Laid::new();
    assert!(laid.read().unwrap() == expected());
    // The kernel reads the same bytes.
    let Some(dir) = prepare("compressed::a_file_of_two_algorithms") else { return };
    let (image, mountpoint) = (dir.path().join("i.img"), dir.path().join("m"));
    fs::create_dir(&mountpoint).unwrap();
    fs::write(&image, laid.image()).unwrap();
    let theirs = mounted(&image, None, &mountpoint);
    let bytes = fs::read(&image).unwrap();
    compare("two algorithms", &read(&Image::open(&bytes[..]).unwrap(), &[]), &theirs);
}

#[track_caller]
fn refused(change: impl FnOnce(&mut Laid), expect: &str) {
    let mut laid = Laid::new();
    change(&mut laid);
    let error = laid.read().unwrap_err();
    let error = error.strip_prefix("the image is corrupt: ").unwrap_or(&error);
    assert_eq!(error, expect);
}

#[test]
fn wrong_indexes() {
    refused(|it| it.header.1 = 0x20, "the image uses unsupported fragments (inode N)");
    refused(|it| it.header.3 = 0x80, "the image uses unsupported fragments (inode N)");
    refused(
        |it| it.header.1 = 0x1000,
        "the image uses unsupported format 0x1000 of the compression of inode N",
    );
    refused(
        |it| it.header.3 = 1,
        "the image uses unsupported logical clusters of 2^13 bytes of inode N",
    );
    refused(
        |it| it.header.2 = 0x24,
        "the image uses unsupported compression algorithm 4 of inode N",
    );
    refused(
        |it| it.header.2 = 0x23,
        "inode N is compressed with zstd, which the image does not state",
    );
    refused(
        |it| it.entries[2].1 = 4096,
        "cluster 2 of inode N states an extent at byte 4096 of the cluster",
    );
    refused(
        |it| it.entries[0] = (2, 0, 1),
        "the extent of cluster 0 of inode N does not begin 1 clusters before",
    );
    refused(
        |it| it.entries[3] = (2, 0, 0),
        "the extent of cluster 3 of inode N does not begin 0 clusters before",
    );
    refused(
        |it| it.entries[0].1 = 1,
        "the extent of cluster 0 of inode N does not begin 1 clusters before",
    );
    // The extent of cluster 3 is said to begin in cluster 1, but the one of cluster 2 is between.
    refused(
        |it| it.entries[3] = (2, 0, 2),
        "inode N has an extent of 4196 bytes at byte 4096 for byte 12337",
    );
    refused(
        |it| it.entries[3] = (2, 0, 0x801),
        "cluster 3 of inode N states no valid number of compressed blocks",
    );
    // More uncompressed bytes than the block has.
    refused(
        |it| it.entries[2].1 = 40,
        "inode N has 4106 bytes at byte 8232 in 4096 bytes of the image",
    );
    // LZ4 data that is too short or too long.
    let text = "inode N has 4095 bytes at byte 0 that do not come from the 4096 bytes at byte 4096 of the image as lz4 data";
    refused(|it| it.entries[1] = (0, 4095, 3), text.replace("4095", "8191").as_str());
    refused(|it| it.blocks[0] = vec![0; 4096], text.replace("4095", "4096").as_str());
    refused(
        |it| it.blocks[1] = padded(&deflated(&[b'b'; 4195])),
        "inode N has 4196 bytes at byte 4096 that do not come from the 4096 bytes at byte 8192 of the image as deflate \
        data",
    );
    refused(
        |it| it.entries[1].2 = 99,
        "the data of inode N takes 4096 bytes at byte 405504 of the image, which has 20480",
    );
}

/// A part of what a physical cluster unpacks to, and a physical cluster of several blocks.
#[test]
fn parts_and_large_clusters() {
    let mut laid = Laid::new();
    laid.entries[0] = (1 | 0x8000, 0, 1);
    laid.entries[1] = (1 | 0x8000, 0, 1);
    laid.entries[2] = (1 | 0x8000, 4000, 1);
    laid.size = 3 * 4096;
    laid.entries.truncate(3);
    // The second part would be longer than the data.
    assert!(laid.read().unwrap_err().contains("inode N has 8096 bytes at byte 4096"));
    laid.entries[2].1 = 0;
    assert!(laid.read().unwrap() == vec![b'a'; 3 * 4096]);

    let text = [words(2 * 4096), testing::noise(2 * 4096)].concat();
    let data = deflated(&text);
    assert!((8192..12_288).contains(&data.len()), "{}", data.len());
    let data = [&vec![0; 12_288 - data.len()], &data[..]].concat();
    let entries =
        vec![(3, 0, 1), (2, 0, 0x803 | 3 << 16), (2, 0, 2 | 2 << 16), (2, 0, 3 | 1 << 16)];
    let blocks = data.chunks(4096).map(<[u8]>::to_vec).collect();
    let mut laid = Laid { size: 4 * 4096, header: (0, 0x6, 0x20, 0), entries, blocks };
    assert!(laid.read().unwrap() == text);
    laid.entries[1].2 = 0x800 | 3 << 16;
    let error = laid.read().unwrap_err();
    assert!(error.ends_with("cluster 1 of inode N states no valid number of compressed blocks"));
    laid.entries[1].2 = 0x800 | 300 | 3 << 16;
    let error = laid.read().unwrap_err();
    assert!(
        error.ends_with("inode N has 16384 bytes at byte 0 in 1228800 bytes of the image"),
        "{error}"
    );
}

/// 20,000 extents of two clusters whose physical clusters of 1 MiB are the same, and a chain of clusters without a
/// beginning that is longer than any extent.
#[test]
fn indexes_that_cost_much() {
    let mut entries = Vec::new();
    for _ in 0..20_000 {
        entries.extend([(1 | 0x8000, 0, 1), (2, 0, 0x900 | 1 << 16)]);
    }
    let mut blocks = vec![vec![0; 4096]; 256];
    let long = {
        let mut data = vec![0x1f, b'a', 1, 0];
        data.extend([255; 40]);
        data.extend([1, 0x50, b'a', b'a', b'a', b'a', b'a']);
        data
    };
    blocks[0] = padded(&long);
    blocks[0].rotate_left(4096 - long.len());
    let size = entries.len() * 4096;
    let laid = Laid { size, header: (0, 0x6, 0, 0), entries, blocks };
    let error = laid.read().unwrap_err();
    assert!(error.contains("bytes of compressed data for"), "{error}");

    let mut entries = vec![(1, 0, 1)];
    entries.extend((1..10_000).map(|_| (2, 0, 1 | 1 << 16)));
    let size = entries.len() * 4096;
    let laid = Laid { size, header: (0, 0, 0, 0), entries, blocks: vec![padded(&lz4_of(b'a'))] };
    let bytes = laid.image();
    let image = Image::open(&bytes[..]).unwrap();
    let nid = image.lookup(&image.root().unwrap(), b"f").unwrap().unwrap();
    let inode = image.inode(nid).unwrap();
    let mut last = [0];
    let error = image.read(&inode, ByteOffset(size as u64 - 1), &mut last, &[]).unwrap_err();
    assert!(error.to_string().contains("does not begin 1 clusters before"), "{error}");
    let error = image.read(&inode, ByteOffset(0), &mut last, &[]).unwrap_err().to_string();
    assert!(error.contains("bytes at byte 0 in 4096 bytes of the image"), "{error}");
}

/// mkfs.erofs states a record for each hole, so bytes without one are damaged, although the kernel shows zeros.
#[test]
fn records_cover_the_file() {
    let seed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/erofs/records");
    let mut bytes = fs::read(seed).unwrap();
    // The file has two records of 16 bytes. The checksum of the superblock covers them.
    let records = 43 * 32 + 48;
    assert_eq!(bytes[records..records + 4], 0x1000_2000_u32.to_le_bytes());
    bytes[1024 + 8] &= !1;
    let read = |bytes: &[u8], offset| {
        let image = Image::open(bytes).unwrap();
        let inode = image.inode(quire_image::erofs::read::Nid(43)).unwrap();
        let read = image.read(&inode, ByteOffset(offset), &mut [0], &[]);
        read.map_err(|error| error.to_string())
    };
    assert_eq!(read(&bytes, 0), Ok(1));
    let mut late = bytes.clone();
    late[records + 12] = 5;
    let missing = "the image is corrupt: inode 43 has no extent for byte 4";
    assert_eq!(read(&late, 4), Err(missing.to_owned()));
}

/// A file of 2^40 bytes, as a sparse host file may be, whose superblock states that many inodes.
#[test]
fn a_vast_image_takes_no_memory() {
    struct Vast(Vec<u8>);
    impl quire_image::erofs::read::ReadAt for Vast {
        fn len(&self) -> u64 {
            1 << 40
        }
        fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
            for (at, byte) in (offset as usize..).zip(buffer) {
                *byte = self.0.get(at).copied().unwrap_or(0);
            }
            Ok(())
        }
    }
    let mut bytes = Laid::new().image();
    bytes[1024 + 16..1024 + 24].copy_from_slice(&u64::MAX.to_le_bytes());
    let image = Image::open(Vast(bytes)).unwrap();
    let (mut walk, mut names) = (image.walk(), 0);
    while let Some(step) = walk.next().unwrap() {
        names += usize::from(step.number < 2);
    }
    assert_eq!(names, 2);
}
