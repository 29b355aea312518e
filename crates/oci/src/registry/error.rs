//! Errors of requests to a registry.

mod http2;
mod retry_after;

use std::error::Error;
use std::io;
use std::time::Duration;

use reqwest::header::HeaderMap;

use super::credentials::CredentialError;
use super::hosts::HostsError;
use crate::Digest;
use crate::manifest::ManifestError;
pub(super) use http2::Http2Failure;
use retry_after::retry_after;

/// Maximum number of characters of a server's message that are shown.
const WORDS_MAX: usize = 300;

/// The error of a request to a registry.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {what} at {host}{}", if *.attempts > 1 { format!(" ({attempts} attempts)") } else { String::new() }
)]
pub struct RegistryError {
    /// Description of the request, such as `fetch blob sha256:… of library/alpine`.
    pub(super) what: Box<str>,
    /// Host of the last failure.
    pub(super) host: Box<str>,
    /// Number of attempts since the last progress.
    pub(super) attempts: u32,
    /// Cause of the last failure.
    #[source]
    pub(super) cause: Box<Cause>,
}

impl RegistryError {
    pub(super) fn new(what: &str, host: &str, attempts: u32, cause: Cause) -> Self {
        Self { what: what.into(), host: host.into(), attempts, cause: Box::new(cause) }
    }

    /// Returns the host of the last failure, with its port.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the cause of the failure.
    #[must_use]
    pub fn cause(&self) -> &Cause {
        &self.cause
    }

    /// Whether the registry reports that the manifest, blob or repository does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(*self.cause, Cause::NotFound { .. } | Cause::NameUnknown { .. })
    }

    /// Whether the caller cancelled the request, by [`super::Settings::cancel`].
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(*self.cause, Cause::Cancelled)
    }
}

