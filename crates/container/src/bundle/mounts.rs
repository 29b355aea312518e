//! A container's mounts besides its root: files and directories of the host, and file systems of its own.

use std::num::NonZeroU64;
use std::str::FromStr;

use kernel::mount::Durability;
use rustix::io::Errno;

use crate::bundle::choices::Access;
use crate::bundle::security::Device;
use crate::bundle::spec::SpecMount;
use crate::bundle::view::KERNELS;

/// Something that is mounted in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// What.
    pub source: Source,
    /// Where, from [`destination`].
    pub destination: String,
    /// Whether it can be written there.
    pub access: Access,
}

/// Source of the mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A directory or file of the host, by its absolute path.
    Host(String),
    /// A tmpfs of the container's own. Its root directory is the container's root's.
    Memory {
        /// The most that it may hold; none means half of the machine's memory.
        bytes: Option<NonZeroU64>,
        /// Permission bits of its root directory.
        mode: u32,
    },
}

/// A mount that the caller asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountWish {
    /// Source of the mount.
    pub kind: MountKind,
    /// Where, from [`destination`].
    pub destination: String,
    /// Whether it can be written there.
    pub access: Access,
    /// Whether SELinux labels are asked for. Quire sets none.
    pub relabels: bool,
}

/// Source that the caller asks to mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountKind {
    /// A tmpfs.
    Memory {
        /// The most that it may hold.
        bytes: Option<NonZeroU64>,
        /// Permission bits of its root directory.
        mode: u32,
    },
    /// A file system in a file of the container's folder.
    Filestore {
        /// Its size.
        bytes: Option<NonZeroU64>,
        /// Permission bits of its root directory.
        mode: u32,
        /// Whether writes survive a crash of the host.
        durability: Durability,
    },
    /// A directory or file of the host, by its absolute path.
    Host(String),
}

/// A mount that is not to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// Without both paths.
    #[error(
        "\"{0}\" is not a volume: write HOST:CONTAINER[:ro], both absolute paths (`--mount type=self,dst=PATH` gives \
         the container a file system of its own)"
    )]
    Syntax(String),
    /// A name in the place of the path on the host.
    #[error(
        "named volumes are not supported: for a directory write ./{0}, or an absolute path; `--mount \
         type=self,dst=PATH` is a file system that is removed with the container"
    )]
    Named(String),
    /// Two options of which one would win.
    #[error("the volume option \"{0}\" contradicts another one, or repeats it")]
    Contradiction(String),
    /// An option of Docker's that has no meaning here.
    #[error(
        "a volume has no option \"{0}\": use ro, rw, z or Z (z and Z have no effect; files keep their labels and owners)"
    )]
    Option(String),
    /// Not an absolute path without `..`.
    #[error("\"{0}\" is not a path in a container: write an absolute path without \"..\"")]
    Destination(String),
    /// A place that the container needs for something else.
    #[error("cannot mount on {destination} in a container: {reason}")]
    Taken {
        /// Where.
        destination: String,
        /// Use that the container has for it.
        reason: &'static str,
    },
    /// Nothing is at the path on the host.
    #[error("cannot mount \"{path}\" on {destination}: this host has no such file or directory")]
    Absent {
        /// The path on the host.
        path: String,
        /// Where.
        destination: String,
    },
    /// Two at one place.
    #[error("two mounts are to be on {0}: one would hide the other")]
    Twice(String),
}

impl FromStr for Volume {
    type Err = VolumeError;

