//! Connections to an engine, one for each call.
//!
//! A call that is cancelled must end at the engine as well. While the engine does not read, HTTP/2 cannot cancel a
//! call, and pending data would stay in memory with its connection. So the socket is shut down when the call ends.

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

/// A connection that is shut down when it is dropped, even if other clones of its channel exist.
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
        // Only the path that the generated code adds is used.
        let endpoint = Endpoint::from_static("http://engine");
        let channel = endpoint.connect_with_connector(opened).await?;
        Ok(Self { channel, socket: own })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The engine may have closed the connection first.
        let _ended = self.socket.shutdown(Shutdown::Both);
    }
}

/// Returns the socket once, so that a call never reconnects.
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
