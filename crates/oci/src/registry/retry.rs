//! Chooses the next host to try, and the pause before it.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::error::{Cause, Remedy};
use super::patience::Patience;
use super::{Core, RegistryError, Settings};

/// Longest pause between two attempts, unless the server requests a longer one.
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Longest total wait that servers may request. Beyond it the request fails, so that the user can decide.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(120);

/// The attempts of one request: tries all hosts, then pauses, then tries those again that may have recovered.
pub(super) struct Turns {
    core: Arc<Core>,
    what: String,
    /// Hosts that may still be tried.
    order: Vec<usize>,
    /// Index in `order` of the next host.
    next: usize,
    rounds: u32,
    /// Maximum number of further rounds without progress.
    retries: u32,
    attempts: u32,
    /// Longest pause that servers requested in this round.
    pause: Option<Duration>,
    /// Total wait that servers have requested since the last progress.
    waited: Duration,
    /// Remaining time of each host, for small documents.
    patience: BTreeMap<usize, Arc<Patience>>,
    last: Option<(usize, Cause)>,
}

impl Turns {
    pub(super) fn new(core: &Arc<Core>, what: String, order: Vec<usize>) -> Self {
        let core = Arc::clone(core);
        Self {
            retries: core.settings.retries,
            core,
            what,
            order,
            next: 0,
            rounds: 0,
            attempts: 0,
            pause: None,
            waited: Duration::ZERO,
            patience: BTreeMap::new(),
            last: None,
        }
    }

    /// Tries each host only once, without a pause, because the caller has another way to get the bytes.
    pub(super) fn once(self) -> Self {
        Self { retries: 0, ..self }
    }

    /// Returns the host to try now. Pauses before a new round.
    pub(super) async fn next(&mut self) -> Result<usize, RegistryError> {
        if self.order.is_empty() {
            return Err(self.give_up());
        }
        if self.next >= self.order.len() {
            self.rounds += 1;
            let is_unreachable = self.last.as_ref().is_some_and(|it| it.1.is_unreachable());
            let is_given_up = self.core.is_given_up.load(Ordering::Relaxed);
            if self.rounds > self.retries || (is_unreachable && is_given_up) {
                self.core.is_given_up.store(is_unreachable, Ordering::Relaxed);
                return Err(self.give_up());
            }
            let own = backoff(self.core.settings.backoff, self.rounds, random());
            let asked = self.pause.take().unwrap_or_default();
            self.waited += asked;
            let pause = own.max(asked);
            self.tell(pause);
            tokio::time::sleep(pause).await;
            self.next = 0;
        }
        self.attempts += 1;
        Ok(self.order[self.next])
    }

    fn tell(&self, wait: Duration) {
        let Some((index, cause)) = &self.last else { return };
        let (retries, Settings { pauses, .. }) = (self.retries, &self.core.settings);
        pauses.tell(&Pause {
            what: &self.what,
            host: &self.core.endpoints[*index].host,
            cause,
            wait,
            attempt: self.rounds + 1,
            attempts: retries + 1,
        });
    }

    /// Runs one attempt. All attempts at a small document share the time limit of one host.
    pub(super) async fn attempt<T>(
        &mut self,
        work: impl Future<Output = Result<T, Cause>>,
    ) -> Result<T, Cause> {
        let Some(index) = self.order.get(self.next) else { return work.await };
        let full = self.core.settings.patience;
        let patience = self.patience.entry(*index).or_insert_with(|| Patience::document(full));
        let done = patience.during(work).await;
        if done.is_ok() {
            self.core.is_given_up.store(false, Ordering::Relaxed);
        }
        done
    }

    /// Records that the attempt made progress, so that the counts of attempts start again.
    pub(super) fn progressed(&mut self) {
        self.rounds = 0;
        self.attempts = 1;
        self.waited = Duration::ZERO;
        self.patience.clear();
    }

