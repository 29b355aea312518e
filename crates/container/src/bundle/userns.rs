//! User namespaces: maps of a container's ids to the host's ids.
//!
//! The image is neither changed nor copied: Quire clones the image's mount, maps the owners in the clone, and uses the
//! clone as a layer of the overlay. Files that the container writes have the host's ids in the upper directory.

use std::fmt;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::str::FromStr;

use kernel::process::{IdRange, ProcessError, ranges_of, user_namespace};
use serde::{Deserialize, Serialize};

use crate::bundle::spec::{IdMapping, SpecLinux, SpecNamespace};
use crate::bundle::user::User;
use crate::folder::USERNS;

/// The kernel's value for "none". Valid ids are smaller.
const NO_ID: u64 = u32::MAX as u64;
/// The kernel reads a map from one write of less than a page. Source: Linux `kernel/user_namespace.c`, `map_write`.
const TEXT_MAX: usize = 4095;
/// Default number of ids of a container: the whole 16-bit range.
pub const SIZE: NonZeroU32 = NonZeroU32::new(65_536).expect("not zero");
/// Range to use if the files contain neither name: it is above SSSD's range for domains, below systemd's foreign
/// users, and no tool uses it by default. Source: systemd `docs/UIDS-GIDS.md`; sssd-ldap(5), `ldap_idmap_range_max`.
pub const UNCLAIMED: IdRange =
    IdRange { inside: 0, outside: 2_000_224_256, count: 2_147_352_576 - 2_000_224_256 };
/// Range from which systemd assigns ids to user namespaces temporarily. Source: systemd `docs/UIDS-GIDS.md`,
/// "container UIDs".
const TRANSIENT: IdRange =
    IdRange { inside: 0, outside: 524_288, count: 1_879_048_191 - 524_288 + 1 };
/// Whether an id is in systemd's transient range. A user with such an id cannot be distinguished from a container's
/// user, so it may write nothing persistent.
#[must_use]
pub fn is_transient(id: u32) -> bool {
    id.checked_sub(TRANSIENT.outside).is_some_and(|it| it < TRANSIENT.count)
}

/// Owners whose ranges in the files Quire may use: Quire's own entry, or podman's entry for the same purpose.
pub const NAMES: [&str; 2] = ["quire", "containers"];

/// A map that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The text is not three numbers.
    #[error("\"{0}\" is not a range of ids: write CONTAINER:HOST:SIZE, three numbers")]
    Syntax(String),
    /// The range is empty.
    #[error("the range {0} is empty")]
    Empty(String),
    /// The range goes beyond the last id.
    #[error("the range {0} exceeds the last id, {last}", last = NO_ID - 1)]
    Overflow(String),
    /// An id is in two ranges.
    #[error("the ranges {0} and {1} overlap")]
    Overlap(String, String),
    /// The map is longer than the kernel accepts.
    #[error("too many ranges: the kernel limits a map to {TEXT_MAX} bytes")]
    TooMany,
    /// The map lacks the container's root, which runtimes need to prepare a container.
    #[error("the map lacks id 0 of the container, its root: begin with 0:HOST:SIZE")]
    NoRoot,
    /// The program's user or group is not in the map.
    #[error("the container's {kind} {id} is not in its map of ids")]
    User {
        /// `user` or `group`.
        kind: &'static str,
        id: u32,
    },
    /// The program's user or group is not in the caller's user namespace.
    #[error(
        "the container's {kind} {id} has no id in this user namespace: use --user 0, or ask root \
        to add a range for you to /etc/subuid and /etc/subgid"
    )]
    NoId {
        /// `user` or `group`.
        kind: &'static str,
        id: u32,
    },
    /// One file has ranges, and the other has none.
    #[error("{0} has no entry for {a} or {b}, but the other file has one", a = NAMES[0], b = NAMES[1])]
    Lacking(&'static str),
    /// All ids are in use.
    #[error(
        "{place} has no {size} consecutive free ids: remove a container, request fewer ids \
        (auto,size=N), or add ranges for \"{name}\" to /etc/subuid and /etc/subgid", name = NAMES[0]
    )]
    Exhausted {
        /// Number of requested ids.
        size: u32,
        /// Source of the ids.
        place: &'static str,
    },
}

