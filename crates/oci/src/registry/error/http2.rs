//! Errors of HTTP/2 streams and connections.

use std::error::Error;

use h2::Reason;

use super::{Cause, escaped};

/// The state of a server's HTTP/2 that a failure shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::registry) enum Http2Failure {
    /// HTTP/2 does not work, so HTTP/1.1 is worth a try.
    Broken,
    /// The server has ended the connection or refused a request, as HTTP/2 permits.
    Usual,
    /// The connection was lost, or another version was used.
    Unknown,
}

impl Http2Failure {
    pub(in crate::registry) fn of(error: &reqwest::Error) -> Self {
        let mut next: Option<&(dyn Error + 'static)> = Some(error);
        while let Some(one) = next {
            match one.downcast_ref::<h2::Error>() {
                Some(error) if error.is_io() => return Self::Unknown,
                Some(error) if error.reason().is_none_or(is_broken) => return Self::Broken,
                Some(_) => return Self::Usual,
                None => next = one.source(),
            }
        }
        Self::Unknown
    }
}

/// Whether a code is not one of those with which servers shut down, refuse or slow down requests.
fn is_broken(code: Reason) -> bool {
    ![Reason::NO_ERROR, Reason::REFUSED_STREAM, Reason::CANCEL, Reason::ENHANCE_YOUR_CALM]
        .contains(&code)
}

impl Cause {
    /// Returns the cause of a failed HTTP/2 request, with the code's name in RFC 9113, 7.
    pub(super) fn of_http2(error: &h2::Error) -> Self {
        let Some(code) = error.reason() else {
            return Self::Connection(escaped(&error.to_string()));
        };
        let what = match (error.is_remote(), error.is_go_away()) {
            (true, true) => "the server closed the HTTP/2 connection",
            (true, false) => "the server reset the HTTP/2 stream",
            (false, _) => "the server violates HTTP/2",
        };
        Self::Connection(format!("{what}: {code:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes are those of RFC 9113, 7.
    #[test]
    fn codes_after_which_http1_is_used() {
        let broken: Vec<u32> = (0..15).filter(|code| is_broken((*code).into())).collect();
        assert_eq!(broken, [1, 2, 3, 4, 5, 6, 9, 10, 12, 13, 14]);
    }
}
