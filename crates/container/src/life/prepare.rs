//! Turns a plan into a container with root and folder, in which no program runs yet.

pub mod joined_network;
pub mod volumes;

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kernel::process::{Signals, UserNamespace, Who};
use store::{
    ContainerDir, ContainerError, ContainerRecord, ContainerSnapshot, ContainerSnapshotError,
    OperationError, PermittedImage, Seconds, Store, VolumeLock,
};

use crate::boot_cache::Notes;
use crate::bundle::config::ImageConfig;
use crate::bundle::etc_files;
use crate::bundle::mounts::{MountPoints, MountSource, Volume, mount_points};
use crate::bundle::security::of_caller;
use crate::bundle::spec::RuntimeSpec;
use crate::bundle::user::UserLookupError;
use crate::bundle::userns::{MapError, OwnIds};
use crate::bundle::{BundleError, Home, Network, Process, Terminal, configure, user};
use crate::folder::{self, FILESTORE};
use crate::life::cgroup::cgroups;
use crate::life::end::reap::share;
use crate::life::filestores::{Filestores, MountRequestError, volumes};
use crate::life::id_allocation::{Claim, ClaimError};
use crate::life::kept::{EnterError, EnteredFolder, KeptContainer};
use crate::life::log::LogLimit;
use crate::life::lookup::{IfRunning, KnownError, OwnVolumes, Removal};
use crate::life::mount_staging::Stage;
use crate::life::prepare::joined_network::{JoinNetworkError, network_of};
use crate::life::prepare::volumes::{VolumeUser, VolumesError};
use crate::life::terminal::{self, TerminalLog};
use crate::life::writable_layer::{KeptError, WritesPlace};
use crate::network::{Pasta, Ports};
use crate::networks::attachment::{Guest, Reservation};
use crate::networks::{NetworkPlace, NetworksError};
use crate::plan::{ContainerPlan, ContainerRequest, InitChoice, PlanError, Stop};
pub use crate::random::{random_id, random_volume_name};
use crate::request::StoredRequest;
use crate::restart_policy::RestartPolicy;
use crate::root::filestore::{self, Backing};
use crate::root::headroom::Headroom;
use crate::root::{
    BetweenOwners, MakeRootError, PlaceError, Root, Shape, TrustedImage, Via, WritableChoice,
    WritablePlace, make, may_have_acl, warm,
};
use crate::runtime::caller_fds::CallerFds;
use crate::runtime::init::{self, InitError};
use crate::runtime::{Kind, Runtime};
use crate::store_ownership::OwnerError;

/// The caller's environment, which this library does not look up itself.
#[expect(missing_debug_implementations, reason = "functions have no debug output")]
pub struct CallerEnvironment<'a> {
    /// Directories of programs, in the syntax of `PATH`.
    pub search: &'a OsStr,
    pub now: Seconds,
    /// Text that is unique to this container, for the name of the container's cgroup.
    pub unique: &'a str,
    /// Terminal of the caller, whose size the container's terminal gets.
    pub terminal: BorrowedFd<'a>,
    /// Notes that are valid until the next boot.
    pub notes: Option<&'a Notes>,
    /// Place of the networks of this user; `None` if there is none.
    pub networks: Option<&'a NetworkPlace>,
    /// How images are made available in user namespaces.
    pub via: Via<'a>,
    /// Receives sentences for the user.
    pub remark: &'a dyn Fn(&str),
    /// Whether a signal that ends programs has arrived.
    pub is_asked_to_end: &'a dyn Fn() -> bool,
}