/// The cause of a failed attempt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The registry asks for credentials, but none are known.
    #[error("no credentials for {host}: log in to it, if the repository exists{}", said(words))]
    NoCredentials {
        /// Host of the registry.
        host: String,
        /// The registry's message.
        words: String,
    },
    /// The registry refuses the credentials.
    #[error("the registry refuses the credentials for {host}{}", said(words))]
    Refused {
        /// Host of the registry.
        host: String,
        /// The registry's message.
        words: String,
    },
    /// The registry accepts the credentials, but denies the request.
    #[error("the registry denies access{}", said(words))]
    Denied {
        /// The registry's message.
        words: String,
    },
    /// The manifest or blob does not exist.
    #[error("not found{}", said(words))]
    NotFound {
        /// The registry's message.
        words: String,
    },
    /// A manifest references a blob that the registry lacks.
    #[error("the registry lacks a blob that the manifest names{}", said(words))]
    BlobUnknown {
        /// The registry's message.
        words: String,
    },
    /// The repository does not exist.
    #[error("the repository does not exist{}", said(words))]
    NameUnknown {
        /// The registry's message.
        words: String,
    },
    /// The client sent too many requests.
    #[error(
        "the registry limits the rate of requests{}{}",
        after.map_or_else(String::new, |after| format!(": try again in {} s", after.as_secs())),
        said(words)
    )]
    RateLimited {
        /// Time until the next attempt is allowed.
        after: Option<Duration>,
        /// The registry's message.
        words: String,
    },
    /// The response has another unsuccessful status.
    #[error("the server returned status {status}{}", said(words))]
    Status {
        /// HTTP status code.
        status: u16,
        /// Time until the next attempt is allowed.
        after: Option<Duration>,
        /// The registry's message.
        words: String,
    },
    /// The server's certificate is signed by an unknown authority.
    #[error(
        "its certificate is signed by an unknown authority: put that CA's certificate into certs.d/{host}/ca.crt, \
         below /etc/quire or the folder of your settings"
    )]
    UnknownCa {
        /// Host of the registry.
        host: String,
    },
    /// The TLS connection failed for another reason.
    #[error("the TLS handshake failed ({0})")]
    Tls(String),
    /// A certificate, key or CA file of the client is unusable.
    #[error("cannot use the certificate file {}: {reason}", path.display())]
    Certificate {
        /// Path of the file.
        path: std::path::PathBuf,
        /// The reason.
        reason: String,
    },
    /// The server uses HTTP, but TLS is expected.
    #[error("the server speaks HTTP, not HTTPS: use --plain-http if the network is trusted")]
    PlainHttp,
    /// The server uses TLS, but HTTP is expected.
    #[error(
        "the server speaks HTTPS, not HTTP: leave out --plain-http, or write server = \"https://{host}\" \
         into certs.d/{host}/hosts.toml"
    )]
    WantsTls {
        /// Host of the registry.
        host: String,
    },
    /// The host name cannot be resolved.
    #[error("the host name cannot be resolved ({0})")]
    Dns(String),
    /// The server refused the connection.
    #[error("the connection is refused: no program listens at this address")]
    ConnectionRefused,
    /// The connection failed or was interrupted.
    #[error("the connection was lost ({0})")]
    Connection(String),
    /// The proxy could not connect.
    #[error("the proxy refused to connect ({0})")]
    Proxy(String),
    /// The connection was not established within this time.
    #[error("timed out after {} s while connecting", .0.as_secs_f32())]
    ConnectTimeout(Duration),
    /// The connection transferred no bytes for this time.
    #[error("received nothing for {} s", .0.as_secs_f32())]
    Stalled(Duration),
    /// A small document arrived too slowly, over all attempts.
    #[error("received only {received} bytes within {} s", seconds.as_secs_f32())]
    Overdue {
        /// Bytes received in all attempts.
        received: u64,
        /// Time limit of all attempts.
        seconds: Duration,
    },
    /// A layer arrived too slowly.
    #[error("the connection is too slow: {received} bytes received, at less than 1 KiB/s for {} s",
        seconds.as_secs_f32())]
    TooSlow {
        /// Bytes received.
        received: u64,
        /// Time limit of the attempt.
        seconds: Duration,
    },
    /// The response has an unexpected media type, most often that of a web page.
    #[error("the server sent {received}, not {expected}")]
    Foreign {
        /// Media type of the response.
        received: String,
        /// Expected kind of document: a manifest, a list, a token.
        expected: &'static str,
    },
    /// The content is too short.
    #[error("the content ended after {actual} of {expected} bytes")]
    Short {
        /// Bytes received.
        actual: u64,
        /// Expected size, in bytes.
        expected: u64,
    },
    /// The content is too long.
    #[error("the content has more than {max} bytes")]
    TooLong {
        /// Maximum or expected size, in bytes.
        max: u64,
    },
    /// The server announces another length than the known one.
    #[error("the server announces {actual} bytes instead of {expected}")]
    Length {
        /// Announced length, in bytes.
        actual: u64,
        /// Known length, in bytes.
        expected: u64,
    },
    /// The server sent another range than the requested one.
    #[error("requested the bytes from {asked}, but the server sent the range \"{}\"", answer.escape_debug())]
    ContentRange {
        /// Offset of the first requested byte.
        asked: u64,
        /// `Content-Range` of the response.
        answer: String,
    },
    /// The content does not have the requested digest.
    #[error("the content has the digest {actual}, not {expected}")]
    Digest {
        /// Requested digest.
        expected: Box<Digest>,
        /// Digest of the content.
        actual: Box<Digest>,
    },
    /// The content does not have the digest that the server claims.
    #[error("the content has the digest {actual}, but the server states \"{}\"", claimed.escape_debug())]
    ClaimedDigest {
        /// `Docker-Content-Digest` of the response.
        claimed: String,
        /// Digest of the content.
        actual: Box<Digest>,
    },
    /// The response violates HTTP or the registry protocol.
    #[error("the server's response is not valid: {0}")]
    Protocol(String),
    /// A document in the response is invalid.
    #[error("cannot use the server's response")]
    Document(#[source] ManifestError),
    /// The server redirects from a secure connection to an insecure one.
    #[error("it redirects to {0} without TLS")]
    Downgrade(String),
    /// The server redirected to another host, where the request failed.
    #[error("the registry redirects to {host}")]
    Elsewhere {
        /// Host to which the server redirected.
        host: String,
        /// Cause of the failure at that host.
        source: Box<Self>,
    },
    /// The token server sent no token.
    #[error("cannot get an access token from {host}")]
    Token {
        /// Host of the token server.
        host: String,
        /// Cause.
        source: Box<Self>,
    },
    /// The registry lost an upload after this many bytes. Only the caller can restart the upload, with a new reader.
    #[error("the registry lost the upload after {0} bytes")]
    UploadLost(u64),
    /// The registry requires chunks that are too large to be held in memory.
    #[error(
        "it requires chunks of at least {least} bytes, and Quire sends at most {max} bytes at once"
    )]
    ChunkSize {
        /// Minimum size that the registry requires, in bytes.
        least: u64,
        /// Maximum size of a chunk, in bytes.
        max: u64,
    },
    /// The data to upload cannot be read.
    #[error("cannot read the data to upload")]
    Read(#[source] io::Error),
    /// The credentials are unusable.
    #[error("cannot use the credentials")]
    Credentials(#[source] CredentialError),
    /// The settings for the registry are unusable.
    #[error("cannot use the settings for the registry")]
    Hosts(#[source] HostsError),
    /// The settings allow this request for no host.
    #[error("the settings allow no host for this request")]
    NoHost,
    /// A setting is unusable.
    #[error("cannot use {0}")]
    Setting(String),
    /// The network thread cannot be started.
    #[error("cannot start the network thread")]
    Thread(#[source] io::Error),
    /// The caller cancelled the request.
    #[error("cancelled")]
    Cancelled,
}

/// The next step after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Remedy {
    /// Give up.
    None,
    /// Try another host.
    Elsewhere,
    /// Try another host, or this one later, after the time that the host requests, if any.
    Later(Option<Duration>),
}

impl Cause {
    pub(super) fn remedy(&self) -> Remedy {
        match self {
            Self::Cancelled | Self::Read(_) | Self::Thread(_) | Self::Setting(_) => Remedy::None,
            Self::RateLimited { after, .. } => Remedy::Later(*after),
            Self::Status { status, after, .. } if is_passing(*status) => Remedy::Later(*after),
            Self::Connection(_)
            | Self::Proxy(_)
            | Self::ConnectTimeout(_)
            | Self::Stalled(_)
            | Self::TooSlow { .. }
            | Self::Short { .. }
            // The registry may be restarting.
            | Self::ConnectionRefused => Remedy::Later(None),
            // The signature in the redirect has expired. The registry makes a new one when asked again.
            Self::Elsewhere { source, .. }
                if matches!(**source, Self::Denied { .. } | Self::NoCredentials { .. }) =>
            {
                Remedy::Later(None)
            }
            Self::Elsewhere { source, .. } | Self::Token { source, .. } => source.remedy(),
            _ => Remedy::Elsewhere,
        }
    }

    /// Whether the host has decided the request, so that a retry is pointless.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::NotFound { .. }
                | Self::NameUnknown { .. }
                | Self::NoCredentials { .. }
                | Self::Refused { .. }
                | Self::Denied { .. }
        )
    }

    /// Whether the attempt received too little in its time limit.
    pub(super) fn is_slow(&self) -> bool {
        match self {
            Self::TooSlow { .. } => true,
            Self::Elsewhere { source, .. } => source.is_slow(),
            _ => false,
        }
    }

    /// Whether the host used up a time limit.
    pub(super) fn is_late(&self) -> bool {
        match self {
            Self::Stalled(_) | Self::TooSlow { .. } | Self::Overdue { .. } => true,
            Self::Elsewhere { source, .. } | Self::Token { source, .. } => source.is_late(),
            _ => false,
        }
    }

    /// Whether no connection to the host is possible.
    pub(super) fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::ConnectTimeout(_)
                | Self::ConnectionRefused
                | Self::Dns(_)
                | Self::UnknownCa { .. }
        )
    }

    /// Adds the host to which the request was redirected, if it was.
    pub(super) fn at(self, elsewhere: Option<&str>) -> Self {
        match elsewhere {
            None => self,
            Some(host) => Self::Elsewhere { host: host.to_owned(), source: Box::new(self) },
        }
    }

    /// Returns the cause of a request that failed before or during the response.
    pub(super) fn of_request(error: reqwest::Error, host: &str, connect: Duration) -> Self {
        // The address may contain a signature, which is as secret as a password.
        let error = error.without_url();
        let (is_connect, is_timeout) = (error.is_connect(), error.is_timeout());
        let mut words = Vec::new();
        let mut next: Option<&(dyn Error + 'static)> = Some(&error);
        while let Some(one) = next {
            if let Some(tls) = one.downcast_ref::<rustls::Error>() {
                return Self::of_tls(tls, host);
            }
            if let Some(error) = one.downcast_ref::<io::Error>() {
                if error.kind() == io::ErrorKind::ConnectionRefused {
                    return Self::ConnectionRefused;
                }
                if let Some(tls) = tls_within(error) {
                    return Self::of_tls(tls, host);
                }
            }
            if let Some(error) = one.downcast_ref::<h2::Error>() {
                return Self::of_http2(error);
            }
            words.push(one.to_string());
            next = one.source();
        }
        // Source: hyper, `proto/h2/ping.rs`.
        if words.iter().any(|text| text == "keep-alive timed out") {
            return Self::Connection("the server does not reply to HTTP/2 pings".to_owned());
        }
        // Source: hyper-util, `client/legacy/connect/proxy`.
        let is_proxy =
            words.iter().any(|it| it.starts_with("tunnel error") || it.starts_with("SOCKS error"));
        let is_dns = words.iter().any(|text| text == "dns error");
        let last = escaped(&words.pop().unwrap_or_default());
        if is_proxy {
            return Self::Proxy(last);
        }
        match (is_connect, is_timeout, is_dns) {
            (_, _, true) => Self::Dns(last),
            (true, true, _) => Self::ConnectTimeout(connect),
            _ => Self::Connection(last),
        }
    }

    fn of_tls(error: &rustls::Error, host: &str) -> Self {
        use rustls::{CertificateError, InvalidMessage};
        match error {
            rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
                Self::UnknownCa { host: host.to_owned() }
            }
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => Self::PlainHttp,
            other => Self::Tls(escaped(&other.to_string())),
        }
    }

    /// Returns the cause that an unsuccessful response means.
    pub(super) fn of_status(status: u16, headers: &HeaderMap, body: &[u8], host: &str) -> Self {
        let Said { code, words } = Said::parse(body);
        let after = retry_after(headers);
        match (status, code.as_str()) {
            (400, _)
                if String::from_utf8_lossy(body).contains("HTTP request to an HTTPS server") =>
            {
                Self::WantsTls { host: host.to_owned() }
            }
            (400 | 404, "MANIFEST_BLOB_UNKNOWN") => Self::BlobUnknown { words },
            (401, _) => Self::NoCredentials { host: host.to_owned(), words },
            (403, _) => Self::Denied { words },
            (404, "NAME_UNKNOWN") => Self::NameUnknown { words },
            (404, _) => Self::NotFound { words },
            (429, _) => Self::RateLimited { after, words },
            _ => Self::Status { status, after, words },
        }
    }
}

