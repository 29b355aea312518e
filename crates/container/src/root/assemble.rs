//! Assembles root file systems: an image of the store, its objects or devices, and optionally a writable layer, in
//! one detached mount.
//!
//! Every mount that Quire makes of an image comes from [`assemble`]. So processes that a mount depends on, such as a
//! service for lazy devices or a monitor that shares superblocks, are handled in one place.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use kernel::mount::{
    Backing, Credentials, Detached, Domain, ErofsOptions, Io, MountError, OverlayOptions,
    Propagation, Reach, Verity, XattrNamespace, bind, native_read_ahead,
};
use kernel::process::{ProcessError, own_mounts};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use store::{OperationError, Presence};

use crate::bundle::userns::IdMap;
use crate::root::layers::{Checked, ImageData, Layers};
use crate::root::share::Superblock;
use crate::root::upper_dir::{Doomed, Shown, Writable, WritableLayer};
use crate::root::via::Via;

/// Free space that `df` shows of a read-only root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// As the kernel reports it: none.
    AsIs,
    /// `df` shows some free space, from an empty tmpfs above the image. As a consequence, the root directory is
    /// merged, so the kernel takes longer to list it.
    Free,
}

/// Ids to which files in a layer between the image and the writable layer belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BetweenOwners {
    /// Those of the image, which the root's map changes.
    Image,
    /// Those of the host, to which the map of the layer's own root has led. The root's map leaves them as they are.
    Host,
}

/// Parameters of a root.
#[derive(Debug, Clone, Copy)]
pub struct Shape<'a> {
    pub writable: Writable<'a>,
    /// Map of the image's owners to the host's ids; `None` if they are the same.
    pub map: Option<&'a IdMap>,
    /// Applies only to read-only roots.
    pub space: Space,
    /// Files that must exist as mount points. Files that the image lacks are created, empty, in a layer below the
    /// image, so that runtimes do not create them in the writable layer. As a consequence, their parent directories
    /// are merged. Paths that end with a slash are directories, as
    /// [`mount_points`](crate::bundle::mounts::mount_points) returns them.
    pub places: &'a [&'a str],
    /// Paths that are needed later, such as destinations of the caller's mounts and devices, in the format of
    /// `places`. Files of `places` are not created at or above the target of such a path, to which a link of the image
    /// may lead.
    pub claimed: &'a [&'a str],
    /// Changes of other roots of this image, uppermost first: the `upper` directories of overlays, which must not be
    /// written to at the same time. They are placed unchanged between the image and the writable layer, without
    /// verification. At most 400, because an overlay has at most 500 layers.
    pub between: &'a [BorrowedFd<'a>],
    /// Ids that the files of `between` belong to.
    pub between_owners: BetweenOwners,
    /// How the image is made available in a user namespace.
    pub via: Via<'a>,
    /// Source in `mountinfo`. With `None`, an overlay has the image's name after [`SOURCE`](crate::root::SOURCE), and
    /// an EROFS has the path that the kernel opened.
    pub source: Option<&'a str>,
}

/// A root file system that is not attached yet.
#[derive(Debug)]
pub struct Root {
    pub mount: Detached,
    /// Mount of the image below the root, which others can share.
    pub image: Superblock,
    /// Action on the writable layer when the root is no longer needed, before the root is unmounted.
    pub doomed: Doomed,
}

/// Reason why a root cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// The kernel refused a mount.
    #[error("cannot mount {name}")]
    Mount {
        name: String,
        #[source]
        source: MountError,
    },
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The owner of the root directory is not in the map, but the writable layer needs a separate root directory.
    #[error(
        "the root directory of {name} belongs to user {user} and group {group}, and the map of \
        ids lacks one or both: add them, or use neither a writable layer nor --df"
    )]
    Nobody {
        name: String,
        /// User that owns the directory in the image.
        user: u32,
        /// Group that owns the directory in the image.
        group: u32,
    },
}

