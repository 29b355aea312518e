//! Login and logout: saves credentials so that [`Keyring::find_credential`] finds them, and removes them.

use std::fs::{DirBuilder, File, Metadata, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;
use serde_json::{Map, Value, json};

use super::{
    CredentialError, DOCKER_HUB_KEY, Keyring, Secret, canonical_host, canonical_key, helper_key,
    longest, read,
};
use crate::reference::DOCKER_HUB;

/// Maximum number of other logins that may replace a file while one waits.
const TURNS_MAX: usize = 1000;
/// Maximum number of symlinks to a file, as in the kernel.
const LINKS_MAX: usize = 40;

/// The storage of credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    /// A file, from which every user who may read it can read the credentials.
    File(PathBuf),
    /// A credential helper.
    Helper {
        /// NAME in the program's name `docker-credential-NAME`.
        name: String,
        /// File that names the helper.
        file: PathBuf,
    },
}

/// The result of removing the credentials for a registry, or for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// Storages from which they were removed.
    pub from: Vec<Kept>,
    /// File of another tool that still has credentials.
    pub left: Option<PathBuf>,
}

/// A helper that a file names for a registry, and the registry's name for the helper.
struct Helper {
    name: String,
    server: String,
    file: PathBuf,
}

impl Keyring {
    /// Saves a user name and password for the whole registry at `host`, at the place where they are looked up first:
    /// with the helper that a file names for the registry, or else in the first file.
    ///
    /// # Errors
    /// [`CredentialError`]. A file whose write fails is unchanged.
    pub fn save(&self, host: &str, user: &str, password: &Secret) -> Result<Kept, CredentialError> {
        if user.contains(':') {
            return Err(CredentialError::User);
        }
        let host = canonical_host(host);
        let path = self.files.first().ok_or(CredentialError::NoFile)?;
        if let Some(Helper { name, server, file }) = self.helper(host)? {
            let input = json!({"ServerURL": server, "Username": user, "Secret": password.expose()});
            let program = self.program(&name, &file)?;
            self.run(&program, "store", input.to_string().as_bytes())?;
            // Removes older entries, because lookups read entries in the order of the files, and before a file's
            // `credsStore`. Empty entries are kept, because Docker writes them to record that the helper has the
            // credentials.
            let last = self.files.iter().position(|it| *it == file).unwrap_or(0);
            for earlier in &self.files[..=last] {
                change(earlier, |auths| {
                    retain(auths, |key, entry| canonical_key(key) != host || *entry == json!({}))
                })?;
            }
            return Ok(Kept::Helper { name, file });
        }
        let auth = STANDARD.encode(format!("{user}:{}", password.expose()));
        change(path, |auths| {
            let is_ours = |key: &String| canonical_key(key) == host;
            let key = auths.keys().find(|key| is_ours(key)).cloned();
            let is_dockers = path.file_name().is_some_and(|name| name == "config.json");
            let usual = if is_dockers && host == DOCKER_HUB { DOCKER_HUB_KEY } else { host };
            let key = key.unwrap_or_else(|| usual.to_owned());
            // An entry under another name of the same host would also be found.
            auths.retain(|other, _| *other == key || !is_ours(other));
            let mut entry = match auths.get(&key) {
                Some(Value::Object(entry)) => entry.clone(),
                _ => Map::new(),
            };
            for other in ["username", "password", "identitytoken", "registrytoken"] {
                entry.shift_remove(other);
            }
            entry.insert("auth".to_owned(), auth.as_str().into());
            auths.insert(key, Value::Object(entry));
            true
        })?;
        Ok(Kept::File(path.clone()))
    }

    /// Removes the credentials for the whole registry at `host`, from the first file and from the helper that a file
    /// names for the registry.
    ///
    /// # Errors
    /// [`CredentialError`] if a file cannot be read or written, or if the helper fails.
    pub fn erase(&self, host: &str) -> Result<Removed, CredentialError> {
        let host = canonical_host(host);
        let path = self.files.first().ok_or(CredentialError::NoFile)?;
        let mut from = Vec::new();
        if change(path, |auths| retain(auths, |key, _| canonical_key(key) != host))? {
            from.push(Kept::File(path.clone()));
        }
        if let Some(Helper { name, server, file }) = self.helper(host)? {
            // Some helpers do not report that they had no credentials to erase, so this asks for the credentials
            // first.
            if self.ask(&name, &server, &file)?.is_some() {
                self.run(&self.program(&name, &file)?, "erase", server.as_bytes())?;
                from.push(Kept::Helper { name, file });
            }
        }
        Ok(Removed { from, left: self.left(|key| key == host)? })
    }

    /// Removes the credentials for all registries that the first file names, from the file and from its helpers for
    /// single registries. `left` is a file of another tool that has credentials for any registry.
    ///
    /// # Errors
    /// [`CredentialError`] if a file cannot be read or written, or if a helper fails.
    pub fn erase_all(&self) -> Result<Removed, CredentialError> {
        let path = self.files.first().ok_or(CredentialError::NoFile)?;
        let file = read::<super::File>(path)?.unwrap_or_default();
        let mut from = Vec::new();
        for key in file.auths.keys().chain(file.cred_helpers.keys()) {
            for kept in self.erase(&canonical_key(key))?.from {
                if !from.contains(&kept) {
                    from.push(kept);
                }
            }
        }
        Ok(Removed { from, left: self.left(|_| true)? })
    }

