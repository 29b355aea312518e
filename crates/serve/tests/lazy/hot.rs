//! Tests hot packs: their blocks need no source, and a wrong pack deceives at most the image that it belongs to.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use image::digest::Digest;
use image::lazy::UNIT;
use image::lazy::hot::BLOCK;
use quire_serve::lazy::{Brought, DoorKind, LayerFiller, LayerSource};
use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;
use store::{HotPack, OpenDevice, Trace, TraceRun};
use testing::fake::wait_for;
use transfer::lazy::hot_pack;

use super::service::{Served, words};
use super::{Stage, store};

/// Two blocks in the middle of two units of the device, whose other blocks are not in the pack. The units are so far from
/// each other that no request has both.
const FIRST: u32 = 4 * 4 + 1;
const SECOND: u32 = 4 * 90 + 2;

const fn bytes_of(block: u32) -> Range<u64> {
    let start = block as u64 * BLOCK;
    start..start + BLOCK
}

fn trace(stage: &Stage, blocks: &[u32]) -> Trace {
    let device = stage.device();
    let runs = blocks.iter().map(|block| TraceRun { device, block: *block, blocks: 1 });
    Trace { name: "default".to_owned(), runs: runs.collect() }
}

/// Returns a pack of blocks of a device.
fn pack(stage: &Stage, blocks: &[u32], device: File) -> Vec<u8> {
    let bytes = device.metadata().unwrap().len();
    let id = stage.device();
    let open = OpenDevice { id, file: device, bytes, kernel_verity: false, is_lent: false };
    hot_pack(&trace(stage, blocks), &[open]).unwrap().unwrap()
}

fn right_device(stage: &Stage) -> File {
    File::open(stage.folder.path().join("full/data").join(stage.device().to_string())).unwrap()
}

/// Returns a copy of the device in which both blocks have other bytes.
fn wrong_device(stage: &Stage) -> File {
    let (mut right, mut wrong) = (right_device(stage), tempfile::tempfile().unwrap());
    std::io::copy(&mut right, &mut wrong).unwrap();
    for block in [FIRST, SECOND] {
        wrong.write_all_at(b"wrong", bytes_of(block).start + 100).unwrap();
    }
    wrong
}

fn opened(pack: &[u8]) -> Arc<HotPack> {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(pack, 0).unwrap();
    Arc::new(HotPack::open(file).unwrap())
}

fn read(file: &File, range: &Range<u64>) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
    file.read_exact_at(&mut bytes, range.start).map(|()| bytes)
}

#[test]
fn blocks_of_a_hot_pack_need_no_source() {
    let Some(stage) = Stage::new() else { return };
    let folder = tempfile::tempdir_in(stage.folder.path()).unwrap();
    let lazy = store(&folder.path().join("lazy"));
    let filler = stage.filler(&lazy);
    let (device, right) = (filler.device().file().try_clone().unwrap(), right_device(&stage));
    let frames =
        filler.use_hot_pack(&opened(&pack(&stage, &[SECOND, FIRST], right_device(&stage))));
    assert_eq!(frames, 1);
    // The index was made from the same source.
    let before = stage.blob.asked.load(Ordering::Relaxed);
    for block in [FIRST, SECOND] {
        let range = bytes_of(block);
        filler.ensure(range.clone(), |_| ()).unwrap();
        assert!(
            filler.has(&range) && read(&device, &range).unwrap() == read(&right, &range).unwrap()
        );
        // The neighbours in the same unit are not there.
        assert!(
            !filler.has(&(range.start - 1..range.end))
                && !filler.has(&(range.start..range.end + 1))
        );
    }
    assert_eq!((stage.blob.asked.load(Ordering::Relaxed), filler.filled()), (before, 0));
    // A read beyond the blocks gets the whole unit.
    let both = bytes_of(FIRST).start..bytes_of(FIRST).end + 1;
    filler.ensure(both.clone(), |_| ()).unwrap();
    assert!(filler.has(&both) && stage.blob.asked.load(Ordering::Relaxed) > before);
    // When all blocks of a unit are there, the unit is compared with its digest, so that others can use it.
    let unit: Vec<u32> = (4 * 20..4 * 21).collect();
    let other = tempfile::tempdir_in(stage.folder.path()).unwrap();
    let other = store(&other.path().join("lazy"));
    let filler = stage.filler(&other);
    filler.use_hot_pack(&opened(&pack(&stage, &unit, right_device(&stage))));
    filler.load_hot_frame(0);
    assert_eq!(filler.filled(), 1);
}

