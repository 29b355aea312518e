//! `mount` and `umount`.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use container::bundle::Access;
use container::root::filestore::Backing as FileBacking;
use container::root::{SOURCE, Shape, TrustedImage, make, space, warm};
use kernel::mount::{Attributes, MountAttrFlags, Unmount};
use store::OpenOptions;

use crate::Answer;
use crate::args::{self, MountWord};
use crate::context::Context;
use crate::target;

pub(crate) fn mount(context: &Context, args: &args::Mount) -> anyhow::Result<Answer> {
    // First, since this is the easiest to mend.
    target::check_directory(&args.directory)?;
    #[cfg(feature = "serve")]
    crate::pull::pull_first(context, &args.name, &args.lazy)?;
    let store = context.open(OpenOptions::read())?;
    let found = crate::resolve::resolve(&store, &args.name)?;
    let permitted = crate::policy::permit(context, &store, found)?;
    #[cfg(feature = "serve")]
    let permitted = crate::lazy::open(context, &store, permitted, &args.lazy)?;
    #[cfg(not(feature = "serve"))]
    let permitted = permitted.open(&store)?;
    let map = match &args.userns {
        Some(wish) => wish.fixed()?,
        None => None,
    };
    let trust = args.trust.wish()?;
    let image = TrustedImage::to_mount(&store, permitted, trust, Some(&args.writable))?;
    let place = args.writable.make(&store, FileBacking::Whole, &context.search())?;
    let space = space(args.df, place.access())?;
    let flags = flags(&args.options, place.access())?;
    let shape = Shape { writable: place.writable(), map: map.as_ref(), space, places: &[] };
    let root = make(&store, &image, &shape, std::iter::empty())?;
    root.mount.set(&Attributes { set: flags, ..Attributes::default() })?;
    warm(image.image(), &root, args.warm.into(), context.who(), &|text| context.remark(text));
    root.mount.attach_at(&args.directory)?;
    Ok(Answer::Yes)
}

/// The attributes that `--options` ask for. Every user of the host can reach the mount, so what an image says of root,
/// capabilities and devices has no effect unless that is asked for.
fn flags(words: &[MountWord], access: Access) -> anyhow::Result<MountAttrFlags> {
    let [nosuid, nodev, noexec] = [
        MountAttrFlags::MOUNT_ATTR_NOSUID,
        MountAttrFlags::MOUNT_ATTR_NODEV,
        MountAttrFlags::MOUNT_ATTR_NOEXEC,
    ];
    let mut flags = nosuid | nodev;
    for word in words {
        match word {
            MountWord::Suid => flags.remove(nosuid),
            MountWord::NoSuid => flags.insert(nosuid),
            MountWord::Dev => flags.remove(nodev),
            MountWord::NoDev => flags.insert(nodev),
            MountWord::Exec => flags.remove(noexec),
            MountWord::NoExec => flags.insert(noexec),
            MountWord::Ro if access == Access::ReadOnly => {}
            MountWord::Ro => bail!("--options ro contradicts --writable: leave one of them out"),
        }
    }
    Ok(flags)
}

pub(crate) fn umount(_: &Context, args: &args::Umount) -> anyhow::Result<Answer> {
    let how = if args.lazy { Unmount::Lazy } else { Unmount::Now };
    for directory in &args.directories {
        let path = std::fs::canonicalize(directory)
            .with_context(|| format!("cannot find \"{}\"", directory.display()))?;
        let mount = mounted_at(&path)?
            .with_context(|| format!("nothing is mounted on \"{}\"", directory.display()))?;
        if !mount.is_ours() {
            bail!(
                "the mount on \"{}\" is not Quire's but \"{}\": use umount",
                directory.display(),
                mount.source
            );
        }
        kernel::mount::unmount(&path, how)?;
    }
    Ok(Answer::Yes)
}

/// What is mounted somewhere.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// Where, as bytes of a path.
    point: Vec<u8>,
    /// Its device number, `MAJOR:MINOR`.
    pub(crate) device: String,
    /// The file system.
    pub(crate) kind: String,
    source: String,
}

