//! Reads ranges of a layer's blob from a registry.

use std::io::{Cursor, Read};
use std::ops::Range;

use crate::chunked::Ranges;
use image::digest::Digest;
use oci::blobs::{BlobSource, FailingReader, Whole};
use oci::manifest::Descriptor;

/// Reads ranges of one blob.
pub(super) struct Parts<'a> {
    blobs: &'a dyn BlobSource,
    digest: Digest,
    size: u64,
}

impl<'a> Parts<'a> {
    pub(super) fn new(blobs: &'a dyn BlobSource, layer: &Descriptor) -> Self {
        Self { blobs, digest: layer.digest, size: layer.size }
    }
}

impl Ranges for Parts<'_> {
    fn read(&self, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        let length = range.end.saturating_sub(range.start);
        if length > RANGE_MAX {
            return self.blobs.blob(&self.digest, self.size, range);
        }
        match self.blobs.ranges(&self.digest, self.size, &[range], Whole::Read) {
            Ok(parts) => Box::new(Cursor::new(parts.concat())),
            Err(error) => Box::new(FailingReader::new(error)),
        }
    }
}

/// Ranges of at most this many bytes are fetched into memory before they are returned.
const RANGE_MAX: u64 = 4 << 20;
