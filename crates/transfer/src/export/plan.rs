//! Plans an export: selects the bytes for each layer of a manifest.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;

use serde_json::{Map, Value};
use store::{Blob, BytesError, OperationError, Store, VerifiedBytes};

use super::compress::{Compressed, Encoding, compress};
use super::{ExportError, Options};
use crate::progress::Event;
use crate::stored::{self, StoredImage};
use image::digest::Digest;
use oci::manifest::{Descriptor, Manifest, is_erofs_layer};

/// Compression of layers in an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// The compression of the manifest. Layers whose blobs are not in the store are compressed again, which gives
    /// other bytes.
    #[default]
    AsItWas,
    /// As in the manifest, except that uncompressed layers which the receiver lacks are compressed with gzip.
    Usual,
    /// Gzip, level 6.
    Gzip,
    /// zstd, level 3.
    Zstd,
    /// Without compression.
    None,
}

impl Compression {
    /// Whether a blob with this media type has the wanted compression. `is_plain`: the blob is the tar itself.
    #[cfg(feature = "registry")]
    pub(crate) fn admits(self, media_type: &str, is_plain: bool) -> bool {
        let is = if is_plain { None } else { encoding_by_name(media_type) };
        self.wanted().is_none_or(|wanted| wanted == is)
    }

    /// Returns the encoding for all layers, or `None` if each layer keeps its own.
    fn wanted(self) -> Option<Option<Encoding>> {
        match self {
            Self::AsItWas | Self::Usual => None,
            Self::None => Some(None),
            Self::Gzip => Some(Some(Encoding::Gzip)),
            Self::Zstd => Some(Some(Encoding::Zstd)),
        }
    }
}

/// The source of a layer's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// The receiver has the bytes already, so they are not read.
    There,
    /// The store kept the original blob.
    Kept,
    /// The bytes are the tar, which is rebuilt from its recipe.
    Plain,
    /// The tar was rebuilt and compressed, because neither the store nor the receiver has the original blob.
    Compressed,
    /// The tar was compressed for the first time.
    New,
}

/// An image to export: a manifest with its config and layers.
#[derive(Debug, Clone)]
pub struct ExportPlan {
    pub manifest: Vec<u8>,
    pub digest: Digest,
    /// Media type of the manifest.
    pub media_type: String,
    /// Whether this is the manifest in the store. Otherwise only the descriptors of layers differ.
    pub is_unchanged: bool,
    /// Descriptor of the config, which never changes.
    pub config: Descriptor,
    pub config_bytes: Vec<u8>,
    /// The layers, from the lowest to the uppermost.
    pub layers: Vec<PlannedLayer>,
}

#[derive(Debug, Clone)]
pub struct PlannedLayer {
    /// Descriptor of the layer in the plan's manifest.
    pub descriptor: Descriptor,
    pub diff_id: Digest,
    /// Source of the layer's bytes.
    pub how: How,
    /// The compressed layer, if it was compressed for this plan.
    file: Option<Arc<File>>,
}

impl PlannedLayer {
    /// Opens a reader of the layer's bytes. Several readers may be open at once.
    pub fn open<'s>(&self, store: &'s Store) -> Result<VerifiedBytes<'s>, ExportError> {
        let Descriptor { digest, size, .. } = &self.descriptor;
        let opened = match (&self.file, self.how) {
            (Some(file), _) => Ok(VerifiedBytes::of_file(Arc::clone(file), *digest, *size)),
            (None, How::Kept | How::There) => store.verified_blob(digest, *size),
            (None, How::Plain | How::Compressed | How::New) => store.layer_tar(&self.diff_id),
        };
        opened.map_err(|source| self.failed(source))
    }

    pub(super) fn failed(&self, source: BytesError) -> ExportError {
        ExportError::Layer { diff_id: self.diff_id, source: Box::new(source) }
    }
}

/// The decision for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    There,
    Kept,
    /// The tar, with its size in bytes.
    Plain(u64),
    /// A tar to compress, with its size in bytes.
    Anew(Encoding, u64),
}

/// Media type of manifests that do not state theirs. Source: OCI image-spec 1.1, `manifest.md`.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of layers that state none.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Prefix of the media types of Docker's layers.
const DOCKER: &str = "application/vnd.docker.";

/// Selects the bytes for each layer, and compresses layers where needed, in parallel and into unnamed files.
///
/// # Errors
/// An [`ExportError`]. Kept and plain layers are verified later, while they are read.
pub fn plan(
    store: &Store,
    digest: &Digest,
    compression: Compression,
    options: &Options<'_>,
) -> Result<ExportPlan, ExportError> {
    plan_for(store, digest, compression, &[], options)
}

