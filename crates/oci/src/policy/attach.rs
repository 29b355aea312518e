//! The place of an image's signatures in a registry, where cosign 1 and 2, skopeo and podman write them.
//!
//! Source: cosign, `specs/SIGNATURE_SPEC.md`, "Tag-based Discovery" and "Storage".

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::key::PublicKey;
use super::signature::{Form, Signature};
use crate::Digest;

/// Media type of the payload of a signature.
pub(super) const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// Media type of the payload that signs an image id.
pub(super) const IMAGE_SIGNING: &str = "application/vnd.quire.image-signature.v1+json";
/// Annotation of a payload: the signature in base64.
pub(super) const ANNOTATION: &str = "dev.cosignproject.cosign/signature";
/// Media type of the manifest that lists the signatures.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of the config that cosign gives this manifest.
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// Returns the tag at which the signatures of a manifest are.
#[must_use]
pub fn signature_tag(manifest: &Digest) -> String {
    format!("{}.sig", manifest.to_string().replacen(':', "-", 1))
}

/// The documents at the tag of an image's signatures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignatureTag {
    /// Manifest that lists the signatures.
    pub manifest: Vec<u8>,
    /// Media type of the manifest.
    pub media_type: &'static str,
    /// Blobs that the manifest needs and that may be missing.
    pub blobs: Vec<Vec<u8>>,
}

/// The error that the tag of an image's signatures has another document, which must not be overwritten.
#[derive(Debug, thiserror::Error)]
#[error("the tag of the image's signatures has a document that is not a list of signatures")]
pub struct AttachError;

/// Adds signatures to the manifest at the tag, of which `old` is the current one. Returns `None` if it has all of
/// them. Only signatures in the form of simple signing can be added; others are left out. A signature by `key` is not
/// added if the manifest has another one by this key of the same payload, because signatures by ECDSA differ each
/// time.
///
/// # Errors
/// [`AttachError`] if `old` is not such a manifest.
pub fn attach(
    old: Option<&[u8]>,
    signatures: &[Signature],
    key: Option<&PublicKey>,
) -> Result<Option<SignatureTag>, AttachError> {
    add(old, signatures, Form::SimpleSigning, key)
}

/// As [`attach`], for the signatures of image ids. Only layouts have them.
///
/// # Errors
/// As [`attach`].
pub fn attach_of_image(
    old: Option<&[u8]>,
    signatures: &[Signature],
) -> Result<Option<SignatureTag>, AttachError> {
    add(old, signatures, Form::Image, None)
}

