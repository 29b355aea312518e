//! Gives back the memory of a program's relocated constants while its process waits.
//!
//! The addresses of a position-independent program are random, so the dynamic linker writes them into its constants:
//! tables of methods, strings, places of panics. For Quire these are 0.6 MB, which no two processes share, although
//! their contents differ only by the address of the program. A process that waits for days does not need them. They
//! are dropped, after which the kernel shows the bytes of the program's file in their place, and computed again after
//! the wait.
//!
//! In between, only [`Constants::wait`] runs, which makes system calls and calculates, and uses no relocated constant.
//! Before a page counts as known, its contents are computed once and compared with those in memory. So a page is never
//! dropped if anything in it is not understood, whichever linker has made the program.
//!
//! A page that was not dropped has the same contents after it is computed. So it does not matter whether the kernel
//! follows the advice to drop a page: QEMU, as an emulator of programs, reports success and keeps some pages.
#![expect(unsafe_code, reason = "the dynamic linker's work is repeated at its addresses")]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rustix::event::PollFd;
use rustix::io::Errno;
use rustix::mm::{Advice, MprotectFlags};

use super::pause::{Rounds, Waited};

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
    /// The same pages, as ranges of addresses.
    known: Vec<Range<usize>>,
    relocations: &'static [Rela],
    /// Relocations in the compact form of `DT_RELR`: an address, or a bitmap of the words behind the last one.
    compact: &'static [u64],
}

/// How a relocation changes a word.
#[derive(Clone, Copy)]
enum Change {
    /// The word is this number.
    To(usize),
    /// The word, as the file has it, is added to the program's address. The file has offsets in the program, which are
    /// smaller than its address.
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
        let offset = program.file_offset(&(start..end))?;
        File::open("/proc/self/exe").ok()?.read_exact_at(&mut bytes, offset).ok()?;
        let mut found = Self {
            base: program.base,
            pages: start..end,
            page_size,
            is_known: Vec::new(),
            known: Vec::new(),
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
        // SAFETY: these pages are mapped from the program's file, and nothing changes constants after its start.
        let now = unsafe { std::slice::from_raw_parts(first, length) };
        let pages = now.chunks(page_size).zip(bytes.chunks(page_size));
        found.is_known = pages.map(|(now, computed)| now == computed).collect();
        found.known = ranges(start, page_size, &found.is_known);
        found.is_known.contains(&true).then_some(found)
    }

