//! Makes signatures with private keys in files.
//!
//! Sources: cosign, `pkg/cosign/keys.go` for the files, and `specs/SIGNATURE_SPEC.md` for the signatures; RFC 5958 for
//! PKCS #8; RFC 5280, section 4.1, and RFC 8410 for public keys.

mod encrypted;
mod key_file;
mod pem;

use std::fmt;

use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256,
    RsaKeyPair,
};

pub use key_file::{KEY_FILE_MAX, KeyFile, PASSPHRASE_VARIABLE, Passphrase, read_secret};

use crate::Digest;
use crate::policy::{PublicKey, Signature, SignedItem};

/// An error of reading a private key, or of signing with it. Its messages never show the key or its passphrase.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SigningKeyError {
    /// The file is not a private key, or its encryption is malformed. Has the reason.
    #[error("it is not a private key: {0}")]
    Malformed(&'static str),
    /// The file has another encoding than PKCS #8, or an encryption that only OpenSSL knows.
    #[error(
        "it has the type \"{0}\": `openssl pkcs8 -topk8 -nocrypt -in FILE -out NEW` converts it, and `cosign \
        import-key-pair --key NEW` encrypts it"
    )]
    Encoding(&'static str),
    /// The key cannot be decrypted.
    #[error("its passphrase is wrong, or it is damaged")]
    Passphrase,
    /// The key has an unknown kind.
    #[error(
        "its private key has another type than ECDSA P-256, RSA of 2048 to 4096 bits or Ed25519"
    )]
    Kind,
    /// The system has no random numbers, or the new signature does not verify.
    #[error("cannot make a signature with it")]
    Sign,
}

/// A private key.
pub struct SigningKey {
    pair: KeyPair,
    /// The public key, as a `SubjectPublicKeyInfo`.
    spki: Vec<u8>,
    public: PublicKey,
}

enum KeyPair {
    P256(EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
    Rsa(Box<RsaKeyPair>),
}

impl fmt::Debug for SigningKey {
    /// Shows the public key only.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.fingerprint())
    }
}

/// The DER encoding of a P-256 public key before its point. Source: RFC 5480, section 2.1.1.
const P256_SPKI: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// The DER encoding of an Ed25519 public key before its 32 bytes. Source: RFC 8410, section 4.
const ED25519_SPKI: [u8; 12] =
    [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
/// The DER encoding of the algorithm of RSA keys. Source: RFC 3279, section 2.3.1.
const RSA_ALGORITHM: [u8; 15] =
    [0x30, 0x0d, 0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01, 0x05, 0x00];

impl SigningKey {
    /// Reads an unencrypted PKCS #8 document.
    fn from_pkcs8(der: &[u8]) -> Result<Self, SigningKeyError> {
        let random = SystemRandom::new();
        // Only keys with which cosign and skopeo verify SHA-256: with P-384, ring signs SHA-384.
        let (pair, spki) = if let Ok(pair) =
            EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, der, &random)
        {
            let spki = [&P256_SPKI[..], pair.public_key().as_ref()].concat();
            (KeyPair::P256(pair), spki)
        } else if let Ok(pair) = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der) {
            let spki = [&ED25519_SPKI[..], pair.public_key().as_ref()].concat();
            (KeyPair::Ed25519(pair), spki)
        } else if let Ok(pair) = RsaKeyPair::from_pkcs8(der) {
            let spki = rsa_spki(pair.public_key().as_ref());
            (KeyPair::Rsa(Box::new(pair)), spki)
        } else {
            return Err(SigningKeyError::Kind);
        };
        let public = PublicKey::from_der(&spki).map_err(|_error| SigningKeyError::Kind)?;
        Ok(Self { pair, spki, public })
    }

    /// Returns the public key.
    #[must_use]
    pub const fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Returns the SHA-256 of the public key in DER, which `openssl pkey -pubin -outform DER` writes.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        Digest::sha256(&self.spki)
    }

    /// Signs a statement about an image. `reference` names the repository, perhaps with a tag; it may be empty.
    ///
    /// # Errors
    /// [`SigningKeyError::Sign`].
    pub fn sign(&self, of: &SignedItem, reference: &str) -> Result<Signature, SigningKeyError> {
        let payload = of.payload(reference);
        let signature = self.sign_bytes(&payload)?;
        // This detects faults of the processor, which could disclose a key of RSA.
        if !self.public.has_signed(&payload, &signature) {
            return Err(SigningKeyError::Sign);
        }
        Signature::new(of.form(), payload, signature).ok_or(SigningKeyError::Sign)
    }

    fn sign_bytes(&self, message: &[u8]) -> Result<Vec<u8>, SigningKeyError> {
        let random = SystemRandom::new();
        let failed = |_error| SigningKeyError::Sign;
        match &self.pair {
            KeyPair::P256(pair) => {
                Ok(pair.sign(&random, message).map_err(failed)?.as_ref().to_vec())
            }
            KeyPair::Ed25519(pair) => Ok(pair.sign(message).as_ref().to_vec()),
            KeyPair::Rsa(pair) => {
                let mut signature = vec![0; pair.public().modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &random, message, &mut signature).map_err(failed)?;
                Ok(signature)
            }
        }
    }
}

/// Returns the `SubjectPublicKeyInfo` of an `RSAPublicKey`.
fn rsa_spki(key: &[u8]) -> Vec<u8> {
    const SEQUENCE: u8 = 0x30;
    const BIT_STRING: u8 = 0x03;
    // The first byte of a bit string is its number of unused bits.
    let bits = der(BIT_STRING, &[&[0][..], key].concat());
    der(SEQUENCE, &[&RSA_ALGORITHM[..], &bits].concat())
}

/// Encodes a value in DER, of at most 65535 bytes. Source: X.690, section 8.1.3. The crate `yasna` is only in builds that
/// write disks.
fn der(tag: u8, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len()).expect("a key of 4096 bits has less than 600 bytes");
    let [high, low] = length.to_be_bytes();
    let mut out = vec![tag];
    match (high, low) {
        (0, 0..=0x7f) => out.push(low),
        (0, _) => out.extend([0x81, low]),
        _ => out.extend([0x82, high, low]),
    }
    out.extend_from_slice(value);
    out
}

#[cfg(test)]
mod tests;
