//! Memory for the tables of contents of one pull.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of memory for all tables of contents together.
#[derive(Debug)]
pub struct Room {
    state: Mutex<State>,
    settled: Condvar,
    whole: usize,
}

#[derive(Debug)]
struct State {
    left: usize,
    /// Tables that are being read, and will need less.
    readers: usize,
}

/// A part of it, until this is dropped, or settled.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    room: &'a Room,
    bytes: usize,
}

impl Room {
    /// Room for this many bytes.
    #[must_use]
    pub const fn new(bytes: usize) -> Self {
        let state = State { left: bytes, readers: 0 };
        Self { state: Mutex::new(state), settled: Condvar::new(), whole: bytes }
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.whole - self.lock().left
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes so many bytes, as soon as there are so many; `None` if there never will be. Whoever has some must not ask for
    /// more.
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

    /// It has been read, and takes so many bytes from now on, at most as many as were claimed.
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
        // Another waits for it, since it may need less.
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| room.claim(30).map(|claim| claim.settle(30)));
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!waits.is_finished());
            claim.settle(50);
            assert!(waits.join().unwrap().is_some());
        });
        assert_eq!(room.used(), 100);
        assert!(room.claim(1).is_none());
        // One that came to nothing gives all back.
        let room = Room::new(100);
        drop(room.claim(100));
        assert_eq!(room.used(), 0);
    }
}
