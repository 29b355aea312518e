//! The `config.json` of an OCI bundle, made from the image's configuration and the caller's settings.

mod choices;
pub mod config;
mod destinations;
pub mod etc_files;
pub(crate) mod files;
mod home;
pub mod mounts;
pub(crate) mod path_resolver;
pub mod process_settings;
pub mod security;
pub mod spec;
pub mod user;
pub mod userns;

use std::num::{NonZeroU32, NonZeroU64};
use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};

use crate::bundle::config::ImageConfig;
use crate::bundle::destinations::{check_kernels, is_at_or_below, resolve_devices, resolve_mounts};
use crate::bundle::etc_files::NameMount;
use crate::bundle::mounts::Volume;
use crate::bundle::path_resolver::{FilePlace, View, WorkingDirError};
use crate::bundle::process_settings::ProcessSettings;
use crate::bundle::security::{Device, Interfaces, Security, write_devices};
use crate::bundle::spec::{
    RuntimeSpec, SpecCpu, SpecLinux, SpecMemory, SpecMount, SpecNamespace, SpecPids, SpecProcess,
    SpecResources, SpecRoot, SpecUser, VERSION, strings,
};
use crate::bundle::user::User;
use crate::bundle::userns::{IdMap, OwnIds};

pub use choices::{Access, Kind, Network};
pub use destinations::DestinationError;
pub(crate) use home::Home;

/// `PATH` of programs if neither the image nor the caller sets one: Docker's default.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Kernel interfaces that expose or control the host. Docker hides the same ones.
const MASKED: [&str; 12] = [
    "/proc/interrupts",
    "/sys/devices/virtual/powercap",
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
];

/// Directory with a subdirectory for each processor, `cpu0` and so on.
const PROCESSORS: &str = "/sys/devices/system/cpu";

const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Prefix of the image labels that are passed on as annotations: descriptions of the image. Other labels are dropped,
/// because runtimes obey some annotations (`run.oci.*` of crun, `org.systemd.property.*` of runc), and an image must
/// not control the runtime. Source: image-spec 1.1, `annotations.md`.
const HARMLESS_LABELS: &str = "org.opencontainers.image.";

/// Whether a process has a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Terminal {
    /// A new terminal, which the runtime connects to the caller's.
    New,
    /// The standard streams of this process, unchanged.
    None,
}

/// Limits of a container's processor time. A field that is `None` sets no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    /// Processor time in each period of 100 ms, in microseconds.
    pub quota: Option<NonZeroU32>,
    /// Weight against other cgroups that compete for processor time; the default is 1024.
    pub shares: Option<NonZeroU64>,
    /// List of processors, such as `0-2,7`.
    pub cpus: Option<String>,
}

/// Variable of programs with a terminal, for which nothing else is chosen. podman has the same.
pub(crate) const DEFAULT_TERM: &str = "TERM=xterm";

/// Default limit of processes and threads in a container, the same as podman's: enough for servers, and low enough
/// that a fork bomb does not bring the host down.
pub const PIDS: NonZeroU32 = NonZeroU32::new(2048).unwrap();

/// Period to which [`Cpu::quota`] refers, in microseconds.
pub const CPU_PERIOD: u32 = 100_000;

/// A cgroup controller that enforces limits. Source: Linux `Documentation/admin-guide/cgroup-v2.rst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    Memory,
    /// Controller of processor time.
    Cpu,
    /// Controller of the set of processors.
    Cpuset,
    /// Controller of the number of processes and threads.
    Pids,
}

impl Controller {
    pub const ALL: [Self; 4] = [Self::Memory, Self::Cpu, Self::Cpuset, Self::Pids];

    /// Returns the kernel's name of the controller.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Cpuset => "cpuset",
            Self::Pids => "pids",
        }
    }

    /// Returns the start of a message about a container's limit.
    pub(crate) const fn limited(self) -> &'static str {
        match self {
            Self::Memory => "its memory is",
            Self::Cpu => "its processor time is",
            Self::Cpuset => "its choice of processors is",
            Self::Pids => "its number of processes is",
        }
    }
}

