//! Devices of the host in a container.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::bundle::spec::{DeviceRule, SpecDevice, SpecMount};

/// A file that every container has in `/dev`, by its name in that directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnDevice {
    name: &'static str,
    /// Major and minor number of a character device.
    numbers: Option<(u32, u32)>,
}

/// Files that a container has by default, or must not get from the host. Sources: runtime-spec 1.2,
/// `config-linux.md`, "Default Devices"; Linux `Documentation/admin-guide/devices.txt`.
const OWN: [OwnDevice; 16] = {
    const fn own(name: &'static str) -> OwnDevice {
        OwnDevice { name, numbers: None }
    }
    const fn device(name: &'static str, major: u32, minor: u32) -> OwnDevice {
        OwnDevice { name, numbers: Some((major, minor)) }
    }
    [
        device("console", 5, 1),
        own("core"),
        own("fd"),
        device("full", 1, 7),
        own("mqueue"),
        device("null", 1, 3),
        own("ptmx"),
        own("pts"),
        device("random", 1, 8),
        own("shm"),
        own("stderr"),
        own("stdin"),
        own("stdout"),
        device("tty", 5, 0),
        device("urandom", 1, 9),
        device("zero", 1, 5),
    ]
};

impl OwnDevice {
    /// Returns the container's own file at a path.
    pub(crate) fn at(path: &str) -> Option<Self> {
        let name = path.strip_prefix("/dev/")?;
        OWN.into_iter().find(|it| it.name == name)
    }

    /// Whether `device` is this device.
    pub(crate) fn is(self, device: &Device) -> bool {
        device.kind == NodeKind::Characters && self.numbers == Some(device.numbers)
    }
}

/// Reason why a container cannot have a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The text is not `HOST[:CONTAINER[:rwm]]` with absolute paths.
    #[error("\"{0}\" is not a device: write HOST[:CONTAINER[:rwm]], both absolute paths")]
    Syntax(String),
    /// The path in the container is not an absolute path without `..`.
    #[error(
        "\"{0}\" is not a path for a device in a container: write an absolute path without \
        \"..\", such as /dev/fuse"
    )]
    Destination(String),
    /// The file is not a device.
    #[error("\"{0}\" is not a device")]
    NotDevice(String),
    /// The file cannot be looked up.
    #[error("cannot examine the device \"{path}\"")]
    Look {
        /// Path on the host.
        path: String,
        source: std::io::Error,
    },
}

/// A device of the host for a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Path on the host.
    host: String,
    /// Path in the container.
    path: String,
    kind: NodeKind,
    numbers: (u32, u32),
    mode: u32,
    owner: (u32, u32),
    access: String,
}

/// Kind of a device, as runtimes name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum NodeKind {
    #[serde(rename = "c")]
    Characters,
    #[serde(rename = "b")]
    Blocks,
}

impl NodeKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Characters => "c",
            Self::Blocks => "b",
        }
    }
}

impl Device {
    /// Looks up a device of the host in the syntax of the command line: `HOST[:CONTAINER[:rwm]]`.
    pub fn from_argument(text: &str) -> Result<Self, DeviceError> {
        let is_access = |it: &str| !it.is_empty() && it.bytes().all(|it| b"rwm".contains(&it));
        let parts: Vec<_> = text.split(':').collect();
        let (host, path, access) = match parts[..] {
            [host] => (host, host, "rwm"),
            [host, access] if is_access(access) => (host, host, access),
            [host, path] => (host, path, "rwm"),
            [host, path, access] if is_access(access) => (host, path, access),
            _ => return Err(DeviceError::Syntax(text.to_owned())),
        };
        if !host.starts_with('/') || !path.starts_with('/') {
            return Err(DeviceError::Syntax(text.to_owned()));
        }
        let names: Vec<_> = path.split('/').filter(|it| !matches!(*it, "" | ".")).collect();
        if names.is_empty() || names.contains(&"..") {
            return Err(DeviceError::Destination(path.to_owned()));
        }
        let path = &*format!("/{}", names.join("/"));
        let found = std::fs::metadata(host);
        let found = found.map_err(|source| DeviceError::Look { path: host.to_owned(), source })?;
        Self::from_metadata(&found, host, path, access)
            .ok_or_else(|| DeviceError::NotDevice(host.to_owned()))
    }

    /// Looks up the device again at its path on the host.
    pub(super) fn renewed(&self) -> Result<Self, DeviceError> {
        let found = std::fs::metadata(&self.host);
        let found =
            found.map_err(|source| DeviceError::Look { path: self.host.clone(), source })?;
        Self::from_metadata(&found, &self.host, &self.path, &self.access)
            .ok_or_else(|| DeviceError::NotDevice(self.host.clone()))
    }

    /// Whether the container has the device at another path than the host.
    pub(super) fn is_moved(&self) -> bool {
        self.host != self.path
    }

