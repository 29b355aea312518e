//! Makes a process small that has done much work and then waits for a long time. A host may have thousands of these.
//!
//! [`shrink`] gives back memory that is not needed at the moment. [`Waiter`] also gives back memory that is needed
//! after the wait.
#![expect(unsafe_code, reason = "memory is given back by its addresses")]

use std::ops::Range;
use std::time::{Duration, Instant};

use rustix::event::PollFd;
use rustix::io::Errno;
use rustix::mm::Advice;

use super::allocator::empty_thread_cache;
use super::constants::Constants;
use super::daemonize::is_alone;
use super::pause::{Pause, Rounds, Waited};
use super::{inherited, trim_heap};

/// How long a process expects to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedWait {
    /// For a moment, or while a user waits as well.
    Short,
    /// Perhaps for days.
    Long,
}

/// Time without an event after which a process also gives back memory that the next event needs.
const QUIET: Duration = Duration::from_secs(2);

/// The same for a process whose events are as frequent as these times.
const QUIET_MAX: Duration = Duration::from_secs(64);

/// The longest interval of the question whether this process still has another thread.
const RARELY: Duration = Duration::from_secs(3600);

/// Waits for descriptors, and keeps this process small during long waits.
#[derive(Debug)]
pub(super) struct Waiter {
    expected: ExpectedWait,
    /// Time without an event after which memory is given back.
    quiet: Duration,
    /// Time until the next question whether this can be done.
    pause: Duration,
    /// The result of the search, which is done once.
    constants: Option<Option<Constants>>,
}

impl Waiter {
    pub(super) const fn new(expected: ExpectedWait) -> Self {
        Self { expected, quiet: QUIET, pause: QUIET, constants: None }
    }

