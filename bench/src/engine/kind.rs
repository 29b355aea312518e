//! The snapshotters: their names, their containerd configuration, and the services that they need.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::Stage;
use super::node::quoted;
use crate::command::{cmd, more, run};

/// A snapshotter, in one of its configurations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Overlayfs,
    /// containerd's EROFS snapshotter with its differ.
    Erofs,
    /// containerd's EROFS snapshotter with layers that were converted before.
    ErofsCaches,
    Quire,
    /// Quire with the engine's own differ.
    QuireWalking,
    /// Quire without the differ's download.
    QuireSkip,
    /// Quire, starting containers before their image's layers are downloaded.
    QuireLazy,
    /// stargz-snapshotter with eStargz layers.
    Stargz,
    /// soci-snapshotter in the mode that needs no index, with a concurrency setting for the number of cores.
    Soci,
}

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Overlayfs => "overlayfs",
            Self::Erofs => "erofs",
            Self::ErofsCaches => "erofs, layer_content_caches",
            Self::Quire => "Quire",
            Self::QuireWalking => "Quire, walking differ",
            Self::QuireSkip => "Quire, --skip download",
            Self::QuireLazy => "Quire, lazy",
            Self::Stargz => "stargz-snapshotter 0.19.1, lazy",
            Self::Soci => "soci-snapshotter 0.16.1, parallel",
        }
    }

    /// Whether this machine has the snapshotter's programs.
    pub(super) fn is_here(self, stage: &Stage<'_>) -> bool {
        let is_built = match self {
            Self::Stargz => stage.stargz.is_some(),
            Self::Soci => stage.soci.is_some(),
            _ => true,
        };
        is_built && !stage.failed.borrow().contains(&self)
    }

    /// Whether the snapshotter belongs neither to Quire nor to the engine.
    pub(super) const fn is_rival(self) -> bool {
        matches!(self, Self::Stargz | Self::Soci)
    }

    /// Tag of the image variant that the snapshotter needs, under one of two names.
    pub(super) fn tag(self, name: &str) -> String {
        match self {
            Self::Stargz => format!("{name}-estargz"),
            _ => name.to_owned(),
        }
    }

    /// The snapshotter's name in containerd.
    pub(super) const fn snapshotter(self) -> &'static str {
        match self {
            Self::Overlayfs => "overlayfs",
            Self::Erofs | Self::ErofsCaches => "erofs",
            Self::Quire | Self::QuireWalking | Self::QuireSkip | Self::QuireLazy => "quire",
            Self::Stargz => "stargz",
            Self::Soci => "soci",
        }
    }

    /// The service that the snapshotter needs besides the engine.
    pub(super) fn service(
        self,
        stage: &Stage<'_>,
        place: &Path,
        socket: &Path,
    ) -> Result<Option<Command>> {
        let quire = stage.context.quire;
        let serve = |skip: &str| {
            let serve = cmd!("{quire} --store {place}/store serve --snapshotter --skip {skip}");
            more!(serve, "--socket {socket} --engine {place}/socket")
        };
        Ok(Some(match self {
            Self::Overlayfs | Self::Erofs | Self::ErofsCaches => return Ok(None),
            Self::Quire | Self::QuireWalking => serve("unpack"),
            Self::QuireSkip => serve("download"),
            Self::QuireLazy => {
                let settings = place.join("serve.toml");
                fs::write(&settings, LAZY)?;
                more!(serve("download"), "--config {settings}")
            }
            Self::Stargz => {
                let stargz = stage.stargz.as_ref().context("the stage did not make it")?;
                cmd!("{stargz} snapshotter {place}/stargz {socket}")
            }
            Self::Soci => {
                let soci = stage.soci.as_ref().context("the stage did not make it")?;
                fs::write(place.join("soci.toml"), soci_settings(place)?)?;
                fs::create_dir(place.join("soci"))?;
                cmd!("{soci} {place}/soci.toml {place}/soci {socket}")
            }
        }))
    }

    /// The engine's configuration, with additional tables for pods.
    pub(super) fn config(
        self,
        stage: &Stage<'_>,
        place: &Path,
        socket: &Path,
        pods: Option<&str>,
    ) -> Result<String> {
        let rest = match self {
            Self::Overlayfs => String::from("version = 3\n"),
            Self::Erofs => erofs("")?,
            Self::ErofsCaches => erofs(&quoted(&stage.caches()))?,
            Self::Quire | Self::QuireSkip | Self::QuireLazy => printed(stage, place, socket)?,
            Self::QuireWalking => {
                let printed = printed(stage, place, socket)?;
                printed.replace("differ = \"quire-diff\"", "differ = \"walking\"")
            }
            Self::Stargz | Self::Soci => format!(
                "version = 3\n[proxy_plugins.{name}]\ntype = \"snapshot\"\naddress = {socket}\n\
                 [proxy_plugins.{name}.exports]\nenable_remote_snapshot_annotations = \"true\"\n{unpack}",
                name = self.snapshotter(),
                socket = quoted(socket),
                unpack = unpack(self.snapshotter(), "walking"),
            ),
        };
        let (first, rest) = rest.split_once('\n').context("the configuration has one line")?;
        let [root, state, socket] = ["root", "state", "socket"].map(|it| quoted(&place.join(it)));
        let (without, tables) = match pods {
            None => ("disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n", String::new()),
            // Quire's printed configuration already contains this table.
            Some(tables) if self.snapshotter() == "quire" => ("", tables.to_owned()),
            Some(tables) => {
                let snapshotter = self.snapshotter();
                let images = "[plugins.\"io.containerd.cri.v1.images\"]\ndisable_snapshot_annotations = false";
                ("", format!("{images}\nsnapshotter = \"{snapshotter}\"\n{tables}"))
            }
        };
        Ok(format!(
            "{first}\nroot = {root}\nstate = {state}\n{without}[grpc]\naddress = {socket}\n{rest}{tables}"
        ))
    }
}

