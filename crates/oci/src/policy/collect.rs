//! Collects the signatures of an image from a registry.
//!
//! Sources: cosign, `specs/SIGNATURE_SPEC.md`, "Tag-based Discovery"; OCI distribution-spec 1.1, "Listing Referrers";
//! sigstore's `protobuf-specs`, `sigstore_bundle.proto`.

use std::error::Error;

use serde::Deserialize;

use super::attach::{ANNOTATION, IMAGE_SIGNING, SIMPLE_SIGNING, signature_tag};
use super::signature::{Form, PAYLOAD_MAX, Signature};
use crate::Digest;
use crate::manifest::Descriptor;

/// Artifact type of cosign's signatures that refer to the image (since OCI 1.1).
pub const COSIGN_SIGNATURE: &str = "application/vnd.dev.cosign.artifact.sig.v1+json";
/// Artifact type of sigstore bundles, which refer to the signed or attested image.
pub const SIGSTORE_BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";

/// Maximum number of signatures that are fetched for one manifest or index.
pub(super) const SIGNATURES_MAX: usize = 32;
/// Maximum number of manifests and blobs that are fetched for one manifest or index. Few of them are no signatures.
const FETCHES_MAX: usize = 4 * SIGNATURES_MAX;
/// Maximum size of a bundle in bytes: a payload in base64, with certificates and log entries.
const BUNDLE_MAX: u64 = 2 * PAYLOAD_MAX;

/// A repository as a source of signatures. Its responses are not trusted: the caller verifies digests.
pub trait SignatureSource {
    /// The error of a failed request.
    type Error: Error + Send + Sync + 'static;

    /// Returns the manifest with this tag. `None` if there is none.
    ///
    /// # Errors
    /// If the request fails.
    fn manifest_by_tag(&self, tag: &str) -> Result<Option<Vec<u8>>, Self::Error>;

    /// Returns manifests that refer to `digest`, from the referrers API or its tag fallback. The result may contain
    /// other artifact types than the requested one.
    ///
    /// # Errors
    /// If the request fails.
    fn referrers(
        &self,
        digest: &Digest,
        artifact_type: &str,
    ) -> Result<Vec<Descriptor>, Self::Error>;

    /// Returns a manifest. `None` if there is none.
    ///
    /// # Errors
    /// If the request fails.
    fn manifest(&self, digest: &Digest) -> Result<Option<Vec<u8>>, Self::Error>;

    /// Returns a blob of at most `limit` bytes.
    ///
    /// # Errors
    /// If the blob is larger or does not exist, or if the request fails.
    fn blob(&self, digest: &Digest, limit: u64) -> Result<Vec<u8>, Self::Error>;
}

/// An error of fetching signatures.
#[derive(Debug, thiserror::Error)]
#[error("cannot look for signatures of {digest}")]
pub struct CollectError {
    /// Manifest or index whose signatures are wanted.
    pub digest: Box<Digest>,
    /// Cause.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}

/// The manifest of a signature. Its format is less strict than that of an image.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Artifact {
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// The number of documents that may still be fetched for one manifest or index.
pub(super) struct Budget(usize);

impl Default for Budget {
    fn default() -> Self {
        Self(FETCHES_MAX)
    }
}

impl Budget {
    /// Counts a document. Returns whether it may be fetched.
    pub(super) fn take(&mut self) -> bool {
        let rest = self.0.checked_sub(1);
        self.0 = rest.unwrap_or_default();
        rest.is_some()
    }
}

/// Returns all signatures of the manifest or index with this digest, unverified. Malformed signatures are skipped.
pub(super) fn collect(
    source: &impl SignatureSource,
    digest: &Digest,
) -> Result<Vec<Signature>, CollectError> {
    let failed =
        |source: Box<dyn Error + Send + Sync>| CollectError { digest: Box::new(*digest), source };
    let (mut found, mut budget) = (Vec::new(), Budget::default());
    if let Some(bytes) =
        source.manifest_by_tag(&signature_tag(digest)).map_err(|it| failed(it.into()))?
    {
        read(source, &bytes, &mut budget, &mut found).map_err(|it| failed(it.into()))?;
    }
    for kind in [COSIGN_SIGNATURE, SIGSTORE_BUNDLE] {
        let referrers = source.referrers(digest, kind).map_err(|it| failed(it.into()))?;
        for referrer in referrers.into_iter().take(SIGNATURES_MAX) {
            let bytes = source.manifest(&referrer.digest).map_err(|it| failed(it.into()))?;
            match bytes {
                Some(bytes) if referrer.digest.matches(&bytes) => {
                    read(source, &bytes, &mut budget, &mut found)
                        .map_err(|it| failed(it.into()))?;
                }
                _ => {
                    let signature = referrer.digest;
                    tracing::warn!(%digest, %signature, "manifest with another digest");
                }
            }
        }
    }
    // Signatures of image ids are for images made here, which a registry does not know.
    found.retain(|it| it.form() != Form::Image);
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Reads the signatures that a manifest lists.
pub(super) fn read<S: SignatureSource>(
    source: &S,
    manifest: &[u8],
    budget: &mut Budget,
    found: &mut Vec<Signature>,
) -> Result<(), S::Error> {
    let Ok(artifact) = serde_json::from_slice::<Artifact>(manifest) else {
        tracing::warn!("a signature's manifest is malformed");
        return Ok(());
    };
    for layer in artifact.layers {
        if found.len() >= SIGNATURES_MAX {
            tracing::warn!("more than {SIGNATURES_MAX} signatures: ignoring the rest");
            return Ok(());
        }
        let limit = match layer.media_type.as_str() {
            SIMPLE_SIGNING | IMAGE_SIGNING => PAYLOAD_MAX,
            SIGSTORE_BUNDLE => BUNDLE_MAX,
            _ => continue,
        };
        if layer.size > limit {
            tracing::warn!(blob = %layer.digest, size = layer.size, "too large for a signature: ignored");
            continue;
        }
        if !budget.take() {
            tracing::warn!("more than {FETCHES_MAX} documents of signatures: ignoring the rest");
            return Ok(());
        }
        let bytes = source.blob(&layer.digest, limit)?;
        let signature = match layer.annotations.get(ANNOTATION) {
            _ if !layer.digest.matches(&bytes) => None,
            Some(signature) if layer.media_type == SIMPLE_SIGNING => {
                Signature::simple(bytes, signature)
            }
            Some(signature) if layer.media_type == IMAGE_SIGNING => {
                Signature::of_image(bytes, signature)
            }
            None if layer.media_type == IMAGE_SIGNING => None,
            _ => Signature::from_bundle(&bytes),
        };
        match signature {
            Some(signature) => found.push(signature),
            None => tracing::debug!(blob = %layer.digest, "not a signature of an image: ignored"),
        }
    }
    Ok(())
}
