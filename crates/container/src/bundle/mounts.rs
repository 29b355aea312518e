//! Mounts of a container besides its root: files and directories of the host, and new file systems.

use std::num::NonZeroU64;
use std::str::FromStr;

use kernel::mount::Durability;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::bundle::choices::Access;
use crate::bundle::path_resolver::KERNELS;
use crate::bundle::security::Device;
use crate::bundle::spec::SpecMount;
use crate::stored_choices::StoredDurability;

/// A mount in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Volume {
    pub source: MountSource,
    /// Path in the container, from [`destination`].
    pub destination: String,
    pub access: Access,
    /// Whether the files get the owner of the container's program at each start. Requests of Quire 0.1 lack the field.
    #[serde(default)]
    pub chown: bool,
    /// Forbidden uses of the files. Requests of Quire 0.1 lack the field.
    #[serde(default)]
    pub restrictions: Restrictions,
}

/// Options that forbid uses of the files of a mount. Source: mount(8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Restrictions {
    /// No program in it can be executed.
    #[serde(default)]
    pub noexec: bool,
    /// Set-user-id and set-group-id bits have no effect.
    #[serde(default)]
    pub nosuid: bool,
    /// Device files cannot be used.
    #[serde(default)]
    pub nodev: bool,
}

impl Restrictions {
    /// Returns the options for a runtime, without those that `others` has.
    fn options(self, others: &[&str]) -> Vec<&'static str> {
        let all = [("noexec", self.noexec), ("nosuid", self.nosuid), ("nodev", self.nodev)];
        let all = all.into_iter().filter(|it| it.1 && !others.contains(&it.0));
        all.map(|it| it.0).collect()
    }
}

/// Source of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountSource {
    /// A directory or file of the host, by its absolute path.
    Host(String),
    /// A new tmpfs. The owner of its root directory is the container's root.
    Memory {
        /// Size limit in bytes; `None` means half of the machine's memory.
        bytes: Option<NonZeroU64>,
        /// Permission bits of its root directory.
        mode: u32,
        /// Whether programs in it cannot be executed.
        #[serde(default)]
        noexec: bool,
    },
    /// A volume of the store, by its name.
    Named(String),
    /// A volume of this container only. Its name is chosen when the container is made.
    Anonymous(Option<String>),
    /// The directory of a volume, at a path at which the runtime finds it. It is set later.
    Directory(String),
}

/// A mount that the caller requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountRequest {
    pub kind: MountKind,
    /// Path in the container, from [`destination`].
    pub destination: String,
    pub access: Access,
    /// Whether the caller requests SELinux labels. Quire sets none.
    pub relabels: bool,
}

/// Source of a requested mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountKind {
    Memory {
        /// Size limit in bytes.
        bytes: Option<NonZeroU64>,
        /// Permission bits of its root directory.
        mode: u32,
        /// Whether programs in it cannot be executed. Requests of Quire 0.1 lack the field.
        #[serde(default)]
        noexec: bool,
    },
    /// A file system in a file of the container's folder.
    Filestore {
        /// Size in bytes.
        bytes: Option<NonZeroU64>,
        /// Permission bits of its root directory.
        mode: u32,
        /// Whether writes survive a crash of the host.
        #[serde(with = "StoredDurability")]
        durability: Durability,
    },
    /// A directory or file of the host, by its absolute path.
    Host(String),
}

/// Reason why a mount is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// The text is not `[SOURCE:]CONTAINER[:OPTION,…]` with absolute paths.
    #[error(
        "\"{0}\" is not a volume: write HOST:CONTAINER[:ro] with absolute paths, NAME:CONTAINER for a named volume, or \
        CONTAINER for one of the container's own"
    )]
    Syntax(String),
    /// The source is neither a path nor a name.
    #[error(
        "\"{0}\" is not a name of a volume, which has 1 to 64 letters, digits, `-`, `_` and `.`: for a directory \
        write ./{0}, or an absolute path"
    )]
    Name(String),
    /// An option contradicts or repeats another one.
    #[error("the volume option \"{0}\" contradicts or repeats another one")]
    Contradiction(String),
    /// The option is unknown, or Quire does not support it.
    #[error(
        "a volume has no option \"{0}\": use ro, rw, noexec, nosuid, nodev, U, z or Z (z and Z have no effect, because \
        Quire does not change labels)"
    )]
    Option(String),
    /// The destination is not an absolute path without `..`.
    #[error("\"{0}\" is not a path in a container: write an absolute path without \"..\"")]
    Destination(String),
    /// The container needs the destination for another purpose.
    #[error("cannot mount on {destination} in a container: {reason}")]
    Taken {
        destination: String,
        /// Purpose of the destination.
        reason: &'static str,
    },
    /// The path on the host does not exist.
    #[error("cannot mount \"{path}\" on {destination}: the host has no such file or directory")]
    Absent { path: String, destination: String },
    /// Two mounts have the same destination.
    #[error("two mounts have the destination {0}: one would hide the other")]
    Twice(String),
}