/// A map of ids inside a user namespace to ids outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct IdMap {
    users: Vec<IdRange>,
    groups: Vec<IdRange>,
}

/// Formats a range as `CONTAINER:HOST:SIZE`.
struct Shown<'a>(&'a IdRange);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.0.inside, self.0.outside, self.0.count)
    }
}

/// Parses `CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…]`, the format of podman.
///
/// # Errors
/// [`MapError`] with the invalid range.
pub fn parse_ranges(text: &str) -> Result<Vec<IdRange>, MapError> {
    let ranges: Vec<IdRange> = text.split(',').map(parse_range).collect::<Result<_, _>>()?;
    // This is the length of the text for the kernel. It is checked first, because the next step compares each range
    // with all others.
    if show(&ranges).len() >= TEXT_MAX {
        return Err(MapError::TooMany);
    }
    let overlap = |a: (u32, u32), b: (u32, u32)| {
        let end = |(first, count): (u32, u32)| u64::from(first) + u64::from(count);
        u64::from(a.0) < end(b) && u64::from(b.0) < end(a)
    };
    for (at, one) in ranges.iter().enumerate() {
        for other in &ranges[..at] {
            if overlap((one.inside, one.count), (other.inside, other.count))
                || overlap((one.outside, one.count), (other.outside, other.count))
            {
                return Err(MapError::Overlap(Shown(other).to_string(), Shown(one).to_string()));
            }
        }
    }
    Ok(ranges)
}

fn parse_range(text: &str) -> Result<IdRange, MapError> {
    let syntax = || MapError::Syntax(text.to_owned());
    let mut numbers = text.split(':').map(|word| {
        // `parse` would also accept a plus sign.
        let is_number = !word.is_empty() && word.bytes().all(|it| it.is_ascii_digit());
        is_number.then_some(word).ok_or_else(syntax)
    });
    let mut next = || numbers.next().unwrap_or_else(|| Err(syntax()));
    let words = [next()?, next()?, next()?];
    if numbers.next().is_some() {
        return Err(syntax());
    }
    let number = |word: &str| word.parse::<u64>().unwrap_or(u64::MAX);
    let [inside, outside, count] = words.map(number);
    if count == 0 {
        return Err(MapError::Empty(text.to_owned()));
    }
    let overflow = || MapError::Overflow(text.to_owned());
    let first = |first: u64| match first.checked_add(count) {
        Some(end) if end <= NO_ID => u32::try_from(first).map_err(|_more| overflow()),
        _ => Err(overflow()),
    };
    let (inside, outside) = (first(inside)?, first(outside)?);
    Ok(IdRange { inside, outside, count: u32::try_from(count).map_err(|_more| overflow())? })
}

fn show(ranges: &[IdRange]) -> String {
    let shown: Vec<_> = ranges.iter().map(|it| Shown(it).to_string()).collect();
    shown.join(",")
}

fn outside(ranges: &[IdRange], inside: u32) -> Option<u32> {
    ranges.iter().find_map(|it| counterpart(inside, it.inside, it.count, it.outside))
}

/// Returns the container's id for an id of the host, or `None` if it has none.
pub(crate) fn inside(ranges: &[IdRange], outside: u32) -> Option<u32> {
    ranges.iter().find_map(|it| counterpart(outside, it.outside, it.count, it.inside))
}

/// Converts an id from the range of `count` ids that begins at `from` to the range that begins at `to`.
fn counterpart(id: u32, from: u32, count: u32, to: u32) -> Option<u32> {
    to.checked_add(id.checked_sub(from).filter(|offset| *offset < count)?)
}

impl IdMap {
    /// Creates a map from ranges of users and of groups, both from [`parse_ranges`] or [`auto`].
    #[must_use]
    pub const fn new(users: Vec<IdRange>, groups: Vec<IdRange>) -> Self {
        Self { users, groups }
    }

    /// Returns the map of a namespace in which the user and its group are root, and no other ids exist.
    #[must_use]
    pub fn single(user: u32, group: u32) -> Self {
        let one = |outside| vec![IdRange { inside: 0, outside, count: 1 }];
        Self { users: one(user), groups: one(group) }
    }

