//! Decides which indexes from a registry are trusted.
//!
//! Diff ids are compared only when a device is complete. Until then, an index determines the contents of an image's
//! files. So a user with push rights to a repository could change the contents of an image that is named by its
//! digest.

use image::digest::Digest;
use oci::policy::{AdmitError, Policies, Repository, SignatureSource, admit};
use oci::reference::Reference;
use serde::Deserialize;

/// The annotation with which a manifest names the index of its image: see
/// [`Artifact::index`](super::artifact::Artifact::index).
pub const INDEX_ANNOTATION: &str = "vnd.quire.lazy.index";

/// The indexes that the user trusts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrustIndex {
    /// Indexes that the manifest names or that are signed, and all others if the image is named by a tag.
    #[default]
    Default,
    /// All indexes in the image's repository.
    Repository,
    /// Indexes that are signed by a key of a policy in force.
    Signed,
    /// The index whose manifest or config has this digest.
    Digest(Digest),
}

/// An error for text that is not a valid [`TrustIndex`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{}\" is neither a digest nor \"repository\"", .0.escape_debug())]
pub struct TrustIndexError(String);

impl std::str::FromStr for TrustIndex {
    type Err = TrustIndexError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.parse()) {
            ("repository", _) => Ok(Self::Repository),
            (_, Ok(digest)) => Ok(Self::Digest(digest)),
            (_, Err(_)) => Err(TrustIndexError(text.to_owned())),
        }
    }
}

/// Why an index is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Untrusted {
    /// The user trusts another index.
    #[error("--trust-index names another index")]
    Other,
    /// A policy refuses the index.
    #[error("a policy refuses it")]
    Policy(#[source] Box<AdmitError>),
    /// The image is named by its digest, but the index is neither named nor signed.
    #[error(
        "the image is named by its digest, but anyone with push rights may have pushed this \
        index; if you trust them, use --trust-index repository"
    )]
    Unnamed,
    /// Only signed indexes are trusted, and this one is not signed. Services require signatures.
    #[error("no key of a policy in force signed it, as this use requires")]
    Unsigned,
}

/// An index in a registry.
#[derive(Debug, Clone, Copy)]
pub(super) struct FoundIndex<'a> {
    /// Digest of the artifact's manifest.
    pub(super) artifact: &'a Digest,
    /// Digest of the artifact's config.
    pub(super) index: &'a Digest,
    /// The image's manifest, to which the index refers.
    pub(super) manifest: &'a [u8],
}

/// Checks that an index is trusted.
pub(super) fn check(
    found: &FoundIndex<'_>,
    reference: &Reference,
    policies: &Policies,
    signatures: &impl SignatureSource,
    trust: TrustIndex,
) -> Result<(), Untrusted> {
    match trust {
        TrustIndex::Digest(digest) if digest != *found.artifact && digest != *found.index => {
            return Err(Untrusted::Other);
        }
        _ => {}
    }
    // The policies have accepted the manifest, including the index that it names for its image.
    if trust != TrustIndex::Signed && named(found.manifest) == Some(*found.index) {
        return Ok(());
    }
    let repository = Repository::new(reference.registry(), reference.repository());
    let admitted = admit(policies, signatures, &repository, found.artifact, Vec::new());
    let (verdict, _) = admitted.map_err(|error| Untrusted::Policy(Box::new(error)))?;
    let is_enough = match trust {
        TrustIndex::Signed => false,
        TrustIndex::Default => reference.digest().is_none(),
        TrustIndex::Repository | TrustIndex::Digest(_) => true,
    };
    match trust {
        _ if is_enough || !verdict.signed_by.is_empty() => Ok(()),
        TrustIndex::Signed => Err(Untrusted::Unsigned),
        _ => Err(Untrusted::Unnamed),
    }
}

