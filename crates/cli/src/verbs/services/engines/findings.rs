//! Checks whether the engines of this host are configured for the snapshotter, and finds errors in their
//! configuration.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;
use toml::{Table, Value};

use super::configuration::{Containerd, Unusable, text};
use super::{CAPABILITIES, DIFFERS, REMAP, TRANSFER};
use crate::args::Skip;
use crate::output::report;
use crate::verbs::services::engine_version::EngineVersion;
use crate::verbs::services::rootfs::HeldPath;
use crate::verbs::services::service_config::{ENGINE, K3S_SOCKET, SnapshotterChoices};

const CONTAINERD: &str = "/etc/containerd/config.toml";
const DOCKER: &str = "/etc/docker/daemon.json";
/// The file that k3s generates from its template at each start.
const K3S: &str = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml";
/// State directory of kubelet. If it exists, the host has Kubernetes.
const KUBELET: &str = "/var/lib/kubelet";

/// The types of proxy plugins, each with its short name and containerd's name. Source: containerd's
/// `cmd/containerd/server/server.go`, `LoadPlugins`.
const TYPES: [[&str; 2]; 4] = [
    ["snapshot", "io.containerd.snapshotter.v1"],
    ["content", "io.containerd.content.v1"],
    ["sandbox", "io.containerd.sandbox.controller.v1"],
    ["diff", "io.containerd.differ.v1"],
];

/// An engine whose configuration was found.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct EngineReport {
    /// `containerd`, `docker` or `k3s`.
    engine: &'static str,
    /// Path of the engine's configuration.
    file: String,
    /// Name of the snapshotter in the configuration. Null if the engine does not use it.
    snapshotter: Option<String>,
    /// Problems in the configuration.
    findings: Vec<FindingReport>,
}

/// A problem in a configuration.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct FindingReport {
    /// Description of the problem.
    problem: String,
    /// Suggested next step.
    next: String,
}

/// The settings that configurations of engines must match.
#[derive(Debug)]
pub(crate) struct Expected<'a> {
    /// Settings of the service.
    pub(crate) service: &'a SnapshotterChoices,
    pub(crate) store: &'a Path,
    /// Root directory of the host whose configurations are read.
    pub(crate) root: &'a Path,
}

impl Expected<'_> {
    /// Returns whether the settings belong to the service to which a plugin connects, because another engine may use
    /// another service.
    fn is_set_for(&self, proxy: &Proxy<'_>) -> bool {
        Path::new(proxy.address()) == self.service.socket
    }

    fn skips_downloads(&self, proxy: &Proxy<'_>) -> bool {
        self.is_set_for(proxy) && self.service.skip == Skip::Download
    }
}

/// Checks all engines that have a configuration.
pub(crate) fn engines(expected: &Expected<'_>) -> Vec<EngineReport> {
    let containerd = Containerd::read(expected.root, Path::new(CONTAINERD));
    let version = || (expected.root == Path::new("/")).then(version_of_containerd).flatten();
    let docker = docker(expected, containerd.as_ref());
    let found = [
        containerd.map(|it| it.check("containerd", CONTAINERD, version(), expected)),
        docker,
        Containerd::read(expected.root, Path::new(K3S))
            .map(|it| it.check("k3s", K3S, None, expected)),
    ];
    found.into_iter().flatten().collect()
}

/// Returns the version that the `containerd` on the path prints.
fn version_of_containerd() -> Option<EngineVersion> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let mut programs = std::env::split_paths(&search).map(|it| it.join("containerd"));
    let mut command = Command::new(programs.find(|it| it.is_file())?);
    let output = command.arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace().nth(2)?.parse().ok()
}

impl EngineReport {
    fn new(engine: &'static str, file: &str) -> Self {
        Self { engine, file: file.to_owned(), snapshotter: None, findings: Vec::new() }
    }

    fn add(&mut self, problem: impl Into<String>, next: impl Into<String>) {
        self.findings.push(FindingReport { problem: problem.into(), next: next.into() });
    }

