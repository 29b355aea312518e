//! Mount and unmount, timed as whole processes.

use std::process::Command;

use anyhow::Result;

use super::command::{cmd, more};
use super::forms::{import_layout, only_image};
use super::measure::{Contestant, Rules};
use super::report::Report;
use crate::Context;
use rig::inputs::{self, sid};

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let (quire, work) = (context.quire, context.work);
    let store = &import_layout(context, &inputs::debian_small(context.cache, false)?)?;
    let sid = sid::make(context.cache, false)?;
    let image = only_image(store)?;
    let target = work.join("root");
    std::fs::create_dir(&target)?;
    let drop_in = crate::named(context, "mount.composefs")?;
    let by_c = |mount: Command| {
        [more!(mount, "-o basedir={store}/objects {image} {target}"), cmd!("umount {target}")]
    };
    let contestants = vec![
        Contestant::new("quire mount, quire umount", || {
            let quire = || cmd!("{quire} --store {store}");
            [more!(quire(), "mount image {target}"), more!(quire(), "umount {target}")]
        }),
        Contestant::new("Quire's mount.composefs, umount(8)", || by_c(cmd!("{drop_in}"))),
        Contestant::new("composefs (C) mount.composefs, umount(8)", || {
            anyhow::Ok(by_c(sid.command("mount.composefs")?))
        }),
        Contestant::new("two processes of Quire's that do nothing: quire --version twice", || {
            [(); 2].map(|()| cmd!("{quire} --version"))
        }),
        Contestant::new("two processes that do nothing: true, true", || {
            [cmd!("true"), cmd!("true")]
        }),
    ];
    let table = Rules::new(context.runs.max(50)).race("debian-small", contestants)?;
    Ok(Report {
        name: "mount",
        about: String::from(
            "One image with its overlay over the store's objects, mounted and unmounted by two processes, from `fork` to \
             their ends.",
        ),
        findings: table.ratio("quire", "composefs (C)").into_iter().collect(),
        tables: vec![table],
        ..Report::default()
    })
}
