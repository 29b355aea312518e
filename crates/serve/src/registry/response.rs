//! Responses, with the headers that all of them have.

use std::io;
use std::ops::Range;

use http_body_util::{Either, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use hyper::header::{
    ACCEPT_RANGES, ALLOW, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderName, HeaderValue,
    RETRY_AFTER,
};
use hyper::{Response, StatusCode};
use image::digest::Digest;
use oci::registry::{PEER_HEADER, PEER_LAYERS};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::error::Refused;
use super::quota::Held;

/// Parts of a body, as they are read.
pub(super) type Parts = mpsc::Receiver<io::Result<Frame<Bytes>>>;
pub(super) type Body = Either<Full<Bytes>, StreamBody<ReceiverStream<io::Result<Frame<Bytes>>>>>;

const VERSION: HeaderName = HeaderName::from_static("docker-distribution-api-version");
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");
/// Source: OCI distribution-spec 1.1, "Listing Referrers".
const FILTERS_APPLIED: HeaderName = HeaderName::from_static("oci-filters-applied");
/// Maximum size of a document that is sent without a slot, in bytes. It fits into the buffers of most connections.
const SMALL: usize = 64 << 10;
const BLOB: &str = "application/octet-stream";

/// Returns a response with a body in memory.
pub(super) fn whole(
    status: StatusCode,
    media_type: &str,
    body: impl Into<Bytes>,
) -> Response<Body> {
    let body = body.into();
    let length = body.len() as u64;
    let mut response = Response::new(Either::Left(Full::new(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_LENGTH, length.into());
    // A media type in a document of the store may have any characters.
    let kind = HeaderValue::from_str(media_type);
    headers.insert(CONTENT_TYPE, kind.unwrap_or(HeaderValue::from_static(BLOB)));
    with_common(response)
}

/// A document with the slot of its request, which is free again when the document was sent.
struct HeldDocument {
    bytes: Vec<u8>,
    /// Dropped with the bytes.
    _slot: Held,
}

impl AsRef<[u8]> for HeldDocument {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Returns a response with a document of the store. A large one keeps the slot until it was sent, so that slow clients
/// cannot keep more of them in memory than there are slots.
pub(super) fn document(
    digest: &Digest,
    media_type: &str,
    bytes: Vec<u8>,
    slot: Held,
) -> Response<Body> {
    let body = match bytes.len() {
        ..=SMALL => Bytes::from(bytes),
        _ => Bytes::from_owner(HeldDocument { bytes, _slot: slot }),
    };
    let mut response = whole(StatusCode::OK, media_type, body);
    add_digest(&mut response, digest);
    response
}

/// Returns a list of referrers of one type.
pub(super) fn list(bytes: Vec<u8>) -> Response<Body> {
    let mut response = whole(StatusCode::OK, oci::manifest::INDEX, bytes);
    response.headers_mut().insert(FILTERS_APPLIED, HeaderValue::from_static("artifactType"));
    response
}

/// Returns the head of a response with `size` bytes, or a part of them.
pub(super) fn head(digest: &Digest, size: u64, part: Option<&Range<u64>>) -> Response<Body> {
    let mut response = whole(StatusCode::OK, BLOB, Vec::new());
    let headers = response.headers_mut();
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    let length = part.map_or(size, |part| part.end - part.start);
    headers.insert(CONTENT_LENGTH, length.into());
    if let Some(Range { start, end }) = part {
        let text = format!("bytes {start}-{}/{size}", end - 1);
        headers.insert(CONTENT_RANGE, ascii(&text));
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    add_digest(&mut response, digest);
    response
}

/// Replaces the body of a response by parts that follow.
pub(super) fn with_parts(response: Response<Body>, parts: Parts) -> Response<Body> {
    response.map(|_| Either::Right(StreamBody::new(ReceiverStream::new(parts))))
}

/// Returns the response with an error.
pub(super) fn refusal(refused: Refused) -> Response<Body> {
    let mut response = whole(refused.status(), "application/json", refused.body().into_bytes());
    let headers = response.headers_mut();
    match refused {
        Refused::Method => drop(headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"))),
        Refused::Busy => drop(headers.insert(RETRY_AFTER, HeaderValue::from_static("1"))),
        Refused::Range(size) => {
            drop(headers.insert(CONTENT_RANGE, ascii(&format!("bytes */{size}"))));
        }
        _ => {}
    }
    response
}

fn add_digest(response: &mut Response<Body>, digest: &Digest) {
    response.headers_mut().insert(CONTENT_DIGEST, ascii(&digest.to_string()));
}

fn with_common(mut response: Response<Body>) -> Response<Body> {
    let headers = response.headers_mut();
    headers.insert(VERSION, HeaderValue::from_static("registry/2.0"));
    headers.insert(HeaderName::from_static(PEER_HEADER), HeaderValue::from_static(PEER_LAYERS));
    response
}

fn ascii(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).expect("digits, letters and punctuation of ASCII")
}
