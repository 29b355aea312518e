//! Policies: decide which images may be used, by origin and signatures.
//!
//! A policy is evaluated when an image is pulled, and again whenever it is mounted or run. The later decisions use
//! the evidence that the pull stored, because the policy may have changed and the registry may be unreachable. The
//! user manual is `docs/policy.md`.

mod collect;
mod evidence;
mod file;
mod key;
mod name;
#[cfg(feature = "registry")]
mod registry;
mod signature;

use std::fmt;
use std::path::PathBuf;

pub use collect::{COSIGN_SIGNATURE, CollectError, SIGSTORE_BUNDLE, SignatureSource};
pub use evidence::Evidence;
pub use file::{Accept, Default, Flaw, Identity, Policy, PolicyError, Rule};
pub use key::{KeyError, PublicKey};
pub use name::{ImageOrigin, Pattern, Repository};
#[cfg(feature = "registry")]
pub use registry::Unanswered;
pub use signature::{Claim, Form, Signature};

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
            Reason::Unsigned(keys) => write!(
                f,
                "the store has no signature of the image; if {} signed it, pull it again, else \
                sign it first",
                files(keys)
            ),
            Reason::Key(count, keys) => write!(
                f,
                "{count} signature(s), but none by {}; sign the image with that key, and pull it \
                again",
                files(keys)
            ),
            Reason::Other(count) => {
                write!(
                    f,
                    "{count} signature(s), but for other images; sign this one, and pull it again"
                )
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

    /// Whether the signature was made with a key of any rule.
    fn know(&self, signature: &Signature) -> bool {
        let rules = self.0.iter().flat_map(|it| &it.rules);
        rules.into_iter().any(|rule| match &rule.accept {
            Accept::Signed(keys, _) => keys.iter().any(|(_, key)| signature.is_by(key)),
            Accept::Any | Accept::None => false,
        })
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
        let files = || keys.iter().map(|it| it.0.clone()).collect();
        let count = evidence.signatures.len();
        let claims = evidence.signatures.iter().filter_map(|it| Some((it, it.claim()?)));
        let claims = claims.filter(|(_, claim)| claim.digests.iter().any(|it| names.contains(it)));
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
                return Ok(Some(file.clone()));
            }
            reason = Reason::Identity(claim.repository, file.clone(), identity.clone());
        }
        Err(reason)
    }
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
        signatures.sort_by_key(|it| !policies.know(it));
    }
    let evidence = Evidence { origins: vec![repository.clone()], indexes, signatures };
    let subject =
        Subject { name: format!("{repository}@{manifest}"), source, manifest: Some(*manifest) };
    let verdict = policies.decide(&subject, &evidence)?;
    Ok((verdict, evidence))
}
