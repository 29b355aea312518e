//! `--publish`: ports of the host that lead into a container, in the syntax of docker and podman.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::str::FromStr;

use container::network::Protocol;

/// A range of ports from 1 to 65535; both ends are included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortRange {
    pub(crate) first: u16,
    pub(crate) count: NonZeroU16,
}

/// A value of `--publish`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Published {
    /// The value as the user wrote it.
    pub(crate) text: String,
    /// None means all addresses of the host.
    pub(crate) address: Option<IpAddr>,
    /// None means any free ports.
    pub(crate) host: Option<PortRange>,
    pub(crate) container: PortRange,
    pub(crate) protocol: Protocol,
}

impl PortRange {
    pub(crate) const fn last(&self) -> u16 {
        self.first.saturating_add(self.count.get() - 1)
    }
}

const FORM: &str =
    "write [[IP:]HOST:]CONTAINER[/udp], for example 8080:80 or 127.0.0.1:5353:53/udp";

impl FromStr for PortRange {
    type Err = String;

    /// Parses `80` or `8000-8010`.
    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| {
            let is_number = text.bytes().all(|it| it.is_ascii_digit());
            let port = text.parse::<u16>().ok().filter(|it| is_number && *it > 0);
            port.ok_or_else(|| format!("\"{text}\" is not a port from 1 to 65535: {FORM}"))
        };
        let (first, last) = match text.split_once('-') {
            Some((first, last)) => (port(first)?, port(last)?),
            None => (port(text)?, port(text)?),
        };
        let count = last.checked_sub(first).and_then(|it| NonZeroU16::new(it.checked_add(1)?));
        let count =
            count.ok_or_else(|| format!("the ports {text} are not in ascending order: {FORM}"))?;
        Ok(Self { first, count })
    }
}

/// Parses a value of `--publish`. An empty one publishes nothing, as in podman, because scripts have variables for it.
pub(crate) fn published(text: &str) -> Result<Option<Published>, String> {
    if text.is_empty() { Ok(None) } else { text.parse().map(Some) }
}

impl FromStr for Published {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (places, protocol) = match text.split_once('/') {
            None => (text, Protocol::Tcp),
            Some((places, "tcp")) => (places, Protocol::Tcp),
            Some((places, "udp")) => (places, Protocol::Udp),
            Some((_, other)) => return Err(format!("\"{other}\" is neither tcp nor udp: {FORM}")),
        };
        let (before, container) = match places.rsplit_once(':') {
            Some((before, container)) => (Some(before), container),
            None => (None, places),
        };
        let container: PortRange = container.parse()?;
        let (address, host) = match before.map(|it| it.rsplit_once(':').unwrap_or(("", it))) {
            None => (None, None),
            Some((address, host)) => {
                let bare = address.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
                let has_brackets = bare.is_some();
                let address = Some(bare.unwrap_or(address)).filter(|it| !it.is_empty());
                let parsed = address.map(IpAddr::from_str).transpose();
                // An IPv4 address may have brackets as well, as in podman.
                let parsed =
                    parsed.ok().filter(|it| it.is_none_or(|it| it.is_ipv4() || has_brackets));
                let address = parsed.ok_or_else(|| {
                    format!(
                        "\"{}\" is not an IP address: {FORM}, IPv6 as [::1]",
                        address.unwrap_or("")
                    )
                })?;
                let host = Some(host).filter(|it| !it.is_empty());
                (address, host.map(PortRange::from_str).transpose()?)
            }
        };
        if host.is_some_and(|it| it.count != container.count) {
            return Err(format!("{text}: the numbers of host ports and container ports differ"));
        }
        Ok(Self { text: text.to_owned(), address, host, container, protocol })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u16, count: u16) -> PortRange {
        PortRange { first, count: NonZeroU16::new(count).unwrap() }
    }

    /// Source: docker-run(1) and podman-run(1).
    #[test]
    fn published_ports_are_written_as_elsewhere() {
        let (tcp, udp) = (Protocol::Tcp, Protocol::Udp);
        for (text, address, host, container, protocol) in [
            ("80", None, None, range(80, 1), tcp),
            ("8080:80", None, Some(range(8080, 1)), range(80, 1), tcp),
            ("8080:80/udp", None, Some(range(8080, 1)), range(80, 1), udp),
            ("127.0.0.1:8080:80/tcp", Some("127.0.0.1"), Some(range(8080, 1)), range(80, 1), tcp),
            ("127.0.0.1::80", Some("127.0.0.1"), None, range(80, 1), tcp),
            ("[127.0.0.1]:8080:80", Some("127.0.0.1"), Some(range(8080, 1)), range(80, 1), tcp),
            ("[::1]:8080:80", Some("::1"), Some(range(8080, 1)), range(80, 1), tcp),
            ("8000-8002:9000-9002", None, Some(range(8000, 3)), range(9000, 3), tcp),
            ("65535:1-1", None, Some(range(65535, 1)), range(1, 1), tcp),
            ("1-65535:1-65535", None, Some(range(1, 65535)), range(1, 65535), tcp),
        ] {
            let address = address.map(|it| it.parse().unwrap());
            let expect = Published { text: text.to_owned(), address, host, container, protocol };
            assert_eq!(text.parse(), Ok(expect), "{text}");
        }
        assert_eq!(published(""), Ok(None));
        assert_eq!(published("80"), "80".parse().map(Some));
        for text in [
            "",
            " ",
            ":",
            "0",
            "65536",
            "+80",
            "80:",
            "a:80",
            "80/sctp",
            "8-7:8-7",
            "1-2:1",
            "x:1:1",
            "::1:1:1",
            "[x]:1:1",
            "[::1:1:1",
            "1:2:3:4",
            "80/",
            "8000-:8000-",
        ] {
            text.parse::<Published>().unwrap_err();
        }
    }
}
