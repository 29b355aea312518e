//! Images that container engines start before their layers are here.

use std::fmt;
use std::fs::{DirBuilder, File};
use std::num::NonZeroUsize;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use container::life::monitor::Watch as _;
use container::owner::check_lazy;
use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::{Credential, Keyring, Registry, Settings};
use rustix::fs::FlockOperation;
use serve::lazy::{LazyService, LazyWatch, folder_of};
use serve::snapshots::{LazyError, LazyImages, PullSecret};
use store::{LazySnapshot, LendDevices, Permitted, PermittedImage, Presence, RefName, Store};
use transfer::import::{self, BUDGET, Completed, ImportSurroundings, ImportWishes};
use transfer::lazy::TrustIndex;
use transfer::pull::{Layers, LazyPullError, LazyPulled, PullWishes, pull, pull_lazy};

use super::{StoreBlobs, lock, start};
use crate::args::RegistryOptions;
use crate::context::{Context, now};
use crate::pull::{pauses, settings};

/// What an engine's snapshotter does with images whose layers are not here.
pub(crate) struct EngineImages {
    context: Context,
    registry: RegistryOptions,
    trust: TrustIndex,
    /// Set when the service ends.
    cancel: Arc<AtomicBool>,
    /// Where credentials are.
    secrets: Option<PathBuf>,
    watches: Watches,
}

impl fmt::Debug for EngineImages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineImages").field("trust", &self.trust).finish_non_exhaustive()
    }
}

impl EngineImages {
    /// `store` may have roots mounted already, of a service before this one.
    pub(crate) fn new(
        context: &Context,
        store: &Store,
        registry: &RegistryOptions,
        trust: TrustIndex,
    ) -> Self {
        let this = Self {
            context: context.clone(),
            registry: registry.clone(),
            trust,
            cancel: Arc::default(),
            secrets: pull_secrets(store),
            watches: Watches::default(),
        };
        let running = folder_of(store.path()).map(|folder| {
            let service = LazyService::connect(&folder)?;
            service
                .map_or(Ok(None), |it| it.watch(&folder).map(Some).map_err(std::io::Error::other))
        });
        match running {
            Ok(Ok(Some(watch))) => this.watches.add(watch),
            Ok(Ok(None)) => {}
            Ok(Err(error)) | Err(error) => {
                tracing::debug!(%error, "the service for lazy devices is not watched yet");
            }
        }
        this
    }

    fn policies(&self) -> anyhow::Result<Policies> {
        crate::policy::policies(&self.context)
    }

    fn registry(&self, store: &Store, reference: &Reference) -> anyhow::Result<Registry> {
        let settings = self.settings(store)?;
        Ok(Registry::new(reference, &settings)?)
    }

    fn settings(&self, store: &Store) -> anyhow::Result<Settings> {
        let (who, pauses) = (self.context.who(), pauses(&self.context));
        let settings = settings(who, &self.registry, &self.cancel, pauses)?;
        Ok(with_pull_secrets(settings, store, &self.registry))
    }

