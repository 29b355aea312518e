//! A cache of windows, from which the spans of a blob are inflated.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use image::gzip::Window;

use crate::unpoisoned::lock;

/// Number of groups of windows that a filler caches: a few hundred kilobytes in valid indexes.
const GROUPS: usize = 16;

/// A cache of the last used windows, by their group.
#[derive(Debug, Default)]
pub(super) struct WindowCache(Mutex<VecDeque<(usize, Arc<[Window]>)>>);

impl WindowCache {
    /// Returns the windows of a group. `make` decodes them if they are not cached.
    pub(super) fn get(
        &self,
        group: usize,
        make: impl FnOnce() -> Option<Vec<Window>>,
    ) -> Option<Arc<[Window]>> {
        let mut kept = lock(&self.0);
        let found = kept.iter().position(|it| it.0 == group).and_then(|at| kept.remove(at));
        let (_, windows) = match found {
            Some(found) => found,
            None => {
                // The lock is released, so that other threads need not wait.
                drop(kept);
                let made = make()?;
                kept = lock(&self.0);
                (group, made.into())
            }
        };
        kept.truncate(GROUPS - 1);
        kept.push_front((group, Arc::clone(&windows)));
        Some(windows)
    }
}
