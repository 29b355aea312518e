//! A reader of a marked file waits until its event is answered: fanotify's pre-content events, since Linux 6.14.
//!
//! Sources: Linux `include/uapi/linux/fanotify.h`, fanotify(7). A group without an unlimited queue lets readers pass that do
//! not fit into it, and a mark that the kernel may drop lets all of them pass. So neither can be had here.
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
/// `FAN_DENY_ERRNO`: 2, and the errno in the highest 8 bits.
const DENY_EIO: u32 = 2 | (5 << 24);

/// The first Linux version with these events.
const EVENTS: KernelVersion = KernelVersion { major: 6, minor: 14 };

/// Bytes to read events into: some thousands of them.
const BUFFER: usize = 256 << 10;

/// An error of a group or of its files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrecontentError {
    /// The kernel has no pre-content events.
    #[error("the kernel does not tell when a file is read: this needs Linux 6.14")]
    Unsupported,
    /// The right to have a group is missing.
    #[error("cannot wait for reads of files: this needs CAP_SYS_ADMIN")]
    Forbidden,
    /// The file system of a file has no such events.
    #[error(
        "{file} lies on a file system that does not tell when a file is read: ext4, XFS and btrfs do"
    )]
    FileSystem {
        /// The file.
        file: String,
    },
    /// A system call failed.
    #[error("cannot {step} {file}")]
    Call {
        /// What was tried.
        step: &'static str,
        /// The file, or the group.
        file: String,
        /// The kernel's answer.
        source: Errno,
    },
    /// The kernel lost events: readers may have seen bytes that are not there.
    #[error("the kernel lost events: readers may have seen zeros")]
    Lost,
    /// The events have another layout than the header says.
    #[error("the kernel's events are of another layout than that of Linux 6.14: {0}")]
    Layout(&'static str),
}

/// A group: readers of the files that it marks wait for its answers. When its last descriptor is closed, all readers go on,
/// and get the bytes that are in the file.
#[derive(Debug)]
pub struct Group(OwnedFd);

/// A reader that waits. It waits until the event is answered or the group is gone, also if this is dropped.
#[derive(Debug)]
pub struct ReadEvent {
    /// The file, open as the group says. Its reads and writes are no events.
    pub file: OwnedFd,
    /// The process that reads.
    pub pid: i32,
    /// The bytes that the reader wants. They may lie beyond the file's end.
    pub range: Range<u64>,
}

/// An answer to the reader of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrecontentAnswer {
    /// It reads the file as it is by now.
    Allow,
    /// It gets an I/O error.
    Deny,
}

/// An event as the kernel gives it: the number of a descriptor, the process, and the bytes.
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

