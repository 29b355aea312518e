//! Disk use and damage of the store. Measuring them reads the tables of all images, so a thread does it in the
//! background, and only when metrics are requested.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use store::{DiskUse, OpenOptions, Store, Who};

use crate::any_error::AnyError;
use crate::metrics::text::{head, sample, single};
use crate::unpoisoned::lock;

/// Shortest time between two measurements. A collection waits for a running measurement.
const APART: Duration = Duration::from_secs(300);
/// The pause after a measurement, in multiples of its duration.
const PAUSE: u32 = 50;
/// Nice value of the thread: all other programs have priority.
const NICE: i32 = 10;

/// The last measurement of a store.
#[derive(Debug)]
pub(super) struct StoreUse {
    path: PathBuf,
    who: Who,
    state: Arc<Mutex<MeasureState>>,
}

#[derive(Debug, Default)]
struct MeasureState {
    is_running: bool,
    /// Time before which no measurement begins.
    next: Option<Instant>,
    last: Option<Arc<Measurement>>,
}

/// The result of a measurement.
#[derive(Debug, Default)]
struct Measurement {
    /// Time of the measurement, in seconds since 1970.
    at: i64,
    took: Duration,
    used: DiskUse,
    /// Number of images that lack data.
    lacking: usize,
}

/// A measurement, for a thread.
type Work = Box<dyn FnOnce() + Send>;

impl StoreUse {
    pub(super) fn new(store: &Store) -> Self {
        let (path, who) = (store.path().to_owned(), store.who());
        Self { path, who, state: Arc::default() }
    }

    /// Returns the metrics of the last measurement, and starts another one if the last one is old. The first call
    /// returns only the size of the disk. `now` is the time in seconds since 1970.
    pub(super) fn text(&self, now: i64) -> String {
        let last = {
            let mut state = lock(&self.state);
            let is_due = state.next.is_none_or(|it| it <= Instant::now());
            if is_due && !state.is_running {
                let spawn = |work: Work| thread::Builder::new().spawn(work).map(drop);
                self.start(&mut state, now, spawn);
            }
            state.last.clone()
        };
        let mut text = disk_text(&self.path);
        if let Some(last) = last {
            text += &last.text();
        }
        text
    }

    /// Starts a measurement in a thread, if `spawn` can start one.
    fn start(
        &self,
        before: &mut MeasureState,
        now: i64,
        spawn: impl FnOnce(Work) -> io::Result<()>,
    ) {
        let (path, who, state) = (self.path.clone(), self.who, Arc::clone(&self.state));
        let work = move || {
            // Source: setpriority(2): on Linux, this changes only the calling thread.
            if let Err(error) = rustix::process::setpriority_process(None, NICE) {
                tracing::debug!(%error, "cannot lower the priority of measurements");
            }
            let begun = Instant::now();
            // A panic was printed.
            let measured = std::panic::catch_unwind(|| measure(&path, who))
                .unwrap_or_else(|_| Err("the measurement panicked".into()));
            let took = begun.elapsed();
            let mut state = lock(&state);
            state.is_running = false;
            state.next = Some(Instant::now() + APART.max(took.saturating_mul(PAUSE)));
            match measured {
                Ok((used, lacking)) => {
                    state.last = Some(Arc::new(Measurement { at: now, took, used, lacking }));
                }
                Err(error) => {
                    // Older figures would hide that the store cannot be measured.
                    state.last = None;
                    let error: &dyn std::error::Error = &*error;
                    tracing::warn!(error, "cannot measure the store for metrics");
                }
            }
        };
        before.is_running = true;
        if let Err(error) = spawn(Box::new(work)) {
            before.is_running = false;
            before.next = Some(Instant::now() + APART);
            tracing::warn!(%error, "cannot start a thread that measures the store for metrics");
        }
    }
}

fn measure(path: &Path, who: Who) -> Result<(DiskUse, usize), AnyError> {
    // A separate handle, so that the thread does not keep the snapshotter open when the service ends.
    let store = Store::open(path, who, OpenOptions::read())?;
    Ok((store.du()?, store.count_lacking()?))
}

/// Returns the size of the disk with the store, as df computes it. Source: coreutils, `df.c`.
fn disk_text(path: &Path) -> String {
    let Ok(disk) = rustix::fs::statvfs(path) else { return String::new() };
    let bytes = |blocks: u64| blocks.saturating_mul(disk.f_frsize);
    let size = "Size of the disk with the store.";
    let available = "Available space of the disk with the store.";
    single("quire_store_disk_size_bytes", "gauge", size, bytes(disk.f_blocks))
        + &single("quire_store_disk_available_bytes", "gauge", available, bytes(disk.f_bavail))
}

