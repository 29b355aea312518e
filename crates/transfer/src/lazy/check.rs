//! Checks an image that another party made: the image is parsed and written again by Quire's writer, and the bytes
//! must be the same.
//!
//! So a kernel that mounts the image reads only structures that Quire writes, and no structures that the maker of the
//! index has crafted.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, Write};

use image::erofs::read::{Image, Located, Objects, ReadError, RunPlace, native_tree};
use image::lazy::Head;
use image::verity::{Algorithm, DeviceId, ImageId, ObjectId, digest};
use sha2::{Digest as _, Sha256};
use store::walk::COMPOSEFS_INLINE_MAX;
use store::{DeviceKind, DraftError, StoredObject};

use crate::native::{self, NativeError, Places};

/// Why an image is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageCheckError {
    /// The image cannot be parsed.
    #[error("cannot read the image of the index")]
    Read(#[source] ReadError),
    /// The image has a device that no head describes.
    #[error("the image of the index needs device number {number}, but the index has no head of it")]
    UnknownDevice {
        /// Number of the device in the image, from 1.
        number: usize,
    },
    /// The length of a device differs from the length in its head.
    #[error(
        "the image of the index states a length of device {device} that is not the {expected} \
        bytes of its head"
    )]
    DeviceLength {
        device: DeviceId,
        /// Length in the head, in bytes.
        expected: u64,
    },
    /// A head describes a device that the image does not have.
    #[error(
        "the image of the index does not have exactly one entry of device {0}, of which the \
        index has a head"
    )]
    Device(DeviceId),
    /// Two heads describe the same device.
    #[error("the index has two heads of device {0}")]
    TwoHeads(DeviceId),
    /// Quire's writer cannot write the image.
    #[error("the image of the index does not have the form tar")]
    Form(#[source] Box<NativeError>),
    /// Quire's writer writes other bytes.
    #[error("the image of the index is not as Quire writes it: byte {at} differs")]
    Differs {
        /// Offset of the first byte that differs.
        at: u64,
    },
}

/// Checks that an image has the form `tar`, has exactly the devices of `heads`, and is identical to the output of
/// Quire's writer. Returns the image's id.
///
/// The memory in use is a small multiple of the image's length.
pub fn check_image<'h>(
    bytes: &[u8],
    heads: impl IntoIterator<Item = &'h Head>,
) -> Result<ImageId, ImageCheckError> {
    let image = Image::open(bytes).map_err(ImageCheckError::Read)?;
    let mut by_device = HashMap::new();
    for head in heads {
        if by_device.insert(head.device, head).is_some() {
            return Err(ImageCheckError::TwoHeads(head.device));
        }
    }
    let mut devices = Vec::new();
    for (number, slot) in (1..).zip(image.devices()) {
        let unknown = ImageCheckError::UnknownDevice { number };
        let device = slot.device_id().ok_or(unknown)?;
        // The head is removed from the map, so that a second slot of the same device is refused.
        let head = by_device.remove(&device).ok_or(ImageCheckError::UnknownDevice { number })?;
        if slot.bytes() != Some(head.device_bytes) {
            let expected = head.device_bytes;
            return Err(ImageCheckError::DeviceLength { device, expected });
        }
        devices.push(head);
    }
    if let Some(device) = by_device.into_keys().min() {
        return Err(ImageCheckError::Device(device));
    }
    let places = TarPlaces { devices, found: RefCell::default() };
    let find = |located: &Located<'_>| places.object_id_of(located);
    let objects = Objects {
        algorithm: Algorithm::Sha256,
        // The same limit as for imports: longer files are in the tars.
        inline_max: COMPOSEFS_INLINE_MAX,
        find: &find,
    };
    let tree = native_tree(&image, objects).map_err(ImageCheckError::Read)?.tree;
    let mut same = Same { rest: bytes, at: 0, differs: None };
    let written = native::write_to(&tree, &places, &mut same);
    if let Some(at) = same.differs {
        return Err(ImageCheckError::Differs { at });
    }
    written.map_err(|source| ImageCheckError::Form(Box::new(source)))?;
    if !same.rest.is_empty() {
        return Err(ImageCheckError::Differs { at: same.at });
    }
    Ok(digest(Algorithm::Sha256, bytes).into())
}

/// The locations of files according to the image. The object ids are derived from the locations, because the bytes are
/// unknown.
struct TarPlaces<'h> {
    /// Heads of the devices, in the image's order.
    devices: Vec<&'h Head>,
    found: RefCell<HashMap<ObjectId, StoredObject>>,
}

