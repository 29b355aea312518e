//! Plans of containers, made only from the caller's settings and the image's configuration, without any input or
//! output.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use store::{ContainerError, check_id};

use crate::bundle::config::ImageConfig;
use crate::bundle::etc_files::Names;
use crate::bundle::mounts::{MountRequest, MountSource, Restrictions, Volume, destination};
use crate::bundle::security::FilterError;
use crate::bundle::userns::IdMap;
use crate::bundle::{Access, BundleOptions};
use crate::network::Pasta;
use crate::networks::JoinedNetworks;
use crate::restart_policy::RestartPolicy;
use crate::root::{Space, SpaceError, Trust, Warm, WritableChoice, space};
use crate::runtime::Kind;
use crate::runtime::init::PLACE;

/// Ids of a container's users on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IdsChoice {
    /// The same ids.
    Host,
    /// A range of this number of ids, which no other container of the store has.
    Auto(NonZeroU32),
    /// The ids of a map.
    Map(IdMap),
}

/// How a container is asked to end.
#[derive(Debug, Clone)]
pub struct Stop {
    /// Signal, by name or number; empty for TERM.
    pub signal: String,
    /// Seconds that `stop` waits before it kills.
    pub timeout: Option<u32>,
}

/// A program of the host as a container's first process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InitChoice {
    /// None: the container's own program is the first process.
    None,
    /// The first known program that is found.
    Any,
    /// The init program at this path.
    Program(PathBuf),
}

/// A caller's settings for a container. A field that is `None` keeps the image's setting.
///
/// The container's folder keeps them ([`crate::request`]), so that the container can be started again. Paths must be
/// absolute, because a later start may have another working directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
pub struct ContainerRequest {
    pub id: String,
    /// Settings for the bundle. Names, volumes, map and cgroup are added later.
    pub bundle: BundleOptions,
    /// User, and optionally group, of the command.
    pub user: Option<String>,
    pub trust: Trust,
    /// Location of changes.
    pub writable: WritableChoice,
    /// Whether `df` shows some free space in a read-only root.
    pub df: bool,
    /// Data to read ahead.
    pub warm: Warm,
    /// Ids of the container's users on the host.
    pub ids: IdsChoice,
    /// Directories and files of the host in the container.
    pub volumes: Vec<Volume>,
    /// Additional mounts.
    pub mounts: Vec<MountRequest>,
    /// Connection of the network, if that is [`Network::Pasta`](crate::bundle::Network::Pasta).
    pub pasta: Option<Pasta>,
    /// Networks of the store, if the network is [`Network::Named`](crate::bundle::Network::Named). Requests of Quire 0.1
    /// lack the field.
    #[serde(default)]
    pub networks: Option<JoinedNetworks>,
    /// Files for looking up names, such as `/etc/hosts`; `None` for those of the image.
    pub names: Option<Names>,
    pub init: InitChoice,
    /// Signal that asks the container to end.
    pub stop_signal: Option<String>,
    /// Seconds that `stop` waits before it kills.
    pub stop_timeout: Option<u32>,
    /// Seconds until the container is killed; 0 for no limit.
    pub timeout: u32,
    /// Limit of the log, in bytes; `None` for no limit.
    pub log_size: Option<NonZeroU64>,
    /// Whether the folder is kept after the container's end.
    pub keep: bool,
    /// Labels of the image and of the caller. Requests of Quire 0.1 lack the field, like the next three.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Whether standard input of a container in the background stays open, although nothing writes to it.
    #[serde(default)]
    pub stdin: bool,
    /// When the program is started again after its end.
    #[serde(default)]
    pub restart: RestartPolicy,
    /// Whether the log does not keep the output.
    #[serde(default)]
    pub no_log: bool,
    /// Whether a new container is kept until its first start, although it is removed at its end.
    #[serde(skip)]
    pub rests: bool,
    /// Id of the uppermost snapshot below the writable layer of a new container. The record of an existing one has it.
    #[serde(skip)]
    pub snapshot: Option<String>,
}

