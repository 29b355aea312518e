//! Checks the paths at which a runtime mounts and creates files in a container's root.
//!
//! An image determines the files of its root, and a container those of its next start. Some runtimes follow links of
//! the root while they prepare it, and then write to the host (crun before 1.28: CVE-2026-47766; runc before 1.3.6:
//! CVE-2026-41579). So Quire gives a runtime only paths without links, and only a root in which the kernel's mount
//! points are directories or absent.

use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::bundle::mounts::{VolumeError, destination};
use crate::bundle::path_resolver::{KERNELS, LinkTarget, TargetState, View};
use crate::bundle::security::{Device, OwnDevice};
use crate::bundle::spec::{RuntimeSpec, SpecMount};

/// A destination that the container's root does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DestinationError {
    /// The mount point of a kernel file system is not a directory.
    #[error(
        "{path} in the container's root is {found}: runtimes mount and write there, so it must be \
        a directory or absent. Remove it from the image, or from the \"upper\" of --writable dir="
    )]
    NotDirectory {
        path: &'static str,
        /// Type of the file, such as `a file`.
        found: String,
    },
    /// The path cannot be looked up.
    #[error("cannot look up {path} in the container's root")]
    Look { path: String, source: Errno },
    /// Links lead the destination to a path that the container needs.
    #[error(
        "a link in the container's root redirects {path} to {target}: {reason}. Choose another \
        destination, or remove the link from the image"
    )]
    Led {
        /// Path as given by the caller.
        path: String,
        /// The path without links.
        target: String,
        /// Reason why the path cannot be used.
        reason: String,
    },
    /// The destination does not exist and cannot be created.
    #[error(
        "cannot use {path} in the container: it does not exist, and cannot be made in a read-only file system{}",
        and_led(path, target)
    )]
    Absent {
        /// Path as given by the caller.
        path: String,
        /// The path without links.
        target: String,
    },
    /// The mount would hide another mount.
    #[error(
        "the mount on {path}{} would hide the one on {hidden}: choose another destination for one \
        of them",
        and_led(path, target)
    )]
    Hides {
        /// Path as given by the caller.
        path: String,
        /// The path without links.
        target: String,
        /// Path of the other mount.
        hidden: String,
    },
    /// The container masks the destination.
    #[error(
        "cannot mount on {path} in a container: the container hides {masked} and mounts below it. \
        Choose another destination (only --privileged shows {masked})"
    )]
    Masked {
        /// Path as given by the caller, which has no links.
        path: String,
        masked: String,
    },
    /// The device has the path of another file.
    #[error(
        "--device: the container has another file at {path}{}: choose another path, for example \
        --device HOST:/dev/NAME",
        and_led(path, target)
    )]
    Exists {
        /// Path as given by the caller.
        path: String,
        /// The path without links.
        target: String,
    },
    /// The device would be in a directory where only the kernel or the host creates files.
    #[error(
        "--device: {path} is in {place}: choose another path, for example --device HOST:/dev/NAME"
    )]
    NoPlace {
        /// Path as given by the caller.
        path: String,
        /// Description of the directory.
        place: &'static str,
    },
}

fn and_led(path: &str, target: &str) -> String {
    if path == target { String::new() } else { format!(" (through links to {target})") }
}

/// Checks that `/proc`, `/sys` and `/dev` are directories or absent, so that mounts and files cannot be redirected.
pub(crate) fn check_kernels(root: BorrowedFd<'_>) -> Result<(), DestinationError> {
    for path in KERNELS {
        let failed = |source| DestinationError::Look { path: path.to_owned(), source };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match rustix::fs::openat(root, &path[1..], flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(failed(errno)),
        };
        let stat = rustix::fs::fstat(&fd).map_err(failed)?;
        let found = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => continue,
            FileType::Symlink => {
                let link = rustix::fs::readlinkat(&fd, "", Vec::new()).map_err(failed)?;
                format!("a symbolic link to \"{}\"", link.to_bytes().escape_ascii())
            }
            FileType::RegularFile => "a file".to_owned(),
            FileType::CharacterDevice | FileType::BlockDevice => "a device".to_owned(),
            FileType::Fifo => "a pipe".to_owned(),
            _ => "not a directory".to_owned(),
        };
        return Err(DestinationError::NotDirectory { path, found });
    }
    Ok(())
}

