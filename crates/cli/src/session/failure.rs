//! The kinds of failures that scripts distinguish: their exit codes, and their report with `--json`.

use std::error::Error;

use container::life::layer_access::LookError;
use container::life::lookup::KnownError;
use container::life::monitor::FAILED;
use oci::policy::{AdmitError, Refusal};
use rustix::io::Errno;
use serde::Serialize;
use store::{NetworkRecordError, ResolveError, StoreError, VolumeError};
use transfer::evidence::UseError;

use crate::output::report;
use crate::session::resolve::{NoContainer, NoObject, Unresolved};

/// Why a verb failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FailureKind {
    /// Any other reason.
    Other,
    /// The command line is wrong.
    Usage,
    /// There is no such image, container, volume, network or store.
    Absent,
    /// A policy, or a registry's access control, refuses it.
    Refused,
    #[cfg_attr(
        not(feature = "registry"),
        expect(dead_code, reason = "only registries need the network")
    )]
    /// A registry cannot be reached, or does not answer as it should.
    Network,
    /// A disk is full, or a quota is used up.
    Full,
}

impl FailureKind {
    /// Classifies an error by its causes.
    pub(crate) fn from_error(error: &anyhow::Error) -> Self {
        // A full disk also breaks downloads and lookups, so it comes first.
        if matches!(refusal(error), Some(Errno::NOSPC | Errno::DQUOT)) {
            return Self::Full;
        }
        error.chain().find_map(from_cause).unwrap_or(Self::Other)
    }

    /// Returns the exit code of verbs that pass on no program's exit code.
    pub(crate) const fn exit_code(self) -> u8 {
        match self {
            Self::Other | Self::Usage => crate::FAILED,
            Self::Absent => 3,
            Self::Refused => 4,
            Self::Network => 5,
            Self::Full => 6,
        }
    }
}

/// Returns the errno of a file system that is full, read-only or over its quota, if that is the cause.
pub(crate) fn refusal(error: &anyhow::Error) -> Option<Errno> {
    error.chain().find_map(|cause| {
        let io = cause.downcast_ref::<std::io::Error>().and_then(|error| match error.kind() {
            std::io::ErrorKind::StorageFull => Some(Errno::NOSPC),
            _ => Errno::from_io_error(error),
        });
        let errno = io.or_else(|| cause.downcast_ref::<Errno>().copied());
        errno.filter(|it| matches!(*it, Errno::NOSPC | Errno::DQUOT | Errno::ROFS))
    })
}

/// A command line that clap accepts, but the verb does not.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for UsageError {}

/// A network is not removed, because a container uses it.
#[derive(Debug)]
pub(crate) struct NetworkInUse {
    pub(crate) container: String,
    pub(crate) network: String,
}

impl std::fmt::Display for NetworkInUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { container, network } = self;
        write!(
            f,
            "container {container} uses network {network}: remove the container first (`quire rm {container}`), or \
            use --force"
        )
    }
}

impl Error for NetworkInUse {}

/// Returns the exit code of `rm`, `volume rm` or `network rm` that removed nothing. Source: podman-rm(1),
/// podman-volume-rm(1), podman-network-rm(1).
pub(crate) fn removal_code(error: &anyhow::Error) -> u8 {
    let is_use = |cause: &(dyn Error + 'static)| {
        matches!(find(cause), Some(KnownError::Runs(_)))
            || matches!(find(cause), Some(VolumeError::InUse { .. }))
            || find::<NetworkInUse>(cause).is_some()
    };
    match FailureKind::from_error(error) {
        FailureKind::Absent => 1,
        _ if error.chain().any(is_use) => 2,
        _ => FAILED,
    }
}

fn from_cause(cause: &(dyn Error + 'static)) -> Option<FailureKind> {
    if cause.is::<UsageError>() {
        return Some(FailureKind::Usage);
    }
    let is_absent = find::<Unresolved>(cause).is_some_and(Unresolved::is_absent)
        || find::<NoContainer>(cause).is_some()
        || find::<NoObject>(cause).is_some()
        || matches!(find(cause), Some(KnownError::Absent { .. }))
        || matches!(find(cause), Some(LookError::Known(KnownError::Absent { .. })))
        || matches!(find(cause), Some(ResolveError::Absent { .. }))
        || matches!(find(cause), Some(StoreError::Absent(_)))
        || matches!(find(cause), Some(VolumeError::Absent(_)))
        || matches!(find(cause), Some(NetworkRecordError::Absent(_)));
    if is_absent {
        return Some(FailureKind::Absent);
    }
    let is_refused = matches!(find(cause), Some(UseError::Refused(_)))
        || matches!(find(cause), Some(AdmitError::Refused(_)))
        || find::<Refusal>(cause).is_some();
    if is_refused {
        return Some(FailureKind::Refused);
    }
    #[cfg(feature = "registry")]
    if let Some(cause) = find::<oci::registry::Cause>(cause) {
        use oci::registry::Cause;
        return Some(match cause {
            Cause::NotFound { .. } | Cause::NameUnknown { .. } => FailureKind::Absent,
            Cause::NoCredentials { .. } | Cause::Refused { .. } | Cause::Denied { .. } => {
                FailureKind::Refused
            }
            Cause::Cancelled
            | Cause::Certificate { .. }
            | Cause::Read(_)
            | Cause::Credentials(_)
            | Cause::Hosts(_)
            | Cause::NoHost
            | Cause::Setting(_)
            | Cause::Thread(_) => FailureKind::Other,
            // Their causes decide.
            Cause::Elsewhere { source, .. } | Cause::Token { source, .. } => {
                // A token server or a mirror that lacks a file does not mean that there is no such image.
                return from_cause(source).map(|it| match it {
                    FailureKind::Absent => FailureKind::Network,
                    it => it,
                });
            }
            _ => FailureKind::Network,
        });
    }
    None
}

/// Returns an error of type `E`, or one in a box.
pub(crate) fn find<'a, E: Error + 'static>(cause: &'a (dyn Error + 'static)) -> Option<&'a E> {
    cause.downcast_ref().or_else(|| cause.downcast_ref::<Box<E>>().map(AsRef::as_ref))
}

