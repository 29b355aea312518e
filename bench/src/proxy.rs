//! A proxy that counts a client's traffic with a server on loopback, and can simulate a distant server, or faults of
//! the connection.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Simulated distance of the server.
#[derive(Debug, Clone, Copy)]
pub(super) struct Distance {
    /// Delay of each new connection and of each request.
    delay: Duration,
    /// Bytes per second of all connections together; none for no limit.
    bandwidth: Option<u32>,
    /// Whether each connection begins with a small congestion window, which doubles in each round trip.
    has_slow_start: bool,
    /// Whether clients use TLS and a token. The proxy then delays what clients send without reading it.
    pub(super) has_tls: bool,
}

/// Bytes of the first congestion window: 10 segments of 1460 bytes. Source: RFC 6928, 2.
const FIRST_WINDOW: u64 = 10 * 1460;
/// Bytes of the largest congestion window: the largest receive buffer of a usual host (`net.ipv4.tcp_rmem`, 6 MiB).
const LARGEST_WINDOW: u64 = 6 << 20;

impl Distance {
    /// A delay in milliseconds, and a bandwidth in Mbit/s.
    pub(super) const fn new(delay: u64, bandwidth: Option<u32>) -> Self {
        let bandwidth = match bandwidth {
            Some(megabits) => Some(megabits * (1_000_000 / 8)),
            None => None,
        };
        let delay = Duration::from_millis(delay);
        Self { delay, bandwidth, has_slow_start: false, has_tls: false }
    }

    /// The same distance, with TCP's slow start. Source: RFC 5681, 3.1.
    pub(super) const fn with_slow_start(self) -> Self {
        Self { has_slow_start: true, ..self }
    }

    /// The same distance of a server that requires TLS and a token.
    pub(super) const fn with_tls(self) -> Self {
        Self { has_tls: true, ..self }
    }
}

/// The fault of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Break {
    Nothing,
    /// Each connection is closed at once.
    Gone,
    /// Requests get no response.
    Silent,
    /// Each request gets status 503.
    Refused,
    /// Responses with data are cut off.
    Cut,
    /// Data has flipped bits.
    Flipped,
    /// Range requests get the whole blob.
    Whole,
}

/// Reads of more bytes than this contain data besides a response's header.
const DATA: usize = 4096;

const REFUSAL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";

/// A proxy that forwards connections until this process ends.
#[derive(Debug)]
pub(super) struct Proxy {
    /// The proxy's host and port.
    pub(super) host: String,
    line: Arc<Line>,
}

/// A line that all connections share.
#[derive(Debug)]
struct Line {
    distance: Distance,
    /// Time at which the line has transferred all bytes so far.
    free: Mutex<Instant>,
    fault: Mutex<Break>,
    received: AtomicU64,
    requests: AtomicU64,
}

/// The congestion window of a connection. Each window of bytes takes a round trip, after which the window doubles. A
/// connection keeps its window when it is idle.
#[derive(Debug)]
struct SlowStart {
    round_trip: Duration,
    window: u64,
    /// When the first bytes of the current window were sent, and their number so far.
    flight: Option<(Instant, u64)>,
}

impl SlowStart {
    const fn new(round_trip: Duration) -> Self {
        Self { round_trip, window: FIRST_WINDOW, flight: None }
    }

    /// Returns how many of these bytes may be sent at `now`, and how long to wait if none may.
    fn admit(&mut self, bytes: u64, now: Instant) -> Result<u64, Duration> {
        let (begun, sent) = match self.flight {
            // All bytes of the flight are acknowledged.
            Some((begun, sent)) if now >= begun + self.round_trip => {
                if sent >= self.window {
                    self.window = (self.window * 2).min(LARGEST_WINDOW);
                }
                (now, 0)
            }
            Some(flight) => flight,
            None => (now, 0),
        };
        let allowed = bytes.min(self.window - sent);
        if allowed == 0 {
            return Err((begun + self.round_trip).saturating_duration_since(now));
        }
        self.flight = Some((begun, sent + allowed));
        Ok(allowed)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Proxy {
    pub(super) fn to(server: &str) -> io::Result<Self> {
        Self::far(server, Distance::new(0, None))
    }

    pub(super) fn far(server: &str, distance: Distance) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let host = listener.local_addr()?.to_string();
        let line = Arc::new(Line {
            distance,
            free: Mutex::new(Instant::now()),
            fault: Mutex::new(Break::Nothing),
            received: AtomicU64::new(0),
            requests: AtomicU64::new(0),
        });
        let (server, all) = (server.to_owned(), Arc::clone(&line));
        thread::spawn(move || {
            for client in listener.incoming() {
                let (server, line) = (server.clone(), Arc::clone(&all));
                // A broken connection is reported and retried by the client, so its error is ignored.
                thread::spawn(move || drop(client.and_then(|it| line.forward(it, &server))));
            }
        });
        Ok(Self { host, line })
    }

    pub(super) fn set(&self, fault: Break) {
        *lock(&self.line.fault) = fault;
    }

    /// Bytes from the server since the last call, including HTTP headers.
    pub(super) fn received(&self) -> u64 {
        self.line.received.swap(0, Ordering::Relaxed)
    }

    /// Number of clients' requests since the last call.
    pub(super) fn requests(&self) -> u64 {
        self.line.requests.swap(0, Ordering::Relaxed)
    }
}

impl Line {
    fn fault(&self) -> Break {
        *lock(&self.fault)
    }

