//! Names of the files in `lazy/`.

use image::digest::Digest;
use image::verity::{Algorithm, DeviceId};

use super::images::id_of;

/// A file of `lazy/`, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LazyDeviceFile {
    /// The device.
    Device(DeviceId),
    /// The record of its state. It is made before the device, and removed after it.
    State(DeviceId),
    /// The head of its index, without which the windows are nothing.
    Index(DeviceId),
    /// The windows of its index.
    Windows(DeviceId),
    /// The head of an index that came with the image of this manifest, which claims that it is right.
    ClaimedIndex(DeviceId, Digest),
    /// The windows of such an index.
    ClaimedWindows(DeviceId, Digest),
}

impl LazyDeviceFile {
    /// Whether it is removed before the other files of its device: a device before its state, a head before its windows.
    pub(crate) const fn goes_before_others(&self) -> bool {
        matches!(self, Self::Device(_) | Self::Index(_) | Self::ClaimedIndex(..))
    }

    /// The device that it belongs to.
    #[must_use]
    pub const fn device(&self) -> &DeviceId {
        match self {
            Self::Device(id)
            | Self::State(id)
            | Self::Index(id)
            | Self::Windows(id)
            | Self::ClaimedIndex(id, _)
            | Self::ClaimedWindows(id, _) => id,
        }
    }

    /// The head of the index that was made here, or that the image of a manifest claims.
    pub(crate) const fn index(device: DeviceId, claimed_by: Option<Digest>) -> Self {
        match claimed_by {
            Some(manifest) => Self::ClaimedIndex(device, manifest),
            None => Self::Index(device),
        }
    }

    /// The windows of the same.
    pub(crate) const fn windows(device: DeviceId, claimed_by: Option<Digest>) -> Self {
        match claimed_by {
            Some(manifest) => Self::ClaimedWindows(device, manifest),
            None => Self::Windows(device),
        }
    }

    /// Whose claim it is a part of.
    pub(super) const fn claimed_by(&self) -> Option<&Digest> {
        match self {
            Self::ClaimedIndex(_, manifest) | Self::ClaimedWindows(_, manifest) => Some(manifest),
            Self::Device(_) | Self::State(_) | Self::Index(_) | Self::Windows(_) => None,
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        let end = [STATE, INDEX, WINDOWS].into_iter().find(|it| name.ends_with(it));
        let name = name.strip_suffix(end.unwrap_or_default())?;
        let (name, claimed_by) = match name.split_once('.') {
            Some((name, manifest)) => (name, Some(Digest::from_file_name(manifest)?)),
            None => (name, None),
        };
        let id = id_of(name.as_bytes())?;
        let file = match (end, claimed_by) {
            (Some(INDEX), claimed_by) => Self::index(id, claimed_by),
            (Some(WINDOWS), claimed_by) => Self::windows(id, claimed_by),
            (Some(_), None) => Self::State(id),
            (None, None) => Self::Device(id),
            (_, Some(_)) => return None,
        };
        (id.algorithm() == Algorithm::Sha256).then_some(file)
    }

    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Device(_) => "lazy device",
            Self::State(_) => "state of a lazy device",
            Self::Index(_) | Self::ClaimedIndex(..) => "index of a lazy device",
            Self::Windows(_) | Self::ClaimedWindows(..) => "windows of a lazy device",
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
        }
    }
}

/// Ends the name of a state.
const STATE: &str = ".state";

/// Ends the name of a head.
const INDEX: &str = ".index";

/// Ends the name of windows.
const WINDOWS: &str = ".windows";
