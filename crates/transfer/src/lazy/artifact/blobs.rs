//! Collects the blobs of an artifact while it is made.

use image::digest::Digest;

use super::{ArtifactBlob, RawDescriptor};

/// Blobs without duplicates.
#[derive(Default)]
pub(super) struct Blobs(pub(super) Vec<ArtifactBlob>);

impl Blobs {
    pub(super) fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> RawDescriptor {
        let digest = Digest::sha256(&bytes);
        let size = bytes.len() as u64;
        if self.0.iter().all(|it| it.digest != digest) {
            self.0.push(ArtifactBlob { digest, bytes });
        }
        RawDescriptor::new(media_type.to_owned(), digest, size)
    }
}
