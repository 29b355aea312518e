//! Prints the configuration that an engine needs to use the snapshotter.

mod configuration;
pub(crate) mod findings;
pub(crate) mod roots;

use std::fmt;
use std::path::Path;

use anyhow::bail;
use oci::manifest::Platform;
use serde_json::json;

use crate::args;
use crate::verbs::services::engine_version::EngineVersion;
use crate::verbs::services::service_config::K3S_SOCKET;

/// The oldest containerd that tests use.
const OLDEST: EngineVersion = EngineVersion::new(1, 6, 0);
/// First version with proxy differs and with exports of proxy plugins.
const DIFFERS: EngineVersion = EngineVersion::new(1, 7, 0);
/// First version that reads the capabilities of a proxy snapshotter. Source: containerd's release notes of 1.7.24.
const CAPABILITIES: EngineVersion = EngineVersion::new(1, 7, 24);
/// The capability that the snapshotter maps owners for user namespaces.
const REMAP: &str = "remap-ids";
/// First version whose runtimes may have snapshotters. Source: containerd#6899.
const CLASSES: EngineVersion = EngineVersion::new(1, 7, 0);
/// First version whose configuration has the third form.
const SECOND: EngineVersion = EngineVersion::new(2, 0, 0);
/// First version whose CRI pulls images through the transfer service.
const TRANSFER: EngineVersion = EngineVersion::new(2, 1, 0);
/// The newest containerd that tests use.
const NEWEST: EngineVersion = EngineVersion::new(2, 4, 0);
/// The oldest Docker whose image store uses the storage driver as the name of a snapshotter.
const OLDEST_DOCKER: EngineVersion = EngineVersion::new(24, 0, 0);
/// The oldest k3s whose templates can begin with its built-in template. Source: k3s's documentation, "Base
/// template".
const OLDEST_K3S: EngineVersion = EngineVersion::new(1, 28, 1);

/// The output for an engine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EngineConfig {
    /// Text of a configuration file.
    pub(crate) text: String,
    /// Path of the configuration file, and further steps for the administrator.
    pub(crate) remark: String,
}

/// Returns the configuration of an engine. The service listens on `socket`; `root` is the store.
pub(crate) fn config(
    engine: args::Engine,
    version: Option<EngineVersion>,
    socket: &Path,
    root: &Path,
) -> anyhow::Result<EngineConfig> {
    match engine {
        args::Engine::Containerd => {
            let version = version.unwrap_or(NEWEST).not_before(OLDEST, "containerd")?;
            let remark = "add these lines to /etc/containerd/config.toml, then restart containerd"
                .to_owned();
            Ok(EngineConfig { text: containerd(version, socket, root), remark })
        }
        args::Engine::Docker => {
            version.map(|it| it.not_before(OLDEST_DOCKER, "Docker")).transpose()?;
            Ok(docker())
        }
        args::Engine::K3s => {
            let version = version.map(|it| it.not_before(OLDEST_K3S, "k3s")).transpose()?;
            Ok(k3s(version, socket, root))
        }
    }
}

/// Returns the configuration of a containerd in which only the pods of a runtime class use the service. `class` is the
/// handler of that class, a name without special characters.
pub(crate) fn config_for_class(
    version: Option<EngineVersion>,
    class: &str,
    socket: &Path,
    root: &Path,
) -> anyhow::Result<EngineConfig> {
    let version = version.unwrap_or(NEWEST);
    if version < CLASSES {
        bail!(
            "containerd {version} has no snapshotters of runtime classes: {CLASSES} and later have \
            them"
        );
    }
    let (form, plugin) = match version < SECOND {
        true => (2, "io.containerd.grpc.v1.cri"),
        false => (3, "io.containerd.cri.v1.runtime"),
    };
    let plugins = plugins(version, socket, root);
    let text = format!(
        "version = {form}\n\n{plugins}\
         [plugins.\"{plugin}\".containerd.runtimes.{class}]\n  \
         runtime_type = \"io.containerd.runc.v2\"\n  snapshotter = \"quire\"\n"
    );
    let remark = format!(
        "add these lines to /etc/containerd/config.toml. If the runtime runc has options there, \
        such as SystemdCgroup, give the runtime {class} the same ones. Then restart containerd, \
        and make a runtime class with the handler {class}"
    );
    Ok(EngineConfig { text, remark })
}

/// Returns Docker's configuration. Its storage driver is the snapshotter's name. Source: moby#43983.
fn docker() -> EngineConfig {
    let file = json!({ "features": { "containerd-snapshotter": true }, "storage-driver": "quire" });
    let remark = "add this to /etc/docker/daemon.json. The containerd that Docker uses also needs \
        `--print-config containerd` in /etc/containerd/config.toml: restart containerd, then Docker";
    EngineConfig { text: format!("{file:#}\n"), remark: remark.to_owned() }
}

