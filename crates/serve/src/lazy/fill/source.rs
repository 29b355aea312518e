//! The source of a layer's bytes, and the image that it is used for.

use std::sync::Arc;

use image::digest::Digest;
use image::verity::DeviceId;
use oci::blobs::BlobSource;

/// The source of a layer's blob.
pub struct LayerSource<'a> {
    /// Returns bytes of the blob.
    pub blobs: Box<dyn BlobSource + 'a>,
    /// Manifest of the image that the bytes are fetched for. Failures of this source, or a wrong index, affect only
    /// this image.
    pub manifest: Option<Digest>,
    /// The host that is asked first, if any.
    pub host: Option<String>,
}

impl std::fmt::Debug for LayerSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { manifest, host, .. } = self;
        f.debug_struct("LayerSource")
            .field("manifest", manifest)
            .field("host", host)
            .finish_non_exhaustive()
    }
}

/// Identifies an image and a host, so that the readers of one image or one host cannot use up all threads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::lazy) struct SourceKey {
    pub(in crate::lazy) image: ImageKey,
    pub(in crate::lazy) host: Option<Arc<str>>,
}

/// Identifies an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::lazy) enum ImageKey {
    /// The image of this manifest.
    Manifest(Digest),
    /// An unknown image that has this device.
    Device(DeviceId),
}
