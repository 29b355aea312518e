//! Resources and settings of a snapshotter.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use oci::policy::Policies;
use store::Moment;

use super::lazy::pull::EngineImages;

/// The resources and settings of a service.
pub struct SnapshotResources {
    /// Returns the policies in force. Called for each root.
    pub policies: Box<dyn Fn() -> Result<Policies, String> + Send + Sync>,
    /// Returns the current time.
    pub now: Box<dyn Fn() -> Moment + Send + Sync>,
    /// Returns the time in an hour in the format of RFC 3339. Until that time, an engine keeps layers that no image
    /// refers to yet.
    pub in_an_hour: Box<dyn Fn() -> String + Send + Sync>,
    /// Number of threads that make a layer.
    pub threads: NonZeroUsize,
    /// Directory for unnamed temporary files.
    pub scratch: PathBuf,
    /// Search path for programs, in the format of `PATH`.
    pub search: OsString,
    /// When the engine may skip layers that the store has.
    pub skip: SkipLayers,
    /// How images start before their layers are downloaded; `None` if they do not.
    pub lazy: Option<LazyChoices>,
    /// When dropped data is freed; `None` for never.
    pub collect: Option<CollectChoices>,
    /// Timeout of calls to the engine's content store: [`PATIENCE`](super::PATIENCE) except in tests.
    pub patience: Duration,
}

impl std::fmt::Debug for SnapshotResources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("SnapshotResources");
        debug
            .field("threads", &self.threads)
            .field("scratch", &self.scratch)
            .finish_non_exhaustive()
    }
}

/// The access to the root of a new snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotAccess {
    /// Read-only, as containerd's `View`.
    Read,
    /// Writable, as containerd's `Prepare`.
    Write,
}

/// When dropped data is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectChoices {
    /// Time between two collections.
    pub apart: Duration,
    /// Percentage of the disk. While more of it is in use, collections are one second apart.
    pub at_once_above: u8,
}

impl CollectChoices {
    /// Default time between two collections, so that a node that stops many containers runs only one.
    pub const APART: Duration = Duration::from_secs(10);
}

/// When an engine may skip a layer that the store has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipLayers {
    /// The engine skips the layer before it downloads the blob. It cannot push or export the image then.
    Download,
    /// After it has downloaded the blob, so that only unpacking is skipped.
    Unpack,
    /// Layers are never skipped: each blob is read.
    Never,
}

/// How images without their layers are used for an engine.
pub struct LazyChoices {
    /// The source of the images.
    pub images: Arc<EngineImages>,
    /// Whether new images are started this way. Otherwise, only existing ones are used.
    pub starts: bool,
    /// Socket of a proxy for the engine's image service, which reads kubelet's credentials; `None` for no proxy.
    pub image_service: Option<PathBuf>,
}

impl std::fmt::Debug for LazyChoices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LazyChoices").field("starts", &self.starts).finish_non_exhaustive()
    }
}
