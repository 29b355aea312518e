//! Reads the ELF headers of programs and libraries: the loader, and the names of the libraries.

use std::io::{self, Read, Seek};
use std::ops::Range;

use object::read::elf::{Dyn as _, FileHeader, ProgramHeader as _};
use object::{Endianness, FileKind, ReadCache, ReadRef, elf};

/// Maximum size of the dynamic section of a file, in bytes.
const DYNAMIC_MAX: u64 = 1 << 20;
/// Maximum length of a name or a search path, in bytes.
const NAME_MAX: u64 = 4096;
/// Maximum number of segments that are mapped. Programs have fewer than ten.
const SEGMENTS_MAX: usize = 64;
/// Maximum number of libraries that a file needs.
const NEEDED_MAX: usize = 512;

/// Length of the ELF header, in bytes. Source: elf(5), `Elf64_Ehdr`.
pub(super) const HEADER_MAX: u64 = 64;

/// Class (whether 64 bits), byte order (whether little-endian) and machine. A program can load only libraries with the
/// same.
pub(super) type Machine = (bool, bool, u16);

/// The part of an ELF file that matters for its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ElfFile {
    pub(super) machine: Machine,
    /// Path of the loader; `None` for static programs and for libraries.
    pub(super) loader: Option<Vec<u8>>,
    /// Names of libraries, in the order in which the loader searches them.
    pub(super) needed: Vec<Vec<u8>>,
    /// The search path `DT_RPATH`; empty if there is none.
    pub(super) rpath: Vec<u8>,
    /// The search path `DT_RUNPATH`, with which the loader ignores the other.
    pub(super) runpath: Vec<u8>,
    /// The parts of the file that are mapped.
    pub(super) segments: Vec<Range<u64>>,
}

/// Returns the machine of a file from its ELF header. Returns `None` if it is not ELF.
pub(super) fn machine(header: &[u8]) -> Option<Machine> {
    fn of_class<E: FileHeader<Endian = Endianness>>(header: &[u8]) -> Option<Machine> {
        let header = E::parse(header).ok()?;
        Some(machine_of(header, header.endian().ok()?))
    }
    match FileKind::parse(header).ok()? {
        FileKind::Elf32 => of_class::<elf::FileHeader32<Endianness>>(header),
        FileKind::Elf64 => of_class::<elf::FileHeader64<Endianness>>(header),
        _ => None,
    }
}

fn machine_of<E: FileHeader<Endian = Endianness>>(header: &E, endian: Endianness) -> Machine {
    (header.is_class_64(), header.is_little_endian(), header.e_machine(endian).0)
}

/// Reads the headers of a file. Returns `None` if it is not ELF, or damaged.
pub(super) fn parse(file: impl Read + Seek) -> Option<ElfFile> {
    let file = ReadCache::new(file);
    match FileKind::parse(&file).ok()? {
        FileKind::Elf32 => of_class::<elf::FileHeader32<Endianness>>(&file),
        FileKind::Elf64 => of_class::<elf::FileHeader64<Endianness>>(&file),
        _ => None,
    }
}

/// Reads `bytes` as an ELF file, for fuzzers. Returns whether a loader was found.
///
/// # Panics
/// If a list exceeds its limit, or the two ways to find the machine differ.
#[doc(hidden)]
#[must_use]
pub fn exercise(bytes: &[u8]) -> bool {
    let Some(file) = parse(io::Cursor::new(bytes)) else { return false };
    assert_eq!(machine(bytes), Some(file.machine), "the same header gives another machine");
    assert!(file.segments.len() <= SEGMENTS_MAX && file.needed.len() <= NEEDED_MAX);
    let paths = [&file.rpath, &file.runpath].into_iter().chain(&file.loader);
    let longest = paths.chain(&file.needed).map(Vec::len).max();
    assert!(longest.is_none_or(|it| it as u64 <= NAME_MAX), "a name is longer than its limit");
    file.loader.is_some()
}

fn of_class<'d, E>(file: impl ReadRef<'d>) -> Option<ElfFile>
where
    E: FileHeader<Endian = Endianness>,
{
    let header = E::parse(file).ok()?;
    let endian = header.endian().ok()?;
    // A larger number would be in a section header. The kernel does not execute such files.
    if header.e_phnum(endian) == elf::PN_XNUM {
        return None;
    }
    let headers = header.program_headers(endian, file).ok()?;
    let mut found = ElfFile {
        machine: machine_of(header, endian),
        loader: None,
        needed: Vec::new(),
        rpath: Vec::new(),
        runpath: Vec::new(),
        segments: Vec::new(),
    };
    let loads = || headers.iter().filter(|it| it.p_type(endian) == elf::PT_LOAD);
    for segment in loads().take(SEGMENTS_MAX) {
        let (start, length) = (segment.p_offset(endian).into(), segment.p_filesz(endian).into());
        found.segments.push(start..start.saturating_add(length));
    }
    // Returns the place in the file of an address.
    let place = |address: u64| {
        loads().find_map(|it| {
            let within = address.checked_sub(it.p_vaddr(endian).into())?;
            let is_in_file = within < it.p_filesz(endian).into();
            is_in_file.then(|| it.p_offset(endian).into().checked_add(within))?
        })
    };
    let first = |kind, most| {
        let segment = headers.iter().find(|it| it.p_type(endian) == kind)?;
        (segment.p_filesz(endian).into() <= most).then_some(segment)
    };
    if let Some(segment) = first(elf::PT_INTERP, NAME_MAX) {
        let path = segment.interpreter(endian, file).ok().flatten();
        found.loader = path.filter(|it| it.starts_with(b"/")).map(<[u8]>::to_vec);
    }
    let Some(segment) = first(elf::PT_DYNAMIC, DYNAMIC_MAX) else { return Some(found) };
    let entries = segment.dynamic(endian, file).ok().flatten().unwrap_or_default();
    let entries = entries.iter().map(|it| (it.tag(endian), it.d_val(endian).into()));
    let entries = entries.take_while(|it| it.0 != elf::DT_NULL);
    let entries: Vec<(elf::DynamicTag, u64)> = entries.collect();
    let strings = entries.iter().find(|it| it.0 == elf::DT_STRTAB);
    let Some(strings) = strings.and_then(|it| place(it.1)) else { return Some(found) };
    let name = |at: u64| {
        let start = strings.checked_add(at)?;
        let until = start.checked_add(NAME_MAX)?.min(file.len().ok()?);
        let name = file.read_bytes_at_until(start..until, 0).ok()?;
        (!name.is_empty()).then(|| name.to_vec())
    };
    let path = |tag| {
        let entry = entries.iter().find(|it| it.0 == tag);
        entry.and_then(|it| name(it.1)).unwrap_or_default()
    };
    (found.rpath, found.runpath) = (path(elf::DT_RPATH), path(elf::DT_RUNPATH));
    let needed = entries.iter().filter(|it| it.0 == elf::DT_NEEDED).take(NEEDED_MAX);
    found.needed = needed.filter_map(|it| name(it.1)).collect();
    Some(found)
}
