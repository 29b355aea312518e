//! The user namespace in which containers of a user without root run, and the ids that it gets.

use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use container::boot_cache::Notes;
use container::bundle::userns::{IdMap, SubIdFiles, UserName, is_transient};
use kernel::features::{Can, Feature};
use kernel::mount::OVERLAY_USER_DATA;
use kernel::process::{IdService, Mapped, Mapper, UserNamespace, Who, enter_own};
use kernel::version::KernelVersion;
#[cfg(feature = "serve")]
use serve::ids::{IDS_SOCKET, IdsService};

use crate::session::accounts::accounts;
use crate::session::{scope, system_programs};

/// This process's user in a namespace that [`enter_own_namespace`] has made.
pub(crate) const INSIDE: Who = Who { user: 0, group: 0, namespace: UserNamespace::Other };

/// Beginning of the remark for a user who has no other ids.
const ALONE: &str =
    "all files belong to the container's root, and its programs cannot become other users";

/// The programs that map the ids of `/etc/subuid` and `/etc/subgid`.
const MAPPERS: [&str; 2] = ["newuidmap", "newgidmap"];

/// Why a user has no other ids from the files.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Lack {
    /// The files list none.
    Range,
    /// The files list some, but this program is not installed.
    Program(&'static str),
    /// `/etc/subuid` and `/etc/subgid` list ranges, but this program may not map them.
    Right(PathBuf),
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ALONE}: ")?;
        let has = "this user has ranges in /etc/subuid and /etc/subgid, but";
        match self {
            Self::Range => f.write_str("this user has no range in /etc/subuid and /etc/subgid"),
            Self::Program(name) => {
                write!(f, "{has} {name} is not installed (Debian: package uidmap)")
            }
            Self::Right(path) => write!(
                f,
                "{has} {} may not map them, because it is neither setuid root nor has capabilities: install it again \
                 (Debian: package uidmap)",
                path.display()
            ),
        }
    }
}

/// Whether a container's files remain after its end. If they do, later namespaces must map the same owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    Goes,
    Stays,
}

/// Moves this process into a new user namespace with the ids of its user. Remarks describe ids that are missing in it.
pub(crate) fn enter_own_namespace(
    who: Who,
    written: Written,
    remark: &mut dyn FnMut(String),
) -> anyhow::Result<bool> {
    let ids = ids(who);
    let (users, groups) = (ids.map.users(), ids.map.groups());
    let is_kept = is_transient(who.user) || is_transient(who.group);
    let mapper = match (&ids.programs, &ids.service, written) {
        (Some(programs), _, _) => {
            // In a pod, /etc/subuid may list ids that the pod lacks.
            let or_own = (who.namespace == UserNamespace::Other).then_some((who.user, who.group));
            Mapper::Programs { programs: programs.clone(), users, groups, or_own }
        }
        (None, Some(service), Written::Goes) if !is_kept => {
            Mapper::Service { service: service.as_ref(), own: (who.user, who.group) }
        }
        (None, _, _) => Mapper::Own { users, groups },
    };
    let alone = ids.lack.as_ref().map_or_else(|| ALONE.to_owned(), ToString::to_string);
    let mapped = enter_own(&mapper).with_context(|| match obstacle() {
        Some(why) => format!("cannot run a container without root: {why}"),
        None => "cannot run a container without root, which needs a user namespace".to_owned(),
    })?;
    match (&mapper, mapped) {
        (Mapper::Own { .. }, _) if ids.service.is_some() && is_kept => remark(format!(
            "{alone}; systemd-nsresourced has no ids for users and groups with numbers from \
            524288 to 1879048191, which systemd keeps for containers"
        )),
        (Mapper::Own { .. }, _) if ids.service.is_some() => remark(format!(
            "{alone}; systemd-nsresourced assigns ids only while a container runs, so neither for \
            --writable dir nor for an ended container"
        )),
        (Mapper::Own { .. }, _) => remark(alone),
        (_, Mapped::Own { why }) => remark(format!("{alone}; {why}")),
        (_, Mapped::GroupsStay { why }) => remark(format!(
            "programs such as su and apt cannot change their groups: this user has no range in \
            /etc/subuid and /etc/subgid, and systemd-nsresourced, which assigned the ids, does \
            not allow it: {why}"
        )),
        (_, Mapped::All) => {}
    }
    Ok(true)
}

/// Returns whether a remark must be printed. Remarks about ids that a user lacks on this host are printed once per
/// boot. `who` is the user of this process.
pub(crate) fn is_news(remark: &str, who: Who) -> bool {
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR");
    let notes = Notes::of_user(who, runtime_dir.as_deref()).filter(|_| remark.starts_with(ALONE));
    notes.is_none_or(|it| it.is_news(remark))
}