/// Like [`plan`], for a receiver that has blobs of some layers already. The caller must know that each of these blobs
/// is the layer, because the plan's manifest names them.
pub fn plan_for(
    store: &Store,
    digest: &Digest,
    compression: Compression,
    there: &[Option<Blob>],
    options: &Options<'_>,
) -> Result<ExportPlan, ExportError> {
    let stored = StoredImage::load(store, digest)?;
    let Manifest { config, layers } = &stored.manifest;
    let diff_ids = stored.config.diff_ids();

    let mut choices = Vec::new();
    let there = |at: usize| there.get(at).and_then(Option::as_ref);
    for (at, (layer, diff_id)) in layers.iter().zip(diff_ids).enumerate() {
        choices.push(match there(at) {
            Some(_) => Choice::There,
            None => choose(store, layer, diff_id, compression)?,
        });
    }
    let sizes = choices.iter().enumerate().map(|(at, choice)| match choice {
        Choice::There => there(at).map(|it| it.size),
        Choice::Kept => Some(layers[at].size),
        Choice::Plain(size) | Choice::Anew(_, size) => Some(*size),
    });
    let sizes: Vec<_> = sizes.collect();
    (options.progress)(Event::Layers(&sizes));
    let made = compress_all(store, diff_ids, &choices, options)?;

    let mut manifest = stored.manifest_json()?;
    let media_type = manifest["mediaType"].as_str().filter(|it| !it.is_empty());
    let media_type = media_type.unwrap_or(MANIFEST).to_owned();
    let mut is_unchanged = true;
    for (at, layer) in layers.iter().enumerate() {
        let new = match (choices[at], &made[at]) {
            (Choice::Kept, _) => continue,
            (Choice::There, _) => {
                let Some(Blob { digest, size, media_type, .. }) = there(at) else { continue };
                let is_plain = *digest == diff_ids[at];
                let encoding = if is_plain { None } else { encoding_by_name(media_type) };
                (encoding, *digest, *size)
            }
            (Choice::Plain(size), _) => (None, diff_ids[at], size),
            (Choice::Anew(encoding, _), Some(made)) => (Some(encoding), made.digest, made.size),
            (Choice::Anew(..), None) => unreachable!("all layers to be compressed were"),
        };
        if new.1 == layer.digest {
            continue;
        }
        is_unchanged = false;
        let Some(entry) = manifest["layers"][at].as_object_mut() else {
            unreachable!("it was read as a descriptor")
        };
        describe(entry, &layer_type(&layer.media_type, &media_type, new.0)?, &new.1, new.2);
    }
    let manifest = if is_unchanged {
        stored.manifest_bytes.clone()
    } else {
        manifest.to_string().into_bytes()
    };
    let new_digest = if is_unchanged { *digest } else { Digest::sha256(&manifest) };
    let image = stored::image_of(&new_digest, &manifest)?;
    let was_plain: Vec<_> =
        layers.iter().zip(diff_ids).map(|(layer, diff_id)| layer.digest == *diff_id).collect();
    let layers = image.layers.into_iter().zip(diff_ids).zip(choices).zip(made).zip(was_plain);
    let layers = layers.map(|((((descriptor, diff_id), choice), made), was_plain)| PlannedLayer {
        descriptor,
        diff_id: *diff_id,
        how: match choice {
            Choice::There => How::There,
            Choice::Kept => How::Kept,
            Choice::Plain(_) => How::Plain,
            Choice::Anew(..) if was_plain => How::New,
            Choice::Anew(..) => How::Compressed,
        },
        file: made.map(|it| it.file),
    });
    let layers = layers.collect();
    Ok(ExportPlan {
        manifest,
        digest: new_digest,
        media_type,
        is_unchanged,
        config: config.clone(),
        config_bytes: stored.config_bytes,
        layers,
    })
}

/// Returns the architecture of an image, named as in Go; `None` if the config has none.
///
/// # Errors
/// An [`ExportError`] if the manifest or config cannot be read.
pub fn architecture(store: &Store, digest: &Digest) -> Result<Option<String>, ExportError> {
    let architecture = StoredImage::load(store, digest)?.config.architecture;
    Ok(Some(architecture).filter(|it| !it.is_empty()))
}

