//! `--writable`: parses where a root's changes are stored.

use std::num::NonZeroU64;
use std::path::PathBuf;

use anyhow::bail;
use container::root::WritableChoice;
use kernel::mount::Durability;

use crate::session::moment::decimal;

/// Parses a value of `--writable`.
pub(crate) fn writable(text: &str) -> Result<WritableChoice, String> {
    // A path may contain commas, so a suffix is parsed as an option only if it is unambiguous.
    if let Some(path) = text.strip_prefix("dir=") {
        let (path, durability) = match path.strip_suffix(",durable") {
            Some(path) => (path, Durability::Durable),
            None => (path, Durability::Volatile),
        };
        return match path {
            "" => Err("dir= needs a directory".to_owned()),
            path if path.contains(",size=") => Err(
                "dir=PATH does not take a size: use dir,size=SIZE, a directory of the container, \
                or self,size=SIZE"
                    .to_owned(),
            ),
            path => Ok(WritableChoice::Directory(PathBuf::from(path), durability)),
        };
    }
    let mut words = text.split(',');
    let kind = words.next().unwrap_or_default();
    let (mut size, mut durability) = (None, Durability::Volatile);
    for word in words {
        match (kind, word.split_once('=')) {
            ("dir" | "memory" | "self", Some(("size", value))) => size = Some(bytes(value)?),
            ("self" | "dir", None) if word == "durable" => durability = Durability::Durable,
            ("memory", None) if word == "durable" => {
                return Err("memory is not durable: use dir or self".to_owned());
            }
            _ => return Err(format!("{kind} has no option \"{word}\"")),
        }
    }
    match kind {
        "none" => Ok(WritableChoice::None),
        "memory" => Ok(WritableChoice::Memory(size)),
        "self" => Ok(WritableChoice::Filestore(size, durability)),
        "dir" => Ok(WritableChoice::Folder(size, durability)),
        _ => Err("use dir[,size=SIZE][,durable], self[,size=SIZE][,durable], memory[,size=SIZE], \
            dir=PATH[,durable] or none"
            .to_owned()),
    }
}

/// Returns the wish, or fails if it needs the folder of a container.
pub(crate) fn with_a_place(wish: WritableChoice) -> anyhow::Result<WritableChoice> {
    if matches!(wish, WritableChoice::Folder(..)) {
        bail!(
            "--writable dir needs the directory of a container, which only `run` makes: use \
            dir=PATH"
        );
    }
    Ok(wish)
}

/// Parses a number of bytes, optionally followed by `k`, `m`, `g` or `t` (powers of 1024), as `docker run --memory`
/// and the mount option of tmpfs do. A `b` or `ib` may follow. The number may have a decimal fraction; a part of a byte
/// is dropped. Source: docker's go-units, `size.go`, `RAMInBytes`.
pub(crate) fn bytes(text: &str) -> Result<NonZeroU64, String> {
    let wrong = || {
        format!(
            "\"{text}\" is not a size: use a number, with k, m, g or t after it, for example 512m"
        )
    };
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
    let unit = 1 << (10 * power);
    let size = decimal(digits, unit).and_then(|it| u64::try_from(it).ok());
    size.and_then(NonZeroU64::new).ok_or_else(wrong)
}

/// Minimum memory of a container, in bytes: the runtime's own process is in the container's cgroup while it starts
/// the program. Source: Docker, `daemon/daemon_unix.go`, `linuxMinMemory`.
const MEMORY_MIN: u64 = 6 << 20;

/// Parses a value of `run --memory`; 0 means no limit, as in podman.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    if text == "0" {
        return Ok(0);
    }
    match bytes(text)?.get() {
        ..MEMORY_MIN => Err(format!("{text} is too little to start a container: use at least 6m")),
        size => Ok(size),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_their_options() {
        let size = |bytes| NonZeroU64::new(bytes);
        let (volatile, durable) = (Durability::Volatile, Durability::Durable);
        let cases = [
            ("none", WritableChoice::None),
            ("memory", WritableChoice::Memory(None)),
            ("memory,size=1", WritableChoice::Memory(size(1))),
            ("memory,size=512m", WritableChoice::Memory(size(512 << 20))),
            ("self", WritableChoice::Filestore(None, volatile)),
            ("self,size=2GiB,durable", WritableChoice::Filestore(size(2 << 30), durable)),
            ("self,durable,size=1T", WritableChoice::Filestore(size(1 << 40), durable)),
            ("dir", WritableChoice::Folder(None, volatile)),
            ("dir,size=1g", WritableChoice::Folder(size(1 << 30), volatile)),
            ("dir,durable", WritableChoice::Folder(None, durable)),
            ("dir=/a,b", WritableChoice::Directory("/a,b".into(), volatile)),
            ("dir=a,durable", WritableChoice::Directory("a".into(), durable)),
        ];
        for (text, expect) in cases {
            assert_eq!(writable(text), Ok(expect), "{text}");
        }
    }

    #[test]
    fn a_size_may_have_a_fraction() {
        for (text, expect) in [
            ("1.5g", 3 << 29),
            ("7.5m", 15 << 19),
            ("0.5KiB", 512),
            ("1.0", 1),
            ("1.9b", 1),
            (".5k", 512),
            ("0.333333333333333333k", 341),
        ] {
            assert_eq!(bytes(text).map(NonZeroU64::get), Ok(expect), "{text}");
        }
        for text in [".", ".g", "1.5.g", "1,5g", "+1", "1e3", "0.1", "1.-5g", "1.5x"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_none_is_refused_with_the_reason() {
        let cases = [
            ("", "use dir[,size=SIZE]"),
            ("Memory", "use dir[,size=SIZE]"),
            ("dir,size=0", "\"0\" is not a size"),
            ("dir,x", "dir has no option \"x\""),
            ("memory,size=", "\"\" is not a size"),
            ("memory,size=0", "\"0\" is not a size"),
            ("memory,size=1x", "\"1x\" is not a size"),
            ("memory,size=-1", "\"-1\" is not a size"),
            ("memory,size=16777216t", "is not a size"),
            ("memory,durable", "not durable"),
            ("none,size=1", "none has no option \"size=1\""),
            ("self,sise=1", "self has no option \"sise=1\""),
            ("dir=", "dir= needs a directory"),
            ("dir=,durable", "dir= needs a directory"),
            ("dir=a,size=1g", "dir=PATH does not take a size"),
        ];
        for (text, expect) in cases {
            let error = writable(text).unwrap_err();
            assert!(error.contains(expect), "{text}: {error}");
        }
    }
}
