//! Second step of `run`: pulls the image if it is missing, opens the stores, removes dead containers, and opens the
//! image if the policies allow it.

use std::sync::Arc;

use container::life::end::reap::{Sweep, clear_dead};
use container::life::monitor::Watch;
use kernel::process::Signals;
use store::{OpenOptions, PermittedImage, Resolved, Store};

use crate::session::context::{Context, now};
use crate::verbs::containers::run::args::Run;

/// An image that a container can be made of, and the store in which the container gets its folder.
pub(super) struct FoundImage {
    /// The user's store.
    pub(super) store: Store,
    /// The store that has the image, if others share it with this user.
    pub(super) shared: Option<Store>,
    /// Names of running containers, whose mounts of the same image can be shared.
    pub(super) living: Vec<String>,
    pub(super) image: PermittedImage,
    /// The watch on the service of a lazy image. It is kept as long as the container runs.
    pub(super) watch: Option<Box<dyn Watch>>,
}

impl FoundImage {
    /// Finds the image that the command line names. A signal that asks the process to end also ends its waits for
    /// locks.
    pub(super) fn resolve(
        context: &Context,
        args: &Run,
        signals: &Arc<Signals>,
    ) -> anyhow::Result<Self> {
        #[cfg(feature = "serve")]
        crate::verbs::images::registry::pull::pull_first(context, &args.image, &args.wanted.lazy)?;
        let others = match context.shared() {
            [] => None,
            _ => Some(context.open_with(&args.image)?),
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
        let found = crate::session::resolve::resolve(images, &args.image)?;
        let (image, watch) = open(context, args, images, found)?;
        Ok(Self { store, shared: others, living, image, watch })
    }

    /// Returns the store that has the image.
    pub(super) fn images(&self) -> &Store {
        self.shared.as_ref().unwrap_or(&self.store)
    }
}

/// Checks an image with the policies, and opens it. For a lazy image, also returns a watch on its service.
fn open(
    context: &Context,
    args: &Run,
    images: &Store,
    found: Resolved,
) -> anyhow::Result<(PermittedImage, Option<Box<dyn Watch>>)> {
    let image = crate::session::policy::permit(context, images, found)?;
    #[cfg(feature = "serve")]
    {
        let lazy = &args.wanted.lazy;
        let (image, watch) =
            crate::verbs::services::lazy::open_watched(context, images, image, lazy)?;
        Ok((image, watch.map(|it| Box::new(it) as Box<dyn Watch>)))
    }
    #[cfg(not(feature = "serve"))]
    {
        let _unused = args;
        Ok((image.open(images)?, None))
    }
}
