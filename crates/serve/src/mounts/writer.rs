//! The process that reads a client's image and writes the copy that is mounted. It has no privileges: it runs as
//! another user, its only files are the image, the copy and a pipe, its memory and time are limited, and seccomp
//! allows few system calls.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use container::bundle::userns::OwnIds;
use image::erofs::read::{Image, Owners, ReadError, View, to_tree};
use image::erofs::{Profile, write};
use image::tree::{Node, TreeUser, for_user};
use image::verity::{Algorithm, ImageId, Tee};
use kernel::process::{IdMaps, IdRange, Setup, Signal, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{DumpableBehavior, Resource, Rlimit, setrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use serde::{Deserialize, Serialize};

use super::users::MountLimits;
use super::wire::MountsError;

/// Longest time of a copy. For comparison: an image of 64,000 files takes 0.1 s.
const MOST: Duration = Duration::from_secs(20);
/// After this time, a copy counts as slow, and needs permission to continue.
const SLOW: Duration = Duration::from_secs(2);
/// Memory limit of the process in bytes, besides [`MEMORY_EACH`].
const MEMORY: u64 = 512 << 20;
/// Additional memory for each byte of the image: its bytes, its tree, and the tables of the writer.
const MEMORY_EACH: u64 = 12;
/// Largest output of the process, in bytes.
const SAID_MAX: u64 = 4096;
/// Largest size of a copy as a multiple of the image's size limit. A copy is larger because of escapes and the added
/// places.
const GROWTH: u64 = 2;

/// The parameters of a copy.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct WriteAsk {
    /// Ranges of ids inside the namespace, as first id and count.
    users: Vec<(u32, u32)>,
    groups: Vec<(u32, u32)>,
    places: Vec<String>,
    inodes_max: u64,
    bytes_max: u64,
}

/// The result of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum WriteAnswer {
    Written(WrittenImage),
    Invalid(String),
    TooMuch(String),
    Unsupported(String),
    Failed(String),
}

/// An image that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WrittenImage {
    pub(super) copy: String,
    pub(super) bytes: u64,
    pub(super) inodes: u64,
    pub(super) devices: u64,
    pub(super) has_acl: bool,
}

/// Returns the argument for a process that copies an image.
pub(super) fn tell(
    maps: &IdMaps,
    places: &[String],
    limits: &MountLimits,
) -> Result<String, MountsError> {
    let inside = |ranges: &[IdRange]| ranges.iter().map(|it| (it.inside, it.count)).collect();
    let ask = WriteAsk {
        users: inside(&maps.users),
        groups: inside(&maps.groups),
        places: places.to_vec(),
        inodes_max: limits.inodes,
        bytes_max: limits.image_bytes,
    };
    serde_json::to_string(&ask)
        .map_err(|error| MountsError::failed("cannot copy the image", &error))
}

/// Copies an image into a file, in a process of `program`, which calls [`write_for_user`]. If the copy takes long,
/// `may_be_slow` is called once. If it returns `false`, the copy is abandoned.
pub(super) fn copy(
    mut program: Command,
    setup: &Setup<'_>,
    image: OwnedFd,
    into: BorrowedFd<'_>,
    may_be_slow: &mut dyn FnMut() -> bool,
) -> Result<WrittenImage, MountsError> {
    let failed = |error: &(dyn std::error::Error + 'static)| {
        MountsError::failed("cannot copy the image", error)
    };
    let into = into.try_clone_to_owned().map_err(|error| failed(&error))?;
    program.current_dir("/").stdin(image).stdout(into).stderr(Stdio::piped());
    let mut started = spawn(program, setup).map_err(|error| failed(&error))?;
    let begun = Instant::now();
    let mut is_refused = false;
    let mut said = Vec::new();
    if let Some(pipe) = started.stderr.take() {
        let pipe = pipe.into();
        let mut read = read_until(&pipe, begun + SLOW, &mut said);
        if read.as_ref().is_err_and(|it| it.kind() == io::ErrorKind::TimedOut) {
            is_refused = !may_be_slow();
            if !is_refused {
                read = read_until(&pipe, begun + MOST, &mut said);
            }
        }
        if let Err(error) = read {
            tracing::debug!(%error, "a process that copies images did not report completely");
        }
    }
    let answer = serde_json::from_slice(&said).ok();
    // The process has written its result, or its time is over.
    let _ended = started.process.signal(Signal::KILL);
    started.process.wait().map_err(|error| failed(&error))?;
    match answer {
        Some(WriteAnswer::Written(written)) => Ok(written),
        Some(WriteAnswer::Invalid(reason)) => Err(MountsError::Invalid { reason }),
        Some(WriteAnswer::TooMuch(reason)) => Err(MountsError::TooMuch { reason }),
        Some(WriteAnswer::Unsupported(reason)) => Err(MountsError::Unsupported { reason }),
        Some(WriteAnswer::Failed(reason)) => Err(MountsError::Failed { reason }),
        None if is_refused => Err(MountsError::too_much(
            "the image takes more than two seconds to copy, and the limit of concurrent slow \
            copies is reached: try again later",
        )),
        None => Err(MountsError::invalid(
            "the process that copies images died: the image needs too much memory or time, or is \
            damaged (`quire verify`)",
        )),
    }
}

