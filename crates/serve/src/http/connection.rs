//! A connection that is cut if its client reads too slowly.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Time in which a client that is behind must take [`SHARE`] bytes: about 1 KiB/s, the rate below which Quire's own
/// client gives up a server.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes after which the time begins again.
const SHARE: usize = 64 << 10;

/// A connection whose writes fail if the client takes too few bytes.
#[derive(Debug)]
pub(crate) struct Patient<S> {
    stream: S,
    patience: Duration,
    /// Ends the connection. It exists while the client is behind.
    end: Option<Pin<Box<Sleep>>>,
    /// Bytes that were written since `end` was set.
    written: usize,
}

impl<S> Patient<S> {
    pub(crate) const fn new(stream: S) -> Self {
        Self { stream, patience: PATIENCE, end: None, written: 0 }
    }

    /// Notes the result of a write. The result of a write that waits for the client is an error after some time.
    fn note(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match &result {
            Poll::Ready(Ok(count)) => {
                self.written += count;
                if self.written >= SHARE {
                    self.end = None;
                }
                return result;
            }
            Poll::Ready(Err(_)) => return result,
            Poll::Pending => {}
        }
        let patience = self.patience;
        if self.end.is_none() {
            self.written = 0;
        }
        let end = self
            .end
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + patience)));
        ready!(end.as_mut().poll(context));
        let slow = "the client takes less than 1 KiB/s";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, slow)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.note(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Everything was written, so the client is not behind.
        self.end = None;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    /// Writes 1 MiB to a client that takes `count` bytes at each `pause`.
    fn write(count: usize, pause: Duration) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (server, mut client) = tokio::io::duplex(4 << 10);
            let taking = tokio::spawn(async move {
                let mut buffer = vec![0; count];
                while let Ok(1..) = client.read(&mut buffer).await {
                    tokio::time::sleep(pause).await;
                }
            });
            let patience = Duration::from_millis(500);
            let mut slow = Patient { patience, ..Patient::new(server) };
            let written = slow.write_all(&vec![0; 1 << 20]).await;
            drop(slow);
            taking.abort();
            written
        })
    }

    #[test]
    fn a_client_that_takes_few_bytes_is_cut_off() {
        let error = write(16, Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        write(64 << 10, Duration::ZERO).unwrap();
    }
}