/// Returns a template for k3s, which begins with its built-in template. The built-in template already has the tables
/// of CRI, and a table must not occur twice, so the snapshotter is set by an option of k3s. Source: k3s's
/// `pkg/agent/templates`.
fn k3s(version: Option<EngineVersion>, socket: &Path, root: &Path) -> EngineConfig {
    let is_second = version.is_none_or(|it| match it {
        EngineVersion { major: 1, minor: 31, .. } => it >= EngineVersion::new(1, 31, 6),
        it => it >= EngineVersion::new(1, 32, 2),
    });
    let (file, containerd) = match is_second {
        true => ("config-v3.toml.tmpl", TRANSFER),
        false => ("config.toml.tmpl", DIFFERS),
    };
    let plugins = plugins(containerd, socket, root);
    let text = format!("{{{{ template \"base\" . }}}}\n\n{plugins}");
    let remark = format!(
        "add this to /var/lib/rancher/k3s/agent/etc/containerd/{file}, and `snapshotter: quire` \
        to /etc/rancher/k3s/config.yaml. Start the service with `--engine {K3S_SOCKET}`, then \
        restart k3s"
    );
    EngineConfig { text, remark }
}

/// Returns a complete file for containerd.
fn containerd(version: EngineVersion, socket: &Path, root: &Path) -> String {
    let form = if version < SECOND { 2 } else { 3 };
    let plugins = plugins(version, socket, root);
    // Kubernetes uses the plugin with this name.
    let images = match version < SECOND {
        true => "\"io.containerd.grpc.v1.cri\".containerd",
        false => "\"io.containerd.cri.v1.images\"",
    };
    format!(
        "version = {form}\n\n{plugins}\
         [plugins.{images}]\n  snapshotter = \"quire\"\n  disable_snapshot_annotations = false\n"
    )
}

/// The snapshotter in containerd's default `unpack_config`. A list in the configuration file replaces that default,
/// so the printed list names it again. Source: stargz-snapshotter, docs/transfer.md.
pub(crate) const DEFAULT_SNAPSHOTTER: &str = "overlayfs";

/// Returns the tables that register the service with containerd.
fn plugins(version: EngineVersion, socket: &Path, root: &Path) -> String {
    let (socket, root) = (quoted(socket), quoted(root));
    let mut text = format!("[proxy_plugins.quire]\n  type = \"snapshot\"\n  address = {socket}\n");
    let mut add = |lines: fmt::Arguments<'_>| text += &lines.to_string();
    if version >= CAPABILITIES {
        add(format_args!("  capabilities = [\"{REMAP}\"]\n"));
    }
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
             snapshotter = \"quire\"\n  differ = \"quire-diff\"\n\
             [[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n  platform = \"{os}/{architecture}\"\n  \
             snapshotter = \"{DEFAULT_SNAPSHOTTER}\"\n"
        ));
    }
    text
}