/// Checks the number of files in an image against the limit.
pub(super) fn check_inodes(inodes: u64, most: u64) -> Result<(), MountsError> {
    if inodes <= most {
        return Ok(());
    }
    Err(MountsError::too_much(format!(
        "the image has {inodes} files, more than {most}: `inodes` below [mounts] in \
        /etc/quire/serve.toml sets the limit"
    )))
}

/// Reads a pipe to its end.
///
/// # Errors
/// `TimedOut` after the deadline.
fn read_until(pipe: &OwnedFd, deadline: Instant, said: &mut Vec<u8>) -> io::Result<()> {
    let mut piece = [0; 1024];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(pipe, PollFlags::IN)];
        if poll(&mut fds, Some(&left))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match rustix::io::read(pipe, &mut piece)? {
            0 => return Ok(()),
            count => said.extend_from_slice(&piece[..count]),
        }
        if said.len() as u64 > SAID_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// Runs such a process: reads an image from standard input, writes the copy to standard output, and the result as
/// JSON to standard error. Returns the exit code.
#[must_use]
pub fn write_for_user(ask: &str) -> u8 {
    let answer = match serde_json::from_str::<WriteAsk>(ask) {
        Ok(ask) => match give_up_rights(ask.bytes_max) {
            Ok(()) => write_asked(&ask).map_or_else(|it| it, WriteAnswer::Written),
            Err(error) => WriteAnswer::Failed(format!("cannot drop privileges: {error}")),
        },
        Err(error) => {
            WriteAnswer::Failed(format!("only `quire serve --mounts` calls this: {error}"))
        }
    };
    let is_well = matches!(answer, WriteAnswer::Written(_));
    let told = serde_json::to_vec(&answer).unwrap_or_default();
    // If this write fails, the service reports that the process ended too early.
    let _told = io::stderr().write_all(&told);
    u8::from(!is_well)
}

fn write_asked(ask: &WriteAsk) -> Result<WrittenImage, WriteAnswer> {
    let mut bytes = Vec::new();
    let failed = |error: io::Error| WriteAnswer::Failed(format!("cannot read the image: {error}"));
    // The input is a sealed memfd whose length was checked.
    io::stdin().lock().take(ask.bytes_max).read_to_end(&mut bytes).map_err(failed)?;
    let out = io::stdout().as_fd().try_clone_to_owned().map(File::from).map_err(failed)?;
    let mut out = BufWriter::with_capacity(1 << 18, out);
    let written = write_copy(&bytes, ask, &mut out)?;
    out.flush().map_err(|error| not_written(&error))?;
    Ok(written)
}

fn not_written(error: &io::Error) -> WriteAnswer {
    WriteAnswer::Failed(format!("cannot write the copy of the image: {error}"))
}

