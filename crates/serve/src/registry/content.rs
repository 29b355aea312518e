//! Reads the bytes of blobs and tars, and passes them to connections.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use hyper::body::{Bytes, Frame};
use store::{BytesError, CheckedRanges, CheckedSource, Store};
use tokio::sync::{mpsc, oneshot};

use super::RegistryResources;
use super::error::Refused;
use super::quota::Held;
use crate::unpoisoned::lock;

/// Size of the parts that are passed to a connection, in bytes.
const PART: usize = 128 << 10;
/// Maximum bytes of hashes that are kept to check ranges: those of about a terabyte of large blobs.
const HASHES_MAX: usize = 64 << 20;
/// Maximum number of blobs and tars whose hashes are kept.
const CHECKED_MAX: usize = 1024;

/// The bytes that a client asks for.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) source: CheckedSource,
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
    /// Held while bytes are compared, because each comparison reads a whole blob.
    comparing: Mutex<()>,
}

impl CheckedSources {
    /// Returns the hashes of a blob or tar, which is read if it was not compared yet.
    fn get(&self, store: &Store, wanted: &Wanted) -> Result<Arc<CheckedRanges>, BytesError> {
        if let Some(found) = self.known(wanted.source) {
            return Ok(found);
        }
        let _comparing = lock(&self.comparing);
        // Another request may have waited for the same blob.
        if let Some(found) = self.known(wanted.source) {
            return Ok(found);
        }
        let new = Arc::new(store.check_ranges(wanted.source, wanted.size)?);
        let mut checked = lock(&self.checked);
        checked.push((wanted.source, Arc::clone(&new)));
        let mut weight: usize = checked.iter().map(|it| it.1.weight()).sum();
        while checked.len() > 1 && (checked.len() > CHECKED_MAX || weight > HASHES_MAX) {
            weight -= checked.remove(0).1.weight();
        }
        Ok(new)
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
    let reader: Result<Box<dyn Read + Send + '_>, BytesError> = match (&wanted.part, wanted.source)
    {
        (Some(part), _) => match sources.get(store, wanted) {
            Ok(found) => {
                checked = found;
                store.read_range(&checked, part.clone()).map(boxed)
            }
            Err(error) => Err(error),
        },
        (None, CheckedSource::Blob(digest)) => store.verified_blob(&digest, wanted.size).map(boxed),
        (None, CheckedSource::Tar(diff_id)) => store.layer_tar(&diff_id).map(boxed),
    };
    let mut reader = match reader {
        Ok(reader) => reader,
        Err(error) => {
            tell(wanted, &error);
            // The client may be gone.
            let _told = opened.send(Err(Refused::Failed));
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
                tell(wanted, &error);
                sources.forget(wanted.source);
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

fn tell(wanted: &Wanted, error: &BytesError) {
    let (CheckedSource::Blob(digest) | CheckedSource::Tar(digest)) = wanted.source;
    let error: &dyn std::error::Error = error;
    tracing::error!(%digest, error, "cannot serve a blob: see `quire fsck`");
}
