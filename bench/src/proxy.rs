//! What a client fetches, counted between it and a server of loopback.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Passes connections on for as long as this process lives.
#[derive(Debug)]
pub(super) struct Proxy {
    /// Its host and port.
    pub(super) host: String,
    received: Arc<AtomicU64>,
}

impl Proxy {
    pub(super) fn to(server: &str) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let host = listener.local_addr()?.to_string();
        let received = Arc::new(AtomicU64::new(0));
        let (server, count) = (server.to_owned(), Arc::clone(&received));
        thread::spawn(move || {
            for client in listener.incoming() {
                let (server, count) = (server.clone(), Arc::clone(&count));
                // A connection that breaks is the client's to mend, and is seen there.
                let pass = move || drop(client.and_then(|it| pass(it, &server, &count)));
                thread::spawn(pass);
            }
        });
        Ok(Self { host, received })
    }

    /// Bytes that came from the server since the last call, with HTTP's own.
    pub(super) fn received(&self) -> u64 {
        self.received.swap(0, Ordering::Relaxed)
    }
}

fn pass(client: TcpStream, server: &str, count: &AtomicU64) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    let (mut requests, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        drop(io::copy(&mut requests, &mut to_server));
        drop(to_server.shutdown(Shutdown::Write));
    });
    let (mut server, mut client) = (server, client);
    let mut buffer = vec![0; 1 << 16];
    loop {
        match server.read(&mut buffer)? {
            0 => return client.shutdown(Shutdown::Both),
            read => {
                // Before the client has them, so that a client that has ended was counted.
                count.fetch_add(read.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
                client.write_all(&buffer[..read])?;
            }
        }
    }
}
