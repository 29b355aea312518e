//! Writes images in layout V2 of composefs-rs. `docs/format/composefs-rs.md` has its rules, F1 to F8.

use std::borrow::Cow;
use std::io;

use hashbrown::HashMap;
use xxhash_rust::xxh32::xxh32;
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromZeros as _, IntoBytes as _};

use crate::erofs::ErofsWriteError;
use crate::erofs::layout::{
    COMPOSEFS_HEADER_VERSION, COMPOSEFS_MAGIC, FORMAT_EXTENDED, FORMAT_LAYOUT_SHIFT,
    LAYOUT_CHUNK_BASED, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, NULL_BLOCK, RawComposefsHeader,
    RawDirent, RawExtendedInode, RawSuperblock, RawXattrEntry, RawXattrHeader, SLOT_SIZE,
    SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, XATTR_FILTER_SEED, XATTR_PREFIXES, compat, file_type,
};
use crate::tree::{Content, Inode, InodeId, Node, Tree};
use crate::verity::ObjectId;

const BLOCK: u64 = 4096;
/// Version in composefs's header.
const VERSION: u32 = 2;
/// A longer tail of a directory is a block.
const TAIL_MAX: u64 = BLOCK / 2;
/// Chunk format of all external files, which have one chunk.
const ONE_CHUNK: u32 = 31;
/// `e_name_index` of `trusted.`.
const TRUSTED: u8 = 4;
const METACOPY: &[u8] = b"overlay.metacopy";
const REDIRECT: &[u8] = b"overlay.redirect";

/// An xattr: the number of its prefix, the rest of its name, and its value. The table of shared xattrs is in this
/// order.
type Pair<'a> = (u8, Cow<'a, [u8]>, Cow<'a, [u8]>);

/// An inode in the order of the image.
struct Listed<'a> {
    inode: Inode<'a>,
    /// Number of the directory above.
    parent: u32,
}

/// The positions of an image's parts.
#[derive(Default)]
struct Places {
    /// Offset of each inode.
    inodes: Vec<u64>,
    /// Number of the first block of each directory that has blocks.
    blocks: HashMap<usize, u64>,
    end: u64,
}

struct Plan<'a> {
    listed: Vec<Listed<'a>>,
    /// The number of each inode of the tree.
    numbers: Vec<u32>,
    /// For each shared xattr, its index in the table.
    shared: HashMap<Pair<'a>, usize>,
    /// Offset of each shared xattr.
    shared_at: Vec<u64>,
    places: Places,
}

/// Why a number fits into its field.
const PLACED: &str = "checked when it was placed";

/// Returns the value of `i_xattr_icount` for this many bytes of xattrs.
fn units(bytes: usize) -> usize {
    bytes.checked_sub(size_of::<RawXattrHeader>()).map_or(0, |rest| 1 + rest / 4)
}

/// Writes the image of a tree.
///
/// # Errors
/// [`ErofsWriteError`] if the image is too large, or writing fails.
pub fn write_layout2(tree: &Tree, out: &mut impl io::Write) -> Result<(), ErofsWriteError> {
    let (listed, numbers) = list(tree)?;
    let (shared, table) = shared(&listed);
    let mut plan =
        Plan { listed, numbers, shared, shared_at: Vec::new(), places: Places::default() };
    // The table's place depends on the sizes of the inodes, which depend only on the number of shared xattrs.
    plan.shared_at = vec![0; table.len()];
    plan.place(&table)?;
    plan.write(&table, out).map_err(ErofsWriteError::Output)
}

/// Lists all inodes depth first, each at its first name. Rule F1.
fn list(tree: &Tree) -> Result<(Vec<Listed<'_>>, Vec<u32>), ErofsWriteError> {
    const NONE: u32 = u32::MAX;
    let mut numbers = vec![NONE; tree.inode_bound()];
    numbers[InodeId::ROOT.index()] = 0;
    let mut listed = vec![Listed { inode: tree.root(), parent: 0 }];
    let mut open = vec![(tree.root().children(), 0)];
    while let Some((children, parent)) = open.last_mut() {
        let Some(entry) = children.next() else {
            open.pop();
            continue;
        };
        let number = &mut numbers[entry.inode.id().index()];
        if *number != NONE {
            continue;
        }
        *number = u32::try_from(listed.len())
            .map_err(|_many| ErofsWriteError::TooLarge("2^32 inodes"))?;
        listed.push(Listed { inode: entry.inode, parent: *parent });
        if entry.inode.is_directory() {
            let number = *number;
            open.push((entry.inode.children(), number));
        }
    }
    Ok((listed, numbers))
}

