//! HTTP requests and responses: connections, proxies, redirects. Independent of the registry protocol.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, LOCATION,
};
use reqwest::{Client, Method, NoProxy, Proxy, Response, Url};
use rustls::RootCertStore;

use super::credentials::Secret;
use super::error::Cause;
use super::hosts::{Endpoint, Route, authority};
use super::{Proxies, Settings, patience, tls};

/// Maximum time to connect.
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// Maximum number of redirects of a request. Registries have one, to their blob storage.
const REDIRECTS_MAX: usize = 5;
/// Multiple of the stall timeout for which a server may be silent after the last byte of an upload.
const COMMIT_PATIENCE: u32 = 2;
/// Number of bytes of an upload that extend its timeout by a second, because a server computes their digest and may
/// copy them.
const COMMIT_RATE: u64 = 8 << 20;
/// Size of the pieces that are given to the connection, in bytes. Between two pieces an upload counts as progressing.
const UPLOAD_PIECE: usize = 64 << 10;

/// A request, which can be sent repeatedly.
#[derive(Clone)]
pub(super) struct Ask {
    pub(super) method: Method,
    pub(super) url: Url,
    pub(super) headers: HeaderMap,
    pub(super) body: Option<Bytes>,
    /// Total bytes of the upload that this request completes. The server processes all of them before it responds.
    pub(super) commits: Option<u64>,
}

impl Ask {
    pub(super) fn new(method: Method, url: Url) -> Self {
        Self { method, url, headers: HeaderMap::new(), body: None, commits: None }
    }

    pub(super) fn header(mut self, name: HeaderName, value: impl Into<HeaderValue>) -> Self {
        self.headers.insert(name, value.into());
        self
    }
}

/// A response, and whether it comes from the requested host rather than from the target of a redirect.
pub(super) struct Answer {
    pub(super) response: Response,
    pub(super) is_own: bool,
}

impl Answer {
    /// Returns the host of a redirected response. Omits the path, which may contain a signature.
    pub(super) fn elsewhere(&self) -> Option<String> {
        (!self.is_own).then(|| authority(self.response.url()).unwrap_or_default())
    }
}

pub(super) struct Transport {
    clients: Mutex<BTreeMap<Route, Client>>,
    roots: OnceLock<RootCertStore>,
    proxies: Proxies,
    stall: Duration,
    /// Time limit for a token that a request needs.
    pub(super) patience: Duration,
}

impl Transport {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            clients: Mutex::default(),
            roots: OnceLock::new(),
            proxies: settings.proxies.clone(),
            stall: settings.stall,
            patience: settings.patience,
        }
    }

    fn connect_timeout(&self, route: &Route) -> Duration {
        route.dial_timeout.unwrap_or_else(|| self.stall.min(CONNECT_MAX))
    }

    /// Sends a request, and follows redirects. Only the endpoint itself gets credentials.
    pub(super) async fn send(
        &self,
        endpoint: &Endpoint,
        ask: &Ask,
        authorization: Option<&HeaderValue>,
    ) -> Result<Answer, Cause> {
        let mut url = ask.url.clone();
        let base =
            Url::parse(&endpoint.base).map_err(|error| Cause::Protocol(error.to_string()))?;
        for _ in 0..=REDIRECTS_MAX {
            let is_own = url.origin() == base.origin();
            let elsewhere = endpoint.route.elsewhere();
            let route = if is_own { &endpoint.route } else { &elsewhere };
            let mut headers = ask.headers.clone();
            // Without this header, a proxy may compress the content, whose digest is verified. Source: RFC 9110,
            // 12.5.3.
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            if is_own {
                add_headers(&mut headers, endpoint)?;
                if let Some(value) = authorization {
                    headers.insert(AUTHORIZATION, value.clone());
                }
            }
            let sent = self.send_once(route, ask, url.clone(), headers);
            let response = patience::wait(sent).await;
            let elsewhere = (!is_own).then(|| authority(&url).unwrap_or_default());
            let response = response.map_err(|cause| cause.at(elsewhere.as_deref()))?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(Answer { response, is_own });
            }
            let next = location(response.headers(), &url)?;
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(Cause::Downgrade(authority(&next).unwrap_or_default()));
            }
            url = next;
        }
        Err(Cause::Protocol(format!("more than {REDIRECTS_MAX} redirects")))
    }

    async fn send_once(
        &self,
        route: &Route,
        ask: &Ask,
        url: Url,
        headers: HeaderMap,
    ) -> Result<Response, Cause> {
        let host = authority(&url).unwrap_or_default();
        let sent = Arc::new(AtomicU64::new(0));
        let mut request = self.client(route)?.request(ask.method.clone(), url).headers(headers);
        if let Some(body) = &ask.body {
            let body = Paced { rest: body.clone(), sent: Arc::clone(&sent) };
            request = request.body(reqwest::Body::wrap(body));
        }
        let answer = request.send();
        tokio::pin!(answer);
        let patience = match ask.commits {
            Some(bytes) => self.stall * COMMIT_PATIENCE + Duration::from_secs(bytes / COMMIT_RATE),
            None => self.stall,
        };
        let mut before = 0;
        loop {
            if let Ok(result) = tokio::time::timeout(patience, &mut answer).await {
                let patience = self.connect_timeout(route);
                return result.map_err(|error| Cause::of_request(error, &host, patience));
            }
            let now = sent.load(Ordering::Relaxed);
            if now == before {
                return Err(Cause::Stalled(patience));
            }
            before = now;
        }
    }

    /// Returns the next bytes of a response, or `None` at its end.
    pub(super) async fn chunk(&self, response: &mut Response) -> Result<Option<Bytes>, Cause> {
        let next = async {
            match tokio::time::timeout(self.stall, response.chunk()).await {
                Ok(Ok(chunk)) => Ok(chunk),
                // The connection already exists, so the connect timeout in the error does not matter.
                Ok(Err(error)) => Err(Cause::of_request(error, "", self.stall)),
                Err(_elapsed) => Err(Cause::Stalled(self.stall)),
            }
        };
        let chunk = patience::wait(next).await?;
        patience::arrived(chunk.as_ref().map_or(0, Bytes::len));
        Ok(chunk)
    }

    /// Reads a whole response of at most `max` bytes.
    pub(super) async fn body(&self, mut response: Response, max: u64) -> Result<Vec<u8>, Cause> {
        let mut bytes = Vec::new();
        let limit = usize::try_from(max).unwrap_or(usize::MAX);
        while let Some(chunk) = self.chunk(&mut response).await? {
            if chunk.len() > limit - bytes.len() {
                return Err(Cause::TooLong { max });
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }

    /// Returns the client for a route. There is one client for all hosts with the same route, because clients keep
    /// connections.
    fn client(&self, route: &Route) -> Result<Client, Cause> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(route) {
            return Ok(client.clone());
        }
        let wrong = |error: reqwest::Error| {
            Cause::Setting(format!("the network settings ({})", error.without_url()))
        };
        let mut builder = Client::builder()
            .user_agent(concat!("quire/", env!("CARGO_PKG_VERSION")))
            .tls_backend_preconfigured(tls::configuration(&route.tls, &self.roots)?)
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(self.connect_timeout(route))
            .retry(reqwest::retry::never())
            .http1_only()
            .no_proxy();
        let proxies = match &route.proxy {
            Some(proxy) => {
                let wrong = |_error| Cause::Setting("the proxy in hosts.toml".to_owned());
                vec![Proxy::all(proxy.expose()).map_err(wrong)?]
            }
            None => self.proxies.list()?,
        };
        for proxy in proxies {
            builder = builder.proxy(proxy);
        }
        let client = builder.build().map_err(wrong)?;
        clients.insert(route.clone(), client.clone());
        Ok(client)
    }
}