/// A container with root and folder, in which no program runs yet.
#[expect(clippy::struct_excessive_bools, reason = "the container has or keeps each of these")]
#[derive(Debug)]
pub struct Ready {
    pub(crate) id: String,
    pub(crate) folder: ContainerDir,
    pub(crate) path: PathBuf,
    pub(crate) root: Root,
    pub(crate) stage: Stage,
    pub(crate) headrooms: Vec<Headroom>,
    pub(crate) process: Process,
    pub(crate) owner: Option<(u32, u32)>,
    pub(crate) spec: RuntimeSpec,
    pub(crate) terminal: Terminal,
    pub(crate) has_open_stdin: bool,
    pub(crate) runtime: Runtime,
    pub(crate) signals: Arc<Signals>,
    pub(crate) stop: Stop,
    pub(crate) restart: RestartPolicy,
    pub(crate) timeout: Option<Duration>,
    pub(crate) pasta: Option<(Pasta, Who)>,
    pub(crate) networks: Option<Reservation>,
    pub(crate) notes: Option<Notes>,
    pub(crate) log_size: LogLimit,
    pub(crate) keep: bool,
    /// Whether the container has volumes of the store.
    pub(crate) has_volumes: bool,
    /// Lock file of a container that is started again; the folder of a new one has its own.
    pub(crate) lock: Option<OwnedFd>,
    /// Whether the container existed before, so that a failed start must not remove it.
    pub(crate) is_again: bool,
    /// Held for the container's whole life, like `directory`.
    pub(crate) image: TrustedImage,
    pub(crate) directory: Option<OwnedFd>,
    pub(crate) fds: CallerFds,
}

