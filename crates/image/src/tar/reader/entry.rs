//! Makes an entry from a header and the extensions before it.

use std::io::Read;

use super::{
    Current, CurrentKind, Cursor, Reader, State, UnusualTar, bad_number, corrupt, is_zero,
};
use crate::tar::error::{Limit, NameError, TarCorruption, TarError, Unsupported};
use crate::tar::header::{Format, Header, RawRegion, RawSparse, number, text};
use crate::tar::pax::{EXTENSION_MAX, Merged, is_id};
use crate::tar::sparse::{TextMap, TextMapError};
use crate::tar::{BLOCK, Segment, name, padding, wide};
use crate::tree::Timestamp;

/// The meaning of an entry's type flag.
enum Flag {
    Kind(CurrentKind),
    /// A sparse file in the old format of GNU tar.
    Sparse,
    Unknown,
}

impl<R: Read> Reader<R> {
    /// Makes the entry of a header and of the extensions before it.
    pub(super) fn entry(
        &mut self,
        at: u64,
        size: u64,
        header: &Header<'_>,
    ) -> Result<(), TarError> {
        let raw = header.raw;
        let merged = Merged { local: &self.local, global: &self.global };
        let long_names = [self.long_name.as_deref(), self.long_link.as_deref()];
        let entry = &mut self.entry;

        // The same precedence as in Go: a sparse file's real name, then GNU's long name, then pax.
        entry.raw.clear();
        let given = merged.sparse_name().or(self.long_name.as_deref()).or_else(|| merged.path());
        if let Some(name) = given.filter(|name| !name.is_empty()) {
            entry.raw.extend_from_slice(name);
        } else {
            header.push_name(&mut entry.raw);
        }
        name::normalise(&entry.raw, &mut entry.path)
            .map_err(|reason| TarError::Name { entry: entry.raw.clone(), reason })?;

        let bad = |field, value: &[u8]| bad_number(at, &entry.raw, field, value);
        let id = |value: &[u8]| number(value).and_then(|it| u32::try_from(it).ok()).filter(is_id);
        let mode = number(&raw.mode).and_then(|mode| u16::try_from(mode & 0o7777).ok());
        entry.permissions = mode.ok_or_else(|| bad("mode", &raw.mode))?;
        entry.uid = match merged.uid() {
            Some(uid) => uid,
            None => id(&raw.uid).ok_or_else(|| bad("uid", &raw.uid))?,
        };
        entry.gid = match merged.gid() {
            Some(gid) => gid,
            None => id(&raw.gid).ok_or_else(|| bad("gid", &raw.gid))?,
        };
        entry.mtime = match merged.mtime() {
            Some(mtime) => mtime,
            None => {
                let seconds = number(&raw.mtime).ok_or_else(|| bad("mtime", &raw.mtime))?;
                Timestamp { seconds, nanoseconds: 0 }
            }
        };
        let size = merged.size().unwrap_or(size);

        let slash = entry.raw.ends_with(b"/");
        let flag = match raw.typeflag {
            // Before tars had a type for directories, or a magic number, a trailing slash marked a directory. Go and
            // Python have the same rule.
            0 if slash => Flag::Kind(CurrentKind::Directory),
            b'0' | b'7' if slash && header.format == Format::V7 => {
                Flag::Kind(CurrentKind::Directory)
            }
            0 | b'0' | b'7' => Flag::Kind(CurrentKind::Regular),
            b'1' => Flag::Kind(CurrentKind::Hardlink),
            b'2' => Flag::Kind(CurrentKind::Symlink),
            b'3' => Flag::Kind(CurrentKind::CharDevice(device(at, &entry.raw, header, merged)?)),
            b'4' => Flag::Kind(CurrentKind::BlockDevice(device(at, &entry.raw, header, merged)?)),
            // `D` is a directory of an incremental GNU archive, whose list of names is not content.
            b'5' | b'D' => Flag::Kind(CurrentKind::Directory),
            b'6' => Flag::Kind(CurrentKind::Fifo),
            b'S' => Flag::Sparse,
            _ => Flag::Unknown,
        };

        entry.target.clear();
        if let Flag::Kind(CurrentKind::Hardlink | CurrentKind::Symlink) = flag {
            let given = self.long_link.as_deref().or_else(|| merged.link());
            let target = given.filter(|target| !target.is_empty()).unwrap_or(text(&raw.link_name));
            if target.is_empty() {
                return Err(corrupt(at, &entry.raw, TarCorruption::NoTarget));
            }
            if raw.typeflag == b'1' {
                name::normalise(target, &mut entry.target)
                    .map_err(|reason| TarError::Name { entry: target.to_vec(), reason })?;
            } else {
                entry.target.extend_from_slice(target);
            }
        }

        entry.xattrs.clear();
        entry.xattrs.append(&merged.global.xattrs);
        entry.xattrs.append(&merged.local.xattrs);
        let is_libarchives = entry.xattrs.is_libarchives(b"security.capability");
        entry
            .xattrs
            .settle()
            .map_err(|limit| TarError::Limit { entry: entry.raw.clone(), limit })?;

        entry.kind = match flag {
            Flag::Kind(kind) => kind,
            Flag::Sparse | Flag::Unknown => CurrentKind::Regular,
        };
        if entry.path.is_empty() && !matches!(flag, Flag::Kind(CurrentKind::Directory)) {
            return Err(TarError::Name { entry: entry.raw.clone(), reason: NameError::Root });
        }
        let what = unusual(header, &merged, entry, slash, long_names);
        let what = what.or(is_libarchives.then_some(UnusualTar::LibarchiveCapability));
        if let Some(what) = what {
            let raw = entry.raw.clone();
            self.note(&raw, what);
        }
        self.content(at, size, &flag, header)
    }