impl ContainerRequest {
    /// Returns the minimal settings for a container with this id: a read-only root, the host's ids, and removal at
    /// its end.
    #[must_use]
    pub fn new(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            bundle: BundleOptions::new(id.to_owned()),
            user: None,
            trust: Trust::default(),
            writable: WritableChoice::None,
            df: false,
            warm: Warm::Nothing,
            ids: IdsChoice::Host,
            volumes: Vec::new(),
            mounts: Vec::new(),
            pasta: None,
            networks: None,
            names: None,
            init: InitChoice::None,
            stop_signal: None,
            stop_timeout: None,
            timeout: 0,
            log_size: None,
            keep: false,
            labels: BTreeMap::new(),
            stdin: false,
            restart: RestartPolicy::No,
            no_log: false,
            rests: false,
            snapshot: None,
        }
    }

    /// Returns the names of the volumes that were made only for this container.
    pub(crate) fn own_volumes(&self) -> impl Iterator<Item = &str> {
        self.volumes.iter().filter_map(|it| match &it.source {
            MountSource::Anonymous(name) => name.as_deref(),
            _ => None,
        })
    }

    /// Takes over the settings of the image that are recorded with a new container: its labels, unless the caller has
    /// set the same ones, and its volumes, unless the caller mounts something there.
    ///
    /// # Errors
    /// [`PlanError::Volumes`] if the image has too many volumes.
    pub fn inherit(&mut self, image: &ImageConfig, volumes: ImageVolumes) -> Result<(), PlanError> {
        // JSON has six bytes for some characters.
        let bytes = serde_json::to_vec(&image.labels).map_or(usize::MAX, |it| it.len());
        if bytes <= LABELS_MAX {
            for (name, value) in &image.labels {
                self.labels.entry(name.clone()).or_insert_with(|| value.clone());
            }
        } else {
            tracing::debug!(bytes, "the labels of the image are too long to be recorded");
        }
        if volumes == ImageVolumes::Ignore {
            return Ok(());
        }
        if image.volumes.0.len() > VOLUMES_MAX {
            return Err(PlanError::Volumes(image.volumes.0.len()));
        }
        for path in &image.volumes.0 {
            // The user of an image cannot repair its paths, and a container does not need such a volume.
            let is_kernels = |it: &String| it.starts_with("/dev/") || it.starts_with("/sys/");
            let is_path = !path.contains('\0') && path.len() < PATH_MAX;
            let destination = destination(path).ok().filter(|it| is_path && !is_kernels(it));
            let Some(destination) = destination else {
                tracing::debug!(path, "ignoring a volume of the image that cannot be mounted");
                continue;
            };
            let is_taken = self.volumes.iter().any(|it| it.destination == destination)
                || self.mounts.iter().any(|it| it.destination == destination);
            if !is_taken {
                let (source, access) = (MountSource::Anonymous(None), Access::Writable);
                self.volumes.push(Volume {
                    source,
                    destination,
                    access,
                    chown: false,
                    restrictions: Restrictions::default(),
                });
            }
        }
        Ok(())
    }
}

/// Treatment of an image's volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageVolumes {
    /// The container gets a new volume for each.
    Make,
    /// Their files are part of the root, because the files of volumes could not outlive the container's ids.
    Ignore,
}

/// Maximum length of the recorded labels of an image as JSON, in bytes. Each command that lists containers by labels
/// reads them.
const LABELS_MAX: usize = 256 << 10;

/// Length of the longest path, in bytes, with a NUL. Source: Linux `PATH_MAX`.
const PATH_MAX: usize = 4096;

/// Maximum number of volumes of an image. Each takes a directory and a mount.
const VOLUMES_MAX: usize = 128;

/// A plan of a container.
#[derive(Debug)]
pub struct ContainerPlan {
    pub(crate) wish: ContainerRequest,
    pub(crate) image: ImageConfig,
    pub(crate) user: String,
    pub(crate) space: Space,
    pub(crate) stop: Stop,
    pub(crate) timeout: Option<Duration>,
    /// Files that must exist in the root as mount points.
    pub(crate) places: Vec<&'static str>,
}

/// Error of settings that contradict each other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The container's name is invalid.
    #[error(transparent)]
    Id(#[from] ContainerError),
    /// Free space is requested for a root with a writable layer.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The runtime does not support a setting.
    #[error(transparent)]
    Security(#[from] FilterError),
    /// The runtime cannot keep the groups of its caller.
    #[error("--group-add keep-groups needs crun as the runtime: use --runtime crun")]
    KeepGroups,
    /// A container that does not stay at its end has a restart policy.
    #[error(
        "--restart {0} needs a container that stays when it ends: use --detach or --rm=false, and not --rm"
    )]
    Restart(RestartPolicy),
    /// The image has more volumes than a container may have.
    #[error("the image has {0} volumes, and a container may have {VOLUMES_MAX} of an image")]
    Volumes(usize),
}

