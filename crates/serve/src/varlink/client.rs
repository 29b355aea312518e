//! A program that asks a service.

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use zlink::Call;
use zlink::tokio::unix::{self, Connection};

use super::MethodCall;

/// How long a client tries to get into the queue of a service.
const QUEUED: Duration = Duration::from_secs(5);
/// The time between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// A connection to a service.
#[derive(Debug)]
pub(crate) struct Client {
    runtime: tokio::runtime::Runtime,
    connection: Connection,
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
            let deadline = tokio::time::Instant::now() + QUEUED;
            loop {
                match unix::connect(socket).await {
                    // More connections wait for the service than its queue takes: unix(7), `EAGAIN`.
                    Err(zlink::Error::Io(error))
                        if error.kind() == io::ErrorKind::WouldBlock
                            && tokio::time::Instant::now() < deadline =>
                    {
                        tokio::time::sleep(PAUSE).await;
                    }
                    connected => return connected,
                }
            }
        });
        match connected {
            Ok(connection) => Ok(Some(Self { runtime, connection })),
            Err(zlink::Error::Io(error)) => match error.kind() {
                // One that has ended without taking it away.
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Ok(None),
                _ => Err(error),
            },
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Calls a method, with descriptors, and waits for the answer for so long. `E` reads the service's own errors.
    pub(crate) fn call<R: DeserializeOwned + Debug, E: DeserializeOwned + Debug>(
        &mut self,
        method: &str,
        parameters: serde_json::Value,
        descriptors: Vec<OwnedFd>,
        most: Duration,
    ) -> Result<(R, Vec<OwnedFd>), CallError<E>> {
        let talk = |error: &dyn std::error::Error| CallError::Talk(error.to_string());
        let call = Call::new(MethodCall { method: method.to_owned(), parameters });
        let connection = &mut self.connection;
        let answered = self.runtime.block_on(async {
            let asked = connection.call_method::<_, R, E>(&call, descriptors);
            tokio::time::timeout(most, asked).await
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
