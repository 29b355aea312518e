//! The journal of a service: the events that it has taken but not answered, in memory that it shares with its keeper.
//!
//! The answer to an event names the number of the event's descriptor, and the descriptor is closed when the service
//! dies. The next service must know for which bytes of which device the reader waits. So the kernel writes events
//! directly into the journal, so every taken event is in the journal. Decision 18 examines each step at which a
//! service may die.

use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use kernel::fanotify::{Group, PrecontentAnswer, PrecontentError, events_left};
use kernel::shared_memory::{SharedMemory, SharedMemoryError};

use super::door::InodePlace;

/// Upper limit of the descriptor numbers of events. Each number has a slot.
pub(super) const NUMBERS: u64 = 1 << 16;
const SLOTS: usize = 1 << 16;
/// Incremented with each change of the layout.
const VERSION: u64 = 1;
const MAGIC: u64 = u64::from_le_bytes(*b"quirejrn");
/// Length of the head in words: the magic, the version, and the number of slots that were ever used, from the first
/// one.
const HEAD: usize = 3;
/// The words into which the kernel writes events. They follow the first page.
const LANDING: Range<usize> = 512..512 + (256 << 10) / size_of::<u64>();
/// Length of a slot in words: its state, then file system, inode, and start and end of the range. File system and
/// inode are 0 if unknown.
const SLOT: usize = 5;
const WORDS: usize = LANDING.end + SLOTS * SLOT;
/// Upper half of the state of a used slot. The lower half is a checksum of the other words.
const LIVE: u64 = 0x4c49_5645;

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum JournalError {
    #[error(transparent)]
    Memory(#[from] SharedMemoryError),
    #[error("it is not a journal")]
    Magic,
    #[error("it is a journal of version {0}, but this version of Quire reads only {VERSION}")]
    Version(u64),
}

/// An event that a dead service took and did not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LeftEvent {
    pub(super) number: RawFd,
    /// The file. `None` if the service died before it could find out.
    pub(super) place: Option<InodePlace>,
    pub(super) range: Range<u64>,
}

/// A taken event, which must be answered exactly once.
#[derive(Debug)]
pub(super) struct TakenEvent {
    number: RawFd,
    /// A descriptor that keeps the kernel from reusing the number. `None` if this process already used the number
    /// when it inherited the event.
    held: Option<OwnedFd>,
    pub(super) place: Option<InodePlace>,
    pub(super) range: Range<u64>,
}

impl TakenEvent {
    /// Returns whether the event must be answered before further events are taken, because a new event could get its
    /// descriptor number.
    pub(super) const fn is_urgent(&self) -> bool {
        self.held.is_none()
    }
}

/// The journal, described above.
#[derive(Debug)]
pub(super) struct Journal(SharedMemory);

impl Journal {
    /// Creates an empty journal.
    pub(super) fn new() -> Result<Self, JournalError> {
        let memory = SharedMemory::new("quire-journal", WORDS)?;
        // The memory is allocated now, because an allocation that fails while events are taken could lose events.
        memory.reserve(0..LANDING.end)?;
        memory.words()[1].store(VERSION, Ordering::Relaxed);
        memory.words()[0].store(MAGIC, Ordering::Release);
        Ok(Self(memory))
    }

