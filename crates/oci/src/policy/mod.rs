//! Policies: decide which images may be used, by origin and signatures.
//!
//! A policy is evaluated when an image is pulled, and again whenever it is mounted or run. The later decisions use
//! the evidence that the pull stored, because the policy may have changed and the registry may be unreachable. The
//! user manual is `docs/policy.md`.

mod attach;
mod collect;
mod evidence;
mod file;
mod key;
mod layout;
mod name;
#[cfg(feature = "registry")]
mod registry;
mod signature;

use std::fmt;
use std::path::{Path, PathBuf};

pub use attach::{AttachError, SignatureTag, attach, attach_of_image, signature_tag};
pub use collect::{COSIGN_SIGNATURE, CollectError, SIGSTORE_BUNDLE, SignatureSource};
pub use evidence::Evidence;
pub use file::{Accept, Default, Flaw, Identity, Policy, PolicyError, Rule};
pub use key::{KeyError, PublicKey};
pub use layout::{LayoutSignatures, image_signature_tag};
pub use name::{ImageOrigin, Pattern, Repository};
#[cfg(feature = "registry")]
pub use registry::Unanswered;
pub use signature::{Claim, Form, Signature, SignedItem};

use image::verity::ImageId;

use crate::Digest;

/// The policies in force. All of them must accept an image; if there is none, every image is accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policies(Vec<Policy>);

/// An image about which policies decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Name in messages.
    pub name: String,
    /// Origin of the image.
    pub source: ImageOrigin,
    /// Digest of its manifest, if it has one.
    pub manifest: Option<Digest>,
    /// How an image that was made on this host is used; `None` for others.
    pub local: Option<LocalUse>,
}

/// The use of an image that was made on this host. Its id must be signed, because the store's record of its manifest is not
/// verified. The manifest must be signed as well if its settings are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalUse {
    /// Id of the image.
    pub image: ImageId,
    /// Whether the settings in the manifest are used.
    pub uses_manifest: bool,
}

/// The decision that an image may be used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Key files that verified a signature: one for each policy that requires one.
    pub signed_by: Vec<PathBuf>,
}

/// The decision that an image may not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Refused image.
    pub subject: Subject,
    /// Policy that refuses the image.
    pub file: PathBuf,
    /// Number and line of the rule, both from 1, and its patterns; `None` for the default.
    pub rule: Option<(usize, usize, String)>,
    /// Reason of the refusal.
    pub reason: Reason,
}

/// The reason why a policy refuses an image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The rule accepts no image.
    Forbidden,
    /// The manifest is not one of this many that the rule accepts.
    Digest(usize),
    /// The image has no signature, and needs one by one of these keys.
    Unsigned(Vec<PathBuf>),
    /// The image has this many signatures, but none by one of these keys.
    Key(usize, Vec<PathBuf>),
    /// The evidence has this many signatures, but all for other images.
    Other(usize),
    /// The signature names the wrong repository. Has that repository (if any), the key, and the required identity.
    Identity(Option<Repository>, PathBuf, Identity),
}

