//! Resolves names of images, and suggests other names if there is no such image.

use image::verity::ImageId;
use oci::reference::Reference;
use store::{ResolveError, Resolved, Store};

use crate::output::report;

/// Resolves a name as written, or else as Docker completes it, so that `alpine` finds an image pulled as
/// `docker.io/library/alpine:latest`.
pub(crate) fn resolve(store: &Store, name: &str) -> Result<Resolved, Unresolved> {
    completed(store, name).map_err(|source| {
        let is_absent = matches!(source, ResolveError::Absent { .. });
        let hint = match is_absent && store.containers.image_of(name).is_some() {
            true => Some(format!(
                "{name} is a container: `quire inspect {name}` describes it, `quire export {name} \
                changes:FILE` writes its changes, and `quire commit {name} IMAGE` makes an image of them"
            )),
            false => next_step(&source),
        };
        Unresolved { hint, source }
    })
}

fn completed(store: &Store, name: &str) -> Result<Resolved, ResolveError> {
    let error = match store.resolve(name) {
        Err(error @ ResolveError::Absent { .. }) => error,
        other => return other,
    };
    let Ok(reference) = name.parse::<Reference>() else { return Err(error) };
    if let Some(digest) = reference.digest() {
        let found = store.resolve(&digest.to_string());
        // Another repository may contain the same image, but the user named this repository.
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

/// A name that does not resolve to a usable image.
#[derive(Debug)]
pub(crate) struct Unresolved {
    /// Advice for the user.
    pub(crate) hint: Option<String>,
    source: ResolveError,
}

impl std::fmt::Display for Unresolved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.source.fmt(f)
    }
}

impl std::error::Error for Unresolved {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.source()
    }
}

impl Unresolved {
    /// Returns the name if the store has no image of that name.
    pub(crate) fn absent(&self) -> Option<&str> {
        match &self.source {
            ResolveError::Absent { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Returns whether the name does not resolve to an image, because there is none or because there are several.
    #[cfg(feature = "serve")]
    pub(crate) const fn is_of_none(&self) -> bool {
        matches!(self.source, ResolveError::Absent { .. } | ResolveError::Ambiguous { .. })
    }

    /// Suggests names or ids that the user probably meant.
    #[cfg(feature = "serve")]
    pub(crate) fn meant(&self) -> Option<String> {
        meant(&self.source)
    }

    /// Returns whether the store has no image of the name.
    pub(crate) const fn is_absent(&self) -> bool {
        matches!(self.source, ResolveError::Absent { .. })
    }
}

/// The error that no container has a name.
#[derive(Debug)]
pub(crate) struct NoContainer {
    pub(crate) name: String,
    /// Advice for the user.
    pub(crate) hint: String,
}

impl std::fmt::Display for NoContainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there is no container \"{}\"", self.name.escape_debug())
    }
}

impl std::error::Error for NoContainer {}

/// The error that neither a container nor an image has a name.
#[derive(Debug)]
pub(crate) struct NoObject {
    pub(crate) name: String,
    /// Kind of thing that was looked up.
    pub(crate) kind: &'static str,
}

impl std::fmt::Display for NoObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there is no {} \"{}\"", self.kind, self.name.escape_debug())
    }
}

impl std::error::Error for NoObject {}

/// Suggests names or ids that the user probably meant.
pub(crate) fn meant(error: &ResolveError) -> Option<String> {
    let join = |all: Vec<String>| format!("did you mean {}?", all.join(" or "));
    let short = |ids: &[ImageId]| ids.iter().take(3).map(|id| report::short(id)).collect();
    match error {
        ResolveError::Absent { ids, .. } if !ids.is_empty() => {
            let least = Store::ID_DIGITS_MIN;
            Some(format!("an image id needs at least {least} digits: {}", join(short(ids))))
        }
        ResolveError::Absent { nearest, .. } if !nearest.is_empty() => {
            Some(join(nearest.iter().map(ToString::to_string).collect()))
        }
        ResolveError::Ambiguous { images, .. } => Some(join(short(images))),
        _ => None,
    }
}

/// Suggests how to get an image that a verb needs.
fn next_step(error: &ResolveError) -> Option<String> {
    let meant = meant(error);
    let ResolveError::Absent { name, ids, .. } = error else { return meant };
    if !ids.is_empty() || !may_be_pulled(name) {
        return Some(meant.unwrap_or_else(|| LIST.to_owned()));
    }
    Some(match meant {
        Some(meant) => {
            format!("{meant} If not, `quire pull {name}` fetches {name} from a registry")
        }
        None => format!("`quire pull {name}` fetches it from a registry; {LIST}"),
    })
}

/// Returns whether a registry may have an image of this name: it is not an id, a digest or a file, and has no other
/// transport.
pub(crate) fn may_be_pulled(name: &str) -> bool {
    const TRANSPORTS: [&str; 12] = [
        "oci",
        "docker-archive",
        "tar",
        "dir",
        "dump",
        "erofs",
        "disk",
        "oci-archive",
        "docker-daemon",
        "containers-storage",
        "sha256",
        "sha512",
    ];
    const FILES: [&str; 12] =
        ["tar", "gz", "tgz", "zst", "xz", "bz2", "zip", "dump", "erofs", "img", "raw", "iso"];
    let is_id = name.len() >= Store::ID_DIGITS_MIN && name.bytes().all(|it| it.is_ascii_hexdigit());
    let word = name.split_once(':').map(|it| it.0);
    let is_transport = word.is_some_and(|word| TRANSPORTS.contains(&word));
    let path = name.split('@').next().unwrap_or(name);
    let last = path.rsplit('/').next().unwrap_or(path);
    let end = last.split(':').next().unwrap_or(last).rsplit_once('.').map(|it| it.1);
    // Images of Docker's own library need no slash; their names have no dot.
    let is_file = end.is_some_and(|it| !path.contains('/') || FILES.contains(&it));
    let is_other = is_id || is_transport || is_file;
    cfg!(feature = "registry") && !is_other && name.parse::<Reference>().is_ok()
}

/// Hint about how to list images.
pub(crate) const LIST: &str = "`quire images` lists all images";

/// Adds a hint to a failed lookup if the text may be meant as `NAME:/PATH`, because no tag has a slash.
pub(crate) fn meant_a_path(store: &Store, name: &str, error: Unresolved) -> Unresolved {
    match name.rsplit_once(':') {
        Some((image, path)) if resolve(store, image).is_ok() => {
            Unresolved { hint: Some(format!("did you mean {image}:/{path}?")), ..error }
        }
        _ => error,
    }
}
