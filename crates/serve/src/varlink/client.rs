//! A program that asks a service.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use kernel::process::is_unread;
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use zlink::Call;
use zlink::tokio::unix::{self, Connection};

use super::MethodCall;

/// How long a client tries to get into the queue of a service.
const QUEUED: Duration = Duration::from_secs(5);
/// The time between two attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// How often a client looks whether the service has read its call.
const LOOK: Duration = Duration::from_millis(200);

/// How long a client waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// For the answer, once the service has read the call.
    pub(crate) answer: Duration,
    /// Until the service reads the call. One that has connections wait says itself when they have waited for too long. This is
    /// for one that has stopped.
    pub(crate) line: Duration,
}

impl From<Duration> for Patience {
    /// For a service that has no connection wait.
    fn from(answer: Duration) -> Self {
        Self { answer, line: Duration::ZERO }
    }
}

/// A connection to a service.
#[derive(Debug)]
pub(crate) struct Client {
    runtime: tokio::runtime::Runtime,
    connection: Connection,
    /// The same socket.
    socket: OwnedFd,
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum CallError<E> {
    /// The service says why.
    Refused(E),
    /// It does not know the method, or a parameter.
    Unknown(zlink::varlink_service::OwnedError),
    /// It cannot be talked to.
    Talk(String),
}

impl Client {
    /// Connects to the service at a socket. `None` if there is none. No thread is started.
    ///
    /// # Errors
    /// When a socket is there, and cannot be connected to.
    pub(crate) fn connect(socket: &Path) -> io::Result<Option<Self>> {
        if rustix::fs::stat(socket).is_err() {
            return Ok(None);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let connected = runtime.block_on(async {
            let deadline = Instant::now() + QUEUED;
            loop {
                match unix::connect(socket).await {
                    // More connections wait for the service than its queue takes: unix(7), `EAGAIN`.
                    Err(zlink::Error::Io(error))
                        if error.kind() == io::ErrorKind::WouldBlock
                            && Instant::now() < deadline =>
                    {
                        tokio::time::sleep(PAUSE).await;
                    }
                    connected => return connected,
                }
            }
        });
        match connected {
            Ok(connection) => {
                let socket = connection.read().read_half().as_fd().try_clone_to_owned()?;
                Ok(Some(Self { runtime, connection, socket }))
            }
            Err(zlink::Error::Io(error)) => match error.kind() {
                // One that has ended without taking it away.
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Ok(None),
                _ => Err(error),
            },
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Calls a method, with descriptors, and waits for the answer. `E` reads the service's own errors.
    pub(crate) fn call<R: DeserializeOwned + Debug, E: DeserializeOwned + Debug>(
        &mut self,
        method: &str,
        parameters: serde_json::Value,
        descriptors: Vec<OwnedFd>,
        patience: impl Into<Patience>,
    ) -> Result<(R, Vec<OwnedFd>), CallError<E>> {
        let talk = |error: &dyn std::error::Error| CallError::Talk(error.to_string());
        let call = Call::new(MethodCall { method: method.to_owned(), parameters });
        let patience = patience.into();
        let (connection, socket) = (&mut self.connection, &self.socket);
        let answered = self.runtime.block_on(async {
            let mut asked = pin!(connection.call_method::<_, R, E>(&call, descriptors));
            let begun = Instant::now();
            let mut deadline = begun + patience.answer;
            loop {
                let look = deadline.min(Instant::now() + LOOK);
                match tokio::time::timeout_at(look, asked.as_mut()).await {
                    Ok(answered) => return Ok(answered),
                    Err(_) if begun.elapsed() < patience.line && is_unread(socket.as_fd()) => {
                        deadline = Instant::now() + patience.answer;
                    }
                    Err(error) if Instant::now() >= deadline => return Err(error),
                    Err(_) => {}
                }
            }
        });
        let answered = answered.map_err(|error| talk(&error))?;
        let (reply, descriptors) = answered.map_err(|error| match error {
            zlink::Error::VarlinkService(error) => CallError::Unknown(error),
            error => talk(&error),
        })?;
        let reply = reply.map_err(CallError::Refused)?;
        let lacks = || CallError::Talk("its answer says nothing".to_owned());
        Ok((reply.into_parameters().ok_or_else(lacks)?, descriptors))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Reply {
        count: u32,
    }

    /// What a client gets of a service that answers after a second, and reads nothing.
    fn ask(patience: Patience) -> Result<u32, String> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                std::thread::sleep(Duration::from_secs(1));
                // A client that has gone hears nothing.
                let _told = stream.write_all(b"{\"parameters\":{\"count\":7}}\0");
            });
            let mut client = Client::connect(&socket).unwrap().unwrap();
            let nothing = serde_json::Value::Null;
            let called = client.call::<Reply, Reply>("a.b.C", nothing, Vec::new(), patience);
            called.map(|it| it.0.count).map_err(|it| format!("{it:?}"))
        })
    }

    #[test]
    fn a_client_waits_as_long_as_its_call_is_not_read() {
        let answer = Duration::from_millis(50);
        assert_eq!(ask(Patience { answer, line: Duration::from_secs(600) }), Ok(7));
        let error = ask(Patience::from(answer)).unwrap_err();
        assert!(error.contains("deadline"), "{error}");
    }
}
