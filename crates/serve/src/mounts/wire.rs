//! The messages of the mount service: varlink, interface `io.quire.Mounts`. `docs/format/mounts.md` describes them.

use serde::{Deserialize, Serialize};
use zlink::ReplyError;

use crate::varlink::{MethodCall, WrongCall};

/// Name of the varlink interface.
pub const INTERFACE: &str = "io.quire.Mounts";

/// Description of the interface in varlink's language, for `varlinkctl introspect`.
pub(super) const DESCRIPTION: &str = include_str!("io.quire.Mounts.varlink");

/// Largest number of places in a request.
pub(super) const PLACES_MAX: usize = 32;
/// Largest length of a place's path, in bytes.
pub(super) const PLACE_MAX: usize = 255;

/// A method call of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountsAsk {
    /// `GetInfo`. Source: varlink's `org.varlink.service`.
    Info,
    /// `GetInterfaceDescription`.
    Description { interface: String },
    /// Returns the version and the limits.
    Describe,
    /// Mounts an image.
    Lend(LendAsk),
}

/// The parameters of `Lend`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LendAsk {
    /// Index of the image's descriptor: a memfd with the seals WRITE, SHRINK and GROW.
    pub image_file_descriptor: usize,
    /// Index of the descriptor of the client's user namespace.
    pub user_namespace_file_descriptor: usize,
    /// Paths of mount points that the mount must contain. If the image lacks a path, an empty file is created. A path
    /// with a trailing slash is a directory.
    #[serde(default, deserialize_with = "none_for_null")]
    pub places: Vec<String>,
}

/// Reads null as empty, because varlink's optional fields may be null.
fn none_for_null<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// The reply to `Lend`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LendReply {
    /// Index of the mount's descriptor.
    pub(super) mount_file_descriptor: usize,
    /// Id of the image that the client sent.
    pub(super) image: String,
    /// Id of the mounted copy.
    pub(super) copy: String,
    /// Number of files, directories and links in the copy.
    pub(super) inodes: u64,
    /// Number of device nodes that were left out.
    pub(super) devices: u64,
}

/// The version and the limits of each user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DescribeReply {
    pub(super) version: String,
    pub(super) image_bytes_max: u64,
    pub(super) inodes_max: u64,
    pub(super) images_max: u64,
    pub(super) bytes_max: u64,
    pub(super) requests_per_second: u64,
}

/// Why an image was not mounted. Each reason is a message for users, with advice.
#[derive(Debug, Clone, PartialEq, Eq, ReplyError)]
#[zlink(interface = "io.quire.Mounts")]
pub enum MountsError {
    /// The policy does not allow the request, or the namespace belongs to another user.
    Denied { reason: String },
    /// A limit was reached.
    TooMuch { reason: String },
    /// The request or the image is invalid.
    Invalid { reason: String },
    /// The service does not support this kind of image.
    Unsupported { reason: String },
    /// An operation of the service failed.
    Failed { reason: String },
}

impl std::fmt::Display for MountsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Denied { reason }
        | Self::TooMuch { reason }
        | Self::Invalid { reason }
        | Self::Unsupported { reason }
        | Self::Failed { reason }) = self;
        f.write_str(reason)
    }
}

impl std::error::Error for MountsError {}

impl MountsError {
    pub(super) fn denied(reason: impl Into<String>) -> Self {
        Self::Denied { reason: reason.into() }
    }

    pub(super) fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid { reason: reason.into() }
    }

    pub(super) fn too_much(reason: impl Into<String>) -> Self {
        Self::TooMuch { reason: reason.into() }
    }

    pub(super) fn failed(doing: &str, error: &(dyn std::error::Error + 'static)) -> Self {
        let mut reason = doing.to_owned();
        let mut next = Some(error);
        while let Some(error) = next {
            reason += &format!(": {error}");
            next = error.source();
        }
        Self::Failed { reason }
    }
}

