//! A read-only registry over a store, so that other hosts can use it as a mirror (decision 34).
//!
//! Every client is hostile. A client gets only manifests, configs and layers of images whose names are in a repository
//! that the administrator has chosen, and that the policies allow. All bytes are compared with their digest before the
//! last of them is sent.

mod catalog;
mod content;
mod error;
mod lazy_layers;
mod private;
mod quota;
mod range;
mod response;
mod route;
mod service;

use oci::policy::{Pattern, Policies};
use store::Store;

pub use service::{ServeRegistryError, serve_registry};

/// The store that a registry serves, and the rules for it.
pub struct RegistryResources {
    /// The store.
    pub store: Store,
    /// Repositories that may be served.
    pub repositories: Vec<Pattern>,
    /// Whether manifests are also served by their tags. A tag of the store may be older than that of the registry.
    pub tags: bool,
    /// Loads the policies in force.
    pub policies: Box<dyn Fn() -> Result<Policies, String> + Send + Sync>,
}

impl std::fmt::Debug for RegistryResources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut resources = f.debug_struct("RegistryResources");
        resources.field("repositories", &self.repositories).field("tags", &self.tags);
        resources.finish_non_exhaustive()
    }
}
