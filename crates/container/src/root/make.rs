//! Makes the root of a store's image, if the image is trusted.

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
use serde::{Deserialize, Serialize};
use store::{Form, OpenImage, OperationError, Store};

use crate::bundle::userns::OwnIds;
use crate::root::assemble::assemble;
use crate::root::mount_points;
use crate::root::share::Superblock;
use crate::root::tree;
use crate::root::trust::{self, TrustError, TrustedImage, VerityPolicy};
use crate::root::via::{Above, AnyError, LendImage, LentMount, ServeImage, Via, WithXattrs};
use crate::root::writable_place::{TMPFS_USER_XATTRS, memory_takes_marks};
use crate::root::{Checked, ImageData, Layers, Root, RootError, Shape, Space, Writable};

/// Prefix of an image's name in `mountinfo`, by which `umount` recognizes Quire's mounts.
pub const SOURCE: &str = "quire:";

/// Reason why a root is not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MakeRootError {
    /// The image is not trusted.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The kernel refused an operation.
    #[error(transparent)]
    Root(#[from] RootError),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The image's data is in devices, to which an overlay cannot be redirected.
    #[error(
        "{name} has the form {form}, which --via fuse-objects, tree and service do not support: \
        leave --via out, or `quire convert --form objects {name}`"
    )]
    Native { name: String, form: Form },
    /// The kernel does not allow users to redirect an overlay to objects.
    #[error(
        "--via fuse-objects, tree and service need Linux {OVERLAY_USER_DATA} or newer in a user \
        namespace, but this is {0}: leave --via out"
    )]
    Kernel(KernelVersion),
    /// There is no service.
    #[error(
        "--via service: no mount service is running: as root, `systemctl enable --now \
        quire-mounts.socket` or `quire serve --mounts` starts one"
    )]
    NoService,
    /// The service refuses the image.
    #[error("--via service: cannot get {name} from the mount service")]
    Lend { name: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// The image's file has changed.
    #[error("the file of image {image} has been replaced by image {found}: run `quire fsck`")]
    Changed {
        image: ImageId,
        /// Digest of the file.
        found: Box<ImageId>,
    },
    /// The image cannot be served by FUSE.
    #[error("cannot serve {name} by FUSE")]
    Serve { name: String, source: Box<dyn std::error::Error + Send + Sync> },
}

/// Makes the detached root of an image, if its trust allows it. `shared` are existing mounts with the image's name.
///
/// The function accepts only an image that a policy allowed, and whose possible writers are known. An image that is
/// only permitted does not compile:
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
/// [`MakeRootError`]; all mounts are then removed.
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
    // In a user namespace, the kernel does not read the image.
    if !is_user {
        trust::check_form(image, &name)?;
    }
    let checked = trust::check(image, &name, trust)?;
    // As in mount.composefs, ACLs are enabled only if the image has some, because they cost a lookup of each inode's
    // xattrs.
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
            Form::Objects => ImageData::Objects(&objects),
            Form::Packed | Form::Tar => ImageData::Devices(&devices),
        },
        acl,
        domain: domain.as_deref(),
        backing: trust.backing,
        presence: image.presence,
        read_ahead: image.read_ahead,
        apart: None,
        records: if is_user { XattrNamespace::User } else { XattrNamespace::Trusted },
    };
    if is_user {
        return in_user_namespace(trusted, &layers, checked, shape, &name);
    }
    // If a digest is required, this file has just been verified, but an existing mount may be of another file.
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

/// Whether an overlay searches its data layers in order, and returns the error of the last layer to readers. In older
/// kernels, a file without data cannot be looked up, and a symlink would count as data.
fn ends_with_an_error() -> bool {
    KernelVersion::running().is_none_or(|it| it >= DATA_LAYERS)
}