/// Stacks the image, its objects and the writable layer, all from descriptors. `shared` is an existing mount of
/// exactly this image. Kernels before 6.15 require some layers to be attached temporarily; this happens in a private
/// mount namespace.
///
/// # Errors
/// [`RootError`] with the step that failed; all mounts are then removed.
pub(crate) fn assemble(
    layers: &Layers<'_>,
    shared: Option<Superblock>,
    checked: Checked,
    shape: &Shape<'_>,
) -> Result<Root, RootError> {
    assemble_in(layers, shared, checked, shape, Workshop::AsNeeded)
}

/// Where an overlay with a writable layer is stacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Workshop {
    /// In this mount namespace, if the kernel does not need attached layers.
    AsNeeded,
    /// In a separate mount namespace, as for older kernels. For tests.
    #[cfg(test)]
    Apart,
}

fn assemble_in(
    layers: &Layers<'_>,
    shared: Option<Superblock>,
    checked: Checked,
    shape: &Shape<'_>,
    workshop: Workshop,
) -> Result<Root, RootError> {
    let failed = |source| RootError::Mount { name: layers.name.to_owned(), source };
    let image = match shared {
        Some(shared) => shared,
        None => mount_image(layers)?,
    };
    let mapped = shape.map.map(|map| mapped(layers, &image, map, workshop)).transpose()?;
    let lower = mapped.as_ref().unwrap_or(&image.mount);
    let between_map = shape.map.filter(|_| shape.between_owners == BetweenOwners::Image);
    let between = shape.between.iter().map(|it| between(layers, *it, between_map));
    let between = between.collect::<Result<Vec<_>, _>>()?;
    let highest = between.first().unwrap_or(lower);
    let writable = shape.writable;
    if let (Some(map), true) = (shape.map, writes_root(shape)) {
        match (shape.between.first(), shape.between_owners) {
            (None, _) => check_owner(layers, image.mount.as_fd(), map)?,
            (Some(highest), BetweenOwners::Image) => check_owner(layers, *highest, map)?,
            // Another root had this owner.
            (Some(_), BetweenOwners::Host) => {}
        }
    }
    let upper_failed = OperationError::of("prepare the writable layer of", layers.name);
    let missing = crate::root::mount_points::missing(lower.as_fd(), shape.claimed, shape.places)
        .map_err(upper_failed)?;
    let bottom = match (missing.is_empty(), layers.records, layers.data) {
        (true, ..) => None,
        // In a user namespace, only the lowest layer above the objects may refer to objects, so a tree must be the
        // lowest layer.
        (false, XattrNamespace::User, ImageData::Objects(_)) => {
            crate::root::upper_dir::add_files(lower.as_fd(), &missing, shape.map)
                .map_err(upper_failed)?;
            None
        }
        (false, ..) => {
            Some(crate::root::upper_dir::files(&missing, shape.map).map_err(upper_failed)?)
        }
    };
    let shown = Shown { root: highest.as_fd(), marks: layers.records };
    let upper =
        crate::root::upper_dir::prepare(writable, shown, shape.map).map_err(upper_failed)?;
    let Some(upper) = upper else {
        let top = match shape.space {
            Space::AsIs => None,
            Space::Free => Some(crate::root::upper_dir::empty(shown).map_err(upper_failed)?),
        };
        let is_alone = top.is_none() && bottom.is_none() && layers.apart.is_none();
        if let (ImageData::Devices(_), true, []) = (layers.data, is_alone, &*between) {
            let mount = match mapped {
                Some(mapped) => mapped,
                None => again(layers, &image, workshop)?,
            };
            return Ok(Root { mount, image, doomed: Doomed::default() });
        }
        let lower = top.iter().chain(&between).chain([lower]).chain(layers.apart).chain(&bottom);
        let lower: Vec<_> = lower.map(Detached::as_fd).collect();
        let mount = stack(layers, checked, &lower, layers.objects(), None).map_err(failed)?;
        return Ok(Root { mount, image, doomed: Doomed::default() });
    };
    let lower = between.iter().chain([lower]).chain(layers.apart).chain(&bottom);
    let lower: Vec<_> = lower.map(Detached::as_fd).collect();
    let here = match workshop {
        Workshop::AsNeeded => Some(stack(layers, checked, &lower, layers.objects(), Some(&upper))),
        #[cfg(test)]
        Workshop::Apart => None,
    };
    let mount = match here {
        // The kernel returns this error before it changes any layer.
        Some(Err(MountError::Unsupported { .. })) | None => {
            stack_apart(layers, checked, &lower, &upper)?
        }
        Some(result) => result.map_err(failed)?,
    };
    Ok(Root { mount, image, doomed: upper.into_doomed(writable) })
}

