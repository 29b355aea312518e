//! Pulls and opens images that container engines start before their layers are downloaded.

use std::fmt;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use container::store_ownership::check_lazy;
use image::digest::Digest;
use image::lazy::hot::READ_AHEAD;
use image::verity::{DeviceId, ImageId};
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::{Credential, Keyring, Registry, Secret, Settings};
use rustix::fs::FlockOperation;
use store::{LazySnapshot, LendDevices, Permitted, PermittedImage, Presence, RefName, Store};
use transfer::import::{self, Completed, ImportContext, ImportOptions};
use transfer::lazy::TrustIndex;
use transfer::pull::{
    Indexes, Layers, LazyPullError, LazyPulled, PullSettings, Syncs, UseTables, pull, pull_lazy,
};

use crate::lazy::{Brought, ImportResources, LazyService, Starter, StoreBlobs, folder_of};

/// Why an image cannot be used without its layers, or cannot be mounted.
pub type LazyError = Box<dyn std::error::Error + Send + Sync>;

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

/// Returns the settings of registries. Transfers end when the flag is set.
pub type RegistrySettings = dyn Fn(&Arc<AtomicBool>) -> Result<Settings, LazyError> + Send + Sync;

/// Settings for images of an engine.
pub struct EngineChoices {
    /// Returns the policies in force. Called for each pull.
    pub policies: Box<dyn Fn() -> Result<Policies, LazyError> + Send + Sync>,
    /// Returns the settings of registries. Called for each pull, which ends when the flag is set.
    pub registries: Box<RegistrySettings>,
    /// Whether the administrator has configured a file with credentials, which has precedence over kubelet's.
    pub has_credentials: bool,
    /// Which indexes are trusted.
    pub trust: TrustIndex,
    /// How the lazy service is started.
    pub starter: Starter,
    /// Resources for imports.
    pub resources: ImportResources,
}

impl fmt::Debug for EngineChoices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineChoices").field("trust", &self.trust).finish_non_exhaustive()
    }
}

/// The source of an engine's images without their layers.
pub struct EngineImages {
    choices: EngineChoices,
    /// Set when the service ends.
    cancel: Arc<AtomicBool>,
    /// Path of the file with kubelet's credentials.
    secrets: Option<PathBuf>,
    /// Downloads layers instead of a pull; `None` except in tests.
    download: Option<Box<DownloadLayers>>,
}

/// Downloads the layers of an image.
type DownloadLayers = dyn Fn(&LazySnapshot) -> Result<(), LazyError> + Send + Sync;

/// Why an image cannot be used without its layers.
#[derive(Debug, thiserror::Error)]
enum EngineImageError {
    #[error("the store does not have its origin")]
    UnknownOrigin,
    #[error(
        "its index is wrong, or was made with other options: its layers make image {0}. Remove \
        the image from the engine, and pull it again"
    )]
    WrongIndex(ImageId),
    #[error("cannot examine the store's directory")]
    Directory,
    #[error("cannot lock {}", path.display())]
    Lock { path: PathBuf, source: io::Error },
}

impl fmt::Debug for EngineImages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineImages").field("trust", &self.choices.trust).finish_non_exhaustive()
    }
}

impl EngineImages {
    /// Creates the source for a store.
    #[must_use]
    pub fn new(store: &Store, choices: EngineChoices) -> Self {
        Self { choices, cancel: Arc::default(), secrets: pull_secrets(store), download: None }
    }

    /// Replaces the download of all layers of an image.
    #[must_use]
    pub fn with_download(
        self,
        download: impl Fn(&LazySnapshot) -> Result<(), LazyError> + Send + Sync + 'static,
    ) -> Self {
        Self { download: Some(Box::new(download)), ..self }
    }

    fn policies(&self) -> Result<Policies, LazyError> {
        (self.choices.policies)()
    }

    fn registry(&self, store: &Store, reference: &Reference) -> Result<Registry, LazyError> {
        let settings = self.settings(store)?;
        Ok(Registry::new(reference, &settings)?)
    }

    fn settings(&self, store: &Store) -> Result<Settings, LazyError> {
        let settings = (self.choices.registries)(&self.cancel)?;
        Ok(with_pull_secrets(settings, store, self.choices.has_credentials))
    }

