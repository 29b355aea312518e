//! Mirrors that are stores of Quire. They have the uncompressed tars of layers under their diff ids, even if they have
//! not kept the blobs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reqwest::Method;
use reqwest::header::{CONTENT_LENGTH, HeaderMap, HeaderName};

use super::blob::BlobReader;
use super::error::Cause;
use super::hosts::{Capability, Endpoint};
use super::patience::Patience;
use super::transport::Answer;
use super::{Core, Registry, UNWELL, lock, patience};
use crate::Digest;
use crate::blobs::Whole;

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

/// The hosts to ask for a layer's tar, if any, and when they were found.
type TarPlace = (Instant, Option<Vec<usize>>);

/// Time for which the hosts of a layer's tar are used before all mirrors are asked again.
const LIFE: Duration = Duration::from_secs(60);

impl Peers {
    /// Forgets where the tar of a layer is, because bytes of the layer were wrong.
    pub(super) fn forget(&self, blob: &Digest) {
        lock(&self.places).remove(blob);
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
    Nothing,
}

impl Registry {
    /// Finds a mirror that lacks a layer's blob, but has its uncompressed tar under the diff id. Only mirrors that are
    /// peers are asked for it. Returns `None` if there is no such mirror, or if another mirror precedes it that may
    /// have the blob.
    #[must_use]
    pub fn peer_tar(&self, blob: &Digest, diff_id: &Digest) -> Option<PeerTar> {
        let (blob, diff_id) = (*blob, *diff_id);
        let find = move |core: Arc<Core>| async move { Ok(core.find_tar(&blob, &diff_id).await) };
        let (hosts, size) = self.run("find a layer at a peer", find).ok().flatten()?;
        let reader = self.blob(&diff_id, Some(size), 0).for_tar_of(&blob, hosts);
        Some(PeerTar { reader, size })
    }
}

impl Registry {
    /// Fetches a part of a layer's uncompressed tar from a peer, like [`peer_tar`](Self::peer_tar). Returns `None` if no
    /// peer has it. The caller must verify the bytes.
    #[must_use]
    pub fn peer_part(&self, blob: &Digest, diff_id: &Digest, range: Range<u64>) -> Option<Vec<u8>> {
        // Most registries have no mirrors.
        if self.core.endpoints.len() < 2 {
            return None;
        }
        let (blob, diff_id) = (*blob, *diff_id);
        let fetch =
            move |core: Arc<Core>| async move { Ok(core.fetch_part(&blob, &diff_id, range).await) };
        self.run("fetch a part of a layer from a peer", fetch).ok().flatten()
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
    ) -> Option<Vec<u8>> {
        let known = lock(&self.peers.places).get(blob).cloned();
        let hosts = match known.filter(|it| it.0.elapsed() < LIFE) {
            Some((_, hosts)) => hosts,
            None => {
                let hosts = self.find_tar(blob, diff_id).await.map(|it| it.0);
                lock(&self.peers.places).insert(*blob, (Instant::now(), hosts.clone()));
                hosts
            }
        };
        let end = tokio::time::Instant::now() + PART;
        for index in hosts?.into_iter().filter(|it| !self.is_resting(*it)) {
            let patience = Patience::blob(self.settings.patience);
            // A host that ignores the range would send the whole tar for each part.
            let fetched = self.one_range(index, diff_id, &range, Whole::Refuse);
            let host = &self.endpoints[index].host;
            match tokio::time::timeout_at(end, patience.during(fetched)).await {
                Ok(Ok(bytes)) => {
                    self.served(index, blob);
                    return Some(bytes);
                }
                Err(_elapsed) => {
                    tracing::debug!(host, "a peer sends a part of a layer too slowly");
                    self.is_unwell(index);
                    break;
                }
                Ok(Err(cause)) => {
                    tracing::debug!(host, %cause, "cannot fetch a part of a layer from a peer");
                    self.note_failure(index, &cause);
                    // The reader has waited long enough.
                    if cause.is_late() {
                        break;
                    }
                }
            }
        }
        // Other mirrors may have it, after they were asked again.
        lock(&self.peers.places).insert(*blob, (Instant::now(), None));
        None
    }

    /// Whether a host is a peer, and not the registry itself.
    pub(super) fn is_peer_mirror(&self, index: usize) -> bool {
        self.endpoints[index].mirror_of.is_some() && self.is_peer(index) == Some(true)
    }

    /// Records a host that did not respond, so that it is not asked again for a while.
    fn note_failure(&self, index: usize, cause: &Cause) {
        if cause.is_unreachable() || cause.is_late() {
            self.is_unwell(index);
        }
    }

    /// Whether a host did not respond a short time ago.
    fn is_resting(&self, index: usize) -> bool {
        lock(&self.unwell).get(&index).is_some_and(|since| since.elapsed() < UNWELL)
    }

    /// Returns the hosts to ask for a layer's tar, the first of which has it, and the size of the tar.
    async fn find_tar(&self, blob: &Digest, diff_id: &Digest) -> Option<(Vec<usize>, u64)> {
        let mut mirrors = self.tar_hosts(blob);
        let end = tokio::time::Instant::now() + SEARCH;
        while !mirrors.is_empty() {
            let index = mirrors[0];
            let asked = tokio::time::timeout_at(end, self.what_has(index, blob, diff_id)).await;
            match asked.unwrap_or(Err(Cause::Stalled(SEARCH))) {
                Ok(Has::Blob) => return None,
                Ok(Has::Tar(size)) => {
                    // A mirror that has not responded yet may not be a peer.
                    mirrors.retain(|it| self.is_peer(*it) == Some(true));
                    return Some((mirrors, size));
                }
                Ok(Has::Nothing) => {}
                Err(cause) => {
                    let host = &self.endpoints[index].host;
                    tracing::debug!(host, %cause, "cannot ask a mirror for a layer");
                    self.note_failure(index, &cause);
                }
            }
            if tokio::time::Instant::now() >= end {
                return None;
            }
            mirrors.remove(0);
        }
        None
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
            _ => Ok(Has::Nothing),
        }
    }

    /// Asks whether a host has a blob. Returns the status and the blob's length.
    async fn head(&self, index: usize, digest: &Digest) -> Result<(u16, Option<u64>), Cause> {
        let ask = self.ask(index, Method::HEAD, &format!("blobs/{digest}"))?;
        let answer = patience::as_document(self.settings.patience, self.call(index, &ask)).await?;
        let length = answer.response.headers().get(CONTENT_LENGTH);
        let length = length.and_then(|it| it.to_str().ok()?.parse().ok());
        Ok((answer.response.status().as_u16(), length))
    }
}

fn is_peer(headers: &HeaderMap) -> bool {
    let values = headers.get_all(HeaderName::from_static(PEER_HEADER));
    values.iter().any(|it| it.as_bytes() == PEER_LAYERS.as_bytes())
}
