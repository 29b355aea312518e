//! TLS: trusted CAs, and client certificates.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme,
};

use crate::registry::error::Cause;
use crate::registry::hosts::Tls;

/// Makes the TLS configuration of connections. `roots` caches the system's CAs, which are read once.
pub(super) fn configuration(
    tls: &Tls,
    roots: &OnceLock<RootCertStore>,
) -> Result<ClientConfig, Cause> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Cause::Tls(error.to_string()))?;
    let builder = if tls.skip_verify {
        let verifier = Arc::new(Anyone(Arc::clone(&provider)));
        builder.dangerous().with_custom_certificate_verifier(verifier)
    } else {
        let mut roots = roots.get_or_init(system_roots).clone();
        for path in &tls.ca {
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| wrong(path, error))?;
            }
        }
        builder.with_root_certificates(roots)
    };
    if tls.client.is_empty() {
        return Ok(builder.with_no_client_auth());
    }
    let ours = tls.client.iter().map(|pair| Pair::read(pair, &provider));
    let ours = ours.collect::<Result<_, _>>()?;
    Ok(builder.with_client_cert_resolver(Arc::new(Ours(ours))))
}

fn wrong(path: &Path, reason: impl std::fmt::Display) -> Cause {
    Cause::Certificate { path: path.to_owned(), reason: reason.to_string() }
}

/// A client certificate with its chain and key.
#[derive(Debug)]
struct Pair {
    certified: Arc<CertifiedKey>,
    /// Issuers of the certificates in the chain.
    issuers: Vec<DistinguishedName>,
}

impl Pair {
    fn read(
        (chain, key): &(PathBuf, Option<PathBuf>),
        provider: &CryptoProvider,
    ) -> Result<Self, Cause> {
        let key = key.as_ref().unwrap_or(chain);
        let private = PrivateKeyDer::from_pem_slice(&read(key)?);
        let private = private.map_err(|error| wrong(key, error))?;
        let certificates = certificates(chain)?;
        let mut issuers = Vec::new();
        for certificate in &certificates {
            let parsed = webpki::EndEntityCert::try_from(certificate);
            let parsed = parsed.map_err(|error| wrong(chain, error))?;
            issuers.push(DistinguishedName::in_sequence(parsed.issuer()));
        }
        let certified = CertifiedKey::from_der(certificates, private, provider);
        let certified = Arc::new(certified.map_err(|error| wrong(chain, error))?);
        Ok(Self { certified, issuers })
    }
}

/// All client certificates. A server gets the first that it can verify. Source: RFC 8446, 4.2.4 and 4.4.2.3.
#[derive(Debug)]
struct Ours(Vec<Pair>);

impl ResolvesClientCert for Ours {
    fn resolve(
        &self,
        authorities: &[&[u8]],
        schemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        let able =
            || self.0.iter().filter(|one| one.certified.key.choose_scheme(schemes).is_some());
        let wanted = |one: &&Pair| {
            authorities.is_empty()
                || one.issuers.iter().any(|it| authorities.contains(&it.as_ref()))
        };
        // Some servers name other CAs than those that they trust. So if there is only one certificate, it is always
        // sent.
        let only = || self.0.first().filter(|_| self.0.len() == 1);
        able().find(wanted).or_else(only).map(|one| Arc::clone(&one.certified))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Returns the system's CAs. Unreadable certificates are skipped with a warning.
fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!(error = %error, "cannot read some of the system's certificates");
    }
    roots.add_parsable_certificates(found.certs);
    roots
}

/// Maximum size of a certificate or key file, in bytes.
const FILE_MAX: u64 = 4 << 20;

fn read(path: &Path) -> Result<Vec<u8>, Cause> {
    crate::files::read_settings(path, FILE_MAX).map_err(|error| wrong(path, error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Cause> {
    let pem = read(path)?;
    let found = CertificateDer::pem_slice_iter(&pem);
    let found = found.collect::<Result<Vec<_>, _>>().map_err(|error| wrong(path, error))?;
    if found.is_empty() {
        return Err(wrong(path, "it contains no certificate"));
    }
    Ok(found)
}

/// The verifier for `skip_verify`: accepts any certificate for which the server has the key.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _chain: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
