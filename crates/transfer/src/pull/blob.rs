//! A layer's blob that is read from a registry. A download that was interrupted resumes from the part in the store.

use std::io::{self, Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use store::{PartialBlob, Store};

use super::parts::Parts;
use super::toc::Table;
use super::{Layers, PullSettings};
use crate::chunked::{AssemblyPlan, Tar, Toc};
use crate::import::{LayerBlob, LayerFailure, Limits};
use crate::lazy::update::UpdatePlan;
use image::digest::Digest;
use oci::blobs::BlobSource;
use oci::manifest::Descriptor;

/// Partial blobs with fewer bytes are not kept, because a new request costs less than a file.
const PARTIAL_MIN: u64 = 1 << 20;
/// Number of times that a layer or config is fetched from another mirror because its bytes were wrong. Each mirror
/// counts once.
pub(super) const WRONG_MAX: usize = 8;

pub(super) struct PulledBlob<'a> {
    blobs: &'a dyn BlobSource,
    store: &'a Store,
    diff_id: &'a Digest,
    digest: Digest,
    size: u64,
    parts: Parts<'a>,
    /// The layer's table, until `open_tar` takes it.
    table: Table<'a>,
    /// The layer's table of contents.
    toc: Option<Arc<Toc>>,
    plan: Option<AssemblyPlan<'a>>,
    /// A plan from the layer's recipe in the image's index.
    update: Option<UpdatePlan<'a>>,
    layers: Layers,
    limits: Limits,
    /// The partial download, which this pull owns until the layer is complete.
    partial: Option<PartialBlob<'a>>,
    last_try: bool,
    /// Number of times that the registry's bytes were wrong.
    wrong: usize,
    /// Whether the layer was read as a tar of a peer. If the blob is read after that, the tar was wrong.
    was_tar: bool,
    /// Whether the last try used bytes from an earlier pull, which may be wrong.
    had_old_bytes: bool,
}

impl<'a> PulledBlob<'a> {
    pub(super) fn new(
        blobs: &'a dyn BlobSource,
        store: &'a Store,
        layer: &'a Descriptor,
        diff_id: &'a Digest,
        options: &PullSettings<'a>,
        table: Table<'a>,
        update: Option<UpdatePlan<'a>>,
    ) -> Self {
        Self {
            blobs,
            store,
            table,
            diff_id,
            parts: Parts::new(blobs, layer),
            toc: None,
            plan: None,
            update,
            digest: layer.digest,
            size: layer.size,
            layers: options.layers,
            limits: options.import.limits,
            partial: None,
            last_try: false,
            wrong: 0,
            was_tar: false,
            had_old_bytes: false,
        }
    }

    fn take_partial(&mut self) {
        if self.size < PARTIAL_MIN && self.layers == Layers::Forget {
            return;
        }
        match self.store.downloads.partial(&self.digest) {
            Ok(partial) => self.partial = partial,
            Err(error) => {
                tracing::debug!(blob = %self.digest, %error, "cannot keep a partial blob");
            }
        }
        if self.partial.as_ref().is_some_and(|partial| partial.length() > self.size) {
            self.restart();
        }
    }

    /// Discards the downloaded part, because some of its bytes are wrong.
    fn restart(&mut self) {
        if let Some(partial) = &mut self.partial
            && let Err(error) = partial.restart()
        {
            tracing::debug!(blob = %self.digest, %error, "cannot keep a partial blob");
            self.partial = None;
        }
    }
}

