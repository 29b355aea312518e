//! Makes a directory with files of every kind, and lists a directory or a mount.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use sha2::{Digest as _, Sha256};

/// An inode as `stat`, `readlink`, `getxattr` and `read` show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedInode {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u64,
    pub device_number: u64,
    pub mtime: (i64, u32),
    /// Size in bytes; for a directory, the file system's own value.
    pub size: u64,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The target of a symlink, or the SHA-256 of a file's bytes.
    pub content: Vec<u8>,
    /// The inode's number.
    pub number: u64,
}

/// Inodes by path, relative to the folder.
pub type Listing = BTreeMap<Vec<u8>, ObservedInode>;

impl ObservedInode {
    fn from_metadata(path: &Path, metadata: &fs::Metadata) -> Self {
        let content = if metadata.is_symlink() {
            fs::read_link(path).unwrap().into_os_string().into_vec()
        } else if metadata.is_file() {
            let mut file = fs::File::open(path).unwrap();
            let mut hash = Sha256::new();
            let mut buffer = vec![0; 1 << 20];
            loop {
                match file.read(&mut buffer).unwrap_or_else(|error| panic!("{path:?}: {error}")) {
                    0 => break hash.finalize().to_vec(),
                    len => hash.update(&buffer[..len]),
                }
            }
        } else {
            Vec::new()
        };
        let is_device = metadata.mode() & 0o130_000 == 0o20_000;
        Self {
            mode: metadata.mode(),
            uid: metadata.uid(),
            gid: metadata.gid(),
            nlink: metadata.nlink(),
            device_number: if is_device { metadata.rdev() } else { 0 },
            mtime: (metadata.mtime(), metadata.mtime_nsec() as u32),
            size: metadata.size(),
            xattrs: xattrs(path),
            content,
            number: metadata.ino(),
        }
    }
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0; 1 << 16];
    let len = rustix::fs::llistxattr(path, &mut list[..]).unwrap();
    let names = list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let get = |name: &[u8]| {
        let mut value = vec![0; 1 << 16];
        let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]).unwrap();
        value.truncate(len);
        (name.to_vec(), value)
    };
    names.map(get).collect()
}

/// Lists everything in `folder`, whose own path is empty.
pub fn list(folder: &Path) -> Listing {
    let mut listing = Listing::new();
    let mut open = vec![folder.to_owned()];
    while let Some(path) = open.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap_or_else(|it| panic!("{path:?}: {it}"));
        if metadata.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let name = path.strip_prefix(folder).unwrap().as_os_str().as_bytes().to_vec();
        listing.insert(name, ObservedInode::from_metadata(&path, &metadata));
    }
    listing
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
        .unwrap_or_else(|error| panic!("{name} of {path:?}: {error}"));
}

fn set_mtime(path: &Path, seconds: i64, nanoseconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds as _ };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Returns bytes in which no block is repeated.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let step = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(step).collect()
}

/// Returns a POSIX ACL in the format of its xattr: the owner has rw, and user 1000, the group and the mask have r;
/// others have no permission. Source: `linux/posix_acl_xattr.h`.
pub fn acl() -> Vec<u8> {
    let entries: [(u16, u16, u32); 5] = [
        (1, 6, u32::MAX),
        (2, 4, 1000),
        (4, 4, u32::MAX),
        (0x10, 4, u32::MAX),
        (0x20, 0, u32::MAX),
    ];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}

/// The parameters of a folder to be filled.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// Whether to make files that only root can make.
    pub is_root: bool,
    /// Whether all ids fit in 16 bits.
    pub narrow: bool,
    /// Length of the longest name in bytes.
    pub name: usize,
    /// Number of entries in the largest directory.
    pub big: usize,
}

