//! The memory budget for the tables of contents of one pull.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A memory budget in bytes, shared by all tables of contents.
#[derive(Debug)]
pub struct Room {
    state: Mutex<State>,
    settled: Condvar,
    whole: usize,
}

#[derive(Debug)]
struct State {
    left: usize,
    /// Number of tables that are being read, which may release memory later.
    readers: usize,
}

/// A part of the budget, held until the claim is dropped or settled.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    room: &'a Room,
    bytes: usize,
}

impl Room {
    /// Creates a budget of this many bytes.
    #[must_use]
    pub const fn new(bytes: usize) -> Self {
        let state = State { left: bytes, readers: 0 };
        Self { state: Mutex::new(state), settled: Condvar::new(), whole: bytes }
    }

    /// Returns the number of bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.whole - self.lock().left
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims this many bytes, and waits until they are free. Returns `None` if they can never become free. A thread
    /// that holds a claim must not make another claim.
    pub(super) fn claim(&self, bytes: usize) -> Option<Claim<'_>> {
        let mut state = self.lock();
        while state.left < bytes {
            if state.readers == 0 {
                return None;
            }
            state = self.settled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.left -= bytes;
        state.readers += 1;
        Some(Claim { room: self, bytes })
    }
}

impl Claim<'_> {
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Ends the claim of a table that has been read. The table keeps `bytes` bytes, which are at most the claimed
    /// ones.
    pub(super) fn settle(mut self, bytes: usize) {
        self.bytes -= bytes.min(self.bytes);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut state = self.room.lock();
        state.left += self.bytes;
        state.readers -= 1;
        drop(state);
        self.room.settled.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_settled_leaves_room() {
        let room = Room::new(100);
        room.claim(60).unwrap().settle(20);
        assert_eq!(room.used(), 20);
        assert!(room.claim(81).is_none());
        let claim = room.claim(80).unwrap();
        // A second thread waits for this claim, because the claim may be settled with fewer bytes.
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| room.claim(30).map(|claim| claim.settle(30)));
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!waits.is_finished());
            claim.settle(50);
            assert!(waits.join().unwrap().is_some());
        });
        assert_eq!(room.used(), 100);
        assert!(room.claim(1).is_none());
        // A claim that is dropped without being settled gives all bytes back.
        let room = Room::new(100);
        drop(room.claim(100));
        assert_eq!(room.used(), 0);
    }
}
