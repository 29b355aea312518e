//! Mounts file systems with `fusermount3`, which lets unprivileged users mount on the host.

use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::process::{Command, Stdio};

use kernel::fuse::FuseConnection;
use kernel::process::{Exit, ProcessError, Setup, spawn};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::descriptor;

/// Environment variable with the number of the socket to which `fusermount3` sends the descriptor. Source: libfuse
/// `util/fusermount.c`.
const SOCKET: &str = "_FUSE_COMMFD";

/// Whether programs on a mount can be executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Executable {
    Yes,
    No,
}

/// Why a mount or an unmount failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// `fusermount3` cannot be started.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// `fusermount3` failed with this message.
    #[error("{0}")]
    Refused(String),
    /// `fusermount3` sent no descriptor.
    #[error("cannot get a FUSE connection from fusermount3")]
    Socket(#[source] io::Error),
}

/// Mounts a file system on a directory, for its user only: read-only, nosuid and nodev. `program` is the path of
/// `fusermount3`; `name` is the source in lists of mounts.
pub fn mount(
    program: &Path,
    directory: &Path,
    name: &str,
    executable: Executable,
) -> Result<FuseConnection, HostError> {
    let failed = |errno: Errno| HostError::Socket(errno.into());
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    let mut command = Command::new(program);
    // `fusermount3` splits options at commas.
    let name = name.replace('\\', "\\\\").replace(',', "\\,");
    command.env_clear().env(SOCKET, theirs.as_raw_fd().to_string());
    let exec = match executable {
        Executable::Yes => "exec",
        Executable::No => "noexec",
    };
    command.args(["-o", &format!("ro,nosuid,nodev,{exec},subtype=quire,fsname={name}"), "--"]);
    command.arg(directory);
    call(command, &Setup { keep: &[theirs.as_fd()], ..Setup::default() })?;
    drop(theirs);
    // The descriptor comes with a message of one byte.
    let received = descriptor::receive(ours.as_fd(), &mut [0]).map_err(HostError::Socket)?;
    let connection = received.descriptor.ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
    connection.map(FuseConnection::adopt).map_err(HostError::Socket)
}

/// Unmounts such a mount: immediately, or, if `lazy`, when it is no longer in use.
pub fn unmount(program: &Path, directory: &Path, lazy: bool) -> Result<(), HostError> {
    let mut command = Command::new(program);
    command.env_clear().arg("-u");
    if lazy {
        command.arg("-z");
    }
    command.arg("--").arg(directory);
    call(command, &Setup::default())
}

fn call(mut command: Command, setup: &Setup<'_>) -> Result<(), HostError> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let program = command.get_program().display().to_string();
    let mut started = spawn(command, setup)?;
    let mut said = String::new();
    if let Some(stderr) = &mut started.stderr {
        // The exit code decides; the output is only for the message.
        let _lossy = stderr.take(4096).read_to_string(&mut said);
    }
    match started.process.wait()? {
        Exit::Code(0) => Ok(()),
        _ if said.trim().is_empty() => Err(HostError::Refused(format!("{program} failed"))),
        _ => {
            // `fusermount3` looks up its mounts in this file. Systems that have booted have it, containers may not.
            let hint = match said.contains("/etc/mtab") {
                true => ": as root, `ln -s ../proc/self/mounts /etc/mtab`",
                false => "",
            };
            Err(HostError::Refused(format!("{}{hint}", said.trim())))
        }
    }
}
