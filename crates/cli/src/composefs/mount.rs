//! `mount.composefs`: mounts an image with its objects, on the command line or for mount(8).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::Context as _;
use image::erofs::read::{Image, ReadAt};
use image::verity::{Algorithm, ImageId};
use kernel::mount::{
    Acl, Attributes, Credentials, Detached, Durability, ErofsOptions, MountAttrFlags, MountError,
    OverlayOptions, Upper, Verity, XattrNamespace, erofs, overlay,
};
use kernel::verity::Measured;

use super::getopt::{Given, Options, Spec};
use super::{Arguments, Failure, refuse, wrong_option};

pub(super) const USAGE: &str = "[-t composefs] [-o OPTION[,OPTION...]] IMAGE MOUNTPOINT

Options (a backslash escapes the next character):
  basedir=PATH[:PATH...]  Directories of the objects, searched in this order (required)
  digest=DIGEST           Require that the image has this fs-verity digest; implies verity
  verity                  Require that every object has the fs-verity digest in the image
  tryverity               The same, if the kernel supports it
  idmap=PATH              Map owners as in this user namespace, for example /proc/PID/ns/user
  upperdir=PATH           Write changes to this directory; needs workdir
  workdir=PATH            Empty directory on the same file system as upperdir
  ro, rw                  Mount read-only, or not

As a mount helper: mount -t composefs -o basedir=/objects image.cfs /mnt";

const SPEC: Spec = Spec { short: &[(b'h', false), (b't', true), (b'o', true)], long: &[] };

/// The parsed command line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Request {
    basedirs: Vec<OsString>,
    digest: Option<ImageId>,
    verity: Option<VerityUse>,
    idmap: Option<OsString>,
    upper: Option<(OsString, OsString)>,
    read_only: bool,
}

/// Whether fs-verity is used if possible, or required.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum VerityUse {
    Possible,
    Required,
}

pub(super) fn run(arguments: Arguments) -> Result<(), Failure> {
    let mut options = Options::new(SPEC, arguments);
    let mut text = None;
    while let Some(given) = options.next().map_err(|error| wrong_option(&error))? {
        match given {
            Given::Short(b't', kind) if kind != "composefs" => {
                return refuse(format!("Unsupported fs type '{}'", kind.display()));
            }
            // The last `-o` overrides the earlier ones.
            Given::Short(b'o', value) => text = Some(value),
            Given::Short(b'h', _) => {
                drop(writeln!(io::stderr(), "Usage: mount.composefs {USAGE}"));
                return Ok(());
            }
            _ => {}
        }
    }
    let usage = |message: &str| Failure::Usage(message.to_owned());
    let mut others = options.others().into_iter();
    let image = others.next().ok_or_else(|| usage("No source path specified"))?;
    let mountpoint = others.next().ok_or_else(|| usage("No mount path specified"))?;
    let request = Request::parse(text.as_deref())?;
    let failed = || format!("Failed to mount composefs {}", image.display());
    let mount = request.mount(&image)?;
    mount.attach_at(Path::new(&mountpoint)).with_context(failed)?;
    Ok(())
}

impl Request {
    fn parse(text: Option<&OsStr>) -> Result<Self, Failure> {
        let mut request = Self::default();
        let (mut upperdir, mut workdir) = (None, None);
        let mut has_basedir = false;
        for (name, value) in text.map(|text| split(text.as_bytes())).unwrap_or_default() {
            let shown = String::from_utf8_lossy(&name).into_owned();
            let needed = || match value.clone() {
                Some(value) => Ok(OsString::from_vec(value)),
                None => refuse(format!("No value specified for {shown} option")),
            };
            match &name[..] {
                b"basedir" => {
                    let paths = needed()?.into_vec();
                    let paths: Vec<_> = paths.split(|byte| *byte == b':').collect();
                    if paths.iter().any(|path| path.is_empty()) {
                        return refuse("Value for basedir option has incorrect format");
                    }
                    has_basedir = true;
                    request.basedirs =
                        paths.iter().map(|path| OsString::from_vec(path.to_vec())).collect();
                }
                b"digest" => {
                    let value = needed()?;
                    let digest = ImageId::from_hex(value.as_bytes())
                        .ok()
                        .filter(|digest| digest.algorithm() == Algorithm::Sha256);
                    let Some(digest) = digest else {
                        return refuse(format!(
                            "digest \"{}\" is not 64 hexadecimal digits",
                            value.display()
                        ));
                    };
                    request.digest = Some(digest);
                    request.verity = Some(VerityUse::Required);
                }
                b"verity" => request.verity = Some(VerityUse::Required),
                b"tryverity" => request.verity = request.verity.max(Some(VerityUse::Possible)),
                b"idmap" => request.idmap = Some(needed()?),
                b"upperdir" => upperdir = Some(needed()?),
                b"workdir" => workdir = Some(needed()?),
                b"ro" => request.read_only = true,
                b"rw" => request.read_only = false,
                _ => return refuse(format!("Unsupported option {shown}")),
            }
        }
        if !has_basedir {
            return Err(Failure::Usage("No object dirs specified".to_owned()));
        }
        request.upper = match (upperdir, workdir) {
            (None, None) => None,
            (Some(upper), Some(work)) => Some((upper, work)),
            _ => return refuse("Both workdir and upperdir must be specified if used"),
        };
        Ok(request)
    }