impl TarPlaces<'_> {
    /// Returns the object id of a file. Returns `None` if the file is not in a single run of a tar.
    fn object_id_of(&self, located: &Located<'_>) -> Option<ObjectId> {
        let [run] = located.runs else { return None };
        let RunPlace::Data(device, offset) = run.place else { return None };
        let head = self.devices.get(device.slot()?)?;
        let (size, sha256, offset) = (located.size, located.fingerprint?, offset.0);
        // The bytes of a device after its tar belong to no file.
        if run.len != size || offset.checked_add(size)? > head.tar_bytes {
            return None;
        }
        let mut place = Sha256::new_with_prefix(head.device.as_bytes());
        place.update(offset.to_le_bytes());
        place.update(size.to_le_bytes());
        place.update(sha256);
        let object = ObjectId::from_bytes(&place.finalize()).ok()?;
        self.found.borrow_mut().entry(object).or_insert_with(|| StoredObject {
            object,
            device: head.device,
            device_bytes: head.device_bytes,
            kind: DeviceKind::Tar,
            offset,
            size,
            sha256,
            pieces: None,
        });
        Some(object)
    }
}

impl Places for TarPlaces<'_> {
    fn find_object(&self, object: &ObjectId) -> Result<Option<StoredObject>, DraftError> {
        Ok(self.found.borrow().get(object).cloned())
    }

    fn give(&self, _: &ObjectId, _: u64, _: &mut dyn Write) -> io::Result<()> {
        Err(not_in_a_tar())
    }
}

fn not_in_a_tar() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its data is not contiguous in the tar of a layer")
}

/// A writer that compares its input with existing bytes.
struct Same<'b> {
    rest: &'b [u8],
    /// Number of bytes that were equal so far.
    at: u64,
    differs: Option<u64>,
}

