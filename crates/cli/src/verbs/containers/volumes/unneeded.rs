//! Removal of volumes whose containers are gone.

use std::path::Path;

use store::{OpenOptions, Store};

use crate::output::report;
use crate::session::context::Context;

/// Removes the volumes that belonged to containers that are gone. A failure is only logged, because the next command
/// tries again.
pub(crate) fn clear_unneeded(store: &Store) {
    if let Err(error) = store.clear_volumes() {
        tracing::warn!(error = report::chain(&error), "cannot remove the volumes of a container");
    }
}

/// As [`clear_unneeded`], for the store in this directory.
pub(crate) fn clear_unneeded_in(context: &Context, store: &Path) {
    match Store::open(store, context.who(), OpenOptions::write()) {
        Ok(store) => clear_unneeded(&store),
        Err(error) => {
            tracing::warn!(
                error = report::chain(&error),
                "cannot remove the volumes of a container"
            );
        }
    }
}
