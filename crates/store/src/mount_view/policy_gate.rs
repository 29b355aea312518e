//! Images that a policy allows. Roots and containers can be made only from these.

use crate::mount_view::open::{LendDevices, OpenImage, OpenImageError};
use crate::resolve::Resolved;
use crate::store::Store;

/// Decides whether an image of a store may be used. This trait is all that policies and the code that mounts images
/// share.
pub trait UsePolicy {
    /// The reason why an image may not be used.
    type Refusal;

    /// Refuses an image that may not be used.
    fn check(&self, store: &Store, found: &Resolved) -> Result<(), Self::Refusal>;
}

/// An image that a policy allows. Only [`Store::permit`] returns one, so a caller that forgets the check does not
/// compile:
///
/// ```compile_fail,E0451
/// fn unasked(found: quire_store::Resolved) -> quire_store::Permitted {
///     quire_store::Permitted { found }
/// }
/// ```
///
/// ```
/// # use quire_store::{Permitted, Resolved, Store, UsePolicy};
/// fn asked<P: UsePolicy>(store: &Store, policy: &P, found: Resolved) -> Result<Permitted, P::Refusal> {
///     store.permit(policy, found)
/// }
/// ```
#[derive(Debug, Clone)]
pub struct Permitted {
    found: Resolved,
}

/// An image that a policy allows, ready to mount.
#[derive(Debug)]
pub struct PermittedImage {
    found: Resolved,
    image: OpenImage,
}

impl Store {
    /// Checks with a policy whether an image may be used.
    ///
    /// # Errors
    /// The refusal of the policy.
    pub fn permit<P: UsePolicy>(
        &self,
        policy: &P,
        found: Resolved,
    ) -> Result<Permitted, P::Refusal> {
        policy.check(self, &found)?;
        Ok(Permitted { found })
    }
}

impl Permitted {
    #[must_use]
    pub const fn found(&self) -> &Resolved {
        &self.found
    }

    /// Opens the image.
    ///
    /// # Errors
    /// As [`Store::open_found`], and [`OpenImageError::Lacking`].
    pub fn open(self, store: &Store) -> Result<PermittedImage, OpenImageError> {
        let mut image = store.open_found(&self.found)?;
        store.check_lacking(&mut image)?;
        Ok(PermittedImage { found: self.found, image })
    }

    /// Opens the image. `lender` provides devices that are not complete.
    ///
    /// # Errors
    /// As [`Store::open_lazy_found`], and [`OpenImageError::Lacking`].
    pub fn open_lazy(
        self,
        store: &Store,
        lender: &dyn LendDevices,
    ) -> Result<PermittedImage, OpenImageError> {
        let mut image = store.open_lazy_found(&self.found, lender)?;
        store.check_lacking(&mut image)?;
        Ok(PermittedImage { found: self.found, image })
    }
}

impl PermittedImage {
    #[must_use]
    pub const fn found(&self) -> &Resolved {
        &self.found
    }

    #[must_use]
    pub const fn image(&self) -> &OpenImage {
        &self.image
    }

    /// Sets the read-ahead of mounts of the image, in KiB.
    pub const fn set_read_ahead(&mut self, kilobytes: u32) {
        self.image.read_ahead = Some(kilobytes);
    }
}
