//! Arguments of `serve`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use crate::args::{Door, Engine, RegistryOptions, Skip};
use crate::verbs::services::engine_version::EngineVersion;

#[derive(Debug, Args)]
// Its own `--version` is that of an engine.
#[command(disable_version_flag = true)]
#[command(group = ArgGroup::new("service").args(["lazy", "snapshotter", "mounts", "storage"]).required(true))]
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
pub(crate) struct Serve {
    /// Fill the devices of lazily mounted images
    #[arg(long)]
    pub(crate) lazy: bool,
    /// Be a proxy snapshotter of containerd: roots of its containers come from this store
    #[arg(
        long,
        conflicts_with_all = [
            "lazy", "replace", "complete", "stop", "door", "keeper", "again", "idle", "detached", "lazy_timeout"
        ]
    )]
    pub(crate) snapshotter: bool,
    /// Lend images to users who are not root: their containers then start as fast as root's. The settings say to whom
    #[arg(
        long,
        conflicts_with_all = [
            "lazy", "snapshotter", "replace", "complete", "stop", "door", "keeper", "again", "idle", "detached",
            "lazy_timeout"
        ]
    )]
    pub(crate) mounts: bool,
    /// Be a storage provider of systemd: `storagectl` lists images, and `mount -t storage quire:NAME DIRECTORY` mounts them,
    /// for root
    #[arg(
        long,
        conflicts_with_all = [
            "lazy", "snapshotter", "mounts", "replace", "complete", "stop", "door", "keeper", "again", "idle", "detached",
            "lazy_timeout", "config"
        ]
    )]
    pub(crate) storage: bool,
    /// Speak with one client, at standard input, as inetd and `Accept=yes` of systemd start services
    #[arg(long, requires = "storage")]
    pub(crate) inetd: bool,
    /// Where the engine finds the snapshotter: the `address` in its configuration [default: /run/quire/snapshotter.sock].
    /// With `--mounts`, where users find the mount service [default: /run/quire/mounts.sock].
    /// With `--storage`, where systemd's tools look [default: /run/systemd/io.systemd.StorageProvider/quire]
    #[arg(long, value_name = "PATH", conflicts_with = "lazy")]
    pub(crate) socket: Option<PathBuf>,
    /// Where the engine listens: the differ reads the blobs of layers there [default: /run/containerd/containerd.sock]
    #[arg(long, value_name = "PATH", requires = "snapshotter", conflicts_with = "lazy")]
    pub(crate) engine: Option<PathBuf>,
    /// When the engine need not bring a layer that the store has. `download`: it does not download it; the image cannot be
    /// pushed or exported then. `unpack`: it downloads it, and unpacking takes no time. `never`: each layer is read
    /// [default: unpack]
    #[arg(long, value_name = "WHEN", requires = "snapshotter", conflicts_with = "lazy")]
    pub(crate) skip: Option<Skip>,
    /// Print what belongs in the configuration of this engine, and start nothing
    #[arg(
        long,
        value_name = "ENGINE",
        value_enum,
        requires = "snapshotter",
        conflicts_with = "lazy"
    )]
    pub(crate) print_config: Option<Engine>,
    /// Which version of the engine the configuration is for: of containerd, Docker or k3s, such as 1.7.24. `1.7` is the newest
    /// 1.7. Without this option it is the newest that is known
    #[arg(long, value_name = "VERSION", requires = "print_config")]
    pub(crate) version: Option<EngineVersion>,
    /// Which engine this is for: each one has snapshots of its own, and a socket of its own [default: containerd]
    #[arg(long, value_name = "NAME", requires = "snapshotter", conflicts_with = "lazy")]
    pub(crate) instance: Option<String>,
    /// Take over from the service that runs: readers wait, and see nothing of it
    #[arg(long, conflicts_with = "keeper")]
    pub(crate) replace: bool,
    /// Fetch all of each image that is mounted, behind what programs read: then it is lazy no longer
    #[arg(long)]
    pub(crate) complete: bool,
    /// End the service that runs, unless lazy devices are in use. Until it ends, it keeps the file system of the store busy
    #[arg(
        long,
        conflicts_with_all = ["replace", "complete", "door", "keeper", "config", "again", "idle", "detached", "lazy_timeout"]
    )]
    pub(crate) stop: bool,
    /// How programs wait for bytes that are not here. `fuse`: files on FUSE stand for devices (Linux 6.4): programs get the right
    /// bytes or an I/O error, whichever processes are killed. `fanotify`: their reads are events (Linux 6.14, a store on ext4,
    /// XFS or btrfs): faster, but programs read zeros as file data, without an error, if the service, its keeper and the
    /// container's monitor are killed together. `auto`: `fuse` [default: auto]
    #[arg(long, value_name = "DOOR")]
    pub(crate) door: Option<Door>,
    /// Be the keeper of the service at the other end of standard input, in this folder
    #[arg(long, hide = true)]
    pub(crate) keeper: Option<PathBuf>,
    /// Read settings from this file instead of /etc/quire/serve.toml: at the start, and at each SIGHUP
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Be the service that a keeper starts again: it starts whatever the settings are
    #[arg(long, hide = true, conflicts_with = "keeper")]
    pub(crate) again: bool,
    /// End by itself once no lazy image has been in use for this long. Without this option it does not
    #[arg(long, value_name = "SECONDS")]
    pub(crate) idle: Option<u32>,
    /// Be the service that a mount starts, whose caller may be ended with all that it started
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
    /// How long a read waits while no source gives anything: then it is an I/O error. 0 for no end [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) lazy_timeout: Option<u32>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}
