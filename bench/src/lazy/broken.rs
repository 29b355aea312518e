//! A proxy that breaks the connection to a registry in several ways.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

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

impl Break {
    const ALL: [Self; 7] = [
        Self::Nothing,
        Self::Gone,
        Self::Silent,
        Self::Refused,
        Self::Cut,
        Self::Flipped,
        Self::Whole,
    ];

    fn number(self) -> u8 {
        let place = Self::ALL.iter().position(|it| *it == self);
        place.and_then(|it| u8::try_from(it).ok()).unwrap_or_default()
    }
}

/// Reads of more bytes than this contain data besides a response's header.
const DATA: usize = 4096;

/// A proxy that forwards connections until this process ends.
#[derive(Debug)]
pub(super) struct BrokenProxy {
    /// The proxy's host and port.
    pub(super) host: String,
    state: Arc<AtomicU8>,
}

impl BrokenProxy {
    pub(super) fn to(server: &str) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let host = listener.local_addr()?.to_string();
        let state = Arc::new(AtomicU8::new(Break::Nothing.number()));
        let (server, of_all) = (server.to_owned(), Arc::clone(&state));
        thread::spawn(move || {
            for client in listener.incoming() {
                let (server, state) = (server.clone(), Arc::clone(&of_all));
                // A broken connection is reported and retried by the client, so its error is ignored.
                thread::spawn(move || drop(client.and_then(|it| pass(it, &server, &state))));
            }
        });
        Ok(Self { host, state })
    }

    pub(super) fn set(&self, how: Break) {
        self.state.store(how.number(), Ordering::SeqCst);
    }
}

fn now(state: &AtomicU8) -> Break {
    Break::ALL[usize::from(state.load(Ordering::SeqCst)) % Break::ALL.len()]
}

fn pass(client: TcpStream, server: &str, state: &Arc<AtomicU8>) -> io::Result<()> {
    if now(state) == Break::Gone {
        return client.shutdown(Shutdown::Both);
    }
    let server = TcpStream::connect(server)?;
    let (mut requests, mut answers) = (client.try_clone()?, client.try_clone()?);
    let (mut to_server, of_requests) = (server.try_clone()?, Arc::clone(state));
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = requests.read(&mut buffer) {
            let done = match now(&of_requests) {
                Break::Gone => break,
                Break::Silent => Ok(()),
                Break::Refused => answers
                    .write_all(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"),
                how => {
                    if how == Break::Whole {
                        forget_range(&mut buffer[..read]);
                    }
                    to_server.write_all(&buffer[..read])
                }
            };
            if done.is_err() {
                break;
            }
        }
        drop(answers.shutdown(Shutdown::Both));
        drop(to_server.shutdown(Shutdown::Write));
    });
    let (mut server, mut client) = (server, client);
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = match server.read(&mut buffer)? {
            0 => return client.shutdown(Shutdown::Both),
            read => read,
        };
        match now(state) {
            Break::Cut if read > DATA => {
                client.write_all(&buffer[..read / 2])?;
                return client.shutdown(Shutdown::Both);
            }
            // The middle of the buffer is behind the response's header.
            Break::Flipped if read > DATA => buffer[read / 2] ^= 0x10,
            Break::Silent => continue,
            _ => {}
        }
        client.write_all(&buffer[..read])?;
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
    #[test]
    fn a_range_is_not_asked_for() {
        let mut request = *b"GET / HTTP/1.1\r\nHost: a\r\nRange: bytes=1-2\r\n\r\n";
        super::forget_range(&mut request);
        assert_eq!(&request, b"GET / HTTP/1.1\r\nHost: a\r\nXange: bytes=1-2\r\n\r\n");
    }
}
