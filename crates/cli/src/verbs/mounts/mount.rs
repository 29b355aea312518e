//! `mount` and `umount`: mount and unmount images.

use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueEnum, ValueHint};
use container::bundle::Access;
use container::mounted::MountNote;
use container::root::filestore::Backing as FileBacking;
use container::root::{BetweenOwners, Shape, TrustedImage, WritableChoice, make, space, warm};
use image::verity::ImageId;
use kernel::mount::{Attributes, MountAttrFlags};
use oci::source::ImageSource;
use store::{OpenOptions, Store, Transaction};
use transfer::import::{BUDGET, ImportError, ImportOptions};

use crate::Answer;
use crate::args::FormOptions;
#[cfg(feature = "serve")]
use crate::args::LazyOptions;
use crate::args::userns::UserNs;
use crate::args::writable::{with_a_place, writable};
use crate::args::{Trust, WARM, Warm};
use crate::output::report;
use crate::session::context::Context;
use crate::session::forms::choose;
use crate::session::resources::JobResources;
use crate::session::target;
use crate::session::ways::Ways;
use crate::verbs::mounts::mount_spec::SpecificationReport;
use crate::verbs::mounts::own_mounts::{MountTarget, OwnMounts};
use crate::verbs::{VerbArgs, option_groups};
#[cfg(feature = "serve")]
use {
    crate::session::system_programs::fusermount, anyhow::Error, kernel::process::UserNamespace,
    serve::fuse::FuseServer, serve::fuse::fusermount::Executable,
};

/// Options that restrict files of a mount, in the words of mount(8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum MountWord {
    /// Honour set-uid files and file capabilities
    Suid,
    /// Ignore set-uid files and file capabilities: the default
    NoSuid,
    /// Allow to open device nodes
    Dev,
    /// Forbid to open device nodes: the default
    NoDev,
    /// Allow to execute programs: the default
    Exec,
    /// Forbid to execute programs
    NoExec,
    /// Read-only: the default, and refused together with --writable
    Ro,
}

#[derive(Debug, Args)]
pub(crate) struct Mount {
    /// A name, an image id or its first digits (6 or more); erofs:FILE or disk:FILE, which is imported first
    pub(crate) name: String,
    /// An existing directory
    #[arg(value_hint = ValueHint::DirPath, required_unless_present = "specification")]
    pub(crate) directory: Option<PathBuf>,
    /// Unmount another image, or the same image with other options, from the directory first
    #[arg(long)]
    pub(crate) replace: bool,
    /// Print the data that another program needs to mount the image by itself, as JSON, and mount nothing
    #[arg(
        long,
        conflicts_with_all = ["directory", "replace", "options", "writable", "df", "userns", "warm"]
    )]
    pub(crate) specification: bool,
    #[arg(
        short,
        long,
        value_enum,
        value_name = "OPTION,…",
        value_delimiter = ',',
        hide_possible_values = true,
        help = "Mount options as in mount(8), separated by commas; the last one wins: suid or nosuid, dev or nodev, exec \
                or noexec, ro. The default is nosuid,nodev,exec: every user of the host can reach the mount, so set-uid \
                files, file capabilities and devices of the image have no effect"
    )]
    pub(crate) options: Vec<MountWord>,
    #[command(flatten)]
    pub(crate) trust: Trust,
    #[arg(
        long,
        value_name = "KIND",
        default_value = "none",
        value_parser = writable,
        help = "Choose where changes go. The default is a read-only mount\n\
                - none: nowhere\n\
                - memory[,size=SIZE]: memory, by default half of the host's\n\
                - self[,size=SIZE][,durable]: a file system in one unnamed file, which is removed at unmount. Its \
                whole size is allocated at once, by default an eighth of the free space\n\
                - dir=PATH[,durable]: the directories `upper` and `work` below PATH, which stay"
    )]
    pub(crate) writable: WritableChoice,
    /// Let `df` show free space instead of a full file system. The root directory is then merged from two, and takes
    /// longer to list
    #[arg(long)]
    pub(crate) df: bool,
    /// Map the image's owners to users of the host: CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…], for users and groups
    /// alike. Owners that are not in the map appear as `nobody` (65534)
    #[arg(long, value_name = "MAP")]
    pub(crate) userns: Option<UserNs>,
    #[arg(long, value_enum, value_name = "WHAT", default_value_t, help = WARM)]
    pub(crate) warm: Warm,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    pub(crate) lazy: LazyOptions,
}

impl VerbArgs for Mount {
    const NAME: &'static str = "mount";
    const ABOUT: &'static str = "Mount an image on a directory";
    const GROUPS: &'static [option_groups::OptionGroup] = option_groups::MOUNT;
    const EXAMPLES: &'static str = "quire mount debian /mnt\n  quire mount --writable memory --replace debian /mnt\n  quire mount --replace erofs:debian.erofs /mnt";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        mount(context, self)
    }
}

