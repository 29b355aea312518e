//! Why a request to a registry failed.

use std::error::Error;
use std::io;
use std::time::Duration;

use reqwest::header::HeaderMap;

use super::credentials::CredentialError;
use super::hosts::HostsError;
use super::retry_after::retry_after;
use crate::Digest;
use crate::manifest::ManifestError;

/// The most characters of a server's own words that are shown.
const WORDS_MAX: usize = 300;

/// A request to a registry, and why it failed.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {what} at {host}{}", if *.attempts > 1 { format!(" ({attempts} attempts)") } else { String::new() }
)]
pub struct RegistryError {
    /// `fetch blob sha256:… of library/alpine`.
    pub(super) what: Box<str>,
    /// The host that failed last.
    pub(super) host: Box<str>,
    /// Attempts since the last progress.
    pub(super) attempts: u32,
    /// Why.
    #[source]
    pub(super) cause: Box<Cause>,
}

impl RegistryError {
    pub(super) fn new(what: &str, host: &str, attempts: u32, cause: Cause) -> Self {
        Self { what: what.into(), host: host.into(), attempts, cause: Box::new(cause) }
    }

    /// The host that failed last, with its port.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Why it failed.
    #[must_use]
    pub fn cause(&self) -> &Cause {
        &self.cause
    }

    /// Whether the registry says that there is no such thing.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(*self.cause, Cause::NotFound { .. } | Cause::NameUnknown { .. })
    }

    /// Whether the caller cancelled it, by [`super::Settings::cancel`].
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(*self.cause, Cause::Cancelled)
    }
}

