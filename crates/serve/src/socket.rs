//! Creates and removes the sockets that services listen at.

use std::fs;
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _,
};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use store::Who;

/// Listens at a socket that never exists with another mode: it is created in a directory that only root can enter,
/// and renamed into place.
pub(crate) fn listen(socket: &Path, who: Who, mode: u32) -> io::Result<UnixListener> {
    let folder = socket.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    check_folder(folder, who)?;
    check_free(socket)?;
    // The name is random, because in a pod a service that was killed may have had the same process id.
    let private = tempfile::Builder::new().prefix(".quire-").tempdir_in(folder)?;
    let made = private.path().join("s");
    let listener = UnixListener::bind(&made)?;
    fs::set_permissions(&made, fs::Permissions::from_mode(mode))?;
    rustix::fs::rename(&made, socket)?;
    private.close()?;
    Ok(listener)
}

/// A socket file that this process created. [`remove`](Self::remove) leaves the file alone if another socket has
/// replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    found: Option<(u64, u64)>,
}

impl SocketFile {
    /// Remembers the socket file that is at `path` now.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), found: identity(path) }
    }

    /// Removes the file. Errors are ignored, because the next service replaces the file anyway.
    pub fn remove(self) {
        if self.found.is_some() && identity(&self.path) == self.found {
            let _removed = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// Refuses a directory in which another user could replace the socket, because clients would then mount what that
/// user's service sends.
fn check_folder(folder: &Path, who: Who) -> io::Result<()> {
    // A client uses the path as written, and the owner of a symbolic link in this path could change the link. So both
    // the written and the resolved path are checked.
    let (written, real) = (std::path::absolute(folder)?, folder.canonicalize()?);
    for above in written.ancestors().chain(real.ancestors()) {
        let found = above.symlink_metadata()?;
        let (shown, owner, mode) = (above.display(), found.uid(), found.mode());
        if owner != 0 && owner != who.user {
            return Err(io::Error::other(format!("{shown} belongs to user {owner}: {ELSEWHERE}")));
        }
        // In a sticky directory, users can rename only their own files. Source: inode(7), "The file type and mode".
        let is_open = mode & 0o002 != 0 || mode & 0o020 != 0 && found.gid() != 0;
        if found.is_dir() && is_open && mode & 0o1000 == 0 {
            return Err(io::Error::other(format!("others can write to {shown}: {ELSEWHERE}")));
        }
    }
    Ok(())
}

/// The advice at the end of each refusal.
const ELSEWHERE: &str = "choose a --socket where only root can write, such as one in /run/quire";

/// Checks that the path is free, or holds a socket at which no process listens any more. Any other file stays.
fn check_free(socket: &Path) -> io::Result<()> {
    match fs::symlink_metadata(socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => return Err(io::Error::other("the path is not a socket")),
        Err(error) => return Err(error),
    }
    match std::os::unix::net::UnixStream::connect(socket) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other(
            "another service listens on it: give each instance a separate --socket",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_of_somebody_else_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _first = UnixListener::bind(&path).unwrap();
        let own = SocketFile::at(&path);
        // Simulates a service manager that starts to listen at the path. The first file stays, so the inode numbers
        // differ.
        rustix::fs::rename(&path, folder.path().join("before")).unwrap();
        let _second = UnixListener::bind(&path).unwrap();
        own.remove();
        assert!(path.exists());
        SocketFile::at(&path).remove();
        assert!(!path.exists());
        // Removing a file that no longer exists does nothing.
        SocketFile::at(&path).remove();
    }
}
