//! Credentials for registries: Docker's `config.json`, containers' `auth.json`, and credential helpers.
//!
//! Source: docker's `cli/config/configfile`, docker-credential-helpers' protocol, `containers-auth.json(5)`.

mod helper;
mod save;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use zeroize::Zeroize as _;

use crate::reference::{DOCKER_HUB, DOCKER_HUB_API};

pub use save::{Kept, Removed};

/// Docker Hub's name in credential files and for helpers.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// A text that never appears in messages or logs, and whose memory is overwritten at the end.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret text.
    #[must_use]
    pub const fn new(text: String) -> Self {
        Self(text)
    }

    /// Returns the text itself, to be sent.
    #[must_use]
    pub(super) fn expose(&self) -> &str {
        &self.0
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self)
    }
}

/// Credentials for a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credential {
    /// A user name and a password.
    Password {
        /// User name.
        user: String,
        /// Password, or a personal access token.
        password: Secret,
    },
    /// A refresh token, which a token server exchanges for access tokens.
    Identity(Secret),
    /// A bearer token that is sent unchanged.
    Bearer(Secret),
}

/// The sources of credentials.
#[derive(Debug, Clone, Default)]
pub struct Keyring {
    /// Credentials from the caller, which override all other sources.
    pub given: Option<Credential>,
    /// Files like Docker's `config.json`. The first one that names the registry is used; missing files are skipped.
    pub files: Vec<PathBuf>,
    /// Directories that contain the programs `docker-credential-NAME`.
    pub helpers: Vec<PathBuf>,
    /// Timeout for a helper, which may ask the user for a password.
    pub helper_timeout: Duration,
}

