//! Evidence of an image's origin and signatures, and its encoding for the store.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::name::Repository;
use super::signature::{Form, Signature};
use crate::Digest;
use crate::manifest::Document;

/// Maximum number of signatures of each kind that are stored with one manifest: those made on this host, and others.
/// Real images have one to five.
const SIGNATURES_KEPT: usize = 64;
/// Maximum number of repositories that are stored.
const ORIGINS_KEPT: usize = 64;
/// Maximum total size of the indexes that are stored, in bytes.
const INDEXES_KEPT: usize = 8 << 20;
/// Maximum total size of the payloads of signatures that are stored, in bytes. With base64, all fits into the file.
const PAYLOADS_KEPT: usize = 3 << 20;
/// The same for signatures that were made on this host. Such a payload has less than 1 KiB.
const OWN_PAYLOADS_KEPT: usize = 512 << 10;

/// Evidence about a manifest. Its signatures are unverified; [`Policies::decide`](super::Policies::decide) verifies
/// them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Repositories from which the policies allowed to pull the manifest, latest first.
    pub origins: Vec<Repository>,
    /// Indexes that led to the manifest, byte for byte. Often they are signed instead of the manifest.
    pub indexes: Vec<Vec<u8>>,
    /// Unverified signatures of the manifest or of one of the indexes, from registries and layouts.
    pub signatures: Vec<Signature>,
    /// Signatures that were made on this host, which others never replace. They are verified like the others.
    pub own: Vec<Signature>,
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
    /// Whether it was made on this host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    own: bool,
}

impl Evidence {
    /// Returns all signatures, those that were made on this host first.
    pub fn all_signatures(&self) -> impl Iterator<Item = &Signature> {
        self.own.iter().chain(&self.signatures)
    }

    /// Decodes the text that [`encode`](Self::encode) made.
    ///
    /// # Errors
    /// If the text has another format.
    pub fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let raw: Raw = serde_json::from_slice(bytes)?;
        let plain = |text: &String| STANDARD.decode(text).map_err(serde::de::Error::custom);
        let (mut signatures, mut own) = (Vec::new(), Vec::new());
        for it in raw.signatures {
            let list = if it.own { &mut own } else { &mut signatures };
            if list.len() < SIGNATURES_KEPT {
                // A malformed signature is dropped.
                list.extend(Signature::new(it.form, plain(&it.payload)?, plain(&it.signature)?));
            }
        }
        Ok(Self {
            origins: raw.origins.iter().filter_map(|it| Repository::from_name(it)).collect(),
            indexes: raw.indexes.iter().map(plain).collect::<Result<_, _>>()?,
            signatures,
            own,
        })
    }

    /// Encodes the evidence as text for [`decode`](Self::decode).
    ///
    /// # Panics
    /// Cannot happen, because lists and texts can always be encoded as JSON.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let signature = |it: &Signature, own| RawSignature {
            form: it.form,
            payload: STANDARD.encode(&it.payload),
            signature: STANDARD.encode(&it.signature),
            own,
        };
        let own = self.own.iter().map(|it| signature(it, true));
        let raw = Raw {
            origins: self.origins.iter().map(ToString::to_string).collect(),
            indexes: self.indexes.iter().map(|it| STANDARD.encode(it)).collect(),
            signatures: own.chain(self.signatures.iter().map(|it| signature(it, false))).collect(),
        };
        serde_json::to_vec(&raw).expect("strings and lists serialize to JSON")
    }

    /// Adds the new parts of `other`, up to the limits. Signatures that were made on this host have separate
    /// limits, so that no number of others replaces them.
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
        add(&mut self.own, &other.own, SIGNATURES_KEPT);
        let mut room = OWN_PAYLOADS_KEPT;
        self.own.retain(|it| take(&mut room, it.payload.len()));
        // A signature that was made here and pushed comes back with a pull.
        add(&mut self.signatures, &other.signatures, usize::MAX);
        self.signatures.retain(|it| !self.own.contains(it));
        self.signatures.truncate(SIGNATURES_KEPT);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::SignedItem;

    fn signature(number: usize, length: usize) -> Signature {
        let item = SignedItem::Manifest(Digest::sha256(b"manifest"));
        let payload = item.payload(&format!("ghcr.io/a{}", "b".repeat(length)));
        let bytes = [&number.to_le_bytes()[..], &[0; 500]].concat();
        Signature::new(Form::SimpleSigning, payload, bytes).unwrap()
    }

    #[test]
    fn no_number_of_pulled_signatures_replaces_those_made_here() {
        let own = vec![signature(0, 0), signature(1, 0)];
        let mut all = Evidence { own: own.clone(), ..Evidence::default() };
        for turn in 1..10 {
            // Each turn fills all places, by number or by size.
            let length = if turn % 2 == 0 { 0 } else { 200 << 10 };
            let junk = (0..SIGNATURES_KEPT).map(|it| signature(turn * 100 + it, length)).collect();
            let mut new = Evidence { signatures: junk, ..Evidence::default() };
            new.add(&all);
            all = Evidence::decode(&new.encode()).unwrap();
            assert_eq!(all.own, own);
            assert!(!all.signatures.is_empty());
        }
        // One that was pushed and pulled again is still one that was made here.
        let mut new = Evidence { signatures: own.clone(), ..Evidence::default() };
        new.add(&all);
        assert_eq!(new.own, own);
        assert!(!new.signatures.contains(&own[0]));
    }

    /// A file that an earlier version wrote does not state which signatures were made here.
    #[test]
    fn signatures_without_a_mark_are_those_of_others() {
        let new = Evidence { signatures: vec![signature(0, 0)], ..Evidence::default() };
        let text = String::from_utf8(new.encode()).unwrap();
        assert!(!text.contains("own"), "{text}");
        assert_eq!(Evidence::decode(text.as_bytes()).unwrap(), new);
    }

    /// Source of the maximum: `docs/format/object-store.md`, "Signatures".
    #[test]
    fn the_most_that_is_kept_fits_into_the_file() {
        let name = "a".repeat(200);
        let origins =
            (0..100).filter_map(|it| Repository::from_name(&format!("ghcr.io/{it}{name}")));
        let indexes = (0..100_u8).map(|it| vec![it; 1 << 20]).collect();
        let many =
            |from: usize, length| (from..from + 100).map(|it| signature(it, length)).collect();
        let mut all = Evidence {
            origins: origins.collect(),
            indexes,
            signatures: many(0, 250 << 10),
            own: many(100, 100 << 10),
        };
        all.add(&Evidence { signatures: many(200, 0), own: many(300, 0), ..Evidence::default() });
        assert_eq!((all.own.len(), all.signatures.len()), (5, 12));
        let length = all.encode().len();
        assert!((15 << 20..16 << 20).contains(&length), "{length}");
    }
}