impl std::error::Error for Refusal {}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, file) = (&self.subject.name, self.file.display());
        let source = self.subject.source.to_string();
        let Some((number, line, patterns)) = &self.rule else {
            if self.subject.source == ImageOrigin::Unknown {
                return write!(
                    f,
                    "the default of {file} refuses {name}: the store does not have the origin of \
                    the image, so no rule applies; import or pull it again"
                );
            }
            return write!(
                f,
                "the default of {file} refuses {name}: no rule matches {source}; add a [[rule]] \
                with match = \"{source}\""
            );
        };
        write!(f, "rule {number} of {file} (line {line}, for {patterns}) refuses {name}: ")?;
        let files = |keys: &[PathBuf]| {
            let keys: Vec<_> = keys.iter().map(|it| it.display().to_string()).collect();
            keys.join(" or ")
        };
        let is_local = self.subject.source == ImageOrigin::Local;
        let again = if is_local { "" } else { ", and pull it again" };
        match &self.reason {
            Reason::Forbidden => {
                write!(f, "it accepts no images; a rule before it may accept {source}")
            }
            Reason::Digest(count) => match &self.subject.manifest {
                Some(manifest) => write!(
                    f,
                    "neither {manifest} nor an index that lists it is among the rule's {count} \
                    digests; add it to digests"
                ),
                None => write!(f, "it accepts {count} digests, but this image has no manifest"),
            },
            Reason::Unsigned(keys) if is_local => write!(
                f,
                "the store has no signature of the image; sign it with the private key of {}",
                files(keys)
            ),
            Reason::Unsigned(keys) => write!(
                f,
                "the store has no signature of the image; if {} signed it, pull it again, else \
                sign it first",
                files(keys)
            ),
            Reason::Key(count, keys) => write!(
                f,
                "{count} signature(s), but none by {}; sign the image with that key{again}",
                files(keys)
            ),
            Reason::Other(count) => {
                write!(f, "{count} signature(s), but for other images; sign this one{again}")
            }
            Reason::Identity(signed, key, wanted) => {
                let wanted = match wanted {
                    Identity::Named(name) => name.as_str(),
                    Identity::Repository | Identity::Any => &source,
                };
                let key = key.display();
                match signed {
                    Some(signed) => write!(
                        f,
                        "{key} signed it as {signed}, not as {wanted}; identity = \"{signed}\" \
                        would accept that"
                    ),
                    None => write!(
                        f,
                        "{key} signed it, but the signature states no identity, so it does not \
                        match {wanted}; identity = \"any\" would accept it"
                    ),
                }
            }
        }
    }
}

