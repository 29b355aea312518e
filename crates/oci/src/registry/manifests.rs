//! Fetches and puts manifests and indexes, and always verifies their digests.

use std::sync::Arc;

use reqwest::Method;
use reqwest::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};

use super::error::escaped;
use super::hosts::Capability;
use super::transport::Ask;
use super::{AskedHosts, Cause, Core, Registry, RegistryError, patience};
use crate::Digest;
use crate::manifest::MANIFEST_MAX;

/// Accepted media types. Source: OCI image-spec 1.1, `media-types.md`; Docker's `manifest-v2-2.md`.
const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");
const OCI_SUBJECT: HeaderName = HeaderName::from_static("oci-subject");

/// A fetched manifest or index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Digest of the bytes. Equal to the requested digest, if one was requested.
    pub digest: Digest,
    /// Media type from the server, without parameters. May be empty.
    pub media_type: String,
    /// The bytes, unchanged.
    pub bytes: Vec<u8>,
}

/// The result of putting a manifest or index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Digest of the bytes.
    pub digest: Digest,
    /// Whether the registry lists the manifest as a referrer of its `subject`. If it does not, and the manifest has a
    /// subject, the index of referrers was written instead.
    pub knows_subject: bool,
}

impl Registry {
    /// Fetches the manifest or index with a tag or digest, of at most [`MANIFEST_MAX`] bytes.
    ///
    /// # Errors
    /// [`RegistryError`] if the manifest does not exist or cannot be fetched.
    pub fn manifest(&self, tag_or_digest: &str) -> Result<Fetched, RegistryError> {
        let name = tag_or_digest.to_owned();
        self.run(&format!("fetch manifest {name}"), |core| async move {
            let digest: Option<Digest> = name.parse().ok();
            let capability = match digest {
                Some(_) => Capability::Pull,
                None => Capability::Resolve,
            };
            let mut turns =
                core.turns(&format!("fetch manifest {name}"), capability, digest.as_ref());
            loop {
                let index = turns.next().await?;
                match turns.attempt(core.fetch_manifest(index, &name, digest.as_ref())).await {
                    Ok(fetched) => return Ok(fetched),
                    Err(cause) => turns.failed(cause),
                }
            }
        })
    }

    /// Requests a manifest that may not exist, once from each of these hosts until one has it. Returns `None` if there
    /// is no usable response within the time for documents. This is for guesses that save time if they are right.
    #[must_use]
    pub fn guess_manifest(&self, tag: &str, hosts: AskedHosts) -> Option<Fetched> {
        let name = tag.to_owned();
        let what = format!("fetch manifest {name}");
        let fetched = self.run(&what.clone(), |core| async move {
            let mut failure = None;
            for host in core.order_among(hosts) {
                let fetch = core.fetch_manifest(host, &name, None);
                match patience::as_document(core.settings.patience, fetch).await {
                    Ok(fetched) => return Ok(Some(fetched)),
                    Err(cause) => {
                        if cause.is_unreachable() {
                            core.is_unwell(host);
                        }
                        failure = Some(cause);
                    }
                }
            }
            let failed = |cause| RegistryError::new(&what, &core.registry, 1, cause);
            failure.map_or(Ok(None), |cause| Err(failed(cause)))
        });
        let failed = |error: &RegistryError| tracing::debug!(%error, "a guess failed");
        fetched.inspect_err(failed).ok().flatten()
    }

    /// Fetches the manifest or index with a tag from the host that a push changes, because a mirror may have an older
    /// one. `None` if there is none.
    ///
    /// # Errors
    /// [`RegistryError`] if it cannot be fetched.
    pub fn manifest_to_replace(&self, tag: &str) -> Result<Option<Fetched>, RegistryError> {
        let name = tag.to_owned();
        let what = format!("fetch manifest {name}");
        self.run(&what.clone(), |core| async move {
            let mut turns = core.turns(&what, Capability::Push, None);
            loop {
                let index = turns.next().await?;
                match turns.attempt(core.fetch_manifest(index, &name, None)).await {
                    Ok(fetched) => return Ok(Some(fetched)),
                    Err(Cause::NotFound { .. } | Cause::NameUnknown { .. }) => return Ok(None),
                    Err(cause) => turns.failed(cause),
                }
            }
        })
    }

