//! Signatures in OCI layouts. They are entries of `index.json` with their own manifests: `cosign save` gives them an
//! annotation, and `regctl image copy --digest-tags` of regclient the tag of registries as a name.

use image::verity::ImageId;

use super::attach::signature_tag;
use super::collect::{Budget, read};
use super::signature::Signature;
use super::{SignatureSource, SignedItem};
use crate::Digest;
use crate::layout::{Layout, LayoutError, LayoutImage};
use crate::manifest::{Descriptor, KIND, KIND_IMAGE_SIGNATURES, KIND_SIGNATURES};

/// Returns the name of the entry with the signatures of an image id.
#[must_use]
pub fn image_signature_tag(image: &ImageId) -> String {
    format!("quire-{image}.sig")
}

/// The signatures of an image in a layout, unverified.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayoutSignatures {
    /// Signatures of the manifest, or of an index that lists it.
    pub of_manifest: Vec<Signature>,
    /// Signatures of the image id.
    pub of_image: Vec<Signature>,
}

impl LayoutSignatures {
    /// Reads the signatures of an image that was found in the layout, and of the id that it has in the store. Malformed
    /// signatures, and those of other images, are skipped.
    #[must_use]
    pub fn read(layout: &Layout, found: &LayoutImage, image: &ImageId) -> Self {
        let names = super::evidence::names_of(&found.manifest.0, &found.indexes);
        let mut tags: Vec<_> = names.iter().map(signature_tag).collect();
        tags.push(image_signature_tag(image));
        let is_candidate = |it: &&Descriptor| {
            let kind = it.annotations.get(KIND).map(String::as_str);
            [Some(KIND_SIGNATURES), Some(KIND_IMAGE_SIGNATURES)].contains(&kind)
                || tags.iter().any(|tag| it.is_named(tag))
        };
        // Lists that state the image's digest come first: other images of the layout may have many.
        let mut entries: Vec<_> = layout.entries().iter().filter(is_candidate).collect();
        entries.sort_by_key(|it| !tags.iter().any(|tag| it.is_named(tag)));
        // The signatures of the manifest may come from a registry, so they have separate limits.
        let tag = image_signature_tag(image);
        let (own, others) = entries.into_iter().partition(|it| it.is_named(&tag));
        let mut signatures = read_entries(layout, own);
        signatures.extend(read_entries(layout, others));
        signatures.sort_unstable();
        signatures.dedup();
        let of = |items: &[SignedItem]| {
            let is_for = |it: &&Signature| {
                it.claim().is_some_and(|claim| items.iter().any(|item| claim.is_for(item)))
            };
            signatures.iter().filter(is_for).cloned().collect()
        };
        let names: Vec<_> = names.iter().map(SignedItem::from).collect();
        Self { of_manifest: of(&names), of_image: of(&[SignedItem::from(image)]) }
    }
}

/// Reads the signatures in lists of a layout, up to the limits.
fn read_entries(layout: &Layout, entries: Vec<&Descriptor>) -> Vec<Signature> {
    let (mut signatures, mut budget) = (Vec::new(), Budget::default());
    for entry in entries {
        if !budget.take() {
            break;
        }
        match layout.document(entry) {
            Ok(bytes) => {
                // Reads of a layout fail one by one, and each failure is logged.
                let Ok(()) = read(&Lenient(layout), &bytes, &mut budget, &mut signatures);
            }
            Err(error) => {
                tracing::warn!(digest = %entry.digest, %error, "no list of signatures");
            }
        }
    }
    signatures
}

/// A layout of which a blob that cannot be read is empty, so that it is no signature.
struct Lenient<'a>(&'a Layout);

impl SignatureSource for Lenient<'_> {
    type Error = std::convert::Infallible;

    fn manifest_by_tag(&self, _: &str) -> Result<Option<Vec<u8>>, Self::Error> {
        Ok(None)
    }

    fn referrers(&self, _: &Digest, _: &str) -> Result<Vec<Descriptor>, Self::Error> {
        Ok(Vec::new())
    }

    fn manifest(&self, _: &Digest) -> Result<Option<Vec<u8>>, Self::Error> {
        Ok(None)
    }

    fn blob(&self, digest: &Digest, limit: u64) -> Result<Vec<u8>, Self::Error> {
        Ok(self.0.small_blob(digest, limit).unwrap_or_else(|error: LayoutError| {
            tracing::warn!(%digest, %error, "cannot read a signature");
            Vec::new()
        }))
    }
}