/// Formats an error with all its sources.
fn chain(doing: &str, error: &(dyn std::error::Error + 'static)) -> String {
    std::iter::successors(Some(error), |it| it.source())
        .fold(doing.to_owned(), |text, error| format!("{text}: {error}"))
}

fn write_copy(
    bytes: &[u8],
    ask: &WriteAsk,
    out: &mut impl io::Write,
) -> Result<WrittenImage, WriteAnswer> {
    let unread = |error: ReadError| match error {
        ReadError::NotComposefs => WriteAnswer::Unsupported(
            "the mount service supports only images of the form `objects`: `quire convert --form \
            objects NAME`"
                .to_owned(),
        ),
        error => WriteAnswer::Invalid(chain("cannot read the image", &error)),
    };
    // The image is opened without a cache, because its bytes are already in memory, and caching would copy a whole
    // block for each distant part of the tree.
    let image = Image::open(bytes).map_err(unread)?;
    let superblock = image.superblock();
    let count = |inodes| match check_inodes(inodes, ask.inodes_max) {
        Err(MountsError::TooMuch { reason }) => Err(WriteAnswer::TooMuch(reason)),
        _ => Ok(()),
    };
    // First checks the count in the superblock, then the real number.
    count(superblock.inodes)?;
    let has_acl = superblock.may_have_acl();
    let tree = to_tree(&image, View::Composefs(Owners::FirstMet)).map_err(unread)?.tree;
    count(tree.inode_count() as u64)?;
    let ids = ids_of(ask);
    let places: Vec<_> = ask.places.iter().map(|it| it.as_bytes()).collect();
    let owner = |user, group| (ids.user(user), ids.group(group));
    let invalid = |error: &(dyn std::error::Error + 'static)| {
        WriteAnswer::Invalid(chain("the image cannot be mounted for users", error))
    };
    let for_user = for_user(&tree, &TreeUser { owner: &owner, places: &places });
    let for_user = for_user.map_err(|error| invalid(&error))?;
    drop(tree);
    let mut out = Tee::new(out, Algorithm::Sha256);
    let summary = write(&for_user.tree, &Profile::Stubs, &mut out);
    let summary = summary.map_err(|error| match error {
        image::erofs::ErofsWriteError::Output(error) => not_written(&error),
        error => invalid(&error),
    })?;
    let (_, digest) = out.finish();
    Ok(WrittenImage {
        copy: ImageId::new(digest).to_string(),
        bytes: summary.bytes,
        inodes: summary.inodes,
        devices: for_user.devices,
        has_acl,
    })
}

/// Copies arbitrary bytes, for a fuzzer. Panics unless the result is a readable image without devices, without
/// `trusted.` xattrs, and without owners that the user lacks. Returns whether a copy was written.
#[doc(hidden)]
#[must_use]
pub fn exercise_copy(bytes: &[u8]) -> bool {
    let ask = WriteAsk {
        users: vec![(0, 1), (10, 5)],
        groups: vec![(0, 100)],
        places: vec!["/etc/hosts".to_owned(), "a".to_owned()],
        inodes_max: 10_000,
        bytes_max: 1 << 20,
    };
    let mut copy = Vec::new();
    let Ok(written) = write_copy(bytes, &ask, &mut copy) else { return false };
    assert_eq!(copy.len() as u64, written.bytes, "the length is known");
    let image = Image::open(&copy[..]).expect("a copy is an image");
    let shown = to_tree(&image, View::Plain).expect("a copy can be read").tree;
    let ids = ids_of(&ask);
    let mut walk = shown.walk();
    while let Some((path, entry)) = walk.next() {
        let inode = entry.inode;
        let is_device = matches!(inode.node(), Node::CharDevice(_) | Node::BlockDevice(_));
        assert!(!is_device, "{} is a device", path.escape_ascii());
        let of_file = inode.metadata();
        let (user, group) = (ids.user(of_file.uid), ids.group(of_file.gid));
        assert_eq!((user, group), (of_file.uid, of_file.gid), "{}", path.escape_ascii());
        let mut names = inode.xattrs().map(|(name, _)| name);
        assert!(!names.any(|it| it.starts_with(b"trusted.")), "{}", path.escape_ascii());
    }
    true
}

fn ids_of(ask: &WriteAsk) -> OwnIds {
    let ranges = |inside: &[(u32, u32)]| {
        inside
            .iter()
            .map(|(inside, count)| IdRange { inside: *inside, outside: 0, count: *count })
            .collect()
    };
    OwnIds::from_ranges(ranges(&ask.users), ranges(&ask.groups))
}

/// Sets resource limits and a seccomp filter for this process, so that a malicious image can harm only this process.
fn give_up_rights(bytes_max: u64) -> io::Result<()> {
    // This process should be the first one that the kernel kills if memory is short. The write is forbidden by some
    // kernels and settings.
    let _first_to_go = std::fs::write("/proc/self/oom_score_adj", "1000");
    rustix::thread::set_no_new_privs(true)?;
    // Other processes of the same user cannot inspect this one.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let limits = [
        (Resource::As, bytes_max.saturating_mul(MEMORY_EACH).saturating_add(MEMORY)),
        (Resource::Cpu, MOST.as_secs()),
        (Resource::Fsize, bytes_max.saturating_mul(GROWTH)),
        // Standard input, output and error, and a duplicate of output.
        (Resource::Nofile, 4),
        (Resource::Nproc, 0),
        (Resource::Core, 0),
    ];
    for (resource, most) in limits {
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    let arch = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let rules: BTreeMap<i64, Vec<_>> = CALLS.iter().map(|it| (*it, Vec::new())).collect();
    let refused = SeccompAction::Errno(rustix::io::Errno::PERM.raw_os_error().unsigned_abs());
    let filter = SeccompFilter::new(rules, refused, SeccompAction::Allow, arch);
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

/// The system calls that reading and writing open files needs, with those for memory and exit.
const CALLS: [i64; 26] = [
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_close,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_can_do_nothing_else() {
        let inside = "mounts::writer::tests::what_it_can_do";
        let mut again = Command::new(std::env::current_exe().unwrap());
        let ran = again.args(["--exact", inside, "--ignored", "--nocapture"]).output().unwrap();
        let out = String::from_utf8_lossy(&ran.stdout);
        let err = String::from_utf8_lossy(&ran.stderr);
        assert!(out.contains("1 passed"), "{out}{err}");
    }

    /// Runs in another process, because rights cannot be regained.
    #[test]
    #[ignore = "what another test has a process do"]
    fn what_it_can_do() {
        let own = rustix::process::getpid();
        give_up_rights(1 << 20).unwrap();
        let refused = |done: io::Result<()>| done.unwrap_err().raw_os_error() == Some(1);
        assert!(refused(File::open("/dev/null").map(drop)), "open");
        assert!(refused(std::fs::remove_file("/nowhere")), "unlink");
        assert!(refused(std::net::TcpListener::bind("127.0.0.1:0").map(drop)), "socket");
        assert!(refused(Command::new("/bin/true").status().map(drop)), "fork");
        assert!(refused(
            Ok(rustix::process::kill_process(own, Signal::CONT)).and_then(|it| Ok(it?))
        ));
    }
}
