//! Signatures in cosign's formats.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::verity::ImageId;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::key::PublicKey;
use super::name::Repository;
use crate::Digest;

/// Maximum size of a signed payload, in bytes. Payloads usually have a few hundred bytes plus the signer's
/// annotations.
pub(super) const PAYLOAD_MAX: u64 = 256 << 10;
/// Maximum size of a signature in bytes, larger than that of 8192-bit RSA.
const SIGNATURE_MAX: usize = 2048;

/// Type of a simple signing payload. Source: cosign, `specs/SIGNATURE_SPEC.md`, "Simple Signing".
const SIMPLE_SIGNING: &str = "cosign container image signature";
/// Type of the payload that signs an image without a manifest. It differs from cosign's, so that no program takes one
/// for the other. Source: `docs/format/object-store.md`, "Signatures".
const IMAGE_SIGNING: &str = "quire image signature";
/// Payload type of an envelope. Source: DSSE and in-toto, as in sigstore's `protobuf-specs`, `sigstore_bundle.proto`.
const IN_TOTO: &str = "application/vnd.in-toto+json";
const STATEMENT: &str = "https://in-toto.io/Statement/v1";
/// Predicate type with which cosign 3 signs an image. Attestations have other types.
const COSIGN_SIGN: &str = "https://sigstore.dev/cosign/sign/v1";

/// The format of a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Cosign's first format: the payload itself is signed.
    SimpleSigning,
    /// The format of sigstore bundles: an in-toto statement in a DSSE envelope.
    Dsse,
    /// As `SimpleSigning`, but for the id of an image without a manifest.
    Image,
}

/// The subject of a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SignedItem {
    /// A manifest or an index.
    Manifest(Digest),
    /// The files of an image, which has no manifest.
    Image(ImageId),
}

impl fmt::Display for SignedItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manifest(digest) => write!(f, "manifest {digest}"),
            Self::Image(image) => write!(f, "image {image}"),
        }
    }
}

impl From<&Digest> for SignedItem {
    fn from(manifest: &Digest) -> Self {
        Self::Manifest(*manifest)
    }
}

impl From<&ImageId> for SignedItem {
    fn from(image: &ImageId) -> Self {
        Self::Image(*image)
    }
}

impl SignedItem {
    /// Returns the form of its signatures that Quire makes.
    #[must_use]
    pub const fn form(&self) -> Form {
        match self {
            Self::Manifest(_) => Form::SimpleSigning,
            Self::Image(_) => Form::Image,
        }
    }

    /// Returns the payload to sign, byte for byte as cosign writes it. `reference` names the repository; it may be
    /// empty.
    #[must_use]
    pub fn payload(&self, reference: &str) -> Vec<u8> {
        let (image, kind) = match self {
            Self::Manifest(digest) => {
                (json!({"docker-manifest-digest": digest.to_string()}), SIMPLE_SIGNING)
            }
            Self::Image(image) => (json!({"quire-image-id": image.to_string()}), IMAGE_SIGNING),
        };
        let identity = json!({"docker-reference": reference});
        let critical = json!({"identity": identity, "image": image, "type": kind});
        json!({"critical": critical, "optional": null}).to_string().into_bytes()
    }
}

/// An unverified signature that claims to be for a manifest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Signature {
    pub(super) form: Form,
    pub(super) payload: Vec<u8>,
    pub(super) signature: Vec<u8>,
}

/// The content of a signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Signed manifests or indexes.
    pub digests: Vec<Digest>,
    /// Signed image, which has no manifest.
    pub image: Option<ImageId>,
    /// Repository that the signer named.
    pub repository: Option<Repository>,
}

impl Claim {
    /// Whether this is a signature of the item.
    #[must_use]
    pub fn is_for(&self, item: &SignedItem) -> bool {
        match item {
            SignedItem::Manifest(digest) => self.digests.contains(digest),
            SignedItem::Image(image) => self.image.as_ref() == Some(image),
        }
    }
}

#[derive(Deserialize)]
struct SimpleSigning<I> {
    critical: Critical<I>,
}