    /// Opens a journal of another process.
    pub(super) fn adopt(memory: OwnedFd) -> Result<Self, JournalError> {
        let memory = SharedMemory::adopt(memory, WORDS);
        // Another version may have another size.
        let memory = memory.map_err(JournalError::Memory)?;
        check(&memory.copy(0..HEAD))?;
        Ok(Self(memory))
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Takes the pending events. Each is in the journal until it is answered.
    pub(super) fn take(&self, group: &Group) -> Result<Vec<TakenEvent>, PrecontentError> {
        let (events, words) = group.read_shared(&self.0, LANDING)?;
        let mut taken = Vec::with_capacity(events.len());
        for event in events {
            let place = rustix::fs::fstat(&event.file).ok().map(|it| (it.st_dev, it.st_ino));
            let (number, range) = (event.file.as_raw_fd(), event.range);
            let left = LeftEvent { number, place, range: range.clone() };
            let event = TakenEvent { number, held: Some(event.file), place, range };
            if self.note(&left) {
                taken.push(event);
            } else {
                self.answer(group, event, PrecontentAnswer::Deny);
            }
        }
        self.clear_landing(words);
        Ok(taken)
    }

    /// Sends the answer to an event.
    #[expect(clippy::needless_pass_by_value, reason = "an event gets one reply")]
    pub(super) fn answer(&self, group: &Group, event: TakenEvent, answer: PrecontentAnswer) {
        if let Err(error) = group.answer(event.number, answer) {
            tracing::debug!(%error, "the reader has exited");
        }
        // The slot is cleared before the descriptor is closed, because the next event may get the number and the
        // slot.
        self.clear(event.number);
    }

    /// Returns the unanswered events of a dead service.
    pub(super) fn left(&self) -> Vec<LeftEvent> {
        let used = usize::try_from(self.0.words()[2].load(Ordering::Acquire)).unwrap_or(SLOTS);
        let slots = LANDING.end..LANDING.end + used.min(SLOTS) * SLOT;
        left(&self.0.copy(LANDING), &self.0.copy(slots))
    }

    /// Takes over the unanswered events of a dead service, and reserves their numbers in this process.
    pub(super) fn inherit(&self) -> Vec<TakenEvent> {
        let left = self.left();
        let taken = left.into_iter().map(|event| {
            // The event is copied to its slot, because the next events overwrite the landing area.
            self.note(&event);
            let LeftEvent { number, place, range } = event;
            // `fcntl` returns the first free number from this one on.
            let held = rustix::io::fcntl_dupfd_cloexec(&self.0, number).ok();
            let held = held.filter(|it| it.as_raw_fd() == number);
            TakenEvent { number, held, place, range }
        });
        let taken = taken.collect();
        self.clear_landing(LANDING);
        taken
    }

    /// Gives an I/O error to all readers whose events a dead service has left.
    pub(super) fn deny(&self, group: &Group) -> Result<usize, PrecontentError> {
        let left = self.left();
        let denied = group.deny_taken(left.iter().map(|it| it.number))?;
        left.iter().for_each(|it| self.clear(it.number));
        self.clear_landing(LANDING);
        Ok(denied)
    }

    fn slot(&self, number: RawFd) -> Option<&[AtomicU64]> {
        let slot = usize::try_from(number).ok().filter(|it| *it < SLOTS)?;
        let start = LANDING.end + slot * SLOT;
        self.0.words().get(start..start + SLOT)
    }

    /// Writes an event into its slot. Returns `false` if its number has no slot.
    fn note(&self, event: &LeftEvent) -> bool {
        let Some(slot) = self.slot(event.number) else { return false };
        let (system, inode) = event.place.unwrap_or_default();
        let fields = [system, inode, event.range.start, event.range.end];
        for (word, field) in slot[1..].iter().zip(fields) {
            word.store(field, Ordering::Relaxed);
        }
        let used = u64::try_from(event.number).unwrap_or_default() + 1;
        self.0.words()[2].fetch_max(used, Ordering::Release);
        // The state is written last, because it marks the slot as valid.
        slot[0].store(state(&fields), Ordering::Release);
        true
    }

    fn clear(&self, number: RawFd) {
        if let Some(slot) = self.slot(number) {
            slot[0].store(0, Ordering::Release);
        }
    }

    /// Clears the landing area. Its first word ends the list of events; the others must be cleared because the kernel
    /// may write fewer events next time.
    fn clear_landing(&self, words: Range<usize>) {
        for word in &self.0.words()[words] {
            word.store(0, Ordering::Release);
        }
    }
}

fn check(head: &[u64]) -> Result<(), JournalError> {
    match head {
        [MAGIC, VERSION, ..] => Ok(()),
        [MAGIC, version, ..] => Err(JournalError::Version(*version)),
        _ => Err(JournalError::Magic),
    }
}

/// Returns the state of a slot with these fields.
fn state(fields: &[u64; SLOT - 1]) -> u64 {
    let mut checksum = crc32fast::Hasher::new();
    fields.iter().for_each(|it| checksum.update(&it.to_le_bytes()));
    (LIVE << 32) | u64::from(checksum.finalize())
}

/// Returns the events of a landing area and of slots, both with arbitrary contents. If both contain an event, the slot
/// is used.
fn left(landing: &[u64], slots: &[u64]) -> Vec<LeftEvent> {
    let number = |slot: usize| RawFd::try_from(slot).ok();
    let in_slots = slots.chunks_exact(SLOT).enumerate().filter_map(|(slot, words)| {
        let &[found, system, inode, start, end] = words else { return None };
        if found != state(&[system, inode, start, end]) || start > end {
            return None;
        }
        let place = Some((system, inode)).filter(|it| *it != (0, 0));
        Some(LeftEvent { number: number(slot)?, place, range: start..end })
    });
    let mut all: Vec<_> = in_slots.collect();
    let most = number(SLOTS).unwrap_or(RawFd::MAX);
    for (number, range) in events_left(landing) {
        // The events of the slots are sorted by number.
        if let Err(place) = all.binary_search_by_key(&number, |it| it.number)
            && (0..most).contains(&number)
        {
            all.insert(place, LeftEvent { number, place: None, range });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: RawFd, place: Option<InodePlace>, range: Range<u64>) -> LeftEvent {
        LeftEvent { number, place, range }
    }

    /// An event with a range in the layout of `linux/fanotify.h`: version 3, 48 bytes in total.
    fn landed(number: u32, start: u64, bytes: u64) -> [u64; 6] {
        let head = u64::from_le_bytes([48, 0, 0, 0, 3, 0, 24, 0]);
        let info = u64::from_le_bytes([6, 0, 24, 0, 0, 0, 0, 0]);
        [head, 0x0010_0000, u64::from(number), info, start, bytes]
    }

    fn reopened(journal: &Journal) -> Result<Journal, JournalError> {
        Journal::adopt(journal.as_fd().try_clone_to_owned().unwrap())
    }

    #[test]
    fn another_process_finds_what_was_not_answered() {
        let journal = Journal::new().unwrap();
        let other = reopened(&journal).unwrap();
        assert_eq!(other.left(), []);
        let one = event(7, Some((2, 3)), 4096..8192);
        let two = event(65_535, None, 0..u64::MAX);
        assert!(journal.note(&two) && journal.note(&one));
        assert!(!journal.note(&event(65_536, None, 0..1)) && !journal.note(&event(-1, None, 0..1)));
        assert_eq!(other.left(), [one, two.clone()]);
        journal.clear(7);
        assert_eq!(other.left(), [two]);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn what_only_landed_is_found_too() {
        let landing = [landed(9, 4096, 10), landed(3, 0, 4096), [0; 6]].concat();
        let (three, nine) = (event(3, None, 0..4096), event(9, None, 4096..4106));
        assert_eq!(left(&landing, &[]), [three.clone(), nine.clone()]);
        let journal = Journal::new().unwrap();
        for (word, value) in journal.0.words()[LANDING].iter().zip(&landing) {
            word.store(*value, Ordering::Relaxed);
        }
        // One of them was noted already.
        let noted = event(9, Some((1, 2)), 4096..4106);
        journal.note(&noted);
        assert_eq!(journal.left(), [three, noted]);
        // The next service writes the remaining events into slots before it takes new ones.
        let inherited = journal.inherit();
        let is_free: Vec<_> = inherited.iter().map(|it| (it.number, it.place)).collect();
        assert_eq!(is_free, [(3, None), (9, Some((1, 2)))]);
        assert!(journal.0.copy(LANDING).iter().all(|it| *it == 0));
        assert_eq!(journal.left().len(), 2);
        journal.0.words()[2].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(journal.left().len(), 2);
    }

    #[test]
    fn numbers_of_others_are_held_where_they_are_free() {
        let journal = Journal::new().unwrap();
        // Other tests of this process do not reach such numbers.
        let free = 700;
        let used = journal.as_fd().as_raw_fd();
        journal.note(&event(free, None, 0..1));
        journal.note(&event(used, None, 0..1));
        let inherited = journal.inherit();
        let urgent: Vec<_> = inherited.iter().map(|it| (it.number, it.is_urgent())).collect();
        assert_eq!(urgent, [(used, true), (free, false)]);
        let next = rustix::io::fcntl_dupfd_cloexec(&journal.0, free).unwrap();
        assert!(next.as_raw_fd() > free);
    }

    #[test]
    fn a_slot_is_believed_only_as_a_whole() {
        let fields = [2, 3, 4096, 8192];
        let slot = [state(&fields), 2, 3, 4096, 8192];
        let found = [event(1, Some((2, 3)), 4096..8192)];
        let second = |slot: &[u64]| left(&[], &[&[0; SLOT], slot].concat());
        assert_eq!(second(&slot), found);
        for word in 0..SLOT {
            for bit in 0..64 {
                let mut wrong = slot;
                wrong[word] ^= 1 << bit;
                assert_eq!(second(&wrong), [], "bit {bit} of word {word}");
            }
        }
        assert_eq!(second(&[state(&[2, 3, 9, 8]), 2, 3, 9, 8]), []);
        assert_eq!(second(&slot[..4]), []);
        assert_eq!(second(&[u64::MAX; SLOT]), []);
    }

    #[test]
    fn noise_is_no_events() {
        for length in 1..20 {
            let noise = testing::noise(length << 10);
            let words = noise.chunks_exact(8).map(|it| u64::from_le_bytes(it.try_into().unwrap()));
            let words: Vec<_> = words.collect();
            assert_eq!(left(&words, &words), []);
        }
    }

    #[test]
    fn other_journals_are_refused() {
        let refused = |word: usize, value: u64| {
            let journal = Journal::new().unwrap();
            journal.note(&event(5, None, 0..1));
            journal.0.words()[word].store(value, Ordering::Relaxed);
            reopened(&journal).err().map(|it| it.to_string())
        };
        assert_eq!(refused(2, 9), None);
        assert_eq!(refused(0, 9).unwrap(), "it is not a journal");
        assert_eq!(
            refused(1, 9).unwrap(),
            "it is a journal of version 9, but this version of Quire reads only 1"
        );
        let short = SharedMemory::new("short", WORDS - 1).unwrap();
        let adopted = Journal::adopt(short.as_fd().try_clone_to_owned().unwrap());
        assert!(matches!(adopted, Err(JournalError::Memory(SharedMemoryError::Size { .. }))));
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(Journal::adopt(file.into()), Err(JournalError::Memory(_))));
    }
}
