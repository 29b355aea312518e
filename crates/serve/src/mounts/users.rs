//! The policy and limits of the mount service, and the counts of each user.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use image::verity::{Algorithm, ImageId};

use super::wire::MountsError;

/// Which users may use the service, and for which images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MountPolicy {
    /// Allowed users; `None` allows all.
    pub users: Option<BTreeSet<u32>>,
    /// Groups whose members are allowed; `None` allows all.
    pub groups: Option<BTreeSet<u32>>,
    /// Allowed images; `None` allows all.
    pub images: Option<BTreeSet<ImageId>>,
    pub limits: MountLimits,
}

/// The limits of each user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountLimits {
    /// Size of an image, in bytes.
    pub image_bytes: u64,
    /// Number of files, directories and links in an image.
    pub inodes: u64,
    /// Number of images that are kept or mounted at the same time.
    pub images: u64,
    /// Total size of these images, in bytes, as the service has written them.
    pub bytes: u64,
    /// Average number of requests per second.
    pub requests: u64,
    /// Number of connections at the same time.
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

/// The credentials of a connection's peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) user: u32,
    pub(super) group: u32,
    /// All groups, including `group`.
    pub(super) groups: BTreeSet<u32>,
    /// Whether the peer is outside user namespaces of other users, in which another user chooses the ids.
    pub(super) is_users_own: bool,
}

impl MountPolicy {
    /// Checks whether a user may use the service.
    pub(super) fn admits(&self, peer: &Peer) -> Result<(), MountsError> {
        let by_user = self.users.as_ref().map(|it| it.contains(&peer.user));
        let by_group = self.groups.as_ref().map(|it| !it.is_disjoint(&peer.groups));
        match (by_user, by_group) {
            (None, None) | (Some(true), _) | (_, Some(true)) => Ok(()),
            _ => Err(MountsError::denied(format!(
                "the mount service does not serve user {}: see `users` and `groups` below \
                [mounts] in /etc/quire/serve.toml",
                peer.user
            ))),
        }
    }

    /// Whether an image may be mounted.
    pub(super) fn allows(&self, image: &ImageId) -> bool {
        self.images.as_ref().is_none_or(|allowed| allowed.contains(image))
    }

    /// Returns the algorithms of the allowed ids but SHA-256, which is that of most stores.
    pub(super) fn other_algorithms(&self) -> impl Iterator<Item = Algorithm> {
        let allowed = || self.images.iter().flatten().map(ImageId::algorithm);
        [Algorithm::Sha512].into_iter().filter(move |it| allowed().any(|other| other == *it))
    }

    /// Returns the error for an image that has these ids.
    pub(super) fn refusal(image: &ImageId, others: &[ImageId]) -> MountsError {
        let others: String = others.iter().map(|it| format!(" or {it}")).collect();
        MountsError::denied(format!(
            "the mount service does not mount image {image}{others}: it is not among `images` below [mounts] in \
            /etc/quire/serve.toml"
        ))
    }
}

/// An idle user may send the requests of this time at once.
const BURST: Duration = Duration::from_secs(2);
/// Longest time that a request waits for its turn.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Largest number of open connections of all users: served, waiting, and being refused.
pub(super) const OPEN_MAX: u64 = 1024;
/// Largest number of open connections of one user.
const OPEN_EACH_MAX: u64 = 128;

/// Average time that copies of one user's images may take in each [`COPYING_PERIOD`].
const COPYING: Duration = Duration::from_secs(20);
/// The period of [`COPYING`].
const COPYING_PERIOD: Duration = Duration::from_secs(60);

/// The current use of the service by each user, except for images.
#[derive(Debug, Default)]
pub(super) struct UserCounts(BTreeMap<u32, UserCount>);

/// A number in the queue of a user's waiting connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LineNumber(u64);

#[derive(Debug)]
struct UserCount {
    /// Number of open connections.
    open: u64,
    /// Number of them that are served.
    served: u64,
    /// Waiting connections, in the order in which they came.
    line: VecDeque<LineNumber>,
    /// The number for the next waiting connection.
    next_in_line: LineNumber,
    /// When the last served connection ended, or the first one began to wait.
    moved: Instant,
    /// The earliest turn of the next connection at the allowed rate. It may be in the past by at most [`BURST`].
    next_connection: Instant,
    /// The same for the next request.
    next_request: Instant,
    /// When the time that copies took is paid off.
    copies_paid: Instant,
}