impl FromStr for Volume {
    type Err = VolumeError;

    /// Parses `[SOURCE:]DESTINATION[:OPTION,…]`, as Docker and podman do. The options `z` and `Z` ask for SELinux
    /// labels, which Quire does not set. They are accepted because scripts for Fedora give them to every volume.
    fn from_str(text: &str) -> Result<Self, VolumeError> {
        let syntax = || VolumeError::Syntax(text.to_owned());
        let (source, rest) = match text.split_once(':') {
            Some((source, rest)) => (Some(source), rest),
            None => (None, text),
        };
        let (to, options) = rest.split_once(':').unwrap_or((rest, "rw"));
        let (mut access, mut label, mut chown, mut exec) = (None, None, None, None);
        let mut restrictions = Restrictions::default();
        for option in options.split(',') {
            let is_contrary = match option {
                "ro" => access.replace(Access::ReadOnly).is_some(),
                "rw" => access.replace(Access::Writable).is_some(),
                "z" | "Z" => label.replace(()).is_some(),
                "U" => chown.replace(()).is_some(),
                "exec" => exec.replace(true).is_some(),
                "noexec" => exec.replace(false).is_some(),
                "nosuid" => std::mem::replace(&mut restrictions.nosuid, true),
                "nodev" => std::mem::replace(&mut restrictions.nodev, true),
                _ => return Err(VolumeError::Option(option.to_owned())),
            };
            // Source: podman, pkg/util/mount_opts.go and containers/common, pkg/parse.
            if is_contrary {
                return Err(VolumeError::Contradiction(option.to_owned()));
            }
        }
        restrictions.noexec = exec == Some(false);
        let access = access.unwrap_or(Access::Writable);
        if !to.starts_with('/') || source == Some("") {
            return Err(syntax());
        }
        let source = match source {
            None => MountSource::Anonymous(None),
            Some(path) if path.starts_with('/') => MountSource::Host(path.to_owned()),
            Some(name) if store::check_id(name).is_ok() => MountSource::Named(name.to_owned()),
            Some(name) => return Err(VolumeError::Name(name.to_owned())),
        };
        let (destination, chown) = (destination(to)?, chown.is_some());
        Ok(Self { source, destination, access, chown, restrictions })
    }
}

/// Checks a destination in a container and removes superfluous slashes and dots.
pub fn destination(text: &str) -> Result<String, VolumeError> {
    let parts: Vec<_> = text.split('/').filter(|it| !matches!(*it, "" | ".")).collect();
    if !text.starts_with('/') || parts.contains(&"..") {
        return Err(VolumeError::Destination(text.to_owned()));
    }
    let reason = match parts[..] {
        [] => "it is the root",
        ["proc", ..] => "the kernel provides it, and it describes the container's processes",
        ["sys"] => "the kernel provides it, and it describes devices",
        ["dev"] => "it holds the container's devices",
        ["dev", "pts", ..] => "it holds the container's terminals",
        _ => return Ok(format!("/{}", parts.join("/"))),
    };
    Err(VolumeError::Taken { destination: format!("/{}", parts.join("/")), reason })
}

/// Sorts mounts so that none hides another one, and checks that no two have the same destination.
pub fn arrange(volumes: &mut [Volume]) -> Result<(), VolumeError> {
    // Mounts closer to the root come first. Apart from that, the order is kept.
    volumes.sort_by_key(|it| it.destination.matches('/').count());
    for (at, one) in volumes.iter().enumerate() {
        if volumes[..at].iter().any(|it| it.destination == one.destination) {
            return Err(VolumeError::Twice(one.destination.clone()));
        }
    }
    Ok(())
}

