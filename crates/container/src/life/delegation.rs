//! Cgroups that are delegated to users, who may make others below and limit them.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD};
use rustix::io::Errno;

use crate::bundle::Controller;
use crate::life::hierarchy::{CGROUP, CGROUPS, is_unified};

/// Why a user cannot limit a container.
#[derive(Debug, thiserror::Error)]
pub enum NotDelegated {
    /// Only version 2 is given to users.
    #[error(
        "users have no cgroups of version 1, which this host uses; version 2 alone is there with \
         `systemd.unified_cgroup_hierarchy=1` on the kernel's command line"
    )]
    Version,
    /// This process sees no cgroups, or not its own.
    #[error("this process does not see its own cgroup below {CGROUPS}: mount cgroup2 there")]
    Unseeing,
    /// The one that this process is in belongs to somebody else, or to systemd.
    #[error(
        "no cgroup was delegated to this user; with systemd this helps: `systemd-run --user \
         --scope -p Delegate=yes quire ...`"
    )]
    Others,
    /// It is the user's, but the user's systemd may go on with it.
    #[error(
        "the cgroup is systemd's; this helps: `systemd-run --user --scope -p Delegate=yes quire ...`"
    )]
    Unmarked(Unmarked),
    /// It has no controllers, or none that is wanted.
    #[error(
        "the controllers that it needs were not delegated to this user: with systemd, `Delegate=` \
         in a drop-in of user@.service names them"
    )]
    Controllers,
    /// What is above both this process and a container belongs to somebody else.
    #[error(
        "no program can be moved from here into its cgroup; with systemd this helps: `systemd-run \
         --user --scope quire exec ...`"
    )]
    Apart,
    /// Processes of another process namespace are in there. A cgroup with processes gives its own no controllers.
    #[error(
        "processes in cgroup {0} cannot be moved from there, since they are not seen from here: \
         call quire in a cgroup of its own"
    )]
    Unseen(String),
    /// New processes came as fast as others were moved.
    #[error(
        "processes in cgroup {0} cannot be moved from there, since there are always new ones: \
         call quire in a cgroup of its own"
    )]
    Busy(String),
    /// The kernel refused something.
    #[error("cannot use cgroup {path}")]
    Kernel {
        /// Its directory, or a file in there.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Is there where systemd is the first program. Source: sd_booted(3).
const SYSTEMD: &str = "/run/systemd/system";

/// The last component of the cgroup that gets processes out of the way of controllers. No container's is called that.
const ASIDE: &str = "quire";

/// How often it is looked for processes that have to move. Each round takes all but those that were born meanwhile.
const ROUNDS: u32 = 100;

/// A cgroup of version 2 that was delegated to a user, who may make others below. Source: Linux
/// `Documentation/admin-guide/cgroup-v2.rst`, "Delegation".
#[derive(Debug)]
pub struct Delegated {
    /// From the root of the hierarchy, with a slash in front.
    path: String,
}

impl Delegated {
    /// The one that this process is in.
    ///
    /// # Errors
    /// [`NotDelegated`] unless this user may change it.
    pub fn own() -> Result<Self, NotDelegated> {
        Self::of(&own_path()?)
    }

    fn of(path: &str) -> Result<Self, NotDelegated> {
        let at = |path: &str| Self { path: path.trim_end_matches('/').to_owned() };
        let above = path.strip_suffix(ASIDE).and_then(|it| it.strip_suffix('/')).map(at);
        // An earlier call has moved this process.
        if let Some(above) = above.filter(|it| it.is_delegated() && it.is_open()) {
            return Ok(above);
        }
        let found = at(path);
        if !is_unified(&found.place()) {
            let has_others = is_unified(Path::new(CGROUPS));
            return Err(if has_others { NotDelegated::Unseeing } else { version() });
        }
        match (found.is_own(), found.is_marked()) {
            (true, true) => Ok(found),
            (true, false) => Err(NotDelegated::Unmarked(Unmarked(found.path))),
            (false, _) => Err(NotDelegated::Others),
        }
    }

    /// Whether this user may change it.
    fn is_own(&self) -> bool {
        let place = self.place();
        let needed = ["", "cgroup.procs", "cgroup.subtree_control"];
        needed.iter().all(|name| may_write(&place.join(name)))
    }

    /// Whether systemd leaves it alone. What it runs for a user belongs to that user, and it goes on with that as it likes,
    /// unless it says that it does not. Source: systemd, "Control Group APIs and Delegation".
    fn is_marked(&self) -> bool {
        if !Path::new(SYSTEMD).exists() {
            return true;
        }
        let mut path = &*self.path;
        while let Some((above, name)) = path.rsplit_once('/') {
            // The scopes that we have asked for are delegated.
            if is_scope(name) || has_mark(&place(path)) {
                return true;
            }
            // What is above a unit is not its own.
            if UNITS.iter().any(|it| name.ends_with(it)) {
                return false;
            }
            path = above;
        }
        false
    }

    fn is_delegated(&self) -> bool {
        self.is_own() && self.is_marked()
    }

    /// Whether those below it have controllers.
    fn is_open(&self) -> bool {
        let open = std::fs::read_to_string(self.place().join("cgroup.subtree_control"));
        open.is_ok_and(|it| !it.trim().is_empty())
    }

    /// Which of these controllers it has.
    fn has(&self, wanted: &[Controller]) -> Vec<Controller> {
        let all = std::fs::read_to_string(self.place().join("cgroup.controllers"));
        let all = all.unwrap_or_default();
        let has = |it: &&Controller| all.split_whitespace().any(|name| name == it.name());
        wanted.iter().filter(has).copied().collect()
    }

    /// The names of its controllers that set limits.
    #[must_use]
    pub fn controllers(&self) -> Vec<&'static str> {
        self.has(&Controller::ALL).into_iter().map(Controller::name).collect()
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    fn place(&self) -> PathBuf {
        place(&self.path)
    }

    /// Makes it ready for containers with limits, and returns which of these controllers they get. All processes that are in
    /// it are in one below from then on: the kernel wants it like that.
    ///
    /// # Errors
    /// [`NotDelegated`] if it has none of them, or a process has to stay.
    pub(super) fn open(&self, wanted: &[Controller]) -> Result<Vec<Controller>, NotDelegated> {
        let wanted = self.has(wanted);
        if wanted.is_empty() {
            return Err(NotDelegated::Controllers);
        }
        let place = self.place();
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| NotDelegated::Kernel { path, source }
        };
        let aside = place.join(ASIDE);
        match std::fs::create_dir(&aside) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(failed(&aside)(error));
            }
            _ => {}
        }
        self.empty(&place.join("cgroup.procs"), &aside.join("cgroup.procs"))?;
        let control = place.join("cgroup.subtree_control");
        let mut open = Vec::new();
        for controller in wanted {
            match std::fs::write(&control, format!("+{}", controller.name())) {
                Ok(()) => open.push(controller),
                Err(error) => tracing::debug!(%error, ?controller, "not to be had"),
            }
        }
        Ok(open)
    }

    fn empty(&self, from: &Path, to: &Path) -> Result<(), NotDelegated> {
        let failed = |path: &Path, source| NotDelegated::Kernel { path: path.to_owned(), source };
        for _ in 0..ROUNDS {
            let text = std::fs::read_to_string(from).map_err(|error| failed(from, error))?;
            if text.is_empty() {
                return Ok(());
            }
            for process in text.lines() {
                // Source: `cgroup-v2.rst`, "Namespace": a process that is not seen has no number.
                if process == "0" {
                    return Err(NotDelegated::Unseen(self.path.clone()));
                }
                match std::fs::write(to, process) {
                    // It has ended.
                    Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
                    moved => moved.map_err(|error| failed(to, error))?,
                }
            }
        }
        Err(NotDelegated::Busy(self.path.clone()))
    }
}

