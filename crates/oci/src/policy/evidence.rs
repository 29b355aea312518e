//! Evidence of an image's origin and signatures, and its encoding for the store.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::name::Repository;
use super::signature::{Form, Signature};
use crate::Digest;
use crate::manifest::Document;

/// Maximum number of signatures that are stored with one manifest. Real images have one to five.
const SIGNATURES_KEPT: usize = 64;
/// Maximum number of repositories that are stored.
const ORIGINS_KEPT: usize = 64;
/// Maximum total size of the indexes that are stored, in bytes.
const INDEXES_KEPT: usize = 8 << 20;
/// Maximum total size of the payloads of signatures that are stored, in bytes. With base64, all fits into the file.
const PAYLOADS_KEPT: usize = 4 << 20;

/// Evidence about a manifest. Its signatures are unverified; [`Policies::decide`](super::Policies::decide) verifies
/// them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Repositories from which the policies allowed to pull the manifest, latest first.
    pub origins: Vec<Repository>,
    /// Indexes that led to the manifest, byte for byte. Often they are signed instead of the manifest.
    pub indexes: Vec<Vec<u8>>,
    /// Unverified signatures of the manifest or of one of the indexes.
    pub signatures: Vec<Signature>,
}

#[derive(Serialize, Deserialize)]
struct Raw {
    origins: Vec<String>,
    indexes: Vec<String>,
    signatures: Vec<RawSignature>,
}

#[derive(Serialize, Deserialize)]
struct RawSignature {
    form: Form,
    payload: String,
    signature: String,
}

impl Evidence {
    /// Decodes the text that [`encode`](Self::encode) made.
    ///
    /// # Errors
    /// If the text has another format.
    pub fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let raw: Raw = serde_json::from_slice(bytes)?;
        let plain = |text: &String| STANDARD.decode(text).map_err(serde::de::Error::custom);
        let mut signatures = Vec::new();
        for it in raw.signatures.into_iter().take(SIGNATURES_KEPT) {
            // A malformed signature is dropped.
            signatures.extend(Signature::new(it.form, plain(&it.payload)?, plain(&it.signature)?));
        }
        Ok(Self {
            origins: raw.origins.iter().filter_map(|it| Repository::from_name(it)).collect(),
            indexes: raw.indexes.iter().map(plain).collect::<Result<_, _>>()?,
            signatures,
        })
    }

    /// Encodes the evidence as text for [`decode`](Self::decode).
    ///
    /// # Panics
    /// Cannot happen, because lists and texts can always be encoded as JSON.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let signature = |it: &Signature| RawSignature {
            form: it.form,
            payload: STANDARD.encode(&it.payload),
            signature: STANDARD.encode(&it.signature),
        };
        let raw = Raw {
            origins: self.origins.iter().map(ToString::to_string).collect(),
            indexes: self.indexes.iter().map(|it| STANDARD.encode(it)).collect(),
            signatures: self.signatures.iter().map(signature).collect(),
        };
        serde_json::to_vec(&raw).expect("strings and lists serialize to JSON")
    }

    /// Adds the new parts of `other`, up to the limits.
    pub fn add(&mut self, other: &Self) {
        fn add<T: Clone + PartialEq>(list: &mut Vec<T>, more: &[T], most: usize) {
            for it in more {
                if !list.contains(it) {
                    list.push(it.clone());
                }
            }
            list.truncate(most);
        }
        add(&mut self.origins, &other.origins, ORIGINS_KEPT);
        add(&mut self.signatures, &other.signatures, SIGNATURES_KEPT);
        add(&mut self.indexes, &other.indexes, usize::MAX);
        let mut room = INDEXES_KEPT;
        self.indexes.retain(|it| take(&mut room, it.len()));
        let mut room = PAYLOADS_KEPT;
        self.signatures.retain(|it| take(&mut room, it.payload.len()));
    }

    /// Returns the manifest and the indexes that list it at any depth. A signature of one of them covers the
    /// manifest.
    #[must_use]
    pub fn names_of(&self, manifest: &Digest) -> Vec<Digest> {
        names_of(manifest, &self.indexes)
    }
}

/// Takes bytes of the room, and returns whether there were enough.
fn take(room: &mut usize, bytes: usize) -> bool {
    let rest = room.checked_sub(bytes);
    *room = rest.unwrap_or(*room);
    rest.is_some()
}

/// Implements [`Evidence::names_of`].
pub(super) fn names_of(manifest: &Digest, indexes: &[Vec<u8>]) -> Vec<Digest> {
    let listed = |bytes: &Vec<u8>| match Document::parse(bytes) {
        Ok(Document::Index(index)) => Some((Digest::sha256(bytes), index)),
        _ => None,
    };
    let mut rest: Vec<_> = indexes.iter().filter_map(listed).collect();
    let mut names = vec![*manifest];
    // The loop ends, because each round removes at least one index.
    loop {
        let lists = |names: &[Digest], index: &crate::manifest::Index| {
            index.manifests.iter().any(|it| names.contains(&it.digest))
        };
        let (found, other): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|(_, index)| lists(&names, index));
        if found.is_empty() {
            return names;
        }
        names.extend(found.iter().map(|it| it.0));
        rest = other;
    }
}
