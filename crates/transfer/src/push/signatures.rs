//! Sends the signatures of a pushed image, and makes one if there is a key.

use std::time::Duration;

use image::digest::Digest;
use oci::policy::{AttachError, Form, Repository, Signature, SignedItem, attach, signature_tag};
use oci::reference::{LATEST, Reference};
use oci::registry::{Registry, RegistryError};
use oci::signing::SigningKey;
use store::Store;

use super::PushError;
use crate::evidence::{EvidenceError, read_evidence};
use crate::signing::{SignError, sign};

/// Number of times that the list of signatures is written, because another client may write it at the same time.
const WRITES_MAX: u32 = 5;
/// Pause before the second attempt to write the list. Each further one is longer by the same time.
const PAUSE: Duration = Duration::from_millis(200);

/// An error of signing a pushed image, or of sending its signatures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignaturesError {
    #[error(transparent)]
    Sign(#[from] SignError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Other clients write the list of signatures all the time, or the registry does not keep it.
    #[error(
        "the registry does not keep the list of signatures, or other clients change it all the time"
    )]
    Lost,
}

/// The signatures that are sent with an image.
pub(super) struct SignaturePush<'a> {
    pub(super) store: &'a Store,
    pub(super) registry: &'a Registry,
    pub(super) target: &'a Reference,
    pub(super) manifest: &'a Digest,
    pub(super) key: Option<&'a SigningKey>,
}

impl SignaturePush<'_> {
    /// Sends the signatures of the manifest that name the target's repository: those of the store, and a new one if
    /// there is a key. Returns their number.
    pub(super) fn send(&self) -> Result<usize, PushError> {
        let failed = |source| {
            let target = Box::new(self.target.clone());
            PushError::Signatures { target, source: Box::new(source) }
        };
        let signatures = self.signatures().map_err(failed)?;
        if !signatures.is_empty() {
            self.publish(&signatures).map_err(failed)?;
        }
        Ok(signatures.len())
    }

    fn signatures(&self) -> Result<Vec<Signature>, SignaturesError> {
        let Self { store, target, manifest, .. } = *self;
        let item = SignedItem::Manifest(*manifest);
        let stored = read_evidence(store, manifest).map_err(SignError::from)?;
        let repository = Repository::new(target.registry(), target.repository());
        let is_ours = |it: &Signature| {
            it.form() == Form::SimpleSigning
                && it.claim().is_some_and(|claim| {
                    claim.is_for(&item) && claim.repository.as_ref() == Some(&repository)
                })
        };
        let mut found: Vec<_> = stored.all_signatures().filter(|it| is_ours(it)).cloned().collect();
        let Some(key) = self.key else { return Ok(found) };
        // As podman and skopeo, which by default accept a signature only for the very tag.
        let reference = match target.digest() {
            Some(_) => target.name(),
            None => format!("{}:{}", target.name(), target.tag().unwrap_or(LATEST)),
        };
        // A manifest that was only made for the registry has no place in the store.
        let is_stored = store.manifests.has(manifest).map_err(EvidenceError::from);
        let signature = if store.is_writable() && is_stored.map_err(SignError::from)? {
            sign(store, &item, &reference, key)?.signature
        } else {
            let signed = key.sign(&item, &reference);
            signed.map_err(|source| SignError::Key { item: Box::new(item), source })?
        };
        if !found.contains(&signature) {
            found.push(signature);
        }
        Ok(found)
    }

    /// Adds the signatures to the list in the registry. Registries have no atomic update, so the list is read again
    /// after it was written.
    fn publish(&self, signatures: &[Signature]) -> Result<(), SignaturesError> {
        let (registry, key) = (self.registry, self.key.map(SigningKey::public));
        let tag = signature_tag(self.manifest);
        for turn in 0..WRITES_MAX {
            std::thread::sleep(PAUSE * turn.saturating_sub(1));
            let old = registry.manifest_to_replace(&tag)?;
            let Some(new) = attach(old.as_ref().map(|it| &*it.bytes), signatures, key)? else {
                return Ok(());
            };
            for blob in &new.blobs {
                let (digest, size) = (Digest::sha256(blob), blob.len() as u64);
                if !registry.has_blob(&digest, Some(size))? {
                    registry.upload_blob(&digest, size, &mut &blob[..])?;
                }
            }
            registry.put_manifest(&tag, new.media_type, &new.manifest)?;
        }
        Err(SignaturesError::Lost)
    }
}
