//! Reads extended attributes.

use std::ops::Range;

use xxhash_rust::xxh32::xxh32;
use zerocopy::FromBytes as _;
use zerocopy::little_endian::U32;

use super::error::{ErofsCorruption, Part, ReadError};
use super::inode::{Inode, Nid};
use super::source::ReadAt;
use super::{ByteOffset, Image, to_u64, to_usize};
use crate::erofs::layout::{
    RawLongPrefix, RawSuperblock, RawXattrEntry, RawXattrHeader, XATTR_FILTER_SEED,
    XATTR_LONG_PREFIX, XATTR_PREFIXES, compat,
};
use crate::tree::{TreeError, XATTR_NAME_MAX};

/// Maximum length in bytes of an escaped name on disk. composefs inserts `overlay.` into `trusted.overlay.` to escape
/// a name, and C's writer does not check the length after that. A name that stays too long is refused by the tree.
const ESCAPED_NAME_MAX: usize = XATTR_NAME_MAX + 8;

/// Maximum total length in bytes of the names of an inode's xattrs, each with a final NUL. Source: Linux
/// `XATTR_LIST_MAX`, beyond which the kernel cannot list them.
pub const XATTR_LIST_MAX: usize = 65536;
/// Upper bound in bytes of the xattrs of one inode: 65,535 units of 4 bytes after the inode, and 255 shared xattrs,
/// each with a name of 255 bytes without its prefix and a value of 65,535 bytes.
pub const XATTRS_BYTES_MAX: usize = 17 << 20;

/// Lustre's prefix, which mkfs.erofs knows and no kernel shows.
const LUSTRE: (u8, &[u8]) = (5, b"lustre.");

/// A prefix of xattr names from the image's table.
#[derive(Debug)]
pub(super) struct LongPrefix {
    base: u8,
    infix: Vec<u8>,
}

impl LongPrefix {
    /// Returns the whole prefix, which may be a complete name.
    pub(super) fn name(&self) -> Vec<u8> {
        [short_prefix(self.base).unwrap_or_default(), &self.infix].concat()
    }
}

fn short_prefix(index: u8) -> Option<&'static [u8]> {
    let known = XATTR_PREFIXES.iter().chain([&LUSTRE, &(0, b"")]);
    known.into_iter().find(|(known, _)| *known == index).map(|(_, prefix)| *prefix)
}

/// An xattr.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xattr<'a> {
    /// The name with its prefix, 1 to 255 bytes without NUL.
    pub name: &'a [u8],
    /// The value, at most 65,535 bytes.
    pub value: &'a [u8],
    /// Whether the kernel shows the xattr in a plain EROFS mount. It hides prefixes that it does not know.
    pub is_visible: bool,
}

/// The xattrs of an inode: first the inline ones, then the shared ones, each in the image's order.
#[derive(Debug, Default)]
pub struct InodeXattrs {
    /// The bytes after the inode.
    body: Vec<u8>,
    /// The names and values of `items`.
    bytes: Vec<u8>,
    items: Vec<Item>,
    /// Total length in bytes of the names, each with a NUL.
    names: usize,
    /// The id and the size of each shared xattr, so that each is counted once.
    pub(super) shared: Vec<(u32, u64)>,
}

#[derive(Debug)]
struct Item {
    name: Range<usize>,
    value: Range<usize>,
    is_visible: bool,
}

impl InodeXattrs {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of xattrs.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are no xattrs.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Iterates over the xattrs.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Xattr<'_>> + Clone {
        self.items.iter().map(|item| Xattr {
            name: self.slice(&item.name),
            value: self.slice(&item.value),
            is_visible: item.is_visible,
        })
    }

    /// Returns the value of the xattr with this name.
    #[must_use]
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.iter().find(|xattr| xattr.name == name).map(|xattr| xattr.value)
    }

    /// Returns the total length of all names and values in bytes.
    pub(super) fn bytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    fn slice(&self, range: &Range<usize>) -> &[u8] {
        self.bytes.get(range.clone()).expect("the range belongs to these bytes")
    }

    /// Checks that no name occurs twice.
    fn check_unique(&self, nid: Nid) -> Result<(), ErofsCorruption> {
        let mut names: Vec<&[u8]> = self.iter().map(|xattr| xattr.name).collect();
        names.sort_unstable();
        match names.iter().zip(names.iter().skip(1)).find(|(name, next)| name == next) {
            None => Ok(()),
            Some((name, _)) => Err(ErofsCorruption::XattrTwice { nid, name: name.to_vec() }),
        }
    }
}

