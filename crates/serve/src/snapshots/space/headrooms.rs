//! Disk space that is reserved for limited roots, by a thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use container::root::headroom::Headroom;

/// A thread that reserves space for filestores.
#[derive(Debug)]
pub(in crate::snapshots) struct Headrooms {
    told: Option<Sender<Told>>,
    thread: Option<JoinHandle<()>>,
}

enum Told {
    Add(u64, Box<Headroom>),
    Drop(u64, Sender<()>),
}

impl Headrooms {
    /// Starts the thread.
    ///
    /// # Errors
    /// The error of starting it.
    pub(in crate::snapshots) fn new() -> std::io::Result<Self> {
        let (told, tell) = mpsc::channel();
        let work = move || {
            let count = Arc::new(AtomicU64::new(0));
            let mut all: Vec<(u64, Headroom)> = Vec::new();
            let mut next = Instant::now();
            loop {
                match tell.recv_timeout(next.saturating_duration_since(Instant::now())) {
                    Ok(Told::Add(number, headroom)) => {
                        all.retain(|it| it.0 != number);
                        all.push((number, headroom.among(Arc::clone(&count))));
                    }
                    Ok(Told::Drop(number, done)) => {
                        all.retain(|it| it.0 != number);
                        let _told = done.send(());
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                count.store(all.len() as u64, Ordering::Relaxed);
                let wait = all.iter().map(|it| it.1.look()).min();
                next = Instant::now() + wait.unwrap_or(IDLE);
            }
        };
        let thread = std::thread::Builder::new().name("headrooms".to_owned()).spawn(work)?;
        Ok(Self { told: Some(told), thread: Some(thread) })
    }

    pub(in crate::snapshots) fn add(&self, number: u64, headroom: Headroom) {
        // The thread outlives this value.
        drop(self.told.as_ref().map(|it| it.send(Told::Add(number, Box::new(headroom)))));
    }

    /// Stops reserving space for a filestore, and waits until the thread has released the filestore.
    pub(in crate::snapshots) fn drop(&self, number: u64) {
        let (done, is_done) = mpsc::channel();
        drop(self.told.as_ref().map(|it| it.send(Told::Drop(number, done))));
        let _done = is_done.recv();
    }
}

impl Drop for Headrooms {
    fn drop(&mut self) {
        drop(self.told.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// How long the thread sleeps without filestores.
const IDLE: Duration = Duration::from_secs(3600);
