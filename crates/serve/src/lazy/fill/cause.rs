//! Causes of fetches, and what a fetch consists of.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// For whom a part of a device is brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A reader waits for it.
    Reader,
    /// A reader reads on, and will want it soon.
    Stream,
    /// A trace has it.
    Trace,
    /// All of the device is wanted.
    Completion,
}

/// Why a unit was brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::lazy) enum Why {
    /// A reader waited for it.
    Wanted,
    /// It came with one that a reader waited for, in the same spans.
    WithOthers,
    /// A trace has it.
    Traced,
    /// All of the device is wanted.
    Completed,
    /// A reader was believed to want it soon.
    Guessed,
}

impl Why {
    pub(in crate::lazy) const ALL: [Self; 5] =
        [Self::Wanted, Self::WithOthers, Self::Traced, Self::Completed, Self::Guessed];

    pub(in crate::lazy) fn number(self) -> u8 {
        let place = Self::ALL.iter().position(|it| *it == self);
        place.and_then(|it| u8::try_from(it).ok()).unwrap_or_default()
    }

    pub(in crate::lazy) fn of(number: u8) -> Self {
        Self::ALL[usize::from(number) % Self::ALL.len()]
    }
}

/// What lies at the bottom of an error: for a disk, what the kernel said.
pub(in crate::lazy) fn cause_of(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

pub(in crate::lazy) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What some units of a device are made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lazy) struct Fetch {
    /// By number; none for units that the tail has.
    pub(in crate::lazy) spans: Range<usize>,
    /// The beginning of the first unit, if it came with the spans before.
    pub(in crate::lazy) before: Vec<u8>,
    /// The end of the last unit, if it came with the spans behind.
    pub(in crate::lazy) behind: Vec<u8>,
    /// Where in the device all of it begins, in bytes.
    pub(in crate::lazy) from: u64,
}
