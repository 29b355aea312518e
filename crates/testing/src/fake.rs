//! An HTTP/1.1 server for tests, which returns correct, false or no data, as the test determines.
#![expect(missing_debug_implementations, reason = "the words of HTTP need no others")]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A request of a client.
#[derive(Debug, Clone, Default)]
pub struct Request {
    pub method: String,
    /// Path with its query; for a proxy, also with the host.
    pub path: String,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
    /// Whether the client has presented a certificate.
    pub has_certificate: bool,
    /// Number of the connection.
    pub connection: usize,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Returns `METHOD /path`.
    pub fn line(&self) -> String {
        format!("{} {}", self.method, self.path)
    }
}

/// Failure while the body is sent.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The connection is reset: before any response, or after this number of bytes.
    Reset(Option<usize>),
    /// The connection is closed after this number of bytes.
    Cut(usize),
    /// The server stops sending after this number of bytes.
    Stall(usize),
    /// The body never ends.
    Endless,
}

#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    fault: Fault,
    delay: Duration,
    /// Delay between two pieces of the body.
    pace: Duration,
    /// Size of a piece, in bytes.
    piece: usize,
}

/// Default size of a piece, in bytes.
const PIECE: usize = 16 << 10;

pub fn reply(status: u16) -> Reply {
    Reply {
        status,
        headers: Vec::new(),
        body: Vec::new(),
        fault: Fault::None,
        delay: Duration::ZERO,
        pace: Duration::ZERO,
        piece: PIECE,
    }
}

/// Returns the body, or the requested range of it.
pub fn content(request: &Request, body: &[u8]) -> Reply {
    let range = request.header("range").and_then(|range| range.strip_prefix("bytes="));
    let Some((first, last)) = range.and_then(|range| range.split_once('-')) else {
        return reply(200).body(body);
    };
    let (first, last) = (first.parse().unwrap(), last.parse().unwrap_or(body.len() - 1));
    let range = format!("bytes {first}-{last}/{}", body.len());
    reply(206).header("content-range", &range).body(&body[first..=last])
}

impl Reply {
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn status(mut self, status: u16) -> Self {
        self.status = status;
        self
    }

    pub fn body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.body = body.as_ref().to_vec();
        self
    }

    pub fn cut(mut self, after: usize) -> Self {
        self.fault = Fault::Cut(after);
        self
    }

    /// Resets the connection after this number of bytes, or before any response.
    pub fn reset(mut self, after: Option<usize>) -> Self {
        self.fault = Fault::Reset(after);
        self
    }

    pub fn stall(mut self, after: usize) -> Self {
        self.fault = Fault::Stall(after);
        self
    }

    pub fn endless(mut self) -> Self {
        self.fault = Fault::Endless;
        self
    }

    pub fn pace(mut self, pace: Duration) -> Self {
        self.pace = pace;
        self
    }

    /// Sends one byte at a time.
    pub fn drip(mut self, pace: Duration) -> Self {
        self.piece = 1;
        self.pace(pace)
    }

    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }
}

type Handler = dyn Fn(&Request, usize) -> Reply + Send + Sync;

/// A server on the loopback address, which runs until the test ends.
pub struct Server {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Request>>>,
    /// Number of bytes of bodies that were sent.
    pub sent: Arc<AtomicU64>,
    /// Number of open connections.
    open: Arc<AtomicUsize>,
}

impl Server {
    /// Starts a server. `answer` gets each request and its number.
    pub fn start(answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_as(answer, plain)
    }

    /// Starts a server. `speak` turns connections into streams.
    pub fn start_as(
        answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static,
        speak: impl Fn(&Job, TcpStream) + Send + Sync + 'static,
    ) -> Self {
        Self::start_on(TcpListener::bind("127.0.0.1:0").unwrap(), answer, speak)
    }

    /// Starts a server of plain HTTP at another address than the loopback one, such as `10.0.0.1:0`.
    pub fn start_at(
        address: &str,
        answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::start_on(TcpListener::bind(address).unwrap(), answer, plain)
    }