/// The cgroup of version 2 of this process, as it sees it. Source: cgroups(7), `/proc/pid/cgroup`.
fn own_path() -> Result<String, NotDelegated> {
    let path = Path::new("/proc/self/cgroup");
    let text = std::fs::read_to_string(path)
        .map_err(|source| NotDelegated::Kernel { path: path.to_owned(), source })?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::"));
    let Some(own) = own else { return Err(version()) };
    // One that is not below what a namespace shows begins with `/..`.
    let is_outside = own.split('/').any(|it| it == "..");
    if is_outside { Err(NotDelegated::Unseeing) } else { Ok(own.to_owned()) }
}

/// Why there is no cgroup of version 2.
fn version() -> NotDelegated {
    let is_there = std::fs::read_dir(CGROUPS).is_ok_and(|mut it| it.next().is_some());
    if is_there { NotDelegated::Version } else { NotDelegated::Unseeing }
}

/// By its path from the root.
fn place(path: &str) -> PathBuf {
    Path::new(CGROUPS).join(path.trim_start_matches('/'))
}

/// By this xattr systemd says of a cgroup that it leaves all below it to others. Source: systemd, "Control Group APIs and
/// Delegation". The manager of a user does not say it: found by a try with systemd 262.
const MARK: &str = "user.delegate";

