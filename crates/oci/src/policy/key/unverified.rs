//! Stand-in for public keys in builds that verify no signatures. Such a build cannot load a policy that names a key,
//! and so refuses every image.

use super::KeyError;

/// A public key. It has no values, because this build cannot verify signatures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublicKey {}

impl PublicKey {
    /// Refuses every key.
    ///
    /// # Errors
    /// Always [`KeyError::Unverified`].
    pub const fn from_pem(_: &[u8]) -> Result<Self, KeyError> {
        Err(KeyError::Unverified)
    }

    /// Cannot be called, because the type has no values.
    #[must_use]
    pub const fn has_signed(&self, _: &[u8], _: &[u8]) -> bool {
        match *self {}
    }
}
