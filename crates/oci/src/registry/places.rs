//! Where registries keep blobs: addresses that they have led to, for further parts of the same blobs.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::{Method, Url};

use super::transport::{Answer, Ask};
use super::{Cause, Core};
use crate::Digest;

/// How long an address is used: registries spread load by them, and their signatures end some time. Those of distribution
/// last 20 minutes. Source: distribution `registry/storage/driver/s3-aws`, `RedirectURL`.
const LIFE: Duration = Duration::from_secs(600);

/// Addresses of blobs elsewhere, by the number of the host that led there.
#[derive(Default)]
pub(super) struct Places(Mutex<BTreeMap<(usize, Digest), Place>>);

struct Place {
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
        let place = Place { url: url.clone(), since: Instant::now() };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert((index, *digest), place);
    }

    /// It failed, or lied.
    pub(super) fn forget(&self, index: usize, digest: &Digest) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(index, *digest));
    }

    /// Some host lied.
    pub(super) fn forget_all(&self, digest: &Digest) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.retain(|(_, of), _| of != digest);
    }
}

impl Core {
    /// Asks a host for a blob, or the place that it led to the last time. The host is asked again as soon as that place gives
    /// anything but the blob. `prepare` adds headers.
    pub(super) async fn ask_blob(
        &self,
        index: usize,
        digest: &Digest,
        prepare: impl Fn(Ask) -> Result<Ask, Cause>,
    ) -> Result<Answer, Cause> {
        if let Some(url) = self.places.get(index, digest) {
            let ask = prepare(Ask::new(Method::GET, url))?;
            // It has what it needs in its address: who we are is for the registry alone.
            match self.transport.send(&self.endpoints[index], &ask, None).await {
                Ok(answer) if matches!(answer.response.status().as_u16(), 200 | 206) => {
                    return Ok(answer);
                }
                Ok(answer) => {
                    let status = answer.response.status().as_u16();
                    tracing::debug!(%digest, status, "the registry is asked again where a blob is");
                }
                Err(cause) => {
                    tracing::debug!(%digest, %cause, "the registry is asked again where a blob is");
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
