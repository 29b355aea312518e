//! Records which blocks of devices programs read.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

use image::lazy::hot::BLOCK;
use image::verity::DeviceId;
use kernel::fanotify::{EventBuffer, Group, PrecontentError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use store::{OperationError, TraceRun};

/// Timeout of a poll: the longest time until the end is noticed.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Why reads cannot be recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecorderError {
    /// A fanotify call failed.
    #[error(transparent)]
    Kernel(#[from] PrecontentError),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// Records which blocks of devices are read, in the order of the first access, through files that are opened after the
/// recorder was started. A new mount has an empty cache, so all blocks that its programs need are recorded. Readers
/// wait only until the recorder has answered the event. If the recorder ends, they continue.
#[derive(Debug)]
pub struct Recorder {
    group: Group,
    /// The id and the length in bytes of each device, by file system and inode number.
    devices: HashMap<(u64, u64), (DeviceId, u64)>,
}

impl Recorder {
    /// Watches files of complete devices.
    pub fn new<'f>(
        devices: impl IntoIterator<Item = (DeviceId, &'f File)>,
    ) -> Result<Self, RecorderError> {
        let group = Group::new()?;
        let mut watched = HashMap::new();
        for (device, file) in devices {
            let found = file.metadata().map_err(OperationError::of("examine", "a device"))?;
            watched.insert((found.dev(), found.ino()), (device, found.len()));
            group.mark(file.as_fd())?;
        }
        Ok(Self { group, devices: watched })
    }

    /// Records reads until `stop` is set.
    ///
    /// # Errors
    /// After an error, readers wait until the recorder is dropped.
    pub fn record(&self, stop: &AtomicBool) -> Result<Vec<TraceRun>, RecorderError> {
        let mut buffer = EventBuffer::default();
        let mut noted = Noted::default();
        loop {
            // Readers that came before the end are still recorded.
            let is_last = stop.load(Ordering::Relaxed);
            match poll(&mut [PollFd::new(&self.group, PollFlags::IN)], Some(&PATIENCE)) {
                Ok(0) if is_last => return Ok(noted.runs),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(OperationError::of("wait", "for readers")(error).into()),
            }
            for event in self.group.read(&mut buffer)? {
                if let Ok(stat) = rustix::fs::fstat(&event.file)
                    && let Some((device, bytes)) = self.devices.get(&(stat.st_dev, stat.st_ino))
                {
                    let end = event.range.end.min(*bytes).div_ceil(BLOCK);
                    noted.add(*device, event.range.start / BLOCK..end);
                }
                if let Err(error) = self.group.allow(event) {
                    tracing::debug!(%error, "the reader has exited");
                }
            }
        }
    }
}

#[derive(Debug, Default)]
struct Noted {
    runs: Vec<TraceRun>,
    seen: HashSet<(DeviceId, u32)>,
}

impl Noted {
    fn add(&mut self, device: DeviceId, blocks: std::ops::Range<u64>) {
        for block in blocks.filter_map(|it| u32::try_from(it).ok()) {
            if !self.seen.insert((device, block)) {
                continue;
            }
            match self.runs.last_mut() {
                Some(last) if last.device == device && last.block + last.blocks == block => {
                    last.blocks += 1;
                }
                _ => self.runs.push(TraceRun { device, block, blocks: 1 }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_noted_at_their_first_touch() {
        let [one, two] = [1, 2].map(|it| DeviceId::from_bytes(&[it; 32]).unwrap());
        let mut noted = Noted::default();
        noted.add(one, 4..6);
        noted.add(two, 6..7);
        noted.add(one, 3..8);
        noted.add(one, 8..9);
        noted.add(two, 6..7);
        let run = |device, block, blocks| TraceRun { device, block, blocks };
        assert_eq!(noted.runs, [run(one, 4, 2), run(two, 6, 1), run(one, 3, 1), run(one, 6, 3)]);
    }
}
