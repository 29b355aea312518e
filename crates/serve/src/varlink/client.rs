//! A varlink client that makes blocking calls.

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

use super::messages::MethodCall;

/// How long `connect` retries while the service's connection queue is full.
const QUEUED: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// How often a client checks whether the service has read its call.
const LOOK: Duration = Duration::from_millis(200);

/// How long a client waits for a reply.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Timeout of the reply, from the time when the service has read the call.
    pub(crate) answer: Duration,
    /// Longest time until the service reads the call. A service that queues connections refuses those that waited too
    /// long, so this limit only applies to a service that has stopped.
    pub(crate) line: Duration,
}

impl From<Duration> for Patience {
    /// For a service that does not queue connections.
    fn from(answer: Duration) -> Self {
        Self { answer, line: Duration::ZERO }
    }
}

/// A connection to a service.
#[derive(Debug)]
pub(crate) struct Client {
    runtime: tokio::runtime::Runtime,
    connection: Connection,
    /// A duplicate of the connection's socket, to check whether the service has read the call.
    socket: OwnedFd,
}

/// Why a call got no reply.
#[derive(Debug)]
pub(crate) enum CallError<E> {
    /// The service returned an error of its interface.
    Refused(E),
    /// The service does not know the method, or a parameter.
    Unknown(zlink::varlink_service::OwnedError),
    /// Exchanging messages failed, or a timeout was over.
    Talk(String),
}

impl Client {
    /// Connects to the service at a socket. Returns `None` if no service listens there. Starts no thread.
    ///
    /// # Errors
    /// If the socket exists, but the connection fails for another reason than a service that has ended.
    pub(crate) fn connect(socket: &Path) -> io::Result<Option<Self>> {
        if rustix::fs::stat(socket).is_err() {
            return Ok(None);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let connected = runtime.block_on(async {
            let deadline = Instant::now() + QUEUED;
            loop {
                match unix::connect(socket).await {
                    // The service's connection queue is full: unix(7), `EAGAIN`.
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
                // The service has ended and left its socket file behind.
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Ok(None),
                _ => Err(error),
            },
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Calls a method with descriptors, and waits for the reply. `E` is the type of the service's own errors.
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
        let lacks = || CallError::Talk("its reply is empty".to_owned());
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

    /// Calls a service that replies after a second and reads nothing.
    fn ask(patience: Patience) -> Result<u32, String> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                std::thread::sleep(Duration::from_secs(1));
                // The client may have closed the connection.
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
