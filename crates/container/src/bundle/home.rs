//! The variable `HOME` of a container's programs.

use crate::bundle::config::ImageConfig;
use crate::bundle::spec::RuntimeSpec;
use crate::bundle::{BundleOptions, is_named};

/// Source of a container's `HOME`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// Set by the image or the caller.
    Given,
    /// The home directory of the container's user, because neither the image nor the caller sets `HOME`. Programs of
    /// other users get other directories.
    Derived,
}

/// Annotation for [`Home::Derived`].
const HOME_IS_DERIVED: &str = "quire.home-is-derived";

impl Home {
    /// Determines the source from the image and the caller's settings.
    pub(crate) fn new(image: &ImageConfig, options: &BundleOptions) -> Self {
        let is_set = image.env.iter().chain(&options.env).any(|it| is_named(it, "HOME"));
        if is_set { Self::Given } else { Self::Derived }
    }

    /// Records the source in a container's bundle.
    pub(crate) fn note(self, spec: &mut RuntimeSpec) {
        if self == Self::Derived {
            spec.annotations.insert(HOME_IS_DERIVED.to_owned(), String::new());
        }
    }

    /// Reads the source from a container's bundle.
    pub(crate) fn from_spec(spec: &RuntimeSpec) -> Self {
        let is_derived = spec.annotations.contains_key(HOME_IS_DERIVED);
        if is_derived { Self::Derived } else { Self::Given }
    }
}
