//! A connection with limits on the bytes and descriptors that its peer may send. zlink itself would accept messages
//! of a hundred megabytes and a thousand descriptors.

use std::io;

use zlink::connection::socket::{ReadHalf, ReadResult, Socket};
use zlink::tokio::unix::Stream;

/// Largest number of bytes that a client may send on one connection.
const BYTES_MAX: usize = 1 << 20;
/// Largest number of descriptors in one read.
const DESCRIPTORS_MAX: usize = 2;

/// A socket that limits its peer.
#[derive(Debug)]
pub(crate) struct Bounded(pub(crate) Stream);

impl Socket for Bounded {
    type ReadHalf = BoundedRead;
    type WriteHalf = <Stream as Socket>::WriteHalf;

    const CAN_TRANSFER_FDS: bool = true;

    fn split(self) -> (BoundedRead, <Stream as Socket>::WriteHalf) {
        let (read, write) = self.0.split();
        (BoundedRead { inner: read, bytes: 0 }, write)
    }
}

/// The half of the socket that reads messages and counts their bytes.
#[derive(Debug)]
pub(crate) struct BoundedRead {
    inner: <Stream as Socket>::ReadHalf,
    bytes: usize,
}

impl ReadHalf for BoundedRead {
    async fn read(&mut self, buffer: &mut [u8]) -> zlink::Result<ReadResult> {
        let refused = |text| Err(io::Error::new(io::ErrorKind::InvalidData, text).into());
        let got = self.inner.read(buffer).await?;
        self.bytes = self.bytes.saturating_add(got.bytes_read());
        if self.bytes > BYTES_MAX {
            return refused("too many bytes");
        }
        if got.fds().len() > DESCRIPTORS_MAX {
            return refused("too many descriptors");
        }
        Ok(got)
    }
}
