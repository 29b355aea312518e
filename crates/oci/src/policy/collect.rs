//! Signatures as registries keep them.
//!
//! Sources: cosign, `specs/SIGNATURE_SPEC.md`, "Tag-based Discovery"; OCI distribution-spec 1.1, "Listing Referrers";
//! sigstore's `protobuf-specs`, `sigstore_bundle.proto`.

use std::error::Error;

use serde::Deserialize;

use super::signature::{PAYLOAD_MAX, Signature};
use crate::Digest;
use crate::manifest::Descriptor;

/// Type of cosign's own signatures, as artifacts that refer to the image (since OCI 1.1).
pub const COSIGN_SIGNATURE: &str = "application/vnd.dev.cosign.artifact.sig.v1+json";
/// Type of sigstore's bundles, as artifacts that refer to what they sign or attest.
pub const SIGSTORE_BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const ANNOTATION: &str = "dev.cosignproject.cosign/signature";

/// The most signatures that are fetched for one manifest or index.
const SIGNATURES_MAX: usize = 32;
/// The most bytes in a bundle: a payload in base64, with certificates and log entries beside it.
const BUNDLE_MAX: u64 = 2 * PAYLOAD_MAX;

/// A repository, as a source of signatures. Its answers need not be true: digests are compared here.
pub trait SignatureSource {
    /// Why a request failed.
    type Error: Error + Send + Sync + 'static;

    /// The manifest with this tag; `None` if there is none.
    ///
    /// # Errors
    /// When that is not known.
    fn manifest_by_tag(&self, tag: &str) -> Result<Option<Vec<u8>>, Self::Error>;

    /// Manifests of this artifact type that refer to `digest`, by the referrers API or its tag fallback. May have others.
    ///
    /// # Errors
    /// When that is not known.
    fn referrers(
        &self,
        digest: &Digest,
        artifact_type: &str,
    ) -> Result<Vec<Descriptor>, Self::Error>;

    /// A manifest; `None` if there is none.
    ///
    /// # Errors
    /// When that is not known.
    fn manifest(&self, digest: &Digest) -> Result<Option<Vec<u8>>, Self::Error>;

    /// A blob of at most `limit` bytes.
    ///
    /// # Errors
    /// When it is larger, or not there.
    fn blob(&self, digest: &Digest, limit: u64) -> Result<Vec<u8>, Self::Error>;
}

/// Why signatures cannot be fetched.
#[derive(Debug, thiserror::Error)]
#[error("cannot look for signatures of {digest}")]
pub struct CollectError {
    /// The manifest or index whose signatures are wanted.
    pub digest: Box<Digest>,
    /// The cause.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}

/// A signature's manifest. More than an image's may be in it, and less.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Artifact {
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// All signatures of what has this digest, as they are: nothing is verified. What is malformed is left out.
pub(super) fn collect(
    source: &impl SignatureSource,
    digest: &Digest,
) -> Result<Vec<Signature>, CollectError> {
    let failed =
        |source: Box<dyn Error + Send + Sync>| CollectError { digest: Box::new(*digest), source };
    let mut found = Vec::new();
    let tag = format!("{}.sig", digest.to_string().replacen(':', "-", 1));
    if let Some(bytes) = source.manifest_by_tag(&tag).map_err(|it| failed(it.into()))? {
        read(source, &bytes, &mut found).map_err(|it| failed(it.into()))?;
    }
    for kind in [COSIGN_SIGNATURE, SIGSTORE_BUNDLE] {
        let referrers = source.referrers(digest, kind).map_err(|it| failed(it.into()))?;
        for referrer in referrers.into_iter().take(SIGNATURES_MAX) {
            let bytes = source.manifest(&referrer.digest).map_err(|it| failed(it.into()))?;
            match bytes {
                Some(bytes) if referrer.digest.matches(&bytes) => {
                    read(source, &bytes, &mut found).map_err(|it| failed(it.into()))?;
                }
                _ => {
                    tracing::warn!(%digest, signature = %referrer.digest, "not what was announced");
                }
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn read<S: SignatureSource>(
    source: &S,
    manifest: &[u8],
    found: &mut Vec<Signature>,
) -> Result<(), S::Error> {
    let Ok(artifact) = serde_json::from_slice::<Artifact>(manifest) else {
        tracing::warn!("a signature's manifest is malformed");
        return Ok(());
    };
    for layer in artifact.layers {
        if found.len() >= SIGNATURES_MAX {
            tracing::warn!("more than {SIGNATURES_MAX} signatures: the rest is not looked at");
            return Ok(());
        }
        let limit = match layer.media_type.as_str() {
            SIMPLE_SIGNING => PAYLOAD_MAX,
            SIGSTORE_BUNDLE => BUNDLE_MAX,
            _ => continue,
        };
        if layer.size > limit {
            tracing::warn!(blob = %layer.digest, size = layer.size, "too large for a signature");
            continue;
        }
        let bytes = source.blob(&layer.digest, limit)?;
        let signature = match layer.annotations.get(ANNOTATION) {
            _ if !layer.digest.matches(&bytes) => None,
            Some(signature) if layer.media_type == SIMPLE_SIGNING => {
                Signature::simple(bytes, signature)
            }
            _ => Signature::from_bundle(&bytes),
        };
        match signature {
            Some(signature) => found.push(signature),
            None => tracing::debug!(blob = %layer.digest, "no signature of an image"),
        }
    }
    Ok(())
}
