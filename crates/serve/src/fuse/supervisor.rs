//! The process that keeps the FUSE connection open besides the server. When the server dies, this process starts the
//! next one, and the kernel resends unanswered requests, so readers wait and get their bytes. A server that has nothing
//! to do may exit.

use std::time::{Duration, Instant};

use kernel::fuse::{FuseConnection, FuseError, Resent};
use kernel::process::{Exit, ProcessError, start_behind};
use rustix::process::{Pid, getpid, getppid};

/// Largest number of servers that may die within [`WITHIN`]. After more deaths, readers get errors, because
/// restarting would only use up the processor.
const DEATHS_MAX: usize = 8;
const WITHIN: Duration = Duration::from_secs(60);

/// How serving ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The file system is unmounted everywhere.
    Over,
    /// Too many servers died.
    GaveUp,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum HolderError {
    /// A server cannot be waited for.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The FUSE connection failed.
    #[error(transparent)]
    Connection(#[from] FuseError),
}

/// The process that starts the next server when this one exits.
#[derive(Debug, Clone, Copy)]
pub(super) enum Successor {
    /// The holder: this process itself, between two servers.
    Here,
    /// The holder, as long as it is the parent of this process.
    Parent(Pid),
}

impl Successor {
    /// Whether the process lives. Without it, a server that exits closes the connection.
    pub(super) fn is_there(self) -> bool {
        match self {
            Self::Here => true,
            Self::Parent(holder) => getppid() == Some(holder),
        }
    }
}

/// Starts one server after another until the file system is unmounted. `serve` runs in a child of this process, which
/// must have one thread. A server exits with 0 when the file system is unmounted, or when no requests come. In the
/// latter case, the next request starts the next server.
///
/// If no child can be started, `serve` runs in this process: the user may have too many processes, and those that wait
/// for files would not become fewer. Otherwise, one container with too many processes would end the file systems of all
/// others.
///
/// # Errors
/// On an error, readers wait until the last descriptor of the connection is closed.
pub(super) fn hold(
    connection: &FuseConnection,
    serve: impl Fn(&FuseConnection, Successor) -> Result<(), FuseError>,
) -> Result<Ended, HolderError> {
    let mut deaths: Vec<Instant> = Vec::new();
    let holder = getpid();
    loop {
        let started = start_behind(|_| {
            let next = Successor::Parent(holder);
            let served =
                own(connection).and_then(|own| serve(own.as_ref().unwrap_or(connection), next));
            // A panic gives an exit code other than 0, which the parent checks.
            assert!(served.is_ok(), "{served:?}");
        });
        let is_well = match started {
            Ok((answer, server)) => {
                drop(answer);
                server.wait()? == Exit::Code(0)
            }
            Err(error) => {
                tracing::warn!(%error, "cannot start a server: serving in its holder");
                // A child that could not be opened may have taken requests.
                connection.resend().and_then(|_| serve(connection, Successor::Here)).is_ok()
            }
        };
        if !connection.is_mounted()? {
            return Ok(Ended::Over);
        }
        if is_well {
            connection.has_request(None)?;
            continue;
        }
        deaths.retain(|it| it.elapsed() < WITHIN);
        deaths.push(Instant::now());
        if deaths.len() > DEATHS_MAX {
            return Ok(Ended::GaveUp);
        }
        // The kernel resends the requests that the dead server had taken. A kernel that cannot resend requests has
        // already failed them, when it closed the descriptor that only the server had.
        connection.resend()?;
    }
}

/// Returns a connection for the server alone if the kernel cannot resend requests (before Linux 6.9).
fn own(connection: &FuseConnection) -> Result<Option<FuseConnection>, FuseError> {
    match connection.resend()? {
        Resent::Yes => Ok(None),
        Resent::Unsupported => connection.sibling().map(Some),
    }
}
