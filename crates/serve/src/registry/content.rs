//! Reads the bytes of blobs and tars, and passes them to connections.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::body::{Bytes, Frame};
use image::digest::Digest;
use store::{BytesError, CheckedRanges, CheckedSource, OperationError, Store};
use tokio::sync::{mpsc, oneshot};

use super::RegistryResources;
use super::error::Refused;
use super::lazy_layers::{LazyHeads, LazyLayer, TURN};
use super::quota::Held;
use crate::unpoisoned::lock;

/// Size of the parts that are passed to a connection, in bytes.
const PART: usize = 128 << 10;
/// Maximum bytes of hashes that are kept to check ranges: those of about a terabyte of large blobs.
const HASHES_MAX: usize = 64 << 20;
/// Maximum number of blobs and tars whose hashes are kept.
const CHECKED_MAX: usize = 1024;
/// Maximum number of blobs and tars that are compared at a time. Each takes a processor.
const COMPARING_MAX: usize = 2;
/// Pause after which a request that waits for a comparison looks whether its client is gone.
const LOOK: Duration = Duration::from_millis(100);
/// Time after which the same damage is logged again.
const TOLD: Duration = Duration::from_secs(60);

/// The place of bytes in the store.
#[derive(Debug, Clone)]
pub(super) enum WantedSource {
    /// A blob or tar, which is complete.
    Complete(CheckedSource),
    /// The tar of a layer of which the store may have only parts.
    Lazy(Arc<LazyLayer>),
}

/// The bytes that a client asks for.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) source: WantedSource,
    /// Size of the blob or tar, in bytes.
    pub(super) size: u64,
    /// A part of the bytes, or `None` for all of them.
    pub(super) part: Option<Range<u64>>,
}

/// Blobs and tars that were compared with their digests, so that parts of them can be served. The last used one is at
/// the end.
#[derive(Debug, Default)]
pub(super) struct CheckedSources {
    checked: Mutex<Vec<(CheckedSource, Arc<CheckedRanges>)>>,
    /// The comparisons that run now. Each comparison reads a whole blob.
    comparing: Mutex<Vec<CheckedSource>>,
    /// The comparisons that wait for one of these.
    waiting: Mutex<Vec<CheckedSource>>,
    /// Notified when a comparison ends.
    compared: Condvar,
    /// Indexes of layers of which the store may have only parts.
    heads: LazyHeads,
    /// When damage was last logged.
    told: Mutex<BTreeMap<Digest, Instant>>,
}

/// One of the comparisons.
struct Comparing<'s> {
    sources: &'s CheckedSources,
    source: CheckedSource,
}

impl Drop for Comparing<'_> {
    fn drop(&mut self) {
        lock(&self.sources.comparing).retain(|it| *it != self.source);
        self.sources.compared.notify_all();
    }
}

impl CheckedSources {
    /// Returns the hashes of a blob or tar, which is read if it was not compared yet. Ends early if the client is gone and
    /// another comparison waits. Otherwise the next client would begin again, and a large layer might never be compared.
    fn get(
        &self,
        store: &Store,
        source: CheckedSource,
        size: u64,
        is_gone: &dyn Fn() -> bool,
    ) -> Result<Arc<CheckedRanges>, BytesError> {
        if let Some(found) = self.known(source) {
            return Ok(found);
        }
        let _comparing = self.wait(source, is_gone).ok_or(BytesError::GivenUp)?;
        // Another request may have compared the same blob.
        if let Some(found) = self.known(source) {
            return Ok(found);
        }
        let is_unneeded = || is_gone() && lock(&self.waiting).iter().any(|it| *it != source);
        let new = Arc::new(store.check_ranges(source, size, is_unneeded)?);
        let mut checked = lock(&self.checked);
        checked.push((source, Arc::clone(&new)));
        let mut weight: usize = checked.iter().map(|it| it.1.weight()).sum();
        while checked.len() > 1 && (checked.len() > CHECKED_MAX || weight > HASHES_MAX) {
            weight -= checked.remove(0).1.weight();
        }
        Ok(new)
    }

    /// Waits until a comparison may begin. `None` if the client is gone before.
    fn wait(&self, source: CheckedSource, is_gone: &dyn Fn() -> bool) -> Option<Comparing<'_>> {
        lock(&self.waiting).push(source);
        let begun = self.wait_turn(source, is_gone);
        let mut waiting = lock(&self.waiting);
        if let Some(at) = waiting.iter().position(|it| *it == source) {
            waiting.swap_remove(at);
        }
        begun
    }

    fn wait_turn(
        &self,
        source: CheckedSource,
        is_gone: &dyn Fn() -> bool,
    ) -> Option<Comparing<'_>> {
        let mut comparing = lock(&self.comparing);
        while comparing.contains(&source) || comparing.len() >= COMPARING_MAX {
            if is_gone() {
                return None;
            }
            let waited = self.compared.wait_timeout(comparing, LOOK);
            comparing = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        comparing.push(source);
        Some(Comparing { sources: self, source })
    }

    /// Whether to log damage of this blob, tar or document now: clients can repeat their requests.
    pub(super) fn may_tell(&self, digest: &Digest) -> bool {
        let mut told = lock(&self.told);
        told.retain(|_, at| at.elapsed() < TOLD);
        let may = told.len() < CHECKED_MAX && !told.contains_key(digest);
        if may {
            told.insert(*digest, Instant::now());
        }
        may
    }

    fn known(&self, source: CheckedSource) -> Option<Arc<CheckedRanges>> {
        let mut checked = lock(&self.checked);
        let at = checked.iter().position(|it| it.0 == source)?;
        let found = checked.remove(at);
        checked.push(found);
        checked.last().map(|it| Arc::clone(&it.1))
    }

    /// Compares the bytes again before the next range, because some were damaged.
    fn forget(&self, source: CheckedSource) {
        lock(&self.checked).retain(|it| it.0 != source);
    }
}

