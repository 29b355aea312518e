//! Second step of `run`: pulls the image if it is missing, opens the stores, removes dead containers, and opens the
//! image if the policies allow it.

use std::sync::Arc;

use container::life::end::reap::{Sweep, clear_dead};
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
        let image = open(context, args, images, found)?;
        Ok(Self { store, shared: others, living, image })
    }

    /// Returns the store that has the image.
    pub(super) fn images(&self) -> &Store {
        self.shared.as_ref().unwrap_or(&self.store)
    }
}

/// Checks an image with the policies, and opens it.
fn open(
    context: &Context,
    args: &Run,
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
