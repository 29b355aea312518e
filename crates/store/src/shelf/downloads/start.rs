//! Recorded starts: the parts of files that programs read when a lazy image was started on this host.
//!
//! `blobs/DIGEST.start` is a record for the image of this manifest. It names files by their paths, which the next version
//! of the image has as well. It never leaves the host. See `docs/format/object-store.md`, "Recorded starts".

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{BlobFile, DownloadShelf};
use crate::disk::DiskError;
use crate::record::{self, RECORD_MAX};
use crate::shelf::refs::Seconds;
use image::digest::Digest;

/// Maximum number of bytes of files that a start can have.
pub const START_BYTES_MAX: u64 = 64 << 20;
/// Maximum number of parts of files in a start. The start of a large server has a few hundred.
pub const START_PARTS_MAX: usize = 1 << 13;
/// Maximum length in bytes of all paths together. With escapes, such paths and the maximum number of parts fit into a
/// record.
const PATHS_MAX: usize = 112 << 10;
/// Maximum number of names in all paths together, each of which is looked up in a directory. Starts have a few thousand.
const NAMES_MAX: usize = 1 << 14;

/// The parts of files that programs read at the start of an image, in the order of the first read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartRecord {
    /// Manifest of the image that was started. A later version of the image inherits its start.
    pub started: Digest,
    /// Whether the image was in use during the whole time for which reads are recorded.
    pub is_whole: bool,
    files: Vec<String>,
    /// For each part, the index of the file in `files`, the offset, and the number of bytes.
    parts: Vec<(u32, u64, u64)>,
    /// Sum of the lengths of `files` in bytes.
    path_bytes: usize,
    /// Number of names in `files`.
    names: usize,
    /// Sum of the lengths of `parts` in bytes.
    bytes: u64,
}

/// A file of a [`StartRecord`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartedFile(u32);

/// The record as written.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    /// Digest of the image's manifest, to detect renamed files.
    manifest: Digest,
    started: Digest,
    whole: bool,
    files: Vec<String>,
    parts: Vec<(u32, u64, u64)>,
}

impl StartRecord {
    /// Returns a start without parts.
    #[must_use]
    pub const fn new(started: Digest, is_whole: bool) -> Self {
        Self {
            started,
            is_whole,
            files: Vec::new(),
            parts: Vec::new(),
            path_bytes: 0,
            names: 0,
            bytes: 0,
        }
    }

    /// Adds a file, whose path begins with a slash. Returns `None` for a path that is not UTF-8, and beyond the limit.
    pub fn add_file(&mut self, path: &[u8]) -> Option<StartedFile> {
        let path = std::str::from_utf8(path).ok().filter(|it| it.starts_with('/'))?;
        let path_bytes = self.path_bytes.checked_add(path.len()).filter(|it| *it <= PATHS_MAX)?;
        let names = self.names + path.bytes().filter(|it| *it == b'/').count();
        if names > NAMES_MAX {
            return None;
        }
        let file = StartedFile(u32::try_from(self.files.len()).ok()?);
        (self.path_bytes, self.names) = (path_bytes, names);
        self.files.push(path.to_owned());
        Some(file)
    }