impl Write for Same<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let same = self.rest.iter().zip(bytes).take_while(|(one, two)| one == two).count();
        self.at += same as u64;
        self.rest = &self.rest[same..];
        if same < bytes.len() {
            self.differs = Some(self.at);
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it differs"));
        }
        Ok(same)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use image::erofs::{DeviceFile, Native, Placed, Run, Standalone, Stored, write_native};
    use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, Timestamp, Tree};

    use super::*;

    const A: u64 = 5000;
    const B: u64 = 100;
    const METADATA: Metadata = Metadata {
        permissions: 0o644,
        uid: 0,
        gid: 0,
        mtime: Timestamp { seconds: 1_700_000_000, nanoseconds: 0 },
    };

    fn device(byte: u8) -> DeviceId {
        DeviceId::from_bytes(&[byte; 32]).unwrap()
    }

    fn object(byte: u8) -> ObjectId {
        ObjectId::from_bytes(&[byte; 32]).unwrap()
    }

    /// Makes a head with the fields that the check of an image uses.
    fn head(byte: u8, device_bytes: u64, tar_bytes: u64) -> Head {
        Head {
            device: device(byte),
            device_bytes,
            blob: image::digest::Digest::sha256(b"blob"),
            blob_bytes: 1,
            kind: image::lazy::BlobKind::Gzip,
            diff_id: image::digest::Digest::sha256(b"tar"),
            tar_bytes,
            tail: Vec::new(),
            units: Vec::new(),
            spans: Vec::new(),
            groups: Vec::new(),
        }
    }

    fn heads() -> [Head; 2] {
        [head(1, 8192, 7168), head(2, 4096, 3584)]
    }

    fn external(size: u64, object: ObjectId) -> Node<'static> {
        let location = Location::Object;
        Node::Regular(Content::External { size, object: Some(object), location })
    }

    /// Makes a tree with files on two devices, and one inode of each other kind. `more` adds inodes.
    fn tree(more: impl FnOnce(&mut Builder)) -> Tree {
        let mut builder = Builder::new();
        let xattrs = builder.xattrs([(&b"user.x"[..], &b"y"[..])]).unwrap();
        let none = builder.xattrs([]).unwrap();
        let nodes = [
            ("a", none, external(A, object(0xa))),
            ("b", xattrs, external(B, object(0xb))),
            ("b-again", none, external(B, object(0xb))),
            ("device", none, Node::CharDevice(0x103)),
            ("directory", xattrs, Node::Directory),
            ("fifo", none, Node::Fifo),
            ("link", none, Node::Symlink(b"/elsewhere")),
            ("small", none, Node::Regular(Content::Inline(b"small"))),
        ];
        for (name, set, node) in nodes {
            let id = builder.inode(&METADATA, set, node).unwrap();
            builder.insert(InodeId::ROOT, name.as_bytes(), id, Link::Equal).unwrap();
            if name == "a" {
                builder.insert(InodeId::ROOT, b"a-linked", id, Link::Equal).unwrap();
            }
        }
        more(&mut builder);
        builder.finish()
    }

    fn stored(object: &ObjectId) -> Option<Placed<'static>> {
        let (device, offset, hash) = match object.as_bytes()[0] {
            0xa => (0, 512, 7),
            0xb => (1, 3072, 8),
            _ => return None,
        };
        Some(Placed::Whole(Stored { device, offset, fingerprint: [hash; 32] }))
    }

    /// Options for writing an image.
    struct Written {
        devices: Vec<DeviceFile>,
        has_tar: bool,
        uuid: [u8; 16],
    }

    /// Writes an image as another writer could. It differs from Quire's output only in the options that `change`
    /// modifies.
    fn image(
        tree: &Tree,
        find: &dyn Fn(&ObjectId) -> Option<Placed<'static>>,
        change: impl FnOnce(&mut Written),
    ) -> Vec<u8> {
        let devices = heads().map(|it| DeviceFile { id: it.device, bytes: it.device_bytes });
        let mut how = Written { devices: devices.to_vec(), has_tar: true, uuid: [0; 16] };
        change(&mut how);
        let find = |object: &ObjectId| find(object);
        let Written { devices, has_tar, uuid } = how;
        let native = Native { has_tar, uuid, ..Native::new(&devices, &find) };
        let mut contents =
            |_: image::tree::Inode<'_>, _, out: &mut dyn Write| out.write_all(&[9; 100]);
        let mut bytes = Vec::new();
        write_native(tree, &native, &mut contents, &mut bytes).unwrap();
        bytes
    }

    fn good() -> Vec<u8> {
        image(&tree(|_| {}), &stored, |_| {})
    }

    #[track_caller]
    fn check(bytes: &[u8], heads: &[Head], expect: Result<(), &str>) {
        match (check_image(bytes, heads), expect) {
            (Ok(id), Ok(())) => assert_eq!(id, digest(Algorithm::Sha256, bytes).into()),
            (Err(error), Err(expect)) => {
                let mut text = error.to_string();
                let mut error: &dyn std::error::Error = &error;
                while let Some(source) = error.source() {
                    text = format!("{text}: {source}");
                    error = source;
                }
                assert!(text.contains(expect), "{text}");
            }
            (Ok(_), Err(expect)) => panic!("accepted, not refused: {expect}"),
            (Err(error), Ok(())) => panic!("{error}"),
        }
    }

    #[test]
    fn an_image_of_our_writer_passes() {
        check(&good(), &heads(), Ok(()));
        let [one, two] = heads();
        check(&good(), &[two, one], Ok(()));
        // An image without devices.
        let bytes = image(&Builder::new().finish(), &stored, |how| {
            how.has_tar = false;
            how.devices.clear();
        });
        check(&bytes, &[], Ok(()));
    }

    /// Tests that the seed of the fuzzers is accepted.
    #[test]
    fn the_accepted_seed_is_an_image_of_ours() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/lazy_image/accepted");
        assert!(std::fs::read(path).unwrap() == good());
    }

    #[test]
    fn devices_are_those_of_the_heads() {
        let [one, two] = heads();
        check(&good(), std::slice::from_ref(&one), Err("needs device number 2"));
        check(&good(), &[one.clone(), head(3, 4096, 3584)], Err("needs device number 2"));
        let both = [one.clone(), two.clone()];
        let more = [&both[..], &[head(3, 512, 512)]].concat();
        check(&good(), &more, Err("exactly one entry of device 0303"));
        check(&good(), &[&both[..], &both[..1]].concat(), Err("two heads of device 0101"));
        check(&good(), &[one, head(2, 4608, 3584)], Err("not the 4608 bytes of its head"));
        // Quire's writer omits devices without files.
        let unused = image(&tree(|_| {}), &stored, |how| {
            how.devices.push(DeviceFile { id: device(3), bytes: 512 });
        });
        check(&unused, &more, Err("not as Quire writes it"));
        // The same device twice.
        let twice = image(&tree(|_| {}), &stored, |how| how.devices.push(how.devices[0]));
        check(&twice, &both, Err("needs device number 3"));
    }

    #[test]
    fn a_file_of_a_device_that_no_head_describes_is_refused() {
        let third = |object: &ObjectId| match stored(object)? {
            Placed::Whole(it) if it.device == 1 => Some(Placed::Whole(Stored { device: 2, ..it })),
            other => Some(other),
        };
        let more = |how: &mut Written| how.devices.push(DeviceFile { id: device(3), bytes: 4096 });
        let bytes = image(&tree(|_| {}), &third, more);
        check(&bytes, &heads(), Err("needs device number 3, but the index has no head of it"));
        let [one, two] = heads();
        check(&bytes, &[one.clone(), two, head(3, 4096, 3584)], Err("not as Quire writes it"));
        // The second slot has the id of the third device. The heads describe two devices, but the file is on device
        // number 3.
        let bytes = image(&tree(|_| {}), &third, |how| {
            how.devices[1].id = device(3);
            how.devices.push(DeviceFile { id: device(2), bytes: 4096 });
        });
        check(&bytes, &[one, head(3, 4096, 3584)], Err("needs device number 3"));
    }

    #[test]
    fn the_order_of_devices_is_that_of_the_files() {
        let turned = |object: &ObjectId| match stored(object)? {
            Placed::Whole(it) => Some(Placed::Whole(Stored { device: 1 - it.device, ..it })),
            other @ Placed::Pieces { .. } => Some(other),
        };
        let bytes = image(&tree(|_| {}), &turned, |how| how.devices.reverse());
        check(&bytes, &heads(), Err("not as Quire writes it"));
    }

    #[test]
    fn files_lie_within_tars() {
        // `b` ends at byte 3172 of its tar.
        let with = |tar_bytes| [head(1, 8192, 7168), head(2, 4096, tar_bytes)];
        check(&good(), &with(3172), Ok(()));
        check(&good(), &with(3171), Err("cannot read the contents of \"/b\""));
    }

    #[test]
    fn files_are_in_one_run_of_a_tar() {
        const RUNS: [Run; 2] =
            [Run { len: 4096, place: Some((0, 512)) }, Run { len: 904, place: Some((1, 0)) }];
        const HOLE: [Run; 1] = [Run { len: 5000, place: None }];
        for runs in [&RUNS[..], &HOLE[..]] {
            let find = |object: &ObjectId| match object.as_bytes()[0] {
                0xa => Some(Placed::Pieces { runs, fingerprint: [7; 32] }),
                _ => stored(object),
            };
            let bytes = image(&tree(|_| {}), &find, |_| {});
            check(&bytes, &heads(), Err("cannot read the contents of \"/a\""));
        }
        // The file is in the image itself.
        let find = |object: &ObjectId| stored(object).filter(|_| object.as_bytes()[0] != 0xb);
        let bytes = image(&tree(|_| {}), &find, |how| how.devices.truncate(1));
        check(&bytes, &heads()[..1], Err("its data is not contiguous in the tar of a layer"));
    }

    #[test]
    fn other_forms_and_writers_are_refused() {
        let mut composefs = Vec::new();
        let profile = image::erofs::Profile::Composefs(image::erofs::Versions::default());
        image::erofs::write(&tree(|_| {}), &profile, &mut composefs).unwrap();
        check(&composefs, &[], Err("does not have the form tar"));
        let mut standalone = Vec::new();
        let profile = image::erofs::Profile::Standalone(Standalone::default());
        image::erofs::write(&Builder::new().finish(), &profile, &mut standalone).unwrap();
        check(&standalone, &[], Err("byte 0 differs"));
        let packed = image(&tree(|_| {}), &stored, |how| how.has_tar = false);
        check(&packed, &heads(), Err("byte 12 differs"));
        let named = image(&tree(|_| {}), &stored, |how| how.uuid = [1; 16]);
        check(&named, &heads(), Err("not as Quire writes it"));
        check(b"no image", &[], Err("cannot read the image"));
    }

    #[test]
    fn nothing_looks_like_overlayfs() {
        let whiteout = tree(|builder| {
            let none = builder.xattrs([]).unwrap();
            let id = builder.inode(&METADATA, none, Node::CharDevice(0)).unwrap();
            builder.insert(InodeId::ROOT, b"gone", id, Link::Equal).unwrap();
        });
        let redirect = tree(|builder| {
            let pairs = [(&b"trusted.overlay.redirect"[..], &b"/etc/shadow"[..])];
            let set = builder.xattrs(pairs).unwrap();
            let id = builder.inode(&METADATA, set, Node::Directory).unwrap();
            builder.insert(InodeId::ROOT, b"moved", id, Link::Equal).unwrap();
        });
        for (tree, expect) in [(whiteout, "character device 0:0"), (redirect, "trusted.overlay")] {
            check(&image(&tree, &stored, |_| {}), &heads(), Err(expect));
        }
    }

    #[test]
    fn a_flipped_bit_is_refused_or_makes_another_image() {
        let (good, heads) = (good(), heads());
        let id = check_image(&good, &heads).unwrap();
        let (mut refused, mut other) = (0, 0);
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bytes = good.clone();
                bytes[at] ^= 1 << bit;
                match check_image(&bytes, &heads) {
                    Err(_) => refused += 1,
                    Ok(accepted) => {
                        assert_ne!(accepted, id);
                        // Header, superblock and device table do not depend on the tree, so no change to them is
                        // accepted.
                        assert!(at >= 0x580, "byte {at}, bit {bit}");
                        other += 1;
                    }
                }
            }
        }
        // A change of a time, an owner or a name may result in another valid image.
        assert!(other > 0 && refused > 8 * other, "{refused} refused, {other} not");
        check(&[&good[..], &[0; 512]].concat(), &heads, Err("differs"));
        check(&good[..good.len() - 512], &heads, Err("cannot read the image"));
    }
}
