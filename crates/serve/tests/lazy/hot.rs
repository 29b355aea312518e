//! Tests hot packs: their blocks need no source, and a wrong pack deceives at most the image that it belongs to.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use image::digest::Digest;
use image::lazy::UNIT;
use image::lazy::hot::{BLOCK, HotHead};
use quire_serve::lazy::{Brought, LayerFiller, LayerSource};
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
    Trace { name: "default".to_owned(), runs: runs.collect(), start: None }
}

/// Returns a pack of blocks of a device, whose bytes may be wrong.
fn pack(stage: &Stage, blocks: &[u32], device: File) -> Vec<u8> {
    let bytes = device.metadata().unwrap().len();
    let mut head = stage.index.head.clone();
    for block in blocks {
        let start = u64::from(*block) * BLOCK / UNIT * UNIT;
        let unit = read(&device, &(start..(start + UNIT).min(bytes))).unwrap();
        let digest = &mut head.units[usize::try_from(start / UNIT).unwrap()];
        digest.copy_from_slice(Digest::sha256(&unit).as_bytes());
    }
    let id = stage.device();
    let open = OpenDevice { id, file: device, bytes, kernel_verity: false, is_lent: false };
    hot_pack(&trace(stage, blocks), &[open], [&head]).unwrap().unwrap()
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
    let hot = || {
        let now = filler.counts().now();
        (now.hot_blocks, now.hot_read_blocks, now.hot_wasted(), now.wanted_units)
    };
    assert_eq!(hot(), (2, 2, 0, 0));
    // A read beyond the blocks gets the whole unit.
    let both = bytes_of(FIRST).start..bytes_of(FIRST).end + 1;
    filler.ensure(both.clone(), |_| ()).unwrap();
    assert!(filler.has(&both) && stage.blob.asked.load(Ordering::Relaxed) > before);
    // A block counts once, and the unit was missed.
    assert_eq!(hot(), (2, 2, 0, 1));
    // When all blocks of a unit are present, the unit is compared with its digest, so that others can use it.
    let unit: Vec<u32> = (4 * 20..4 * 21).collect();
    let other = tempfile::tempdir_in(stage.folder.path()).unwrap();
    let other = store(&other.path().join("lazy"));
    let filler = stage.filler(&other);
    filler.use_hot_pack(&opened(&pack(&stage, &unit, right_device(&stage))));
    filler.load_hot_frame(0);
    assert_eq!(filler.filled(), 1);
    // Readers get parts of two blocks; the pack has four.
    let counts = || filler.counts().now();
    assert_eq!((counts().hot_blocks, counts().hot_wasted()), (4, 4 * BLOCK));
    let start = bytes_of(unit[1]).start;
    filler.ensure(start..start + 1, |_| ()).unwrap();
    filler.ensure(start + 7..start + BLOCK + 1, |_| ()).unwrap();
    assert_eq!((counts().hot_read_blocks, counts().hot_wasted()), (2, 2 * BLOCK));
    assert_eq!(counts().wanted_units, 0);
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
    let head = HotHead::length_of(whole.first_chunk().unwrap()).unwrap();
    // Bytes that cannot be decompressed, and blocks whose digests are others.
    let mut torn = whole.clone();
    torn[head..].fill(0);
    let mut changed = HotHead::decode(&whole[..head]).unwrap();
    changed.frames[0].digests[0][0] ^= 1;
    let mut mixed = changed.encode().unwrap();
    mixed.extend(&whole[head..]);
    for damaged in [torn, mixed] {
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
    // A pack that is too short is refused.
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&whole[..whole.len() - 1], 0).unwrap();
    HotPack::open(file).unwrap_err();
}

