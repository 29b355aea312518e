//! Finds layers of an image among the blobs of an OCI layout, so that an export into the layout compresses them once.
//!
//! A layout only claims that a blob is a certain layer. The blob is used if it decompresses to that layer, which takes
//! a fraction of the time that compressing takes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek as _};
use std::path::Path;

use serde_json::Value;
use store::{Blob, Store};

use super::compress::{Encoding, PIECE, copy};
use super::copy_error::CopyError;
use super::plan::{Choice, choose, encoding_of, plan_for};
use super::{Compression, ExportError, ExportPlan, Options};
use crate::stored::StoredImage;
use image::digest::Digest;
use oci::layout::Layout;
use oci::manifest::{CONFIG_MAX, Config, Descriptor, Document};

/// Like [`plan`](super::plan()), for the layout in `directory`, which may not exist yet.
///
/// # Errors
/// An [`ExportError`]. Errors of the layout only mean that its blobs are not used.
pub fn plan_for_layout(
    store: &Store,
    digest: &Digest,
    compression: Compression,
    directory: &Path,
    options: &Options<'_>,
) -> Result<ExportPlan, ExportError> {
    let there = match Layout::open(directory) {
        Ok(layout) => blobs(store, digest, compression, &layout, options)?,
        Err(_) => Vec::new(),
    };
    plan_for(store, digest, compression, &there, options)
}

/// Returns, for each layer that would be compressed, a blob of the layout that is this layer.
fn blobs(
    store: &Store,
    digest: &Digest,
    compression: Compression,
    layout: &Layout,
    options: &Options<'_>,
) -> Result<Vec<Option<Blob>>, ExportError> {
    let stored = StoredImage::load(store, digest)?;
    let claimed = claimed(layout);
    let layers: Vec<_> = stored.manifest.layers.iter().zip(stored.config.diff_ids()).collect();
    options.each(layers.len(), |at| {
        let (layer, diff_id) = layers[at];
        let Choice::Anew(encoding, size) = choose(store, layer, diff_id, compression)? else {
            return Ok(None);
        };
        // The original blob comes first, because it keeps the manifest as it is.
        let claims = claimed.get(diff_id).into_iter().flatten();
        for (digest, length) in [(layer.digest, layer.size)].iter().chain(claims) {
            let Ok(file) = layout.open_blob(digest, *length) else { continue };
            if is_layer(&file, digest, encoding, diff_id, size, options)? {
                return Ok(Some(Blob {
                    digest: *digest,
                    size: *length,
                    media_type: media_type(encoding).to_owned(),
                    is_hashed: true,
                    repositories: Vec::new(),
                }));
            }
        }
        Ok(None)
    })
}

/// The media type from which a plan reads the encoding.
const fn media_type(encoding: Encoding) -> &'static str {
    match encoding {
        Encoding::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
        Encoding::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
    }
}

/// Digests and sizes of blobs, by diff id.
type Claims = BTreeMap<Digest, Vec<(Digest, u64)>>;

/// Returns the blobs that the layout's manifests and configs claim to be layers.
fn claimed(layout: &Layout) -> Claims {
    let mut claimed = Claims::new();
    let index: Value = serde_json::from_slice(layout.index_bytes()).unwrap_or_default();
    for entry in index["manifests"].as_array().into_iter().flatten() {
        for (layer, diff_id) in layers_of(layout, entry).into_iter().flatten() {
            claimed.entry(diff_id).or_default().push((layer.digest, layer.size));
        }
    }
    claimed
}

/// Returns the layers of an entry of the index; `None` if the entry is not an image with all of its documents.
fn layers_of(layout: &Layout, entry: &Value) -> Option<Vec<(Descriptor, Digest)>> {
    let digest: Digest = entry["digest"].as_str()?.parse().ok()?;
    let manifest = document(layout, &digest, entry["size"].as_u64()?)?;
    let Document::Image(manifest) = Document::parse(&manifest).ok()? else { return None };
    let config = document(layout, &manifest.config.digest, manifest.config.size)?;
    let config = Config::parse(&config).ok()?;
    let diff_ids = config.diff_ids_of(manifest.layers.len()).ok()?.to_vec();
    Some(manifest.layers.into_iter().zip(diff_ids).collect())
}

fn document(layout: &Layout, digest: &Digest, size: u64) -> Option<Vec<u8>> {
    let file = layout.open_blob(digest, size).ok().filter(|_| size <= CONFIG_MAX)?;
    let mut bytes = Vec::new();
    file.take(size).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Whether the blob has its digest and this encoding, and decompresses to this layer, whose tar has `size` bytes.
fn is_layer(
    file: &File,
    blob: &Digest,
    encoding: Encoding,
    diff_id: &Digest,
    size: u64,
    options: &Options<'_>,
) -> Result<bool, ExportError> {
    let mut file = file;
    let is_encoded = matches!(encoding_of(file), Ok(Some(found)) if found == encoding);
    if !is_encoded || file.rewind().is_err() {
        return Ok(false);
    }
    if !has_digest(file, blob, u64::MAX, options)? || file.rewind().is_err() {
        return Ok(false);
    }
    // A blob that decompresses to more is not this layer.
    let most = size.saturating_add(1);
    match encoding {
        Encoding::Gzip => {
            let tar = flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(PIECE, file));
            has_digest(tar, diff_id, most, options)
        }
        Encoding::Zstd => match zstd::Decoder::new(file) {
            Ok(tar) => has_digest(tar, diff_id, most, options),
            Err(_) => Ok(false),
        },
    }
}

/// Whether at most `most` bytes have this digest. Damaged bytes have another one.
fn has_digest(
    mut from: impl Read,
    digest: &Digest,
    most: u64,
    options: &Options<'_>,
) -> Result<bool, ExportError> {
    let mut hasher = digest.hasher();
    let mut from = from.by_ref().take(most);
    match copy(&mut from, &mut hasher, options, &|_| {}) {
        Ok(()) => Ok(hasher.finish() == *digest),
        Err(CopyError::Cancelled) => Err(ExportError::Cancelled),
        Err(CopyError::Failed(error)) => Err(error.into()),
        Err(CopyError::Read(_) | CopyError::Write(_)) => Ok(false),
    }
}
