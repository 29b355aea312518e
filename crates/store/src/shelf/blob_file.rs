//! Names of the files in `blobs/`.

use image::digest::Digest;
use image::verity::ImageId;

use super::images::id_of;

/// A file of `blobs/`, identified by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlobFile {
    Whole(Digest),
    /// The first bytes of a blob.
    Partial(Digest),
    /// The pin of the pull of this manifest.
    Pin(Digest),
    /// Table of the chunks of the layer with this diff id.
    Chunks(Digest),
    /// Origin and signatures of this manifest.
    Signatures(Digest),
    /// Signatures of this image, for its use without a manifest.
    ImageSignatures(ImageId),
    Origins(ImageId),
    Traces(ImageId),
    /// Hot pack of the index of this manifest.
    Hot(Digest),
    /// Name of the index for lazy loading that was kept with this manifest.
    Index(Digest),
    /// Start of the image of this manifest, as it was recorded here.
    Start(Digest),
    /// Mark that this image came with an index and has not been compared with its layers.
    Unproven(ImageId),
    /// Mark that a repair has removed data of this image.
    Lacking(ImageId),
}

impl BlobFile {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        if let Some(name) = name.strip_suffix(PARTIAL) {
            return Digest::from_file_name(name).map(Self::Partial);
        }
        if let Some(name) = name.strip_suffix(PULL) {
            return Digest::from_file_name(name).map(Self::Pin);
        }
        if let Some(name) = name.strip_suffix(CHUNKS) {
            return Digest::from_file_name(name).map(Self::Chunks);
        }
        if let Some(name) = name.strip_suffix(SIGNATURES) {
            let of_image = || id_of(name.as_bytes()).map(Self::ImageSignatures);
            return Digest::from_file_name(name).map(Self::Signatures).or_else(of_image);
        }
        if let Some(name) = name.strip_suffix(ORIGINS) {
            return id_of(name.as_bytes()).map(Self::Origins);
        }
        if let Some(name) = name.strip_suffix(TRACES) {
            return id_of(name.as_bytes()).map(Self::Traces);
        }
        if let Some(name) = name.strip_suffix(HOT) {
            return Digest::from_file_name(name).map(Self::Hot);
        }
        if let Some(name) = name.strip_suffix(INDEX) {
            return Digest::from_file_name(name).map(Self::Index);
        }
        if let Some(name) = name.strip_suffix(START) {
            return Digest::from_file_name(name).map(Self::Start);
        }
        if let Some(name) = name.strip_suffix(UNPROVEN) {
            return id_of(name.as_bytes()).map(Self::Unproven);
        }
        if let Some(name) = name.strip_suffix(LACKING) {
            return id_of(name.as_bytes()).map(Self::Lacking);
        }
        Digest::from_file_name(name).map(Self::Whole)
    }

    /// Returns a short name of the kind.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Whole(_) => "blob",
            Self::Partial(_) => "part of a blob",
            Self::Pin(_) => "unfinished pull",
            Self::Chunks(_) => "table of chunks",
            Self::Signatures(_) | Self::ImageSignatures(_) => "signatures",
            Self::Origins(_) => "record of origins",
            Self::Traces(_) => "record of traces",
            Self::Hot(_) => "hot pack",
            Self::Index(_) => "record of a kept index",
            Self::Start(_) => "record of a start",
            Self::Unproven(_) => "mark of an unproven image",
            Self::Lacking(_) => "mark of an image that lacks data",
        }
    }

    /// Returns the digest or id in the file's name.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Whole(digest)
            | Self::Partial(digest)
            | Self::Pin(digest)
            | Self::Chunks(digest)
            | Self::Signatures(digest)
            | Self::Hot(digest)
            | Self::Index(digest)
            | Self::Start(digest) => digest.to_string(),
            Self::ImageSignatures(image)
            | Self::Origins(image)
            | Self::Traces(image)
            | Self::Unproven(image)
            | Self::Lacking(image) => image.to_string(),
        }
    }

    pub(crate) fn file_name(&self) -> String {
        match self {
            Self::Whole(digest) => digest.file_name(),
            Self::Partial(digest) => digest.file_name() + PARTIAL,
            Self::Pin(digest) => digest.file_name() + PULL,
            Self::Chunks(diff_id) => diff_id.file_name() + CHUNKS,
            Self::Signatures(digest) => digest.file_name() + SIGNATURES,
            Self::ImageSignatures(image) => image.to_string() + SIGNATURES,
            Self::Origins(image) => image.to_string() + ORIGINS,
            Self::Traces(image) => image.to_string() + TRACES,
            Self::Hot(digest) => digest.file_name() + HOT,
            Self::Index(digest) => digest.file_name() + INDEX,
            Self::Start(digest) => digest.file_name() + START,
            Self::Unproven(image) => image.to_string() + UNPROVEN,
            Self::Lacking(image) => image.to_string() + LACKING,
        }
    }
}

const PARTIAL: &str = ".partial";

const PULL: &str = ".pull";

const CHUNKS: &str = ".chunks";

const SIGNATURES: &str = ".signatures";

const ORIGINS: &str = ".origins";

const TRACES: &str = ".traces";

const HOT: &str = ".hot";

const INDEX: &str = ".index";

const START: &str = ".start";

const UNPROVEN: &str = ".unproven";

const LACKING: &str = ".lacking";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_a_row_for_each_kind() {
        let document = include_str!("../../../../docs/format/object-store.md");
        for end in [
            PARTIAL, PULL, CHUNKS, SIGNATURES, ORIGINS, TRACES, HOT, INDEX, START, UNPROVEN,
            LACKING,
        ] {
            assert!(document.contains(&format!("{end}` | ")), "{end}");
        }
    }
}
