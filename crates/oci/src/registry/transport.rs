//! Requests and answers: connections, proxies, redirects. Knows nothing of registries.

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

/// The longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// The most redirects of one request. Registries have one, to where blobs are stored.
const REDIRECTS_MAX: usize = 5;
/// How many times as long as for its next byte a server may be silent after the last byte of an upload.
const COMMIT_PATIENCE: u32 = 2;
/// Bytes of an upload for each second more: a server computes their digest, and may copy them.
const COMMIT_RATE: u64 = 8 << 20;
/// What is asked of the connection at once; between two of these it is seen that an upload moves.
const UPLOAD_PIECE: usize = 64 << 10;

/// A request, which can be made again.
#[derive(Clone)]
pub(super) struct Ask {
    pub(super) method: Method,
    pub(super) url: Url,
    pub(super) headers: HeaderMap,
    pub(super) body: Option<Bytes>,
    /// Bytes of an upload that ends with this request: the server works on all of them before it answers.
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

/// An answer, and whether it is from the host that was asked, not one that it led to.
pub(super) struct Answer {
    pub(super) response: Response,
    pub(super) is_own: bool,
}

impl Answer {
    /// The host that it is from, if that is another one. Without the path, which may have a signature in it.
    pub(super) fn elsewhere(&self) -> Option<String> {
        (!self.is_own).then(|| authority(self.response.url()).unwrap_or_default())
    }
}

pub(super) struct Transport {
    clients: Mutex<BTreeMap<Route, Client>>,
    roots: OnceLock<RootCertStore>,
    proxies: Proxies,
    stall: Duration,
    /// For a token that is asked for on the way.
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

    /// Sends a request, and follows where it leads. Who we are is told to the endpoint alone.
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
            // Without it, anybody on the way may compress what is compared with a digest. Source: RFC 9110, 12.5.3.
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

    /// The next bytes of an answer, unless it has ended.
    pub(super) async fn chunk(&self, response: &mut Response) -> Result<Option<Bytes>, Cause> {
        let next = async {
            match tokio::time::timeout(self.stall, response.chunk()).await {
                Ok(Ok(chunk)) => Ok(chunk),
                // The connection is there: how long it may take to be made plays no part.
                Ok(Err(error)) => Err(Cause::of_request(error, "", self.stall)),
                Err(_elapsed) => Err(Cause::Stalled(self.stall)),
            }
        };
        let chunk = patience::wait(next).await?;
        patience::arrived(chunk.as_ref().map_or(0, Bytes::len));
        Ok(chunk)
    }

    /// A whole answer of at most `max` bytes.
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

    /// Clients keep connections, so that there is one for all hosts that are reached the same way.
    fn client(&self, route: &Route) -> Result<Client, Cause> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(route) {
            return Ok(client.clone());
        }
        let wrong = |error: reqwest::Error| {
            Cause::Setting(format!("the settings of the network ({})", error.without_url()))
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

/// Where an answer leads.
pub(super) fn location(headers: &HeaderMap, from: &Url) -> Result<Url, Cause> {
    let wrong = || Cause::Protocol("it leads to no address".to_owned());
    let text = headers.get(LOCATION).and_then(|value| value.to_str().ok()).ok_or_else(wrong)?;
    let mut url = from.join(text).map_err(|_error| wrong())?;
    // Credentials that a server makes up are not ours to send.
    let cleared = url.set_username("").and_then(|()| url.set_password(None));
    if cleared.is_err() || !matches!(url.scheme(), "http" | "https") {
        return Err(wrong());
    }
    Ok(url)
}

impl Proxies {
    /// As the client wants them: the first that fits is used.
    fn list(&self) -> Result<Vec<Proxy>, Cause> {
        // As curl and Go have it, this machine is never reached by a proxy.
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
            // Its own error would show the address, and with it the password.
            let proxy = proxy.map_err(|_error| Cause::Setting(format!("the proxy in {name}")))?;
            list.push(proxy.no_proxy(NoProxy::from_string(&exceptions)));
        }
        Ok(list)
    }
}

/// A body that tells how much of it was taken.
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