    fn unusable(&mut self, files: &[Unusable]) {
        for Unusable { path, reason } in files {
            let path = path.display();
            self.add(format!("{path}: {reason}"), format!("repair {path}, and restart the engine"));
        }
    }

    /// Returns whether the configuration is free of problems, or `None` if the engine does not use the snapshotter.
    pub(crate) fn works(&self) -> Option<bool> {
        self.snapshotter.as_ref().map(|_| self.findings.is_empty())
    }

    /// Formats the report for people, with several lines if there are problems.
    pub(crate) fn text(&self) -> String {
        let Self { engine, file, snapshotter, findings } = self;
        let state = match snapshotter {
            None => format!(
                "does not use the snapshotter (`quire serve --snapshotter --print-config {engine}` prints the \
                 lines to add)"
            ),
            Some(name) if findings.is_empty() => format!("uses the snapshotter as {name}"),
            Some(name) => format!(
                "uses the snapshotter as {name}, with {}",
                report::count(findings.len() as u64, "problem")
            ),
        };
        let mut text = report::plain(&format!("{engine} ({file}) {state}")).into_owned();
        for FindingReport { problem, next } in findings {
            text += &format!("\n- {}\n  {}", report::plain(problem), report::plain(next));
        }
        text
    }
}

/// A proxy plugin, which is another process.
struct Proxy<'a> {
    name: &'a str,
    table: &'a Table,
}

impl<'a> Proxy<'a> {
    fn text(&self, key: &str) -> Option<&'a str> {
        self.table.get(key)?.as_str()
    }

    /// Returns the short name of the plugin's type; `None` if containerd does not know the type.
    fn kind(&self) -> Option<&'static str> {
        let kind = self.text("type")?;
        TYPES.iter().find(|it| it.contains(&kind)).map(|it| it[0])
    }

    fn address(&self) -> &'a str {
        let address = self.text("address").unwrap_or_default();
        address.strip_prefix("unix://").unwrap_or(address)
    }

    fn has_capability(&self, name: &str) -> bool {
        let all = self.table.get("capabilities").and_then(Value::as_array);
        all.is_some_and(|all| all.iter().any(|it| it.as_str() == Some(name)))
    }

    fn export(&self, key: &str) -> Option<&'a str> {
        self.table.get("exports")?.get(key)?.as_str()
    }
}