/// Replaces the destinations of a bundle's last `count` mounts by paths without links, and sorts the mounts so that
/// none hides another.
pub(crate) fn resolve_mounts(
    root: BorrowedFd<'_>,
    spec: &mut RuntimeSpec,
    count: usize,
) -> Result<(), DestinationError> {
    let asked = spec.mounts.split_off(spec.mounts.len().saturating_sub(count));
    let mut view = View::of_bundle(root, spec);
    let mut sorted = Vec::new();
    for mount in asked {
        let LinkTarget { path, .. } = target(&view, &mount.destination)?;
        sorted.push((path.matches('/').count(), mount));
    }
    sorted.sort_by_key(|it| it.0);
    for (_, mount) in sorted {
        let found = target(&view, &mount.destination)?;
        check_mount(&mount.destination, &found)?;
        // A mount above a masked path is allowed: lxcfs has one on /sys/devices/system/cpu.
        let mut masked = spec.linux.masked_paths.iter();
        if let Some(masked) = masked.find(|it| is_at_or_below(&found.path, it)) {
            let (path, masked) = (mount.destination, masked.clone());
            return Err(DestinationError::Masked { path, masked });
        }
        // These include the bundle's default mounts. If the caller mounts on the path of a default mount, the caller's
        // mount has already replaced it.
        let mut others = spec.mounts.iter().map(|it| &it.destination);
        if let Some(hidden) = others.find(|it| is_at_or_below(it, &found.path)) {
            let (path, hidden) = (mount.destination, hidden.clone());
            return Err(DestinationError::Hides { path, target: found.path, hidden });
        }
        let mount = SpecMount { destination: found.path, ..mount };
        view.add(&mount);
        spec.mounts.push(mount);
    }
    Ok(())
}

pub(crate) fn is_at_or_below(path: &str, place: &str) -> bool {
    path.strip_prefix(place).is_some_and(|it| it.is_empty() || it.starts_with('/'))
}

fn target(view: &View<'_>, path: &str) -> Result<LinkTarget, DestinationError> {
    view.target(path).map_err(|source| DestinationError::Look { path: path.to_owned(), source })
}

fn check_mount(given: &str, found: &LinkTarget) -> Result<(), DestinationError> {
    let led = |reason: String| {
        let (path, target) = (given.to_owned(), found.path.clone());
        Err(DestinationError::Led { path, target, reason })
    };
    if found.state == TargetState::CannotBeMade {
        return Err(DestinationError::Absent {
            path: given.to_owned(),
            target: found.path.clone(),
        });
    }
    if given == found.path {
        return Ok(());
    }
    // The caller may choose a path in the kernel's file systems, but the links of an image may not lead there.
    if is_at_or_below(&found.path, "/sys") {
        return led("the kernel provides it, and it describes devices".to_owned());
    }
    match destination(&found.path) {
        Err(VolumeError::Taken { reason, .. }) => led(reason.to_owned()),
        Err(error) => led(error.to_string()),
        Ok(_) if OwnDevice::at(&found.path).is_some() => {
            led("it is one of the container's own devices".to_owned())
        }
        Ok(_) => Ok(()),
    }
}