    /// Waits like poll(2), or less: without an event, it may return before the end of the time.
    pub(super) fn poll(&mut self, fds: &mut [PollFd<'_>], pause: &Pause<'_>) -> Result<(), Errno> {
        let is_long = pause.most.is_none_or(|it| it > self.pause);
        if self.expected == ExpectedWait::Short || !is_long {
            return Rounds::new(pause.most, pause).wait(fds).map(drop);
        }
        if Rounds::new(Some(self.pause), pause).wait(fds)? != Waited::Over {
            self.pause = self.quiet;
            return Ok(());
        }
        // A thread needs the constants. It may end without an event.
        if !is_alone() {
            self.pause = self.pause.saturating_mul(2).min(RARELY);
            return Ok(());
        }
        let rest = Rounds::new(pause.most.map(|it| it.saturating_sub(self.pause)), pause);
        let constants = self.constants.get_or_insert_with(Constants::find);
        shrink();
        let since = Instant::now();
        let waited = match constants {
            // A handler may need the constants as well.
            Some(constants) if !inherited::handles_signals() => constants.wait(fds, &rest),
            _ => rest.wait(fds),
        };
        self.quiet = next_quiet(self.quiet, since.elapsed());
        self.pause = self.quiet;
        waited.map(drop)
    }
}

/// Returns how long a process waits before it gives back memory again. It took processor time to get the memory back,
/// so it should have been without the memory for longer than it had waited before.
fn next_quiet(quiet: Duration, wait: Duration) -> Duration {
    let is_worth_it = wait >= quiet.saturating_mul(4);
    if is_worth_it { QUIET } else { quiet.saturating_mul(2).min(QUIET_MAX) }
}

/// Space below the current frame that is kept, in bytes: more than the red zone and the frames of these functions.
const KEPT: usize = 16 << 10;

/// Returns memory to the kernel that this process does not need while it waits: whole free pages of the heap, the stack
/// below the caller's frames, and the pages of its program's files that it can read again. The last also frees page
/// tables, which are the larger part of the kernel's memory for a small process (since Linux 6.14).
///
/// Call it from the main thread; in another one it does not touch the stack. In a process with several threads it does
/// not touch files, because another thread could change the mappings at the same time. Without `/proc`, it frees only
/// heap.
pub fn shrink() {
    if is_alone() {
        empty_thread_cache();
        wait_to_be_alone();
    }
    let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let here = std::ptr::from_ref(&mappings).addr();
    let stack = unused_stack(&mappings, here);
    let files = if is_alone() { unchanged_files(&mappings) } else { Vec::new() };
    drop(mappings);
    trim_heap();
    if let Some(stack) = stack {
        // SAFETY: nothing lives below the stack pointer and its red zone, and the range ends far below them.
        unsafe { give_back(&stack) };
    }
    for file in files {
        // SAFETY: the mapping is read-only and has no changed page, so the kernel reads the same bytes again. Both are
        // still so, because this is the only thread, and the allocator maps no files.
        unsafe { give_back(&file) };
    }
}

/// Waits until the kernel has removed a thread that has ended, for a few milliseconds at most.
fn wait_to_be_alone() {
    for _ in 0..100 {
        if is_alone() {
            return;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// # Safety
/// The bytes in the range must not be needed, or be the same when the kernel reads them again.
unsafe fn give_back(range: &Range<usize>) {
    let start = std::ptr::with_exposed_provenance_mut(range.start);
    // A range that cannot be given back is kept.
    // SAFETY: the caller guarantees that no byte changes that is needed.
    let _kept = unsafe { rustix::mm::madvise(start, range.len(), Advice::LinuxDontNeed) };
}

/// Returns the part of the main thread's stack that is below its frames. `here` is an address in the current frame.
fn unused_stack(smaps: &str, here: usize) -> Option<Range<usize>> {
    let page = rustix::param::page_size();
    let stack = mappings(smaps).find(|it| it.name == "[stack]")?.range;
    let end = here.checked_sub(KEPT)? / page * page;
    (stack.contains(&here) && stack.start < end).then_some(stack.start..end)
}

/// Returns the mappings of files that this process cannot write to and has not changed. Relocated constants of a
/// program are changed pages that look the same otherwise.
fn unchanged_files(smaps: &str) -> Vec<Range<usize>> {
    let files = mappings(smaps).filter(|it| {
        it.name.starts_with('/')
            && it.rights.starts_with('r')
            && it.rights.ends_with('p')
            && !it.rights.contains('w')
            && it.changed == Some(0)
    });
    files.map(|it| it.range).collect()
}

/// A mapping as the kernel lists it. Source: proc_pid_smaps(5).
struct Mapping<'a> {
    range: Range<usize>,
    /// Such as `r-xp`.
    rights: &'a str,
    /// Path of the file; empty for memory.
    name: &'a str,
    /// Changed pages in memory and in swap space, and huge pages that may be changed, in kB. `None` if the kernel does
    /// not show the first two.
    changed: Option<u64>,
}

fn mappings(smaps: &str) -> impl Iterator<Item = Mapping<'_>> {
    let mut lines = smaps.lines().peekable();
    std::iter::from_fn(move || {
        let mapping = lines.find_map(mapping)?;
        let (mut anonymous, mut huge, mut swapped) = (None, None, None);
        while let Some(line) = lines.next_if(|it| self::mapping(it).is_none()) {
            let size =
                |name| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok();
            anonymous = anonymous.or_else(|| size("Anonymous:"));
            huge = huge.or_else(|| size("Private_Hugetlb:"));
            swapped = swapped.or_else(|| size("Swap:"));
        }
        // A changed page that is swapped out counts as swapped only, and one of hugetlbfs as huge only.
        let changed = anonymous.zip(swapped).map(|(one, other)| one.saturating_add(other));
        let changed = changed.map(|it| it.saturating_add(huge.unwrap_or(0)));
        Some(Mapping { changed, ..mapping })
    })
}

/// Parses the first line of a mapping. Returns `None` for the lines with its fields.
fn mapping(line: &str) -> Option<Mapping<'_>> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    let range = number(start)?..number(end)?;
    let rights = words.next().filter(|it| it.len() == 4)?;
    let name = words.nth(3).unwrap_or_default().trim_start();
    Some(Mapping { range, rights, name, changed: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `cat` shows it on Linux 6.18, with some lines left out.
    const SMAPS: &str = "\
555555554000-555555560000 r--p 00000000 fe:00 123                        /usr/bin/a program
Size:                 48 kB
Anonymous:             0 kB
Swap:                  0 kB
SwapPss:               0 kB
VmFlags: rd mr mw me sd
555555560000-555555570000 r-xp 0000c000 fe:00 123                        /usr/bin/a program
Anonymous:             0 kB
Swap:                  0 kB
SwapPss:               0 kB
555555570000-555555578000 r--p 0001c000 fe:00 123                        /usr/bin/a program
Anonymous:            32 kB
Swap:                  0 kB
SwapPss:               0 kB
555555578000-555555579000 rw-p 00024000 fe:00 123                        /usr/bin/a program
Anonymous:             0 kB
Swap:                  0 kB
SwapPss:               0 kB
555555580000-5555555a1000 rw-p 00000000 00:00 0                          [heap]
Anonymous:           132 kB
Swap:                  0 kB
SwapPss:               0 kB
7ffff7d00000-7ffff7d10000 r--s 00000000 fe:00 124                        /shared
Anonymous:             0 kB
Swap:                  0 kB
SwapPss:               0 kB
7ffff7d20000-7ffff7d30000 ---p 00000000 fe:00 125                        /guard
Anonymous:             0 kB
Swap:                  0 kB
SwapPss:               0 kB
7ffff7d60000-7ffff7d70000 r--p 00000000 fe:00 127                        /swapped
Anonymous:             0 kB
Swap:                 32 kB
SwapPss:              32 kB
7ffff7e00000-7ffff8000000 r--p 00000000 00:0f 128                        /huge
Anonymous:             0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:    2048 kB
Swap:                  0 kB
7ffff7d40000-7ffff7d50000 r--p 00000000 fe:00 126                        /old kernel
7ffff7ff0000-7ffff7ff2000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
Swap:                  0 kB
SwapPss:               0 kB
7ffffff00000-7fffffff0000 rw-p 00000000 00:00 0                          [stack]
Anonymous:            96 kB
Swap:                  0 kB
SwapPss:               0 kB
";

    #[test]
    fn only_what_can_be_read_again_is_given_back() {
        let expect = [0x5555_5555_4000..0x5555_5556_0000, 0x5555_5556_0000..0x5555_5557_0000];
        assert_eq!(unchanged_files(SMAPS), expect);
        assert_eq!(unchanged_files(""), []);
        let stack = |here| unused_stack(SMAPS, here);
        let page = rustix::param::page_size();
        assert_eq!(
            stack(0x7fff_fffe_1234),
            Some(0x7fff_fff0_0000..0x7fff_fffe_1234_usize.saturating_sub(KEPT) / page * page)
        );
        // Another thread's stack, and a stack that is in use as a whole.
        for here in [0x7fff_f7d0_0000, 0x7fff_fff0_1000, 0x7fff_ffff_0000, 0] {
            assert_eq!(stack(here), None, "{here:x}");
        }
    }

    /// Returns whether a page is in a process's memory. Source: proc_pid_pagemap(5), bit 63.
    fn is_present(process: &str, address: usize) -> bool {
        use std::os::unix::fs::FileExt as _;

        let pagemap = std::fs::File::open(format!("/proc/{process}/pagemap")).unwrap();
        let page = u64::try_from(address / rustix::param::page_size()).unwrap();
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, page * 8).unwrap();
        u64::from_le_bytes(entry) >> 63 == 1
    }

    /// The first freed pieces of a size stay in the cache of the thread, each on a page that is free otherwise.
    #[cfg(target_env = "gnu")]
    #[test]
    fn no_page_is_kept_for_a_piece_in_the_cache_of_a_thread() {
        const CACHED: usize = 7;
        let mut pieces: Vec<_> = (0..1024).map(|_| Some(vec![1_u8; 1000])).collect();
        // This piece keeps the others from becoming the end of the heap.
        let last = pieces.pop();
        let cached: Vec<_> = (1..=CACHED).map(|it| pieces[it * 128].take().unwrap()).collect();
        let addresses: Vec<_> = cached.iter().map(|it| it.as_ptr().expose_provenance()).collect();
        drop(cached);
        drop(pieces);
        let present = || {
            trim_heap();
            addresses.iter().filter(|it| is_present("self", **it)).count()
        };
        assert_eq!(present(), CACHED, "the cache has none of them");
        empty_thread_cache();
        // The other thread may have got one of the pages for its own use.
        assert!(present() < CACHED / 2, "{}", present());
        drop(last);
    }

    /// The threads of this process could replace the mapping of a file by another one at any time, so a child with one
    /// thread does it.
    #[test]
    fn what_is_given_back_can_be_used() {
        use std::io::Write as _;

        use rustix::mm::{MapFlags, ProtFlags};

        let page = rustix::param::page_size();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; page]).unwrap();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            let (rights, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
            rustix::mm::mmap(std::ptr::null_mut(), page, rights, flags, &file, 0).unwrap()
        };
        // SAFETY: the mapping has a page, which is readable.
        let read = || unsafe { start.cast::<u8>().read_volatile() };
        assert_eq!(read(), 7);
        shrink();
        assert!(is_present("self", start.expose_provenance()), "this process has other threads");
        // SAFETY: the child calls the allocator, which can be used after a fork, and the system, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let first = read();
            shrink();
            let is_given_back = !is_present("self", start.expose_provenance());
            // Text, constants, relocated constants and data of this program.
            let texts = ["text", "other"].map(str::to_owned);
            let error: Box<dyn std::error::Error> = texts[0].clone().into();
            let text = format!("{error} {} {} {}", texts[1], first, read());
            let is_fine = is_given_back && text == "text other 7 7";
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(!is_fine)) };
        }
        let pid = rustix::process::Pid::from_raw(child);
        let (_, status) =
            rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(0));
        // SAFETY: nothing uses the mapping any more.
        unsafe { rustix::mm::munmap(start, page).unwrap() };
    }

    #[test]
    fn processes_with_many_events_keep_their_memory() {
        let seconds = Duration::from_secs;
        for (quiet, wait, expect) in
            [(2, 0, 4), (2, 7, 4), (2, 8, 2), (4, 15, 8), (4, 16, 2), (64, 255, 64), (64, 256, 2)]
        {
            let next = next_quiet(seconds(quiet), seconds(wait));
            assert_eq!(next, seconds(expect), "{quiet} {wait}");
        }
    }
}