pub(super) fn choose(
    store: &Store,
    layer: &Descriptor,
    diff_id: &Digest,
    compression: Compression,
) -> Result<Choice, ExportError> {
    let failed = |source| ExportError::Layer { diff_id: *diff_id, source: Box::new(source) };
    let kept = store
        .downloads
        .blob(&layer.digest)
        .map_err(OperationError::of("open", "the blob"))
        .map_err(|error| failed(error.into()))?;
    let is_plain = layer.digest == *diff_id;
    let encoding = match &kept {
        Some((file, _)) => encoding_of(file).map_err(|error| failed(BytesError::from_io(error)))?,
        None => encoding_by_name(&layer.media_type),
    };
    let wanted = compression.wanted();
    let is = if is_plain { None } else { encoding };
    let fits = wanted.is_none_or(|wanted| wanted == is);
    if kept.is_some() && fits {
        return Ok(Choice::Kept);
    }
    let is_erofs = is_erofs_layer(&layer.media_type);
    if is_erofs && compression == Compression::Gzip {
        return Err(ExportError::ErofsGzip);
    }
    let usual = if is_erofs { Encoding::Zstd } else { Encoding::Gzip };
    let stored = store.layers.open(diff_id).map_err(|error| failed(BytesError::Layer(error)))?;
    let stored = stored.ok_or(ExportError::Absent(*diff_id))?;
    let size = stored.info().size;
    Ok(match wanted {
        None if is_plain && compression == Compression::Usual => Choice::Anew(usual, size),
        _ if is_plain && fits => Choice::Plain(size),
        Some(None) => Choice::Plain(size),
        Some(Some(encoding)) => Choice::Anew(encoding, size),
        // The media type may be wrong or missing. gzip is used then, because most layers are gzip.
        None => Choice::Anew(encoding.unwrap_or(usual), size),
    })
}

/// Detects the encoding of a blob by its first bytes. Sources: RFC 1952, RFC 8878.
pub(super) fn encoding_of(file: &File) -> io::Result<Option<Encoding>> {
    let mut first = Vec::new();
    file.take(4).read_to_end(&mut first)?;
    Ok(match &first[..] {
        [0x1f, 0x8b, ..] => Some(Encoding::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => Some(Encoding::Zstd),
        _ => None,
    })
}

fn encoding_by_name(media_type: &str) -> Option<Encoding> {
    match media_type.rsplit(['+', '.']).next() {
        Some("gzip") => Some(Encoding::Gzip),
        Some("zstd") => Some(Encoding::Zstd),
        _ => None,
    }
}

/// Returns the media type of a layer after its encoding changed.
fn layer_type(
    was: &str,
    manifest: &str,
    encoding: Option<Encoding>,
) -> Result<String, ExportError> {
    let was = if was.is_empty() && !manifest.starts_with(DOCKER) {
        LAYER
    } else if was.is_empty() {
        "application/vnd.docker.image.rootfs.diff.tar"
    } else {
        was
    };
    let suffixes = ["+gzip", "+zstd", ".gzip", ".zstd"];
    let base = suffixes.iter().find_map(|suffix| was.strip_suffix(suffix)).unwrap_or(was);
    let is_docker = base.starts_with(DOCKER);
    match (encoding, is_docker) {
        (None, _) => Ok(base.to_owned()),
        (Some(Encoding::Gzip), false) => Ok(format!("{base}+gzip")),
        (Some(Encoding::Zstd), false) => Ok(format!("{base}+zstd")),
        (Some(Encoding::Gzip), true) => Ok(format!("{base}.gzip")),
        // If the manifest already had a zstd layer of this kind, the new layer may use zstd as well.
        (Some(Encoding::Zstd), true) if was.ends_with("zstd") => Ok(was.to_owned()),
        (Some(Encoding::Zstd), true) => Err(ExportError::DockerZstd),
    }
}

/// Changes a descriptor to other bytes of the same layer, and removes fields that describe the old bytes.
fn describe(entry: &mut Map<String, Value>, media_type: &str, digest: &Digest, size: u64) {
    let text = |text: &str| Value::String(text.to_owned());
    entry.insert("mediaType".to_owned(), text(media_type));
    entry.insert("digest".to_owned(), text(&digest.to_string()));
    entry.insert("size".to_owned(), Value::from(size));
    // These are other download locations, and embedded bytes. Source: OCI image-spec 1.1, `descriptor.md`.
    for key in ["urls", "data"] {
        entry.shift_remove(key);
    }
    // Tables of contents, by which clients read parts of a blob. Sources: `docs/estargz.md` of stargz-snapshotter,
    // and `pkg/chunked/internal` of containers/storage.
    let of_the_blob = |key: &str| {
        key.starts_with("containerd.io/snapshot/stargz/toc.")
            || key == "io.containers.estargz.uncompressed-size"
            || key.starts_with("io.github.containers.zstd-chunked.")
    };
    if let Some(annotations) = entry.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.retain(|key, _| !of_the_blob(key));
    }
}