/// Parses the bytes of a call, for fuzz tests.
///
/// # Errors
/// A description of the mistake in the call.
pub fn read_ask(bytes: &[u8]) -> Result<MountsAsk, String> {
    let call: MethodCall = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    ask_of(&call).map_err(|wrong| format!("{wrong:?}"))
}

/// Parses a method call.
pub(super) fn ask_of(call: &MethodCall) -> Result<MountsAsk, WrongCall> {
    match &*call.method {
        "org.varlink.service.GetInfo" => Ok(MountsAsk::Info),
        "org.varlink.service.GetInterfaceDescription" => {
            Ok(MountsAsk::Description { interface: call.interface(INTERFACE)? })
        }
        "io.quire.Mounts.Describe" => Ok(MountsAsk::Describe),
        "io.quire.Mounts.Lend" => {
            let ask = LendAsk::deserialize(&call.parameters);
            let ask = ask.map_err(|error| WrongCall::Parameter(error.to_string()))?;
            let is_long = ask.places.len() > PLACES_MAX;
            if is_long || ask.places.iter().any(|it| !is_place(it)) {
                return Err(WrongCall::Parameter("places".to_owned()));
            }
            Ok(MountsAsk::Lend(ask))
        }
        method => Err(WrongCall::Method(method.to_owned())),
    }
}

/// Returns whether a path names a file below a root, without `.` and `..`.
fn is_place(path: &str) -> bool {
    let is_name = |it: &str| !matches!(it, "." | "..") && !it.contains('\0');
    let mut names = path.split('/').filter(|it| !it.is_empty()).peekable();
    path.len() <= PLACE_MAX && names.peek().is_some() && names.all(is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: Result<MountsAsk, &str>) {
        assert_eq!(read_ask(text.as_bytes()), expect.map_err(ToOwned::to_owned), "{text}");
    }

    #[test]
    fn a_call_is_read_or_told_what_is_wrong() {
        check(r#"{"method": "org.varlink.service.GetInfo"}"#, Ok(MountsAsk::Info));
        check(
            r#"{"method": "org.varlink.service.GetInfo", "parameters": {}}"#,
            Ok(MountsAsk::Info),
        );
        check(r#"{"method": "io.quire.Mounts.Describe"}"#, Ok(MountsAsk::Describe));
        let lend = |more: &str| {
            format!(
                r#"{{"method": "io.quire.Mounts.Lend", "parameters": {{"imageFileDescriptor": 0,
                "userNamespaceFileDescriptor": 1{more}}}}}"#
            )
        };
        let ask = |places: &[&str]| {
            Ok(MountsAsk::Lend(LendAsk {
                image_file_descriptor: 0,
                user_namespace_file_descriptor: 1,
                places: places.iter().map(ToString::to_string).collect(),
            }))
        };
        check(&lend(""), ask(&[]));
        check(&lend(r#", "places": ["/etc/hosts"]"#), ask(&["/etc/hosts"]));
        for wrong in ["", "/", "..", "/etc/../x", "a\\u0000b", &"x".repeat(256)] {
            let call = lend(&format!(r#", "places": ["{wrong}"]"#));
            check(&call, Err(r#"Parameter("places")"#));
        }
        let many = vec!["\"x\""; PLACES_MAX + 1].join(",");
        check(&lend(&format!(r#", "places": [{many}]"#)), Err(r#"Parameter("places")"#));
        assert!(read_ask(lend(r#", "root": "/""#).as_bytes()).is_err());
        check(
            r#"{"method": "io.quire.Mounts.Attach"}"#,
            Err(r#"Method("io.quire.Mounts.Attach")"#),
        );
        check(
            r#"{"method": "org.varlink.service.GetInterfaceDescription", "parameters": {"interface": "x"}}"#,
            Err(r#"Interface("x")"#),
        );
        for text in ["", "[]", "7", "{}", r#"{"method": 7}"#] {
            assert!(read_ask(text.as_bytes()).is_err(), "{text}");
        }
    }
}