/// Finds a TLS error in nested I/O errors, which `source` does not show.
fn tls_within(error: &io::Error) -> Option<&rustls::Error> {
    let inner = error.get_ref()?;
    inner.downcast_ref().or_else(|| tls_within(inner.downcast_ref()?))
}

/// Whether the error of a status may be temporary.
fn is_passing(status: u16) -> bool {
    matches!(status, 408 | 425) || (500..=599).contains(&status) && !matches!(status, 501 | 505)
}

fn said(words: &str) -> String {
    if words.is_empty() { String::new() } else { format!(" (the server says: \"{words}\")") }
}

/// Escapes and truncates a server's message for display.
pub(super) fn escaped(words: &str) -> String {
    let mut text: String = words.chars().take(WORDS_MAX).flat_map(char::escape_debug).collect();
    if words.chars().nth(WORDS_MAX).is_some() {
        text.push('…');
    }
    text
}

/// The first error in a registry's response. Source: OCI distribution-spec 1.1, "Error Codes".
#[derive(Default)]
struct Said {
    code: String,
    words: String,
}

impl Said {
    fn parse(body: &[u8]) -> Self {
        #[derive(serde::Deserialize)]
        struct Errors {
            errors: Vec<One>,
        }
        #[derive(serde::Deserialize)]
        struct One {
            #[serde(default)]
            code: String,
            #[serde(default)]
            message: String,
        }
        let first = serde_json::from_slice(body)
            .ok()
            .and_then(|Errors { errors }| errors.into_iter().next());
        first.map_or_else(Self::default, |One { code, message }| Self {
            words: escaped(if message.is_empty() { &code } else { &message }),
            code,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(status: u16, body: &str, expect: &str) {
        let cause = Cause::of_status(status, &HeaderMap::new(), body.as_bytes(), "a.io");
        assert_eq!(cause.to_string(), expect, "{status} {body}");
    }

    #[test]
    fn what_a_registry_says() {
        let error = |code: &str, message: &str| {
            format!(
                r#"{{"errors":[{{"code":"{code}","message":"{message}","detail":{{"x":1}}}}]}}"#
            )
        };
        check(
            404,
            &error("MANIFEST_UNKNOWN", "manifest unknown"),
            "not found (the server says: \"manifest unknown\")",
        );
        check(
            404,
            &error("NAME_UNKNOWN", ""),
            "the repository does not exist (the server says: \"NAME_UNKNOWN\")",
        );
        check(404, "<html>", "not found");
        check(
            403,
            &error("DENIED", "no\\u001b[31m"),
            "the registry denies access (the server says: \"no\\u{1b}[31m\")",
        );
        check(401, "", "no credentials for a.io: log in to it, if the repository exists");
        check(
            404,
            &error("MANIFEST_BLOB_UNKNOWN", "blob unknown to registry"),
            "the registry lacks a blob that the manifest names (the server says: \"blob unknown to \
             registry\")",
        );
        check(429, "", "the registry limits the rate of requests");
        check(500, "{}", "the server returned status 500");
        let long =
            Cause::of_status(500, &HeaderMap::new(), error("X", &"y".repeat(9000)).as_bytes(), "a");
        assert!(long.to_string().len() < 400, "{long}");
    }

    #[test]
    fn what_may_help() {
        let of = |status| Cause::of_status(status, &HeaderMap::new(), b"", "a").remedy();
        for status in [408, 425, 429, 500, 502, 503, 504, 599] {
            assert_eq!(of(status), Remedy::Later(None), "{status}");
        }
        for status in [400, 401, 403, 404, 405, 416, 501, 505] {
            assert_eq!(of(status), Remedy::Elsewhere, "{status}");
        }
        assert_eq!(Cause::Cancelled.remedy(), Remedy::None);
    }
}