impl Containerd {
    /// Returns the proxy plugins of this type, sorted by name; for `None`, those of unknown types.
    fn proxies(&self, kind: Option<&str>) -> Vec<Proxy<'_>> {
        let all = self.get(&["proxy_plugins"]).and_then(Value::as_table).into_iter().flatten();
        let all = all.filter_map(|(name, it)| Some(Proxy { name, table: it.as_table()? }));
        let mut found: Vec<_> = all.filter(|it| it.kind() == kind).collect();
        found.sort_by_key(|it| it.name);
        found
    }

    /// Returns the proxy plugins that refer to the snapshotter, found by name or by socket.
    fn snapshotters(&self, service: &SnapshotterChoices) -> Vec<Proxy<'_>> {
        let mut found = self.proxies(Some("snapshot"));
        found.retain(|it| it.name == "quire" || Path::new(it.address()) == service.socket);
        found
    }

    /// Returns the table for the images of CRI.
    fn images(&self) -> Option<&Value> {
        match self.form() {
            ..=2 => self.get(&["plugins", "io.containerd.grpc.v1.cri", "containerd"]),
            _ => self.get(&["plugins", "io.containerd.cri.v1.images"]),
        }
    }

    fn check(
        &self,
        engine: &'static str,
        file: &str,
        version: Option<EngineVersion>,
        expected: &Expected<'_>,
    ) -> EngineReport {
        let mut report = EngineReport::new(engine, file);
        report.unusable(&self.unusable);
        let service = expected.service;
        for other in self.proxies(None) {
            let (name, kind) = (other.name, other.text("type").unwrap_or_default());
            report.add(
                format!(
                    "[proxy_plugins.{name}] has the type {kind:?}, which containerd does not know"
                ),
                format!("set type = \"snapshot\" or \"diff\" below [proxy_plugins.{name}]"),
            );
        }
        let found = self.snapshotters(service);
        let Some(proxy) = found.first() else { return report };
        report.snapshotter = Some(proxy.name.to_owned());
        let socket = proxy.address();
        for other in found.iter().skip(1).filter(|it| it.address() == socket) {
            let (one, other) = (proxy.name, other.name);
            report.add(
                format!("[proxy_plugins.{one}] and [proxy_plugins.{other}] use the same socket, so the engine \
                    removes snapshots of one through the other"),
                "remove one of them, or start a service with another --instance and --socket for it",
            );
        }
        report.socket(proxy, expected);
        let print = format!("`quire serve --snapshotter --print-config {engine}` prints it");
        // If the version is unknown, assumes the oldest version with the checked settings in this form of the file.
        let version = version.unwrap_or(if self.form() < 3 { DIFFERS } else { TRANSFER });
        if version >= DIFFERS {
            Self::check_capabilities(&mut report, proxy, version);
            self.check_exports(&mut report, proxy, expected);
            self.check_differ(&mut report, proxy, version, &print);
        }
        self.check_cri(&mut report, proxy, expected);
        let listens = self.socket(engine);
        if expected.is_set_for(proxy) && listens != service.engine {
            report.add(
                format!("it listens on {}, but the service reads blobs at {}", listens.display(),
                 service.engine.display()),
                format!("set engine = \"{}\" below [snapshotter] in /etc/quire/serve.toml, and restart the service",
                    listens.display()),
            );
        }
        report
    }

    /// Returns the socket at which this containerd listens.
    fn socket(&self, engine: &str) -> PathBuf {
        let grpc = self.get(&["plugins", "io.containerd.server.v1.grpc", "address"]);
        // In the fourth form, containerd ignores the older table.
        let older = || self.get(&["grpc", "address"]).filter(|_| self.form() < 4);
        let address = grpc.or_else(older).and_then(Value::as_str).filter(|it| !it.is_empty());
        let usual = if engine == "k3s" { K3S_SOCKET } else { ENGINE };
        PathBuf::from(address.unwrap_or(usual))
    }

    fn check_exports(&self, report: &mut EngineReport, proxy: &Proxy<'_>, expected: &Expected<'_>) {
        let (name, store) = (proxy.name, expected.store.display());
        let next = format!("set root = \"{store}\" below [proxy_plugins.{name}.exports]");
        match proxy.export("root") {
            Some(root) if Path::new(root) == expected.store => {}
            Some(root) => report.add(
                format!("exports.root of [proxy_plugins.{name}] is {root}, but the store is {store}: kubelet \
                    measures the wrong file system"),
                next,
            ),
            None => report.add(
                format!("[proxy_plugins.{name}] has no exports.root: kubelet cannot determine how full the file \
                    system of images is"),
                next,
            ),
        }
        if expected.skips_downloads(proxy)
            && proxy.export("enable_remote_snapshot_annotations") != Some("true")
        {
            report.add(
                format!("skip is \"download\", but [proxy_plugins.{name}] has no \
                    exports.enable_remote_snapshot_annotations: the engine downloads layers that the store has"),
                format!("set enable_remote_snapshot_annotations = \"true\" below [proxy_plugins.{name}.exports]"),
            );
        }
    }

    fn check_capabilities(report: &mut EngineReport, proxy: &Proxy<'_>, version: EngineVersion) {
        if version >= CAPABILITIES && !proxy.has_capability(REMAP) {
            let name = proxy.name;
            report.add(
                format!("[proxy_plugins.{name}] lacks the capability {REMAP}: owners of containers with user \
                 namespaces are mapped twice"),
                format!("set capabilities = [\"{REMAP}\"] below [proxy_plugins.{name}]"),
            );
        }
    }

    fn check_differ(
        &self,
        report: &mut EngineReport,
        proxy: &Proxy<'_>,
        version: EngineVersion,
        print: &str,
    ) {
        let differs = self.proxies(Some("diff"));
        let Some(differ) = differs.iter().find(|it| it.address() == proxy.address()) else {
            let problem = "no proxy plugin of type \"diff\" uses the snapshotter's socket: the engine unpacks \
                layers, and the service reads them a second time";
            return report.add(problem, format!("add [proxy_plugins.quire-diff]: {print}"));
        };
        let name = differ.name;
        let order = self.get(&["plugins", "io.containerd.service.v1.diff-service", "default"]);
        let order = order.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        if order.first().and_then(Value::as_str) != Some(name) {
            report.add(
                format!("the diff service does not try {name} first: the engine unpacks layers, and the service \
                    reads them a second time"),
                format!("set default = [\"{name}\", \"walking\"] below \
                 [plugins.\"io.containerd.service.v1.diff-service\"]"),
            );
        }
        if version < TRANSFER {
            return;
        }
        let unpack = self.get(&["plugins", "io.containerd.transfer.v1.local", "unpack_config"]);
        let unpack = unpack.and_then(Value::as_array).into_iter().flatten();
        let of = |it: &Value, key| it.get(key).and_then(Value::as_str).map(str::to_owned);
        let mut of_ours = unpack.filter(|it| of(it, "snapshotter").as_deref() == Some(proxy.name));
        let table = "[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]";
        match of_ours.next().map(|it| of(it, "differ")) {
            None => report.add(
                format!("{table} has no entry for {}: the engine cannot pull images for it", proxy.name),
                format!("add one: {print}"),
            ),
            Some(differ) if differ.as_deref() != Some(name) => report.add(
                format!("{table} has another differ for {}: the engine unpacks layers, and the service reads them a \
                    second time", proxy.name),
                format!("set differ = \"{name}\" there"),
            ),
            Some(_) => {}
        }
    }

    fn check_cri(&self, report: &mut EngineReport, proxy: &Proxy<'_>, expected: &Expected<'_>) {
        let is_kubernetes =
            report.engine == "k3s" || HeldPath::new(expected.root, Path::new(KUBELET)).is_ok();
        let (images, name) = (self.images(), proxy.name);
        let table = match self.form() {
            ..=2 => "[plugins.\"io.containerd.grpc.v1.cri\".containerd]",
            _ => "[plugins.\"io.containerd.cri.v1.images\"]",
        };
        let chosen = images.and_then(|it| it.get("snapshotter")?.as_str());
        if chosen != Some(name) {
            if is_kubernetes && !self.has_class(name) {
                let next = match report.engine {
                    "k3s" => format!(
                        "write `snapshotter: {name}` into /etc/rancher/k3s/config.yaml, and restart k3s"
                    ),
                    _ => format!("set snapshotter = \"{name}\" below {table}"),
                };
                let other = chosen.unwrap_or("overlayfs");
                report.add(format!("Kubernetes uses the snapshotter {other}"), next);
            }
            return;
        }
        // The default of this setting is true.
        let named = images.and_then(|it| it.get("disable_snapshot_annotations")?.as_bool());
        if expected.skips_downloads(proxy) && named != Some(false) {
            report.add(
                "skip is \"download\", but disable_snapshot_annotations is not false: Kubernetes downloads layers \
                that the store has",
                match report.engine {
                    // k3s's built-in template already has that table, and a table must not occur twice.
                    "k3s" => "k3s's own template sets it: set skip = \"unpack\" below [snapshotter] in \
                     /etc/quire/serve.toml".to_owned(),
                    _ => format!("set disable_snapshot_annotations = false below {table}"),
                },
            );
        }
    }
}

