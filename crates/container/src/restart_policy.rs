//! Restart policies: whether and when the program of a container that has ended is started again. The words and their
//! meanings are those of Docker and podman.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// When the program of a container is started again after its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RestartPolicy {
    /// Never.
    #[default]
    No,
    /// After each end, and at each boot.
    Always,
    /// As `Always`, but a container that a user has stopped stays so at boot.
    UnlessStopped,
    /// After an end with another exit code than 0.
    OnFailure {
        /// Maximum number of restarts; 0 means no limit.
        most: u32,
    },
}

/// A text that is no restart policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestartPolicyError {
    #[error(
        "\"{0}\" is not a restart policy: use no, always, unless-stopped, on-failure or on-failure:MAX"
    )]
    Word(String),
    #[error("only on-failure has a maximum number of restarts, and not \"{0}\"")]
    Count(String),
}

impl RestartPolicy {
    /// Returns the word without the maximum.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Always => "always",
            Self::UnlessStopped => "unless-stopped",
            Self::OnFailure { .. } => "on-failure",
        }
    }

    /// Returns the maximum number of restarts; 0 means no limit.
    #[must_use]
    pub const fn most(self) -> u32 {
        match self {
            Self::OnFailure { most } => most,
            Self::No | Self::Always | Self::UnlessStopped => 0,
        }
    }

    /// Whether a program that has ended with this exit code after `count` restarts is started again, unless a user has
    /// stopped it.
    #[must_use]
    pub const fn wants(self, count: u32, code: i32) -> bool {
        match self {
            Self::No => false,
            Self::Always | Self::UnlessStopped => true,
            Self::OnFailure { most } => code != 0 && (most == 0 || count < most),
        }
    }

    /// Whether a container starts at boot, as podman's filter `should-start-on-boot` decides.
    #[must_use]
    pub const fn wants_boot(self, is_stopped_by_user: bool) -> bool {
        match self {
            Self::Always => true,
            Self::UnlessStopped => !is_stopped_by_user,
            Self::No | Self::OnFailure { .. } => false,
        }
    }
}

impl FromStr for RestartPolicy {
    type Err = RestartPolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || RestartPolicyError::Word(text.to_owned());
        let (word, most) = match text.split_once(':') {
            Some((word, most)) => (word, Some(most.parse().map_err(|_ignored| unknown())?)),
            None => (text, None),
        };
        match (word, most) {
            // podman also accepts `never`.
            ("no" | "never", None) => Ok(Self::No),
            ("always", None) => Ok(Self::Always),
            ("unless-stopped", None) => Ok(Self::UnlessStopped),
            ("on-failure", most) => Ok(Self::OnFailure { most: most.unwrap_or(0) }),
            ("no" | "never" | "always" | "unless-stopped", Some(_)) => {
                Err(RestartPolicyError::Count(text.to_owned()))
            }
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for RestartPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnFailure { most: 1.. } => write!(f, "{}:{}", self.name(), self.most()),
            _ => f.write_str(self.name()),
        }
    }
}

impl TryFrom<String> for RestartPolicy {
    type Error = RestartPolicyError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<RestartPolicy> for String {
    fn from(policy: RestartPolicy) -> Self {
        policy.to_string()
    }
}

/// First delay before a restart. Each delay is twice the one before.
const DELAY: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(60);

/// After a run of this length, the delays begin again.
const STEADY: Duration = Duration::from_secs(10);

/// The growing delays between the runs of a program, so that a program that always fails does not keep the host busy.
/// The times are those of Docker, "Restart policy details".
#[derive(Debug, Default)]
pub(crate) struct RestartDelays {
    last: Option<Duration>,
}

impl RestartDelays {
    /// Returns the delay after a run of this length.
    pub(crate) fn next(&mut self, ran: Duration) -> Duration {
        let last = self.last.filter(|_| ran < STEADY);
        let next = last.map_or(DELAY, |last| (last * 2).min(DELAY_MAX));
        self.last = Some(next);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILURE: RestartPolicy = RestartPolicy::OnFailure { most: 0 };

    /// Source: docker-run(1) and podman-run(1), `--restart`.
    #[test]
    fn policies_have_dockers_words() {
        for (text, expect) in [
            ("no", RestartPolicy::No),
            ("always", RestartPolicy::Always),
            ("unless-stopped", RestartPolicy::UnlessStopped),
            ("on-failure", FAILURE),
            ("on-failure:7", RestartPolicy::OnFailure { most: 7 }),
        ] {
            assert_eq!(text.parse(), Ok(expect));
            assert_eq!(expect.to_string(), text);
            let json = serde_json::to_string(&expect).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<RestartPolicy>(&json).unwrap(), expect);
        }
        assert_eq!("never".parse(), Ok(RestartPolicy::No));
        assert_eq!("on-failure:0".parse(), Ok(FAILURE));
        for text in ["", "yes", "Always", "on-failure:", "on-failure:-1", "on-failure:x", "a:1"] {
            let error = text.parse::<RestartPolicy>().unwrap_err();
            assert_eq!(error, RestartPolicyError::Word(text.to_owned()));
        }
        for text in ["no:1", "always:3", "unless-stopped:0"] {
            let error = text.parse::<RestartPolicy>().unwrap_err();
            assert_eq!(error, RestartPolicyError::Count(text.to_owned()));
        }
    }

    #[test]
    fn an_end_is_followed_by_a_restart_if_the_policy_says_so() {
        let twice = RestartPolicy::OnFailure { most: 2 };
        for (policy, count, code, expect) in [
            (RestartPolicy::No, 0, 1, false),
            (RestartPolicy::Always, 1000, 0, true),
            (RestartPolicy::UnlessStopped, 1000, 0, true),
            (FAILURE, 1000, 1, true),
            (FAILURE, 0, 0, false),
            (twice, 1, 1, true),
            (twice, 2, 1, false),
            (twice, 0, 0, false),
        ] {
            assert_eq!(policy.wants(count, code), expect, "{policy} {count} {code}");
        }
    }

    /// Source: podman-ps(1), `should-start-on-boot`; Docker, "Start containers automatically".
    #[test]
    fn a_boot_starts_what_should_always_run() {
        for (policy, running, stopped) in [
            (RestartPolicy::No, false, false),
            (RestartPolicy::Always, true, true),
            (RestartPolicy::UnlessStopped, true, false),
            (FAILURE, false, false),
        ] {
            let found = [false, true].map(|is_stopped| policy.wants_boot(is_stopped));
            assert_eq!(found, [running, stopped], "{policy}");
        }
    }

    #[test]
    fn delays_grow_until_a_program_runs_for_long() {
        let mut delays = RestartDelays::default();
        let mut next = |ran: u64| delays.next(Duration::from_millis(ran)).as_millis();
        let short: Vec<_> = (0..12).map(|_| next(9_999)).collect();
        assert_eq!(
            short,
            [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000]
        );
        assert_eq!([next(10_000), next(0)], [100, 200]);
    }
}
