//! Frees the space of data that an engine has dropped, in a thread of the service.
//!
//! Engines call `Remove` while they hold a lock, and `Cleanup` after a garbage collection. They wait for the thread
//! only in `Cleanup`, and only if the disk is nearly full.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use store::{Seconds, Store};
use tokio::sync::oneshot;

use crate::lazy::release;
use crate::snapshots::settings::CollectChoices;
use crate::snapshots::snapshotter::Snapshotter;

/// Time between two collections on a disk that is nearly full.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Nice value of the thread. Other programs have priority, but calls that wait for the store's lock should not wait
/// long for a processor.
const NICE: i32 = 5;
/// How long a collection may take to stop when the service ends.
const ENDING: Duration = Duration::from_secs(10);
/// How long `Cleanup` waits for a collection. Engines wait longer: kubelet gives up a removal after two minutes.
const PATIENCE: Duration = Duration::from_secs(10);

/// Dropped when a collection that began after the request has ended.
type Waiting = oneshot::Sender<()>;

/// The collector thread. It ends when all [`CollectRequests`] are dropped.
#[derive(Debug)]
pub(in crate::snapshots) struct Collector {
    stop: Arc<AtomicBool>,
    ended: Receiver<()>,
}

impl Collector {
    /// Starts the thread.
    ///
    /// # Errors
    /// The error of starting it.
    pub(in crate::snapshots) fn start(
        snapshotter: &Arc<Snapshotter>,
        choices: CollectChoices,
    ) -> io::Result<(Self, CollectRequests)> {
        let (asked, ask) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let (snapshotter, stopped) = (Arc::clone(snapshotter), Arc::clone(&stop));
        thread::Builder::new().name("collector".to_owned()).spawn(move || {
            // Source: setpriority(2): on Linux, this changes only the calling thread.
            if let Err(error) = rustix::process::setpriority_process(None, NICE) {
                tracing::debug!(%error, "cannot lower the priority of garbage collections");
            }
            work(&snapshotter, choices, &ask, &stopped);
            drop(snapshotter);
            // The receiver may have timed out.
            let _told = end.send(());
        })?;
        Ok((Self { stop, ended }, CollectRequests { asked, choices }))
    }
}

/// Sends requests to the thread.
#[derive(Debug)]
pub(in crate::snapshots) struct CollectRequests {
    asked: Sender<Waiting>,
    choices: CollectChoices,
}

impl CollectRequests {
    /// Requests a collection. If the disk is nearly full, waits for the end of the collection, because kubelet
    /// measures the disk directly after it has removed images, and evicts pods if too little space is available.
    pub(in crate::snapshots) async fn send(&self, snapshotter: &Snapshotter) {
        let (waiting, ended) = oneshot::channel();
        // The thread outlives this value.
        let _asked = self.asked.send(waiting);
        if is_nearly_full(&snapshotter.store, self.choices) {
            // Messages are never sent: the wait ends when the sender is dropped.
            let _ended = tokio::time::timeout(PATIENCE, ended).await;
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A collection that waits for a long check of the store ends with the process.
        let _ended = self.ended.recv_timeout(ENDING);
    }
}

fn work(
    snapshotter: &Snapshotter,
    choices: CollectChoices,
    asked: &Receiver<Waiting>,
    stop: &AtomicBool,
) {
    let mut last: Option<Instant> = None;
    while let Ok(first) = asked.recv() {
        let mut waiting = vec![first];
        while let Some(last) = last {
            // The disk may fill up while requests arrive.
            let apart = match is_nearly_full(&snapshotter.store, choices) {
                true => AT_ONCE.min(choices.apart),
                false => choices.apart,
            };
            match asked.recv_timeout(apart.saturating_sub(last.elapsed())) {
                Ok(another) => waiting.push(another),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        waiting.extend(asked.try_iter());
        last = Some(Instant::now());
        collect(snapshotter, stop);
        drop(waiting);
    }
}

fn is_nearly_full(store: &Store, choices: CollectChoices) -> bool {
    disk_use(store) > choices.at_once_above
}

/// Returns the used percentage of the store's disk, as df computes it. Source: coreutils, `df.c`.
fn disk_use(store: &Store) -> u8 {
    let Ok(disk) = rustix::fs::statvfs(store.path()) else { return 0 };
    let used = disk.f_blocks.saturating_sub(disk.f_bfree);
    let all = used.saturating_add(disk.f_bavail).max(1);
    u8::try_from(used.saturating_mul(100).div_ceil(all)).unwrap_or(100)
}

/// Collects garbage. A failure only costs space.
fn collect(snapshotter: &Snapshotter, stop: &AtomicBool) {
    let begun = Instant::now();
    if snapshotter.environment.lazy.is_some() {
        release(&snapshotter.store);
    }
    let now = Seconds((snapshotter.environment.now)().seconds);
    let collected = snapshotter.store.gc_while(now, &|| !stop.load(Ordering::Relaxed));
    let took = begun.elapsed();
    match collected {
        Ok((_, swept)) => {
            let end = u64::try_from((snapshotter.environment.now)().seconds).unwrap_or_default();
            snapshotter.counts.collected(swept.removed, swept.freed, end);
            let (removed, freed, set_aside) = (swept.removed, swept.freed, swept.set_aside);
            if removed == 0 {
                tracing::debug!(?took, "no data to free");
            } else {
                tracing::info!(removed, freed, set_aside, ?took, "collected garbage");
            }
        }
        Err(error) => {
            snapshotter.counts.not_collected();
            let error: &dyn std::error::Error = &error;
            tracing::error!(
                error,
                ?took,
                "cannot free data that engines removed: fix the cause, then `quire gc` frees \
                it"
            );
        }
    }
}