impl EngineReport {
    /// Checks that the service replies at the socket of a plugin.
    fn socket(&mut self, proxy: &Proxy<'_>, expected: &Expected<'_>) {
        let (name, socket) = (proxy.name, proxy.address());
        let listens = expected.service.socket.display();
        let held = HeldPath::new(expected.root, Path::new(socket));
        let Err(error) = held.and_then(|it| UnixStream::connect(it.reached())) else {
            return;
        };
        if error.kind() == ErrorKind::PermissionDenied {
            return self.add(
                format!("only root can check whether a service listens on {socket}"),
                "run `quire doctor` as root",
            );
        }
        if Path::new(socket) != expected.service.socket {
            return self.add(
                format!("[proxy_plugins.{name}] uses {socket}, where no service listens, but the service is set to \
                    listen on {listens}"),
                format!("set address = \"{listens}\" there, or socket = \"{socket}\" below [snapshotter] in \
                 /etc/quire/serve.toml"),
            );
        }
        self.add(
            format!("no service listens on {socket}: {error}"),
            "`systemctl enable --now quire-snapshotter` starts the service",
        );
    }
}

/// Checks Docker's configuration, and the settings that its containerd needs.
fn docker(expected: &Expected<'_>, containerd: Option<&Containerd>) -> Option<EngineReport> {
    let mut report = EngineReport::new("docker", DOCKER);
    let wrong = |reason: String| [Unusable { path: DOCKER.into(), reason }];
    let parsed = match text(expected.root, Path::new(DOCKER)) {
        Ok(None) => return None,
        Ok(Some(text)) => serde_json::from_str::<serde_json::Value>(&text)
            .map_err(|error| wrong(format!("it is not JSON: {error}"))),
        Err(Unusable { reason, .. }) => Err(wrong(reason)),
    };
    let file = match parsed {
        Ok(file) => file,
        Err(files) => {
            report.unusable(&files);
            return Some(report);
        }
    };
    let driver = file["storage-driver"].as_str().unwrap_or_default();
    let found = containerd.map(|it| it.snapshotters(expected.service)).unwrap_or_default();
    if driver != "quire" && !found.iter().any(|it| it.name == driver) {
        return Some(report);
    }
    report.snapshotter = Some(driver.to_owned());
    if file["features"]["containerd-snapshotter"].as_bool() != Some(true) {
        report.add(
            "features.containerd-snapshotter is not true: before Docker 29, Docker then uses no snapshotter",
            format!("set \"features\": {{ \"containerd-snapshotter\": true }} in {DOCKER}"),
        );
    }
    if !found.iter().any(|it| it.name == driver) {
        report.add(
            format!("{CONTAINERD} has no proxy plugin {driver}, so Docker does not start"),
            "`quire serve --snapshotter --print-config containerd` prints the lines to add",
        );
    }
    let engine = &expected.service.engine;
    if let Some(socket) = file["containerd"].as_str().filter(|it| Path::new(it) != engine) {
        report.add(
            format!("Docker uses the containerd at {socket}, but the service reads blobs at {}", engine.display()),
            format!("set engine = \"{socket}\" below [snapshotter] in /etc/quire/serve.toml, and restart the service"),
        );
    }
    Some(report)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::args::Engine;
    use crate::verbs::services::engines::config;
    use crate::verbs::services::engines::configuration::below;
    use crate::verbs::services::service_config::SnapshotterSettings;

    struct Host {
        root: tempfile::TempDir,
        service: SnapshotterChoices,
    }

    impl Host {
        /// Returns a host with a service that replies.
        fn new() -> (Self, UnixListener) {
            let root = tempfile::tempdir().unwrap();
            let service = SnapshotterChoices::as_set(SnapshotterSettings::default());
            let socket = below(root.path(), &service.socket);
            fs::create_dir_all(socket.parent().unwrap()).unwrap();
            (Self { root, service }, UnixListener::bind(socket).unwrap())
        }

        fn write(&self, path: &str, text: &str) {
            let path = below(self.root.path(), Path::new(path));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        /// Returns the printed configuration of an engine.
        fn configure(&self, engine: Engine, version: &str) -> String {
            let version = Some(version.parse().unwrap());
            let store = Path::new("/var/lib/quire");
            config(engine, version, &self.service.socket, store).unwrap().text
        }

        fn engines(&self) -> Vec<EngineReport> {
            let store = Path::new("/var/lib/quire");
            engines(&Expected { service: &self.service, store, root: self.root.path() })
        }

        /// Returns the problems of one engine that uses the snapshotter.
        fn problems(&self, engine: &str) -> Vec<String> {
            let found = self.engines();
            let found = found.iter().find(|it| it.engine == engine).unwrap();
            assert!(found.snapshotter.is_some(), "{found:?}");
            assert!(found.findings.iter().all(|it| !it.next.is_empty()));
            found.findings.iter().map(|it| it.problem.clone()).collect()
        }

        fn check(&self, engine: &str, problem: &str) {
            let found = self.problems(engine);
            assert!(found.len() == 1 && found[0].contains(problem), "{problem}: {found:#?}");
        }
    }

    #[test]
    fn what_is_printed_has_no_problems() {
        let (host, _listener) = Host::new();
        assert_eq!(host.engines(), []);
        // Below another root, a file of the third form is treated as a file of containerd 2.1 or newer.
        for version in ["1.7", "2.4"] {
            host.write(CONTAINERD, &host.configure(Engine::Containerd, version));
            host.write(DOCKER, &host.configure(Engine::Docker, "28.5"));
            assert_eq!(host.problems("containerd"), [""; 0], "{version}");
            assert_eq!(host.problems("docker"), [""; 0], "{version}");
        }
        // Fill the template like k3s.
        let base = "version = 3\n[grpc]\naddress = \"/run/k3s/containerd/containerd.sock\"\n\
                    [plugins.'io.containerd.cri.v1.images']\nsnapshotter = \"quire\"\ndisable_snapshot_annotations \
                     = true\n";
        let template = host.configure(Engine::K3s, "1.33.1");
        let (host, _listener) = {
            let (mut host, listener) = Host::new();
            host.service.engine = K3S_SOCKET.into();
            (host, listener)
        };
        host.write(K3S, &template.replace("{{ template \"base\" . }}", base));
        assert_eq!(host.problems("k3s"), [""; 0]);
    }

    #[test]
    fn an_engine_that_does_not_use_it_is_no_problem() {
        let (host, _listener) = Host::new();
        host.write(
            CONTAINERD,
            "version = 3\n[proxy_plugins.stargz]\ntype = \"snapshot\"\naddress = \"/run/x\"",
        );
        host.write(DOCKER, "{\"storage-driver\": \"overlay2\"}");
        for found in host.engines() {
            assert_eq!((found.snapshotter.as_ref(), found.findings.len()), (None, 0), "{found:?}");
            let text = found.text();
            assert!(text.contains(&format!("--print-config {}", found.engine)), "{text}");
        }
    }

    #[test]
    fn each_missing_part_of_containerds_file_is_found() {
        let (mut host, listener) = Host::new();
        let right = host.configure(Engine::Containerd, "2.4");
        fs::create_dir_all(below(host.root.path(), Path::new(KUBELET))).unwrap();
        let cases = [
            ("  root = \"/var/lib/quire\"\n", "", "has no exports.root"),
            ("  capabilities = [\"remap-ids\"]\n", "", "lacks the capability remap-ids"),
            ("/var/lib/quire", "/elsewhere", "is /elsewhere, but the store is /var/lib/quire"),
            ("type = \"diff\"", "type = \"snapshot\"", "no proxy plugin of type \"diff\""),
            (
                "type = \"diff\"",
                "type = \"dif\"",
                "[proxy_plugins.quire-diff] has the type \"dif\"",
            ),
            (
                "[\"quire-diff\", \"walking\"]",
                "[\"walking\", \"quire-diff\"]",
                "does not try quire-diff first",
            ),
            ("[\"quire-diff\", \"walking\"]", "{}", "does not try quire-diff first"),
            ("  differ = \"quire-diff\"", "  differ = \"walking\"", "another differ for quire"),
            ("  differ = \"quire-diff\"", "", "another differ for quire"),
            (
                "snapshotter = \"quire\"\n  differ",
                "snapshotter = \"other\"\n  differ",
                "no entry for quire",
            ),
            (
                "snapshotter = \"quire\"\n  disable",
                "disable",
                "Kubernetes uses the snapshotter overlayfs",
            ),
            (
                "version = 3",
                "version = 3\ngrpc.address = \"/run/other\"",
                "it listens on /run/other",
            ),
            (
                "version = 3",
                "version = 3\nimports = [\"none\"]",
                "it is imported, but does not exist",
            ),
            (
                "version = 3",
                "version = 3\nproxy_plugins.zweite = \
                 { type = \"snapshot\", address = \"/run/quire/snapshotter.sock\" }",
                "use the same socket",
            ),
        ];
        for (from, to, problem) in cases {
            let text = right.replacen(from, to, 1);
            assert_ne!(text, right, "{from}");
            host.write(CONTAINERD, &text);
            let found = host.problems("containerd");
            assert!(found.iter().any(|it| it.contains(problem)), "{problem}: {found:#?}");
        }
        host.write(CONTAINERD, &right.replacen("\"snapshot\"", "\"snapshoter\"", 1));
        let found = host.engines();
        assert_eq!((found.len(), &found[0].snapshotter, found[0].findings.len()), (1, &None, 1));
        assert!(found[0].findings[0].problem.contains("\"snapshoter\""), "{found:?}");
        // Types with containerd's own names are also accepted.
        let long = right.replacen("\"snapshot\"", "\"io.containerd.snapshotter.v1\"", 1);
        host.write(CONTAINERD, &long.replacen("\"diff\"", "\"io.containerd.differ.v1\"", 1));
        assert_eq!(host.problems("containerd"), [""; 0]);
        host.service.skip = Skip::Download;
        host.write(CONTAINERD, &right);
        assert_eq!(host.problems("containerd"), [""; 0]);
        host.write(CONTAINERD, &right.replace("annotations = \"true\"", "annotations = \"false\""));
        host.check("containerd", "has no exports.enable_remote_snapshot_annotations");
        host.write(CONTAINERD, &right.replace("  disable_snapshot_annotations = false\n", ""));
        host.check("containerd", "disable_snapshot_annotations is not false");
        host.write(CONTAINERD, &right);
        drop(listener);
        host.check(
            "containerd",
            "no service listens on /run/quire/snapshotter.sock: Connection refused",
        );
        host.service.socket = "/run/quire/other.sock".into();
        host.check("containerd", "the service is set to listen on /run/quire/other.sock");
    }

    #[test]
    fn dockers_file_needs_two_settings_and_a_plugin() {
        let (host, _listener) = Host::new();
        let right = host.configure(Engine::Docker, "28.5");
        host.write(DOCKER, &right);
        host.check("docker", "no proxy plugin quire");
        host.write(CONTAINERD, &host.configure(Engine::Containerd, "2.4"));
        assert_eq!(host.problems("docker"), [""; 0]);
        host.write(DOCKER, "{\"storage-driver\": \"quire\", \"features\": []}");
        host.check("docker", "features.containerd-snapshotter is not true");
        host.write(DOCKER, &right.replacen('{', "{ \"containerd\": \"/run/other\",", 1));
        host.check("docker", "Docker uses the containerd at /run/other");
    }

    #[test]
    fn hostile_files_give_findings() {
        let (host, _listener) = Host::new();
        for text in [
            "",
            "[",
            "nul",
            "[]",
            "3",
            "\"x\"",
            "{\"storage-driver\": 3}",
            "{\"storage-driver\": {}}",
        ] {
            host.write(DOCKER, text);
            assert!(host.engines().iter().all(|it| it.snapshotter.is_none()), "{text}");
        }
        host.write(DOCKER, &"[".repeat(10_000));
        assert_eq!(host.engines()[0].findings.len(), 1);
        for text in [
            "proxy_plugins = 3",
            "[proxy_plugins]\nquire = 3",
            "[proxy_plugins.quire]\ntype = 3",
            "[proxy_plugins.quire]\ntype = \"snapshot\"",
            "[proxy_plugins.quire]\ntype = \"snapshot\"\naddress = \"../../../\\u001b\"\nexports = 1",
            "plugins = 1\n[proxy_plugins.quire]\ntype = \"snapshot\"\naddress = 1",
        ] {
            host.write(CONTAINERD, text);
            for found in host.engines() {
                assert!(!found.text().contains('\x1b'), "{text}");
            }
        }
    }
}
