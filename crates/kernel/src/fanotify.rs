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

const FAN_PRE_ACCESS: u64 = 0x0010_0000;
const FAN_Q_OVERFLOW: u64 = 0x4000;
const EVENT_INFO_TYPE_RANGE: u8 = 6;
const METADATA_VERSION: u8 = 3;
const ALLOW: u32 = 1;

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
    /// The kernel lost events, so some reads were not reported.
    #[error("the kernel lost events: some reads were not reported")]
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
    /// The file, open for reading. Its reads cause no events.
    pub file: OwnedFd,
    /// The process id of the reader.
    pub pid: i32,
    /// The byte range of the read, which may extend beyond the end of the file.
    pub range: Range<u64>,
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
    /// Makes a group without marks and with an unlimited queue.
    pub fn new() -> Result<Self, PrecontentError> {
        let queue = libc::FAN_UNLIMITED_QUEUE;
        let flags = libc::FAN_CLASS_PRE_CONTENT | queue | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
        let events = libc::O_RDONLY | libc::O_LARGEFILE | libc::O_CLOEXEC;
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

    /// Marks a file. After that, reads block if they use a descriptor that was opened, or a mount that was made, after
    /// this call. Reads through earlier descriptors never block.
    pub fn mark(&self, file: BorrowedFd<'_>) -> Result<(), PrecontentError> {
        // SAFETY: both descriptors are borrowed, and a null path selects the file itself.
        let done = unsafe {
            let (group, file) = (self.0.as_raw_fd(), file.as_raw_fd());
            libc::fanotify_mark(group, libc::FAN_MARK_ADD, FAN_PRE_ACCESS, file, std::ptr::null())
        };
        if done == 0 {
            return Ok(());
        }
        let name = name_of(file);
        Err(match last_errno() {
            Errno::INVAL => PrecontentError::Unsupported,
            Errno::OPNOTSUPP | Errno::NODEV => PrecontentError::FileSystem { file: name },
            source => PrecontentError::Call { step: "mark", file: name, source },
        })
    }

    /// Returns the queued events, without waiting for any. Each event holds a descriptor until it is answered.
    ///
    /// # Errors
    /// After [`PrecontentError::Layout`], the events that were read cannot be answered.
    pub fn read(&self, buffer: &mut EventBuffer) -> Result<Vec<ReadEvent>, PrecontentError> {
        let length = length_of(rustix::io::read(&self.0, &mut buffer.0[..]))?;
        owned(&buffer.0[..length])
    }

    /// Lets the reader of an event continue with the current content of the file.
    ///
    /// # Errors
    /// [`PrecontentError::Call`] with `ENOENT` if the reader is gone.
    #[expect(clippy::needless_pass_by_value, reason = "an event gets one reply")]
    pub fn allow(&self, event: ReadEvent) -> Result<(), PrecontentError> {
        let answer = Response { fd: event.file.as_raw_fd(), response: ALLOW };
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
}
