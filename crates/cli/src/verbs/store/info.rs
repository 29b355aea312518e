//! `info`: describes the host, the runtime and the store, in podman's format.

use std::io::{self, Write};

use clap::Args;
use container::life::lookup::{KnownContainer, all};
use container::runtime::Runtime;
use oci::manifest::Platform;
use serde::Serialize;
use serde_json::Value;
use store::OpenOptions;

use crate::Answer;
use crate::output::report::{self, Bytes};
use crate::output::{template, version};
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Info {
    /// Print this Go template, such as {{.Host.Kernel}}, or json
    #[arg(short, long, value_name = "TEMPLATE")]
    pub(crate) format: Option<String>,
}

impl VerbArgs for Info {
    const NAME: &'static str = "info";
    const ABOUT: &'static str = "Show facts about this host and the store";
    const DETAILS: &'static str = "The fields are those of podman. `quire doctor` examines which features of Quire this \
        host supports, and why.";
    const EXAMPLES: &'static str = "quire info\n  quire info --format '{{.Store.GraphRoot}}'";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        info(context, self)
    }
}

/// Report of `info --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct InfoReport {
    /// The host.
    host: HostInfoReport,
    /// The store.
    store: StoreInfoReport,
    /// The program.
    version: VersionInfoReport,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct HostInfoReport {
    /// Architecture, such as `amd64`.
    arch: String,
    /// `v1` or `v2`.
    cgroup_version: String,
    /// Number of processors that this process may use.
    cpus: usize,
    /// Host name.
    hostname: String,
    /// Release of the kernel.
    kernel: String,
    /// Memory that is available to new programs.
    mem_free: Bytes,
    /// Memory of the host.
    mem_total: Bytes,
    /// Operating system, which is `linux`.
    os: String,
    /// The OCI runtime that `run` uses by default. Null if none is installed.
    oci_runtime: Option<RuntimeInfoReport>,
    /// Rights of the caller.
    security: SecurityInfoReport,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct RuntimeInfoReport {
    /// File name of the program.
    name: String,
    /// Path of the program.
    path: String,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SecurityInfoReport {
    /// Whether the caller is not root of the host.
    rootless: bool,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct StoreInfoReport {
    /// Directory of the store, which may not exist yet.
    graph_root: String,
    /// Numbers of containers.
    container_store: ContainerStoreReport,
    /// Numbers of images.
    image_store: ImageStoreReport,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContainerStoreReport {
    /// Number of containers.
    number: usize,
    /// Number of paused containers, which is 0.
    paused: usize,
    /// Number of running containers.
    running: usize,
    /// Number of containers that do not run.
    stopped: usize,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageStoreReport {
    /// Number of images with a name.
    number: usize,
}

/// Report of `version --json` on a program.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct VersionInfoReport {
    /// Version of Quire.
    pub(super) version: String,
    /// Commit of its source; empty if unknown.
    pub(super) git_commit: String,
    /// Operating system and architecture, such as `linux/amd64`.
    pub(super) os_arch: String,
}

impl VersionInfoReport {
    pub(super) fn new() -> Self {
        let platform = Platform::of_this_machine();
        // Such as `0.1.0 (0123abc)`.
        let (version, commit) = version::VERSION.split_once(" (").unwrap_or((version::VERSION, ""));
        Self {
            version: version.to_owned(),
            git_commit: commit.trim_end_matches(')').to_owned(),
            os_arch: format!("{}/{}", platform.os, platform.architecture),
        }
    }
}

fn info(context: &Context, args: &Info) -> anyhow::Result<Answer> {
    let report = InfoReport::new(context)?;
    let format = args.format.as_deref().filter(|it| !it.is_empty());
    if let Some(format) = format.filter(|it| !template::is_json(it)) {
        let value = upper(serde_json::to_value(&report)?);
        template::print(&(template::render(format, &value)? + "\n"))?;
        return Ok(Answer::Yes);
    }
    report::print(context.json || format.is_some(), &report, |report, out| {
        let value = serde_json::to_value(report).map_err(io::Error::other)?;
        write(&value, 0, out)
    })?;
    Ok(Answer::Yes)
}

impl InfoReport {
    fn new(context: &Context) -> anyhow::Result<Self> {
        let store = context.open_for(OpenOptions::read(), true)?;
        let containers = store.as_ref().map_or_else(|| Ok(Vec::new()), all)?;
        let running = containers.iter().filter(|it| it.is_running()).count();
        let images = match &store {
            Some(store) => {
                let (refs, _) = store.refs.readable()?;
                let images: std::collections::BTreeSet<_> =
                    refs.into_values().map(|it| it.image).collect();
                images.len()
            }
            None => 0,
        };
        let platform = Platform::of_this_machine();
        let of_kernel = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}"));
            text.unwrap_or_default().trim_end().to_owned()
        };
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let runtime = Runtime::locate(&context.search(), None, None).ok().map(|it| {
            let name = it.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            RuntimeInfoReport { name, path: it.path.display().to_string() }
        });
        Ok(Self {
            host: HostInfoReport {
                arch: platform.architecture.clone(),
                cgroup_version: cgroup_version(),
                cpus: std::thread::available_parallelism().map_or(1, |it| it.get()),
                hostname: of_kernel("hostname"),
                kernel: of_kernel("osrelease"),
                mem_free: Bytes(memory_of(&memory, "MemAvailable")),
                mem_total: Bytes(memory_of(&memory, "MemTotal")),
                os: platform.os.clone(),
                oci_runtime: runtime,
                security: SecurityInfoReport { rootless: !context.outside().is_host_root() },
            },
            store: StoreInfoReport {
                graph_root: context.store_directory()?.display().to_string(),
                container_store: numbers(&containers, running),
                image_store: ImageStoreReport { number: images },
            },
            version: VersionInfoReport::new(),
        })
    }
}

fn numbers(containers: &[KnownContainer], running: usize) -> ContainerStoreReport {
    let number = containers.len();
    ContainerStoreReport { number, paused: 0, running, stopped: number.saturating_sub(running) }
}

/// Returns the version of control groups, as podman names it. Source: Linux `include/uapi/linux/magic.h`,
/// `CGROUP2_SUPER_MAGIC`.
fn cgroup_version() -> String {
    let is_second = rustix::fs::statfs("/sys/fs/cgroup").is_ok_and(|it| it.f_type == 0x6367_7270);
    if is_second { "v2".to_owned() } else { "v1".to_owned() }
}

/// Returns a number of `/proc/meminfo`, in bytes; 0 if it is missing.
fn memory_of(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(':'));
    let kibibytes = line.and_then(|it| it.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.map_or(0, |it| it.saturating_mul(1024))
}

/// Gives the fields the names that templates of podman use: `GraphRoot` for `graphRoot`.
fn upper(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().map(|(name, value)| (upper_name(&name), upper(value)));
            Value::Object(fields.collect())
        }
        other => other,
    }
}

