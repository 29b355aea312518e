//! Serves metrics by HTTP, with limits for clients.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HOST, HeaderValue};
use hyper::http::request::Parts as Head;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use store::Who;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::address::MetricsAddress;
use crate::http::connection::Patient;
use crate::socket::{SocketFile, listen};
use crate::unpoisoned::lock;

/// Maximum number of connections. A further one ends the oldest, so that silent clients do not keep kubelet's health
/// checks from the service.
const CONNECTIONS: usize = 256;
/// Maximum time from a connection to the end of its first request's head. A client that sends a request takes much
/// less.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);
/// Maximum time for the head of a request, and between two requests. Prometheus scrapes once a minute by default.
const HEAD_PATIENCE: Duration = Duration::from_secs(120);
/// Maximum size of the head of a request, in bytes, and number of its headers.
const HEAD_MAX: (usize, usize) = (16 << 10, 64);
/// How long a request waits for another one. Prometheus gives up after ten seconds by default.
const TURN: Duration = Duration::from_secs(5);
/// How long metrics are sent again, so that clients cannot keep a processor busy.
const FRESH: Duration = Duration::from_secs(1);
/// How long the check of the engine's socket may take.
const CHECK: Duration = Duration::from_secs(2);
/// Pause after the kernel could not accept a connection, for example because there are no descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Media type of metrics. Source: Prometheus, "Exposition formats".
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// A socket at which clients request metrics.
#[derive(Debug)]
pub struct MetricsListener {
    address: MetricsAddress,
    socket: ListeningSocket,
    /// The file of the socket, which is removed at the end.
    file: Option<SocketFile>,
}

#[derive(Debug)]
enum ListeningSocket {
    Network(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener),
}

impl MetricsListener {
    /// Listens at an address.
    ///
    /// # Errors
    /// If the address is in use or not of this host, or if other users could replace the socket.
    pub fn bind(address: &MetricsAddress, who: Who) -> io::Result<Self> {
        match address {
            MetricsAddress::Network(wanted) => {
                let socket = std::net::TcpListener::bind(wanted)?;
                socket.set_nonblocking(true)?;
                // With port 0, the kernel has chosen the port.
                let address = MetricsAddress::Network(socket.local_addr()?);
                Ok(Self { address, socket: ListeningSocket::Network(socket), file: None })
            }
            MetricsAddress::Socket(path) => {
                let socket = listen(path, who, 0o600)?;
                socket.set_nonblocking(true)?;
                let file = Some(SocketFile::at(path));
                Ok(Self { address: address.clone(), socket: ListeningSocket::Unix(socket), file })
            }
        }
    }

    /// Returns the address, with the port that the kernel has chosen.
    #[must_use]
    pub const fn address(&self) -> &MetricsAddress {
        &self.address
    }

    /// Takes the file of the socket, so that the caller can remove it at the end.
    pub(crate) fn take_file(&mut self) -> Option<SocketFile> {
        self.file.take()
    }
}

/// The content of the service.
pub(crate) struct MetricsPages {
    /// Returns the metrics.
    pub(crate) metrics: Box<dyn Fn() -> String + Send + Sync>,
    /// The socket of the service for engines. The service is healthy if a client can connect there.
    pub(crate) engine_socket: PathBuf,
}

/// Serves metrics until the runtime ends.
pub(crate) async fn serve_metrics(listener: MetricsListener, pages: MetricsPages) {
    let MetricsListener { address, socket, .. } = listener;
    // Programs on this host include browsers, whose pages reach loopback by DNS rebinding.
    let checks_host = address.is_local() && matches!(address, MetricsAddress::Network(_));
    let service = Arc::new(MetricsService {
        pages,
        checks_host,
        connections: Mutex::default(),
        turn: Arc::new(Semaphore::new(1)),
        last: Mutex::default(),
        first_patience: FIRST_PATIENCE,
    });
    let served = match socket {
        ListeningSocket::Network(socket) => accept_network(&service, socket).await,
        ListeningSocket::Unix(socket) => accept_unix(&service, socket).await,
    };
    let Err(error) = served;
    tracing::error!(%error, %address, "cannot serve metrics");
}

async fn accept_network(
    service: &Arc<MetricsService>,
    socket: std::net::TcpListener,
) -> io::Result<Infallible> {
    let socket = tokio::net::TcpListener::from_std(socket)?;
    loop {
        match socket.accept().await {
            Ok((stream, _)) => service.connected(stream),
            Err(error) => pause(&error).await,
        }
    }
}

