//! What belongs in the configuration of an engine, so that it uses the snapshotter.

use std::path::Path;
use std::str::FromStr;

use oci::manifest::Platform;

/// A version of containerd, of which the first two numbers count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EngineVersion {
    major: u32,
    minor: u32,
}

impl EngineVersion {
    const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl FromStr for EngineVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "\"{}\" is no version of containerd: 1.6 or 2.4.2 would be",
                text.escape_debug()
            )
        };
        let mut numbers = text.trim_start_matches('v').split('.').map(str::parse);
        let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
            return Err(wrong());
        };
        if Self::new(major, minor) < OLDEST {
            return Err(format!(
                "containerd {major}.{minor} is too old: {}.{} is the oldest that was tried",
                OLDEST.major, OLDEST.minor
            ));
        }
        Ok(Self::new(major, minor))
    }
}

/// The oldest that tests use.
const OLDEST: EngineVersion = EngineVersion::new(1, 6);
/// It has proxy differs, and exports of proxy plugins.
const DIFFERS: EngineVersion = EngineVersion::new(1, 7);
/// Its configuration has another form.
const SECOND: EngineVersion = EngineVersion::new(2, 0);
/// Images come through its transfer service.
const TRANSFER: EngineVersion = EngineVersion::new(2, 1);

/// The lines for a containerd, whose service listens on `socket`; `root` is the store.
pub(crate) fn containerd(version: EngineVersion, socket: &Path, root: &Path) -> String {
    let (socket, root) = (quoted(socket), quoted(root));
    let form = if version < SECOND { 2 } else { 3 };
    let mut text = format!(
        "version = {form}\n\n[proxy_plugins.quire]\n  type = \"snapshot\"\n  address = {socket}\n"
    );
    let mut add = |lines: std::fmt::Arguments<'_>| text += &lines.to_string();
    if version >= DIFFERS {
        add(format_args!(
            "[proxy_plugins.quire.exports]\n  root = {root}\n  enable_remote_snapshot_annotations = \"true\"\n\
             [proxy_plugins.quire-diff]\n  type = \"diff\"\n  address = {socket}\n\n\
             [plugins.\"io.containerd.service.v1.diff-service\"]\n  default = [\"quire-diff\", \"walking\"]\n"
        ));
    }
    if version >= TRANSFER {
        let Platform { os, architecture, .. } = Platform::of_this_machine();
        add(format_args!(
            "[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n  platform = \"{os}/{architecture}\"\n  \
             snapshotter = \"quire\"\n  differ = \"quire-diff\"\n"
        ));
    }
    // Kubernetes asks through these.
    let images = match version < SECOND {
        true => "\"io.containerd.grpc.v1.cri\".containerd",
        false => "\"io.containerd.cri.v1.images\"",
    };
    add(format_args!(
        "[plugins.{images}]\n  snapshotter = \"quire\"\n  disable_snapshot_annotations = false\n"
    ));
    text
}

/// A string of TOML.
fn quoted(path: &Path) -> String {
    let escaped = |it: char| match it {
        '"' | '\\' => format!("\\{it}"),
        it if it.is_control() => format!("\\u{:04X}", u32::from(it)),
        it => it.to_string(),
    };
    format!("\"{}\"", path.to_string_lossy().chars().map(escaped).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_gets_what_it_knows() {
        let has = |version: &str, words: &str| {
            let text = containerd(version.parse().unwrap(), Path::new("/s\n"), Path::new("/r\"x"));
            let parsed: toml::Table = text.parse().unwrap();
            let address = parsed["proxy_plugins"]["quire"]["address"].as_str();
            assert_eq!(address, Some("/s\n"), "{text}");
            text.contains(words)
        };
        let cases = [
            ("quire-diff", [false, true, true, true]),
            ("r\\\"x", [false, true, true, true]),
            ("unpack_config", [false, false, false, true]),
            ("version = 3", [false, false, true, true]),
            ("io.containerd.grpc.v1.cri", [true, true, false, false]),
        ];
        for (words, expect) in cases {
            for (version, expect) in ["1.6.20", "v1.7.24", "2.0", "2.4.2"].iter().zip(expect) {
                assert_eq!(has(version, words), expect, "{version} {words}");
            }
        }
        for bad in ["", "2", "x.y", "1.5", "2.x"] {
            assert!(bad.parse::<EngineVersion>().is_err(), "{bad}");
        }
    }
}
