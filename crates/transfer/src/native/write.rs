//! Writes an image whose data is in devices.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};
use std::ops::Range;

use image::erofs::{DeviceFile, ErofsWriteError, Native, Piece, Placed, Run, Stored, write_native};
use image::tree::{Content, Inode, Node, Tree};
use image::verity::{DeviceId, ImageId, ObjectId};
use store::{DeviceKind, DraftError, StoredObject, StoredPiece, Transaction};

/// The xattr by which kernels share pages. Source: erofs-utils `mkfs/main.c`.
const FINGERPRINT: &str = "erofs.fingerprint.v1";

/// Why an image over devices cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NativeError {
    /// Overlayfs would misinterpret a file.
    #[error(
        "\"{}\" {what}, which overlayfs would misread below a writable layer: import the image with --form objects",
        path.escape_ascii()
    )]
    Overlay {
        path: Vec<u8>,
        /// The file's type or xattr.
        what: &'static str,
    },
    /// The image has an xattr with the name of Quire's fingerprints.
    #[error(
        "\"{}\" has an xattr \"{FINGERPRINT}\", which Quire uses itself: import the image with \
        --form objects or --skip-xattrs",
        path.escape_ascii()
    )]
    Fingerprint { path: Vec<u8> },
    /// The image cannot be added to the store.
    #[error(transparent)]
    Draft(#[from] DraftError),
    #[error(transparent)]
    Write(#[from] ErofsWriteError),
}

/// Locations of the data of an image's files.
pub(crate) trait Places {
    /// Returns the location of an object, or `None` if the image itself must contain its bytes.
    fn find_object(&self, object: &ObjectId) -> Result<Option<StoredObject>, DraftError>;

    /// Writes the bytes of an object from `start` on.
    fn give(&self, object: &ObjectId, start: u64, out: &mut dyn Write) -> io::Result<()>;
}

/// Writes the image of a tree over devices into the store.
pub(crate) fn write(
    transaction: &Transaction<'_>,
    tree: &Tree,
    places: &dyn Places,
) -> Result<Written, NativeError> {
    let mut draft = transaction.image()?;
    let WrittenTo { bytes, devices, has_tar } = write_to(tree, places, &mut draft)?;
    let image = draft.finish()?;
    Ok(Written { image, bytes, devices, has_tar })
}

/// Writes the image of a tree over devices.
pub(crate) fn write_to(
    tree: &Tree,
    places: &dyn Places,
    out: &mut impl Write,
) -> Result<WrittenTo, NativeError> {
    let (found, devices) = survey(tree, places)?;
    let has_tar = devices.iter().any(|(_, kind)| *kind == DeviceKind::Tar);
    let numbers: HashMap<DeviceId, u16> =
        devices.iter().zip(0..).map(|((device, _), number)| (device.id, number)).collect();
    let devices: Vec<DeviceFile> = devices.iter().map(|(device, _)| *device).collect();
    let number = |device: &DeviceId| numbers.get(device).copied().unwrap_or_default();
    let run = |piece: &StoredPiece| Run {
        len: piece.len,
        place: piece.stored.as_ref().map(|it| (number(&it.device), it.offset)),
    };
    let in_pieces = found.iter().filter_map(|(object, stored)| {
        let pieces = stored.pieces.as_ref()?;
        Some((*object, pieces.iter().map(run).collect()))
    });
    let runs: HashMap<ObjectId, Vec<Run>> = in_pieces.collect();
    let find = |object: &ObjectId| {
        let stored = found.get(object)?;
        let fingerprint = stored.sha256;
        if let Some(runs) = runs.get(object) {
            return Some(Placed::Pieces { runs, fingerprint });
        }
        let (device, offset) = (number(&stored.device), stored.offset);
        Some(Placed::Whole(Stored { device, offset, fingerprint }))
    };
    let native = Native { has_tar, ..Native::new(&devices, &find) };
    let mut contents = |file: Inode<'_>, piece, out: &mut dyn Write| {
        let Node::Regular(Content::External { object: Some(object), .. }) = file.node() else {
            let path = file.path();
            let why = format!("the content of {} is not an object", path.escape_ascii());
            return Err(io::Error::other(why));
        };
        let start = match piece {
            Piece::Whole => 0,
            Piece::From(start) => start,
        };
        places.give(&object, start, out)
    };
    let summary = write_native(tree, &native, &mut contents, out)?;
    let devices = devices.iter().map(|it| it.id).collect();
    Ok(WrittenTo { bytes: summary.bytes, devices, has_tar })
}

