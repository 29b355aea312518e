//! Indexes of lazy devices. `lazy/ID.index` is the head and `lazy/ID.windows` the windows of an index that was made
//! locally from all bytes of a blob. An index that came with an image has the names `lazy/ID.MANIFEST.index` and
//! `lazy/ID.MANIFEST.windows`. Each of these is a claim of its manifest, and is used only for that manifest. Instead of
//! windows, `lazy/ID.MANIFEST.windows-digest` may have the digest of the blob that contains them.
//!
//! `docs/format/lazy-index.md` describes the contents, and `docs/format/object-store.md`, "Lazy devices", when the
//! files are created and removed.

use image::digest::Digest;
use image::lazy::{HEAD_MAX, Head, HeadError};
use image::verity::DeviceId;

use super::{LazyDeviceError, LazyDeviceFile, LazyDeviceShelf};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::{Directory, DiskError, length};

/// Maximum length in bytes of windows, because they are held in memory. It suffices for a blob of 30 gigabytes.
const WINDOWS_MAX: u64 = 1 << 30;

/// Maximum length in bytes of the text of a digest: that of SHA-512.
const DIGEST_MAX: u64 = 135;

/// The windows of an index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IndexWindows {
    /// All groups of windows, concatenated. Each group is a zstd frame.
    Groups(Vec<u8>),
    /// The windows have not been fetched yet. This is the digest of the blob that has the groups, in the repository of
    /// the image. The head states the length of the blob.
    Blob(Digest),
}

impl IndexWindows {
    /// Returns the groups, if they were fetched.
    #[must_use]
    pub fn groups(&self) -> Option<&[u8]> {
        match self {
            Self::Groups(groups) => Some(groups),
            Self::Blob(_) => None,
        }
    }
}

/// Damage to the index of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LazyIndexDamage {
    /// The head is invalid.
    #[error("its head is invalid")]
    Head(#[source] HeadError),
    /// The head belongs to another device.
    #[error("it belongs to device {0}")]
    Device(Box<DeviceId>),
    /// The device has another length than the head states.
    #[error("it belongs to a device of {expected} bytes, not {actual}")]
    Length {
        /// Length in bytes in the head.
        expected: u64,
        /// Length of the device in bytes.
        actual: u64,
    },
    /// The index has a head but no windows.
    #[error("its windows are missing")]
    NoWindows,
    /// The windows have another length than the head states.
    #[error("its windows have {actual} bytes, not {expected}")]
    Windows {
        /// Length in bytes in the head.
        expected: u64,
        /// Length of the file in bytes.
        actual: u64,
    },
}

/// How a new index treats the indexes that a device already has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existing {
    /// The new index replaces the old one, because its creator has read all bytes.
    Replaced,
    /// The new index replaces the old one. Other indexes of the device are kept, and the new one must agree with them
    /// about the device's bytes.
    Agreeing,
    /// As [`Agreeing`](Self::Agreeing), but other manifests' indexes need not agree, because all of the device is in
    /// the store.
    Any,
}

impl LazyDeviceShelf {
    /// Returns the index of a device that was made locally, if it exists: its head and its windows. The device may be
    /// complete.
    ///
    /// # Errors
    /// [`LazyDeviceError::Index`] if the head is invalid or belongs to another device, or the windows have another
    /// length than the head states; or an error of the disk.
    pub fn index(
        &self,
        device: &DeviceId,
    ) -> Result<Option<(Head, IndexWindows)>, LazyDeviceError> {
        self.read_index(device, None, read_windows)
    }

    /// Returns the index of a device that came with the image of a manifest, if it exists. It is a claim of that
    /// manifest.
    ///
    /// # Errors
    /// As [`index`](Self::index).
    pub fn claimed_index(
        &self,
        device: &DeviceId,
        manifest: &Digest,
    ) -> Result<Option<(Head, IndexWindows)>, LazyDeviceError> {
        self.read_index(device, Some(manifest), read_windows)
    }