    /// `SOURCE:DESTINATION[:OPTION,…]`, as Docker and podman have it. The options `z` and `Z` ask for SELinux labels, which
    /// Quire does not set: scripts for Fedora give them to every volume.
    fn from_str(text: &str) -> Result<Self, VolumeError> {
        let syntax = || VolumeError::Syntax(text.to_owned());
        let (source, rest) = text.split_once(':').ok_or_else(syntax)?;
        let (to, options) = rest.split_once(':').unwrap_or((rest, "rw"));
        let (mut access, mut label) = (None, None);
        for option in options.split(',') {
            let is_contrary = match option {
                "ro" => access.replace(Access::ReadOnly).is_some(),
                "rw" => access.replace(Access::Writable).is_some(),
                "z" | "Z" => label.replace(()).is_some(),
                _ => return Err(VolumeError::Option(option.to_owned())),
            };
            // Source: podman, pkg/util/mount_opts.go and containers/common, pkg/parse.
            if is_contrary {
                return Err(VolumeError::Contradiction(option.to_owned()));
            }
        }
        let access = access.unwrap_or(Access::Writable);
        if !to.starts_with('/') || source.is_empty() {
            return Err(syntax());
        }
        if !source.starts_with('/') {
            return Err(VolumeError::Named(source.to_owned()));
        }
        let source = Source::Host(source.to_owned());
        Ok(Self { source, destination: destination(to)?, access })
    }
}

/// A place in a container where something can be mounted, without superfluous slashes and dots.
///
/// # Errors
/// [`VolumeError::Destination`] and [`VolumeError::Taken`].
pub fn destination(text: &str) -> Result<String, VolumeError> {
    let parts: Vec<_> = text.split('/').filter(|it| !matches!(*it, "" | ".")).collect();
    if !text.starts_with('/') || parts.contains(&"..") {
        return Err(VolumeError::Destination(text.to_owned()));
    }
    let reason = match parts[..] {
        [] => "it is the root itself",
        ["proc", ..] => "it is the kernel's, and tells about the container's processes",
        ["sys"] => "it is the kernel's, and tells about devices",
        ["dev"] => "it has the container's devices",
        ["dev", "pts", ..] => "it has the container's terminals",
        _ => return Ok(format!("/{}", parts.join("/"))),
    };
    Err(VolumeError::Taken { destination: format!("/{}", parts.join("/")), reason })
}

/// Puts mounts into an order in which none hides another.
///
/// # Errors
/// [`VolumeError::Twice`].
pub fn arrange(volumes: &mut [Volume]) -> Result<(), VolumeError> {
    // What is above comes first; otherwise as given.
    volumes.sort_by_key(|it| it.destination.matches('/').count());
    for (at, one) in volumes.iter().enumerate() {
        if volumes[..at].iter().any(|it| it.destination == one.destination) {
            return Err(VolumeError::Twice(one.destination.clone()));
        }
    }
    Ok(())
}

/// What a read-only root has to have for a container's mounts and its working directory, since no runtime can make it there.
/// Paths of directories end with a slash. Paths below other mounts are left out.
#[must_use]
pub fn mount_points(volumes: &[Volume], mounts: &[MountWish], working_dir: &str) -> Vec<String> {
    let is_directory = |host: &str| std::fs::metadata(host).is_ok_and(|it| it.is_dir());
    let volumes = volumes.iter().map(|it| match &it.source {
        Source::Host(path) => (it.destination.as_str(), is_directory(path)),
        Source::Memory { .. } => (it.destination.as_str(), true),
    });
    let mounts = mounts.iter().map(|it| match &it.kind {
        MountKind::Host(path) => (it.destination.as_str(), is_directory(path)),
        MountKind::Memory { .. } | MountKind::Filestore { .. } => (it.destination.as_str(), true),
    });
    let wanted: Vec<_> = volumes.chain(mounts).collect();
    let is_below = |path: &str, mount: &str| {
        path.strip_prefix(mount).is_some_and(|it| it.starts_with('/') && it.len() > 1)
    };
    let is_covered = |path: &str| {
        let mut mounts = KERNELS.into_iter().chain(wanted.iter().map(|it| it.0));
        mounts.any(|it| is_below(path, it))
    };
    let working_dir = Some((working_dir, true)).filter(|it| it.0.starts_with('/'));
    let kernels = KERNELS.map(|it| (it, true));
    let points = kernels.into_iter().chain(wanted.iter().copied()).chain(working_dir);
    points
        .filter(|it| !is_covered(it.0))
        .map(|(path, is_directory)| {
            let end = if is_directory && !path.ends_with('/') { "/" } else { "" };
            format!("{path}{end}")
        })
        .collect()
}