impl Fill {
    pub fn make(self, folder: &Path) {
        let Self { is_root, narrow, name, big } = self;
        let at = |name: &str| folder.join(name);
        let write = |name: &str, bytes: &[u8]| fs::write(at(name), bytes).unwrap();
        fs::create_dir_all(at("deep/er/and/deeper")).unwrap();
        fs::create_dir(at("empty")).unwrap();
        let noise = noise(300_000);
        for len in [0, 1, 60, 511, 512, 513, 2000, 4095, 4096, 4097, 8192, 10_000, 65_536, 300_000]
        {
            write(&format!("file-{len}"), &noise[..len]);
        }
        write("deep/er/and/deeper/leaf", b"leaf");
        for name in [&b"\xff\x80 not utf-8"[..], b"-", b"new\nline", b"!", b"~", &vec![b'n'; name]]
        {
            fs::write(folder.join(OsStr::from_bytes(name)), name).unwrap();
        }
        let mut sparse = fs::File::create(at("sparse")).unwrap();
        sparse.set_len(3 << 20).unwrap();
        sparse.seek(SeekFrom::Start(1 << 20)).unwrap();
        sparse.write_all(&noise[..100_000]).unwrap();
        fs::File::create(at("hole")).unwrap().set_len(1_000_001).unwrap();

        // A directory of some dozen blocks, and one whose last block is nearly full.
        fs::create_dir(at("big")).unwrap();
        for number in 0..big {
            write(&format!("big/entry-{number}"), b"");
        }
        fs::create_dir(at("block")).unwrap();
        for number in 0..180 {
            write(&format!("block/{number:010}"), b"x");
        }
        for name in ["linked", "deep/linked", "empty-not"] {
            if name != "linked" {
                fs::hard_link(at("linked"), at(name)).unwrap();
            } else {
                write(name, &noise[..5000]);
            }
        }
        symlink("file-1", at("link")).unwrap();
        symlink("x".repeat(1000), at("long-link")).unwrap();
        symlink("y/".repeat(2047), at("longest-link")).unwrap();
        symlink(OsStr::from_bytes(b"\xfe"), at("odd-link")).unwrap();
        rustix::fs::mknodat(CWD, at("socket"), FileType::Socket, Mode::from(0o755), 0).unwrap();
        rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::from(0o640), 0).unwrap();
        fs::set_permissions(at("file-60"), fs::Permissions::from_mode(0o6755)).unwrap();
        fs::set_permissions(at("empty"), fs::Permissions::from_mode(0o1777)).unwrap();

        set_xattr(&at("file-1"), "user.empty", b"");
        set_xattr(&at("file-1"), "user.one", b"1");
        set_xattr(&at("file-2000"), "user.large", &noise[..3000]);
        set_xattr(&at("file-4097"), "user.prefixed.by.much.a", b"a");
        set_xattr(&at("file-8192"), "user.prefixed.by.much.b", b"b");
        for number in 0..180 {
            set_xattr(&at(&format!("block/{number:010}")), "user.shared", b"by all of them");
            set_xattr(
                &at(&format!("block/{number:010}")),
                "user.own",
                number.to_string().as_bytes(),
            );
        }
        if is_root {
            let nodes = [
                ("null", FileType::CharacterDevice, (1, 3)),
                ("whiteout", FileType::CharacterDevice, (0, 0)),
                ("disk", FileType::BlockDevice, (259, 70_000)),
            ];
            for (name, file_type, (major, minor)) in nodes {
                let number = rustix::fs::makedev(major, minor);
                rustix::fs::mknodat(CWD, at(name), file_type, Mode::from(0o600), number).unwrap();
            }
            let (uid, gid) = if narrow { (65_535, 1) } else { (70_000, 4_000_000_000) };
            std::os::unix::fs::chown(at("file-512"), Some(uid), Some(gid)).unwrap();
            std::os::unix::fs::lchown(at("link"), Some(3), Some(4)).unwrap();
            for name in ["file-60", "null", "link", "big", "fifo"] {
                set_xattr(&at(name), "security.selinux", b"system_u:object_r:usr_t:s0\0");
            }
            set_xattr(&at("file-60"), "trusted.overlay.opaque", b"y");
            set_xattr(&at("file-60"), "trusted.prefixed", b"z");
            set_xattr(&at("deep"), "trusted.overlay.redirect", b"/elsewhere");
            set_xattr(&at("file-4096"), "system.posix_acl_access", &acl());
            set_xattr(&at("deep"), "system.posix_acl_default", &acl());
        }
        set_mtime(&at("file-1"), 1, 1);
        set_mtime(&at("file-60"), -1_000_000_000, 999_999_999);
        set_mtime(&at("link"), 8_000_000_000, 123_456_789);
        set_mtime(&at("deep/er"), 0, 0);
        set_mtime(folder, 1_700_000_000, 0);
    }
}

/// Escapes a path for messages.
pub fn show(path: &[u8]) -> OsString {
    OsString::from(path.escape_ascii().to_string())
}
