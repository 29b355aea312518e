//! Login to and logout from a registry.

use reqwest::{Method, Url};

use super::credentials::canonical_host;
use super::transport::Ask;
use super::{Cause, Credential, Kept, Keyring, Registry, RegistryError, Removed, Secret, Settings};
use crate::reference::Reference;

/// A registry for login or logout.
#[derive(Debug, Clone)]
pub struct Login {
    reference: Reference,
    settings: Settings,
}

/// The result of checking credentials with a registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checked {
    /// The registry accepts the user name and the password.
    Known,
    /// The registry does not ask for credentials.
    Unasked,
}

impl Login {
    /// Takes the registry at `host`, with an optional port. Ignores a leading `https://` and trailing slashes. `None`
    /// if the text is not the name of a registry.
    #[must_use]
    pub fn new(host: &str, settings: &Settings) -> Option<Self> {
        let host = host.strip_prefix("https://").unwrap_or(host).trim_end_matches('/');
        // The repository does not matter.
        let reference: Reference = format!("{host}/all").parse().ok()?;
        let is_host = canonical_host(host) == canonical_host(reference.registry());
        is_host.then(|| Self { reference, settings: settings.clone() })
    }

    /// Returns the registry.
    #[must_use]
    pub fn registry(&self) -> &str {
        self.reference.registry()
    }

    /// Asks the registry, not its mirrors, whether it accepts the user name and the password.
    ///
    /// # Errors
    /// [`RegistryError`] if the registry refuses them or cannot be reached.
    pub fn check(&self, user: &str, password: &Secret) -> Result<Checked, RegistryError> {
        let (user, password) = (user.to_owned(), password.clone());
        let given = Some(Credential::Password { user, password });
        let keyring = Keyring { given, ..self.settings.keyring.clone() };
        let settings = Settings { keyring, ..self.settings.clone() };
        let registry = Registry::new(&self.reference, &settings)?;
        let what = format!("log in to {}", self.registry());
        registry.run(&what.clone(), |core| async move {
            let own = core.endpoints.len() - 1;
            let mut turns = super::retry::Turns::new(&core, what, vec![own]);
            loop {
                let index = turns.next().await?;
                let endpoint = &core.endpoints[index];
                let asked = async {
                    let url = Url::parse(&format!("{}/", endpoint.base))
                        .map_err(|error| Cause::Protocol(error.to_string()))?;
                    let ask = Ask::new(Method::GET, url);
                    // Without a challenge from the registry, the credentials cannot be checked.
                    let answer = core.call_with(index, &ask, &[]).await?;
                    match answer.response.status().as_u16() {
                        200 => Ok(core.auth.was_asked(endpoint)),
                        _ => Err(core.failure(index, answer).await),
                    }
                };
                match turns.attempt(asked).await {
                    Ok(true) => return Ok(Checked::Known),
                    Ok(false) => return Ok(Checked::Unasked),
                    Err(cause) => turns.failed(cause),
                }
            }
        })
    }

    /// Returns the user name that is saved for this registry; `<token>` if it is a token.
    ///
    /// # Errors
    /// [`RegistryError`] if saved credentials cannot be read.
    pub fn user(&self) -> Result<Option<String>, RegistryError> {
        let repository = self.reference.repository();
        let found = self.settings.keyring.find_credential(&self.host()?, repository);
        let found = found
            .map_err(|error| self.failed("look up the credentials", Cause::Credentials(error)))?;
        Ok(found.map(|it| match it {
            Credential::Password { user, .. } => user,
            Credential::Identity(_) | Credential::Bearer(_) => "<token>".to_owned(),
        }))
    }

    /// Saves the user name and the password for this registry.
    ///
    /// # Errors
    /// [`RegistryError`] if they cannot be saved.
    pub fn save(&self, user: &str, password: &Secret) -> Result<Kept, RegistryError> {
        let saved = self.settings.keyring.save(&self.host()?, user, password);
        saved.map_err(|error| self.failed("save the credentials", Cause::Credentials(error)))
    }

    /// Removes the credentials for this registry.
    ///
    /// # Errors
    /// [`RegistryError`] if they cannot be removed.
    pub fn erase(&self) -> Result<Removed, RegistryError> {
        let erased = self.settings.keyring.erase(&self.host()?);
        erased.map_err(|error| self.failed("remove the credentials", Cause::Credentials(error)))
    }

    /// Returns the host under which credentials are stored. It differs from the registry if `hosts.toml` names a
    /// server.
    fn host(&self) -> Result<String, RegistryError> {
        let Settings { hosts, protection, .. } = &self.settings;
        let endpoints = super::hosts::endpoints(self.registry(), hosts, *protection);
        let endpoints =
            endpoints.map_err(|error| self.failed("use the registry", Cause::Hosts(error)))?;
        Ok(endpoints.last().expect("the registry itself is the last").host.clone())
    }

    fn failed(&self, what: &str, cause: Cause) -> RegistryError {
        RegistryError::new(what, self.registry(), 1, cause)
    }
}