/// Settings of the caller. A field that is `None` or empty keeps the image's setting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BundleOptions {
    /// Replaces the image's command, but not its entrypoint.
    pub command: Vec<String>,
    /// Replaces the image's entrypoint and command.
    pub entrypoint: Option<Vec<String>>,
    /// `NAME=VALUE`, which overrides the image's variables.
    pub env: Vec<String>,
    /// Directory in which the command starts.
    pub working_dir: Option<String>,
    pub hostname: String,
    pub terminal: Terminal,
    pub network: Network,
    /// Absolute path of the namespace for [`Network::Pasta`], [`Network::Named`] and [`Network::Container`]. It is set later.
    #[serde(skip)]
    pub network_place: Option<String>,
    /// Files for looking up names, such as `/etc/hosts`, from [`crate::bundle::etc_files::files`].
    #[serde(skip)]
    pub names: Vec<NameMount>,
    /// Access to the root file system.
    pub access: Access,
    /// Additional mounts, from [`crate::bundle::mounts::arrange`].
    #[serde(skip)]
    pub volumes: Vec<Volume>,
    /// Map of the container's ids to the host's ids; `None` if they are the same.
    #[serde(skip)]
    pub map: Option<IdMap>,
    /// Path of its cgroups below the root of each hierarchy; `None` leaves the choice to the runtime.
    #[serde(skip)]
    pub cgroup: Option<String>,
    /// Ids of the user namespace of this process and the runtime, if it is not the host's. Then the container sees
    /// cgroups only if it has a delegated one.
    #[serde(skip)]
    pub own: Option<OwnIds>,
    /// Whether the caller requested a limit. The default [`PIDS`] does not count.
    pub is_limited: bool,
    /// Memory limit, in bytes.
    pub memory: Option<NonZeroU64>,
    /// Limit of processes and threads.
    pub pids: Option<NonZeroU32>,
    /// Limits of processor time.
    pub cpu: Cpu,
    /// Capabilities, system calls, devices and resource limits.
    pub security: Security,
    /// Groups, kernel parameters and the like. Requests of Quire 0.1 lack the field.
    #[serde(default)]
    pub process: ProcessSettings,
}

impl BundleOptions {
    /// Returns the controllers that the limits need.
    pub(crate) fn controllers(&self) -> Vec<Controller> {
        let is_timed = self.cpu.quota.is_some() || self.cpu.shares.is_some();
        let needed = [
            (Controller::Memory, self.memory.is_some()),
            (Controller::Cpu, is_timed),
            (Controller::Cpuset, self.cpu.cpus.is_some()),
            (Controller::Pids, self.pids.is_some()),
        ];
        needed.into_iter().filter(|it| it.1).map(|it| it.0).collect()
    }

    /// Removes the limits whose controllers are not in `there`, the available ones.
    pub(crate) fn drop_limits(&mut self, there: &[Controller]) {
        let has = |controller| there.contains(&controller);
        self.memory = self.memory.filter(|_| has(Controller::Memory));
        self.cpu.quota = self.cpu.quota.filter(|_| has(Controller::Cpu));
        self.cpu.shares = self.cpu.shares.filter(|_| has(Controller::Cpu));
        self.cpu.cpus = self.cpu.cpus.take().filter(|_| has(Controller::Cpuset));
        self.pids = self.pids.filter(|_| has(Controller::Pids));
    }

    /// Returns settings that contain only a host name: all else is as in the image, without limits or shared
    /// resources.
    #[must_use]
    pub fn new(hostname: String) -> Self {
        Self {
            command: Vec::new(),
            entrypoint: None,
            env: Vec::new(),
            working_dir: None,
            hostname,
            terminal: Terminal::None,
            network: Network::None,
            network_place: None,
            names: Vec::new(),
            access: Access::Writable,
            volumes: Vec::new(),
            map: None,
            cgroup: None,
            own: None,
            is_limited: false,
            memory: None,
            pids: None,
            cpu: Cpu::default(),
            security: Security::default(),
            process: ProcessSettings::default(),
        }
    }
}

