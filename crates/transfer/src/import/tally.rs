//! Counts the content of all layers of one import, and compares the sums with the limits.
//!
//! A layer may be read several times, because a mirror or a peer may send wrong bytes. Each attempt has its own
//! counts, which are dropped if the attempt fails. The counts of attempts in progress are included in the sums, so
//! that verified layers do not exceed a limit together. But these attempts may still fail. So if the sums exceed a
//! limit only because of other attempts, one attempt goes on, and all others that need more wait for its end. Until
//! then, the content of all attempts may reach twice a limit. Only verified layers and the attempt's own counts decide that an attempt fails.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::limits::{ImportLimitError, Limits};
use super::stop::Stop;

/// Content of layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Amounts {
    pub(super) entries: u64,
    /// Bytes of names, link targets, xattrs and inline files.
    pub(super) metadata_bytes: u64,
    /// Bytes of files, with holes.
    pub(super) content_bytes: u64,
    /// Bytes of blobs. They raise the limits on `unpacked` and `holes`.
    pub(super) packed: u64,
    /// Bytes of tars.
    pub(super) unpacked: u64,
    /// Bytes of holes, which are not in a tar.
    pub(super) holes: u64,
}

impl Amounts {
    const fn plus(self, other: Self) -> Self {
        Self {
            entries: self.entries.saturating_add(other.entries),
            metadata_bytes: self.metadata_bytes.saturating_add(other.metadata_bytes),
            content_bytes: self.content_bytes.saturating_add(other.content_bytes),
            packed: self.packed.saturating_add(other.packed),
            unpacked: self.unpacked.saturating_add(other.unpacked),
            holes: self.holes.saturating_add(other.holes),
        }
    }

    const fn check(&self, limits: &Limits) -> Result<(), ImportLimitError> {
        let Limits { ratio, entries, metadata_bytes, content_bytes, .. } = *limits;
        let size = self.packed;
        if self.entries > entries {
            return Err(ImportLimitError::Entries(entries));
        }
        if self.metadata_bytes > metadata_bytes {
            return Err(ImportLimitError::MetadataBytes(metadata_bytes));
        }
        if self.content_bytes > content_bytes {
            return Err(ImportLimitError::ContentBytes(content_bytes));
        }
        if limits.is_beyond(size, self.unpacked) {
            return Err(ImportLimitError::AllRatio { ratio, size });
        }
        if limits.is_beyond(size, self.holes) {
            return Err(ImportLimitError::AllHoles { ratio, size });
        }
        Ok(())
    }
}

/// Why an attempt has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TallyError {
    Limit(ImportLimitError),
    /// The import has failed elsewhere or was cancelled.
    Stopped,
}

/// Sums over all layers of one import.
#[derive(Debug, Default)]
pub(super) struct Totals {
    sums: Mutex<Sums>,
    changed: Condvar,
    /// Locked by the layer whose tree is in memory twice: its names are counted only while they are added.
    tree: Mutex<()>,
}

#[derive(Debug, Default)]
struct Sums {
    /// Content of verified layers, and the sizes of all blobs that were begun.
    verified: Amounts,
    /// Attempts in progress, by their number. Those that were given up are not there.
    running: BTreeMap<u64, Amounts>,
    /// Number of the attempt that goes on although all attempts together exceed a limit.
    ahead: Option<u64>,
    /// Number of the next attempt.
    next: u64,
}

impl Sums {
    fn of(&self, attempt: u64) -> Amounts {
        self.running.get(&attempt).copied().unwrap_or_default()
    }