/// The error of [`admit`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// A policy refuses the image.
    #[error(transparent)]
    Refused(#[from] Box<Refusal>),
    /// The signatures cannot be fetched.
    #[error(transparent)]
    Collect(#[from] CollectError),
}

impl Policies {
    /// Loads a policy from each of the files that exists.
    ///
    /// # Errors
    /// [`PolicyError`] if a file exists but is unusable. Then no image may be used.
    pub fn load(files: &[PathBuf]) -> Result<Self, PolicyError> {
        let mut found = Vec::new();
        for file in files {
            found.extend(Policy::load(file)?);
        }
        Ok(Self(found))
    }

    /// Whether there is no policy, so that every image is accepted.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all policies, in the order of the files.
    #[must_use]
    pub fn all(&self) -> &[Policy] {
        &self.0
    }

    /// Whether any policy needs signatures of an image from `source`.
    #[must_use]
    pub fn wants_signatures(&self, source: &ImageOrigin) -> bool {
        let rules = self.0.iter().filter_map(|it| it.rule_for(source));
        rules.into_iter().any(|(_, rule)| matches!(rule.accept, Accept::Signed(..)))
    }

    /// Returns the file of the first key of any rule that verifies the signature.
    #[must_use]
    pub fn key_of(&self, signature: &Signature) -> Option<&Path> {
        let rules = self.0.iter().flat_map(|it| &it.rules);
        let keys = rules.flat_map(|rule| match &rule.accept {
            Accept::Signed(keys, _) => keys.as_slice(),
            Accept::Any | Accept::None => &[],
        });
        let mut keys = keys.filter(|(_, key)| signature.is_by(key));
        keys.next().map(|(file, _)| file.as_path())
    }

    /// Decides whether an image may be used.
    ///
    /// # Errors
    /// The [`Refusal`] of the first policy that refuses.
    pub fn decide(&self, subject: &Subject, evidence: &Evidence) -> Result<Verdict, Box<Refusal>> {
        let mut verdict = Verdict::default();
        for policy in &self.0 {
            let refuse = |rule, reason| {
                let (subject, file) = (subject.clone(), policy.file.clone());
                Box::new(Refusal { subject, file, rule, reason })
            };
            match policy.rule_for(&subject.source) {
                Some((number, rule)) => {
                    let signed = rule.decide(subject, evidence).map_err(|reason| {
                        let patterns: Vec<_> =
                            rule.patterns.iter().map(ToString::to_string).collect();
                        refuse(Some((number, rule.line, patterns.join(", "))), reason)
                    })?;
                    verdict.signed_by.extend(signed);
                }
                None if policy.default == Default::None => {
                    return Err(refuse(None, Reason::Forbidden));
                }
                None => {}
            }
        }
        Ok(verdict)
    }
}

impl Policy {
    /// Returns the first rule that matches `source`, and its number from 1.
    fn rule_for(&self, source: &ImageOrigin) -> Option<(usize, &Rule)> {
        let rules = self.rules.iter().enumerate().map(|(at, rule)| (at + 1, rule));
        let mut rules = rules.filter(|it| it.1.patterns.iter().any(|it| it.matches(source)));
        rules.next()
    }
}

impl Rule {
    /// Returns the file of the key that verified a signature, if the rule requires one.
    fn decide(&self, subject: &Subject, evidence: &Evidence) -> Result<Option<PathBuf>, Reason> {
        if self.accept == Accept::None {
            return Err(Reason::Forbidden);
        }
        let names = subject.manifest.map(|it| evidence.names_of(&it)).unwrap_or_default();
        if !self.digests.is_empty() && !names.iter().any(|it| self.digests.contains(it)) {
            return Err(Reason::Digest(self.digests.len()));
        }
        let Accept::Signed(keys, identity) = &self.accept else { return Ok(None) };
        let names: Vec<_> = names.iter().map(SignedItem::from).collect();
        let signed = |items: &[SignedItem]| signer(keys, identity, items, subject, evidence);
        let Some(local) = &subject.local else { return signed(&names).map(Some) };
        if local.uses_manifest {
            signed(&names)?;
        }
        signed(&[SignedItem::Image(local.image)]).map(Some)
    }
}

/// Returns the file of the first key that has signed one of these items with the required identity.
fn signer(
    keys: &[(PathBuf, PublicKey)],
    identity: &Identity,
    items: &[SignedItem],
    subject: &Subject,
    evidence: &Evidence,
) -> Result<PathBuf, Reason> {
    let files = || keys.iter().map(|it| it.0.clone()).collect();
    let count = evidence.all_signatures().count();
    let claims = evidence.all_signatures().filter_map(|it| Some((it, it.claim()?)));
    let claims = claims.filter(|(_, claim)| items.iter().any(|it| claim.is_for(it)));
    let claims: Vec<_> = claims.collect();
    if claims.is_empty() {
        return Err(if count == 0 { Reason::Unsigned(files()) } else { Reason::Other(count) });
    }
    let mut reason = Reason::Key(claims.len(), files());
    for (signature, claim) in claims {
        let Some((file, _)) = keys.iter().find(|(_, key)| signature.is_by(key)) else {
            continue;
        };
        let fits = match identity {
            Identity::Any => true,
            Identity::Named(name) => claim.repository.as_ref() == Some(name),
            Identity::Repository => match (&claim.repository, &subject.source) {
                (Some(signed), ImageOrigin::Repository(name)) => signed == name,
                _ => false,
            },
        };
        if fits {
            return Ok(file.clone());
        }
        reason = Reason::Identity(claim.repository, file.clone(), identity.clone());
    }
    Err(reason)
}

/// Decides whether an image may be pulled, and fetches its signatures if the policies need any. Returns the evidence
/// to store, on which later decisions are based.
///
/// `indexes` are the indexes that led to the manifest, byte for byte and with verified digests.
///
/// # Errors
/// [`AdmitError`] if a policy refuses the image, or if the signatures cannot be fetched.
pub fn admit(
    policies: &Policies,
    registry: &impl SignatureSource,
    repository: &Repository,
    manifest: &Digest,
    indexes: Vec<Vec<u8>>,
) -> Result<(Verdict, Evidence), AdmitError> {
    let mut signatures = Vec::new();
    let source = ImageOrigin::Repository(repository.clone());
    if policies.wants_signatures(&source) {
        for name in evidence::names_of(manifest, &indexes) {
            signatures.extend(collect::collect(registry, &name)?);
        }
        // Signatures by known keys come first, because only a limited number is stored, and anyone may sign.
        signatures.sort_by_key(|it| policies.key_of(it).is_none());
        // The rest of the room in the store is for signatures from other registries.
        signatures.truncate(collect::SIGNATURES_MAX);
    }
    let evidence =
        Evidence { origins: vec![repository.clone()], indexes, signatures, own: Vec::new() };
    let name = format!("{repository}@{manifest}");
    let subject = Subject { name, source, manifest: Some(*manifest), local: None };
    let verdict = policies.decide(&subject, &evidence)?;
    Ok((verdict, evidence))
}