/// A setting that cannot be applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// Neither the image nor the caller names a command.
    #[error("the image has no command: give one after --")]
    NoCommand,
    /// A variable of the caller has no name or no value.
    #[error("\"{0}\" is not NAME=VALUE")]
    Env(String),
    /// The working directory cannot be used.
    #[error(transparent)]
    WorkingDir(#[from] WorkingDirError),
    /// The root does not allow a mount or a device.
    #[error(transparent)]
    Destination(#[from] DestinationError),
    /// The mount points of the files for names cannot be looked up.
    #[error("cannot look for /etc/hosts and the like in the root")]
    Places(#[source] rustix::io::Errno),
}

/// Command to execute, with its environment and working directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The program and its arguments; at least one entry.
    pub args: Vec<String>,
    /// `NAME=VALUE`. Each name is unique, and `PATH` and `HOME` are set.
    pub env: Vec<String>,
    /// Directory as requested; its links are not resolved.
    pub working_dir: String,
}

impl Process {
    /// Merges the image's configuration with the caller's settings. Malformed variables of the image are left out.
    fn new(image: &ImageConfig, options: &BundleOptions, user: &User) -> Result<Self, BundleError> {
        let (entrypoint, image_command) = match &options.entrypoint {
            Some(entrypoint) => (entrypoint, &Vec::new()),
            None => (&image.entrypoint, &image.cmd),
        };
        let command = if options.command.is_empty() { image_command } else { &options.command };
        let args: Vec<String> = entrypoint.iter().chain(command).cloned().collect();
        if args.is_empty() {
            return Err(BundleError::NoCommand);
        }
        let mut env: Vec<String> = Vec::new();
        let image_env = image.env.iter().filter(|variable| {
            let good = name_of(variable).is_some();
            if !good {
                // The user of an image cannot repair its variables, and programs could not find such a variable.
                tracing::debug!(
                    variable,
                    "ignoring a variable of the image that is not NAME=VALUE"
                );
            }
            good
        });
        for variable in image_env.chain(&options.env) {
            let name = name_of(variable).ok_or_else(|| BundleError::Env(variable.clone()))?;
            match env.iter_mut().find(|it| is_named(it, name)) {
                Some(other) => other.clone_from(variable),
                None => env.push(variable.clone()),
            }
        }
        if !env.iter().any(|it| is_named(it, "PATH")) {
            env.push(format!("PATH={DEFAULT_PATH}"));
        }
        if !env.iter().any(|it| is_named(it, "HOME")) {
            env.push(format!("HOME={}", user.home));
        }
        if options.terminal == Terminal::New && !env.iter().any(|it| is_named(it, "TERM")) {
            env.push(DEFAULT_TERM.to_owned());
        }
        let working_dir = options.working_dir.as_ref().unwrap_or(&image.working_dir);
        let working_dir = if working_dir.is_empty() { "/" } else { working_dir };
        Ok(Self { args, env, working_dir: working_dir.to_owned() })
    }

    /// Returns the value of a variable.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        let found = self.env.iter().find(|it| is_named(it, name));
        found.and_then(|it| it.split_once('=')).map(|(_, value)| value)
    }
}

fn name_of(variable: &str) -> Option<&str> {
    variable.split_once('=').map(|(name, _)| name).filter(|name| !name.is_empty())
}

fn is_named(variable: &str, name: &str) -> bool {
    variable.split_once('=').is_some_and(|(it, _)| it == name)
}

/// Returns the process and the runtime configuration of a container. The container's root is `root`, which the runtime
/// finds at the path `place`. The working directory and the destinations of mounts and devices are resolved inside the
/// root, so that the runtime need not follow links.
pub fn configure(
    root: BorrowedFd<'_>,
    place: &str,
    image: &ImageConfig,
    options: &BundleOptions,
    user: &User,
) -> Result<(Process, RuntimeSpec), BundleError> {
    let mut process = Process::new(image, options, user)?;
    check_kernels(root)?;
    let mut config = runtime_config(&process, user, options, image, place);
    if options.security.interfaces == Interfaces::Masked {
        config.linux.masked_paths.extend(thermal_throttles());
    }
    resolve_mounts(root, &mut config, options.volumes.len())?;
    let devices = resolve_devices(&View::of_bundle(root, &config), &options.security.devices)?;
    let in_user_namespace = options.map.is_some() || options.own.is_some();
    write_devices(&devices, in_user_namespace, &mut config);
    let view = View::of_bundle(root, &config);
    process.working_dir = view.working_dir(&process.working_dir)?;
    let paths: Vec<_> = options.names.iter().map(|it| it.place).collect();
    let places = view.places(&paths).map_err(BundleError::Places)?;
    let places = places.into_iter().map(|place| match place {
        FilePlace::At(path) if is_needed(&path, &config, &devices, &process) => FilePlace::Taken,
        place => place,
    });
    let names = options.names.iter().zip(places);
    let names: Vec<_> = names.filter_map(|(it, place)| name_mount(options, it, place)).collect();
    config.process.cwd.clone_from(&process.working_dir);
    config.mounts.extend(names);
    Ok((process, config))
}