    /// Returns the map of a namespace in which a user is root, and the other ids are those that subuid(5) and
    /// subgid(5) assign to the user. `None` if one of the files assigns no ids.
    #[must_use]
    pub fn of_user(
        files: SubIdFiles<'_>,
        name: &UserName<'_>,
        user: u32,
        group: u32,
    ) -> Option<Self> {
        let users = with_own(user, &name.stretches(files.users))?;
        let groups = with_own(group, &name.stretches(files.groups))?;
        Some(Self { users, groups })
    }

    /// Adds all ids that systemd may assign temporarily, except those that the files assign to a user.
    #[must_use]
    pub fn and_transient(mut self, files: SubIdFiles<'_>) -> Self {
        self.users.extend(unclaimed_in(&TRANSIENT, files.users));
        self.groups.extend(unclaimed_in(&TRANSIENT, files.groups));
        self
    }

    #[must_use]
    pub fn users(&self) -> &[IdRange] {
        &self.users
    }

    #[must_use]
    pub fn groups(&self) -> &[IdRange] {
        &self.groups
    }

    /// Returns the host's id of a user of the container; `None` if the map lacks it.
    #[must_use]
    pub fn user(&self, inside: u32) -> Option<u32> {
        outside(&self.users, inside)
    }

    /// Returns the host's id of a group of the container; `None` if the map lacks it.
    #[must_use]
    pub fn group(&self, inside: u32) -> Option<u32> {
        outside(&self.groups, inside)
    }

    /// Returns the host's ids of the container's root, user and group.
    pub fn root(&self) -> Result<(u32, u32), MapError> {
        self.user(0).zip(self.group(0)).ok_or(MapError::NoRoot)
    }

    /// Checks that a program can run as this user.
    ///
    /// # Errors
    /// [`MapError::User`] with the id that is in no range.
    pub fn check(&self, user: &User) -> Result<(), MapError> {
        let missing = missing(user, &self.users, &self.groups);
        missing.map_or(Ok(()), |(kind, id)| Err(MapError::User { kind, id }))
    }

    /// Creates a user namespace with the map and without processes.
    pub fn namespace(&self) -> Result<OwnedFd, ProcessError> {
        user_namespace(&self.users, &self.groups)
    }

    /// Writes the map into a bundle's configuration.
    pub(crate) fn write(&self, linux: &mut SpecLinux) {
        let ranges = |ranges: &[IdRange]| {
            let range =
                |it: &IdRange| IdMapping { container: it.inside, host: it.outside, size: it.count };
            ranges.iter().map(range).collect()
        };
        linux.uid_mappings = ranges(&self.users);
        linux.gid_mappings = ranges(&self.groups);
        linux.namespaces.push(SpecNamespace::new("user"));
    }

    /// Writes the map into a container's folder. Until the file exists, searches for a free range wait.
    pub fn note(&self, folder: &Path) -> std::io::Result<()> {
        std::fs::write(folder.join(USERNS), self.to_string())
    }

    /// Returns the map of a container; `None` if it has none.
    #[must_use]
    pub fn noted(folder: &Path) -> Option<Self> {
        std::fs::read_to_string(folder.join(USERNS)).ok()?.parse().ok()
    }
}

impl fmt::Display for IdMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}\n", show(&self.users), show(&self.groups))
    }
}

impl From<IdMap> for String {
    fn from(map: IdMap) -> Self {
        map.to_string()
    }
}

impl TryFrom<String> for IdMap {
    type Error = MapError;

    fn try_from(text: String) -> Result<Self, MapError> {
        text.parse()
    }
}

impl FromStr for IdMap {
    type Err = MapError;

    fn from_str(text: &str) -> Result<Self, MapError> {
        let mut lines = text.lines();
        let mut next = || parse_ranges(lines.next().unwrap_or_default());
        Ok(Self { users: next()?, groups: next()? })
    }
}

/// Contents of `/etc/subuid` and `/etc/subgid`.
#[derive(Debug, Clone, Copy)]
pub struct SubIdFiles<'a> {
    /// Contents of `/etc/subuid`.
    pub users: &'a str,
    /// Contents of `/etc/subgid`.
    pub groups: &'a str,
}

