//! The root of an image of a store, as far as it is trusted.

use std::iter;
use std::os::fd::AsFd;

use image::erofs::read::Image;
use image::verity::ImageId;
use kernel::cache;
use kernel::mount::{
    Acl, Backing, DATA_LAYERS, DETACHED_SOURCES, OVERLAY_USER_DATA, XattrNamespace,
};
use kernel::process::{UserNamespace, Who};
use kernel::version::KernelVersion;
use store::{Form, OpenImage, Store};

use crate::bundle::userns::OwnIds;
use crate::root::assemble::assemble;
use crate::root::mount_points;
use crate::root::place::{TMPFS_USER_XATTRS, memory_takes_marks};
use crate::root::share::Superblock;
use crate::root::tree::{self, TreeError};
use crate::root::trust::{self, TrustError, TrustedImage, VerityPolicy};
use crate::root::via::{Above, AnyError, LendImage, LentMount, ServeImage, Via, WithXattrs};
use crate::root::{Checked, Data, Layers, Root, RootError, Shape, Space, Writable};

/// Prefix of an image's name in `mountinfo`, by which `umount` recognizes Quire's mounts.
pub const SOURCE: &str = "quire:";

/// A root that is not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MakeRootError {
    /// The image is not trusted.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The kernel refused.
    #[error(transparent)]
    Root(#[from] RootError),
    /// The image's superblock cannot be read.
    #[error("cannot read image {image}")]
    Superblock {
        /// The image.
        image: ImageId,
        /// Cause.
        source: Box<image::erofs::read::ReadError>,
    },
    /// Its tree cannot be made anew.
    #[error("cannot make the tree of image {image} in a user namespace")]
    Tree {
        /// The image.
        image: ImageId,
        /// Cause.
        source: Box<TreeError>,
    },
    /// Its data are in devices, to which no tree leads.
    #[error(
        "{name} has the form {form}, of which no tree can be made: leave --via out, or `quire convert --form objects \
         {name}`"
    )]
    Native {
        /// The image's name.
        name: String,
        /// Its form.
        form: Form,
    },
    /// The kernel lets no user lead an overlay to objects.
    #[error(
        "--via tree and --via service need Linux {OVERLAY_USER_DATA} or newer in a user namespace, and this is {0}: leave --via out"
    )]
    Kernel(KernelVersion),
    /// There is no service that lends it.
    #[error(
        "--via service: no mount service is there: root starts one by `systemctl enable --now quire-mounts.socket`, or `quire \
         serve --mounts`"
    )]
    NoService,
    /// No service lends it.
    #[error("--via service: {name} is not lent")]
    Lend {
        /// The image's name.
        name: String,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Its file has changed.
    #[error("the file of image {image} is another one, {found}: `quire fsck` tells more")]
    Changed {
        /// The image.
        image: ImageId,
        /// The digest of its file.
        found: Box<ImageId>,
    },
    /// It cannot be served by FUSE.
    #[error("cannot serve {name} by FUSE")]
    Serve {
        /// The image's name.
        name: String,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It is not known which ids there are.
    #[error("cannot read the ids of this user namespace")]
    Ids(#[source] std::io::Error),
}

/// The root of an image, attached nowhere, if its trust allows it. `shared` are mounts by its name that are there already.
///
/// It takes only an image that a policy allowed, and of which it is known who can change it. One that is merely permitted
/// does not compile:
///
/// ```compile_fail,E0308
/// # use quire_container::root::{Root, Shape, make};
/// # use store::{PermittedImage, Store};
/// fn root(store: &Store, image: &PermittedImage, shape: &Shape<'_>) -> Option<Root> {
///     make(store, image, shape, std::iter::empty()).ok()
/// }
/// ```
///
/// ```
/// # use quire_container::root::{Root, Shape, Trust, TrustedImage, make};
/// # use store::{PermittedImage, Store};
/// fn root(store: &Store, image: PermittedImage, trust: Trust, shape: &Shape<'_>) -> Option<Root> {
///     let image = TrustedImage::to_run(store, image, trust).ok()?;
///     make(store, &image, shape, std::iter::empty()).ok()
/// }
/// ```
///
/// # Errors
/// [`MakeRootError`]; nothing is left mounted then.
pub fn make(
    store: &Store,
    image: &TrustedImage,
    shape: &Shape<'_>,
    mut shared: impl Iterator<Item = Superblock>,
) -> Result<Root, MakeRootError> {
    let trusted = image;
    let (image, trust) = (image.image(), image.trust());
    let name = trusted.name();
    let is_user = store.who().namespace == UserNamespace::Other;
    // No user has the kernel read it.
    if !is_user {
        trust::check_form(image, &name)?;
    }
    let checked = trust::check(image, &name, trust)?;
    // As mount.composefs does: ACLs cost a look at every inode's xattrs, so only where there are some.
    let acl = if may_have_acl(image)? { Acl::Keep } else { Acl::Ignore };
    let source = shape.source.map_or_else(|| format!("{SOURCE}{name}"), ToOwned::to_owned);
    let domain = trust::domain(store, &trust.domain)?;
    let devices: Vec<_> = image.devices.iter().map(|it| it.file.as_fd()).collect();
    let absent = image.absent.as_ref().filter(|_| ends_with_an_error());
    let objects: Vec<_> =
        iter::once(image.objects.as_fd()).chain(absent.map(AsFd::as_fd)).collect();
    let layers = Layers {
        name: &source,
        source: shape.source,
        image: image.image.fd(),
        data: match image.form {
            Form::Objects => Data::Objects(&objects),
            Form::Packed | Form::Tar => Data::Devices(&devices),
        },
        acl,
        domain: domain.as_deref(),
        backing: backing(image, trust.backing),
        presence: image.presence,
        apart: None,
        records: if is_user { XattrNamespace::User } else { XattrNamespace::Trusted },
    };
    if is_user {
        return in_user_namespace(trusted, &layers, checked, shape, &name);
    }
    // Whoever demands a digest has just verified this file, and nobody knows which one is mounted already.
    let shared = match trust.digest {
        None => shared.find(|it| it.is_of(layers.identity().as_deref())),
        Some(_) => None,
    };
    match assemble(&layers, shared, checked, shape) {
        Err(RootError::Mount { source, .. })
            if trust.verity == VerityPolicy::Auto && source.is_for_want_of_verity() =>
        {
            if trust.digest.is_some() {
                image.verify().map_err(TrustError::from)?;
            }
            Ok(assemble(&layers, None, Checked::AtImport, shape)?)
        }
        root => Ok(root?),
    }
}

/// Whether an overlay asks its data layers in turn, and gives a reader the last one's error. Before, a file without its data
/// cannot be looked up, and a symlink would pass for data.
fn ends_with_an_error() -> bool {
    KernelVersion::running().is_none_or(|it| it >= DATA_LAYERS)
}

/// The same without the kernel's EROFS: nobody but the host's root may have it read an image.
fn in_user_namespace(
    image: &TrustedImage,
    layers: &Layers<'_>,
    checked: Checked,
    shape: &Shape<'_>,
    name: &str,
) -> Result<Root, MakeRootError> {
    let open = image.image();
    let serve = match shape.via {
        Via::Fuse(serve) => return served(image, layers, serve, shape, name),
        Via::Service(lender) => {
            can_lead_to_objects(open, name)?;
            return match lent(open, lender, shape)? {
                Lent::Lower(lower) => Ok(assemble(layers, Some(lower), checked, shape)?),
                Lent::NoService => Err(MakeRootError::NoService),
                Lent::Refused(source) => Err(MakeRootError::Lend { name: name.to_owned(), source }),
            };
        }
        Via::Auto { lender, server } => {
            let lender = lender.filter(|_| can_lead_to_objects(open, name).is_ok());
            match lender.map_or(Ok(Lent::NoService), |it| lent(open, it, shape))? {
                Lent::Lower(lower) => return Ok(assemble(layers, Some(lower), checked, shape)?),
                Lent::NoService => {}
                Lent::Refused(error) => {
                    tracing::info!(%error, "{name} is not lent: it is made another way");
                }
            }
            server
        }
        Via::Tree => None,
    };
    if let Some(serve) = serve {
        match Suits::of(open)? {
            Suits::Tree => {}
            Suits::Fuse => return served(image, layers, serve, shape, name),
            Suits::Both => match served(image, layers, serve, shape, name) {
                // Without /dev/fuse, for example.
                Err(MakeRootError::Serve { source, .. }) => {
                    tracing::info!(error = &*source, "{name} gets a tree, though it is large");
                }
                root => return root,
            },
        }
    }
    can_lead_to_objects(open, name)?;
    let ids = OwnIds::read().map_err(MakeRootError::Ids)?;
    let made = match (tree::make(open, layers.name, &ids), serve) {
        (Err(error), Some(serve)) if error.is_full() => {
            tracing::warn!(%error, "there is no room for the tree of {name}: it is served by FUSE instead");
            return served(image, layers, serve, shape, name);
        }
        (made, _) => {
            made.map_err(|it| MakeRootError::Tree { image: open.id, source: Box::new(it) })?
        }
    };
    if made.devices > 0 {
        tracing::info!(devices = made.devices, "device nodes of the image are left out");
    }
    // It differs from others by the ids of this namespace, so nobody shares it.
    let tree = Superblock { mount: made.mount, backing: Backing::File, identity: None };
    Ok(assemble(layers, Some(tree), checked, shape)?)
}

/// Whether an overlay of a user's can find an image's data in objects.
fn can_lead_to_objects(image: &OpenImage, name: &str) -> Result<(), MakeRootError> {
    if image.form != Form::Objects {
        return Err(MakeRootError::Native { name: name.to_owned(), form: image.form });
    }
    match KernelVersion::running().filter(|it| *it < OVERLAY_USER_DATA) {
        Some(running) => Err(MakeRootError::Kernel(running)),
        None => Ok(()),
    }
}

/// What became of a request to a service.
enum Lent {
    /// The image, with all that is needed.
    Lower(Superblock),
    NoService,
    Refused(AnyError),
}

/// Has an image lent.
///
/// # Errors
/// [`MakeRootError::Changed`], which no other way makes good.
fn lent(
    image: &OpenImage,
    lender: &dyn LendImage,
    shape: &Shape<'_>,
) -> Result<Lent, MakeRootError> {
    // Most images have the directories, and a mount is shared by all requests for the same places.
    let files = shape.places.iter().filter(|it| !it.ends_with('/'));
    let mut places: Vec<_> = files.map(ToString::to_string).collect();
    let mut is_first = true;
    // Links of the image may lead elsewhere. Nothing can be added to the mount, so another one is asked for.
    for _ in 0..3 {
        let wanted: Vec<_> = places.iter().map(String::as_str).collect();
        let LentMount { mount, of } = match lender.lend(image, &wanted) {
            Ok(Some(lent)) => lent,
            Ok(None) => return Ok(Lent::NoService),
            Err(error) => return Ok(Lent::Refused(error)),
        };
        if of != image.id {
            return Err(MakeRootError::Changed { image: image.id, found: Box::new(of) });
        }
        if std::mem::take(&mut is_first) {
            match mount_points::meets(mount.as_fd(), shape.claimed, shape.places) {
                Err(error) => return Ok(Lent::Refused(error.into())),
                // The service knows nothing of the paths that come first, so it gets those that remain, without links.
                Ok(true) if !places.is_empty() => {
                    places.clear();
                    continue;
                }
                Ok(_) => {}
            }
        }
        let missing = match mount_points::missing(mount.as_fd(), shape.claimed, shape.places) {
            Err(error) => return Ok(Lent::Refused(error.into())),
            Ok(missing) => missing,
        };
        if missing.is_empty() {
            let lower = Superblock { mount, backing: Backing::File, identity: None };
            return Ok(Lent::Lower(lower));
        }
        places.extend(missing);
    }
    let place = places.pop().unwrap_or_default();
    Ok(Lent::Refused(format!("the image has nothing at {place} to mount on").into()))
}

/// The ways that suit an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Suits {
    Tree,
    Fuse,
    /// FUSE better than a tree.
    Both,
}

/// Trees of more files than these take a while, and many megabytes.
const TREE_MAX: u64 = 30_000;

impl Suits {
    fn of(image: &OpenImage) -> Result<Self, MakeRootError> {
        let is_old = KernelVersion::running().is_some_and(|it| it < OVERLAY_USER_DATA);
        if is_old || image.form != Form::Objects {
            return Ok(Self::Fuse);
        }
        let failed =
            |source| MakeRootError::Superblock { image: image.id, source: Box::new(source) };
        let inodes = Image::open(&image.image).map_err(failed)?.superblock().inodes;
        Ok(if inodes > TREE_MAX { Self::Both } else { Self::Tree })
    }
}

/// A root over a file system on FUSE, which has the bytes of all files.
fn served(
    image: &TrustedImage,
    layers: &Layers<'_>,
    serve: &dyn ServeImage,
    shape: &Shape<'_>,
    name: &str,
) -> Result<Root, MakeRootError> {
    let has_user_xattrs = memory_takes_marks();
    let with_xattrs = match layers.records {
        XattrNamespace::User if has_user_xattrs && shape.map.is_none() => WithXattrs::Apart,
        _ => WithXattrs::Served,
    };
    // Kernels that clone no detached mounts get an overlay of two layers in any case.
    let is_old = KernelVersion::running().is_some_and(|it| it < DETACHED_SOURCES);
    let space = if is_old { Space::Free } else { shape.space };
    let above = match (shape.writable, space, shape.places, shape.between) {
        (Writable::None, Space::AsIs, [], []) => Above::Nothing,
        _ => Above::Overlay,
    };
    let served = serve.serve(image, layers.name, with_xattrs, above);
    let served = served.map_err(|source| MakeRootError::Serve { name: name.to_owned(), source })?;
    let lower = Superblock { mount: served.mount, backing: Backing::File, identity: None };
    let apart = served.apart.as_ref();
    let layers = Layers { data: Data::Devices(&[]), apart, ..*layers };
    let is_in_memory = matches!(shape.writable, Writable::Memory { .. });
    if is_in_memory && !has_user_xattrs {
        tracing::warn!(
            "before Linux {TMPFS_USER_XATTRS}, directories of the image cannot be removed where changes are in memory: \
             --writable dir=PATH"
        );
    }
    let shape = Shape { space, ..*shape };
    Ok(assemble(&layers, Some(lower), Checked::AtImport, &shape)?)
}

/// How an image is read. Reads of a loop device are no events of the file below, and would give zeros. So an image some of
/// whose bytes are missing may have one only where files on FUSE stand for all such devices.
fn backing(image: &OpenImage, wish: Backing) -> Backing {
    let mut lent = image.devices.iter().filter(|it| it.is_lent);
    match lent.all(|it| kernel::mount::is_on_fuse(it.file.as_fd()).unwrap_or(false)) {
        true => wish,
        false => Backing::FileOnly,
    }
}

/// Whether a file of the image may have a POSIX ACL.
///
/// # Errors
/// [`MakeRootError::Superblock`].
pub fn may_have_acl(image: &OpenImage) -> Result<bool, MakeRootError> {
    let failed = |source| MakeRootError::Superblock { image: image.id, source: Box::new(source) };
    Ok(Image::open(&image.image).map_err(failed)?.superblock().may_have_acl())
}

/// Data that the kernel begins to read when an image is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warm {
    /// The metadata of images that are not large.
    Auto,
    /// Nothing.
    Nothing,
    /// The metadata.
    Metadata,
}