/// Replaces the paths of devices by paths without links, and removes duplicates.
pub(crate) fn resolve_devices(
    view: &View<'_>,
    devices: &[Device],
) -> Result<Vec<Device>, DestinationError> {
    let mut resolved: Vec<Device> = Vec::new();
    for device in devices {
        let given = device.path().to_owned();
        let found = target(view, &given)?;
        let exists =
            || DestinationError::Exists { path: given.clone(), target: found.path.clone() };
        let no_place = |place| DestinationError::NoPlace { path: given.clone(), place };
        match found.state {
            TargetState::Exists => return Err(exists()),
            TargetState::CannotBeMade => {
                let target = found.path.clone();
                return Err(DestinationError::Absent { path: given.clone(), target });
            }
            TargetState::Absent if found.is_on_host => {
                return Err(no_place("a directory of the host, where Quire makes no devices"));
            }
            TargetState::InKernel if !found.path.starts_with("/dev/") => {
                return Err(no_place("a file system of the kernel"));
            }
            TargetState::Absent | TargetState::InKernel => {}
        }
        if OwnDevice::at(&found.path).is_some_and(|it| !it.is(device)) {
            return Err(exists());
        }
        let device = device.at(found.path.clone());
        match resolved.iter().find(|it| it.path() == device.path()) {
            Some(other) if other.is_same_as(&device) => {}
            Some(_) => return Err(exists()),
            None => resolved.push(device),
        }
    }
    Ok(resolved)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn root(folder: &Path) -> File {
        for directory in ["usr/lib", "etc", "dev", "host"] {
            std::fs::create_dir_all(folder.join(directory)).unwrap();
        }
        std::fs::write(folder.join("etc/file"), "").unwrap();
        for (link, target) in [
            ("lib", "usr/lib"),
            ("null", "/dev/null"),
            ("kernel", "../../proc/sys"),
            ("loop", "loop"),
            ("cgroups", "/sys/fs"),
            ("class", "lib/../../../sys/class"),
            ("firmware", "sys/firmware"),
            ("devices", "/sys"),
        ] {
            symlink(target, folder.join(link)).unwrap();
        }
        File::open(folder).unwrap()
    }

    fn spec(host: &Path) -> RuntimeSpec {
        let spec = json!({"root": {"readonly": false}, "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs"},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"},
            {"destination": "/host", "type": "bind", "source": host},
        ], "linux": {"maskedPaths": ["/sys/firmware", "/sys/devices/virtual/powercap"]}});
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn the_kernels_directories_are_directories_or_absent() {
        let folder = tempfile::tempdir().unwrap();
        let fd = root(folder.path());
        assert_eq!(check_kernels(fd.as_fd()), Ok(()));
        let dev = folder.path().join("dev");
        std::fs::remove_dir(&dev).unwrap();
        let check = |expect: &str| {
            let error = check_kernels(fd.as_fd()).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("/dev in the container's root is {expect}:")),
                "{error}"
            );
        };
        for target in ["/etc", "usr", "dev", "nowhere"] {
            symlink(target, &dev).unwrap();
            check(&format!("a symbolic link to \"{target}\""));
            std::fs::remove_file(&dev).unwrap();
        }
        std::fs::write(&dev, "").unwrap();
        check("a file");
    }

    #[test]
    fn mounts_are_resolved_in_the_order_of_their_places() {
        let (folder, host) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let fd = root(folder.path());
        let check = |given: &[&str], expect: Result<&[&str], &str>| {
            let mut spec = spec(host.path());
            let own = spec.mounts.len();
            spec.mounts.extend(given.iter().map(|it| SpecMount::new(it, "tmpfs", "tmpfs", &[])));
            match (resolve_mounts(fd.as_fd(), &mut spec, given.len()), expect) {
                (Ok(()), Ok(expect)) => {
                    let found: Vec<_> =
                        spec.mounts[own..].iter().map(|it| &*it.destination).collect();
                    assert_eq!(found, expect, "{given:?}");
                }
                (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
                (found, _) => panic!("{given:?}: {found:?}, {expect:?}"),
            }
        };
        check(&["/lib/x", "/new"], Ok(&["/new", "/usr/lib/x"]));
        check(&["/lib", "/usr"], Ok(&["/usr", "/usr/lib"]));
        check(&["/dev/shm/x"], Ok(&["/dev/shm/x"]));
        check(&["/lib", "/usr/lib"], Err("hide the one on /usr/lib"));
        check(&["/host"], Err("the mount on /host would hide the one on /host"));
        check(
            &["/null"],
            Err("redirects /null to /dev/null: it is one of the container's own devices"),
        );
        check(&["/kernel/x"], Err("redirects /kernel/x to /proc/sys/x"));
        check(&["/loop/x"], Err("cannot look up /loop/x"));
        let way_out = ". Choose another destination, or remove the link from the image";
        for (given, led) in [
            ("/cgroups", "/sys/fs"),
            ("/cgroups/cgroup", "/sys/fs/cgroup"),
            ("/cgroups/cgroup/x", "/sys/fs/cgroup/x"),
            ("/cgroups/fuse", "/sys/fs/fuse"),
            ("/class", "/sys/class"),
            ("/class/net/x", "/sys/class/net/x"),
            ("/firmware", "/sys/firmware"),
            ("/firmware/x", "/sys/firmware/x"),
            ("/devices", "/sys"),
            ("/devices/devices", "/sys/devices"),
        ] {
            let reason = "the kernel provides it, and it describes devices";
            check(&[given], Err(&format!("redirects {given} to {led}: {reason}{way_out}")));
        }
        // The caller itself may name paths in `/sys`.
        check(&["/sys/fs/fuse", "/sys/class"], Ok(&["/sys/class", "/sys/fs/fuse"]));
        check(&["/sys/fs/cgroup/x"], Ok(&["/sys/fs/cgroup/x"]));
        check(&["/sys/firmwares"], Ok(&["/sys/firmwares"]));
        check(&["/sys/devices/virtual"], Ok(&["/sys/devices/virtual"]));
        check(&["/sys/fs"], Err("the mount on /sys/fs would hide the one on /sys/fs/cgroup"));
        check(&["/sys/firmware"], Err("cannot mount on /sys/firmware in a container: the"));
        check(&["/sys/firmware/efi"], Err("the container hides /sys/firmware and mounts"));
        check(&["/sys/devices/virtual/powercap/x"], Err("hides /sys/devices/virtual/powercap"));
    }

    #[test]
    fn devices_take_free_paths() {
        let (folder, host) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let fd = root(folder.path());
        let check = |given: &[&str], expect: Result<&[&str], &str>| {
            let devices: Vec<_> =
                given.iter().map(|it| Device::from_argument(it).unwrap()).collect();
            let view = View::of_bundle(fd.as_fd(), &spec(host.path()));
            match (resolve_devices(&view, &devices), expect) {
                (Ok(found), Ok(expect)) => {
                    let found: Vec<_> = found.iter().map(Device::path).collect();
                    assert_eq!(found, expect, "{given:?}");
                }
                (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
                (found, _) => panic!("{given:?}: {found:?}, {expect:?}"),
            }
        };
        check(&["/dev/zero:/dev/mine"], Ok(&["/dev/mine"]));
        check(&["/dev/zero:/lib/mine"], Ok(&["/usr/lib/mine"]));
        check(&["/dev/zero", "/dev/zero:r"], Ok(&["/dev/zero"]));
        check(&["/dev/zero:/dev/a", "/dev/null:/dev/a"], Err("another file at /dev/a"));
        check(&["/dev/zero:/dev/tty"], Err("another file at /dev/tty"));
        check(&["/dev/zero:/null"], Err("through links to /dev/null"));
        check(&["/dev/zero:/etc/file"], Err("another file at /etc/file"));
        check(&["/dev/zero:/kernel/x"], Err("a file system of the kernel"));
        check(&["/dev/zero:/host/x"], Err("a directory of the host"));
    }
}
