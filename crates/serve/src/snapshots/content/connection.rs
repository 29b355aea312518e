//! Connections to an engine, one for each call.
//!
//! A call that is given up has to end at the engine, too. HTTP/2 cannot do that while the engine takes no bytes: what
//! was to be sent would wait in memory, with its connection. So the socket is shut down with the call.

use std::future::{Ready, ready};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A connection that ends when it is dropped, whoever else uses it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) channel: Channel,
    socket: UnixStream,
}

impl Connection {
    pub(super) async fn open(socket: &Path) -> Result<Self, BoxError> {
        let stream = tokio::net::UnixStream::connect(socket).await?.into_std()?;
        let own = stream.try_clone()?;
        let opened = Opened(Some(tokio::net::UnixStream::from_std(stream)?));
        // Only the path counts that the generated code adds.
        let endpoint = Endpoint::from_static("http://engine");
        let channel = endpoint.connect_with_connector(opened).await?;
        Ok(Self { channel, socket: own })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The engine may have gone first.
        let _ended = self.socket.shutdown(Shutdown::Both);
    }
}

/// Gives the socket once: a call does not go on with another one.
struct Opened(Option<tokio::net::UnixStream>);

impl Service<Uri> for Opened {
    type Response = TokioIo<tokio::net::UnixStream>;
    type Error = io::Error;
    type Future = Ready<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let socket = self.0.take().map(TokioIo::new);
        ready(socket.ok_or_else(|| io::ErrorKind::NotConnected.into()))
    }
}