    /// Mounts the image without attaching it.
    fn mount(&self, image: &OsStr) -> Result<Detached, Failure> {
        let failed = || format!("Failed to mount composefs {}", image.display());
        let idmap = match &self.idmap {
            Some(path) => Some(
                File::open(path)
                    .with_context(|| format!("Failed to open userns {}", path.display()))?,
            ),
            None => None,
        };
        let file =
            File::open(image).with_context(|| format!("Failed to open {}", image.display()))?;
        if let Some(expected) = &self.digest {
            check_digest(&file, expected).with_context(failed)?;
        }
        let options = ErofsOptions { acl: acls(&file).with_context(failed)?, ..Default::default() };
        let lower = erofs(file.as_fd(), &options).with_context(failed)?.mount;
        if let Some(idmap) = idmap {
            lower.idmap(idmap.as_fd()).with_context(failed)?;
        }
        let basedirs = self.basedirs.iter().map(|path| directory(path));
        let basedirs = basedirs.collect::<Result<Vec<_>, _>>().with_context(failed)?;
        let data: Vec<BorrowedFd<'_>> = basedirs.iter().map(OwnedFd::as_fd).collect();
        let upper = match &self.upper {
            Some((upper, work)) => Some((
                directory(upper).with_context(failed)?,
                directory(work).with_context(failed)?,
            )),
            None => None,
        };
        let stack = |verity| {
            overlay(&OverlayOptions {
                name: "composefs",
                lower: &[lower.as_fd()],
                data: &data,
                upper: upper.as_ref().map(|(upper, work)| Upper {
                    upper: upper.as_fd(),
                    work: work.as_fd(),
                    durability: Durability::Durable,
                }),
                verity,
                xattrs: XattrNamespace::Trusted,
                credentials: Credentials::Mounter,
            })
        };
        let mount = match self.verity {
            None => stack(Verity::Off),
            Some(VerityUse::Required) => stack(Verity::Required),
            Some(VerityUse::Possible) => stack(Verity::Required).or_else(|error| match error {
                // Linux before 6.6 does not know the option.
                MountError::Call { .. } if error.errno() == Some(kernel::Errno::INVAL) => {
                    stack(Verity::Off)
                }
                error => Err(error),
            }),
        };
        let mount = mount.with_context(failed)?;
        if self.read_only {
            let set = MountAttrFlags::MOUNT_ATTR_RDONLY;
            mount.set(&Attributes { set, ..Attributes::default() }).with_context(failed)?;
        }
        Ok(mount)
    }
}

/// Checks that the kernel enforces this digest for the image. The messages are those of the C tool.
fn check_digest(image: &File, expected: &ImageId) -> anyhow::Result<()> {
    match kernel::verity::measure(image.as_fd()) {
        Ok(Some(Measured::Sha256(digest))) if digest[..] == *expected.as_bytes() => Ok(()),
        Ok(Some(_)) => anyhow::bail!("Image has wrong fs-verity"),
        Ok(None) => anyhow::bail!("Image has no fs-verity"),
        Err(error) => Err(error).context("Image has no fs-verity"),
    }
}

/// An image file that is read in place.
struct ImageFile<'a> {
    file: &'a File,
    len: u64,
}

impl ReadAt for ImageFile<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

/// Returns whether the kernel must look for ACLs, according to the image's header.
fn acls(file: &File) -> anyhow::Result<Acl> {
    let len = file.metadata()?.len();
    let image = Image::open(ImageFile { file, len })?;
    match image.superblock().composefs {
        Some(header) if header.has_acl => Ok(Acl::Keep),
        Some(_) => Ok(Acl::Ignore),
        None => anyhow::bail!("it is not a composefs image"),
    }
}

fn directory(path: &OsStr) -> anyhow::Result<OwnedFd> {
    let flags =
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, rustix::fs::Mode::empty());
    opened.map_err(io::Error::from).with_context(|| path.display().to_string())
}