    /// Determines what data follows the header, and reads the map of a sparse file.
    fn content(
        &mut self,
        at: u64,
        stored: u64,
        flag: &Flag,
        header: &Header<'_>,
    ) -> Result<(), TarError> {
        let typeflag = header.raw.typeflag;
        self.entry.size = 0;
        self.entry.segments.clear();
        self.cursor = Cursor::new(0);
        // Entries of types without content may state any size, but no data follows them.
        let behind = match flag {
            Flag::Kind(CurrentKind::Regular) | Flag::Sparse | Flag::Unknown => stored,
            _ if typeflag == b'D' => stored,
            Flag::Kind(CurrentKind::Hardlink) if stored > 0 && self.data_follows()? => stored,
            Flag::Kind(_) => 0,
        };
        let padding = padding(behind);
        if behind == 0 && number(&header.raw.size) != Some(0) && !matches!(flag, Flag::Sparse) {
            let raw = self.entry.raw.clone();
            self.note(&raw, UnusualTar::Size);
        }
        if let Some(kind) = self.unsupported(stored, flag, header) {
            let entry = self.entry.raw.clone();
            self.state = State::Skip { left: behind, padding };
            self.forget();
            return Err(TarError::Unsupported { entry, kind });
        }
        let sparse = &self.local.sparse;
        let in_pax = sparse.major.is_some() || sparse.has_map;
        let mut skip = 0;
        match flag {
            Flag::Kind(CurrentKind::Regular) if in_pax => self.pax_sparse(at, stored)?,
            _ if in_pax => {
                return Err(corrupt(at, &self.entry.raw, TarCorruption::SparseType(typeflag)));
            }
            Flag::Sparse => self.old_sparse(at, stored, header)?,
            Flag::Kind(CurrentKind::Regular) => {
                self.entry.size = stored;
                if stored > 0 {
                    self.entry.segments.push(Segment { offset: 0, length: stored });
                }
            }
            _ => skip = behind,
        }
        self.cursor = Cursor::new(self.entry.size);
        self.state = State::Entry { skip, padding };
        Ok(())
    }