/// An error of reading or saving credentials. Its messages never show them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file has an invalid format. Its content is not shown.
    #[error("{} is malformed at line {line}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
    },
    /// An `auth` is not the base64 encoding of a name, a colon and a password.
    #[error("{} has unreadable credentials for {}", path.display(), key.escape_debug())]
    Auth {
        /// Path of the file.
        path: PathBuf,
        /// Name of the registry in the file.
        key: String,
    },
    /// A helper does not exist.
    #[error(
        "the credential helper docker-credential-{}, which {} names, is not installed",
        name.escape_debug(), path.display()
    )]
    NoHelper {
        /// Name of the helper, without the prefix.
        name: String,
        /// File that names the helper.
        path: PathBuf,
    },
    /// A helper cannot be run.
    #[error("cannot run {}", path.display())]
    Helper {
        /// Path of the helper.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A helper failed. Its output is not shown, because it may contain secrets.
    #[error("{} failed ({status})", path.display())]
    HelperFailed {
        /// Path of the helper.
        path: PathBuf,
        /// Exit status, or the reason.
        status: String,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The settings name no file to write to.
    #[error("there is no file to save credentials in: set REGISTRY_AUTH_FILE or XDG_RUNTIME_DIR")]
    NoFile,
    /// The user name contains a colon, which files cannot store.
    #[error("a user name cannot have a colon")]
    User,
    /// A helper did not exit in time.
    #[error("{} did not finish within {} s", path.display(), timeout.as_secs_f32())]
    HelperTimeout {
        /// Path of the helper.
        path: PathBuf,
        /// Timeout.
        timeout: Duration,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
    #[serde(default)]
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Entry {
    auth: Option<Secret>,
    username: Option<String>,
    password: Option<Secret>,
    identitytoken: Option<Secret>,
    registrytoken: Option<Secret>,
}

impl Keyring {
    /// Finds credentials for a repository of the registry at `host`.
    ///
    /// # Errors
    /// [`CredentialError`] if credentials exist but are unusable.
    pub fn find_credential(
        &self,
        host: &str,
        repository: &str,
    ) -> Result<Option<Credential>, CredentialError> {
        if self.given.is_some() {
            return Ok(self.given.clone());
        }
        let host = canonical_host(host);
        for path in &self.files {
            let found = self.find_in(path, host, repository)?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    fn find_in(
        &self,
        path: &Path,
        host: &str,
        repository: &str,
    ) -> Result<Option<Credential>, CredentialError> {
        let Some(file) = read::<File>(path)? else { return Ok(None) };
        let name = format!("{host}/{repository}");
        if let Some((key, helper)) = longest(&file.cred_helpers, &name) {
            let key = if canonical_key(key) == DOCKER_HUB { DOCKER_HUB_KEY } else { key.as_str() };
            return self.ask(helper, key, path);
        }
        if let Some((key, entry)) = longest(&file.auths, &name) {
            let wrong = || CredentialError::Auth { path: path.to_owned(), key: key.clone() };
            // Docker writes an empty entry if the credential store has the credentials.
            if let Some(found) = entry.credential().map_err(|Unreadable| wrong())? {
                return Ok(Some(found));
            }
        }
        match &file.creds_store {
            Some(store) if !store.is_empty() => self.ask(store, helper_key(host), path),
            _ => Ok(None),
        }
    }
}

/// Maximum size of a credential file, in bytes.
pub const FILE_MAX: u64 = 4 << 20;

/// Reads a credential file. `None` if the file does not exist or is empty.
fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>, CredentialError> {
    let text = match crate::files::read_settings(path, FILE_MAX) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(CredentialError::Read { path: path.to_owned(), source }),
    };
    // A bind mount without a source appears as an empty file.
    if text.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    let read = serde_json::from_slice(&text);
    read.map(Some)
        .map_err(|error| CredentialError::Malformed { path: path.to_owned(), line: error.line() })
}

/// Returns a registry's name for helpers.
fn helper_key(host: &str) -> &str {
    if host == DOCKER_HUB { DOCKER_HUB_KEY } else { host }
}

struct Unreadable;

impl Entry {
    fn credential(&self) -> Result<Option<Credential>, Unreadable> {
        let filled =
            |secret: &Option<Secret>| secret.clone().filter(|one| !one.expose().is_empty());
        if let Some(token) = filled(&self.identitytoken) {
            return Ok(Some(Credential::Identity(token)));
        }
        if let Some(token) = filled(&self.registrytoken) {
            return Ok(Some(Credential::Bearer(token)));
        }
        if let Some(auth) = filled(&self.auth) {
            let decoded = STANDARD.decode(auth.expose().trim()).map_err(|_error| Unreadable)?;
            let decoded = String::from_utf8(decoded).map_err(|_error| Unreadable)?;
            let (user, password) = decoded.split_once(':').ok_or(Unreadable)?;
            // Docker pads passwords with zeroes. Source: `configfile/file.go`, `decodeAuth`.
            let password = Secret::new(password.trim_matches('\0').to_owned());
            return Ok(Some(Credential::Password { user: user.to_owned(), password }));
        }
        match (&self.username, filled(&self.password)) {
            (Some(user), Some(password)) if !user.is_empty() => {
                Ok(Some(Credential::Password { user: user.clone(), password }))
            }
            _ => Ok(None),
        }
    }
}

pub(super) fn canonical_host(host: &str) -> &str {
    if matches!(host, "index.docker.io" | DOCKER_HUB_API) { DOCKER_HUB } else { host }
}

/// Returns a key as `host` or `host/path`. Older files have addresses of the API as keys.
fn canonical_key(key: &str) -> String {
    let (key, is_address) = match key.split_once("://") {
        Some((_, rest)) => (rest, true),
        None => (key, false),
    };
    let key = key.trim_end_matches('/');
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    let host = canonical_host(host);
    if path.is_empty() || is_address || matches!(path, "v1" | "v2") {
        return host.to_owned();
    }
    format!("{host}/{path}")
}

/// Returns the entry with the longest key that is a prefix of `name` and ends at a component of it.
fn longest<'a, T>(entries: &'a BTreeMap<String, T>, name: &str) -> Option<(&'a String, &'a T)> {
    let fit = |key: &str| {
        let key = canonical_key(key);
        let rest = name.strip_prefix(key.as_str())?;
        (rest.is_empty() || rest.starts_with('/')).then_some(key.len())
    };
    let fitting = entries.iter().filter_map(|entry| Some((fit(entry.0)?, entry)));
    fitting.max_by_key(|(length, _)| *length).map(|(_, entry)| entry)
}

#[cfg(test)]
mod tests;
