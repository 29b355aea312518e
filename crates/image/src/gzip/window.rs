//! The bytes of a window that a span refers to.

use std::ops::Range;

use super::WINDOW;

/// The bytes to which a span refers among the 32 KiB before it. In layers, they are about a tenth of these 32 KiB.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Window {
    /// Positions of the bytes in the window, as ascending ranges with gaps between them.
    runs: Vec<Range<u16>>,
    /// The bytes of all runs, concatenated.
    bytes: Vec<u8>,
}

impl Window {
    /// Keeps the bytes of a whole window for which `needed` is 1 rather than 0.
    pub(super) fn new(whole: &[u8], needed: &[u8]) -> Self {
        let mut window = Self::default();
        let find = |is: bool, from: usize| {
            let found = memchr::memchr(u8::from(is), needed.get(from..).unwrap_or_default());
            found.map_or(needed.len(), |it| from.saturating_add(it))
        };
        let mut start = find(true, 0);
        while start < needed.len() {
            let end = find(false, start);
            if let [Ok(first), Ok(last)] = [start, end].map(u16::try_from) {
                window.runs.push(first..last);
            }
            window.bytes.extend(whole.get(start..end).unwrap_or_default());
            start = find(true, end);
        }
        window
    }

    /// Makes a window from runs and their bytes; `None` if the runs are invalid or the number of bytes differs.
    #[must_use]
    pub fn of_parts(runs: Vec<Range<u16>>, bytes: Vec<u8>) -> Option<Self> {
        let mut end = None;
        let mut length = 0;
        for run in &runs {
            let is_apart = end.is_none_or(|end| end < run.start);
            if !is_apart || run.is_empty() || usize::from(run.end) > WINDOW {
                return None;
            }
            end = Some(run.end);
            length = run.len().checked_add(length)?;
        }
        (length == bytes.len()).then_some(Self { runs, bytes })
    }

    /// Returns the positions of the bytes in the window: non-empty ascending ranges with gaps between them.
    #[must_use]
    pub fn runs(&self) -> &[Range<u16>] {
        &self.runs
    }

    /// Returns the bytes of all runs, concatenated.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the size in memory of the runs and their bytes, in bytes.
    pub(super) fn memory(&self) -> u64 {
        let runs = self.runs.len().saturating_mul(size_of::<Range<u16>>());
        u64::try_from(runs.saturating_add(self.bytes.len())).unwrap_or(u64::MAX)
    }

    /// Copies the kept bytes to their positions in a window of 32 KiB.
    pub(super) fn write(&self, whole: &mut [u8]) {
        let mut bytes = &self.bytes[..];
        for run in &self.runs {
            let (these, rest) = bytes.split_at(run.len());
            if let Some(place) = whole.get_mut(usize::from(run.start)..usize::from(run.end)) {
                place.copy_from_slice(these);
            }
            bytes = rest;
        }
    }
}