/// Makes the root without the kernel's EROFS, which only the host's root may mount.
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
        Via::FuseObjects(names) => {
            can_lead_to_objects(open, name)?;
            return match lent(open, names, shape)? {
                Lent::Lower(lower) => Ok(assemble(layers, Some(lower), checked, shape)?),
                Lent::NoService => Err(MakeRootError::NoService),
                Lent::Refused(source) => {
                    Err(MakeRootError::Serve { name: name.to_owned(), source })
                }
            };
        }
        Via::Auto { lender, names, server } => {
            let lender = lender.filter(|_| can_lead_to_objects(open, name).is_ok());
            match lender.map_or(Ok(Lent::NoService), |it| lent(open, it, shape))? {
                Lent::Lower(lower) => return Ok(assemble(layers, Some(lower), checked, shape)?),
                Lent::NoService => {}
                Lent::Refused(error) => {
                    tracing::info!(%error, "cannot get {name} from the mount service: mounting it another way");
                }
            }
            let names = names.filter(|_| can_lead_to_objects(open, name).is_ok());
            match names.map_or(Ok(Lent::NoService), |it| lent(open, it, shape))? {
                Lent::Lower(lower) => match assemble(layers, Some(lower), checked, shape) {
                    Err(error @ RootError::Mount { .. }) => {
                        let error = AnyError::from(error);
                        tracing::info!(
                            error = &*error,
                            "cannot mount the names of {name} over its objects: mounting it another way"
                        );
                    }
                    root => return Ok(root?),
                },
                Lent::NoService => {}
                Lent::Refused(error) => {
                    tracing::info!(%error, "cannot serve the names of {name} by FUSE: mounting it another way");
                }
            }
            server
        }
        Via::Tree => None,
    };
    if let Some(serve) = serve {
        match served(image, layers, serve, shape, name) {
            // For example, /dev/fuse may be missing.
            Err(MakeRootError::Serve { source, .. }) if can_lead_to_objects(open, name).is_ok() => {
                tracing::info!(error = &*source, "cannot serve {name} by FUSE: making a tree");
            }
            root => return root,
        }
    }
    can_lead_to_objects(open, name)?;
    let ids =
        OwnIds::read().map_err(OperationError::of("read", "the ids of this user namespace"))?;
    let made = tree::make(open, layers.name, &ids).map_err(OperationError::of(
        "make",
        format_args!("the tree of image {} in a user namespace", open.id),
    ))?;
    if made.devices > 0 {
        tracing::info!(devices = made.devices, "leaving out device nodes of the image");
    }
    // The tree depends on the ids of this namespace, so it is not shared.
    let tree = Superblock { mount: made.mount, backing: Backing::File, identity: None };
    Ok(assemble(layers, Some(tree), checked, shape)?)
}

/// Checks that a user's overlay can find an image's data in objects.
fn can_lead_to_objects(image: &OpenImage, name: &str) -> Result<(), MakeRootError> {
    if image.form != Form::Objects {
        return Err(MakeRootError::Native { name: name.to_owned(), form: image.form });
    }
    match KernelVersion::running().filter(|it| *it < OVERLAY_USER_DATA) {
        Some(running) => Err(MakeRootError::Kernel(running)),
        None => Ok(()),
    }
}

/// Result of a request to a service.
enum Lent {
    /// The image, with all requested files.
    Lower(Superblock),
    NoService,
    Refused(AnyError),
}

/// Requests an image from a service.
///
/// # Errors
/// [`MakeRootError::Changed`], which would also occur with the other ways.
fn lent(
    image: &OpenImage,
    lender: &dyn LendImage,
    shape: &Shape<'_>,
) -> Result<Lent, MakeRootError> {
    // At first, only files are requested, because most images have the directories, and all requests for the same
    // places share a mount.
    let files = shape.places.iter().filter(|it| !it.ends_with('/'));
    let mut places: Vec<_> = files.map(ToString::to_string).collect();
    let mut is_first = true;
    // Because of links in the image, other places may also be needed. A mount cannot be extended, so another one is
    // requested.
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
                // A requested place meets a claimed path, which the service does not know. So the next request
                // contains only the places that are still missing, as paths without links.
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
    Ok(Lent::Refused(format!("the image has no file or directory at {place} to mount on").into()))
}

/// Makes a root over a FUSE file system, which contains the data of all files.
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
    // Kernels that cannot clone detached mounts always get an overlay of two layers.
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
    let layers = Layers { data: ImageData::Devices(&[]), apart, ..*layers };
    let is_in_memory = matches!(shape.writable, Writable::Memory { .. });
    if is_in_memory && !has_user_xattrs {
        tracing::warn!(
            "before Linux {TMPFS_USER_XATTRS}, directories of the image cannot be removed if \
            changes are in memory: use --writable dir=PATH"
        );
    }
    let shape = Shape { space, ..*shape };
    Ok(assemble(&layers, Some(lower), Checked::AtImport, &shape)?)
}

/// Whether a file of the image may have a POSIX ACL.
pub fn may_have_acl(image: &OpenImage) -> Result<bool, MakeRootError> {
    let failed = OperationError::of("read image", image.id);
    Ok(Image::open(&image.image).map_err(failed)?.superblock().may_have_acl())
}

/// Data that the kernel starts to read when an image is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Warm {
    /// The metadata of images up to a certain size.
    Auto,
    Nothing,
    Metadata,
}

/// Maximum size of an image file that is read ahead by default, in bytes. `docs/performance/metadata.md` has the
/// costs and savings. Larger images have a million files, of which a container uses few.
const WARM_AUTO_MAX: u64 = 32 << 20;

/// Makes the kernel start to read the data selected by `wish`. Errors are ignored, because the mount also works
/// without read-ahead. `remark` gets a sentence if the wish has no effect.
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
                "not reading ahead: the image is read through a loop device, which has its own \
                page cache",
            );
        }
        return;
    }
    let (file, all) = (image.image.fd(), 0..image.image.size());
    let pages = image.image.size().div_ceil(cache::page_size());
    // If the resident pages cannot be counted, the file is read ahead: the kernel skips resident pages.
    if cache::resident(file, &all, who).is_ok_and(|there| there >= pages) {
        return;
    }
    if let Err(error) = cache::read_ahead(file, &all) {
        tracing::debug!(image = %image.id, %error, "cannot read ahead");
    }
}