    /// Returns the first file of another tool that has credentials for a wanted registry or repository.
    fn left(&self, is_wanted: impl Fn(&str) -> bool) -> Result<Option<PathBuf>, CredentialError> {
        for other in &self.files[1..] {
            let file = read::<super::File>(other)?.unwrap_or_default();
            if file.auths.iter().any(|(key, entry)| {
                is_wanted(&canonical_key(key)) && !matches!(entry.credential(), Ok(None))
            }) {
                return Ok(Some(other.clone()));
            }
        }
        Ok(None)
    }

    /// Returns the helper that [`find_credential`](Self::find_credential) asks if no file has an entry.
    fn helper(&self, host: &str) -> Result<Option<Helper>, CredentialError> {
        for path in &self.files {
            let Some(file) = read::<super::File>(path)? else { continue };
            let found = match (longest(&file.cred_helpers, host), file.creds_store) {
                (Some((key, name)), _) => {
                    let is_hub = canonical_key(key) == DOCKER_HUB;
                    let server = if is_hub { DOCKER_HUB_KEY } else { key };
                    Some((name.clone(), server.to_owned()))
                }
                (None, Some(name)) if !name.is_empty() => Some((name, helper_key(host).to_owned())),
                _ => None,
            };
            if let Some((name, server)) = found {
                return Ok(Some(Helper { name, server, file: path.clone() }));
            }
        }
        Ok(None)
    }
}

/// Removes all other entries. Returns whether there were any.
fn retain(auths: &mut Map<String, Value>, keep: impl Fn(&String, &Value) -> bool) -> bool {
    let before = auths.len();
    auths.retain(|key, entry| keep(key, entry));
    auths.len() != before
}

/// Changes the `auths` of a file, which is replaced atomically. Its other content is kept. Returns the result of
/// `change`: whether anything changed. A lock of the file keeps the changes of other logins. `change` is called again
/// if one of them came first.
fn change(
    path: &Path,
    change: impl Fn(&mut Map<String, Value>) -> bool,
) -> Result<bool, CredentialError> {
    let malformed = || CredentialError::Malformed { path: path.to_owned(), line: 1 };
    let failed = |source| CredentialError::Write { path: path.to_owned(), source };
    for _ in 0..TURNS_MAX {
        // The lock is held until the end of the turn.
        let old =
            lock(path).map_err(|source| CredentialError::Read { path: path.to_owned(), source })?;
        if old.as_ref().is_some_and(|file| !is_at(file, path)) {
            continue;
        }
        let mut file: Map<String, Value> = read(path)?.unwrap_or_default();
        let auths = file.entry("auths").or_insert_with(|| Value::Object(Map::new()));
        if !change(auths.as_object_mut().ok_or_else(malformed)?) {
            return Ok(false);
        }
        let mut bytes = serde_json::to_vec_pretty(&file).expect("it was parsed as JSON");
        bytes.push(b'\n');
        match write(path, &bytes, old.is_some()) {
            // Another login has just made the file.
            Err(error)
                if old.is_none()
                    && error.kind() == io::ErrorKind::AlreadyExists
                    && path.exists() => {}
            written => return written.map(|()| true).map_err(failed),
        }
    }
    Err(failed(Errno::BUSY.into()))
}

/// Opens and locks a file. `None` if it does not exist.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    // NFS locks a file only if it is open for writing.
    let opened = File::options().read(true).write(true).custom_flags(flags).open(path);
    let opened = match opened {
        Err(error) if error.kind() != io::ErrorKind::NotFound => crate::files::open(path),
        opened => opened,
    };
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    // Every user may hold a lock of a device.
    if !file.metadata()?.is_file() {
        return Ok(Some(file));
    }
    match rustix::fs::flock(&file, FlockOperation::LockExclusive) {
        // Some file systems have no locks.
        Ok(()) | Err(Errno::NOLCK | Errno::OPNOTSUPP) => Ok(Some(file)),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether a file is still the one at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |it: Metadata| (it.dev(), it.ino());
    let (ours, current) = (file.metadata().map(id), path.metadata().map(id));
    ours.is_ok_and(|ours| current.is_ok_and(|current| ours == current))
}

/// Writes a file that only its owner may read. An old file is replaced atomically, so that readers see the old file or
/// the new one; `AlreadyExists` if there should be none.
fn write(path: &Path, bytes: &[u8], replaces: bool) -> io::Result<()> {
    let path = target(path)?;
    // `/dev/null`, for example, means that there is no file.
    if path.metadata().is_ok_and(|it| !it.is_file()) {
        let refused = "it is not a regular file: name another one to save credentials in";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, refused));
    }
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let mut draft = tempfile::Builder::new()
        .prefix(".quire-auth-")
        .permissions(Permissions::from_mode(0o600))
        .tempfile_in(folder)?;
    draft.write_all(bytes)?;
    draft.as_file().sync_all()?;
    let persisted = match replaces {
        true => draft.persist(&path),
        false => draft.persist_noclobber(&path),
    };
    persisted.map_err(|error| error.error)?;
    File::open(folder)?.sync_all()
}

/// Returns the path to which symlinks lead, because the target is replaced and not the symlink. The target need not
/// exist.
fn target(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match path.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        match path.read_link() {
            Ok(to) => path = path.parent().unwrap_or(Path::new("")).join(to),
            Err(_error) => return Ok(path),
        }
    }
    Err(Errno::LOOP.into())
}

#[cfg(test)]
mod tests;
