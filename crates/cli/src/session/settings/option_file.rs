//! Reads files that options name, such as those of `--env-file` and `--security-opt seccomp=`.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::bail;

/// Maximum size of such a file, in bytes. It is more than execve(2) can pass to a program, and any seccomp profile is
/// smaller.
const LARGEST: u64 = 4 << 20;

/// Reads a whole file, which may be a pipe.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        bail!("it is larger than {} MiB", LARGEST >> 20);
    }
    Ok(bytes)
}

/// Makes the kernel write no core dump of this process, and keeps other processes of the user from reading its memory.
#[cfg(any(feature = "disk", feature = "signatures"))]
pub(crate) fn keep_out_of_dumps() -> std::io::Result<()> {
    use rustix::process::{DumpableBehavior, Resource, Rlimit};

    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let most = rustix::process::getrlimit(Resource::Core).maximum;
    Ok(rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: most })?)
}
