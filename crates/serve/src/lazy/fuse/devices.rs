//! The states of served devices, and their bytes.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use image::digest::Digest;
use image::verity::DeviceId;

use super::broken::BrokenDevice;
use crate::lazy::fill::{Check, LayerFiller};
use crate::lazy::metrics::FailureCause;

/// Size of a unit, in bytes.
pub(super) const UNIT_BYTES: usize = 64 << 10;
const _: () = assert!(UNIT_BYTES as u64 == image::lazy::UNIT);

/// The device number and the inode number of a file.
pub(super) type InodePlace = (u64, u64);

/// A device that the server serves.
#[derive(Debug)]
pub(super) struct ServedDevice<'a> {
    pub(super) device: DeviceId,
    /// Since when a file that stands for the device has been in use, if it is.
    pub(super) used: Option<Instant>,
    pub(super) state: ServedState<'a>,
}

/// The progress of a device.
#[derive(Debug)]
pub(super) enum ServedState<'a> {
    Filling(Fillers<'a>),
    /// All units are filled, and the whole device is being hashed and synced. Readers do not wait, but the disk may
    /// still lose bytes. The keeper has the device.
    Sealing(Arc<LayerFiller<'a>>),
    /// All bytes are verified and on the disk. The file is kept open for requests that may still come.
    Complete(Arc<File>),
    /// The bytes have another digest, or the disk lost some, or the server ended before this was known. Readers get
    /// errors.
    Broken(File, Box<BrokenDevice>),
}

/// The fillers of a device: one for each image that it was mounted for.
#[derive(Debug)]
pub(super) struct Fillers<'a> {
    pub(super) first: Arc<LayerFiller<'a>>,
    pub(super) others: Vec<Arc<LayerFiller<'a>>>,
    /// Manifest of the image that the device was mounted for last.
    pub(super) last: Option<Digest>,
}

impl<'a> Fillers<'a> {
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<LayerFiller<'a>>> {
        std::iter::once(&self.first).chain(&self.others)
    }

    pub(super) fn filler(&self, manifest: &Digest) -> Option<&Arc<LayerFiller<'a>>> {
        self.all().find(|it| it.manifest() == Some(manifest))
    }

    /// Returns the filler for an image, or the first one if the image is unknown.
    pub(super) fn filler_or_first(&self, manifest: Option<&Digest>) -> &Arc<LayerFiller<'a>> {
        manifest.and_then(|it| self.filler(it)).unwrap_or(&self.first)
    }

    /// Records that readers of an image come. If they have no separate filler, the filler that they share with
    /// another image uses no hot pack.
    pub(super) fn connects(&self, manifest: Option<&Digest>) {
        let filler = self.filler_or_first(manifest);
        if filler.manifest() != manifest {
            filler.stop_using_hot_pack();
        }
    }

    /// Returns the filler for the image that the device was mounted for last.
    pub(super) fn usual(&self) -> &Arc<LayerFiller<'a>> {
        self.filler_or_first(self.last.as_ref())
    }

    /// Returns whether no thread is filling the device.
    pub(super) fn is_idle(&self) -> bool {
        self.all().all(|it| Arc::strong_count(it) == 1)
    }
}

impl ServedState<'_> {
    pub(super) fn file(&self) -> &File {
        match self {
            Self::Filling(fillers) => fillers.first.device().file(),
            Self::Sealing(filler) => filler.device().file(),
            Self::Complete(file) => file,
            Self::Broken(file, _) => file,
        }
    }
}

/// The source of a device's bytes.
pub(super) enum DeviceBytes<'a> {
    /// A device whose bytes may be incomplete.
    Filling(Arc<LayerFiller<'a>>),
    /// A complete device.
    Complete(Arc<File>),
}

impl<'a> DeviceBytes<'a> {
    /// Returns the filler of a device whose bytes may be incomplete.
    pub(super) const fn filler(&self) -> Option<&Arc<LayerFiller<'a>>> {
        match self {
            Self::Filling(filler) => Some(filler),
            Self::Complete(_) => None,
        }
    }

    pub(super) fn file(&self) -> &File {
        match self {
            Self::Filling(filler) => filler.device().file(),
            Self::Complete(file) => file,
        }
    }

    pub(super) fn has(&self, range: &Range<u64>) -> bool {
        match self {
            Self::Filling(filler) => filler.has(range),
            Self::Complete(_) => true,
        }
    }

    pub(super) fn touch(&self, range: &Range<u64>) {
        if let Self::Filling(filler) = self {
            filler.touch(range);
        }
    }

    /// Returns the bytes that must be read to verify `range`: blocks with tags, blocks of the hot pack, or whole units. A
    /// complete device was verified as a whole.
    pub(super) fn to_compare(&self, range: &Range<u64>) -> Range<u64> {
        match self {
            Self::Filling(filler) => filler.verifiable(range),
            Self::Complete(_) => range.clone(),
        }
    }

    /// Compares the bytes of `whole`, which [`Self::to_compare`] returned before they were read, with their tags or
    /// digests, and returns those of `range`. Counts a failure.
    pub(super) fn compared<'b>(
        &self,
        range: &Range<u64>,
        whole: &Range<u64>,
        bytes: &'b [u8],
    ) -> Compared<'b> {
        if let Self::Filling(filler) = self {
            if !is_kept(filler) {
                return Compared::Wrong;
            }
            match filler.check(whole, bytes) {
                Check::Right => {}
                Check::Changed => return Compared::Changed,
                Check::Wrong => {
                    filler.counts().failed(FailureCause::Disk);
                    filler.record_failure("the disk changed data of the device".to_owned());
                    return Compared::Wrong;
                }
            }
        }
        let place = |it: u64| usize::try_from(it.saturating_sub(whole.start)).unwrap_or(usize::MAX);
        match bytes.get(place(range.start)..place(range.end)) {
            Some(bytes) => Compared::Right(bytes),
            None => Compared::Wrong,
        }
    }

    /// Returns whether a read of this range must fail at once, because fetching failed a moment ago. Counts the
    /// failure.
    pub(super) fn denies(&self, range: &Range<u64>) -> bool {
        let Self::Filling(filler) = self else { return false };
        let is_denied = filler.is_denied(range);
        if is_denied {
            filler.counts().failed(FailureCause::Denied);
        }
        is_denied
    }

    pub(super) fn asked(&self) {
        if let Self::Filling(filler) = self {
            filler.counts().asked();
        }
    }
}

/// The outcome of [`DeviceBytes::compared`].
pub(super) enum Compared<'b> {
    Right(&'b [u8]),
    /// The bytes were replaced while they were read: read them again.
    Changed,
    Wrong,
}

/// Returns whether the disk has kept the bytes of a device. Counts a failure.
fn is_kept(filler: &LayerFiller<'_>) -> bool {
    let is_kept = filler.is_kept();
    if !is_kept {
        filler.counts().failed(FailureCause::Disk);
        filler.record_failure("the disk lost data of the device".to_owned());
    }
    is_kept
}

/// Returns all fillers of a device that is being filled.
pub(super) fn fillers_of<'a>(served: &ServedDevice<'a>) -> Vec<Arc<LayerFiller<'a>>> {
    match &served.state {
        ServedState::Filling(fillers) => fillers.all().cloned().collect(),
        ServedState::Sealing(_) | ServedState::Complete(_) | ServedState::Broken(..) => Vec::new(),
    }
}