/// Report of a failed verb with `--json`.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct FailureReport {
    /// The error, as people get it without its causes.
    error: String,
    /// The causes of the error: each is the cause of the one before.
    causes: Vec<String>,
    /// `absent`, `refused`, `network`, `full`, `usage` or `other`.
    #[cfg_attr(test, schemars(with = "String"))]
    kind: FailureKind,
    /// The next steps. Null if Quire knows none.
    hint: Option<String>,
    /// Exit code of the command.
    exit_code: u8,
}

impl FailureReport {
    pub(crate) fn new(error: &anyhow::Error, hints: &[String], exit_code: u8) -> Self {
        let mut texts: Vec<_> = error.chain().map(ToString::to_string).collect();
        // A transparent error has the text of its cause.
        texts.dedup();
        let causes = texts.split_off(1);
        let hint = (!hints.is_empty()).then(|| hints.join("\n"));
        let kind = FailureKind::from_error(error);
        Self { error: texts.swap_remove(0), causes, kind, hint, exit_code }
    }

    /// Makes the report of a command line that Quire does not understand.
    pub(crate) fn usage(error: &str, hint: Option<&str>, exit_code: u8) -> Self {
        let (error, hint) = (error.to_owned(), hint.map(str::to_owned));
        Self { error, causes: Vec::new(), kind: FailureKind::Usage, hint, exit_code }
    }

    /// Prints the report as one line on standard error. A failure is ignored, because it cannot be reported.
    pub(crate) fn print(&self) {
        use std::io::Write as _;
        let Ok(text) = serde_json::to_string(self) else { return };
        let text = report::visible(&text);
        let _unheard = writeln!(std::io::stderr(), "{text}");
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use store::OperationError;

    use super::*;

    #[test]
    fn kinds_are_found_below_other_errors() {
        let check = |error: anyhow::Error, kind| {
            assert_eq!(FailureKind::from_error(&error.context("outer")), kind);
        };
        check(StoreError::Absent("/no".into()).into(), FailureKind::Absent);
        let missing = || NoContainer { name: "a".into(), hint: String::new() };
        check(missing().into(), FailureKind::Absent);
        check(anyhow::Error::new(missing()).context("inner"), FailureKind::Absent);
        check(io::Error::from(io::ErrorKind::StorageFull).into(), FailureKind::Full);
        check(io::Error::from(Errno::DQUOT).into(), FailureKind::Full);
        check(Errno::NOSPC.into(), FailureKind::Full);
        let full = OperationError::of("write", "/x")(Errno::NOSPC);
        check(transfer::import::ImportError::from(full).into(), FailureKind::Full);
        let absent = OperationError::of("use", "it")(StoreError::Absent("/no".into()));
        check(absent.into(), FailureKind::Absent);
        // A read-only file system has room.
        check(Errno::ROFS.into(), FailureKind::Other);
        // A file that is missing in the store is damage.
        check(io::Error::from(io::ErrorKind::NotFound).into(), FailureKind::Other);
        check(anyhow::anyhow!("any other"), FailureKind::Other);
        check(UsageError(String::new()).into(), FailureKind::Usage);
    }

    #[cfg(feature = "registry")]
    #[test]
    fn kinds_of_registry_errors() {
        use oci::registry::Cause;
        let words = String::new;
        for (cause, kind) in [
            (Cause::NotFound { words: words() }, FailureKind::Absent),
            (Cause::NameUnknown { words: words() }, FailureKind::Absent),
            (Cause::Denied { words: words() }, FailureKind::Refused),
            (Cause::NoCredentials { host: words(), words: words() }, FailureKind::Refused),
            (Cause::Cancelled, FailureKind::Other),
            (
                Cause::Elsewhere {
                    host: words(),
                    source: Box::new(Cause::NotFound { words: words() }),
                },
                FailureKind::Network,
            ),
            (
                Cause::Token { host: words(), source: Box::new(Cause::Denied { words: words() }) },
                FailureKind::Refused,
            ),
            (Cause::Dns("x".into()), FailureKind::Network),
            (Cause::ConnectionRefused, FailureKind::Network),
            (Cause::Status { status: 500, after: None, words: words() }, FailureKind::Network),
        ] {
            let error = anyhow::Error::new(Box::new(cause)).context("outer");
            assert_eq!(FailureKind::from_error(&error), kind, "{error:#}");
        }
    }

    /// C1 controls, bidirectional marks and tags, which `serde_json` leaves as they are.
    #[test]
    fn reports_change_no_terminal() {
        let text = "a\u{9b}2J\u{202e}\u{e0041}\u{7f}ä";
        let json = report::visible(&serde_json::to_string(text).unwrap());
        assert_eq!(json, r#""a\u009b2J\u202e\udb40\udc41\u007fä""#);
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }

    #[test]
    fn a_report_has_each_text_once() {
        let error = anyhow::Error::new(io::Error::from(Errno::NOSPC)).context("cannot write /x");
        let report = FailureReport::new(&error, &["free some".into()], 6);
        let value = serde_json::to_value(&report).unwrap();
        assert_eq!(value["error"], "cannot write /x");
        assert_eq!(value["causes"].as_array().unwrap().len(), 1);
        assert_eq!((&value["kind"], &value["hint"]), (&"full".into(), &"free some".into()));
        assert_eq!(value["exitCode"], 6);
    }
}