    /// Adds a part of a file. Returns whether it is within the limits.
    pub fn add_part(&mut self, file: StartedFile, part: Range<u64>) -> bool {
        let Some(length) = part.end.checked_sub(part.start).filter(|it| *it > 0) else {
            return false;
        };
        let bytes = self.bytes.checked_add(length).filter(|it| *it <= START_BYTES_MAX);
        let is_known = usize::try_from(file.0).is_ok_and(|it| it < self.files.len());
        let Some(bytes) = bytes.filter(|_| is_known) else { return false };
        let is_full = self.parts.len() >= START_PARTS_MAX;
        match self.parts.last_mut() {
            Some((last, start, before)) if *last == file.0 && *start + *before == part.start => {
                *before += length;
            }
            _ if is_full => return false,
            _ => self.parts.push((file.0, part.start, length)),
        }
        self.bytes = bytes;
        true
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the paths of the files.
    pub fn files(&self) -> impl Iterator<Item = &[u8]> {
        self.files.iter().map(String::as_bytes)
    }

    /// Returns the index of the file in [`files`](Self::files), and the range of bytes, of each part.
    pub fn parts(&self) -> impl Iterator<Item = (usize, Range<u64>)> {
        let part = |(file, start, bytes): &(u32, u64, u64)| {
            (usize::try_from(*file).unwrap_or(usize::MAX), *start..start.saturating_add(*bytes))
        };
        self.parts.iter().map(part)
    }

    /// Whether this start is better known than another one, for the image of a manifest: first those that were recorded
    /// for the whole time, then those of this very image.
    #[must_use]
    pub fn is_better_than(&self, other: &Self, manifest: &Digest) -> bool {
        let rank = |it: &Self| (it.is_whole, it.started == *manifest);
        rank(self) > rank(other)
    }

    fn raw(&self, manifest: &Digest) -> Raw {
        let Self { started, is_whole, files, parts, .. } = self;
        let (files, parts) = (files.clone(), parts.clone());
        Raw { manifest: *manifest, started: *started, whole: *is_whole, files, parts }
    }

    /// Returns the start for a manifest, or `None` if the record is another manifest's, or breaks a limit.
    fn from_raw(raw: &Raw, manifest: &Digest) -> Option<Self> {
        let mut start = Self::new(raw.started, raw.whole);
        if raw.manifest != *manifest {
            return None;
        }
        for path in &raw.files {
            start.add_file(path.as_bytes())?;
        }
        for (file, offset, bytes) in &raw.parts {
            let end = offset.checked_add(*bytes)?;
            start.add_part(StartedFile(*file), *offset..end).then_some(())?;
        }
        Some(start)
    }
}

impl DownloadShelf {
    /// Returns the start that is recorded for the image of a manifest. A damaged record counts as absent, because a start
    /// only saves time.
    ///
    /// # Errors
    /// [`DiskError`] if the record cannot be read.
    pub fn start(&self, manifest: &Digest) -> Result<Option<StartRecord>, DiskError> {
        let name = BlobFile::Start(*manifest).file_name();
        let Some(bytes) = self.directory.read_all(name, RECORD_MAX)? else { return Ok(None) };
        let raw = record::decode::<Raw>(&bytes);
        let raw = raw.inspect_err(|error| {
            tracing::debug!(%manifest, %error, "ignoring a damaged record of a start");
        });
        Ok(raw.ok().and_then(|it| StartRecord::from_raw(&it, manifest)))
    }

    /// Returns when the start of an image was recorded or inherited, or `None` if there is none.
    ///
    /// # Errors
    /// [`DiskError`] if the record cannot be examined.
    pub fn start_time(&self, manifest: &Digest) -> Result<Option<Seconds>, DiskError> {
        let stat = self.directory.stat(BlobFile::Start(*manifest).file_name())?;
        Ok(stat.map(|it| Seconds(it.st_mtime)))
    }