pub(crate) fn mount(context: &Context, args: &Mount) -> anyhow::Result<Answer> {
    // Check this first, because it is the easiest error to fix.
    if let Some(directory) = &args.directory {
        target::check_directory(directory)?;
    }
    let Some(source) = target::file_source(context, OsStr::new(&args.name))? else {
        return mount_of(context, args, &args.name);
    };
    let name = args.name.escape_debug();
    #[cfg(feature = "serve")]
    if args.lazy.lazy.is_some() || args.lazy.pull.pull.is_some() {
        bail!("--lazy and --pull need an image of a registry, not {name}: leave them out");
    }
    if args.specification {
        bail!("--specification needs an image of the store: `quire import {name} NAME` stores it");
    }
    // A store is created only for a file that exists.
    transfer::import::check(&source)?;
    let store = context.open(OpenOptions::create())?;
    // Until the image is mounted, `gc` keeps it because of this transaction.
    let keeper = store.begin()?;
    let image = import_unnamed(context, &store, &source, &keeper).map_err(|error| {
        match error.downcast_ref() {
            // The objects of a composefs image are in a directory, for which `mount` has no option.
            Some(ImportError::Missing { .. } | ImportError::DumpFile { .. }) => {
                error.context(format!(
                    "cannot mount {name}: `quire import --objects DIR {name} NAME` imports it with the directory of \
                    its objects"
                ))
            }
            _ => error,
        }
    })?;
    mount_of(context, args, &image.to_string())
}

/// Imports a file that is mounted once. The image gets no name, so `gc` removes it after it is unmounted.
fn import_unnamed(
    context: &Context,
    store: &Store,
    source: &ImageSource,
    keeper: &Transaction<'_>,
) -> anyhow::Result<ImageId> {
    let form = choose(&FormOptions::default(), store)?;
    let options =
        ImportOptions { unnamed: true, keeper: Some(keeper), form, ..ImportOptions::default() };
    let done = JobResources::new(context, store, BUDGET)
        .during(|environment| transfer::import::import(store, source, environment, &options))??;
    Ok(done.image)
}

/// Mounts the image with this name or id.
fn mount_of(context: &Context, args: &Mount, name: &str) -> anyhow::Result<Answer> {
    let Some(directory) = &args.directory else { return specify(context, args, name) };
    #[cfg(feature = "serve")]
    crate::verbs::images::registry::pull::pull_first(context, name, &args.lazy)?;
    let store = context.open_with(name)?;
    let found = crate::session::resolve::resolve(&store, name)?;
    let image = found.image;
    let permitted = crate::session::policy::permit(context, &store, found)?;
    let own = OwnMounts::for_user(context.who());
    let note = MountNote::new(&image, &own.source(&args.name), options(args)?);
    let Some(mut target) = MountTarget::for_directory(directory, own, note, args.replace)? else {
        let directory = directory.display();
        context.remark(&format!("{} is already mounted on \"{directory}\"", args.name));
        return Ok(Answer::Yes);
    };
    #[cfg(feature = "serve")]
    let permitted = crate::verbs::services::lazy::open(context, &store, permitted, &args.lazy)?;
    #[cfg(not(feature = "serve"))]
    let permitted = permitted.open(&store)?;
    let map = match &args.userns {
        Some(wish) => wish.fixed()?,
        None => None,
    };
    let trust = args.trust.wish()?;
    let image = TrustedImage::to_mount(&store, permitted, trust, Some(&args.writable))?;
    #[cfg(feature = "serve")]
    if serve(context, args, &image, &mut target)? {
        return Ok(Answer::Yes);
    }
    // The old mount may write to the same directory.
    if matches!(args.writable, WritableChoice::Directory(..)) {
        target.clear()?;
    }
    let wish = with_a_place(args.writable.clone())?;
    let layer = wish.make(&store, FileBacking::Whole, &context.search())?;
    let space = space(args.df, layer.access())?;
    let flags = flags(&args.options, layer.access())?;
    let ways = Ways::new(context.who(), &args.trust);
    let via = ways.via(&args.trust);
    let (writable, map, source) = (layer.writable(), map.as_ref(), Some(target.source()));
    let shape = Shape {
        writable,
        map,
        space,
        places: &[],
        claimed: &[],
        between: &[],
        between_owners: BetweenOwners::Image,
        via,
        source,
    };
    let root = make(&store, &image, &shape, std::iter::empty())?;
    root.mount.set(&Attributes { set: flags, ..Attributes::default() })?;
    warm(image.image(), &root, args.warm.into(), context.who(), &|text| context.remark(text));
    target.attach(context, &root.mount)?;
    Ok(Answer::Yes)
}

