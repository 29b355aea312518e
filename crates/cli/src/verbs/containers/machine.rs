//! `bundle --vm`: gives an image to a virtual machine.
//!
//! The directory gets hard links of the store's files, so no data is copied, and all virtual machines and containers
//! that use an image share the host's page cache. Decision 38 has the reasons.

mod disks;
mod hypervisors;
mod report;
#[cfg(test)]
mod schemas;

use std::cell::{Cell, RefCell};
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write as _};
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use container::root::filestore::{self, Backing};
use container::root::{TrustedImage, WritableChoice};
use image::erofs::read::{Cached, Image};
use image::verity::ImageId;
use kernel::files::{NameOutcome, link};
use kernel::mount::Durability;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use store::{Digest, Form, OpenImage, OpenImageError, Permitted, PermittedImage, Store};
use transfer::StoredImage;

use crate::Answer;
use crate::args::ContainerOptions;
use crate::output::report as out;
use crate::session::context::Context;
use disks::{DISK, Disk, MACHINE, Parts, TABLE, WRITABLE, sectors};
pub(crate) use report::MachineReport;

/// Options of containers, which `--vm` refuses. `domain` and `mount_service` are not among them, because clap takes
/// their environment variables for options.
pub(crate) const REFUSED: &[&str] = &[
    "tz",
    "directory",
    "command",
    "tty",
    "env",
    "env_file",
    "user",
    "workdir",
    "entrypoint",
    "network_alias",
    "ip",
    "hostname",
    "add_host",
    "no_hosts",
    "dns",
    "dns_search",
    "dns_option",
    "network",
    "df",
    "warm",
    "volume",
    "mount",
    "tmpfs",
    "shm_size",
    "group_add",
    "sysctl",
    "umask",
    "oom_score_adj",
    "memory",
    "cpus",
    "cpu_shares",
    "cpuset_cpus",
    "cap_add",
    "cap_drop",
    "privileged",
    "security_opt",
    "device",
    "ulimit",
    "pids_limit",
    "io",
    "userns",
    "uidmap",
    "gidmap",
    "init",
    "init_path",
    #[cfg(feature = "serve")]
    "via",
    #[cfg(feature = "serve")]
    "lazy",
    #[cfg(feature = "serve")]
    "trust_index",
    #[cfg(feature = "serve")]
    "prefetch",
    #[cfg(feature = "serve")]
    "complete",
];

/// An image for a virtual machine, and the directory to fill.
pub(super) struct MachineRequest<'a> {
    /// Name or id of the image.
    pub(super) image: &'a str,
    /// The options, of which the parser has refused those of containers.
    pub(super) wanted: &'a ContainerOptions,
    /// Whether the machine may get data of other images.
    pub(super) shared_devices: bool,
    pub(super) directory: &'a Path,
}

pub(super) fn bundle(context: &Context, args: &MachineRequest<'_>) -> anyhow::Result<Answer> {
    let directory = args.directory;
    // Check these first, because they are the easiest errors to fix.
    check_empty(directory)?;
    let writable = writable(args.wanted)?;
    #[cfg(feature = "serve")]
    crate::verbs::images::registry::pull::pull_first(context, args.image, &args.wanted.lazy)?;
    let store = context.open_with(args.image)?;
    let found = crate::session::resolve::resolve(&store, args.image)?;
    let permitted = crate::session::policy::permit(context, &store, found)?;
    let opened = open(&store, permitted, args.image)?;
    let trust = args.wanted.trust.wish()?;
    let trusted = TrustedImage::to_mount(&store, opened, trust, Some(&writable.choice()))?;
    trusted.check()?;
    let image = trusted.image();
    if image.form == Form::Objects {
        bail!(
            "image {} has the form objects, whose data is in many files: `quire convert --form \
            packed {}` puts it into a few, which can be disks",
            image.id,
            args.image
        );
    }
    if !args.shared_devices {
        check_devices(&store, image.id, trusted.found().manifest.as_ref(), args.image)?;
    }
    // A name outside of the store is not known to it, so the data must be durable before.
    store.settle()?;
    let was_there = std::fs::symlink_metadata(directory).is_ok();
    let made = Folder::make(context, directory)
        .and_then(|folder| folder.fill(context, &store, image, &writable));
    if made.is_err() && !was_there {
        let _removed = std::fs::remove_dir(directory);
    }
    let report = made?;
    if report.vmdk.is_none() {
        context.remark(&format!(
            "no {DISK}: image {} states no addresses for its devices, so each file is a disk",
            image.id
        ));
    }
    if let Some(remark) = report.remark() {
        context.remark(&remark);
    }
    out::print(context.json, &report, |it, out| it.write(out))?;
    Ok(Answer::Yes)
}

