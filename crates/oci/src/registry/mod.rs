//! A client for one repository of a registry: manifests, blobs, uploads and referrers, through mirrors if there are
//! any.
//!
//! Calls block; one thread does all network work. Source: OCI distribution-spec 1.1. All responses are verified with
//! the requested digest, except blobs. The reader of a blob verifies it, and calls [`Registry::distrust`] if it is
//! wrong.

mod auth;
mod blob;
mod connect;
pub mod credentials;
mod engine;
mod error;
pub mod hosts;
mod lists;
mod login;
mod manifests;
mod patience;
mod peers;
mod places;
mod ranges;
mod referrers;
mod retry;
mod settings;
mod transport;
mod upload;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::{Method, Url};

pub use blob::BlobReader;
pub use credentials::{Credential, Kept, Keyring, Removed, Secret};
pub use error::{Cause, RegistryError};
pub use hosts::Protection;
pub use login::{Checked, Login};
pub use manifests::{Fetched, Stored};
pub use peers::{KnownPeers, PEER_HEADER, PEER_LAYERS, PeerTar};
pub use referrers::Referrer;
pub use retry::{Pause, Pauses};
pub use settings::{Proxies, Settings};

use crate::Digest;
use crate::reference::Reference;
use auth::Authenticator;
use engine::Engine;
use hosts::{Capability, Endpoint};
use peers::Peers;
use places::Places;
use retry::Turns;
use transport::{Answer, Ask, Transport};

/// Time for which an unreachable host is tried last.
const UNWELL: Duration = Duration::from_secs(60);

/// Which hosts of a repository are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedHosts {
    /// The registry itself.
    Own,
    /// Its mirrors, in their order.
    Mirrors,
}

/// A repository of a registry. Clones share connections, tokens, and the state of hosts.
#[derive(Clone)]
pub struct Registry {
    core: Arc<Core>,
    engine: Arc<Engine>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Core { registry, repository, .. } = &*self.core;
        write!(f, "Registry({registry}/{repository})")
    }
}

/// The state that all requests share.
struct Core {
    registry: String,
    repository: String,
    /// Hosts: mirrors first, the registry itself last.
    endpoints: Vec<Endpoint>,
    settings: Settings,
    transport: Transport,
    auth: Authenticator,
    /// Hosts that sent data of a blob, by index.
    served: Mutex<BTreeMap<Digest, BTreeSet<usize>>>,
    /// Hosts that sent wrong data of a blob, by index.
    distrusted: Mutex<BTreeMap<Digest, BTreeSet<usize>>>,
    unwell: Mutex<BTreeMap<usize, Instant>>,
    /// Whether all attempts of the previous request found no reachable host. If so, requests make no pauses until one
    /// of them succeeds.
    is_given_up: AtomicBool,
    places: Places,
    peers: Peers,
    /// Hosts that accept only one range per request.
    single_range: Mutex<BTreeSet<usize>>,
    /// When the last request was sent.
    last_request: Mutex<Option<Instant>>,
}

impl Registry {
    /// Makes a client for the repository of `reference`. It sends a request only to a registry that may use HTTP if it
    /// has no HTTPS ([`Protection::Unverified`]).
    ///
    /// # Errors
    /// [`RegistryError`] if the settings are unusable.
    pub fn new(reference: &Reference, settings: &Settings) -> Result<Self, RegistryError> {
        let registry = reference.registry();
        let failed = |cause| RegistryError::new("use the registry", registry, 1, cause);
        let endpoints = hosts::endpoints(registry, &settings.hosts, settings.protection)
            .map_err(|error| failed(Cause::Hosts(error)))?;
        let made = Self::with(reference, settings, endpoints)?;
        let Some(own) = made.find_http()? else { return Ok(made) };
        let mut endpoints = made.core.endpoints.clone();
        endpoints.pop();
        endpoints.push(own);
        Self::with(reference, settings, endpoints)
    }

    fn with(
        reference: &Reference,
        settings: &Settings,
        endpoints: Vec<Endpoint>,
    ) -> Result<Self, RegistryError> {
        let (registry, repository) = (reference.registry(), reference.repository());
        let failed = |cause| RegistryError::new("use the registry", registry, 1, cause);
        let engine = Engine::start().map_err(|error| failed(Cause::Thread(error)))?;
        let core = Core {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            endpoints,
            settings: settings.clone(),
            transport: Transport::new(settings),
            auth: Authenticator::new(settings.keyring.clone(), repository.to_owned()),
            served: Mutex::default(),
            distrusted: Mutex::default(),
            unwell: Mutex::default(),
            is_given_up: AtomicBool::new(false),
            places: Places::default(),
            peers: Peers::default(),
            single_range: Mutex::default(),
            last_request: Mutex::default(),
        };
        Ok(Self { core: Arc::new(core), engine: Arc::new(engine) })
    }

    /// Returns the registry of the reference.
    #[must_use]
    pub fn registry(&self) -> &str {
        &self.core.registry
    }

    /// Whether there are mirrors that may be asked for tags and referrers.
    #[must_use]
    pub fn has_resolving_mirrors(&self) -> bool {
        !self.core.order_among(AskedHosts::Mirrors).is_empty()
    }

