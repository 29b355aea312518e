//! Peers that send wrong bytes of a layer's tar, and peers that complete the same device.

use std::io::Read;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use image::digest::Digest;
use image::lazy::Head;
use oci::blobs::{AskedPeers, BlobSource, PeerPart};
use quire_serve::lazy::{LayerFiller, PartOutcome};
use store::Store;

use super::{OneBlob, Stage, store};

/// A layer's blob, and peers that have only wrong tars.
struct LyingPeers<'a> {
    layer: &'a OneBlob,
    /// Number of peers that are not yet distrusted.
    left: AtomicUsize,
    /// Whether wrong bytes never end the trust in a peer.
    is_forgetful: bool,
    asked: AtomicUsize,
    is_sent: AtomicBool,
}

impl BlobSource for LyingPeers<'_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        self.layer.blob(digest, size, range)
    }

    fn tar_part(
        &self,
        _blob: &Digest,
        _diff_id: &Digest,
        range: Range<u64>,
        _asked: AskedPeers,
    ) -> Option<PeerPart> {
        if self.left.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.is_sent.store(true, Ordering::Relaxed);
        let bytes = vec![7; usize::try_from(range.end - range.start).unwrap()];
        Some(PeerPart { bytes, host: "liar".to_owned() })
    }

    fn distrust_peer(&self, _blob: &Digest, host: &str) {
        assert_eq!(host, "liar");
        // Like the client of registries, this distrusts only a host that sent bytes.
        if self.is_sent.swap(false, Ordering::Relaxed) && !self.is_forgetful {
            self.left.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn distrust(&self, digest: &Digest) -> bool {
        panic!("the blob {digest} is not wrong, only its peers");
    }

    fn may_have_peers(&self, _blob: &Digest) -> bool {
        true
    }
}

/// Fills a device in spite of the peers. Returns the number of their wrong parts.
fn filled(stage: &Stage, peers: usize, is_forgetful: bool, is_completion: bool) -> usize {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let lazy = store(&folder.path().join("lazy"));
    let blobs = LyingPeers {
        layer: &stage.blob,
        left: AtomicUsize::new(peers),
        is_forgetful,
        asked: AtomicUsize::new(0),
        is_sent: AtomicBool::new(false),
    };
    let length = stage.index.head.device_bytes;
    let device = lazy.create_lazy_device(&stage.device(), length).unwrap();
    let filler = LayerFiller::new(stage.index.clone(), &blobs, device);
    if is_completion {
        complete(&filler, &parts(stage));
        assert!(filler.is_full());
    }
    filler.ensure(0..length, |_| ()).unwrap();
    let full = stage.folder.path().join("full/data").join(stage.device().to_string());
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    filler.device().read_at(&mut bytes, 0).unwrap();
    assert!(bytes == std::fs::read(full).unwrap());
    drop(filler);
    blobs.asked.load(Ordering::Relaxed)
}

#[test]
fn readers_get_right_bytes_in_spite_of_lying_peers() {
    let Some(stage) = Stage::new() else { return };
    for is_completion in [false, true] {
        assert_eq!(filled(&stage, 0, false, is_completion), 0);
        for peers in 1..=4 {
            assert!(filled(&stage, peers, false, is_completion) >= peers, "{peers}");
        }
        // More peers than tries.
        assert!(filled(&stage, 50, true, is_completion) > 0);
    }
}

/// Number of spans in a part.
const PART: usize = 4;

fn parts(stage: &Stage) -> Vec<Range<usize>> {
    let spans = stage.index.head.spans.len();
    (0..spans).step_by(PART).map(|it| it..(it + PART).min(spans)).collect()
}

/// Brings all parts, as often as a service does until a device is complete.
fn complete(filler: &LayerFiller<'_>, parts: &[Range<usize>]) {
    for _ in 0..3 {
        for part in parts {
            assert_ne!(filler.bring_part(part, false).unwrap(), PartOutcome::Later);
        }
    }
}

/// Stores that fill the same device, and the blob.
struct Swarm<'a> {
    layer: &'a OneBlob,
    head: &'a Head,
    others: Vec<&'a Store>,
}

impl BlobSource for Swarm<'_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        self.layer.blob(digest, size, range)
    }

    fn tar_part(
        &self,
        _blob: &Digest,
        _diff_id: &Digest,
        range: Range<u64>,
        _asked: AskedPeers,
    ) -> Option<PeerPart> {
        let bytes =
            self.others.iter().find_map(|it| it.lazy_tar_part(self.head, &range).unwrap())?;
        Some(PeerPart { bytes, host: "other".to_owned() })
    }

    fn may_have_peers(&self, _blob: &Digest) -> bool {
        true
    }
}

