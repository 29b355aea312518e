//! Second step of `run`: pulls the image if it is missing, opens the stores, removes dead containers, and opens the
//! image if the policies allow it.

use std::sync::Arc;

use container::life::end::reap::{Sweep, clear_dead};
use kernel::process::Signals;
use store::{ContainerSnapshot, OpenOptions, PermittedImage, Resolved, Store};

use crate::session::context::{Context, now};
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
        crate::verbs::images::registry::pull::pull_first(
            context,
            args.image()?,
            &args.wanted.lazy,
        )?;
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
