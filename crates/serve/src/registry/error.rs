//! Errors that clients get. Source: OCI distribution-spec 1.1, "Error Codes".

use hyper::StatusCode;

/// Why a client's request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// There is no such address.
    Address,
    /// Only GET and HEAD are possible.
    Method,
    /// The name of the repository is invalid.
    Name,
    /// The digest or tag is invalid.
    Reference,
    /// The repository is not served.
    Repository,
    /// The repository has no such manifest.
    Manifest,
    /// The repository has no such blob.
    Blob,
    /// No byte of the body is in the range. Has the body's size.
    Range(u64),
    /// Too many clients use the registry.
    Busy,
    /// The store cannot be read, or has damage.
    Failed,
}

impl Refused {
    pub(super) const fn status(self) -> StatusCode {
        match self {
            Self::Address | Self::Repository | Self::Manifest | Self::Blob => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Name | Self::Reference => StatusCode::BAD_REQUEST,
            Self::Range(_) => StatusCode::RANGE_NOT_SATISFIABLE,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the body: fixed text, so that no client learns more about the store.
    pub(super) fn body(self) -> String {
        let (code, message) = match self {
            Self::Address => ("UNSUPPORTED", "there is nothing at this address"),
            Self::Method => ("UNSUPPORTED", "this registry is read-only"),
            Self::Name => ("NAME_INVALID", "the repository's name is invalid"),
            Self::Reference => ("DIGEST_INVALID", "the digest or tag is invalid"),
            Self::Repository => ("NAME_UNKNOWN", "this registry does not serve the repository"),
            Self::Manifest => ("MANIFEST_UNKNOWN", "the repository does not have the manifest"),
            Self::Blob => ("BLOB_UNKNOWN", "the repository does not have the blob"),
            Self::Range(_) => ("SIZE_INVALID", "the range is not within the blob, or not single"),
            Self::Busy => ("TOOMANYREQUESTS", "too many requests at a time: try again"),
            Self::Failed => {
                ("UNKNOWN", "the store cannot be read: its owner can see why in the log")
            }
        };
        format!(r#"{{"errors":[{{"code":"{code}","message":"{message}"}}]}}"#)
    }
}
