//! The headers of ELF programs, as far as they are needed to find the name of the program's loader.

/// Number of bytes to read for the program headers, which linkers write right after the ELF header.
pub(crate) const HEADERS: u64 = 4096;

/// The loader that a program names, which loads its libraries.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Loader {
    /// The program is static.
    None,
    Path(String),
    /// The program headers or the path are not in the part of the file that was read, or the path is empty.
    Unread,
}

/// Offsets of fields in the headers of an ELF class, in bytes. Source: elf(5), `Elf32_Ehdr`, `Elf64_Ehdr`,
/// `Elf32_Phdr`, `Elf64_Phdr`.
pub(super) struct Headers {
    /// Whether addresses, offsets and lengths have 64 bits instead of 32.
    pub(super) is_wide: bool,
    /// `e_phoff`, the offset of the program headers.
    pub(super) table: usize,
    /// `e_phentsize`, the size of a program header.
    pub(super) size: usize,
    /// `e_phnum`, their number.
    pub(super) count: usize,
    /// Size of a program header, in bytes.
    pub(super) header: u64,
    /// `p_offset` in a program header.
    pub(super) start: usize,
    /// `p_filesz` in a program header.
    pub(super) length: usize,
}

impl Headers {
    pub(super) const ELF32: Self =
        Self { is_wide: false, table: 28, size: 42, count: 44, header: 32, start: 4, length: 16 };
    pub(super) const ELF64: Self =
        Self { is_wide: true, table: 32, size: 54, count: 56, header: 56, start: 8, length: 32 };

    /// Reads an address, an offset or a length.
    fn word(&self, bytes: &[u8], at: usize) -> Option<u64> {
        if self.is_wide { number::<8>(bytes, at) } else { number::<4>(bytes, at) }
    }

    /// Whether the kernel rejects the program headers. Source: Linux `fs/binfmt_elf.c`, `load_elf_phdrs`.
    pub(super) fn are_wrong(&self, bytes: &[u8]) -> bool {
        let (Some(table), Some(size), Some(count)) = (
            self.word(bytes, self.table),
            number::<2>(bytes, self.size),
            number::<2>(bytes, self.count),
        ) else {
            return true;
        };
        let all = count * self.header;
        let end = table.checked_add(all).filter(|it| i64::try_from(*it).is_ok());
        // Only the start of a longer file was read, so its length is unknown.
        let length = bytes.len() as u64;
        let is_beyond = |end| length < HEADERS && end > length;
        size != self.header || !(1..=65536).contains(&all) || end.is_none_or(is_beyond)
    }

    /// Returns the loader in `PT_INTERP`.
    pub(super) fn loader(&self, bytes: &[u8]) -> Loader {
        self.read_loader(bytes).unwrap_or(Loader::Unread)
    }

    /// Returns `None` if a header or the path is not in `bytes`, or the path is empty.
    fn read_loader(&self, bytes: &[u8]) -> Option<Loader> {
        const PT_INTERP: u64 = 3;
        let index = |number: u64| usize::try_from(number).ok();
        let table = index(self.word(bytes, self.table)?)?;
        let size = index(self.header)?;
        for entry in 0..index(number::<2>(bytes, self.count)?)? {
            let entry = table.checked_add(entry.checked_mul(size)?)?;
            if number::<4>(bytes, entry)? != PT_INTERP {
                continue;
            }
            let start = index(self.word(bytes, entry.checked_add(self.start)?)?)?;
            let length = index(self.word(bytes, entry.checked_add(self.length)?)?)?;
            let text = bytes.get(start..start.checked_add(length)?)?;
            let path = text.split(|&byte| byte == 0).next().filter(|it| !it.is_empty())?;
            return Some(Loader::Path(String::from_utf8_lossy(path).into_owned()));
        }
        Some(Loader::None)
    }
}

/// Reads a number of `N` bytes, at most 8, in this machine's byte order.
pub(super) fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(N)?)?;
    let shift = |sum: u64, byte: &u8| sum << 8 | u64::from(*byte);
    Some(match cfg!(target_endian = "little") {
        true => field.iter().rev().fold(0, shift),
        false => field.iter().fold(0, shift),
    })
}
