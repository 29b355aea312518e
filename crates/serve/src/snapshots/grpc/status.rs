//! gRPC statuses of errors.

use std::error::Error as _;
use std::io;

use store::OpenImageError;
use tonic::{Code, Status};
use transfer::export::CopyError;

use crate::snapshots::error::SnapshotterError;

/// Converts an error to a gRPC status with all causes in its message.
pub(in crate::snapshots) fn status(error: &SnapshotterError) -> Status {
    let code = match error {
        SnapshotterError::Exists(_) | SnapshotterError::Skipped(_) => Code::AlreadyExists,
        SnapshotterError::Absent(_) => Code::NotFound,
        SnapshotterError::Committed(_)
        | SnapshotterError::NotActive(_)
        | SnapshotterError::NeverMounted(_)
        | SnapshotterError::NeverUnpacked(_)
        | SnapshotterError::Written(_)
        | SnapshotterError::HasChild(..) => Code::FailedPrecondition,
        SnapshotterError::Image(error) if matches!(**error, OpenImageError::Lacking { .. }) => {
            Code::FailedPrecondition
        }
        SnapshotterError::NotCommitted(_)
        | SnapshotterError::OtherParent(..)
        | SnapshotterError::Name
        | SnapshotterError::Label(_)
        | SnapshotterError::Labels
        | SnapshotterError::Field(_)
        | SnapshotterError::Map { .. }
        | SnapshotterError::Size { .. }
        | SnapshotterError::Filter(_) => Code::InvalidArgument,
        SnapshotterError::Refused(_)
        | SnapshotterError::UnknownOrigin { .. }
        | SnapshotterError::Policies(_) => Code::PermissionDenied,
        SnapshotterError::Busy { .. } => Code::Aborted,
        SnapshotterError::Content(_) | SnapshotterError::Pack(CopyError::Write(_)) => {
            Code::Unavailable
        }
        _ => Code::Internal,
    };
    let mut message = error.to_string();
    let mut cause = error.source();
    let mut is_full = false;
    while let Some(error) = cause {
        message += &format!(": {error}");
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        is_full |= kind == Some(io::ErrorKind::StorageFull);
        cause = error.source();
    }
    if is_full {
        message += ". To free space, remove images from the engine, or names from the store, and \
            run `quire gc`; or give the store a larger disk";
    }
    Status::new(code, message)
}
