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
use super::{Compression, ExportError, Options, plan};
use crate::progress::Event;
use image::digest::Digest;
use oci::manifest::is_erofs_layer;

/// Result of writing an archive.
#[derive(Debug, Clone)]
pub struct ArchiveReport {
    /// Digest of the config, which Docker uses as the image's id.
    pub config: Digest,
    /// Diff ids of the layers, from the lowest to the uppermost.
    pub layers: Vec<Digest>,
    /// Size of the archive, in bytes.
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

/// Writes an archive of one image: its config, its uncompressed layers and its name. The same image always gives the
/// same bytes.
///
/// # Errors
/// An [`ExportError`]; the output is incomplete then.
pub fn to_docker_archive(
    store: &Store,
    manifest: &Digest,
    names: &[RefName],
    out: &mut dyn Write,
    options: &Options<'_>,
) -> Result<ArchiveReport, ExportError> {
    let plan = plan(store, manifest, Compression::None, options)?;
    if plan.layers.iter().any(|it| is_erofs_layer(&it.descriptor.media_type)) {
        return Err(ExportError::ErofsArchive);
    }
    let mut writer = Writer::new(Counted { out, bytes: 0 });
    let mut there = BTreeSet::new();
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
        match copy(&mut tar, &mut Content(&mut writer), options, &tell) {
            Ok(()) => done(),
            Err(CopyError::Cancelled) => return Err(ExportError::Cancelled),
            Err(CopyError::Failed(error)) => return Err(error.into()),
            Err(CopyError::Read(error)) => return Err(ExportError::layer(layer.diff_id, error)),
            Err(CopyError::Write(error)) => {
                return Err(archive_failed(TarWriteError::Write(error)).into());
            }
        }
    }
    let config_name = file_name(&plan.config.digest, ".json");
    let layers: Vec<_> = plan.layers.iter().map(|it| file_name(&it.diff_id, ".tar")).collect();
    let names: Vec<_> = names.iter().map(RefName::as_str).collect();
    let list = json!([{ "Config": config_name, "RepoTags": names, "Layers": layers }]);
    let list = list.to_string();
    for (name, bytes) in
        [(&*config_name, &plan.config_bytes[..]), ("manifest.json", list.as_bytes())]
    {
        let member = member(name, bytes.len() as u64);
        let written = writer.member(&member).and_then(|()| writer.content(bytes));
        written.map_err(archive_failed)?;
    }
    let mut counted = writer.finish().map_err(archive_failed)?;
    counted.flush().map_err(|error| archive_failed(TarWriteError::Write(error)))?;
    Ok(ArchiveReport {
        config: plan.config.digest,
        layers: plan.layers.iter().map(|it| it.diff_id).collect(),
        bytes: counted.bytes,
    })
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
