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

/// Resources and rules of a service.
pub struct SnapshotSurroundings {
    /// The policies in force, asked at each root.
    pub policies: Box<dyn Fn() -> Result<Policies, String> + Send + Sync>,
    /// The time of day.
    pub now: Box<dyn Fn() -> Moment + Send + Sync>,
    /// The time of day in an hour, as RFC 3339 writes it: until then an engine keeps layers that it has not named yet.
    pub in_an_hour: Box<dyn Fn() -> String + Send + Sync>,
    /// Number of threads that make a layer.
    pub threads: NonZeroUsize,
    /// Directory for unnamed temporary files.
    pub scratch: PathBuf,
    /// Where programs are looked for, as `PATH` says.
    pub search: OsString,
    /// When the engine need not bring layers that the store has.
    pub skip: SkipLayers,
    /// Images that start before their layers are here; `None` for none.
    pub lazy: Option<LazyChoices>,
    /// When space is freed that the engine has dropped; `None` for never.
    pub collect: Option<CollectChoices>,
    /// How long the engine's content store may be silent: [`PATIENCE`](super::PATIENCE) but for tests.
    pub patience: Duration,
}

impl std::fmt::Debug for SnapshotSurroundings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("SnapshotSurroundings");
        debug
            .field("threads", &self.threads)
            .field("scratch", &self.scratch)
            .finish_non_exhaustive()
    }
}

/// What can be done with the root of a new snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotAccess {
    /// Containerd's `View`.
    Read,
    /// Containerd's `Prepare`.
    Write,
}

/// When space is freed that an engine has dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectChoices {
    /// Time from one collection to the next.
    pub apart: Duration,
    /// Percentage of the disk. With more of it in use, collections are a second apart.
    pub at_once_above: u8,
}

impl CollectChoices {
    /// Time from one collection to the next: a node that stops many containers has one.
    pub const APART: Duration = Duration::from_secs(10);
}

/// When an engine is told that it need not bring a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipLayers {
    /// Before it downloads the blob. It cannot push or export the image then.
    Download,
    /// When it has the blob: unpacking takes no time.
    Unpack,
    /// Never: each blob is read.
    Never,
}

/// Why an image cannot be had without its layers, or not be mounted.
pub type LazyError = Box<dyn std::error::Error + Send + Sync>;

/// What has images whose layers are not here: registries, and the service that fills devices.
pub trait LazyImages: Send + Sync {
    /// Brings an image without its layers, and gives it a name. `None` if no index says how to fill it, or none is trusted.
    ///
    /// # Errors
    /// Why it cannot be had.
    fn pull(
        &self,
        store: &Store,
        name: &RefName,
        reference: &Reference,
    ) -> Result<Option<ImageId>, LazyError>;

    /// Brings all layers of an image that is here without them, and gives it a name.
    ///
    /// # Errors
    /// Why they cannot be had.
    fn bring(&self, store: &Store, name: &RefName, lazy: &LazySnapshot) -> Result<(), LazyError>;

    /// Opens an image to mount it. What is missing is lent by the service that fills it.
    ///
    /// # Errors
    /// Why it cannot be mounted.
    fn open(&self, store: &Store, image: Permitted) -> Result<PermittedImage, LazyError>;

    /// Keeps credentials that an engine pulls an image with. Returns those that it had for the same repository.
    fn keep(&self, secret: &PullSecret) -> Option<PullSecret>;

    /// Goes back to those that it had: the registry has refused the new ones.
    fn restore(&self, image: &str, before: Option<PullSecret>);

    /// Has devices let go that nothing uses any more, so that they can be removed.
    fn release(&self, store: &Store);

    /// Ends what takes long.
    fn stop(&self);
}

/// Credentials that an engine pulls an image with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullSecret {
    /// The image, as its user gave it.
    pub image: String,
    /// The user's name.
    pub user: String,
    /// The password, or a personal token.
    pub password: Secret,
}

/// Images whose layers are not here, for an engine.
pub struct LazyChoices {
    /// Where they come from.
    pub images: Arc<dyn LazyImages>,
    /// Whether images are brought so. Without it, only those that are here already are used.
    pub starts: bool,
    /// Where kubelet finds the engine's image service, if its credentials are to be heard.
    pub image_service: Option<PathBuf>,
}

impl std::fmt::Debug for LazyChoices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LazyChoices").field("starts", &self.starts).finish_non_exhaustive()
    }
}
