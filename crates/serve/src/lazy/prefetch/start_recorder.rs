//! Records which parts of devices are read at the start of images, for later versions of the images (decision 36).

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::DeviceId;
use transfer::lazy::DeviceReads;

use crate::unpoisoned::lock;

/// How long reads are recorded, from the first one on: as long as `quire index` runs the start of an image.
const TIME: Duration = Duration::from_secs(10);
/// Maximum number of images whose starts are recorded at the same time.
const RECORDINGS_MAX: usize = 64;
/// Maximum number of images whose prefetched start is remembered.
const PREFETCHED_MAX: usize = 1024;

/// The starts of images that are recorded or were prefetched, by the manifests of the images.
#[derive(Debug, Default)]
pub(in crate::lazy) struct Starts {
    recordings: Mutex<HashMap<Digest, Arc<StartRecording>>>,
    /// Manifests of the versions whose starts were prefetched.
    prefetched: Mutex<HashMap<Digest, Digest>>,
}

/// The recording of one start, which the connections of its mounts share.
#[derive(Debug, Default)]
pub(in crate::lazy) struct StartRecording {
    is_over: AtomicBool,
    state: Mutex<RecordingState>,
}

#[derive(Debug, Default)]
struct RecordingState {
    /// The time of the first read.
    begun: Option<Instant>,
    reads: DeviceReads,
}

/// A recording that has ended.
#[derive(Debug)]
pub(in crate::lazy) struct EndedRecording {
    /// Manifest of the image.
    pub(in crate::lazy) manifest: Digest,
    pub(in crate::lazy) reads: DeviceReads,
    /// Whether the image was in use during the whole time of a recording.
    pub(in crate::lazy) is_whole: bool,
}

impl StartRecording {
    /// Records a read. It costs little, because each read of a device calls it.
    pub(in crate::lazy) fn note(&self, device: DeviceId, range: &Range<u64>) {
        if self.is_over.load(Ordering::Relaxed) {
            return;
        }
        let mut state = lock(&self.state);
        let begun = *state.begun.get_or_insert_with(Instant::now);
        if begun.elapsed() >= TIME || !state.reads.add(device, range) {
            self.is_over.store(true, Ordering::Relaxed);
        }
    }
}

impl Starts {
    /// Returns the recording for a new mount of an image, or `None` if too many starts are recorded.
    pub(in crate::lazy) fn recording(&self, manifest: &Digest) -> Option<Arc<StartRecording>> {
        let mut recordings = lock(&self.recordings);
        let is_full = |it: &HashMap<Digest, Arc<StartRecording>>| {
            it.len() >= RECORDINGS_MAX && !it.contains_key(manifest)
        };
        if is_full(&recordings) {
            // Images that are mounted but not read give way.
            recordings.retain(|_, recording| {
                let is_read = lock(&recording.state).begun.is_some();
                if !is_read {
                    recording.is_over.store(true, Ordering::Relaxed);
                }
                is_read
            });
        }
        if is_full(&recordings) {
            return None;
        }
        Some(Arc::clone(recordings.entry(*manifest).or_default()))
    }

    /// Removes the recordings whose time is over, or whose last mount has ended. Those without reads are dropped.
    pub(in crate::lazy) fn take_ended(&self, now: Instant) -> Vec<EndedRecording> {
        let mut ended = Vec::new();
        lock(&self.recordings).retain(|manifest, recording| {
            let mut state = lock(&recording.state);
            let time = state.begun.map(|it| now.saturating_duration_since(it));
            let is_whole = time.is_some_and(|it| it >= TIME);
            // The connection of each mount has a reference.
            if !is_whole && Arc::strong_count(recording) > 1 {
                return true;
            }
            recording.is_over.store(true, Ordering::Relaxed);
            let reads = std::mem::take(&mut state.reads);
            if !reads.is_empty() {
                ended.push(EndedRecording { manifest: *manifest, reads, is_whole });
            }
            false
        });
        ended
    }

    /// Remembers that the start of the version with the manifest `started` was prefetched for an image.
    pub(in crate::lazy) fn was_prefetched(&self, manifest: Digest, started: Digest) {
        let mut prefetched = lock(&self.prefetched);
        if prefetched.len() >= PREFETCHED_MAX {
            prefetched.clear();
        }
        prefetched.insert(manifest, started);
    }

    /// Returns the manifest of the version whose start was prefetched for an image.
    pub(in crate::lazy) fn prefetched(&self, manifest: &Digest) -> Option<Digest> {
        lock(&self.prefetched).get(manifest).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(number: usize) -> Digest {
        Digest::sha256(&number.to_le_bytes())
    }

    fn device() -> DeviceId {
        DeviceId::from_bytes(&[1; 32]).unwrap()
    }

    #[test]
    fn a_recording_ends_with_its_time_or_its_last_mount() {
        let starts = Starts::default();
        let now = Instant::now();
        let ended = |at| {
            let ended = starts.take_ended(at);
            ended.into_iter().map(|it| (it.manifest, it.is_whole)).collect::<Vec<_>>()
        };
        let [one, two] = [1, 1].map(|it| starts.recording(&manifest(it)).unwrap());
        assert!(Arc::ptr_eq(&one, &two));
        // The time begins with the first read.
        assert_eq!(ended(now + TIME * 2), []);
        one.note(device(), &(0..4096));
        drop(one);
        assert_eq!(ended(now), []);
        drop(two);
        assert_eq!(ended(now), [(manifest(1), false)]);
        // A new mount begins another recording.
        let again = starts.recording(&manifest(1)).unwrap();
        again.note(device(), &(0..4096));
        assert_eq!(ended(Instant::now() + TIME), [(manifest(1), true)]);
        again.note(device(), &(8192..9000));
        assert_eq!(ended(Instant::now() + TIME), []);
        assert!(lock(&again.state).reads.is_empty(), "it is over");
        // A mount without reads.
        drop(starts.recording(&manifest(2)));
        assert_eq!(ended(now), []);
        assert!(lock(&starts.recordings).is_empty());
    }

    #[test]
    fn starts_are_bounded() {
        let starts = Starts::default();
        let all: Vec<_> = (0..RECORDINGS_MAX).map(|it| starts.recording(&manifest(it))).collect();
        for recording in &all[1..] {
            recording.as_ref().unwrap().note(device(), &(0..1));
        }
        // The first image was not read.
        assert!(starts.recording(&manifest(RECORDINGS_MAX + 1)).is_some());
        assert!(all[0].as_ref().unwrap().is_over.load(Ordering::Relaxed));
        drop(starts.take_ended(Instant::now()));
        let all: Vec<_> = (0..RECORDINGS_MAX).map(|it| starts.recording(&manifest(it))).collect();
        for recording in &all {
            recording.as_ref().unwrap().note(device(), &(0..1));
        }
        assert!(starts.recording(&manifest(RECORDINGS_MAX)).is_none());
        assert!(starts.recording(&manifest(0)).is_some());
        all[0].as_ref().unwrap().note(device(), &(0..u64::MAX));
        assert!(all[0].as_ref().unwrap().is_over.load(Ordering::Relaxed));
        for number in 0..PREFETCHED_MAX * 2 + 1 {
            starts.was_prefetched(manifest(number), manifest(0));
        }
        assert_eq!(lock(&starts.prefetched).len(), 1);
        assert_eq!(starts.prefetched(&manifest(PREFETCHED_MAX * 2)), Some(manifest(0)));
        assert_eq!(starts.prefetched(&manifest(1)), None);
    }
}
