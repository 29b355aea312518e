//! Who may ask, and for how much.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use image::verity::ImageId;

use super::wire::MountsError;

/// Who may have images lent, and which.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MountPolicy {
    /// The users who may, if not all.
    pub users: Option<BTreeSet<u32>>,
    /// The groups whose members may, if not all.
    pub groups: Option<BTreeSet<u32>>,
    /// The images that may be lent, if not all.
    pub images: Option<BTreeSet<ImageId>>,
    /// How much each user may have.
    pub limits: MountLimits,
}

/// How much each user may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountLimits {
    /// Bytes in an image.
    pub image_bytes: u64,
    /// Files, directories and links in an image.
    pub inodes: u64,
    /// Images that are kept, or mounted, at once.
    pub images: u64,
    /// Bytes in all of these, as the service has written them.
    pub bytes: u64,
    /// Requests in each second, on average.
    pub requests: u64,
    /// Connections at once.
    pub connections: u64,
}

impl Default for MountLimits {
    fn default() -> Self {
        Self {
            image_bytes: 64 << 20,
            inodes: 1_000_000,
            images: 64,
            bytes: 1 << 30,
            requests: 50,
            connections: 16,
        }
    }
}

/// The other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) user: u32,
    pub(super) group: u32,
    /// All groups, the first one among them.
    pub(super) groups: BTreeSet<u32>,
    /// Whether it is in no user namespace of somebody else, where all numbers are that one's.
    pub(super) is_users_own: bool,
}

impl MountPolicy {
    /// Whether a user may ask at all.
    pub(super) fn admits(&self, peer: &Peer) -> Result<(), MountsError> {
        let by_user = self.users.as_ref().map(|it| it.contains(&peer.user));
        let by_group = self.groups.as_ref().map(|it| !it.is_disjoint(&peer.groups));
        match (by_user, by_group) {
            (None, None) | (Some(true), _) | (_, Some(true)) => Ok(()),
            _ => Err(MountsError::denied(format!(
                "the mount service is not for user {}: `users` and `groups` below [mounts] in /etc/quire/serve.toml say \
                 for whom",
                peer.user
            ))),
        }
    }

    /// Whether an image may be lent.
    pub(super) fn allows(&self, image: &ImageId) -> Result<(), MountsError> {
        match &self.images {
            Some(allowed) if !allowed.contains(image) => Err(MountsError::denied(format!(
                "the mount service does not lend image {image}: it is not among `images` below [mounts] in \
                 /etc/quire/serve.toml"
            ))),
            _ => Ok(()),
        }
    }
}

/// How many requests at once a user who was quiet has for granted: those of so many seconds.
const BURST: Duration = Duration::from_secs(2);
/// The longest that a request waits for its turn.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// What each user has of the service at this moment, except for images.
#[derive(Debug, Default)]
pub(super) struct UserCounts(BTreeMap<u32, UserCount>);

#[derive(Debug)]
struct UserCount {
    connections: u64,
    /// When the next request has its turn, if all come as fast as they may. It may be in the past, by [`BURST`] at most.
    next: Instant,
}

impl UserCounts {
    /// Takes a connection. Each one that is taken has to be given back.
    pub(super) fn connect(
        &mut self,
        user: u32,
        limits: &MountLimits,
        now: Instant,
    ) -> Result<(), MountsError> {
        let most = limits.connections;
        let next = now.checked_sub(BURST).unwrap_or(now);
        let count = self.0.entry(user).or_insert(UserCount { connections: 0, next });
        if count.connections >= most {
            return Err(MountsError::too_much(format!(
                "user {user} has {most} connections to the mount service already: wait until one has ended"
            )));
        }
        count.connections += 1;
        Ok(())
    }

    /// Gives a connection back.
    pub(super) fn disconnect(&mut self, user: u32, now: Instant) {
        if let Some(count) = self.0.get_mut(&user) {
            count.connections = count.connections.saturating_sub(1);
        }
        // What is forgotten begins anew as one that was quiet.
        self.0.retain(|_, it| it.connections > 0 || it.next + BURST > now);
    }

    /// How long a request has to wait for its turn.
    pub(super) fn turn(
        &mut self,
        user: u32,
        limits: &MountLimits,
        now: Instant,
    ) -> Result<Duration, MountsError> {
        let Some(count) = self.0.get_mut(&user) else { return Ok(Duration::ZERO) };
        let each =
            Duration::from_secs(1) / u32::try_from(limits.requests.max(1)).unwrap_or(u32::MAX);
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let turn = count.next.max(earliest);
        let wait = turn.saturating_duration_since(now);
        if wait > WAIT_MAX {
            return Err(MountsError::too_much(format!(
                "user {user} asks the mount service for more than {} images in a second: ask again later",
                limits.requests
            )));
        }
        count.next = turn + each;
        Ok(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_is_said_by_user_or_group() {
        let set = |ids: &[u32]| Some(ids.iter().copied().collect());
        let peer = Peer { user: 1000, group: 100, groups: [100, 27].into(), is_users_own: true };
        let cases = [
            (None, None, true),
            (set(&[1000]), None, true),
            (set(&[1001]), None, false),
            (None, set(&[27]), true),
            (None, set(&[28]), false),
            (set(&[1001]), set(&[27]), true),
            (set(&[1000]), set(&[28]), true),
            (set(&[]), set(&[]), false),
        ];
        for (users, groups, expect) in cases {
            let policy = MountPolicy { users, groups, ..MountPolicy::default() };
            assert_eq!(policy.admits(&peer).is_ok(), expect, "{policy:?}");
        }
    }

    #[test]
    fn connections_and_requests_have_an_end() {
        let limits = MountLimits { requests: 10, connections: 2, ..MountLimits::default() };
        let (mut counts, now) = (UserCounts::default(), Instant::now() + BURST);
        assert!(counts.connect(1, &limits, now).is_ok());
        assert!(counts.connect(1, &limits, now).is_ok());
        assert!(counts.connect(1, &limits, now).is_err());
        // Another user does not wait for this one.
        assert!(counts.connect(2, &limits, now).is_ok());
        // Those of two seconds at once, and then one in each tenth of a second.
        let waits: Vec<_> = (0..22).map(|_| counts.turn(1, &limits, now).unwrap()).collect();
        assert!(waits[..21].iter().all(|it| it.is_zero()), "{waits:?}");
        assert_eq!(waits[21], Duration::from_millis(100));
        assert_eq!(counts.turn(2, &limits, now), Ok(Duration::ZERO));
        let refused = (0..100).find(|_| counts.turn(1, &limits, now).is_err());
        assert_eq!(refused, Some(49));
        counts.disconnect(1, now);
        assert!(counts.connect(1, &limits, now).is_ok());
        counts.disconnect(1, now);
        counts.disconnect(1, now);
        // What it owes is not forgotten.
        assert!(counts.connect(1, &limits, now).is_ok());
        assert!(counts.turn(1, &limits, now).is_err());
        counts.disconnect(1, now + Duration::from_secs(60));
        assert!(!counts.0.contains_key(&1));
    }
}
