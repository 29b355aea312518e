//! Moves this process into a new user namespace, in which an ordinary user may mount.
#![expect(unsafe_code, reason = "fork, and unshare, which rustix calls unsafe")]

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, getpid};
use rustix::thread::UnshareFlags;

use super::ProcessError;
use super::namespaces::{IdRange, map_text, ranges_of};

/// The source of the id maps of a new user namespace.
pub enum Mapper<'a> {
    /// This process writes the maps. Each map may have a single range with a single id, which is this process's own.
    Own {
        /// Ranges of user ids.
        users: &'a [IdRange],
        /// Ranges of group ids.
        groups: &'a [IdRange],
    },
    /// The programs `newuidmap` and `newgidmap` map ids that subuid(5) and subgid(5) assign to the user.
    Programs {
        /// Paths of `newuidmap` and `newgidmap`.
        programs: [PathBuf; 2],
        /// Ranges of user ids.
        users: &'a [IdRange],
        /// Ranges of group ids.
        groups: &'a [IdRange],
        /// This process's user and group, if a namespace that has only root is acceptable when the programs refuse.
        or_own: Option<(u32, u32)>,
    },
    /// A service maps ids into a namespace without ids: this process's user and group, and other ids, each to itself.
    /// In that namespace, this process makes a second one, in which its user is root and the other ids follow. If the
    /// service maps no ids, the namespace has only root.
    Service {
        service: &'a dyn IdService,
        /// User and group of this process.
        own: (u32, u32),
    },
}

/// A service that maps ids into user namespaces.
pub trait IdService {
    /// Maps ids into a namespace without ids, whose only process is this one.
    ///
    /// # Errors
    /// The reason, as a sentence for users.
    fn give(&self, user_namespace: OwnedFd) -> Result<(), String>;

    /// Registers a namespace inside the first one, with the same ids, so that its programs may call setgroups(2).
    ///
    /// # Errors
    /// The reason, as a sentence for users.
    fn register(&self, user_namespace: OwnedFd) -> Result<(), String>;
}

impl std::fmt::Debug for Mapper<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Own { .. } => "Own",
            Self::Programs { .. } => "Programs",
            Self::Service { .. } => "Service",
        })
    }
}

/// The ids that a namespace received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapped {
    /// All requested ids.
    All,
    /// All requested ids, but programs cannot call setgroups(2).
    GroupsStay {
        /// The service's reason.
        why: String,
    },
    /// Only this process's own id, because the programs or the service mapped none.
    Own {
        /// The reason of the programs or the service.
        why: String,
    },
}

/// The error of [`enter_own`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnNamespaceError {
    /// A system call failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A program did not map the ids.
    #[error("{0}")]
    Program(String),
}

const STEP: &str = "make a user namespace";

fn failed(errno: Errno) -> ProcessError {
    match errno {
        // The kernel reports a reached limit of namespaces as ENOSPC (user_namespaces(7)); disk space is not the
        // cause.
        Errno::NOSPC | Errno::USERS => ProcessError::Limit { step: STEP },
        source => ProcessError::Call { step: STEP, source },
    }
}

fn of_io(error: &std::io::Error) -> ProcessError {
    failed(Errno::from_io_error(error).unwrap_or(Errno::IO))
}

/// Moves this process, which must have one thread, into a new user namespace with the given ids and into a mount
/// namespace that belongs to it. The process has all capabilities in them, and its ids are translated by the maps.
///
/// # Errors
/// [`OwnNamespaceError`]. The process may then be in a new namespace without ids, and should exit.
pub fn enter_own(mapper: &Mapper<'_>) -> Result<Mapped, OwnNamespaceError> {
    let both = UnshareFlags::NEWUSER | UnshareFlags::NEWNS;
    match mapper {
        Mapper::Own { users, groups } => {
            unshare(both)?;
            write_own_maps(users, groups)?;
        }
        Mapper::Programs { programs, users, groups, or_own } => {
            let calls = [(&programs[0], users), (&programs[1], groups)].map(|(program, ranges)| {
                let mut command = Command::new(program);
                command.arg(getpid().as_raw_nonzero().to_string());
                let text = map_text(ranges);
                command.args(text.split_whitespace()).env_clear();
                command
            });
            let helper = Helper::fork(|| calls.into_iter().try_for_each(call))
                .map_err(|error| of_io(&error))?;
            unshare(both)?;
            if let Err(why) = helper.finish() {
                let is_given = !read_own_map("uid_map")?.is_empty();
                let Some((user, group)) = or_own.filter(|_| !is_given) else {
                    return Err(OwnNamespaceError::Program(why));
                };
                write_root_alone(user, group)?;
                return Ok(Mapped::Own { why });
            }
        }
        Mapper::Service { service, own } => return of_service(*service, own.0, own.1),
    }
    Ok(Mapped::All)
}

