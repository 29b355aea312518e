//! Fetches the windows of an index that came without them, when the first span is needed.

use std::io;
use std::sync::{Mutex, OnceLock};
use std::thread;

use image::digest::Digest;
use oci::blobs::Whole;
use store::IndexWindows;

use super::{Cause, FillError, LayerFiller};
use crate::unpoisoned::lock;

/// Number of attempts to fetch windows whose digest is wrong, each from another host.
const ATTEMPTS: usize = 2;

/// Windows that are fetched later than their index.
#[derive(Default)]
pub(super) struct LaterWindows<'a> {
    groups: OnceLock<Vec<u8>>,
    /// Held while they are fetched.
    fetching: Mutex<()>,
    /// Keeps them for the next filler.
    keep: Option<Box<KeepWindows<'a>>>,
}

type KeepWindows<'a> = dyn Fn(&[u8]) + Send + Sync + 'a;

impl<'a> LaterWindows<'a> {
    pub(super) fn keep_by(&mut self, keep: impl Fn(&[u8]) + Send + Sync + 'a) {
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
        if let Some(groups) = self.later.groups.get() {
            return Ok(groups);
        }
        let _fetching = lock(&self.later.fetching);
        // Another thread may have fetched them.
        if let Some(groups) = self.later.groups.get() {
            return Ok(groups);
        }
        let groups = self.fetch_windows(digest)?;
        if let Some(keep) = &self.later.keep {
            keep(&groups);
        }
        Ok(self.later.groups.get_or_init(|| groups))
    }

    /// Calls `fetch`, and fetches the windows at the same time if they are not there, so that the first reader waits
    /// for one round trip and not for two.
    pub(super) fn with_windows<T>(
        &self,
        fetch: impl FnOnce() -> Result<T, FillError>,
    ) -> Result<T, FillError> {
        let is_there = match &self.index.windows {
            IndexWindows::Groups(_) => true,
            IndexWindows::Blob(_) => self.later.groups.get().is_some(),
        };
        if is_there {
            return fetch();
        }
        thread::scope(|scope| {
            // If there is no thread, or the windows cannot be fetched, the first use of the windows reports that.
            let windows = || drop(self.window_groups());
            let _thread = thread::Builder::new().spawn_scoped(scope, windows);
            fetch()
        })
    }

    fn fetch_windows(&self, digest: &Digest) -> Result<Vec<u8>, FillError> {
        let length = self.index.head.windows_bytes();
        let failed = |source| FillError::FetchWindows { blob: Box::new(*digest), source };
        let all = 0..length;
        for _ in 0..ATTEMPTS {
            let all = std::slice::from_ref(&all);
            let parts = self.blobs.ranges(digest, length, all, Whole::Read).map_err(failed)?;
            let groups = parts.concat();
            if groups.len() as u64 == length && digest.matches(&groups) {
                self.core.counts.fetched(length, Cause::Reader);
                return Ok(groups);
            }
            if !self.blobs.distrust(digest) {
                break;
            }
        }
        let wrong = "their digest or length is wrong";
        Err(failed(io::Error::new(io::ErrorKind::InvalidData, wrong)))
    }
}
