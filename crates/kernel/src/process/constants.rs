//! Gives back the memory of a program's relocated constants while its process waits.
//!
//! The addresses of a position-independent program are random, so the dynamic linker writes them into its constants:
//! tables of methods, strings, places of panics. For Quire these are 0.6 MB, which no two processes share, although
//! their contents differ only by the address of the program. A process that waits for days does not need them. They
//! are dropped, after which the kernel shows the bytes of the program's file in their place, and computed again after
//! the wait.
//!
//! In between, only [`Constants::poll`] runs, which makes system calls and calculates, and uses no relocated constant.
//! Before a page counts as known, its contents are computed once and compared with those in memory. So a page is never
//! dropped if anything in it is not understood, whichever linker has made the program.
#![expect(unsafe_code, reason = "the dynamic linker's work is repeated at its addresses")]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;
use rustix::mm::{Advice, MprotectFlags};

/// Number of the relocation that adds the program's address to a number; `None` if it is unknown here. Source:
/// `R_X86_64_RELATIVE` and `R_AARCH64_RELATIVE` of elf.h.
const RELATIVE: Option<u64> = if cfg!(target_arch = "x86_64") {
    Some(8)
} else if cfg!(target_arch = "aarch64") {
    Some(1027)
} else {
    None
};

/// A relocation. Source: elf(5), `Elf64_Rela`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Rela {
    offset: u64,
    kind: u64,
    addend: u64,
}

const _: () = assert!(size_of::<Rela>() == 24);

/// Size of an address, in bytes.
const WORD: usize = size_of::<usize>();

/// The relocated constants of this program.
#[derive(Debug)]
pub(super) struct Constants {
    /// Address of the program.
    base: usize,
    pages: Range<usize>,
    page_size: usize,
    /// Which of the pages can be computed.
    is_known: Vec<bool>,
    relocations: &'static [Rela],
    /// Relocations in the compact form of `DT_RELR`: an address, or a bitmap of the words behind the last one.
    compact: &'static [u64],
}

/// How a relocation changes a word.
#[derive(Clone, Copy)]
enum Change {
    /// The word is this number.
    To(usize),
    /// The word, as the file has it, is added to the program's address.
    Add,
}

impl Constants {
    /// Finds the pages that can be computed. `None` if there are none, as in a program at a fixed address.
    #[must_use]
    pub(super) fn find() -> Option<Self> {
        let program = Program::of_process().filter(|it| it.base != 0)?;
        let page_size = rustix::param::page_size();
        let start = program.relro.start.checked_next_multiple_of(page_size)?;
        let end = program.relro.end.min(program.dynamic.start) / page_size * page_size;
        let length = end.checked_sub(start).filter(|it| *it > 0)?;
        let mut bytes = vec![0; length];
        let offset = program.file_offset(start)?;
        File::open("/proc/self/exe").ok()?.read_exact_at(&mut bytes, offset).ok()?;
        let mut found = Self {
            base: program.base,
            pages: start..end,
            page_size,
            is_known: vec![true; length / page_size],
            relocations: program.table(DT_RELA)?,
            compact: program.table(DT_RELR)?,
        };
        found.for_each(|at, change| {
            let Some(word) = bytes.get_mut(at - start..).and_then(|it| it.first_chunk_mut()) else {
                return;
            };
            let before = usize::from_le_bytes(*word);
            *word = found.changed(before, change).to_le_bytes();
        });
        let first = std::ptr::with_exposed_provenance::<u8>(start);
        // SAFETY: the dynamic linker has made these pages read-only, and no other memory is in them.
        let now = unsafe { std::slice::from_raw_parts(first, length) };
        let pages = now.chunks(page_size).zip(bytes.chunks(page_size));
        found.is_known = pages.map(|(now, computed)| now == computed).collect();
        found.is_known.contains(&true).then_some(found)
    }

