//! `bundle`: makes an OCI bundle for other tools, or gives an image to a virtual machine.

use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use clap::{Args, ValueHint};
use container::bundle::etc_files::{NameFile, NameMount};
use container::bundle::mounts::{MountPoints, MountSource, Volume, mount_points};
use container::bundle::spec::RuntimeSpec;
use container::bundle::user::add_groups;
use container::bundle::{Access, Network, Terminal, configure};
use container::folder::{CONFIG, ROOT};
use container::life::filestores::{self, Filestores};
use container::life::mount_staging::Stage;
use container::life::prepare::add_init;
use container::root::filestore::Backing;
use container::root::{BetweenOwners, Shape, TrustedImage, make, warm};
use container::runtime::Runtime;
use kernel::mount::{Attributes, Detached, MountAttrFlags};
use rustix::fs::{AtFlags, Mode, OFlags};

use crate::Answer;
use crate::args::writable::with_a_place;
use crate::args::{ContainerOptions, mounts, volumes};
use crate::session::context::Context;
use crate::session::ways::Ways;
use crate::verbs::containers::container_options::{
    GivenFiles, bundle_options, image_config, init_wish, wish, writable_wish,
};
use crate::verbs::containers::machine::{self, MachineRequest, check_empty};
use crate::verbs::{VerbArgs, option_groups};

#[derive(Debug, Args)]
pub(crate) struct Bundle {
    #[command(flatten)]
    pub(crate) wanted: ContainerOptions,
    /// Ask for a terminal in config.json
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Make no container, but fill this empty or new directory with disks for a virtual machine. It must be on the file
    /// system of the store
    #[arg(
        long,
        value_name = "DIR",
        value_hint = ValueHint::DirPath,
        conflicts_with_all = machine::REFUSED
    )]
    pub(crate) vm: Option<PathBuf>,
    /// Also give the virtual machine devices that hold data of other images. Root in the machine can read all of it
    #[arg(long, requires = "vm")]
    pub(crate) shared_devices: bool,
    /// Name or id of the image, or the first digits of its id (6 or more)
    pub(crate) image: String,
    /// Empty or new directory for config.json and the root, which is mounted on rootfs
    #[arg(value_hint = ValueHint::DirPath, required_unless_present = "vm")]
    pub(crate) directory: Option<PathBuf>,
    /// Command and arguments; by default those of the image
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

impl VerbArgs for Bundle {
    const NAME: &'static str = "bundle";
    const ABOUT: &'static str = "Make an OCI bundle, or disks for a virtual machine";
    const DETAILS: &'static str = "\
        `--vm DIR` gives an image of the form `packed` or `tar` to a virtual machine, without copying data. DIR \
        gets these files:\n\n\
        - `image.erofs` and `device-1`, `device-2`…: the image and its devices, each a disk. They are hard links of \
        the store's files, so attach them read-only\n\
        - `disk.vmdk`: all of these as one disk\n\
        - `writable.ext4`: a sparse disk for changes, by default of 10 GiB (`--writable self,size=SIZE`); \
        `--writable none` leaves it out\n\
        - `table`: a table for `dmsetup`, which joins the disks in a guest\n\
        - `machine.json`: sizes, mount options and kernel command lines; arguments of QEMU and Cloud Hypervisor; the \
        disks in the configurations of Cloud Hypervisor, Firecracker and Kata Containers\n\n\
        Quire prints the arguments of QEMU. `quire rmi` and `quire gc` do not affect DIR. Its disk space is free when \
        the files in DIR and in the store are removed.";
    const EXAMPLES: &'static str = "quire bundle debian ./bundle\n  runc run --bundle ./bundle one\n  quire bundle --vm ./machine debian";
    const HAS_SHORT_HELP: bool = false;
    const GROUPS: &'static [option_groups::OptionGroup] = option_groups::CONTAINER;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        bundle(context, self)
    }
}