    /// Returns the repository of the reference.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.core.repository
    }

    /// Reports that a blob's data was wrong. The hosts that sent it are tried last for this blob from now on. Returns
    /// whether there is any other host. If all hosts that sent it were distrusted before, returns `false`, unless another
    /// thread has just reported the same bytes. So callers must bound their attempts.
    #[must_use]
    pub fn distrust(&self, digest: &Digest) -> bool {
        self.core.places.forget_all(digest);
        self.core.peers.forget(digest);
        let served = lock(&self.core.served).remove(digest).unwrap_or_default();
        let mut distrusted = lock(&self.core.distrusted);
        let hosts = distrusted.entry(*digest).or_default();
        let is_reported = served.is_empty() && !hosts.is_empty();
        let is_new = !served.is_subset(hosts);
        hosts.extend(served);
        if !is_new && !is_reported {
            return false;
        }
        let able = self.core.endpoints.iter().enumerate();
        let mut able = able.filter(|(_, one)| one.capabilities.contains(&Capability::Pull));
        able.any(|(index, _)| !hosts.contains(&index))
    }
}

impl Core {
    /// Returns the hosts with a capability, in the order in which to try them.
    fn order(&self, capability: Capability, digest: Option<&Digest>) -> Vec<usize> {
        let able = self.endpoints.iter().enumerate();
        let able = able.filter(|(_, endpoint)| endpoint.capabilities.contains(&capability));
        let mut order: Vec<usize> = able.map(|(index, _)| index).collect();
        let distrusted = lock(&self.distrusted);
        let distrusted = digest.and_then(|digest| distrusted.get(digest));
        let unwell = lock(&self.unwell);
        order.sort_by_key(|index| {
            let lied = distrusted.is_some_and(|hosts| hosts.contains(index));
            let is_unwell = unwell.get(index).is_some_and(|since| since.elapsed() < UNWELL);
            // If several hosts sent parts of a wrong blob, it is unknown which part was wrong, so the registry itself
            // precedes the mirrors.
            let is_mirror = lied && index + 1 < self.endpoints.len();
            (lied, is_unwell, is_mirror)
        });
        // Uploads go to one host only, because an image must be complete on one host.
        if capability == Capability::Push {
            order.truncate(1);
        }
        order
    }

    /// Returns those of the hosts for tags and referrers, in the order in which to try them. Mirrors that were just
    /// unreachable are left out, because the registry is asked as well.
    fn order_among(&self, hosts: AskedHosts) -> Vec<usize> {
        let mut order = self.order(Capability::Resolve, None);
        let unwell = lock(&self.unwell);
        let is_unwell = |it: &usize| unwell.get(it).is_some_and(|since| since.elapsed() < UNWELL);
        order.retain(|index| match hosts {
            AskedHosts::Own => index + 1 == self.endpoints.len(),
            AskedHosts::Mirrors => index + 1 < self.endpoints.len() && !is_unwell(index),
        });
        order
    }

    /// Records that the host is unreachable.
    fn is_unwell(&self, index: usize) {
        lock(&self.unwell).insert(index, Instant::now());
    }

    fn served(&self, index: usize, digest: &Digest) {
        lock(&self.served).entry(*digest).or_default().insert(index);
    }

    fn turns(
        self: &Arc<Self>,
        what: &str,
        capability: Capability,
        digest: Option<&Digest>,
    ) -> Turns {
        let what = format!("{what} of {}/{}", self.registry, self.repository);
        Turns::new(self, what, self.order(capability, digest))
    }

    /// As [`turns`](Self::turns), at these hosts for tags and referrers.
    fn turns_among(self: &Arc<Self>, what: &str, hosts: AskedHosts) -> Turns {
        let what = format!("{what} of {}/{}", self.registry, self.repository);
        Turns::new(self, what, self.order_among(hosts))
    }

    /// Returns an address in the repository, for a path such as `blobs/sha256:…`.
    fn url(&self, index: usize, path: &str) -> Result<Url, Cause> {
        let endpoint = &self.endpoints[index];
        let text = format!("{}/{}/{path}", endpoint.base, self.repository);
        let mut url = Url::parse(&text).map_err(|error| Cause::Protocol(error.to_string()))?;
        if let Some(registry) = &endpoint.mirror_of {
            url.query_pairs_mut().append_pair("ns", registry);
        }
        Ok(url)
    }

    fn ask(&self, index: usize, method: Method, path: &str) -> Result<Ask, Cause> {
        Ok(Ask::new(method, self.url(index, path)?))
    }

    /// Sends a request to a host, with credentials if the host asks for them.
    async fn call(&self, index: usize, ask: &Ask) -> Result<Answer, Cause> {
        let may =
            if matches!(ask.method, Method::GET | Method::HEAD) { "pull" } else { "pull,push" };
        let scopes = [format!("repository:{}:{may}", self.repository)];
        self.call_with(index, ask, &scopes).await
    }

    async fn call_with(&self, index: usize, ask: &Ask, scopes: &[String]) -> Result<Answer, Cause> {
        self.note_request();
        let answer = self.auth.call(&self.transport, &self.endpoints[index], ask, scopes).await?;
        self.note_peer(index, &answer);
        Ok(answer)
    }

    /// Returns the cause of an unsuccessful response.
    async fn failure(&self, index: usize, answer: Answer) -> Cause {
        let status = answer.response.status().as_u16();
        let elsewhere = answer.elsewhere();
        let headers = answer.response.headers().clone();
        let body = self.transport.body(answer.response, auth::ERROR_MAX).await.unwrap_or_default();
        let host = elsewhere.as_ref().unwrap_or(&self.endpoints[index].host);
        Cause::of_status(status, &headers, &body, host).at(elsewhere.as_deref())
    }

    /// Returns once the caller has cancelled all calls.
    async fn cancelled(&self) {
        while !self.settings.cancel.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