/// Paths in the root at which something is mounted or made later.
#[derive(Debug)]
pub struct MountPoints<'a> {
    /// Those that the root has to have.
    pub places: Vec<&'a str>,
    /// Those that the caller named, where Quire puts nothing else.
    pub claimed: Vec<&'a str>,
}

impl<'a> MountPoints<'a> {
    /// The caller's mounts are at `points`, from [`mount_points`], and Quire's own at `files`.
    #[must_use]
    pub fn new(
        access: Access,
        points: &'a [String],
        devices: &'a [Device],
        files: &[&'a str],
    ) -> Self {
        let points = points.iter().map(String::as_str);
        let devices = devices.iter().map(Device::path);
        // No runtime can make them in a read-only root.
        let made = points.clone().filter(|_| access == Access::ReadOnly);
        Self {
            places: made.chain(files.iter().copied()).collect(),
            claimed: points.chain(devices).collect(),
        }
    }
}

impl Volume {
    /// Looks for what is to be mounted, if it is the host's: runtimes tell less of what is missing.
    ///
    /// # Errors
    /// [`VolumeError::Absent`].
    pub fn check(&self) -> Result<(), VolumeError> {
        let Source::Host(path) = &self.source else { return Ok(()) };
        match rustix::fs::stat(path) {
            Err(Errno::NOENT | Errno::NOTDIR) => Err(VolumeError::Absent {
                path: path.clone(),
                destination: self.destination.clone(),
            }),
            // What this process cannot look at, a runtime may.
            _ => Ok(()),
        }
    }

