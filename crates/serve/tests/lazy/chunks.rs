//! Devices of chunks, which a layer's table of contents describes.

use std::io::{Read, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use image::digest::Digest;
use image::gzip::Start;
use image::lazy::{BlobKind, Head, SpanPlace, UNIT};
use oci::blobs::{AskedPeers, BlobSource, PeerPart};
use quire_serve::lazy::{Cause, DeviceServer, LayerFiller, LayerSource};
use store::{IndexWindows, Store};
use transfer::lazy::LayerIndex;

use super::{Lie, OneBlob, store};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Gzip,
    Zstd,
}

/// A layer and its device. Chunks begin in the middle of units.
struct Layer {
    blob: OneBlob,
    head: Head,
    /// The right bytes of the device.
    device: Vec<u8>,
}

fn packed(kind: Kind, bytes: &[u8]) -> Vec<u8> {
    match kind {
        Kind::Gzip => {
            let mut member = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            member.write_all(bytes).unwrap();
            member.finish().unwrap()
        }
        Kind::Zstd => zstd::encode_all(bytes, 1).unwrap(),
    }
}

/// The chunks of files: small files, a file of three chunks, a file of zeros, and a large one.
fn files() -> Vec<Vec<Vec<u8>>> {
    let noise = testing::noise(2_000_000);
    let mut rest = &noise[..];
    let mut take = |length: usize| {
        let (these, behind) = rest.split_at(length);
        rest = behind;
        these.to_vec()
    };
    let mut files: Vec<_> = (1..12_usize).map(|it| vec![take(it * 777)]).collect();
    files.push(vec![take(100_001), take(100_001), take(1)]);
    files.push(vec![vec![0; 70_000]]);
    files.push(vec![take(1_000_000)]);
    files.extend((1..30_usize).map(|it| vec![take(it)]));
    files
}

impl Layer {
    fn new(kind: Kind) -> Self {
        Self::with(kind, |_| ())
    }

    /// Makes the layer. `lie` changes the digests of chunks.
    fn with(kind: Kind, lie: impl FnOnce(&mut Vec<[u8; 32]>)) -> Self {
        let headers = testing::noise(512);
        let mut blob = packed(kind, &headers);
        let (mut device, mut spans, mut digests) =
            (Vec::new(), Vec::<SpanPlace>::new(), Vec::new());
        let pad = |device: &mut Vec<u8>, spans: &mut Vec<SpanPlace>| {
            let length = device.len().next_multiple_of(4096);
            let zeros = u16::try_from(length - device.len()).unwrap();
            device.resize(length, 0);
            spans.last_mut().into_iter().for_each(|it| it.padding = zeros);
        };
        for file in files() {
            pad(&mut device, &mut spans);
            let last = file.len() - 1;
            for (number, chunk) in file.iter().enumerate() {
                spans.push(SpanPlace {
                    start: Start::Member,
                    packed: blob.len() as u64,
                    unpacked: device.len() as u64,
                    padding: 0,
                });
                digests.push(image::lazy::unit_digest(chunk));
                device.extend(chunk);
                // The headers behind a file are in the member of its last chunk, or in a separate frame.
                match kind {
                    Kind::Gzip if number == last => {
                        blob.extend(packed(kind, &[&chunk[..], &headers].concat()));
                    }
                    _ => blob.extend(packed(kind, chunk)),
                }
            }
            if kind == Kind::Zstd {
                blob.extend(packed(kind, &headers));
            }
        }
        pad(&mut device, &mut spans);
        let data_end = blob.len() as u64;
        blob.extend(testing::noise(300_000));
        let kind = match kind {
            Kind::Gzip => BlobKind::GzipChunks { data_end },
            Kind::Zstd => BlobKind::ZstdChunks { data_end },
        };
        lie(&mut digests);
        let (digest, diff_id) = (Digest::sha256(&blob), Digest::sha256(b"tar"));
        let bytes = blob.len() as u64;
        let length = device.len() as u64;
        let head = Head::of_chunks(digest, bytes, kind, diff_id, length, spans, digests).unwrap();
        Self { blob: OneBlob::new(blob), head, device }
    }