    /// Returns the index for filling a device for the image of a manifest: the claimed one, or else the one that was
    /// made locally. The local one also precedes a claimed index of the same blob without windows. Without a manifest,
    /// returns any sound index.
    ///
    /// # Errors
    /// As [`index`](Self::index).
    pub fn index_for(
        &self,
        device: &DeviceId,
        manifest: Option<&Digest>,
    ) -> Result<Option<(Head, IndexWindows)>, LazyDeviceError> {
        if let Some(manifest) = manifest {
            return match self.claimed_index(device, manifest)? {
                None => self.index(device),
                Some((head, IndexWindows::Blob(digest))) => {
                    let is_same = |it: &(Head, IndexWindows)| {
                        (&it.0.blob, it.0.blob_bytes) == (&head.blob, head.blob_bytes)
                            && same_bytes(&it.0, &head)
                    };
                    let local = self.index(device).ok().flatten().filter(is_same);
                    Ok(Some(local.unwrap_or((head, IndexWindows::Blob(digest)))))
                }
                claimed => Ok(claimed),
            };
        }
        let mut found = self.index(device);
        for manifest in self.claims(device)? {
            if matches!(found, Ok(Some(_))) {
                break;
            }
            found = self.claimed_index(device, &manifest);
        }
        found
    }

    /// As [`index_for`](Self::index_for), without the windows. Only their length is checked.
    ///
    /// # Errors
    /// As [`index`](Self::index).
    pub fn index_head_for(
        &self,
        device: &DeviceId,
        manifest: Option<&Digest>,
    ) -> Result<Option<Head>, LazyDeviceError> {
        let claimed = match manifest {
            Some(_) => self.head(device, manifest)?,
            None => None,
        };
        claimed.map_or_else(|| self.index_head(device), |it| Ok(Some(it)))
    }

    /// As [`index`](Self::index), without the windows. Only their length is checked.
    ///
    /// # Errors
    /// As [`index`](Self::index).
    pub fn index_head(&self, device: &DeviceId) -> Result<Option<Head>, LazyDeviceError> {
        self.head(device, None)
    }

    /// Returns the heads of all sound indexes of a device. The one that was made locally comes first.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be listed.
    pub fn heads(&self, device: &DeviceId) -> Result<Vec<Head>, DiskError> {
        let claims = self.claims(device)?;
        let all = std::iter::once(None).chain(claims.iter().map(Some));
        Ok(all.filter_map(|it| self.head(device, it).ok().flatten()).collect())
    }

    /// Returns the manifests that claim an index of a device, sorted by digest.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be listed.
    pub fn claims(&self, device: &DeviceId) -> Result<Vec<Digest>, DiskError> {
        let names = self.list()?.names.into_iter();
        let mut claims: Vec<_> = names
            .filter_map(|it| match it {
                LazyDeviceFile::ClaimedIndex(id, manifest) if id == *device => Some(manifest),
                _ => None,
            })
            .collect();
        claims.sort_unstable();
        Ok(claims)
    }

    pub(super) fn head(
        &self,
        device: &DeviceId,
        claimed_by: Option<&Digest>,
    ) -> Result<Option<Head>, LazyDeviceError> {
        let head = self.read_index(device, claimed_by, |shelf, (name, digest)| {
            match digest.map(|it| read_digest(shelf, it)).transpose()?.flatten() {
                Some(Some(_)) => return Ok(Some((None, ()))),
                Some(None) => return Ok(None),
                None => {}
            }
            Ok(shelf.stat(name)?.map(|stat| (Some(length(&stat)), ())))
        })?;
        Ok(head.map(|it| it.0))
    }

