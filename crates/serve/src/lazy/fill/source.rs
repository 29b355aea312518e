//! Where the bytes of a layer come from, and for whose readers.

use std::sync::Arc;

use image::digest::Digest;
use image::verity::DeviceId;
use oci::blobs::BlobSource;

/// Where the bytes of a layer's blob come from.
pub struct LayerSource<'a> {
    /// Who has them.
    pub blobs: Box<dyn BlobSource + 'a>,
    /// The manifest of the image that they are asked for. What its source does, or its index, hurts no other image.
    pub manifest: Option<Digest>,
    /// The host that is asked first, if one is.
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

/// Whose bytes are asked of whom: readers of one image, and those of one host, do not take all threads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::lazy) struct SourceKey {
    pub(in crate::lazy) image: ImageKey,
    pub(in crate::lazy) host: Option<Arc<str>>,
}

/// An image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::lazy) enum ImageKey {
    /// That of this manifest.
    Manifest(Digest),
    /// Nobody said which; this device is of it.
    Device(DeviceId),
}
