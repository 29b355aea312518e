//! Builds without signatures have no keys. A policy that names a key cannot be loaded there, and so refuses every
//! image.

use super::KeyError;

/// A public key. None can exist in this build.
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