/// Reason why a container cannot be prepared. All its remains are removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// A bundle cannot contain the path of the store.
    #[error(
        "the store's path {0:?} is not UTF-8, which runtimes need: use `--store` with another \
        path, such as a link to it"
    )]
    Name(PathBuf),
    /// Another user can change the image.
    #[error(transparent)]
    Owner(#[from] OwnerError),
    /// The location of the container's changes is not usable.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// A mount is not possible.
    #[error(transparent)]
    Mount(#[from] MountRequestError),
    /// The container's users cannot get ids.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The root cannot be created.
    #[error(transparent)]
    Root(#[from] MakeRootError),
    /// The user cannot be found.
    #[error(transparent)]
    User(#[from] UserLookupError),
    /// The user has no id on the host.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A volume cannot be used.
    #[error(transparent)]
    Volumes(#[from] VolumesError),
    /// Networks of the store cannot be joined.
    #[error(transparent)]
    Networks(#[from] NetworksError),
    /// Another container's network cannot be joined.
    #[error(transparent)]
    Network(#[from] JoinNetworkError),
    /// The bundle cannot be created.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The init program cannot be used.
    #[error(transparent)]
    Init(#[from] InitError),
    /// The folder cannot be created.
    #[error(transparent)]
    Folder(#[from] ContainerError),
    /// A snapshot below the writable layer cannot be used.
    #[error(transparent)]
    Snapshot(#[from] ContainerSnapshotError),
    /// The settings of a container that is started again contradict each other.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The writable layer of a container that is started again cannot be used.
    #[error("cannot start container {id} with its own changes")]
    Kept { id: String, source: KeptError },
    /// The folder of a container that is started again cannot be used.
    #[error(transparent)]
    Enter(#[from] EnterError),
    /// The container that the new one replaces cannot be removed.
    #[error("--replace: cannot remove container {id}")]
    Replaced { id: String, source: Box<KnownError> },
    #[error(transparent)]
    Failed(#[from] OperationError),
}

const NO_ACLS: &str = "the image has POSIX ACLs, which gVisor ignores: it checks only the modes \
    of these files, whose group bits are the most that the ACL allows";

/// Returns the ids of this process's user namespace, if it is not the host's.
fn own_ids(store: &Store) -> Result<Option<OwnIds>, PrepareError> {
    let is_own = store.who().namespace == UserNamespace::Other;
    let ids = is_own.then(OwnIds::read).transpose();
    let failed = OperationError::of("read", "the ids of this user namespace");
    Ok(ids.map_err(failed).map_err(MakeRootError::from)?)
}

/// An image that a policy allowed, and the store that contains it.
#[derive(Debug)]
pub struct AdmittedImage<'s> {
    /// The store of the container, or a shared store.
    pub store: &'s Store,
    pub image: PermittedImage,
}

/// Fate of an existing container that has the name of a new one.
#[expect(missing_debug_implementations, reason = "functions have no debug output")]
pub enum TakenName<'a> {
    /// The new container is refused.
    Refused,
    /// It is killed and removed, as soon as the new one has everything except its name. The function returns the time,
    /// in seconds since 1970.
    Replaced(&'a dyn Fn() -> i64),
}

impl TakenName<'_> {
    /// Removes the container of this name, if it may be replaced. `held` is the lock of volumes, if the caller has it.
    fn make_room(
        &self,
        store: &Store,
        id: &str,
        held: Option<&VolumeLock>,
    ) -> Result<(), PrepareError> {
        let Self::Replaced(now) = self else { return Ok(()) };
        // A name that begins the name of another container must not stand for it.
        if store.containers.get(id)?.is_none() {
            return Ok(());
        }
        // As with `quire rm`.
        let (running, volumes) = (IfRunning::Kill, OwnVolumes::Stay);
        let removal = Removal { held, ..Removal::new(store, running, volumes, now) };
        let failed =
            |source| PrepareError::Replaced { id: id.to_owned(), source: Box::new(source) };
        removal.remove(id).map(drop).map_err(failed)
    }
}

/// Creates a container's root and folder from an image. The mounts of the `living` containers may be shared. `signals`
/// must not end this process between the creation of the folder and its removal.
///
/// If this fails, volumes that were made only for the container are removed again.
#[expect(clippy::too_many_arguments, reason = "each has another type")]
pub fn prepare(
    store: &Store,
    image: AdmittedImage<'_>,
    mut plan: ContainerPlan,
    runtime: Runtime,
    living: &[String],
    signals: Arc<Signals>,
    taken: TakenName<'_>,
    around: &CallerEnvironment<'_>,
) -> Result<Ready, PrepareError> {
    name_volumes(&mut plan.wish.volumes)?;
    let stored = StoredRequest::encode(&runtime.path, &plan.wish)?;
    let is_own = |it: &Volume| matches!(it.source, MountSource::Anonymous(_));
    let has_own = plan.wish.volumes.iter().any(is_own);
    let spot = Spot::New { stored, taken };
    let inputs = StartInputs { runtime, living, signals };
    let prepared = prepare_in(store, image, plan, inputs, spot, around);
    if prepared.is_err()
        && has_own
        && let Err(error) = store.clear_volumes()
    {
        tracing::warn!(%error, "cannot remove volumes that no container needs: `quire gc` tries again");
    }
    prepared
}

/// Prepares a container that has ended, or was only created, in its own folder: with its settings, its ids, its
/// network and its changes. `config` is the configuration of the image. The other parameters are those of [`prepare`].
///
/// If this fails, the container stays as it was.
pub fn restart(
    store: &Store,
    image: AdmittedImage<'_>,
    config: ImageConfig,
    kept: KeptContainer,
    living: &[String],
    signals: Arc<Signals>,
    around: &CallerEnvironment<'_>,
) -> Result<Ready, PrepareError> {
    let runtime = kept.runtime().clone();
    let plan = ContainerPlan::new(config, kept.request().clone(), runtime.kind)?;
    let spot = Spot::Kept(Box::new(kept));
    prepare_in(store, image, plan, StartInputs { runtime, living, signals }, spot, around)
}

/// Inputs that the starts of new and of kept containers share.
struct StartInputs<'a> {
    runtime: Runtime,
    living: &'a [String],
    signals: Arc<Signals>,
}

/// The folder of a container that is prepared.
enum Spot<'a> {
    /// A new folder, which gets these stored settings.
    New { stored: Vec<u8>, taken: TakenName<'a> },
    /// The folder that the container had before.
    Kept(Box<KeptContainer>),
}

impl Spot<'_> {
    fn place(
        &self,
        store: &Store,
        id: &str,
        wish: &WritableChoice,
        around: &CallerEnvironment<'_>,
    ) -> Result<WritablePlace, PrepareError> {
        let make = || wish.make(store, Backing::Ahead, around.search);
        match self {
            Self::New { taken, .. } => match make() {
                // The container that is replaced may have the directory.
                Err(PlaceError::InUse(_)) => {
                    taken.make_room(store, id, None)?;
                    Ok(make()?)
                }
                made => Ok(made?),
            },
            Self::Kept(kept) => {
                let failed = |source| PrepareError::Kept { id: kept.id().to_owned(), source };
                kept.place(around.remark).map_err(failed)
            }
        }
    }
}

/// Returns the snapshots below a writable layer, uppermost first. As long as they are open, no command removes them.
pub(crate) fn snapshots(
    store: &Store,
    uppermost: Option<&str>,
) -> Result<Vec<ContainerSnapshot>, ContainerSnapshotError> {
    uppermost.map_or_else(|| Ok(Vec::new()), |id| store.container_snapshots.chain(id))
}

fn prepare_in(
    store: &Store,
    image: AdmittedImage<'_>,
    plan: ContainerPlan,
    start: StartInputs<'_>,
    spot: Spot<'_>,
    around: &CallerEnvironment<'_>,
) -> Result<Ready, PrepareError> {
    let ContainerPlan { mut wish, image: config, user, space, stop, timeout, places } = plan;
    let StartInputs { runtime, living, signals } = start;
    if store.path().to_str().is_none() {
        return Err(PrepareError::Name(store.path().to_owned()));
    }
    let AdmittedImage { store: images, image } = image;
    let image = TrustedImage::to_run(images, image, wish.trust.clone())?;
    let below = snapshots(store, wish.snapshot.as_deref())?;
    let uppers = below.iter().map(ContainerSnapshot::upper).collect::<Result<Vec<_>, _>>()?;
    let between: Vec<_> = uppers.iter().map(|it| it.as_fd()).collect();
    let place = spot.place(store, &wish.id, &wish.writable, around)?;
    let files = Filestores::make(store, &wish.mounts, around.search)?;
    let claim = match &spot {
        Spot::New { .. } => wish.ids.claim(store, around.is_asked_to_end)?,
        Spot::Kept(kept) => kept.claim(),
    };
    let map = claim.as_ref().map(|it| &it.map);
    let shared = share(store, living, image.image().id);
    let working_dir = wish.bundle.working_dir.as_ref().unwrap_or(&config.working_dir);
    let points = mount_points(&wish.volumes, &wish.mounts, working_dir);
    let points =
        MountPoints::new(wish.bundle.access, &points, &wish.bundle.security.devices, &places);
    let shape = Shape {
        writable: place.writable(),
        map,
        space,
        places: &points.places,
        claimed: &points.claimed,
        between: &between,
        between_owners: BetweenOwners::Host,
        via: around.via,
        source: None,
    };
    let root = make(store, &image, &shape, shared)?;
    warm(image.image(), &root, wish.warm, store.who(), around.remark);
    if runtime.kind == Kind::Runsc && may_have_acl(image.image())? {
        (around.remark)(NO_ACLS);
    }
    let mut user = user::find_user(root.mount.as_fd(), &user)?;
    user::add_groups(root.mount.as_fd(), &mut user, &wish.bundle.process.groups)?;
    map.map_or(Ok(()), |map| map.check(&user))?;
    let own = own_ids(store)?;
    own.as_ref().map_or(Ok(()), |own| own.check(&user))?;
    let owner = map.and_then(|map| map.user(user.uid).zip(map.group(user.gid)));
    let stage = Stage::new(&folder::path(store, &wish.id), store.who().user, map);
    let mut stage = stage.in_memory(store.who());
    let networks = reserve(store, &wish, around)?;
    let mut bundle = wish.bundle;
    // The network is set first, because it determines the base folder of all mount points.
    bundle.network_place = match &bundle.network {
        Network::Named => {
            let networks = networks.as_ref().map(Reservation::namespace).transpose()?;
            networks.map(|it| stage.join_network(it))
        }
        Network::Container(other) => {
            let network = network_of(store, other, around.is_asked_to_end)?;
            Some(stage.join_network(network))
        }
        _ => wish.pasta.as_ref().map(|_| stage.set_network(store.who())),
    };
    let volume_user = VolumeUser {
        store,
        root: root.mount.as_fd(),
        owner: owner.unwrap_or((user.uid, user.gid)),
        is_new: matches!(spot, Spot::New { .. }),
        is_mapped: map.is_some(),
        keep: wish.keep,
        now: around.now,
        is_asked_to_end: around.is_asked_to_end,
    };
    let held = volume_user.prepare(&mut wish.volumes, &mut stage)?;
    bundle.volumes = volumes(wish.volumes, &wish.mounts, &files, map, &mut stage)?;
    bundle.map = map.cloned();
    bundle.own = own;
    cgroups::limit(&mut bundle, &wish.id, around.unique, around.remark);
    let mut given = wish.names.clone();
    if let (Some(given), Some(networks)) = (&mut given, &networks) {
        given.add(&networks.attachment().names(), &bundle.hostname, &wish.id);
    }
    let names =
        given.as_ref().map(|names| etc_files::files(names, &bundle.network, &bundle.hostname));
    bundle.names = stage.set_names(names.transpose()?.unwrap_or_default());
    let terminal = bundle.terminal;
    let (process, mut spec) =
        configure(root.mount.as_fd(), &stage.root(), &config, &bundle, &user)?;
    held.stage(&mut spec);
    Home::new(&config, &bundle).note(&mut spec);
    of_caller(&mut spec.process);
    add_init(&wish.init, around.search, &mut spec)?;
    if terminal == Terminal::New {
        terminal::note_size(&mut spec.process, around.terminal);
    }
    let id = std::mem::take(&mut wish.id);
    let entered = match spot {
        Spot::New { stored, taken } => {
            taken.make_room(store, &id, held.lock.as_ref())?;
            let found = image.found();
            let record = ContainerRecord {
                image: found.image,
                manifest: found.manifest,
                name: found.name.as_ref().map(ToString::to_string),
                created: around.now,
                keep: wish.keep || wish.rests,
                shared: (!images.is_own()).then(|| images.path().display().to_string()),
                boot: kernel::process::boot_id(),
                snapshot: wish.snapshot,
                volumes: held.names.clone(),
            };
            let folder = store.create_container(&id, &record)?;
            let pasta = wish.pasta.as_ref().map(|it| &it.ports);
            let ports = pasta.or(wish.networks.as_ref().map(|it| &it.ports));
            let ports = ports.map_or(&[][..], |it| it);
            let new = NewFolder { folder: &folder, stored: &stored, claim, ports };
            let directory = new.fill(place, &wish.writable, &root)?;
            (EnteredFolder { folder, lock: None }, directory, false)
        }
        Spot::Kept(kept) => (kept.enter(store)?, place.into_locked(), true),
    };
    let (entered, directory, is_again) = entered;
    let path = entered.folder.path().to_owned();
    files.name(&entered.folder).map_err(OperationError::at("keep a filestore in", &path))?;
    let headrooms = root.doomed.headroom(&path.join(FILESTORE))?;
    let headrooms = headrooms.into_iter().chain(Filestores::headrooms(&path, &stage)?).collect();
    if let Some(networks) = &networks {
        networks.attachment().note(&path).map_err(OperationError::at("write in", &path))?;
    }
    entered.begin()?;
    // The container's record now protects them.
    let has_volumes = !held.names.is_empty();
    drop((below, held));
    let EnteredFolder { folder, lock } = entered;
    let log_limit = match wish.log_size {
        _ if wish.no_log => LogLimit::Nothing,
        Some(size) => LogLimit::Bytes(size),
        None => LogLimit::Unlimited,
    };
    Ok(Ready {
        id,
        folder,
        path,
        root,
        stage,
        headrooms,
        process,
        owner,
        spec,
        terminal,
        has_open_stdin: wish.stdin,
        runtime,
        signals,
        stop,
        restart: wish.restart,
        timeout,
        pasta: wish.pasta.map(|it| (it, store.who())),
        networks,
        notes: around.notes.cloned(),
        log_size: log_limit,
        keep: wish.keep,
        has_volumes,
        lock,
        is_again,
        image,
        directory,
        fds: CallerFds::default(),
    })
}

/// The folder of a new container, with the settings that it keeps.
struct NewFolder<'a> {
    folder: &'a ContainerDir,
    stored: &'a [u8],
    claim: Option<Claim>,
    /// Ports of the host that are forwarded to the container.
    ports: &'a [Ports],
}

impl NewFolder<'_> {
    /// Writes the files that later commands need, and moves the writable layer into the folder. Returns the layer's
    /// locked directory.
    fn fill(
        self,
        place: WritablePlace,
        wish: &WritableChoice,
        root: &Root,
    ) -> Result<Option<OwnedFd>, PrepareError> {
        let path = self.folder.path();
        let failed = OperationError::at("write in", path);
        if let WritablePlace::Filestore(file, _) = &place {
            let named = filestore::name(file.as_fd(), self.folder.fd(), FILESTORE);
            named.map_err(OperationError::at("keep a filestore in", path))?;
        }
        let place = place.settle(self.folder)?;
        if let Some(claim) = self.claim {
            let object = format!("the ids of {} in {}", self.folder.id(), path.display());
            claim.map.note(path).map_err(OperationError::of("record", &object))?;
        }
        kept_place(&place, wish, root).and_then(|place| place.save(path)).map_err(failed)?;
        Ports::note(self.ports, path).map_err(failed)?;
        StoredRequest::write(self.stored, path).map_err(failed)?;
        Ok(place.into_locked())
    }
}

/// Chooses the addresses of a container in networks of the store.
fn reserve(
    store: &Store,
    wish: &ContainerRequest,
    around: &CallerEnvironment<'_>,
) -> Result<Option<Reservation>, NetworksError> {
    let Some(networks) = &wish.networks else { return Ok(None) };
    let place = around.networks.ok_or(NetworksError::NoPlace)?;
    let resolver = wish.names.as_ref().and_then(|it| it.resolver.as_ref());
    let servers = resolver.and_then(|it| it.servers.as_deref()).unwrap_or_default();
    let guest = Guest { id: &wish.id, networks, servers };
    Reservation::make(place, store, guest).map(Some)
}

/// Names the volumes that only a new container has.
fn name_volumes(volumes: &mut [Volume]) -> Result<(), OperationError> {
    for volume in volumes {
        if let MountSource::Anonymous(name @ None) = &mut volume.source {
            *name = Some(random_volume_name()?);
        }
    }
    Ok(())
}

/// Puts the requested init program before the container's command.
///
/// # Errors
/// [`InitError`] if the program is not usable.
pub fn add_init(
    wish: &InitChoice,
    search: &OsStr,
    spec: &mut RuntimeSpec,
) -> Result<(), InitError> {
    let program = match wish {
        InitChoice::None => return Ok(()),
        InitChoice::Any => None,
        InitChoice::Program(path) => Some(&**path),
    };
    init::add(&init::find_init(search, program)?, spec);
    Ok(())
}

/// Returns the location of a new container's writes, for commands that read them later.
fn kept_place(
    place: &WritablePlace,
    wish: &WritableChoice,
    root: &Root,
) -> std::io::Result<WritesPlace> {
    match (place, wish, root.doomed.upper()) {
        (WritablePlace::Memory(_), ..) => Ok(WritesPlace::Memory),
        (WritablePlace::Filestore(..), ..) => Ok(WritesPlace::Filestore { lost: false }),
        (WritablePlace::Directory(..), WritableChoice::Directory(path, _), Some(upper)) => {
            WritesPlace::directory(&std::path::absolute(path)?, upper)
        }
        (WritablePlace::Directory(..), WritableChoice::Folder(..), _) => {
            Ok(WritesPlace::Folder { lost: false })
        }
        _ => Ok(WritesPlace::None),
    }
}

impl Ready {
    /// Gives the program descriptors of this process's caller, which only this process can pass on.
    #[must_use]
    pub fn with_fds(self, fds: CallerFds) -> Self {
        Self { fds, ..self }
    }

    /// Returns the container's name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the container's folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the signals that are forwarded to the container.
    #[must_use]
    pub const fn signals(&self) -> &Arc<Signals> {
        &self.signals
    }

    /// Whether the end of the container may leave volumes that nothing needs.
    #[must_use]
    pub const fn leaves_volumes(&self) -> bool {
        // Also the volumes of a container that is kept, but could not be started.
        self.has_volumes
    }

    /// Returns the log for the process at the terminal of a container that is kept. `None` for another container.
    #[must_use]
    pub fn terminal_log(&self) -> Option<TerminalLog> {
        self.keep.then(|| TerminalLog::new(&self.path, self.log_size))
    }

    /// Whether the program gets a terminal.
    #[must_use]
    pub fn has_terminal(&self) -> bool {
        self.terminal == Terminal::New
    }

    /// Whether Quire connects the container's terminal to the caller's. runsc does that itself.
    #[must_use]
    pub fn has_terminal_of_ours(&self) -> bool {
        self.terminal == Terminal::New && self.runtime.kind != Kind::Runsc
    }
}