impl UserCounts {
    /// Counts an accepted connection, if the user may have another one; returns whether that is so. Each counted
    /// connection must be ended with [`close`](Self::close). A user may have at most as many connections as remain for
    /// others, so that a few greedy users cannot use up all connections. Source of the rule: Choudhury and Hahne,
    /// "Dynamic queue length thresholds", IEEE/ACM ToN 6(2), 1998.
    pub(super) fn open(&mut self, user: u32, now: Instant) -> bool {
        if !self.has_room(user) {
            return false;
        }
        let before = now.checked_sub(BURST).unwrap_or(now);
        let new = || UserCount {
            open: 0,
            served: 0,
            line: VecDeque::new(),
            next_in_line: LineNumber(0),
            moved: now,
            next_connection: before,
            next_request: before,
            copies_paid: now,
        };
        self.0.entry(user).or_insert_with(new).open += 1;
        true
    }

    /// Returns whether a user may have another connection.
    pub(super) fn has_room(&self, user: u32) -> bool {
        let open = self.0.get(&user).map_or(0, |it| it.open);
        let all = self.0.values().map(|it| it.open).sum::<u64>();
        open < OPEN_EACH_MAX && open < OPEN_MAX.saturating_sub(all)
    }

    /// Ends a counted connection, and forgets idle users.
    pub(super) fn close(&mut self, user: u32, now: Instant) {
        if let Some(count) = self.0.get_mut(&user) {
            count.open = count.open.saturating_sub(1);
        }
        // A new user starts with the same allowance as an idle user, so idle users can be forgotten.
        self.0.retain(|_, it| {
            let is_quiet = it.next_request.max(it.next_connection) + BURST <= now;
            it.open > 0 || !is_quiet || it.copies_paid > now
        });
    }

    /// Puts an open connection at the end of its user's queue.
    pub(super) fn line_up(&mut self, user: u32, now: Instant) -> LineNumber {
        let Some(count) = self.0.get_mut(&user) else { return LineNumber(0) };
        if count.line.is_empty() {
            count.moved = now;
        }
        let number = count.next_in_line;
        count.next_in_line = LineNumber(number.0.wrapping_add(1));
        count.line.push_back(number);
        number
    }

    /// Removes a connection from the queue, if it is in it.
    pub(super) fn step_out(&mut self, user: u32, number: LineNumber) {
        if let Some(count) = self.0.get_mut(&user) {
            count.line.retain(|it| *it != number);
        }
    }

    /// Starts to serve a connection if it is the first of the queue and its user may have another served one.
    pub(super) fn serve(&mut self, user: u32, number: LineNumber, limits: &MountLimits) -> bool {
        match self.0.get_mut(&user) {
            Some(count)
                if count.served < limits.connections && count.line.front() == Some(&number) =>
            {
                count.line.pop_front();
                count.served += 1;
                true
            }
            _ => false,
        }
    }

    /// Ends serving a connection.
    pub(super) fn leave(&mut self, user: u32, now: Instant) {
        if let Some(count) = self.0.get_mut(&user) {
            count.served = count.served.saturating_sub(1);
            count.moved = now;
        }
    }

    /// Returns the last time when a user's queue moved.
    pub(super) fn moved(&self, user: u32) -> Option<Instant> {
        self.0.get(&user).map(|it| it.moved)
    }

    /// Returns how long a connection or request must wait for its turn.
    pub(super) fn turn(
        &mut self,
        of: TurnOf,
        user: u32,
        limits: &MountLimits,
        now: Instant,
    ) -> Result<Duration, MountsError> {
        let Some(count) = self.0.get_mut(&user) else { return Ok(Duration::ZERO) };
        let next = match of {
            TurnOf::Connection => &mut count.next_connection,
            TurnOf::Request => &mut count.next_request,
        };
        turn(next, user, limits, now)
    }

    /// Checks whether a user may have another image copied.
    pub(super) fn check_copying(&self, user: u32, now: Instant) -> Result<(), MountsError> {
        let paid = self.0.get(&user).map_or(now, |it| it.copies_paid);
        let wait = paid.saturating_duration_since(now);
        if wait < COPYING_PERIOD {
            return Ok(());
        }
        Err(MountsError::too_much(format!(
            "copying images of user {user} took more than {} of the last {} seconds: try again in \
            {} seconds",
            COPYING.as_secs(),
            COPYING_PERIOD.as_secs(),
            (wait - COPYING_PERIOD).as_secs() + 1
        )))
    }

