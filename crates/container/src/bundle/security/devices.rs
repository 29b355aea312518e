//! Devices of the host that a container has.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use crate::bundle::spec::{DeviceRule, SpecDevice, SpecMount};

/// A file that every container has in `/dev`, by its name there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnDevice {
    name: &'static str,
    /// Numbers of a character device.
    numbers: Option<(u32, u32)>,
}

/// What a container has by itself, or must not have of the host's. Sources: runtime-spec 1.2, `config-linux.md`, "Default Devices";
/// Linux `Documentation/admin-guide/devices.txt`.
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
    /// The one at a path of a container.
    pub(crate) fn at(path: &str) -> Option<Self> {
        let name = path.strip_prefix("/dev/")?;
        OWN.into_iter().find(|it| it.name == name)
    }

    /// Whether this is the same device.
    pub(crate) fn is(self, device: &Device) -> bool {
        device.kind == "c" && self.numbers == Some(device.numbers)
    }
}

/// A device that a container cannot have.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// It is not written as one.
    #[error("\"{0}\" is not a device: write HOST[:CONTAINER[:rwm]], both absolute paths")]
    Syntax(String),
    /// Its path in the container is not a path without `..`.
    #[error(
        "\"{0}\" is no path for a device in a container: write an absolute path without \"..\", such as /dev/fuse"
    )]
    Destination(String),
    /// It is something else.
    #[error("\"{0}\" is not a device")]
    NotDevice(String),
    /// It is not there.
    #[error("cannot look at the device \"{path}\"")]
    Look {
        /// On the host.
        path: String,
        /// Why.
        source: std::io::Error,
    },
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// On the host.
    host: String,
    /// In the container.
    path: String,
    kind: &'static str,
    numbers: (u32, u32),
    mode: u32,
    owner: (u32, u32),
    access: String,
}

impl Device {
    /// One of the host, as the command line says it: `HOST[:CONTAINER[:rwm]]`.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn find(text: &str) -> Result<Self, DeviceError> {
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
        Self::of(&found, (host, path), access)
            .ok_or_else(|| DeviceError::NotDevice(host.to_owned()))
    }

    /// All of the host, but those that a container has of its own.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut devices = Vec::new();
        below(Path::new("/dev"), &mut devices);
        devices
    }

    fn of(found: &std::fs::Metadata, (host, path): (&str, &str), access: &str) -> Option<Self> {
        let kind = match found.file_type() {
            it if it.is_char_device() => "c",
            it if it.is_block_device() => "b",
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

    /// Whether gVisor's kernel has it: memory devices, `/dev/tty`, FUSE and TUN. Of others it shows the node, which nobody can
    /// open. Source: gVisor `pkg/sentry/devices`.
    pub(super) fn is_in_gvisor(&self) -> bool {
        matches!(
            (self.kind, self.numbers),
            ("c", (1, 3 | 5 | 7 | 8 | 9) | (5, 0) | (10, 200 | 229))
        )
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// The same at another path in the container.
    pub(crate) fn at(&self, path: String) -> Self {
        Self { path, ..self.clone() }
    }

    /// Whether both are one device of the host.
    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        (self.kind, self.numbers) == (other.kind, other.numbers)
    }

    pub(super) fn entry(&self) -> SpecDevice {
        let (major, minor) = self.numbers;
        let (uid, gid) = self.owner;
        SpecDevice {
            path: self.path.clone(),
            kind: self.kind.to_owned(),
            major: Some(major.into()),
            minor: Some(minor.into()),
            file_mode: Some(self.mode),
            uid: Some(uid),
            gid: Some(gid),
        }
    }

    /// The host's own node in the place of the container's, where nobody may make one: in a user namespace. Runtimes do so by
    /// themselves, but take the node that has the *container's* path on the host.
    pub(super) fn mount(&self) -> Option<SpecMount> {
        let options = ["bind", "nosuid", "noexec"];
        let is_moved = self.host != self.path;
        is_moved.then(|| SpecMount::new(&self.path, "bind", &self.host, &options))
    }

    pub(super) fn rule(&self) -> DeviceRule {
        let (major, minor) = self.numbers;
        DeviceRule {
            allow: true,
            kind: Some(self.kind.to_owned()),
            major: Some(major.into()),
            minor: Some(minor.into()),
            access: Some(self.access.clone()),
        }
    }
}

/// What cannot be looked at is left out: `/dev` changes while it is read.
fn below(folder: &Path, devices: &mut Vec<Device>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if OWN.iter().any(|it| name == it.name) {
            continue;
        }
        let Ok(found) = entry.metadata() else { continue };
        match (found.is_dir(), path.to_str()) {
            (true, _) => below(&path, devices),
            (false, Some(text)) => devices.extend(Device::of(&found, (text, text), "rwm")),
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
        let null = Device::find("/dev/null:/dev/nothing:r").unwrap();
        let mount = null.mount().unwrap();
        assert_eq!(
            (&*mount.destination, mount.source.as_deref()),
            ("/dev/nothing", Some("/dev/null"))
        );
        assert!(Device::find("/dev/zero").unwrap().mount().is_none());
        assert_eq!(
            serde_json::to_string(&null.rule()).unwrap(),
            r#"{"allow":true,"type":"c","major":1,"minor":3,"access":"r"}"#
        );
        let entry = serde_json::to_string(&null.entry()).unwrap();
        let start = r#"{"path":"/dev/nothing","type":"c","major":1,"minor":3,"fileMode":"#;
        assert!(entry.starts_with(start), "{entry}");
        assert_eq!(Device::find("/dev/zero:w").unwrap().access, "w");
        assert_eq!(Device::find("/dev/zero:/x").unwrap().access, "rwm");
        for text in ["", "dev/null", "/dev/null:x", "/dev/null:/x:q", "/dev/null:/x:r:w"] {
            assert!(matches!(Device::find(text), Err(DeviceError::Syntax(_))), "{text}");
        }
        assert_eq!(Device::find("/dev/zero://x/./y").unwrap().path, "/x/y");
        for text in
            ["/dev/null:/dev/../etc/x", "/dev/../dev/null", "/dev/null:/", "/dev/null:/dev/.."]
        {
            assert!(matches!(Device::find(text), Err(DeviceError::Destination(_))), "{text}");
        }
        assert!(matches!(Device::find("/etc/passwd"), Err(DeviceError::NotDevice(_))));
        assert!(matches!(Device::find("/dev/no-such"), Err(DeviceError::Look { .. })));
        assert!(Device::all().iter().all(|it| it.path != "/dev/null"));
    }
}
