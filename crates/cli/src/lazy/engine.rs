//! Images that container engines start before their layers are here.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::Context as _;
use container::life::monitor::Watch as _;
use container::owner::check_lazy;
use image::verity::{DeviceId, ImageId};
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::Registry;
use serve::lazy::{LazyService, LazyWatch, folder_of};
use serve::snapshots::{LazyError, LazyImages};
use store::{LazySnapshot, LendDevices, Permitted, PermittedImage, Presence, RefName, Store};
use transfer::import::{self, BUDGET, Completed, ImportSurroundings, ImportWishes};
use transfer::lazy::TrustIndex;
use transfer::pull::{Layers, LazyPullError, LazyPulled, PullWishes, pull, pull_lazy};

use super::{StoreBlobs, start};
use crate::args::RegistryOptions;
use crate::context::{Context, now};
use crate::pull::{pauses, settings};

/// What an engine's snapshotter does with images whose layers are not here.
pub(crate) struct EngineImages {
    context: Context,
    registry: RegistryOptions,
    trust: TrustIndex,
    /// Never set: who asks waits for the registry's own limits of time.
    cancel: Arc<AtomicBool>,
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
        Ok(Policies::load(&crate::policy::files(&self.context)?)?)
    }

    fn registry(&self, reference: &Reference) -> anyhow::Result<Registry> {
        let (who, pauses) = (self.context.who(), pauses(&self.context));
        let settings = settings(who, &self.registry, &self.cancel, pauses)?;
        Ok(Registry::new(reference, &settings)?)
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

    fn pull_lazy(
        &self,
        store: &Store,
        name: &RefName,
        reference: &Reference,
    ) -> anyhow::Result<Option<ImageId>> {
        check_lazy(store)?;
        let (policies, registry) = (self.policies()?, self.registry(reference)?);
        let import = ImportWishes { name: Some(name), ..ImportWishes::default() };
        let wishes = PullWishes { import, layers: Layers::Forget, policies: &policies };
        let pulled = self.import(|surroundings| {
            pull_lazy(store, &registry, reference, surroundings, &wishes, (name, self.trust))
        });
        match pulled {
            Ok(LazyPulled::Image { image, .. } | LazyPulled::UpToDate { image, .. }) => {
                Ok(Some(image))
            }
            Err(LazyPullError::Index(error)) => {
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
            let pulled = self.registry(reference).and_then(|registry| {
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
        let lender = Lender { images: self, store };
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
        if !matches!(store.presence(&found.image), Ok(Presence::Unproven)) {
            return Ok(());
        }
        let who = self.context.who();
        let settings = settings(who, &self.registry, &self.cancel, pauses(&self.context))?;
        let blobs = StoreBlobs::new(store, settings);
        let manifest = found.manifest.as_ref();
        if let Some(manifest) = manifest
            && let Err(error) = blobs.know_layers(&found.image, manifest)
        {
            tracing::debug!(%manifest, error = &*error, "where its layers are is not known");
        }
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
}

/// Asks the service for devices, and starts it where there is none.
struct Lender<'a> {
    images: &'a EngineImages,
    store: &'a Store,
}

impl Lender<'_> {
    fn service(&self) -> anyhow::Result<LazyService> {
        let folder =
            folder_of(self.store.path()).context("cannot look at the store's directory")?;
        start::service(&self.images.context, &folder, &self.images.registry)
    }
}

impl LendDevices for Lender<'_> {
    fn lend(&self, device: &DeviceId) -> Result<std::fs::File, LazyError> {
        Ok(self.service()?.lend(device)?)
    }
}

/// Groups of services, held for the readers of this engine's roots: no readers see zeros, whoever else dies.
#[derive(Default)]
struct Watches(Mutex<Vec<Arc<Held>>>);

struct Held {
    watch: Mutex<LazyWatch>,
    is_over: AtomicBool,
}

impl Watches {
    fn add(&self, watch: LazyWatch) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |held: &Arc<Held>| {
            held.watch.lock().unwrap_or_else(PoisonError::into_inner).is_like(&watch)
        };
        if all.iter().any(is_same) {
            return;
        }
        let held = Arc::new(Held { watch: Mutex::new(watch), is_over: AtomicBool::new(false) });
        all.push(Arc::clone(&held));
        thread::spawn(move || {
            while !held.is_over.load(Ordering::Relaxed) {
                let wait = held.watch.lock().unwrap_or_else(PoisonError::into_inner).look();
                thread::sleep(wait);
            }
        });
    }
}

impl Drop for Watches {
    fn drop(&mut self) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().for_each(|it| it.is_over.store(true, Ordering::Relaxed));
    }
}

/// What the settings say of whose indexes are used.
pub(crate) fn trust(is_repository: bool) -> TrustIndex {
    if is_repository { TrustIndex::Repository } else { TrustIndex::Signed }
}
