//! The snapshotters: what each is called, how containerd is told of it, and what runs beside it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use rig::process::quiet;

use super::Stage;
use super::node::quoted;

/// What gives containers their roots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Overlayfs,
    /// containerd's own, with its differ.
    Erofs,
    /// The same with layers that were converted before.
    ErofsCaches,
    Quire,
    /// The same, with the engine's own differ.
    QuireWalking,
    /// The same, without the differ's download.
    QuireSkip,
    /// The same, which starts images before their layers are here.
    QuireLazy,
    /// stargz-snapshotter, with layers as it wants them.
    Stargz,
    /// soci-snapshotter in its mode that wants no index, with a setting for each core.
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

    /// Whether this machine has it.
    pub(super) fn is_here(self, stage: &Stage<'_>) -> bool {
        let is_built = match self {
            Self::Stargz => stage.stargz.is_some(),
            Self::Soci => stage.soci.is_some(),
            _ => true,
        };
        is_built && !stage.failed.borrow().contains(&self)
    }

    /// Whether it is somebody else's, beside the engine's own.
    pub(super) const fn is_rival(self) -> bool {
        matches!(self, Self::Stargz | Self::Soci)
    }

    /// The tag of an image as it wants it, under one of two names.
    pub(super) fn tag(self, name: &str) -> String {
        match self {
            Self::Stargz => format!("{name}-estargz"),
            _ => name.to_owned(),
        }
    }

    /// As the engine knows it.
    pub(super) const fn snapshotter(self) -> &'static str {
        match self {
            Self::Overlayfs => "overlayfs",
            Self::Erofs | Self::ErofsCaches => "erofs",
            Self::Quire | Self::QuireWalking | Self::QuireSkip | Self::QuireLazy => "quire",
            Self::Stargz => "stargz",
            Self::Soci => "soci",
        }
    }

    /// What runs beside the engine.
    pub(super) fn service(
        self,
        stage: &Stage<'_>,
        place: &Path,
        socket: &Path,
    ) -> Result<Option<Command>> {
        let skip = match self {
            Self::Overlayfs | Self::Erofs | Self::ErofsCaches => return Ok(None),
            Self::Quire | Self::QuireWalking => "unpack",
            Self::QuireSkip | Self::QuireLazy => "download",
            Self::Stargz => {
                let mut stargz = Command::new(stage.stargz.as_ref().context("it is here")?);
                stargz.arg("snapshotter").arg(place.join("stargz")).arg(socket);
                return Ok(Some(stargz));
            }
            Self::Soci => {
                let mut soci = Command::new(stage.soci.as_ref().context("it is here")?);
                let (settings, root) = (place.join("soci.toml"), place.join("soci"));
                fs::write(&settings, soci_settings(place)?)?;
                fs::create_dir(&root)?;
                soci.arg(settings).arg(root).arg(socket);
                return Ok(Some(soci));
            }
        };
        let mut quire = Command::new(stage.context.quire);
        quire.arg("--store").arg(place.join("store"));
        quire.args(["serve", "--snapshotter", "--skip", skip]);
        quire.arg("--socket").arg(socket).arg("--engine").arg(place.join("socket"));
        if self == Self::QuireLazy {
            let settings = place.join("serve.toml");
            fs::write(&settings, LAZY)?;
            quire.arg("--config").arg(settings);
        }
        Ok(Some(quire))
    }

    /// The engine's configuration. For pods it has tables more.
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
            // What Quire prints has this table already.
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

/// The registry is on loopback, and nobody else pushes to it.
const LAZY: &str = "[snapshotter]\nlazy = true\ntrust-index = \"repository\"\n";

/// As its manual advises for erofs-utils of sid's age. As many layers as there are cores are unpacked at once.
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

/// What `quire serve` itself says.
fn printed(stage: &Stage<'_>, place: &Path, socket: &Path) -> Result<String> {
    let mut quire = Command::new(stage.context.quire);
    quire.arg("--store").arg(place.join("store")).args(["serve", "--snapshotter"]);
    quire.args(["--print-config", "containerd", "--version", "2.4", "--socket"]);
    quiet(quire.arg(socket))
}

/// The part of the engine that pulls has to be told of each snapshotter.
fn unpack(snapshotter: &str, differ: &str) -> String {
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    format!(
        "[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\nplatform = \"linux/{architecture}\"\n\
         snapshotter = \"{snapshotter}\"\ndiffer = \"{differ}\"\n"
    )
}

/// Whole layers, as many at once as there are cores.
fn soci_settings(place: &Path) -> Result<String> {
    let (cores, engine) = (std::thread::available_parallelism()?, quoted(&place.join("socket")));
    Ok(format!(
        "[content_store]\ntype = \"containerd\"\ncontainerd_address = {engine}\n\
         [pull_modes.parallel_pull_unpack]\nenable = true\nmax_concurrent_unpacks_per_image = {cores}\n"
    ))
}
