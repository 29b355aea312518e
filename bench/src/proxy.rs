//! A proxy that counts a client's traffic with a server on loopback, and can simulate a distant server.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Simulated distance of the server.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Distance {
    /// Delay of each new connection and of each request.
    pub(super) delay: Duration,
    /// Bytes per second of all connections together; none for no limit.
    pub(super) bandwidth: Option<u32>,
}

/// A proxy that forwards connections until this process ends.
#[derive(Debug)]
pub(super) struct Proxy {
    /// The proxy's host and port.
    pub(super) host: String,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    received: AtomicU64,
    requests: AtomicU64,
}

/// A line that all connections share.
#[derive(Debug)]
struct Line {
    distance: Distance,
    /// Time at which the line has transferred all bytes so far.
    free: Mutex<Instant>,
}

impl Line {
    /// Waits until the line has transferred these bytes, after those of all connections before.
    fn pass(&self, bytes: usize) {
        let Some(bandwidth) = self.distance.bandwidth else { return };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let time = Duration::from_secs_f64(f64::from(bytes) / f64::from(bandwidth));
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let until = (*free).max(Instant::now()) + time;
        *free = until;
        drop(free);
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

impl Proxy {
    pub(super) fn to(server: &str) -> io::Result<Self> {
        Self::far(server, Distance::default())
    }

    pub(super) fn far(server: &str, distance: Distance) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let host = listener.local_addr()?.to_string();
        let counts = Arc::new(Counts::default());
        let line = Arc::new(Line { distance, free: Mutex::new(Instant::now()) });
        let (server, all) = (server.to_owned(), Arc::clone(&counts));
        thread::spawn(move || {
            for client in listener.incoming() {
                let (server, all, line) = (server.clone(), Arc::clone(&all), Arc::clone(&line));
                // A broken connection is reported and retried by the client, so its error is ignored.
                let pass = move || drop(client.and_then(|it| pass(it, &server, &all, &line)));
                thread::spawn(pass);
            }
        });
        Ok(Self { host, counts })
    }

    /// Bytes from the server since the last call, including HTTP headers.
    pub(super) fn received(&self) -> u64 {
        self.counts.received.swap(0, Ordering::Relaxed)
    }

    /// Number of clients' requests since the last call.
    pub(super) fn requests(&self) -> u64 {
        self.counts.requests.swap(0, Ordering::Relaxed)
    }
}

fn pass(client: TcpStream, server: &str, counts: &Arc<Counts>, line: &Line) -> io::Result<()> {
    let delay = line.distance.delay;
    // The delay of the connection's handshake.
    thread::sleep(delay);
    let server = TcpStream::connect(server)?;
    for side in [&client, &server] {
        side.set_nodelay(true)?;
    }
    let (mut requests, mut to_server) = (client.try_clone()?, server.try_clone()?);
    let all = Arc::clone(counts);
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = requests.read(&mut buffer) {
            // The benches' clients send a request in one piece, and wait for its response before the next one.
            if [&b"GET "[..], b"HEAD "].iter().any(|it| buffer.starts_with(it)) {
                all.requests.fetch_add(1, Ordering::Relaxed);
                thread::sleep(delay);
            }
            if to_server.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        drop(to_server.shutdown(Shutdown::Write));
    });
    let (mut server, mut client) = (server, client);
    let mut buffer = vec![0; 1 << 16];
    loop {
        match server.read(&mut buffer)? {
            0 => return client.shutdown(Shutdown::Both),
            read => {
                line.pass(read);
                // Counts before the client gets the bytes, so that the traffic of a client that has exited is
                // complete.
                counts.received.fetch_add(read.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
                client.write_all(&buffer[..read])?;
            }
        }
    }
}
