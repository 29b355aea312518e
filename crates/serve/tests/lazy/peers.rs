//! Peers that send wrong bytes of a layer's tar.

use std::io::Read;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use image::digest::Digest;
use oci::blobs::BlobSource;
use quire_serve::lazy::LayerFiller;

use super::{OneBlob, Stage, store};

/// A layer's blob, and peers that have only wrong tars.
struct LyingPeers<'a> {
    layer: &'a OneBlob,
    /// Number of peers that are not yet distrusted.
    left: AtomicUsize,
    /// Whether wrong bytes never end the trust in a peer.
    is_forgetful: bool,
    /// The result of `distrust`, if it is not whether peers or the registry are left.
    is_another_there: Option<bool>,
    asked: AtomicUsize,
    is_sent: AtomicBool,
}

impl BlobSource for LyingPeers<'_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        self.layer.blob(digest, size, range)
    }

    fn tar_part(&self, _blob: &Digest, _diff_id: &Digest, range: Range<u64>) -> Option<Vec<u8>> {
        if self.left.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.is_sent.store(true, Ordering::Relaxed);
        Some(vec![7; usize::try_from(range.end - range.start).unwrap()])
    }

    fn distrust(&self, _digest: &Digest) -> bool {
        // Like the client of registries, this distrusts only a host that sent bytes.
        let is_new = self.is_sent.swap(false, Ordering::Relaxed);
        if is_new && !self.is_forgetful {
            self.left.fetch_sub(1, Ordering::Relaxed);
        }
        self.is_another_there.unwrap_or(is_new)
    }
}

/// Fills a device in spite of the peers. Returns the number of their wrong parts.
fn filled(
    stage: &Stage,
    peers: usize,
    is_forgetful: bool,
    is_another_there: Option<bool>,
) -> usize {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let lazy = store(&folder.path().join("lazy"));
    let blobs = LyingPeers {
        layer: &stage.blob,
        left: AtomicUsize::new(peers),
        is_forgetful,
        is_another_there,
        asked: AtomicUsize::new(0),
        is_sent: AtomicBool::new(false),
    };
    let length = stage.index.head.device_bytes;
    let device = lazy.create_lazy_device(&stage.device(), length).unwrap();
    let filler = LayerFiller::new(stage.index.clone(), &blobs, device);
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
    assert_eq!(filled(&stage, 0, false, None), 0);
    for peers in 1..=4 {
        assert!(filled(&stage, peers, false, None) >= peers, "{peers}");
    }
    // More peers than tries, and peers that look like the registry.
    for is_another_there in [None, Some(true), Some(false)] {
        assert!(filled(&stage, 50, true, is_another_there) > 0);
    }
}
