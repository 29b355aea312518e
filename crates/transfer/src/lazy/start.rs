//! Translates reads of an image's devices to parts of its files, and parts of files to blocks of another version's
//! devices (decision 36).
//!
//! Both images may be hostile, and so may the programs whose reads are recorded. The result only determines the order of
//! fetches.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use image::digest::Digest;
use image::erofs::read::{
    ByteOffset, Cached, DeviceSlot, FileType, Image, Inode, Nid, ReadAt, ReadError, RunPlace,
};
use image::lazy::hot::BLOCK;
use image::verity::DeviceId;
use store::{START_BYTES_MAX, START_PARTS_MAX, StartRecord, TraceRun};

use super::closure::add_block;

/// Maximum number of blocks that are prefetched for a start.
const BLOCKS_MAX: usize = 1 << 12;
const _: () = assert!(BLOCKS_MAX as u64 * BLOCK == START_BYTES_MAX);
/// Maximum number of parts of files that are found before they are put in order. A read may contain several small files.
const FOUND_MAX: usize = START_PARTS_MAX * 4;

/// Ranges of bytes, of which no two touch each other: the end of each by its start.
#[derive(Debug, Default)]
struct CoveredRanges(BTreeMap<u64, u64>);

impl CoveredRanges {
    /// Adds a range. Returns its parts that were not covered before, in order.
    fn add(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut new = Vec::new();
        if range.is_empty() {
            return new;
        }
        let before = self.0.range(..=range.end).rev().take_while(|it| *it.1 >= range.start);
        let touched: Vec<(u64, u64)> = before.map(|(start, end)| (*start, *end)).collect();
        let (mut at, mut all) = (range.start, range.clone());
        for (start, end) in touched.into_iter().rev() {
            if at < start {
                new.push(at..start);
            }
            at = at.max(end);
            all = all.start.min(start)..all.end.max(end);
            self.0.remove(&start);
        }
        if at < range.end {
            new.push(at..range.end);
        }
        self.0.insert(all.start, all.end);
        new
    }
}

/// Reads of an image's devices, in the order of the first read of each byte.
#[derive(Debug, Default)]
pub struct DeviceReads {
    covered: HashMap<DeviceId, CoveredRanges>,
    reads: Vec<(DeviceId, Range<u64>)>,
    /// Sum of the lengths of `reads`.
    bytes: u64,
}

impl DeviceReads {
    /// Returns the reads that a trace lists.
    #[must_use]
    pub fn of_trace(runs: &[TraceRun]) -> Self {
        let mut reads = Self::default();
        for TraceRun { device, block, blocks } in runs {
            let start = u64::from(*block) * BLOCK;
            let is_within = reads.add(*device, &(start..start + u64::from(*blocks) * BLOCK));
            if !is_within {
                break;
            }
        }
        reads
    }

    /// Adds a read of a range of bytes. Returns whether more can be added.
    pub fn add(&mut self, device: DeviceId, range: &Range<u64>) -> bool {
        for part in self.covered.entry(device).or_default().add(range) {
            let left = START_BYTES_MAX.saturating_sub(self.bytes);
            let part = part.start..part.end.min(part.start.saturating_add(left));
            let is_full = self.reads.len() >= START_PARTS_MAX;
            match self.reads.last_mut() {
                _ if part.is_empty() => return false,
                Some((last, before)) if *last == device && before.end == part.start => {
                    before.end = part.end;
                }
                _ if is_full => return false,
                _ => self.reads.push((device, part.clone())),
            }
            self.bytes += part.end - part.start;
        }
        self.bytes < START_BYTES_MAX
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    /// Returns the devices, in no particular order.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceId> {
        self.covered.keys()
    }
}

/// A read of a device, with its position in the order of reads.
struct OrderedRead {
    range: Range<u64>,
    order: usize,
}

