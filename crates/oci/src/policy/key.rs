//! Public keys that verify signatures.

#[cfg(not(feature = "signatures"))]
mod unverified;
#[cfg(feature = "signatures")]
mod verified;

#[cfg(not(feature = "signatures"))]
pub use unverified::PublicKey;
#[cfg(feature = "signatures")]
pub use verified::PublicKey;

/// An error of reading a public key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The file contains no `PUBLIC KEY`.
    #[error("it lacks \"-----BEGIN PUBLIC KEY-----\"")]
    Pem,
    /// The file contains several keys.
    #[error("it has several public keys: use one file for each key")]
    Several,
    /// The key is not a `SubjectPublicKeyInfo`, or has an unknown kind.
    #[error(
        "its public key has another type than ECDSA P-256, ECDSA P-384, RSA of 2048 to 8192 bits \
        or Ed25519"
    )]
    Kind,
    /// This build cannot verify signatures.
    #[error("this build of Quire verifies no signatures: build it with the feature `signatures`")]
    Unverified,
}
