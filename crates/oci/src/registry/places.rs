//! Remembers the addresses to which registries redirect for blobs, for further parts of the same blobs.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::{Method, Url};

use super::transport::{Answer, Ask};
use super::{Cause, Core};
use crate::Digest;

/// Time for which an address is used. Registries balance load by redirects, and the signatures in the addresses
/// expire. Those of distribution last 20 minutes. Source: distribution `registry/storage/driver/s3-aws`,
/// `RedirectURL`.
const LIFE: Duration = Duration::from_secs(600);

/// Addresses of blobs on other hosts, by the index of the host that redirected, and the digest.
#[derive(Default)]
pub(super) struct Places(Mutex<BTreeMap<(usize, Digest), BlobPlace>>);

struct BlobPlace {
    url: Url,
    since: Instant,
}

impl Places {
    fn get(&self, index: usize, digest: &Digest) -> Option<Url> {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = places.get(&(index, *digest))?;
        (place.since.elapsed() < LIFE).then(|| place.url.clone())
    }

    fn keep(&self, index: usize, digest: &Digest, url: &Url) {
        let place = BlobPlace { url: url.clone(), since: Instant::now() };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert((index, *digest), place);
    }

    /// Forgets an address from which a request failed or the data was wrong.
    pub(super) fn forget(&self, index: usize, digest: &Digest) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(index, *digest));
    }

    /// Forgets all addresses of a blob whose data was wrong.
    pub(super) fn forget_all(&self, digest: &Digest) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.retain(|(_, of), _| of != digest);
    }
}

impl Core {
    /// Requests a blob from the address to which the host last redirected, or from the host. If that address does not
    /// return the blob, the host is asked again. `prepare` adds headers.
    pub(super) async fn ask_blob(
        &self,
        index: usize,
        digest: &Digest,
        prepare: impl Fn(Ask) -> Result<Ask, Cause>,
    ) -> Result<Answer, Cause> {
        if let Some(url) = self.places.get(index, digest) {
            let ask = prepare(Ask::new(Method::GET, url))?;
            self.note_request();
            // The address already contains an authorization, so the registry's credentials are not sent.
            match self.transport.send(&self.endpoints[index], &ask, None).await {
                Ok(answer) if matches!(answer.response.status().as_u16(), 200 | 206) => {
                    return Ok(answer);
                }
                Ok(answer) => {
                    let status = answer.response.status().as_u16();
                    tracing::debug!(%digest, status, "the cached location of a blob is not used");
                }
                Err(cause) => {
                    tracing::debug!(%digest, %cause, "the cached location of a blob is not used");
                }
            }
            self.places.forget(index, digest);
        }
        let ask = prepare(self.ask(index, Method::GET, &format!("blobs/{digest}"))?)?;
        let answer = self.call(index, &ask).await?;
        if !answer.is_own && matches!(answer.response.status().as_u16(), 200 | 206) {
            self.places.keep(index, digest, answer.response.url());
        }
        Ok(answer)
    }
}
