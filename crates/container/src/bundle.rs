//! The `config.json` of an OCI bundle, made from the image's configuration and the caller's wishes.

mod choices;
pub mod config;
mod destinations;
pub(crate) mod files;
mod home;
pub mod mounts;
pub mod names;
pub mod security;
pub mod spec;
pub mod user;
pub mod userns;
pub(crate) mod view;

use std::num::{NonZeroU32, NonZeroU64};
use std::os::fd::BorrowedFd;

use crate::bundle::config::ImageConfig;
use crate::bundle::destinations::{check_kernels, is_at_or_below, resolve_devices, resolve_mounts};
use crate::bundle::mounts::Volume;
use crate::bundle::names::NameMount;
use crate::bundle::security::{Device, Interfaces, Security, write_devices};
use crate::bundle::spec::{
    RuntimeSpec, SpecCpu, SpecLinux, SpecMemory, SpecMount, SpecNamespace, SpecPids, SpecProcess,
    SpecResources, SpecRoot, SpecUser, VERSION, strings,
};
use crate::bundle::user::User;
use crate::bundle::userns::{IdMap, OwnIds};
use crate::bundle::view::{FilePlace, View, WorkingDirError};

pub use choices::{Access, Kind, Network};
pub use destinations::DestinationError;
pub(crate) use home::Home;

/// What a root without a `PATH` is searched by; Docker's default.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Kernel interfaces that tell about the host, or control it: those that Docker hides.
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

/// Directory with a directory for each processor, `cpu0` and so on.
const PROCESSORS: &str = "/sys/devices/system/cpu";

const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// What labels of an image begin with that are passed on as annotations: what images say about themselves. All others
/// stay here, since runtimes take orders from annotations (`run.oci.*` of crun, `org.systemd.property.*` of runc), and an
/// image is nobody who may give orders. Source: image-spec 1.1, `annotations.md`.
const HARMLESS_LABELS: &str = "org.opencontainers.image.";

/// Whether a process talks to a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Terminal {
    /// It gets a new one, that the runtime connects to ours.
    New,
    /// It gets our standard streams as they are.
    None,
}

/// Limits of a container's processor use. A field that is `None` sets no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cpu {
    /// Microseconds of processor time in each tenth of a second.
    pub quota: Option<NonZeroU32>,
    /// Weight against other cgroups that want time, whose default is 1024.
    pub shares: Option<NonZeroU64>,
    /// Which processors, such as `0-2,7`.
    pub cpus: Option<String>,
}

/// The most processes and threads of a container, if nobody says more or less. As with podman: enough for servers, and no
/// fork bomb takes the host down.
pub const PIDS: NonZeroU32 = NonZeroU32::new(2048).unwrap();

/// Period of which [`Cpu::quota`] is a part, in microseconds.
pub const CPU_PERIOD: u32 = 100_000;

/// A controller of cgroups that holds limits. Source: Linux `Documentation/admin-guide/cgroup-v2.rst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    /// Of memory.
    Memory,
    /// Of processor time.
    Cpu,
    /// Of which processors.
    Cpuset,
    /// Of processes and threads.
    Pids,
}

impl Controller {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Cpu, Self::Cpuset, Self::Pids];

    /// As the kernel names it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Cpuset => "cpuset",
            Self::Pids => "pids",
        }
    }

    /// What it limits, as the beginning of a sentence on a container.
    pub(crate) const fn limited(self) -> &'static str {
        match self {
            Self::Memory => "its memory is",
            Self::Cpu => "its processor time is",
            Self::Cpuset => "the choice of processors is",
            Self::Pids => "the number of its processes is",
        }
    }
}