async fn accept_unix(
    service: &Arc<MetricsService>,
    socket: std::os::unix::net::UnixListener,
) -> io::Result<Infallible> {
    let socket = tokio::net::UnixListener::from_std(socket)?;
    loop {
        match socket.accept().await {
            Ok((stream, _)) => service.connected(stream),
            Err(error) => pause(&error).await,
        }
    }
}

async fn pause(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection for metrics");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

struct MetricsService {
    pages: MetricsPages,
    /// Whether requests must name this host by an IP address or as `localhost`.
    checks_host: bool,
    /// The open connections, oldest first.
    connections: Mutex<VecDeque<AbortHandle>>,
    /// Lets one thread at a time collect metrics.
    turn: Arc<Semaphore>,
    /// The last metrics, and when they were collected.
    last: Mutex<Option<(Instant, Bytes)>>,
    /// [`FIRST_PATIENCE`].
    first_patience: Duration,
}

type Page = Response<Full<Bytes>>;

fn page(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Page {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn refusal(status: StatusCode, text: &'static str) -> Page {
    page(status, TEXT, text)
}

impl MetricsService {
    fn connected<S>(self: &Arc<Self>, stream: S)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = Arc::clone(self);
        let connection = tokio::spawn(async move {
            let has_asked = AtomicBool::new(false);
            let answer = service_fn(|request: Request<Incoming>| {
                has_asked.store(true, Ordering::Relaxed);
                let service = Arc::clone(&service);
                let (head, _no_body) = request.into_parts();
                async move { Ok::<_, Infallible>(service.answer(&head).await) }
            });
            let mut serving = pin!(
                http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_PATIENCE)
                    .max_buf_size(HEAD_MAX.0)
                    .max_headers(HEAD_MAX.1)
                    .serve_connection(TokioIo::new(Patient::new(stream)), answer)
            );
            let served = match timeout(service.first_patience, &mut serving).await {
                Ok(served) => served,
                Err(_) if has_asked.load(Ordering::Relaxed) => serving.await,
                Err(_) => return tracing::debug!("a client sent no request for metrics"),
            };
            if let Err(error) = served {
                tracing::debug!(%error, "a connection for metrics ended");
            }
        });
        let mut connections = lock(&self.connections);
        connections.retain(|it| !it.is_finished());
        if connections.len() >= CONNECTIONS
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        connections.push_back(connection.abort_handle());
    }

    async fn answer(self: &Arc<Self>, request: &Head) -> Page {
        if self.checks_host && !names_this_host(request.headers.get(HOST)) {
            return refusal(StatusCode::FORBIDDEN, "the header Host names another host\n");
        }
        // hyper sends no body in response to HEAD.
        if !matches!(request.method, Method::GET | Method::HEAD) {
            let mut refusal = refusal(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
            refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refusal;
        }
        match request.uri.path() {
            "/metrics" => self.metrics().await,
            "/healthz" => self.health().await,
            _ => refusal(StatusCode::NOT_FOUND, "there are /metrics and /healthz\n"),
        }
    }

    async fn metrics(self: &Arc<Self>) -> Page {
        const BUSY: &str = "other clients wait for metrics\n";
        let turn = timeout(TURN, Arc::clone(&self.turn).acquire_owned());
        let Ok(Ok(turn)) = turn.await else {
            return refusal(StatusCode::SERVICE_UNAVAILABLE, BUSY);
        };
        let service = Arc::clone(self);
        let collect = move || {
            let text = service.recent_metrics();
            // If the client is gone, the turn ends when the thread is free.
            drop(turn);
            text
        };
        match tokio::task::spawn_blocking(collect).await {
            Ok(text) => page(StatusCode::OK, METRICS, text),
            // A panic was printed.
            Err(_) => refusal(StatusCode::INTERNAL_SERVER_ERROR, "cannot collect metrics\n"),
        }
    }

    fn recent_metrics(&self) -> Bytes {
        if let Some((at, text)) = &*lock(&self.last)
            && at.elapsed() < FRESH
        {
            return text.clone();
        }
        let text = Bytes::from((self.pages.metrics)());
        *lock(&self.last) = Some((Instant::now(), text.clone()));
        text
    }

    /// Checks that an engine could connect. The socket of a running service may have been removed.
    async fn health(&self) -> Page {
        let connect = tokio::net::UnixStream::connect(&self.pages.engine_socket);
        match timeout(CHECK, connect).await {
            Ok(Ok(_)) => page(StatusCode::OK, TEXT, "ok\n"),
            Ok(Err(error)) => {
                tracing::warn!(%error, "engines cannot connect to the service");
                refusal(StatusCode::SERVICE_UNAVAILABLE, "engines cannot connect\n")
            }
            Err(_) => refusal(StatusCode::SERVICE_UNAVAILABLE, "the service does not respond\n"),
        }
    }
}

/// Whether the header `Host` is an IP address or `localhost`, each perhaps with a port. All browsers send the header.
fn names_this_host(host: Option<&HeaderValue>) -> bool {
    let Some(host) = host else { return true };
    let Ok(host) = host.to_str() else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|it| it.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn service(
        address: &str,
        engine_socket: PathBuf,
    ) -> (tokio::runtime::Runtime, MetricsListener) {
        let address = MetricsAddress::parse(address).unwrap();
        let listener = MetricsListener::bind(&address, Who::this_process()).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let pages = MetricsPages { metrics: Box::new(|| "some 1\n".to_owned()), engine_socket };
        drop(runtime.spawn(serve_metrics(copy(&listener), pages)));
        (runtime, listener)
    }

    /// Returns a second descriptor of the listening socket.
    fn copy(listener: &MetricsListener) -> MetricsListener {
        let socket = match &listener.socket {
            ListeningSocket::Network(socket) => {
                ListeningSocket::Network(socket.try_clone().unwrap())
            }
            ListeningSocket::Unix(socket) => ListeningSocket::Unix(socket.try_clone().unwrap()),
        };
        MetricsListener { address: listener.address.clone(), socket, file: None }
    }

    fn answer(mut stream: impl std::io::Read + std::io::Write, request: &str) -> String {
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    fn get(listener: &MetricsListener, path: &str, host: &str) -> String {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        match listener.address() {
            MetricsAddress::Network(address) => {
                answer(TcpStream::connect(address).unwrap(), &request)
            }
            MetricsAddress::Socket(path) => answer(UnixStream::connect(path).unwrap(), &request),
        }
    }

    #[test]
    fn metrics_and_health_are_served() {
        let folder = tempfile::tempdir().unwrap();
        let engine = folder.path().join("engine");
        let (_runtime, listener) = service("127.0.0.1:0", engine.clone());
        assert!(matches!(listener.address(), MetricsAddress::Network(it) if it.port() > 0));
        let page = get(&listener, "/metrics", "127.0.0.1:9110");
        assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
        assert!(page.to_lowercase().contains("content-type: text/plain; version=0.0.4"), "{page}");
        assert!(page.ends_with("\r\n\r\nsome 1\n"), "{page}");
        let status = |path: &str, host: &str| {
            let page = get(&listener, path, host);
            page.split(' ').nth(1).unwrap().to_owned()
        };
        assert_eq!(status("/", "localhost"), "404");
        // No process listens there, then one does, and then its socket is removed.
        assert_eq!(status("/healthz", "localhost"), "503");
        let engines = UnixListener::bind(&engine).unwrap();
        assert_eq!(status("/healthz", "localhost"), "200");
        std::fs::remove_file(&engine).unwrap();
        assert_eq!(status("/healthz", "localhost"), "503");
        drop(engines);
        let MetricsAddress::Network(address) = listener.address() else { panic!("{listener:?}") };
        let post = "POST /metrics HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        let refused = answer(TcpStream::connect(address).unwrap(), post);
        assert!(refused.starts_with("HTTP/1.1 405 "), "{refused}");
        let head = "HEAD /metrics HTTP/1.1\r\nHost: [::1]:1\r\nConnection: close\r\n\r\n";
        let head = answer(TcpStream::connect(address).unwrap(), head);
        assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
    }

    /// A web page in a browser on this host can make requests to loopback, in the name of another host.
    #[test]
    fn names_of_other_hosts_are_refused() {
        for host in ["127.0.0.1", "127.0.0.1:9110", "[::1]:9110", "[::1]", "LOCALHOST:1"] {
            assert!(names_this_host(Some(&host.parse().unwrap())), "{host}");
        }
        assert!(names_this_host(None));
        for host in ["example.com", "example.com:9110", "127.0.0.1.example.com", "", ":9110", "a]"]
        {
            assert!(!names_this_host(Some(&host.parse().unwrap())), "{host}");
        }
        let folder = tempfile::tempdir().unwrap();
        let (_runtime, listener) = service("127.0.0.1:0", folder.path().join("engine"));
        let page = get(&listener, "/metrics", "rebound.example.com:9110");
        assert!(page.starts_with("HTTP/1.1 403 ") && !page.contains("some 1"), "{page}");
    }

    #[test]
    fn silent_clients_keep_no_other_client_from_the_service() {
        let folder = tempfile::tempdir().unwrap();
        let (_runtime, listener) = service("127.0.0.1:0", folder.path().join("engine"));
        let MetricsAddress::Network(address) = listener.address() else { panic!("{listener:?}") };
        let connect = |_| TcpStream::connect(address).unwrap();
        let mut silent: Vec<_> = (0..CONNECTIONS).map(connect).collect();
        for _ in 0..3 {
            assert!(get(&listener, "/metrics", "localhost").ends_with("some 1\n"));
        }
        // The oldest connections were ended.
        let mut end = [0];
        silent[0].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert!(matches!(silent[0].read(&mut end), Ok(0)));
        // A head without an end is refused.
        let mut long = TcpStream::connect(address).unwrap();
        let _written = long.write_all(&[b'a'; HEAD_MAX.0 + 1]);
        let mut text = String::new();
        let _cut = long.read_to_string(&mut text);
        assert!(!text.contains(" 200 "), "{text}");
    }

    #[test]
    fn a_client_that_asks_for_nothing_is_cut_off() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let pages = MetricsPages {
            metrics: Box::new(|| "some 1\n".to_owned()),
            engine_socket: "/none".into(),
        };
        let service = Arc::new(MetricsService {
            pages,
            checks_host: true,
            connections: Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
            last: Mutex::default(),
            first_patience: Duration::from_millis(300),
        });
        let connect = || {
            let (client, server) = UnixStream::pair().unwrap();
            server.set_nonblocking(true).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            runtime.block_on(async {
                service.connected(tokio::net::UnixStream::from_std(server).unwrap());
            });
            client
        };
        let (mut silent, mut begins, mut asks) = (connect(), connect(), connect());
        begins.write_all(b"GET /metrics HT").unwrap();
        let ask = |client: &mut UnixStream| {
            client.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            let mut page = Vec::new();
            while !page.ends_with(b"some 1\n") {
                let mut part = [0; 512];
                let count = client.read(&mut part).unwrap();
                assert!(count > 0, "the connection ended: {page:?}");
                page.extend_from_slice(&part[..count]);
            }
        };
        ask(&mut asks);
        assert!(matches!(silent.read(&mut [0]), Ok(0)));
        assert!(matches!(begins.read(&mut [0]), Ok(0)));
        // This one may be silent between two requests.
        ask(&mut asks);
    }

    #[test]
    fn many_requests_collect_metrics_once_a_second() {
        let count = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counted = Arc::clone(&count);
        let metrics = move || {
            let count = counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
            format!("some {count}\n")
        };
        let pages = MetricsPages { metrics: Box::new(metrics), engine_socket: "/none".into() };
        let service = MetricsService {
            pages,
            checks_host: true,
            connections: Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
            last: Mutex::default(),
            first_patience: FIRST_PATIENCE,
        };
        assert_eq!(service.recent_metrics(), "some 1\n");
        // An old page is not sent again.
        let old = Instant::now().checked_sub(FRESH).unwrap();
        *lock(&service.last) = Some((old, Bytes::from_static(b"old")));
        assert_eq!(service.recent_metrics(), "some 2\n");
        *lock(&service.last) = Some((Instant::now() + FRESH, Bytes::from_static(b"new")));
        assert_eq!(service.recent_metrics(), "new");
    }

    #[test]
    fn a_socket_is_for_its_owner_only() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        let (_runtime, listener) = service(path.to_str().unwrap(), folder.path().join("engine"));
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // No browser reaches a socket, so the name of the host does not matter.
        assert!(get(&listener, "/metrics", "any.example.com").ends_with("some 1\n"));
        let again = MetricsListener::bind(listener.address(), Who::this_process()).unwrap_err();
        assert!(again.to_string().contains("another service listens"), "{again}");
    }
}
