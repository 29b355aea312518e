//! `mount` and `umount`.

use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use container::bundle::Access;
use container::root::filestore::Backing as FileBacking;
use container::root::share::Superblock;
use container::root::{Checked, Data, Layers, Root, RootError, Shape, Space, assemble};
use image::erofs::read::Image;
use kernel::cache;
use kernel::features::KernelVersion;
use kernel::mount::{Acl, Attributes, Backing, MountAttrFlags, Unmount};
use store::{Form, OpenImage, OpenOptions, Resolved};

use crate::Answer;
use crate::args::{self, IoWish, MountWord, Trust, VerityPolicy};
use crate::context::Context;
use crate::target;
use crate::writable::Place;

/// What `mountinfo` shows before the name, so that `umount` knows what is ours.
const SOURCE: &str = "quire:";

pub(crate) fn mount(context: &Context, args: &args::Mount) -> anyhow::Result<Answer> {
    // First, since this is the easiest to mend.
    target::check_directory(&args.directory)?;
    let store = context.open(OpenOptions::read())?;
    let found = crate::names::resolve(&store, &args.name)?;
    crate::policy::check(context, &store, &found)?;
    let opened = store.open_image(&found.image)?;
    let map = match &args.userns {
        Some(wish) => wish.fixed()?,
        None => None,
    };
    let trust = crate::owner::trust(&store, &opened, &args.trust, Some(&args.writable))?;
    let place = Place::make(&store, &args.writable, FileBacking::Whole)?;
    let space = space(args.df, place.access())?;
    let flags = flags(&args.options, place.access())?;
    let shape = Shape { writable: place.writable(), map: map.as_ref(), space, places: &[] };
    let root = root(context, &opened, &found, &trust, &shape, std::iter::empty())?;
    root.mount.set(&Attributes { set: flags, ..Attributes::default() })?;
    warm(context, &opened, &root, args.warm);
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

/// What `--df` asks for.
pub(crate) fn space(df: bool, access: Access) -> anyhow::Result<Space> {
    match (df, access) {
        (false, _) => Ok(Space::AsIs),
        (true, Access::ReadOnly) => Ok(Space::Free),
        (true, Access::Writable) => bail!(
            "--df is for roots that nothing can be written to: of this one, `df` shows the writable layer"
        ),
    }
}

/// The root of an image, attached nowhere, when `trust` allows it; `shared` are mounts by its name that are there already.
pub(crate) fn root(
    context: &Context,
    image: &OpenImage,
    found: &Resolved,
    trust: &Trust,
    shape: &Shape<'_>,
    mut shared: impl Iterator<Item = Superblock>,
) -> anyhow::Result<Root> {
    let name = found.name.as_ref().map_or_else(|| image.id.to_string(), ToString::to_string);
    check_form(image, &name)?;
    let checked = check(image, &name, trust)?;
    // As mount.composefs does: ACLs cost a look at every inode's xattrs, so only where there are some.
    let has_acl = may_have_acl(image)?;
    let source = format!("{SOURCE}{name}");
    let domain = domain(context, trust)?;
    let devices: Vec<_> = image.devices.iter().map(|it| it.file.as_fd()).collect();
    let objects = [image.objects.as_fd()];
    let layers = Layers {
        name: &source,
        image: image.image.fd(),
        data: match image.form {
            Form::Objects => Data::Objects(&objects),
            Form::Packed | Form::Tar => Data::Devices(&devices),
        },
        acl: if has_acl { Acl::Keep } else { Acl::Ignore },
        domain: domain.as_deref(),
        backing: match trust.io {
            IoWish::File => Backing::File,
            IoWish::Loop => Backing::Loop,
        },
    };
    // Whoever demands a digest has just verified this file, and nobody knows which one is mounted already.
    let shared = match trust.digest {
        None => shared.find(|it| it.is_of(&layers)),
        Some(_) => None,
    };
    match assemble(&layers, shared, checked, shape) {
        Err(RootError::Mount { source, .. })
            if trust.verity == VerityPolicy::Auto && source.is_for_want_of_verity() =>
        {
            if trust.digest.is_some() {
                verify_image(image)?;
            }
            Ok(assemble(&layers, None, Checked::AtImport, shape)?)
        }
        root => Ok(root?),
    }
}

/// Whether a file of the image may have a POSIX ACL.
pub(crate) fn may_have_acl(image: &OpenImage) -> anyhow::Result<bool> {
    let opened = Image::open(&image.image);
    let opened = opened.with_context(|| format!("cannot read image {}", image.id))?;
    Ok(opened.superblock().may_have_acl())
}

/// The first Linux version whose EROFS knows long prefixes of xattrs, blocks of 512 bytes, and addresses over all devices.
const NATIVE: KernelVersion = KernelVersion { major: 6, minor: 4 };

/// Older kernels would only say that something is invalid.
fn check_form(image: &OpenImage, name: &str) -> anyhow::Result<()> {
    match KernelVersion::running() {
        Some(version) if version < NATIVE && image.form != Form::Objects => bail!(
            "{name} has the form {}, which Linux mounts from {NATIVE} on, and this is {version}: \
             `quire convert --form objects {name}`",
            crate::forms::word(image.form)
        ),
        _ => Ok(()),
    }
}

/// The most bytes of an image file that are read ahead unless somebody says otherwise: `docs/performance/metadata.md` has
/// what it costs and what it saves. Larger ones are of a million files, of which one container uses few.
const WARM_AUTO_MAX: u64 = 32 << 20;

/// Has the kernel begin to read what `--warm` asks for. A mount is as good without.
pub(crate) fn warm(context: &Context, image: &OpenImage, root: &Root, wish: args::Warm) {
    let is_wanted = match wish {
        args::Warm::Auto => image.image.size() <= WARM_AUTO_MAX,
        args::Warm::None => false,
        args::Warm::Metadata => true,
    };
    if !is_wanted {
        return;
    }
    if image.form != Form::Objects && root.image.backing == Backing::Loop {
        if wish == args::Warm::Metadata {
            context.remark(
                "nothing is read ahead: the image is read through a loop device, which has pages of its own",
            );
        }
        return;
    }
    let (file, all) = (image.image.fd(), 0..image.image.size());
    let pages = image.image.size().div_ceil(cache::page_size());
    // What cannot be counted is read ahead: the kernel skips what it has.
    if cache::resident(file, &all).is_ok_and(|there| there >= pages) {
        return;
    }
    if let Err(error) = cache::read_ahead(file, &all) {
        tracing::debug!(image = %image.id, %error, "nothing is read ahead");
    }
}

/// The most bytes in the name of a domain: what an option of a mount takes.
const DOMAIN_MAX: usize = 200;

/// With whom pages are shared.
fn domain(context: &Context, trust: &Trust) -> anyhow::Result<Option<String>> {
    match trust.domain.as_deref() {
        Some("none") => Ok(None),
        Some(name) => {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            if name.is_empty() || name.len() > DOMAIN_MAX || !name.bytes().all(is_plain) {
                bail!(
                    "--domain: \"{}\" is no name of a domain: it has 1 to {DOMAIN_MAX} letters, digits, '-', '_' and '.'",
                    name.escape_debug()
                );
            }
            Ok(Some(name.to_owned()))
        }
        None => {
            let store = context.store_directory()?;
            let stat = std::fs::metadata(&store)
                .with_context(|| format!("cannot look at {}", store.display()))?;
            // The directory, whatever its path is: all images in it were written by who may write there.
            let named = format!("quire {} {}", stat.dev(), stat.ino());
            let digest = store::Digest::sha256(named.as_bytes()).to_string();
            Ok(Some(format!("quire-{}", &digest["sha256:".len()..][..32])))
        }
    }
}

/// Decides whether the image may be used, and who checks what is read from it.
fn check(image: &OpenImage, name: &str, trust: &Trust) -> anyhow::Result<Checked> {
    if let Some(wanted) = &trust.digest
        && *wanted != image.id
    {
        bail!("{name} is image {}, not {wanted} as --digest demands", image.id);
    }
    match (trust.verity, image.kernel_verity) {
        (VerityPolicy::Require | VerityPolicy::Auto, true) => return Ok(Checked::ByKernel),
        (VerityPolicy::Require, false) => {
            bail!(
                "--verity require: image {} has no fs-verity here, so the kernel cannot check what is read: \
                 use a store on a file system with fs-verity (`quire doctor` tells), or --verity auto",
                image.id
            )
        }
        (VerityPolicy::Auto, false) | (VerityPolicy::Off, _) => {}
    }
    if trust.digest.is_some() && !image.kernel_verity {
        verify_image(image)?;
    }
    Ok(Checked::AtImport)
}

/// Hashes the image itself: with its digest demanded, nobody has to trust the store's names.
fn verify_image(image: &OpenImage) -> anyhow::Result<()> {
    let mut hasher = image::verity::Hasher::new(image.id.algorithm());
    let mut buffer = vec![0; 1 << 20];
    let mut offset = 0;
    while offset < image.image.size() {
        let rest = image.image.size() - offset;
        let length = usize::try_from(rest).map_or(buffer.len(), |rest| rest.min(buffer.len()));
        let failed = || format!("cannot read image {}", image.id);
        image.image.read_exact_at(&mut buffer[..length], offset).with_context(failed)?;
        hasher.update(&buffer[..length]);
        offset += length as u64;
    }
    let found = hasher.finish();
    if found != image.id {
        bail!("image {} is damaged, its bytes are those of {found}: run `quire fsck`", image.id);
    }
    Ok(())
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
                "what is mounted on \"{}\" is not Quire's but \"{}\": use umount",
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
        image::verity::ObjectId::from_hex(name.as_bytes()).is_ok()
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