pub(crate) fn bundle(context: &Context, args: &Bundle) -> anyhow::Result<Answer> {
    if let Some(directory) = &args.vm {
        let (image, wanted) = (args.image.as_str(), &args.wanted);
        let shared_devices = args.shared_devices;
        let request = MachineRequest { image, wanted, shared_devices, directory };
        return machine::bundle(context, &request);
    }
    let directory = args.directory.as_deref().context("the directory is missing")?;
    // Check this first, because it is the easiest error to fix.
    check_empty(directory)?;
    let given = GivenFiles::read(&args.wanted)?;
    #[cfg(feature = "serve")]
    crate::verbs::images::registry::pull::pull_first(context, &args.image, &args.wanted.lazy)?;
    let store = context.open_with(&args.image)?;
    let found = crate::session::resolve::resolve(&store, &args.image)?;
    let opened = crate::session::policy::permit(context, &store, found)?;
    #[cfg(feature = "serve")]
    let opened = crate::verbs::services::lazy::open(context, &store, opened, &args.wanted.lazy)?;
    #[cfg(not(feature = "serve"))]
    let opened = opened.open(&store)?;
    let image = image_config(&store, opened.found())?;
    let wanted = &args.wanted;
    let map = wanted.ids.fixed()?;
    if let Some(map) = &map {
        map.root()?;
    }
    let trust = wanted.trust.wish()?;
    let opened = TrustedImage::to_mount(&store, opened, trust, wish(wanted))?;
    let wish = with_a_place(writable_wish(context, wanted, None))?;
    let place = wish.make(&store, Backing::Whole, &context.search())?;
    let space = container::root::space(wanted.df, place.access())?;
    let terminal = if args.tty { Terminal::New } else { Terminal::None };
    let mut options =
        bundle_options(wanted, &args.command, terminal, "quire", place.access(), given)?;
    options.security.apparmor =
        crate::verbs::containers::security::apparmor(context, &wanted.security)?;
    crate::verbs::containers::security::remark_on_labels(context, wanted);
    if options.network == Network::Pasta {
        bail!(
            "--network pasta: pasta must run as long as the container, but `bundle` starts no \
            programs: make a network by `ip netns`, and use ns:PATH"
        );
    }
    if options.network == Network::Named {
        bail!(
            "--network NAME: netavark connects only containers that Quire runs: make a network by `ip netns`, and use \
            ns:PATH"
        );
    }
    if matches!(options.network, Network::Container(_)) {
        bail!(
            "--network container: a bundle has no containers beside it: use ns:/proc/PID/ns/net, with the PID of \
            `quire ps --json`"
        );
    }
    options.process.check(&options.network).context("--sysctl")?;
    let names = crate::verbs::containers::run::hosts::name_files(&wanted.names, &options)?;
    let volumes = volumes(wanted)?;
    check_volumes(&volumes)?;
    let requested = mounts(wanted);
    let working_dir = options.working_dir.as_ref().unwrap_or(&image.working_dir);
    let points = mount_points(&volumes, &requested, working_dir);
    let places: Vec<_> = names.iter().map(|it| it.place).collect();
    let points = MountPoints::new(options.access, &points, &options.security.devices, &places);
    let ways = Ways::new(context.who(), &wanted.trust);
    let via = ways.via(&wanted.trust);
    let shape = Shape {
        writable: place.writable(),
        map: map.as_ref(),
        space,
        places: &points.places,
        claimed: &points.claimed,
        between: &[],
        between_owners: BetweenOwners::Image,
        via,
        source: None,
    };
    let root = make(&store, &opened, &shape, std::iter::empty())?;
    if map.is_some() {
        // Other users must be able to traverse the folder, because the container's root is mapped to one of them.
        // Set-uid files in it belong to mapped users, which have no rights on the host. Devices in it would work on
        // the host, so the mount forbids them; a container in a user namespace cannot use them in any case.
        let set = MountAttrFlags::MOUNT_ATTR_NODEV;
        root.mount.set(&Attributes { set, ..Attributes::default() })?;
    }
    warm(opened.image(), &root, wanted.warm.into(), context.who(), &|text| context.remark(text));
    let user = wanted.program.user.as_deref().unwrap_or(&image.user);
    let mut user = container::bundle::user::find_user(root.mount.as_fd(), user)?;
    add_groups(root.mount.as_fd(), &mut user, &options.process.groups)?;
    if let Some(map) = &map {
        map.check(&user)?;
    }
    let mut stage = Stage::new(directory, context.who().user, None);
    options.volumes =
        filestores::volumes(volumes, &requested, &Filestores::default(), map.as_ref(), &mut stage)?;
    let owners = if map.is_some() { Owners::Mapped } else { Owners::AsInImage };
    options.map = map;
    options.names = name_mounts(directory, &names)?;
    let (_, mut spec) = configure(root.mount.as_fd(), ROOT, &image, &options, &user)?;
    add_init(&init_wish(wanted), &context.search(), &mut spec)?;
    let was_there = std::fs::symlink_metadata(directory).is_ok();
    let made = make_folder(context, directory, owners)
        .and_then(|folder| publish(&folder, directory, &spec, &names, &root.mount));
    if let Err(error) = made {
        if !was_there {
            let _removed = std::fs::remove_dir(directory);
        }
        return Err(error);
    }
    if owners == Owners::Mapped
        && let Some(closed) = closed_above(directory)
    {
        context.remark(&format!(
            "the container's root, an ordinary user of the host, cannot traverse {}: use `chmod \
            o+x` on it, or choose another directory",
            closed.display()
        ));
    }
    let rootfs = directory.join(ROOT);
    let (directory, rootfs) = (directory.display(), rootfs.display());
    let runtime = Runtime::locate(&context.search(), None, None);
    let runtime = runtime.as_ref().ok().and_then(|it| it.path.file_name());
    let runtime = runtime.map_or_else(|| "crun".into(), |it| it.to_string_lossy());
    context.remark(&format!(
        "run it with `{runtime} run --bundle {directory} NAME`, unmount it with `quire umount \
        {rootfs}`"
    ));
    Ok(Answer::Yes)
}