impl Mounted {
    /// Where it is mounted.
    pub(crate) fn point(&self) -> &Path {
        Path::new(std::ffi::OsStr::from_bytes(&self.point))
    }

    /// The name of its image, of an overlay.
    pub(crate) fn image(&self) -> Option<&str> {
        self.source.strip_prefix(SOURCE)
    }

    /// Overlays have the name that we gave them. EROFS says what the kernel opened: a descriptor, which only who mounts
    /// by the new mount calls has for a source, or a loop device, whose file then has an image's name.
    pub(crate) fn is_ours(&self) -> bool {
        if self.source.starts_with(SOURCE) {
            return true;
        }
        if self.kind != "erofs" {
            return false;
        }
        let Some(device) = self.source.strip_prefix("/dev/loop") else {
            return self.source.starts_with("/proc/self/fd/");
        };
        let file = std::fs::read_to_string(format!("/sys/block/loop{device}/loop/backing_file"));
        let name = file.unwrap_or_default();
        let name = name.trim_end().rsplit('/').next().unwrap_or_default();
        image::verity::ImageId::from_hex(name.as_bytes()).is_ok()
    }
}

/// What is mounted last on a path.
fn mounted_at(path: &Path) -> anyhow::Result<Option<Mounted>> {
    Ok(mount_of(&mountinfo()?, path.as_os_str().as_bytes()))
}

/// All that is mounted where this process can see it.
pub(crate) fn all_mounted() -> anyhow::Result<Vec<Mounted>> {
    Ok(mounts(&mountinfo()?).collect())
}

fn mountinfo() -> anyhow::Result<Vec<u8>> {
    std::fs::read("/proc/self/mountinfo").context("cannot read mountinfo")
}

/// Source: proc_pid_mountinfo(5). Fields are separated by spaces; `\ooo` stands for bytes that would confuse.
fn mounts(mountinfo: &[u8]) -> impl DoubleEndedIterator<Item = Mounted> + '_ {
    let lines = mountinfo.split(|&byte| byte == b'\n');
    let text = |field: &[u8]| String::from_utf8_lossy(&unescape(field)).into_owned();
    lines.filter_map(move |line| {
        let mut fields = line.split(|&byte| byte == b' ');
        let device = text(fields.nth(2)?);
        let point = unescape(fields.nth(1)?);
        let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
        let (kind, source) = (text(rest.next()?), text(rest.next()?));
        Some(Mounted { point, device, kind, source })
    })
}

fn mount_of(mountinfo: &[u8], path: &[u8]) -> Option<Mounted> {
    mounts(mountinfo).rfind(|mount| mount.point == path)
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
                rest = &rest[3..];
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
    const MOUNTINFO: &[u8] = b"\
        36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
        40 35 0:50 / /mnt/a\\040b ro,relatime - overlay quire:x:latest ro,lowerdir+=y\n\
        41 35 0:51 / /mnt/a\\040b ro,relatime shared:2 master:3 - overlay quire:y:1 ro\n\
        42 35 0:52 / /native ro,relatime - erofs /proc/self/fd/5 ro,user_xattr,acl\n\
        43 35 98:1 / /other ro,relatime - erofs /dev/sda1 ro,user_xattr,acl\n";

    #[test]
    fn the_uppermost_mount_counts() {
        let cases = [
            ("/mnt", Some(("/dev/root", false))),
            ("/mnt/a b", Some(("quire:y:1", true))),
            ("/mnt/a", None),
            ("/native", Some(("/proc/self/fd/5", true))),
            ("/other", Some(("/dev/sda1", false))),
        ];
        for (path, expect) in cases {
            let found = mount_of(MOUNTINFO, path.as_bytes());
            let found = found.as_ref().map(|it| (it.source.as_str(), it.is_ours()));
            assert_eq!(found, expect, "{path}");
        }
    }
}