/// The caller's wishes. A field that is `None` or empty leaves it to the image.
#[derive(Debug, Clone)]
pub struct Wishes {
    /// Replaces the image's command, but not its entrypoint.
    pub command: Vec<String>,
    /// Replaces the image's entrypoint, and then the image's command is not used either.
    pub entrypoint: Option<Vec<String>>,
    /// `NAME=VALUE`, over the image's.
    pub env: Vec<String>,
    /// Where the command starts.
    pub working_dir: Option<String>,
    /// The container's host name.
    pub hostname: String,
    /// Terminal or streams.
    pub terminal: Terminal,
    /// Network.
    pub network: Network,
    /// Where the namespace of [`Network::Pasta`] is found, an absolute path. Added later.
    pub network_place: Option<String>,
    /// Files for looking up names, such as `/etc/hosts`, from [`crate::bundle::names::files`].
    pub names: Vec<NameMount>,
    /// Root file system.
    pub access: Access,
    /// Further mounts, from [`crate::bundle::mounts::arrange`].
    pub volumes: Vec<Volume>,
    /// Map of its ids to ids of the host; `None` if they are the same.
    pub map: Option<IdMap>,
    /// Where its cgroups are, from the root of each hierarchy; none leaves it to the runtime.
    pub cgroup: Option<String>,
    /// The ids of the user namespace that this process and the runtime are in, if it is not the host's. Then the container
    /// sees cgroups only if it has one that was delegated.
    pub own: Option<OwnIds>,
    /// Whether somebody asked that it has less of the machine than there is: [`PIDS`] is there by itself.
    pub is_limited: bool,
    /// The most memory, in bytes.
    pub memory: Option<NonZeroU64>,
    /// The most processes and threads.
    pub pids: Option<NonZeroU32>,
    /// How much of the processors.
    pub cpu: Cpu,
    /// Capabilities, system calls, devices and limits.
    pub security: Security,
}

impl Wishes {
    /// The controllers that its limits need.
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

    /// Without the limits that none of these controllers sets.
    pub(crate) fn drop_limits(&mut self, there: &[Controller]) {
        let has = |controller| there.contains(&controller);
        self.memory = self.memory.filter(|_| has(Controller::Memory));
        self.cpu.quota = self.cpu.quota.filter(|_| has(Controller::Cpu));
        self.cpu.shares = self.cpu.shares.filter(|_| has(Controller::Cpu));
        self.cpu.cpus = self.cpu.cpus.take().filter(|_| has(Controller::Cpuset));
        self.pids = self.pids.filter(|_| has(Controller::Pids));
    }

    /// Wishes for nothing but a host name: the rest is as the image says, and nothing is limited or shared.
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
        }
    }
}

