//! Signatures of root hashes: PKCS#7, detached, by RSA with PKCS#1 v1.5 and SHA-256, so that the same key and root hash
//! give the same bytes.
//!
//! Both systemd and the kernel (`CONFIG_DM_VERITY_VERIFY_ROOTHASH_SIG`) verify them. The signed content is the root
//! hash as hexadecimal text, and there are no signed attributes. Source: RFC 2315, 9 and 10; Discoverable Partitions
//! Specification, "Verity signature"; systemd `src/repart/repart.c`, `sign_verity_roothash`.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::digest::Digest;
use image::dm_verity::RootHash;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::der::{
    BIT_STRING, CONTEXT_0, DerReader, INTEGER, NULL, OBJECT_IDENTIFIER, OCTET_STRING, SEQUENCE,
    SET, element,
};

/// Object identifiers. Source: RFC 2315, 14, and RFC 8017, appendix C.
const SIGNED_DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x02];
const DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x01];
const SHA256: &[u8] = &[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x01];
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];

/// The reason why a key or a certificate cannot sign root hashes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignerError {
    #[error(
        "it has no private key in PEM, or one with a passphrase: `openssl pkey -in FILE -out NEW` writes one without"
    )]
    NoKey,
    /// Signatures by other algorithms contain random numbers.
    #[error("it has no RSA key of 2048 to 4096 bits, the only keys that sign disks ({0})")]
    Key(String),
    #[error("it has no certificate in PEM")]
    NoCertificate,
    #[error("its certificate is malformed")]
    Certificate,
    #[error("its certificate is for another key than the private key")]
    OtherKey,
}

/// A private key.
pub struct SigningKey(RsaKeyPair);

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey(***)")
    }
}

impl SigningKey {
    /// Reads the first private key of a PEM file.
    ///
    /// # Errors
    /// [`SignerError`] if there is none, or if it is no RSA key.
    pub fn from_pem(pem: &[u8]) -> Result<Self, SignerError> {
        let Ok(key) = PrivateKeyDer::from_pem_slice(pem) else { return Err(SignerError::NoKey) };
        let key = match &key {
            PrivateKeyDer::Pkcs1(key) => RsaKeyPair::from_der(key.secret_pkcs1_der()),
            PrivateKeyDer::Pkcs8(key) => RsaKeyPair::from_pkcs8(key.secret_pkcs8_der()),
            _ => return Err(SignerError::Key("WrongAlgorithm".to_owned())),
        };
        key.map(Self).map_err(|error| SignerError::Key(error.to_string()))
    }
}

/// Signs root hashes with a key, in the name of a certificate.
#[derive(Debug)]
pub struct RootSigner {
    key: SigningKey,
    certificate: Vec<u8>,
    /// The issuer and the serial number, by which verifiers find the certificate.
    issuer_and_serial: Vec<u8>,
}

impl RootSigner {
    /// Reads the first certificate of a PEM file, which must be for the key.
    ///
    /// # Errors
    /// [`SignerError`] if there is none, or if it is for another key.
    pub fn new(key: SigningKey, pem: &[u8]) -> Result<Self, SignerError> {
        let Ok(certificate) = CertificateDer::from_pem_slice(pem) else {
            return Err(SignerError::NoCertificate);
        };
        let names = CertificateNames::read(&certificate).ok_or(SignerError::Certificate)?;
        if names.key != key.0.public().as_ref() {
            return Err(SignerError::OtherKey);
        }
        let issuer_and_serial = element(SEQUENCE, &[names.issuer, names.serial]);
        Ok(Self { key, certificate: certificate.to_vec(), issuer_and_serial })
    }

    /// Returns the SHA-256 of the certificate, as hexadecimal text.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        Digest::sha256(&self.certificate).to_string().replacen("sha256:", "", 1)
    }

    /// Returns the content of a signature partition for a root hash, without its padding. Source: Discoverable
    /// Partitions Specification, "Verity signature".
    pub(super) fn partition(&self, root: &RootHash) -> Result<Vec<u8>, ring::error::Unspecified> {
        let value = serde_json::json!({
            "rootHash": root.to_string(),
            "certificateFingerprint": self.fingerprint(),
            "signature": STANDARD.encode(self.sign(root)?),
        });
        Ok(value.to_string().into_bytes())
    }

    /// Returns the signature in DER.
    fn sign(&self, root: &RootHash) -> Result<Vec<u8>, ring::error::Unspecified> {
        let mut signature = vec![0; self.key.0.public().modulus_len()];
        // The random numbers protect the key from measurements. They have no effect on the signature.
        let random = SystemRandom::new();
        let content = root.to_string();
        self.key.0.sign(&RSA_PKCS1_SHA256, &random, content.as_bytes(), &mut signature)?;
        let version = element(INTEGER, &[&[1]]);
        let digest = algorithm(SHA256);
        let signer = element(
            SEQUENCE,
            &[
                &version,
                &self.issuer_and_serial,
                &digest,
                &algorithm(RSA),
                &element(OCTET_STRING, &[&signature]),
            ],
        );
        let signed = element(
            SEQUENCE,
            &[
                &version,
                &element(SET, &[&digest]),
                &element(SEQUENCE, &[&element(OBJECT_IDENTIFIER, &[DATA])]),
                &element(CONTEXT_0, &[&self.certificate]),
                &element(SET, &[&signer]),
            ],
        );
        let kind = element(OBJECT_IDENTIFIER, &[SIGNED_DATA]);
        Ok(element(SEQUENCE, &[&kind, &element(CONTEXT_0, &[&signed])]))
    }
}

/// Returns the identifier of an algorithm without parameters.
fn algorithm(identifier: &[u8]) -> Vec<u8> {
    let identifier = element(OBJECT_IDENTIFIER, &[identifier]);
    element(SEQUENCE, &[&identifier, &element(NULL, &[])])
}

/// The parts of a certificate that a signature needs.
#[derive(Debug, PartialEq, Eq)]
struct CertificateNames<'a> {
    /// The serial number, as an element.
    serial: &'a [u8],
    /// The issuer's name, as an element.
    issuer: &'a [u8],
    /// The public key, for RSA an element.
    key: &'a [u8],
}

impl<'a> CertificateNames<'a> {
    /// Reads a certificate. Source: RFC 5280, 4.1.
    fn read(der: &'a [u8]) -> Option<Self> {
        let mut outer = DerReader(der);
        let certificate = outer.read(SEQUENCE)?;
        if !outer.0.is_empty() {
            return None;
        }
        let mut signed = DerReader(DerReader(certificate.content).read(SEQUENCE)?.content);
        // Absent in version 1.
        let _version = signed.read(CONTEXT_0);
        let serial = signed.read(INTEGER)?.whole;
        let _algorithm = signed.read(SEQUENCE)?;
        let issuer = signed.read(SEQUENCE)?.whole;
        let _validity = signed.read(SEQUENCE)?;
        let _subject = signed.read(SEQUENCE)?;
        let mut info = DerReader(signed.read(SEQUENCE)?.content);
        let _algorithm = info.read(SEQUENCE)?;
        // The first byte is the number of unused bits.
        let key = info.read(BIT_STRING)?.content.strip_prefix(&[0])?;
        Some(Self { serial, issuer, key })
    }
}

#[cfg(test)]
mod tests;
