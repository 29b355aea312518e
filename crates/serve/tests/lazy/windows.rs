//! Windows that are fetched with the first data of their device.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use image::digest::Digest;
use oci::blobs::BlobSource;
use quire_serve::lazy::{FillError, LayerFiller};
use store::IndexWindows;
use transfer::lazy::LayerIndex;

use super::{OneBlob, Stage, store};

/// A layer, and the windows of its index.
struct TwoBlobs<'a> {
    layer: &'a OneBlob,
    windows: Vec<u8>,
    /// The number of requests for windows.
    asked: AtomicU64,
    /// The number of next requests for windows that get wrong bytes.
    lies: AtomicU64,
    /// Whether there is another source after a wrong one.
    has_other: bool,
}

impl BlobSource for TwoBlobs<'_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        if *digest != Digest::sha256(&self.windows) {
            return self.layer.blob(digest, size, range);
        }
        assert_eq!((size, range), (self.windows.len() as u64, 0..size));
        self.asked.fetch_add(1, Ordering::Relaxed);
        let mut bytes = self.windows.clone();
        let lie =
            self.lies.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |it| it.checked_sub(1));
        bytes[3] ^= u8::from(lie.is_ok());
        Box::new(io::Cursor::new(bytes))
    }

    fn distrust(&self, digest: &Digest) -> bool {
        assert_eq!(*digest, Digest::sha256(&self.windows));
        self.has_other
    }
}

/// Fills a device from an index without its windows. `lies` is the number of wrong responses. Returns the result, the
/// number of requests for windows, and the windows that were kept.
fn filled(stage: &Stage, lies: u64, has_other: bool) -> (Result<(), FillError>, u64, Vec<Vec<u8>>) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let lazy = store(&folder.path().join("lazy"));
    let windows = stage.index.windows.groups().unwrap().to_vec();
    let blobs = TwoBlobs {
        layer: &stage.blob,
        windows,
        asked: AtomicU64::new(0),
        lies: AtomicU64::new(lies),
        has_other,
    };
    let named = IndexWindows::Blob(Digest::sha256(&blobs.windows));
    let index = LayerIndex { windows: named, ..stage.index.clone() };
    let length = index.head.device_bytes;
    let device = lazy.create_lazy_device(&stage.device(), length).unwrap();
    let kept = Mutex::new(Vec::new());
    let keep = |groups: &Arc<Vec<u8>>| kept.lock().unwrap().push(groups.to_vec());
    let filler = LayerFiller::new(index, &blobs, device).with_windows_kept(keep);
    assert_eq!(blobs.asked.load(Ordering::Relaxed), 0, "nothing was read");
    let done = filler.ensure(0..length, |_| ());
    if done.is_ok() {
        let expected =
            std::fs::read(stage.folder.path().join("full/data").join(stage.device().to_string()));
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        filler.device().read_at(&mut bytes, 0).unwrap();
        assert!(bytes == expected.unwrap());
    }
    drop(filler);
    let asked = blobs.asked.load(Ordering::Relaxed);
    (done, asked, kept.into_inner().unwrap())
}

#[test]
fn windows_come_once_and_are_kept() {
    let Some(stage) = Stage::new() else { return };
    let windows = stage.index.windows.groups().unwrap().to_vec();
    let (done, asked, kept) = filled(&stage, 0, false);
    done.unwrap();
    assert_eq!((asked, kept), (1, vec![windows.clone()]));
    // The second source has the right windows.
    let (done, asked, kept) = filled(&stage, 1, true);
    done.unwrap();
    assert_eq!((asked, kept), (2, vec![windows.clone()]));
    // The third one has them.
    let (done, asked, kept) = filled(&stage, 2, true);
    done.unwrap();
    assert_eq!((asked, kept), (3, vec![windows]));
}

#[test]
fn wrong_windows_are_an_error_and_not_kept() {
    let Some(stage) = Stage::new() else { return };
    for (lies, has_other) in [(u64::MAX, false), (u64::MAX, true)] {
        let (done, asked, kept) = filled(&stage, lies, has_other);
        let error = testing::chain(&done.unwrap_err());
        assert!(error.contains("cannot fetch the windows of the index"), "{error}");
        assert!(error.contains("digest or length is wrong"), "{error}");
        assert_eq!(asked, if has_other { 8 } else { 1 }, "a failure is not repeated at once");
        assert!(kept.is_empty());
    }
}