    /// Returns all devices of the host, except those that every container has by default.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut devices = Vec::new();
        below(Path::new("/dev"), &mut devices);
        devices
    }

    fn from_metadata(
        found: &std::fs::Metadata,
        host: &str,
        path: &str,
        access: &str,
    ) -> Option<Self> {
        let kind = match found.file_type() {
            it if it.is_char_device() => NodeKind::Characters,
            it if it.is_block_device() => NodeKind::Blocks,
            _ => return None,
        };
        let number = found.rdev();
        Some(Self {
            host: host.to_owned(),
            path: path.to_owned(),
            kind,
            numbers: (rustix::fs::major(number), rustix::fs::minor(number)),
            mode: found.mode() & 0o7777,
            owner: (found.uid(), found.gid()),
            access: access.to_owned(),
        })
    }

    /// Whether gVisor's kernel supports the device: memory devices, `/dev/tty`, FUSE and TUN. Nodes of other devices
    /// are visible in gVisor, but cannot be opened. Source: gVisor `pkg/sentry/devices`.
    pub(super) fn is_in_gvisor(&self) -> bool {
        matches!(
            (self.kind, self.numbers),
            (NodeKind::Characters, (1, 3 | 5 | 7 | 8 | 9) | (5, 0) | (10, 200 | 229))
        )
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Returns the same device at another path in the container.
    pub(crate) fn at(&self, path: String) -> Self {
        Self { path, ..self.clone() }
    }

    /// Whether both are the same device of the host.
    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        (self.kind, self.numbers) == (other.kind, other.numbers)
    }

    pub(super) fn entry(&self) -> SpecDevice {
        let (major, minor) = self.numbers;
        let (uid, gid) = self.owner;
        SpecDevice {
            path: self.path.clone(),
            kind: self.kind.name().to_owned(),
            major: Some(major.into()),
            minor: Some(minor.into()),
            file_mode: Some(self.mode),
            uid: Some(uid),
            gid: Some(gid),
        }
    }

    /// Returns a bind mount of the host's node, for user namespaces, which cannot create nodes. Runtimes make such a
    /// mount themselves, but they use the container's path as the path on the host. So the result is `None` if both
    /// paths are the same.
    pub(super) fn mount(&self) -> Option<SpecMount> {
        let options = ["bind", "nosuid", "noexec"];
        self.is_moved().then(|| SpecMount::new(&self.path, "bind", &self.host, &options))
    }

    pub(super) fn rule(&self) -> DeviceRule {
        let (major, minor) = self.numbers;
        DeviceRule {
            allow: true,
            kind: Some(self.kind.name().to_owned()),
            major: Some(major.into()),
            minor: Some(minor.into()),
            access: Some(self.access.clone()),
        }
    }
}

/// Adds the devices below a folder. Files that cannot be looked up are left out, because `/dev` changes while it is
/// read.
fn below(folder: &Path, devices: &mut Vec<Device>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if OWN.iter().any(|it| name == it.name) {
            continue;
        }
        let Ok(found) = entry.metadata() else { continue };
        match (found.is_dir(), path.to_str()) {
            (true, _) => below(&path, devices),
            (false, Some(text)) => devices.extend(Device::from_metadata(&found, text, text, "rwm")),
            (false, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source of the numbers: Linux `Documentation/admin-guide/devices.txt`.
    #[test]
    fn devices_are_looked_at() {
        let null = Device::from_argument("/dev/null:/dev/nothing:r").unwrap();
        let mount = null.mount().unwrap();
        assert_eq!(
            (&*mount.destination, mount.source.as_deref()),
            ("/dev/nothing", Some("/dev/null"))
        );
        assert!(Device::from_argument("/dev/zero").unwrap().mount().is_none());
        assert_eq!(
            serde_json::to_string(&null.rule()).unwrap(),
            r#"{"allow":true,"type":"c","major":1,"minor":3,"access":"r"}"#
        );
        let entry = serde_json::to_string(&null.entry()).unwrap();
        let start = r#"{"path":"/dev/nothing","type":"c","major":1,"minor":3,"fileMode":"#;
        assert!(entry.starts_with(start), "{entry}");
        assert_eq!(Device::from_argument("/dev/zero:w").unwrap().access, "w");
        assert_eq!(Device::from_argument("/dev/zero:/x").unwrap().access, "rwm");
        for text in ["", "dev/null", "/dev/null:x", "/dev/null:/x:q", "/dev/null:/x:r:w"] {
            assert!(matches!(Device::from_argument(text), Err(DeviceError::Syntax(_))), "{text}");
        }
        assert_eq!(Device::from_argument("/dev/zero://x/./y").unwrap().path, "/x/y");
        for text in
            ["/dev/null:/dev/../etc/x", "/dev/../dev/null", "/dev/null:/", "/dev/null:/dev/.."]
        {
            assert!(
                matches!(Device::from_argument(text), Err(DeviceError::Destination(_))),
                "{text}"
            );
        }
        assert!(matches!(Device::from_argument("/etc/passwd"), Err(DeviceError::NotDevice(_))));
        assert!(matches!(Device::from_argument("/dev/no-such"), Err(DeviceError::Look { .. })));
        assert!(Device::all().iter().all(|it| it.path != "/dev/null"));
    }
}
