//! `ls -lR` over a developer's root file system, in several file systems.

use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use super::command::{cmd, more, run};
use super::measure::{Contestant, Rules};
use super::report::Report;
use crate::{Context, tree};
use rig::inputs::{self, sid};
use rig::process::quiet;

/// Mounts a file system at the given folder.
type Mount<'a> = &'a dyn Fn(&Path) -> Result<()>;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let work = context.work;
    let dump = inputs::dump(context.cache, "cs9-developer")?;
    let sid = sid::make(context.cache, false)?;
    let tree = work.join("tree");
    tree::unpack(&std::fs::read(&dump)?, &tree)?;
    let (erofs, composefs) = (work.join("erofs.img"), work.join("composefs.img"));
    // Chunks preserve the holes, because the files' contents are not measured.
    let mkfs = sid.command("mkfs.erofs")?;
    quiet(&mut more!(mkfs, "--quiet --chunksize=1048576 {erofs} {tree}"))?;
    run!(crate::named(context, "mkcomposefs")?, "--from-file {dump} {composefs}")?;
    let (objects, lower) = (work.join("objects"), work.join("lower"));
    std::fs::create_dir(&objects)?;
    let overlay = |target: &Path| mount_composefs(&composefs, &lower, &objects, target);
    let ways: [(&str, PathBuf, Mount<'_>); 4] = [
        ("ext4 folder", tree, &|_| Ok(())),
        ("erofs by mkfs.erofs", work.join("a"), &|target| mount_erofs(&erofs, target)),
        ("composefs image, erofs alone", work.join("b"), &|at| mount_erofs(&composefs, at)),
        ("composefs image + overlay", work.join("c"), &overlay),
    ];
    let mut tables = Vec::new();
    for cold in [true, false] {
        let mut contestants = Vec::new();
        for (name, root, mount) in &ways {
            std::fs::create_dir_all(root)?;
            let list = move || cmd!("ls -lR {root}");
            let before = move || {
                mount(root)?;
                if cold { Ok(()) } else { quiet(&mut list()).map(drop) }
            };
            let is_mount = *name != "ext4 folder";
            let after = move || if is_mount { unmount(root, UnmountFlags::DETACH) } else { Ok(()) };
            let after = move || Ok(after()?);
            contestants.push(Contestant::new(*name, list).before(before).after(after));
        }
        let title = if cold { "Cold" } else { "Warm" };
        tables.push(Rules::reads(context.runs, cold).race(title, contestants)?);
    }
    let found = tables.iter().filter_map(|it| it.titled_ratio("composefs image + overlay", "ext4"));
    Ok(Report {
        name: "walk",
        about: String::from(
            "`ls -lR` of 64,246 entries. Cold: after dropping the page cache; its memory is all that the kernel charges, so \
             with inodes, dentries and cached metadata. Warm: after one walk; its memory is `ls`'s own.",
        ),
        findings: found.collect(),
        tables,
        ..Report::default()
    })
}

/// Mounts the image file directly, without a loop device, and with direct I/O so that its data is cached only once.
pub(super) fn mount_erofs(image: &Path, target: &Path) -> Result<()> {
    mount("erofs", &[("source", image)], &["ro", "directio"], target)
}

fn mount_composefs(image: &Path, lower: &Path, objects: &Path, target: &Path) -> Result<()> {
    std::fs::create_dir_all(lower)?;
    mount_erofs(image, lower)?;
    let on = Path::new("on");
    let options =
        [("metacopy", on), ("redirect_dir", on), ("lowerdir+", lower), ("datadir+", objects)];
    mount("overlay", &options, &[], target)?;
    Ok(unmount(lower, UnmountFlags::DETACH)?)
}

fn mount(kind: &str, options: &[(&str, &Path)], flags: &[&str], target: &Path) -> Result<()> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    options.iter().try_for_each(|(key, value)| fsconfig_set_string(&context, *key, *value))?;
    flags.iter().try_for_each(|it| fsconfig_set_flag(&context, *it))?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(&mount, "", rustix::fs::CWD, target, flags)?)
}
