//! The process that has the connection besides the server. When that dies, it starts the next one, and the kernel asks again
//! what nobody replied to: readers wait, and get their bytes.

use std::time::{Duration, Instant};

use kernel::fuse::{FuseConnection, FuseError, Resent};
use kernel::process::{Exit, ProcessError, start_behind};

/// So many servers may die in [`WITHIN`]. More would only take time from others: readers get errors then.
const DEATHS_MAX: usize = 8;
const WITHIN: Duration = Duration::from_secs(60);

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The file system is gone.
    Over,
    /// Servers died again and again.
    GaveUp,
}

/// An error of a holder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum HolderError {
    /// No server can be started, or waited for.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The connection.
    #[error(transparent)]
    Connection(#[from] FuseError),
}

/// Has one server after the other take requests, until the file system is gone. `serve` is what a server does, in a child of
/// this process, which must have one thread. Servers end with 0 when the file system is gone.
///
/// # Errors
/// [`HolderError`]. Readers wait until the last descriptor of the connection is closed.
pub(super) fn hold(
    connection: &FuseConnection,
    serve: impl Fn(&FuseConnection) -> Result<(), FuseError>,
) -> Result<Ended, HolderError> {
    let mut deaths: Vec<Instant> = Vec::new();
    loop {
        let (_, server) = start_behind(|_| {
            let served = own(connection).and_then(|own| serve(own.as_ref().unwrap_or(connection)));
            // The parent is told by the code.
            assert!(served.is_ok(), "{served:?}");
        })?;
        if server.wait()? == Exit::Code(0) || !connection.is_mounted()? {
            return Ok(Ended::Over);
        }
        deaths.retain(|it| it.elapsed() < WITHIN);
        deaths.push(Instant::now());
        if deaths.len() > DEATHS_MAX {
            return Ok(Ended::GaveUp);
        }
        // What it had taken is asked again. Where the kernel cannot, it failed with the server's own descriptor.
        connection.resend()?;
    }
}

/// The server's own way to requests, if the kernel would not ask again what was taken: before Linux 6.9.
fn own(connection: &FuseConnection) -> Result<Option<FuseConnection>, FuseError> {
    match connection.resend()? {
        Resent::Yes => Ok(None),
        Resent::Unsupported => connection.sibling().map(Some),
    }
}