/// Reads the bytes on this thread, and sends them to a connection, until the client is gone. Bytes that do not match
/// their digest end in an error, which cuts the connection.
pub(super) fn send(
    resources: &RegistryResources,
    sources: &CheckedSources,
    wanted: &Wanted,
    opened: oneshot::Sender<Result<(), Refused>>,
    parts: &mpsc::Sender<io::Result<Frame<Bytes>>>,
    slot: Held,
) {
    let store = &resources.store;
    let checked;
    let is_gone = || opened.is_closed();
    let reader: Result<Option<Box<dyn Read + Send + '_>>, BytesError> = match &wanted.source {
        WantedSource::Complete(source) => match (&wanted.part, *source) {
            (Some(part), _) => match sources.get(store, *source, wanted.size, &is_gone) {
                Ok(found) => {
                    checked = found;
                    store.read_range(&checked, part.clone()).map(boxed)
                }
                Err(error) => Err(error),
            },
            (None, CheckedSource::Blob(digest)) => {
                store.verified_blob(&digest, wanted.size).map(boxed)
            }
            (None, CheckedSource::Tar(diff_id)) => store.layer_tar(&diff_id).map(boxed),
        }
        .map(Some),
        WantedSource::Lazy(layer) => {
            let part = wanted.part.clone().unwrap_or(0..wanted.size);
            let Some(comparing) = sources.heads.begin(TURN, is_gone) else {
                // The client asks another host, and perhaps this one later.
                let _told = opened.send(Err(Refused::Busy));
                return;
            };
            let found = sources.heads.open(&comparing, store, layer, part, is_gone);
            let failed = OperationError::of("read", "the device");
            found.map(|it| it.map(boxed)).map_err(|error| failed(error).into())
        }
    };
    let mut reader = match reader {
        Ok(Some(reader)) => reader,
        // The client asks another host.
        Ok(None) => {
            let _told = opened.send(Err(Refused::Blob));
            return;
        }
        Err(error) => {
            let refused =
                if is_absent(store, &wanted.source) { Refused::Blob } else { Refused::Failed };
            tell(store, sources, wanted, &error);
            // The client may be gone.
            let _told = opened.send(Err(refused));
            return;
        }
    };
    if opened.send(Ok(())).is_err() {
        return;
    }
    loop {
        let mut part = vec![0; PART];
        let sent = match fill(&mut *reader, &mut part) {
            Ok(0) => break,
            Ok(count) => {
                part.truncate(count);
                parts.blocking_send(Ok(Frame::data(Bytes::from(part))))
            }
            Err(error) => {
                let error = BytesError::from_io(error);
                tell(store, sources, wanted, &error);
                if let WantedSource::Complete(source) = &wanted.source {
                    sources.forget(*source);
                }
                let damaged = io::Error::from(io::ErrorKind::InvalidData);
                // The client may be gone.
                let _told = parts.blocking_send(Err(damaged));
                break;
            }
        };
        if sent.is_err() {
            break;
        }
    }
    drop(slot);
}

fn boxed<'a>(reader: impl Read + Send + 'a) -> Box<dyn Read + Send + 'a> {
    Box::new(reader)
}

/// Fills a part, unless the bytes end before.
fn fill(reader: &mut dyn Read, part: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < part.len() {
        match reader.read(&mut part[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Logs why bytes cannot be sent. `quire gc` may remove them at any time, which is no damage.
fn tell(store: &Store, sources: &CheckedSources, wanted: &Wanted, error: &BytesError) {
    let digest = match &wanted.source {
        WantedSource::Complete(CheckedSource::Blob(digest) | CheckedSource::Tar(digest)) => *digest,
        WantedSource::Lazy(layer) => layer.diff_id,
    };
    let is_gone = matches!(error, BytesError::GivenUp) || is_absent(store, &wanted.source);
    let error: &dyn std::error::Error = error;
    if is_gone {
        tracing::debug!(%digest, error, "a blob is not needed any more, or was removed");
        return;
    }
    if !sources.may_tell(&digest) {
        return;
    }
    tracing::error!(%digest, error, "cannot serve a blob: see `quire fsck`");
}

fn is_absent(store: &Store, source: &WantedSource) -> bool {
    match source {
        WantedSource::Complete(CheckedSource::Blob(digest)) => {
            matches!(store.downloads.blob(digest), Ok(None))
        }
        WantedSource::Complete(CheckedSource::Tar(diff_id)) => {
            matches!(store.layers.has(diff_id), Ok(false))
        }
        // Such a device may be completed and moved at any time, and its parts may be missing.
        WantedSource::Lazy(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_are_limited_and_end_with_their_clients() {
        let sources = CheckedSources::default();
        let [one, two, three] = [b"1", b"2", b"3"].map(|it| CheckedSource::Tar(Digest::sha256(it)));
        let first = sources.wait(one, &|| false).unwrap();
        assert!(sources.wait(one, &|| true).is_none(), "the same one twice");
        let _second = sources.wait(two, &|| true).expect("another one need not wait");
        assert!(sources.wait(three, &|| true).is_none(), "three at a time");
        drop(first);
        let _third = sources.wait(three, &|| true).unwrap();
    }

    #[test]
    fn the_same_damage_is_logged_once() {
        let sources = CheckedSources::default();
        let [one, two] = [b"1", b"2"].map(|it| Digest::sha256(it));
        assert_eq!(
            [&one, &one, &two, &one].map(|it| sources.may_tell(it)),
            [true, false, true, false]
        );
    }
}
