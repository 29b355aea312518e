//! The part of a window that a span refers to.

use std::ops::Range;

use super::WINDOW;

/// Bytes of the 32 KiB before a span: those that the span refers to. About a tenth of them, in layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Window {
    /// Ascending and apart, each within the window.
    runs: Vec<Range<u16>>,
    /// The bytes of all runs, one after the other.
    bytes: Vec<u8>,
}

impl Window {
    /// Keeps those bytes of a whole window for which `needed` has a 1, not a 0.
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

    /// A window of these runs and their bytes. `None` if they do not fit together.
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

    /// Where in the window there are bytes: ascending, apart, none empty.
    #[must_use]
    pub fn runs(&self) -> &[Range<u16>] {
        &self.runs
    }

    /// The bytes of all runs.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes of memory of its runs and their bytes.
    pub(super) fn memory(&self) -> u64 {
        let runs = self.runs.len().saturating_mul(size_of::<Range<u16>>());
        u64::try_from(runs.saturating_add(self.bytes.len())).unwrap_or(u64::MAX)
    }

    /// Writes the kept bytes into a window of 32 KiB.
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
