//! Adds an image's signatures to an OCI layout. See `oci::policy`, `layout.rs`, for their form.

use image::verity::ImageId;
use oci::layout::Layout;
use oci::manifest::{KIND, KIND_IMAGE_SIGNATURES, KIND_SIGNATURES, REF_NAME};
use oci::policy::{
    AttachError, Signature, SignatureTag, SignedItem, attach, attach_of_image, image_signature_tag,
    signature_tag,
};
use serde_json::{Value, json};
use store::{OperationError, Store};

use super::ExportError;
use crate::evidence::read_evidence;
use image::digest::Digest;

/// The signatures that an export adds to a layout.
#[derive(Debug, Default)]
pub(super) struct AddedSignatures {
    /// Manifests, configs and payloads.
    pub(super) documents: Vec<(Digest, Vec<u8>)>,
    /// Entries of `index.json`, by their names. Each replaces the one of the same name; `None` stands for that one,
    /// which only moves behind its image, because cosign reads the first image and the first signatures.
    entries: Vec<(String, Option<Value>)>,
    /// Number of the image's signatures that are in the layout afterwards, without those that were there before.
    pub(super) count: usize,
    /// Whether the manifest is signed.
    pub(super) signs_manifest: bool,
}

/// Adds signatures to the document of a tag, if it exists. `None` if the document has them already.
type Attach<'a> = dyn Fn(Option<&[u8]>) -> Result<Option<SignatureTag>, AttachError> + 'a;

impl AddedSignatures {
    /// Returns the stored signatures of a manifest and of an image id, added to those that the layout has.
    pub(super) fn new(
        store: &Store,
        manifest: &Digest,
        image: Option<&ImageId>,
        layout: Option<&Layout>,
    ) -> Result<Self, ExportError> {
        let mut added = Self::default();
        let of_manifest = stored(store, SignedItem::from(manifest))?;
        added.signs_manifest = !of_manifest.is_empty();
        let tag = signature_tag(manifest);
        added.add(&tag, KIND_SIGNATURES, &of_manifest, layout, &|old| {
            attach(old, &of_manifest, None)
        })?;
        if let Some(image) = image {
            let of_image = stored(store, SignedItem::from(image))?;
            let tag = image_signature_tag(image);
            let attach = |old: Option<&[u8]>| attach_of_image(old, &of_image);
            added.add(&tag, KIND_IMAGE_SIGNATURES, &of_image, layout, &attach)?;
        }
        Ok(added)
    }

    fn add(
        &mut self,
        tag: &str,
        kind: &str,
        signatures: &[Signature],
        layout: Option<&Layout>,
        attach: &Attach<'_>,
    ) -> Result<(), ExportError> {
        if signatures.is_empty() {
            return Ok(());
        }
        self.count += signatures.len();
        const OBJECT: &str = "the signatures of the image";
        let entry =
            layout.and_then(|it| Some((it, it.entries().iter().find(|it| it.is_named(tag))?)));
        let old = entry.map(|(layout, entry)| layout.document(entry)).transpose();
        let old = old.map_err(OperationError::of("read", OBJECT))?;
        let new = attach(old.as_deref()).map_err(OperationError::of("write", OBJECT))?;
        let Some(new) = new else {
            self.entries.push((tag.to_owned(), None));
            return Ok(());
        };
        let digest = Digest::sha256(&new.manifest);
        let annotations = json!({ KIND: kind, REF_NAME: tag });
        let entry = json!({
            "mediaType": new.media_type, "digest": digest.to_string(),
            "size": new.manifest.len(), "annotations": annotations,
        });
        self.entries.push((tag.to_owned(), Some(entry)));
        let blobs = new.blobs.into_iter().map(|it| (Digest::sha256(&it), it));
        self.documents.extend(blobs.chain([(digest, new.manifest)]));
        Ok(())
    }

    /// Adds the entries to the manifests of `index.json`.
    pub(super) fn list(&self, manifests: &mut Vec<Value>) {
        for (tag, entry) in &self.entries {
            let is_it = |it: &Value| it["annotations"][REF_NAME].as_str() == Some(tag);
            let old = manifests.iter().find(|it| is_it(it)).cloned();
            manifests.retain(|it| !is_it(it));
            manifests.extend(entry.clone().or(old));
        }
    }
}

/// Returns the stored signatures of an item that a layout can have: those of indexes and bundles are for registries.
fn stored(store: &Store, item: SignedItem) -> Result<Vec<Signature>, ExportError> {
    let evidence = read_evidence(store, item);
    let evidence = evidence.map_err(OperationError::of("read", "the signatures of the image"))?;
    let fits = |it: &&Signature| {
        it.form() == item.form() && it.claim().is_some_and(|claim| claim.is_for(&item))
    };
    Ok(evidence.all_signatures().filter(fits).cloned().collect())
}