    /// Waits until the line has transferred these bytes, after those of all connections before.
    fn pass(&self, bytes: usize) {
        let Some(bandwidth) = self.distance.bandwidth else { return };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let time = Duration::from_secs_f64(f64::from(bytes) / f64::from(bandwidth));
        let mut free = lock(&self.free);
        let until = (*free).max(Instant::now()) + time;
        *free = until;
        drop(free);
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }

    fn forward(self: Arc<Self>, mut client: TcpStream, server: &str) -> io::Result<()> {
        if self.fault() == Break::Gone {
            return client.shutdown(Shutdown::Both);
        }
        // The delay of the connection's handshake.
        thread::sleep(self.distance.delay);
        let mut server = TcpStream::connect(server)?;
        for side in [&client, &server] {
            side.set_nodelay(true)?;
        }
        let (requests, to_server) = (client.try_clone()?, server.try_clone()?);
        let line = Arc::clone(&self);
        thread::spawn(move || match line.distance.has_tls {
            true => line.delay(requests, to_server),
            false => line.requests(requests, to_server),
        });
        let mut buffer = vec![0; 1 << 16];
        let distance = self.distance;
        let mut slow_start = distance.has_slow_start.then(|| SlowStart::new(distance.delay));
        loop {
            let read = server.read(&mut buffer)?;
            if read == 0 {
                return client.shutdown(Shutdown::Both);
            }
            self.pass(read);
            // Counts before the client gets the bytes, so that the traffic of a client that has exited is complete.
            self.received.fetch_add(read.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
            match self.fault() {
                Break::Cut if read > DATA => {
                    client.write_all(&buffer[..read / 2])?;
                    return client.shutdown(Shutdown::Both);
                }
                // The middle of the buffer is behind the response's header.
                Break::Flipped if read > DATA => buffer[read / 2] ^= 0x10,
                Break::Silent => continue,
                _ => {}
            }
            let mut rest = &buffer[..read];
            while !rest.is_empty() {
                let length = rest.len().try_into().unwrap_or(u64::MAX);
                let admitted = slow_start.as_mut().map(|it| it.admit(length, Instant::now()));
                let (now, later) = match admitted.unwrap_or(Ok(length)) {
                    Ok(bytes) => rest.split_at(bytes.try_into().unwrap_or(rest.len())),
                    Err(wait) => {
                        thread::sleep(wait);
                        continue;
                    }
                };
                client.write_all(now)?;
                rest = later;
            }
        }
    }

    /// Forwards what a client sends, each byte after the delay. So each round trip of the client takes this time: that
    /// of the TLS handshake, and that of each request.
    fn delay(&self, mut client: TcpStream, mut server: TcpStream) {
        let (sender, flights) = mpsc::channel::<(Instant, Vec<u8>)>();
        let writer = thread::spawn(move || {
            for (due, bytes) in flights {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                if server.write_all(&bytes).is_err() {
                    break;
                }
            }
            drop(server.shutdown(Shutdown::Write));
        });
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = client.read(&mut buffer) {
            let flight = (Instant::now() + self.distance.delay, buffer[..read].to_vec());
            if sender.send(flight).is_err() {
                break;
            }
        }
        drop(sender);
        drop(writer.join());
    }

    /// Forwards a client's requests.
    fn requests(&self, mut client: TcpStream, mut server: TcpStream) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = client.read(&mut buffer) {
            // The benches' clients send a request in one piece, and wait for its response before the next one.
            if [&b"GET "[..], b"HEAD "].iter().any(|it| buffer.starts_with(it)) {
                self.requests.fetch_add(1, Ordering::Relaxed);
                thread::sleep(self.distance.delay);
            }
            let request = &mut buffer[..read];
            let done = match self.fault() {
                Break::Gone => break,
                Break::Silent => Ok(()),
                Break::Refused => client.write_all(REFUSAL),
                Break::Whole => {
                    forget_range(request);
                    server.write_all(request)
                }
                _ => server.write_all(request),
            };
            if done.is_err() {
                break;
            }
        }
        if self.fault() != Break::Nothing {
            drop(client.shutdown(Shutdown::Both));
        }
        drop(server.shutdown(Shutdown::Write));
    }
}

/// Renames the range header, so that the server ignores it.
fn forget_range(request: &mut [u8]) {
    const RANGE: &[u8] = b"\r\nrange:";
    let is_range = |it: &[u8]| it.eq_ignore_ascii_case(RANGE);
    if let Some(at) = request.windows(RANGE.len()).position(is_range) {
        request[at + 2] = b'X';
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_takes_a_round_trip_and_doubles() {
        let round_trip = Duration::from_millis(20);
        let mut connection = SlowStart::new(round_trip);
        let mut now = Instant::now();
        for window in [1, 2, 4].map(|it| it * FIRST_WINDOW) {
            assert_eq!(connection.admit(100, now), Ok(100));
            assert_eq!(connection.admit(u64::MAX, now), Ok(window - 100));
            assert_eq!(connection.admit(1, now), Err(round_trip));
            now += round_trip;
        }
        // A window that was not used up does not double.
        assert_eq!(connection.admit(1, now), Ok(1));
        now += round_trip;
        assert_eq!(connection.admit(u64::MAX, now), Ok(8 * FIRST_WINDOW));
    }

    #[test]
    fn a_range_is_not_asked_for() {
        let mut request = *b"GET / HTTP/1.1\r\nHost: a\r\nRange: bytes=1-2\r\n\r\n";
        forget_range(&mut request);
        assert_eq!(&request, b"GET / HTTP/1.1\r\nHost: a\r\nXange: bytes=1-2\r\n\r\n");
    }
}
