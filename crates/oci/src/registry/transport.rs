//! HTTP requests and responses: timeouts, redirects. Independent of the registry protocol.

mod clients;
mod tls;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, LOCATION,
};
use reqwest::{Method, Response, Url, Version};

use super::error::{Cause, Http2Failure};
use super::hosts::{Endpoint, Route, authority};
use super::{Settings, patience};
pub(super) use clients::Urgency;
use clients::{ClientId, Clients, NumberedClient};

/// Maximum number of redirects of a request. Registries have one, to their blob storage.
const REDIRECTS_MAX: usize = 5;
/// Multiple of the stall timeout for which a server may be silent after the last byte of an upload.
const COMMIT_PATIENCE: u32 = 2;
/// Number of bytes of an upload that extend its timeout by a second, because a server computes their digest and may
/// copy them.
const COMMIT_RATE: u64 = 8 << 20;
/// Size of the pieces that are given to the connection, in bytes. Between two pieces an upload counts as progressing.
const UPLOAD_PIECE: usize = 64 << 10;
/// Time for the end of a response that is not needed any more.
const END_TIME: Duration = Duration::from_secs(1);
/// Maximum number of bytes until that end.
const END_BYTES: usize = 64 << 10;

/// A request, which can be sent repeatedly.
#[derive(Clone)]
pub(super) struct Ask {
    pub(super) method: Method,
    pub(super) url: Url,
    pub(super) headers: HeaderMap,
    pub(super) body: Option<Bytes>,
    /// Whether the body has credentials, which no other host gets.
    pub(super) is_secret: bool,
    /// Total bytes of the upload that this request completes. The server processes all of them before it responds.
    pub(super) commits: Option<u64>,
    pub(super) urgency: Urgency,
}

impl Ask {
    pub(super) fn new(method: Method, url: Url) -> Self {
        let (headers, urgency) = (HeaderMap::new(), Urgency::Reader);
        Self { method, url, headers, body: None, is_secret: false, commits: None, urgency }
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
    clients: Clients,
    stall: Duration,
    /// Time limit for a token that a request needs.
    pub(super) patience: Duration,
}

impl Transport {
    pub(super) fn new(settings: &Settings) -> Self {
        Self { clients: Clients::new(settings), stall: settings.stall, patience: settings.patience }
    }

    /// Whether a host has sent a response by HTTP/2.
    pub(super) fn is_http2(&self, host: &str) -> bool {
        self.clients.is_http2(host)
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
            let elsewhere = (!is_own).then(|| authority(&url).unwrap_or_default());
            let at = |cause: Cause| cause.at(elsewhere.as_deref());
            let versions = self.clients.versions(&url, &headers, ask.body.as_ref());
            let client = self.clients.client(route, versions, ask.urgency).map_err(at)?;
            let sent = self.send_once(&client, route, ask, url.clone(), headers);
            let response = patience::wait(sent).await;
            if response.as_ref().is_err_and(Cause::is_late) {
                self.clients.renew(&client.id);
                let host = authority(&url).unwrap_or_default();
                self.clients.failed(&client.id, &host, Http2Failure::Unknown);
            }
            let response = response.map_err(at)?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(Answer { response, is_own });
            }
            let next = location(response.headers(), &url)?;
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(Cause::Downgrade(authority(&next).unwrap_or_default()));
            }
            if ask.is_secret && next.origin() != base.origin() {
                let host = authority(&next).unwrap_or_default();
                return Err(Cause::Protocol(format!("it redirects credentials to {host}")));
            }
            take_end(response);
            url = next;
        }
        Err(Cause::Protocol(format!("more than {REDIRECTS_MAX} redirects")))
    }

    async fn send_once(
        &self,
        client: &NumberedClient,
        route: &Route,
        ask: &Ask,
        url: Url,
        headers: HeaderMap,
    ) -> Result<Response, Cause> {
        let host = authority(&url).unwrap_or_default();
        let sent = Arc::new(AtomicU64::new(0));
        let mut request = client.client.request(ask.method.clone(), url).headers(headers);
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
                let mut response = result.map_err(|error| {
                    if !error.is_connect() {
                        self.clients.failed(&client.id, &host, Http2Failure::of(&error));
                    }
                    Cause::of_request(error, &host, self.clients.connect_timeout(route))
                })?;
                if response.version() == Version::HTTP_2 {
                    self.clients.has_http2(&host);
                }
                response.extensions_mut().insert(client.id.clone());
                return Ok(response);
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
                Ok(Ok(Some(chunk))) => Ok(Some(chunk)),
                Ok(Ok(None)) => check_end(response).map(|()| None),
                Ok(Err(error)) => {
                    if let Some(client) = response.extensions().get::<ClientId>() {
                        let host = authority(response.url()).unwrap_or_default();
                        self.clients.failed(client, &host, Http2Failure::of(&error));
                    }
                    // The connection already exists, so the connect timeout in the error does not matter.
                    Err(Cause::of_request(error, "", self.stall))
                }
                Err(_elapsed) => Err(Cause::Stalled(self.stall)),
            }
        };
        let chunk = patience::wait(next).await;
        if chunk.as_ref().is_err_and(Cause::is_late)
            && let Some(client) = response.extensions().get::<ClientId>()
        {
            self.clients.renew(client);
        }
        let chunk = chunk?;
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
}

/// Takes the end of a response in the background, because the rest is short and not needed. Otherwise the stream of
/// HTTP/2 would be reset, and servers close connections with many resets.
pub(super) fn take_end(mut response: Response) {
    if response.version() != Version::HTTP_2 {
        return;
    }
    let end = async move {
        let mut taken = 0;
        while taken <= END_BYTES
            && let Ok(Some(chunk)) = response.chunk().await
        {
            taken += chunk.len();
        }
    };
    drop(tokio::spawn(async { tokio::time::timeout(END_TIME, end).await.is_ok() }));
}

/// Fails if a response has fewer bytes than its header announces. In HTTP/2, a server can end a response early without
/// an error. Source: RFC 9113, 8.1.
fn check_end(response: &Response) -> Result<(), Cause> {
    let left = response.content_length().unwrap_or(0);
    if left == 0 {
        return Ok(());
    }
    let expected = response.headers().get(CONTENT_LENGTH);
    let expected = expected.and_then(|it| it.to_str().ok()?.parse().ok()).unwrap_or(left);
    Err(Cause::Short { actual: expected.saturating_sub(left), expected })
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