impl LayerBlob for PulledBlob<'_> {
    fn open(&mut self, failure: Option<&LayerFailure>) -> Option<Box<dyn Read + Send + '_>> {
        match failure {
            None => {
                if std::mem::take(&mut self.was_tar) {
                    let _is_another_there = self.blobs.distrust(&self.digest);
                }
                // This code is reached with a whole blob in the store only if the store lacks the layer's files.
                if let Ok(Some((file, size))) = self.store.downloads.blob(&self.digest)
                    && size == self.size
                {
                    self.had_old_bytes = true;
                    return Some(Box::new(file));
                }
                self.take_partial();
                self.had_old_bytes = self.partial.as_ref().is_some_and(|it| it.length() > 0);
            }
            Some(_) => {
                self.restart();
                // Wrong bytes from the store are not the registry's fault. If the registry sent wrong bytes, they are
                // fetched again as long as there is another mirror, and then once more.
                let is_new = !std::mem::take(&mut self.had_old_bytes);
                let is_another_there = is_new && self.blobs.distrust(&self.digest);
                self.wrong += usize::from(is_new);
                let may_try = is_another_there && self.wrong < WRONG_MAX;
                if is_new && !may_try && std::mem::replace(&mut self.last_try, true) {
                    if let Some(Err(error)) = self.partial.take().map(PartialBlob::discard) {
                        tracing::debug!(blob = %self.digest, %error, "cannot remove the partial blob");
                    }
                    return None;
                }
                if self.partial.is_none() {
                    self.take_partial();
                    self.restart();
                }
            }
        }
        let here = self.partial.as_ref().map_or(0, PartialBlob::length);
        let blob = |from, until: Option<u64>| {
            self.blobs.blob(&self.digest, self.size, from..until.unwrap_or(self.size))
        };
        // After a failure, the bytes that were fetched with the table are not used, because they have no digest and
        // may be wrong.
        let known = self.toc.as_ref().filter(|_| failure.is_none()).map(|toc| toc.bytes());
        let rest = (here < self.size).then(|| rest(here, self.size, known, blob));
        Some(Box::new(Reader { partial: &mut self.partial, here, at: 0, rest }))
    }

    fn open_tar(&mut self) -> Result<Option<Tar<'_>>, LayerFailure> {
        if let Some((toc, plan)) = std::mem::replace(&mut self.table, Ok(None))? {
            (self.toc, self.plan) = (Some(toc), plan);
        }
        if let Some(plan) = &self.plan {
            return Ok(Some(plan.open(&self.parts)));
        }
        let tar = self.update.as_ref().map(|plan| plan.open(self.blobs)).transpose();
        let tar = tar.unwrap_or_else(|error| {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(blob = %self.digest, error, "downloading the whole blob");
            None
        });
        let is_kept = || matches!(self.store.downloads.blob(&self.digest), Ok(Some(_)));
        // With `--keep-layers`, the blob itself is needed.
        if tar.is_some() || self.layers == Layers::Keep || is_kept() {
            return Ok(tar);
        }
        let Some((reader, size)) = self.blobs.tar(&self.digest, self.diff_id) else {
            return Ok(None);
        };
        // No bytes were requested yet.
        if let Err(error) = self.limits.check_layer(self.size, size) {
            tracing::debug!(blob = %self.digest, %error, "not reading the layer of a peer");
            return Ok(None);
        }
        self.was_tar = true;
        let fetched = Arc::new(AtomicU64::new(0));
        let counted = CountedTar { reader, passed: 0, size, blob: self.size, fetched };
        let fetched = Arc::clone(&counted.fetched);
        Ok(Some(Tar { reader: Box::new(counted), sealed: None, skipped: 0, fetched }))
    }

    fn done(&mut self) {
        if let Some(toc) = &self.toc
            && let Err(error) = toc.keep(self.store, self.diff_id)
        {
            tracing::debug!(blob = %self.digest, %error, "cannot keep its table of contents");
        }
        let Some(partial) = self.partial.take() else { return };
        let outcome = match self.layers {
            // A part of another length is incomplete or too long, so it is discarded.
            Layers::Keep if partial.length() == self.size => partial.finish(),
            _ => partial.discard(),
        };
        if let Err(error) = outcome {
            tracing::warn!(blob = %self.digest, %error, "cannot keep or remove a partial blob: `quire gc` removes it");
        }
    }
}

/// Reads the tar of a layer that comes from a peer. The progress is that of the blob, whose size was announced.
struct CountedTar<'a> {
    reader: Box<dyn Read + Send + 'a>,
    passed: u64,
    /// Number of bytes of the tar, according to the peer.
    size: u64,
    /// Number of bytes of the blob.
    blob: u64,
    fetched: Arc<AtomicU64>,
}

impl Read for CountedTar<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.passed += read as u64;
        let part = u128::from(self.passed) * u128::from(self.blob) / u128::from(self.size.max(1));
        self.fetched.store(u64::try_from(part).unwrap_or(self.blob), Ordering::Relaxed);
        Ok(read)
    }
}

