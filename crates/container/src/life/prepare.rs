//! Turns a plan into a container with root and folder, in which no program runs yet.

use std::ffi::OsStr;
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kernel::process::{Signals, UserNamespace, Who};
use rustix::rand::{GetRandomFlags, getrandom};
use store::{
    ContainerDir, ContainerError, ContainerRecord, OperationError, PermittedImage, Seconds, Store,
};

use crate::boot_cache::Notes;
use crate::bundle::mounts::{MountPoints, mount_points};
use crate::bundle::security::of_caller;
use crate::bundle::spec::RuntimeSpec;
use crate::bundle::user::UserLookupError;
use crate::bundle::userns::{MapError, OwnIds};
use crate::bundle::{BundleError, Home, Process, Terminal, configure, user};
use crate::folder::{self, FILESTORE};
use crate::life::cgroup::cgroups;
use crate::life::end::reap::share;
use crate::life::filestores::{Filestores, MountRequestError, volumes};
use crate::life::id_allocation::ClaimError;
use crate::life::mount_staging::Stage;
use crate::life::terminal;
use crate::life::writable_layer;
use crate::network::{Pasta, Ports};
use crate::plan::{ContainerPlan, InitChoice, Stop};
use crate::root::filestore::{self, Backing};
use crate::root::headroom::Headroom;
use crate::root::{
    MakeRootError, PlaceError, Root, Shape, TrustedImage, Via, WritableChoice, WritablePlace, make,
    may_have_acl, warm,
};
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
    /// How images are made available in user namespaces.
    pub via: Via<'a>,
    /// Receives sentences for the user.
    pub remark: &'a dyn Fn(&str),
    /// Whether a signal that ends programs has arrived.
    pub is_asked_to_end: &'a dyn Fn() -> bool,
}

/// A container with root and folder, in which no program runs yet.
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
    pub(crate) runtime: Runtime,
    pub(crate) signals: Arc<Signals>,
    pub(crate) stop: Stop,
    pub(crate) timeout: Option<Duration>,
    pub(crate) pasta: Option<(Pasta, Who)>,
    pub(crate) notes: Option<Notes>,
    pub(crate) log_size: Option<NonZeroU64>,
    pub(crate) keep: bool,
    /// Held for the container's whole life, like `directory`.
    pub(crate) image: TrustedImage,
    pub(crate) directory: Option<OwnedFd>,
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
    /// The bundle cannot be created.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The init program cannot be used.
    #[error(transparent)]
    Init(#[from] InitError),
    /// The folder cannot be created.
    #[error(transparent)]
    Folder(#[from] ContainerError),
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

/// Creates a container's root and folder from an image. The mounts of the `living` containers may be shared. `signals`
/// must not end this process between the creation of the folder and its removal.
pub fn prepare(
    store: &Store,
    image: AdmittedImage<'_>,
    plan: ContainerPlan,
    runtime: Runtime,
    living: &[String],
    signals: Arc<Signals>,
    around: &CallerEnvironment<'_>,
) -> Result<Ready, PrepareError> {
    let ContainerPlan { mut wish, image: config, user, space, stop, timeout, places } = plan;
    if store.path().to_str().is_none() {
        return Err(PrepareError::Name(store.path().to_owned()));
    }
    let AdmittedImage { store: images, image } = image;
    let image = TrustedImage::to_run(images, image, wish.trust.clone())?;
    let place = wish.writable.make(store, Backing::Ahead, around.search)?;
    let files = Filestores::make(store, &wish.mounts, around.search)?;
    let claim = wish.ids.claim(store, around.is_asked_to_end)?;
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
        between: &[],
        via: around.via,
        source: None,
    };
    let root = make(store, &image, &shape, shared)?;
    warm(image.image(), &root, wish.warm, store.who(), around.remark);
    if runtime.kind == Kind::Runsc && may_have_acl(image.image())? {
        (around.remark)(NO_ACLS);
    }
    let user = user::find_user(root.mount.as_fd(), &user)?;
    map.map_or(Ok(()), |map| map.check(&user))?;
    let own = own_ids(store)?;
    own.as_ref().map_or(Ok(()), |own| own.check(&user))?;
    let owner = map.and_then(|map| map.user(user.uid).zip(map.group(user.gid)));
    let mut stage = Stage::new(&folder::path(store, &wish.id), store.who().user, map);
    let mut bundle = wish.bundle;
    // The network is set first, because it determines the base folder of all mount points.
    bundle.network_place = wish.pasta.as_ref().map(|_| stage.set_network(store.who()));
    bundle.volumes = volumes(wish.volumes, &wish.mounts, &files, map, &mut stage)?;
    bundle.map = map.cloned();
    bundle.own = own;
    cgroups::limit(&mut bundle, &wish.id, around.unique, around.remark);
    bundle.names = stage.set_names(wish.names);
    let terminal = bundle.terminal;
    let (process, mut spec) =
        configure(root.mount.as_fd(), &stage.root(), &config, &bundle, &user)?;
    Home::new(&config, &bundle).note(&mut spec);
    of_caller(&mut spec.process);
    add_init(&wish.init, around.search, &mut spec)?;
    if terminal == Terminal::New {
        terminal::note_size(&mut spec.process, around.terminal);
    }
    let found = image.found();
    let record = ContainerRecord {
        image: found.image,
        manifest: found.manifest,
        name: found.name.as_ref().map(ToString::to_string),
        created: around.now,
        keep: wish.keep,
        shared: (!images.is_own()).then(|| images.path().display().to_string()),
        boot: kernel::process::boot_id(),
        snapshot: None,
    };
    let id = std::mem::take(&mut wish.id);
    let folder = store.create_container(&id, &record)?;
    let path = folder.path().to_owned();
    let unnamed = OperationError::at("keep a filestore in", &path);
    if let WritablePlace::Filestore(file, _) = &place {
        filestore::name(file.as_fd(), folder.fd(), FILESTORE).map_err(unnamed)?;
    }
    let place = place.settle(&folder)?;
    files.name(&folder).map_err(unnamed)?;
    if let Some(claim) = claim {
        let object = format!("the ids of {id} in {}", path.display());
        claim.map.note(&path).map_err(OperationError::of("record", &object))?;
    }
    kept_place(&place, &wish.writable, &root)
        .and_then(|place| place.save(&path))
        .map_err(OperationError::at("write in", &path))?;
    if let Some(pasta) = &wish.pasta {
        Ports::note(&pasta.ports, &path).map_err(OperationError::at("write in", &path))?;
    }
    let headrooms = root.doomed.headroom(&path.join(FILESTORE))?;
    let headrooms = headrooms.into_iter().chain(Filestores::headrooms(&path, &stage)?).collect();
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
        runtime,
        signals,
        stop,
        timeout,
        pasta: wish.pasta.map(|it| (it, store.who())),
        notes: around.notes.cloned(),
        log_size: wish.log_size,
        keep: wish.keep,
        image,
        directory: place.into_locked(),
    })
}

