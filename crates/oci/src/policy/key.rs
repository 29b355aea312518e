//! Public keys, and what they have signed.

#[cfg(not(feature = "signatures"))]
mod unverified;
#[cfg(feature = "signatures")]
mod verified;

#[cfg(not(feature = "signatures"))]
pub use unverified::PublicKey;
#[cfg(feature = "signatures")]
pub use verified::PublicKey;

/// Why a file is not a key that signatures can be verified with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// No `PUBLIC KEY` in it.
    #[error("it has no \"-----BEGIN PUBLIC KEY-----\"")]
    Pem,
    /// Several, of which it is not known which is meant.
    #[error("it has several public keys: one file, one key")]
    Several,
    /// Not a `SubjectPublicKeyInfo`, or of a kind that is not known.
    #[error(
        "its public key is none of ECDSA P-256, ECDSA P-384, RSA of 2048 to 8192 bits or Ed25519"
    )]
    Kind,
    /// This build verifies no signatures.
    #[error("this build of Quire verifies no signatures: build it with the feature `signatures`")]
    Unverified,
}