    /// Waits without the constants. Call it only if this process has one thread and no signal handlers
    /// that use constants.
    // The compiler may move reads of constants within a function, because it assumes that constants never change. So
    // the functions that read some must not become one with this.
    #[inline(never)]
    pub(super) fn wait(
        &self,
        fds: &mut [PollFd<'_>],
        rounds: &Rounds<'_>,
    ) -> Result<Waited, Errno> {
        // This comes first, so that nothing can fail after the pages are dropped.
        let is_writable = self.protect(MprotectFlags::READ | MprotectFlags::WRITE).is_ok();
        if is_writable {
            self.drop_pages();
        }
        let waited = rounds.wait(fds);
        if is_writable {
            self.compute();
        }
        // If this fails, the constants stay writable, and the process is otherwise as before. A change to writable that
        // failed may have changed some of the pages.
        let _protected = self.protect(MprotectFlags::READ);
        waited
    }

    fn protect(&self, flags: MprotectFlags) -> Result<(), Errno> {
        let start = std::ptr::with_exposed_provenance_mut(self.pages.start);
        // SAFETY: the pages belong to this program's constants, which stay readable.
        unsafe { rustix::mm::mprotect(start, self.pages.len(), flags) }
    }

    fn drop_pages(&self) {
        for range in &self.known {
            let start = std::ptr::with_exposed_provenance_mut(range.start);
            // A page that the kernel keeps does not change when it is computed.
            // SAFETY: until `compute` has written the pages again, only code runs that does not read them.
            let _kept = unsafe { rustix::mm::madvise(start, range.len(), Advice::LinuxDontNeed) };
        }
    }

    /// Writes the constants of all known pages, which have the bytes of the file, or the constants already.
    fn compute(&self) {
        self.for_each(|at, change| {
            let page = at.wrapping_sub(self.pages.start) / self.page_size;
            // A comparison with `Some(&true)` would be one with a constant that contains an address.
            if !self.is_known.get(page).is_some_and(|it| *it) {
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
            Change::Add if before < self.base => before.wrapping_add(self.base),
            Change::Add => before,
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

/// Returns the pages that are known, as ranges of addresses, from the address of the first page.
fn ranges(start: usize, page_size: usize, is_known: &[bool]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut page = start..start;
    for is_known in is_known {
        page = page.end..page.end.saturating_add(page_size);
        match ranges.last_mut() {
            _ if !is_known => {}
            Some(last) if last.end == page.start => last.end = page.end,
            _ => ranges.push(page.clone()),
        }
    }
    ranges
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

    /// Returns the position in the file of addresses that the file has; `None` for others.
    fn file_offset(&self, addresses: &Range<usize>) -> Option<u64> {
        let (start, end) = (addresses.start, addresses.end);
        let has = |range: &Range<usize>| range.start <= start && end <= range.end;
        let (range, offset) = self.loaded.iter().find(|(range, _)| has(range))?;
        offset.checked_add(u64::try_from(start - range.start).ok()?)
    }

    /// Returns a table of the dynamic section; empty if the program has none.
    fn table<T>(&self, [tag, size]: Table) -> Option<&'static [T]> {
        if !self.dynamic.start.is_multiple_of(align_of::<[u64; 2]>()) {
            return None;
        }
        let first = std::ptr::with_exposed_provenance::<[u64; 2]>(self.dynamic.start);
        // SAFETY: the section is part of the program, aligned, and the linker does not change it after the start.
        let entries = unsafe { std::slice::from_raw_parts(first, self.dynamic.len() / 16) };
        let value = |tag: u64| {
            let mut entries = entries.iter().take_while(|it| it[0] != 0);
            entries.find(|it| it[0] == tag).map(|it| word(it[1]))
        };
        let (Some(address), Some(size)) = (value(tag), value(size)) else { return Some(&[]) };
        // glibc changes the offset to an address, and musl does not.
        let address = if address < self.base { self.base.wrapping_add(address) } else { address };
        self.file_offset(&(address..address.checked_add(size)?))?;
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
    use std::os::fd::AsFd as _;

    use super::super::pause::{Pause, WatchedSpace};
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
        let Some(constants) = Constants::find() else {
            // Only this platform's programs are known to have some.
            let platform = (std::env::consts::ARCH, cfg!(target_env = "gnu"));
            assert_ne!(platform, ("x86_64", true));
            return;
        };
        let known = constants.is_known.iter().filter(|it| **it).count();
        assert!(known > constants.is_known.len() / 2, "{:?}", constants.is_known);
        let (mut said, mut say) = std::io::pipe().unwrap();
        let (hear, mut told) = std::io::pipe().unwrap();
        let directory = File::open("/").unwrap();
        let any = 0..=u64::MAX;
        let watched =
            vec![WatchedSpace { file: directory.as_fd(), blocks: any.clone(), inodes: any }];
        let interval = std::time::Duration::from_millis(1);
        // SAFETY: the child calls the allocator, which can be used after a fork, and the system, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            say.write_all(b"a").unwrap();
            let mut byte = [0];
            (&hear).read_exact(&mut byte).unwrap();
            // The second wait also checks a file system.
            for pause in [Pause::default(), Pause { watched, interval, most: None }] {
                let rounds = Rounds::new(None, &pause);
                let fds = &mut [PollFd::new(&hear, rustix::event::PollFlags::IN)];
                let ready = constants.wait(fds, &rounds);
                (&hear).read_exact(&mut byte).unwrap();
                let error: &dyn std::error::Error = &Errno::PERM;
                let text = format!("{ready:?} {} {error}", NAMES.join(","));
                let length = u8::try_from(text.len()).unwrap();
                say.write_all(&[&[length], text.as_bytes()].concat()).unwrap();
            }
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        // If the child dies, this process has no other end of the pipe, and gets an error.
        drop(say);
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
            let expect = format!("Ok(Ready) one,two,three {}", Errno::PERM);
            assert_eq!(String::from_utf8(text).unwrap(), expect);
        }
        let pid = rustix::process::Pid::from_raw(child);
        let (_, status) =
            rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(0));
    }

    /// The words of a page of constants as a file has them, and its relocations. The program begins a page before.
    struct Example {
        bytes: Vec<u8>,
        relocations: &'static [Rela],
        compact: &'static [u64],
    }

    impl Example {
        fn new(page: usize) -> Self {
            let words = (0..page / WORD).map(|it| u64::try_from(it).unwrap());
            let bytes = words.flat_map(u64::to_le_bytes).collect();
            let offset = |word: usize| u64::try_from(page + word * WORD).unwrap();
            // The words from 0 to 63, and the word 64.
            let compact = Box::leak(Box::new([offset(0), u64::MAX]));
            let kind = RELATIVE.unwrap_or_default();
            let relocations = [Rela { offset: offset(64), kind, addend: 7 }];
            Self { bytes, relocations: Box::leak(Box::new(relocations)), compact }
        }
    }

    /// A mapping that is shared keeps its pages, although the kernel reports success.
    #[test]
    fn it_does_not_matter_whether_the_kernel_drops_pages() {
        use rustix::mm::{MapFlags, ProtFlags};

        const NO_CONSTANT: usize = 100;
        if RELATIVE.is_none() {
            return;
        }
        let page_size = rustix::param::page_size();
        let example = Example::new(page_size);
        for (flags, is_kept) in [(MapFlags::PRIVATE, false), (MapFlags::SHARED, true)] {
            let mut file = tempfile::tempfile().unwrap();
            // Two pages of which only the first is known.
            file.write_all(&example.bytes.repeat(2)).unwrap();
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            let length = 2 * page_size;
            // SAFETY: a new mapping at an address that the kernel chooses.
            let start = unsafe {
                rustix::mm::mmap(std::ptr::null_mut(), length, rights, flags, &file, 0).unwrap()
            };
            let words = start.cast::<usize>();
            // SAFETY: the word is in the mapping, and aligned.
            let get = |number: usize| unsafe { words.wrapping_add(number).read_volatile() };
            // SAFETY: as above, and the mapping is writable.
            let set = |number: usize, to| unsafe { words.wrapping_add(number).write_volatile(to) };
            let pages = start.expose_provenance()..start.expose_provenance() + length;
            let base = pages.start - page_size;
            let constants = Constants {
                base,
                pages: pages.clone(),
                page_size,
                is_known: vec![true, false],
                known: ranges(pages.start, page_size, &[true, false]),
                relocations: example.relocations,
                compact: example.compact,
            };
            let expected = |word: usize| if word == 64 { base + 7 } else { base + word };
            (0..=64).for_each(|it| set(it, expected(it)));
            set(NO_CONSTANT, 1);
            set(page_size / WORD, 1);
            let now = Pause::from(Some(std::time::Duration::ZERO));
            let now = Rounds::new(now.most, &now);
            for _ in 0..2 {
                assert_eq!(constants.wait(&mut [], &now), Ok(Waited::Over));
                for word in 0..=64 {
                    assert_eq!(get(word), expected(word), "{word}, {flags:?}");
                }
                assert_eq!(get(65), 65);
                // So the kernel has dropped the page, or has not.
                assert_eq!(get(NO_CONSTANT), if is_kept { 1 } else { NO_CONSTANT });
                assert_eq!(get(page_size / WORD), 1);
            }
            // SAFETY: nothing uses the mapping any more.
            unsafe { rustix::mm::munmap(start, length).unwrap() };
        }
    }

    #[test]
    fn pages_become_ranges() {
        let check = |is_known: &[bool], expect: &[Range<usize>]| {
            assert_eq!(ranges(64, 16, is_known), expect, "{is_known:?}");
        };
        check(&[], &[]);
        check(&[false, false], &[]);
        check(&[true], std::slice::from_ref(&(64..80)));
        check(&[true, true, false, true], &[64..96, 112..128]);
        check(&[false, true, false, true, true], &[80..96, 112..144]);
    }
}