/// Reads a blob from the offset `here` to its end. `known` contains bytes that need no request, and their offset.
/// `blob` reads the other bytes from a start offset to an end offset, or to the end of the blob.
fn rest<'b, R: Read + Send + 'b>(
    here: u64,
    size: u64,
    known: Option<(u64, &'b [u8])>,
    blob: impl Fn(u64, Option<u64>) -> R,
) -> Box<dyn Read + Send + 'b> {
    let known = known.filter(|(_, bytes)| !bytes.is_empty());
    let Some((start, bytes)) = known else { return Box::new(blob(here, None)) };
    let end = start + bytes.len() as u64;
    if here >= end {
        return Box::new(blob(here, None));
    }
    let skipped =
        usize::try_from(here.saturating_sub(start)).expect("the position is within the bytes");
    let known = Cursor::new(&bytes[skipped..]);
    let before = (here < start).then(|| blob(here, Some(start)));
    let after = (end < size).then(|| blob(end, None));
    match (before, after) {
        (None, None) => Box::new(known),
        (Some(before), None) => Box::new(before.chain(known)),
        (None, Some(after)) => Box::new(known.chain(after)),
        (Some(before), Some(after)) => Box::new(before.chain(known).chain(after)),
    }
}

/// Reads the stored part of a blob, then the rest from the registry, which it appends to the stored part.
struct Reader<'r, 'a, R> {
    partial: &'r mut Option<PartialBlob<'a>>,
    /// Length in bytes of the part that was stored at the start.
    here: u64,
    at: u64,
    /// `None` if the whole blob was stored.
    rest: Option<R>,
}

impl<R: Read> Read for Reader<'_, '_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Some(partial) = self.partial
            && self.at < self.here
        {
            let left = usize::try_from(self.here - self.at).unwrap_or(usize::MAX);
            let length = left.min(into.len());
            let read = partial.read_at(&mut into[..length], self.at)?;
            if read == 0 && length > 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "another process truncated the stored part of the blob",
                ));
            }
            self.at += read as u64;
            return Ok(read);
        }
        let Some(rest) = &mut self.rest else { return Ok(0) };
        let read = rest.read(into)?;
        if let Some(partial) = self.partial
            && let Err(error) = partial.append(&into[..read])
        {
            // The usual cause is a full disk. The pull itself may still have enough space.
            tracing::debug!(%error, "cannot keep a partial blob");
            if let Some(Err(error)) = self.partial.take().map(PartialBlob::discard) {
                tracing::debug!(%error, "cannot remove the partial blob");
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Reads a blob of ten bytes, some of them known, and compares the ranges that are requested for the rest.
    fn check(here: u64, known: Option<(u64, &[u8])>, expect: &[(u64, Option<u64>)]) {
        const BLOB: &[u8] = b"0123456789";
        let asked = RefCell::new(Vec::new());
        let blob = |from: u64, until: Option<u64>| {
            asked.borrow_mut().push((from, until));
            let [from, end] = [from, until.unwrap_or(10)].map(|it| usize::try_from(it).unwrap());
            &BLOB[from..end]
        };
        let mut bytes = Vec::new();
        rest(here, 10, known, blob).read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, &BLOB[usize::try_from(here).unwrap()..], "{here} {known:?}");
        assert_eq!(*asked.borrow(), expect, "{here} {known:?}");
    }

    #[test]
    fn what_came_with_a_table_is_not_asked_for_again() {
        check(0, None, &[(0, None)]);
        check(4, None, &[(4, None)]);
        check(0, Some((6, b"67")), &[(0, Some(6)), (8, None)]);
        check(0, Some((6, b"6789")), &[(0, Some(6))]);
        check(3, Some((6, b"6789")), &[(3, Some(6))]);
        check(6, Some((6, b"67")), &[(8, None)]);
        check(7, Some((6, b"67")), &[(8, None)]);
        check(7, Some((6, b"6789")), &[]);
        check(8, Some((6, b"67")), &[(8, None)]);
        check(9, Some((6, b"67")), &[(9, None)]);
        check(0, Some((10, b"")), &[(0, None)]);
    }
}
