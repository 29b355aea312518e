//! The reports of exports.

use serde::Serialize;
use transfer::export::{ExportPlan, How};

use crate::output::report::{self, Bytes, Seconds, count};

/// Report of `export --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ExportReport<T> {
    #[serde(flatten)]
    pub(super) exported: T,
    /// Image id.
    pub(super) image: String,
    /// Duration of the export.
    pub(super) seconds: Seconds,
}

impl ExportReport<Exported> {
    pub(super) fn text(&self) -> String {
        format!("{}\n{:.2} s", self.exported.text(), self.seconds.0)
    }
}

/// The report of a kind of output.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Exported {
    Layout(LayoutReport),
    Docker(DockerReport),
    Tar(TarReport),
    Erofs(ErofsReport),
    #[cfg(feature = "disk")]
    Disk(DiskReport),
    Extension(ExtensionReport),
}

impl Exported {
    fn text(&self) -> String {
        match self {
            Self::Layout(it) => it.text(),
            Self::Docker(it) => it.text(),
            Self::Tar(it) => it.text(),
            Self::Erofs(it) => it.text(),
            #[cfg(feature = "disk")]
            Self::Disk(it) => it.text(),
            Self::Extension(it) => it.text(),
        }
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct LayoutReport {
    /// Digest of the manifest in the layout.
    pub(super) manifest: String,
    /// Whether the manifest is the one that the image came with.
    pub(super) unchanged: bool,
    /// The layers, lowest first.
    pub(super) layers: Vec<LayerReport>,
    /// Number of blobs that were written.
    pub(super) blobs_added: usize,
    /// Size of the blobs that were written.
    pub(super) bytes_added: Bytes,
    /// Number of blobs that the layout had already.
    pub(super) blobs_reused: usize,
    /// Number of signatures of the image, in the store, that the layout has now.
    pub(super) signatures: usize,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct LayerReport {
    /// Digest of the uncompressed tar.
    pub(super) diff_id: String,
    /// Digest of the blob.
    pub(super) digest: String,
    /// Media type of the blob.
    pub(super) media_type: String,
    /// Size of the blob.
    pub(super) bytes: Bytes,
    /// `kept` (the original blob), `reused` (a blob that the layout had), `plain` (the tar), or `compressed` again.
    pub(super) from: &'static str,
}

impl LayoutReport {
    fn text(&self) -> String {
        let signed = match self.signatures {
            0 => String::new(),
            many => format!("; {}", count(many, "signature")),
        };
        format!(
            "manifest {}\n{}; {} added ({}), {} already in the layout{signed}",
            self.manifest,
            count(self.layers.len(), "layer"),
            count(self.blobs_added, "blob"),
            report::size(self.bytes_added.0),
            self.blobs_reused
        )
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DockerReport {
    /// Digest of the configuration, which Docker calls the image's id.
    pub(super) config: String,
    /// Names in the archive.
    pub(super) names: Vec<String>,
    /// Diff ids of the layers, lowest first.
    pub(super) layers: Vec<String>,
    /// Size of the archive.
    pub(super) bytes: Bytes,
}

impl DockerReport {
    fn text(&self) -> String {
        let names: String = self.names.iter().map(|it| format!("name  {it}\n")).collect();
        let (layers, size) = (count(self.layers.len(), "layer"), report::size(self.bytes.0));
        format!("image {}\n{names}{layers}, {size}", self.config)
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct TarReport {
    /// Number of entries in the tar.
    pub(super) entries: u64,
    /// Size of the tar.
    pub(super) bytes: Bytes,
    /// Paths of files that a tar cannot hold. Bytes other than printable ASCII are `\xHH`.
    pub(super) skipped: Vec<String>,
}

impl TarReport {
    fn text(&self) -> String {
        format!("{}, {}", count(self.entries, "entry"), report::size(self.bytes.0))
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ErofsReport {
    /// Number of inodes in the image.
    pub(super) inodes: u64,
    /// Size of the image.
    pub(super) bytes: Bytes,
    /// Number of files whose extended attributes were left out, because gVisor cannot read them.
    pub(super) without_xattrs: u64,
    /// Number of devices whose numbers were left out, because gVisor cannot read them.
    pub(super) without_numbers: u64,
}

impl ErofsReport {
    fn text(&self) -> String {
        format!("{}, {}", count(self.inodes, "inode"), report::size(self.bytes.0))
    }
}

#[cfg(feature = "disk")]
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DiskReport {
    /// Processor architecture of the disk, as OCI names it.
    pub(super) architecture: String,
    /// UUID of the root partition.
    pub(super) partition: String,
    /// Root hash of the dm-verity hash tree. Null without `--verity`.
    pub(super) root_hash: Option<String>,
    /// SHA-256 of the certificate of the root hash's signature. Null without `--private-key`.
    pub(super) certificate: Option<String>,
    /// Number of inodes in the image.
    pub(super) inodes: u64,
    /// Size of the image.
    pub(super) image_bytes: Bytes,
    /// Size of the disk.
    pub(super) bytes: Bytes,
}

#[cfg(feature = "disk")]
impl DiskReport {
    fn text(&self) -> String {
        let Self { architecture, partition, inodes, .. } = self;
        let (inodes, size) = (count(*inodes, "inode"), report::size(self.bytes.0));
        let root_hash = root_hash(self.root_hash.as_deref());
        format!("PARTUUID={partition} for {architecture}\n{root_hash}{inodes}, {size}")
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ExtensionReport {
    /// Name of the extension.
    pub(super) name: String,
    /// The `ID` of the hosts that take the extension, or `_any`.
    pub(super) id: String,
    /// The `SYSEXT_LEVEL` or `CONFEXT_LEVEL` of these hosts. Null if the extension states none.
    pub(super) level: Option<String>,
    /// The `VERSION_ID` of these hosts, which counts for those without a level. Null if the extension states none.
    pub(super) version: Option<String>,
    /// Root hash of the dm-verity hash tree. Null without `--verity`.
    pub(super) root_hash: Option<String>,
    /// SHA-256 of the certificate of the root hash's signature. Null without `--private-key`.
    pub(super) certificate: Option<String>,
    /// Number of inodes in the image.
    pub(super) inodes: u64,
    /// Size of the file.
    pub(super) bytes: Bytes,
}

impl ExtensionReport {
    fn text(&self) -> String {
        let Self { name, id, inodes, .. } = self;
        let level = self.level.as_ref().or(self.version.as_ref());
        let level = level.map_or_else(String::new, |it| format!(" {it}"));
        let (inodes, size) = (count(*inodes, "inode"), report::size(self.bytes.0));
        let root_hash = root_hash(self.root_hash.as_deref());
        format!("extension {name} for {id}{level}\n{root_hash}{inodes}, {size}")
    }
}

/// Returns a line with the root hash, if there is one.
fn root_hash(hash: Option<&str>) -> String {
    hash.map_or_else(String::new, |it| format!("root hash {it}\n"))
}

pub(super) fn layers(plan: &ExportPlan) -> Vec<LayerReport> {
    let layers = plan.layers.iter().map(|layer| LayerReport {
        diff_id: layer.diff_id.to_string(),
        digest: layer.descriptor.digest.to_string(),
        media_type: layer.descriptor.media_type.clone(),
        bytes: Bytes(layer.descriptor.size),
        from: match layer.how {
            How::There => "reused",
            How::Kept => "kept",
            How::Plain => "plain",
            How::Compressed | How::New => "compressed",
        },
    });
    layers.collect()
}
