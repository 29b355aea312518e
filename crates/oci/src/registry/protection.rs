//! How connections to a registry are protected, and what protection a registry has.

use reqwest::{Method, Url};

use super::hosts::Endpoint;
use super::transport::Ask;
use super::{Cause, Core, Registry, RegistryError};

/// Protection of the connections to a registry itself. For its mirrors, `hosts.toml` decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protection {
    /// HTTPS with a valid certificate, or HTTP on a loopback address without TLS settings, unless `hosts.toml` has
    /// another choice.
    #[default]
    Usual,
    /// HTTPS with a valid certificate, also on loopback addresses and whatever `hosts.toml` has.
    Verified,
    /// HTTPS with any certificate, or HTTP if the registry responds only to HTTP.
    Unverified,
    /// HTTP.
    None,
}

impl Endpoint {
    /// Returns the same host by HTTP.
    pub(super) fn by_http(&self) -> Self {
        let base = match self.base.strip_prefix("https:") {
            Some(rest) => format!("http:{rest}"),
            None => self.base.clone(),
        };
        Self { base, may_use_http: false, ..self.clone() }
    }
}

impl Registry {
    /// Returns the registry itself by HTTP if it may use HTTP, and responds only to that. `None` if the settings stay.
    ///
    /// # Errors
    /// [`RegistryError`] if the caller cancels the requests.
    pub(super) fn find_http(&self) -> Result<Option<Endpoint>, RegistryError> {
        let Some(own) = self.core.endpoints.last().filter(|it| it.may_use_http) else {
            return Ok(None);
        };
        let (by_https, by_http) = (own.clone(), own.by_http());
        self.run("reach the registry", |core| async move {
            if core.responds(&by_https).await {
                return Ok(None);
            }
            // A host that responds to neither is reported by the first request.
            Ok(core.responds(&by_http).await.then_some(by_http))
        })
    }
}

impl Core {
    /// Whether a host responds to a request without credentials, with any status.
    async fn responds(&self, endpoint: &Endpoint) -> bool {
        // Headers of `hosts.toml` may contain credentials.
        let anonymous = Endpoint { headers: Vec::new(), ..endpoint.clone() };
        let asked = async {
            let url = Url::parse(&format!("{}/", endpoint.base))
                .map_err(|error| Cause::Protocol(error.to_string()))?;
            self.transport.send(&anonymous, &Ask::new(Method::GET, url), None).await
        };
        match asked.await {
            Ok(_) => true,
            Err(cause) => {
                tracing::debug!(base = endpoint.base, %cause, "the registry does not respond");
                false
            }
        }
    }
}
