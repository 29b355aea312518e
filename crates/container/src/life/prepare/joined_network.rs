//! `--network container:NAME`: a container in the network namespace of another one.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use store::{OperationError, Store};

use crate::life::init_signals::first_process;
use crate::life::lookup::{KnownContainer, KnownError, running};

/// Reason why a container cannot join another container's network.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinNetworkError {
    /// The other container does not exist or does not run.
    #[error("--network container:{name}: start that container first")]
    Absent { name: String, source: Box<KnownError> },
    /// The other container has the network of this process.
    #[error("--network container:{0}: that container has the host's network: use --network host")]
    Host(String),
    /// The other container ended during the start.
    #[error("--network container:{0}: that container has just ended")]
    Over(String),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// Opens the network namespace of a running container. It exists as long as the descriptor is open.
pub(crate) fn network_of(
    store: &Store,
    name: &str,
    is_asked_to_end: &dyn Fn() -> bool,
) -> Result<OwnedFd, JoinNetworkError> {
    let absent =
        |source| JoinNetworkError::Absent { name: name.to_owned(), source: Box::new(source) };
    let (known, _root) = running(store, name, is_asked_to_end).map_err(absent)?;
    let over = || JoinNetworkError::Over(known.id.clone());
    let pid = first_process(&known.folder).ok_or_else(over)?;
    let path = format!("/proc/{}/ns/net", pid.as_raw_nonzero());
    let failed = OperationError::of("open", "the network of another container");
    let namespace = File::open(&path).map_err(failed)?;
    // Another process could have got the pid before the open.
    if !is_first(&known, pid) {
        return Err(over());
    }
    let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let own = rustix::fs::stat("/proc/self/ns/net").map_err(io::Error::from).map_err(failed)?;
    let joined = rustix::fs::fstat(&namespace).map_err(io::Error::from).map_err(failed)?;
    if identity(own) == identity(joined) {
        return Err(JoinNetworkError::Host(known.id));
    }
    Ok(namespace.into())
}

/// Whether the pid is still that of the container's first process. The state of a container in the foreground is not
/// recorded; its pid is not reused while its command, which is the parent, lives.
fn is_first(known: &KnownContainer, pid: kernel::process::Pid) -> bool {
    match &known.state {
        Some(state) => state.process.as_ref().is_some_and(|it| it.pid() == pid && it.is_current()),
        None => first_process(&known.folder) == Some(pid),
    }
}
