//! Starts the holder and the server of a file system.

use std::cell::Cell;
use std::os::fd::AsFd as _;

use kernel::fuse::FuseConnection;
use kernel::mount::FewMounts;
use kernel::process::{ProcessError, start_server};

use super::open::{StoreTree, descriptors};
use super::session::serve;
use super::supervisor::hold;

/// The mount namespace that a server runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounts {
    /// The namespace of the process that starts the server, for users who may not create one.
    Same,
    /// The server runs in a new mount namespace, without the served mount and the caller's other mounts. The kernel
    /// destroys a file system only when no namespace has it mounted, so a server with the mount in its namespace would
    /// never exit.
    Few,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot start a server")]
pub struct StartError(#[from] ProcessError);

/// Serves a tree in the background until its file system is unmounted. This process must have one thread. With
/// [`Mounts::Few`], the file system may be attached only after this call.
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
        // The heap is a copy of the caller's, which has planned a container. Holder and server need little of it.
        kernel::process::trim_heap();
        // The other mounts are detached here, and not in `prepare`, because this takes long and the caller need not
        // wait for it.
        if let Some(few) = few.take() {
            few.detach_others();
        }
        // When this process exits, the connection is closed and readers get errors.
        let _ended = hold(connection, |connection, next| serve(connection, tree, next));
    };
    start_server(&keep, prepare, serve)?;
    Ok(())
}