/// Refuses volumes that only a container of Quire can have.
fn check_volumes(volumes: &[Volume]) -> anyhow::Result<()> {
    for volume in volumes {
        let is_of_host = matches!(volume.source, MountSource::Host(_));
        if !is_of_host || volume.chown {
            bail!(
                "--volume {}: a bundle can have only directories and files of the host, without U",
                volume.destination
            );
        }
    }
    Ok(())
}

/// Returns the mounts of the files for the runtime. They are read-only, because otherwise a container could fill the
/// host's disk through them.
fn name_mounts(directory: &Path, files: &[NameFile]) -> anyhow::Result<Vec<NameMount>> {
    let directory = std::path::absolute(directory)?;
    let mount = |file: &NameFile| {
        let source = directory.join(file.name()).into_os_string().into_string();
        let source =
            source.map_err(|path| anyhow!("path {path:?} is not UTF-8, which runtimes need"))?;
        Ok(NameMount { place: file.place, source, access: Access::ReadOnly })
    };
    files.iter().map(mount).collect()
}

/// Owners of the root's files on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owners {
    /// The owners that the image states, including root.
    AsInImage,
    /// The users of a map.
    Mapped,
}

/// Opens the directory of the bundle, and makes it if it does not exist. Unless owners are mapped, only the
/// directory's owner can access it. The container needs set-uid files, file capabilities and devices of the image, so
/// these take effect in the root, but they must not be available to other users of the host.
fn make_folder(context: &Context, directory: &Path, owners: Owners) -> anyhow::Result<File> {
    let failed = || format!("cannot make \"{}\"", directory.display());
    if let Some(parent) = directory.parent() {
        std::fs::create_dir_all(parent).with_context(failed)?;
    }
    let mode = if owners == Owners::Mapped { 0o755 } else { 0o700 };
    match DirBuilder::new().mode(mode).create(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        result => result.with_context(failed)?,
    }
    let folder = File::open(directory)
        .with_context(|| format!("cannot open \"{}\"", directory.display()))?;
    let found = folder.metadata()?;
    let user = context.who().user;
    if found.uid() != user {
        bail!(
            "\"{}\" belongs to user {}, who could reach set-uid files and devices of the image: \
            use a directory that belongs to you, or one that does not exist yet",
            directory.display(),
            found.uid()
        );
    }
    if owners == Owners::AsInImage && found.mode() & 0o077 != 0 {
        folder
            .set_permissions(std::fs::Permissions::from_mode(0o700))
            .with_context(|| format!("cannot change the mode of \"{}\"", directory.display()))?;
        context.remark(&format!(
            "set the mode of \"{}\" to 0700, because set-uid files and devices of the image take \
            effect in its rootfs",
            directory.display()
        ));
    }
    Ok(folder)
}