    /// Returns the feature that prevents a tree from holding the entry.
    fn unsupported(&self, stored: u64, flag: &Flag, header: &Header<'_>) -> Option<Unsupported> {
        let sparse = &self.local.sparse;
        let dialect = match (flag, sparse.major, sparse.minor) {
            (Flag::Unknown, ..) => return Some(Unsupported::Type(header.raw.typeflag)),
            (Flag::Sparse, ..) if header.format != Format::Gnu => Some("star"),
            _ if sparse.foreign.is_some() => sparse.foreign,
            _ if sparse.star_size.is_some_and(|size| size != stored) => Some("star"),
            (_, None, None) | (_, Some(0), Some(0 | 1)) | (_, Some(1), Some(0)) => None,
            _ => Some("a later GNU tar"),
        };
        dialect.map(Unsupported::Sparse)
    }

    /// Whether the next block is neither a header nor the archive's end.
    fn data_follows(&mut self) -> Result<bool, TarError> {
        let next = self.stream.peek(BLOCK)?;
        let header = next.first_chunk().is_some_and(|block| Header::check(block).is_ok());
        Ok(!header && !is_zero(next))
    }

    /// Reads GNU tar's oldest map: up to four regions in the header, and 21 in each of any number of further blocks.
    fn old_sparse(&mut self, at: u64, stored: u64, header: &Header<'_>) -> Result<(), TarError> {
        let gnu = header.gnu();
        let bad = |field, value: &[u8]| bad_number(at, &self.entry.raw, field, value);
        let size = unsigned(&gnu.real_size).ok_or_else(|| bad("realsize", &gnu.real_size))?;
        let map = &mut self.local.sparse.map;
        map.clear();
        let mut add = |regions: &[RawRegion]| {
            // As in GNU tar, libarchive and Go, a region without a number ends the list.
            for region in regions.iter().take_while(|region| region.offset[0] != 0) {
                for (field, value) in [("offset", &region.offset), ("numbytes", &region.length)] {
                    let number = unsigned(value).ok_or_else(|| bad(field, value))?;
                    map.push(number).map_err(|limit| TarError::Limit {
                        entry: self.entry.raw.clone(),
                        limit,
                    })?;
                }
            }
            Ok(())
        };
        add(&gnu.sparse)?;
        let mut extended = gnu.is_extended != 0;
        let mut total: u64 = 0;
        while extended {
            total += wide(BLOCK);
            if total > EXTENSION_MAX {
                let limit = Limit::Extension { what: "a sparse map", size: total, at };
                return Err(TarError::Limit { entry: self.entry.raw.clone(), limit });
            }
            let Some(block) = self.stream.block()? else {
                return Err(self.stream.truncated(&self.entry.raw, BLOCK));
            };
            let more: &RawSparse = zerocopy::transmute_ref!(&block);
            add(&more.sparse)?;
            extended = more.is_extended != 0;
        }
        self.segments(at, size, stored)
    }

    /// Reads the map of pax's three versions: in the records (0.0, 0.1) or before the data (1.0).
    fn pax_sparse(&mut self, at: u64, mut stored: u64) -> Result<(), TarError> {
        let sparse = &mut self.local.sparse;
        let Some(size) = sparse.size else {
            let kind = TarCorruption::SparseMap {
                reason: "comes without the file's size; its regions and bytes are",
                value: wide(sparse.map.regions().0),
                bound: stored,
            };
            return Err(corrupt(at, &self.entry.raw, kind));
        };
        if sparse.major == Some(1) {
            let mut reader = TextMap::default();
            let mut total: u64 = 0;
            sparse.map.clear();
            loop {
                total += wide(BLOCK);
                if total > EXTENSION_MAX {
                    let limit = Limit::Extension { what: "a sparse map", size: total, at };
                    return Err(TarError::Limit { entry: self.entry.raw.clone(), limit });
                }
                // The map is part of the data, so it must not be longer.
                let Some(rest) = stored.checked_sub(wide(BLOCK)) else {
                    let reason = "is longer than the data that contains it";
                    let kind =
                        TarCorruption::SparseMap { reason, value: wide(BLOCK), bound: stored };
                    return Err(corrupt(at, &self.entry.raw, kind));
                };
                stored = rest;
                let Some(block) = self.stream.block()? else {
                    return Err(self.stream.truncated(&self.entry.raw, BLOCK));
                };
                let last = reader.block(&block, &mut sparse.map).map_err(|error| match error {
                    TextMapError::Corrupt(kind) => corrupt(at, &self.entry.raw, kind),
                    TextMapError::Limit(limit) => {
                        TarError::Limit { entry: self.entry.raw.clone(), limit }
                    }
                })?;
                if last {
                    break;
                }
            }
        } else {
            let (regions, _) = sparse.map.regions();
            if sparse.regions != Some(wide(regions)) {
                let kind = TarCorruption::SparseMap {
                    reason: "does not have the stated number of regions",
                    value: wide(regions),
                    bound: sparse.regions.unwrap_or(0),
                };
                return Err(corrupt(at, &self.entry.raw, kind));
            }
        }
        self.segments(at, size, stored)
    }

