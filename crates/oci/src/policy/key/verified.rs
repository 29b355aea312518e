//! Public keys whose signatures webpki verifies.

use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{SignatureVerificationAlgorithm, SubjectPublicKeyInfoDer};
use webpki::RawPublicKeyEntity;

use super::KeyError;

/// The signature algorithms of cosign, by the kind of key. Source: sigstore's `LoadVerifier` (SHA-256 with every kind
/// of key, PKCS #1 padding unless PSS is requested) and its `algorithm_registry.go` (P-384 with SHA-384; RSA of 3072
/// and 4096 bits).
///
/// webpki accepts only the algorithms that the key's type allows.
static ALGORITHMS: [&dyn SignatureVerificationAlgorithm; 6] = [
    webpki::ring::ECDSA_P256_SHA256,
    webpki::ring::ECDSA_P384_SHA384,
    webpki::ring::ECDSA_P384_SHA256,
    webpki::ring::RSA_PKCS1_2048_8192_SHA256,
    webpki::ring::RSA_PSS_2048_8192_SHA256_LEGACY_KEY,
    webpki::ring::ED25519,
];

/// A public key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey(SubjectPublicKeyInfoDer<'static>);

impl PublicKey {
    /// Parses a PEM file as written by `cosign generate-key-pair`, `openssl pkey -pubout` and `skopeo
    /// generate-sigstore-key`.
    ///
    /// # Errors
    /// [`KeyError`] if the file does not contain exactly one key of a supported kind.
    pub fn from_pem(pem: &[u8]) -> Result<Self, KeyError> {
        let mut keys = SubjectPublicKeyInfoDer::pem_slice_iter(pem);
        let Some(Ok(key)) = keys.next() else { return Err(KeyError::Pem) };
        if keys.next().is_some() {
            return Err(KeyError::Several);
        }
        Self::checked(key)
    }

    /// Takes a `SubjectPublicKeyInfo` in DER.
    ///
    /// # Errors
    /// [`KeyError::Kind`] if it is not a key of a supported kind.
    pub(crate) fn from_der(spki: &[u8]) -> Result<Self, KeyError> {
        Self::checked(SubjectPublicKeyInfoDer::from(spki).into_owned())
    }

    fn checked(key: SubjectPublicKeyInfoDer<'static>) -> Result<Self, KeyError> {
        let key = Self(key);
        // If an algorithm does not fit the key, webpki reports this before it verifies the signature.
        let fits = |it: &&dyn SignatureVerificationAlgorithm| {
            !matches!(
                key.try_one(*it, b"", b""),
                Err(webpki::Error::UnsupportedSignatureAlgorithmForPublicKeyContext(_)) | Ok(())
            )
        };
        let is_key = RawPublicKeyEntity::try_from(&key.0).is_ok();
        if is_key && ALGORITHMS.iter().any(fits) { Ok(key) } else { Err(KeyError::Kind) }
    }

    fn try_one(
        &self,
        algorithm: &dyn SignatureVerificationAlgorithm,
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), webpki::Error> {
        RawPublicKeyEntity::try_from(&self.0)?.verify_signature(algorithm, message, signature)
    }

    /// Whether the signature of this message was made with this key.
    #[must_use]
    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        ALGORITHMS.iter().any(|it| self.try_one(*it, message, signature).is_ok())
    }
}