    fn filler<'a>(&'a self, store: &'a Store) -> LayerFiller<'a> {
        let device = self.head.device;
        let there = store.fill_lazy_device(&device).unwrap();
        let make = || store.create_lazy_device(&device, self.head.device_bytes).unwrap();
        LayerFiller::new(self.index(), &self.blob, there.unwrap_or_else(make))
    }

    fn index(&self) -> LayerIndex {
        LayerIndex { head: self.head.clone(), windows: IndexWindows::Groups(Vec::new()) }
    }

    fn asked(&self) -> u64 {
        self.blob.asked.load(Ordering::Relaxed)
    }

    /// Returns the bytes of the device's file in a store.
    fn stored(&self, store: &Store, range: &Range<u64>) -> Vec<u8> {
        let file = store.lazy_devices.open(&self.head.device).unwrap().unwrap().0;
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
        file.read_exact_at(&mut bytes, range.start).unwrap();
        bytes
    }

    fn right(&self, range: &Range<u64>) -> &[u8] {
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        &self.device[start..end]
    }

    /// Returns all units of the device as ranges.
    fn units(&self) -> Vec<Range<u64>> {
        let length = self.head.device_bytes;
        (0..length.div_ceil(UNIT)).map(|it| it * UNIT..((it + 1) * UNIT).min(length)).collect()
    }

    fn check(&self, store: &Store, range: &Range<u64>) {
        assert!(self.stored(store, range) == self.right(range), "{range:?}");
    }
}

fn each(test: impl Fn(&Layer, &Path)) {
    for kind in [Kind::Gzip, Kind::Zstd] {
        let folder = tempfile::tempdir().unwrap();
        test(&Layer::new(kind), &folder.path().join("store"));
    }
}

#[test]
fn units_are_made_of_verified_chunks() {
    each(|layer, path| {
        let lazy = store(path);
        let filler = layer.filler(&lazy);
        // One small file needs the chunks of its unit.
        filler.ensure(5000..5001, |_| ()).unwrap();
        layer.check(&lazy, &(0..UNIT));
        let asked = layer.asked();
        assert!(asked > 0 && asked < layer.head.data_end() / 4, "{asked} bytes");
        filler.ensure(4096..8192, |_| ()).unwrap();
        assert_eq!(layer.asked(), asked);
        // In an order that is not that of the device.
        for range in layer.units().iter().rev().step_by(3) {
            filler.ensure(range.clone(), |_| ()).unwrap();
            layer.check(&lazy, range);
        }
        let all = 0..layer.head.device_bytes;
        filler.ensure(all.clone(), |_| ()).unwrap();
        layer.check(&lazy, &all);
        assert!(filler.is_full());
        // Chunks at the edges of units may be fetched twice.
        assert!(layer.asked() < 3 * layer.head.data_end(), "{}", layer.asked());
    });
}

/// A peer that sends sevens as any part of any tar.
struct LyingPeer<'a> {
    blob: &'a OneBlob,
    asked: AtomicBool,
}

impl BlobSource for LyingPeer<'_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        self.blob.blob(digest, size, range)
    }

    fn tar_part(
        &self,
        _: &Digest,
        _: &Digest,
        range: Range<u64>,
        _: AskedPeers,
    ) -> Option<PeerPart> {
        self.asked.store(true, Ordering::Relaxed);
        let bytes = vec![7; usize::try_from(range.end - range.start).unwrap()];
        Some(PeerPart { bytes, host: "peer".into() })
    }

    fn may_have_peers(&self, _: &Digest) -> bool {
        true
    }
}