/// A wish that cannot be fulfilled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// Neither the image nor the caller names a command.
    #[error("the image has no command: give one after --")]
    NoCommand,
    /// A variable of the caller's without a name, or without a value.
    #[error("\"{0}\" is not NAME=VALUE")]
    Env(String),
    /// A working directory that cannot be had.
    #[error(transparent)]
    WorkingDir(#[from] WorkingDirError),
    /// The root does not allow a mount or a device.
    #[error(transparent)]
    Destination(#[from] DestinationError),
    /// Where its names go cannot be looked up.
    #[error("cannot look for /etc/hosts and the like in the root")]
    Places(#[source] rustix::io::Errno),
}

/// Command to execute, with its environment and working directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The program and its arguments, at least one.
    pub args: Vec<String>,
    /// `NAME=VALUE`, each name once, `PATH` and `HOME` among them.
    pub env: Vec<String>,
    /// As asked for.
    pub working_dir: String,
}

impl Process {
    /// Merges the image's configuration with the caller's wishes. What in the image's environment is no variable is
    /// left out.
    ///
    /// # Errors
    /// [`BundleError`].
    fn new(image: &ImageConfig, wishes: &Wishes, user: &User) -> Result<Self, BundleError> {
        let (entrypoint, image_command) = match &wishes.entrypoint {
            Some(entrypoint) => (entrypoint, &Vec::new()),
            None => (&image.entrypoint, &image.cmd),
        };
        let command = if wishes.command.is_empty() { image_command } else { &wishes.command };
        let args: Vec<String> = entrypoint.iter().chain(command).cloned().collect();
        if args.is_empty() {
            return Err(BundleError::NoCommand);
        }
        let mut env: Vec<String> = Vec::new();
        let image_env = image.env.iter().filter(|variable| {
            let good = name_of(variable).is_some();
            if !good {
                // Whoever runs an image cannot mend it, and no program could find such a variable.
                tracing::debug!(variable, "the image's variable is not NAME=VALUE: left out");
            }
            good
        });
        for variable in image_env.chain(&wishes.env) {
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
        if wishes.terminal == Terminal::New && !env.iter().any(|it| is_named(it, "TERM")) {
            env.push("TERM=xterm".to_owned());
        }
        let working_dir = wishes.working_dir.as_ref().unwrap_or(&image.working_dir);
        let working_dir = if working_dir.is_empty() { "/" } else { working_dir };
        Ok(Self { args, env, working_dir: working_dir.to_owned() })
    }

    /// The value of a variable.
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

/// Returns the process and the runtime configuration of a container. Its root is `root`, which the runtime finds at
/// `place`. The working directory, and the destinations of mounts and devices, are looked up in there, so that the runtime need not
/// follow links.
///
/// # Errors
/// [`BundleError`].
pub fn configure(
    root: BorrowedFd<'_>,
    place: &str,
    image: &ImageConfig,
    wishes: &Wishes,
    user: &User,
) -> Result<(Process, RuntimeSpec), BundleError> {
    let mut process = Process::new(image, wishes, user)?;
    check_kernels(root)?;
    let mut config = runtime_config(&process, user, wishes, image, place);
    if wishes.security.interfaces == Interfaces::Masked {
        config.linux.masked_paths.extend(thermal_throttles());
    }
    resolve_mounts(root, &mut config, wishes.volumes.len())?;
    let devices = resolve_devices(&View::of_bundle(root, &config), &wishes.security.devices)?;
    let in_user_namespace = wishes.map.is_some() || wishes.own.is_some();
    write_devices(&devices, in_user_namespace, &mut config);
    let view = View::of_bundle(root, &config);
    process.working_dir = view.working_dir(&process.working_dir)?;
    let paths: Vec<_> = wishes.names.iter().map(|it| it.place).collect();
    let places = view.places(&paths).map_err(BundleError::Places)?;
    let places = places.into_iter().map(|place| match place {
        FilePlace::At(path) if is_needed(&path, &config, &devices, &process) => FilePlace::Taken,
        place => place,
    });
    let names = wishes.names.iter().zip(places);
    let names: Vec<_> = names.filter_map(|(it, place)| name_mount(wishes, it, place)).collect();
    config.process.cwd.clone_from(&process.working_dir);
    config.mounts.extend(names);
    Ok((process, config))
}

/// Whether a file at a path would take the place of a mount, of a device or of the working directory. All are without links.
fn is_needed(path: &str, config: &RuntimeSpec, devices: &[Device], process: &Process) -> bool {
    let mounts = config.mounts.iter().map(|it| it.destination.as_str());
    let mut above = mounts.chain([process.working_dir.as_str()]);
    let mut files = devices.iter().map(Device::path);
    above.any(|it| is_at_or_below(it, path))
        || files.any(|it| is_at_or_below(it, path) || is_at_or_below(path, it))
}

/// Directories that count how often each processor was too hot, by which a program can watch others. Docker hides those of all
/// processors. Source: moby `daemon/pkg/oci/defaults.go` and its advisory GHSA-6fw5-f8r9-fgfm.
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

/// A file with names, where links of the image lead, but never out of the root; none if what was asked for or something
/// that is no file is there.
fn name_mount(wishes: &Wishes, file: &NameMount, place: FilePlace) -> Option<SpecMount> {
    let FilePlace::At(place) = place else {
        tracing::debug!(file.place, "stays as the container has it: nothing can be mounted there");
        return None;
    };
    // As podman has it: they are part of the root.
    let is_read_only = [wishes.access, file.access].contains(&Access::ReadOnly);
    let access = if is_read_only { "ro" } else { "rw" };
    let options = ["bind", "rprivate", "nosuid", "noexec", "nodev", access];
    Some(SpecMount::new(&place, "bind", &file.source, &options))
}

/// The runtime configuration, for a root file system at `root` (relative to the bundle, or absolute).
#[must_use]
fn runtime_config(
    process: &Process,
    user: &User,
    wishes: &Wishes,
    image: &ImageConfig,
    root: &str,
) -> RuntimeSpec {
    let annotations = image.labels.iter().filter(|(name, _)| name.starts_with(HARMLESS_LABELS));
    let mut spec = RuntimeSpec {
        oci_version: VERSION.to_owned(),
        process: SpecProcess {
            terminal: wishes.terminal == Terminal::New,
            user: SpecUser::new(user),
            args: process.args.clone(),
            env: process.env.clone(),
            cwd: process.working_dir.clone(),
            ..SpecProcess::default()
        },
        root: SpecRoot { path: root.to_owned(), readonly: wishes.access == Access::ReadOnly },
        hostname: wishes.hostname.clone(),
        mounts: mounts(wishes),
        annotations: annotations.map(|(name, it)| (name.clone(), it.clone())).collect(),
        linux: SpecLinux {
            namespaces: namespaces(wishes),
            resources: resources(wishes),
            cgroups_path: wishes.cgroup.clone(),
            ..SpecLinux::default()
        },
        ..RuntimeSpec::default()
    };
    if wishes.security.interfaces == Interfaces::Masked {
        spec.linux.masked_paths = strings(&MASKED);
        spec.linux.readonly_paths = strings(&READ_ONLY);
    }
    wishes.security.write(user, &mut spec);
    if let Some(map) = &wishes.map {
        map.write(&mut spec.linux);
    }
    spec
}

fn namespaces(wishes: &Wishes) -> Vec<SpecNamespace> {
    // With cgroups of its own in sight, it does not see where on the host it stands.
    let mut namespaces = ["pid", "ipc", "uts", "mount", "cgroup"].map(SpecNamespace::new).to_vec();
    match &wishes.network {
        Network::None => namespaces.push(SpecNamespace::new("network")),
        Network::Host => {}
        Network::Pasta => {
            let path = wishes.network_place.clone();
            namespaces.push(SpecNamespace { path, ..SpecNamespace::new("network") });
        }
        Network::Joined(path) => {
            let path = Some(path.clone());
            namespaces.push(SpecNamespace { path, ..SpecNamespace::new("network") });
        }
    }
    namespaces
}

/// What limits the whole container. What is more than a number of the specification is more than any machine has.
fn resources(wishes: &Wishes) -> SpecResources {
    let memory = wishes.memory.map(|bytes| SpecMemory {
        limit: Some(i64::try_from(bytes.get()).unwrap_or(i64::MAX)),
        ..SpecMemory::default()
    });
    let cpu = SpecCpu {
        quota: wishes.cpu.quota.map(|it| it.get().into()),
        period: wishes.cpu.quota.map(|_| CPU_PERIOD.into()),
        shares: wishes.cpu.shares.map(NonZeroU64::get),
        cpus: wishes.cpu.cpus.clone(),
        ..SpecCpu::default()
    };
    SpecResources {
        memory,
        pids: wishes.pids.map(|it| SpecPids { limit: it.get().into() }),
        cpu: Some(cpu).filter(|it| *it != SpecCpu::default()),
        ..SpecResources::default()
    }
}

/// What every container has mounted, and what was asked for.
fn mounts(wishes: &Wishes) -> Vec<SpecMount> {
    // The group of terminals, for programs that look for it there: where it is nobody, the kernel refuses to say it.
    let has_group = wishes.map.as_ref().is_none_or(|map| map.group(5).is_some())
        && wishes.own.as_ref().is_none_or(|own| own.has_group(5));
    let is_of_user = wishes.map.is_some() || wishes.own.is_some();
    let mut terminals = vec!["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"];
    terminals.extend(has_group.then_some("gid=5"));
    let memory = ["nosuid", "noexec", "strictatime", "mode=755", "size=65536k"];
    let shared = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"];
    let plain = ["nosuid", "noexec", "nodev"];
    let mut mounts = vec![
        SpecMount::new("/proc", "proc", "proc", &plain),
        SpecMount::new("/dev", "tmpfs", "tmpfs", &memory),
        SpecMount::new("/dev/pts", "devpts", "devpts", &terminals),
        SpecMount::new("/dev/shm", "tmpfs", "shm", &shared),
        SpecMount::new("/dev/mqueue", "mqueue", "mqueue", &plain),
    ];
    // A user namespace may not mount a sysfs of a network that is not its. In the host's, files are nobody's.
    let is_elsewhere = match wishes.network {
        Network::None => false,
        Network::Host | Network::Joined(_) => is_of_user,
        Network::Pasta => wishes.map.is_some(),
    };
    mounts.push(match is_elsewhere {
        true => {
            let options = ["rbind", "rprivate", "nosuid", "noexec", "nodev", "rro"];
            SpecMount::new("/sys", "bind", "/sys", &options)
        }
        false if wishes.security.interfaces == Interfaces::Open => {
            SpecMount::new("/sys", "sysfs", "sysfs", &plain)
        }
        // One of the container's own, never the host's with what is mounted in it: cgroups there can be written to.
        _ => SpecMount::new("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    });
    // Its own and those below, which is all that its cgroup namespace shows. With version 1 runtimes put the hierarchies into
    // a tmpfs that stays writable; as a read-only path of the bundle crun 1.8 makes the hierarchies in it writable.
    let is_open = wishes.security.interfaces == Interfaces::Open;
    let access = if is_open { "rw" } else { "ro" };
    let options = ["nosuid", "noexec", "nodev", "relatime", access];
    if wishes.own.is_none() || wishes.cgroup.is_some() {
        mounts.push(SpecMount::new("/sys/fs/cgroup", "cgroup", "cgroup", &options));
    }
    // What somebody asked for takes the place of what is there by itself.
    let is_asked_for =
        |mount: &SpecMount| wishes.volumes.iter().any(|it| mount.destination == it.destination);
    mounts.retain(|mount| !is_asked_for(mount));
    mounts.extend(wishes.volumes.iter().map(Volume::entry));
    mounts
}

#[cfg(test)]
mod tests;
