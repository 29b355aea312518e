//! Numbers of the kernel's files of `NAME: NUMBER` lines, such as `/proc/meminfo`.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// The number after a name that ends with a colon.
pub(super) fn field(file: impl AsRef<Path>, name: &str) -> Result<u64> {
    let file = file.as_ref();
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let line = text.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|it| it.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("{} has no {name}", file.display()))
}

/// Size of the whole machine's page cache, in bytes.
pub(super) fn page_cache() -> Result<u64> {
    bytes("/proc/meminfo", &["Active(file)", "Inactive(file)"])
}

/// The sum of the numbers after these names, which are in kB, in bytes.
pub(super) fn bytes(file: impl AsRef<Path>, names: &[&str]) -> Result<u64> {
    let numbers = names.iter().map(|name| field(&file, name));
    Ok(numbers.sum::<Result<u64>>()? * 1024)
}
