//! Why a part of a device is not filled.

use std::io;
use std::ops::Range;
use std::time::Duration;

use image::digest::Digest;
use image::gzip::SpanError;
use store::LazyDeviceError;

/// An error while a part of a device is filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FillError {
    /// The blob's bytes cannot be had.
    #[error("cannot fetch bytes {} to {} of blob {blob}", range.start, range.end)]
    Blob {
        /// The blob.
        blob: Box<Digest>,
        /// In bytes.
        range: Range<u64>,
        /// The cause.
        source: io::Error,
    },
    /// The index has no window for a span.
    #[error("the index has no sound windows for span {0} of the blob")]
    Windows(usize),
    /// The bytes cannot be inflated.
    #[error("cannot inflate span {span} of the blob")]
    Span {
        /// Its number.
        span: usize,
        /// The cause.
        source: SpanError,
    },
    /// The bytes of a unit have another digest than the index says.
    #[error("unit {0} of the device has another digest than its index says")]
    Digest(usize),
    /// The disk.
    #[error("cannot write to the device")]
    Write(#[source] LazyDeviceError),
    /// The disk.
    #[error("cannot read what the device has")]
    Read(#[source] LazyDeviceError),
    /// It failed a moment ago.
    #[error("unit {unit} of the device did not come, and is not asked for again for {} ms", left.as_millis())]
    Denied {
        /// Its number.
        unit: usize,
        /// How long still.
        left: Duration,
    },
    /// The disk did not take what it was last given.
    #[error("the disk took nothing of the device a moment ago, and nothing is fetched for {} ms", .0.as_millis())]
    DiskPause(Duration),
    /// What nobody waits for would take the last of the disk.
    #[error("no room for what nobody waits for")]
    Room(#[source] LazyDeviceError),
    /// Who brings it waits for a source.
    #[error("no source gave anything of the device for {} seconds", .0.as_secs())]
    Silent(Duration),
}

impl FillError {
    /// Whether the disk takes nothing.
    pub(in crate::lazy) const fn is_of_the_disk(&self) -> bool {
        matches!(self, Self::Write(_) | Self::DiskPause(_) | Self::Room(_))
    }

    /// Whether other bytes of the blob could help.
    pub(in crate::lazy) const fn is_of_the_blob(&self) -> bool {
        matches!(self, Self::Span { .. } | Self::Digest(_))
    }
}
