//! Runs credential helpers. Source: docker-credential-helpers' `credentials/credentials.go`.

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::{Credential, CredentialError, Keyring, Secret};

/// Output of helpers without credentials for the registry. Source: `credentials/error.go`.
const HAS_NOTHING: &str = "credentials not found in native keychain";
/// User name that marks an identity token. Source: docker's `cli/config/credentials/native_store.go`.
const TOKEN_USER: &str = "<token>";
/// Maximum output of a helper in bytes, larger than any token.
const ANSWER_MAX: u64 = 1 << 20;

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "Username")]
    user: String,
    #[serde(rename = "Secret")]
    secret: Secret,
}

impl Keyring {
    /// Runs `docker-credential-NAME get` as Docker does, with the server's name on standard input.
    pub(super) fn ask(
        &self,
        name: &str,
        server: &str,
        file: &Path,
    ) -> Result<Option<Credential>, CredentialError> {
        let path = self.program(name, file)?;
        let Some(answer) = self.run(&path, "get", server.as_bytes())? else { return Ok(None) };
        let Ok(Answer { user, secret }) = serde_json::from_slice(&answer) else {
            return Err(CredentialError::HelperFailed {
                path,
                status: "its output is malformed".to_owned(),
            });
        };
        Ok(Some(match user.as_str() {
            TOKEN_USER => Credential::Identity(secret),
            _ => Credential::Password { user, password: secret },
        }))
    }

    /// Returns the path of the helper that `file` names.
    pub(super) fn program(&self, name: &str, file: &Path) -> Result<PathBuf, CredentialError> {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        Some(format!("docker-credential-{name}"))
            .filter(|_| name.bytes().all(is_word))
            .and_then(|program| {
                self.helpers.iter().map(|folder| folder.join(&program)).find(|path| path.is_file())
            })
            .ok_or_else(|| CredentialError::NoHelper {
                name: name.to_owned(),
                path: file.to_owned(),
            })
    }

    /// Returns the output of a helper for `input`. `None` if the helper has no credentials for the registry.
    pub(super) fn run(
        &self,
        program: &Path,
        verb: &str,
        input: &[u8],
    ) -> Result<Option<Vec<u8>>, CredentialError> {
        let failed = |source| CredentialError::Helper { path: program.to_owned(), source };
        let mut child = Command::new(program)
            .arg(verb)
            // Helpers do not need the passphrase of a private key, which `push` may have.
            .env_remove(crate::signing::PASSPHRASE_VARIABLE)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        if let Some(mut pipe) = child.stdin.take() {
            // A helper that does not read its input still prints a result, or fails by its status.
            let _ignored: io::Result<()> = pipe.write_all(input);
        }
        // The thread is not joined, because a child of the helper may keep the pipe open.
        let (sender, receiver) = std::sync::mpsc::channel();
        if let Some(output) = child.stdout.take() {
            let started = std::thread::Builder::new().spawn(move || {
                let mut answer = Vec::new();
                let result = output.take(ANSWER_MAX).read_to_end(&mut answer).map(|_| answer);
                // After a timeout the receiver is gone.
                let _ignored = sender.send(result);
            });
            if let Err(error) = started {
                child.kill().and_then(|()| child.wait().map(drop)).map_err(failed)?;
                return Err(failed(error));
            }
        }
        let deadline = Instant::now() + self.helper_timeout;
        let answer = receiver.recv_timeout(self.helper_timeout);
        let status = loop {
            match child.try_wait().map_err(failed)? {
                Some(status) => break Some(status),
                None if Instant::now() >= deadline => break None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let (Some(status), Ok(answer)) = (status, answer) else {
            child.kill().map_err(failed)?;
            child.wait().map_err(failed)?;
            let timeout = self.helper_timeout;
            return Err(CredentialError::HelperTimeout { path: program.to_owned(), timeout });
        };
        let answer = answer.map_err(failed)?;
        if status.success() {
            return Ok(Some(answer));
        }
        if String::from_utf8_lossy(&answer).trim() == HAS_NOTHING {
            return Ok(None);
        }
        Err(CredentialError::HelperFailed { path: program.to_owned(), status: status.to_string() })
    }
}
