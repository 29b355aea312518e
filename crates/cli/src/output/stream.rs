//! Streams of bytes that a signal ends.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// A stream whose reads and writes fail soon after `cancel` is set.
pub(crate) struct CancellableStream<'a, T> {
    pub(crate) inner: T,
    pub(crate) cancel: &'a AtomicBool,
}

impl<T> CancellableStream<'_, T> {
    fn check(&self) -> io::Result<()> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(io::Error::other("cancelled")),
            false => Ok(()),
        }
    }
}

impl<T: Read> Read for CancellableStream<'_, T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        self.inner.read(into)
    }
}

impl<T: Write> Write for CancellableStream<'_, T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        self.inner.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
