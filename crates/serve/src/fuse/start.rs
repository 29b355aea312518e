//! Starts holder and server of a file system.

use std::cell::Cell;
use std::os::fd::AsFd as _;

use kernel::fuse::FuseConnection;
use kernel::mount::FewMounts;
use kernel::process::{ProcessError, start_server};

use super::open::{StoreTree, descriptors};
use super::session::serve;
use super::supervisor::hold;

/// The mount namespace of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounts {
    /// The one of the process that starts it, for those who may not have another one.
    Same,
    /// Another one, which has neither the mount that is served nor others of the caller's. A file system is freed only when
    /// no namespace has it mounted. If the server had it mounted, it would wait for its own end.
    Few,
}

/// A server that is not started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a server")]
pub struct StartError(#[from] ProcessError);

/// Serves a tree in the background, until its file system is gone. This process must have one thread. With [`Mounts::Few`],
/// the file system may be attached only after this.
///
/// # Errors
/// [`StartError`].
pub fn start(
    connection: &FuseConnection,
    tree: &StoreTree,
    mounts: Mounts,
) -> Result<(), StartError> {
    let keep = [vec![connection.as_fd()], descriptors(tree)].concat();
    let few = Cell::new(None);
    let prepare = || {
        if mounts == Mounts::Few {
            few.set(Some(FewMounts::unshare()?));
        }
        Ok(())
    };
    let serve = || {
        // It takes longer, and nothing has to wait for it.
        if let Some(few) = few.take() {
            few.detach_others();
        }
        // Readers get errors when the connection is closed, whatever ended it.
        let _ended = hold(connection, |connection| serve(connection, tree));
    };
    start_server(&keep, prepare, serve)?;
    Ok(())
}
