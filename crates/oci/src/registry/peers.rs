//! Mirrors that are stores of Quire. They have the uncompressed tars of layers under their diff ids, even if they have
//! not kept the blobs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reqwest::Method;
use reqwest::header::{CONTENT_LENGTH, HeaderMap, HeaderName};

use super::blob::{BlobReader, PartsWay};
use super::error::Cause;
use super::hosts::{Capability, Endpoint};
use super::patience::Patience;
use super::transport::{Answer, Ask, Urgency};
use super::{Core, Registry, UNWELL, lock, patience};
use crate::Digest;
use crate::blobs::{AskedPeers, PeerPart, Whole};

/// Header by which a registry announces, in every response, that it serves layers in another way as well.
pub const PEER_HEADER: &str = "quire-layers";
/// Its value: the uncompressed tars of layers are served as blobs that are named by their diff ids.
pub const PEER_LAYERS: &str = "diff-id";

/// Maximum number of mirrors that are asked for a layer's tar.
const ASKED_MAX: usize = 8;
/// Time limit for the search of a layer's tar at all mirrors, because a reader may wait for the layer.
const SEARCH: Duration = Duration::from_secs(4);
/// Time limit for a part of a layer's tar, at all peers. The registry gets the rest of the time that a reader waits.
const PART: Duration = Duration::from_secs(20);

/// Whether mirrors that have responded are peers, by their addresses. All clients with the same [`Settings`] share it,
/// so that a new client need not ask the mirrors again.
///
/// [`Settings`]: super::Settings
#[derive(Debug, Default)]
pub struct KnownPeers(Mutex<BTreeMap<String, bool>>);

/// Facts about the mirrors, by the index of the host.
#[derive(Default)]
pub(super) struct Peers {
    /// Whether a host that has responded to this client is a peer.
    known: Mutex<BTreeMap<usize, bool>>,
    /// The hosts that were found for parts of a layer's tar, by the digest of its blob.
    places: Mutex<BTreeMap<Digest, TarPlace>>,
}

/// The hosts to ask for parts of a layer's tar.
#[derive(Debug, Clone)]
struct TarPlace {
    found: Instant,
    /// In the order in which they are asked.
    hosts: Vec<PartHost>,
}

/// A host that has a layer's tar, or may have parts of it.
#[derive(Debug, Clone, Copy)]
struct PartHost {
    index: usize,
    /// When the host lacked a part, if no later part came from it.
    lacked: Option<Instant>,
}

impl PartHost {
    /// Whether to ask this host for a part.
    fn is_asked(&self, asked: AskedPeers, now: Instant) -> bool {
        let has_just = self.lacked.is_some_and(|since| now.duration_since(since) < LACK);
        asked == AskedPeers::All || !has_just
    }
}

/// Time for which the hosts of a layer's tar are used before all mirrors are asked again.
const LIFE: Duration = Duration::from_secs(60);
/// Time for which a peer that lacks a part of a layer is not asked for others that a reader waits for.
const LACK: Duration = Duration::from_secs(1);

impl Peers {
    /// Forgets where the tar of a layer is, because bytes of the layer were wrong.
    pub(super) fn forget(&self, blob: &Digest) {
        lock(&self.places).remove(blob);
    }

    /// Records that a part of a layer's tar came from a host, which is asked before those that lack parts from now on.
    fn had_part(&self, blob: &Digest, index: usize) {
        self.note_part(blob, index, None);
    }

    /// Records that a host lacks a part of a layer's tar.
    fn lacked_part(&self, blob: &Digest, index: usize) {
        self.note_part(blob, index, Some(Instant::now()));
    }

    fn note_part(&self, blob: &Digest, index: usize, lacked: Option<Instant>) {
        let mut places = lock(&self.places);
        let Some(place) = places.get_mut(blob) else { return };
        if let Some(host) = place.hosts.iter_mut().find(|it| it.index == index) {
            host.lacked = lacked;
        }
        // The order of hosts that lack nothing does not change.
        place.hosts.sort_by_key(|it| it.lacked.is_some());
    }

    /// Does not ask a host for parts of a layer's tar, until all mirrors are asked again.
    fn drop_host(&self, blob: &Digest, index: usize) {
        if let Some(place) = lock(&self.places).get_mut(blob) {
            place.hosts.retain(|it| it.index != index);
        }
    }
}