/// Whether a file at a path would replace a mount, a device or the working directory. All paths are without links.
fn is_needed(path: &str, config: &RuntimeSpec, devices: &[Device], process: &Process) -> bool {
    let mounts = config.mounts.iter().map(|it| it.destination.as_str());
    let mut above = mounts.chain([process.working_dir.as_str()]);
    let mut files = devices.iter().map(Device::path);
    above.any(|it| is_at_or_below(it, path))
        || files.any(|it| is_at_or_below(it, path) || is_at_or_below(path, it))
}

/// Returns the directories that count how often each processor was too hot, because a program could use these counts
/// to observe other programs. Docker also hides them. Source: moby `daemon/pkg/oci/defaults.go` and its advisory
/// GHSA-6fw5-f8r9-fgfm.
fn thermal_throttles() -> Vec<String> {
    let entries = std::fs::read_dir(PROCESSORS).into_iter().flatten().flatten();
    let names = entries.filter_map(|it| it.file_name().into_string().ok());
    let is_number = |it: &str| !it.is_empty() && it.bytes().all(|it| it.is_ascii_digit());
    let mut numbers: Vec<u32> = names
        .filter_map(|it| it.strip_prefix("cpu").filter(|it| is_number(it))?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let paths = numbers.into_iter().map(|it| format!("{PROCESSORS}/cpu{it}/thermal_throttle"));
    paths.filter(|path| std::path::Path::new(path).exists()).collect()
}

/// Returns the mount of a file for names. Its destination is the target of the image's links, inside the root.
/// Returns `None` if a mount of the caller, or something other than a file, is at the destination.
fn name_mount(options: &BundleOptions, file: &NameMount, place: FilePlace) -> Option<SpecMount> {
    let FilePlace::At(place) = place else {
        tracing::debug!(file.place, "not replaced, because the path cannot be mounted on");
        return None;
    };
    // Read-only like the root, of which these files are a part. podman does the same.
    let is_read_only = [options.access, file.access].contains(&Access::ReadOnly);
    let access = if is_read_only { "ro" } else { "rw" };
    let flags = ["bind", "rprivate", "nosuid", "noexec", "nodev", access];
    Some(SpecMount::new(&place, "bind", &file.source, &flags))
}

/// Returns the runtime configuration for a root file system at `root` (relative to the bundle, or absolute).
#[must_use]
fn runtime_config(
    process: &Process,
    user: &User,
    options: &BundleOptions,
    image: &ImageConfig,
    root: &str,
) -> RuntimeSpec {
    let annotations = image.labels.iter().filter(|(name, _)| name.starts_with(HARMLESS_LABELS));
    let mut spec = RuntimeSpec {
        oci_version: VERSION.to_owned(),
        process: SpecProcess {
            terminal: options.terminal == Terminal::New,
            user: SpecUser::new(user),
            args: process.args.clone(),
            env: process.env.clone(),
            cwd: process.working_dir.clone(),
            ..SpecProcess::default()
        },
        root: SpecRoot { path: root.to_owned(), readonly: options.access == Access::ReadOnly },
        hostname: options.hostname.clone(),
        mounts: mounts(options),
        annotations: annotations.map(|(name, it)| (name.clone(), it.clone())).collect(),
        linux: SpecLinux {
            namespaces: namespaces(options),
            resources: resources(options),
            cgroups_path: options.cgroup.clone(),
            ..SpecLinux::default()
        },
        ..RuntimeSpec::default()
    };
    if options.security.interfaces == Interfaces::Masked {
        spec.linux.masked_paths = strings(&MASKED);
        spec.linux.readonly_paths = strings(&READ_ONLY);
    }
    options.security.write(user, &mut spec);
    options.process.write(&mut spec);
    if let Some(map) = &options.map {
        map.write(&mut spec.linux);
    }
    spec
}

fn namespaces(options: &BundleOptions) -> Vec<SpecNamespace> {
    // The cgroup namespace hides the container's place in the host's cgroup hierarchy.
    let mut namespaces = ["pid", "ipc", "uts", "mount", "cgroup"].map(SpecNamespace::new).to_vec();
    match &options.network {
        Network::None => namespaces.push(SpecNamespace::new("network")),
        Network::Host => {}
        Network::Pasta | Network::Named | Network::Container(_) => {
            let path = options.network_place.clone();
            namespaces.push(SpecNamespace { path, ..SpecNamespace::new("network") });
        }
        Network::Joined(path) => {
            let path = Some(path.clone());
            namespaces.push(SpecNamespace { path, ..SpecNamespace::new("network") });
        }
    }
    namespaces
}

/// Returns the limits of the whole container. Numbers that exceed the specification's range are clamped, because they
/// exceed every machine.
fn resources(options: &BundleOptions) -> SpecResources {
    let memory = options.memory.map(|bytes| SpecMemory {
        limit: Some(i64::try_from(bytes.get()).unwrap_or(i64::MAX)),
        ..SpecMemory::default()
    });
    let cpu = SpecCpu {
        quota: options.cpu.quota.map(|it| it.get().into()),
        period: options.cpu.quota.map(|_| CPU_PERIOD.into()),
        shares: options.cpu.shares.map(NonZeroU64::get),
        cpus: options.cpu.cpus.clone(),
        ..SpecCpu::default()
    };
    SpecResources {
        memory,
        pids: options.pids.map(|it| SpecPids { limit: it.get().into() }),
        cpu: Some(cpu).filter(|it| *it != SpecCpu::default()),
        ..SpecResources::default()
    }
}

/// Returns the mounts of every container, and those that the caller requested.
fn mounts(options: &BundleOptions) -> Vec<SpecMount> {
    // Group 5 owns terminals. If the group is not mapped, the kernel refuses the option.
    let has_group = options.map.as_ref().is_none_or(|map| map.group(5).is_some())
        && options.own.as_ref().is_none_or(|own| own.has_group(5));
    let is_of_user = options.map.is_some() || options.own.is_some();
    let mut terminals = vec!["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"];
    terminals.extend(has_group.then_some("gid=5"));
    // The kernel does not count inodes as bytes of a tmpfs: see `mounts::files_of`.
    let memory = ["nosuid", "noexec", "strictatime", "mode=755", "size=65536k", "nr_inodes=65536"];
    let shared = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k", "nr_inodes=65536"];
    let plain = ["nosuid", "noexec", "nodev"];
    let mut mounts = vec![
        SpecMount::new("/proc", "proc", "proc", &plain),
        SpecMount::new("/dev", "tmpfs", "tmpfs", &memory),
        SpecMount::new("/dev/pts", "devpts", "devpts", &terminals),
        SpecMount::new("/dev/shm", "tmpfs", "shm", &shared),
        SpecMount::new("/dev/mqueue", "mqueue", "mqueue", &plain),
    ];
    // A user namespace may not mount a sysfs for a network namespace that it does not own. In a bind mount of the
    // host's sysfs, files belong to `nobody`.
    let is_elsewhere = match options.network {
        Network::None => false,
        Network::Host | Network::Joined(_) | Network::Container(_) => is_of_user,
        Network::Pasta | Network::Named => options.map.is_some(),
    };
    mounts.push(match is_elsewhere {
        true => {
            let flags = ["rbind", "rprivate", "nosuid", "noexec", "nodev", "rro"];
            SpecMount::new("/sys", "bind", "/sys", &flags)
        }
        false if options.security.interfaces == Interfaces::Open => {
            SpecMount::new("/sys", "sysfs", "sysfs", &plain)
        }
        // This is a new mount, and not a recursive bind mount of the host's `/sys`, which contains writable cgroups.
        _ => SpecMount::new("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    });
    // The cgroup namespace shows only the container's own cgroup and those below it. With cgroup version 1, runtimes
    // put the hierarchies into a tmpfs that stays writable. If this were a read-only path of the bundle, crun 1.8
    // would make the hierarchies in it writable.
    let is_open = options.security.interfaces == Interfaces::Open;
    let access = if is_open { "rw" } else { "ro" };
    let flags = ["nosuid", "noexec", "nodev", "relatime", access];
    if options.own.is_none() || options.cgroup.is_some() {
        mounts.push(SpecMount::new("/sys/fs/cgroup", "cgroup", "cgroup", &flags));
    }
    // A mount that the caller requested replaces the default mount at the same destination.
    let is_asked_for =
        |mount: &SpecMount| options.volumes.iter().any(|it| mount.destination == it.destination);
    mounts.retain(|mount| !is_asked_for(mount));
    mounts.extend(options.volumes.iter().map(Volume::entry));
    mounts
}

#[cfg(test)]
mod tests;
