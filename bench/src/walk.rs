//! `ls -lR` over a developer's root file system, in several file systems.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::report::{Report, Table, ratio};
use crate::Context;
use crate::tree;
use rig::inputs::{self, sid};
use rig::process;

/// Mounts a file system at the given folder.
type Mount = dyn Fn(&Path) -> Result<()>;

/// A mounted file system with the tree.
struct Mounted {
    name: &'static str,
    root: PathBuf,
    mount: Box<Mount>,
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let dump = inputs::dump(context.cache, "cs9-developer")?;
    let sid = sid::make(context.cache, false)?;
    let place = |name: &str| context.work.join(name);
    let tree = place("tree");
    tree::unpack(&std::fs::read(&dump)?, &tree)?;
    let (erofs, composefs) = (place("erofs.img"), place("composefs.img"));
    // Chunks preserve the holes, because the files' contents are not measured.
    let mut mkfs = sid.command("mkfs.erofs")?;
    process::quiet(mkfs.args(["--quiet", "--chunksize=1048576"]).arg(&erofs).arg(&tree))?;
    let mut mkcomposefs = Command::new(crate::named(context, "mkcomposefs")?);
    process::quiet(mkcomposefs.arg("--from-file").arg(&dump).arg(&composefs))?;
    let objects = place("objects");
    std::fs::create_dir(&objects)?;
    let file = |image: &Path| {
        let image = image.to_owned();
        Box::new(move |target: &Path| mount_erofs(&image, target))
    };
    let overlay = {
        let (image, lower) = (composefs.clone(), place("lower"));
        move |target: &Path| mount_composefs(&image, &lower, &objects, target)
    };
    let ways = [
        Mounted { name: "ext4 folder", root: tree, mount: Box::new(|_| Ok(())) },
        Mounted { name: "erofs by mkfs.erofs", root: place("a"), mount: file(&erofs) },
        Mounted { name: "composefs image, erofs alone", root: place("b"), mount: file(&composefs) },
        Mounted { name: "composefs image + overlay", root: place("c"), mount: Box::new(overlay) },
    ];
    let mut tables = Vec::new();
    for cold in [true, false] {
        let mut contestants = Vec::new();
        for way in &ways {
            std::fs::create_dir_all(&way.root)?;
            let contestant = Contestant::new(way.name, || {
                let mut ls = Command::new("ls");
                ls.arg("-lR").arg(&way.root);
                Ok(vec![ls])
            });
            let mount = move || {
                (way.mount)(&way.root)?;
                if cold {
                    return Ok(());
                }
                process::quiet(Command::new("ls").arg("-lR").arg(&way.root)).map(drop)
            };
            contestants.push(contestant.before(mount).after(|| {
                if way.name != "ext4 folder" {
                    unmount(&way.root, UnmountFlags::DETACH)?;
                }
                Ok(())
            }));
        }
        let memory = if cold { Memory::WithCache } else { Memory::LargestProcess };
        let rules = Rules { runs: context.runs, sync: None, cold, pace: Pace::Turns, memory };
        let outcomes = measure(&rules, &mut contestants)?;
        let title = String::from(if cold { "Cold" } else { "Warm" });
        tables.push(Table { title, memory, runs: rules.runs, outcomes });
    }
    let findings = tables.iter().filter_map(|table| {
        let found = ratio(&table.outcomes, "composefs image + overlay", "ext4")?;
        Some(format!("{}: {found}", table.title))
    });
    Ok(Report {
        name: "walk",
        about: String::from(
            "`ls -lR` of 64,246 entries. Cold: after dropping the page cache; its memory is all that the kernel charges, so \
             with inodes, dentries and cached metadata. Warm: after one walk; its memory is `ls`'s own.",
        ),
        findings: findings.collect(),
        tables,
        sizes: Vec::new(),
    })
}

/// Mounts the image file directly, without a loop device, and with direct I/O so that its data is cached only once.
pub(super) fn mount_erofs(image: &Path, target: &Path) -> Result<()> {
    let context = fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", image)?;
    fsconfig_set_flag(&context, "ro")?;
    fsconfig_set_flag(&context, "directio")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&mount, "", rustix::fs::CWD, target, flags)?;
    Ok(())
}

fn mount_composefs(image: &Path, lower: &Path, objects: &Path, target: &Path) -> Result<()> {
    std::fs::create_dir_all(lower)?;
    mount_erofs(image, lower)?;
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("metacopy", "on"), ("redirect_dir", "on")] {
        fsconfig_set_string(&context, key, value)?;
    }
    fsconfig_set_string(&context, "lowerdir+", lower)?;
    fsconfig_set_string(&context, "datadir+", objects)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&mount, "", rustix::fs::CWD, target, flags)?;
    unmount(lower, UnmountFlags::DETACH)?;
    Ok(())
}
