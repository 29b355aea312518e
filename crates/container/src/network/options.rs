//! Options of pasta that a user may choose, in podman's form: `pasta:-4,--mtu,1280`.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Options for a network of pasta, each a word of pasta's command line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PastaOptions(Vec<String>);

/// Reason why options are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PastaOptionsError {
    /// An unknown option, or one that Quire sets itself.
    #[error(
        "\"{}\" is not an option of pasta that you may choose: use addresses (-a, -n, -g, -M), interfaces (-i, -o, -I), \
        --mtu, -4, -6, ports (-t, -u, -T, -U) or --map-gw",
        .0.escape_debug()
    )]
    Unknown(String),
    /// An option without its value.
    #[error("{0} of pasta needs a value: write pasta:{0},VALUE")]
    NoValue(String),
}

/// Whether a value follows an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Follows {
    Nothing,
    Value,
}

/// All options: their letter and their name. Options that write files, change pasta's user or lead to another namespace
/// are not among them, and neither is --dns-forward, because Quire writes the container's resolv.conf. Source: pasta(1).
const OPTIONS: [(&str, &str, Follows); 18] = [
    ("-4", "--ipv4-only", Follows::Nothing),
    ("-6", "--ipv6-only", Follows::Nothing),
    ("-a", "--address", Follows::Value),
    ("-n", "--netmask", Follows::Value),
    ("-g", "--gateway", Follows::Value),
    ("-M", "--mac-addr", Follows::Value),
    ("-m", "--mtu", Follows::Value),
    ("-i", "--interface", Follows::Value),
    ("-o", "--outbound", Follows::Value),
    ("", "--outbound-if4", Follows::Value),
    ("", "--outbound-if6", Follows::Value),
    ("-I", "--ns-ifname", Follows::Value),
    ("-t", "--tcp-ports", Follows::Value),
    ("-u", "--udp-ports", Follows::Value),
    ("-T", "--tcp-ns", Follows::Value),
    ("-U", "--udp-ns", Follows::Value),
    ("", MAP_GATEWAY, Follows::Nothing),
    ("", "--no-map-gw", Follows::Nothing),
];

/// Podman's opposite of pasta's `--no-map-gw`, which is no option of pasta.
const MAP_GATEWAY: &str = "--map-gw";

impl FromStr for PastaOptions {
    type Err = PastaOptionsError;

    /// Parses words separated by commas, as podman does.
    fn from_str(text: &str) -> Result<Self, PastaOptionsError> {
        let mut words = Vec::new();
        let mut rest = text.split(',');
        while let Some(word) = rest.next() {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name, Some(value)),
                _ => (word, None),
            };
            let known = OPTIONS
                .iter()
                .find(|(letter, long, _)| !name.is_empty() && (name == *letter || name == *long));
            let unknown = || PastaOptionsError::Unknown(word.to_owned());
            let (_, _, follows) = known.ok_or_else(unknown)?;
            words.push(name.to_owned());
            match (follows, value) {
                (Follows::Nothing, None) => {}
                (Follows::Nothing, Some(_)) => return Err(unknown()),
                (Follows::Value, value) => {
                    let value = value.or_else(|| rest.next()).filter(|it| !it.is_empty());
                    let value = value.ok_or(PastaOptionsError::NoValue(name.to_owned()))?;
                    words.push(value.to_owned());
                }
            }
        }
        Ok(Self(words))
    }
}

impl PastaOptions {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this option, or `other`, is given.
    pub(super) fn has(&self, option: &str, other: &str) -> bool {
        self.0.iter().any(|it| it == option || it == other)
    }

    /// Returns the words for pasta.
    pub(super) fn words(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str).filter(|it| *it != MAP_GATEWAY)
    }

    /// Whether the host's loopback is reached at the gateway's address.
    pub(super) fn maps_gateway(&self) -> bool {
        self.has(MAP_GATEWAY, MAP_GATEWAY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The options are those of podman's system tests, `505-networking-pasta.bats`, and of pasta(1).
    #[test]
    fn options_are_words_between_commas() {
        for (text, expect) in [
            ("-4", "-4"),
            ("-a,192.0.2.2,-g,192.0.2.1", "-a 192.0.2.2 -g 192.0.2.1"),
            ("--tcp-ports,127.0.0.1%lo/5256:5256", "--tcp-ports 127.0.0.1%lo/5256:5256"),
            ("--mtu=1280,--map-gw", "--mtu 1280"),
        ] {
            let options: PastaOptions = text.parse().unwrap();
            assert_eq!(options.words().collect::<Vec<_>>().join(" "), expect, "{text}");
        }
    }

    #[test]
    fn options_that_write_files_or_change_users_are_refused() {
        for text in [
            "",
            "x",
            "-P,/etc/passwd",
            "--pid=/etc/passwd",
            "-l,/x",
            "--pcap,/x",
            "--runas,0",
            "--netns,/x",
            "--dns-forward,192.0.2.1",
            "-4=1",
            "-a192.0.2.1",
            "-4,",
        ] {
            let error = text.parse::<PastaOptions>().unwrap_err();
            assert!(matches!(error, PastaOptionsError::Unknown(_)), "{text}: {error}");
        }
        for text in ["-a", "-a,", "--mtu="] {
            let error = text.parse::<PastaOptions>().unwrap_err();
            assert!(matches!(error, PastaOptionsError::NoValue(_)), "{text}: {error}");
        }
    }
}