/// Returns the index that a manifest names.
fn named(manifest: &[u8]) -> Option<Digest> {
    #[derive(Deserialize)]
    struct Annotated {
        annotations: std::collections::BTreeMap<String, String>,
    }
    let Annotated { annotations } = serde_json::from_slice(manifest).ok()?;
    annotations.get(INDEX_ANNOTATION)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use oci::manifest::Descriptor;
    use serde_json::json;

    use super::*;

    /// A source without signatures.
    struct Unsigned;

    impl SignatureSource for Unsigned {
        type Error = std::io::Error;

        fn manifest_by_tag(&self, _: &str) -> Result<Option<Vec<u8>>, Self::Error> {
            Ok(None)
        }

        fn referrers(&self, _: &Digest, _: &str) -> Result<Vec<Descriptor>, Self::Error> {
            Ok(Vec::new())
        }

        fn manifest(&self, _: &Digest) -> Result<Option<Vec<u8>>, Self::Error> {
            Ok(None)
        }

        fn blob(&self, _: &Digest, _: u64) -> Result<Vec<u8>, Self::Error> {
            Err(std::io::ErrorKind::NotFound.into())
        }
    }

    #[track_caller]
    fn check(policy: &str, reference: &str, trust: &str, annotation: Option<&str>, expect: &str) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(policy.as_bytes()).unwrap();
        let policies = Policies::load(&[file.path().to_owned()]).unwrap();
        let (artifact, index) = (Digest::sha256(b"artifact"), Digest::sha256(b"index"));
        let manifest = match annotation {
            Some(text) => {
                json!({"annotations": {INDEX_ANNOTATION: Digest::sha256(text.as_bytes())}})
            }
            None => json!({"annotations": null}),
        };
        let manifest = manifest.to_string().into_bytes();
        let found = FoundIndex { artifact: &artifact, index: &index, manifest: &manifest };
        let trust = match trust {
            "" => TrustIndex::Default,
            "repository" => "repository".parse().unwrap(),
            "signed" => TrustIndex::Signed,
            text => Digest::sha256(text.as_bytes()).to_string().parse().unwrap(),
        };
        let reference = reference.parse().unwrap();
        let checked = super::check(&found, &reference, &policies, &Unsigned, trust);
        let text = checked.map_or_else(|error| testing::chain(&error), |()| "trusted".to_owned());
        assert!(text.contains(expect), "{text}");
    }

    #[test]
    fn what_is_named_by_a_digest_needs_an_index_that_is_named() {
        let tag = "r.example/app:1";
        let pinned = format!("r.example/app@{}", Digest::sha256(b"manifest"));
        let both = format!("r.example/app:1@{}", Digest::sha256(b"manifest"));
        let any = "default = \"any\"\n";
        check(any, tag, "", None, "trusted");
        check(any, &pinned, "", None, "anyone with push rights");
        check(any, &both, "", None, "anyone with push rights");
        check(any, &pinned, "repository", None, "trusted");
        check(any, &pinned, "artifact", None, "trusted");
        check(any, &pinned, "index", None, "trusted");
        check(any, &pinned, "other", None, "--trust-index names another index");
        check(any, tag, "other", None, "--trust-index names another index");
        check(any, &pinned, "", Some("index"), "trusted");
        // A manifest that names its own index does not replace a required signature.
        for reference in [tag, &pinned] {
            check(any, reference, "signed", None, "no key of a policy");
            check(any, reference, "signed", Some("index"), "no key of a policy");
        }
        check(any, &pinned, "", Some("other"), "anyone with push rights");
    }

    #[test]
    fn policies_have_to_accept_what_no_accepted_manifest_names() {
        let tag = "r.example/app:1";
        let none = "default = \"none\"\n";
        for trust in ["", "repository", "artifact", "index"] {
            check(none, tag, trust, None, "a policy refuses it");
        }
        check(none, tag, "", Some("index"), "trusted");
    }

    #[test]
    fn other_words_are_refused() {
        let error = "any".parse::<TrustIndex>().unwrap_err().to_string();
        assert_eq!(error, "\"any\" is neither a digest nor \"repository\"");
    }
}