/// Writes the configuration and attaches the root, both in the open directory, because its path may have changed.
fn publish(
    folder: &File,
    directory: &Path,
    spec: &RuntimeSpec,
    names: &[NameFile],
    root: &Detached,
) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(spec)? + "\n";
    let mut files: Vec<_> = names.iter().map(|it| (it.name(), &*it.bytes)).collect();
    files.push((CONFIG, text.as_bytes()));
    let make = || -> anyhow::Result<()> {
        let failed = || format!("cannot make \"{}\"", directory.join(ROOT).display());
        rustix::fs::mkdirat(folder, ROOT, Mode::from_raw_mode(0o755)).with_context(failed)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let rootfs = rustix::fs::openat(folder, ROOT, flags, Mode::empty()).with_context(failed)?;
        for (name, bytes) in &files {
            let failed = || format!("cannot write \"{}\"", directory.join(name).display());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let mode = Mode::from_raw_mode(0o644);
            let file = rustix::fs::openat(folder, *name, flags, mode).with_context(failed)?;
            // The umask is ignored, because all users must be able to look up names.
            rustix::fs::fchmod(&file, mode).with_context(failed)?;
            File::from(file).write_all(bytes).with_context(failed)?;
        }
        // The root is attached last, because after a later failure it would have to be unmounted.
        Ok(root.attach(rootfs.as_fd())?)
    };
    let made = make();
    if made.is_err() {
        // Restore the empty directory: all files in it are ours.
        for (name, _) in &files {
            let _removed = rustix::fs::unlinkat(folder, *name, AtFlags::empty());
        }
        let _removed = rustix::fs::unlinkat(folder, ROOT, AtFlags::REMOVEDIR);
    }
    made
}

/// Returns the first directory on the path that other users cannot pass through.
fn closed_above(directory: &Path) -> Option<PathBuf> {
    let path = std::fs::canonicalize(directory).ok()?;
    let mut above: Vec<_> = path.ancestors().collect();
    above.reverse();
    let is_open =
        |path: &Path| std::fs::metadata(path).is_ok_and(|it| it.permissions().mode() & 0o001 != 0);
    above.into_iter().find(|path| !is_open(path)).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};

    use super::*;

    /// Options that also concern virtual machines, and those whose environment variable clap takes for an option.
    const ACCEPTED: &[&str] = &[
        "vm",
        "image",
        "writable",
        "read_only",
        "verity",
        "digest",
        "pull",
        "keep_index",
        "authfile",
        "certs_dir",
        "plain_http",
        "tls_verify",
        "help",
        "domain",
        "mount_service",
        "shared_devices",
    ];

    #[test]
    fn each_option_is_accepted_or_refused() {
        let command = Bundle::augment_args(Command::default());
        let vm = command.get_arguments().find(|it| it.get_id() == "vm").unwrap();
        let refused = command.get_arg_conflicts_with(vm);
        for arg in command.get_arguments() {
            let id = arg.get_id().as_str();
            let is_refused = refused.iter().any(|it| it.get_id() == id);
            assert_ne!(is_refused, ACCEPTED.contains(&id), "{id}");
        }
    }
}