/// Finds the parts of an image's files that were read, in the order of the reads. Files whose path is not UTF-8, and
/// bytes that belong to no file, are left out. `started` and `is_whole` are as in [`StartRecord`].
///
/// # Errors
/// [`ReadError`] if the image cannot be read.
pub fn started_files(
    image: &impl ReadAt,
    reads: &DeviceReads,
    started: Digest,
    is_whole: bool,
) -> Result<StartRecord, ReadError> {
    let image = Image::open(Cached::new(image))?;
    let mut of_devices: HashMap<DeviceId, Vec<OrderedRead>> = HashMap::new();
    for (order, (device, range)) in reads.reads.iter().enumerate() {
        of_devices.entry(*device).or_default().push(OrderedRead { range: range.clone(), order });
    }
    // The reads of a device have no byte in common, so their ends ascend as well.
    of_devices.values_mut().for_each(|it| it.sort_unstable_by_key(|it| it.range.start));
    let of_slot = |slot: &DeviceSlot| of_devices.get(&slot.device_id()?);
    let of_slots: Vec<_> = image.devices().iter().map(of_slot).collect();
    let mut start = StartRecord::new(started, is_whole);
    let mut found = Vec::new();
    // The file that was added last, or that cannot be added.
    let mut last = None::<(Nid, _)>;
    image.named_device_ranges(|path, run| {
        let slot = run.device.slot().and_then(|it| of_slots.get(it));
        let Some(reads) = slot.copied().flatten() else { return };
        let end = run.offset.0.saturating_add(run.len);
        let first = reads.partition_point(|it| it.range.end <= run.offset.0);
        for read in reads[first..].iter().take_while(|it| it.range.start < end) {
            if found.len() >= FOUND_MAX {
                return;
            }
            let file = match last {
                Some((nid, file)) if nid == run.nid => file,
                _ => start.add_file(path),
            };
            last = Some((run.nid, file));
            let Some(file) = file else { return };
            let from = read.range.start.max(run.offset.0);
            let until = read.range.end.min(end);
            let begin = run.start.0.saturating_add(from - run.offset.0);
            found.push((read.order, from, file, begin..begin.saturating_add(until - from)));
        }
    })?;
    found.sort_by_key(|(order, from, ..)| (*order, *from));
    for (_, _, file, part) in found {
        if !start.add_part(file, part) {
            break;
        }
    }
    Ok(start)
}

/// Finds the blocks of an image's devices that contain the files of a start, in the same order and each once. Files that
/// the image lacks, and parts behind the end of a file, are left out.
///
/// # Errors
/// [`ReadError`] if the image cannot be opened.
pub fn start_blocks(image: &impl ReadAt, start: &StartRecord) -> Result<Vec<TraceRun>, ReadError> {
    let image = Image::open(Cached::new(image))?;
    let devices: Vec<_> = image.devices().iter().map(DeviceSlot::device_id).collect();
    // A file that cannot be read is left out.
    let inode = |path: &[u8]| image.resolve(path).ok().flatten().filter(is_readable);
    let inodes: Vec<Option<Inode>> = start.files().map(inode).collect();
    let (mut seen, mut runs) = (HashSet::new(), Vec::new());
    for (file, part) in start.parts() {
        let Some(inode) = inodes.get(file).copied().flatten() else { continue };
        let mut at = part.start;
        while at < part.end {
            let Ok(Some(extent)) = image.map(&inode, ByteOffset(at)) else { break };
            let length = extent.len.min(part.end - at).max(1);
            at += length;
            let RunPlace::Data(device, place) = extent.place else { continue };
            let device = device.slot().and_then(|it| devices.get(it).copied().flatten());
            let Some(device) = device else { continue };
            for block in place.0 / BLOCK..place.0.saturating_add(length).div_ceil(BLOCK) {
                // The end of a run is a number as well.
                let block = u32::try_from(block).ok().filter(|it| *it < u32::MAX);
                let Some(block) = block else { break };
                if seen.len() >= BLOCKS_MAX {
                    return Ok(runs);
                }
                if seen.insert((device, block)) {
                    add_block(&mut runs, TraceRun { device, block, blocks: 1 });
                }
            }
        }
    }
    Ok(runs)
}

