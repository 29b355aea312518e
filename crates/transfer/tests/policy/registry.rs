//! A repository in memory with configured responses.

use std::collections::BTreeMap;
use std::convert::Infallible;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use oci::Digest;
use oci::manifest::Descriptor;
use oci::policy::{COSIGN_SIGNATURE, SIGSTORE_BUNDLE, SignatureSource};
use serde_json::json;

use crate::keys::Key;

const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";

#[derive(Debug, Default)]
pub(crate) struct Registry {
    pub(crate) tags: BTreeMap<String, Vec<u8>>,
    pub(crate) contents: BTreeMap<Digest, Vec<u8>>,
    /// Manifests by their subject and artifact type.
    pub(crate) referrers: Vec<(Digest, String, Digest)>,
}

/// The payload that cosign signs. Source: its `specs/SIGNATURE_SPEC.md`, with the bytes that Go's encoder writes.
pub(crate) fn payload(reference: &str, digest: &Digest) -> Vec<u8> {
    format!(
        "{{\"critical\":{{\"identity\":{{\"docker-reference\":\"{reference}\"}},\"image\":{{\"docker-manifest-digest\":\
         \"{digest}\"}},\"type\":\"cosign container image signature\"}},\"optional\":null}}"
    )
    .into_bytes()
}

impl Registry {
    fn put(&mut self, bytes: Vec<u8>) -> Digest {
        let digest = Digest::sha256(&bytes);
        self.contents.insert(digest, bytes);
        digest
    }

    /// Makes the manifest of a signature, like `cosign sign`.
    fn artifact(&mut self, payload: &[u8], signature: &[u8]) -> Vec<u8> {
        let blob = self.put(payload.to_vec());
        let annotations = json!({"dev.cosignproject.cosign/signature": STANDARD.encode(signature)});
        let layer = json!({"mediaType": SIMPLE_SIGNING, "size": payload.len(), "digest": blob, "annotations": annotations});
        let config = json!({"mediaType": "application/vnd.oci.image.config.v1+json", "size": 2, "digest": Digest::sha256(b"{}")});
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": [layer]});
        manifest.to_string().into_bytes()
    }

    /// Adds a signature where cosign 1 and 2 put it.
    pub(crate) fn tag_signature(&mut self, of: &Digest, payload: &[u8], signature: &[u8]) {
        let artifact = self.artifact(payload, signature);
        self.tags.insert(format!("{}.sig", of.to_string().replace(':', "-")), artifact);
    }

    /// Adds a signature as a referrer of the image, like cosign 2 with `--registry-referrers-mode=oci-1-1`.
    pub(crate) fn refer_signature(&mut self, of: &Digest, payload: &[u8], signature: &[u8]) {
        let artifact = self.artifact(payload, signature);
        let artifact = self.put(artifact);
        self.referrers.push((*of, COSIGN_SIGNATURE.to_owned(), artifact));
    }

    /// Adds a sigstore bundle as a referrer of the image, like cosign 3.
    pub(crate) fn refer_bundle(&mut self, of: &Digest, key: &Key, statement: &[u8]) {
        let kind = "application/vnd.in-toto+json";
        let mut message = format!("DSSEv1 28 {kind} {} ", statement.len()).into_bytes();
        message.extend_from_slice(statement);
        let signature = STANDARD.encode(key.sign(&message));
        let envelope = json!({"payload": STANDARD.encode(statement), "payloadType": kind, "signatures": [{"sig": signature}]});
        let bundle = json!({"mediaType": SIGSTORE_BUNDLE, "verificationMaterial": {"publicKey": {"hint": "x"}}, "dsseEnvelope": envelope});
        let bundle = bundle.to_string().into_bytes();
        let layer =
            json!({"mediaType": SIGSTORE_BUNDLE, "size": bundle.len(), "digest": self.put(bundle)});
        let manifest =
            json!({"schemaVersion": 2, "artifactType": SIGSTORE_BUNDLE, "layers": [layer]});
        let manifest = self.put(manifest.to_string().into_bytes());
        self.referrers.push((*of, SIGSTORE_BUNDLE.to_owned(), manifest));
    }
}

impl SignatureSource for Registry {
    type Error = Infallible;

    fn manifest_by_tag(&self, tag: &str) -> Result<Option<Vec<u8>>, Infallible> {
        Ok(self.tags.get(tag).cloned())
    }

    fn referrers(&self, digest: &Digest, kind: &str) -> Result<Vec<Descriptor>, Infallible> {
        let found = self.referrers.iter().filter(|it| it.0 == *digest && it.1 == kind);
        let found = found.map(|it| json!({"mediaType": "", "digest": it.2, "size": 1}));
        Ok(found.map(|it| serde_json::from_value(it).unwrap()).collect())
    }

    fn manifest(&self, digest: &Digest) -> Result<Option<Vec<u8>>, Infallible> {
        Ok(self.contents.get(digest).cloned())
    }

    fn blob(&self, digest: &Digest, limit: u64) -> Result<Vec<u8>, Infallible> {
        let bytes = self.contents[digest].clone();
        assert!(bytes.len() as u64 <= limit);
        Ok(bytes)
    }
}