/// Splits options at commas. A backslash escapes the next character; it is removed from values, but not from names.
fn split(text: &[u8]) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let mut options = Vec::new();
    let (mut name, mut value) = (Vec::new(), None::<Vec<u8>>);
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        match (byte, &mut value) {
            (b',', _) => options.push((std::mem::take(&mut name), value.take())),
            (b'=', None) => value = Some(Vec::new()),
            (b'\\', Some(value)) => value.extend(bytes.next()),
            (b'\\', None) => {
                name.push(byte);
                name.extend(bytes.next());
            }
            (byte, Some(value)) => value.push(byte),
            (byte, None) => name.push(byte),
        }
    }
    options.push((name, value));
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_split(text: &str, expect: &[(&str, Option<&str>)]) {
        let found = split(text.as_bytes());
        let found: Vec<_> = found
            .iter()
            .map(|(name, value)| {
                let value = value.as_deref().map(|value| str::from_utf8(value).unwrap());
                (str::from_utf8(name).unwrap(), value)
            })
            .collect();
        assert_eq!(found, expect, "{text}");
    }

    #[test]
    fn options_are_cut_at_commas() {
        check_split("", &[("", None)]);
        check_split("ro,basedir=a", &[("ro", None), ("basedir", Some("a"))]);
        check_split("ro,", &[("ro", None), ("", None)]);
        check_split("a=", &[("a", Some(""))]);
        check_split("a=b=c", &[("a", Some("b=c"))]);
        check_split(r"a=b\,c\\d\:e,f", &[("a", Some(r"b,c\d:e")), ("f", None)]);
        check_split(r"a\=b,c", &[(r"a\=b", None), ("c", None)]);
        check_split(r"a=b\", &[("a", Some("b"))]);
    }

    fn check(options: &str, expect: Result<Request, &str>) {
        let found = Request::parse(Some(OsStr::new(options))).map_err(|failure| match failure {
            Failure::Usage(message) => format!("usage: {message}"),
            Failure::Error(error) => format!("{error:#}"),
        });
        assert_eq!(found, expect.map_err(str::to_owned), "{options}");
    }

    #[test]
    fn options_are_understood_as_c_does() {
        let plain = Request { basedirs: vec!["o".into()], ..Request::default() };
        let hex = "00".repeat(32);
        let digest = Some(ImageId::from_bytes(&[0; 32]).unwrap());
        let required = Some(VerityUse::Required);
        check("basedir=o", Ok(plain.clone()));
        check("basedir=x,basedir=o", Ok(plain.clone()));
        check(
            r"basedir=a\,b:c",
            Ok(Request { basedirs: vec!["a,b".into(), "c".into()], ..plain.clone() }),
        );
        check("basedir=o,ro,rw=5,ro=x", Ok(Request { read_only: true, ..plain.clone() }));
        check("basedir=o,ro,rw", Ok(plain.clone()));
        check(
            "tryverity=x,basedir=o",
            Ok(Request { verity: Some(VerityUse::Possible), ..plain.clone() }),
        );
        check("verity,tryverity,basedir=o", Ok(Request { verity: required, ..plain.clone() }));
        check(
            &format!("basedir=o,digest={hex}"),
            Ok(Request { verity: required, digest, ..plain.clone() }),
        );
        check(
            "basedir=o,upperdir=u,workdir=w,idmap=n",
            Ok(Request { upper: Some(("u".into(), "w".into())), idmap: Some("n".into()), ..plain }),
        );

        check("ro", Err("usage: No object dirs specified"));
        check("basedir", Err("No value specified for basedir option"));
        check("basedir=o,digest", Err("No value specified for digest option"));
        for paths in ["", ":", "a:", ":a", "a::b"] {
            let wrong = "Value for basedir option has incorrect format";
            check(&format!("basedir={paths}"), Err(wrong));
        }
        check("basedir=o,", Err("Unsupported option "));
        check("", Err("Unsupported option "));
        check("noatime,basedir=o", Err("Unsupported option noatime"));
        check(r"base\dir=o", Err(r"Unsupported option base\dir"));
        check("basedir=o,workdir=w", Err("Both workdir and upperdir must be specified if used"));
        // The C tool accepts the first text as if no digest was given, and truncates the second one.
        for digest in ["", &"00".repeat(33), "0x", &"00".repeat(64)] {
            let wrong = format!("digest \"{digest}\" is not 64 hexadecimal digits");
            check(&format!("basedir=o,digest={digest}"), Err(&wrong));
        }
    }
}
