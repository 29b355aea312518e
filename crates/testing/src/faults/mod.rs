//! Runs a program under ptrace and makes one of its system calls fail, or every one from then on.
//!
//! Only processes that execute this program are traced: what it starts (container runtimes, their containers) runs
//! free. Calls count from `main` on, so the dynamic loader is spared.

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
    /// `EINTR`: a signal came.
    Interrupted,
    /// `EMFILE`: the process has all the descriptors that it may have.
    Descriptors,
    /// `ENOMEM`: the kernel has no memory left for this.
    Memory,
    /// Fewer bytes than asked for are read or written. The call itself is done, so the bytes are true.
    Short,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 6] =
        [Self::NoSpace, Self::Io, Self::Interrupted, Self::Descriptors, Self::Memory, Self::Short];

    /// As it is written in tables and on the command line.
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

    /// The place in `ALL`, and in `Traced::candidates`.
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
    /// One call, once.
    Once,
    /// That call, and all after it that can fail in this way.
    FromThenOn,
}

/// Which calls fail.
#[derive(Debug, Clone, Copy)]
pub struct Fault<'a> {
    /// The error.
    pub kind: Kind,
    /// Counted from 1, among the calls that can fail in this way and that `only` allows.
    pub nth: u64,
    /// Once, or for good.
    pub mode: Mode,
    /// Only calls whose description contains this: `renameat2 `, `/objects/`.
    pub only: Option<&'a str>,
}

/// What came of a run.
#[derive(Debug)]
pub struct Traced {
    /// The program's exit code; none if a signal ended it.
    pub code: Option<i32>,
    /// It, or a process that it left, did not end in time and was killed.
    pub timed_out: bool,
    /// Calls that can fail, for each kind, in the order of `Kind::ALL`.
    pub candidates: [u64; Kind::ALL.len()],
    /// The calls that failed, by name and by what they were about.
    pub failed: Vec<String>,
}

/// Runs `words` (the first is the program, by its absolute path) with `input` for standard input until it, and every
/// process of the program that it left, has ended.
///
/// # Errors
///
/// The program cannot be started, or the kernel refuses to trace it.
pub fn run(
    words: &[&OsStr],
    place: &Place<'_>,
    fault: Option<Fault<'_>>,
    limit: Duration,
) -> io::Result<Traced> {
    tracer::run(words, place, fault, limit)
}

/// What a run is given.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The working directory.
    pub folder: &'a Path,
    /// Standard input.
    pub input: &'a [u8],
    /// The file for standard output.
    pub output: &'a Path,
    /// The file for standard error.
    pub errors: &'a Path,
    /// The whole environment.
    pub variables: &'a [(&'a str, &'a OsStr)],
}