fn has_mark(place: &Path) -> bool {
    let mut value = [0; 8];
    let length = rustix::fs::getxattr(place, MARK, &mut value);
    length.is_ok_and(|it| value.get(..it) == Some(b"1"))
}

/// A cgroup of a user's of which only systemd knows whether it is delegated.
#[derive(Debug)]
pub struct Unmarked(String);

impl Unmarked {
    /// The unit that it belongs to.
    #[must_use]
    pub fn unit(&self) -> Option<&str> {
        self.0.rsplit('/').find(|it| UNITS.iter().any(|end| it.ends_with(end)))
    }

    /// Marks it as delegated, as systemd has said that it is.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn mark(&self) -> io::Result<()> {
        let flags = rustix::fs::XattrFlags::empty();
        Ok(rustix::fs::setxattr(place(&self.0), MARK, b"1", flags)?)
    }
}

/// The name of a scope, of those that [`Delegated::own`] knows to be delegated. `unique` has no slash.
#[must_use]
pub fn scope(unique: &str) -> String {
    format!("{}{unique}{SCOPE}", &CGROUP[1..])
}

/// What the names of scopes end with. Source: systemd.scope(5).
const SCOPE: &str = ".scope";

/// What the names of cgroups of units end with. Source: systemd.unit(5).
const UNITS: [&str; 3] = [SCOPE, ".service", ".slice"];

fn is_scope(name: &str) -> bool {
    name.starts_with(&CGROUP[1..]) && name.ends_with(SCOPE)
}

/// Whether this process is in a cgroup with this last name.
#[must_use]
pub fn is_in(name: &str) -> bool {
    own_path().is_ok_and(|it| it.rsplit('/').next() == Some(name))
}

fn may_write(path: &Path) -> bool {
    rustix::fs::accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
}

/// Whether this process may move others into this cgroup of a container of a user's.
///
/// # Errors
/// [`NotDelegated::Apart`] if the nearest cgroup that has both of them below is not this user's. Source: Linux
/// `Documentation/admin-guide/cgroup-v2.rst`, "Delegation Containment".
pub fn may_join(cgroup: &str) -> Result<(), NotDelegated> {
    let own = own_path()?;
    let procs = place(&common(&own, cgroup)).join("cgroup.procs");
    if may_write(&procs) { Ok(()) } else { Err(NotDelegated::Apart) }
}

/// The nearest cgroup that is both or above them.
fn common(one: &str, other: &str) -> String {
    let names = one.split('/').zip(other.split('/'));
    names.take_while(|(one, other)| one == other).map(|it| it.0).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_have_in_common() {
        for (one, other, expect) in [
            ("/a/b", "/a/c/d", "/a"),
            ("/a/b", "/a/b/c", "/a/b"),
            ("/a/b", "/a/b", "/a/b"),
            ("/a/bc", "/a/b", "/a"),
            ("/a", "/b", ""),
            ("/", "/b", ""),
        ] {
            assert_eq!(common(one, other), expect, "{one} {other}");
            assert_eq!(common(other, one), expect, "{other} {one}");
        }
    }
}
