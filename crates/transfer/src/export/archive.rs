//! Writes archives for `docker load` and `podman load`. Source: Docker's `image/spec/v1.2.md`, "Combined Image JSON +
//! Filesystem Changeset Format". File names are those of `podman save` and `skopeo`, which all versions of both
//! programs accept.

use std::collections::BTreeSet;
use std::io::{self, Write};

use image::tar::Kind;
use image::tar::write::{Member, TarWriteError, Writer};
use image::tree::{Metadata, Timestamp};
use serde_json::json;
use store::{OperationError, RefName, Store};

use super::compress::copy;
use super::copy_error::CopyError;
use super::{Compression, ExportError, ExportPlan, Options, plan};
use crate::progress::Event;
use image::digest::Digest;
use oci::manifest::is_erofs_layer;

/// Result of writing an image into an archive.
#[derive(Debug, Clone)]
pub struct ArchiveReport {
    /// Digest of the config, which Docker uses as the image's id.
    pub config: Digest,
    /// Diff ids of the layers, from the lowest to the uppermost.
    pub layers: Vec<Digest>,
    /// Size of the whole archive, in bytes.
    pub bytes: u64,
}

/// A writer that counts the bytes written.
pub(super) struct Counted<W> {
    pub(super) out: W,
    pub(super) bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A writer that adds content to the archive's current member.
struct Content<'a, W>(&'a mut Writer<W>);

impl<W: Write> Write for Content<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.content(bytes).map(|()| bytes.len()).map_err(|error| match error {
            TarWriteError::Write(error) => error,
            other => io::Error::other(other),
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An image for an archive.
#[derive(Debug, Clone)]
pub struct ArchivedImage {
    pub manifest: Digest,
    /// Names in the archive; may be empty.
    pub names: Vec<RefName>,
}

/// Writes an archive of images: their configs, their uncompressed layers, each once, and their names. The same images
/// always give the same bytes.
///
/// # Errors
/// An [`ExportError`]; the output is incomplete then.
pub fn to_docker_archive(
    store: &Store,
    images: &[ArchivedImage],
    out: &mut dyn Write,
    options: &Options<'_>,
) -> Result<Vec<ArchiveReport>, ExportError> {
    let mut writer = Writer::new(Counted { out, bytes: 0 });
    let (mut layers, mut configs) = (BTreeSet::new(), BTreeSet::new());
    let (mut list, mut written) = (Vec::new(), Vec::new());
    for image in images {
        let plan = plan(store, &image.manifest, Compression::None, options)?;
        if plan.layers.iter().any(|it| is_erofs_layer(&it.descriptor.media_type)) {
            return Err(ExportError::ErofsArchive);
        }
        add_layers(store, &plan, &mut layers, &mut writer, options)?;
        let config = file_name(&plan.config.digest, ".json");
        if configs.insert(plan.config.digest) {
            add_document(&config, &plan.config_bytes, &mut writer)?;
        }
        let paths: Vec<_> = plan.layers.iter().map(|it| file_name(&it.diff_id, ".tar")).collect();
        let names: Vec<_> = image.names.iter().map(RefName::as_str).collect();
        list.push(json!({ "Config": config, "RepoTags": names, "Layers": paths }));
        let layers = plan.layers.iter().map(|it| it.diff_id).collect();
        written.push(ArchiveReport { config: plan.config.digest, layers, bytes: 0 });
    }
    let list = serde_json::Value::Array(list).to_string();
    add_document("manifest.json", list.as_bytes(), &mut writer)?;
    let mut counted = writer.finish().map_err(archive_failed)?;
    counted.flush().map_err(|error| archive_failed(TarWriteError::Write(error)))?;
    for report in &mut written {
        report.bytes = counted.bytes;
    }
    Ok(written)
}

/// Writes the layers of an image that are not in `there`.
fn add_layers(
    store: &Store,
    plan: &ExportPlan,
    there: &mut BTreeSet<Digest>,
    writer: &mut Writer<impl Write>,
    options: &Options<'_>,
) -> Result<(), ExportError> {
    for (number, layer) in plan.layers.iter().enumerate() {
        let done = || (options.progress)(Event::Done { layer: number });
        if !there.insert(layer.diff_id) {
            done();
            continue;
        }
        (options.progress)(Event::Started { layer: number });
        let mut tar = layer.open(store)?;
        let path = file_name(&layer.diff_id, ".tar");
        writer.member(&member(&path, tar.size())).map_err(archive_failed)?;
        let tell = |bytes| (options.progress)(Event::Read { layer: number, bytes });
        match copy(&mut tar, &mut Content(&mut *writer), options, &tell) {
            Ok(()) => done(),
            Err(CopyError::Cancelled) => return Err(ExportError::Cancelled),
            Err(CopyError::Failed(error)) => return Err(error.into()),
            Err(CopyError::Read(error)) => return Err(ExportError::layer(layer.diff_id, error)),
            Err(CopyError::Write(error)) => {
                return Err(archive_failed(TarWriteError::Write(error)).into());
            }
        }
    }
    Ok(())
}

fn add_document(
    path: &str,
    bytes: &[u8],
    writer: &mut Writer<impl Write>,
) -> Result<(), ExportError> {
    let member = member(path, bytes.len() as u64);
    let written = writer.member(&member).and_then(|()| writer.content(bytes));
    Ok(written.map_err(archive_failed)?)
}

pub(super) fn archive_failed(error: TarWriteError) -> OperationError {
    OperationError::of("write", "the archive")(error)
}

/// Returns the hexadecimal digits of a digest, followed by a suffix.
fn file_name(digest: &Digest, suffix: &str) -> String {
    let text = digest.to_string();
    let (_, hex) = text.split_once(':').unwrap_or_default();
    format!("{hex}{suffix}")
}

const fn member(path: &str, size: u64) -> Member<'_> {
    let mtime = Timestamp { seconds: 0, nanoseconds: 0 };
    Member {
        path: path.as_bytes(),
        kind: Kind::Regular,
        metadata: Metadata { permissions: 0o644, uid: 0, gid: 0, mtime },
        size,
        xattrs: &[],
    }
}
