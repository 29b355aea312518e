//! The errors of filling a device.

use std::io;
use std::ops::Range;
use std::time::Duration;

use image::digest::Digest;
use image::gzip::SpanError;
use store::LazyDeviceError;

/// Why a part of a device was not filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FillError {
    /// Fetching bytes of the blob failed.
    #[error("cannot fetch bytes {} to {} of blob {blob}", range.start, range.end)]
    Blob {
        blob: Box<Digest>,
        /// The range, in bytes.
        range: Range<u64>,
        source: io::Error,
    },
    /// The index has no valid window for a span.
    #[error("the index has no valid windows for span {0} of the blob")]
    Windows(usize),
    /// The windows of the index, which are fetched when they are needed, cannot be fetched.
    #[error("cannot fetch the windows of the index, which are blob {blob}")]
    FetchWindows { blob: Box<Digest>, source: io::Error },
    /// Inflating a span failed.
    #[error("cannot inflate span {span} of the blob")]
    Span {
        /// Number of the span.
        span: usize,
        source: SpanError,
    },
    /// A part of the hot pack cannot be read, or its bytes have another digest.
    #[error("cannot read the hot pack, or its bytes are wrong")]
    Hot(#[source] io::Error),
    /// The bytes of a unit have another digest than in the index.
    #[error("the digest of unit {0} of the device is not that in its index")]
    Digest(usize),
    /// The bytes of a chunk have another digest than in the layer's table of contents.
    #[error("the digest of chunk {0} of the layer is not that in its table of contents")]
    Chunk(usize),
    /// Writing to the device failed.
    #[error("cannot write to the device")]
    Write(#[source] LazyDeviceError),
    /// Reading the device failed.
    #[error("cannot read the device's data")]
    Read(#[source] LazyDeviceError),
    /// The unit failed a moment ago and is not tried again yet.
    #[error("unit {unit} of the device failed to arrive, and is not requested again for {} ms", left.as_millis())]
    Denied {
        /// Number of the unit.
        unit: usize,
        /// Time until the next attempt.
        left: Duration,
    },
    /// The last write to the disk failed, so fetching pauses.
    #[error("the disk just refused data of the device, so the service fetches no data for {} ms", .0.as_millis())]
    DiskPause(Duration),
    /// Prefetching would use up the last free space of the disk.
    #[error("no disk space for prefetching")]
    Room(#[source] LazyDeviceError),
    /// The thread that fetches the unit got no bytes from a source until the timeout.
    #[error("no source sent data of the device for {} seconds", .0.as_secs())]
    Silent(Duration),
}

impl FillError {
    /// Returns whether the disk is the reason.
    pub(in crate::lazy) const fn is_of_the_disk(&self) -> bool {
        matches!(self, Self::Write(_) | Self::DiskPause(_) | Self::Room(_))
    }

    /// Returns whether fetching the blob's bytes again could help.
    pub(in crate::lazy) const fn is_of_the_blob(&self) -> bool {
        matches!(self, Self::Span { .. } | Self::Digest(_) | Self::Chunk(_))
    }
}
