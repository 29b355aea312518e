//! Unpacks a composefs dump as files with their metadata, and with holes for contents.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{lchown, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

use crate::Context;
use crate::command::run;
use rig::dump::unescaped;
use rig::inputs;

/// Packs the tree of the dump of a developer's root in a tar archive, with zeros in place of its files' contents, which
/// the dump does not have. Only a source with layers can be imported in the form `tar`.
pub(crate) fn pack(context: &Context<'_>) -> Result<PathBuf> {
    let (tree, tar) = (context.work.join("tree"), context.work.join("tree.tar"));
    unpack(&fs::read(inputs::dump(context.cache, "cs9-developer")?)?, &tree)?;
    run!("tar --xattrs --xattrs-include=* -cf {tar} -C {tree} .")?;
    Ok(tar)
}

/// Creates the tree that the dump describes at `root`, which must not exist.
pub(crate) fn unpack(dump: &[u8], root: &Path) -> Result<()> {
    let mut links = Vec::new();
    let mut folders = Vec::new();
    for line in dump.split(|it| *it == b'\n').filter(|it| !it.is_empty()) {
        let entry = Entry::parse(line, root).with_context(|| {
            format!("cannot use the dump's line {}", String::from_utf8_lossy(line))
        })?;
        if let Some(target) = &entry.hardlink {
            links.push((target.clone(), entry.path));
            continue;
        }
        entry.make()?;
        if entry.kind == FileType::Directory {
            folders.push(entry);
        } else {
            entry.set_mtime()?;
        }
    }
    for (target, path) in links {
        fs::hard_link(target, path)?;
    }
    // Set last, because creating an entry changes the time of its folder.
    for folder in folders.iter().rev() {
        folder.set_mtime()?;
    }
    Ok(())
}

struct Entry {
    path: PathBuf,
    kind: FileType,
    mode: u32,
    size: u64,
    owner: (u32, u32),
    device: u64,
    mtime: Timespec,
    /// Target of a symlink.
    target: Vec<u8>,
    content: Vec<u8>,
    hardlink: Option<PathBuf>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Entry {
    fn parse(line: &[u8], root: &Path) -> Result<Self> {
        let fields: Vec<_> = line.split(|it| *it == b' ').collect();
        if fields.len() < 11 {
            bail!("{} fields", fields.len());
        }
        let text = |field: usize| std::str::from_utf8(fields[field]);
        let place = |name: &[u8]| {
            let name = unescaped(name);
            root.join(OsStr::from_bytes(name.strip_prefix(b"/").unwrap_or(&name)))
        };
        let bytes = |field: usize| {
            if fields[field] == b"-" { Vec::new() } else { unescaped(fields[field]) }
        };
        let (mode, linked) = match text(2)?.strip_prefix('@') {
            Some(mode) => (mode, true),
            None => (text(2)?, false),
        };
        let mode = u32::from_str_radix(mode, 8)?;
        let (seconds, nanoseconds) = text(7)?.split_once('.').context("no fraction in the time")?;
        let xattrs = fields[11..].iter().map(|it| {
            let at =
                it.iter().position(|byte| *byte == b'=').context("an xattr without a value")?;
            Ok((unescaped(&it[..at]), unescaped(&it[at + 1..])))
        });
        Ok(Self {
            path: place(fields[0]),
            kind: FileType::from_raw_mode(mode),
            mode: mode & 0o7777,
            size: text(1)?.parse()?,
            owner: (text(4)?.parse()?, text(5)?.parse()?),
            device: text(6)?.parse()?,
            mtime: Timespec { tv_sec: seconds.parse()?, tv_nsec: nanoseconds.parse()? },
            target: bytes(8),
            content: bytes(9),
            hardlink: linked.then(|| place(fields[8])),
            xattrs: xattrs.collect::<Result<_>>()?,
        })
    }

    fn make(&self) -> Result<()> {
        let path = &self.path;
        let make = || format!("cannot make {}", path.display());
        match self.kind {
            FileType::Directory => fs::create_dir(path).with_context(make)?,
            FileType::Symlink => {
                symlink(OsStr::from_bytes(&self.target), path).with_context(make)?;
            }
            FileType::RegularFile if self.content.is_empty() => {
                File::create(path).with_context(make)?.set_len(self.size).with_context(make)?;
            }
            FileType::RegularFile => fs::write(path, &self.content).with_context(make)?,
            kind => rustix::fs::mknodat(CWD, path, kind, Mode::empty(), self.device)
                .with_context(make)?,
        }
        let (uid, gid) = self.owner;
        lchown(path, Some(uid), Some(gid)).with_context(make)?;
        if self.kind != FileType::Symlink {
            rustix::fs::chmod(path, Mode::from_raw_mode(self.mode)).with_context(make)?;
        }
        for (key, value) in &self.xattrs {
            rustix::fs::lsetxattr(path, &key[..], value, XattrFlags::empty()).with_context(make)?;
        }
        Ok(())
    }

    fn set_mtime(&self) -> Result<()> {
        let times = Timestamps { last_access: self.mtime, last_modification: self.mtime };
        rustix::fs::utimensat(CWD, &self.path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }
}
