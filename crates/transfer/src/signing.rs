//! Signs images of the store.

use oci::policy::{Evidence, Signature, SignedItem};
use oci::signing::{SigningKey, SigningKeyError};
use store::Store;

use crate::evidence::{EvidenceError, keep, read_evidence};

/// A signature that was made, or that the store had before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signed {
    /// The signature.
    pub signature: Signature,
    /// Whether the store had it already.
    pub is_old: bool,
}

/// An error of signing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignError {
    #[error("cannot sign {item}")]
    Key { item: Box<SignedItem>, source: SigningKeyError },
    #[error(transparent)]
    Evidence(#[from] EvidenceError),
}

/// Signs a manifest or an image of the store, and stores the signature as a pull stores those of a registry. If it has
/// a signature by this key that states the same, no other is made. `reference` names the repository that the signature
/// states; it may be empty.
pub fn sign(
    store: &Store,
    item: &SignedItem,
    reference: &str,
    key: &SigningKey,
) -> Result<Signed, SignError> {
    let stored = match read_evidence(store, *item) {
        // The new signature replaces them.
        Err(EvidenceError::Damaged { .. }) => Evidence::default(),
        other => other?,
    };
    let is_same = |it: &Signature| {
        it.form() == item.form()
            && it.payload() == item.payload(reference)
            && it.is_by(key.public())
    };
    if let Some(signature) = stored.signatures.into_iter().find(is_same) {
        return Ok(Signed { signature, is_old: true });
    }
    let signature = key
        .sign(item, reference)
        .map_err(|source| SignError::Key { item: Box::new(*item), source })?;
    let evidence = Evidence { signatures: vec![signature.clone()], ..Evidence::default() };
    keep(&evidence, store, *item)?;
    Ok(Signed { signature, is_old: false })
}