/// `struct fanotify_event_info_range`, without its header.
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
    /// Whether it marks any file.
    ///
    /// # Errors
    /// The kernel's, when its record of the descriptor cannot be read.
    pub fn has_marks(&self) -> std::io::Result<bool> {
        // Source: Linux `fs/notify/fdinfo.c`: a line for the group, and one for each mark.
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let text = std::fs::read_to_string(path)?;
        Ok(text.lines().any(|line| line.starts_with("fanotify ino:")))
    }

    /// Whether it marks this file.
    ///
    /// # Errors
    /// As [`has_marks`](Self::has_marks).
    pub fn has_mark(&self, file: BorrowedFd<'_>) -> std::io::Result<bool> {
        let inode = rustix::fs::fstat(file)?.st_ino;
        // Two file systems may have a number in common. Then this says yes once too often.
        let start = format!("fanotify ino:{inode:x} ");
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        Ok(std::fs::read_to_string(path)?.lines().any(|line| line.starts_with(&start)))
    }

    /// A group without any files. Its queue has no bound.
    ///
    /// # Errors
    /// [`PrecontentError`].
    pub fn new() -> Result<Self, PrecontentError> {
        Self::make(libc::O_RDWR, libc::FAN_UNLIMITED_QUEUE)
    }

    /// A group whose queue has a bound, which lets readers pass: only for the test that says so of this kernel.
    ///
    /// # Errors
    /// [`PrecontentError`].
    #[doc(hidden)]
    pub fn bounded() -> Result<Self, PrecontentError> {
        Self::make(libc::O_RDWR, 0)
    }

    /// As [`new`](Self::new), for files that nobody writes: those of the events are open to read only.
    ///
    /// # Errors
    /// [`PrecontentError`].
    pub fn to_watch() -> Result<Self, PrecontentError> {
        Self::make(libc::O_RDONLY, libc::FAN_UNLIMITED_QUEUE)
    }

    fn make(access: i32, queue: u32) -> Result<Self, PrecontentError> {
        let flags = libc::FAN_CLASS_PRE_CONTENT | queue | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
        let events = access | libc::O_LARGEFILE | libc::O_CLOEXEC;
        // SAFETY: two numbers, and no memory.
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
        // SAFETY: the kernel has just made it, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// A group that another process made, by a descriptor of it.
    #[must_use]
    pub const fn adopt(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Another descriptor of the group, which outlives this one.
    ///
    /// # Errors
    /// [`PrecontentError::Call`] where there are no descriptors left.
    pub fn duplicate(&self) -> Result<Self, PrecontentError> {
        let copied = rustix::io::fcntl_dupfd_cloexec(&self.0, 0);
        copied.map(Self).map_err(|source| {
            let file = "a group of files".to_owned();
            PrecontentError::Call { step: "duplicate", file, source }
        })
    }

    /// Gives an I/O error to each reader whose event somebody has taken and not answered. An event is known by the number of
    /// a descriptor: those of `numbers` are tried. Returns how many readers waited.
    ///
    /// The process that took them has to be gone, lest it answers events that came later.
    ///
    /// # Errors
    /// [`PrecontentError::Call`] for other errors than that no reader waits.
    pub fn deny_taken(
        &self,
        numbers: impl IntoIterator<Item = RawFd>,
    ) -> Result<usize, PrecontentError> {
        let mut denied = 0;
        for number in numbers {
            match self.answer(number, PrecontentAnswer::Deny) {
                Ok(()) => denied += 1,
                Err(PrecontentError::Call { source: Errno::NOENT, .. }) => {}
                // Before Linux 6.14 the answer is not known, whatever the number is. Nobody can wait there.
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

    /// Marks a file. Reads wait through every descriptor and every mount that is opened afterwards. Descriptors that were
    /// open before never wait.
    ///
    /// # Errors
    /// [`PrecontentError`].
    pub fn mark(&self, file: BorrowedFd<'_>) -> Result<(), PrecontentError> {
        self.change("mark", libc::FAN_MARK_ADD, file)
    }

    /// Takes a mark away. Readers that wait still need an answer.
    ///
    /// # Errors
    /// [`PrecontentError::Call`]: `ENOENT` where there is no mark.
    pub fn unmark(&self, file: BorrowedFd<'_>) -> Result<(), PrecontentError> {
        self.change("take the mark from", libc::FAN_MARK_REMOVE, file)
    }

    fn change(
        &self,
        step: &'static str,
        flags: libc::c_uint,
        file: BorrowedFd<'_>,
    ) -> Result<(), PrecontentError> {
        // SAFETY: both descriptors are borrowed, and no path means the file itself.
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

    /// The events that are there, none if there are none. Each holds a descriptor until it is answered.
    ///
    /// # Errors
    /// [`PrecontentError::Lost`] is the end: a reader may have seen zeros. After [`PrecontentError::Layout`] events have no
    /// answer.
    pub fn read(&self, buffer: &mut EventBuffer) -> Result<Vec<ReadEvent>, PrecontentError> {
        let length = length_of(rustix::io::read(&self.0, &mut buffer.0[..]))?;
        owned(&buffer.0[..length])
    }

    /// As [`read`](Self::read), by way of some words of shared memory. The kernel puts the events there itself: so whoever
    /// has that memory knows of them, whatever becomes of this process. [`events_left`] finds them. Returns the words, too,
    /// that have them. They have to be zeros before the next call.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Panics
    /// If there are no such words.
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

    /// Lets the reader of an event read the file as it is by now.
    ///
    /// # Errors
    /// [`PrecontentError::Call`]: `ENOENT` where the reader is gone.
    #[expect(clippy::needless_pass_by_value, reason = "an event is answered once")]
    pub fn allow(&self, event: ReadEvent) -> Result<(), PrecontentError> {
        self.answer(event.file.as_raw_fd(), PrecontentAnswer::Allow)
    }

    /// Gives the reader of an event an I/O error.
    ///
    /// # Errors
    /// As [`allow`](Self::allow).
    #[expect(clippy::needless_pass_by_value, reason = "an event is answered once")]
    pub fn deny(&self, event: ReadEvent) -> Result<(), PrecontentError> {
        self.answer(event.file.as_raw_fd(), PrecontentAnswer::Deny)
    }

    /// Answers an event by the number that its descriptor has, or had in a process that is gone. As long as nothing else can
    /// have got the number, it is the event that was meant.
    ///
    /// # Errors
    /// As [`allow`](Self::allow).
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

/// How many bytes of events came; none if there are no events.
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

/// The events in bytes that the kernel has just given.
fn owned(bytes: &[u8]) -> Result<Vec<ReadEvent>, PrecontentError> {
    let owned = |it: RawEvent| ReadEvent {
        // SAFETY: the kernel has just made it for this event, and nothing else owns it.
        file: unsafe { OwnedFd::from_raw_fd(it.number) },
        pid: it.pid,
        range: it.range,
    };
    Ok(parse(bytes)?.into_iter().map(owned).collect())
}

/// The events that a process left where [`Group::read_shared`] had put them: the numbers of their descriptors, and the bytes.
/// Anything may stand there. It ends where no event is.
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

/// A buffer for events.
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

/// The events in the bytes that a group gave.
fn parse(mut bytes: &[u8]) -> Result<Vec<RawEvent>, PrecontentError> {
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let (event, rest) = first(bytes)?;
        events.push(event);
        bytes = rest;
    }
    Ok(events)
}

/// The first event, and the bytes behind it.
fn first(bytes: &[u8]) -> Result<(RawEvent, &[u8]), PrecontentError> {
    let layout = PrecontentError::Layout;
    let (metadata, _) =
        Metadata::read_from_prefix(bytes).or(Err(layout("an event is cut short")))?;
    if metadata.version != METADATA_VERSION {
        return Err(layout("they have another version"));
    }
    if metadata.mask & FAN_Q_OVERFLOW != 0 {
        return Err(PrecontentError::Lost);
    }
    let length = usize::try_from(metadata.event_len).unwrap_or(usize::MAX);
    let (event, rest) = bytes.split_at_checked(length).ok_or(layout("an event is cut short"))?;
    let head = usize::from(metadata.metadata_len);
    if head < size_of::<Metadata>() || metadata.mask & FAN_PRE_ACCESS == 0 || metadata.fd < 0 {
        return Err(layout("an event is of another kind"));
    }
    let infos = event.get(head..).ok_or(layout("an event is cut short"))?;
    let range = range_of(infos)?.ok_or(layout("an event has no range"))?;
    Ok((RawEvent { number: metadata.fd, pid: metadata.pid, range }, rest))
}

/// The range among the pieces of information behind an event.
fn range_of(mut infos: &[u8]) -> Result<Option<Range<u64>>, PrecontentError> {
    let short = || PrecontentError::Layout("what follows an event is cut short");
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

    /// As `linux/fanotify.h` lays it out: kind 6, length 24, padding, offset, count.
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
        // Lengths of nothing would never end.
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
        // The first word is what takes all of them away.
        let mut gone = words(&two);
        gone[0] = 0;
        assert_eq!(events_left(&gone), []);
        assert_eq!(events_left(&[]), []);
        // Whatever it is, it ends.
        for place in 0..two.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = two.clone();
                bytes[place] = value;
                assert!(events_left(&words(&bytes)).len() <= 2);
            }
        }
    }
}
