//! Starts holder and server of a file system that is mounted already.

use std::os::fd::AsFd as _;

use kernel::fuse::FuseConnection;
use kernel::mount::Propagation;
use kernel::process::{ProcessError, own_mounts, start_server};

use super::holder::hold;
use super::open::{StoreTree, descriptors};
use super::session::serve;

/// Whose mounts a server sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounts {
    /// Those of the process that starts it.
    Same,
    /// A copy of what is attached now: what is attached later in the namespace of the process that starts it can be freed.
    Own,
}

/// A server that is not started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a server")]
pub struct StartError(#[from] ProcessError);

/// Serves a tree in the background, until its file system is gone. This process must have one thread.
///
/// # Errors
/// [`StartError`].
pub fn start(
    connection: &FuseConnection,
    tree: &StoreTree,
    mounts: Mounts,
) -> Result<(), StartError> {
    let keep = [vec![connection.as_fd()], descriptors(tree)].concat();
    start_server(&keep, || {
        if mounts == Mounts::Own
            && let Err(error) = own_mounts(Propagation::Downstream)
        {
            tracing::error!(%error, "mounts of the container may outlive it");
        }
        // Whatever ends it, nobody hears of it: readers get errors when the connection is closed.
        let _ended = hold(connection, |connection| serve(connection, tree));
    })?;
    Ok(())
}