    fn start_on(
        listener: TcpListener,
        answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static,
        speak: impl Fn(&Job, TcpStream) + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sent = Arc::new(AtomicU64::new(0));
        let open = Arc::new(AtomicUsize::new(0));
        let job = Arc::new(Job {
            answer: Box::new(answer),
            seen: Arc::clone(&seen),
            sent: Arc::clone(&sent),
            count: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
        });
        let (speak, count) = (Arc::new(speak), Arc::clone(&open));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                count.fetch_add(1, Ordering::SeqCst);
                let (job, speak, count) =
                    (Arc::clone(&job), Arc::clone(&speak), Arc::clone(&count));
                std::thread::spawn(move || {
                    speak(&job, stream.unwrap());
                    count.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, seen, sent, open }
    }

    /// Waits until all requests of disconnected clients were recorded.
    pub fn settle(&self) {
        // Connections are accepted in order, so earlier ones are counted when this one gets its response.
        let mut last = TcpStream::connect(self.address).unwrap();
        last.shutdown(Shutdown::Write).unwrap();
        assert_eq!(last.read(&mut [0]).unwrap(), 0);
        wait_for("nobody is connected", || self.open.load(Ordering::SeqCst) == 0);
    }

    /// Returns `127.0.0.1:PORT`.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    pub fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }

    pub fn lines(&self) -> Vec<String> {
        self.seen().iter().map(Request::line).collect()
    }
}

/// Serves a connection without TLS.
fn plain(job: &Job, stream: TcpStream) {
    let end = stream.try_clone().unwrap();
    if job.serve(stream, |_| false) == Ending::Reset {
        // A socket that is closed with a linger time of zero resets the connection.
        let now = Some(Duration::ZERO);
        rustix::net::sockopt::set_socket_linger(&end, now).unwrap();
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ending {
    Close,
    Reset,
}

pub struct Job {
    answer: Box<Handler>,
    seen: Arc<Mutex<Vec<Request>>>,
    sent: Arc<AtomicU64>,
    count: AtomicUsize,
    connections: AtomicUsize,
}

impl Job {
    pub fn serve<S: Read + Write>(
        &self,
        stream: S,
        has_certificate: impl Fn(&S) -> bool,
    ) -> Ending {
        let mut stream = BufReader::new(stream);
        let connection = self.connections.fetch_add(1, Ordering::SeqCst);
        while let Some(mut request) = read_request(&mut stream) {
            request.connection = connection;
            request.has_certificate = has_certificate(stream.get_ref());
            let number = self.count.fetch_add(1, Ordering::SeqCst);
            self.seen.lock().unwrap().push(request.clone());
            let reply = (self.answer)(&request, number);
            std::thread::sleep(reply.delay);
            // A client may disconnect, which is not an error of the server.
            let written = self.write(stream.get_mut(), &request, &reply);
            if matches!(reply.fault, Fault::Reset(_)) {
                return Ending::Reset;
            }
            if written.is_err() || reply.fault != Fault::None {
                break;
            }
        }
        Ending::Close
    }

    fn write<S: Write>(
        &self,
        stream: &mut S,
        request: &Request,
        reply: &Reply,
    ) -> std::io::Result<()> {
        if reply.fault == Fault::Reset(None) {
            return Ok(());
        }
        let mut head = format!("HTTP/1.1 {} X\r\n", reply.status);
        let has = |name: &str| reply.headers.iter().any(|(other, _)| other == name);
        if !has("content-length") && !has("connection") && reply.fault != Fault::Endless {
            head += &format!("content-length: {}\r\n", reply.body.len());
        }
        for (name, value) in &reply.headers {
            head += &format!("{name}: {value}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        let body: &[u8] = if request.method == "HEAD" { &[] } else { &reply.body };
        match reply.fault {
            Fault::None => self.body(stream, body, reply)?,
            Fault::Cut(after) | Fault::Reset(Some(after)) => {
                self.body(stream, &body[..after], reply)?;
            }
            Fault::Reset(None) => {}
            Fault::Stall(after) => {
                self.body(stream, &body[..after], reply)?;
                std::thread::sleep(Duration::from_secs(20));
            }
            Fault::Endless => loop {
                self.body(stream, body, reply)?;
            },
        }
        if has("connection") {
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        stream.flush()
    }

    fn body<S: Write>(&self, stream: &mut S, body: &[u8], reply: &Reply) -> std::io::Result<()> {
        for piece in body.chunks(reply.piece) {
            std::thread::sleep(reply.pace);
            stream.write_all(piece)?;
            self.sent.fetch_add(piece.len() as u64, Ordering::SeqCst);
        }
        stream.flush()
    }
}

fn read_request<S: Read>(stream: &mut BufReader<S>) -> Option<Request> {
    let mut line = String::new();
    if stream.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let mut words = line.split_whitespace();
    let mut request = Request {
        method: words.next()?.to_owned(),
        path: words.next()?.to_owned(),
        ..Request::default()
    };
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        request.headers.insert(name.to_lowercase(), value.to_owned());
    }
    let length = request.header("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    request.body = body;
    Some(request)
}

/// Forwards a request to the server `host`, with only the first `arrives` bytes of its body, and returns the
/// response.
pub fn forward(host: &str, request: &Request, arrives: usize) -> std::io::Result<Reply> {
    // With HTTP/1.0, the response ends with the connection.
    let mut head = format!("{} {} HTTP/1.0\r\n", request.method, request.path);
    for (name, value) in &request.headers {
        if name != "connection" {
            head += &format!("{name}: {value}\r\n");
        }
    }
    let mut stream = TcpStream::connect(host)?;
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    stream.write_all(&request.body[..arrives])?;
    if arrives < request.body.len() {
        stream.shutdown(Shutdown::Write)?;
    }
    let mut stream = BufReader::new(stream);
    let malformed = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|it| it.parse().ok()).ok_or_else(malformed)?;
    let mut answer = reply(status);
    loop {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        let name = name.to_lowercase();
        // The sender of the response sets the length of its body, unless there is none.
        if name != "connection" && (name != "content-length" || request.method == "HEAD") {
            answer = answer.header(&name, value);
        }
    }
    stream.read_to_end(&mut answer.body)?;
    Ok(answer)
}

/// Protocol for requests to a proxy.
#[derive(Clone, Copy, PartialEq)]
pub enum Manner {
    Connect,
    Socks5,
}

/// Starts a proxy that connects all clients to `target`. Returns its address, and the list of requested names.
pub fn proxy(manner: Manner, target: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let name = match manner {
                Manner::Connect => {
                    let mut reader = BufReader::new(client.try_clone().unwrap());
                    let Some(request) = read_request(&mut reader) else { continue };
                    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
                    request.line()
                }
                Manner::Socks5 => socks5(&mut client),
            };
            log.lock().unwrap().push(name);
            let server = TcpStream::connect(target).unwrap();
            let (mut up_from, mut up_to) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut up_from, &mut up_to));
            std::thread::spawn(move || std::io::copy(&mut &server, &mut &client));
        }
    });
    (address, asked)
}

