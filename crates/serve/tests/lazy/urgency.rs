//! Requests that no reader waits for, which sources keep apart from the others.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Mutex;

use image::digest::Digest;
use oci::blobs::{BlobSource, Whole};
use quire_serve::lazy::{Cause, LayerFiller};

use super::{OneBlob, Stage, store};

/// The blob, and for each request whether it is one in the background.
struct Kinds<'a> {
    blob: &'a OneBlob,
    asked: Mutex<Vec<bool>>,
}

impl Kinds<'_> {
    fn fetch(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
        is_in_background: bool,
    ) -> io::Result<Vec<Vec<u8>>> {
        self.asked.lock().unwrap().push(is_in_background);
        self.blob.ranges(digest, size, ranges, whole)
    }
}

impl BlobSource for Kinds<'_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        self.blob.blob(digest, size, range)
    }

    fn ranges(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        self.fetch(digest, size, ranges, whole, false)
    }

    fn ranges_in_background(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        self.fetch(digest, size, ranges, whole, true)
    }
}

#[test]
fn only_readers_are_urgent() {
    let Some(stage) = Stage::new() else { return };
    let kinds = Kinds { blob: &stage.blob, asked: Mutex::default() };
    let (id, bytes) = (stage.device(), stage.index.head.device_bytes);
    let lazy = store(&stage.folder.path().join("urgency"));
    let device = lazy.create_lazy_device(&id, bytes).unwrap();
    let filler = LayerFiller::new(stage.index.clone(), &kinds, device);
    let asked = || std::mem::take(&mut *kinds.asked.lock().unwrap());
    filler.ensure(0..1, |_| ()).unwrap();
    assert_eq!(asked(), [false]);
    let last = stage.index.head.spans.len() - 1;
    for (at, cause) in [Cause::Stream, Cause::Trace, Cause::Completion].into_iter().enumerate() {
        let span = last - 2 * at..last - 2 * at + 1;
        assert!(filler.bring_ahead(span, cause).unwrap(), "{cause:?}");
        assert_eq!(asked(), [true], "{cause:?}");
    }
}