/// Refuses an image if its devices also have data of other images, which programs in the machine could read.
fn check_devices(
    store: &Store,
    image: ImageId,
    manifest: Option<&Digest>,
    name: &str,
) -> anyhow::Result<()> {
    let documents = manifest.map(|it| StoredImage::load(store, it)).transpose()?;
    let layers = documents.as_ref().map_or(&[][..], |it| it.config.diff_ids());
    let devices = store.devices_with_other_data(&image, layers)?;
    let Some(device) = devices.first() else { return Ok(()) };
    let count = out::count(devices.len() as u64, "device");
    bail!(
        "{count} of image {image}, such as {device}, hold data that is not in the image, or not in the layers of its \
        name. Root in the virtual machine could read it: `quire export {name} erofs:FILE` makes a disk without it, and \
        --shared-devices accepts this"
    )
}

/// Opens an image of which all data is in the store.
fn open(store: &Store, permitted: Permitted, name: &str) -> anyhow::Result<PermittedImage> {
    match permitted.open(store) {
        Err(OpenImageError::Partial(image)) => bail!(
            "image {image} is not completely downloaded, but a virtual machine cannot fetch the \
            rest: `quire pull {name}` without --lazy does, or `quire run --lazy --complete`"
        ),
        opened => Ok(opened?),
    }
}

/// The disk for the changes of a virtual machine.
enum WritableDisk {
    None,
    /// An ext4 of this size in bytes, by default of [`filestore::SIZE`].
    Ext4(Option<NonZeroU64>),
}

impl WritableDisk {
    fn choice(&self) -> WritableChoice {
        match self {
            Self::None => WritableChoice::None,
            Self::Ext4(size) => WritableChoice::Filestore(*size, Durability::Durable),
        }
    }
}

/// Returns the disk for changes. Its ext4 always has a journal, because a virtual machine may end at any time.
fn writable(wanted: &ContainerOptions) -> anyhow::Result<WritableDisk> {
    match &wanted.writable {
        _ if wanted.read_only => Ok(WritableDisk::None),
        None => Ok(WritableDisk::Ext4(None)),
        Some(WritableChoice::None) => Ok(WritableDisk::None),
        Some(WritableChoice::Filestore(size, _)) => Ok(WritableDisk::Ext4(*size)),
        Some(WritableChoice::Memory(_)) => bail!(
            "--writable memory does not work with --vm: use none, and mount a tmpfs in the \
            virtual machine"
        ),
        Some(WritableChoice::Folder(..) | WritableChoice::Directory(..)) => {
            bail!("--writable dir does not work with --vm: use self[,size=SIZE] or none")
        }
    }
}

/// The directory of a virtual machine.
struct Folder<'a> {
    file: File,
    /// As the user gave it, for messages.
    path: &'a Path,
    /// The absolute path, for hypervisors.
    absolute: String,
    /// Names of the files that were made.
    made: RefCell<Vec<String>>,
    /// The mode of the directory before it was closed to others.
    mode_before: Cell<Option<u32>>,
}

impl Drop for Folder<'_> {
    /// Restores the empty directory after an error.
    fn drop(&mut self) {
        for name in self.made.borrow().iter() {
            let _removed = rustix::fs::unlinkat(&self.file, name.as_str(), AtFlags::empty());
        }
        if let Some(mode) = self.mode_before.get() {
            let _restored = self.file.set_permissions(Permissions::from_mode(mode));
        }
    }
}

