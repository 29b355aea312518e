//! The messages of `io.systemd.StorageProvider`. Source: systemd 261,
//! `src/shared/varlink-io.systemd.StorageProvider.c`.

use serde::{Deserialize, Serialize};
use zlink::ReplyError;

use crate::varlink::{MethodCall, WrongCall};

pub(super) const INTERFACE: &str = "io.systemd.StorageProvider";

/// Description of the interface in varlink's language.
pub(super) const DESCRIPTION: &str = include_str!("io.systemd.StorageProvider.varlink");

/// The kinds of volumes, named like kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum VolumeType {
    /// A block device.
    Blk,
    /// A regular file.
    Reg,
    /// A directory.
    Dir,
}

/// Whether `Acquire` may create a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum CreateMode {
    /// Create the volume if it does not exist.
    Any,
    /// Always create it; it must not exist.
    New,
    /// Do not create it; it must exist.
    Open,
}

/// A method call of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StorageAsk {
    /// `GetInfo`. Source: varlink's `org.varlink.service`.
    Info,
    /// `GetInterfaceDescription`.
    Description { interface: String },
    /// Mounts a volume.
    Acquire(AcquireAsk),
    /// Lists the names of volumes.
    ListVolumes(ListAsk),
    /// Lists the names of templates for new volumes.
    ListTemplates(ListAsk),
}

/// The parameters of `Acquire`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct AcquireAsk {
    pub(super) name: String,
    pub(super) create_mode: Option<CreateMode>,
    /// Template for a new volume.
    pub(super) template: Option<String>,
    /// Whether the client wants a read-only volume. All volumes are read-only.
    pub(super) read_only: Option<bool>,
    /// The kind of volume that the client requires.
    pub(super) request_as: Option<VolumeType>,
    /// Size of a new volume, in bytes.
    pub(super) create_size_bytes: Option<u64>,
    /// Whether the service may ask a person for a password, which it never does.
    pub(super) allow_interactive_authentication: Option<bool>,
}

/// The parameters of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ListAsk {
    /// Pattern of fnmatch(3) that names must match.
    pub(super) match_name: Option<String>,
}

/// The reply to `Acquire`.
#[derive(Debug, Serialize)]
pub(super) struct AcquireReply {
    #[serde(rename = "fileDescriptorIndex")]
    pub(super) file_descriptor_index: usize,
    #[serde(rename = "type")]
    pub(super) kind: VolumeType,
    #[serde(rename = "readOnly")]
    pub(super) read_only: bool,
    #[serde(rename = "baseUID")]
    pub(super) base_uid: u32,
    #[serde(rename = "baseGID")]
    pub(super) base_gid: u32,
}

/// An entry of a list of volumes.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct VolumeReply {
    pub(super) name: String,
    pub(super) aliases: Vec<String>,
    #[serde(rename = "type")]
    pub(super) kind: VolumeType,
    pub(super) read_only: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) used_bytes: Option<u64>,
}

/// An error of the interface, which carries no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ReplyError)]
#[zlink(interface = "io.systemd.StorageProvider")]
pub(super) enum StorageError {
    NoSuchVolume,
    NoSuchTemplate,
    TypeNotSupported,
    CreateNotSupported,
}

/// A system error. Source: systemd, `src/libsystemd/sd-varlink/sd-varlink.c`, `sd_varlink_error_errno`.
#[derive(Debug, Clone, PartialEq, Eq, ReplyError)]
#[zlink(interface = "io.systemd")]
pub(super) enum SystemError {
    System { origin: String, errno: i32 },
}

