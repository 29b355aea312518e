//! The address at which metrics are served.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Where a service serves its metrics by HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address and a port.
    Network(SocketAddr),
    /// A socket that only root can use.
    Socket(PathBuf),
}

impl MetricsAddress {
    /// Parses `ADDRESS:PORT` or an absolute path. Names of hosts are not looked up.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if Path::new(text).is_absolute() {
            return Some(Self::Socket(text.into()));
        }
        text.parse().ok().map(Self::Network)
    }

    /// Whether only programs on this host reach the address.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Network(address) => address.ip().to_canonical().is_loopback(),
            Self::Socket(_) => true,
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(address) => write!(f, "{address}"),
            Self::Socket(path) => write!(f, "{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_and_sockets_are_local() {
        let check = |text: &str, expect: Option<bool>| {
            let parsed = MetricsAddress::parse(text);
            assert_eq!(parsed.as_ref().map(MetricsAddress::is_local), expect, "{text}");
            assert!(parsed.is_none_or(|it| it.to_string() == text), "{text}");
        };
        for local in ["127.0.0.1:9110", "127.9.9.9:0", "[::1]:9110", "/run/quire/metrics.sock"] {
            check(local, Some(true));
        }
        check("[::ffff:127.0.0.1]:9110", Some(true));
        for other in ["0.0.0.0:9110", "[::]:9110", "10.0.0.5:9110", "[2001:db8::1]:9110"] {
            check(other, Some(false));
        }
        for wrong in ["", "9110", ":9110", "localhost:9110", "127.0.0.1", "127.0.0.1:65536", "run"]
        {
            check(wrong, None);
        }
    }
}