/// A user as named in these files: by name if the files have such entries, otherwise by number.
#[derive(Debug, Clone, Copy)]
pub struct UserName<'a> {
    /// User id.
    pub number: u32,
    /// User name, if known.
    pub name: Option<&'a str>,
}

impl UserName<'_> {
    fn stretches(&self, file: &str) -> Vec<Stretch> {
        let by_name = self.name.map(|it| stretches(file, Some(it))).unwrap_or_default();
        match by_name.is_empty() {
            true => stretches(file, Some(&self.number.to_string())),
            false => by_name,
        }
    }
}

/// Returns the parts of a range that a file assigns to no user.
fn unclaimed_in(range: &IdRange, file: &str) -> Vec<IdRange> {
    let mut claimed = stretches(file, None);
    claimed.sort_unstable();
    let (mut at, end) =
        (u64::from(range.outside), u64::from(range.outside) + u64::from(range.count));
    let mut left = Vec::new();
    for (first, after) in claimed.into_iter().chain([(end, end)]) {
        let until = first.min(end);
        if let (Ok(outside), Some(count @ 1..)) = (u32::try_from(at), until.checked_sub(at)) {
            left.extend(u32::try_from(count).map(|count| IdRange { inside: 0, outside, count }));
        }
        at = at.max(after);
    }
    left
}

/// Returns ranges that map 0 to the user's own id, and the following ids to `stretches`. `None` if `stretches` is
/// empty.
fn with_own(own: u32, stretches: &[Stretch]) -> Option<Vec<IdRange>> {
    let mut ranges = vec![IdRange { inside: 0, outside: own, count: 1 }];
    let mut next = 1;
    for (first, end) in stretches {
        let count = u32::try_from(end - first).ok()?;
        ranges.push(IdRange { inside: next, outside: u32::try_from(*first).ok()?, count });
        next = next.checked_add(count)?;
    }
    (ranges.len() > 1).then_some(ranges)
}

/// The ids of this process's user namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnIds {
    users: Vec<IdRange>,
    groups: Vec<IdRange>,
}

impl OwnIds {
    /// Makes the ids from ranges of another namespace. Only the inner ids of each range are used.
    #[must_use]
    pub const fn from_ranges(users: Vec<IdRange>, groups: Vec<IdRange>) -> Self {
        Self { users, groups }
    }

    /// Reads the ids from `/proc`.
    pub fn read() -> std::io::Result<Self> {
        let ranges = |name: &str| {
            std::fs::read_to_string(format!("/proc/self/{name}")).map(|text| ranges_of(&text))
        };
        Ok(Self { users: ranges("uid_map")?, groups: ranges("gid_map")? })
    }

    /// Returns the id in this namespace for a user of an image: the same id, or else nobody's, or else root's.
    #[must_use]
    pub fn user(&self, user: u32) -> u32 {
        squashed(&self.users, user)
    }

    /// Like [`user`](Self::user), for a group.
    #[must_use]
    pub fn group(&self, group: u32) -> u32 {
        squashed(&self.groups, group)
    }

    /// Whether the namespace has this group.
    #[must_use]
    pub fn has_group(&self, group: u32) -> bool {
        outside(&self.groups, group).is_some()
    }

    /// Checks that a program can run as this user.
    ///
    /// # Errors
    /// [`MapError::NoId`] with the id that is in no range.
    pub fn check(&self, user: &User) -> Result<(), MapError> {
        let missing = missing(user, &self.users, &self.groups);
        missing.map_or(Ok(()), |(kind, id)| Err(MapError::NoId { kind, id }))
    }
}

/// Returns the first id of a user that is in no range, and whether it is a `user` or `group`.
fn missing(user: &User, users: &[IdRange], groups: &[IdRange]) -> Option<(&'static str, u32)> {
    if outside(users, user.uid).is_none() {
        return Some(("user", user.uid));
    }
    let mut of_user = [user.gid].into_iter().chain(user.groups.iter().copied());
    of_user.find(|it| outside(groups, *it).is_none()).map(|it| ("group", it))
}

/// Id of the user and the group `nobody`. Source: Linux `Documentation/admin-guide/sysctl/fs.rst`, `overflowuid`.
const NOBODY: u32 = 65_534;

