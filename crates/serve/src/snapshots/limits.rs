//! Roots that may be written only so much: a filestore each, attached where the others have a plain directory.

use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use container::root::filestore::{SIZE_MAX, SIZE_MIN};
use container::root::headroom::Headroom;
use container::root::limit::{attach_filestore, headroom_of, make_filestore, shut_down_filestore};
use store::SnapshotRecord;

use super::error::SnapshotterError;
use super::roots::detach;
use super::snapshotter::{Labels, Snapshotter, is_unpacked};

/// How an engine asks for a limit, in bytes. Source: containerd's `core/snapshots/snapshotter.go`, `LabelSnapshotMaxSize`.
const SIZE: &str = "containerd.io/snapshot/max-size";

/// How long nobody looks where there is no filestore.
const IDLE: Duration = Duration::from_secs(3600);

/// The limit that labels ask for. Of a root on which a layer is unpacked, the image's manifest may have brought the labels.
///
/// # Errors
/// [`SnapshotterError::Size`].
pub(super) fn asked_size(
    name: &str,
    labels: &Labels,
) -> Result<Option<NonZeroU64>, SnapshotterError> {
    let Some(text) = labels.get(SIZE).filter(|_| !is_unpacked(name)) else { return Ok(None) };
    let bytes = text.parse().ok().filter(|it| (SIZE_MIN..=SIZE_MAX).contains(it));
    let bytes = bytes.and_then(NonZeroU64::new);
    let failed = || SnapshotterError::Size { name: name.to_owned(), size: text.clone() };
    bytes.map(Some).ok_or_else(failed)
}

impl Snapshotter {
    /// Whether what is written to a snapshot is limited.
    pub(super) fn is_limited(&self, number: u64) -> bool {
        self.instance.filestore(number).exists()
    }

    /// Sees to it that a root has its limit, before it is mounted. One that was written to without keeps having none.
    pub(super) fn limit(
        &self,
        number: u64,
        record: &SnapshotRecord,
    ) -> Result<(), SnapshotterError> {
        let (file, at) = (self.instance.filestore(number), self.instance.changes(number));
        if !file.exists() {
            let Some(bytes) = asked_size(&record.name, &record.labels)? else { return Ok(()) };
            if at.join("upper").exists() {
                return Ok(());
            }
            let (folder, name) = (file.parent(), file.file_name().and_then(|it| it.to_str()));
            let place = folder.zip(name).ok_or(SnapshotterError::Name)?;
            let search = &self.surroundings.search;
            make_filestore(self.store.containers.fd(), bytes, place, search)?;
        }
        self.attach_limit(number)
    }

    /// Mounts the file of a limited root, if it is not. Of others, nothing is done.
    pub(super) fn attach_limit(&self, number: u64) -> Result<(), SnapshotterError> {
        let (file, at) = (self.instance.filestore(number), self.instance.changes(number));
        match file.exists() && !is_mounted(&at) {
            true => Ok(attach_filestore(&file, &at)?),
            false => Ok(()),
        }
    }

    /// Has room made for a limited root, which is mounted.
    pub(super) fn make_room(&self, number: u64) {
        let (file, at) = (self.instance.filestore(number), self.instance.changes(number));
        if !is_mounted(&at) {
            return;
        }
        match headroom_of(&file, &at) {
            Ok(headroom) => self.headrooms.add(number, headroom),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, number, "a root has only the room that it has already");
            }
        }
    }

    /// Unmounts what limits a root that is not mounted any more; what is in it is not needed.
    pub(super) fn drop_limit(&self, number: u64) -> Result<(), SnapshotterError> {
        let at = self.instance.changes(number);
        if !is_mounted(&at) {
            return Ok(());
        }
        self.headrooms.drop(number);
        shut_down_filestore(&at);
        Ok(detach(&at)?)
    }
}

/// Whether something else is mounted at a directory than what it lies in.
fn is_mounted(directory: &Path) -> bool {
    let device = |it: &Path| it.metadata().ok().map(|it| it.dev());
    let (here, above) = (device(directory), directory.parent().and_then(device));
    here.is_some() && here != above
}

/// What reserves space for filestores, in a thread of its own.
#[derive(Debug)]
pub(super) struct Headrooms {
    told: Option<Sender<Told>>,
    thread: Option<JoinHandle<()>>,
}

enum Told {
    Add(u64, Box<Headroom>),
    Drop(u64, Sender<()>),
}

impl Headrooms {
    pub(super) fn new() -> Self {
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
        Self { told: Some(told), thread: Some(std::thread::spawn(work)) }
    }

    fn add(&self, number: u64, headroom: Headroom) {
        // The thread ends after this only.
        drop(self.told.as_ref().map(|it| it.send(Told::Add(number, Box::new(headroom)))));
    }

    /// Lets go of a filestore, and waits for that.
    fn drop(&self, number: u64) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_bytes() {
        let asked = |name: &str, size: &str| {
            let labels = [(SIZE.to_owned(), size.to_owned())].into();
            asked_size(name, &labels).map(|it| it.map(NonZeroU64::get)).ok()
        };
        assert_eq!(asked("default/1/one", "16777216"), Some(Some(16 << 20)));
        for wrong in ["", "0", "-1", "16777215", "17592186044417", "1G", "99999999999999999999"] {
            assert_eq!(asked("default/1/one", wrong), None, "{wrong}");
        }
        // A manifest may have said so.
        let unpacked = format!("default/1/extract-1-a {}", image::digest::Digest::sha256(b""));
        assert_eq!(asked(&unpacked, "1"), Some(None));
        assert_eq!(asked_size("default/1/one", &Labels::new()).unwrap(), None);
    }
}
