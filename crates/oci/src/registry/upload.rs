//! Uploads blobs to a registry. Source: OCI distribution-spec 1.1, "Pushing blobs", and distribution's `spec/api.md`
//! for interrupted chunks.

use std::io::Read;
use std::sync::Arc;

use bytes::Bytes;
use reqwest::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RANGE,
};
use reqwest::{Method, Url};

use super::hosts::Capability;
use super::retry::Turns;
use super::transport::{Answer, Ask, location};
use super::{Cause, Core, Registry, RegistryError};
use crate::Digest;

/// Size of a chunk in bytes. Each chunk is one request, and stays in memory until the registry has it.
const CHUNK: u64 = 16 << 20;
/// Maximum size of a chunk in bytes, for registries that require larger ones than [`CHUNK`].
const CHUNK_MAX: u64 = 64 << 20;
/// Minimum size of all chunks except the last one, in bytes. Source: OCI distribution-spec 1.1, "Pushing a blob in
/// chunks".
const CHUNK_MIN_LENGTH: HeaderName = HeaderName::from_static("oci-chunk-min-length");

/// A started upload.
#[derive(Clone)]
struct Session {
    /// Index of the host.
    index: usize,
    /// Address for the next request.
    url: Url,
    /// Size of a chunk, in bytes. The last one may be smaller.
    chunk: u64,
}

impl Registry {
    /// Whether the registry has a blob. With a `size` in bytes, a blob of another size does not count.
    ///
    /// # Errors
    /// [`RegistryError`] if the registry cannot be asked.
    pub fn has_blob(&self, digest: &Digest, size: Option<u64>) -> Result<bool, RegistryError> {
        let digest = *digest;
        self.run(&format!("check for blob {digest}"), |core| async move {
            let mut turns = core.turns(&format!("check for blob {digest}"), Capability::Push, None);
            loop {
                let index = turns.next().await?;
                match turns.attempt(core.has_blob(index, &digest, size)).await {
                    Ok(has) => return Ok(has),
                    Err(cause) => turns.failed(cause),
                }
            }
        })
    }

    /// Asks the registry to mount a blob from another of its repositories. `false` if the registry does not support
    /// that or does not allow it.
    ///
    /// # Errors
    /// [`RegistryError`] if the request fails for another reason.
    pub fn mount_blob(
        &self,
        digest: &Digest,
        from_repository: &str,
    ) -> Result<bool, RegistryError> {
        let (digest, from) = (*digest, from_repository.to_owned());
        self.run(&format!("mount blob {digest}"), |core| async move {
            let mut turns = core.turns(&format!("mount blob {digest}"), Capability::Push, None);
            loop {
                let index = turns.next().await?;
                match turns.attempt(core.mount_blob(index, &digest, &from)).await {
                    Ok(mounted) => return Ok(mounted),
                    Err(cause) => turns.failed(cause),
                }
            }
        })
    }

    /// Uploads a blob of `size` bytes, and verifies its digest before the registry learns the digest. At most one
    /// chunk of 16 MiB is in memory, unless the registry requires larger ones, of up to 64 MiB.
    ///
    /// # Errors
    /// [`RegistryError`], with [`Cause::Read`] if the reader fails, with [`Cause::ChunkSize`] if the registry requires
    /// too large chunks, and with [`Cause::UploadLost`] if the registry has lost the upload, which the caller can then
    /// restart with a new reader.
    pub fn upload_blob(
        &self,
        digest: &Digest,
        size: u64,
        reader: &mut dyn Read,
    ) -> Result<(), RegistryError> {
        let what = format!("send blob {digest}");
        let failed = |cause| RegistryError::new(&what, &self.core.registry, 1, cause);
        let mut hasher = digest.hasher();
        let mut at = 0;
        if size <= CHUNK {
            let chunk = read_chunk(reader, size).map_err(failed)?;
            hasher.update(&chunk);
            check_end(reader, chunk.len() as u64, size).map_err(failed)?;
            check_digest(hasher, digest).map_err(failed)?;
            let digest = *digest;
            return self.run(&what.clone(), |core| core.send_at_once(what, digest, chunk));
        }
        let begin = what.clone();
        let mut session = self.run(&what, |core| core.begin(begin))?;
        if session.chunk.min(size) > CHUNK_MAX {
            let cause = Cause::ChunkSize { least: session.chunk, max: CHUNK_MAX };
            return Err(self.abandoned(&what, session, cause));
        }
        while at < size {
            let chunk = read_chunk(reader, session.chunk.min(size - at)).map_err(failed)?;
            if chunk.is_empty() {
                break;
            }
            hasher.update(&chunk);
            let length = chunk.len() as u64;
            let send = what.clone();
            session = self.run(&what, |core| core.send_chunk(send, session, at, chunk))?;
            at += length;
        }
        let checked = check_end(reader, at, size).and_then(|()| check_digest(hasher, digest));
        if let Err(cause) = checked {
            return Err(self.abandoned(&what, session, cause));
        }
        let digest = *digest;
        self.run(&what.clone(), |core| core.finish(what, session, digest, at))
    }

