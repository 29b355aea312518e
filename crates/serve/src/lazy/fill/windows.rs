//! Fetches the windows of an index that came without them, when the first span is needed.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Instant;

use image::digest::Digest;
use oci::blobs::Whole;
use store::IndexWindows;

use super::{Cause, FillError, LayerFiller};
use crate::any_error::text;
use crate::unpoisoned::lock;

/// Number of attempts to fetch windows whose digest is wrong, each from another host.
const ATTEMPTS: usize = 8;
/// Number of bytes that are requested at once. After each request, the source counts as one that sends data.
const PIECE: u64 = 4 << 20;

/// Windows that are fetched later than their index.
#[derive(Default)]
pub(super) struct LaterWindows<'a> {
    groups: OnceLock<Arc<Vec<u8>>>,
    /// Held while they are fetched. Contains the time and the cause of the last failure.
    fetching: Mutex<Option<(Instant, String)>>,
    /// Keeps them for the next filler. A reader waits for this call.
    keep: Option<Box<KeepWindows<'a>>>,
}

type KeepWindows<'a> = dyn Fn(&Arc<Vec<u8>>) + Send + Sync + 'a;

impl<'a> LaterWindows<'a> {
    pub(super) fn keep_by(&mut self, keep: impl Fn(&Arc<Vec<u8>>) + Send + Sync + 'a) {
        self.keep = Some(Box::new(keep));
    }
}

impl LayerFiller<'_> {
    /// Returns all groups of windows, and fetches them if that was not done.
    pub(super) fn window_groups(&self) -> Result<&[u8], FillError> {
        let digest = match &self.index.windows {
            IndexWindows::Groups(groups) => return Ok(groups),
            IndexWindows::Blob(digest) => digest,
        };
        let later = &self.later;
        if let Some(groups) = later.groups.get() {
            return Ok(groups);
        }
        let came = Instant::now();
        let mut failure = lock(&later.fetching);
        // Another thread may have fetched them while this one waited.
        if let Some(groups) = later.groups.get() {
            return Ok(groups);
        }
        // A thread that has waited for a request that failed does not repeat it.
        if let Some((_, cause)) = failure.as_ref().filter(|it| it.0 >= came) {
            let source = io::Error::other(cause.clone());
            return Err(FillError::FetchWindows { blob: Box::new(*digest), source });
        }
        let fetched = self.fetch_windows(digest).map_err(|source| {
            *failure = Some((Instant::now(), text(&source)));
            FillError::FetchWindows { blob: Box::new(*digest), source }
        })?;
        let groups = later.groups.get_or_init(|| Arc::new(fetched));
        drop(failure);
        if let Some(keep) = &later.keep {
            keep(groups);
        }
        Ok(groups)
    }

    /// Returns whether the windows were fetched, or are not needed.
    pub(in crate::lazy) fn has_windows(&self) -> bool {
        match &self.index.windows {
            _ if !self.index.head.has_windows() => true,
            IndexWindows::Groups(_) => true,
            IndexWindows::Blob(_) => self.later.groups.get().is_some(),
        }
    }

    /// Fetches the windows if that was not done. The first use of the windows reports a failure.
    pub(in crate::lazy) fn fetch_windows_now(&self) {
        if let Err(error) = self.with_windows(|| Ok(())) {
            let error: &dyn std::error::Error = &error;
            tracing::debug!(error, "cannot fetch the windows of an index");
        }
    }

    /// Calls `fetch`, and fetches the windows at the same time if that was not done, so that the first reader waits for
    /// one round trip and not for two.
    pub(super) fn with_windows<T>(
        &self,
        fetch: impl FnOnce() -> Result<T, FillError>,
    ) -> Result<T, FillError> {
        if self.has_windows() {
            return fetch();
        }
        thread::scope(|scope| {
            // Without a thread, the windows are fetched when they are used.
            let windows = || self.window_groups().map(drop);
            let thread = thread::Builder::new().spawn_scoped(scope, windows);
            let fetched = fetch()?;
            if let Ok(thread) = thread {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
            Ok(fetched)
        })
    }

    fn fetch_windows(&self, digest: &Digest) -> io::Result<Vec<u8>> {
        let length = self.index.head.windows_bytes();
        for _ in 0..ATTEMPTS {
            let mut groups = Vec::new();
            while (groups.len() as u64) < length {
                let start = groups.len() as u64;
                let piece = start..(start + PIECE).min(length);
                let piece = std::slice::from_ref(&piece);
                let parts = self.blobs.ranges(digest, length, piece, Whole::Read)?.concat();
                if parts.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.failures.gave(Instant::now());
                self.core.counts.fetched(parts.len() as u64, Cause::Reader);
                groups.extend(parts);
            }
            if groups.len() as u64 == length && digest.matches(&groups) {
                return Ok(groups);
            }
            if !self.blobs.distrust(digest) {
                break;
            }
        }
        let wrong = "their digest or length is wrong";
        Err(io::Error::new(io::ErrorKind::InvalidData, wrong))
    }
}
