//! Adds sections to a program for UEFI, which is a PE file.
//!
//! Source: Microsoft's PE format, "File Headers", "Optional Header (Image Only)" and "Section Table (Section Headers)".

use std::ops::Range;

/// Offset of the field with the PE header's offset.
const HEADER_AT: usize = 0x3c;
const SIGNATURE: &[u8] = b"PE\0\0";
/// Length of the signature and the COFF header.
const COFF: usize = 24;
/// Magic number of an optional header with addresses of 64 bits.
const PE32_PLUS: u16 = 0x20b;
/// The number of the data directory for signatures.
const CERTIFICATES: u32 = 4;
/// Length of a section header.
const SECTION: usize = 40;
/// Sections that change what systemd's stub starts. It takes the first section of a name. Source: UAPI Group
/// Specifications, "Unified Kernel Image", and systemd `src/fundamental/uki.c`.
const OF_KERNEL_IMAGES: [&str; 14] = [
    ".linux", ".osrel", ".cmdline", ".initrd", ".ucode", ".splash", ".dtb", ".dtbauto", ".hwids",
    ".efifw", ".uname", ".profile", ".pcrsig", ".pcrpkey",
];
/// Length of a symbol in the COFF symbol table. Source: the same format, "COFF Symbol Table".
const SYMBOL: u64 = 18;
/// Flag of a program without a symbol table. Source: the same format, `IMAGE_FILE_LOCAL_SYMS_STRIPPED`.
const NO_SYMBOLS: u8 = 8;
/// Flags of a section with data, and those of one with a program.
const DATA: u32 = 0x4000_0040;
const CODE: u32 = 0x6000_0060;

/// A section to add.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewSection<'a> {
    /// At most eight bytes.
    pub(super) name: &'a str,
    pub(super) content: &'a [u8],
    pub(super) is_code: bool,
}

/// The reason why a file cannot be the stub of a boot program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StubError {
    #[error("it is not a program for UEFI (PE32+): byte {at} {reason}")]
    Format { at: usize, reason: &'static str },
    #[error("it is for processors of the type {found:#x}, not {expected:#x}")]
    Machine { found: u16, expected: u16 },
    #[error("it is signed: use the stub without a signature")]
    Signed,
    #[error(
        "it has a section {0}, like a unified kernel image: name systemd's stub, which has no kernel"
    )]
    KernelImage(&'static str),
    #[error("its header has no space for {0} more sections")]
    NoSpace(usize),
    #[error("with the kernel and the initrds, it is longer than 4 GiB")]
    TooLong,
}

/// The fields of a program that change.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Program {
    /// Offset of the COFF header's signature.
    header: usize,
    /// Offset of the optional header.
    optional: usize,
    section_alignment: u32,
    file_alignment: u32,
    /// Offsets of the section headers.
    sections: Range<usize>,
    /// The first address behind all sections.
    address: u32,
    /// Length of the file without the symbols at its end.
    length: usize,
}

/// Checks that this number of sections can be added.
pub(super) fn check_stub(stub: &[u8], machine: u16, more: usize) -> Result<(), StubError> {
    Program::read(stub, machine, more).map(drop)
}

