//! Sockets that services listen at.

use std::fs;
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _,
};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use store::Who;

/// Listens at a socket that has this mode from its first moment: it comes to its place from a folder that only root enters.
pub(crate) fn listen(socket: &Path, who: Who, mode: u32) -> io::Result<UnixListener> {
    let folder = socket.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    check_folder(folder, who)?;
    check_free(socket)?;
    // It has a name of its own each time: in a pod, the service that was killed had the same process number.
    let private = tempfile::Builder::new().prefix(".quire-").tempdir_in(folder)?;
    let made = private.path().join("s");
    let listener = UnixListener::bind(&made)?;
    fs::set_permissions(&made, fs::Permissions::from_mode(mode))?;
    rustix::fs::rename(&made, socket)?;
    private.close()?;
    Ok(listener)
}

/// The file of a socket that was made here. It can be removed unless another one has taken its place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    found: Option<(u64, u64)>,
}

impl SocketFile {
    /// The one that is there now.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), found: identity(path) }
    }

    /// Removes it. If that fails, the next service takes its place anyway.
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

/// Refuses a folder in which another user could put a socket of their own in the place of this one: clients would mount what
/// they say.
fn check_folder(folder: &Path, who: Who) -> io::Result<()> {
    // A client takes the way as it is written: a link on it is its owner's to change.
    let (written, real) = (std::path::absolute(folder)?, folder.canonicalize()?);
    for above in written.ancestors().chain(real.ancestors()) {
        let found = above.symlink_metadata()?;
        let (shown, owner, mode) = (above.display(), found.uid(), found.mode());
        if owner != 0 && owner != who.user {
            return Err(io::Error::other(format!("{shown} belongs to user {owner}: {ELSEWHERE}")));
        }
        // In a sticky one, users rename only what is theirs. Source: inode(7), "The file type and mode".
        let is_open = mode & 0o002 != 0 || mode & 0o020 != 0 && found.gid() != 0;
        if found.is_dir() && is_open && mode & 0o1000 == 0 {
            return Err(io::Error::other(format!("others may write to {shown}: {ELSEWHERE}")));
        }
    }
    Ok(())
}

/// The way out.
const ELSEWHERE: &str =
    "choose a --socket where only root can put files, such as one in /run/quire";

/// A socket in whose place another may come: nobody listens there any more. Anything else stays.
fn check_free(socket: &Path) -> io::Result<()> {
    match fs::symlink_metadata(socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => return Err(io::Error::other("something is there that is no socket")),
        Err(error) => return Err(error),
    }
    match std::os::unix::net::UnixStream::connect(socket) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other(
            "another service listens there: each instance needs a --socket of its own",
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
        // As a service manager does that starts to listen there. Both are there, so that they have different numbers.
        rustix::fs::rename(&path, folder.path().join("before")).unwrap();
        let _second = UnixListener::bind(&path).unwrap();
        own.remove();
        assert!(path.exists());
        SocketFile::at(&path).remove();
        assert!(!path.exists());
        // One that has gone is in nobody's way.
        SocketFile::at(&path).remove();
    }
}