    /// Charges a user for the time that a copy took, whether it succeeded or not.
    pub(super) fn charge_copying(&mut self, user: u32, took: Duration, now: Instant) {
        if let Some(count) = self.0.get_mut(&user) {
            let price =
                took * u32::try_from(COPYING_PERIOD.as_secs() / COPYING.as_secs()).unwrap_or(1);
            let begun = now.checked_sub(took).unwrap_or(now);
            count.copies_paid = count.copies_paid.max(begun) + price;
        }
    }
}

/// The kinds of events with a limited rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TurnOf {
    /// A connection, which costs a process.
    Connection,
    Request,
}

fn turn(
    next: &mut Instant,
    user: u32,
    limits: &MountLimits,
    now: Instant,
) -> Result<Duration, MountsError> {
    let each = Duration::from_secs(1) / u32::try_from(limits.requests.max(1)).unwrap_or(u32::MAX);
    let earliest = now.checked_sub(BURST).unwrap_or(now);
    let turn = (*next).max(earliest);
    let wait = turn.saturating_duration_since(now);
    if wait > WAIT_MAX {
        return Err(MountsError::too_much(format!(
            "user {user} requested more than {} images in a second from the mount service: try \
            again later",
            limits.requests
        )));
    }
    *next = turn + each;
    Ok(wait)
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
        for _ in 0..4 {
            assert!(counts.open(1, now));
        }
        let [first, second, third, fourth] = [(); 4].map(|()| counts.line_up(1, now));
        assert!(!counts.serve(1, second, &limits), "the first one is before it");
        assert!(counts.serve(1, first, &limits) && counts.serve(1, second, &limits));
        assert!(!counts.serve(1, third, &limits), "the third one waits");
        // The limits of users are independent.
        assert!(counts.open(2, now));
        let other = counts.line_up(2, now);
        assert!(counts.serve(2, other, &limits));
        let later = now + Duration::from_secs(1);
        counts.leave(1, later);
        assert_eq!((counts.moved(1), counts.moved(2)), (Some(later), Some(now)));
        // A connection that leaves the queue does not block those behind it.
        counts.step_out(1, third);
        assert!(counts.serve(1, fourth, &limits));
        counts.close(1, now);
        // A user may send the requests of two seconds at once, and then one request in each tenth of a second.
        let mut turn = |user, now| counts.turn(TurnOf::Request, user, &limits, now);
        let waits: Vec<_> = (0..22).map(|_| turn(1, now).unwrap()).collect();
        assert!(waits[..21].iter().all(|it| it.is_zero()), "{waits:?}");
        assert_eq!(waits[21], Duration::from_millis(100));
        assert_eq!(turn(2, now), Ok(Duration::ZERO));
        assert_eq!((0..100).find(|_| turn(1, now).is_err()), Some(49));
        assert_eq!(counts.turn(TurnOf::Connection, 1, &limits, now), Ok(Duration::ZERO));
        // A user's debt survives closing all connections.
        for _ in 0..3 {
            counts.leave(1, now);
            counts.close(1, now);
        }
        assert!(counts.open(1, now));
        assert!(counts.turn(TurnOf::Request, 1, &limits, now).is_err());
        counts.close(1, now + Duration::from_secs(60));
        assert!(!counts.0.contains_key(&1));
    }

    #[test]
    fn users_leave_places_to_others_however_many_they_want() {
        let (mut counts, now) = (UserCounts::default(), Instant::now());
        let mut take_all = |user| (0..).take_while(|_| counts.open(user, now)).count();
        assert_eq!(take_all(1), 128);
        let each: Vec<_> = (2..13).map(take_all).collect();
        assert!(each.iter().all(|it| *it > 0), "{each:?}");
        assert!(counts.has_room(100));
        assert!(!counts.has_room(1));
    }

    #[test]
    fn a_user_pays_for_the_time_of_copies() {
        let (mut counts, start) = (UserCounts::default(), Instant::now() + COPYING_PERIOD);
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(counts.open(1, start) && counts.open(2, start));
        counts.charge_copying(1, Duration::from_secs(20), after(20));
        assert_eq!(counts.check_copying(1, after(20)), Ok(()));
        counts.charge_copying(1, Duration::from_secs(20), after(40));
        // Forty seconds of copying use up two minutes.
        assert!(counts.check_copying(1, after(40)).is_err());
        counts.close(1, after(41));
        let error = counts.check_copying(1, after(41)).unwrap_err();
        assert!(error.to_string().contains("try again in 20 seconds"), "{error}");
        assert_eq!(counts.check_copying(2, after(40)), Ok(()));
        assert_eq!(counts.check_copying(1, after(61)), Ok(()));
    }
}