/// A device of chunks is not a tar, and its units have no digests with which bytes of peers could be compared.
#[test]
fn peers_are_not_asked_for_chunks() {
    each(|layer, path| {
        let lazy = store(path);
        let peer = LyingPeer { blob: &layer.blob, asked: AtomicBool::new(false) };
        let device = lazy.create_lazy_device(&layer.head.device, layer.head.device_bytes).unwrap();
        let filler = LayerFiller::new(layer.index(), &peer, device);
        assert!(!filler.may_have_peers());
        let spans = layer.head.spans.len();
        filler.bring_part(&(0..spans / 2), true).unwrap();
        filler.bring_ahead(spans / 2..spans, Cause::Completion).unwrap();
        let all = 0..layer.head.device_bytes;
        filler.ensure(all.clone(), |_| ()).unwrap();
        layer.check(&lazy, &all);
        assert!(!peer.asked.load(Ordering::Relaxed));
    });
}

#[test]
fn wrong_bytes_of_a_chunk_are_never_written() {
    each(|layer, path| {
        let lazy = store(path);
        let filler = layer.filler(&lazy);
        *layer.blob.lie.lock().unwrap() = Lie::Always;
        let mut failed = 0;
        for range in layer.units() {
            // The wrong byte may be one of the headers between the chunks.
            failed += usize::from(filler.ensure(range.clone(), |_| ()).is_err());
            let stored = layer.stored(&lazy, &range);
            assert!(stored == layer.right(&range) || stored.iter().all(|it| *it == 0));
            assert!(!filler.has(&range) || stored == layer.right(&range));
        }
        assert!(failed > layer.units().len() / 2, "{failed}");
        *layer.blob.lie.lock().unwrap() = Lie::None;
        let patient = layer.filler_again(&lazy, filler);
        *layer.blob.lie.lock().unwrap() = Lie::Once;
        // The source has no other host, so the same one is asked once more.
        patient.ensure(0..layer.head.device_bytes, |_| ()).unwrap();
        layer.check(&lazy, &(0..layer.head.device_bytes));
    });
}

impl Layer {
    /// Returns a new filler after the first one has ended.
    fn filler_again<'a>(&'a self, store: &'a Store, first: LayerFiller<'a>) -> LayerFiller<'a> {
        drop(first);
        self.opened(store)
    }

    /// Returns a filler of a device that exists. A child process of another test may hold the lock of an earlier filler
    /// until its `exec`.
    fn opened<'a>(&'a self, store: &'a Store) -> LayerFiller<'a> {
        let mut device = None;
        testing::fake::wait_for("its lock", || {
            device = store.fill_lazy_device(&self.head.device).unwrap();
            device.is_some()
        });
        LayerFiller::new(self.index(), &self.blob, device.unwrap())
    }
}

/// The chunks that an earlier service has written are compared before they are used again.
#[test]
fn a_later_filler_compares_chunks_before_it_uses_them() {
    each(|layer, path| {
        let lazy = store(path);
        let filler = layer.filler(&lazy);
        let all = 0..layer.head.device_bytes;
        filler.ensure(all.clone(), |_| ()).unwrap();
        let asked = layer.asked();
        let filler = layer.filler_again(&lazy, filler);
        assert!(!filler.has(&(0..1)));
        filler.ensure(all.clone(), |_| ()).unwrap();
        assert_eq!(layer.asked(), asked, "nothing is fetched twice");
        drop(filler);
        // A byte of a chunk, and a zero behind one, are changed on the disk.
        let name = path.join("lazy").join(layer.head.device.to_string());
        let file = std::fs::OpenOptions::new().write(true).open(name).unwrap();
        for place in [300, 777 + 20] {
            let before = layer.stored(&lazy, &(place..place + 1))[0];
            file.write_all_at(&[before ^ 1], place).unwrap();
            let asked = layer.asked();
            let filler = layer.opened(&lazy);
            // The rest of the device is used as it is.
            filler.ensure(UNIT * 2..all.end, |_| ()).unwrap();
            assert_eq!(layer.asked(), asked);
            filler.ensure(0..1, |_| ()).unwrap();
            assert!(layer.asked() > asked);
            layer.check(&lazy, &all);
        }
    });
}

