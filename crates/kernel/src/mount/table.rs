//! Reads the mount table of this process's mount namespace.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

/// An attached mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    /// Path of its mountpoint.
    pub point: PathBuf,
    /// Device number, `MAJOR:MINOR`.
    pub device: String,
    /// Type of its file system.
    pub kind: String,
    /// Source that was named when it was mounted.
    pub source: String,
}

/// Returns all mounts that this process can see, in the order in which they were attached.
///
/// # Errors
/// If `/proc/thread-self/mountinfo` cannot be read.
pub fn mounted() -> io::Result<Vec<Mounted>> {
    Ok(parse(&std::fs::read("/proc/thread-self/mountinfo")?))
}

/// Source: proc_pid_mountinfo(5). Fields are separated by spaces; `\ooo` is an escaped byte in octal.
fn parse(table: &[u8]) -> Vec<Mounted> {
    let text = |field: &[u8]| String::from_utf8_lossy(&unescape(field)).into_owned();
    let parsed = table.split(|&byte| byte == b'\n').filter_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ');
        let device = text(fields.nth(2)?);
        let point = OsString::from_vec(unescape(fields.nth(1)?)).into();
        let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
        let (kind, source) = (text(rest.next()?), text(rest.next()?));
        Some(Mounted { point, device, kind, source })
    });
    parsed.collect()
}

fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let octal = after
            .get(..3)
            .filter(|_| byte == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match octal {
            Some(byte) => {
                out.push(byte);
                rest = rest.get(3..).unwrap_or_default();
            }
            None => out.push(byte),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines as Linux 6.18 writes them.
    const TABLE: &[u8] = b"\
        36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
        40 35 0:50 / /mnt/a\\040b ro,relatime - overlay quire:x:latest ro,lowerdir+=y\n\
        41 35 0:51 / /mnt/a\\040b ro,relatime shared:2 master:3 - overlay quire:y:1 ro\n";

    #[test]
    fn lines_of_the_kernel() {
        let expect = [
            ("/mnt", "98:0", "ext3", "/dev/root"),
            ("/mnt/a b", "0:50", "overlay", "quire:x:latest"),
            ("/mnt/a b", "0:51", "overlay", "quire:y:1"),
        ];
        let found = parse(TABLE);
        let found = found
            .iter()
            .map(|it| (it.point.to_str().unwrap(), &*it.device, &*it.kind, &*it.source));
        assert_eq!(found.collect::<Vec<_>>(), expect);
    }
}
