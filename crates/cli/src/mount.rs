//! `mount` and `umount`.

use anyhow::{Context as _, bail};
use container::bundle::Access;
use container::mounted::MountNote;
use container::root::filestore::Backing as FileBacking;
use container::root::{Shape, TrustedImage, WritableWish, make, space, warm};
use kernel::mount::{Attributes, MountAttrFlags, Unmount};
#[cfg(feature = "serve")]
use {kernel::process::UserNamespace, serve::fuse::host::Executable};

use crate::Answer;
use crate::args::{self, MountWord};
use crate::context::Context;
use crate::own_mounts::{MountTarget, OwnMounts};
use crate::report;
use crate::rootless::Ways;
use crate::specification::SpecificationReport;
use crate::target;
use crate::writable::with_a_place;

pub(crate) fn mount(context: &Context, args: &args::Mount) -> anyhow::Result<Answer> {
    let Some(directory) = &args.directory else { return specify(context, args) };
    // First, since this is the easiest to mend.
    target::check_directory(directory)?;
    #[cfg(feature = "serve")]
    crate::pull::pull_first(context, &args.name, &args.lazy)?;
    let store = context.open_with(&args.name)?;
    let found = crate::resolve::resolve(&store, &args.name)?;
    let image = found.image;
    let permitted = crate::policy::permit(context, &store, found)?;
    let own = OwnMounts::of(context.who());
    let note = MountNote::new(&image, &own.source(&args.name), options(args)?);
    let Some(mut target) = MountTarget::find(directory, own, note, args.replace)? else {
        let directory = directory.display();
        context.remark(&format!("{} is mounted on \"{directory}\" already", args.name));
        return Ok(Answer::Yes);
    };
    #[cfg(feature = "serve")]
    let permitted = crate::lazy::open(context, &store, permitted, &args.lazy)?;
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
    if matches!(args.writable, WritableWish::Directory(..)) {
        target.clear()?;
    }
    let wish = with_a_place(args.writable.clone())?;
    let layer = wish.make(&store, FileBacking::Whole, &context.search())?;
    let space = space(args.df, layer.access())?;
    let flags = flags(&args.options, layer.access())?;
    let ways = Ways::new(context.who(), &args.trust);
    let via = ways.via(&args.trust);
    let (writable, map, source) = (layer.writable(), map.as_ref(), Some(target.source()));
    let shape =
        Shape { writable, map, space, places: &[], claimed: &[], between: &[], via, source };
    let root = make(&store, &image, &shape, std::iter::empty())?;
    root.mount.set(&Attributes { set: flags, ..Attributes::default() })?;
    warm(image.image(), &root, args.warm.into(), context.who(), &|text| context.remark(text));
    target.attach(context, &root.mount)?;
    Ok(Answer::Yes)
}

/// The options that change what programs see in a mount, for comparison with those of another one.
fn options(args: &args::Mount) -> anyhow::Result<String> {
    let flags = flags(&args.options, args.writable.access())?.bits();
    let (writable, df, map, trust) = (&args.writable, args.df, &args.userns, &args.trust);
    Ok(format!("{flags:#x} {writable:?} df={df} {map:?} {trust:?}"))
}

/// Mounts by FUSE alone, if that is the only way, or asked for; answers whether it has.
#[cfg(feature = "serve")]
fn serve(
    context: &Context,
    args: &args::Mount,
    image: &TrustedImage,
    target: &mut MountTarget<'_>,
) -> anyhow::Result<bool> {
    use crate::args::ViaWord;
    let who = context.who();
    match (who.namespace, args.trust.via) {
        // In a namespace it is a layer like others.
        (UserNamespace::Other, _) if who.can_mount_in_its_namespace() => return Ok(false),
        (UserNamespace::Initial, ViaWord::Auto) if who.user == 0 => return Ok(false),
        (_, way @ (ViaWord::Tree | ViaWord::Service)) => bail!(
            "--via {} is for user namespaces: use it in one (`unshare --user --map-root-user --mount`), or leave it out",
            if way == ViaWord::Tree { "tree" } else { "service" }
        ),
        (UserNamespace::Initial | UserNamespace::Other, _) => {}
    }
    if args.writable != WritableWish::None || args.df || args.userns.is_some() {
        bail!(
            "--writable, --df and --userns do not work by FUSE alone: use them as root, or in a user namespace (`unshare \
             --user --map-auto --map-root-user --mount`)"
        );
    }
    let flags = flags(&args.options, Access::ReadOnly)?;
    if who.is_host_root() {
        let mount = crate::fuse::mount_for_root(who, image, target.source())?;
        mount.set(&Attributes { set: flags, ..Attributes::default() })?;
        target.attach(context, &mount)?;
        return Ok(true);
    }
    image.check()?;
    let never = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    if !flags.contains(never) {
        bail!("--options suid and dev are for root: leave them out");
    }
    let executable = match flags.contains(MountAttrFlags::MOUNT_ATTR_NOEXEC) {
        true => Executable::No,
        false => Executable::Yes,
    };
    let Some(_turn) = target.turn(context)? else { return Ok(true) };
    target.clear()?;
    crate::fuse::mount_for_user(who, image, target.source(), target.directory(), executable)?;
    target.note(context);
    Ok(true)
}

/// Says how the image is mounted.
fn specify(context: &Context, args: &args::Mount) -> anyhow::Result<Answer> {
    #[cfg(feature = "serve")]
    if args.lazy.lazy.is_some() {
        bail!(
            "--specification cannot be used with --lazy, since others can mount only an image that is here as a whole: \
             leave --lazy out"
        );
    }
    let store = context.open_with(&args.name)?;
    let found = crate::resolve::resolve(&store, &args.name)?;
    let permitted = crate::policy::permit(context, &store, found)?.open(&store)?;
    let trust = args.trust.wish()?;
    let image = TrustedImage::to_mount(&store, permitted, trust, Some(&WritableWish::None))?;
    report::json_line(&SpecificationReport::of(&image)?)?;
    Ok(Answer::Yes)
}

/// The attributes that `--options` ask for. Every user of the host can reach the mount, so what an image says of root,
/// capabilities and devices has no effect unless that is asked for.
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

pub(crate) fn umount(context: &Context, args: &args::Umount) -> anyhow::Result<Answer> {
    let how = if args.lazy { Unmount::Lazy } else { Unmount::Now };
    let own = OwnMounts::of(context.who());
    for directory in &args.directories {
        let path = std::fs::canonicalize(directory)
            .with_context(|| format!("cannot find \"{}\"", directory.display()))?;
        let mount = own.at(&path)?;
        let mount =
            mount.with_context(|| format!("nothing is mounted on \"{}\"", directory.display()))?;
        match mount {
            Ok(mount) => own.unmount(&mount, how)?,
            Err(other) => bail!(
                "the mount on \"{}\" is not Quire's but \"{}\": use umount",
                directory.display(),
                other.source
            ),
        }
    }
    Ok(Answer::Yes)
}
