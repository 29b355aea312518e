//! A server of HTTP/2 and HTTP/1.1 over TLS, which behaves as a test determines.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue, Response, Version};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Barrier;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Time in which the bytes before a reset leave the server.
const FLUSH: Duration = Duration::from_millis(200);

/// A request.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    /// Number of the connection, from 0.
    pub(super) connection: usize,
    pub(super) version: Version,
    pub(super) method: String,
    /// Path with its query.
    pub(super) path: String,
    pub(super) headers: HeaderMap,
}

impl Asked {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|it| it.to_str().unwrap())
    }

    pub(super) fn is_http2(&self) -> bool {
        self.version == Version::HTTP_2
    }
}

/// How a connection ends.
#[derive(Debug, Clone, Copy)]
pub(super) enum Close {
    /// The requests that have arrived are answered.
    Gracefully,
    /// No further request is answered.
    Abruptly(Reason),
    /// The server closes the connection without a word.
    Silently,
}

/// The server's reaction to a request. On HTTP/1.1, those that need HTTP/2 close the connection.
#[derive(Clone)]
pub(super) enum Act {
    /// Sends the body, or the requested range of it.
    Send(Bytes),
    /// Does the same once as many requests wait as the barrier has room for.
    SendTogether(Arc<Barrier>, Bytes),
    /// Sends the body, and a while later the end of the stream.
    SendEndLater(Bytes),
    /// Sends this status, with a header.
    Status(u16, &'static str, String),
    Reset(Reason),
    /// Sends nothing.
    Wait,
    /// Resets the stream after half of the body.
    ResetHalfway(Bytes, Reason),
    /// Ends the stream after half of the body that its header announces.
    EndHalfway(Bytes),
    /// Closes the connection. If it closes gracefully, sends the body before.
    Close(Close, Bytes),
}

struct State {
    act: Box<dyn Fn(&Asked) -> Act + Send + Sync>,
    asked: Mutex<Vec<Asked>>,
    /// Bodies of requests.
    bodies: Mutex<Vec<Vec<u8>>>,
    connections: AtomicUsize,
    /// Number of bytes of bodies for which HTTP/2 clients have given room.
    sent: AtomicU64,
    /// For each [`Act::SendEndLater`], whether the client has reset the stream before the end.
    resets: Mutex<Vec<bool>>,
}

/// The server, which runs until the test ends.
pub(super) struct Http2Server {
    pub(super) address: SocketAddr,
    state: Arc<State>,
}

impl Http2Server {
    /// Starts a server that offers these protocols, the preferred one first.
    pub(super) fn start(
        mut config: rustls::ServerConfig,
        protocols: &[&str],
        act: impl Fn(&Asked) -> Act + Send + Sync + 'static,
    ) -> Self {
        config.alpn_protocols = protocols.iter().map(|it| it.as_bytes().to_vec()).collect();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            act: Box::new(act),
            asked: Mutex::default(),
            bodies: Mutex::default(),
            connections: AtomicUsize::new(0),
            sent: AtomicU64::new(0),
            resets: Mutex::default(),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async move {
                let listener = TcpListener::from_std(listener).unwrap();
                let acceptor = TlsAcceptor::from(Arc::new(config));
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(serve(Arc::clone(&shared), acceptor.clone(), stream));
                }
            });
        });
        Self { address, state }
    }

    /// Returns `127.0.0.1:PORT`.
    pub(super) fn host(&self) -> String {
        self.address.to_string()
    }

    pub(super) fn asked(&self) -> Vec<Asked> {
        self.state.asked.lock().unwrap().clone()
    }

    pub(super) fn bodies(&self) -> Vec<Vec<u8>> {
        self.state.bodies.lock().unwrap().clone()
    }

    pub(super) fn resets(&self) -> Vec<bool> {
        self.state.resets.lock().unwrap().clone()
    }

    /// Number of connections with a complete handshake.
    pub(super) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    pub(super) fn sent(&self) -> u64 {
        self.state.sent.load(Ordering::SeqCst)
    }
}

async fn serve(state: Arc<State>, acceptor: TlsAcceptor, stream: TcpStream) {
    // A client may refuse the certificate.
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let number = state.connections.fetch_add(1, Ordering::SeqCst);
    // The connection may end at any time, which is not an error of the server.
    if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
        let _ended = http2(&state, number, stream).await;
    } else {
        let _ended = http1(&state, number, stream).await;
    }
}

async fn http2(
    state: &Arc<State>,
    connection: usize,
    stream: TlsStream<TcpStream>,
) -> Result<(), h2::Error> {
    let mut server = h2::server::handshake(stream).await?;
    // A response that is dropped resets its stream.
    let mut waiting = Vec::new();
    while let Some(accepted) = server.accept().await {
        let (request, mut respond) = accepted?;
        let (head, body) = request.into_parts();
        let asked = Asked {
            connection,
            version: Version::HTTP_2,
            method: head.method.to_string(),
            path: head.uri.path_and_query().unwrap().to_string(),
            headers: head.headers,
        };
        state.asked.lock().unwrap().push(asked.clone());
        let act = match (state.act)(&asked) {
            Act::Close(Close::Silently, _) => return Ok(()),
            Act::Close(Close::Abruptly(reason), _) => {
                server.abrupt_shutdown(reason);
                continue;
            }
            Act::Close(Close::Gracefully, body) => {
                server.graceful_shutdown();
                Act::Send(body)
            }
            Act::Wait => {
                waiting.push(respond);
                continue;
            }
            Act::Reset(reason) => {
                respond.send_reset(reason);
                continue;
            }
            act => act,
        };
        let state = Arc::clone(state);
        tokio::spawn(async move {
            let _ended = reply(&state, &asked, act, body, respond).await;
        });
    }
    Ok(())
}