/// The ids that a user can have in a namespace, and the source of the ids.
struct Ids {
    /// The map from `/etc/subuid` and `/etc/subgid`, or else with the user's own ids only.
    map: IdMap,
    /// `newuidmap` and `newgidmap`, if the files list ids for the user.
    programs: Option<[PathBuf; 2]>,
    /// The reason why the programs or ids are missing.
    lack: Option<Lack>,
    /// A service that assigns other ids for the lifetime of a namespace.
    service: Option<Box<dyn IdService>>,
}

fn ids(who: Who) -> Ids {
    let [users, groups] = SUBORDINATE.map(read_or_nothing);
    let name = name_of_user(who.user);
    let name = UserName { number: who.user, name: name.as_deref() };
    let files = SubIdFiles { users: &users, groups: &groups };
    let service = service_of_ids();
    let found = match IdMap::of_user(files, &name, who.user, who.group) {
        Some(map) => mappers(who).map(|programs| (map, programs)),
        None => Err(Lack::Range),
    };
    match found {
        Ok((map, programs)) => Ids { map, programs: Some(programs), lack: None, service },
        Err(lack) => Ids {
            map: IdMap::single(who.user, who.group),
            programs: None,
            lack: Some(lack),
            service,
        },
    }
}

/// Returns the paths of `newuidmap` and `newgidmap`, if they can map the ids of a user.
fn mappers(who: Who) -> Result<[PathBuf; 2], Lack> {
    let [users, groups] = MAPPERS.map(|name| {
        let path = system_programs::program_path(name).ok_or(Lack::Program(name))?;
        // Root may map ids without the rights of the program.
        match who.user != 0 && !gives_rights(&path) {
            true => Err(Lack::Right(path)),
            false => Ok(path),
        }
    });
    Ok([users?, groups?])
}

/// Whether the kernel runs a program with more privileges than its caller has. Source: execve(2), capabilities(7).
fn gives_rights(program: &Path) -> bool {
    let is_setuid = program.metadata().is_ok_and(|it| it.uid() == 0 && it.mode() & 0o4000 != 0);
    is_setuid || rustix::fs::getxattr(program, "security.capability", &mut [0_u8; 0]).is_ok()
}

/// Returns whether the user can mount. In a user namespace, only its root can mount, so the other users of a pod need
/// a child namespace.
pub(crate) fn has_rights(who: Who) -> bool {
    match who.namespace {
        UserNamespace::Initial => who.user == 0,
        UserNamespace::Other => who.can_mount_in_its_namespace(),
    }
}

/// Returns whether a container's files can outlive it. If systemd has assigned the ids, it takes them back when the
/// namespace ends, and then no files may have these owners. In all other cases, containers have the same ids each
/// time. `who` is the caller, outside of a container's namespace.
pub(crate) fn changes_can_stay(who: Who) -> bool {
    if has_rights(who) {
        return true;
    }
    let ids = ids(who);
    let is_kept = is_transient(who.user) || is_transient(who.group);
    ids.programs.is_some() || ids.service.is_none() || is_kept
}

#[cfg(feature = "serve")]
fn service_of_ids() -> Option<Box<dyn IdService>> {
    Path::new(IDS_SOCKET)
        .exists()
        .then(|| -> Box<dyn IdService> { Box::new(IdsService(IDS_SOCKET)) })
}

#[cfg(not(feature = "serve"))]
fn service_of_ids() -> Option<Box<dyn IdService>> {
    None
}

/// Returns the ids that a user may have in a namespace besides its own: those in the files, and those that systemd
/// assigns to any user for a time.
#[cfg(feature = "serve")]
pub(crate) fn given_ids(user: u32, group: u32) -> IdMap {
    let [users, groups] = SUBORDINATE.map(read_or_nothing);
    let files = SubIdFiles { users: &users, groups: &groups };
    let name = name_of_user(user);
    let name = UserName { number: user, name: name.as_deref() };
    let given = IdMap::of_user(files, &name, user, group);
    let given = given.unwrap_or_else(|| IdMap::single(user, group));
    if service_of_ids().is_some() { given.and_transient(files) } else { given }
}

/// Files with the ids of users and groups that users may map.
const SUBORDINATE: [&str; 2] = ["/etc/subuid", "/etc/subgid"];
/// File with the names of users.
const PASSWD: &str = "/etc/passwd";