/// Returns the options that change the view of programs in a mount, for comparison with another mount.
fn options(args: &Mount) -> anyhow::Result<String> {
    let flags = flags(&args.options, args.writable.access())?.bits();
    let (writable, df, map, trust) = (&args.writable, args.df, &args.userns, &args.trust);
    Ok(format!("{flags:#x} {writable:?} df={df} {map:?} {trust:?}"))
}

/// Mounts by FUSE if this is the only way, or if the user requested it. Returns whether it has mounted.
#[cfg(feature = "serve")]
fn serve(
    context: &Context,
    args: &Mount,
    image: &TrustedImage,
    target: &mut MountTarget<'_>,
) -> anyhow::Result<bool> {
    use crate::args::ViaWord;
    let who = context.who();
    match (who.namespace, args.trust.via) {
        // In a user namespace, a FUSE mount is used as a layer of a root, which `Ways` makes.
        (UserNamespace::Other, _) if who.can_mount_in_its_namespace() => return Ok(false),
        (UserNamespace::Initial, ViaWord::Auto) if who.user == 0 => return Ok(false),
        (_, way @ (ViaWord::Tree | ViaWord::Service | ViaWord::FuseObjects)) => bail!(
            "--via {} works only in a user namespace: use it in one (`unshare --user \
            --map-root-user --mount`), or leave it out",
            match way {
                ViaWord::Tree => "tree",
                ViaWord::FuseObjects => "fuse-objects",
                _ => "service",
            }
        ),
        (UserNamespace::Initial | UserNamespace::Other, _) => {}
    }
    if args.writable != WritableChoice::None || args.df || args.userns.is_some() {
        bail!(
            "--writable, --df and --userns do not work with a FUSE mount: use them as root, or in \
            a user namespace (`unshare --user --map-auto --map-root-user --mount`)"
        );
    }
    let flags = flags(&args.options, Access::ReadOnly)?;
    if who.is_host_root() {
        let mount =
            FuseServer::new(who).mount(image, target.source()).map_err(Error::from_boxed)?;
        mount.set(&Attributes { set: flags, ..Attributes::default() })?;
        target.attach(context, &mount)?;
        return Ok(true);
    }
    image.check()?;
    let never = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    if !flags.contains(never) {
        bail!("--options suid and dev need root: leave them out");
    }
    let executable = match flags.contains(MountAttrFlags::MOUNT_ATTR_NOEXEC) {
        true => Executable::No,
        false => Executable::Yes,
    };
    let Some(_turn) = target.turn(context)? else { return Ok(true) };
    target.clear()?;
    let program = fusermount()?;
    let (source, directory) = (target.source(), target.directory());
    let mounted = FuseServer::new(who).mount_at(image, source, &program, directory, executable);
    mounted.map_err(Error::from_boxed)?;
    target.note(context);
    Ok(true)
}

/// Prints how another program can mount the image.
fn specify(context: &Context, args: &Mount, name: &str) -> anyhow::Result<Answer> {
    #[cfg(feature = "serve")]
    if args.lazy.lazy.is_some() {
        bail!(
            "--specification cannot be used with --lazy, because others can mount only an image \
            that is completely downloaded: leave --lazy out"
        );
    }
    let store = context.open_with(name)?;
    let found = crate::session::resolve::resolve(&store, name)?;
    let permitted = crate::session::policy::permit(context, &store, found)?.open(&store)?;
    let trust = args.trust.wish()?;
    let image = TrustedImage::to_mount(&store, permitted, trust, Some(&WritableChoice::None))?;
    report::json_line(&SpecificationReport::from_image(&image)?)?;
    Ok(Answer::Yes)
}

/// Returns the attributes for `--options`. Every user of the host can reach the mount, so set-uid bits,
/// capabilities and devices of the image are ignored unless the options ask for them.
pub(crate) fn flags(words: &[MountWord], access: Access) -> anyhow::Result<MountAttrFlags> {
    let [nosuid, nodev, noexec] = [
        MountAttrFlags::MOUNT_ATTR_NOSUID,
        MountAttrFlags::MOUNT_ATTR_NODEV,
        MountAttrFlags::MOUNT_ATTR_NOEXEC,
    ];
    let mut flags = nosuid | nodev;
    for word in words {
        match word {
            MountWord::Suid => flags.remove(nosuid),
            MountWord::NoSuid => flags.insert(nosuid),
            MountWord::Dev => flags.remove(nodev),
            MountWord::NoDev => flags.insert(nodev),
            MountWord::Exec => flags.remove(noexec),
            MountWord::NoExec => flags.insert(noexec),
            MountWord::Ro if access == Access::ReadOnly => {}
            MountWord::Ro => bail!("--options ro contradicts --writable: leave one of them out"),
        }
    }
    Ok(flags)
}