    /// Deletes a useless upload, and returns the error. If the deletion fails, the registry deletes it after a while.
    fn abandoned(&self, what: &str, session: Session, cause: Cause) -> RegistryError {
        let _ignored: Result<(), RegistryError> = self.run(what, |core| core.abandon(session));
        RegistryError::new(what, &self.core.registry, 1, cause)
    }
}

fn read_chunk(reader: &mut dyn Read, length: u64) -> Result<Bytes, Cause> {
    let mut chunk = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    reader.take(length).read_to_end(&mut chunk).map_err(Cause::Read)?;
    Ok(chunk.into())
}

fn check_end(reader: &mut dyn Read, actual: u64, expected: u64) -> Result<(), Cause> {
    if actual < expected {
        return Err(Cause::Short { actual, expected });
    }
    match read_chunk(reader, 1)?.is_empty() {
        true => Ok(()),
        false => Err(Cause::TooLong { max: expected }),
    }
}

fn check_digest(hasher: crate::DigestHasher, expected: &Digest) -> Result<(), Cause> {
    let actual = hasher.finish();
    if actual == *expected {
        return Ok(());
    }
    Err(Cause::Digest { expected: Box::new(*expected), actual: Box::new(actual) })
}

impl Core {
    async fn has_blob(
        &self,
        index: usize,
        digest: &Digest,
        size: Option<u64>,
    ) -> Result<bool, Cause> {
        let ask = self.ask(index, Method::HEAD, &format!("blobs/{digest}"))?;
        let answer = self.call(index, &ask).await?;
        match answer.response.status().as_u16() {
            200 => {
                let said = answer.response.headers().get(CONTENT_LENGTH);
                let said: Option<u64> = said.and_then(|value| value.to_str().ok()?.parse().ok());
                // Some servers report length 0 for every response without a body.
                let said = said.filter(|said| *said > 0);
                Ok(size.zip(said).is_none_or(|(expected, said)| expected == said))
            }
            404 => Ok(false),
            _ => Err(self.failure(index, answer).await),
        }
    }

    async fn mount_blob(&self, index: usize, digest: &Digest, from: &str) -> Result<bool, Cause> {
        let mut ask = self.post(index)?;
        ask.url
            .query_pairs_mut()
            .append_pair("mount", &digest.to_string())
            .append_pair("from", from);
        let scopes = [
            format!("repository:{}:pull,push", self.repository),
            format!("repository:{from}:pull"),
        ];
        let answer = self.call_with(index, &ask, &scopes).await?;
        match answer.response.status().as_u16() {
            201 => Ok(true),
            // The registry has started a normal upload instead.
            202 => {
                if let Ok(session) = self.session(index, &answer, &ask.url, CHUNK) {
                    self.delete(&session).await;
                }
                Ok(false)
            }
            400..=499 if answer.response.status().as_u16() != 429 => Ok(false),
            _ => Err(self.failure(index, answer).await),
        }
    }

    fn post(&self, index: usize) -> Result<Ask, Cause> {
        let mut ask = self.ask(index, Method::POST, "blobs/uploads/")?;
        ask.body = Some(Bytes::new());
        Ok(ask)
    }

    async fn start(&self, index: usize) -> Result<Session, Cause> {
        let ask = self.post(index)?;
        let answer = self.call(index, &ask).await?;
        if answer.response.status().as_u16() != 202 {
            return Err(self.failure(index, answer).await);
        }
        let least = answer.response.headers().get(CHUNK_MIN_LENGTH);
        let least = least.and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(0);
        self.session(index, &answer, &ask.url, CHUNK.max(least))
    }