/// Finds the xattrs that several inodes have: their indexes, and the table in its order. Rule F4.
fn shared<'a>(listed: &[Listed<'a>]) -> (HashMap<Pair<'a>, usize>, Vec<Pair<'a>>) {
    // Metacopy and redirect of an object are shared if two files have the object.
    let mut objects: HashMap<ObjectId, bool> = HashMap::new();
    let mut others: HashMap<Pair<'a>, bool> = HashMap::new();
    for Listed { inode, .. } in listed {
        if let Some(object) = object(inode) {
            objects.entry(object).and_modify(|it| *it = true).or_insert(false);
        }
        for pair in source_pairs(inode) {
            others.entry(pair).and_modify(|it| *it = true).or_insert(false);
        }
    }
    let mut table: Vec<Pair<'a>> =
        others.into_iter().filter(|it| it.1).map(|(pair, _)| pair).collect();
    table.extend(objects.iter().filter(|it| *it.1).flat_map(|(object, _)| object_pairs(object)));
    table.sort_unstable();
    let numbers = table.iter().cloned().enumerate().map(|(at, pair)| (pair, at)).collect();
    (numbers, table)
}

fn object(inode: &Inode<'_>) -> Option<ObjectId> {
    match inode.node() {
        Node::Regular(Content::External { object, .. }) => object,
        _ => None,
    }
}

fn object_pairs<'a>(object: &ObjectId) -> [Pair<'a>; 2] {
    let digest = object.as_bytes();
    let length = u8::try_from(4 + digest.len()).expect("a digest has at most 64 bytes");
    let metacopy = [&[0, length, 0, object.algorithm().kernel_id()], digest].concat();
    let redirect = format!("/{}", object.path()).into_bytes();
    [
        (TRUSTED, Cow::Borrowed(METACOPY), Cow::Owned(metacopy)),
        (TRUSTED, Cow::Borrowed(REDIRECT), Cow::Owned(redirect)),
    ]
}

/// Returns the xattrs of the tree, in the order of their names.
fn source_pairs<'a>(inode: &Inode<'a>) -> Vec<Pair<'a>> {
    let mut xattrs: Vec<_> = inode.xattrs().collect();
    xattrs.sort_unstable();
    let pair = |(name, value): (&'a [u8], &'a [u8])| {
        let known = XATTR_PREFIXES.iter().find(|(_, prefix)| name.starts_with(prefix));
        let (index, length) = known.map_or((0, 0), |(index, prefix)| (*index, prefix.len()));
        (index, Cow::Borrowed(&name[length..]), Cow::Borrowed(value))
    };
    xattrs.into_iter().map(pair).collect()
}

fn pairs<'a>(inode: &Inode<'a>) -> Vec<Pair<'a>> {
    let own = object(inode).map(|it| object_pairs(&it)).into_iter().flatten();
    own.chain(source_pairs(inode)).collect()
}

fn entry_size(pair: &Pair<'_>) -> u64 {
    (size_of::<RawXattrEntry>() + pair.1.len() + pair.2.len()).next_multiple_of(4) as u64
}

fn put_entry(pair: &Pair<'_>, into: &mut Vec<u8>) {
    let entry = RawXattrEntry {
        e_name_len: u8::try_from(pair.1.len()).expect("a tree's names have up to 255 bytes"),
        e_name_index: pair.0,
        e_value_size: U16::new(u16::try_from(pair.2.len()).expect("a tree allows no more")),
    };
    into.extend_from_slice(entry.as_bytes());
    into.extend_from_slice(&pair.1);
    into.extend_from_slice(&pair.2);
    into.resize(into.len().next_multiple_of(4), 0);
}

