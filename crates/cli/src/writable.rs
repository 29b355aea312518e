//! `--writable`: where the changes to a root go.

use std::ffi::OsString;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use container::bundle::Access;
use container::life::detached::GLANCE;
use container::root::Writable;
use container::root::filestore::{self, Backing};
use kernel::mount::Durability;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use store::Store;

use crate::args;
use crate::context::Context;
use crate::wanted::wish;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wish {
    /// `none`
    None,
    /// `memory[,size=SIZE]`
    Memory(Option<NonZeroU64>),
    /// `self[,size=SIZE][,durable]`
    Filestore(Option<NonZeroU64>, Durability),
    /// `dir=PATH[,durable]`
    Directory(PathBuf, Durability),
}

impl FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A path may have commas; only what can be nothing else is an option.
        if let Some(path) = text.strip_prefix("dir=") {
            let (path, durability) = match path.strip_suffix(",durable") {
                Some(path) => (path, Durability::Durable),
                None => (path, Durability::Volatile),
            };
            return match path {
                "" => Err("dir= needs a directory".to_owned()),
                path => Ok(Self::Directory(PathBuf::from(path), durability)),
            };
        }
        let mut words = text.split(',');
        let kind = words.next().unwrap_or_default();
        let (mut size, mut durability) = (None, Durability::Volatile);
        for word in words {
            match (kind, word.split_once('=')) {
                ("memory" | "self", Some(("size", value))) => size = Some(bytes(value)?),
                ("self", None) if word == "durable" => durability = Durability::Durable,
                ("memory", None) if word == "durable" => {
                    return Err("what is in memory is not durable: use self or dir=PATH".to_owned());
                }
                _ => return Err(format!("{kind} has no option \"{word}\"")),
            }
        }
        match kind {
            "none" => Ok(Self::None),
            "memory" => Ok(Self::Memory(size)),
            "self" => Ok(Self::Filestore(size, durability)),
            _ => Err(
                "it is memory[,size=SIZE], self[,size=SIZE][,durable], dir=PATH[,durable] or none"
                    .to_owned(),
            ),
        }
    }
}

/// A number of bytes, or with `k`, `m`, `g` or `t` of powers of 1024, as `docker run --memory` and the mount option of
/// tmpfs have it. A `b` or `ib` may follow.
pub(crate) fn bytes(text: &str) -> Result<NonZeroU64, String> {
    let wrong =
        || format!("\"{text}\" is no size: a number, with k, m, g or t behind it, such as 512m");
    let lower = text.to_ascii_lowercase();
    let digits = lower.trim_end_matches(|it: char| it.is_ascii_alphabetic());
    let power = match lower.get(digits.len()..).unwrap_or_default() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 1,
        "m" | "mb" | "mib" => 2,
        "g" | "gb" | "gib" => 3,
        "t" | "tb" | "tib" => 4,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_error| wrong())?;
    number.checked_mul(1 << (10 * power)).and_then(NonZeroU64::new).ok_or_else(wrong)
}

/// What has to be open while a root is made.
#[derive(Debug)]
pub(crate) enum Place {
    None,
    Memory(Option<NonZeroU64>),
    Filestore(OwnedFd, Durability),
    /// Locked as long as it is open.
    Directory(OwnedFd, Durability),
}

impl Place {
    /// The one that a container is to have. Without a wish it is a filestore for root, and memory for others and where no
    /// file system can be made. In memory it may take half of what the container may use.
    pub(crate) fn of_container(
        context: &Context,
        store: &Store,
        wanted: &args::Wanted,
        backing: Backing,
    ) -> anyhow::Result<Self> {
        let wish = wish(wanted).cloned().unwrap_or_else(|| default(context, &search()));
        let half = wanted.memory.and_then(|it| NonZeroU64::new(it.get() / 2));
        let wish = if wish == Wish::Memory(None) { Wish::Memory(half) } else { wish };
        Self::make(store, &wish, backing)
    }

    /// Makes it, or opens what is there.
    pub(crate) fn make(store: &Store, wish: &Wish, backing: Backing) -> anyhow::Result<Self> {
        let search = search();
        Ok(match wish {
            Wish::None => Self::None,
            Wish::Memory(size) => Self::Memory(*size),
            Wish::Filestore(size, durability) => {
                let folder = store.containers_fd();
                let size = size.map_or_else(|| filestore::default_size(folder, backing), Ok)?;
                let file = filestore::make(folder, size, *durability, backing, &search);
                let file = file.context(
                    "--writable self: `--writable memory` needs no file system of its own",
                )?;
                Self::Filestore(file, *durability)
            }
            Wish::Directory(path, durability) => {
                let opened = File::open(path).with_context(|| {
                    format!("cannot open \"{}\" for --writable", path.display())
                })?;
                if !opened.metadata()?.is_dir() {
                    bail!("--writable: \"{}\" is no directory", path.display());
                }
                if !lock(&opened) {
                    bail!(
                        "--writable: \"{}\" is in use by another container: stop that (`quire ps`), or take another \
                         directory",
                        path.display()
                    );
                }
                Self::Directory(opened.into(), *durability)
            }
        })
    }

