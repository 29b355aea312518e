//! fanotify's pre-content events (since Linux 6.14): a reader of a marked file blocks until its event is answered.
//!
//! Sources: Linux `include/uapi/linux/fanotify.h`, fanotify(7). If the queue of a group is limited, readers whose
//! events do not fit are not blocked. If the kernel may drop a mark (`FAN_MARK_EVICTABLE`), no readers are blocked. So
//! this module offers neither limited queues nor such marks.
#![expect(unsafe_code, reason = "rustix has no fanotify")]

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::fd_name::name_of;
use crate::last_errno;
use crate::shared_memory::SharedMemory;
use crate::version::KernelVersion;

const FAN_PRE_ACCESS: u64 = 0x0010_0000;
const FAN_Q_OVERFLOW: u64 = 0x4000;
const EVENT_INFO_TYPE_RANGE: u8 = 6;
const METADATA_VERSION: u8 = 3;
const ALLOW: u32 = 1;
/// `FAN_DENY_ERRNO`: `FAN_DENY` (2), with the errno in the highest 8 bits.
const DENY_EIO: u32 = 2 | (5 << 24);

/// The first Linux version with these events.
const EVENTS: KernelVersion = KernelVersion { major: 6, minor: 14 };

/// Size of the buffer for events in bytes, enough for several thousand.
const BUFFER: usize = 256 << 10;

/// An error of a group, its files or its events.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrecontentError {
    #[error(
        "the kernel does not support pre-content events, which report reads of files: this \
        needs Linux 6.14"
    )]
    Unsupported,
    /// The process has no `CAP_SYS_ADMIN`.
    #[error("cannot watch reads of files: this needs CAP_SYS_ADMIN")]
    Forbidden,
    /// The file system of a file has no pre-content events.
    #[error(
        "{file} is on a file system that does not report reads of files: use ext4, XFS or btrfs"
    )]
    FileSystem { file: String },
    /// A system call failed.
    #[error("cannot {step} {file}")]
    Call {
        step: &'static str,
        /// The name of the file, or a description of the group.
        file: String,
        source: Errno,
    },
    /// The kernel lost events, so readers may have read zeros instead of data that is not downloaded.
    #[error("the kernel lost events: readers may have read zeros")]
    Lost,
    /// The kernel's events do not have the layout of the header.
    #[error("the kernel's events do not have the layout of Linux 6.14: {0}")]
    Layout(&'static str),
}

/// A fanotify group. Readers of the files that it marks block until the events are answered. When its last descriptor
/// is closed, all blocked readers continue and read the current content of the file.
#[derive(Debug)]
pub struct Group(OwnedFd);

/// A blocked reader. It stays blocked until the event is answered or the group is closed, even if this value is
/// dropped.
#[derive(Debug)]
pub struct ReadEvent {
    /// The file, with the access mode of the group. Its reads and writes cause no events.
    pub file: OwnedFd,
    /// The process id of the reader.
    pub pid: i32,
    /// The byte range of the read, which may extend beyond the end of the file.
    pub range: Range<u64>,
}

/// An answer to the reader of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrecontentAnswer {
    /// The read continues with the current content of the file.
    Allow,
    /// The read fails with `EIO`.
    Deny,
}

/// An event with the number of its descriptor, which is not owned.
#[derive(Debug, PartialEq, Eq)]
struct RawEvent {
    number: RawFd,
    pid: i32,
    range: Range<u64>,
}

/// `struct fanotify_event_metadata`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
struct Metadata {
    event_len: u32,
    version: u8,
    reserved: u8,
    metadata_len: u16,
    mask: u64,
    fd: i32,
    pid: i32,
}

/// `struct fanotify_event_info_header`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
struct InfoHeader {
    kind: u8,
    padding: u8,
    length: u16,
}

/// `struct fanotify_event_info_range` without its header.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C, packed)]
struct InfoRange {
    padding: u32,
    offset: u64,
    count: u64,
}

