//! `--userns`: who a container's users are on the host.

use std::fs::File;
use std::num::NonZeroU32;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context as _, bail};
use container::bundle::userns::{Files, IdMap, MapError, SIZE, auto, parse_ranges};
use container::folder;
use kernel::process::IdRange;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use store::{Liveness, Store};

use crate::args::Ids;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UserNs {
    /// `host`: themselves.
    Host,
    /// `auto[,size=COUNT]`: whoever is free.
    Auto(NonZeroU32),
    /// A map, for users and groups alike.
    Map(Ranges),
}

/// One map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<IdRange>);

/// As `--uidmap` has it.
pub(crate) fn ranges(text: &str) -> Result<Ranges, MapError> {
    parse_ranges(text).map(Ranges)
}

impl FromStr for UserNs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("auto") {
            Some("") => return Ok(Self::Auto(SIZE)),
            Some(rest) => {
                let wrong = || {
                    format!("\"{text}\": auto has size=COUNT, how many ids, as in auto,size=65536")
                };
                let size = rest.strip_prefix(",size=").ok_or_else(wrong)?;
                return size.parse().map(Self::Auto).map_err(|_error| wrong());
            }
            None if text == "host" => return Ok(Self::Host),
            None => {}
        }
        ranges(text).map(Self::Map).map_err(|error| {
            if text.starts_with(|it: char| it.is_ascii_digit()) {
                return error.to_string();
            }
            "it is host, auto[,size=COUNT] or CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…]".to_owned()
        })
    }
}

impl UserNs {
    /// Without anybody who would keep a range for it.
    pub(crate) fn fixed(&self) -> anyhow::Result<Option<IdMap>> {
        match self {
            Self::Host => Ok(None),
            Self::Map(Ranges(ranges)) => Ok(Some(IdMap::new(ranges.clone(), ranges.clone()))),
            Self::Auto(_) => bail!(
                "--userns auto is for `run`, whose container holds its ids as long as it lives: say a map, such as \
                 0:100000:65536"
            ),
        }
    }
}

impl Ids {
    /// What is asked for, if `auto` is not.
    pub(crate) fn fixed(&self) -> anyhow::Result<Option<IdMap>> {
        let ranges = |map: &Option<Ranges>| map.clone().map(|Ranges(it)| it);
        match (&self.userns, ranges(&self.uidmap), ranges(&self.gidmap)) {
            (Some(wish), ..) => wish.fixed(),
            (None, None, None) => Ok(None),
            (None, Some(users), Some(groups)) => Ok(Some(IdMap::new(users, groups))),
            (None, Some(both), None) | (None, None, Some(both)) => {
                Ok(Some(IdMap::new(both.clone(), both)))
            }
        }
    }

    /// Decides, and makes sure that whoever decides at the same time does not choose the same: until the answer is noted
    /// in the container's folder, others wait.
    pub(crate) fn claim(
        &self,
        store: &Store,
        is_asked_to_end: &dyn Fn() -> bool,
    ) -> anyhow::Result<Option<Claim>> {
        let wanted = match self.userns {
            Some(UserNs::Auto(size)) => Err(size),
            _ => match self.fixed()? {
                Some(map) => Ok(map),
                None => return Ok(None),
            },
        };
        if !rustix::process::geteuid().is_root() {
            bail!("--userns: only root can give a container's users to others of the host");
        }
        let lock = lock(store, is_asked_to_end)?;
        let map = match wanted {
            Ok(map) => map,
            Err(size) => {
                let (users, groups) = (entries("/etc/subuid")?, entries("/etc/subgid")?);
                auto(Files { users: &users, groups: &groups }, size, &taken(store)?)
                    .context("--userns auto")?
            }
        };
        // Runtimes need it, and say so in riddles.
        map.root().context("--userns")?;
        Ok(Some(Claim { map, _lock: lock }))
    }
}

/// A map that nobody else is given.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) map: IdMap,
    /// Held until the claim is dropped.
    _lock: File,
}

/// The maps of all containers that live.
fn taken(store: &Store) -> anyhow::Result<Vec<IdMap>> {
    let containers = store.containers()?.into_iter();
    let alive = containers.filter(|(_, _, liveness)| *liveness == Liveness::Alive);
    let folders = alive.map(|(id, ..)| folder::path(store, &id));
    Ok(folders.filter_map(|folder| IdMap::noted(&folder)).collect())
}

/// How often a lock is tried.
const GLANCE: std::time::Duration = std::time::Duration::from_millis(2);

fn lock(store: &Store, is_asked_to_end: &dyn Fn() -> bool) -> anyhow::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o600);
    let failed = "cannot lock the ranges of ids of the store's containers";
    let file =
        rustix::fs::openat(store.containers_fd(), ".userns.lock", flags, mode).context(failed)?;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file.into()),
            Err(Errno::WOULDBLOCK) if is_asked_to_end() => {
                bail!("interrupted while another container was given its ids")
            }
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(GLANCE),
            Err(errno) => return Err(errno).context(failed),
        }
    }
}

/// A file that need not be there.
fn entries(path: &str) -> anyhow::Result<String> {
    match std::fs::read(Path::new(path)) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {path}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_users_can_be() {
        let size = |size| UserNs::Auto(NonZeroU32::new(size).unwrap());
        let map = UserNs::Map(Ranges(vec![IdRange { inside: 0, outside: 9, count: 2 }]));
        let cases = [
            ("host", UserNs::Host),
            ("auto", size(65_536)),
            ("auto,size=9", size(9)),
            ("0:9:2", map),
        ];
        for (text, expect) in cases {
            assert_eq!(text.parse(), Ok(expect), "{text}");
        }
        let bad = [
            ("", "it is host, auto"),
            ("keep-id", "it is host, auto"),
            ("auto,", "auto has size=COUNT"),
            ("auto,size=0", "auto has size=COUNT"),
            ("auto,size=4294967296", "auto has size=COUNT"),
            ("auto:uidmapping=1", "auto has size=COUNT"),
            ("0:9:0", "has no ids"),
            ("0:9", "is no range of ids"),
        ];
        for (text, expect) in bad {
            let error = text.parse::<UserNs>().unwrap_err();
            assert!(error.contains(expect), "{text}: {error}");
        }
    }
}
