//! Cgroups that are delegated to users, who may create child cgroups with limits.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD};
use rustix::io::Errno;

use crate::bundle::Controller;
use crate::life::cgroup::hierarchy::{CGROUP, CGROUPS, is_unified};

/// Reason why a user cannot limit a container.
#[derive(Debug, thiserror::Error)]
pub enum NotDelegated {
    /// The host uses cgroups of version 1, but only version 2 can be delegated.
    #[error(
        "users cannot use cgroups of version 1, which this host uses; add \
        `systemd.unified_cgroup_hierarchy=1` to the kernel's command line for version 2"
    )]
    Version,
    /// This process cannot see cgroups, or cannot see its own cgroup.
    #[error("the cgroup of this process is not visible below {CGROUPS}: mount cgroup2 there")]
    Unseeing,
    /// This process is in a cgroup of another user or of systemd.
    #[error(
        "no cgroup is delegated to this user; with systemd, use `systemd-run --user --scope -p \
        Delegate=yes quire ...`"
    )]
    Others,
    /// The cgroup belongs to the user, but the user's systemd manages it.
    #[error(
        "the cgroup belongs to systemd; use `systemd-run --user --scope -p Delegate=yes quire ...`"
    )]
    Unmarked(Unmarked),
    /// The cgroup has none of the requested controllers.
    #[error(
        "the required controllers are not delegated to this user: with systemd, add them to \
        `Delegate=` in a drop-in of user@.service"
    )]
    Controllers,
    /// The common ancestor of this process's cgroup and the container's belongs to another user.
    #[error(
        "this cgroup does not allow moving a program into the container's cgroup; with systemd, \
        use `systemd-run --user --scope quire exec ...`"
    )]
    Apart,
    /// The cgroup contains processes of another pid namespace, which cannot be moved. A cgroup that contains processes
    /// cannot enable controllers for its children.
    #[error(
        "cannot move the processes of cgroup {0}, because they are not visible in this PID \
        namespace: call quire in a separate cgroup"
    )]
    Unseen(String),
    /// New processes appear as fast as existing ones are moved.
    #[error(
        "cannot move the processes of cgroup {0}, because new ones keep starting: call quire in a \
        separate cgroup"
    )]
    Busy(String),
    /// The kernel refused an operation.
    #[error("cannot use cgroup {path}")]
    Kernel {
        /// The cgroup's directory, or a file in it.
        path: PathBuf,
        source: io::Error,
    },
}

/// Path that exists if systemd is the init system. Source: sd_booted(3).
const SYSTEMD: &str = "/run/systemd/system";

/// Last component of the cgroup into which processes are moved, so that its parent may have controllers. Containers
/// never have this name.
const ASIDE: &str = "quire";

/// Maximum number of rounds of moving processes. Each round moves all processes except those that are created during
/// it.
const ROUNDS: u32 = 100;

/// A cgroup (v2) that was delegated to a user, who may create child cgroups. Source: Linux
/// `Documentation/admin-guide/cgroup-v2.rst`, "Delegation".
#[derive(Debug)]
pub struct Delegated {
    /// Path below the root of the hierarchy, with a leading slash.
    path: String,
}

impl Delegated {
    /// Returns the cgroup of this process.
    ///
    /// # Errors
    /// [`NotDelegated`] unless this user may change the cgroup.
    pub fn own() -> Result<Self, NotDelegated> {
        Self::from_path(&own_path()?)
    }

    fn from_path(path: &str) -> Result<Self, NotDelegated> {
        let at = |path: &str| Self { path: path.trim_end_matches('/').to_owned() };
        let above = path.strip_suffix(ASIDE).and_then(|it| it.strip_suffix('/')).map(at);
        // An earlier call may have moved this process into the child cgroup.
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

    /// Whether this user may change the cgroup.
    fn is_own(&self) -> bool {
        let place = self.place();
        let needed = ["", "cgroup.procs", "cgroup.subtree_control"];
        needed.iter().all(|name| may_write(&place.join(name)))
    }

    /// Returns whether systemd does not manage the cgroup. The cgroups of a user's units belong to the user, but
    /// systemd manages them unless they are marked as delegated. Source: systemd, "Control Group APIs and Delegation".
    fn is_marked(&self) -> bool {
        if !Path::new(SYSTEMD).exists() {
            return true;
        }
        let mut path = &*self.path;
        while let Some((above, name)) = path.rsplit_once('/') {
            // The scopes that Quire requests are delegated.
            if is_scope(name) || has_mark(&place(path)) {
                return true;
            }
            // Marks above the unit's cgroup do not apply to the unit.
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

    /// Whether the cgroups below have controllers.
    fn is_open(&self) -> bool {
        let open = std::fs::read_to_string(self.place().join("cgroup.subtree_control"));
        open.is_ok_and(|it| !it.trim().is_empty())
    }

    /// Returns those of the `wanted` controllers that the cgroup has.
    fn has(&self, wanted: &[Controller]) -> Vec<Controller> {
        let all = std::fs::read_to_string(self.place().join("cgroup.controllers"));
        let all = all.unwrap_or_default();
        let has = |it: &&Controller| all.split_whitespace().any(|name| name == it.name());
        wanted.iter().filter(has).copied().collect()
    }

    /// Returns the names of the cgroup's controllers that set limits.
    #[must_use]
    pub fn controllers(&self) -> Vec<&'static str> {
        self.has(&Controller::ALL).into_iter().map(Controller::name).collect()
    }

    pub(in crate::life) fn path(&self) -> &str {
        &self.path
    }

    fn place(&self) -> PathBuf {
        place(&self.path)
    }

    /// Prepares the cgroup for containers with limits, and returns the `wanted` controllers that these containers get.
    /// Moves all processes of the cgroup into a child cgroup, because the kernel does not allow processes in a cgroup
    /// that enables controllers for its children.
    ///
    /// # Errors
    /// [`NotDelegated`] if the cgroup has none of the controllers, or if a process cannot be moved.
    pub(in crate::life) fn open(
        &self,
        wanted: &[Controller],
    ) -> Result<Vec<Controller>, NotDelegated> {
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
                Err(error) => tracing::debug!(%error, ?controller, "cannot enable a controller"),
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
                // A process of another pid namespace is listed as 0. Source: `cgroup-v2.rst`, "Namespace".
                if process == "0" {
                    return Err(NotDelegated::Unseen(self.path.clone()));
                }
                match std::fs::write(to, process) {
                    // The process has exited.
                    Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
                    moved => moved.map_err(|error| failed(to, error))?,
                }
            }
        }
        Err(NotDelegated::Busy(self.path.clone()))
    }
}