/// `struct fanotify_response`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
struct Response {
    fd: i32,
    response: u32,
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Group {
    /// Tests whether the group marks any file.
    ///
    /// # Errors
    /// If `/proc/self/fdinfo` cannot be read.
    pub fn has_marks(&self) -> std::io::Result<bool> {
        // Source: Linux `fs/notify/fdinfo.c`. The file has one line for the group and one for each mark.
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let text = std::fs::read_to_string(path)?;
        Ok(text.lines().any(|line| line.starts_with("fanotify ino:")))
    }

    /// Tests whether the group marks a file. True also if it marks a file with the same inode number on another file
    /// system.
    ///
    /// # Errors
    /// Those of [`has_marks`](Self::has_marks).
    pub fn has_mark(&self, file: BorrowedFd<'_>) -> std::io::Result<bool> {
        let inode = rustix::fs::fstat(file)?.st_ino;
        // Only the inode number is compared, although files of two file systems may have the same number.
        let start = format!("fanotify ino:{inode:x} ");
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        Ok(std::fs::read_to_string(path)?.lines().any(|line| line.starts_with(&start)))
    }

    /// Makes a group without marks and with an unlimited queue.
    pub fn new() -> Result<Self, PrecontentError> {
        Self::make(libc::O_RDWR, libc::FAN_UNLIMITED_QUEUE)
    }

    /// Makes a group with a limited queue, which does not block all readers. This is only for a test of that behaviour
    /// of the kernel.
    #[doc(hidden)]
    pub fn bounded() -> Result<Self, PrecontentError> {
        Self::make(libc::O_RDWR, 0)
    }

    /// Like [`new`](Self::new), for files that the caller does not write: the files of the events are open read-only.
    pub fn to_watch() -> Result<Self, PrecontentError> {
        Self::make(libc::O_RDONLY, libc::FAN_UNLIMITED_QUEUE)
    }

    fn make(access: i32, queue: u32) -> Result<Self, PrecontentError> {
        let flags = libc::FAN_CLASS_PRE_CONTENT | queue | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
        let events = access | libc::O_LARGEFILE | libc::O_CLOEXEC;
        // SAFETY: both arguments are numbers.
        let fd = unsafe { libc::fanotify_init(flags, events.cast_unsigned()) };
        if fd < 0 {
            return Err(match last_errno() {
                Errno::NOSYS => PrecontentError::Unsupported,
                Errno::PERM => PrecontentError::Forbidden,
                source => {
                    let file = "a group of files".to_owned();
                    PrecontentError::Call { step: "make", file, source }
                }
            });
        }
        // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Takes a descriptor of a group that another process made.
    #[must_use]
    pub const fn adopt(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Duplicates the descriptor of the group.
    ///
    /// # Errors
    /// [`PrecontentError::Call`], such as `EMFILE`.
    pub fn duplicate(&self) -> Result<Self, PrecontentError> {
        let copied = rustix::io::fcntl_dupfd_cloexec(&self.0, 0);
        copied.map(Self).map_err(|source| {
            let file = "a group of files".to_owned();
            PrecontentError::Call { step: "duplicate", file, source }
        })
    }

    /// If another process has received events and not answered them, fails the reads of these events with `EIO`.
    /// Descriptor numbers identify events, so all of `numbers` are tried. Returns how many readers were blocked.
    ///
    /// The process that received the events must have exited, because otherwise later events could be answered.
    ///
    /// # Errors
    /// [`PrecontentError::Call`] for errors other than `ENOENT`.
    pub fn deny_taken(
        &self,
        numbers: impl IntoIterator<Item = RawFd>,
    ) -> Result<usize, PrecontentError> {
        let mut denied = 0;
        for number in numbers {
            match self.answer(number, PrecontentAnswer::Deny) {
                Ok(()) => denied += 1,
                Err(PrecontentError::Call { source: Errno::NOENT, .. }) => {}
                // Before Linux 6.14 the kernel refuses this answer for any number. Such a kernel has no blocked
                // readers.
                Err(PrecontentError::Call { source: Errno::INVAL, .. })
                    if KernelVersion::running().is_some_and(|it| it < EVENTS) =>
                {
                    return Ok(denied);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(denied)
    }

    /// Marks a file. After that, reads block if they use a descriptor that was opened, or a mount that was made, after
    /// this call. Reads through earlier descriptors never block.
    pub fn mark(&self, file: BorrowedFd<'_>) -> Result<(), PrecontentError> {
        self.change("mark", libc::FAN_MARK_ADD, file)
    }

    /// Removes a mark. Blocked readers still need an answer.
    ///
    /// # Errors
    /// [`PrecontentError::Call`] with `ENOENT` if the file has no mark.
    pub fn unmark(&self, file: BorrowedFd<'_>) -> Result<(), PrecontentError> {
        self.change("take the mark from", libc::FAN_MARK_REMOVE, file)
    }

    fn change(
        &self,
        step: &'static str,
        flags: libc::c_uint,
        file: BorrowedFd<'_>,
    ) -> Result<(), PrecontentError> {
        // SAFETY: both descriptors are borrowed, and a null path selects the file itself.
        let done = unsafe {
            let (group, file) = (self.0.as_raw_fd(), file.as_raw_fd());
            libc::fanotify_mark(group, flags, FAN_PRE_ACCESS, file, std::ptr::null())
        };
        if done == 0 {
            return Ok(());
        }
        let name = name_of(file);
        Err(match last_errno() {
            Errno::INVAL => PrecontentError::Unsupported,
            Errno::OPNOTSUPP | Errno::NODEV => PrecontentError::FileSystem { file: name },
            source => PrecontentError::Call { step, file: name, source },
        })
    }

    /// Returns the queued events, without waiting for any. Each event holds a descriptor until it is answered.
    ///
    /// # Errors
    /// [`PrecontentError::Lost`] is fatal, because a reader may have read zeros. After [`PrecontentError::Layout`]
    /// the events that were read cannot be answered.
    pub fn read(&self, buffer: &mut EventBuffer) -> Result<Vec<ReadEvent>, PrecontentError> {
        let length = length_of(rustix::io::read(&self.0, &mut buffer.0[..]))?;
        owned(&buffer.0[..length])
    }

    /// Like [`read`](Self::read), but reads into the given words of shared memory. The kernel writes the events
    /// directly into this memory. So if this process is killed, another process with the memory can find the events
    /// with [`events_left`]. Also returns the words that contain the events. The caller must zero these words before
    /// the next call.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    ///
    /// # Panics
    /// If `words` is out of range.
    pub fn read_shared(
        &self,
        memory: &SharedMemory,
        words: Range<usize>,
    ) -> Result<(Vec<ReadEvent>, Range<usize>), PrecontentError> {
        let length = length_of(memory.read_into(self.0.as_fd(), words.clone()))?;
        let used = words.start..words.start + length.div_ceil(size_of::<u64>());
        let copied = memory.copy(used.clone());
        Ok((owned(&copied.as_bytes()[..length])?, used))
    }

    /// Lets the reader of an event continue with the current content of the file.
    ///
    /// # Errors
    /// [`PrecontentError::Call`] with `ENOENT` if the reader is gone.
    #[expect(clippy::needless_pass_by_value, reason = "an event gets one reply")]
    pub fn allow(&self, event: ReadEvent) -> Result<(), PrecontentError> {
        self.answer(event.file.as_raw_fd(), PrecontentAnswer::Allow)
    }

    /// Fails the read of an event with `EIO`.
    ///
    /// # Errors
    /// Those of [`allow`](Self::allow).
    #[expect(clippy::needless_pass_by_value, reason = "an event gets one reply")]
    pub fn deny(&self, event: ReadEvent) -> Result<(), PrecontentError> {
        self.answer(event.file.as_raw_fd(), PrecontentAnswer::Deny)
    }

    /// Answers an event by its descriptor's number, also if the process that had the descriptor has exited. The
    /// number identifies the event as long as no other event can have received the same number.
    ///
    /// # Errors
    /// Those of [`allow`](Self::allow).
    pub fn answer(&self, number: RawFd, answer: PrecontentAnswer) -> Result<(), PrecontentError> {
        let response = match answer {
            PrecontentAnswer::Allow => ALLOW,
            PrecontentAnswer::Deny => DENY_EIO,
        };
        let answer = Response { fd: number, response };
        let written = rustix::io::write(&self.0, answer.as_bytes());
        written.map(drop).map_err(|source| PrecontentError::Call {
            step: "answer",
            file: "an event of a group of files".to_owned(),
            source,
        })
    }
}

/// Returns the length of the events that were read, in bytes; 0 if the queue was empty.
fn length_of(read: Result<usize, Errno>) -> Result<usize, PrecontentError> {
    match read {
        Ok(length) => Ok(length),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(source) => {
            let file = "events of a group of files".to_owned();
            Err(PrecontentError::Call { step: "read", file, source })
        }
    }
}

/// Parses bytes just read from the kernel into events that own their descriptors.
fn owned(bytes: &[u8]) -> Result<Vec<ReadEvent>, PrecontentError> {
    let owned = |it: RawEvent| ReadEvent {
        // SAFETY: the kernel has just made the descriptor for this event, and nothing else owns it.
        file: unsafe { OwnedFd::from_raw_fd(it.number) },
        pid: it.pid,
        range: it.range,
    };
    Ok(parse(bytes)?.into_iter().map(owned).collect())
}

/// Returns the events that a process left in the words of [`Group::read_shared`]: descriptor numbers and byte ranges.
/// The words may contain anything. Parsing stops at the first word sequence that is not an event.
#[must_use]
pub fn events_left(words: &[u64]) -> Vec<(RawFd, Range<u64>)> {
    let mut bytes = words.as_bytes();
    let mut events = Vec::new();
    while let Ok((event, rest)) = first(bytes) {
        events.push((event.number, event.range));
        bytes = rest;
    }
    events
}

/// A buffer for [`Group::read`].
pub struct EventBuffer(Box<[u8]>);

impl std::fmt::Debug for EventBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventBuffer")
    }
}

impl Default for EventBuffer {
    fn default() -> Self {
        Self(vec![0; BUFFER].into_boxed_slice())
    }
}

/// Parses all events in bytes from the kernel.
fn parse(mut bytes: &[u8]) -> Result<Vec<RawEvent>, PrecontentError> {
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let (event, rest) = first(bytes)?;
        events.push(event);
        bytes = rest;
    }
    Ok(events)
}

/// Parses the first event, and returns it with the bytes that follow it.
fn first(bytes: &[u8]) -> Result<(RawEvent, &[u8]), PrecontentError> {
    let layout = PrecontentError::Layout;
    let (metadata, _) =
        Metadata::read_from_prefix(bytes).or(Err(layout("an event is truncated")))?;
    if metadata.version != METADATA_VERSION {
        return Err(layout("their version is unknown"));
    }
    if metadata.mask & FAN_Q_OVERFLOW != 0 {
        return Err(PrecontentError::Lost);
    }
    let length = usize::try_from(metadata.event_len).unwrap_or(usize::MAX);
    let (event, rest) = bytes.split_at_checked(length).ok_or(layout("an event is truncated"))?;
    let head = usize::from(metadata.metadata_len);
    if head < size_of::<Metadata>() || metadata.mask & FAN_PRE_ACCESS == 0 || metadata.fd < 0 {
        return Err(layout("an event is not a pre-content event"));
    }
    let infos = event.get(head..).ok_or(layout("an event is truncated"))?;
    let range = range_of(infos)?.ok_or(layout("an event has no range"))?;
    Ok((RawEvent { number: metadata.fd, pid: metadata.pid, range }, rest))
}

/// Returns the range among the information records of an event.
fn range_of(mut infos: &[u8]) -> Result<Option<Range<u64>>, PrecontentError> {
    let short = || PrecontentError::Layout("an information record is truncated");
    while !infos.is_empty() {
        let (header, _) = InfoHeader::read_from_prefix(infos).ok().ok_or_else(short)?;
        let length = usize::from(header.length);
        if length < size_of::<InfoHeader>() {
            return Err(short());
        }
        let (info, rest) = infos.split_at_checked(length).ok_or_else(short)?;
        if header.kind == EVENT_INFO_TYPE_RANGE {
            let fields = &info[size_of::<InfoHeader>()..];
            let (range, _) = InfoRange::read_from_prefix(fields).ok().ok_or_else(short)?;
            return Ok(Some(range.offset..range.offset.saturating_add(range.count)));
        }
        infos = rest;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(mask: u64, fd: i32, info: &[u8]) -> Vec<u8> {
        let event_len = u32::try_from(24 + info.len()).unwrap();
        let version = METADATA_VERSION;
        let metadata =
            Metadata { event_len, version, reserved: 0, metadata_len: 24, mask, fd, pid: 7 };
        [metadata.as_bytes(), info].concat()
    }

    /// The layout in `linux/fanotify.h`: kind 6, length 24, padding, offset, count.
    fn range(offset: u64, count: u64) -> Vec<u8> {
        let header = InfoHeader { kind: 6, padding: 0, length: 24 };
        [header.as_bytes(), InfoRange { padding: 0, offset, count }.as_bytes()].concat()
    }

    #[test]
    fn events_have_the_layout_of_the_header() {
        assert_eq!(size_of::<Metadata>(), 24);
        assert_eq!(size_of::<InfoHeader>() + size_of::<InfoRange>(), 24);
        let mut bytes = event(FAN_PRE_ACCESS, 5, &range(4096, 65_536));
        bytes.extend(event(FAN_PRE_ACCESS, 6, &range(u64::MAX, 2)));
        let expect = [
            RawEvent { number: 5, pid: 7, range: 4096..69_632 },
            RawEvent { number: 6, pid: 7, range: u64::MAX..u64::MAX },
        ];
        assert_eq!(parse(&bytes).unwrap(), expect);
        assert_eq!(parse(&[]).unwrap(), []);
    }

    #[test]
    fn information_of_other_kinds_is_passed_over() {
        let mut infos = vec![5, 0, 12, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        infos.extend(range(1, 2));
        let events = parse(&event(FAN_PRE_ACCESS, 5, &infos)).unwrap();
        assert_eq!(events[0].range, 1..3);
    }

    #[test]
    fn what_the_kernel_does_not_send_is_an_error() {
        let whole = event(FAN_PRE_ACCESS, 5, &range(0, 1));
        for length in 1..whole.len() {
            assert!(matches!(parse(&whole[..length]), Err(PrecontentError::Layout(_))), "{length}");
        }
        let refused = |bytes: &[u8]| {
            assert!(matches!(parse(bytes), Err(PrecontentError::Layout(_))));
        };
        refused(&event(FAN_PRE_ACCESS, 5, &[]));
        refused(&event(FAN_PRE_ACCESS, -1, &range(0, 1)));
        refused(&event(1, 5, &range(0, 1)));
        // Parsing a record or an event of length 0 would never end.
        refused(&event(FAN_PRE_ACCESS, 5, &[6, 0, 0, 0]));
        let mut none = whole.clone();
        none[..4].fill(0);
        refused(&none);
        let mut version = whole;
        version[4] = 4;
        refused(&version);
        let lost = event(FAN_Q_OVERFLOW, -1, &[]);
        assert!(matches!(parse(&lost), Err(PrecontentError::Lost)));
    }

    #[test]
    fn events_that_were_left_end_where_none_is() {
        let words = |bytes: &[u8]| -> Vec<u64> {
            let whole = bytes.chunks(8).map(|it| [it, &[0; 8][it.len()..]].concat());
            whole.map(|it| u64::read_from_bytes(&it).unwrap()).collect()
        };
        let two =
            [event(FAN_PRE_ACCESS, 5, &range(4096, 10)), event(FAN_PRE_ACCESS, 9, &range(0, 1))]
                .concat();
        let zeros = [two.clone(), vec![0; 96]].concat();
        assert_eq!(events_left(&words(&zeros)), [(5, 4096..4106), (9, 0..1)]);
        assert_eq!(events_left(&words(&two)), [(5, 4096..4106), (9, 0..1)]);
        // Zeroing the first word removes all events.
        let mut gone = words(&two);
        gone[0] = 0;
        assert_eq!(events_left(&gone), []);
        assert_eq!(events_left(&[]), []);
        // Parsing ends for any content.
        for place in 0..two.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = two.clone();
                bytes[place] = value;
                assert!(events_left(&words(&bytes)).len() <= 2);
            }
        }
    }
}