fn add_headers(headers: &mut HeaderMap, endpoint: &Endpoint) -> Result<(), Cause> {
    for (name, value) in &endpoint.headers {
        let wrong =
            || Cause::Setting(format!("the header \"{}\" of hosts.toml", name.escape_debug()));
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_error| wrong())?;
        let mut value = HeaderValue::from_str(value.expose()).map_err(|_error| wrong())?;
        value.set_sensitive(true);
        headers.append(name, value);
    }
    Ok(())
}

/// Returns the target of a `Location` header.
pub(super) fn location(headers: &HeaderMap, from: &Url) -> Result<Url, Cause> {
    let wrong = || Cause::Protocol("it redirects without a valid address".to_owned());
    let text = headers.get(LOCATION).and_then(|value| value.to_str().ok()).ok_or_else(wrong)?;
    let mut url = from.join(text).map_err(|_error| wrong())?;
    // Credentials in the address were set by the server, and are not sent.
    let cleared = url.set_username("").and_then(|()| url.set_password(None));
    if cleared.is_err() || !matches!(url.scheme(), "http" | "https") {
        return Err(wrong());
    }
    Ok(url)
}

impl Proxies {
    /// Returns the proxies for the HTTP client, which uses the first that matches.
    fn list(&self) -> Result<Vec<Proxy>, Cause> {
        // As in curl and Go, loopback addresses are never reached through a proxy.
        let exceptions = format!("localhost,127.0.0.0/8,::1,{}", self.except);
        let mut list = Vec::new();
        for (name, url) in
            [("HTTPS_PROXY", &self.https), ("HTTP_PROXY", &self.http), ("ALL_PROXY", &self.all)]
        {
            let Some(url) = url.as_ref().map(Secret::expose).filter(|url| !url.is_empty()) else {
                continue;
            };
            let proxy = match name {
                "HTTPS_PROXY" => Proxy::https(url),
                "HTTP_PROXY" => Proxy::http(url),
                _ => Proxy::all(url),
            };
            // The original error would show the address with its password.
            let proxy = proxy.map_err(|_error| Cause::Setting(format!("the proxy in {name}")))?;
            list.push(proxy.no_proxy(NoProxy::from_string(&exceptions)));
        }
        Ok(list)
    }
}

/// A request body that counts the bytes taken from it.
struct Paced {
    rest: Bytes,
    sent: Arc<AtomicU64>,
}

impl http_body::Body for Paced {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let length = self.rest.len().min(UPLOAD_PIECE);
        let piece = self.rest.split_to(length);
        self.sent.fetch_add(length as u64, Ordering::Relaxed);
        Poll::Ready(Some(Ok(http_body::Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.rest.len() as u64)
    }
}