/// Five stores complete the same device in different orders. Each span of the blob is fetched once by one of them, and
/// spans at the edges of parts perhaps once more.
#[test]
fn stores_that_complete_the_same_device_share_the_blob() {
    let Some(stage) = Stage::new() else { return };
    let head = &stage.index.head;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let stores: Vec<_> =
        (0..5).map(|it| store(&folder.path().join(format!("store-{it}")))).collect();
    let swarms: Vec<_> = (0..5)
        .map(|own| {
            let others = stores.iter().enumerate().filter(|it| it.0 != own);
            Swarm { layer: &stage.blob, head, others: others.map(|it| it.1).collect() }
        })
        .collect();
    let fillers: Vec<_> = stores
        .iter()
        .zip(&swarms)
        .map(|(store, swarm)| {
            let device = store.create_lazy_device(&head.device, head.device_bytes).unwrap();
            LayerFiller::new(stage.index.clone(), swarm, device)
        })
        .collect();
    let parts = parts(&stage);
    assert!(parts.len() > 5, "{}", parts.len());
    let before = stage.blob.asked.load(Ordering::Relaxed);
    // In the second round, the units between the parts are fetched.
    for step in 0..2 * parts.len() {
        for (own, filler) in fillers.iter().enumerate() {
            // The order of a store is another one than that of the others.
            let stride = [1, parts.len() - 1][own % 2];
            let part = &parts[(step * stride + own * 2) % parts.len()];
            filler.bring_part(part, false).unwrap();
        }
    }
    assert!(fillers.iter().all(LayerFiller::is_full));
    let asked = stage.blob.asked.load(Ordering::Relaxed) - before;
    // A unit between two parts is in two spans.
    let between: u64 = parts[1..]
        .iter()
        .map(|it| head.packed(&(it.start - 1..it.start + 1)))
        .map(|it| it.end - it.start)
        .sum();
    let bytes = stage.blob.bytes.len() as u64;
    // Spans share bytes at their edges.
    let edges = 2 * head.spans.len() as u64;
    assert!(asked <= bytes + between + edges, "{asked} of {bytes}, between: {between}");
    let full = stage.folder.path().join("full/data").join(head.device.to_string());
    let full = std::fs::read(full).unwrap();
    for filler in fillers {
        let mut found = vec![0; usize::try_from(head.device_bytes).unwrap()];
        filler.device().read_at(&mut found, 0).unwrap();
        assert!(found == full);
    }
}

/// A store that has reached the place where a peer fetches bytes leaves them to the peer.
#[test]
fn parts_that_a_peer_probably_fetches_come_later() {
    let Some(stage) = Stage::new() else { return };
    let head = &stage.index.head;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [one, two] = ["one", "two"].map(|it| store(&folder.path().join(it)));
    let swarms = [&two, &one].map(|it| Swarm { layer: &stage.blob, head, others: vec![it] });
    let [first, second] = [(&one, &swarms[0]), (&two, &swarms[1])].map(|(store, swarm)| {
        let device = store.create_lazy_device(&head.device, head.device_bytes).unwrap();
        LayerFiller::new(stage.index.clone(), swarm, device)
    });
    let parts = parts(&stage);
    assert_eq!(first.bring_part(&parts[2], true).unwrap(), PartOutcome::Fetched);
    let asked = || stage.blob.asked.load(Ordering::Relaxed);
    let before = asked();
    // No peer has sent the part before it.
    assert_eq!(second.bring_part(&parts[2], true).unwrap(), PartOutcome::Fetched);
    assert_eq!(asked(), before, "it came from the blob");
    assert_eq!(second.bring_part(&parts[3], true).unwrap(), PartOutcome::Later);
    assert_eq!(asked(), before);
    assert_eq!(second.bring_part(&parts[3], false).unwrap(), PartOutcome::Fetched);
    assert!(asked() > before);
    // The beginning of the layer is far from the place of the peer.
    assert_eq!(second.bring_part(&parts[0], true).unwrap(), PartOutcome::Fetched);
    // Its last unit ends in the next part.
    assert_eq!(second.bring_part(&parts[0], true).unwrap(), PartOutcome::Fetched);
    assert_eq!(second.bring_part(&parts[0], true).unwrap(), PartOutcome::Present);
}

/// A peer that lies, and one that has all of the tar.
struct LiarAndHonest<'a> {
    layer: &'a OneBlob,
    tar: Vec<u8>,
    is_distrusted: AtomicBool,
}

impl BlobSource for LiarAndHonest<'_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        self.layer.blob(digest, size, range)
    }

    fn tar_part(
        &self,
        _blob: &Digest,
        _diff_id: &Digest,
        range: Range<u64>,
        _asked: AskedPeers,
    ) -> Option<PeerPart> {
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        let mut bytes = self.tar[start..end].to_vec();
        let is_honest = self.is_distrusted.load(Ordering::Relaxed);
        if !is_honest {
            *bytes.last_mut().unwrap() ^= 1;
        }
        Some(PeerPart { bytes, host: if is_honest { "honest" } else { "liar" }.to_owned() })
    }

    fn distrust_peer(&self, _blob: &Digest, host: &str) {
        assert_eq!(host, "liar");
        self.is_distrusted.store(true, Ordering::Relaxed);
    }

    fn distrust(&self, digest: &Digest) -> bool {
        panic!("the blob {digest} is not wrong, only a peer");
    }

    fn may_have_peers(&self, _blob: &Digest) -> bool {
        true
    }
}

/// Wrong bytes of one peer neither end the use of the others nor cost bytes of the blob.
#[test]
fn other_peers_are_asked_after_one_has_lied() {
    let Some(stage) = Stage::new() else { return };
    let length = stage.index.head.device_bytes;
    let full = stage.folder.path().join("full/data").join(stage.device().to_string());
    let tar = std::fs::read(full).unwrap();
    for is_completion in [false, true] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let lazy = store(&folder.path().join("lazy"));
        let is_distrusted = AtomicBool::new(false);
        let blobs = LiarAndHonest { layer: &stage.blob, tar: tar.clone(), is_distrusted };
        let device = lazy.create_lazy_device(&stage.device(), length).unwrap();
        let filler = LayerFiller::new(stage.index.clone(), &blobs, device);
        let before = stage.blob.asked.load(Ordering::Relaxed);
        if is_completion {
            complete(&filler, &parts(&stage));
        } else {
            filler.ensure(0..length, |_| ()).unwrap();
        }
        assert!(filler.is_full() && blobs.is_distrusted.load(Ordering::Relaxed));
        assert_eq!(stage.blob.asked.load(Ordering::Relaxed), before, "{is_completion}");
    }
}