impl ContainerPlan {
    /// Makes a plan for a runtime of this kind.
    pub fn new(
        image: ImageConfig,
        mut wish: ContainerRequest,
        kind: Kind,
    ) -> Result<Self, PlanError> {
        check_id(&wish.id)?;
        let space = space(wish.df, wish.writable.access())?;
        wish.bundle.access = wish.writable.access();
        wish.bundle.security.fit(kind)?;
        if wish.bundle.process.keep_groups && kind != Kind::Crun {
            return Err(PlanError::KeepGroups);
        }
        if wish.restart != RestartPolicy::No && !wish.keep {
            return Err(PlanError::Restart(wish.restart));
        }
        let names = wish.names.as_ref();
        let mut places = names.map_or_else(Vec::new, |it| it.places(&wish.bundle.network));
        if kind == Kind::Runsc && wish.init != InitChoice::None {
            // runsc needs a mount point in the root, below the /dev that it mounts.
            places.push(PLACE);
        }
        let user = wish.user.as_ref().unwrap_or(&image.user).clone();
        let signal = wish.stop_signal.as_ref().unwrap_or(&image.stop_signal).clone();
        let stop = Stop { signal, timeout: wish.stop_timeout };
        let timeout = (wish.timeout > 0).then(|| Duration::from_secs(wish.timeout.into()));
        Ok(Self { wish, image, user, space, stop, timeout, places })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::mounts::MountKind;

    fn wish() -> ContainerRequest {
        ContainerRequest::new("a")
    }

    fn image() -> ImageConfig {
        let (user, stop_signal) = ("7".to_owned(), "SIGINT".to_owned());
        ImageConfig { user, stop_signal, ..ImageConfig::default() }
    }

    #[test]
    fn what_nobody_wishes_is_as_the_image_says() {
        let plan = ContainerPlan::new(image(), wish(), Kind::Crun).unwrap();
        assert_eq!((plan.user.as_str(), plan.stop.signal.as_str()), ("7", "SIGINT"));
        assert_eq!((plan.timeout, plan.places.len()), (None, 0));
        // The plan ignores the access in the bundle's settings.
        assert_eq!(plan.wish.bundle.access, Access::ReadOnly);
        let (user, signal) = (Some("8".to_owned()), Some("TERM".to_owned()));
        let wish = ContainerRequest { user, stop_signal: signal, timeout: 3, ..wish() };
        let plan = ContainerPlan::new(image(), wish, Kind::Crun).unwrap();
        assert_eq!((plan.user.as_str(), plan.stop.signal.as_str()), ("8", "TERM"));
        assert_eq!(plan.timeout, Some(Duration::from_secs(3)));
    }

    #[test]
    fn only_gvisor_needs_a_place_for_the_first_process() {
        for (kind, expect) in [(Kind::Crun, 0), (Kind::Runc, 0), (Kind::Runsc, 1)] {
            let wish = ContainerRequest { init: InitChoice::Any, ..wish() };
            assert_eq!(
                ContainerPlan::new(image(), wish, kind).unwrap().places.len(),
                expect,
                "{kind:?}"
            );
        }
    }

    #[test]
    fn an_image_adds_labels_and_volumes() {
        let image = ImageConfig {
            labels: BTreeMap::from(
                [("a", "image"), ("b", "image")]
                    .map(|(name, value)| (name.to_owned(), value.to_owned())),
            ),
            volumes: ["/v/", "/w", "/x", "v", "/", "/proc/1", "/sys/fs/cgroup", "/a/../b", "/a\0"]
                .map(str::to_owned)
                .into(),
            ..ImageConfig::default()
        };
        let own = "/host:/w".parse::<Volume>().unwrap();
        let mount = MountRequest {
            kind: MountKind::Memory { bytes: None, mode: 0o755, noexec: false },
            destination: "/x".to_owned(),
            access: Access::Writable,
            relabels: false,
        };
        let labels = BTreeMap::from([("a".to_owned(), "own".to_owned())]);
        let first =
            ContainerRequest { labels, volumes: vec![own.clone()], mounts: vec![mount], ..wish() };
        let mut request = first.clone();
        request.inherit(&image, ImageVolumes::Make).unwrap();
        assert_eq!(request.labels["a"], "own");
        assert_eq!(request.labels["b"], "image");
        assert_eq!(request.volumes, [own.clone(), "/v".parse().unwrap()]);
        let again = request.clone();
        request.inherit(&image, ImageVolumes::Make).unwrap();
        assert_eq!(request, again);
        let mut request = first.clone();
        request.inherit(&image, ImageVolumes::Ignore).unwrap();
        assert_eq!(request.volumes, [own]);
        // An image may be hostile.
        let labels = BTreeMap::from([("a".to_owned(), "x".repeat(LABELS_MAX))]);
        let large = ImageConfig { labels, ..ImageConfig::default() };
        let mut request = wish();
        request.inherit(&large, ImageVolumes::Make).unwrap();
        assert_eq!(request.labels.len(), 0);
        let many = (0..=VOLUMES_MAX).map(|it| format!("/{it}")).collect::<Vec<_>>().into();
        let many = ImageConfig { volumes: many, ..ImageConfig::default() };
        let error = wish().inherit(&many, ImageVolumes::Make).unwrap_err().to_string();
        assert!(error.contains("129 volumes"), "{error}");
    }

    #[test]
    fn only_crun_keeps_groups() {
        for (kind, expect) in [(Kind::Crun, true), (Kind::Runc, false), (Kind::Runsc, false)] {
            let mut wish = wish();
            wish.bundle.process.keep_groups = true;
            let plan = ContainerPlan::new(image(), wish, kind);
            assert_eq!(plan.is_ok(), expect, "{kind:?}");
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let check = |wish: ContainerRequest, expect: &str| {
            let error = ContainerPlan::new(image(), wish, Kind::Crun).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        let writable = WritableChoice::Memory(None);
        check(ContainerRequest { df: true, writable, ..wish() }, "--df is for read-only roots");
        check(ContainerRequest { id: "-a".to_owned(), ..wish() }, "-a");
        let restart = RestartPolicy::Always;
        check(ContainerRequest { restart, ..wish() }, "--restart always needs a container");
        let kept = ContainerRequest { restart, keep: true, ..wish() };
        assert!(ContainerPlan::new(image(), kept, Kind::Crun).is_ok());
    }
}