    /// Calls `work` with the resources of an import.
    fn import<T>(&self, work: impl FnOnce(&ImportContext<'_>) -> T) -> T {
        work(&self.choices.resources.until(&self.cancel))
    }

    /// Changes the credentials for the repository of an image.
    fn change<T>(
        &self,
        image: &str,
        change: impl FnOnce(&Keyring, &Reference) -> Result<T, LazyError>,
    ) -> Option<T> {
        let changed = image.parse().map_err(LazyError::from).and_then(|reference: Reference| {
            let path = self.secrets.as_ref().ok_or(EngineImageError::Directory)?;
            change_secrets(path, |keyring| change(keyring, &reference))
        });
        let failed = |error: &LazyError| {
            let error: &dyn std::error::Error = &**error;
            tracing::warn!(image = %image.escape_debug(), error, "cannot store the credentials for an image");
        };
        changed.inspect_err(failed).ok()
    }

    /// Pulls an image without its layers, and gives it a name. Returns `None` if it has no trusted index.
    ///
    /// # Errors
    /// If pulling fails.
    pub(in crate::snapshots) fn pull(
        &self,
        store: &Store,
        name: &RefName,
        reference: &Reference,
    ) -> Result<Option<ImageId>, LazyError> {
        check_lazy(store)?;
        let (policies, registry) = (self.policies()?, self.registry(store, reference)?);
        let import = ImportOptions { name: Some(name), ..ImportOptions::default() };
        let options = PullSettings {
            import,
            layers: Layers::Forget,
            indexes: Indexes::Forget,
            policies: &policies,
            syncs: Syncs::AtOnce,
        };
        let pulled = self.import(|environment| {
            let trust = (self.choices.trust, UseTables::Never);
            pull_lazy(store, &registry, reference, environment, &options, name, trust)
        });
        match pulled {
            Ok(LazyPulled::Image { image, .. } | LazyPulled::UpToDate { image, .. }) => {
                Ok(Some(image))
            }
            Err(
                error @ (LazyPullError::Index(_)
                | LazyPullError::Tables { .. }
                | LazyPullError::Contradiction { .. }),
            ) => {
                let error: &dyn std::error::Error = &error;
                tracing::info!(%reference, error, "the engine downloads the layers");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Downloads all layers of an image that was pulled without them, and gives it a name.
    ///
    /// # Errors
    /// If downloading fails.
    pub(in crate::snapshots) fn bring(
        &self,
        store: &Store,
        name: &RefName,
        lazy: &LazySnapshot,
    ) -> Result<(), LazyError> {
        if let Some(download) = &self.download {
            return download(lazy);
        }
        let policies = self.policies()?;
        let import = ImportOptions { name: Some(name), ..ImportOptions::default() };
        let options = PullSettings {
            import,
            layers: Layers::Forget,
            indexes: Indexes::Forget,
            policies: &policies,
            syncs: Syncs::AtOnce,
        };
        let sources = transfer::lazy::sources(store, &lazy.image)?;
        let from = |it: &Reference| it.digest() == Some(&lazy.manifest);
        let mut failed = LazyError::from(EngineImageError::UnknownOrigin);
        for reference in sources.iter().filter(|it| from(it)) {
            let pulled = self.registry(store, reference).and_then(|registry| {
                let pulled =
                    self.import(|it| pull(store, &registry, reference, it, &options).map(drop));
                Ok(pulled?)
            });
            match pulled {
                Ok(()) => return Ok(()),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// Opens an image for mounting. The service that fills its devices provides them.
    ///
    /// # Errors
    /// If the image cannot be mounted.
    pub(in crate::snapshots) fn open(
        &self,
        store: &Store,
        image: Permitted,
    ) -> Result<PermittedImage, LazyError> {
        self.prove(store, &image)?;
        let manifest = image.found().manifest;
        let lender = Lender { images: self, store, manifest };
        let mut opened = image.open_lazy(store, &lender)?;
        if opened.image().presence == Presence::Partial {
            match lender.service()?.bring(&opened.image().id, None) {
                Ok(Brought::HotPack) => opened.set_read_ahead(READ_AHEAD),
                Ok(Brought::Trace | Brought::Nothing) => {}
                // The image works without prefetching.
                Err(error) => tracing::warn!(%error, "not prefetching"),
            }
        }
        Ok(opened)
    }

    /// Stores credentials that an engine pulls an image with. Returns the earlier ones for the same repository.
    pub(in crate::snapshots) fn keep(&self, secret: &PullSecret) -> Option<PullSecret> {
        let changed = self.change(&secret.image, |keyring, reference| {
            let before = keyring.find_credential(reference.registry(), reference.repository())?;
            let before = before.and_then(|it| match it {
                Credential::Password { user, password } => {
                    Some(PullSecret { image: secret.image.clone(), user, password })
                }
                Credential::Identity(_) | Credential::Bearer(_) => None,
            });
            if before.as_ref() != Some(secret) {
                keyring.save(&reference.name(), &secret.user, &secret.password)?;
            }
            Ok(before)
        });
        changed.flatten()
    }

    /// Restores the earlier credentials, because the registry has refused the new ones.
    pub(in crate::snapshots) fn restore(&self, image: &str, before: Option<PullSecret>) {
        self.change(image, |keyring, reference| {
            match before {
                Some(it) => drop(keyring.save(&reference.name(), &it.user, &it.password)?),
                None => drop(keyring.erase(&reference.name())?),
            }
            Ok(())
        });
    }

    /// Ends running downloads.
    pub(in crate::snapshots) fn stop(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    /// Verifies an image against its layers, if those were downloaded in another way in the meantime.
    fn prove(&self, store: &Store, image: &Permitted) -> Result<(), LazyError> {
        let found = image.found();
        if !matches!(
            store.presence_of(&found.image, found.manifest.as_ref()),
            Ok(Presence::Unproven)
        ) {
            return Ok(());
        }
        let blobs = StoreBlobs::new(store, self.settings(store)?);
        let manifest = found.manifest.as_ref();
        if let Some(manifest) = manifest
            && let Err(error) = blobs.know_layers(&found.image, manifest)
        {
            tracing::debug!(%manifest, error = &*error, "cannot determine the locations of layers");
        }
        let blobs = blobs.for_manifest(found.manifest);
        let proven = self.import(|it| import::prove(store, &found.image, manifest, &blobs, it));
        match proven? {
            Completed::Same | Completed::NotYet => Ok(()),
            Completed::Other(right) => Err(EngineImageError::WrongIndex(right).into()),
        }
    }
}

/// Requests devices from the lazy service, and starts it if necessary.
struct Lender<'a> {
    images: &'a EngineImages,
    store: &'a Store,
    /// Manifest of the image.
    manifest: Option<Digest>,
}

impl Lender<'_> {
    fn service(&self) -> Result<LazyService, LazyError> {
        let folder = folder_of(self.store.path())?;
        let service = self.images.choices.starter.service(&folder)?;
        Ok(service.with_manifest(self.manifest))
    }
}

impl LendDevices for Lender<'_> {
    fn lend(&self, device: &DeviceId) -> Result<std::fs::File, LazyError> {
        Ok(self.service()?.lend(device)?)
    }
}

/// Returns the path of kubelet's credentials for a store. The file is in memory, like all of `/run`, and only root
/// can read it.
fn pull_secrets(store: &Store) -> Option<PathBuf> {
    Some(folder_of(store.path()).ok()?.with_extension("secrets"))
}

/// Adds kubelet's credentials to settings. Only a file that the administrator has configured has precedence.
#[must_use]
pub fn with_pull_secrets(mut settings: Settings, store: &Store, has_named: bool) -> Settings {
    let named = usize::from(has_named);
    settings.keyring.files.splice(named..named, pull_secrets(store));
    settings
}

/// Changes a store's file of pull credentials, under a lock that all processes take.
fn change_secrets<T>(
    path: &Path,
    change: impl FnOnce(&Keyring) -> Result<T, LazyError>,
) -> Result<T, LazyError> {
    let failed = |source| EngineImageError::Lock { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        // With the same mode as the lazy service uses.
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    }
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600);
    let lock = options.open(path.with_extension("secrets-lock")).map_err(failed)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|it| failed(it.into()))?;
    change(&Keyring { files: vec![path.to_owned()], ..Keyring::default() })
}