#[test]
fn a_hot_pack_that_lies_deceives_no_other_image() {
    let Some(stage) = Stage::new() else { return };
    let source = |manifest: &[u8]| {
        let manifest = Some(Digest::sha256(manifest));
        LayerSource { blobs: Box::new(&stage.blob), manifest, host: None }
    };
    let folder = tempfile::tempdir_in(stage.folder.path()).unwrap();
    let lazy = store(&folder.path().join("lazy"));
    let length = stage.index.head.device_bytes;
    let device = lazy.create_lazy_device(&stage.device(), length).unwrap();
    let honest = LayerFiller::from_source(stage.index.clone(), source(b"honest"), device);
    let liar = honest.beside(stage.index.clone(), source(b"liar")).unwrap();
    let (device, right) = (honest.device().file().try_clone().unwrap(), right_device(&stage));
    // The honest image has the second block before the liar's pack comes.
    let (first, second) = (bytes_of(FIRST), bytes_of(SECOND));
    honest.ensure(second.clone(), |_| ()).unwrap();
    liar.use_hot_pack(&opened(&pack(&stage, &[FIRST, SECOND], wrong_device(&stage))));
    liar.load_hot_frame(0);
    assert!(read(&device, &second).unwrap() == read(&right, &second).unwrap());
    assert!(read(&device, &first).unwrap() != read(&right, &first).unwrap());
    assert!(liar.has(&first) && !honest.has(&first));
    honest.ensure(first.clone(), |_| ()).unwrap();
    assert!(read(&device, &first).unwrap() == read(&right, &first).unwrap());
    // All bytes together have the digest that is the device's name.
    honest.ensure(0..length, |_| ()).unwrap();
    assert!(honest.is_full());
    assert!(read(&device, &(0..length)).unwrap() == read(&right, &(0..length)).unwrap());
}

#[test]
fn blocks_of_a_damaged_pack_come_from_the_source() {
    let Some(stage) = Stage::new() else { return };
    let whole = pack(&stage, &[FIRST, SECOND], right_device(&stage));
    let other = pack(&stage, &[FIRST, SECOND], wrong_device(&stage));
    let head = image::lazy::hot::HotHead::length_of(whole.first_chunk().unwrap()).unwrap();
    // Bytes that cannot be decompressed, and, with the right head, bytes with other digests.
    let mut torn = whole.clone();
    torn[head..].fill(0);
    let mut mixed = whole[..head].to_vec();
    mixed.extend(&other[head..]);
    let is_as_long = mixed.len() == whole.len();
    for damaged in [Some(torn), is_as_long.then_some(mixed)].into_iter().flatten() {
        let folder = tempfile::tempdir_in(stage.folder.path()).unwrap();
        let lazy = store(&folder.path().join("lazy"));
        let filler = stage.filler(&lazy);
        filler.use_hot_pack(&opened(&damaged));
        filler.load_hot_frame(0);
        assert!(!filler.has(&bytes_of(FIRST)));
        let before = stage.blob.asked.load(Ordering::Relaxed);
        filler.ensure(bytes_of(FIRST), |_| ()).unwrap();
        assert!(stage.blob.asked.load(Ordering::Relaxed) > before);
    }
    // A pack whose head or length is damaged is none.
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&whole[..whole.len() - 1], 0).unwrap();
    HotPack::open(file).unwrap_err();
}

#[test]
fn a_mount_reads_its_hot_pack_without_the_registry() {
    let Some(served) = Served::new(DoorKind::Fuse) else { return };
    let service = served.start();
    let stage = &served.stage;
    // A block in the middle of a file, and the pages of the file in it.
    let device = read(&right_device(stage), &(0..stage.index.head.device_bytes)).unwrap();
    let begins = |it: &[u8]| it == &served.expect[..4096];
    let file = device.windows(4096).position(begins).unwrap() as u64;
    let block = u32::try_from((file + 10 * UNIT) / BLOCK + 1).unwrap();
    let bytes = bytes_of(block);
    let pages = (bytes.start - file).next_multiple_of(4096)..(bytes.end - file) / 4096 * 4096;
    let image = stage.image;
    let put = store(&served.path("lazy"));
    put.downloads.set_hot_pack(&image, &pack(stage, &[block], right_device(stage))).unwrap();
    served.save_trace("default", trace(stage, &[block]).runs);
    let mount = served.mount();
    assert_eq!(served.service().bring(&image, Some("default")).unwrap(), Brought::HotPack);
    fs::write(served.path("gone"), "").unwrap();
    let open = File::open(words(&mount)).unwrap();
    // The kernel reads nothing ahead.
    fadvise(&open, 0, None, Advice::Random).unwrap();
    let expect = |range: &Range<u64>| {
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        &served.expect[start..end]
    };
    assert!(read(&open, &pages).unwrap() == expect(&pages));
    let counts = || served.service().status().unwrap().remove(0).counts;
    assert_eq!((counts().requests, counts().hot_blocks, counts().failures), (0, 1, 0));
    let beyond = pages.end + 2 * BLOCK..pages.end + 2 * BLOCK + 4096;
    let error = read(&open, &beyond).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    fs::remove_file(served.path("gone")).unwrap();
    wait_for("the source", || read(&open, &beyond).is_ok());
    assert!(read(&open, &beyond).unwrap() == expect(&beyond));
    drop((open, mount));
    served.end(service);
}

/// Readers behind a mark read the file itself, so they get whole units only.
#[test]
fn a_device_with_a_mark_uses_the_trace_of_a_hot_pack() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let service = served.start();
    let (stage, image) = (&served.stage, served.stage.image);
    let put = store(&served.path("lazy"));
    put.downloads.set_hot_pack(&image, &pack(stage, &[FIRST], wrong_device(stage))).unwrap();
    served.save_trace("default", trace(stage, &[FIRST]).runs);
    let mount = served.mount();
    assert_eq!(served.service().bring(&image, Some("default")).unwrap(), Brought::Trace);
    assert_eq!(served.read(&mount, 8), 0);
    drop(mount);
    served.end(service);
}