fn of_service(service: &dyn IdService, user: u32, group: u32) -> Result<Mapped, OwnNamespaceError> {
    unshare(UnshareFlags::NEWUSER)?;
    let given = service.give(own_user_namespace()?);
    // The service may have mapped the ids but failed to reply in time.
    let is_given = read_own_map("uid_map").is_ok_and(|it| !it.is_empty());
    match given {
        Err(why) if !is_given => {
            write_root_alone(user, group)?;
            unshare(UnshareFlags::NEWNS)?;
            return Ok(Mapped::Own { why });
        }
        _ => {}
    }
    let users = further_inside(&read_own_map("uid_map")?, user);
    let groups = further_inside(&read_own_map("gid_map")?, group);
    go_further_inside(&users, &groups, Groups::Set)?;
    if users.len() == 1 {
        return Ok(Mapped::Own { why: "the service assigned no other ids".to_owned() });
    }
    // Runtimes and many programs call setgroups, which the service can forbid. So a child tests this call.
    let registered = service.register(own_user_namespace()?).and_then(|()| {
        let set = || rustix::thread::set_thread_groups(&[]);
        let helper = Helper::fork(|| set().map_err(|errno| format!("cannot set groups: {errno}")));
        helper.map_err(|error| error.to_string())?.finish()
    });
    match registered {
        Ok(()) => Ok(Mapped::All),
        Err(why) => {
            // If `/proc/PID/setgroups` contains "deny", runtimes do not try to set groups.
            go_further_inside(&to_themselves(&users), &to_themselves(&groups), Groups::Stay)?;
            Ok(Mapped::GroupsStay { why })
        }
    }
}

/// Whether programs in a namespace can call setgroups(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Groups {
    Set,
    Stay,
}

/// Moves this process into a user namespace and a mount namespace below its current ones.
fn go_further_inside(
    users: &[IdRange],
    groups: &[IdRange],
    setting: Groups,
) -> Result<(), OwnNamespaceError> {
    let stay = (setting == Groups::Stay).then(|| ("setgroups", "deny".to_owned()));
    let maps = [("uid_map", map_text(users)), ("gid_map", map_text(groups))];
    let process = getpid().as_raw_nonzero();
    // The kernel accepts such maps only from a process in the parent namespace (user_namespaces(7)).
    let write = move |(name, text): (&str, String)| {
        let written = std::fs::write(format!("/proc/{process}/{name}"), text);
        written.map_err(|error| format!("cannot write the {name} of a user namespace: {error}"))
    };
    let helper = Helper::fork(|| stay.into_iter().chain(maps).try_for_each(write));
    let helper = helper.map_err(|error| of_io(&error))?;
    unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNS)?;
    helper.finish().map_err(OwnNamespaceError::Program)
}

/// Returns the map of an inner namespace that has the same ids as the outer one.
fn to_themselves(ranges: &[IdRange]) -> Vec<IdRange> {
    let same = |it: &IdRange| IdRange { outside: it.inside, ..*it };
    ranges.iter().map(same).collect()
}

fn read_own_map(name: &str) -> Result<Vec<IdRange>, ProcessError> {
    let text = std::fs::read_to_string(format!("/proc/self/{name}"));
    text.map(|it| ranges_of(&it)).map_err(|error| of_io(&error))
}

fn own_user_namespace() -> Result<OwnedFd, ProcessError> {
    File::open("/proc/self/ns/user").map(OwnedFd::from).map_err(|error| of_io(&error))
}

fn unshare(flags: UnshareFlags) -> Result<(), ProcessError> {
    // SAFETY: without CLONE_FILES, all threads keep the same descriptor table.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(failed)
}