    /// Adds to an attempt's counts, unless the attempt has to wait for other attempts.
    fn admit(
        &mut self,
        attempt: u64,
        added: Amounts,
        limits: &Limits,
    ) -> Result<Admission, ImportLimitError> {
        // An attempt that was given up may read on, and its content is not used.
        let Some(own) = self.running.get(&attempt) else { return Ok(Admission::Added) };
        let own = own.plus(added);
        let all = self.running.values().fold(self.verified.plus(added), |all, it| all.plus(*it));
        if all.check(limits).is_err() {
            self.verified.plus(own).check(limits)?;
            if *self.ahead.get_or_insert(attempt) != attempt {
                return Ok(Admission::Wait);
            }
        }
        self.running.insert(attempt, own);
        Ok(Admission::Added)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Admission {
    Added,
    Wait,
}

impl Totals {
    /// Adds the size of a blob that is going to be read. It is added once, not by each attempt to read the blob.
    pub(super) fn add_blob(&self, size: u64) {
        let mut sums = self.lock();
        sums.verified.packed = sums.verified.packed.saturating_add(size);
    }

    /// Waits until no other layer has a tree in memory whose names are not counted yet.
    pub(super) fn one_tree(&self) -> MutexGuard<'_, ()> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an attempt to read a layer.
    pub(super) fn begin<'a>(&'a self, limits: &'a Limits, stop: &'a Stop<'a>) -> Attempt<'a> {
        let mut sums = self.lock();
        let number = sums.next;
        sums.next += 1;
        sums.running.insert(number, Amounts::default());
        Attempt { totals: self, limits, stop, number }
    }

    fn lock(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attempt to read one layer. Its counts are dropped with it, unless it is [kept](Self::keep).
pub(super) struct Attempt<'a> {
    totals: &'a Totals,
    limits: &'a Limits,
    stop: &'a Stop<'a>,
    number: u64,
}

impl Attempt<'_> {
    /// Counts content before it is used. Waits if only the counts of other attempts are in the way.
    pub(super) fn add(&self, added: Amounts) -> Result<(), TallyError> {
        let mut sums = self.totals.lock();
        loop {
            let admitted = sums.admit(self.number, added, self.limits);
            if admitted.map_err(TallyError::Limit)? == Admission::Added {
                return Ok(());
            }
            if self.stop.is_set() {
                return Err(TallyError::Stopped);
            }
            // A failure elsewhere does not notify this condition variable.
            let waited = self.totals.changed.wait_timeout(sums, Duration::from_millis(20));
            sums = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Drops the counts of an attempt that has failed, but still reads its blob to find the cause. Its further
    /// content is not counted.
    pub(super) fn give_up(&self) {
        let mut sums = self.totals.lock();
        sums.running.remove(&self.number);
        sums.ahead.take_if(|it| *it == self.number);
        self.totals.changed.notify_all();
    }

    /// Adds the counts to those of the verified layers.
    ///
    /// # Errors
    /// The limit that the verified layers exceed with this one.
    pub(super) fn keep(self) -> Result<(), ImportLimitError> {
        let mut sums = self.totals.lock();
        let verified = sums.verified.plus(sums.of(self.number));
        verified.check(self.limits)?;
        sums.verified = verified;
        Ok(())
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    const LIMITS: Limits = Limits {
        layer_bytes: u64::MAX,
        content_bytes: 100,
        ratio: 10,
        ratio_from: 1000,
        entries: 3,
        metadata_bytes: 50,
    };
    const TOO_MANY: ImportLimitError = ImportLimitError::Entries(3);

    fn entries(entries: u64) -> Amounts {
        Amounts { entries, ..Amounts::default() }
    }

    static NEVER: AtomicBool = AtomicBool::new(false);

    struct Import {
        totals: Totals,
        stop: Stop<'static>,
    }

    impl Import {
        fn new() -> Self {
            Self { totals: Totals::default(), stop: Stop::new(&NEVER) }
        }

        fn begin(&self) -> Attempt<'_> {
            self.totals.begin(&LIMITS, &self.stop)
        }
    }

    #[test]
    fn each_limit_applies_to_the_sum() {
        let none = Amounts::default();
        for (amount, error) in [
            (Amounts { entries: 2, ..none }, TOO_MANY),
            (Amounts { metadata_bytes: 30, ..none }, ImportLimitError::MetadataBytes(50)),
            (Amounts { content_bytes: 60, ..none }, ImportLimitError::ContentBytes(100)),
            (Amounts { unpacked: 600, ..none }, ImportLimitError::AllRatio { ratio: 10, size: 7 }),
            (Amounts { holes: 600, ..none }, ImportLimitError::AllHoles { ratio: 10, size: 7 }),
            (Amounts { content_bytes: u64::MAX, ..none }, ImportLimitError::ContentBytes(100)),
        ] {
            let import = Import::new();
            import.totals.add_blob(7);
            let first = import.begin();
            if first.add(amount).is_ok() {
                first.keep().unwrap();
            }
            let second = import.begin().add(amount);
            assert_eq!(second, Err(TallyError::Limit(error)), "{amount:?}");
            // The size of a blob raises the ratio's limit.
            import.totals.add_blob(1000);
            let is_ratio = amount.unpacked + amount.holes > 0;
            assert_eq!(import.begin().add(amount).is_ok(), is_ratio, "{amount:?}");
        }
    }

    #[test]
    fn a_failed_attempt_leaves_no_counts() {
        let import = Import::new();
        for _ in 0..9 {
            let liar = import.begin();
            liar.add(entries(3)).unwrap();
            assert_eq!(liar.add(entries(1)), Err(TallyError::Limit(TOO_MANY)));
        }
        let origin = import.begin();
        origin.add(entries(3)).unwrap();
        origin.keep().unwrap();
        assert_eq!(import.begin().add(entries(1)), Err(TallyError::Limit(TOO_MANY)));
    }

    #[test]
    fn an_attempt_that_was_given_up_counts_no_more() {
        let import = Import::new();
        let liar = import.begin();
        liar.add(entries(3)).unwrap();
        liar.give_up();
        // It still reads its blob, and may find any number of entries.
        liar.add(entries(9)).unwrap();
        import.begin().add(entries(3)).unwrap();
    }

    /// The sum of two layers exceeds a limit, and neither layer does. The second one goes ahead, so the first one
    /// waits until the second one has ended by `end`. Returns the result of the first one.
    fn contest(end: impl FnOnce(Attempt<'_>)) -> Result<(), TallyError> {
        let import = Import::new();
        let (one, two) = (import.begin(), import.begin());
        one.add(entries(2)).unwrap();
        two.add(entries(2)).unwrap();
        let has_ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let added = one.add(entries(1));
                assert!(has_ended.load(Ordering::SeqCst));
                added
            });
            let admitted = import.totals.lock().admit(one.number, entries(1), &LIMITS);
            assert_eq!(admitted, Ok(Admission::Wait));
            has_ended.store(true, Ordering::SeqCst);
            end(two);
            waiting.join().unwrap()
        })
    }

    #[test]
    fn a_liar_at_the_same_time_costs_only_time() {
        assert_eq!(contest(|two| drop(two)), Ok(()));
    }

    #[test]
    fn two_layers_at_the_same_time_do_not_exceed_a_limit_together() {
        assert_eq!(contest(|two| two.keep().unwrap()), Err(TallyError::Limit(TOO_MANY)));
        // An attempt that counts nothing more is checked at its end.
        let import = Import::new();
        let (one, two) = (import.begin(), import.begin());
        one.add(entries(2)).unwrap();
        two.add(entries(2)).unwrap();
        one.keep().unwrap();
        assert_eq!(two.keep(), Err(TOO_MANY));
    }

    #[test]
    fn a_waiting_attempt_ends_with_its_import() {
        let cancel = AtomicBool::new(false);
        let stop = Stop::new(&cancel);
        let totals = Totals::default();
        let [one, two] = [0; 2].map(|_| totals.begin(&LIMITS, &stop));
        one.add(entries(2)).unwrap();
        two.add(entries(2)).unwrap();
        cancel.store(true, Ordering::SeqCst);
        assert_eq!(one.add(entries(1)), Err(TallyError::Stopped));
    }
}
