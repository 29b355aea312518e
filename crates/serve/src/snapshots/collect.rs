//! Space that an engine has dropped is freed soon after, by a thread of the service.
//!
//! Engines call `Remove` with a lock of their own held, and `Cleanup` once they have ended a collection of theirs. They wait
//! for the thread in `Cleanup` alone, and only on a disk that is nearly full.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use store::Seconds;
use tokio::sync::oneshot;

use super::settings::CollectChoices;
use super::snapshotter::Snapshotter;

/// Time from one collection to the next on a disk that is nearly full.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Nice value of the thread. Programs come first, but what waits for the store's lock is not to wait long for a processor.
const NICE: i32 = 5;
/// How long a collection may take to end when the service ends.
const ENDING: Duration = Duration::from_secs(10);
/// How long `Cleanup` waits for a collection. Engines have longer patience: kubelet gives up a removal after two minutes.
const PATIENCE: Duration = Duration::from_secs(10);

/// Dropped once a collection that began after it was sent has ended.
type Waiting = oneshot::Sender<()>;

/// The thread. It ends with all [`CollectRequests`].
#[derive(Debug)]
pub(super) struct Collector {
    stop: Arc<AtomicBool>,
    ended: Receiver<()>,
}

impl Collector {
    /// Starts it.
    pub(super) fn start(
        snapshotter: &Arc<Snapshotter>,
        choices: CollectChoices,
    ) -> (Self, CollectRequests) {
        let (asked, ask) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let (snapshotter, stopped) = (Arc::clone(snapshotter), Arc::clone(&stop));
        thread::spawn(move || {
            // Source: setpriority(2): on Linux it is the calling thread's.
            if let Err(error) = rustix::process::setpriority_process(None, NICE) {
                tracing::debug!(%error, "collections have the priority of the service");
            }
            work(&snapshotter, choices, &ask, &stopped);
            drop(snapshotter);
            // Nobody may wait any more.
            let _told = end.send(());
        });
        (Self { stop, ended }, CollectRequests { asked, choices })
    }
}

/// Asks the thread for collections.
#[derive(Debug)]
pub(super) struct CollectRequests {
    asked: Sender<Waiting>,
    choices: CollectChoices,
}

impl CollectRequests {
    /// Asks for a collection. On a disk that is nearly full, it waits for the end of the collection: kubelet measures the disk
    /// as soon as it has removed images, and evicts pods if too little is available then.
    pub(super) async fn send(&self, snapshotter: &Snapshotter) {
        let (waiting, ended) = oneshot::channel();
        // The thread ends after this only.
        let _asked = self.asked.send(waiting);
        if snapshotter.is_nearly_full(self.choices) {
            // Nothing is ever sent: it ends with the sender.
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
            // The disk may fill while others ask.
            let apart = match snapshotter.is_nearly_full(choices) {
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
        snapshotter.collect(stop);
        drop(waiting);
    }
}

impl Snapshotter {
    fn is_nearly_full(&self, choices: CollectChoices) -> bool {
        self.disk_use() > choices.at_once_above
    }

    /// Percentage of the store's disk that is in use, as df computes it. Source: coreutils, `df.c`.
    fn disk_use(&self) -> u8 {
        let Ok(disk) = rustix::fs::statvfs(self.store.path()) else { return 0 };
        let used = disk.f_blocks.saturating_sub(disk.f_bfree);
        let all = used.saturating_add(disk.f_bavail).max(1);
        u8::try_from(used.saturating_mul(100).div_ceil(all)).unwrap_or(100)
    }

    /// Frees what nothing needs. A failure costs space, and nothing else.
    fn collect(&self, stop: &AtomicBool) {
        let begun = Instant::now();
        if let Some(lazy) = &self.surroundings.lazy {
            lazy.images.release(&self.store);
        }
        let now = Seconds((self.surroundings.now)().seconds);
        let collected = self.store.gc_while(now, &|| !stop.load(Ordering::Relaxed));
        let took = begun.elapsed();
        match collected {
            Ok((_, swept)) => {
                self.counts.collected(swept.removed, swept.freed);
                let (removed, freed, set_aside) = (swept.removed, swept.freed, swept.set_aside);
                if removed == 0 {
                    tracing::debug!(?took, "there is nothing to free");
                } else {
                    tracing::info!(removed, freed, set_aside, ?took, "collected garbage");
                }
            }
            Err(error) => {
                self.counts.not_collected();
                let error: &dyn std::error::Error = &error;
                tracing::error!(
                    error,
                    ?took,
                    "what engines have dropped is not freed: `quire gc` frees it once the cause is gone"
                );
            }
        }
    }
}