#[test]
fn a_mount_reads_its_hot_pack_without_the_registry() {
    let Some(served) = Served::new() else { return };
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
    let manifest = Digest::sha256(b"manifest");
    let bytes = pack(stage, &[block], right_device(stage));
    put.downloads.set_hot_pack(&manifest, Some(&bytes)).unwrap();
    served.save_trace("default", trace(stage, &[block]).runs);
    let client = served.service().with_manifest(Some(manifest));
    let mount = served.mount_with(&client.lend(&stage.device()).unwrap());
    assert_eq!(client.bring(&image, Some("default")).unwrap(), Brought::HotPack);
    drop(client);
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

/// Blocks of a unit that is filled are compared with their own digests. If those are wrong, the unit decides.
#[test]
fn bytes_of_a_hot_pack_that_changed_on_the_disk_are_errors() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let stage = &served.stage;
    let unit: Vec<u32> = (0..4).collect();
    let put = store(&served.path("lazy"));
    let manifest = Digest::sha256(b"manifest");
    let bytes = pack(stage, &unit, right_device(stage));
    put.downloads.set_hot_pack(&manifest, Some(&bytes)).unwrap();
    served.save_trace("default", trace(stage, &unit).runs);
    let client = served.service().with_manifest(Some(manifest));
    let device = client.lend(&stage.device()).unwrap();
    assert_eq!(client.bring(&stage.image, Some("default")).unwrap(), Brought::HotPack);
    drop(client);
    let counts = || served.service().status().unwrap().remove(0).counts;
    wait_for("its blocks", || counts().hot_blocks == 4);
    let expect = read(&right_device(stage), &bytes_of(2)).unwrap();
    assert!(read(&device, &bytes_of(2)).unwrap() == expect);
    // A change in another block of the unit does not concern this block.
    let change = |place| {
        let path = served.path("lazy/lazy").join(stage.device().to_string());
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(b"other bytes", place).unwrap();
    };
    change(100);
    assert!(read(&device, &bytes_of(2)).unwrap() == expect);
    assert_eq!(served.state(), Some(store::LazyDeviceState::Partial));
    let error = read(&device, &bytes_of(0)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    assert_eq!(served.state(), Some(store::LazyDeviceState::Condemned));
    drop(device);
    served.leave();
    served.is_gone(service);
}

/// Manifests of different authors may have the same image, so a pack belongs to a manifest.
#[test]
fn a_hot_pack_is_used_for_its_manifest_only() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let (stage, right) = (&served.stage, right_device(&served.stage));
    let put = store(&served.path("lazy"));
    let [liar, honest] = [b"liar".as_slice(), b"honest"].map(Digest::sha256);
    let lie = pack(stage, &[FIRST, SECOND], wrong_device(stage));
    put.downloads.set_hot_pack(&liar, Some(&lie)).unwrap();
    served.save_trace("default", trace(stage, &[FIRST]).runs);
    let client = |manifest| served.service().with_manifest(manifest);
    let bring = |manifest| client(Some(manifest)).bring(&stage.image, None).unwrap();
    let lend = |manifest| client(manifest).lend(&stage.device()).unwrap();
    let of_liar = lend(Some(liar));
    // The service of the tests uses another trace by default.
    assert_eq!(bring(liar), Brought::Nothing);
    let named = client(Some(liar)).bring(&stage.image, Some("default")).unwrap();
    assert_eq!(named, Brought::HotPack);
    let counts = || served.service().status().unwrap().remove(0).counts;
    wait_for("its blocks", || counts().hot_blocks == 2);
    assert!(read(&of_liar, &bytes_of(FIRST)).unwrap() != read(&right, &bytes_of(FIRST)).unwrap());
    let of_honest = lend(Some(honest));
    let named = client(Some(honest)).bring(&stage.image, Some("default")).unwrap();
    assert_eq!(named, Brought::Trace);
    let expect = read(&right, &bytes_of(FIRST)).unwrap();
    assert!(read(&of_honest, &bytes_of(FIRST)).unwrap() == expect);
    // Readers whose manifest is unknown share a filler, which then uses no pack.
    let of_nobody = lend(None);
    let expect = read(&right, &bytes_of(SECOND)).unwrap();
    assert!(read(&of_nobody, &bytes_of(SECOND)).unwrap() == expect);
    drop((of_liar, of_honest, of_nobody));
    served.end(service);
}
