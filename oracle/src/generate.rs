//! Generates random trees as composefs dumps, which target the rules and the size limits of the image format.

use std::collections::{BTreeMap, BTreeSet};

use rig::dump::unescaped;
use rig::random::Random;

/// A dump, with the properties that a test needs.
#[derive(Debug)]
pub(crate) struct Dump {
    pub(crate) lines: Vec<Vec<u8>>,
    /// Whether the length of a payload is 3 modulo 4. The C reader then prints bytes after the payload, which is a
    /// bug, so only the images can be compared.
    pub(crate) c_misreads: bool,
    /// Whether the dump is also valid under `CFS_PARSE_STRICT`.
    pub(crate) strict: bool,
}

impl Dump {
    pub(crate) fn text(&self) -> Vec<u8> {
        let mut text = self.lines.join(&b'\n');
        text.push(b'\n');
        text
    }
}

/// The feature that a dump has much of.
#[derive(Debug, Clone, Copy)]
enum Theme {
    Mixed,
    Many,
    HugeFolder,
    Xattrs,
    Symlinks,
    Inline,
    Hardlinks,
    Root,
    Whiteouts,
    Extremes,
}

const THEMES: [Theme; 10] = [
    Theme::Mixed,
    Theme::Many,
    Theme::HugeFolder,
    Theme::Xattrs,
    Theme::Symlinks,
    Theme::Inline,
    Theme::Hardlinks,
    Theme::Root,
    Theme::Whiteouts,
    Theme::Extremes,
];

const NESTED_WHITEOUT: &[u8] = b"trusted.overlay.whiteout";

/// Themes of dumps that the `composefs` crate also supports.
const PLAIN_THEMES: [Theme; 4] = [Theme::Mixed, Theme::Many, Theme::HugeFolder, Theme::Root];

/// The set of features that a dump may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Range {
    /// All features that C's mkcomposefs accepts.
    Full,
    /// The features that the `composefs` crate 0.9 accepts and writes like C: objects by digest, times from 1970 on,
    /// short contents and targets; no whiteouts, no hard links, few xattrs.
    Plain,
}

type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

struct Generator<'a> {
    random: &'a mut Random,
    theme: Theme,
    folders: Vec<Vec<u8>>,
    /// Possible targets of hard links: their paths, and their modes as text.
    files: Vec<(Vec<u8>, String)>,
    taken: BTreeSet<Vec<u8>>,
    lines: Vec<Vec<u8>>,
    /// The modification time of most entries, so that there are compact inodes.
    mtime: String,
    /// Pairs of name and value that several inodes share.
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Whether payloads may have any length.
    any_payload: bool,
    c_misreads: bool,
    strict: bool,
    range: Range,
}

pub(super) fn dump(random: &mut Random, range: Range) -> Dump {
    let is_plain = range == Range::Plain;
    let theme = if is_plain { *random.pick(&PLAIN_THEMES) } else { *random.pick(&THEMES) };
    let mut generator = Generator {
        theme,
        folders: vec![Vec::new()],
        files: Vec::new(),
        taken: BTreeSet::new(),
        lines: Vec::new(),
        mtime: String::new(),
        xattrs: Vec::new(),
        any_payload: random.percent(15),
        c_misreads: false,
        strict: is_plain || random.percent(30),
        range,
        random,
    };
    generator.fill();
    Dump { lines: generator.lines, c_misreads: generator.c_misreads, strict: generator.strict }
}

