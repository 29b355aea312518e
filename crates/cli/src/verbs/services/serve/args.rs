//! Arguments of `serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgGroup, Args};
use serve::metrics::MetricsAddress;

use crate::args::{Engine, RegistryOptions, Skip};
use crate::verbs::services::engine_version::EngineVersion;

#[derive(Debug, Args)]
// `--version` is the version of an engine here.
#[command(disable_version_flag = true)]
#[command(group = ArgGroup::new("service").args(["lazy", "snapshotter", "mounts", "storage", "serve_registry"]).required(true))]
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
pub(crate) struct Serve {
    /// Fill the devices of lazily mounted images
    #[arg(long)]
    pub(crate) lazy: bool,
    /// Be a proxy snapshotter of containerd: roots of its containers come from this store
    #[arg(
        long,
        conflicts_with_all = [
            "lazy", "replace", "complete", "stop", "keeper", "again", "idle", "detached", "lazy_timeout"
        ]
    )]
    pub(crate) snapshotter: bool,
    /// Mount images for users who are not root: their containers then start as fast as root's. The settings list
    /// these users
    #[arg(
        long,
        conflicts_with_all = [
            "lazy", "snapshotter", "replace", "complete", "stop", "keeper", "again", "idle", "detached",
            "lazy_timeout"
        ]
    )]
    pub(crate) mounts: bool,
    /// Be a storage provider of systemd: `storagectl` lists images, and `mount -t storage quire:NAME DIRECTORY`
    /// mounts them, for root
    #[arg(
        long,
        conflicts_with_all = [
            "lazy", "snapshotter", "mounts", "replace", "complete", "stop", "keeper", "again", "idle", "detached",
            "lazy_timeout", "config"
        ]
    )]
    pub(crate) storage: bool,
    /// Be a read-only registry, which other hosts use as a mirror
    #[arg(
        long = "registry",
        requires = "repository",
        conflicts_with_all = [
            "lazy", "snapshotter", "mounts", "storage", "replace", "complete", "stop", "keeper", "again", "idle",
            "detached", "lazy_timeout", "config", "socket"
        ]
    )]
    pub(crate) serve_registry: bool,
    /// Address and port of the registry [default: 127.0.0.1:5500]
    #[arg(long, value_name = "ADDRESS:PORT", requires = "serve_registry")]
    pub(crate) listen: Option<SocketAddr>,
    /// Serve images with names in these repositories, to everyone who can reach the address. In the pattern, `*` is any
    /// text without a slash, and `**` any text: `docker.io/library/*`. Can be repeated
    #[arg(long, value_name = "PATTERN", requires = "serve_registry")]
    pub(crate) repository: Vec<String>,
    /// Also serve manifests by tag. By default clients ask the registry itself, because tags of the store may be
    /// outdated
    #[arg(long, requires = "serve_registry")]
    pub(crate) tags: bool,
    /// Serve one client, at standard input, as inetd and `Accept=yes` of systemd start services
    #[arg(long, requires = "storage")]
    pub(crate) inetd: bool,
    /// Socket of the snapshotter, which is the `address` in the engine's configuration [default:
    /// /run/quire/snapshotter.sock]. With `--mounts`, socket of the mount service [default:
    /// /run/quire/mounts.sock]. With `--storage`, socket for systemd's tools [default:
    /// /run/systemd/io.systemd.StorageProvider/quire]
    #[arg(long, value_name = "PATH", conflicts_with = "lazy")]
    pub(crate) socket: Option<PathBuf>,
    /// Socket of the engine, from which the differ reads the blobs of layers [default:
    /// /run/containerd/containerd.sock]
    #[arg(long, value_name = "PATH", requires = "snapshotter", conflicts_with = "lazy")]
    pub(crate) engine: Option<PathBuf>,
    /// When the engine may skip a layer that the store has. `download`: it does not download the layer; the image
    /// then cannot be pushed or exported. `unpack`: it downloads the layer, but unpacking takes no time. `never`:
    /// each layer is read [default: unpack]
    #[arg(long, value_name = "WHEN", requires = "snapshotter", conflicts_with = "lazy")]
    pub(crate) skip: Option<Skip>,
    /// Serve metrics for Prometheus by HTTP at this address and port, or at a socket with this path, as the setting
    /// `metrics` does. Only this host must reach the address, unless `--metrics-remote` is given
    #[arg(
        long,
        value_name = "ADDRESS",
        requires = "snapshotter",
        conflicts_with = "lazy",
        value_parser = parse_metrics
    )]
    pub(crate) metrics: Option<MetricsAddress>,
    /// Allow an address for metrics that other hosts reach. Metrics have no password and no encryption
    #[arg(long, requires = "metrics")]
    pub(crate) metrics_remote: bool,
    /// Free space without a pause if more than this percentage of the disk is in use [default: 80]
    #[arg(
        long,
        value_name = "PERCENT",
        requires = "snapshotter",
        conflicts_with = "lazy",
        value_parser = clap::value_parser!(u8).range(..=100)
    )]
    pub(crate) gc_above: Option<u8>,
    /// Print the configuration for this engine, and start nothing
    #[arg(
        long,
        value_name = "ENGINE",
        value_enum,
        requires = "snapshotter",
        conflicts_with = "lazy"
    )]
    pub(crate) print_config: Option<Engine>,
    /// Version of the engine whose configuration is printed: of containerd, Docker or k3s, such as 1.7.24. `1.7`
    /// means the newest 1.7. The default is the newest version that is known
    #[arg(long, value_name = "VERSION", requires = "print_config")]
    pub(crate) version: Option<EngineVersion>,
    /// Print the configuration of containerd in which only the pods of a runtime class use Quire. The name is the
    /// handler of the class
    #[arg(long, value_name = "NAME", requires = "print_config", value_parser = parse_handler)]
    pub(crate) runtime_class: Option<String>,
    /// Name for the engine of this service: each engine has separate snapshots and a separate socket [default:
    /// containerd]
    #[arg(long, value_name = "NAME", requires = "snapshotter", conflicts_with = "lazy")]
    pub(crate) instance: Option<String>,
    /// Take over from the running service: readers wait, but get no errors
    #[arg(long, conflicts_with = "keeper")]
    pub(crate) replace: bool,
    /// Also fetch the rest of each mounted image in the background; after that, the image is no longer lazy
    #[arg(long)]
    pub(crate) complete: bool,
    /// End the running service, unless lazy devices are in use. Until it ends, it keeps the file system of the
    /// store busy
    #[arg(
        long,
        conflicts_with_all = ["replace", "complete", "keeper", "config", "again", "idle", "detached", "lazy_timeout"]
    )]
    pub(crate) stop: bool,
    /// Be the keeper of the service at the other end of standard input, in this folder
    #[arg(long, hide = true)]
    pub(crate) keeper: Option<PathBuf>,
    /// Read settings from this file instead of /etc/quire/serve.toml: at the start, and at each SIGHUP
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Be the service that a keeper starts again: it starts even if the settings are invalid
    #[arg(long, hide = true, conflicts_with = "keeper")]
    pub(crate) again: bool,
    /// End once no lazy image has been in use for this long. Without this option the service does not end
    #[arg(long, value_name = "SECONDS")]
    pub(crate) idle: Option<u32>,
    /// Be the service that a mount starts, whose caller may be killed with all processes that it started
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
    /// Fail a read with an I/O error after this time without data from any source; 0 means no limit [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) lazy_timeout: Option<u32>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

fn parse_metrics(text: &str) -> Result<MetricsAddress, String> {
    MetricsAddress::parse(text).ok_or_else(|| {
        "it is neither an address with a port, such as 127.0.0.1:9110, nor an absolute path"
            .to_owned()
    })
}

/// Parses a handler of a runtime class. Source: Kubernetes, "Runtime Class", which wants a DNS label as in RFC 1123.
fn parse_handler(text: &str) -> Result<String, String> {
    let is_inner = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-';
    let has_ends = !text.starts_with('-') && !text.ends_with('-');
    if (1..=63).contains(&text.len()) && has_ends && text.bytes().all(is_inner) {
        return Ok(text.to_owned());
    }
    Err("a handler has 1 to 63 lower-case letters, digits and hyphens inside, such as quire"
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_are_labels() {
        for good in ["quire", "a", "my-quire-2", &"a".repeat(63)] {
            assert_eq!(parse_handler(good).as_deref(), Ok(good));
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a\"]\n", "a b", "ä", &"a".repeat(64)] {
            assert!(parse_handler(bad).is_err(), "{bad}");
        }
    }
}