fn mount_image(layers: &Layers<'_>) -> Result<Superblock, RootError> {
    let acl = layers.acl;
    let options = match layers.data {
        // The image contains only metadata. Its pages in the page cache stay after an unmount, so the next mount does
        // not read the disk. (With direct I/O, every container would read the disk again.)
        ImageData::Objects(_) => ErofsOptions { io: Io::Buffered, acl, ..ErofsOptions::default() },
        // EROFS caches file data; without direct I/O, the devices' page cache would hold it a second time. Data of a
        // file on FUSE is not in the page cache, but with direct I/O, a loop device lets several readers wait at the
        // same time. For a partial image, each byte of read-ahead may have to be fetched. Pages that are not verified
        // are not shared.
        ImageData::Devices(devices) if layers.presence == Presence::Partial => ErofsOptions {
            devices,
            backing: layers.backing,
            source: layers.source,
            io: Io::Direct,
            acl,
            read_ahead: layers.read_ahead,
            ..ErofsOptions::default()
        },
        ImageData::Devices(devices) => ErofsOptions {
            devices,
            backing: layers.backing,
            io: Io::Direct,
            acl,
            // Shared pages belong to no device, and cannot be read with direct I/O.
            share: layers.domain.filter(|_| layers.backing == Backing::File).map(Domain),
            read_ahead: layers
                .read_ahead
                .or_else(|| native_read_ahead(*devices.first().unwrap_or(&layers.image))),
            source: layers.source,
        },
    };
    let image = kernel::mount::erofs(layers.image, &options)
        .map_err(|source| RootError::Mount { name: layers.name.to_owned(), source })?;
    Ok(Superblock { mount: image.mount, backing: image.backing, identity: layers.identity() })
}

fn map_failed(layers: &Layers<'_>) -> impl Fn(ProcessError) -> OperationError {
    OperationError::of("make a user namespace for the owners of", layers.name)
}

/// Mounts the image a second time, with mapped owners.
fn mapped(
    layers: &Layers<'_>,
    image: &Superblock,
    map: &IdMap,
    workshop: Workshop,
) -> Result<Detached, RootError> {
    let namespace = map.namespace().map_err(map_failed(layers))?;
    let mount = again(layers, image, workshop)?;
    let failed = |source| RootError::Mount { name: layers.name.to_owned(), source };
    mount.idmap(namespace.as_fd()).map_err(failed)?;
    Ok(mount)
}

/// Mounts a directory, with mapped owners if there is a map.
fn between(
    layers: &Layers<'_>,
    directory: BorrowedFd<'_>,
    map: Option<&IdMap>,
) -> Result<Detached, RootError> {
    let failed = |source| RootError::Mount { name: layers.name.to_owned(), source };
    let mount = bind(directory, Reach::One).map_err(failed)?;
    if let Some(map) = map {
        let namespace = map.namespace().map_err(map_failed(layers))?;
        mount.idmap(namespace.as_fd()).map_err(failed)?;
    }
    Ok(mount)
}

/// Mounts the image a second time: the same superblock, or a new one on kernels that cannot clone detached mounts.
fn again(
    layers: &Layers<'_>,
    image: &Superblock,
    workshop: Workshop,
) -> Result<Detached, RootError> {
    let cloned = match workshop {
        Workshop::AsNeeded => Some(image.mount.clone_detached()),
        #[cfg(test)]
        Workshop::Apart => None,
    };
    match cloned {
        Some(Err(MountError::Unsupported { .. })) | None => Ok(mount_image(layers)?.mount),
        Some(clone) => {
            clone.map_err(|source| RootError::Mount { name: layers.name.to_owned(), source })
        }
    }
}

/// Whether the root directory is in a writable file system.
fn writes_root(shape: &Shape<'_>) -> bool {
    !matches!(shape.writable, Writable::None) || shape.space == Space::Free
}