    /// Records the start of the image of a manifest, unless the store has one that is as well known. The record is
    /// removed together with the manifest. It is not synced, because it only saves time.
    ///
    /// # Errors
    /// [`DiskError`] if the record cannot be written.
    pub fn set_start(&self, manifest: &Digest, start: &StartRecord) -> Result<(), DiskError> {
        let before = self.start(manifest)?;
        if before.is_some_and(|it| !start.is_better_than(&it, manifest)) {
            return Ok(());
        }
        let name = BlobFile::Start(*manifest).file_name();
        self.tmp.replace_unsynced(&self.directory, name, &record::encode(&start.raw(manifest)))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::shelf::downloads::tests::store;

    fn manifest() -> Digest {
        Digest::sha256(b"manifest")
    }

    /// Parts of two files.
    fn sample(started: Digest, is_whole: bool) -> StartRecord {
        let mut start = StartRecord::new(started, is_whole);
        let [program, library] =
            [&b"/bin/program"[..], b"/lib/\"library\""].map(|it| start.add_file(it).unwrap());
        for (file, part) in [
            (program, 0..4096),
            (library, 8192..9000),
            (program, 4096..5000),
            (program, 5000..6000),
        ] {
            assert!(start.add_part(file, part));
        }
        start
    }

    #[test]
    fn a_start_is_read_as_it_was_written() {
        let (_folder, store) = store();
        let start = sample(manifest(), true);
        store.downloads.set_start(&manifest(), &start).unwrap();
        let read = store.downloads.start(&manifest()).unwrap().unwrap();
        assert_eq!(read, start);
        let files: Vec<_> = read.files().collect();
        assert_eq!(files, [&b"/bin/program"[..], b"/lib/\"library\""]);
        // Parts that follow each other are one part.
        let parts: Vec<_> = read.parts().collect();
        assert_eq!(parts, [(0, 0..4096), (1, 8192..9000), (0, 4096..6000)]);
        assert!(store.downloads.start_time(&manifest()).unwrap().is_some());
        assert_eq!(store.downloads.start(&Digest::sha256(b"other")).unwrap(), None);
    }

    #[test]
    fn a_better_start_replaces_a_record() {
        let (_folder, store) = store();
        let other = Digest::sha256(b"other");
        let set = |started, is_whole, is_taken: bool| {
            let new = sample(started, is_whole);
            store.downloads.set_start(&manifest(), &new).unwrap();
            assert_eq!(store.downloads.start(&manifest()).unwrap() == Some(new), is_taken);
        };
        set(other, false, true);
        set(manifest(), false, true);
        set(other, false, false);
        set(other, true, true);
        set(manifest(), false, false);
        set(manifest(), true, true);
        set(other, true, false);
    }

    #[test]
    fn limits_hold() {
        let mut start = StartRecord::new(manifest(), true);
        for wrong in [&b""[..], b"no/slash", b"/\xff"] {
            assert_eq!(start.add_file(wrong), None);
        }
        let file = start.add_file(b"/file").unwrap();
        let refused = [5..5, 0..START_BYTES_MAX + 1, 0..u64::MAX];
        assert!(refused.iter().all(|it| !start.add_part(file, it.clone())));
        assert!(!start.add_part(StartedFile(1), 0..1));
        assert!(start.add_part(file, 9..START_BYTES_MAX));
        assert!(!start.add_part(file, u64::MAX - 10..u64::MAX) && !start.is_empty());
        let mut start = StartRecord::new(manifest(), true);
        // Each character of these paths takes six bytes in JSON.
        let long = [b"/", &[1; 1023][..]].concat();
        let files = std::iter::from_fn(|| start.add_file(&long)).count();
        assert_eq!(files * long.len(), PATHS_MAX);
        let parts = (0_u32..).take_while(|it| {
            let part = u64::MAX - 10_000 * (u64::from(*it) + 1);
            start.add_part(StartedFile(it % 112), part..part + 8192)
        });
        assert_eq!(parts.count(), START_PARTS_MAX);
        assert_eq!(start.bytes, START_BYTES_MAX);
        // The largest start fits into a record.
        let (_folder, store) = store();
        store.downloads.set_start(&manifest(), &start).unwrap();
        assert_eq!(store.downloads.start(&manifest()).unwrap(), Some(start));
    }

    #[test]
    fn a_damaged_record_is_no_start_and_is_replaced() {
        let (folder, store) = store();
        let start = sample(manifest(), true);
        let raw = || start.raw(&manifest());
        let path = folder.path().join("store/blobs").join(BlobFile::Start(manifest()).file_name());
        let right = record::encode(&raw());
        let cut = right[..right.len() - 1].to_vec();
        for wrong in [
            Vec::new(),
            cut,
            record::encode(&Raw { manifest: Digest::sha256(b"other"), ..raw() }),
            record::encode(&Raw { parts: vec![(2, 0, 1)], ..raw() }),
            record::encode(&Raw { parts: vec![(0, u64::MAX, 1)], ..raw() }),
            record::encode(&Raw { parts: vec![(0, 0, 0)], ..raw() }),
            record::encode(&Raw { parts: vec![(0, 0, START_BYTES_MAX + 1)], ..raw() }),
            record::encode(&Raw { files: vec!["relative".to_owned(); 2], ..raw() }),
            record::encode(&Raw { files: vec!["/x".repeat(PATHS_MAX); 2], ..raw() }),
        ] {
            let _before = fs::remove_file(&path);
            fs::write(&path, &wrong).unwrap();
            assert_eq!(store.downloads.start(&manifest()).unwrap(), None);
            store.downloads.set_start(&manifest(), &start).unwrap();
            assert!(fs::read(&path).unwrap() == right);
        }
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o444);
    }
}