    fn read_index<T>(
        &self,
        device: &DeviceId,
        claimed_by: Option<&Digest>,
        windows: impl Fn(&Directory, WindowsNames<'_>) -> Result<Option<FoundWindows<T>>, DiskError>,
    ) -> Result<Option<(Head, T)>, LazyDeviceError> {
        let Some(shelf) = self.directory.get()? else { return Ok(None) };
        let name = LazyDeviceFile::index(*device, claimed_by.copied()).file_name();
        let (bytes, windows) = loop {
            let Some(file) = shelf.placed(&name)? else { return Ok(None) };
            let bytes = shelf.read_all(&name, HEAD_MAX)?;
            let of_it = LazyDeviceFile::windows(*device, claimed_by.copied()).file_name();
            let digest =
                claimed_by.map(|it| LazyDeviceFile::WindowsDigest(*device, *it).file_name());
            let windows = windows(shelf, (&of_it, digest.as_deref()))?;
            // Another process may have replaced both files in between.
            if let Some(bytes) = bytes
                && shelf.is_placed(&name, &file)?
            {
                break (bytes, windows);
            }
        };
        let damaged = |damage| LazyDeviceError::Index { device: *device, source: damage };
        let head = Head::decode(&bytes).map_err(|it| damaged(LazyIndexDamage::Head(it)))?;
        if head.device != *device {
            return Err(damaged(LazyIndexDamage::Device(Box::new(head.device))));
        }
        let (actual, windows) = windows.ok_or_else(|| damaged(LazyIndexDamage::NoWindows))?;
        let expected = head.windows_bytes();
        if let Some(actual) = actual.filter(|it| *it != expected) {
            return Err(damaged(LazyIndexDamage::Windows { expected, actual }));
        }
        Ok(Some((head, windows)))
    }

    /// Checks the index of a device that was made locally, or that a manifest claims. Returns the damage.
    pub(crate) fn index_damage(
        &self,
        device: &DeviceId,
        claimed_by: Option<&Digest>,
    ) -> Result<Option<String>, FsckError> {
        let head = match check_error::found(self.head(device, claimed_by))? {
            Ok(Some(head)) => head,
            Ok(None) => return Ok(None),
            Err(why) => return Ok(Some(why)),
        };
        let expected = head.device_bytes;
        let other = self.file(device).map(|it| length(&it.1)).filter(|it| *it != expected);
        Ok(other.map(|actual| LazyIndexDamage::Length { expected, actual }.to_string()))
    }

    /// Whether a device has an index, sound or damaged.
    pub(crate) fn has_index(&self, device: &DeviceId) -> Result<bool, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(false) };
        let is_made = shelf.stat(LazyDeviceFile::Index(*device).file_name())?.is_some();
        Ok(is_made || !self.claims(device)?.is_empty())
    }

    /// Whether a device has a sound index, so that it can be filled.
    pub(super) fn has_sound_index(&self, device: &DeviceId) -> Result<bool, DiskError> {
        Ok(matches!(self.index_head(device), Ok(Some(_))) || !self.heads(device)?.is_empty())
    }
}

/// The names of the file with windows, and of the file with their digest.
type WindowsNames<'n> = (&'n str, Option<&'n str>);

/// Windows, and their length in bytes if they were not fetched with the head.
type FoundWindows<T> = (Option<u64>, T);

/// Reads windows. Windows that were fetched later were not synced, so a crash may have damaged them: they count only if
/// they have the digest.
fn read_windows(
    shelf: &Directory,
    (name, digest): WindowsNames<'_>,
) -> Result<Option<FoundWindows<IndexWindows>>, DiskError> {
    let digest = digest.map(|it| read_digest(shelf, it)).transpose()?.flatten();
    let groups = shelf.read_all(name, WINDOWS_MAX)?;
    Ok(match (groups, digest) {
        (Some(groups), None) => Some((Some(groups.len() as u64), IndexWindows::Groups(groups))),
        (Some(groups), Some(Some(digest))) if digest.matches(&groups) => {
            Some((Some(groups.len() as u64), IndexWindows::Groups(groups)))
        }
        (_, Some(Some(digest))) => Some((None, IndexWindows::Blob(digest))),
        // Windows beside a damaged digest may be damaged as well.
        (_, Some(None)) | (None, None) => None,
    })
}

/// Reads the digest of windows: `None` if the file does not exist, and `Some(None)` if it is damaged.
pub(super) fn read_digest(
    shelf: &Directory,
    name: &str,
) -> Result<Option<Option<Digest>>, DiskError> {
    let text = shelf.read_all(name, DIGEST_MAX)?;
    Ok(text.map(|it| String::from_utf8(it).ok()?.parse().ok()))
}

/// Encodes a head, and checks that the windows have the length that it states.
pub(crate) fn encoded(head: &Head, windows: &IndexWindows) -> Result<Vec<u8>, LazyDeviceError> {
    let damaged = |damage| LazyDeviceError::Index { device: head.device, source: damage };
    let (expected, actual) = (head.windows_bytes(), windows.groups().map(|it| it.len() as u64));
    if let Some(actual) = actual.filter(|it| *it != expected) {
        return Err(damaged(LazyIndexDamage::Windows { expected, actual }));
    }
    head.encode().map_err(|it| damaged(LazyIndexDamage::Head(it)))
}

/// Whether two indexes state the same bytes of a device. They may belong to different blobs, except if a table of
/// contents describes the device: digests of chunks and digests of units are not comparable, and the device's name is a
/// digest of the whole head.
pub(super) fn same_bytes(one: &Head, other: &Head) -> bool {
    if one.kind.is_of_chunks() || other.kind.is_of_chunks() {
        return one == other;
    }
    (one.device_bytes, one.tar_bytes, &one.diff_id, &one.tail, &one.units)
        == (other.device_bytes, other.tar_bytes, &other.diff_id, &other.tail, &other.units)
}