    /// As runtimes take it.
    pub(crate) fn entry(&self) -> SpecMount {
        let access = if self.access == Access::ReadOnly { "ro" } else { "rw" };
        let destination = &self.destination;
        match &self.source {
            Source::Host(path) => {
                SpecMount::new(destination, "bind", path, &["rbind", "rprivate", access])
            }
            Source::Memory { bytes, mode } => {
                let options = ["nosuid", "nodev", access];
                let mut mount = SpecMount::new(destination, "tmpfs", "tmpfs", &options);
                mount.options.push(format!("mode={mode:o}"));
                mount.options.extend(bytes.map(|bytes| format!("size={bytes}")));
                let files = bytes.and_then(files_of);
                mount.options.extend(files.map(|files| format!("nr_inodes={files}")));
                mount
            }
        }
    }
}

/// The most files in so many bytes of memory. The kernel counts no inode as bytes of a tmpfs, and each takes about one KiB.
pub(crate) fn files_of(bytes: NonZeroU64) -> Option<NonZeroU64> {
    NonZeroU64::new((bytes.get() / 1024).max(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_two_absolute_paths() {
        let volume = |source: &str, destination: &str, access| {
            let source = Source::Host(source.to_owned());
            Ok(Volume { source, destination: destination.to_owned(), access })
        };
        let cases = [
            ("/a:/b", volume("/a", "/b", Access::Writable)),
            ("/a:/b:rw", volume("/a", "/b", Access::Writable)),
            ("/a b:/c/d:ro", volume("/a b", "/c/d", Access::ReadOnly)),
            // Source: podman-run(1), --volume.
            ("/a:/b:z", volume("/a", "/b", Access::Writable)),
            ("/a:/b:Z", volume("/a", "/b", Access::Writable)),
            ("/a:/b:ro,z", volume("/a", "/b", Access::ReadOnly)),
            ("/a:/b:Z,ro", volume("/a", "/b", Access::ReadOnly)),
            ("/a:/b:rw,z", volume("/a", "/b", Access::Writable)),
            ("/a:/b//./c/", volume("/a", "/b/c", Access::Writable)),
        ];
        for (text, expect) in cases {
            assert_eq!(text.parse(), expect, "{text}");
        }
        for text in ["", "/a", ":/b", "/a:b", "/a:ro"] {
            assert_eq!(text.parse::<Volume>(), Err(VolumeError::Syntax(text.to_owned())), "{text}");
        }
        assert_eq!("a:/b".parse::<Volume>(), Err(VolumeError::Named("a".to_owned())));
        assert!(VolumeError::Named("dirx".to_owned()).to_string().contains("write ./dirx, or an"));
        let refused = [
            ("/a:/b:zz", "zz"),
            ("/a:/b:z,", ""),
            ("/a:/b:ro:rw", "ro:rw"),
            ("/a:/b:ro:z", "ro:z"),
            ("/a:/b:U", "U"),
            ("/a:/b:", ""),
        ];
        for (text, option) in refused {
            assert_eq!(text.parse::<Volume>(), Err(VolumeError::Option(option.to_owned())));
        }
        for (text, option) in
            [("/a:/b:z,Z", "Z"), ("/a:/b:ro,z,ro", "ro"), ("/a:/b:ro,rw", "rw"), ("/a:/b:z,z", "z")]
        {
            let expect = VolumeError::Contradiction(option.to_owned());
            assert_eq!(text.parse::<Volume>(), Err(expect), "{text}");
        }
    }

    #[test]
    fn a_path_that_is_missing_on_the_host_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("file"), "").unwrap();
        let check = |name: &str| format!("{}:/x", path(name)).parse::<Volume>().unwrap().check();
        assert_eq!(check(""), Ok(()));
        assert_eq!(check("file"), Ok(()));
        for name in ["none", "file/none"] {
            let error = check(name).unwrap_err();
            let expect = format!("cannot mount \"{}\" on /x: this host has no", path(name));
            assert!(error.to_string().starts_with(&expect), "{error}");
        }
    }

    #[test]
    fn some_places_are_taken() {
        for text in ["/a", "/sys/fs/cgroup", "/dev/shm", "/process", "/devices"] {
            assert_eq!(destination(text), Ok(text.to_owned()));
        }
        for text in ["/", "//", "/.", "/proc", "/proc/", "//proc/sys", "/sys/.", "/dev", "/dev/pts"]
        {
            let found = destination(text);
            assert!(matches!(found, Err(VolumeError::Taken { .. })), "{text}: {found:?}");
        }
        for text in ["", "a", "./a", "/a/../proc", ".."] {
            assert_eq!(destination(text), Err(VolumeError::Destination(text.to_owned())));
        }
    }

    #[test]
    fn mount_points_are_of_the_type_of_what_is_mounted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file").display().to_string();
        std::fs::write(&file, "").unwrap();
        let volumes = [
            format!("{file}:/a/file"),
            format!("{}:/data", folder.path().display()),
            format!("{file}:/data/file"),
            "/tmp:/dev/shm".to_owned(),
        ];
        let volumes: Vec<Volume> = volumes.iter().map(|it| it.parse().unwrap()).collect();
        let memory = MountWish {
            kind: MountKind::Memory { bytes: None, mode: 0o755 },
            destination: "/cache".to_owned(),
            access: Access::Writable,
            relabels: false,
        };
        let points =
            |working_dir| mount_points(&volumes, std::slice::from_ref(&memory), working_dir);
        let expect = ["/proc/", "/sys/", "/dev/", "/a/file", "/data/", "/cache/"];
        assert_eq!(points("/job"), [&expect[..], &["/job/"]].concat());
        for other in ["", "job", "/data/job", "/proc/self"] {
            assert_eq!(points(other), expect, "{other}");
        }
    }

    #[test]
    fn none_hides_another() {
        let volume = |text: &str| text.parse::<Volume>().unwrap();
        let mut volumes = ["/1:/a/b", "/2:/c", "/3:/a", "/4:/a/b/c", "/5:/b"].map(volume);
        arrange(&mut volumes).unwrap();
        assert_eq!(volumes, ["/2:/c", "/3:/a", "/5:/b", "/1:/a/b", "/4:/a/b/c"].map(volume));
        let mut twice = ["/1:/a/b", "/2:/a//b/"].map(volume);
        assert_eq!(arrange(&mut twice), Err(VolumeError::Twice("/a/b".to_owned())));
    }
}