/// Returns the cgroup of version 2 of this process, as the process sees it. Source: cgroups(7), `/proc/pid/cgroup`.
fn own_path() -> Result<String, NotDelegated> {
    let path = Path::new("/proc/self/cgroup");
    let text = std::fs::read_to_string(path)
        .map_err(|source| NotDelegated::Kernel { path: path.to_owned(), source })?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::"));
    let Some(own) = own else { return Err(version()) };
    // A cgroup outside of the namespace's root has a path that starts with `/..`.
    let is_outside = own.split('/').any(|it| it == "..");
    if is_outside { Err(NotDelegated::Unseeing) } else { Ok(own.to_owned()) }
}

/// Returns the reason for a missing cgroup of version 2.
fn version() -> NotDelegated {
    let is_there = std::fs::read_dir(CGROUPS).is_ok_and(|mut it| it.next().is_some());
    if is_there { NotDelegated::Version } else { NotDelegated::Unseeing }
}

/// Returns the directory of a cgroup.
fn place(path: &str) -> PathBuf {
    Path::new(CGROUPS).join(path.trim_start_matches('/'))
}

/// Xattr with which systemd marks a cgroup whose descendants are managed by others. Source: systemd, "Control Group
/// APIs and Delegation". A user's systemd instance does not set this xattr, as an experiment with systemd 262 has
/// shown.
const MARK: &str = "user.delegate";

fn has_mark(place: &Path) -> bool {
    let mut value = [0; 8];
    let length = rustix::fs::getxattr(place, MARK, &mut value);
    length.is_ok_and(|it| value.get(..it) == Some(b"1"))
}

/// A user's cgroup for which only systemd knows whether it is delegated.
#[derive(Debug)]
pub struct Unmarked(String);

impl Unmarked {
    /// Returns the unit of the cgroup.
    #[must_use]
    pub fn unit(&self) -> Option<&str> {
        self.0.rsplit('/').find(|it| UNITS.iter().any(|end| it.ends_with(end)))
    }

    /// Marks the cgroup as delegated, after systemd has confirmed that it is.
    pub fn mark(&self) -> io::Result<()> {
        let flags = rustix::fs::XattrFlags::empty();
        Ok(rustix::fs::setxattr(place(&self.0), MARK, b"1", flags)?)
    }
}

/// Returns the name of a scope that [`Delegated::own`] regards as delegated. `unique` has no slash.
#[must_use]
pub fn scope(unique: &str) -> String {
    format!("{}{unique}{SCOPE}", &CGROUP[1..])
}

/// Suffix of the names of scopes. Source: systemd.scope(5).
const SCOPE: &str = ".scope";

/// Suffixes of the names of units' cgroups. Source: systemd.unit(5).
const UNITS: [&str; 3] = [SCOPE, ".service", ".slice"];

fn is_scope(name: &str) -> bool {
    name.starts_with(&CGROUP[1..]) && name.ends_with(SCOPE)
}

/// Whether this process is in a cgroup whose last component is `name`.
#[must_use]
pub fn is_in(name: &str) -> bool {
    own_path().is_ok_and(|it| it.rsplit('/').next() == Some(name))
}

fn may_write(path: &Path) -> bool {
    rustix::fs::accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
}

/// Checks that this process may move other processes into this cgroup of a user's container.
///
/// # Errors
/// [`NotDelegated::Apart`] if the nearest common ancestor of both cgroups does not belong to this user. Source: Linux
/// `Documentation/admin-guide/cgroup-v2.rst`, "Delegation Containment".
pub fn may_join(cgroup: &str) -> Result<(), NotDelegated> {
    let own = own_path()?;
    let procs = place(&common(&own, cgroup)).join("cgroup.procs");
    if may_write(&procs) { Ok(()) } else { Err(NotDelegated::Apart) }
}

/// Returns the nearest common ancestor of two cgroups, which may be one of them.
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
