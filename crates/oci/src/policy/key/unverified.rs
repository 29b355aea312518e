//! Builds without signatures have no keys: a policy that names one cannot be read, so that it refuses every image.

use super::KeyError;

/// A public key, of which there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublicKey {}

impl PublicKey {
    /// Refuses every key.
    ///
    /// # Errors
    /// [`KeyError::Unverified`].
    pub const fn from_pem(_: &[u8]) -> Result<Self, KeyError> {
        Err(KeyError::Unverified)
    }

    /// Never called.
    #[must_use]
    pub const fn has_signed(&self, _: &[u8], _: &[u8]) -> bool {
        match *self {}
    }
}
