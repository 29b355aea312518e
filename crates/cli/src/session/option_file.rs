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