    /// Records that the attempt failed.
    pub(super) fn failed(&mut self, cause: Cause) {
        let Some(&index) = self.order.get(self.next) else { return };
        let host = &self.core.endpoints[index].host;
        tracing::debug!(what = self.what, host, cause = %cause, "an attempt failed");
        match cause.remedy() {
            Remedy::None => self.order.clear(),
            Remedy::Later(asked)
                if asked.is_none_or(|asked| self.waited + asked <= RETRY_AFTER_MAX) =>
            {
                self.next += 1;
                self.pause = self.pause.max(asked);
            }
            Remedy::Elsewhere | Remedy::Later(_) => {
                self.order.remove(self.next);
                // After the registry itself has refused the request, waiting for failed mirrors is pointless.
                let is_own = index + 1 == self.core.endpoints.len();
                if is_own && cause.is_refusal() && self.next >= self.order.len() {
                    self.order.clear();
                }
            }
        }
        if cause.is_unreachable() {
            self.core.is_unwell(index);
        }
        // An error of the registry itself takes precedence over an error of a mirror.
        let better = self.last.as_ref().is_none_or(|(before, _)| *before <= index);
        if better || cause.remedy() == Remedy::None {
            self.last = Some((index, cause));
        }
    }

    /// Like [`failed`](Self::failed), for a failure after which the same host may be tried again.
    pub(super) fn failed_for_now(&mut self, cause: Cause) {
        let Some(&index) = self.order.get(self.next) else { return };
        self.next += 1;
        self.last = Some((index, cause));
    }

    /// Ends the attempts, because the caller continues in another way. Returns the error.
    pub(super) fn end(&mut self, cause: Cause) -> RegistryError {
        if let Some(&index) = self.order.get(self.next) {
            self.last = Some((index, cause));
        }
        self.give_up()
    }

    fn give_up(&mut self) -> RegistryError {
        let (host, cause) = match self.last.take() {
            Some((index, cause)) => (self.core.endpoints[index].host.as_str(), cause),
            None => (self.core.registry.as_str(), Cause::NoHost),
        };
        RegistryError::new(&self.what, host, self.attempts, cause)
    }
}

/// A pause before the hosts are tried again.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Pause<'a> {
    /// Description of the request, such as `fetch manifest 1 of library/alpine`.
    pub what: &'a str,
    /// Host of the last failure.
    pub host: &'a str,
    /// Length of the pause.
    pub wait: Duration,
    /// Number of the next attempt, from 1.
    pub attempt: u32,
    /// Maximum number of attempts without progress.
    pub attempts: u32,
    cause: &'a Cause,
}

impl Pause<'_> {
    /// Returns the reason for the last failure.
    #[must_use]
    pub fn reason(&self) -> String {
        let mut text = self.cause.to_string();
        let mut next = self.cause.source();
        while let Some(error) = next {
            text += &format!(": {error}");
            next = error.source();
        }
        text
    }
}

impl fmt::Display for Pause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, host, wait, attempt, attempts, .. } = self;
        write!(f, "cannot {what} at {host}: {}; ", self.reason())?;
        write!(f, "attempt {attempt} of {attempts} in {:.1} s", wait.as_secs_f64())
    }
}

type Told = dyn Fn(&Pause<'_>) + Send + Sync;

/// A callback for each [`Pause`], called on the network thread. By default there is none.
#[derive(Clone, Default)]
pub struct Pauses(Option<Arc<Told>>);

impl Pauses {
    /// Makes a callback, which must not block.
    pub fn to(told: impl Fn(&Pause<'_>) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(told)))
    }

    fn tell(&self, pause: &Pause<'_>) {
        if let Some(told) = &self.0 {
            told(pause);
        }
    }
}

impl fmt::Debug for Pauses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pauses").field(&self.0.is_some()).finish()
    }
}

/// Returns the pause before a round, counted from 1. It doubles each time, and is then reduced by up to a half at
/// random, so that clients that failed together do not retry together.
fn backoff(base: Duration, round: u32, random: u32) -> Duration {
    let doubled = base.saturating_mul(1 << (round - 1).min(16)).min(BACKOFF_MAX);
    let part = 0.5 + 0.5 * f64::from(random) / f64::from(u32::MAX);
    doubled.mul_f64(part)
}

fn random() -> u32 {
    let hash = RandomState::new().hash_one(0_u8);
    u32::try_from(hash >> 32).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_gets_longer() {
        let base = Duration::from_millis(500);
        for (round, random, expect) in [
            (1, 0, 250),
            (1, u32::MAX, 500),
            (2, u32::MAX, 1000),
            (3, 0, 1000),
            (30, u32::MAX, 30_000),
        ] {
            assert_eq!(backoff(base, round, random), Duration::from_millis(expect), "{round}");
        }
    }
}
