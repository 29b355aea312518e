//! A user namespace of this process's own, in which an ordinary user may mount.
#![expect(unsafe_code, reason = "fork, and unshare, which rustix calls unsafe")]

use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::path::PathBuf;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, getpid};
use rustix::thread::UnshareFlags;

use super::ProcessError;
use super::namespaces::{IdRange, map_text};

/// Who gives a namespace its ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapper {
    /// This process: each map may have one range with one id, which is its own.
    Own,
    /// The programs `newuidmap` and `newgidmap`, which let a user have what subuid(5) and subgid(5) give it.
    Programs {
        /// The path of `newuidmap`.
        users: PathBuf,
        /// The path of `newgidmap`.
        groups: PathBuf,
    },
}

/// Why this process has no namespace of its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnNamespaceError {
    /// The kernel refused.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A program did not give it ids.
    #[error("{0}")]
    Program(String),
}

/// Moves this process, which must have one thread, into a new user namespace with these ids, and into a mount namespace that
/// belongs to it. It has all rights there. Its ids are those that the maps give to its own.
///
/// # Errors
/// [`OwnNamespaceError`]. Then this process may be in the new namespaces without ids, and should end.
pub fn enter_own(
    mapper: &Mapper,
    users: &[IdRange],
    groups: &[IdRange],
) -> Result<(), OwnNamespaceError> {
    let step = "make a user namespace";
    let failed = |errno| match errno {
        // The kernel's word for a limit here (user_namespaces(7)), which has nothing to do with disks.
        Errno::NOSPC | Errno::USERS => ProcessError::Limit { step },
        source => ProcessError::Call { step, source },
    };
    let of_io = |error: std::io::Error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    let helper = match mapper {
        Mapper::Own => None,
        Mapper::Programs { users: for_users, groups: for_groups } => {
            let calls = [(for_users, users), (for_groups, groups)].map(|(program, ranges)| {
                let mut command = Command::new(program);
                command.arg(getpid().as_raw_nonzero().to_string());
                let text = map_text(ranges);
                command.args(text.split_whitespace()).env_clear();
                command
            });
            Some(Helper::fork(calls).map_err(of_io)?)
        }
    };
    let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS;
    // SAFETY: without FILES, nobody loses sight of a descriptor.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(failed)?;
    match helper {
        Some(helper) => helper.finish().map_err(OwnNamespaceError::Program)?,
        None => {
            let write = |name: &str, text: &str| {
                std::fs::write(format!("/proc/self/{name}"), text).map_err(of_io)
            };
            write("uid_map", &map_text(users))?;
            // An ordinary user may not drop groups (user_namespaces(7)).
            write("setgroups", "deny")?;
            write("gid_map", &map_text(groups))?;
        }
    }
    Ok(())
}

/// A child that stays outside, and calls programs as soon as its parent is in its new namespace.
struct Helper {
    child: Pid,
    go_on: PipeWriter,
    said: PipeReader,
}

impl Helper {
    fn fork(calls: [Command; 2]) -> std::io::Result<Self> {
        let (is_told, go_on) = std::io::pipe()?;
        let (said, says) = std::io::pipe()?;
        // SAFETY: this process has one thread, or the parent's unshare fails; a child with locks that nobody frees waits for
        // the end of its pipe at most.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error()),
            0 => {
                drop((go_on, said));
                let code = i32::from(!call(is_told, says, calls));
                // SAFETY: _exit runs no destructors or handlers of the parent's.
                unsafe { libc::_exit(code) }
            }
            child => {
                let child = Pid::from_raw(child).expect("fork answers a pid");
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
            _ if text.is_empty() => Err("the programs that map ids were ended".to_owned()),
            _ => Err(text),
        }
    }
}

/// What the child does. The parent has gone if it hears nothing.
fn call(mut is_told: PipeReader, mut says: PipeWriter, calls: [Command; 2]) -> bool {
    if is_told.read_exact(&mut [0]).is_err() {
        return false;
    }
    for mut command in calls {
        let program = command.get_program().display().to_string();
        let why = match command.output() {
            Ok(output) if output.status.success() => continue,
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        let _nobody_hears = says.write_all(format!("{program}: {why}").as_bytes());
        return false;
    }
    true
}
