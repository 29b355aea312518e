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
    /// Keeps the `needed` bytes of a whole window.
    pub(super) fn new(whole: &[u8], needed: &[bool]) -> Self {
        let mut window = Self::default();
        for (at, byte) in (0..).zip(whole).filter(|(at, _)| needed[usize::from(*at)]) {
            match window.runs.last_mut() {
                Some(run) if run.end == at => run.end += 1,
                _ => window.runs.push(at..at + 1),
            }
            window.bytes.push(*byte);
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
            length += run.len();
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

    /// Writes the kept bytes into a window of 32 KiB.
    pub(super) fn write(&self, whole: &mut [u8]) {
        let mut bytes = &self.bytes[..];
        for run in &self.runs {
            let (these, rest) = bytes.split_at(run.len());
            whole[usize::from(run.start)..usize::from(run.end)].copy_from_slice(these);
            bytes = rest;
        }
    }
}