/// Why one attempt failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// It asks for credentials, and there are none.
    #[error("no credentials for {host}: log in to it, if the repository exists{}", said(words))]
    NoCredentials {
        /// The registry.
        host: String,
        /// The registry's message.
        words: String,
    },
    /// It does not accept the credentials.
    #[error("the credentials for {host} are refused{}", said(words))]
    Refused {
        /// The registry.
        host: String,
        /// The registry's message.
        words: String,
    },
    /// It accepts the credentials, but does not allow the request.
    #[error("access is denied{}", said(words))]
    Denied {
        /// The registry's message.
        words: String,
    },
    /// There is no such manifest or blob.
    #[error("it is not there{}", said(words))]
    NotFound {
        /// The registry's message.
        words: String,
    },
    /// A manifest names a blob that the registry lacks.
    #[error("it lacks a blob that the manifest names{}", said(words))]
    BlobUnknown {
        /// The registry's message.
        words: String,
    },
    /// There is no such repository.
    #[error("there is no such repository{}", said(words))]
    NameUnknown {
        /// The registry's message.
        words: String,
    },
    /// Too many requests.
    #[error(
        "the registry limits the rate of requests{}{}",
        after.map_or_else(String::new, |after| format!(": try again in {} s", after.as_secs())),
        said(words)
    )]
    RateLimited {
        /// When to try again, from now.
        after: Option<Duration>,
        /// The registry's message.
        words: String,
    },
    /// Any other status that is not a success.
    #[error("it answers with status {status}{}", said(words))]
    Status {
        /// Status code of HTTP.
        status: u16,
        /// When to try again, from now.
        after: Option<Duration>,
        /// The registry's message.
        words: String,
    },
    /// An unknown authority signed its certificate.
    #[error(
        "its certificate is signed by an unknown authority: put that CA's certificate into certs.d/{host}/ca.crt, \
         below /etc/quire or the folder of your settings"
    )]
    UnknownCa {
        /// The registry.
        host: String,
    },
    /// TLS failed for another reason.
    #[error("no secure connection ({0})")]
    Tls(String),
    /// A certificate, key or CA file of the client cannot be used.
    #[error("cannot use the certificate file {}: {reason}", path.display())]
    Certificate {
        /// The file.
        path: std::path::PathBuf,
        /// The reason.
        reason: String,
    },
    /// It speaks HTTP where TLS is expected.
    #[error("the server speaks HTTP, not HTTPS: use --plain-http if the network is trusted")]
    PlainHttp,
    /// It speaks TLS where HTTP is expected.
    #[error(
        "the server speaks HTTPS, not HTTP: leave out --plain-http, or write server = \"https://{host}\" \
         into certs.d/{host}/hosts.toml"
    )]
    WantsTls {
        /// The registry.
        host: String,
    },
    /// The name has no address.
    #[error("the host name cannot be resolved ({0})")]
    Dns(String),
    /// It refused the connection.
    #[error("the connection is refused: nothing listens there")]
    ConnectionRefused,
    /// The connection failed or broke off.
    #[error("the connection broke ({0})")]
    Connection(String),
    /// The proxy did not make the connection.
    #[error("the proxy refuses to connect ({0})")]
    Proxy(String),
    /// The connection was not made in time.
    #[error("no connection within {} s", .0.as_secs_f32())]
    ConnectTimeout(Duration),
    /// No bytes came for this long.
    #[error("nothing came for {} s", .0.as_secs_f32())]
    Stalled(Duration),
    /// A small document came too slowly, over all attempts.
    #[error("only {received} bytes of it came in {} s", seconds.as_secs_f32())]
    Overdue {
        /// Bytes that came, in all attempts.
        received: u64,
        /// Time of all attempts.
        seconds: Duration,
    },
    /// A layer came too slowly.
    #[error("the connection is too slow: it gave {received} bytes, and less than 1 KiB/s for {} s", seconds.as_secs_f32())]
    TooSlow {
        /// Bytes that came.
        received: u64,
        /// Time in which they came.
        seconds: Duration,
    },
    /// Another media type, most often a web page.
    #[error("the server sent {received}, not {expected}")]
    Foreign {
        /// Its media type.
        received: String,
        /// The wanted kind: a manifest, a list, a token.
        expected: &'static str,
    },
    /// Too few bytes came.
    #[error("the content ended after {actual} of {expected} bytes")]
    Short {
        /// Bytes that came.
        actual: u64,
        /// Bytes that were expected.
        expected: u64,
    },
    /// Too many bytes came.
    #[error("the content has more than {max} bytes")]
    TooLong {
        /// Bytes that were expected.
        max: u64,
    },
    /// It announces another length than the known one.
    #[error("the server announces {actual} bytes instead of {expected}")]
    Length {
        /// The announced length, in bytes.
        actual: u64,
        /// The known length, in bytes.
        expected: u64,
    },
    /// It sent another range than the wanted one.
    #[error("asked for the bytes from {asked}, the server sends \"{}\"", answer.escape_debug())]
    ContentRange {
        /// First byte of the wanted range.
        asked: u64,
        /// Its `Content-Range`.
        answer: String,
    },
    /// The content has another digest.
    #[error("the content has the digest {actual}, not {expected}")]
    Digest {
        /// The wanted digest.
        expected: Box<Digest>,
        /// Digest of the content.
        actual: Box<Digest>,
    },
    /// The content does not have the digest that the server claims.
    #[error("the content has the digest {actual}, but the server calls it \"{}\"", claimed.escape_debug())]
    ClaimedDigest {
        /// Its `Docker-Content-Digest`.
        claimed: String,
        /// Digest of the content.
        actual: Box<Digest>,
    },
    /// An answer that breaks the rules of HTTP or of the registry protocol.
    #[error("the server's answer is not valid: {0}")]
    Protocol(String),
    /// A document that cannot be used.
    #[error("cannot use its answer")]
    Document(#[source] ManifestError),
    /// A redirect from a secure connection to an insecure one.
    #[error("it redirects to {0} without TLS")]
    Downgrade(String),
    /// It redirected to another host, where the request failed.
    #[error("it leads to {host}")]
    Elsewhere {
        /// The other host.
        host: String,
        /// The failure there.
        source: Box<Self>,
    },
    /// The token server gave no token.
    #[error("cannot get an access token from {host}")]
    Token {
        /// The token server.
        host: String,
        /// The cause.
        source: Box<Self>,
    },
    /// The registry lost an upload after this many bytes, and it cannot begin again.
    #[error("the registry has lost the upload after {0} bytes")]
    UploadLost(u64),
    /// The data to upload cannot be read.
    #[error("cannot read the data to upload")]
    Read(#[source] io::Error),
    /// Credentials that cannot be used.
    #[error("cannot use the credentials")]
    Credentials(#[source] CredentialError),
    /// Settings that cannot be used.
    #[error("cannot use the settings for the registry")]
    Hosts(#[source] HostsError),
    /// No known host may be asked for this.
    #[error("the settings allow no host for this request")]
    NoHost,
    /// A setting that cannot be used.
    #[error("cannot use {0}")]
    Setting(String),
    /// A thread cannot be started.
    #[error("cannot start the thread for the network")]
    Thread(#[source] io::Error),
    /// The caller cancelled it.
    #[error("cancelled")]
    Cancelled,
}

/// What may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Remedy {
    /// Nothing.
    None,
    /// Another host.
    Elsewhere,
    /// Another host, or this one later: not before so long, where it says so.
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
            // A registry that is being restarted.
            | Self::ConnectionRefused => Remedy::Later(None),
            // That host does not know the signature any more: the registry makes a new one when asked again.
            Self::Elsewhere { source, .. }
                if matches!(**source, Self::Denied { .. } | Self::NoCredentials { .. }) =>
            {
                Remedy::Later(None)
            }
            Self::Elsewhere { source, .. } | Self::Token { source, .. } => source.remedy(),
            _ => Remedy::Elsewhere,
        }
    }

    /// The host has answered, and means it.
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

    /// Too little came in all the time that an attempt has.
    pub(super) fn is_slow(&self) -> bool {
        match self {
            Self::TooSlow { .. } => true,
            Self::Elsewhere { source, .. } => source.is_slow(),
            _ => false,
        }
    }

    /// The host cannot even be connected to.
    pub(super) fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::ConnectTimeout(_)
                | Self::ConnectionRefused
                | Self::Dns(_)
                | Self::UnknownCa { .. }
        )
    }

    /// Names the host that the one that was asked has led to, if it did.
    pub(super) fn at(self, elsewhere: Option<&str>) -> Self {
        match elsewhere {
            None => self,
            Some(host) => Self::Elsewhere { host: host.to_owned(), source: Box::new(self) },
        }
    }

    /// Why a request failed before there was an answer, or in mid-answer.
    pub(super) fn of_request(error: reqwest::Error, host: &str, connect: Duration) -> Self {
        // The address may have a signature in it that is as good as a password.
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
            words.push(one.to_string());
            next = one.source();
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

    /// What an answer means that is no success.
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

/// Errors of TLS come as errors of I/O, within one another, which `source` does not show.
fn tls_within(error: &io::Error) -> Option<&rustls::Error> {
    let inner = error.get_ref()?;
    inner.downcast_ref().or_else(|| tls_within(inner.downcast_ref()?))
}

/// Whether a status may be another one later.
fn is_passing(status: u16) -> bool {
    matches!(status, 408 | 425) || (500..=599).contains(&status) && !matches!(status, 501 | 505)
}

fn said(words: &str) -> String {
    if words.is_empty() { String::new() } else { format!(" (it says \"{words}\")") }
}

/// A server's words as they may be shown.
pub(super) fn escaped(words: &str) -> String {
    let mut text: String = words.chars().take(WORDS_MAX).flat_map(char::escape_debug).collect();
    if words.chars().nth(WORDS_MAX).is_some() {
        text.push('…');
    }
    text
}

/// The first of a registry's errors. Source: OCI distribution-spec 1.1, "Error Codes".
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
            "it is not there (it says \"manifest unknown\")",
        );
        check(
            404,
            &error("NAME_UNKNOWN", ""),
            "there is no such repository (it says \"NAME_UNKNOWN\")",
        );
        check(404, "<html>", "it is not there");
        check(
            403,
            &error("DENIED", "no\\u001b[31m"),
            "access is denied (it says \"no\\u{1b}[31m\")",
        );
        check(401, "", "no credentials for a.io: log in to it, if the repository exists");
        check(
            404,
            &error("MANIFEST_BLOB_UNKNOWN", "blob unknown to registry"),
            "it lacks a blob that the manifest names (it says \"blob unknown to registry\")",
        );
        check(429, "", "the registry limits the rate of requests");
        check(500, "{}", "it answers with status 500");
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