/// Checks that the map contains the owner of the root directory, which is the owner in the highest layer.
fn check_owner(layers: &Layers<'_>, highest: BorrowedFd<'_>, map: &IdMap) -> Result<(), RootError> {
    let stat = rustix::fs::fstat(highest)
        .map_err(OperationError::of("prepare the writable layer of", layers.name))?;
    match map.user(stat.st_uid).zip(map.group(stat.st_gid)) {
        Some(_) => Ok(()),
        None => Err(RootError::Nobody {
            name: layers.name.to_owned(),
            user: stat.st_uid,
            group: stat.st_gid,
        }),
    }
}

fn stack(
    layers: &Layers<'_>,
    checked: Checked,
    lower: &[BorrowedFd<'_>],
    objects: &[BorrowedFd<'_>],
    upper: Option<&WritableLayer>,
) -> Result<Detached, MountError> {
    kernel::mount::overlay(&OverlayOptions {
        name: layers.name,
        lower,
        data: objects,
        upper: upper.map(WritableLayer::options),
        verity: match (layers.data, checked) {
            (ImageData::Objects(_), Checked::ByKernel) => Verity::Required,
            // Sealed devices are verified at every read.
            (ImageData::Devices(_), _) | (_, Checked::AtImport) => Verity::Off,
        },
        xattrs: layers.records,
        credentials: Credentials::Mounter,
    })
}

/// Stacks an overlay on a kernel that requires the writable layer to be attached, and all layers to be in the same
/// mount namespace. This happens in a new namespace, which ends with this thread. The overlay keeps its own clones of
/// the layers' mounts and is detached, so it can be attached in any namespace.
fn stack_apart(
    layers: &Layers<'_>,
    checked: Checked,
    lower: &[BorrowedFd<'_>],
    upper: &WritableLayer,
) -> Result<Detached, RootError> {
    let object = format!("the objects of {}, or its writable layer, by their path", layers.name);
    let lost = OperationError::of("find", &*object);
    let work = || {
        // The paths are read before the new namespace is created, because they are valid in the old one.
        let directories = match &upper.mount {
            Some(_) => layers.objects().to_vec(),
            None => [layers.objects(), &upper.directories()].concat(),
        };
        let paths = directories.iter().map(|fd| path_of(*fd));
        let paths = paths.collect::<Result<Vec<_>, _>>().map_err(lost)?;
        own_mounts(Propagation::Private).map_err(OperationError::of(
            "make",
            format_args!("a mount namespace to stack {} in", layers.name),
        ))?;
        // An earlier descriptor refers to a mount in the old namespace, which cannot be a layer in this namespace.
        let again = paths.iter().zip(&directories).map(|(path, fd)| open_again(path, *fd));
        let mut again = again.collect::<Result<Vec<_>, _>>().map_err(lost)?;
        let failed = |source| RootError::Mount { name: layers.name.to_owned(), source };
        let upper_again = upper.again(again.split_off(layers.objects().len()));
        if let Some(mount) = &upper.mount {
            // The root is used because it always exists, and because a mount on it hides no paths: all paths still
            // start at the process's root.
            mount.attach_at(Path::new("/")).map_err(failed)?;
        }
        let objects: Vec<_> = again.iter().map(|fd| fd.as_fd()).collect();
        let upper = upper_again.as_ref().unwrap_or(upper);
        stack(layers, checked, lower, &objects, Some(upper)).map_err(failed)
    };
    match std::thread::scope(|scope| scope.spawn(work).join()) {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn path_of(fd: BorrowedFd<'_>) -> std::io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/thread-self/fd/{}", fd.as_raw_fd()))
}

/// Opens a directory by its path, and checks that it is the expected one.
fn open_again(path: &Path, expected: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let again = rustix::fs::open(path, flags, Mode::empty())?;
    let identity = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|it| (it.st_dev, it.st_ino));
    if identity(again.as_fd())? != identity(expected)? {
        return Err(Errno::STALE.into());
    }
    Ok(again)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::unix::fs::MetadataExt as _;

    use image::erofs::{DeviceFile, Placed, Profile, Stored, Versions, write_native};
    use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, XattrsId};
    use image::verity::{Algorithm, ObjectId, digest};

    use kernel::mount::Acl;

    use super::*;

    /// Prints a message if the test is skipped because it needs root.
    fn is_root() -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            testing::skipped("mounts need root");
        }
        root
    }

    const BYTES: [u8; 100] = [b'x'; 100];

    /// Creates an image of one file and the file's object. Returns the object's path.
    fn composefs() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let bytes = BYTES;
        let object = ObjectId::new(digest(Algorithm::Sha256, &bytes));
        let place = folder.path().join(object.path());
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::fs::write(&place, bytes).unwrap();
        let mut builder = Builder::new();
        let node = Node::Regular(Content::External {
            size: 100,
            object: Some(object),
            location: Location::Object,
        });
        let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
        builder.insert(InodeId::ROOT, b"file", inode, Link::Equal).unwrap();
        let path = folder.path().join("image");
        let profile = Profile::Composefs(Versions::default());
        image::erofs::write(&builder.finish(), &profile, &mut File::create(&path).unwrap())
            .unwrap();
        (folder, place)
    }

    /// The objects have no fs-verity in this test. The kernel refuses either the mount, or every read of an object.
    #[test]
    fn the_kernel_is_not_asked_to_check_what_it_can_not() {
        if !is_root() {
            return;
        }
        let (folder, _) = composefs();
        let image = File::open(folder.path().join("image")).unwrap();
        let objects = File::open(folder.path()).unwrap();
        let objects = [objects.as_fd()];
        let layers = layers(&image, &objects);
        let shape = Shape {
            writable: Writable::None,
            map: None,
            space: Space::AsIs,
            places: &[],
            claimed: &[],
            between: &[],
            between_owners: BetweenOwners::Image,
            via: Via::Tree,
            source: None,
        };
        let Ok(root) = assemble(&layers, None, Checked::ByKernel, &shape) else { return };
        let opened = rustix::fs::openat(&root.mount, "file", OFlags::RDONLY, Mode::empty());
        assert_eq!(opened.unwrap_err(), Errno::IO);
    }

    fn layers<'a>(image: &'a File, objects: &'a [BorrowedFd<'a>]) -> Layers<'a> {
        Layers {
            source: None,
            name: "quire:test",
            image: image.as_fd(),
            data: ImageData::Objects(objects),
            acl: Acl::Ignore,
            domain: None,
            backing: Backing::File,
            presence: Presence::Complete,
            read_ahead: None,
            apart: None,
            records: XattrNamespace::Trusted,
        }
    }

    /// Tests the code for kernels before 6.15. The tests of the `kernel` crate cover the layers by name.
    #[test]
    fn a_root_stacked_apart_is_one_like_others() {
        if !is_root() {
            return;
        }
        let (bytes, (folder, place)) = (BYTES, composefs());
        let image = File::open(folder.path().join("image")).unwrap();
        let objects = File::open(folder.path()).unwrap();
        let objects = [objects.as_fd()];
        let layers = layers(&image, &objects);
        let mounts = || std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let before = mounts();
        let map: IdMap = "0:100000:10\n0:200000:10".parse().unwrap();
        let shape = Shape {
            writable: Writable::Memory { bytes: None },
            map: Some(&map),
            space: Space::AsIs,
            places: &[],
            claimed: &[],
            between: &[],
            between_owners: BetweenOwners::Image,
            via: Via::Tree,
            source: None,
        };
        let root = assemble_in(&layers, None, Checked::AtImport, &shape, Workshop::Apart).unwrap();
        assert_eq!(mounts(), before);
        // The root is attached in another namespace than the one in which it was made, as in a container.
        own_mounts(Propagation::Private).unwrap();
        let point = tempfile::tempdir().unwrap();
        root.mount.attach_at(point.path()).unwrap();
        drop(root);
        let file = point.path().join("file");
        assert_eq!(std::fs::read(&file).unwrap(), bytes);
        for path in [&*file, point.path()] {
            let found = std::fs::metadata(path).unwrap();
            assert_eq!((found.uid(), found.gid()), (100_000, 200_000));
        }
        File::options().append(true).open(&file).unwrap().write_all(b"y").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), [&bytes[..], b"y"].concat());
        assert_eq!(std::fs::read(&place).unwrap(), bytes);
        assert!(mounts().contains(" overlay quire:test "));
        kernel::mount::unmount(point.path(), kernel::mount::Unmount::Now).unwrap();
    }

    /// An image whose only file is in a device, after an unrelated block.
    struct Native {
        folder: tempfile::TempDir,
        bytes: Vec<u8>,
    }

    impl Native {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let bytes: Vec<u8> = (0..=255).cycle().take(3 * 4096 + 5).collect();
            let object = ObjectId::new(digest(Algorithm::Sha256, &bytes));
            let data = [&[0xee; 4096][..], &bytes, &[0; 4096 - 5]].concat();
            let mut builder = Builder::new();
            let size = bytes.len() as u64;
            let content =
                Content::External { size, object: Some(object), location: Location::None };
            let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Regular(content));
            builder.insert(InodeId::ROOT, b"file", inode.unwrap(), Link::Equal).unwrap();
            let find = |_: &_| {
                Some(Placed::Whole(Stored { device: 0, offset: 4096, fingerprint: [7; 32] }))
            };
            let device = DeviceFile {
                id: digest(Algorithm::Sha256, &data).into(),
                bytes: data.len() as u64,
            };
            let devices = [device];
            let native = image::erofs::Native::new(&devices, &find);
            let mut give = |_: image::tree::Inode<'_>, _, _: &mut dyn std::io::Write| {
                panic!("all is on the device")
            };
            let mut out = File::create(folder.path().join("image")).unwrap();
            write_native(&builder.finish(), &native, &mut give, &mut out).unwrap();
            std::fs::write(folder.path().join("device"), data).unwrap();
            Self { folder, bytes }
        }

        fn root(&self, shape: &Shape<'_>, workshop: Workshop) -> Root {
            let open = |name| File::open(self.folder.path().join(name)).unwrap();
            let (image, device) = (open("image"), open("device"));
            let layers = Layers {
                source: None,
                name: "quire:native",
                image: image.as_fd(),
                data: ImageData::Devices(&[device.as_fd()]),
                acl: Acl::Keep,
                domain: Some("test"),
                backing: Backing::File,
                presence: Presence::Complete,
                read_ahead: None,
                apart: None,
                records: XattrNamespace::Trusted,
            };
            assemble_in(&layers, None, Checked::AtImport, shape, workshop).unwrap()
        }
    }

    #[test]
    fn an_image_over_devices_is_mounted_alone_until_something_is_written() {
        if !is_root() {
            return;
        }
        let native = Native::new();
        let map: IdMap = "0:100000:10\n0:200000:10".parse().unwrap();
        own_mounts(Propagation::Private).unwrap();
        let memory = Writable::Memory { bytes: None };
        let none = Writable::None;
        let cases = [
            (none, None, Space::AsIs, "erofs"),
            (none, Some(&map), Space::AsIs, "erofs"),
            (none, None, Space::Free, "overlay"),
            (memory, Some(&map), Space::AsIs, "overlay"),
        ];
        for (writable, map, space, kind) in cases {
            for workshop in [Workshop::AsNeeded, Workshop::Apart] {
                let root = native.root(
                    &Shape {
                        writable,
                        map,
                        space,
                        places: &[],
                        claimed: &[],
                        between: &[],
                        between_owners: BetweenOwners::Image,
                        via: Via::Tree,
                        source: None,
                    },
                    workshop,
                );
                let point = tempfile::tempdir().unwrap();
                root.mount.attach_at(point.path()).unwrap();
                drop(root);
                let file = point.path().join("file");
                assert_eq!(std::fs::read(&file).unwrap(), native.bytes);
                let owner = std::fs::metadata(&file).unwrap().uid();
                assert_eq!(owner, if map.is_some() { 100_000 } else { 0 });
                let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
                let at = format!(" {} ", point.path().display());
                let line = mounts.lines().find(|line| line.contains(&at)).unwrap();
                assert!(line.contains(&format!(" - {kind} ")), "{line}");
                assert_eq!(
                    std::fs::write(&file, b"new").is_ok(),
                    matches!(writable, Writable::Memory { .. })
                );
                kernel::mount::unmount(point.path(), kernel::mount::Unmount::Lazy).unwrap();
            }
        }
    }
}
