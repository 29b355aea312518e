//! What names of images stand for.

use oci::reference::Reference;
use store::{ResolveError, Resolved, Store};

/// What a name stands for: as it is written, and then as Docker would complete it, so that `alpine` finds what was pulled
/// as `docker.io/library/alpine:latest`.
pub(crate) fn resolve(store: &Store, name: &str) -> Result<Resolved, ResolveError> {
    let error = match store.resolve(name) {
        Err(error @ ResolveError::Absent { .. }) => error,
        other => return other,
    };
    let Ok(reference) = name.parse::<Reference>() else { return Err(error) };
    if let Some(digest) = reference.digest() {
        let found = store.resolve(&digest.to_string());
        // Another repository may have the same image, but that is not what was said.
        let is_same = |found: &Resolved| {
            found.name.as_ref().is_some_and(|name| {
                name.as_str().strip_prefix(&reference.name()).is_some_and(|it| it.starts_with(':'))
            })
        };
        return found.ok().filter(is_same).ok_or(error);
    }
    let tag = reference.tag().unwrap_or("latest");
    store.resolve(&format!("{}:{tag}", reference.name())).map_err(|_absent| error)
}

/// There is no such image, but one that is named before the last colon: what stands after it is no tag.
#[derive(Debug)]
pub(crate) struct PathAsTag {
    /// What was probably meant.
    pub(crate) meant: String,
    source: ResolveError,
}

impl std::fmt::Display for PathAsTag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.source.fmt(f)
    }
}

impl std::error::Error for PathAsTag {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.source()
    }
}

/// What a lookup says that failed, of a text that may be meant as `NAME:/PATH`.
pub(crate) fn meant_a_path(store: &Store, name: &str, error: ResolveError) -> anyhow::Error {
    match name.rsplit_once(':') {
        Some((image, path)) if resolve(store, image).is_ok() => {
            PathAsTag { meant: format!("{image}:/{path}"), source: error }.into()
        }
        _ => error.into(),
    }
}