/// Compresses the layers that need it, each tar once.
fn compress_all(
    store: &Store,
    diff_ids: &[Digest],
    choices: &[Choice],
    options: &Options<'_>,
) -> Result<Vec<Option<Compressed>>, ExportError> {
    let first = |at: usize| {
        let same =
            |other: &usize| (diff_ids[*other], choices[*other]) == (diff_ids[at], choices[at]);
        (0..=at).find(same).unwrap_or(at)
    };
    let anew = |at: &usize| matches!(choices[*at], Choice::Anew(..)) && first(*at) == *at;
    let mut jobs: Vec<usize> = (0..choices.len()).filter(anew).collect();
    // The largest layers come first, so that the last job is short.
    jobs.sort_by_key(|at| match choices[*at] {
        Choice::Anew(_, size) | Choice::Plain(size) => std::cmp::Reverse(size),
        Choice::There | Choice::Kept => std::cmp::Reverse(0),
    });
    let made = options.each(jobs.len(), |job| {
        let layer = jobs[job];
        let Choice::Anew(encoding, _) = choices[layer] else {
            unreachable!("only such layers are jobs")
        };
        let diff_id = &diff_ids[layer];
        (options.progress)(Event::Started { layer });
        let tar = store.layer_tar(diff_id);
        let tar = tar
            .map_err(|source| ExportError::Layer { diff_id: *diff_id, source: Box::new(source) })?;
        let tell = |bytes| (options.progress)(Event::Read { layer, bytes });
        let made = compress(tar, diff_id, encoding, options, &tell)?;
        (options.progress)(Event::Done { layer });
        Ok(made)
    })?;
    let mut all: Vec<Option<Compressed>> = vec![None; choices.len()];
    for (job, made) in jobs.iter().zip(made) {
        all[*job] = Some(made);
    }
    for at in 0..choices.len() {
        if matches!(choices[at], Choice::Anew(..)) {
            all[at] = all[first(at)].clone();
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected types: OCI image-spec 1.1, `layer.md`; Docker's "Image Manifest Version 2, Schema 2".
    #[test]
    fn types_of_layers() {
        let (oci, docker) = (LAYER, "application/vnd.docker.image.rootfs.diff.tar");
        let schema2 = "application/vnd.docker.distribution.manifest.v2+json";
        let check = |was: &str, manifest: &str, encoding, expected: &str| {
            let found = layer_type(was, manifest, encoding);
            assert_eq!(found.unwrap_or_else(|error| error.to_string()), expected, "{was}");
        };
        let (gzip, zstd) = (Some(Encoding::Gzip), Some(Encoding::Zstd));
        for was in [oci.to_owned(), format!("{oci}+gzip"), format!("{oci}+zstd"), String::new()] {
            check(&was, MANIFEST, None, oci);
            check(&was, MANIFEST, gzip, &format!("{oci}+gzip"));
            check(&was, MANIFEST, zstd, &format!("{oci}+zstd"));
        }
        for was in [docker.to_owned(), format!("{docker}.gzip"), String::new()] {
            check(&was, schema2, None, docker);
            check(&was, schema2, gzip, &format!("{docker}.gzip"));
            check(
                &was,
                schema2,
                zstd,
                "manifests of Docker's schema 2 cannot name zstd layers: choose another --compression",
            );
        }
        let zstd_docker = format!("{docker}.zstd");
        check(&zstd_docker, schema2, zstd, &zstd_docker);
    }

    #[test]
    fn a_descriptor_loses_what_was_said_of_other_bytes() {
        let mut entry: Value = serde_json::from_str(
            r#"{"x":1,"size":3,"urls":["u"],"mediaType":"m","digest":"d","data":"aa",
                "annotations":{"a":"b","containerd.io/snapshot/stargz/toc.digest":"t",
                "io.github.containers.zstd-chunked.manifest-position":"1"},"y":[2]}"#,
        )
        .unwrap();
        let digest = Digest::sha256(b"");
        describe(entry.as_object_mut().unwrap(), "n", &digest, 4);
        let expected = format!(
            r#"{{"x":1,"size":4,"mediaType":"n","digest":"{digest}","annotations":{{"a":"b"}},"y":[2]}}"#
        );
        assert_eq!(entry.to_string(), expected);
    }
}