/// Quotes a path as a string of TOML.
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

    fn config_for(engine: args::Engine, version: &str) -> anyhow::Result<EngineConfig> {
        let version: Option<EngineVersion> =
            (!version.is_empty()).then(|| version.parse().unwrap());
        config(engine, version, Path::new("/s\n"), Path::new("/r\"x"))
    }

    /// Fills a template like k3s, with `base` as its built-in template.
    fn filled(template: &str, base: &str) -> toml::Table {
        let rest = template.strip_prefix("{{ template \"base\" . }}").unwrap();
        assert!(!rest.contains("{{"), "{rest}");
        format!("{base}{rest}").parse().unwrap()
    }

    #[test]
    fn each_version_gets_what_it_knows() {
        let has = |version: &str, words: &str| {
            let text = config_for(args::Engine::Containerd, version).unwrap().text;
            let parsed: toml::Table = text.parse().unwrap();
            let address = parsed["proxy_plugins"]["quire"]["address"].as_str();
            assert_eq!(address, Some("/s\n"), "{text}");
            text.contains(words)
        };
        let cases = [
            ("quire-diff", [false, true, true, true]),
            ("r\\\"x", [false, true, true, true]),
            ("unpack_config", [false, false, false, true]),
            ("\"remap-ids\"", [false, true, true, true]),
            ("version = 3", [false, false, true, true]),
            ("io.containerd.grpc.v1.cri", [true, true, false, false]),
        ];
        for (words, expect) in cases {
            for (version, expect) in ["1.6.20", "v1.7.24", "2.0", "2.4.2"].iter().zip(expect) {
                assert_eq!(has(version, words), expect, "{version} {words}");
            }
        }
        assert!(has("", "unpack_config"));
        // The newest release of a line has all features of that line.
        assert!(has("1.7", "\"remap-ids\"") && !has("1.7.23", "\"remap-ids\""));
        assert!(has("2", "unpack_config") && !has("1", "unpack_config"));
        for (given, shown) in [("2", "2"), ("2.0", "2.0"), ("v1.7.24", "1.7.24"), ("2.4.0", "2.4")]
        {
            assert_eq!(given.parse::<EngineVersion>().unwrap().to_string(), shown);
        }
        for bad in ["", "x.y", "2.x", "2.4.x", "-1.2", "2."] {
            assert!(bad.parse::<EngineVersion>().is_err(), "{bad}");
        }
        let old = config_for(args::Engine::Containerd, "1.5.9").unwrap_err().to_string();
        assert!(
            old.starts_with("containerd 1.5.9 is too old: `--print-config` supports 1.6"),
            "{old}"
        );
    }

    #[test]
    fn a_runtime_class_leaves_other_pods_alone() {
        let text = |version: &str| {
            let version = Some(version.parse().unwrap());
            config_for_class(version, "my-quire", Path::new("/s"), Path::new("/r")).unwrap().text
        };
        for (version, cri, runtime) in [
            ("1.7.24", "io.containerd.grpc.v1.cri", "io.containerd.grpc.v1.cri"),
            ("2.4", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"),
        ] {
            let parsed: toml::Table = text(version).parse().unwrap();
            let plugins = &parsed["plugins"];
            let class = &plugins[runtime]["containerd"]["runtimes"]["my-quire"];
            assert_eq!(class["snapshotter"].as_str(), Some("quire"), "{version}");
            assert_eq!(class["runtime_type"].as_str(), Some("io.containerd.runc.v2"), "{version}");
            // The snapshotter of all other pods stays.
            let images = plugins.get(cri).and_then(|it| it.get("snapshotter"));
            let old = plugins.get(cri).and_then(|it| it.get("containerd")?.get("snapshotter"));
            assert!(images.is_none() && old.is_none(), "{version}");
            assert_eq!(parsed["proxy_plugins"]["quire-diff"]["type"].as_str(), Some("diff"));
        }
        let old = Some("1.6".parse().unwrap());
        let old = config_for_class(old, "quire", Path::new("/s"), Path::new("/r")).unwrap_err();
        assert!(old.to_string().contains("1.7 and later"), "{old}");
    }

    #[test]
    fn docker_gets_json_and_is_told_of_its_containerd() {
        for version in ["", "24.0.7", "28", "28.5.2+dfsg1", "29.1"] {
            let config = config_for(args::Engine::Docker, version).unwrap();
            let parsed: serde_json::Value = serde_json::from_str(&config.text).unwrap();
            assert_eq!(parsed["features"]["containerd-snapshotter"], true);
            assert_eq!(parsed["storage-driver"], "quire");
            assert!(config.remark.contains("/etc/docker/daemon.json"));
            assert!(config.remark.contains("/etc/containerd/config.toml"));
        }
        assert!(config_for(args::Engine::Docker, "20.10.24").is_err());
    }

    #[test]
    fn k3s_gets_a_template_for_its_version() {
        // The tables for CRI in the built-in templates of k3s, in both forms.
        let old = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"quire\"\n";
        let new = "version = 3\n[plugins.'io.containerd.cri.v1.images']\nsnapshotter = \"quire\"\n";
        let cases = [
            ("v1.28.1+k3s1", "config.toml.tmpl", old),
            ("v1.31.5+k3s1", "config.toml.tmpl", old),
            ("v1.31.6+k3s1", "config-v3.toml.tmpl", new),
            ("1.32.1", "config.toml.tmpl", old),
            ("1.32.2", "config-v3.toml.tmpl", new),
            ("1.32", "config-v3.toml.tmpl", new),
            ("v1.36.0+k3s1", "config-v3.toml.tmpl", new),
            ("", "config-v3.toml.tmpl", new),
        ];
        for (version, file, base) in cases {
            let config = config_for(args::Engine::K3s, version).unwrap();
            assert!(config.remark.contains(&format!("containerd/{file},")), "{version}");
            assert!(config.remark.contains(K3S_SOCKET));
            let parsed = filled(&config.text, base);
            assert_eq!(parsed["proxy_plugins"]["quire-diff"]["type"].as_str(), Some("diff"));
            let plugins = parsed["plugins"].as_table().unwrap();
            let is_new = plugins.contains_key("io.containerd.transfer.v1.local");
            assert_eq!(is_new, base == new, "{version}");
        }
        assert!(config_for(args::Engine::K3s, "v1.27.16+k3s1").is_err());
    }
}
