//! Mount and unmount, timed as whole processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::report::{Report, Table, ratio};
use crate::Context;
use rig::inputs::{self, sid};
use rig::process;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let store = import(context, &inputs::debian_small(context.cache, false)?)?;
    let sid = sid::make(context.cache, false)?;
    let image = only_file(&store.join("images"))?;
    let target = context.work.join("root");
    fs::create_dir(&target)?;
    let umount = || {
        let mut umount = Command::new("umount");
        umount.arg(&target);
        umount
    };
    let quire = |verb: &str| {
        let mut quire = Command::new(context.quire);
        quire.arg("--store").arg(&store).arg(verb);
        quire
    };
    let ours = || {
        let (mut mount, mut umount) = (quire("mount"), quire("umount"));
        mount.arg("image").arg(&target);
        umount.arg(&target);
        Ok(vec![mount, umount])
    };
    let c = || {
        let mut mount = sid.command("mount.composefs")?;
        mount.arg("-o").arg(format!("basedir={}", store.join("objects").display()));
        mount.arg(&image).arg(&target);
        Ok(vec![mount, umount()])
    };
    let drop_in = crate::named(context, "mount.composefs")?;
    let ours_as_c = || {
        let mut mount = Command::new(&drop_in);
        mount.arg("-o").arg(format!("basedir={}", store.join("objects").display()));
        mount.arg(&image).arg(&target);
        Ok(vec![mount, umount()])
    };
    let mut contestants = [
        Contestant::new("quire mount, quire umount", ours),
        Contestant::new("Quire's mount.composefs, umount(8)", ours_as_c),
        Contestant::new("composefs (C) mount.composefs, umount(8)", c),
        Contestant::new("two processes of Quire's that do nothing: quire --version twice", || {
            Ok(["--version"; 2]
                .map(|it| {
                    let mut quire = Command::new(context.quire);
                    quire.arg(it);
                    quire
                })
                .into())
        }),
        Contestant::new("two processes that do nothing: true, true", || {
            Ok(vec![Command::new("true"), Command::new("true")])
        }),
    ];
    let runs = context.runs.max(50);
    let rules =
        Rules { runs, sync: None, cold: false, pace: Pace::Turns, memory: Memory::LargestProcess };
    let outcomes = measure(&rules, &mut contestants)?;
    let findings = ratio(&outcomes, "quire", "composefs (C)").into_iter().collect();
    Ok(Report {
        name: "mount",
        about: String::from(
            "One image with its overlay over the store's objects, mounted and unmounted by two processes, from `fork` to \
             their ends.",
        ),
        tables: vec![Table {
            title: String::from("debian-small"),
            memory: rules.memory,
            runs,
            outcomes,
        }],
        findings,
        sizes: Vec::new(),
    })
}

/// Imports the layout's image under the name `image` into a store.
pub(super) fn import(context: &Context<'_>, layout: &Path) -> Result<PathBuf> {
    let store = context.work.join("store");
    let mut quire = Command::new(context.quire);
    quire.arg("--store").arg(&store).arg("import");
    process::quiet(quire.arg(format!("oci:{}:latest", layout.display())).arg("image"))?;
    Ok(store)
}

fn only_file(dir: &Path) -> Result<PathBuf> {
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            match path.is_dir() {
                true => dirs.push(path),
                false => return Ok(path),
            }
        }
    }
    None.context("the store has no image")
}