/// Adds the signatures of one form.
fn add(
    old: Option<&[u8]>,
    signatures: &[Signature],
    form: Form,
    key: Option<&PublicKey>,
) -> Result<Option<SignatureTag>, AttachError> {
    let payload_type = if form == Form::Image { IMAGE_SIGNING } else { SIMPLE_SIGNING };
    let mut manifest = match old {
        None => Map::new(),
        Some(old) => serde_json::from_slice(old).map_err(|_error| AttachError)?,
    };
    let mut layers = match manifest.remove("layers") {
        None if old.is_none() => Vec::new(),
        Some(Value::Array(layers)) => layers,
        _ => return Err(AttachError),
    };
    let digest = |layer: &Value| layer["digest"].as_str().map(str::to_owned).ok_or(AttachError);
    let is_signature = |it: &Value| it["annotations"][ANNOTATION].is_string() && digest(it).is_ok();
    if !layers.iter().all(is_signature) {
        return Err(AttachError);
    }
    let mut blobs = Vec::new();
    // The last one that is added becomes the first one of the list.
    for signature in signatures.iter().rev().filter(|it| it.form == form) {
        let payload = Digest::sha256(&signature.payload).to_string();
        let text = STANDARD.encode(&signature.signature);
        let is_by = |key: &PublicKey, text: &str| {
            let bytes = STANDARD.decode(text).unwrap_or_default();
            signature.is_by(key) && key.has_signed(&signature.payload, &bytes)
        };
        let is_same = |it: &Value| {
            let other = it["annotations"][ANNOTATION].as_str().unwrap_or_default();
            it["digest"] == payload && (other == text || key.is_some_and(|key| is_by(key, other)))
        };
        if layers.iter().any(is_same) {
            continue;
        }
        let layer = json!({
            "mediaType": payload_type, "size": signature.payload.len(), "digest": payload,
            "annotations": {ANNOTATION: text},
        });
        // Verifiers read a limited number of signatures, so the new one is the first.
        layers.insert(0, layer);
        blobs.push(signature.payload.clone());
    }
    if blobs.is_empty() {
        return Ok(None);
    }
    // Payloads are not compressed, so their diff ids are their digests.
    let diff_ids = layers.iter().map(digest).collect::<Result<Vec<_>, _>>()?;
    let rootfs = json!({"type": "layers", "diff_ids": diff_ids});
    let config = json!({"architecture": "", "os": "", "config": {}, "rootfs": rootfs});
    let config = config.to_string().into_bytes();
    let descriptor = json!({"mediaType": CONFIG, "size": config.len(), "digest": Digest::sha256(&config).to_string()});
    manifest.insert("schemaVersion".to_owned(), 2.into());
    manifest.insert("mediaType".to_owned(), MANIFEST.into());
    manifest.insert("config".to_owned(), descriptor);
    manifest.insert("layers".to_owned(), layers.into());
    blobs.push(config);
    let manifest = Value::from(manifest).to_string().into_bytes();
    Ok(Some(SignatureTag { manifest, media_type: MANIFEST, blobs }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{attach, signature_tag};
    use crate::Digest;
    use crate::policy::{Form, Signature, SignedItem};

    fn signature(reference: &str, bytes: &[u8]) -> Signature {
        let item = SignedItem::Manifest(Digest::sha256(b"manifest"));
        Signature::new(Form::SimpleSigning, item.payload(reference), bytes.to_vec()).unwrap()
    }

    #[test]
    fn signatures_are_added_and_none_is_lost() {
        let attach = |old: Option<&[u8]>, new: &[Signature]| attach(old, new, None);
        let [one, two] = [signature("ghcr.io/a", b"one"), signature("ghcr.io/a", b"two")];
        let first = attach(None, std::slice::from_ref(&one)).unwrap().unwrap();
        assert_eq!(attach(Some(&first.manifest), std::slice::from_ref(&one)).unwrap(), None);
        let both = attach(Some(&first.manifest), &[one, two]).unwrap().unwrap();
        let manifest: Value = serde_json::from_slice(&both.manifest).unwrap();
        let layers = manifest["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 2);
        // `two` in base64, by base64(1).
        assert_eq!(layers[0]["annotations"]["dev.cosignproject.cosign/signature"], "dHdv");
        let config = both.blobs.last().unwrap();
        assert_eq!(manifest["config"]["digest"], Digest::sha256(config).to_string());
        let config: Value = serde_json::from_slice(config).unwrap();
        let ids: Vec<_> = layers.iter().map(|it| it["digest"].clone()).collect();
        assert_eq!(config["rootfs"]["diff_ids"], Value::from(ids));
    }

    #[test]
    fn other_documents_are_not_overwritten() {
        let index = json!({"schemaVersion": 2, "manifests": []}).to_string();
        let odd = json!({"layers": [1]}).to_string();
        let layer =
            json!({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": "sha256:00"});
        let image = json!({"schemaVersion": 2, "layers": [layer]}).to_string();
        for old in ["", "[]", "{}", "{\"layers\":1}", &index, &odd, &image] {
            let added = attach(Some(old.as_bytes()), &[signature("ghcr.io/a", b"x")], None);
            assert!(added.is_err(), "{old}");
        }
    }

    #[test]
    fn signatures_of_ids_are_for_no_registry() {
        let id = "ab".repeat(32).parse().unwrap();
        let payload = SignedItem::Image(id).payload("");
        let signature = Signature::new(Form::Image, payload, Vec::new()).unwrap();
        assert_eq!(attach(None, &[signature], None).unwrap(), None);
    }

    /// Source: cosign, `specs/SIGNATURE_SPEC.md`, "Tag-based Discovery".
    #[test]
    fn the_tag_is_that_of_cosign() {
        let digest =
            "sha256:97fc222cee7991b5b061d4d4afdb5f3428fcb0c9054e1690313786befa1e4e36".parse();
        let tag = "sha256-97fc222cee7991b5b061d4d4afdb5f3428fcb0c9054e1690313786befa1e4e36.sig";
        assert_eq!(signature_tag(&digest.unwrap()), tag);
    }
}