/// A layer's tar at a peer. The bytes are unverified: the caller must compare them with the diff id.
#[derive(Debug)]
pub struct PeerTar {
    /// Reads the tar.
    pub reader: BlobReader,
    /// Number of bytes that the peer announces.
    pub size: u64,
}

/// The data of a layer that a mirror has.
enum Has {
    /// The blob, or perhaps the blob, because it is not a peer.
    Blob,
    /// A tar of this number of bytes.
    Tar(u64),
    /// At most parts of the tar.
    Parts,
}

/// The peers with a layer's tar.
#[derive(Default)]
struct FoundTar {
    /// The hosts to ask for the whole tar, the first of which has it, and the size of the tar.
    whole: Option<(Vec<usize>, u64)>,
    /// The hosts before that one, which may have parts of it.
    parts: Vec<usize>,
}

impl Registry {
    /// Finds a mirror that lacks a layer's blob, but has its uncompressed tar under the diff id. Only mirrors that are
    /// peers are asked for it. Returns `None` if there is no such mirror, or if another mirror precedes it that may
    /// have the blob.
    #[must_use]
    pub fn peer_tar(&self, blob: &Digest, diff_id: &Digest) -> Option<PeerTar> {
        let (blob, diff_id) = (*blob, *diff_id);
        let find = move |core: Arc<Core>| async move { Ok(core.find_tar(&blob, &diff_id).await) };
        let (hosts, size) = self.run("find a layer at a peer", find).ok()?.whole?;
        let reader = self.blob(&diff_id, Some(size), 0).for_tar_of(&blob, hosts);
        Some(PeerTar { reader, size })
    }
}

impl Registry {
    /// Fetches a part of a layer's uncompressed tar from a peer, like [`peer_tar`](Self::peer_tar), also from one that
    /// has only parts of it. Returns `None` if no peer has it. The caller must verify the bytes, and call
    /// [`distrust_peer`](Self::distrust_peer) if they are wrong.
    #[must_use]
    pub fn peer_part(
        &self,
        blob: &Digest,
        diff_id: &Digest,
        range: Range<u64>,
        asked: AskedPeers,
    ) -> Option<PeerPart> {
        // Most registries have no mirrors.
        if !self.core.may_have_peers(blob) {
            return None;
        }
        let (blob, diff_id) = (*blob, *diff_id);
        let fetch = move |core: Arc<Core>| async move {
            Ok(core.fetch_part(&blob, &diff_id, range, asked).await)
        };
        self.run("fetch a part of a layer from a peer", fetch).ok().flatten()
    }

    /// Reports that a part of a layer's tar was wrong. Its host is not asked for parts of this layer again, and is asked
    /// last for the blob. All other mirrors are searched again.
    pub fn distrust_peer(&self, blob: &Digest, host: &str) {
        let mut endpoints = self.core.endpoints.iter();
        let Some(index) = endpoints.position(|it| it.base == host && it.mirror_of.is_some()) else {
            return;
        };
        lock(&self.core.distrusted).entry(*blob).or_default().insert(index);
        // The next search also finds mirrors that had not responded yet at the last one.
        self.core.peers.forget(blob);
    }
}

impl Core {
    /// Records what a response shows about a host.
    pub(super) fn note_peer(&self, index: usize, answer: &Answer) {
        let mut known = lock(&self.peers.known);
        // Stores of Quire do not redirect to other hosts.
        let is_peer = match known.get(&index) {
            Some(is_peer) if !answer.is_own => *is_peer,
            _ => answer.is_own && is_peer(answer.response.headers()),
        };
        known.insert(index, is_peer);
        let Endpoint { base, mirror_of, .. } = &self.endpoints[index];
        // Names of registries come from images, so they are not collected.
        if mirror_of.is_some() {
            lock(&self.settings.peers.0).insert(base.clone(), is_peer);
        }
    }

    /// Whether a host is a peer; `None` if it has not responded yet.
    fn is_peer(&self, index: usize) -> Option<bool> {
        let here = lock(&self.peers.known).get(&index).copied();
        let base = &self.endpoints[index].base;
        here.or_else(|| lock(&self.settings.peers.0).get(base).copied())
    }