/// Trusts the repository's index, because the registry is on loopback and only this bench pushes to it.
const LAZY: &str = "[snapshotter]\nlazy = true\ntrust-index = \"repository\"\n";

/// The configuration that the snapshotter's manual advises for erofs-utils of sid's age. It unpacks as many layers at
/// once as there are cores.
fn erofs(caches: &str) -> Result<String> {
    Ok(format!(
        "version = 3\n[plugins.\"io.containerd.service.v1.diff-service\"]\ndefault = [\"erofs\", \"walking\"]\n\
         [plugins.\"io.containerd.differ.v1.erofs\"]\nmkfs_options = [\"-T0\", \"--mkfs-time\", \"--sort=none\"]\n\
         [plugins.\"io.containerd.snapshotter.v1.erofs\"]\nlayer_content_caches = [{caches}]\n\
         [plugins.\"io.containerd.transfer.v1.local\"]\nmax_concurrent_unpacks = {cores}\n{unpack}",
        cores = std::thread::available_parallelism()?,
        unpack = unpack("erofs", "erofs"),
    ))
}

/// The configuration that `quire serve` prints.
fn printed(stage: &Stage<'_>, place: &Path, socket: &Path) -> Result<String> {
    let quire = stage.context.quire;
    run!(
        "{quire} --store {place}/store serve --snapshotter",
        "--print-config containerd --version 2.4 --socket {socket}"
    )
}

/// Configures a snapshotter for the engine's transfer service, which pulls images.
fn unpack(snapshotter: &str, differ: &str) -> String {
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    format!(
        "[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\nplatform = \"linux/{architecture}\"\n\
         snapshotter = \"{snapshotter}\"\ndiffer = \"{differ}\"\n"
    )
}

/// Settings for whole layers, as many at once as there are cores.
fn soci_settings(place: &Path) -> Result<String> {
    let (cores, engine) = (std::thread::available_parallelism()?, quoted(&place.join("socket")));
    Ok(format!(
        "[content_store]\ntype = \"containerd\"\ncontainerd_address = {engine}\n\
         [pull_modes.parallel_pull_unpack]\nenable = true\nmax_concurrent_unpacks_per_image = {cores}\n"
    ))
}