/// An image that was written to any output.
#[derive(Debug)]
pub(crate) struct WrittenTo {
    /// Size of the image, in bytes.
    pub(crate) bytes: u64,
    pub(crate) devices: Vec<DeviceId>,
    /// Whether one of its devices is a tar.
    pub(crate) has_tar: bool,
}

/// An image that was written into the store.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) image: ImageId,
    /// Size of the image, in bytes.
    pub(crate) bytes: u64,
    pub(crate) devices: Vec<DeviceId>,
    /// Whether one of its devices is a tar.
    pub(crate) has_tar: bool,
}

type PlacedFiles = (HashMap<ObjectId, StoredObject>, Vec<(DeviceFile, DeviceKind)>);

/// Finds all objects of a tree, and their devices in the order in which the tree needs them.
fn survey(tree: &Tree, places: &dyn Places) -> Result<PlacedFiles, NativeError> {
    let mut found = HashMap::new();
    let mut devices = Vec::new();
    let mut known = BTreeSet::new();
    let mut walk = tree.walk();
    check(&[], &tree.root())?;
    while let Some((path, entry)) = walk.next() {
        if !entry.is_owner {
            continue;
        }
        check(path, &entry.inode)?;
        let Node::Regular(Content::External { object: Some(object), .. }) = entry.inode.node()
        else {
            continue;
        };
        if found.contains_key(&object) {
            continue;
        }
        let Some(stored) = places.find_object(&object)? else { continue };
        // Empty files have no data in a device. For an object in pieces, the devices include the one whose index lists
        // the pieces, so that `gc` keeps this device as long as the image.
        if stored.size > 0 {
            for store::StoredDevice { id, bytes, kind } in stored.devices() {
                if known.insert(id) {
                    devices.push((DeviceFile { id, bytes }, kind));
                }
            }
        }
        found.insert(object, stored);
    }
    Ok((found, devices))
}

/// Refuses inodes that look like the marks of overlayfs, which would interpret them if the image is one of its
/// layers.
fn check(path: &[u8], inode: &Inode<'_>) -> Result<(), NativeError> {
    let refused = |what| Err(NativeError::Overlay { path: path.to_vec(), what });
    if matches!(inode.node(), Node::CharDevice(0)) {
        return refused("is a character device 0:0");
    }
    if inode.xattrs().any(|(name, _)| name.starts_with(b"trusted.overlay.")) {
        return refused("has an xattr \"trusted.overlay.…\"");
    }
    if inode.xattrs().any(|(name, _)| name == FINGERPRINT.as_bytes()) {
        return Err(NativeError::Fingerprint { path: path.to_vec() });
    }
    Ok(())
}

/// Copies a range of bytes. `read` fills a buffer from an offset.
pub(crate) fn copy(
    range: Range<u64>,
    out: &mut dyn Write,
    read: impl Fn(&mut [u8], u64) -> io::Result<()>,
) -> io::Result<()> {
    let Range { start: mut at, end } = range;
    let mut buffer = [0; 16 << 10];
    while at < end {
        let count = usize::try_from(end - at).map_or(buffer.len(), |it| it.min(buffer.len()));
        read(&mut buffer[..count], at)?;
        out.write_all(&buffer[..count])?;
        at += count as u64;
    }
    Ok(())
}
