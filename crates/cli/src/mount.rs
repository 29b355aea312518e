//! `mount` and `umount`.

use anyhow::{Context as _, bail};
use container::bundle::Access;
use container::root::filestore::Backing as FileBacking;
use container::root::{SOURCE, Shape, TrustedImage, WritableWish, make, space, warm};
use kernel::mount::{Attributes, MountAttrFlags, Unmount};
#[cfg(feature = "serve")]
use {kernel::process::UserNamespace, serve::fuse::host::Executable};

use crate::Answer;
use crate::args::{self, MountWord};
use crate::context::Context;
use crate::own_mounts::{all_mounted, is_ours};
use crate::report;
use crate::rootless::Ways;
use crate::specification::SpecificationReport;
use crate::target;

pub(crate) fn mount(context: &Context, args: &args::Mount) -> anyhow::Result<Answer> {
    let Some(directory) = &args.directory else { return specify(context, args) };
    // First, since this is the easiest to mend.
    target::check_directory(directory)?;
    #[cfg(feature = "serve")]
    crate::pull::pull_first(context, &args.name, &args.lazy)?;
    let store = context.open_with(&args.name)?;
    let found = crate::resolve::resolve(&store, &args.name)?;
    let permitted = crate::policy::permit(context, &store, found)?;
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
    if serve(context, args, &image, directory)? {
        return Ok(Answer::Yes);
    }
    let place = args.writable.make(&store, FileBacking::Whole, &context.search())?;
    let space = space(args.df, place.access())?;
    let flags = flags(&args.options, place.access())?;
    let ways = Ways::new(context.who(), &args.trust);
    let via = ways.via(&args.trust);
    let (writable, map) = (place.writable(), map.as_ref());
    let shape =
        Shape { writable, map, space, places: &[], claimed: &[], between: &[], via, source: None };
    let root = make(&store, &image, &shape, std::iter::empty())?;
    root.mount.set(&Attributes { set: flags, ..Attributes::default() })?;
    warm(image.image(), &root, args.warm.into(), context.who(), &|text| context.remark(text));
    root.mount.attach_at(directory)?;
    Ok(Answer::Yes)
}

/// Mounts by FUSE alone, if that is the only way, or asked for; answers whether it has.
#[cfg(feature = "serve")]
fn serve(
    context: &Context,
    args: &args::Mount,
    image: &TrustedImage,
    directory: &std::path::Path,
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
        let mount = crate::fuse::mount_for_root(who, image)?;
        mount.set(&Attributes { set: flags, ..Attributes::default() })?;
        mount.attach_at(directory)?;
        return Ok(true);
    }
    image.check()?;
    let source = format!("{SOURCE}{}", image.name());
    let never = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    if !flags.contains(never) {
        bail!("--options suid and dev are for root: leave them out");
    }
    let executable = match flags.contains(MountAttrFlags::MOUNT_ATTR_NOEXEC) {
        true => Executable::No,
        false => Executable::Yes,
    };
    crate::fuse::mount_for_user(who, image, &source, directory, executable)?;
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
    for directory in &args.directories {
        let path = std::fs::canonicalize(directory)
            .with_context(|| format!("cannot find \"{}\"", directory.display()))?;
        // What is mounted last on a path counts.
        let mount = all_mounted()?.into_iter().rfind(|it| it.point == path);
        let mount =
            mount.with_context(|| format!("nothing is mounted on \"{}\"", directory.display()))?;
        if !is_ours(&mount) {
            bail!(
                "the mount on \"{}\" is not Quire's but \"{}\": use umount",
                directory.display(),
                mount.source
            );
        }
        match context.who().user {
            #[cfg(feature = "serve")]
            1.. if mount.kind.starts_with("fuse") => {
                crate::fuse::unmount_for_user(&path, args.lazy)?;
            }
            _ => kernel::mount::unmount(&path, how)?,
        }
    }
    Ok(Answer::Yes)
}