/// Returns paths that must exist in a read-only root for a container's mounts and its working directory, because no
/// runtime can create them there. Paths of directories end with a slash. Paths below other mounts are left out.
#[must_use]
pub fn mount_points(volumes: &[Volume], mounts: &[MountRequest], working_dir: &str) -> Vec<String> {
    let is_directory = |host: &str| std::fs::metadata(host).is_ok_and(|it| it.is_dir());
    let volumes = volumes.iter().map(|it| match &it.source {
        MountSource::Host(path) => (it.destination.as_str(), is_directory(path)),
        MountSource::Memory { .. }
        | MountSource::Named(_)
        | MountSource::Anonymous(_)
        | MountSource::Directory(_) => (it.destination.as_str(), true),
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

/// Paths in the root at which Quire or the runtime mounts or creates files later.
#[derive(Debug)]
pub struct MountPoints<'a> {
    /// Paths that must exist in the root.
    pub places: Vec<&'a str>,
    /// Paths that the caller named, where Quire puts no other files.
    pub claimed: Vec<&'a str>,
}

impl<'a> MountPoints<'a> {
    /// Combines the caller's mounts at `points`, from [`mount_points`], with Quire's mounts at `files`.
    #[must_use]
    pub fn new(
        access: Access,
        points: &'a [String],
        devices: &'a [Device],
        files: &[&'a str],
    ) -> Self {
        let points = points.iter().map(String::as_str);
        let devices = devices.iter().map(Device::path);
        // In a read-only root, runtimes cannot create mount points.
        let made = points.clone().filter(|_| access == Access::ReadOnly);
        Self {
            places: made.chain(files.iter().copied()).collect(),
            claimed: points.chain(devices).collect(),
        }
    }
}

impl Volume {
    /// Checks that a source on the host exists, because runtimes report a missing source less clearly.
    pub fn check(&self) -> Result<(), VolumeError> {
        let MountSource::Host(path) = &self.source else { return Ok(()) };
        match rustix::fs::stat(path) {
            Err(Errno::NOENT | Errno::NOTDIR) => Err(VolumeError::Absent {
                path: path.clone(),
                destination: self.destination.clone(),
            }),
            // A runtime may have access to files that this process cannot look up.
            _ => Ok(()),
        }
    }

    /// Returns the mount's entry in the runtime configuration.
    pub(crate) fn entry(&self) -> SpecMount {
        let access = if self.access == Access::ReadOnly { "ro" } else { "rw" };
        let destination = &self.destination;
        let with =
            |options: &[&'static str]| [options, &self.restrictions.options(options)].concat();
        match &self.source {
            MountSource::Host(path) => {
                SpecMount::new(destination, "bind", path, &with(&["rbind", "rprivate", access]))
            }
            // Source of the options: podman-run(1), --volume.
            MountSource::Directory(path) => {
                let options = ["rbind", "rprivate", "nosuid", "nodev", access];
                SpecMount::new(destination, "bind", path, &with(&options))
            }
            // The directories of volumes are found before the configuration is made. Without a path, a runtime
            // refuses the entry.
            MountSource::Named(_) | MountSource::Anonymous(_) => {
                SpecMount::new(destination, "bind", "", &["rbind", access])
            }
            MountSource::Memory { bytes, mode, noexec } => {
                let mut options = vec!["nosuid", "nodev", access];
                options.extend(noexec.then_some("noexec"));
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

/// Returns the maximum number of files in a tmpfs of this size. The kernel does not count inodes as bytes of a tmpfs,
/// and each takes about one KiB.
pub(crate) fn files_of(bytes: NonZeroU64) -> Option<NonZeroU64> {
    NonZeroU64::new((bytes.get() / 1024).max(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_two_absolute_paths() {
        let volume = |source: &str, destination: &str, access| {
            let source = MountSource::Host(source.to_owned());
            Ok(Volume {
                source,
                destination: destination.to_owned(),
                access,
                chown: false,
                restrictions: Restrictions::default(),
            })
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
        for text in ["", "a", ":/b", "/a:b", "/a:ro", "a:b"] {
            assert_eq!(text.parse::<Volume>(), Err(VolumeError::Syntax(text.to_owned())), "{text}");
        }
        for name in ["a b", "a/b", ".a", "-a"] {
            let error = format!("{name}:/b").parse::<Volume>().unwrap_err();
            assert_eq!(error, VolumeError::Name(name.to_owned()));
            assert!(error.to_string().contains(&format!("write ./{name}, or an")), "{error}");
        }
        let refused = [
            ("/a:/b:zz", "zz"),
            ("/a:/b:z,", ""),
            ("/a:/b:ro:rw", "ro:rw"),
            ("/a:/b:ro:z", "ro:z"),
            ("/a:/b:u", "u"),
            ("/a:/b:", ""),
        ];
        for (text, option) in refused {
            assert_eq!(text.parse::<Volume>(), Err(VolumeError::Option(option.to_owned())));
        }
        for (text, option) in
            [("/a:/b:z,Z", "Z"), ("/a:/b:ro,z,ro", "ro"), ("/a:/b:ro,rw", "rw"), ("/a:/b:U,U", "U")]
        {
            let expect = VolumeError::Contradiction(option.to_owned());
            assert_eq!(text.parse::<Volume>(), Err(expect), "{text}");
        }
    }

    /// Source: podman-run(1), --volume.
    #[test]
    fn volumes_of_the_store_have_names_or_none() {
        let volume = |source, access, chown| {
            Ok(Volume {
                source,
                destination: "/b".to_owned(),
                access,
                chown,
                restrictions: Restrictions::default(),
            })
        };
        let named = MountSource::Named("data.1".to_owned());
        let (rw, ro) = (Access::Writable, Access::ReadOnly);
        let cases = [
            ("data.1:/b", volume(named.clone(), rw, false)),
            ("data.1:/b:ro,Z", volume(named.clone(), ro, false)),
            ("data.1:/b:U", volume(named, rw, true)),
            ("/b", volume(MountSource::Anonymous(None), rw, false)),
            ("/a:/b:U,ro", volume(MountSource::Host("/a".to_owned()), ro, true)),
        ];
        for (text, expect) in cases {
            assert_eq!(text.parse(), expect, "{text}");
        }
        for text in ["/", "/proc"] {
            assert!(matches!(text.parse::<Volume>(), Err(VolumeError::Taken { .. })), "{text}");
        }
    }

    /// Source: podman-run(1), --volume.
    #[test]
    fn uses_of_files_are_restricted() {
        let options = |text: &str| {
            let mut volume: Volume = text.parse().unwrap();
            if let MountSource::Named(name) = &volume.source {
                volume.source = MountSource::Directory(name.clone());
            }
            volume.entry().options
        };
        assert_eq!(options("/a:/b:noexec"), ["rbind", "rprivate", "rw", "noexec"]);
        assert_eq!(
            options("/a:/b:nodev,ro,nosuid"),
            ["rbind", "rprivate", "ro", "nosuid", "nodev"]
        );
        let of_volume = ["rbind", "rprivate", "nosuid", "nodev", "rw"];
        assert_eq!(options("a:/b:nosuid,exec"), of_volume);
        assert_eq!(options("a:/b:z,noexec"), [&of_volume[..], &["noexec"]].concat());
        for text in ["/a:/b:exec,noexec", "/a:/b:noexec,noexec", "/a:/b:nodev,nodev"] {
            assert!(matches!(text.parse::<Volume>(), Err(VolumeError::Contradiction(_))), "{text}");
        }
    }

    /// Source: podman-run(1), --volume and --tmpfs.
    #[test]
    fn directories_of_volumes_have_no_devices_and_set_uid_files() {
        let of = |source| Volume {
            source,
            destination: "/b".to_owned(),
            access: Access::Writable,
            chown: false,
            restrictions: Restrictions::default(),
        };
        let entry = of(MountSource::Directory("/v".to_owned())).entry();
        assert_eq!(entry.options, ["rbind", "rprivate", "nosuid", "nodev", "rw"]);
        let memory = |noexec| of(MountSource::Memory { bytes: None, mode: 0o755, noexec }).entry();
        assert_eq!(memory(true).options, ["nosuid", "nodev", "rw", "noexec", "mode=755"]);
        assert_eq!(memory(false).options, ["nosuid", "nodev", "rw", "mode=755"]);
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
            let expect = format!("cannot mount \"{}\" on /x: the host has no", path(name));
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
        let memory = MountRequest {
            kind: MountKind::Memory { bytes: None, mode: 0o755, noexec: false },
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
