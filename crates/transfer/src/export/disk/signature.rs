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
use yasna::models::ObjectIdentifier;
use yasna::{ASN1Result, BERReaderSeq, DERWriter, Tag, construct_der, parse_der};

/// Object identifiers. Source: RFC 2315, 14, and RFC 8017, appendix C.
const SIGNED_DATA: &[u64] = &[1, 2, 840, 113_549, 1, 7, 2];
const DATA: &[u64] = &[1, 2, 840, 113_549, 1, 7, 1];
const SHA256: &[u64] = &[2, 16, 840, 1, 101, 3, 4, 2, 1];
const RSA: &[u64] = &[1, 2, 840, 113_549, 1, 1, 1];

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
pub struct RootHashKey(RsaKeyPair);

impl fmt::Debug for RootHashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RootHashKey(***)")
    }
}

impl RootHashKey {
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
    key: RootHashKey,
    certificate: Vec<u8>,
    names: CertificateNames,
}

impl RootSigner {
    /// Reads the first certificate of a PEM file, which must be for the key.
    ///
    /// # Errors
    /// [`SignerError`] if there is none, or if it is for another key.
    pub fn new(key: RootHashKey, pem: &[u8]) -> Result<Self, SignerError> {
        let Ok(certificate) = CertificateDer::from_pem_slice(pem) else {
            return Err(SignerError::NoCertificate);
        };
        let names = CertificateNames::read(&certificate).ok_or(SignerError::Certificate)?;
        if names.key != key.0.public().as_ref() {
            return Err(SignerError::OtherKey);
        }
        Ok(Self { key, certificate: certificate.to_vec(), names })
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
        // The structures of RFC 2315, 9.1, 9.2 and 7.
        let signer = |writer: DERWriter<'_>| {
            writer.write_sequence(|fields| {
                fields.next().write_u8(1);
                fields.next().write_sequence(|names| {
                    names.next().write_der(&self.names.issuer);
                    names.next().write_der(&self.names.serial);
                });
                algorithm(fields.next(), SHA256);
                algorithm(fields.next(), RSA);
                fields.next().write_bytes(&signature);
            });
        };
        let signed = |writer: DERWriter<'_>| {
            writer.write_sequence(|fields| {
                fields.next().write_u8(1);
                fields.next().write_set(|digests| algorithm(digests.next(), SHA256));
                fields.next().write_sequence(|content| identifier(content.next(), DATA));
                fields.next().write_tagged_implicit(Tag::context(0), |writer| {
                    writer.write_set(|all| all.next().write_der(&self.certificate));
                });
                fields.next().write_set(|signers| signer(signers.next()));
            });
        };
        Ok(construct_der(|writer| {
            writer.write_sequence(|fields| {
                identifier(fields.next(), SIGNED_DATA);
                fields.next().write_tagged(Tag::context(0), signed);
            });
        }))
    }
}

fn identifier(writer: DERWriter<'_>, numbers: &[u64]) {
    writer.write_oid(&ObjectIdentifier::from_slice(numbers));
}

/// Writes the identifier of an algorithm without parameters.
fn algorithm(writer: DERWriter<'_>, numbers: &[u64]) {
    writer.write_sequence(|fields| {
        identifier(fields.next(), numbers);
        fields.next().write_null();
    });
}

/// The parts of a certificate that a signature needs.
#[derive(Debug, PartialEq, Eq)]
struct CertificateNames {
    /// The serial number, as an element.
    serial: Vec<u8>,
    /// The issuer's name, as an element. With the serial number, verifiers find the certificate by it.
    issuer: Vec<u8>,
    /// The public key, for RSA an element.
    key: Vec<u8>,
}

impl CertificateNames {
    /// Reads a certificate. Source: RFC 5280, 4.1.
    fn read(der: &[u8]) -> Option<Self> {
        let read = parse_der(der, |reader| {
            reader.read_sequence(|certificate| {
                let names = certificate.next().read_sequence(Self::signed_part)?;
                // The algorithm and the signature of the issuer.
                skip(certificate)?;
                skip(certificate)?;
                Ok(names)
            })
        });
        let (names, bits) = read.ok()?;
        (bits == names.key.len().checked_mul(8)?).then_some(names)
    }

    /// Reads the part that the issuer has signed. Also returns the number of bits of the key.
    fn signed_part(fields: &mut BERReaderSeq<'_, '_>) -> ASN1Result<(Self, usize)> {
        // Absent in version 1.
        fields.read_optional(|it| it.read_tagged(Tag::context(0), |it| it.read_u8()))?;
        let serial = fields.next().read_der()?;
        skip(fields)?;
        let issuer = fields.next().read_der()?;
        // The validity and the subject.
        skip(fields)?;
        skip(fields)?;
        let (key, bits) = fields.next().read_sequence(|info| {
            skip(info)?;
            info.next().read_bitvec_bytes()
        })?;
        // Unique identifiers and extensions.
        while fields.read_optional(|it| it.read_der())?.is_some() {}
        Ok((Self { serial, issuer, key }, bits))
    }
}

/// Skips an element.
fn skip(fields: &mut BERReaderSeq<'_, '_>) -> ASN1Result<()> {
    fields.next().read_der().map(drop)
}

#[cfg(test)]
mod tests;