    /// Does `work` with the resources of an import.
    fn import<T>(&self, work: impl FnOnce(&ImportSurroundings<'_>) -> T) -> T {
        work(&ImportSurroundings {
            now: now(),
            threads: thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            budget: BUDGET,
            scratch: &std::env::temp_dir(),
            progress: &|_| {},
            cancel: &self.cancel,
        })
    }

    /// Changes the credentials for the repository of an image.
    fn change<T>(
        &self,
        image: &str,
        change: impl FnOnce(&Keyring, &Reference) -> anyhow::Result<T>,
    ) -> Option<T> {
        let changed =
            image.parse().map_err(anyhow::Error::from).and_then(|reference: Reference| {
                let path =
                    self.secrets.as_ref().context("the store's directory cannot be looked at")?;
                change_secrets(path, |keyring| change(keyring, &reference))
            });
        let failed = |error: &anyhow::Error| {
            let error: &dyn std::error::Error = &**error;
            tracing::warn!(image = %image.escape_debug(), error, "its credentials are not kept");
        };
        changed.inspect_err(failed).ok()
    }

    fn pull_lazy(
        &self,
        store: &Store,
        name: &RefName,
        reference: &Reference,
    ) -> anyhow::Result<Option<ImageId>> {
        check_lazy(store)?;
        let (policies, registry) = (self.policies()?, self.registry(store, reference)?);
        let import = ImportWishes { name: Some(name), ..ImportWishes::default() };
        let wishes = PullWishes { import, layers: Layers::Forget, policies: &policies };
        let pulled = self.import(|surroundings| {
            pull_lazy(store, &registry, reference, surroundings, &wishes, (name, self.trust))
        });
        match pulled {
            Ok(LazyPulled::Image { image, .. } | LazyPulled::UpToDate { image, .. }) => {
                Ok(Some(image))
            }
            Err(error @ (LazyPullError::Index(_) | LazyPullError::Contradiction { .. })) => {
                let error: &dyn std::error::Error = &error;
                tracing::info!(%reference, error, "the engine brings its layers");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn pull_whole(&self, store: &Store, name: &RefName, lazy: &LazySnapshot) -> anyhow::Result<()> {
        let policies = self.policies()?;
        let import = ImportWishes { name: Some(name), ..ImportWishes::default() };
        let wishes = PullWishes { import, layers: Layers::Forget, policies: &policies };
        let sources = transfer::lazy::sources(store, &lazy.image)?;
        let from = |it: &Reference| it.digest() == Some(&lazy.manifest);
        let mut failed = anyhow::anyhow!("the store does not know where it is from");
        for reference in sources.iter().filter(|it| from(it)) {
            let pulled = self.registry(store, reference).and_then(|registry| {
                let pulled =
                    self.import(|it| pull(store, &registry, reference, it, &wishes).map(drop));
                Ok(pulled?)
            });
            match pulled {
                Ok(()) => return Ok(()),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn open_lent(&self, store: &Store, image: Permitted) -> anyhow::Result<PermittedImage> {
        self.prove(store, &image)?;
        let manifest = image.found().manifest;
        let lender = Lender { images: self, store, manifest };
        let opened = image.open_lazy(store, &lender)?;
        if opened.image().presence == Presence::Partial {
            let service = lender.service()?;
            self.watches.add(service.watch(&folder_of(store.path())?)?);
            match service.bring(&opened.image().id, None) {
                Ok(_has_trace) => {}
                // It starts without.
                Err(error) => tracing::warn!(%error, "nothing is fetched ahead of its readers"),
            }
        }
        Ok(opened)
    }

    /// Compares an image with its layers, if they have come in another way meanwhile.
    fn prove(&self, store: &Store, image: &Permitted) -> anyhow::Result<()> {
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
            tracing::debug!(%manifest, error = &*error, "where its layers are is not known");
        }
        let blobs = blobs.of(found.manifest);
        let proven = self.import(|it| import::prove(store, &found.image, manifest, &blobs, it));
        match proven? {
            Completed::Same | Completed::NotYet => Ok(()),
            Completed::Other(right) => Err(anyhow::anyhow!(
                "its index was wrong, or made with other options: its layers make image {right}. Remove the image from the \
                 engine, and pull it again"
            )),
        }
    }
}

impl LazyImages for EngineImages {
    fn pull(
        &self,
        store: &Store,
        name: &RefName,
        reference: &Reference,
    ) -> Result<Option<ImageId>, LazyError> {
        Ok(self.pull_lazy(store, name, reference)?)
    }

    fn bring(&self, store: &Store, name: &RefName, lazy: &LazySnapshot) -> Result<(), LazyError> {
        Ok(self.pull_whole(store, name, lazy)?)
    }

    fn open(&self, store: &Store, image: Permitted) -> Result<PermittedImage, LazyError> {
        Ok(self.open_lent(store, image)?)
    }

    fn keep(&self, secret: &PullSecret) -> Option<PullSecret> {
        let changed = self.change(&secret.image, |keyring, reference| {
            let before = keyring.find(reference.registry(), reference.repository())?;
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

    fn restore(&self, image: &str, before: Option<PullSecret>) {
        self.change(image, |keyring, reference| {
            match before {
                Some(it) => drop(keyring.save(&reference.name(), &it.user, &it.password)?),
                None => drop(keyring.erase(&reference.name())?),
            }
            Ok(())
        });
    }

    fn release(&self, store: &Store) {
        super::release(store);
    }

    fn stop(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }
}

/// Asks the service for devices, and starts it where there is none.
struct Lender<'a> {
    images: &'a EngineImages,
    store: &'a Store,
    /// Of the image.
    manifest: Option<Digest>,
}

impl Lender<'_> {
    fn service(&self) -> anyhow::Result<LazyService> {
        let folder =
            folder_of(self.store.path()).context("cannot look at the store's directory")?;
        let service = start::service(&self.images.context, &folder, &self.images.registry)?;
        Ok(service.of(self.manifest))
    }
}

impl LendDevices for Lender<'_> {
    fn lend(&self, device: &DeviceId) -> Result<std::fs::File, LazyError> {
        let service = self.service()?;
        // An earlier one may have died. Its devices are none of its group once all containers of it have ended.
        self.images.watches.let_go(self.store, device);
        Ok(service.lend(device)?)
    }
}

/// Groups of services, held for the readers of this engine's roots: no readers see zeros, whoever else dies.
#[derive(Debug, Default)]
struct Watches(Arc<Mutex<Watched>>);

#[derive(Debug, Default)]
struct Watched {
    all: Vec<LazyWatch>,
    /// Whether a thread looks at them.
    is_watched: bool,
}

impl Watches {
    fn add(&self, watch: LazyWatch) {
        let mut watched = lock(&self.0);
        if watched.all.iter().any(|it| it.is_like(&watch)) {
            return;
        }
        watched.all.push(watch);
        if !std::mem::replace(&mut watched.is_watched, true) {
            let watched = Arc::clone(&self.0);
            // It ends with the last of them, or with the process.
            thread::spawn(move || {
                loop {
                    let wait = look(&mut lock(&watched));
                    let Some(wait) = wait else { return };
                    thread::sleep(wait);
                }
            });
        }
    }
}

impl Watches {
    /// Has no group of a dead service keep a device from the next one.
    fn let_go(&self, store: &Store, device: &DeviceId) {
        let Ok(Some((file, _))) = store.sparse.open(device) else { return };
        for watch in &lock(&self.0).all {
            if let Err(error) = watch.let_go(file.as_fd()) {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(%device, error, "it may wait for a service that is gone");
            }
        }
    }
}

/// Looks at all. Returns when to look again, if anything is left.
fn look(watched: &mut Watched) -> Option<Duration> {
    watched.all.retain(|it| !it.is_done());
    let wait = watched.all.iter().map(LazyWatch::look).min();
    watched.is_watched = wait.is_some();
    wait
}

/// Where credentials of repositories are that kubelet has pulled from, for a store. It is in memory, as all of `/run`, and
/// only root reads it.
fn pull_secrets(store: &Store) -> Option<PathBuf> {
    Some(folder_of(store.path()).ok()?.with_extension("secrets"))
}

/// The same settings, with what kubelet pulls with. Only a file that the administrator has named comes before.
pub(crate) fn with_pull_secrets(
    mut settings: Settings,
    store: &Store,
    options: &RegistryOptions,
) -> Settings {
    let named = usize::from(options.authfile.is_some());
    settings.keyring.files.splice(named..named, pull_secrets(store));
    settings
}

/// Changes the credentials of a store, one process after the other.
fn change_secrets<T>(
    path: &Path,
    change: impl FnOnce(&Keyring) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let failed = || format!("cannot lock {}", path.display());
    if let Some(folder) = path.parent() {
        // As the service for lazy devices makes it.
        DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(failed)?;
    }
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600);
    let lock = options.open(path.with_extension("secrets-lock")).with_context(failed)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).with_context(failed)?;
    change(&Keyring { files: vec![path.to_owned()], ..Keyring::default() })
}

/// What the settings say of whose indexes are used.
pub(crate) fn trust(is_repository: bool) -> TrustIndex {
    if is_repository { TrustIndex::Repository } else { TrustIndex::Signed }
}
