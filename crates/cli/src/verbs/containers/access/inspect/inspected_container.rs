//! A container, as `inspect` describes it. The fields are those of podman, `libpod/define/container_inspect.go`.

use std::collections::BTreeMap;

use container::bundle::config::ImageConfig;
use container::bundle::mounts::{MountKind, MountSource, Volume};
use container::bundle::security::Interfaces;
use container::bundle::spec::{RuntimeSpec, SpecLimit};
use container::bundle::{Access, Network, Terminal};
use container::folder;
use container::life::background;
use container::life::lookup::KnownContainer;
use container::life::state::Reason;
use container::networks::attachment::{Endpoint, noted_endpoints};
use container::networks::subnet::Subnet;
use container::plan::{ContainerRequest, IdsChoice};
use container::request::StoredRequest;
use serde::Serialize;
use store::{OpenOptions, Resolved};

use crate::output::report::{self, Bytes};
use crate::session::context::Context;
use crate::verbs::containers::access::port::PortReport;
use crate::verbs::containers::container_options::image_config;
use crate::verbs::containers::start::shared_store;

/// Report of `inspect` on a container.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedContainerReport {
    /// Id of the container, which is its name.
    id: String,
    /// Name of the container.
    name: String,
    /// Time at which the container was made, in RFC 3339. Null if the container is damaged.
    created: Option<String>,
    /// Program of the container; empty if unknown.
    path: String,
    /// Arguments of the program.
    args: Vec<String>,
    /// The state.
    state: InspectedStateReport,
    /// Id of the image. Null if the container is damaged.
    image: Option<String>,
    /// Name by which the image was started. Null if it had none.
    image_name: Option<String>,
    /// Digest of the image's manifest. Null if it has none.
    image_digest: Option<String>,
    /// Path of the configuration for the runtime.
    #[serde(rename = "OCIConfigPath")]
    oci_config_path: String,
    /// Path of the runtime. Null if unknown.
    #[serde(rename = "OCIRuntime")]
    oci_runtime: Option<String>,
    /// Capabilities of the program.
    effective_caps: Vec<String>,
    /// Capabilities that programs of the container can have at most.
    bounding_caps: Vec<String>,
    /// Mounts that were requested.
    mounts: Vec<InspectedMountReport>,
    /// The network.
    network_settings: InspectedNetworkReport,
    /// Size of the writable layer. Null if unknown.
    size_rw: Option<Bytes>,
    /// Number of times that the restart policy has started the program again.
    restart_count: u32,
    /// Settings of the program.
    config: InspectedConfigReport,
    /// Settings of the host.
    host_config: InspectedHostReport,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
