//! `HOME` of a container's programs.

use crate::bundle::config::ImageConfig;
use crate::bundle::spec::RuntimeSpec;
use crate::bundle::{Wishes, is_named};

/// Whose choice a container's `HOME` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// The image's or the caller's.
    Given,
    /// The home directory of the container's user, since nobody has set it. Programs of other users have others.
    Derived,
}

/// The annotation that says [`Home::Derived`].
const HOME_IS_DERIVED: &str = "quire.home-is-derived";

impl Home {
    /// As the image and the caller have it.
    pub(crate) fn new(image: &ImageConfig, wishes: &Wishes) -> Self {
        let is_set = image.env.iter().chain(&wishes.env).any(|it| is_named(it, "HOME"));
        if is_set { Self::Given } else { Self::Derived }
    }

    /// Notes it in a container's bundle.
    pub(crate) fn note(self, spec: &mut RuntimeSpec) {
        if self == Self::Derived {
            spec.annotations.insert(HOME_IS_DERIVED.to_owned(), String::new());
        }
    }

    /// As a container's bundle has it.
    pub(crate) fn of(spec: &RuntimeSpec) -> Self {
        let is_derived = spec.annotations.contains_key(HOME_IS_DERIVED);
        if is_derived { Self::Derived } else { Self::Given }
    }
}
