//! The process that keeps the FUSE connection open besides the server. When the server dies, this process starts the
//! next one, and the kernel resends unanswered requests, so readers wait and get their bytes. A server that has nothing
//! to do may exit.

use std::time::{Duration, Instant};

use kernel::fuse::{FuseConnection, FuseError, Resent};
use kernel::process::{Exit, ProcessError, start_behind};

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
    /// A server cannot be started, or waited for.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The FUSE connection failed.
    #[error(transparent)]
    Connection(#[from] FuseError),
}

/// Starts one server after another until the file system is unmounted. `serve` runs in a child of this process, which
/// must have one thread. A server exits with 0 when the file system is unmounted, or when no requests come. In the
/// latter case, the next request starts the next server.
///
/// # Errors
/// On an error, readers wait until the last descriptor of the connection is closed.
pub(super) fn hold(
    connection: &FuseConnection,
    serve: impl Fn(&FuseConnection) -> Result<(), FuseError>,
) -> Result<Ended, HolderError> {
    let mut deaths: Vec<Instant> = Vec::new();
    loop {
        let (_, server) = start_behind(|_| {
            let served = own(connection).and_then(|own| serve(own.as_ref().unwrap_or(connection)));
            // A panic gives an exit code other than 0, which the parent checks.
            assert!(served.is_ok(), "{served:?}");
        })?;
        let exit = server.wait()?;
        if !connection.is_mounted()? {
            return Ok(Ended::Over);
        }
        if exit == Exit::Code(0) {
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