impl<'a> Folder<'a> {
    /// Opens the directory, and makes it if it does not exist. Only its owner can access it: the store has closed
    /// directories above the same files, and a person who can replace `disk.vmdk` chooses files that a guest reads.
    fn make(context: &Context, path: &'a Path) -> anyhow::Result<Self> {
        let failed = || format!("cannot make \"{}\"", path.display());
        let text = |path: PathBuf| {
            let text = path.into_os_string().into_string();
            text.map_err(|path| {
                anyhow::anyhow!("path {path:?} is not UTF-8, which {MACHINE} needs")
            })
        };
        text(std::path::absolute(path).with_context(failed)?)?;
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).with_context(failed)?;
        }
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => result.with_context(failed)?,
        }
        // Another user may have made a link in a directory that all users share, and Quire would change the mode of its
        // target.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::LOOP | Errno::NOTDIR) => bail!(
                "\"{}\" is a link or no directory: name a directory, or one that does not exist yet",
                path.display()
            ),
            Err(errno) => {
                return Err(errno).with_context(|| format!("cannot open \"{}\"", path.display()));
            }
        };
        let found = file.metadata().with_context(failed)?;
        if found.uid() != context.who().user {
            bail!(
                "\"{}\" belongs to user {}, who could replace the disks: use a directory that \
                belongs to you, or one that does not exist yet",
                path.display(),
                found.uid()
            );
        }
        // The path of the directory that is open: another one may be at `path` by now.
        let open = format!("/proc/self/fd/{}", file.as_raw_fd());
        let absolute = text(std::fs::read_link(open).with_context(failed)?)?;
        let it =
            Self { file, path, absolute, made: RefCell::default(), mode_before: Cell::default() };
        if found.mode() & 0o077 != 0 {
            let closed = it.file.set_permissions(Permissions::from_mode(0o700));
            closed.with_context(|| format!("cannot change the mode of \"{}\"", path.display()))?;
            it.mode_before.set(Some(found.mode() & 0o7777));
        }
        Ok(it)
    }

    /// Makes all files.
    fn fill(
        self,
        context: &Context,
        store: &Store,
        image: &OpenImage,
        writable: &WritableDisk,
    ) -> anyhow::Result<MachineReport> {
        // This may take a second, and an interrupt before the first link leaves nothing.
        let writable = match writable {
            WritableDisk::None => None,
            WritableDisk::Ext4(size) => {
                let size = size.unwrap_or(filestore::SIZE);
                let (folder, search) = (store.containers.fd(), context.search());
                let made =
                    filestore::make(folder, size, Durability::Durable, Backing::Sparse, &search);
                let made = made.with_context(|| {
                    format!("cannot make {WRITABLE}, which --writable none leaves out")
                })?;
                let file = File::from(made);
                file.sync_all().with_context(|| format!("cannot write {WRITABLE}"))?;
                let bytes = file.metadata()?.len();
                self.link(file.as_fd(), WRITABLE)?;
                Some(bytes)
            }
        };
        let name = "image.erofs";
        self.link(image.image.fd(), name)?;
        let first = Disk { file: name.to_owned(), device: None, bytes: image.image.size() };
        let mut disks = vec![first];
        for (number, device) in (1..).zip(&image.devices) {
            let name = format!("device-{number}");
            self.link(device.file.as_fd(), &name)?;
            let (device, bytes) = (Some(device.id), device.bytes);
            disks.push(Disk { file: name, device, bytes });
        }
        let is_one_disk = is_one_disk(image)?;
        let parts = Parts {
            image: image.id,
            form: image.form,
            directory: &self.absolute,
            disks: &disks,
            is_one_disk,
            writable,
        };
        let report = MachineReport::new(&parts);
        if is_one_disk {
            self.write(DISK, &parts.vmdk())?;
            self.write(TABLE, &parts.table())?;
        }
        self.write(MACHINE, &(serde_json::to_string_pretty(&report)? + "\n"))?;
        let synced = self.file.sync_all();
        synced.with_context(|| format!("cannot sync \"{}\"", self.path.display()))?;
        self.made.borrow_mut().clear();
        if self.mode_before.take().is_some() {
            context.remark(&format!(
                "set the mode of \"{}\" to 0700, because the files of the store are readable in it",
                self.path.display()
            ));
        }
        Ok(report)
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Gives an open file a name in the directory.
    fn link(&self, file: BorrowedFd<'_>, name: &str) -> anyhow::Result<()> {
        let failed = || format!("cannot make \"{}\"", self.path_of(name).display());
        match link(file, self.file.as_fd(), name) {
            Ok(NameOutcome::Now) => {
                self.made.borrow_mut().push(name.to_owned());
                Ok(())
            }
            Ok(NameOutcome::Taken) => Err(Errno::EXIST).with_context(failed),
            Err(Errno::XDEV) => bail!(
                "\"{}\" is on another file system, mount or subvolume than the store, but its files \
                are hard links of the store's: choose a directory beside the store, or copy the image with `quire export NAME erofs:FILE`",
                self.path.display()
            ),
            Err(Errno::PERM) => Err(Errno::PERM).with_context(|| {
                format!(
                    "cannot make the hard link \"{}\": the store's files are immutable (`quire \
                    unseal` clears that), or belong to another user",
                    self.path_of(name).display()
                )
            }),
            Err(errno) => Err(errno).with_context(failed),
        }
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let failed = || format!("cannot write \"{}\"", self.path_of(name).display());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o644);
        let file = rustix::fs::openat(&self.file, name, flags, mode).with_context(failed)?;
        self.made.borrow_mut().push(name.to_owned());
        let mut file = File::from(file);
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(failed)
    }
}

/// Whether the image and its devices, one after the other, are a disk with the image. If the kernel gets no devices at
/// a mount, it reads each one at the address that the device table states. Source: Linux `fs/erofs/super.c`,
/// `erofs_scan_devices`, and `fs/erofs/data.c`, `erofs_map_dev`, from 6.4 on.
fn is_one_disk(image: &OpenImage) -> anyhow::Result<bool> {
    let failed = || format!("cannot read the device table of image {}", image.id);
    let read = Image::open(Cached::new(&image.image)).with_context(failed)?;
    let block = read.superblock().block_bits.size();
    let mut next = image.image.size();
    for (slot, device) in read.devices().iter().zip(&image.devices) {
        if slot.first_block.checked_mul(block) != Some(next) || sectors(next).is_none() {
            return Ok(false);
        }
        next = next.saturating_add(device.bytes);
    }
    Ok(sectors(next).is_some())
}

pub(super) fn check_empty(directory: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot read \"{}\"", directory.display());
    let is_empty = match std::fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(error) => return Err(error).with_context(failed),
    };
    if !is_empty {
        let directory = directory.display();
        bail!(
            "\"{directory}\" is not empty: use an empty directory, or one that does not exist yet"
        );
    }
    Ok(())
}
