//! Names of the files in `lazy/`.

use image::digest::Digest;
use image::verity::{Algorithm, DeviceId};

use super::images::id_of;

/// A file of `lazy/`, identified by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LazyDeviceFile {
    Device(DeviceId),
    /// Record of the device's state. It is created before the device and removed after it.
    State(DeviceId),
    /// Head of the device's index. The windows are useless without it.
    Index(DeviceId),
    /// Windows of the device's index.
    Windows(DeviceId),
    /// Head of an index that came with the image of this manifest. The manifest's publisher claims that the index is
    /// right.
    ClaimedIndex(DeviceId, Digest),
    /// Windows of such an index.
    ClaimedWindows(DeviceId, Digest),
    /// Digest of the windows of such an index, which are fetched when they are needed.
    WindowsDigest(DeviceId, Digest),
}

impl LazyDeviceFile {
    /// Whether this file is removed before other files of its device: a device before its state, and a head before
    /// its windows.
    pub(crate) const fn goes_before_others(&self) -> bool {
        matches!(self, Self::Device(_) | Self::Index(_) | Self::ClaimedIndex(..))
    }

    /// Kinds of files, those first that no other kind needs: devices, then heads and states, then windows.
    pub(crate) const NEEDED_LAST: [u8; 3] = [0, 1, 2];

    /// Whether a name is that of a file of this kind. Unknown names count as windows.
    pub(crate) fn is_of(name: &[u8], kind: u8) -> bool {
        let file = std::str::from_utf8(name).ok().and_then(Self::parse);
        kind == match file {
            Some(Self::Device(_)) => 0,
            Some(Self::Index(_) | Self::ClaimedIndex(..) | Self::State(_)) => 1,
            Some(Self::Windows(_) | Self::ClaimedWindows(..) | Self::WindowsDigest(..)) | None => 2,
        }
    }

    /// Returns the device that the file belongs to.
    #[must_use]
    pub const fn device(&self) -> &DeviceId {
        match self {
            Self::Device(id)
            | Self::State(id)
            | Self::Index(id)
            | Self::Windows(id)
            | Self::ClaimedIndex(id, _)
            | Self::ClaimedWindows(id, _)
            | Self::WindowsDigest(id, _) => id,
        }
    }

    /// Returns the head of the index that was made locally, or that came with the image of a manifest.
    pub(crate) const fn index(device: DeviceId, claimed_by: Option<Digest>) -> Self {
        match claimed_by {
            Some(manifest) => Self::ClaimedIndex(device, manifest),
            None => Self::Index(device),
        }
    }

    /// Returns the windows of the same index.
    pub(crate) const fn windows(device: DeviceId, claimed_by: Option<Digest>) -> Self {
        match claimed_by {
            Some(manifest) => Self::ClaimedWindows(device, manifest),
            None => Self::Windows(device),
        }
    }

    /// Returns the manifest with which an index came.
    pub(super) const fn claimed_by(&self) -> Option<&Digest> {
        match self {
            Self::ClaimedIndex(_, manifest)
            | Self::ClaimedWindows(_, manifest)
            | Self::WindowsDigest(_, manifest) => Some(manifest),
            Self::Device(_) | Self::State(_) | Self::Index(_) | Self::Windows(_) => None,
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        let ends = [STATE, INDEX, WINDOWS, WINDOWS_DIGEST];
        let end = ends.into_iter().find(|it| name.ends_with(it));
        let name = name.strip_suffix(end.unwrap_or_default())?;
        let (name, claimed_by) = match name.split_once('.') {
            Some((name, manifest)) => (name, Some(Digest::from_file_name(manifest)?)),
            None => (name, None),
        };
        let id = id_of(name.as_bytes())?;
        let file = match (end, claimed_by) {
            (Some(INDEX), claimed_by) => Self::index(id, claimed_by),
            (Some(WINDOWS), claimed_by) => Self::windows(id, claimed_by),
            (Some(WINDOWS_DIGEST), Some(manifest)) => Self::WindowsDigest(id, manifest),
            (Some(STATE), None) => Self::State(id),
            (None, None) => Self::Device(id),
            (Some(_), None) | (_, Some(_)) => return None,
        };
        (id.algorithm() == Algorithm::Sha256).then_some(file)
    }

    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Device(_) => "lazy device",
            Self::State(_) => "state of a lazy device",
            Self::Index(_) | Self::ClaimedIndex(..) => "index of a lazy device",
            Self::Windows(_) | Self::ClaimedWindows(..) | Self::WindowsDigest(..) => {
                "windows of a lazy device"
            }
        }
    }

    pub(crate) fn file_name(&self) -> String {
        match self {
            Self::Device(id) => id.to_string(),
            Self::State(id) => format!("{id}{STATE}"),
            Self::Index(id) => format!("{id}{INDEX}"),
            Self::Windows(id) => format!("{id}{WINDOWS}"),
            Self::ClaimedIndex(id, manifest) => format!("{id}.{}{INDEX}", manifest.file_name()),
            Self::ClaimedWindows(id, manifest) => format!("{id}.{}{WINDOWS}", manifest.file_name()),
            Self::WindowsDigest(id, manifest) => {
                format!("{id}.{}{WINDOWS_DIGEST}", manifest.file_name())
            }
        }
    }
}

/// Suffix of a state file.
const STATE: &str = ".state";

/// Suffix of the head of an index.
const INDEX: &str = ".index";

/// Suffix of the windows of an index.
const WINDOWS: &str = ".windows";

/// Suffix of the digest of windows.
const WINDOWS_DIGEST: &str = ".windows-digest";