#[expect(clippy::struct_excessive_bools, reason = "podman's fields")]
pub(crate) struct InspectedStateReport {
    /// `created`, `running`, `stopping` (a command waits for its end), `restarting`, `exited`, or `unknown` (it ended in an unknown way, or is damaged).
    status: &'static str,
    /// Whether the program runs, or is started again soon.
    running: bool,
    /// Whether it is paused, which is false.
    paused: bool,
    /// Whether the program has ended, and is started again soon.
    restarting: bool,
    /// Whether the program was killed because of the memory limit.
    #[serde(rename = "OOMKilled")]
    oom_killed: bool,
    /// Process id of the first process; 0 unless the program runs.
    pid: u32,
    /// Exit code, also that of the last run if the program is started again soon; 0 before the end, and -1 if it is
    /// unknown.
    exit_code: i32,
    /// Time of the start, in RFC 3339; the year 1 if the container has not started.
    started_at: String,
    /// Time of the end, in RFC 3339; the year 1 if the container has not ended.
    finished_at: String,
    /// Whether a user has stopped the container. Always false without a restart policy.
    stopped_by_user: bool,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedMountReport {
    /// `bind`, `volume`, `tmpfs`, or `self` (a file system in a file of the container).
    #[serde(rename = "Type")]
    kind: &'static str,
    /// Name of a volume. Absent for other mounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Path on the host; empty if there is none.
    source: String,
    /// Path in the container.
    destination: String,
    /// Whether it is writable.
    #[serde(rename = "RW")]
    rw: bool,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedNetworkReport {
    /// Published ports of a running container: the addresses of the host, by port and protocol such as `80/tcp`.
    ports: BTreeMap<String, Vec<InspectedPortReport>>,
    /// Address in the only network of the store that a running container has joined; empty if there is none.
    #[serde(rename = "IPAddress")]
    ip_address: String,
    /// Networks of the store that the container joins, by their names.
    networks: BTreeMap<String, InspectedEndpointReport>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedEndpointReport {
    /// Id of the network; empty unless the container runs, like the other texts.
    #[serde(rename = "NetworkID")]
    network_id: String,
    /// Address of the container.
    #[serde(rename = "IPAddress")]
    ip_address: String,
    /// Number of leading bits that all addresses of the subnet share; 0 unless the container runs.
    #[serde(rename = "IPPrefixLen")]
    ip_prefix_len: u8,
    /// Address of the host in the network.
    gateway: String,
    /// Names of the container in the network, besides its own.
    aliases: Vec<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedPortReport {
    /// Address of the host; `0.0.0.0` means all.
    host_ip: String,
    /// Port of the host.
    host_port: String,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedConfigReport {
    /// Host name.
    hostname: String,
    /// User, and perhaps group, that the caller or the image names.
    user: String,
    /// Whether the program has a terminal.
    tty: bool,
    /// Variables of the program, as NAME=VALUE.
    env: Vec<String>,
    /// Command without the entrypoint.
    cmd: Vec<String>,
    /// Entrypoint.
    entrypoint: Vec<String>,
    /// Name by which the image was started; empty if it had none.
    image: String,
    /// Directory in which the program starts.
    working_dir: String,
    /// Labels of the caller and of the image.
    labels: BTreeMap<String, String>,
    /// Signal that `stop` sends first.
    stop_signal: String,
    /// Seconds after which `stop` kills the container.
    stop_timeout: u32,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedHostReport {
    /// Whether the container is removed at its end.
    auto_remove: bool,
    /// When the program is started again after its end.
    restart_policy: InspectedRestartReport,
    /// `none`, `host`, `pasta`, `bridge` for networks of the store, `ns:PATH` or `container:NAME`.
    network_mode: String,
    /// Directories and files of the host, and volumes by their names, as SOURCE:DESTINATION:OPTIONS.
    binds: Vec<String>,
    /// Whether the container has all rights of its user.
    privileged: bool,
    /// Whether the root is read-only.
    readonly_rootfs: bool,
    /// Memory limit; 0 if there is none.
    memory: Bytes,
    /// Limit of processor time, in billionths of a processor; 0 if there is none.
    nano_cpus: u64,
    /// Weight of processor time; 0 for the default.
    cpu_shares: u64,
    /// Processors on which programs may run; empty for all.
    cpuset_cpus: String,
    /// Limit of processes and threads; 0 if there is none.
    pids_limit: u32,
    /// Limits of the program's resources, as `run --ulimit` sets them.
    ulimits: Vec<InspectedUlimitReport>,
    /// Ports that are published when the container runs: the addresses of the host, by port and protocol.
    port_bindings: BTreeMap<String, Vec<InspectedPortReport>>,
    /// `private` if the container's users are other users of the host; else empty.
    userns_mode: &'static str,
    /// The log of the container's output.
    log_config: InspectedLogReport,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedLogReport {
    /// `k8s-file`, or `none` if no output is kept.
    #[serde(rename = "Type")]
    kind: &'static str,
    /// Path of the newer file of the log; empty if the container has none.
    path: String,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedRestartReport {
    /// `no`, `always`, `unless-stopped` or `on-failure`.
    name: &'static str,
    /// Maximum number of restarts of `on-failure`; 0 means no limit.
    maximum_retry_count: u32,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedUlimitReport {
    /// Name of the limit, such as `RLIMIT_NOFILE`.
    name: String,
    /// The limit that applies; -1 if there is none.
    soft: i64,
    /// The maximum of the limit that applies; -1 if there is none.
    hard: i64,
}

impl InspectedUlimitReport {
    fn of(limit: &SpecLimit) -> Self {
        // Source: Linux `include/uapi/linux/resource.h`, `RLIM_INFINITY`, the largest number.
        let number = |it: u64| i64::try_from(it).unwrap_or(-1);
        Self { name: limit.kind.clone(), soft: number(limit.soft), hard: number(limit.hard) }
    }
}

/// The time of an event that has not happened, as in Go.
const NEVER: &str = "0001-01-01T00:00:00Z";

impl InspectedContainerReport {
    /// Describes a container. A setting that cannot be read has its default.
    pub(crate) fn new(context: &Context, known: &KnownContainer) -> Self {
        let record = known.record.as_ref();
        let spec = RuntimeSpec::load(&known.folder).unwrap_or_default();
        let stored = StoredRequest::load(&known.folder, &known.id).ok();
        let runtime = stored.as_ref().map(|it| it.runtime.display().to_string());
        let request = stored.map_or_else(|| ContainerRequest::new(&known.id), |it| it.request);
        let image = config(context, known).unwrap_or_default();
        let command = known.command();
        let ports = by_name(PortReport::of(known));
        Self {
            id: known.id.clone(),
            name: known.id.clone(),
            created: record.map(|it| report::rfc3339(it.created.0)),
            path: command.first().cloned().unwrap_or_default(),
            args: command.into_iter().skip(1).collect(),
            state: InspectedStateReport::new(known),
            image: record.map(|it| it.image.to_string()),
            image_name: record.and_then(|it| it.name.clone()),
            image_digest: record.and_then(|it| it.manifest).map(|it| it.to_string()),
            oci_config_path: known.folder.join(folder::CONFIG).display().to_string(),
            oci_runtime: runtime,
            effective_caps: spec.process.capabilities.effective.clone(),
            bounding_caps: spec.process.capabilities.bounding.clone(),
            mounts: mounts(context, &request),
            network_settings: InspectedNetworkReport::new(known, &request, ports),
            size_rw: known.written().map(Bytes),
            restart_count: known.restarts(),
            host_config: InspectedHostReport::new(context, known, &request, &spec),
            config: InspectedConfigReport::new(known, &request, spec, image),
        }
    }
}

impl InspectedNetworkReport {
    fn new(
        known: &KnownContainer,
        request: &ContainerRequest,
        ports: BTreeMap<String, Vec<InspectedPortReport>>,
    ) -> Self {
        let mut noted = Vec::new();
        if known.is_running() {
            noted = noted_endpoints(&known.folder);
        }
        let mut networks = BTreeMap::new();
        for (joined, join) in
            request.networks.iter().flat_map(|it| it.networks.iter().map(move |join| (it, join)))
        {
            let found = noted.iter().find(|it| it.network == join.name);
            let prefix = found.and_then(|it| it.subnet.parse::<Subnet>().ok());
            let text = |of: &dyn Fn(&Endpoint) -> String| found.map_or_else(String::new, of);
            let endpoint = InspectedEndpointReport {
                network_id: text(&|it| it.id.clone()),
                ip_address: text(&|it| it.address.to_string()),
                ip_prefix_len: prefix.map_or(0, |it| it.prefix()),
                gateway: text(&|it| it.gateway.to_string()),
                aliases: joined.aliases.clone(),
            };
            networks.insert(join.name.clone(), endpoint);
        }
        let ip_address = match &*noted {
            [one] => one.address.to_string(),
            _ => String::new(),
        };
        Self { ports, ip_address, networks }
    }
}

/// Returns the configuration of a container's image, if it is still in the store.
fn config(context: &Context, known: &KnownContainer) -> anyhow::Result<ImageConfig> {
    let Some(record) = &known.record else { return Ok(ImageConfig::default()) };
    let store = match shared_store(context, record.shared.as_deref())? {
        Some(shared) => shared,
        None => context.open(OpenOptions::read())?,
    };
    let found = Resolved { image: record.image, name: None, manifest: record.manifest };
    image_config(&store, &found)
}

impl InspectedStateReport {
    fn new(known: &KnownContainer) -> Self {
        let state = known.state.as_ref();
        let is_running = known.is_running();
        let status = match known.status() {
            "unwatched" => "running",
            "lost" | "damaged" => "unknown",
            _ if known.is_stopping() => "stopping",
            status => status,
        };
        let is_over = !is_running && !known.is_created;
        let delay = known.delay();
        let reason = delay.map_or_else(|| known.reason(), |it| it.reason);
        let code = delay.map(|it| it.code).or_else(|| known.code());
        let finished = delay.map(|it| it.finished).or_else(|| state.and_then(|it| it.finished));
        let time = |seconds: Option<i64>| seconds.map_or_else(|| NEVER.to_owned(), report::rfc3339);
        Self {
            status,
            running: is_running,
            paused: false,
            restarting: delay.is_some(),
            oom_killed: reason == Some(Reason::Memory),
            pid: state.filter(|_| is_running && delay.is_none()).map_or(0, |it| it.pid),
            exit_code: code.unwrap_or(if is_over { -1 } else { 0 }),
            started_at: time(state.map(|it| it.started)),
            finished_at: time(finished),
            stopped_by_user: background::is_stopped_by_user(&known.folder),
        }
    }
}

/// Returns the mounts that the caller and the image requested. The paths of volumes are empty if there is no store.
fn mounts(context: &Context, request: &ContainerRequest) -> Vec<InspectedMountReport> {
    let is_volume =
        |it: &Volume| matches!(it.source, MountSource::Named(_) | MountSource::Anonymous(_));
    let has_volumes = request.volumes.iter().any(is_volume);
    let store = has_volumes.then(|| context.open(OpenOptions::read()).ok()).flatten();
    let path = |name: &String| {
        store.as_ref().map_or_else(String::new, |it| it.volumes.path(name).display().to_string())
    };
    let volumes = request.volumes.iter().map(|it| {
        let (kind, name, source) = match &it.source {
            MountSource::Host(path) | MountSource::Directory(path) => ("bind", None, path.clone()),
            MountSource::Memory { .. } => ("tmpfs", None, String::new()),
            MountSource::Named(name) | MountSource::Anonymous(Some(name)) => {
                ("volume", Some(name.clone()), path(name))
            }
            MountSource::Anonymous(None) => ("volume", None, String::new()),
        };
        (kind, name, source, &it.destination, it.access)
    });
    let mounts = request.mounts.iter().map(|it| {
        let (kind, source) = match &it.kind {
            MountKind::Host(path) => ("bind", path.clone()),
            MountKind::Memory { .. } => ("tmpfs", String::new()),
            MountKind::Filestore { .. } => ("self", String::new()),
        };
        (kind, None, source, &it.destination, it.access)
    });
    let report = |(kind, name, source, destination, access): (_, _, _, &String, Access)| {
        let rw = access == Access::Writable;
        InspectedMountReport { kind, name, source, destination: destination.clone(), rw }
    };
    volumes.chain(mounts).map(report).collect()
}

/// Sorts ports by the container's port and protocol.
fn by_name(ports: Vec<PortReport>) -> BTreeMap<String, Vec<InspectedPortReport>> {
    let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for port in ports {
        let host_ip = port.host_address().to_owned();
        let host_port = port.host_port().to_string();
        all.entry(port.name()).or_default().push(InspectedPortReport { host_ip, host_port });
    }
    all
}

impl InspectedConfigReport {
    fn new(
        known: &KnownContainer,
        request: &ContainerRequest,
        spec: RuntimeSpec,
        image: ImageConfig,
    ) -> Self {
        let bundle = &request.bundle;
        let has_own = bundle.entrypoint.is_some();
        let cmd = match (bundle.command.is_empty(), has_own) {
            (false, _) => bundle.command.clone(),
            (true, true) => Vec::new(),
            (true, false) => image.cmd,
        };
        let signal = request.stop_signal.clone().unwrap_or(image.stop_signal);
        let name = known.record.as_ref().and_then(|it| it.name.clone());
        // A container of an earlier version has not recorded those of its image.
        let mut labels = image.labels;
        labels.extend(request.labels.clone());
        Self {
            hostname: spec.hostname,
            user: request.user.clone().unwrap_or(image.user),
            tty: bundle.terminal == Terminal::New,
            env: spec.process.env,
            cmd,
            entrypoint: bundle.entrypoint.clone().unwrap_or(image.entrypoint),
            image: name.unwrap_or_default(),
            working_dir: spec.process.cwd,
            labels,
            stop_signal: if signal.is_empty() { "SIGTERM".to_owned() } else { signal },
            stop_timeout: request.stop_timeout.unwrap_or(PATIENCE),
        }
    }
}

impl InspectedLogReport {
    fn new(known: &KnownContainer, request: &ContainerRequest) -> Self {
        if request.no_log {
            return Self { kind: "none", path: String::new() };
        }
        let path = known.folder.join(folder::LOG);
        let path = if path.exists() { path.display().to_string() } else { String::new() };
        Self { kind: "k8s-file", path }
    }
}

/// Seconds after which `stop` kills a container by default.
const PATIENCE: u32 = 10;

impl InspectedHostReport {
    fn new(
        context: &Context,
        known: &KnownContainer,
        request: &ContainerRequest,
        spec: &RuntimeSpec,
    ) -> Self {
        let bundle = &request.bundle;
        let network_mode = match &bundle.network {
            Network::None => "none".to_owned(),
            Network::Host => "host".to_owned(),
            Network::Pasta => "pasta".to_owned(),
            Network::Joined(path) => format!("ns:{path}"),
            Network::Named => "bridge".to_owned(),
            Network::Container(name) => format!("container:{name}"),
        };
        let binds = mounts(context, request).into_iter();
        let binds = binds.filter(|it| ["bind", "volume"].contains(&it.kind)).map(|it| {
            let access = if it.rw { "rw" } else { "ro" };
            let source = it.name.unwrap_or(it.source);
            format!("{source}:{}:{access}", it.destination)
        });
        let ports = request.pasta.iter().flat_map(|it| &it.ports);
        let ports = ports.chain(request.networks.iter().flat_map(|it| &it.ports));
        let ports = ports.flat_map(|it| PortReport::of_range(&known.id, it)).collect();
        Self {
            // One of `create --rm` stays until its first start.
            auto_remove: known.record.as_ref().is_some_and(|it| !it.keep)
                || known.is_created && !request.keep,
            restart_policy: InspectedRestartReport {
                name: request.restart.name(),
                maximum_retry_count: request.restart.most(),
            },
            network_mode,
            binds: binds.collect(),
            privileged: bundle.security.interfaces == Interfaces::Open,
            readonly_rootfs: request.writable.access() == Access::ReadOnly,
            memory: Bytes(bundle.memory.map_or(0, |it| it.get())),
            // The quota is in microseconds of each period of 100 ms.
            nano_cpus: bundle.cpu.quota.map_or(0, |it| u64::from(it.get()).saturating_mul(10_000)),
            cpu_shares: bundle.cpu.shares.map_or(0, |it| it.get()),
            cpuset_cpus: bundle.cpu.cpus.clone().unwrap_or_default(),
            pids_limit: bundle.pids.map_or(0, |it| it.get()),
            ulimits: spec.process.rlimits.iter().map(InspectedUlimitReport::of).collect(),
            port_bindings: by_name(ports),
            userns_mode: if request.ids == IdsChoice::Host { "" } else { "private" },
            log_config: InspectedLogReport::new(known, request),
        }
    }
}
