//! Whether the rest of a device is fetched.

use std::sync::atomic::Ordering;

use super::LayerFiller;

/// Whether and why a whole device should be fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::lazy) enum Completing {
    /// Only the bytes that programs read are fetched.
    No,
    /// As long as the device is in use, because it has been in use for some time.
    WhileUsed,
    /// Even if the device is not in use, because a client or a setting asked for it.
    Asked,
}

impl Completing {
    pub(super) const fn number(self) -> u8 {
        match self {
            Self::No => 0,
            Self::WhileUsed => 1,
            Self::Asked => 2,
        }
    }
}

impl LayerFiller<'_> {
    /// Sets that the whole device should be fetched, unless more was set before. Returns whether it was not fetched
    /// before.
    pub(in crate::lazy) fn begin_completing(&self, completing: Completing) -> bool {
        self.completing.fetch_max(completing.number(), Ordering::AcqRel) == Completing::No.number()
    }

    /// Sets that only the bytes that readers need are fetched, because fetching the whole device failed too often.
    pub(in crate::lazy) fn give_up_completing(&self) {
        self.has_given_up.store(true, Ordering::Release);
        self.completing.store(Completing::No.number(), Ordering::Release);
    }

    pub(in crate::lazy) fn has_given_up(&self) -> bool {
        self.has_given_up.load(Ordering::Acquire)
    }

    /// Sets that only the bytes that readers need are fetched, if the whole device was fetched only while it was in
    /// use.
    pub(in crate::lazy) fn stop_completing(&self) {
        self.has_given_up.store(false, Ordering::Release);
        let [used, no] = [Completing::WhileUsed, Completing::No].map(Completing::number);
        let _unchanged =
            self.completing.compare_exchange(used, no, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Returns whether a client or a setting has asked for the whole device, which is full now but is never sealed.
    /// Then the request is done.
    pub(in crate::lazy) fn end_completing(&self) -> bool {
        let [asked, no] = [Completing::Asked, Completing::No].map(Completing::number);
        !self.is_sealable()
            && self.is_full()
            && self
                .completing
                .compare_exchange(asked, no, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
    }

    /// Returns whether the whole device should be fetched for this reason or a stronger one. A full device that is not
    /// sealed is done.
    pub(in crate::lazy) fn is_completing(&self, least: Completing) -> bool {
        self.completing.load(Ordering::Acquire) >= least.number()
            && (self.is_sealable() || !self.is_full())
    }
}