/// Sends the response to a request.
async fn reply(
    state: &State,
    asked: &Asked,
    act: Act,
    mut body: RecvStream,
    mut respond: SendResponse<Bytes>,
) -> Result<(), h2::Error> {
    let mut received = Vec::new();
    while let Some(bytes) = body.data().await {
        let bytes = bytes?;
        body.flow_control().release_capacity(bytes.len())?;
        received.extend_from_slice(&bytes);
    }
    state.bodies.lock().unwrap().push(received);
    if let Act::SendTogether(others, _) = &act {
        others.wait().await;
    }
    let (status, headers, body) = head(asked, &act);
    let mut response = Response::new(());
    *response.status_mut() = status.try_into().unwrap();
    *response.headers_mut() = headers;
    let mut stream = respond.send_response(response, body.is_empty())?;
    let half = body.slice(..body.len() / 2);
    match act {
        Act::ResetHalfway(_, reason) => {
            send(state, &mut stream, half, false).await?;
            tokio::time::sleep(FLUSH).await;
            stream.send_reset(reason);
        }
        Act::EndHalfway(_) => send(state, &mut stream, half, true).await?,
        Act::SendEndLater(_) => {
            send(state, &mut stream, body, false).await?;
            tokio::time::sleep(FLUSH).await;
            let reset = poll_fn(|context| Poll::Ready(stream.poll_reset(context).is_ready())).await;
            state.resets.lock().unwrap().push(reset);
            stream.send_data(Bytes::new(), true)?;
        }
        _ if body.is_empty() => {}
        _ => send(state, &mut stream, body, true).await?,
    }
    Ok(())
}

/// Sends bytes as far as the client has room for them.
async fn send(
    state: &State,
    stream: &mut SendStream<Bytes>,
    mut bytes: Bytes,
    is_end: bool,
) -> Result<(), h2::Error> {
    while !bytes.is_empty() {
        stream.reserve_capacity(bytes.len());
        let Some(room) = poll_fn(|context| stream.poll_capacity(context)).await else {
            return Ok(());
        };
        let piece = bytes.split_to(room?.min(bytes.len()));
        state.sent.fetch_add(piece.len() as u64, Ordering::SeqCst);
        stream.send_data(piece, is_end && bytes.is_empty())?;
    }
    Ok(())
}

/// Returns the status, the headers and the body of a response.
fn head(asked: &Asked, act: &Act) -> (u16, HeaderMap, Bytes) {
    let mut headers = HeaderMap::new();
    let mut add = |name: &'static str, value: &str| {
        let value = HeaderValue::from_str(value).unwrap();
        headers.insert(HeaderName::from_static(name), value);
    };
    let body = match act {
        Act::Status(status, name, value) => {
            add(name, value);
            add("content-length", "0");
            return (*status, headers, Bytes::new());
        }
        Act::Reset(_) | Act::Wait => Bytes::new(),
        Act::Send(body)
        | Act::SendTogether(_, body)
        | Act::SendEndLater(body)
        | Act::ResetHalfway(body, _)
        | Act::EndHalfway(body)
        | Act::Close(_, body) => body.clone(),
    };
    let range = asked.header("range").and_then(|range| range.strip_prefix("bytes="));
    let (status, body) = match range.and_then(|range| range.split_once('-')) {
        None => (200, body),
        Some((first, last)) => {
            let (first, last) = (first.parse().unwrap(), last.parse().unwrap_or(body.len() - 1));
            add("content-range", &format!("bytes {first}-{last}/{}", body.len()));
            (206, body.slice(first..=last))
        }
    };
    add("content-length", &body.len().to_string());
    let body = if asked.method == "HEAD" { Bytes::new() } else { body };
    (status, headers, body)
}

async fn http1(
    state: &State,
    connection: usize,
    stream: TlsStream<TcpStream>,
) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let mut words = line.split_whitespace();
        let (method, path) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
        let mut headers = HeaderMap::new();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        let asked = Asked { connection, version: Version::HTTP_11, method, path, headers };
        let length = asked.header("content-length").map_or(0, |it| it.parse().unwrap());
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        state.bodies.lock().unwrap().push(body);
        state.asked.lock().unwrap().push(asked.clone());
        let act = (state.act)(&asked);
        if !matches!(act, Act::Send(_) | Act::SendTogether(..) | Act::Status(..)) {
            return Ok(());
        }
        if let Act::SendTogether(others, _) = &act {
            others.wait().await;
        }
        let (status, headers, body) = head(&asked, &act);
        let mut text = format!("HTTP/1.1 {status} X\r\n");
        for (name, value) in &headers {
            text += &format!("{name}: {}\r\n", value.to_str().unwrap());
        }
        stream.write_all(format!("{text}\r\n").as_bytes()).await?;
        stream.write_all(&body).await?;
        stream.flush().await?;
    }
}