/// The most bytes of an image file that are read ahead unless somebody says otherwise: `docs/performance/metadata.md` has
/// what it costs and what it saves. Larger ones are of a million files, of which one container uses few.
const WARM_AUTO_MAX: u64 = 32 << 20;

/// Has the kernel begin to read what `wish` asks for. A mount is as good without. `remark` is given a sentence if that has
/// no effect.
pub fn warm(image: &OpenImage, root: &Root, wish: Warm, who: Who, remark: &dyn Fn(&str)) {
    let is_wanted = match wish {
        Warm::Auto => image.image.size() <= WARM_AUTO_MAX,
        Warm::Nothing => false,
        Warm::Metadata => true,
    };
    if !is_wanted {
        return;
    }
    if image.form != Form::Objects && root.image.backing == Backing::Loop {
        if wish == Warm::Metadata {
            remark(
                "nothing is read ahead: the image is read through a loop device, which has pages of its own",
            );
        }
        return;
    }
    let (file, all) = (image.image.fd(), 0..image.image.size());
    let pages = image.image.size().div_ceil(cache::page_size());
    // What cannot be counted is read ahead: the kernel skips what it has.
    if cache::resident(file, &all, who).is_ok_and(|there| there >= pages) {
        return;
    }
    if let Err(error) = cache::read_ahead(file, &all) {
        tracing::debug!(image = %image.id, %error, "nothing is read ahead");
    }
}