#[derive(Deserialize)]
struct Critical<I> {
    identity: Identity,
    image: I,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct Identity {
    #[serde(rename = "docker-reference")]
    reference: String,
}

#[derive(Deserialize)]
struct SignedManifest {
    #[serde(rename = "docker-manifest-digest")]
    digest: Digest,
}

#[derive(Deserialize)]
struct SignedImage {
    #[serde(rename = "quire-image-id")]
    id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    predicate_type: String,
    subject: Vec<Subject>,
}

#[derive(Deserialize)]
struct Subject {
    digest: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    dsse_envelope: Envelope,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Deserialize)]
struct EnvelopeSignature {
    sig: String,
}

impl Signature {
    /// Makes a signature from a payload and cosign's annotation, which is base64.
    pub(super) fn simple(payload: Vec<u8>, signature: &str) -> Option<Self> {
        let signature = STANDARD.decode(signature).ok()?;
        Self::new(Form::SimpleSigning, payload, signature)
    }

    /// The same for the signature of an image id.
    pub(super) fn of_image(payload: Vec<u8>, signature: &str) -> Option<Self> {
        let signature = STANDARD.decode(signature).ok()?;
        Self::new(Form::Image, payload, signature)
    }

    /// Makes a signature from a sigstore bundle.
    pub(super) fn from_bundle(bundle: &[u8]) -> Option<Self> {
        let Bundle { dsse_envelope: envelope } = serde_json::from_slice(bundle).ok()?;
        let [EnvelopeSignature { sig }] = envelope.signatures.as_slice() else { return None };
        if envelope.payload_type != IN_TOTO {
            return None;
        }
        let payload = STANDARD.decode(envelope.payload).ok()?;
        Self::new(Form::Dsse, payload, STANDARD.decode(sig).ok()?)
    }

    /// `None` if a part is too large, or the payload is not about an image.
    pub(crate) fn new(form: Form, payload: Vec<u8>, signature: Vec<u8>) -> Option<Self> {
        let fits = payload.len() as u64 <= PAYLOAD_MAX && signature.len() <= SIGNATURE_MAX;
        let this = Self { form, payload, signature };
        (fits && this.claim().is_some()).then_some(this)
    }

    /// Returns its format.
    #[must_use]
    pub const fn form(&self) -> Form {
        self.form
    }

    /// Returns the signed bytes.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Parses its content. `None` if the content is not about an image.
    #[must_use]
    pub fn claim(&self) -> Option<Claim> {
        match self.form {
            Form::SimpleSigning => {
                let SimpleSigning::<SignedManifest> { critical } =
                    serde_json::from_slice(&self.payload).ok()?;
                let repository = Repository::from_reference(&critical.identity.reference);
                let digests = vec![critical.image.digest];
                let claim = Claim { digests, image: None, repository };
                (critical.kind == SIMPLE_SIGNING).then_some(claim)
            }
            Form::Image => {
                let SimpleSigning::<SignedImage> { critical } =
                    serde_json::from_slice(&self.payload).ok()?;
                let repository = Repository::from_reference(&critical.identity.reference);
                let image = Some(critical.image.id.parse().ok()?);
                let claim = Claim { digests: Vec::new(), image, repository };
                (critical.kind == IMAGE_SIGNING).then_some(claim)
            }
            Form::Dsse => {
                let statement: Statement = serde_json::from_slice(&self.payload).ok()?;
                if statement.kind != STATEMENT || statement.predicate_type != COSIGN_SIGN {
                    return None;
                }
                let digest = |subject: &Subject| {
                    let sha256 = subject.digest.get("sha256")?;
                    format!("sha256:{sha256}").parse().ok()
                };
                let digests = statement.subject.iter().filter_map(digest).collect();
                Some(Claim { digests, image: None, repository: None })
            }
        }
    }

    /// Whether this key verifies the signature.
    #[must_use]
    pub fn is_by(&self, key: &PublicKey) -> bool {
        match self.form {
            Form::SimpleSigning | Form::Image => key.has_signed(&self.payload, &self.signature),
            Form::Dsse => {
                // Source: DSSE 1.0, "PAE".
                let length = self.payload.len();
                let mut message =
                    format!("DSSEv1 {} {IN_TOTO} {length} ", IN_TOTO.len()).into_bytes();
                message.extend_from_slice(&self.payload);
                key.has_signed(&message, &self.signature)
            }
        }
    }
}