    fn session(
        &self,
        index: usize,
        answer: &Answer,
        from: &Url,
        chunk: u64,
    ) -> Result<Session, Cause> {
        let mut url = location(answer.response.headers(), from)?;
        let own = &self.endpoints[index].base;
        // A registry behind a proxy that terminates TLS often assumes that clients also use HTTP.
        if own.starts_with("https:") && url.scheme() == "http" && url.host_str() == from.host_str()
        {
            url = match url.set_scheme("https").and_then(|()| url.set_port(from.port())) {
                Ok(()) => url,
                Err(()) => return Err(Cause::Downgrade(own.clone())),
            };
        }
        if own.starts_with("https:") && url.scheme() != "https" {
            return Err(Cause::Downgrade(url.host_str().unwrap_or_default().to_owned()));
        }
        Ok(Session { index, url, chunk })
    }

    async fn begin(self: Arc<Self>, what: String) -> Result<Session, RegistryError> {
        let mut turns = self.turns(&what, Capability::Push, None);
        loop {
            let index = turns.next().await?;
            match self.start(index).await {
                Ok(session) => return Ok(session),
                Err(cause) => turns.failed(cause),
            }
        }
    }

    /// Uploads a blob that fits into one request. Each attempt restarts the upload.
    async fn send_at_once(
        self: Arc<Self>,
        what: String,
        digest: Digest,
        bytes: Bytes,
    ) -> Result<(), RegistryError> {
        let mut turns = self.turns(&what, Capability::Push, None);
        let size = bytes.len() as u64;
        let mut is_sure = true;
        loop {
            let index = turns.next().await?;
            let sent = async {
                // An earlier attempt may have succeeded although its response was lost.
                if !is_sure && self.has_blob(index, &digest, Some(size)).await? {
                    return Ok(());
                }
                let session = self.start(index).await?;
                is_sure = false;
                self.put(&session, &digest, size, bytes.clone()).await
            };
            match sent.await {
                Ok(()) => return Ok(()),
                // Another instance of the registry behind the same name may not know the upload.
                Err(cause @ Cause::UploadLost(_)) => turns.failed_for_now(cause),
                Err(cause) => turns.failed(cause),
            }
        }
    }