fn read_or_nothing(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// System settings that prevent users from making namespaces: the setting, the value with which it does so, and the
/// next step. Source: Linux `Documentation/admin-guide/sysctl/user.rst`; Debian's and Ubuntu's own patches for the
/// others.
const OBSTACLES: [(&str, &str, &str); 3] = [
    (
        "/proc/sys/user/max_user_namespaces",
        "0",
        "the kernel allows no user namespaces: `sysctl user.max_user_namespaces=15000`",
    ),
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "the kernel allows user namespaces only for root: `sysctl \
        kernel.unprivileged_userns_clone=1`",
    ),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor denies user namespaces to users: load a profile for quire with `userns,`, or \
        `sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
    ),
];

fn obstacle() -> Option<&'static str> {
    let is_set =
        |file: &str, value: &str| std::fs::read_to_string(file).is_ok_and(|it| it.trim() == value);
    // If the process has its own AppArmor profile, that profile decides. Source: apparmor.d(5), `userns`.
    let label = std::fs::read_to_string("/proc/self/attr/current").unwrap_or_default();
    let has_profile = !label.is_empty() && !label.starts_with("unconfined");
    let counts = |file: &str| !(file.contains("/apparmor_") && has_profile);
    OBSTACLES.iter().find(|it| counts(it.0) && is_set(it.0, it.1)).map(|it| it.2)
}

/// Describes in one line, for people, whether and how users who are not root can run containers and mount images on
/// this host. `namespaces` is the result of a trial by `who`.
pub(crate) fn describe(who: Who, namespaces: &Feature) -> Result<String, String> {
    let (run, mount) = (describe_run(who, namespaces), describe_mount());
    let works = run.is_ok() && mount.is_ok();
    let text = |it: Result<String, String>| it.unwrap_or_else(|why| why);
    let mut ways = format!("{}; {}", text(run), text(mount));
    // If root asks, the result applies to other users, except for their cgroups.
    if who.user != 0 {
        ways = format!("{ways}; {}", scope::describe(who.user));
    }
    if works { Ok(ways) } else { Err(ways) }
}

fn describe_run(who: Who, namespaces: &Feature) -> Result<String, String> {
    let refused = (namespaces.can == Can::No).then_some(&*namespaces.reason);
    if let Some(why) = obstacle().or(refused) {
        return Err(format!("run does not work: {why}"));
    }
    let is_old = KernelVersion::running().is_some_and(|it| it < OVERLAY_USER_DATA);
    #[cfg(feature = "serve")]
    let fuse = serve::fuse::check_device();
    #[cfg(not(feature = "serve"))]
    let fuse = Err("this program was built without FUSE");
    #[cfg(feature = "serve")]
    let service = serve::mounts::access_to_mounts(Path::new(serve::mounts::MOUNTS_SOCKET));
    #[cfg(not(feature = "serve"))]
    let service: Option<Result<(), String>> = None;
    let ways = match (is_old, fuse) {
        (false, Ok(())) => "run works by FUSE, with data in the store's objects".to_owned(),
        (false, Err(why)) => format!("run works by tree (not by FUSE: {why})"),
        (true, Ok(())) => format!(
            "run works by FUSE (with data in the store's objects it needs Linux {OVERLAY_USER_DATA})"
        ),
        (true, Err(why)) => {
            return Err(format!(
                "run does not work: before Linux {OVERLAY_USER_DATA} it needs FUSE, but {why}"
            ));
        }
    };
    let ways = match service {
        Some(Ok(())) if !is_old => {
            ways.replacen("run works", "run works by the mount service, and", 1)
        }
        Some(Ok(())) | None => ways,
        Some(Err(why)) => format!("{ways} (not by the mount service: {why})"),
    };
    let ids = ids(who);
    Ok(match (&ids.programs, &ids.service) {
        _ if who.user == 0 => ways,
        (Some(_), _) => {
            let count = ids.map.users().iter().map(|it| u64::from(it.count)).sum::<u64>();
            format!("{ways}, with {count} ids inside")
        }
        (None, Some(_)) if !is_transient(who.user) && !is_transient(who.group) => {
            format!("{ways}, with ids from systemd-nsresourced inside")
        }
        (None, _) => match &ids.lack {
            Some(lack) => format!("{ways}; {lack}"),
            None => ways,
        },
    })
}

#[cfg(feature = "serve")]
fn describe_mount() -> Result<String, String> {
    let fails = |why: &dyn std::fmt::Display| format!("mount does not work: {why}");
    let program = system_programs::fusermount().map_err(|it| fails(&it))?;
    // The program also opens the device as its caller.
    serve::fuse::check_device().map_err(|it| fails(&it))?;
    Ok(format!("mount works by {}", program.display()))
}

#[cfg(not(feature = "serve"))]
fn describe_mount() -> Result<String, String> {
    Err("mount does not work: this program was built without FUSE".to_owned())
}

/// Returns the name of a user, from `/etc/passwd` or another source of the system.
pub(crate) fn name_of_user(user: u32) -> Option<String> {
    let name_in = |text: &str| {
        let found = accounts(text).find(|it| it.number == user);
        found.map(|it| it.name.to_owned())
    };
    let known = name_in(&read_or_nothing(PASSWD));
    known.or_else(|| name_in(&system_programs::getent("passwd", &user.to_string())?))
}