impl<S: ReadAt> Image<S> {
    /// Reads the table of long prefixes. If there is a packed inode, the table is in it, unless a feature bit states
    /// otherwise.
    pub(super) fn long_prefixes(&self, raw: &RawSuperblock) -> Result<Vec<LongPrefix>, ReadError> {
        let plain = self.superblock.compat & compat::PLAIN_XATTR_PFX != 0;
        let packed = match self.superblock.packed.filter(|_| !plain && raw.xattr_prefix_count != 0)
        {
            Some(nid) => Some(self.inode(nid)?),
            None => None,
        };
        let mut packed = packed.map(|packed| (packed, self.reader(&packed)));
        let mut fetch = |at: u64, bytes: &mut [u8], part| match &mut packed {
            None => self.fetch(ByteOffset(at), bytes, part),
            Some((packed, reader)) => {
                let read = reader.read(ByteOffset(at), bytes, &[])?;
                let (device, len) = (super::Device::IMAGE, to_u64(bytes.len()));
                let (offset, bound) = (ByteOffset(at), packed.size());
                match read == bytes.len() {
                    true => Ok(()),
                    false => {
                        Err(ErofsCorruption::Outside { part, device, offset, len, bound }.into())
                    }
                }
            }
        };
        let mut at = u64::from(raw.xattr_prefix_start.get()).saturating_mul(4);
        (0..raw.xattr_prefix_count)
            .map(|number| {
                let part = Part::LongPrefix(number);
                let mut head = [0; size_of::<RawLongPrefix>()];
                fetch(at, &mut head, part)?;
                let head = RawLongPrefix::ref_from_bytes(&head).expect("it has that size");
                let (size, base) = (head.size.get(), head.base_index);
                let infix = usize::from(size).checked_sub(1).filter(|len| *len <= XATTR_NAME_MAX);
                let infix = infix.ok_or(ErofsCorruption::LongPrefix { at: number, size })?;
                short_prefix(base).ok_or(ErofsCorruption::LongPrefixBase { at: number, base })?;
                let mut infix = vec![0; infix];
                fetch(at.saturating_add(to_u64(size_of::<RawLongPrefix>())), &mut infix, part)?;
                let next = at.saturating_add(2).saturating_add(size.into());
                at = next.checked_next_multiple_of(4).unwrap_or(u64::MAX);
                Ok(LongPrefix { base, infix })
            })
            .collect()
    }

    /// Reads the xattrs of an inode.
    ///
    /// # Errors
    /// [`ReadError`] if an xattr is invalid or cannot be read.
    pub fn xattrs(&self, inode: &Inode) -> Result<InodeXattrs, ReadError> {
        let mut xattrs = InodeXattrs::new();
        self.read_xattrs(inode, &mut xattrs)?;
        Ok(xattrs)
    }

    /// Like [`xattrs`](Self::xattrs), but reuses the memory of `xattrs`.
    ///
    /// # Errors
    /// As [`xattrs`](Self::xattrs); the set is then empty.
    pub fn read_xattrs(&self, inode: &Inode, xattrs: &mut InodeXattrs) -> Result<(), ReadError> {
        let mut body = std::mem::take(&mut xattrs.body);
        let read = self.decode(inode, &mut body, xattrs);
        xattrs.body = body;
        if read.is_err() {
            xattrs.items.clear();
        }
        read
    }

    fn decode(
        &self,
        inode: &Inode,
        body: &mut Vec<u8>,
        xattrs: &mut InodeXattrs,
    ) -> Result<(), ReadError> {
        xattrs.bytes.clear();
        xattrs.items.clear();
        xattrs.names = 0;
        xattrs.shared.clear();
        body.clear();
        if inode.xattrs_size == 0 {
            return Ok(());
        }
        let (nid, size) = (inode.nid(), inode.xattrs_size);
        body.resize(to_usize(size.into()), 0);
        self.fetch(inode.xattrs, body, Part::Xattrs(nid))?;
        let (header, rest) = RawXattrHeader::ref_from_prefix(body).expect("it includes the header");
        let shared = header.h_shared_count;
        let (ids, inline) = <[U32]>::ref_from_prefix_with_elems(rest, shared.into())
            .ok()
            .ok_or(ErofsCorruption::XattrHeader { nid, size, shared })?;
        let filter = header.h_name_filter.get();

        let mut inline = inline;
        while let Ok((raw, rest)) = RawXattrEntry::ref_from_prefix(inline) {
            let at = body.len().saturating_sub(inline.len());
            let need = entry_size(raw);
            let (data, left) = (data_size(raw), inline.len());
            let data =
                rest.get(..data).ok_or(ErofsCorruption::XattrEntry { nid, at, need, left })?;
            // mkfs.erofs pads with zeros if it has to leave room.
            if raw.e_name_len != 0 || raw.e_name_index != 0 || raw.e_value_size.get() != 0 {
                self.push(nid, raw, data, filter, xattrs)?;
            }
            inline = inline.get(need..).unwrap_or_default();
        }
        let mut data = Vec::new();
        for id in ids {
            let id = id.get();
            let part = Part::SharedXattr(id);
            let start = self.superblock.shared_xattrs.0;
            let at = ByteOffset(start.saturating_add(u64::from(id).saturating_mul(4)));
            let raw: RawXattrEntry = self.fetch_raw(at, part)?;
            data.resize(data_size(&raw), 0);
            let at = at.0.saturating_add(to_u64(size_of::<RawXattrEntry>()));
            self.fetch(ByteOffset(at), &mut data, part)?;
            self.push(nid, &raw, &data, filter, xattrs)?;
            xattrs.shared.push((id, to_u64(entry_size(&raw))));
        }
        xattrs.check_unique(nid)?;
        Ok(())
    }

