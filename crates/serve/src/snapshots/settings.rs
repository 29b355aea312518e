//! Resources and settings of a snapshotter.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use image::verity::ImageId;
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::Secret;
use store::{LazySnapshot, Moment, Permitted, PermittedImage, RefName, Store};

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

/// Why an image cannot be used without its layers, or cannot be mounted.
pub type LazyError = Box<dyn std::error::Error + Send + Sync>;

/// A source of images without their layers: registries, and the service that fills devices.
pub trait LazyImages: Send + Sync {
    /// Pulls an image without its layers, and gives it a name. Returns `None` if it has no trusted index.
    ///
    /// # Errors
    /// If pulling fails.
    fn pull(
        &self,
        store: &Store,
        name: &RefName,
        reference: &Reference,
    ) -> Result<Option<ImageId>, LazyError>;

    /// Downloads all layers of an image that was pulled without them, and gives it a name.
    ///
    /// # Errors
    /// If downloading fails.
    fn bring(&self, store: &Store, name: &RefName, lazy: &LazySnapshot) -> Result<(), LazyError>;

    /// Opens an image for mounting. The service that fills its devices provides them.
    ///
    /// # Errors
    /// If the image cannot be mounted.
    fn open(&self, store: &Store, image: Permitted) -> Result<PermittedImage, LazyError>;

    /// Stores credentials with which an engine pulls an image. Returns the earlier credentials for the same
    /// repository.
    fn keep(&self, secret: &PullSecret) -> Option<PullSecret>;

    /// Restores the earlier credentials, because the registry has refused the new ones.
    fn restore(&self, image: &str, before: Option<PullSecret>);

    /// Makes the service release unused devices, so that they can be removed.
    fn release(&self, store: &Store);

    /// Ends running downloads.
    fn stop(&self);
}

/// Credentials that an engine pulls an image with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullSecret {
    /// Name of the image, as its user gave it.
    pub image: String,
    /// Name of the user.
    pub user: String,
    /// A password or a personal token.
    pub password: Secret,
}

/// How images without their layers are used for an engine.
pub struct LazyChoices {
    /// The source of the images.
    pub images: Arc<dyn LazyImages>,
    /// Whether new images are started without their layers. Otherwise, only existing ones are used in this way.
    pub starts: bool,
    /// Socket of a proxy for the engine's image service, which reads kubelet's credentials; `None` for no proxy.
    pub image_service: Option<PathBuf>,
}

impl std::fmt::Debug for LazyChoices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LazyChoices").field("starts", &self.starts).finish_non_exhaustive()
    }
}
