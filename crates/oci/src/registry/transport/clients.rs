//! HTTP clients, which keep connections. There is one for each route, choice of HTTP versions, and urgency.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{HOST, HeaderMap};
use reqwest::{Client, NoProxy, Proxy, Url};
use rustls::RootCertStore;

use super::tls;
use crate::registry::credentials::Secret;
use crate::registry::error::{Cause, Http2Failure};
use crate::registry::hosts::{Route, authority};
use crate::registry::{Proxies, Settings, lock};

/// Maximum time to connect.
const CONNECT_MAX: Duration = Duration::from_secs(30);

/// Number of bytes that a server may send on an HTTP/2 stream before they are read: 200 MB/s at a round trip of 20 ms.
/// The windows of TCP, which limit HTTP/1.1, are about as large. Source: Go's client has the same, net/http
/// `http2transportDefaultStreamFlow`.
const STREAM_WINDOW: u32 = 4 << 20;
/// The same for all streams of a connection together. If streams whose readers are busy used up this window, the other
/// streams would get no bytes. So it has room for 64 such streams. It also limits the memory that a server can fill.
const CONNECTION_WINDOW: u32 = 64 * STREAM_WINDOW;
/// Maximum size of the headers of an HTTP/2 response, in bytes.
const HEADERS_MAX: u32 = 64 << 10;
/// Time after which an HTTP/2 server that sends nothing gets a ping, if it owes a response.
const PING_AFTER: Duration = Duration::from_secs(10);
/// Time for the reply to a ping, after which the connection is given up.
const PING_MAX: Duration = Duration::from_secs(10);
/// Size of a request's body, in bytes, from which HTTP/1.1 is used. Servers in Go take only 1 MiB of all uploads of an
/// HTTP/2 connection at once, so at a long round trip uploads would be slower. Source: net/http,
/// `MaxUploadBufferPerConnection`.
const LARGE_BODY: usize = 1 << 20;

/// The HTTP versions that a client may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HttpVersions {
    /// HTTP/1.1.
    One,
    /// HTTP/2 if the server offers it during the TLS handshake, else HTTP/1.1.
    Newest,
}

/// The urgency of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::registry) enum Urgency {
    /// A reader, or a command, waits for the response.
    Reader,
    /// A prefetch or a completion, which no reader waits for. Such requests have a separate HTTP/2 connection. A server
    /// that has written their responses to its socket sends these before the response to a reader: with four such
    /// requests of 1 MiB, a reader of 64 KiB waited for 181 ms, and 37 ms with HTTP/1.1 (20 ms, 200 Mbit/s).
    Background,
}

/// Requests that share connections.
type ClientKey = (Route, HttpVersions, Urgency);

/// Identifies a client.
#[derive(Debug, Clone)]
pub(super) struct ClientId {
    key: Arc<ClientKey>,
    number: u64,
}

/// A client, and its identity.
#[derive(Debug, Clone)]
pub(super) struct NumberedClient {
    pub(super) id: ClientId,
    pub(super) client: Client,
}

pub(super) struct Clients {
    made: Mutex<BTreeMap<ClientKey, NumberedClient>>,
    /// Number of the next client.
    next: AtomicU64,
    /// Whether HTTP/2 works, of the hosts that have sent a response by HTTP/2 or failed to do so.
    http2: Mutex<BTreeMap<String, bool>>,
    roots: OnceLock<RootCertStore>,
    proxies: Proxies,
    stall: Duration,
}