    /// Adds an entry. `data` is the name without its prefix, and the value.
    fn push(
        &self,
        nid: Nid,
        raw: &RawXattrEntry,
        data: &[u8],
        filter: u32,
        xattrs: &mut InodeXattrs,
    ) -> Result<(), ErofsCorruption> {
        let (rest, value) =
            data.split_at_checked(raw.e_name_len.into()).expect("the data is a name and a value");
        let index = raw.e_name_index;
        let missing = ErofsCorruption::XattrPrefix { nid, index };
        let (base, infix) = match index & XATTR_LONG_PREFIX {
            0 => (index, &[][..]),
            _ => {
                let long = self.prefixes.get(usize::from(index & !XATTR_LONG_PREFIX));
                let long = long.ok_or(missing.clone())?;
                (long.base, &long.infix[..])
            }
        };
        let short = short_prefix(base).ok_or(missing)?;

        let InodeXattrs { bytes, items, names, .. } = xattrs;
        let start = bytes.len();
        bytes.extend_from_slice(short);
        let after_short = bytes.len();
        bytes.extend_from_slice(infix);
        bytes.extend_from_slice(rest);
        let end = bytes.len();
        bytes.extend_from_slice(value);
        let name = bytes.get(start..end).unwrap_or_default();
        let escaped = name.starts_with(b"trusted.overlay.overlay.");
        let longest = if escaped { ESCAPED_NAME_MAX } else { XATTR_NAME_MAX };
        if name.is_empty() || name.len() > longest || name.contains(&0) {
            let reason = TreeError::XattrName(name.to_vec());
            return Err(ErofsCorruption::XattrName { nid, reason });
        }
        if self.superblock.has_xattr_filter {
            let hashed = bytes.get(after_short..end).unwrap_or_default();
            if denies(filter, base, hashed) {
                return Err(ErofsCorruption::XattrFilter { nid, name: name.to_vec(), filter });
            }
        }
        *names = names.saturating_add(name.len()).saturating_add(1);
        if *names > XATTR_LIST_MAX {
            return Err(ErofsCorruption::XattrList { nid, len: *names });
        }
        let is_visible = base != 0 && base != LUSTRE.0;
        items.push(Item { name: start..end, value: end..bytes.len(), is_visible });
        Ok(())
    }

    /// Reads the value of one xattr. If the inode's name filter shows that the name is absent, only the header is
    /// read.
    ///
    /// # Errors
    /// [`ReadError`] if an xattr of the inode is invalid or cannot be read.
    pub fn xattr(&self, inode: &Inode, name: &[u8]) -> Result<Option<Vec<u8>>, ReadError> {
        if inode.xattrs_size == 0 {
            return Ok(None);
        }
        // Lustre's names may be stored with or without their prefix, so the filter cannot be used.
        if self.superblock.has_xattr_filter && !name.starts_with(LUSTRE.1) {
            let part = Part::Xattrs(inode.nid());
            let header: RawXattrHeader = self.fetch_raw(inode.xattrs, part)?;
            let split = XATTR_PREFIXES
                .iter()
                .find_map(|(index, prefix)| Some((*index, name.strip_prefix(*prefix)?)));
            let (base, rest) = split.unwrap_or((0, name));
            if denies(header.h_name_filter.get(), base, rest) {
                return Ok(None);
            }
        }
        Ok(self.xattrs(inode)?.get(name).map(<[u8]>::to_vec))
    }
}

/// Whether a name filter shows that a name is absent.
fn denies(filter: u32, base: u8, rest: &[u8]) -> bool {
    let bit = xxh32(rest, XATTR_FILTER_SEED.wrapping_add(base.into())) % u32::BITS;
    filter & 1_u32.wrapping_shl(bit) != 0
}

/// Returns the length of an entry's name and value in bytes.
fn data_size(raw: &RawXattrEntry) -> usize {
    usize::from(raw.e_name_len).saturating_add(raw.e_value_size.get().into())
}

/// Returns the length of an entry with padding in bytes.
fn entry_size(raw: &RawXattrEntry) -> usize {
    size_of::<RawXattrEntry>().saturating_add(data_size(raw)).next_multiple_of(4)
}