    /// Puts a manifest or index, by tag or digest. The registry must have all content that it references, except its
    /// `subject`. A manifest with a subject is added to the subject's referrers, by the registry or by this function.
    ///
    /// # Errors
    /// [`RegistryError`]. The manifest may have been put even if it could not be listed as a referrer.
    pub fn put_manifest(
        &self,
        tag_or_digest: &str,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Stored, RegistryError> {
        let (name, media_type) = (tag_or_digest.to_owned(), media_type.to_owned());
        let kind = media_type.clone();
        let body = bytes::Bytes::copy_from_slice(bytes);
        let stored = self.run(&format!("put manifest {name}"), |core| async move {
            let mut turns = core.turns(&format!("put manifest {name}"), Capability::Push, None);
            loop {
                let index = turns.next().await?;
                match core.put_manifest(index, &name, &media_type, &body).await {
                    Ok(stored) => return Ok(stored),
                    Err(cause) => turns.failed(cause),
                }
            }
        })?;
        if !stored.knows_subject {
            self.list_referrer(&stored.digest, &kind, bytes)?;
        }
        Ok(stored)
    }
}

impl Core {
    pub(super) async fn fetch_manifest(
        self: &Arc<Self>,
        index: usize,
        name: &str,
        asked: Option<&Digest>,
    ) -> Result<Fetched, Cause> {
        let ask = self
            .ask(index, Method::GET, &format!("manifests/{name}"))?
            .header(ACCEPT, HeaderValue::from_static(ACCEPTED));
        let answer = self.call(index, &ask).await?;
        if answer.response.status().as_u16() != 200 {
            return Err(self.failure(index, answer).await);
        }
        let headers = answer.response.headers().clone();
        if answer.response.content_length().is_some_and(|length| length > MANIFEST_MAX) {
            return Err(Cause::TooLong { max: MANIFEST_MAX });
        }
        // A body shorter than its `Content-Length` is an error of the transport, which is retried.
        let bytes = self.transport.body(answer.response, MANIFEST_MAX).await?;
        check_json("a manifest", &bytes, &headers)?;
        let digest = check_digest(&bytes, asked, &headers)?;
        let media_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let media_type = media_type.and_then(|text| text.split(';').next()).unwrap_or_default();
        Ok(Fetched { digest, media_type: media_type.trim().to_owned(), bytes })
    }

    pub(super) async fn put_manifest(
        &self,
        index: usize,
        name: &str,
        media_type: &str,
        bytes: &bytes::Bytes,
    ) -> Result<Stored, Cause> {
        let asked: Option<Digest> = name.parse().ok();
        let value = HeaderValue::from_str(media_type)
            .map_err(|_error| Cause::Protocol("the media type is not a valid header".to_owned()))?;
        let mut ask = Ask::new(Method::PUT, self.url(index, &format!("manifests/{name}"))?)
            .header(CONTENT_TYPE, value);
        ask.body = Some(bytes.clone());
        ask.commits = Some(bytes.len() as u64);
        // Content with another digest must not be sent under this name at all.
        check_digest(bytes, asked.as_ref(), &HeaderMap::new())?;
        let answer = self.call(index, &ask).await?;
        if !answer.response.status().is_success() {
            return Err(self.failure(index, answer).await);
        }
        let headers = answer.response.headers();
        let digest = check_digest(bytes, asked.as_ref(), headers)?;
        Ok(Stored { digest, knows_subject: headers.contains_key(OCI_SUBJECT) })
    }
}

/// Checks that a successful response can be JSON. Captive portals, proxies and wrong addresses send web pages.
pub(super) fn check_json(
    expected: &'static str,
    bytes: &[u8],
    headers: &HeaderMap,
) -> Result<(), Cause> {
    let is_json = matches!(bytes.trim_ascii_start().first(), Some(b'{' | b'['));
    if let Some(encoding) = headers.get(CONTENT_ENCODING).filter(|it| !is_json && *it != "identity")
    {
        let encoding = String::from_utf8_lossy(encoding.as_bytes());
        return Err(Cause::Protocol(format!(
            "{expected} has an unexpected Content-Encoding, {}: does a proxy compress it?",
            escaped(&encoding)
        )));
    }
    let received = headers.get(CONTENT_TYPE).map(|value| value.as_bytes()).unwrap_or_default();
    let received = String::from_utf8_lossy(received);
    let received = received.split(';').next().unwrap_or_default().trim();
    let is_foreign = match bytes.trim_ascii_start().first() {
        Some(b'<') => true,
        Some(b'{' | b'[') => false,
        // Servers that do not know the type send no type, or one of these.
        _ => {
            !(received.is_empty()
                || received.contains("json")
                || received.ends_with("octet-stream"))
        }
    };
    if !is_foreign {
        return Ok(());
    }
    let received =
        if received.is_empty() { "content without a type".to_owned() } else { escaped(received) };
    Err(Cause::Foreign { received, expected })
}

/// Returns the digest of `bytes`. It must equal the requested digest, and the digest that the server claims.
fn check_digest(
    bytes: &[u8],
    asked: Option<&Digest>,
    headers: &HeaderMap,
) -> Result<Digest, Cause> {
    let of = |other: &Digest| {
        let mut hasher = other.hasher();
        hasher.update(bytes);
        hasher.finish()
    };
    let digest = asked.map_or_else(|| Digest::sha256(bytes), of);
    if let Some(expected) = asked.filter(|asked| **asked != digest) {
        return Err(Cause::Digest { expected: Box::new(*expected), actual: Box::new(digest) });
    }
    let Some(claimed) = headers.get(CONTENT_DIGEST) else { return Ok(digest) };
    let claimed = String::from_utf8_lossy(claimed.as_bytes()).into_owned();
    // A claimed digest with an unknown hash function cannot be verified, and is ignored.
    match claimed.parse::<Digest>() {
        Ok(other) if of(&other) != other => {
            let claimed = claimed.chars().take(140).collect();
            Err(Cause::ClaimedDigest { claimed, actual: Box::new(digest) })
        }
        _ => Ok(digest),
    }
}