/// Handles a request of RFC 1928, without authentication. Returns the requested name.
fn socks5(client: &mut TcpStream) -> String {
    let mut take = |count: usize| {
        let mut bytes = vec![0; count];
        client.read_exact(&mut bytes).unwrap();
        bytes
    };
    let methods = take(2)[1];
    take(methods.into());
    client.write_all(&[5, 0]).unwrap();
    let mut take = |count: usize| {
        let mut bytes = vec![0; count];
        client.read_exact(&mut bytes).unwrap();
        bytes
    };
    let head = take(5);
    assert_eq!(head[..3], [5, 1, 0], "a connection");
    let name = match head[3] {
        3 => String::from_utf8(take(head[4].into())).unwrap(),
        1 => {
            let rest = take(3);
            std::net::Ipv4Addr::new(head[4], rest[0], rest[1], rest[2]).to_string()
        }
        4 => {
            let rest = take(15);
            let address = [&head[4..5], &rest].concat();
            let address: [u8; 16] = address.try_into().expect("sixteen bytes");
            let address = std::net::Ipv6Addr::from(address);
            // Without an entry in /etc/hosts, localhost resolves to this address first.
            if address.is_loopback() { "127.0.0.1".to_owned() } else { format!("[{address}]") }
        }
        other => panic!("an address of kind {other}"),
    };
    let port = take(2);
    client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
    format!("{name}:{}", u16::from_be_bytes([port[0], port[1]]))
}

/// Waits for a condition that another thread fulfils.
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