fn is_readable(inode: &Inode) -> bool {
    inode.file_type() == FileType::Regular && !inode.is_compressed()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use image::erofs::{DeviceFile, Native, Placed, Run, Stored, write_native};
    use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, Timestamp};
    use image::verity::ObjectId;

    use super::*;

    const METADATA: Metadata = Metadata {
        permissions: 0o644,
        uid: 0,
        gid: 0,
        mtime: Timestamp { seconds: 1_700_000_000, nanoseconds: 0 },
    };
    /// Length of each device in bytes.
    const LENGTH: u64 = 1 << 20;
    /// A page, in bytes.
    const PAGE: u64 = 4096;

    fn device(number: u16) -> DeviceId {
        DeviceId::from_bytes(&[u8::try_from(number).unwrap() + 1; 32]).unwrap()
    }

    fn started() -> Digest {
        Digest::sha256(b"manifest")
    }

    /// A file of an image: the runs of its bytes, each with the device and the offset. Files without runs are directories.
    #[derive(Clone, Copy)]
    struct TestFile<'a> {
        path: &'a str,
        runs: &'a [(u16, u64, u64)],
        /// Further names of the file.
        links: &'a [&'a str],
    }

    const fn file<'a>(path: &'a str, runs: &'a [(u16, u64, u64)]) -> TestFile<'a> {
        TestFile { path, runs, links: &[] }
    }

    fn name_of(path: &str) -> (&str, &str) {
        path.rsplit_once('/').unwrap()
    }

    /// Makes an image with three devices.
    fn image(files: &[TestFile<'_>]) -> Vec<u8> {
        let mut builder = Builder::new();
        let none = builder.xattrs([]).unwrap();
        let mut places = HashMap::new();
        for (number, TestFile { path, runs, links }) in (1..).zip(files) {
            let object = ObjectId::from_bytes(&[number; 32]).unwrap();
            let size = runs.iter().map(|it| it.2).sum();
            let runs = runs
                .iter()
                .map(|(device, offset, len)| Run { len: *len, place: Some((*device, *offset)) });
            places.insert(object, runs.collect::<Vec<_>>());
            let content =
                Content::External { size, object: Some(object), location: Location::Object };
            let id = builder.inode(&METADATA, none, Node::Regular(content)).unwrap();
            for path in [path].into_iter().chain(*links) {
                let (folder, name) = name_of(path);
                let mut into = InodeId::ROOT;
                for folder in folder.split('/').filter(|it| !it.is_empty()) {
                    into = builder.subdirectory(into, folder.as_bytes()).unwrap();
                }
                builder.insert(into, name.as_bytes(), id, Link::Equal).unwrap();
            }
        }
        let find = |object: &ObjectId| {
            let runs = places.get(object)?;
            Some(match &runs[..] {
                [Run { place: Some((device, offset)), .. }] => {
                    Placed::Whole(Stored { device: *device, offset: *offset, fingerprint: [7; 32] })
                }
                _ => Placed::Pieces { runs, fingerprint: [7; 32] },
            })
        };
        let devices = [0, 1, 2].map(|it| DeviceFile { id: device(it), bytes: LENGTH });
        let native = Native { has_tar: true, ..Native::new(&devices, &find) };
        let mut contents = |_: image::tree::Inode<'_>, _, _: &mut dyn Write| unreachable!();
        let mut bytes = Vec::new();
        write_native(&builder.finish(), &native, &mut contents, &mut bytes).unwrap();
        bytes
    }

    fn reads(all: &[(u16, Range<u64>)]) -> DeviceReads {
        let mut reads = DeviceReads::default();
        all.iter().for_each(|(number, range)| assert!(reads.add(device(*number), range)));
        reads
    }

    /// The version whose start was recorded: the first three files share a block.
    const BEFORE: [TestFile<'_>; 5] = [
        file("/bin/a", &[(0, 512, 3000)]),
        file("/bin/b", &[(0, 4096, 3000)]),
        file("/etc/c", &[(0, 8192, 100)]),
        file("/lib/large", &[(1, 512, 300_000)]),
        TestFile { path: "/x/one", runs: &[(1, 400_384, 9000)], links: &["/x/two", "/y/three"] },
    ];

    /// Checks the files of a start of [`BEFORE`].
    #[track_caller]
    fn check_files(all: &[(u16, Range<u64>)], expect: &[(&str, Range<u64>)]) {
        let start = started_files(&&image(&BEFORE)[..], &reads(all), started(), true).unwrap();
        let files: Vec<_> = start.files().map(|it| std::str::from_utf8(it).unwrap()).collect();
        let parts: Vec<_> = start.parts().map(|(file, part)| (files[file], part)).collect();
        assert_eq!(parts, expect);
        assert_eq!((start.started, start.is_whole), (started(), true));
    }

    #[test]
    fn reads_become_parts_of_files() {
        check_files(&[], &[]);
        // The header before a file, and the bytes behind it, belong to no file.
        check_files(&[(0, 0..4096)], &[("/bin/a", 0..3000)]);
        check_files(&[(0, 4096..8192)], &[("/bin/b", 0..3000)]);
        check_files(
            &[(0, 0..16384)],
            &[("/bin/a", 0..3000), ("/bin/b", 0..3000), ("/etc/c", 0..100)],
        );
        // In the order of the reads, each byte once.
        check_files(
            &[(1, 100_512..108_704), (0, 4096..8192), (1, 96_416..110_000), (1, 512..4608)],
            &[
                ("/lib/large", 100_000..108_192),
                ("/bin/b", 0..3000),
                ("/lib/large", 95_904..100_000),
                ("/lib/large", 108_192..109_488),
                ("/lib/large", 0..4096),
            ],
        );
        // A file with several names has the first one.
        check_files(&[(1, 400_384..404_480)], &[("/x/one", 0..4096)]);
        // Bytes and devices without files, and devices of other images.
        check_files(&[(0, 600_000..700_000), (2, 0..9), (7, 0..4096)], &[]);
    }

    /// Checks the blocks of another version, for a start of [`BEFORE`].
    #[track_caller]
    fn check_blocks(all: &[(u16, Range<u64>)], after: &[TestFile<'_>], expect: &[(u16, u32, u32)]) {
        let start = started_files(&&image(&BEFORE)[..], &reads(all), started(), true).unwrap();
        let run = |(number, block, blocks): &(u16, u32, u32)| TraceRun {
            device: device(*number),
            block: *block,
            blocks: *blocks,
        };
        let expect: Vec<_> = expect.iter().map(run).collect();
        assert_eq!(start_blocks(&&image(after)[..], &start).unwrap(), expect);
    }

    #[test]
    fn files_are_found_where_the_next_version_has_them() {
        let b = [(0, 4096..8192)];
        check_blocks(&b, &BEFORE, &[(0, 0, 1)]);
        // At another offset, over the edge of a block, and in another layer.
        check_blocks(&b, &[file("/bin/b", &[(0, 5 * BLOCK, 3000)])], &[(0, 5, 1)]);
        check_blocks(&b, &[file("/bin/b", &[(0, 2 * BLOCK - 512, 3000)])], &[(0, 1, 2)]);
        check_blocks(&b, &[file("/bin/b", &[(2, 3 * BLOCK, 3000)])], &[(2, 3, 1)]);
        // Shorter, longer and in pieces.
        check_blocks(&b, &[file("/bin/b", &[(0, 2 * BLOCK - 512, 400)])], &[(0, 1, 1)]);
        check_blocks(&b, &[file("/bin/b", &[(0, BLOCK, 90_000)])], &[(0, 1, 1)]);
        let pieces = [(0, 3 * BLOCK, 2048), (1, 7 * BLOCK, 2048)];
        check_blocks(&b, &[file("/bin/b", &pieces)], &[(0, 3, 1), (1, 7, 1)]);
        // Gone, moved to another path, and below a path that was a file.
        check_blocks(&b, &[file("/bin/a", &[(0, 0, 3000)])], &[]);
        check_blocks(&b, &[file("/sbin/b", &[(0, 0, 3000)])], &[]);
        check_blocks(&b, &[file("/bin/b/b", &[(0, 0, 3000)])], &[]);
        check_blocks(&b, &[], &[]);
        // The middle of a file whose beginning is elsewhere.
        let middle = [(1, 512 + 5 * BLOCK..512 + 7 * BLOCK)];
        check_blocks(&middle, &[file("/lib/large", &[(2, BLOCK, 300_000)])], &[(2, 6, 2)]);
        check_blocks(&middle, &[file("/lib/large", &[(2, BLOCK, 5 * BLOCK)])], &[]);
        // Files that share a block, and names of one file, give each block once, in the order of the reads.
        let all = [(1, 400_384..404_480), (0, 0..16384), (1, 512..512 + 2 * BLOCK)];
        let after = [
            file("/bin/a", &[(0, 9 * BLOCK, 3000)]),
            file("/bin/b", &[(0, 9 * BLOCK + 4096, 3000)]),
            file("/etc/c", &[(0, 8 * BLOCK + 512, 100)]),
            TestFile { links: &["/x/one"], ..file("/lib/large", &[(2, BLOCK, 300_000)]) },
        ];
        check_blocks(&all, &after, &[(2, 1, 1), (0, 9, 1), (0, 8, 1), (2, 2, 1)]);
    }

    #[test]
    fn the_end_of_a_read_is_the_end_of_a_block_range() {
        // The last byte that is read is the first one of a block.
        let all = [(1, 512..512 + BLOCK + 1)];
        let large = |offset| [(2, offset, 300_000)];
        check_blocks(&all, &[file("/lib/large", &large(0))], &[(2, 0, 2)]);
        check_blocks(&all, &[file("/lib/large", &large(BLOCK - 512))], &[(2, 0, 2)]);
        check_blocks(&[(1, 512..512 + BLOCK)], &[file("/lib/large", &large(0))], &[(2, 0, 1)]);
    }

    #[test]
    fn covered_ranges_do_not_count_again() {
        let mut covered = CoveredRanges::default();
        let mut check = |range: Range<u64>, expect: &[(u64, u64)]| {
            let added = covered.add(&range);
            let added: Vec<_> = added.iter().map(|it| (it.start, it.end)).collect();
            assert_eq!(added, expect, "{range:?}");
        };
        check(5..5, &[]);
        check(10..20, &[(10, 20)]);
        check(12..18, &[]);
        check(10..20, &[]);
        check(30..40, &[(30, 40)]);
        check(20..22, &[(20, 22)]);
        check(5..50, &[(5, 10), (22, 30), (40, 50)]);
        check(0..60, &[(0, 5), (50, 60)]);
        check(60..61, &[(60, 61)]);
        check(u64::MAX - 1..u64::MAX, &[(u64::MAX - 1, u64::MAX)]);
        check(0..u64::MAX, &[(61, u64::MAX - 1)]);
        assert_eq!(covered.0.len(), 1);
    }

    #[test]
    fn endless_reads_have_an_end() {
        let mut reads = DeviceReads::default();
        assert!(!reads.add(device(0), &(0..u64::MAX)));
        assert_eq!(reads.reads, [(device(0), 0..START_BYTES_MAX)]);
        assert!(!reads.add(device(1), &(0..1)));
        // Backwards, so that no two reads are joined.
        let mut reads = DeviceReads::default();
        let count = (0..u64::MAX).take_while(|it| {
            reads.add(device(0), &(LENGTH * LENGTH - it * 2..LENGTH * LENGTH - it * 2 + 1))
        });
        assert_eq!(count.count(), START_PARTS_MAX);
        let start = started_files(&&image(&BEFORE)[..], &reads, started(), true).unwrap();
        assert!(start.is_empty());
        // A trace with the same runs again and again, up to the largest number of a block.
        let run = TraceRun { device: device(1), block: 0, blocks: u32::MAX };
        let reads = DeviceReads::of_trace(&[run; 9]);
        assert_eq!(reads.bytes, START_BYTES_MAX);
        let start = started_files(&&image(&BEFORE)[..], &reads, started(), true).unwrap();
        assert_eq!(start.parts().map(|it| it.1.end - it.1.start).sum::<u64>(), 309_000);
        // A later version whose file has all of its bytes in other blocks.
        let far: Vec<_> = (0..73).map(|it| (2, it * 2 * 4096, PAGE)).collect();
        let blocks = start_blocks(&&image(&[file("/lib/large", &far)])[..], &start).unwrap();
        assert_eq!(blocks.iter().map(|it| it.blocks).sum::<u32>(), 37);
    }

    /// Many files may claim the same bytes of a device.
    #[test]
    fn files_that_share_bytes_are_bounded() {
        let names: Vec<String> = (0..200).map(|it| format!("/file-{it}")).collect();
        let files: Vec<_> = names.iter().map(|it| file(it, &[(0, 0, 100_000)])).collect();
        let pages: Vec<_> = (0..400).map(|it| (0, it * 200..it * 200 + 100)).collect();
        let start = started_files(&&image(&files)[..], &reads(&pages), started(), false).unwrap();
        assert_eq!(start.parts().count(), START_PARTS_MAX);
        let blocks = start_blocks(&&image(&files)[..], &start).unwrap();
        assert!(!blocks.is_empty() && blocks.iter().all(|it| it.blocks <= 7), "{blocks:?}");
    }

    #[test]
    fn what_is_no_image_is_an_error() {
        let start = StartRecord::new(started(), true);
        assert!(start_blocks(&&b"no image"[..], &start).is_err());
        assert!(started_files(&&b"no image"[..], &reads(&[]), started(), true).is_err());
    }

    /// No change of an image makes the translation panic.
    #[test]
    fn damaged_images_give_errors_or_other_blocks() {
        let good = image(&BEFORE);
        let all = reads(&[(0, 0..16384), (1, 0..300_000), (1, 400_000..409_000)]);
        let start = started_files(&&good[..], &all, started(), true).unwrap();
        assert!(!start.is_empty());
        for at in 0..good.len() {
            for bit in [0, 3, 7] {
                let mut bytes = good.clone();
                bytes[at] ^= 1 << bit;
                let _other = started_files(&&bytes[..], &all, started(), true);
                let _other = start_blocks(&&bytes[..], &start);
            }
        }
    }
}
