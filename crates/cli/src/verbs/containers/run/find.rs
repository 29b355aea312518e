//! Second step of `run`: pulls the image if it is missing, opens the stores, removes dead containers, and opens the
//! image if the policies allow it.

use std::sync::Arc;

use anyhow::Context as _;
use container::life::end::reap::{Sweep, clear_dead};
use kernel::process::Signals;
use oci::manifest::Platform;
use store::{ContainerSnapshot, OpenOptions, PermittedImage, Resolved, Store};
use transfer::StoredImage;

#[cfg(feature = "serve")]
use crate::session::context::is_absent_store;
use crate::session::context::{Context, now};
#[cfg(feature = "serve")]
use crate::session::resolve::Unresolved;
use crate::verbs::containers::run::args::NewContainer;
use crate::verbs::containers::start::shared_store;

/// An image that a container can be made of, and the store in which the container gets its folder.
pub(super) struct FoundImage {
    /// The user's store.
    pub(super) store: Store,
    /// The store that has the image, if others share it with this user.
    pub(super) shared: Option<Store>,
    /// Names of running containers, whose mounts of the same image can be shared.
    pub(super) living: Vec<String>,
    pub(super) image: PermittedImage,
    /// Snapshot with which the container begins. It stays open, so that no command removes it.
    pub(super) snapshot: Option<ContainerSnapshot>,
}

impl FoundImage {
    /// Finds the image that the command line names. A signal that asks the process to end also ends its waits for
    /// locks.
    pub(super) fn resolve(
        context: &Context,
        args: &NewContainer,
        signals: &Arc<Signals>,
    ) -> anyhow::Result<Self> {
        if let Some(name) = &args.from {
            return Self::of_snapshot(context, args, name, signals);
        }
        #[cfg(feature = "serve")]
        {
            use crate::args::PullPolicy;
            use crate::session::resolve::may_be_pulled;
            use crate::verbs::images::registry::pull::{pull_always, pull_missing};

            let (name, lazy) = (args.image()?, &args.wanted.lazy);
            let platform = args.platform.as_deref();
            match lazy.pull.pull.unwrap_or(PullPolicy::Missing) {
                PullPolicy::Always => pull_always(context, name, lazy, platform)?,
                PullPolicy::Never => {}
                // Most images are in the store, so the store is opened only once for these.
                PullPolicy::Missing => match Self::stored(context, args, signals) {
                    Err(error) if is_lacking(&error) && may_be_pulled(name) => {
                        pull_missing(context, name, lazy, platform, &error)?;
                    }
                    found => return found,
                },
            }
        }
        Self::stored(context, args, signals)
    }

    /// Finds the image in the stores.
    fn stored(
        context: &Context,
        args: &NewContainer,
        signals: &Arc<Signals>,
    ) -> anyhow::Result<Self> {
        let others = match context.shared() {
            [] => None,
            _ => Some(context.open_with(args.image()?)?),
        };
        let is_own = others.as_ref().is_none_or(Store::is_own);
        let options = if is_own { OpenOptions::write() } else { OpenOptions::create() };
        let store = context.open(options)?;
        let images = others.as_ref().unwrap_or(&store);
        for store in [&store, images] {
            let asked = Arc::clone(signals);
            store.give_up_when(move || asked.ending().is_some());
        }
        let (_, living) = clear_dead(&store, Sweep::Brief, &|| now().0);
        let found = crate::session::resolve::resolve(images, args.image()?)?;
        if let Some(platform) = &args.platform {
            check_platform(images, &found, platform, args.image()?)?;
        }
        let image = open(context, args, images, found)?;
        Ok(Self { store, shared: others, living, image, snapshot: None })
    }

    /// Finds the image below a snapshot.
    fn of_snapshot(
        context: &Context,
        args: &NewContainer,
        name: &str,
        signals: &Arc<Signals>,
    ) -> anyhow::Result<Self> {
        let store = context.open(OpenOptions::write())?;
        let snapshot = store.container_snapshots.find(name)?;
        let record = &snapshot.record;
        let shared = shared_store(context, record.shared.as_deref())?;
        let images = shared.as_ref().unwrap_or(&store);
        for store in [&store, images] {
            let asked = Arc::clone(signals);
            store.give_up_when(move || asked.ending().is_some());
        }
        let (_, living) = clear_dead(&store, Sweep::Brief, &|| now().0);
        let found = Resolved {
            image: record.image,
            name: record.image_name.as_ref().and_then(|it| it.parse().ok()),
            manifest: record.manifest,
        };
        let image = open(context, args, images, found)?;
        Ok(Self { store, shared, living, image, snapshot: Some(snapshot) })
    }

    /// Returns the store that has the image.
    pub(super) fn images(&self) -> &Store {
        self.shared.as_ref().unwrap_or(&self.store)
    }
}

/// The image in the store is for another platform than the wanted one.
#[derive(Debug)]
struct OtherPlatform {
    image: String,
    actual: String,
    wanted: String,
}

impl std::fmt::Display for OtherPlatform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { image, actual, wanted } = self;
        write!(f, "image {} in the store is for {actual}, not for {wanted}", image.escape_debug())
    }
}

impl std::error::Error for OtherPlatform {}

/// Fails if an image is for another platform. An image without a platform fits.
fn check_platform(
    images: &Store,
    found: &Resolved,
    wanted: &str,
    name: &str,
) -> anyhow::Result<()> {
    let platform: Platform = wanted.parse().context("--platform")?;
    let Some(manifest) = found.manifest else { return Ok(()) };
    let config = StoredImage::load(images, &manifest)?.config;
    match config.platform().filter(|actual| !platform.may_be(actual)) {
        Some(actual) => Err(OtherPlatform {
            image: name.to_owned(),
            actual: actual.to_string(),
            wanted: platform.to_string(),
        }
        .into()),
        None => Ok(()),
    }
}

/// Whether the store lacks the image, so that a pull helps.
#[cfg(feature = "serve")]
fn is_lacking(error: &anyhow::Error) -> bool {
    let is_absent = error.downcast_ref::<Unresolved>().is_some_and(Unresolved::is_absent);
    is_absent || error.is::<OtherPlatform>() || is_absent_store(error)
}

/// Checks an image with the policies, and opens it.
fn open(
    context: &Context,
    args: &NewContainer,
    images: &Store,
    found: Resolved,
) -> anyhow::Result<PermittedImage> {
    let image = crate::session::policy::permit(context, images, found)?;
    #[cfg(feature = "serve")]
    {
        crate::verbs::services::lazy::open(context, images, image, &args.wanted.lazy)
    }
    #[cfg(not(feature = "serve"))]
    {
        let _unused = args;
        Ok(image.open(images)?)
    }
}
