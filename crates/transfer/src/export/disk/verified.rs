//! Writes a disk whose root is verified by dm-verity: the image, its hash tree and, on request, a signature of the
//! tree's root hash, and a boot program with the root hash.
//!
//! Partition tables contain UUIDs that are made from the root hash, and the root hash is known when the image is
//! complete. So the table before the image is written last, and the output must be a file. The image's first block
//! contains its length, from which the places of all blocks of the tree follow, so none of them is kept in memory.

use std::fs::File;
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;

use image::digest::Digest;
use image::dm_verity::{HashTreeBuilder, RootHash};
use image::erofs::Flavor;
use image::tree::Node;
use image::verity::ImageId;
use store::{OperationError, Store};
use uuid::Uuid;

use super::super::erofs::{derived, image_only};
use super::super::{ExportError, Options, files};
use super::boot::BootProgram;
use super::fat::FatLayout;
use super::first_block::{BLOCK, image_length, wrong_length};
use super::identity::{DiskReport, ROOT_NAME, RootType, Variant};
use super::signature::RootSigner;
use super::table::{DiskPartition, DiskTable, MIB, READ_ONLY, SECTOR, zeros};
use crate::root_types::ESP;

/// Names of the partitions after the root's.
const VERITY_NAME: &str = "root-verity";
const SIGNATURE_NAME: &str = "root-verity-sig";
const ESP_NAME: &str = "esp";
/// Maximum length of an os-release file in bytes. Others are shorter than 1 KiB.
const OS_RELEASE_MAX: u64 = 64 << 10;

/// Size of the buffer before the output, in bytes.
const BUFFER: usize = 1 << 20;

/// The kind of a disk.
#[derive(Debug, Clone, Copy)]
pub struct VerifiedDisk<'a> {
    pub root: RootType,
    pub flavor: Flavor,
    /// Signs the root hash.
    pub signer: Option<&'a RootSigner>,
    /// Adds an EFI system partition with this boot program.
    pub boot: Option<&'a BootProgram>,
}

/// Result of writing a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerifiedDiskReport {
    pub disk: DiskReport,
    pub root_hash: RootHash,
}

/// Writes a disk whose first partition is the image that [`to_erofs`](super::super::to_erofs) makes for this flavor,
/// and whose second is the hash tree of the first. The file must be empty. The same image, kind and signer give the
/// same bytes. The memory use is that of [`to_erofs`](super::super::to_erofs), and of a few copies of the boot program.
///
/// # Errors
/// An [`ExportError`]; the output is incomplete then.
pub fn to_verified_disk(
    store: &Store,
    id: &ImageId,
    kind: &VerifiedDisk<'_>,
    file: &File,
    options: &Options<'_>,
) -> Result<VerifiedDiskReport, ExportError> {
    let failed = OperationError::of("make", "the disk");
    let variant = Variant::of(kind.flavor);
    let mut out = BufWriter::with_capacity(BUFFER, file);
    zeros(&mut out, MIB).map_err(failed)?;

    let mut root = HashedOutput {
        out: &mut out,
        file,
        start: Vec::with_capacity(BLOCK),
        tree: None,
        written: 0,
        ids: TreeIds::of(id, variant),
    };
    let image = image_only(store, id, kind.flavor, &mut root, options)?;
    let (root_bytes, tree_bytes, root_hash) = root.finish().map_err(failed)?;
    let [root_id, tree_id] = root_hash.halves().map(Uuid::from_bytes);
    let mut parts = DiskParts { out, partitions: Vec::new() };
    parts.push(kind.root.root(), root_id, ROOT_NAME, root_bytes).map_err(failed)?;

    // The tree is there already.
    let tree_end = SeekFrom::Start(parts.end() + tree_bytes);
    parts.out.seek(tree_end).map_err(failed)?;
    parts.push(kind.root.verity(), tree_id, VERITY_NAME, tree_bytes).map_err(failed)?;

    let mut more = format!(" {root_hash}");
    if let Some(signer) = kind.signer {
        let content = signer.partition(&root_hash);
        let content = content.map_err(OperationError::of("sign", "the root hash"))?;
        let fingerprint = format!(" {}", signer.fingerprint());
        let signature_id = variant.guid("signature", kind.root, id, &fingerprint);
        parts.out.write_all(&content).map_err(failed)?;
        let bytes = content.len() as u64;
        let signature = kind.root.signature();
        parts.push(signature, signature_id, SIGNATURE_NAME, bytes).map_err(failed)?;
        more += &fingerprint;
    }

    if let Some(boot) = kind.boot {
        let os_release = os_release(store, id, options)?;
        let program = boot.make(&root_hash, os_release.as_deref());
        let program = program.map_err(OperationError::of("make", "the boot program"))?;
        let digest = Digest::sha256(&program);
        let fat = FatLayout::for_file(program.len());
        let fat = fat.ok_or_else(|| io::Error::other("the boot program is too long for FAT"));
        let fat = fat.map_err(failed)?;
        let volume = digest.as_bytes().first_chunk().copied().unwrap_or_default();
        // The field of FAT has 32 bits. Only a BIOS would need it.
        let start = u32::try_from(parts.end() / SECTOR).unwrap_or(0);
        let written = fat.write(boot.file(), &program, volume, start, &mut parts.out);
        written.map_err(failed)?;
        let digest = format!(" {digest}");
        let id = variant.guid("esp", kind.root, id, &digest);
        let esp = DiskPartition {
            kind: Uuid::from_u128(ESP),
            id,
            name: ESP_NAME,
            flags: 0,
            bytes: fat.bytes(),
        };
        parts.push_with(esp).map_err(failed)?;
        more += &digest;
    }

    let guid = variant.guid("disk", kind.root, id, &more);
    let bytes = parts.finish(guid, variant.align, file).map_err(failed)?;
    Ok(VerifiedDiskReport { disk: DiskReport { image, bytes, partition: root_id }, root_hash })
}

