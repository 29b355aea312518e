//! Writes pax tars. Source: POSIX `pax`, "ustar Interchange Format" and "pax Extended Header".

use std::io::Write as _;

/// The metadata of an entry.
#[derive(Debug, Clone)]
pub(super) struct Meta {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) seconds: u64,
    pub(super) nanoseconds: u32,
    pub(super) xattrs: Vec<(&'static str, Vec<u8>)>,
}

impl Meta {
    pub(super) const fn mode(mode: u32) -> Self {
        Self { mode, uid: 0, gid: 0, seconds: 1_700_000_000, nanoseconds: 0, xattrs: Vec::new() }
    }

    pub(super) const fn time(mut self, seconds: u64, nanoseconds: u32) -> Self {
        (self.seconds, self.nanoseconds) = (seconds, nanoseconds);
        self
    }

    pub(super) const fn owner(mut self, uid: u32, gid: u32) -> Self {
        (self.uid, self.gid) = (uid, gid);
        self
    }

    pub(super) fn xattr(mut self, name: &'static str, value: &[u8]) -> Self {
        self.xattrs.push((name, value.to_vec()));
        self
    }
}

/// A tar that is being written.
#[derive(Debug, Default)]
pub(super) struct Tar(Vec<u8>);

const DIRECTORY: Meta = Meta::mode(0o755);
const FILE: Meta = Meta::mode(0o644);

impl Tar {
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }

    pub(super) fn dir(&mut self, path: impl AsRef<[u8]>) -> &mut Self {
        self.dir_as(path, &DIRECTORY)
    }

    pub(super) fn dir_as(&mut self, path: impl AsRef<[u8]>, meta: &Meta) -> &mut Self {
        self.entry(path.as_ref(), b'5', meta, b"", b"", (0, 0))
    }

    pub(super) fn file(&mut self, path: impl AsRef<[u8]>, content: impl AsRef<[u8]>) -> &mut Self {
        self.file_as(path, &FILE, content)
    }

    pub(super) fn file_as(
        &mut self,
        path: impl AsRef<[u8]>,
        meta: &Meta,
        content: impl AsRef<[u8]>,
    ) -> &mut Self {
        self.entry(path.as_ref(), b'0', meta, b"", content.as_ref(), (0, 0))
    }

    pub(super) fn symlink(
        &mut self,
        path: impl AsRef<[u8]>,
        target: impl AsRef<[u8]>,
    ) -> &mut Self {
        self.entry(path.as_ref(), b'2', &Meta::mode(0o777), target.as_ref(), b"", (0, 0))
    }

    pub(super) fn link(&mut self, path: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> &mut Self {
        self.entry(path.as_ref(), b'1', &FILE, target.as_ref(), b"", (0, 0))
    }

    /// Adds a device or a pipe, by its type flag.
    pub(super) fn special(
        &mut self,
        path: impl AsRef<[u8]>,
        flag: u8,
        meta: &Meta,
        number: (u32, u32),
    ) -> &mut Self {
        self.entry(path.as_ref(), flag, meta, b"", b"", number)
    }

    pub(super) fn entry(
        &mut self,
        path: &[u8],
        flag: u8,
        meta: &Meta,
        target: &[u8],
        content: &[u8],
        number: (u32, u32),
    ) -> &mut Self {
        let mut records = Vec::new();
        let mut record = |key: &str, value: &[u8]| {
            let length = key.len() + value.len() + 3;
            // The number of bytes of a record includes the digits of the number.
            let total =
                (1..).map(|digits| length + digits).find(|it| it.to_string().len() + length == *it);
            write!(records, "{} {key}=", total.unwrap()).unwrap();
            records.extend_from_slice(value);
            records.push(b'\n');
        };
        let mut name = path.to_vec();
        if flag == b'5' {
            name.push(b'/');
        }
        if name.len() > 100 {
            record("path", &name);
        }
        if target.len() > 100 {
            record("linkpath", target);
        }
        if meta.uid > 0o7_777_777 {
            record("uid", meta.uid.to_string().as_bytes());
        }
        if meta.gid > 0o7_777_777 {
            record("gid", meta.gid.to_string().as_bytes());
        }
        if meta.nanoseconds > 0 {
            record("mtime", format!("{}.{:09}", meta.seconds, meta.nanoseconds).as_bytes());
        }
        for (xattr, value) in &meta.xattrs {
            record(&format!("SCHILY.xattr.{xattr}"), value);
        }
        if !records.is_empty() {
            self.header(b"pax", b'x', &FILE, b"", records.len(), (0, 0));
            self.data(&records);
        }
        self.header(&name, flag, meta, target, content.len(), number);
        self.data(content);
        self
    }

    fn data(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
    }

    fn header(
        &mut self,
        name: &[u8],
        flag: u8,
        meta: &Meta,
        target: &[u8],
        size: usize,
        number: (u32, u32),
    ) {
        let mut block = [0; 512];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        let first = |bytes: &[u8]| bytes[..bytes.len().min(100)].to_vec();
        let octal = |value: u64, digits: usize| format!("{value:0digits$o}\0").into_bytes();
        let id = |value: u32| octal(u64::from(if value > 0o7_777_777 { 0 } else { value }), 7);
        put(0, &first(name));
        put(100, &octal(u64::from(meta.mode), 7));
        put(108, &id(meta.uid));
        put(116, &id(meta.gid));
        put(124, &octal(size as u64, 11));
        put(136, &octal(meta.seconds, 11));
        put(148, b"        ");
        put(156, &[flag]);
        put(157, &first(target));
        put(257, b"ustar\x0000");
        put(329, &octal(u64::from(number.0), 7));
        put(337, &octal(u64::from(number.1), 7));
        let sum: u64 = block.iter().map(|it| u64::from(*it)).sum();
        block[148..155].copy_from_slice(&octal(sum, 6));
        self.0.extend_from_slice(&block);
    }
}
