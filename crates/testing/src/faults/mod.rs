//! Runs a program under ptrace and makes one of its system calls fail, or that call and all later ones.
//!
//! Only processes that execute this program are traced: the programs that it starts (container runtimes, their
//! containers) run untraced. Calls are counted from `main` on, so those of the dynamic loader do not fail.

mod calls;
mod tracer;

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// `ENOSPC`: the file system is full.
    NoSpace,
    /// `EIO`: the disk fails.
    Io,
    /// `EINTR`: a signal arrived.
    Interrupted,
    /// `EMFILE`: the process has as many descriptors as it may have.
    Descriptors,
    /// `ENOMEM`: the kernel has no memory left for the call.
    Memory,
    /// Fewer bytes than requested are read or written. The call itself is executed, so the bytes are correct.
    Short,
}

impl Kind {
    pub const ALL: [Self; 6] =
        [Self::NoSpace, Self::Io, Self::Interrupted, Self::Descriptors, Self::Memory, Self::Short];

    /// Returns the name in tables and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoSpace => "ENOSPC",
            Self::Io => "EIO",
            Self::Interrupted => "EINTR",
            Self::Descriptors => "EMFILE",
            Self::Memory => "ENOMEM",
            Self::Short => "short",
        }
    }

    /// Returns the index in `ALL`, and in `Traced::candidates`.
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    fn errno(self) -> Errno {
        match self {
            Self::NoSpace => Errno::ENOSPC,
            Self::Io => Errno::EIO,
            Self::Interrupted | Self::Short => Errno::EINTR,
            Self::Descriptors => Errno::EMFILE,
            Self::Memory => Errno::ENOMEM,
        }
    }
}

/// How often calls fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One call fails once.
    Once,
    /// That call fails, and all later ones that can fail in this way.
    FromThenOn,
}

/// A fault to inject.
#[derive(Debug, Clone, Copy)]
pub struct Fault<'a> {
    pub kind: Kind,
    /// Number of the call, from 1, among the calls that can fail in this way and that `only` allows.
    pub nth: u64,
    pub mode: Mode,
    /// Only calls whose description contains this text, such as `renameat2 ` or `/objects/`.
    pub only: Option<&'a str>,
}

/// Result of a run.
#[derive(Debug)]
pub struct Traced {
    /// Exit code of the program; `None` if a signal killed it.
    pub code: Option<i32>,
    /// Whether the program, or a process that it left, did not end in time and was killed.
    pub timed_out: bool,
    /// Number of calls that can fail, for each kind, in the order of `Kind::ALL`.
    pub candidates: [u64; Kind::ALL.len()],
    /// The calls that failed, by name and by descriptor or path.
    pub failed: Vec<String>,
}

/// Runs `words` (the first is the absolute path of the program) with `input` as standard input, until the program,
/// and every process of the program that it left, has ended.
///
/// # Errors
///
/// The program cannot be started, or the kernel refuses to trace it.
pub fn run(
    words: &[&OsStr],
    place: &RunEnvironment<'_>,
    fault: Option<Fault<'_>>,
    limit: Duration,
) -> io::Result<Traced> {
    tracer::run(words, place, fault, limit)
}

/// Environment of a run.
#[derive(Debug, Clone, Copy)]
pub struct RunEnvironment<'a> {
    pub folder: &'a Path,
    pub input: &'a [u8],
    pub output: &'a Path,
    pub errors: &'a Path,
    /// All environment variables.
    pub variables: &'a [(&'a str, &'a OsStr)],
}