/// Returns a random id of twelve hexadecimal digits, which is unique with very high probability.
pub fn random_id() -> Result<String, OperationError> {
    let mut bytes = [0_u8; 6];
    let taken = getrandom(&mut bytes, GetRandomFlags::empty());
    let taken = taken.map_err(OperationError::of("get", "random numbers"))?;
    // getrandom(2) never returns fewer bytes than requested for up to 256 bytes.
    debug_assert_eq!(taken, bytes.len());
    Ok(bytes.iter().fold(String::new(), |id, byte| format!("{id}{byte:02x}")))
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

/// Returns the location of the container's writes, for commands that read them later.
fn kept_place(
    place: &WritablePlace,
    wish: &WritableChoice,
    root: &Root,
) -> std::io::Result<writable_layer::WritesPlace> {
    match (place, wish, root.doomed.upper()) {
        (WritablePlace::Memory(_), ..) => Ok(writable_layer::WritesPlace::Memory),
        (WritablePlace::Filestore(..), ..) => {
            Ok(writable_layer::WritesPlace::Filestore { lost: false })
        }
        (WritablePlace::Directory(..), WritableChoice::Directory(path, _), Some(upper)) => {
            writable_layer::WritesPlace::directory(&std::path::absolute(path)?, upper)
        }
        (WritablePlace::Directory(..), WritableChoice::Folder(..), _) => {
            Ok(writable_layer::WritesPlace::Folder { lost: false })
        }
        _ => Ok(writable_layer::WritesPlace::None),
    }
}

impl Ready {
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

    /// Whether Quire connects the container's terminal to the caller's. runsc does that itself.
    #[must_use]
    pub fn has_terminal_of_ours(&self) -> bool {
        self.terminal == Terminal::New && self.runtime.kind != Kind::Runsc
    }
}