    /// Waits like poll(2), without the constants. Call it only if this process has one thread and no signal handlers
    /// that use constants.
    pub(super) fn poll(
        &mut self,
        fds: &mut [PollFd<'_>],
        timeout: Option<&Timespec>,
    ) -> Result<usize, Errno> {
        // This comes first, so that nothing can fail after the pages are dropped.
        if self.protect(MprotectFlags::READ | MprotectFlags::WRITE).is_err() {
            return rustix::event::poll(fds, timeout);
        }
        self.drop_pages();
        let ready = rustix::event::poll(fds, timeout);
        self.compute();
        // If this fails, the constants stay writable, and the process is otherwise as before.
        let _protected = self.protect(MprotectFlags::READ);
        ready
    }

    fn protect(&self, flags: MprotectFlags) -> Result<(), Errno> {
        let start = std::ptr::with_exposed_provenance_mut(self.pages.start);
        // SAFETY: the pages belong to this program's constants, which stay readable.
        unsafe { rustix::mm::mprotect(start, self.pages.len(), flags) }
    }

    fn drop_pages(&mut self) {
        let (first, size) = (self.pages.start, self.page_size);
        for (number, is_known) in self.is_known.iter_mut().enumerate().filter(|it| *it.1) {
            let page = std::ptr::with_exposed_provenance_mut(
                first.wrapping_add(number.wrapping_mul(size)),
            );
            // SAFETY: until `compute` has written the page again, only code runs that does not read it.
            let dropped = unsafe { rustix::mm::madvise(page, size, Advice::LinuxDontNeed) };
            // A page that the kernel keeps must not be computed twice.
            *is_known = dropped.is_ok();
        }
    }

    /// Writes the constants of all known pages, which have the bytes of the file.
    fn compute(&self) {
        self.for_each(|at, change| {
            let page = at.wrapping_sub(self.pages.start) / self.page_size;
            if self.is_known.get(page) != Some(&true) {
                return;
            }
            let word = std::ptr::with_exposed_provenance_mut::<usize>(at);
            // SAFETY: the word is aligned and in a page that is readable.
            let before = unsafe { word.read_volatile() };
            // SAFETY: the word is aligned and in a page that is writable now, and gets the value that it had before.
            unsafe { word.write_volatile(self.changed(before, change)) };
        });
    }

    fn changed(&self, before: usize, change: Change) -> usize {
        match change {
            Change::To(number) => number,
            Change::Add => before.wrapping_add(self.base),
        }
    }

    /// Calls `visit` with the address of each relocated word that is wholly in the pages.
    fn for_each(&self, mut visit: impl FnMut(usize, Change)) {
        let mut visit = |offset: usize, change| {
            let at = self.base.wrapping_add(offset);
            let last = at.wrapping_add(WORD - 1);
            if self.pages.contains(&at) && self.pages.contains(&last) && at.is_multiple_of(WORD) {
                visit(at, change);
            }
        };
        for relocation in self.relocations {
            // The upper half of the number is a symbol, which this relocation does not have.
            if Some(relocation.kind) == RELATIVE {
                let number = self.base.wrapping_add(word(relocation.addend));
                visit(word(relocation.offset), Change::To(number));
            }
        }
        // Source: the generic ABI, "Relative Relocation Table".
        let mut next = 0_usize;
        for entry in self.compact {
            if entry & 1 == 0 {
                visit(word(*entry), Change::Add);
                next = word(*entry).wrapping_add(WORD);
                continue;
            }
            for bit in 1..64_usize {
                if entry >> bit & 1 == 1 {
                    visit(next.wrapping_add((bit - 1).wrapping_mul(WORD)), Change::Add);
                }
            }
            next = next.wrapping_add(63 * WORD);
        }
    }
}

/// A number of a file for this word size. Such a file has no larger ones.
fn word(number: u64) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Tags of a table and of its size in bytes, in the dynamic section. Source: elf(5), and the generic ABI.
type Table = [u64; 2];
const DT_RELA: Table = [7, 8];
const DT_RELR: Table = [36, 35];

/// The program of this process, by its addresses.
#[derive(Default)]
struct Program {
    base: usize,
    relro: Range<usize>,
    dynamic: Range<usize>,
    /// Parts of the file: addresses, and the position in the file.
    loaded: Vec<(Range<usize>, u64)>,
}

impl Program {
    fn of_process() -> Option<Self> {
        /// Takes the first entry, which is that of the program. Source: dl_iterate_phdr(3).
        unsafe extern "C" fn first(
            info: *mut libc::dl_phdr_info,
            _size: libc::size_t,
            to: *mut libc::c_void,
        ) -> libc::c_int {
            // SAFETY: the linker passes a valid entry.
            let info = unsafe { info.read_unaligned() };
            // SAFETY: this is the pointer of the call below.
            unsafe { to.cast::<Option<libc::dl_phdr_info>>().write(Some(info)) };
            1
        }
        if RELATIVE.is_none() || WORD != 8 || cfg!(target_endian = "big") {
            return None;
        }
        let mut info: Option<libc::dl_phdr_info> = None;
        // SAFETY: the callback writes only to the variable, which has the right type.
        unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut info).cast()) };
        let info = info.filter(|it| !it.dlpi_phdr.is_null())?;
        // SAFETY: the program's headers are part of it and never change.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let mut program = Self { base: word(info.dlpi_addr), ..Self::default() };
        for header in headers {
            let start = program.base.wrapping_add(word(header.p_vaddr));
            let range = |size| start..start.saturating_add(word(size));
            match header.p_type {
                libc::PT_LOAD => program.loaded.push((range(header.p_filesz), header.p_offset)),
                libc::PT_GNU_RELRO => program.relro = range(header.p_memsz),
                libc::PT_DYNAMIC => program.dynamic = range(header.p_memsz),
                _ => {}
            }
        }
        Some(program)
    }

    fn file_offset(&self, address: usize) -> Option<u64> {
        let (range, offset) = self.loaded.iter().find(|(range, _)| range.contains(&address))?;
        offset.checked_add(u64::try_from(address - range.start).ok()?)
    }

    /// Returns a table of the dynamic section; empty if the program has none.
    fn table<T>(&self, [tag, size]: Table) -> Option<&'static [T]> {
        let first = std::ptr::with_exposed_provenance::<[u64; 2]>(self.dynamic.start);
        // SAFETY: the section is part of the program, and the linker does not change it after the start.
        let entries = unsafe { std::slice::from_raw_parts(first, self.dynamic.len() / 16) };
        let value = |tag: u64| {
            let mut entries = entries.iter().take_while(|it| it[0] != 0);
            entries.find(|it| it[0] == tag).map(|it| word(it[1]))
        };
        let (Some(address), Some(size)) = (value(tag), value(size)) else { return Some(&[]) };
        // glibc changes the offset to an address, and musl does not.
        let address = if address < self.base { self.base.wrapping_add(address) } else { address };
        let end = address.checked_add(size)?;
        let is_inside =
            |(range, _): &&(Range<usize>, u64)| range.start <= address && end <= range.end;
        self.loaded.iter().find(is_inside)?;
        if !address.is_multiple_of(align_of::<T>()) {
            return None;
        }
        let first = std::ptr::with_exposed_provenance::<T>(address);
        // SAFETY: the table is inside of the program's file, aligned, of plain numbers, and does not change.
        Some(unsafe { std::slice::from_raw_parts(first, size / size_of::<T>()) })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    /// A constant with an address in it.
    static NAMES: [&str; 3] = ["one", "two", "three"];

    /// Returns the changed memory of a process, in bytes.
    fn anonymous(pid: i32) -> usize {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = rollup.lines().find(|it| it.starts_with("Anonymous:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    }

    /// The constants of this process are in use by its threads, so a child with one thread drops its own.
    #[test]
    fn what_is_dropped_is_computed_again() {
        let Some(mut constants) = Constants::find() else {
            // Only this platform's programs are known to have some.
            let platform = (std::env::consts::ARCH, cfg!(target_env = "gnu"));
            assert_ne!(platform, ("x86_64", true));
            return;
        };
        let known = constants.is_known.iter().filter(|it| **it).count();
        assert!(known > constants.is_known.len() / 2, "{:?}", constants.is_known);
        let (mut said, mut say) = std::io::pipe().unwrap();
        let (hear, mut told) = std::io::pipe().unwrap();
        // SAFETY: the child calls the allocator, which can be used after a fork, and the system, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            say.write_all(b"a").unwrap();
            let mut byte = [0];
            (&hear).read_exact(&mut byte).unwrap();
            for _ in 0..2 {
                let ready =
                    constants.poll(&mut [PollFd::new(&hear, rustix::event::PollFlags::IN)], None);
                (&hear).read_exact(&mut byte).unwrap();
                let error: &dyn std::error::Error = &Errno::PERM;
                let text = format!("{ready:?} {} {error}", NAMES.join(","));
                let length = u8::try_from(text.len()).unwrap();
                say.write_all(&[&[length], text.as_bytes()].concat()).unwrap();
            }
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        let mut byte = [0];
        said.read_exact(&mut byte).unwrap();
        let before = anonymous(child);
        told.write_all(b"b").unwrap();
        for _ in 0..2 {
            let limit = before - known * constants.page_size / 2;
            let is_small = (0..2000).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(5));
                anonymous(child) < limit
            });
            assert!(is_small, "{} of {before}", anonymous(child));
            told.write_all(b"c").unwrap();
            said.read_exact(&mut byte).unwrap();
            let mut text = vec![0; byte[0].into()];
            said.read_exact(&mut text).unwrap();
            let expect = format!("Ok(1) one,two,three {}", Errno::PERM);
            assert_eq!(String::from_utf8(text).unwrap(), expect);
        }
        let pid = rustix::process::Pid::from_raw(child);
        let (_, status) =
            rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(0));
    }
}