/// A chunk counts only if all of it was written.
#[test]
fn a_chunk_with_a_hole_is_fetched_again() {
    each(|layer, path| {
        let lazy = store(path);
        let filler = layer.filler(&lazy);
        let place = layer.head.chunk(11);
        // The last unit of the chunk is not written.
        let unit = place.start.next_multiple_of(UNIT);
        assert!(unit + UNIT < layer.head.chunk(12).end);
        filler.ensure(unit..unit + 1, |_| ()).unwrap();
        let asked = layer.asked();
        let filler = layer.filler_again(&lazy, filler);
        filler.ensure(unit..unit + 1, |_| ()).unwrap();
        layer.check(&lazy, &(unit..unit + UNIT));
        assert!(layer.asked() > asked);
    });
}

/// The table has wrong digests: readers get errors, and other files their bytes.
#[test]
fn chunks_with_other_digests_than_in_the_table_are_errors() {
    for kind in [Kind::Gzip, Kind::Zstd] {
        // The second chunk of the file of three chunks.
        let layer = Layer::with(kind, |digests| digests[12][0] ^= 1);
        let folder = tempfile::tempdir().unwrap();
        let lazy = store(&folder.path().join("store"));
        let filler = layer.filler(&lazy);
        let wrong = layer.head.chunk(12);
        let mut failed = 0;
        for range in layer.units() {
            let is_of_it = range.start < wrong.end && wrong.start < range.end;
            match filler.ensure(range.clone(), |_| ()) {
                Ok(()) => {
                    assert!(!is_of_it, "{range:?}");
                    layer.check(&lazy, &range);
                }
                Err(error) => {
                    failed += 1;
                    assert!(is_of_it, "{range:?}: {}", testing::chain(&error));
                }
            }
        }
        assert!(failed >= 2, "{failed}");
        assert!(layer.stored(&lazy, &wrong).iter().filter(|it| **it != 0).count() < 70_000);
    }
}

/// The id of such a device is not a digest of its bytes.
#[test]
fn a_full_device_of_chunks_is_not_sealed() {
    each(|layer, path| {
        let lazy = store(path);
        let filler = layer.filler(&lazy);
        for order in [0, 1] {
            for number in 0..layer.head.spans.len() {
                let span = if order == 0 { layer.head.spans.len() - 1 - number } else { number };
                filler.bring_ahead(span..span + 1, Cause::Completion).unwrap();
            }
        }
        assert!(filler.is_full(), "{} of {}", filler.filled(), layer.head.unit_count());
        layer.check(&lazy, &(0..layer.head.device_bytes));
        let server = DeviceServer::new().unwrap();
        server.fill(filler).unwrap();
        assert!(server.take_full().is_none());
    });
}

/// A full device that is never sealed is not read again by the next service.
#[test]
fn a_full_device_of_chunks_is_no_longer_completed() {
    each(|layer, path| {
        let lazy = store(path);
        let server = DeviceServer::new().unwrap();
        server.fill(layer.filler(&lazy)).unwrap();
        let filler = Arc::clone(&server.fillers()[0]);
        for _request in 0..2 {
            server.complete(&filler);
            filler.ensure(0..layer.head.device_bytes, |_| ()).unwrap();
            assert!(filler.is_full());
            assert_eq!(server.take_completed().len(), 1);
            assert!(server.take_completed().is_empty());
        }
    });
    let layer = Layer::new(Kind::Gzip);
    let folder = tempfile::tempdir().unwrap();
    let lazy = store(&folder.path().join("store"));
    let server = DeviceServer::new().unwrap();
    server.fill(layer.filler(&lazy)).unwrap();
    server.complete(&server.fillers()[0]);
    assert!(server.take_completed().is_empty(), "it is not full");
}

/// Two images with the same device share its units only if their tables have the same chunks.
#[test]
fn images_share_a_device_of_the_same_chunks() {
    each(|layer, path| {
        let lazy = store(path);
        let filler = layer.filler(&lazy);
        let source = || LayerSource { blobs: Box::new(&layer.blob), manifest: None, host: None };
        let mut other = layer.index();
        other.head.units[3][0] ^= 1;
        assert!(filler.beside(other, source()).is_none());
        let same = filler.beside(layer.index(), source()).unwrap();
        filler.ensure(0..UNIT, |_| ()).unwrap();
        assert!(same.has(&(0..UNIT)));
    });
}