impl Measurement {
    fn text(&self) -> String {
        let Self { at, took, used, lacking } = self;
        let mut text = head("quire_store_bytes", "gauge", "Bytes on disk of the store, by kind.");
        // Each byte is in one kind.
        let kinds = [
            ("objects", used.objects),
            ("devices", used.data),
            ("images", used.image_files),
            ("layers", used.layers),
            ("manifests", used.manifests),
            ("blobs", used.blobs),
            ("containers", used.containers),
            ("container-snapshots", used.container_snapshots),
            ("snapshots", used.snapshots),
            ("unfinished", used.tmp),
        ];
        for (kind, bytes) in kinds {
            text += &sample("quire_store_bytes", &format!("kind=\"{kind}\""), bytes);
        }
        let of_all: u64 = used.images.iter().map(|it| it.shared).sum();
        let values = [
            ("images", "Images in the store.", used.images.len() as u64),
            ("shared_bytes", "Bytes on disk that several images use.", used.shared),
            (
                "saved_bytes",
                "Bytes that would be on disk in addition if images shared nothing.",
                of_all.saturating_sub(used.shared),
            ),
            (
                "unused_bytes",
                "Bytes on disk of objects and devices that no image uses; layers may use them.",
                used.unused_objects.saturating_add(used.unused_data),
            ),
            (
                "damaged_images",
                "Images that lack data, so that no container starts from them.",
                *lacking as u64,
            ),
            (
                "unreadable_files",
                "Files of the store that are damaged or cannot be read, as far as their tables show.",
                used.unreadable.len() as u64,
            ),
        ];
        for (name, help, value) in values {
            text += &single(&format!("quire_store_{name}"), "gauge", help, value);
        }
        let help = "Time of this measurement of the store, in seconds since 1970.";
        text += &single("quire_store_measured_timestamp_seconds", "gauge", help, at);
        let help = "Duration of this measurement.";
        let took = format!("{:.6}", took.as_secs_f64());
        text + &single("quire_store_measure_duration_seconds", "gauge", help, took)
    }
}

#[cfg(test)]
mod tests {
    use image::verity::ImageId;
    use store::ImageUse;

    use super::*;

    #[test]
    fn a_measurement_without_a_thread_is_tried_again_later() {
        let state = Arc::new(Mutex::new(MeasureState::default()));
        let measured =
            StoreUse { path: "/none".into(), who: Who::this_process(), state: Arc::clone(&state) };
        let mut before = lock(&state);
        measured.start(&mut before, 7, |_work| Err(io::ErrorKind::WouldBlock.into()));
        assert!(!before.is_running);
        // The next try waits, because each request would try it.
        assert!(before.next.take().is_some_and(|it| it > Instant::now()));
        measured.start(&mut before, 7, |_work| Ok(()));
        assert!(before.is_running);
    }

    #[test]
    fn a_measurement_has_no_names_of_images() {
        let image: ImageId = "ab".repeat(32).parse().unwrap();
        let used = |shared| ImageUse {
            image,
            refs: vec!["secret:1".parse().unwrap()],
            own: 3,
            shared,
            shared_with: Vec::new(),
        };
        let used = DiskUse {
            objects: 1000,
            tmp: 7,
            shared: 100,
            images: vec![used(100), used(90)],
            unreadable: vec!["image secret is damaged".to_owned()],
            unused_objects: 4,
            unused_data: 5,
            ..DiskUse::default()
        };
        let took = Duration::from_millis(1500);
        let text = Measurement { at: 1_700_000_000, took, used, lacking: 2 }.text();
        for line in [
            "# TYPE quire_store_bytes gauge",
            "quire_store_bytes{kind=\"objects\"} 1000",
            "quire_store_bytes{kind=\"unfinished\"} 7",
            "quire_store_images 2",
            "quire_store_shared_bytes 100",
            "quire_store_saved_bytes 90",
            "quire_store_unused_bytes 9",
            "quire_store_damaged_images 2",
            "quire_store_unreadable_files 1",
            "quire_store_measured_timestamp_seconds 1700000000",
            "quire_store_measure_duration_seconds 1.500000",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        assert!(!text.contains("secret") && !text.contains("abab"), "{text}");
    }

    #[test]
    fn a_store_is_measured_in_the_background() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = Store::open(&path, Who::this_process(), OpenOptions::create()).unwrap();
        let measured = StoreUse::new(&store);
        let first = measured.text(5);
        assert!(first.contains("quire_store_disk_size_bytes "), "{first}");
        assert!(!first.contains("quire_store_images "), "{first}");
        let begun = Instant::now();
        let text = loop {
            let text = measured.text(6);
            if text.contains("quire_store_images ") {
                break text;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no measurement\n{text}");
            thread::sleep(Duration::from_millis(10));
        };
        // Later calls show the same measurement, and start no other one.
        assert!(text.contains("quire_store_measured_timestamp_seconds 5\n"), "{text}");
        assert_eq!(lock(&measured.state).last.as_ref().map(|it| it.at), Some(5));
        assert!(!lock(&measured.state).is_running);
    }
}