/// Maps this process's own user and group to root, as the only ids.
fn write_root_alone(user: u32, group: u32) -> Result<(), ProcessError> {
    let one = |outside| [IdRange { inside: 0, outside, count: 1 }];
    write_own_maps(&one(user), &one(group))
}

fn write_own_maps(users: &[IdRange], groups: &[IdRange]) -> Result<(), ProcessError> {
    let write = |name: &str, text: &str| {
        std::fs::write(format!("/proc/self/{name}"), text).map_err(|error| of_io(&error))
    };
    write("uid_map", &map_text(users))?;
    // The kernel accepts a group map of an ordinary user only after this (user_namespaces(7)).
    write("setgroups", "deny")?;
    write("gid_map", &map_text(groups))
}

/// Returns the map of a namespace inside one with the map `outer`: the process's own id becomes 0, and the other ids
/// of the outer namespace follow.
fn further_inside(outer: &[IdRange], own: u32) -> Vec<IdRange> {
    let mut inner = vec![IdRange { inside: 0, outside: own, count: 1 }];
    let mut next = 1_u32;
    for range in outer.iter().filter(|it| it.inside != own) {
        let Some(after) = next.checked_add(range.count) else { break };
        inner.push(IdRange { inside: next, outside: range.inside, count: range.count });
        next = after;
    }
    inner
}

/// A child that stays in the outer namespace and starts its work once its parent is in the new one.
struct Helper {
    child: Pid,
    go_on: PipeWriter,
    said: PipeReader,
}

impl Helper {
    fn fork(work: impl FnOnce() -> Result<(), String>) -> std::io::Result<Self> {
        let (is_told, go_on) = std::io::pipe()?;
        let (said, says) = std::io::pipe()?;
        // SAFETY: this process has one thread, because otherwise the parent's unshare fails. If there are more
        // threads, the child only waits until its pipe ends, and needs no lock for that.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error()),
            0 => {
                drop((go_on, said));
                let code = i32::from(!follow(is_told, says, work));
                // SAFETY: _exit runs no destructors or handlers of the parent.
                unsafe { libc::_exit(code) }
            }
            child => {
                let child = Pid::from_raw(child).expect("fork returns a pid");
                Ok(Self { child, go_on, said })
            }
        }
    }

    fn finish(self) -> Result<(), String> {
        let Self { child, mut go_on, mut said } = self;
        let told = go_on.write_all(&[1]);
        drop(go_on);
        let mut text = String::new();
        let read = said.read_to_string(&mut text);
        let status = loop {
            match rustix::process::waitpid(Some(child), WaitOptions::empty()) {
                Err(Errno::INTR) => {}
                ended => break ended.ok().flatten(),
            }
        };
        let is_well = status.and_then(|it| it.1.exit_status()) == Some(0);
        match (told, read, is_well) {
            (Ok(()), Ok(_), true) => Ok(()),
            _ if text.is_empty() => Err("the process that maps ids was killed".to_owned()),
            _ => Err(text),
        }
    }
}

/// Runs the child's work once the parent sends a byte. If the pipe ends without one, the parent has exited or failed.
fn follow(
    mut is_told: PipeReader,
    mut says: PipeWriter,
    work: impl FnOnce() -> Result<(), String>,
) -> bool {
    if is_told.read_exact(&mut [0]).is_err() {
        return false;
    }
    let done = work();
    if let Err(why) = &done {
        let _nobody_hears = says.write_all(why.as_bytes());
    }
    done.is_ok()
}

fn call(mut command: Command) -> Result<(), String> {
    let program = command.get_program().display().to_string();
    let why = match command.output() {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    Err(format!("{program}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_a_namespace_outside_follow_the_own_one() {
        let range = |inside, outside, count| IdRange { inside, outside, count };
        let outer = [range(524_288, 524_288, 65_536), range(1000, 1000, 1), range(7, 9, 2)];
        let inner = [range(0, 1000, 1), range(1, 524_288, 65_536), range(65_537, 7, 2)];
        assert_eq!(further_inside(&outer, 1000), inner);
        // A map cannot contain more ids than exist.
        let outer = [range(0, 0, u32::MAX)];
        assert_eq!(further_inside(&outer, 5), [range(0, 5, 1)]);
    }
}