    /// Whether anything can be written.
    pub(crate) const fn access(&self) -> Access {
        match self {
            Self::None => Access::ReadOnly,
            Self::Memory(_) | Self::Filestore(..) | Self::Directory(..) => Access::Writable,
        }
    }

    /// What others may not use as long as it is open.
    pub(crate) fn into_locked(self) -> Option<OwnedFd> {
        match self {
            Self::Directory(directory, _) => Some(directory),
            Self::None | Self::Memory(_) | Self::Filestore(..) => None,
        }
    }

    /// As roots take it.
    pub(crate) fn writable(&self) -> Writable<'_> {
        match self {
            Self::None => Writable::None,
            Self::Memory(bytes) => Writable::Memory { bytes: *bytes },
            Self::Filestore(file, durability) => {
                Writable::Filestore { file: file.as_fd(), durability: *durability }
            }
            Self::Directory(directory, durability) => {
                Writable::Directory { directory: directory.as_fd(), durability: *durability }
            }
        }
    }
}

/// Where programs are searched.
fn search() -> OsString {
    std::env::var_os("PATH").unwrap_or_default()
}

/// How long the monitor of a container that has ended may take to let go of its directory.
const PATIENCE: Duration = Duration::from_secs(3);

/// Whether the directory is this process's now. Two overlays that write to one directory spoil it, and the kernel only warns
/// of that. What `quire mount` has mounted holds no lock, since no process stays with it; nor does every file system lock.
fn lock(directory: &File) -> bool {
    let since = Instant::now();
    loop {
        match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if since.elapsed() >= PATIENCE => return false,
            Err(Errno::WOULDBLOCK) => std::thread::sleep(GLANCE),
            _ => return true,
        }
    }
}

fn default(context: &Context, search: &OsString) -> Wish {
    if !rustix::process::geteuid().is_root() {
        return Wish::Memory(None);
    }
    if filestore::program(search).is_none() {
        context.remark(
            "there is no mkfs.ext4 (package e2fsprogs), so what the container writes is in memory: `--writable memory` to \
             want that",
        );
        return Wish::Memory(None);
    }
    Wish::Filestore(None, Durability::Volatile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_their_options() {
        let size = |bytes| NonZeroU64::new(bytes);
        let (volatile, durable) = (Durability::Volatile, Durability::Durable);
        let cases = [
            ("none", Wish::None),
            ("memory", Wish::Memory(None)),
            ("memory,size=1", Wish::Memory(size(1))),
            ("memory,size=512m", Wish::Memory(size(512 << 20))),
            ("self", Wish::Filestore(None, volatile)),
            ("self,size=2GiB,durable", Wish::Filestore(size(2 << 30), durable)),
            ("self,durable,size=1T", Wish::Filestore(size(1 << 40), durable)),
            ("dir=/a,b", Wish::Directory("/a,b".into(), volatile)),
            ("dir=a,durable", Wish::Directory("a".into(), durable)),
        ];
        for (text, expect) in cases {
            assert_eq!(text.parse(), Ok(expect), "{text}");
        }
    }

    #[test]
    fn what_is_none_is_refused_with_the_reason() {
        let cases = [
            ("", "it is memory[,size=SIZE]"),
            ("Memory", "it is memory[,size=SIZE]"),
            ("memory,size=", "\"\" is no size"),
            ("memory,size=0", "\"0\" is no size"),
            ("memory,size=1x", "\"1x\" is no size"),
            ("memory,size=-1", "\"-1\" is no size"),
            ("memory,size=16777216t", "is no size"),
            ("memory,durable", "not durable"),
            ("none,size=1", "none has no option \"size=1\""),
            ("self,sise=1", "self has no option \"sise=1\""),
            ("dir=", "dir= needs a directory"),
            ("dir=,durable", "dir= needs a directory"),
        ];
        for (text, expect) in cases {
            let error = text.parse::<Wish>().unwrap_err();
            assert!(error.contains(expect), "{text}: {error}");
        }
    }
}