/// Parses a method call.
pub(super) fn ask_of(call: &MethodCall) -> Result<StorageAsk, WrongCall> {
    let wrong = |error: serde_json::Error| WrongCall::Parameter(error.to_string());
    // Absent parameters count as an empty object.
    let list = || match &call.parameters {
        serde_json::Value::Null => Ok(ListAsk::default()),
        set => ListAsk::deserialize(set).map_err(wrong),
    };
    match &*call.method {
        "org.varlink.service.GetInfo" => Ok(StorageAsk::Info),
        "org.varlink.service.GetInterfaceDescription" => {
            Ok(StorageAsk::Description { interface: call.interface(INTERFACE)? })
        }
        "io.systemd.StorageProvider.Acquire" => {
            Ok(StorageAsk::Acquire(AcquireAsk::deserialize(&call.parameters).map_err(wrong)?))
        }
        "io.systemd.StorageProvider.ListVolumes" => Ok(StorageAsk::ListVolumes(list()?)),
        "io.systemd.StorageProvider.ListTemplates" => Ok(StorageAsk::ListTemplates(list()?)),
        method => Err(WrongCall::Method(method.to_owned())),
    }
}

impl AcquireAsk {
    /// Refuses volumes that this service cannot offer: it creates none, and all are read-only directories.
    pub(super) fn check(&self) -> Result<(), StorageError> {
        match self {
            Self { template: Some(name), .. } if !name.is_empty() => {
                Err(StorageError::NoSuchTemplate)
            }
            Self { create_mode: Some(CreateMode::New), .. } => {
                Err(StorageError::CreateNotSupported)
            }
            Self { request_as: Some(VolumeType::Blk | VolumeType::Reg), .. } => {
                Err(StorageError::TypeNotSupported)
            }
            // A request for a writable volume is accepted, because mount(8) always passes `ro` or `rw` to a helper,
            // and `rw` is its default. The reply states that the volume is read-only, as for a write-protected disk.
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(method: &str, parameters: &str) -> Result<StorageAsk, String> {
        let call = format!(r#"{{"method": "{method}", "more": true, "parameters": {parameters}}}"#);
        ask_of(&serde_json::from_str(&call).unwrap()).map_err(|wrong| format!("{wrong:?}"))
    }

    fn acquire(parameters: &str) -> Result<(), StorageError> {
        match read("io.systemd.StorageProvider.Acquire", parameters).unwrap() {
            StorageAsk::Acquire(ask) => ask.check(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_volume_that_is_asked_for_can_be_one_of_ours() {
        // The call that mount.storage of systemd 262 sends.
        let usual =
            r#"{"name": "debian", "requestAs": "dir", "allowInteractiveAuthentication": true}"#;
        assert_eq!(acquire(usual), Ok(()));
        for (more, error) in [
            (r#""createMode": "any", "createSizeBytes": 5"#, None),
            (r#""createMode": "open", "readOnly": true"#, None),
            (r#""createMode": null, "readOnly": null, "requestAs": null"#, None),
            (r#""createMode": "new""#, Some(StorageError::CreateNotSupported)),
            (r#""template": "subvolume""#, Some(StorageError::NoSuchTemplate)),
            (r#""readOnly": false"#, None),
            (r#""requestAs": "reg""#, Some(StorageError::TypeNotSupported)),
            (r#""requestAs": "blk""#, Some(StorageError::TypeNotSupported)),
        ] {
            let got = acquire(&format!(r#"{{"name": "debian", {more}}}"#));
            assert_eq!(got.err(), error, "{more}");
        }
    }

    #[test]
    fn a_wrong_call_is_told_what_is_wrong() {
        for parameters in
            ["{}", "[]", "7", "null", r#"{"name": 7}"#, r#"{"name": "x", "where": "y"}"#]
        {
            assert!(
                read("io.systemd.StorageProvider.Acquire", parameters).is_err(),
                "{parameters}"
            );
        }
        assert!(read("io.systemd.StorageProvider.ListVolumes", r#"{"name": "x"}"#).is_err());
        let missing = read("io.systemd.StorageProvider.Release", "{}");
        assert_eq!(missing, Err(r#"Method("io.systemd.StorageProvider.Release")"#.to_owned()));
    }

    #[test]
    fn lists_need_no_parameters() {
        for parameters in ["null", "{}", r#"{"matchName": null}"#] {
            let ask = read("io.systemd.StorageProvider.ListVolumes", parameters);
            assert_eq!(ask, Ok(StorageAsk::ListVolumes(ListAsk::default())), "{parameters}");
        }
    }
}