impl Clients {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            made: Mutex::default(),
            next: AtomicU64::new(0),
            http2: Mutex::default(),
            roots: OnceLock::new(),
            proxies: settings.proxies.clone(),
            stall: settings.stall,
        }
    }

    pub(super) fn connect_timeout(&self, route: &Route) -> Duration {
        route.dial_timeout.unwrap_or_else(|| self.stall.min(CONNECT_MAX))
    }

    /// Returns the HTTP versions for a request.
    pub(super) fn versions(
        &self,
        url: &Url,
        headers: &HeaderMap,
        body: Option<&Bytes>,
    ) -> HttpVersions {
        let is_large = body.is_some_and(|it| it.len() >= LARGE_BODY);
        // HTTP/2 has a field for the host, with which this header must agree. Source: RFC 9113, 8.3.1.
        let has_host = headers.contains_key(HOST);
        if url.scheme() != "https" || is_large || has_host {
            return HttpVersions::One;
        }
        let host = authority(url).unwrap_or_default();
        match lock(&self.http2).get(&host) {
            Some(false) => HttpVersions::One,
            Some(true) | None => HttpVersions::Newest,
        }
    }

    /// Whether a host has sent a response by HTTP/2, which works.
    pub(super) fn is_http2(&self, host: &str) -> bool {
        lock(&self.http2).get(host) == Some(&true)
    }

    /// Records that a host has sent a response by HTTP/2.
    pub(super) fn has_http2(&self, host: &str) {
        let mut http2 = lock(&self.http2);
        if !http2.contains_key(host) {
            http2.insert(host.to_owned(), true);
        }
    }

    /// Uses HTTP/1.1 for a host from now on, if its HTTP/2 does not work: if the failure shows that, or if the host has
    /// not sent any response by HTTP/2.
    pub(super) fn failed(&self, client: &ClientId, host: &str, failure: Http2Failure) {
        let mut http2 = lock(&self.http2);
        let is_broken = match failure {
            Http2Failure::Broken => true,
            Http2Failure::Usual => false,
            Http2Failure::Unknown => !http2.contains_key(host),
        };
        if client.key.1 == HttpVersions::Newest && is_broken {
            tracing::debug!(host, "HTTP/2 does not work, so HTTP/1.1 is used");
            http2.insert(host.to_owned(), false);
        }
    }

    /// Returns the client for requests to a route.
    pub(super) fn client(
        &self,
        route: &Route,
        versions: HttpVersions,
        urgency: Urgency,
    ) -> Result<NumberedClient, Cause> {
        // Requests of HTTP/1.1 have separate connections anyway.
        let urgency = match versions {
            HttpVersions::One => Urgency::Reader,
            HttpVersions::Newest => urgency,
        };
        let key = (route.clone(), versions, urgency);
        let mut made = lock(&self.made);
        if let Some(client) = made.get(&key) {
            return Ok(client.clone());
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let id = ClientId { key: Arc::new(key.clone()), number };
        let client = NumberedClient { id, client: self.build(route, versions)? };
        made.insert(key, client.clone());
        Ok(client)
    }

    /// Makes later requests use new connections, because a response of this client came too late. A timeout closes an
    /// HTTP/1.1 connection, but of HTTP/2 only the stream, and the connection may be the cause. Other requests on it
    /// continue.
    pub(super) fn renew(&self, late: &ClientId) {
        let mut made = lock(&self.made);
        // If several requests of a client are late, the first one replaces it.
        if made.get(&*late.key).is_some_and(|it| it.id.number == late.number) {
            made.remove(&*late.key);
        }
    }

    fn build(&self, route: &Route, versions: HttpVersions) -> Result<Client, Cause> {
        let wrong = |error: reqwest::Error| {
            Cause::Setting(format!("the network settings ({})", error.without_url()))
        };
        let mut tls = tls::configuration(&route.tls, &self.roots)?;
        let offered: &[&str] = match versions {
            HttpVersions::One => &["http/1.1"],
            HttpVersions::Newest => &["h2", "http/1.1"],
        };
        tls.alpn_protocols = offered.iter().map(|it| it.as_bytes().to_vec()).collect();
        // A request that an HTTP/2 server has not begun, because it ends the connection or refuses the stream, is sent
        // again at once, twice at most. That is the default of `reqwest::retry`; requests with a body are excluded.
        let mut builder = Client::builder()
            .user_agent(concat!("quire/", env!("CARGO_PKG_VERSION")))
            .tls_backend_preconfigured(tls)
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(self.connect_timeout(route))
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_header_list_size(HEADERS_MAX)
            .http2_keep_alive_interval(PING_AFTER)
            .http2_keep_alive_timeout(PING_MAX)
            .no_proxy();
        if versions == HttpVersions::One {
            builder = builder.http1_only();
        }
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
        builder.build().map_err(wrong)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_requests() {
        let clients = Clients::new(&Settings::default());
        let newest =
            clients.client(&Route::default(), HttpVersions::Newest, Urgency::Reader).unwrap().id;
        // The last two hosts have responded by HTTP/2 before they fail.
        clients.has_http2("works.io");
        clients.has_http2("broken.io");
        for (host, failure) in [
            ("silent.io", Http2Failure::Unknown),
            ("busy.io", Http2Failure::Usual),
            ("works.io", Http2Failure::Unknown),
            ("broken.io", Http2Failure::Broken),
        ] {
            clients.failed(&newest, host, failure);
        }
        let (none, mut host) = (HeaderMap::new(), HeaderMap::new());
        host.insert(HOST, "a.io".parse().unwrap());
        let large = Bytes::from(vec![0; LARGE_BODY]);
        let small = large.slice(1..);
        for (url, headers, body, expect) in [
            ("https://a.io/v2/", &none, None, HttpVersions::Newest),
            ("https://a.io/v2/", &none, Some(&small), HttpVersions::Newest),
            ("https://a.io/v2/", &none, Some(&large), HttpVersions::One),
            ("https://a.io/v2/", &host, None, HttpVersions::One),
            ("http://a.io/v2/", &none, None, HttpVersions::One),
            ("https://broken.io/v2/", &none, None, HttpVersions::One),
            ("https://silent.io/v2/", &none, None, HttpVersions::One),
            ("https://busy.io/v2/", &none, None, HttpVersions::Newest),
            ("https://works.io/v2/", &none, None, HttpVersions::Newest),
            ("https://broken.io:444/v2/", &none, None, HttpVersions::Newest),
        ] {
            let got = clients.versions(&url.parse().unwrap(), headers, body);
            assert_eq!(got, expect, "{url} {headers:?} {}", body.is_some());
        }
    }

    #[test]
    fn a_client_is_replaced_once() {
        let clients = Clients::new(&Settings::default());
        let (route, versions) = (Route::default(), HttpVersions::One);
        let client = || clients.client(&route, versions, Urgency::Reader).unwrap().id;
        let (first, same) = (client(), client());
        assert_eq!(first.number, same.number);
        clients.renew(&first);
        let second = client();
        assert_ne!(second.number, first.number);
        // Another response of the first client is late.
        clients.renew(&same);
        assert_eq!(client().number, second.number);
    }
}
