//! Compares this build of Quire with another one, to find the effect of a change on speed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use super::command::{cmd, more};
use super::import::synced;
use super::measure::{Contestant, Pace, Rules};
use super::registry;
use super::report::{Report, Table};
use crate::Context;
use rig::cache::remove;
use rig::process::{find_program, quiet};
use rig::{Skipped, inputs};

/// A build of Quire, with a folder for its stores.
struct Build<'a> {
    name: &'static str,
    program: &'a Path,
    folder: PathBuf,
}

impl Build<'_> {
    /// Returns a command that runs this build on one of its stores.
    fn quire(&self, store: &str) -> Command {
        let (program, folder) = (self.program, &self.folder);
        cmd!("{program} --store {folder}/{store}")
    }
}

const THIS: &str = "this build";
const OTHER: &str = "the build before";

/// The tables so far, which all have both builds.
struct Tables<'a> {
    context: &'a Context<'a>,
    builds: &'a [Build<'a>],
    tables: Vec<Table>,
}

impl<'a> Tables<'a> {
    fn add(
        &mut self,
        title: &str,
        rules: &Rules,
        contestant: impl Fn(&'a Build<'a>) -> Contestant<'a>,
    ) -> Result<()> {
        if self.context.wants(title) {
            let contestants = self.builds.iter().map(contestant).collect();
            self.tables.push(rules.race(title, contestants)?);
        }
        Ok(())
    }
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let Some((before, before_name)) = context.before else {
        bail!(Skipped(String::from("no other build is named: --before PROGRAM")));
    };
    let builds = [(THIS, context.quire, "this"), (OTHER, before, "other")];
    let builds = builds.map(|(name, program, folder)| {
        let folder = context.work.join(folder);
        std::fs::create_dir(&folder)?;
        std::os::unix::fs::symlink(program, folder.join("mkcomposefs"))?;
        anyhow::Ok(Build { name, program, folder })
    });
    let builds = builds.into_iter().collect::<Result<Vec<_>>>()?;
    let layout = &inputs::debian_postgres(context.cache, false)?;
    let dump = &inputs::dump(context.cache, "cs9-developer")?;
    let registry = registry::start(context)?;
    let image = &format!("{}/postgres:1", registry.host);
    registry::copy(layout, image)?;
    let runtime =
        find_program("runc").ok_or_else(|| Skipped(String::from("runc is not installed")))?;
    let runtime = &runtime;
    // On a disk, times vary more than the two builds differ.
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let on_tmpfs = &memory.path().join("store");

    let many = context.runs.max(31);
    let synced = synced(context);
    let unsynced = Rules { sync: None, ..synced.clone() };
    let mut tables = Tables { context, builds: &builds, tables: Vec::new() };
    tables.add("mkcomposefs of 64,246 entries", &Rules::new(many), |build| {
        let folder = &build.folder;
        let make = move || cmd!("{folder}/mkcomposefs --from-file {dump} {folder}/image");
        Contestant::new(build.name, make)
    })?;
    for form in ["objects", "packed"] {
        tables.add(&format!("import --form {form}"), &synced, |build| {
            let import = move || import(build.quire("imported"), form, layout);
            Contestant::new(build.name, import).before(|| aside(context, build, "imported"))
        })?;
    }
    tables.add("import --form objects, on tmpfs", &unsynced, |build| {
        let program = build.program;
        let import = move || import(cmd!("{program} --store {on_tmpfs}"), "objects", layout);
        Contestant::new(build.name, import).before(|| remove(on_tmpfs))
    })?;
    tables.add("pull", &synced, |build| {
        let pull = move || more!(build.quire("pulled"), "pull {image}");
        Contestant::new(build.name, pull).before(|| aside(context, build, "pulled"))
    })?;
    tables.add("pull, on tmpfs", &unsynced, |build| {
        let program = build.program;
        let pull = move || cmd!("{program} --store {on_tmpfs} pull {image}");
        Contestant::new(build.name, pull).before(|| remove(on_tmpfs))
    })?;
    drop((registry, memory));

    if context.wants("run of true") || context.wants("cold") {
        for build in &builds {
            for form in ["objects", "packed"] {
                quiet(&mut import(build.quire(form), form, layout))?;
            }
        }
    }
    for (when, pace) in [
        ("right after another one", Pace::OwnLeadIn),
        ("after a rest", Pace::Rested(Duration::from_millis(100))),
    ] {
        let rules = Rules { runs: many, pace, ..unsynced.clone() };
        tables.add(&format!("run of true by runc, {when}"), &rules, |build| {
            let run = move || {
                let quire = build.quire("objects");
                more!(quire, "run --runtime {runtime} --writable memory image -- true")
            };
            Contestant::new(build.name, run)
        })?;
    }
    for form in ["objects", "packed"] {
        for (what, script) in [
            ("ls -lR", "ls -lR \"$0\" > /dev/null"),
            ("read of all files", "find \"$0\" -type f -exec cat {} + > /dev/null"),
        ] {
            let title = format!("cold {what}, {form}");
            tables.add(&title, &Rules::reads(context.runs, true), |build| {
                let root = build.folder.join("root");
                let (mounted, left) = (root.clone(), root.clone());
                Contestant::new(build.name, move || cmd!("sh -ec {script} {root}"))
                    .before(move || {
                        std::fs::create_dir_all(&mounted)?;
                        quiet(&mut more!(build.quire(form), "mount image {mounted}"))
                    })
                    .after(move || quiet(&mut more!(build.quire(form), "umount {left}")))
            })?;
        }
    }
    Ok(Report {
        name: "compare",
        about: format!(
            "Two builds of Quire in turn, each with its own stores: this one, and {}. Debian with PostgreSQL, as in \
             the benches of the same names; files of all sizes are read to the end.",
            before_name
        ),
        findings: tables.tables.iter().filter_map(|it| it.titled_ratio(THIS, OTHER)).collect(),
        tables: tables.tables,
        ..Report::default()
    })
}

fn import(quire: Command, form: &str, layout: &Path) -> Command {
    more!(quire, "import --form {form} oci:{layout}:latest image")
}

fn aside(context: &Context<'_>, build: &Build<'_>, store: &str) -> Result<()> {
    context.set_aside(build.folder.strip_prefix(context.work)?.join(store))
}