    async fn fetch_part(
        &self,
        blob: &Digest,
        diff_id: &Digest,
        range: Range<u64>,
        asked: AskedPeers,
    ) -> Option<PeerPart> {
        let known = lock(&self.peers.places).get(blob).cloned();
        let TarPlace { mut hosts, .. } = match known.filter(|it| it.found.elapsed() < LIFE) {
            Some(place) => place,
            None => self.find_parts(blob, diff_id).await,
        };
        hosts.retain(|it| it.is_asked(asked, Instant::now()));
        let end = tokio::time::Instant::now() + PART;
        for PartHost { index, .. } in hosts.into_iter().filter(|it| !self.is_resting(it.index)) {
            let patience = Patience::blob(self.settings.patience);
            // A host that ignores the range would send the whole tar for each part.
            let way = PartsWay { whole: Whole::Refuse, urgency: Urgency::Reader };
            let fetched = self.one_range(index, diff_id, &range, way);
            let Endpoint { base, host, .. } = &self.endpoints[index];
            match tokio::time::timeout_at(end, patience.during(fetched)).await {
                Ok(Ok(bytes)) => {
                    self.peers.had_part(blob, index);
                    return Some(PeerPart { bytes, host: base.clone() });
                }
                Err(_elapsed) => {
                    tracing::debug!(host, "a peer sends a part of a layer too slowly");
                    self.is_unwell(index);
                    self.peers.drop_host(blob, index);
                    break;
                }
                Ok(Err(cause)) if is_lack(&cause) => self.peers.lacked_part(blob, index),
                Ok(Err(cause)) => {
                    tracing::debug!(host, %cause, "cannot fetch a part of a layer from a peer");
                    self.note_failure(index, &cause);
                    // Other mirrors may have it, after they were asked again.
                    self.peers.drop_host(blob, index);
                    // The reader has waited long enough.
                    if cause.is_late() {
                        break;
                    }
                }
            }
        }
        None
    }

    /// Finds the peers that have a layer's tar, or may have parts of it, and remembers them.
    async fn find_parts(&self, blob: &Digest, diff_id: &Digest) -> TarPlace {
        let FoundTar { whole, parts } = self.find_tar(blob, diff_id).await;
        let whole = whole.map(|it| it.0).unwrap_or_default();
        let hosts = whole.into_iter().chain(parts).map(|index| PartHost { index, lacked: None });
        let place = TarPlace { found: Instant::now(), hosts: hosts.collect() };
        lock(&self.peers.places).insert(*blob, place.clone());
        place
    }

    /// Whether a mirror may be a peer that lacks a blob.
    pub(super) fn may_have_peers(&self, blob: &Digest) -> bool {
        self.endpoints.len() > 1 && !self.tar_hosts(blob).is_empty()
    }

    /// Whether a host is a peer, and not the registry itself.
    pub(super) fn is_peer_mirror(&self, index: usize) -> bool {
        self.endpoints[index].mirror_of.is_some() && self.is_peer(index) == Some(true)
    }

    /// Records a host that did not respond, so that it is not asked again for a while.
    pub(super) fn note_failure(&self, index: usize, cause: &Cause) {
        if cause.is_unreachable() || cause.is_late() {
            self.is_unwell(index);
        }
    }

    /// Whether a host did not respond a short time ago.
    fn is_resting(&self, index: usize) -> bool {
        lock(&self.unwell).get(&index).is_some_and(|since| since.elapsed() < UNWELL)
    }

    /// Asks mirrors until one has a layer's tar. Finds nothing if one has the blob itself.
    async fn find_tar(&self, blob: &Digest, diff_id: &Digest) -> FoundTar {
        let mut mirrors = self.tar_hosts(blob);
        let mut found = FoundTar::default();
        let end = tokio::time::Instant::now() + SEARCH;
        while !mirrors.is_empty() {
            let index = mirrors[0];
            let asked = tokio::time::timeout_at(end, self.what_has(index, blob, diff_id)).await;
            match asked.unwrap_or(Err(Cause::Stalled(SEARCH))) {
                Ok(Has::Blob) => return FoundTar::default(),
                Ok(Has::Tar(size)) => {
                    // A mirror that has not responded yet may not be a peer.
                    mirrors.retain(|it| self.is_peer(*it) == Some(true));
                    found.whole = Some((mirrors, size));
                    return found;
                }
                Ok(Has::Parts) => found.parts.push(index),
                Err(cause) => {
                    let host = &self.endpoints[index].host;
                    tracing::debug!(host, %cause, "cannot ask a mirror for a layer");
                    self.note_failure(index, &cause);
                }
            }
            if tokio::time::Instant::now() >= end {
                return found;
            }
            mirrors.remove(0);
        }
        found
    }