/// The salt and the UUID of an image's hash tree. They depend only on the image, so all disks of it have the same root
/// hash.
#[derive(Debug, Clone, Copy)]
struct TreeIds {
    salt: [u8; 32],
    uuid: [u8; 16],
}

impl TreeIds {
    fn of(id: &ImageId, variant: Variant) -> Self {
        let suffix = variant.suffix;
        let mut salt = [0; 32];
        let digest = Digest::sha256(format!("quire salt {id}{suffix}").as_bytes());
        salt.copy_from_slice(digest.as_bytes());
        Self { salt, uuid: derived(&format!("quire verity {id}{suffix}")) }
    }
}

/// Reads the image's description of its operating system, if it has one. `/etc/os-release` is usually a link to the
/// other file. Source: os-release(5).
fn os_release(
    store: &Store,
    id: &ImageId,
    options: &Options<'_>,
) -> Result<Option<Vec<u8>>, ExportError> {
    let tree = files::tree(store, id)?;
    for path in ["/etc/os-release", "/usr/lib/os-release"] {
        if let Some(file) = tree.resolve(path.as_bytes())
            && let Node::Regular(content) = file.node()
            && (1..=OS_RELEASE_MAX).contains(&content.size())
        {
            return Ok(Some(files::read(store, path.as_bytes(), content, options)?));
        }
    }
    Ok(None)
}

/// A disk being written, from its first partition on.
struct DiskParts<'a> {
    out: BufWriter<&'a File>,
    partitions: Vec<DiskPartition>,
}

impl DiskParts<'_> {
    /// Completes a read-only partition whose first `bytes` were written.
    fn push(&mut self, kind: Uuid, id: Uuid, name: &'static str, bytes: u64) -> io::Result<()> {
        self.push_with(DiskPartition { kind, id, name, flags: READ_ONLY, bytes })
    }

    /// Completes a partition of which all bytes were written but the zeros at its end.
    fn push_with(&mut self, partition: DiskPartition) -> io::Result<()> {
        let bytes = partition.bytes.next_multiple_of(MIB);
        zeros(&mut self.out, bytes - partition.bytes)?;
        self.partitions.push(DiskPartition { bytes, ..partition });
        Ok(())
    }

    /// Returns the offset of the next partition.
    fn end(&self) -> u64 {
        MIB + self.partitions.iter().map(|it| it.bytes).sum::<u64>()
    }

    /// Writes both tables. Returns the length of the disk in bytes.
    fn finish(mut self, guid: Uuid, align: u64, file: &File) -> io::Result<u64> {
        let table = DiskTable::new(guid, &self.partitions, align)?;
        let rest = table.bytes - self.end() - table.tail.len() as u64;
        zeros(&mut self.out, rest)?;
        self.out.write_all(&table.tail)?;
        self.out.flush()?;
        file.write_all_at(&table.head, 0)?;
        Ok(table.bytes)
    }
}

/// A writer of the root partition that also writes the hash tree behind it.
struct HashedOutput<'a, 'b> {
    out: &'a mut BufWriter<&'b File>,
    file: &'b File,
    ids: TreeIds,
    /// The first block of the image, until it is complete.
    start: Vec<u8>,
    /// `None` until the first block is complete.
    tree: Option<RootTree>,
    /// Number of bytes of the partition that were written.
    written: u64,
}

/// The hash tree of a root partition.
struct RootTree {
    builder: HashTreeBuilder,
    /// Length of the image in bytes, as it states.
    image: u64,
    /// Length of the partition in bytes.
    root: u64,
}

impl HashedOutput<'_, '_> {
    /// Writes bytes of the partition, of which the length is known.
    fn write_hashed(&mut self, bytes: &[u8]) -> io::Result<()> {
        let tree = self.tree.as_mut().expect("the first block is complete");
        self.out.write_all(bytes)?;
        tree.builder.update(bytes, &mut sink(self.file, tree.root))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Completes the partition and the tree. Returns the lengths of both in bytes, and the root hash.
    fn finish(mut self) -> io::Result<(u64, u64, RootHash)> {
        let stated = self.tree.as_ref().map(|it| it.image);
        if stated != Some(self.written) {
            return Err(wrong_length(self.written, stated));
        }
        let root = self.written.next_multiple_of(MIB);
        let padding = root - self.written;
        zeros(&mut self, padding)?;
        let Some(RootTree { builder, .. }) = self.tree else {
            return Err(wrong_length(self.written, stated));
        };
        let bytes = builder.size();
        Ok((root, bytes, builder.finish(&mut sink(self.file, root))?))
    }
}

/// Writes blocks of a hash tree behind a root partition of this length.
fn sink(file: &File, root: u64) -> impl FnMut(u64, &[u8]) -> io::Result<()> + '_ {
    move |offset, block| file.write_all_at(block, MIB + root + offset)
}

impl Write for HashedOutput<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.tree.is_some() {
            self.write_hashed(bytes)?;
            return Ok(bytes.len());
        }
        let count = bytes.len().min(BLOCK - self.start.len());
        self.start.extend_from_slice(&bytes[..count]);
        if self.start.len() == BLOCK {
            let image = image_length(&self.start);
            let root = image.next_multiple_of(MIB);
            let TreeIds { salt, uuid } = self.ids;
            let builder = HashTreeBuilder::new(salt, uuid, root).map_err(io::Error::other)?;
            self.tree = Some(RootTree { builder, image, root });
            let start = std::mem::take(&mut self.start);
            self.write_hashed(&start)?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