    /// Sends the last request of an upload, after which the registry verifies the digest and has the blob.
    async fn put(
        &self,
        session: &Session,
        digest: &Digest,
        size: u64,
        bytes: Bytes,
    ) -> Result<(), Cause> {
        let mut ask = Ask::new(Method::PUT, session.url.clone())
            .header(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        ask.url.query_pairs_mut().append_pair("digest", &digest.to_string());
        ask.body = Some(bytes);
        ask.commits = Some(size);
        let answer = self.call(session.index, &ask).await?;
        // Some registries return 204, as in an old version of the protocol.
        if !answer.response.status().is_success() {
            let cause = self.failure(session.index, answer).await;
            return Err(lost(cause, size));
        }
        Ok(())
    }

    fn turns_at(self: &Arc<Self>, what: &str, index: usize) -> Turns {
        let what = format!("{what} of {}/{}", self.registry, self.repository);
        Turns::new(self, what, vec![index])
    }

    async fn send_chunk(
        self: Arc<Self>,
        what: String,
        mut session: Session,
        start: u64,
        chunk: Bytes,
    ) -> Result<Session, RegistryError> {
        let mut turns = self.turns_at(&what, session.index);
        let end = start + chunk.len() as u64;
        let mut at = start;
        let mut is_sure = true;
        while at < end {
            turns.next().await?;
            let step = async {
                if !is_sure {
                    let (next, has) = self.status(&session).await?;
                    if has < start || has > end {
                        return Err(Cause::UploadLost(has));
                    }
                    if has == end {
                        return Ok((next, has));
                    }
                    (session, at) = (next, has);
                }
                let rest = chunk.slice(usize::try_from(at - start).unwrap_or(chunk.len())..);
                Ok((self.patch(&session, at, rest).await?, end))
            };
            match step.await {
                Ok((next, has)) => (session, at) = (next, has),
                Err(cause @ Cause::UploadLost(_)) => return Err(turns.end(cause)),
                Err(cause) => {
                    // Only the registry knows how much of the chunk has arrived.
                    is_sure = false;
                    if at > start {
                        turns.progressed();
                    }
                    turns.failed(cause);
                }
            }
        }
        Ok(session)
    }

    async fn patch(&self, session: &Session, at: u64, bytes: Bytes) -> Result<Session, Cause> {
        let end = at + bytes.len() as u64;
        let range = HeaderValue::try_from(format!("{at}-{}", end - 1))
            .map_err(|error| Cause::Protocol(error.to_string()))?;
        let mut ask = Ask::new(Method::PATCH, session.url.clone())
            .header(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"))
            .header(CONTENT_RANGE, range)
            .header(CONTENT_LENGTH, bytes.len());
        ask.body = Some(bytes);
        let answer = self.call(session.index, &ask).await?;
        match answer.response.status().as_u16() {
            // Some registries return 204 for chunks as well.
            201..=204 => {}
            // The registry expects another offset, which the status request returns.
            416 => return Err(Cause::Connection("the registry expects another offset".to_owned())),
            _ => {
                let cause = self.failure(session.index, answer).await;
                return Err(lost(cause, at));
            }
        }
        if let Some(has) = received(answer.response.headers()).filter(|has| *has != end) {
            return Err(Cause::Connection(format!(
                "the registry has {has} bytes instead of {end}"
            )));
        }
        match self.session(session.index, &answer, &ask.url, session.chunk) {
            Ok(next) => Ok(next),
            // The specification requires a `Location`, but some registries send none.
            Err(_) if !answer.response.headers().contains_key(reqwest::header::LOCATION) => {
                Ok(session.clone())
            }
            Err(cause) => Err(cause),
        }
    }

    /// Returns the address for the next request, and how many bytes of an upload the registry has.
    async fn status(&self, session: &Session) -> Result<(Session, u64), Cause> {
        let ask = Ask::new(Method::GET, session.url.clone());
        let scopes = [format!("repository:{}:pull,push", self.repository)];
        let answer = self.call_with(session.index, &ask, &scopes).await?;
        let status = answer.response.status().as_u16();
        // 404 means that the upload is unknown. The other statuses come from registries without this request.
        if matches!(status, 404 | 400 | 405 | 501) {
            return Err(Cause::UploadLost(0));
        }
        if !answer.response.status().is_success() {
            return Err(self.failure(session.index, answer).await);
        }
        let has = received(answer.response.headers()).unwrap_or(0);
        let next = match answer.response.headers().contains_key(reqwest::header::LOCATION) {
            true => self.session(session.index, &answer, &ask.url, session.chunk)?,
            false => session.clone(),
        };
        Ok((next, has))
    }

    async fn finish(
        self: Arc<Self>,
        what: String,
        session: Session,
        digest: Digest,
        size: u64,
    ) -> Result<(), RegistryError> {
        let mut turns = self.turns_at(&what, session.index);
        let mut is_sure = true;
        loop {
            turns.next().await?;
            let step = async {
                // An earlier attempt may have succeeded although its response was lost.
                if !is_sure && self.has_blob(session.index, &digest, None).await? {
                    return Ok(());
                }
                self.put(&session, &digest, size, Bytes::new()).await
            };
            match step.await {
                Ok(()) => return Ok(()),
                Err(cause @ Cause::UploadLost(_)) => return Err(turns.end(cause)),
                Err(cause) => {
                    is_sure = false;
                    turns.failed(cause);
                }
            }
        }
    }

    async fn abandon(self: Arc<Self>, session: Session) -> Result<(), RegistryError> {
        self.delete(&session).await;
        Ok(())
    }

    /// Deletes an upload. A failure does not matter, because registries remove unfinished uploads after a while.
    async fn delete(&self, session: &Session) {
        let ask = Ask::new(Method::DELETE, session.url.clone());
        if let Err(cause) = self.call(session.index, &ask).await {
            tracing::debug!(cause = %cause, "cannot abandon an upload");
        }
    }
}

/// Turns "not found" into [`Cause::UploadLost`], because an unknown upload (BLOB_UPLOAD_UNKNOWN) can only be
/// restarted. Source: OCI distribution-spec 1.1, "Error Codes".
fn lost(cause: Cause, at: u64) -> Cause {
    match cause {
        Cause::NotFound { .. } => Cause::UploadLost(at),
        Cause::Elsewhere { source, .. } if matches!(*source, Cause::NotFound { .. }) => {
            Cause::UploadLost(at)
        }
        other => other,
    }
}

/// Parses `Range: 0-LAST` into the number of bytes that a registry has. Distribution sends `0-0` for none.
fn received(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(RANGE)?.to_str().ok()?;
    let text = text.strip_prefix("bytes=").unwrap_or(text);
    let last: u64 = text.strip_prefix("0-")?.parse().ok()?;
    if last == 0 { Some(0) } else { last.checked_add(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_registry_has() {
        for (text, expect) in [
            ("0-99", Some(100)),
            ("bytes=0-99", Some(100)),
            ("0-0", Some(0)),
            ("1-99", None),
            ("0-18446744073709551615", None),
            ("", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(RANGE, text.parse().unwrap());
            assert_eq!(received(&headers), expect, "{text}");
        }
    }
}