fn squashed(ranges: &[IdRange], id: u32) -> u32 {
    let is_there = |id| outside(ranges, id).is_some();
    [id, NOBODY].into_iter().find(|it| is_there(*it)).unwrap_or(0)
}

/// A range of the host's ids: the first id, and the id after the last one.
type Stretch = (u64, u64);

/// Returns the ranges that a file assigns to `name`, or to any user if `name` is `None`. Source: subuid(5).
fn stretches(file: &str, name: Option<&str>) -> Vec<Stretch> {
    let lines = file.lines().filter_map(|line| {
        let mut fields = line.trim().split(':');
        let owner = fields.next()?;
        let (first, count): (u64, u64) =
            (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let end = first.checked_add(count)?.min(NO_ID);
        (name.is_none_or(|name| name == owner) && first < end).then_some((first, end))
    });
    lines.collect()
}

/// Finds a map for a new container: `size` consecutive ids from the container's 0 on, which no map in `taken` uses.
pub fn auto(files: SubIdFiles<'_>, size: NonZeroU32, taken: &[IdMap]) -> Result<IdMap, MapError> {
    let ours = |file| {
        let mut names = NAMES.iter().map(|name| stretches(file, Some(name)));
        names.find(|found| !found.is_empty()).unwrap_or_default()
    };
    let (mut users, mut groups) = (ours(files.users), ours(files.groups));
    let mut used_users: Vec<_> = taken.iter().flat_map(|it| taken_by(&it.users)).collect();
    let mut used_groups: Vec<_> = taken.iter().flat_map(|it| taken_by(&it.groups)).collect();
    let mut places = ["/etc/subuid", "/etc/subgid"];
    match (users.is_empty(), groups.is_empty()) {
        (true, true) => {
            let first = u64::from(UNCLAIMED.outside);
            users = vec![(first, first + u64::from(UNCLAIMED.count))];
            groups.clone_from(&users);
            // Ranges that the files assign to others stay theirs.
            used_users.extend(stretches(files.users, None));
            used_groups.extend(stretches(files.groups, None));
            places = ["a range of Quire"; 2];
        }
        (true, false) => return Err(MapError::Lacking("/etc/subuid")),
        (false, true) => return Err(MapError::Lacking("/etc/subgid")),
        (false, false) => {}
    }
    let find = |from: &[Stretch], used: &[Stretch], place| {
        first_free(from, used, size)
            .map(|outside| vec![IdRange { inside: 0, outside, count: size.get() }])
            .ok_or(MapError::Exhausted { size: size.get(), place })
    };
    Ok(IdMap {
        users: find(&users, &used_users, places[0])?,
        groups: find(&groups, &used_groups, places[1])?,
    })
}

fn taken_by(ranges: &[IdRange]) -> impl Iterator<Item = Stretch> {
    ranges.iter().map(|it| (u64::from(it.outside), u64::from(it.outside) + u64::from(it.count)))
}

fn first_free(from: &[Stretch], used: &[Stretch], size: NonZeroU32) -> Option<u32> {
    let size = u64::from(size.get());
    let mut used = used.to_vec();
    used.sort_unstable();
    from.iter().find_map(|&(first, end)| {
        let mut at = first;
        for (taken, after) in &used {
            if at.checked_add(size)? <= *taken {
                break;
            }
            at = at.max(*after);
        }
        (at.checked_add(size)? <= end).then_some(at).and_then(|at| u32::try_from(at).ok())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_root_of_its_own_ids() {
        let (users, groups) = ("other:1:5\nme:100000:65536\nme:300000:2\n", "1000:200000:10\n");
        let of = |users, groups, name| {
            let name = UserName { number: 1000, name };
            IdMap::of_user(SubIdFiles { users, groups }, &name, 1000, 100).map(|it| it.to_string())
        };
        let expect = "0:1000:1,1:100000:65536,65537:300000:2\n0:100:1,1:200000:10\n";
        assert_eq!(of(users, groups, Some("me")).as_deref(), Some(expect));
        for (users, groups, name) in
            [(users, "", Some("me")), ("", groups, None), (users, groups, None)]
        {
            assert_eq!(of(users, groups, name), None);
        }
        assert_eq!(IdMap::single(1000, 100).to_string(), "0:1000:1\n0:100:1\n");
    }

    #[test]
    fn what_systemd_gives_is_nothing_that_files_give() {
        let of = |file| {
            let left = unclaimed_in(&IdRange { inside: 0, outside: 100, count: 50 }, file);
            left.iter().map(|it| (it.outside, it.count)).collect::<Vec<_>>()
        };
        assert_eq!(of(""), [(100, 50)]);
        assert_eq!(of("a:0:100\nb:150:9\n"), [(100, 50)]);
        assert_eq!(of("a:140:100\nb:90:20\nc:120:5\nd:121:1\n"), [(110, 10), (125, 15)]);
        assert_eq!(of("a:0:200\n"), []);
        assert_eq!(of("a:100:50\n"), []);
        assert_eq!(of("a:101:48\n"), [(100, 1), (149, 1)]);
        let ids = [524_287, 524_288, 1_879_048_191, 1_879_048_192];
        assert_eq!(ids.map(is_transient), [false, true, true, false]);
    }

    #[test]
    fn ids_that_are_not_there_are_nobody_or_root() {
        let of = |text: &str, id| squashed(&ranges_of(text), id);
        let (many, one) = ("0 1000 1\n1 100000 65536\n", "         0       1000          1\n");
        for (text, id, expect) in [
            (many, 33, 33),
            (many, 65_536, 65_536),
            (many, 70_000, NOBODY),
            (one, 33, 0),
            (one, 0, 0),
        ] {
            assert_eq!(of(text, id), expect, "{id}");
        }
    }

    #[test]
    fn maps_are_ranges_of_three_numbers() {
        let range = |inside, outside, count| IdRange { inside, outside, count };
        let cases = [
            ("0:100000:65536", vec![range(0, 100_000, 65_536)]),
            ("0:1000:1,1:100000:999", vec![range(0, 1000, 1), range(1, 100_000, 999)]),
            ("0:0:4294967295", vec![range(0, 0, u32::MAX)]),
            ("5:4294967294:1", vec![range(5, u32::MAX - 1, 1)]),
        ];
        for (text, expect) in cases {
            assert_eq!(parse_ranges(text), Ok(expect.clone()), "{text}");
            assert_eq!(show(&expect), text);
        }
        let bad = [
            ("", "is not a range of ids"),
            ("0", "is not a range of ids"),
            ("0:1", "is not a range of ids"),
            ("0:1:2:3", "is not a range of ids"),
            ("0:1:2,", "\"\" is not a range of ids"),
            ("+0:1:2", "is not a range of ids"),
            ("-1:1:2", "is not a range of ids"),
            ("0:a:2", "\"0:a:2\" is not a range of ids"),
            ("0:1:0", "0:1:0 is empty"),
            ("0:0:4294967296", "exceeds the last id, 4294967294"),
            ("0:4294967295:1", "exceeds the"),
            ("4294967290:0:9", "exceeds the"),
            ("0:99999999999999999999:1", "exceeds the"),
            ("0:18446744073709551615:18446744073709551615", "exceeds the"),
            ("0:1000:10,9:2000:1", "0:1000:10 and 9:2000:1 overlap"),
            ("0:1000:10,10:1009:1", "0:1000:10 and 10:1009:1 overlap"),
        ];
        for (text, expect) in bad {
            let error = parse_ranges(text).unwrap_err().to_string();
            assert!(error.contains(expect), "{text}: {error}");
        }
        let many: Vec<_> = (0..1000).map(|it| format!("{it}:{}:1", it + 1_000_000)).collect();
        assert_eq!(parse_ranges(&many.join(",")), Err(MapError::TooMany));
        // The length is checked before the ranges are compared, which would take long for a hundred thousand ranges.
        assert_eq!(parse_ranges(&["0:1:1"; 1000].join(",")), Err(MapError::TooMany));
    }

    #[test]
    fn ids_are_looked_up() {
        let map: IdMap = "0:1000:1,10:5000:3\n0:7:100".parse().unwrap();
        for (inside, user, group) in
            [(0, Some(1000), Some(7)), (1, None, Some(8)), (12, Some(5002), Some(19))]
        {
            assert_eq!((map.user(inside), map.group(inside)), (user, group), "{inside}");
        }
        assert_eq!((map.user(13), map.user(9), map.group(100)), (None, None, None));
        assert_eq!(map.root(), Ok((1000, 7)));
        assert_eq!(map.to_string().parse(), Ok(map.clone()));
        let user = |uid, gid, groups: &[u32]| User {
            uid,
            gid,
            groups: groups.to_vec(),
            home: "/".to_owned(),
        };
        assert_eq!(map.check(&user(10, 99, &[5])), Ok(()));
        assert_eq!(map.check(&user(1, 0, &[])), Err(MapError::User { kind: "user", id: 1 }));
        let group = |id| Err(MapError::User { kind: "group", id });
        assert_eq!(map.check(&user(0, 100, &[])), group(100));
        assert_eq!(map.check(&user(0, 0, &[5, 300])), group(300));
        let rootless: IdMap = "1:1:1\n0:1:1".parse().unwrap();
        assert_eq!(rootless.root(), Err(MapError::NoRoot));
    }

    #[test]
    fn a_range_is_free_when_nobody_has_it() {
        let map =
            |users: &str, groups: &str| -> IdMap { format!("{users}\n{groups}").parse().unwrap() };
        let size = |size| NonZeroU32::new(size).unwrap();
        let check = |users: &str, groups: &str, wanted, taken: &[IdMap], expect: &str| {
            let files = SubIdFiles { users, groups };
            let found = match auto(files, size(wanted), taken) {
                Ok(map) => map.to_string().trim().replace('\n', " "),
                Err(error) => error.to_string(),
            };
            assert!(found.contains(expect), "{users} {groups}: {found}, not {expect}");
        };
        let (one, other) = ("containers:1000:200\n", "root:5:5\nquire:100:10\ncontainers:7:99\n");
        check(one, other, 10, &[], "0:1000:10 0:100:10");
        check(one, one, 100, &[map("0:1050:10", "0:5:1")], "0:1060:100 0:1000:100");
        check(one, one, 100, &[map("0:1100:1", "0:900:101")], "0:1000:100 0:1001:100");
        check(one, one, 101, &[map("0:1100:1", "0:1:1")], "has no 101 consecutive free ids");
        check(one, one, 201, &[], "/etc/subuid");
        check("quire:9:1\nquire:50:5", one, 5, &[], "0:50:5");
        check(one, "", 1, &[], "/etc/subgid has no entry for quire or containers");
        check("", one, 1, &[], "/etc/subuid has no entry");
        // Malformed lines are no entries.
        check("quire\nquire:x:1\nquire:1\nquire:5:0\n\n#", "", 1, &[], "0:2000224256:1");
        check("u:2000224256:65536\n", "", 10, &[], "0:2000289792:10 0:2000224256:10");
        check("", "", u32::MAX, &[], "a range of Quire");
        let first = auto(SubIdFiles { users: "", groups: "" }, SIZE, &[]).unwrap();
        check("", "", 65_536, &[first], "0:2000289792:65536 0:2000289792:65536");
        check("quire:18446744073709551615:5", "quire:4294967290:99", 1, &[], "/etc/subuid");
        check("quire:4294967290:99", "quire:4294967290:99", 5, &[], "0:4294967290:5");
        check(
            "quire:4294967290:99",
            "quire:4294967290:99",
            6,
            &[],
            "has no 6 consecutive free ids",
        );
    }

    #[test]
    fn bundles_say_it() {
        let map: IdMap = "0:1000:1,1:5000:3\n0:7:100".parse().unwrap();
        let namespaces = vec![SpecNamespace::new("pid")];
        let mut linux = SpecLinux { namespaces, ..SpecLinux::default() };
        map.write(&mut linux);
        let expect = serde_json::json!({
            "namespaces": [{"type": "pid"}, {"type": "user"}],
            "uidMappings": [{"containerID": 0, "hostID": 1000, "size": 1},
                            {"containerID": 1, "hostID": 5000, "size": 3}],
            "gidMappings": [{"containerID": 0, "hostID": 7, "size": 100}],
        });
        assert_eq!(linux, serde_json::from_value(expect).unwrap());
    }
}