    /// Returns the mirrors that may be peers, up to the first one that is known not to be one.
    fn tar_hosts(&self, blob: &Digest) -> Vec<usize> {
        let distrusted = lock(&self.distrusted).get(blob).cloned().unwrap_or_default();
        let order = self.order(Capability::Pull, Some(blob)).into_iter();
        let mirrors = order.filter(|it| self.endpoints[*it].mirror_of.is_some());
        let well = mirrors.filter(|it| !distrusted.contains(it) && !self.is_resting(*it));
        well.take_while(|it| self.is_peer(*it) != Some(false)).take(ASKED_MAX).collect()
    }

    async fn what_has(&self, index: usize, blob: &Digest, diff_id: &Digest) -> Result<Has, Cause> {
        let (status, _) = self.head(index, blob).await?;
        match (status, self.is_peer(index)) {
            (200, _) | (_, None | Some(false)) => return Ok(Has::Blob),
            (_, Some(true)) => {}
        }
        match self.head(index, diff_id).await? {
            (200, Some(size)) => Ok(Has::Tar(size)),
            _ => Ok(Has::Parts),
        }
    }

    /// Asks whether a host has a blob. Returns the status and the blob's length.
    async fn head(&self, index: usize, digest: &Digest) -> Result<(u16, Option<u64>), Cause> {
        self.head_as(index, digest, Urgency::Reader).await
    }

    /// Like [`head`](Self::head), by a connection for such requests.
    pub(super) async fn head_as(
        &self,
        index: usize,
        digest: &Digest,
        urgency: Urgency,
    ) -> Result<(u16, Option<u64>), Cause> {
        let ask = self.ask(index, Method::HEAD, &format!("blobs/{digest}"))?;
        let ask = Ask { urgency, ..ask };
        let answer = patience::as_document(self.settings.patience, self.call(index, &ask)).await?;
        let length = answer.response.headers().get(CONTENT_LENGTH);
        let length = length.and_then(|it| it.to_str().ok()?.parse().ok());
        Ok((answer.response.status().as_u16(), length))
    }
}

/// Whether a peer lacks a part at the moment, or has no time to send it.
const fn is_lack(cause: &Cause) -> bool {
    matches!(
        cause,
        Cause::NotFound { .. }
            | Cause::NameUnknown { .. }
            | Cause::RateLimited { .. }
            | Cause::Status { status: 503, .. }
    )
}

fn is_peer(headers: &HeaderMap) -> bool {
    let values = headers.get_all(HeaderName::from_static(PEER_HEADER));
    values.iter().any(|it| it.as_bytes() == PEER_LAYERS.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader does not wait for a peer that has just lacked a part.
    #[test]
    fn peers_that_lack_parts_are_asked_later() {
        let now = Instant::now();
        let ago = |time: Duration| PartHost { index: 0, lacked: now.checked_sub(time) };
        let never = PartHost { index: 0, lacked: None };
        for (host, is_likely) in [(never, true), (ago(LACK), true), (ago(LACK / 2), false)] {
            assert_eq!(host.is_asked(AskedPeers::Likely, now), is_likely, "{host:?}");
            assert!(host.is_asked(AskedPeers::All, now));
        }
    }

    /// Hosts that lack parts come last. A host that has sent one comes before them.
    #[test]
    fn peers_that_lack_parts_are_asked_last() {
        let peers = Peers::default();
        let blob = Digest::sha256(b"blob");
        let hosts = (0..4).map(|index| PartHost { index, lacked: None }).collect();
        lock(&peers.places).insert(blob, TarPlace { found: Instant::now(), hosts });
        let order =
            || -> Vec<_> { lock(&peers.places)[&blob].hosts.iter().map(|it| it.index).collect() };
        peers.lacked_part(&blob, 0);
        peers.lacked_part(&blob, 2);
        assert_eq!(order(), [1, 3, 2, 0]);
        peers.had_part(&blob, 2);
        assert_eq!(order(), [1, 3, 2, 0]);
        peers.drop_host(&blob, 3);
        assert_eq!(order(), [1, 2, 0]);
        // Another layer has no hosts.
        peers.had_part(&Digest::sha256(b"other"), 1);
        peers.forget(&blob);
        assert!(lock(&peers.places).is_empty());
    }
}