/// A directory's entries, in blocks; the last ones are the tail, which may be empty. Rule F5.
struct Entries<'a> {
    names: Vec<(&'a [u8], u32, u8)>,
    /// Number of entries in each block.
    blocks: Vec<usize>,
    /// Number of bytes in the tail.
    tail: u64,
}

impl Plan<'_> {
    fn entries(&self, at: usize) -> Entries<'_> {
        let Listed { inode, parent } = &self.listed[at];
        let number = u32::try_from(at).expect("the list has less than 2^32");
        let directory = file_type::DIRECTORY;
        let mut names: Vec<(&[u8], u32, u8)> =
            vec![(b".", number, directory), (b"..", *parent, directory)];
        names.extend(inode.children().map(|it| {
            (it.name, self.numbers[it.inode.id().index()], file_type_of(&it.inode.node()))
        }));
        names.sort_unstable_by_key(|it| it.0);
        let (mut blocks, mut count, mut bytes) = (Vec::new(), 0, 0);
        for (name, ..) in &names {
            let size = (size_of::<RawDirent>() + name.len()) as u64;
            bytes += size;
            if bytes > BLOCK {
                blocks.push(count);
                (count, bytes) = (0, size);
            }
            count += 1;
        }
        if bytes > TAIL_MAX {
            blocks.push(count);
            bytes = 0;
        }
        Entries { names, blocks, tail: bytes }
    }

    /// Returns the bytes of an inode's xattrs.
    fn xattrs(&self, at: usize) -> Vec<u8> {
        let pairs = pairs(&self.listed[at].inode);
        if pairs.is_empty() {
            return Vec::new();
        }
        let mut filter = 0_u32;
        let (mut references, mut local) = (Vec::new(), Vec::new());
        for pair in &pairs {
            filter |= 1 << (xxh32(&pair.1, XATTR_FILTER_SEED + u32::from(pair.0)) % 32);
            match self.shared.get(pair) {
                Some(index) => {
                    let at = u32::try_from(self.shared_at[*index] / 4).expect(PLACED);
                    references.extend_from_slice(&at.to_le_bytes());
                }
                None => put_entry(pair, &mut local),
            }
        }
        let header = RawXattrHeader {
            h_name_filter: U32::new(!filter),
            h_shared_count: u8::try_from(references.len() / 4).expect(PLACED),
            h_reserved2: [0; 7],
        };
        [header.as_bytes(), &references, &local].concat()
    }

    /// Decides where everything is.
    fn place(&mut self, table: &[Pair<'_>]) -> Result<(), ErofsWriteError> {
        let mut at = SUPERBLOCK_OFFSET as u64 + size_of::<RawSuperblock>() as u64;
        let mut blocks = Vec::new();
        let mut inodes = Vec::with_capacity(self.listed.len());
        for number in 0..self.listed.len() {
            let shared = pairs(&self.listed[number].inode);
            let shared = shared.iter().filter(|it| self.shared.contains_key(*it)).count();
            if u8::try_from(shared).is_err() {
                return Err(ErofsWriteError::TooLarge("255 xattrs of a file that others have too"));
            }
            let xattrs = self.xattrs(number).len();
            if u16::try_from(units(xattrs)).is_err() {
                return Err(ErofsWriteError::TooLarge("256 KiB of xattrs of a file"));
            }
            let header = (size_of::<RawExtendedInode>() + xattrs) as u64;
            at = at.next_multiple_of(SLOT_SIZE);
            let (inline, is_flat) = match self.listed[number].inode.node() {
                Node::Directory => {
                    let entries = self.entries(number);
                    if !entries.blocks.is_empty() {
                        blocks.push((number, entries.blocks.len() as u64));
                    }
                    (entries.tail, true)
                }
                Node::Regular(Content::Inline(bytes)) => (bytes.len() as u64, true),
                Node::Symlink(target) => (target.len() as u64, true),
                Node::Regular(Content::External { .. }) => (4, false),
                _ => (0, false),
            };
            // The tail must be in one block.
            let last = at + header - 1;
            if is_flat && inline > 0 && last / BLOCK != (last + 1 + inline) / BLOCK {
                at = (at + BLOCK - last % BLOCK).next_multiple_of(SLOT_SIZE);
            }
            inodes.push(at);
            at += header + inline;
        }
        at = at.next_multiple_of(SLOT_SIZE);
        // `i_ino` has 32 bits for the number of a slot.
        if u32::try_from(at / SLOT_SIZE).is_err() {
            return Err(ErofsWriteError::TooLarge("2^32 slots of inodes"));
        }
        for (shared, pair) in self.shared_at.iter_mut().zip(table) {
            *shared = at;
            at += entry_size(pair);
        }
        // A reference counts in units of 4 bytes.
        if u32::try_from(at / 4).is_err() {
            return Err(ErofsWriteError::TooLarge("16 GiB of inodes and xattrs"));
        }
        at = at.next_multiple_of(BLOCK);
        let mut next = at / BLOCK;
        let mut places = Places { inodes, ..Places::default() };
        for (number, count) in blocks {
            places.blocks.insert(number, next);
            next += count;
        }
        if u32::try_from(next).is_err() {
            return Err(ErofsWriteError::TooLarge("2^32 blocks"));
        }
        places.end = next * BLOCK;
        self.places = places;
        Ok(())
    }

    fn nid(&self, number: u32) -> u64 {
        self.places.inodes[number as usize] / SLOT_SIZE
    }

    fn write(&self, table: &[Pair<'_>], out: &mut impl io::Write) -> io::Result<()> {
        let mut buffer = Vec::new();
        let header = RawComposefsHeader {
            magic: COMPOSEFS_MAGIC.into(),
            version: COMPOSEFS_HEADER_VERSION.into(),
            composefs_version: VERSION.into(),
            ..RawComposefsHeader::new_zeroed()
        };
        buffer.extend_from_slice(header.as_bytes());
        buffer.resize(SUPERBLOCK_OFFSET, 0);
        let narrow = |number: u64| u32::try_from(number).expect("checked when it was placed");
        let mut superblock = RawSuperblock::new_zeroed();
        superblock.magic = SUPERBLOCK_MAGIC.into();
        superblock.feature_compat = (compat::MTIME | compat::XATTR_FILTER).into();
        superblock.blkszbits = 12;
        superblock.rootnid_2b = U16::new(u16::try_from(self.nid(0)).expect("the root comes first"));
        superblock.inos = (self.listed.len() as u64).into();
        superblock.blocks_lo = narrow(self.places.end / BLOCK).into();
        buffer.extend_from_slice(superblock.as_bytes());
        let mut written = 0_u64;
        for (number, Listed { inode, .. }) in self.listed.iter().enumerate() {
            let at = self.places.inodes[number];
            buffer.resize(buffer_length(at - written), 0);
            self.put_inode(number, inode, at, &mut buffer);
            if buffer.len() > 1 << 20 {
                out.write_all(&buffer)?;
                written += buffer.len() as u64;
                buffer.clear();
            }
        }
        let start = self.shared_at.first().copied();
        if let Some(start) = start {
            buffer.resize(buffer_length(start - written), 0);
        }
        for pair in table {
            put_entry(pair, &mut buffer);
        }
        let to_block = |buffer: &mut Vec<u8>, written: u64| {
            let end = (written + buffer.len() as u64).next_multiple_of(BLOCK);
            buffer.resize(buffer_length(end - written), 0);
        };
        to_block(&mut buffer, written);
        for number in 0..self.listed.len() {
            if !self.places.blocks.contains_key(&number) {
                continue;
            }
            let Entries { names, blocks, .. } = self.entries(number);
            let mut rest = &names[..];
            for count in blocks {
                let (block, after) = rest.split_at(count);
                self.put_dirents(block, &mut buffer);
                to_block(&mut buffer, written);
                rest = after;
            }
            if buffer.len() > 1 << 20 {
                out.write_all(&buffer)?;
                written += buffer.len() as u64;
                buffer.clear();
            }
        }
        out.write_all(&buffer)
    }

    fn put_inode(&self, number: usize, inode: &Inode<'_>, at: u64, into: &mut Vec<u8>) {
        let xattrs = self.xattrs(number);
        let device = |rdev: u64| u32::try_from(rdev & 0xffff_ffff).unwrap_or(0);
        let mut tail = Vec::new();
        let node = inode.node();
        let (layout, size, i_u, nlink) = match node {
            Node::Directory => {
                let entries = self.entries(number);
                let in_blocks: usize = entries.blocks.iter().sum();
                if entries.tail > 0 {
                    self.put_dirents(&entries.names[in_blocks..], &mut tail);
                }
                let directories = entries.names.iter().filter(|it| it.2 == file_type::DIRECTORY);
                let first = self.places.blocks.get(&number).copied().unwrap_or(0);
                let layout = if entries.tail > 0 { LAYOUT_FLAT_INLINE } else { LAYOUT_FLAT_PLAIN };
                let size = entries.blocks.len() as u64 * BLOCK + entries.tail;
                let nlink =
                    u32::try_from(directories.count()).expect("there are at most 2^32 inodes");
                (layout, size, device(first), nlink)
            }
            Node::Regular(Content::Inline(b"")) => (LAYOUT_FLAT_PLAIN, 0, 0, inode.nlink()),
            Node::Regular(Content::Inline(bytes)) | Node::Symlink(bytes) => {
                tail.extend_from_slice(bytes);
                (LAYOUT_FLAT_INLINE, bytes.len() as u64, 0, inode.nlink())
            }
            Node::Regular(Content::External { size, .. }) => {
                tail.extend_from_slice(&NULL_BLOCK.to_le_bytes());
                (LAYOUT_CHUNK_BASED, size, ONE_CHUNK, inode.nlink())
            }
            Node::CharDevice(rdev) | Node::BlockDevice(rdev) => {
                (LAYOUT_FLAT_PLAIN, 0, device(rdev), inode.nlink())
            }
            Node::Fifo | Node::Socket => (LAYOUT_FLAT_PLAIN, 0, 0, inode.nlink()),
        };
        let count = units(xattrs.len());
        let metadata = inode.metadata();
        let raw = RawExtendedInode {
            i_format: U16::new(layout << FORMAT_LAYOUT_SHIFT | FORMAT_EXTENDED),
            i_xattr_icount: U16::new(u16::try_from(count).expect(PLACED)),
            i_mode: U16::new(metadata.permissions | node.type_bits()),
            i_nb: U16::ZERO,
            i_size: U64::new(size),
            i_u: U32::new(i_u),
            i_ino: U32::new(u32::try_from(at / SLOT_SIZE).expect(PLACED)),
            i_uid: U32::new(metadata.uid),
            i_gid: U32::new(metadata.gid),
            i_mtime: I64::new(metadata.mtime.seconds),
            i_mtime_nsec: U32::ZERO,
            i_nlink: U32::new(nlink),
            i_reserved2: [0; 16],
        };
        into.extend_from_slice(raw.as_bytes());
        into.extend_from_slice(&xattrs);
        into.extend_from_slice(&tail);
    }

    fn put_dirents(&self, entries: &[(&[u8], u32, u8)], into: &mut Vec<u8>) {
        let mut name_at = entries.len() * size_of::<RawDirent>();
        for (name, number, kind) in entries {
            let dirent = RawDirent {
                nid: U64::new(self.nid(*number)),
                nameoff: U16::new(u16::try_from(name_at).expect("names are in the block")),
                file_type: *kind,
                reserved: 0,
            };
            into.extend_from_slice(dirent.as_bytes());
            name_at += name.len();
        }
        for (name, ..) in entries {
            into.extend_from_slice(name);
        }
    }
}

/// Converts a distance in the image to a length of the buffer.
fn buffer_length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("an inode takes less than 1 MiB")
}

const fn file_type_of(node: &Node<'_>) -> u8 {
    match node {
        Node::Directory => file_type::DIRECTORY,
        Node::Regular(_) => file_type::REGULAR,
        Node::Symlink(_) => file_type::SYMLINK,
        Node::CharDevice(_) => file_type::CHAR_DEVICE,
        Node::BlockDevice(_) => file_type::BLOCK_DEVICE,
        Node::Fifo => file_type::FIFO,
        Node::Socket => file_type::SOCKET,
    }
}