    fn segments(&mut self, at: u64, size: u64, stored: u64) -> Result<(), TarError> {
        let entry = &mut self.entry;
        entry.size = size;
        let map = &self.local.sparse.map;
        map.segments(size, stored, &mut entry.segments)
            .map_err(|kind| corrupt(at, &entry.raw, kind))
    }
}

/// Returns what other readers may treat differently in an entry. `long_names` are GNU's name and link.
fn unusual(
    header: &Header<'_>,
    merged: &Merged<'_>,
    entry: &Current,
    slash: bool,
    [long_name, long_link]: [Option<&[u8]>; 2],
) -> Option<UnusualTar> {
    // The type in the mode, as in inode(7): bits of the own type change nothing.
    let own: i64 = match entry.kind {
        CurrentKind::Regular | CurrentKind::Hardlink => 0o100_000,
        CurrentKind::Symlink => 0o120_000,
        CurrentKind::CharDevice(_) => 0o020_000,
        CurrentKind::BlockDevice(_) => 0o060_000,
        CurrentKind::Directory => 0o040_000,
        CurrentKind::Fifo => 0o010_000,
    };
    let extra = number(&header.raw.mode).unwrap_or(0) & !0o7777;
    let differ = |long: Option<&[u8]>, path: Option<&[u8]>| matches!((long, path), (Some(long), Some(path)) if long != path);
    let typeflag = header.raw.typeflag;
    let is_device = matches!(entry.kind, CurrentKind::CharDevice(_) | CurrentKind::BlockDevice(_));
    let is_directory = matches!(entry.kind, CurrentKind::Directory);
    let cases = [
        (merged.global.changes_entries(), UnusualTar::GlobalRecords),
        (
            differ(long_name, merged.path()) || differ(long_link, merged.link()),
            UnusualTar::TwoNames,
        ),
        (extra & !own != 0, UnusualTar::Mode),
        (is_directory && slash && !matches!(typeflag, b'5' | b'D'), UnusualTar::Slash),
        (is_device && header.format == Format::V7, UnusualTar::OldDevice),
        (typeflag == b'D', UnusualTar::Incremental),
    ];
    cases.into_iter().find(|(is_so, _)| *is_so).map(|(_, what)| what)
}

fn unsigned(field: &[u8]) -> Option<u64> {
    number(field).and_then(|value| u64::try_from(value).ok())
}

/// Returns a device number as in `st_rdev`. Linux has 12 bits for the major number and 20 for the minor.
fn device(at: u64, entry: &[u8], header: &Header<'_>, merged: Merged<'_>) -> Result<u64, TarError> {
    let raw = header.raw;
    // V7 has no such fields, although type `3` comes from V7. Go reads such an entry as device 0:0.
    let field =
        |field: &[u8; 8]| if header.format == Format::V7 { Some(0) } else { unsigned(field) };
    let major =
        merged.dev_major().or_else(|| field(&raw.dev_major)).filter(|&major| major < 1 << 12);
    let minor =
        merged.dev_minor().or_else(|| field(&raw.dev_minor)).filter(|&minor| minor < 1 << 20);
    let major = major.ok_or_else(|| bad_number(at, entry, "devmajor", &raw.dev_major))?;
    let minor = minor.ok_or_else(|| bad_number(at, entry, "devminor", &raw.dev_minor))?;
    Ok((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}
