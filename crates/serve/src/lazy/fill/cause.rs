//! Causes and parts of fetches.

use std::ops::Range;

/// The purpose of a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A reader waits for the bytes.
    Reader,
    /// A sequential reader will need the bytes soon.
    Stream,
    /// A trace contains the bytes.
    Trace,
    /// The whole device is fetched.
    Completion,
}

/// The sources that are asked for a layer's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::lazy) enum Sources {
    /// Also those that have the uncompressed tar.
    All,
    /// Only those that have the blob.
    OfBlob,
}

/// The reason for which a unit was fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::lazy) enum Why {
    /// A reader waited for the unit.
    Wanted,
    /// The unit was in the same spans as a unit that a reader waited for.
    WithOthers,
    /// A trace contained the unit.
    Traced,
    /// The whole device was fetched.
    Completed,
    /// A reader was expected to need it soon.
    Guessed,
}

impl Why {
    pub(in crate::lazy) const ALL: [Self; 5] =
        [Self::Wanted, Self::WithOthers, Self::Traced, Self::Completed, Self::Guessed];

    pub(in crate::lazy) fn number(self) -> u8 {
        let place = Self::ALL.iter().position(|it| *it == self);
        place.and_then(|it| u8::try_from(it).ok()).unwrap_or_default()
    }

    pub(in crate::lazy) fn from_number(number: u8) -> Self {
        Self::ALL[usize::from(number) % Self::ALL.len()]
    }
}

/// Returns the message of an error's innermost source, which is the kernel's for disk errors.
pub(in crate::lazy) fn cause_of(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// The parts that some units of a device are made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lazy) struct Fetch {
    /// Numbers of the spans; empty for units that only contain the tail.
    pub(in crate::lazy) spans: Range<usize>,
    /// The beginning of the first unit, if an earlier span contained it.
    pub(in crate::lazy) before: Vec<u8>,
    /// The end of the last unit, if a later span contained it.
    pub(in crate::lazy) behind: Vec<u8>,
    /// Offset of the first byte in the device.
    pub(in crate::lazy) from: u64,
}
