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

/// Signs a manifest or an image of the store, and stores the signature beside those of registries, which never replace
/// it. If it has a signature by this key that states the same, no other is made. `reference` names the repository that
/// the signature states; it may be empty.
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
    let old = stored.all_signatures().find(|it| is_same(it)).cloned();
    let is_old = old.is_some();
    let signature = match old {
        Some(signature) => signature,
        None => key
            .sign(item, reference)
            .map_err(|source| SignError::Key { item: Box::new(*item), source })?,
    };
    // An old signature may have come from a registry, and then others could replace it.
    let evidence = Evidence { own: vec![signature.clone()], ..Evidence::default() };
    keep(&evidence, store, *item)?;
    Ok(Signed { signature, is_old })
}