impl Generator<'_> {
    fn is_plain(&self) -> bool {
        self.range == Range::Plain
    }

    fn fill(&mut self) {
        self.mtime = self.time();
        let shared = match self.theme {
            Theme::Xattrs => self.random.size(0..=200),
            _ => self.random.size(0..=8),
        };
        for _ in 0..shared {
            let pair = self.xattr();
            self.xattrs.push(pair);
        }
        self.root();
        let entries = match self.theme {
            Theme::Root => self.random.size(0..=20),
            Theme::Many => self.random.size(200..=1500),
            Theme::HugeFolder => self.random.size(500..=6000),
            Theme::Xattrs => self.random.size(1..=40),
            _ => self.random.size(1..=150),
        };
        for _ in 0..entries {
            self.entry();
        }
        let links = match self.theme {
            Theme::Hardlinks => self.random.size(1..=150),
            _ if !self.is_plain() && self.random.percent(40) => self.random.size(0..=10),
            _ => 0,
        };
        for _ in 0..links {
            self.hardlink();
        }
    }

    fn root(&mut self) {
        let mode = format!("4{:04o}", self.random.number(0..=0o7777));
        let mut xattrs = self.some_xattrs();
        if self.random.percent(30) {
            xattrs.insert(b"security.selinux".to_vec(), b"system_u:object_r:root_t:s0\0".to_vec());
        }
        let path: &[u8] = b"/";
        let line = self.line(path, 4096, &mode, [b"-", b"-", b"-"], &xattrs);
        self.lines.push(line);
        if matches!(self.theme, Theme::Root) || self.random.percent(10) {
            for _ in 0..self.random.size(1..=12) {
                let name = format!("/{:02x}", self.random.byte()).into_bytes();
                self.named(name);
            }
        }
    }

    fn entry(&mut self) {
        let folder = match self.theme {
            Theme::HugeFolder if self.random.percent(97) => self.folders[0].clone(),
            // Take the newest folder, so that paths get deep.
            _ if self.random.percent(20) => self.folders.last().expect("has the root").clone(),
            _ => self.random.pick(&self.folders).clone(),
        };
        let mut path = folder;
        path.push(b'/');
        path.extend(self.name());
        self.named(path);
    }

    fn named(&mut self, path: Vec<u8>) {
        if path.len() > 3000 || !self.taken.insert(path.clone()) {
            return;
        }
        // Percentages of folder, inline, external, empty, symlink, device, whiteout, and fifo or socket.
        let weights: [u64; 8] = match self.theme {
            Theme::HugeFolder => [1, 2, 10, 80, 2, 2, 2, 1],
            Theme::Symlinks => [10, 2, 5, 3, 75, 2, 2, 1],
            Theme::Inline => [8, 80, 4, 2, 2, 1, 2, 1],
            Theme::Whiteouts => [30, 5, 10, 5, 5, 3, 40, 2],
            Theme::Extremes => [15, 10, 55, 5, 5, 5, 2, 3],
            _ => [20, 15, 25, 10, 12, 5, 5, 8],
        };
        let mut at = self.random.number(0..=weights.iter().sum::<u64>() - 1);
        let mut kind = 0;
        while at >= weights[kind] {
            at -= weights[kind];
            kind += 1;
        }
        if kind == 6 && self.is_plain() {
            kind = 3;
        }
        if kind == 6 && self.random.percent(50) && !matches!(self.theme, Theme::Whiteouts) {
            kind = 3; // One whiteout changes the whole image's version: not in nearly every dump.
        }
        let mode = |file_type: &str, permissions: u64| format!("{file_type}{permissions:04o}");
        let permissions = match self.random.number(0..=2) {
            0 => 0o644,
            1 => 0o755,
            _ => self.random.number(0..=0o7777),
        };
        let xattrs = self.some_xattrs();
        let line = match kind {
            0 => {
                self.folders.push(path.clone());
                let mode = mode("4", permissions);
                let size = self.random.magnitude(20);
                let line = self.line(&path, size, &mode, [b"-", b"-", b"-"], &xattrs);
                self.lines.push(line);
                return;
            }
            1 => self.inline(&path, &mode("10", permissions), &xattrs),
            2 => self.external(&path, &mode("10", permissions), &xattrs),
            3 => self.line(&path, 0, &mode("10", permissions), [b"-", b"-", b"-"], &xattrs),
            4 => self.symlink(&path, &mode("12", permissions), &xattrs),
            5 => {
                let file_type = *self.random.pick(&["2", "6"]);
                let rdev = 1 + self.random.magnitude(31);
                let mode = mode(file_type, permissions);
                self.device(&path, &mode, rdev, &xattrs)
            }
            6 => self.device(&path, &mode("2", permissions), 0, &xattrs),
            _ => {
                let file_type = *self.random.pick(&["1", "14"]);
                let mode = mode(file_type, permissions);
                self.line(&path, 0, &mode, [b"-", b"-", b"-"], &xattrs)
            }
        };
        let mode = String::from_utf8_lossy(line.split(|it| *it == b' ').nth(2).expect("mode"));
        self.files.push((path, mode.into_owned()));
        self.lines.push(line);
    }

    fn inline(&mut self, path: &[u8], mode: &str, xattrs: &Xattrs) -> Vec<u8> {
        let size = match self.random.number(0..=4) {
            _ if self.is_plain() => self.random.size(1..=64),
            0 => self.random.size(1..=5000),
            1 => {
                *self.random.pick(&[1, 63, 64, 65, 2047, 2048, 2049, 4095, 4096, 4097, 4999, 5000])
            }
            _ => self.random.size(1..=64),
        };
        let content = if self.random.percent(5) { vec![b'-'] } else { self.random.bytes(size) };
        let content_text = self.escaped(&content, false);
        let digest =
            if !self.is_plain() && self.random.percent(10) { self.digest() } else { b"-".to_vec() };
        let size = u64::try_from(content.len()).expect("64 bits");
        self.line(path, size, mode, [b"-", &content_text, &digest], xattrs)
    }

    fn external(&mut self, path: &[u8], mode: &str, xattrs: &Xattrs) -> Vec<u8> {
        // A file of 8 PiB has 1024 chunks of 8 TiB, the maximum of an image.
        const LARGEST: u64 = 1 << 53;
        let size = match self.random.number(0..=5) {
            0 => *self.random.pick(&[
                1,
                4095,
                4096,
                4097,
                (1 << 32) - 1,
                1 << 32,
                (1 << 32) + 1,
                LARGEST,
            ]),
            1 => 1 + self.random.magnitude(53).min(LARGEST - 1),
            2 => LARGEST - self.random.magnitude(50),
            _ => 1 + self.random.magnitude(24),
        };
        let digest = self.digest();
        let object = {
            let mut path = digest.clone();
            path.insert(2, b'/');
            path
        };
        let free = {
            let size = match (self.any_payload, self.random.percent(90)) {
                (true, true) => self.random.size(1..=100),
                (true, false) => self.random.size(1..=4000),
                // Any length that the C reader handles correctly.
                (false, _) => self.random.size(1..=30) * 4 + self.random.size(0..=2),
            };
            self.c_misreads |= size % 4 == 3;
            let mut payload = self.random.bytes(size);
            for byte in &mut payload {
                *byte = (*byte).max(1);
            }
            self.escaped(&payload, false)
        };
        let (payload, digest): (&[u8], &[u8]) = match self.random.number(0..=5) {
            _ if self.is_plain() => (&object, &digest),
            0 => (b"-", b"-"),
            1 => (b"-", &digest),
            2 => (&free, b"-"),
            3 => (&free, &digest),
            _ => (&object, &digest),
        };
        self.line(path, size, mode, [payload, b"-", digest], xattrs)
    }

    fn symlink(&mut self, path: &[u8], mode: &str, xattrs: &Xattrs) -> Vec<u8> {
        let size = match self.random.number(0..=3) {
            _ if self.is_plain() => self.random.size(1..=1000),
            0 => self.random.size(3900..=4095),
            1 => self.random.size(1..=4095),
            _ => self.random.size(1..=40),
        };
        let target: Vec<u8> = self.random.bytes(size).into_iter().map(|it| it.max(1)).collect();
        let payload = self.escaped(&target, false);
        let stated = if self.strict || self.random.percent(50) { size } else { 0 };
        let stated = u64::try_from(stated).expect("64 bits");
        self.line(path, stated, mode, [&payload, b"-", b"-"], xattrs)
    }

    fn device(&mut self, path: &[u8], mode: &str, rdev: u64, xattrs: &Xattrs) -> Vec<u8> {
        let line = self.line(path, 0, mode, [b"-", b"-", b"-"], xattrs);
        let mut fields: Vec<_> = line.split(|it| *it == b' ').map(<[u8]>::to_vec).collect();
        fields[6] = rdev.to_string().into_bytes();
        fields.join(&b' ')
    }

    /// Inserts a line anywhere after its folder's line. Its target may come later, or be a hard link itself.
    fn hardlink(&mut self) {
        if self.files.is_empty() {
            return;
        }
        let (target, mode) = self.random.pick(&self.files).clone();
        let folder = self.random.pick(&self.folders).clone();
        let mut path = folder.clone();
        path.push(b'/');
        path.extend(self.name());
        if path.len() > 3000 || !self.taken.insert(path.clone()) {
            return;
        }
        let payload = self.escaped(&target, false);
        let mode = if mode.starts_with('@') { mode } else { format!("@{mode}") };
        let line = self.line(&path, 0, &mode, [&payload, b"-", b"-"], &Xattrs::new());
        let folder_at = self.lines.iter().position(|line| {
            let fields: Vec<_> = line.split(|it| *it == b' ').collect();
            fields[2].starts_with(b"4") && unescaped(fields[0]) == folder
        });
        // `folder` is empty for the root, whose line has "/" and is the first.
        let at = self.random.size(folder_at.unwrap_or(0) + 1..=self.lines.len());
        self.lines.insert(at, line);
        self.files.push((path, mode));
    }

    fn line(
        &mut self,
        path: &[u8],
        size: u64,
        mode: &str,
        [payload, content, digest]: [&[u8]; 3],
        xattrs: &Xattrs,
    ) -> Vec<u8> {
        let path = self.escaped(path, false);
        let extreme = if matches!(self.theme, Theme::Extremes) { 60 } else { 5 };
        let mut id = |usual: &[u64]| {
            if self.random.percent(extreme) {
                *self.random.pick(&[65535, 65536, 1 << 31, (1 << 32) - 1])
            } else {
                *self.random.pick(usual)
            }
        };
        let (uid, gid, nlink) = (id(&[0, 0, 1000]), id(&[0, 0, 100]), id(&[1, 1, 1, 2]));
        let nlink = if self.is_plain() { 1 } else { nlink };
        let rdev =
            if !self.strict && self.random.percent(3) { self.random.magnitude(32) } else { 0 };
        // C's reader takes a file with this mark for a whiteout, and prints a whiteout with leftovers of the file.
        let misread = |key: &[u8]| size > 0 && mode.starts_with("10") && key == NESTED_WHITEOUT;
        let mtime = if self.random.percent(70) { self.mtime.clone() } else { self.time() };
        let numbers = format!(" {size} {mode} {nlink} {uid} {gid} {rdev} {mtime} ");
        let mut line = [&path, numbers.as_bytes()].concat();
        line.extend([payload, content, digest].join(&b' '));
        for (key, value) in xattrs.iter().filter(|(key, _)| !misread(key)) {
            line.push(b' ');
            line.extend(self.escaped(key, true));
            line.push(b'=');
            line.extend(self.escaped(value, true));
        }
        line
    }

    fn time(&mut self) -> String {
        let seconds = match self.random.number(0..=4) {
            0 => 0.to_string(),
            1 if !self.is_plain() => format!("-{}", self.random.magnitude(40)),
            2 => self.random.magnitude(62).to_string(),
            _ => (1_600_000_000 + self.random.magnitude(20)).to_string(),
        };
        let nanoseconds =
            if self.random.percent(50) { 0 } else { self.random.number(0..=999_999_999) };
        format!("{seconds}.{nanoseconds}")
    }

    fn digest(&mut self) -> Vec<u8> {
        self.random.bytes(32).iter().flat_map(|it| format!("{it:02x}").into_bytes()).collect()
    }

    /// Returns 1 to 255 bytes without a slash, other than `.` and `..`.
    fn name(&mut self) -> Vec<u8> {
        let letters = |random: &mut Random, size| {
            (0..size).map(|_| *random.pick(b"abcdefghijklmnopqrstuvwxyz.-_0123456789")).collect()
        };
        let mut name: Vec<u8> = match self.random.number(0..=9) {
            0 => {
                let size = self.random.size(1..=255);
                self.random.bytes(size)
            }
            1 => {
                let first =
                    *self.random.pick(&[" ", "!", "-", ".a", "..a", "\\", "=", "\t", "é", "~"]);
                [first.as_bytes(), &[b'a' + self.random.byte() % 26]].concat()
            }
            2 => format!("{:02x}", self.random.byte()).into_bytes(),
            3 => {
                let size = self.random.size(200..=255);
                letters(self.random, size)
            }
            _ => {
                let size = self.random.size(1..=24);
                letters(self.random, size)
            }
        };
        for byte in &mut name {
            if matches!(*byte, 0 | b'/') {
                *byte = b'+';
            }
        }
        if name == b"." || name == b".." { b"dots".to_vec() } else { name }
    }

    fn some_xattrs(&mut self) -> Xattrs {
        let mut xattrs = Xattrs::new();
        let (percent, most) = match self.theme {
            Theme::Xattrs => (80, 220),
            Theme::HugeFolder => (3, 3),
            _ => (30, 4),
        };
        if !self.random.percent(percent) {
            return xattrs;
        }
        for _ in 0..self.random.size(0..=most) {
            let shared = !self.xattrs.is_empty() && self.random.percent(75);
            let (key, value) =
                if shared { self.random.pick(&self.xattrs).clone() } else { self.xattr() };
            // The format allows 32767 bytes per inode, including the xattrs that the writer adds for overlayfs.
            let used: usize = xattrs.iter().map(|(key, value)| key.len() + value.len() + 24).sum();
            if used + key.len() + value.len() < 27_000 {
                xattrs.insert(key, value);
            }
        }
        xattrs
    }

    fn xattr(&mut self) -> (Vec<u8>, Vec<u8>) {
        let prefix = *self.random.pick(&[
            "user.",
            "user.",
            "trusted.",
            "trusted.overlay.",
            "trusted.overlay.overlay.",
            "security.",
            "system.",
            "lustre.",
            "",
            "user",
            "trusted.overlay",
        ]);
        let mut key = prefix.as_bytes().to_vec();
        match self.random.number(0..=19) {
            0 => return (b"system.posix_acl_access".to_vec(), self.random.bytes(28)),
            1 => return (b"system.posix_acl_default".to_vec(), self.random.bytes(28)),
            // The crate takes this name for an ACL.
            2 if !self.is_plain() => key = b"system.posix_acl_access.more".to_vec(),
            3 if !key.is_empty() => {} // An empty suffix.
            4 => key = b"security.selinux".to_vec(),
            // The writer itself sets these xattrs for whiteouts, and replaces those of the dump. C counts only the
            // bytes that it added, so replacing a longer value makes its count negative, and C refuses the dump. Most
            // values are therefore not longer.
            5 => {
                let name = *self.random.pick(&[
                    "trusted.overlay.whiteout",
                    "trusted.overlay.whiteouts",
                    "user.overlay.whiteout",
                    "user.overlay.whiteouts",
                ]);
                let size = if self.random.percent(2) { self.random.size(0..=150) } else { 0 };
                return (name.as_bytes().to_vec(), self.random.bytes(size));
            }
            6 => {
                let name = *self.random.pick(&["trusted.overlay.opaque", "user.overlay.opaque"]);
                let longest = if self.random.percent(5) { 150 } else { 1 };
                let size = self.random.size(0..=longest);
                return (name.as_bytes().to_vec(), self.random.bytes(size));
            }
            8 => {
                let name = *self.random.pick(&["redirect", "metacopy", "origin", "whiteoutx"]);
                key = format!("trusted.overlay.{name}").into_bytes();
            }
            // The limit applies to the name in the dump; the writer adds eight bytes to a trusted.overlay. name.
            7 => {
                let size = 255 - key.len();
                key.extend(self.random.bytes(size).into_iter().map(|it| it.max(1)));
            }
            _ => key.extend(self.random.number(0..=300).to_string().into_bytes()),
        }
        let size = match self.random.number(0..=9) {
            // C's reader loses an entry of four bytes, without name and value, if it is the inode's last.
            0 => usize::from(key.ends_with(b".")),
            1 => self.random.size(1..=3000),
            _ => self.random.size(1..=40),
        };
        (key, self.random.bytes(size))
    }

    /// Returns the field's text. Some bytes are escaped although they need not be, in either case of the digits.
    fn escaped(&mut self, bytes: &[u8], xattr: bool) -> Vec<u8> {
        let mut text = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            let must = matches!(byte, 0 | b' ' | b'\n' | b'\\') || (xattr && byte == b'=');
            match byte {
                b'\\' | b'\n' | b'\r' | b'\t' if self.random.percent(50) => {
                    let letter = match byte {
                        b'\n' => b'n',
                        b'\r' => b'r',
                        b'\t' => b't',
                        _ => b'\\',
                    };
                    text.extend([b'\\', letter]);
                }
                _ if must
                    || (self.is_plain() && !byte.is_ascii_graphic())
                    || self.random.percent(2) =>
                {
                    text.extend(match self.random.percent(50) {
                        true => format!("\\x{byte:02x}").into_bytes(),
                        false => format!("\\x{byte:02X}").into_bytes(),
                    });
                }
                _ => text.push(byte),
            }
        }
        if text == b"-" { b"\\x2d".to_vec() } else { text }
    }
}