fn upper_name(name: &str) -> String {
    if name == "ociRuntime" {
        return "OCIRuntime".to_owned();
    }
    let mut letters = name.chars();
    let first = letters.next().map(|it| it.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

/// Prints fields for people, those of inner objects indented.
fn write(value: &Value, depth: usize, out: &mut dyn Write) -> io::Result<()> {
    for (name, value) in value.as_object().into_iter().flatten() {
        let indent = "  ".repeat(depth);
        match value {
            Value::Object(_) => {
                writeln!(out, "{indent}{name}:")?;
                write(value, depth + 1, out)?;
            }
            Value::String(text) => writeln!(out, "{indent}{name}: {}", report::plain(text))?,
            Value::Null => writeln!(out, "{indent}{name}: none")?,
            other => writeln!(out, "{indent}{name}: {other}")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_in_bytes() {
        let text = "MemTotal:       16384 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(memory_of(text, "MemTotal"), 16384 * 1024);
        assert_eq!(memory_of(text, "MemAvailable"), 1024 * 1024);
        assert_eq!(memory_of(text, "Mem"), 0);
        assert_eq!(memory_of("", "MemTotal"), 0);
    }

    #[test]
    fn templates_have_podmans_names() {
        let value = serde_json::json!({"host": {"ociRuntime": {"name": "crun"}, "cpus": 2}});
        let expect = serde_json::json!({"Host": {"OCIRuntime": {"Name": "crun"}, "Cpus": 2}});
        assert_eq!(upper(value), expect);
    }

    #[test]
    fn versions_have_parts() {
        let version = VersionInfoReport::new();
        assert_eq!(version.os_arch.split('/').count(), 2);
        assert!(version::VERSION.starts_with(&version.version), "{}", version.version);
        assert!(!version.version.contains(' ') && !version.git_commit.contains(')'));
    }
}