/// Returns the program with these sections at its end.
pub(super) fn add_sections(
    stub: &[u8],
    machine: u16,
    sections: &[NewSection<'_>],
) -> Result<Vec<u8>, StubError> {
    let program = Program::read(stub, machine, sections.len())?;
    let lengths = sections.iter().map(|it| it.content.len()).sum::<usize>();
    let mut bytes = Vec::with_capacity(stub.len() + lengths + (sections.len() + 1) * 0x1_0000);
    bytes.extend_from_slice(&stub[..program.length]);
    let mut address = program.address;
    let mut data = 0u32;
    let mut header = program.sections.end;
    for section in sections {
        let too_long = || StubError::TooLong;
        let length = u32::try_from(section.content.len()).ok().ok_or_else(too_long)?;
        let start = round_up(address, program.section_alignment).ok_or_else(too_long)?;
        pad(&mut bytes, program.file_alignment)?;
        let place = u32::try_from(bytes.len()).ok().ok_or_else(too_long)?;
        bytes.extend_from_slice(section.content);
        pad(&mut bytes, program.file_alignment)?;
        let end = u32::try_from(bytes.len()).ok().ok_or_else(too_long)?;
        let mut name = [0; 8];
        name[..section.name.len()].copy_from_slice(section.name.as_bytes());
        bytes[header..header + 8].copy_from_slice(&name);
        for (at, value) in [(8, length), (12, start), (16, end - place), (20, place)] {
            put(&mut bytes, header + at, value);
        }
        for at in [24, 28, 32] {
            put(&mut bytes, header + at, 0);
        }
        put(&mut bytes, header + 36, if section.is_code { CODE } else { DATA });
        header += SECTION;
        address = start.checked_add(length).ok_or_else(too_long)?;
        data = data.checked_add(end - place).ok_or_else(too_long)?;
    }
    let image = round_up(address, program.section_alignment).ok_or(StubError::TooLong)?;
    let count = (header - program.sections.start) / SECTION;
    // `read` has checked that the header table ends before byte 65,536.
    let count = u16::try_from(count).ok().ok_or(StubError::NoSpace(sections.len()))?;
    bytes[program.header + 6..program.header + 8].copy_from_slice(&count.to_le_bytes());
    // The symbols were behind the sections. Bytes between sections would not be covered by a signature.
    put(&mut bytes, program.header + 12, 0);
    put(&mut bytes, program.header + 16, 0);
    bytes[program.header + 22] |= NO_SYMBOLS;
    let initialized = program.optional + 8;
    let before = number(&bytes, initialized)?;
    put(&mut bytes, initialized, before.checked_add(data).ok_or(StubError::TooLong)?);
    put(&mut bytes, program.optional + 56, image);
    // The checksum, which UEFI does not read.
    put(&mut bytes, program.optional + 64, 0);
    Ok(bytes)
}

impl Program {
    /// Reads a program to which `more` sections can be added.
    fn read(bytes: &[u8], machine: u16, more: usize) -> Result<Self, StubError> {
        let format = |at, reason| StubError::Format { at, reason };
        if !bytes.starts_with(b"MZ") {
            return Err(format(0, "is not the beginning of one"));
        }
        let header = usize::try_from(number(bytes, HEADER_AT)?).unwrap_or(usize::MAX);
        let coff = header.checked_add(COFF).and_then(|end| bytes.get(header..end));
        let coff = coff.ok_or(format(HEADER_AT, "leads to behind the end"))?;
        if !coff.starts_with(SIGNATURE) {
            return Err(format(header, "is not the beginning of its header"));
        }
        let found = short(coff, 4)?;
        if found != machine {
            return Err(StubError::Machine { found, expected: machine });
        }
        let (count, optional_len) = (usize::from(short(coff, 6)?), usize::from(short(coff, 20)?));
        let optional = header + COFF;
        let table = optional + optional_len;
        // With the data directories.
        if optional_len < 112 || short(bytes, optional)? != PE32_PLUS {
            return Err(format(optional, "is not the beginning of its optional header"));
        }
        let field = |at: usize| number(bytes, optional + at);
        let (section_alignment, file_alignment) = (field(32)?, field(36)?);
        let is_sound = |it: u32| it.is_power_of_two() && it <= 0x1_0000;
        if !is_sound(section_alignment) || !is_sound(file_alignment) {
            return Err(format(optional + 32, "is not an alignment"));
        }
        let headers_end = usize::try_from(field(60)?).unwrap_or(usize::MAX);
        let directories = field(108)?;
        if directories > CERTIFICATES && optional_len >= 152 && field(112 + 8 * 4 + 4)? != 0 {
            return Err(StubError::Signed);
        }
        let end = table + count * SECTION;
        if end > headers_end || headers_end > bytes.len().min(0x1_0000) {
            return Err(format(optional + 60, "is not the length of its headers"));
        }
        let (mut address, mut length) = (0u32, headers_end);
        let mut first = headers_end;
        for at in (table..end).step_by(SECTION) {
            let name: [u8; 8] = field_of(bytes, at)?;
            let name = name.split(|it| *it == 0).next().unwrap_or_default();
            if let Some(taken) = OF_KERNEL_IMAGES.iter().find(|it| it.as_bytes() == name) {
                return Err(StubError::KernelImage(taken));
            }
            let (size, start) = (number(bytes, at + 8)?, number(bytes, at + 12)?);
            let (raw, place) = (number(bytes, at + 16)?, number(bytes, at + 20)?);
            let behind = start.checked_add(size.max(raw)).ok_or(format(at + 12, "is too large"))?;
            address = address.max(behind);
            let place = usize::try_from(place).unwrap_or(usize::MAX);
            let raw = usize::try_from(raw).unwrap_or(usize::MAX);
            let Some(end) = place.checked_add(raw).filter(|end| *end <= bytes.len()) else {
                return Err(format(at + 20, "leads to behind the end"));
            };
            if raw > 0 {
                first = first.min(place);
                length = length.max(end);
            }
        }
        let needed = end + more * SECTION;
        if needed > first {
            return Err(StubError::NoSpace(more));
        }
        if bytes[end..needed].iter().any(|it| *it != 0) {
            return Err(format(end, "is behind the section table, but not zero"));
        }
        let symbols = (number(coff, 12)?, u64::from(number(coff, 16)?));
        if length < bytes.len() && !is_symbols(&bytes[length..], length, symbols) {
            return Err(format(length, "is behind the last section"));
        }
        Ok(Self {
            header,
            optional,
            section_alignment,
            file_alignment,
            sections: table..end,
            address,
            length,
        })
    }
}

/// Whether the bytes behind the sections are a symbol table with its strings. `place` is their offset; `table` is the
/// offset of the symbols in the file, and their number.
fn is_symbols(bytes: &[u8], place: usize, table: (u32, u64)) -> bool {
    let (at, count) = table;
    let symbols = count.saturating_mul(SYMBOL);
    let strings = usize::try_from(symbols).ok().and_then(|it| number(bytes, it).ok());
    let end = strings.map(|it| symbols.saturating_add(u64::from(it)));
    // The end of the file may be padded.
    let padding = end.and_then(|it| usize::try_from(it).ok()).and_then(|it| bytes.get(it..));
    usize::try_from(at) == Ok(place) && padding.is_some_and(|it| it.iter().all(|it| *it == 0))
}

/// Appends zeros up to a multiple of `alignment`.
fn pad(bytes: &mut Vec<u8>, alignment: u32) -> Result<(), StubError> {
    let length = u32::try_from(bytes.len()).ok().and_then(|it| round_up(it, alignment));
    let length = length.ok_or(StubError::TooLong)?;
    bytes.resize(usize::try_from(length).unwrap_or(usize::MAX), 0);
    Ok(())
}

fn round_up(value: u32, alignment: u32) -> Option<u32> {
    value.checked_next_multiple_of(alignment)
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn number(bytes: &[u8], at: usize) -> Result<u32, StubError> {
    field_of(bytes, at).map(u32::from_le_bytes)
}

fn short(bytes: &[u8], at: usize) -> Result<u16, StubError> {
    field_of(bytes, at).map(u16::from_le_bytes)
}

fn field_of<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], StubError> {
    let end = at.checked_add(N);
    let found = end.and_then(|end| bytes.get(at..end)).and_then(|it| it.try_into().ok());
    found.ok_or(StubError::Format { at, reason: "is behind the end" })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: u16 = 0x8664;

    /// A program with one section, whose headers have space for this many.
    fn stub(space: usize) -> Vec<u8> {
        let headers = (0x40 + COFF + 240 + space * SECTION).next_multiple_of(0x200);
        let mut bytes = vec![0; headers + 0x200];
        bytes[..2].copy_from_slice(b"MZ");
        put(&mut bytes, HEADER_AT, 0x40);
        bytes[0x40..0x44].copy_from_slice(SIGNATURE);
        bytes[0x44..0x46].copy_from_slice(&MACHINE.to_le_bytes());
        bytes[0x46] = 1;
        bytes[0x54] = 240;
        let optional = 0x40 + COFF;
        bytes[optional..optional + 2].copy_from_slice(&PE32_PLUS.to_le_bytes());
        let headers = u32::try_from(headers).unwrap();
        for (at, value) in [(8, 0x200), (32, 0x1000), (36, 0x200), (56, 0x2000), (60, headers)] {
            put(&mut bytes, optional + at, value);
        }
        put(&mut bytes, optional + 108, 16);
        let section = optional + 240;
        bytes[section..section + 5].copy_from_slice(b".text");
        for (at, value) in [(8, 0x123), (12, 0x1000), (16, 0x200), (20, headers)] {
            put(&mut bytes, section + at, value);
        }
        bytes
    }

    fn sections() -> [NewSection<'static>; 2] {
        [
            NewSection { name: ".cmdline", content: b"a b", is_code: false },
            NewSection { name: ".linux", content: &[7; 0x1234], is_code: true },
        ]
    }

    #[test]
    fn sections_are_behind_the_others() {
        let stub = stub(3);
        let bytes = add_sections(&stub, MACHINE, &sections()).unwrap();
        let table = 0x40 + COFF + 240;
        assert_eq!(bytes[0x46], 3);
        let place = u32::try_from(stub.len()).unwrap();
        let rows = [
            (*b".cmdline", [3, 0x2000, 0x200, place, 0, 0, 0, DATA]),
            (*b".linux\0\0", [0x1234, 0x3000, 0x1400, place + 0x200, 0, 0, 0, CODE]),
        ];
        for (number_of, (name, fields)) in rows.into_iter().enumerate() {
            let at = table + (number_of + 1) * SECTION;
            assert_eq!(bytes[at..at + 8], name);
            let found: Vec<_> =
                (8..40).step_by(4).map(|it| number(&bytes, at + it).unwrap()).collect();
            assert_eq!(found, fields);
        }
        let optional = 0x40 + COFF;
        assert_eq!(number(&bytes, optional + 8).unwrap(), 0x200 + 0x200 + 0x1400);
        assert_eq!(number(&bytes, optional + 56).unwrap(), 0x5000);
        assert_eq!(&bytes[stub.len()..stub.len() + 4], b"a b\0");
        assert_eq!(bytes.len(), stub.len() + 0x200 + 0x1400);
    }

    #[test]
    fn programs_that_cannot_grow_are_refused() {
        let check = |change: &dyn Fn(&mut Vec<u8>), expect: &str| {
            let mut stub = stub(3);
            change(&mut stub);
            let error = add_sections(&stub, MACHINE, &sections()).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        let optional = 0x40 + COFF;
        check(&|it| it.clear(), "not a program for UEFI");
        check(&|it| it.truncate(0x45), "behind the end");
        check(&|it| it[0] = 0, "byte 0");
        check(&|it| put(it, HEADER_AT, u32::MAX), "byte 60");
        check(&|it| it[0x44] = 0, "the type 0x8600, not 0x8664");
        check(&|it| it[optional] = 0, "optional header");
        check(&|it| put(it, optional + 32, 3), "not an alignment");
        check(&|it| put(it, optional + 36, 0), "not an alignment");
        check(&|it| put(it, optional + 60, u32::MAX), "length of its headers");
        check(&|it| put(it, optional + 148, 1), "signed");
        check(&|it| put(it, optional + 240 + 12, u32::MAX), "is too large");
        check(&|it| put(it, optional + 240 + 20, u32::MAX), "behind the end");
        check(&|it| put(it, optional + 240 + 8, u32::MAX - 0x1000), "longer than 4 GiB");
        assert_eq!(
            add_sections(&stub(0), MACHINE, &[sections()[0]; 9]),
            Err(StubError::NoSpace(9))
        );
    }

    /// systemd's stub takes the first section of a name, so another kernel would start.
    #[test]
    fn kernel_images_are_no_stubs() {
        let image = add_sections(&stub(5), MACHINE, &sections()).unwrap();
        let error = check_stub(&image, MACHINE, 1).unwrap_err();
        assert_eq!(error, StubError::KernelImage(".cmdline"));
    }

    /// Debian 12's stub has symbols behind its sections.
    #[test]
    fn symbols_are_removed_and_other_bytes_are_refused() {
        let plain = stub(3);
        let expect = add_sections(&plain, MACHINE, &sections()).unwrap();
        let mut symbols = plain.clone();
        let place = u32::try_from(plain.len()).unwrap();
        put(&mut symbols, 0x40 + 12, place);
        put(&mut symbols, 0x40 + 16, 2);
        symbols.extend([7; 36]);
        symbols.extend([6, 0, 0, 0, b'a', 0, 0, 0]);
        assert_eq!(add_sections(&symbols, MACHINE, &sections()).unwrap(), expect);
        assert_eq!(expect[0x40 + 22] & NO_SYMBOLS, NO_SYMBOLS);
        // The data of all sections is contiguous, which signatures need.
        let headers = usize::try_from(number(&expect, 0x40 + COFF + 60).unwrap()).unwrap();
        let table = 0x40 + COFF + 240;
        let mut next = headers;
        for at in (table..table + 3 * SECTION).step_by(SECTION) {
            assert_eq!(number(&expect, at + 20).unwrap() as usize, next);
            next += number(&expect, at + 16).unwrap() as usize;
        }
        assert_eq!(next, expect.len());
        for change in [
            &|it: &mut Vec<u8>| it.push(1),
            &|it: &mut Vec<u8>| put(it, 0x40 + 16, 3),
            &|it: &mut Vec<u8>| put(it, 0x40 + 16, u32::MAX),
            &|it: &mut Vec<u8>| put(it, 0x40 + 12, 0),
        ] as [&dyn Fn(&mut Vec<u8>); 4]
        {
            let mut changed = symbols.clone();
            change(&mut changed);
            let error = add_sections(&changed, MACHINE, &sections()).unwrap_err().to_string();
            assert!(error.contains("behind the last section"), "{error}");
        }
    }

    /// No byte of the headers leads to a panic.
    #[test]
    fn changed_headers_are_no_panic() {
        let stub = stub(3);
        for at in 0..0x200 {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = stub.clone();
                changed[at] = value;
                drop(add_sections(&changed, MACHINE, &sections()));
            }
        }
    }
}
