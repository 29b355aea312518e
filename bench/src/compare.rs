//! Compares this build of Quire with another one, to find the effect of a change on speed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use testing::daemon::{Daemon, PROGRAM};

use super::measure::{Contestant, Memory, Outcome, Pace, Rules, measure};
use super::report::{Report, Table, ratio};
use crate::Context;
use rig::Skipped;
use rig::cache::remove;
use rig::inputs;
use rig::process::{find, need, quiet};

/// A build of Quire, with a folder for its stores.
struct Build<'a> {
    name: &'static str,
    program: &'a Path,
    folder: PathBuf,
}

impl Build<'_> {
    /// Returns a command that runs this build on one of its stores.
    fn quire(&self, store: &str) -> Command {
        let mut quire = Command::new(self.program);
        quire.arg("--store").arg(self.folder.join(store));
        quire
    }
}

const THIS: &str = "this build";
const OTHER: &str = "the build before";

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let Some((before, before_name)) = context.before else {
        bail!(Skipped(String::from("no other build is named: --before PROGRAM")));
    };
    let build = |name, program, folder: &str| -> Result<Build<'_>> {
        let folder = context.work.join(folder);
        std::fs::create_dir(&folder)?;
        std::os::unix::fs::symlink(program, folder.join("mkcomposefs"))?;
        Ok(Build { name, program, folder })
    };
    let builds = [build(THIS, context.quire, "this")?, build(OTHER, before, "other")?];
    let layout = inputs::debian_postgres(context.cache, false)?;
    let source = format!("oci:{}:latest", layout.display());
    let mut tables = Vec::new();
    let synced = || Rules {
        runs: context.runs,
        sync: Some(context.work.to_owned()),
        cold: false,
        pace: Pace::Turns,
        memory: Memory::AllProcesses,
    };

    let dump = inputs::dump(context.cache, "cs9-developer")?;
    let many = context.runs.max(31);
    let rules = Rules { sync: None, memory: Memory::LargestProcess, runs: many, ..synced() };
    tables.extend(table(context, "mkcomposefs of 64,246 entries", &rules, &builds, |build| {
        let mut command = Command::new(build.folder.join("mkcomposefs"));
        command.arg("--from-file").arg(&dump).arg(build.folder.join("image"));
        Contestant::new(build.name, again(command))
    })?);

    for form in ["objects", "packed"] {
        let title = format!("import --form {form}");
        tables.extend(table(context, &title, &synced(), &builds, |build| {
            let mut command = build.quire("imported");
            command.args(["import", "--form", form]).arg(&source).arg("image");
            let store = build.folder.join("imported");
            Contestant::new(build.name, again(command)).before(aside(context, store))
        })?);
    }

    // On a disk, times vary more than the two builds differ.
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let in_memory = Rules { sync: None, ..synced() };
    tables.extend(table(
        context,
        "import --form objects, on tmpfs",
        &in_memory,
        &builds,
        |build| {
            let store = memory.path().join("store");
            let mut command = Command::new(build.program);
            command.arg("--store").arg(&store).args(["import", "--form", "objects"]);
            command.arg(&source).arg("image");
            Contestant::new(build.name, again(command)).before(move || remove(&store))
        },
    )?);

    let registry = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    let registry = registry.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    let image = format!("{}/postgres:1", registry.host);
    let mut push = Command::new(need("skopeo")?);
    push.args(["copy", "--quiet", "--dest-tls-verify=false"]).arg(&source);
    quiet(push.arg(format!("docker://{image}")))?;
    tables.extend(table(context, "pull", &synced(), &builds, |build| {
        let mut command = build.quire("pulled");
        command.arg("pull").arg(&image);
        let store = build.folder.join("pulled");
        Contestant::new(build.name, again(command)).before(aside(context, store))
    })?);
    tables.extend(table(context, "pull, on tmpfs", &in_memory, &builds, |build| {
        let store = memory.path().join("store");
        let mut command = Command::new(build.program);
        command.arg("--store").arg(&store).arg("pull").arg(&image);
        Contestant::new(build.name, again(command)).before(move || remove(&store))
    })?);
    drop((registry, memory));

    if context.wants("run of true") || context.wants("cold") {
        for build in &builds {
            for form in ["objects", "packed"] {
                let mut import = build.quire(form);
                quiet(import.args(["import", "--form", form]).arg(&source).arg("image"))?;
            }
        }
    }
    let runtime = find("runc").ok_or_else(|| Skipped(String::from("runc is not installed")))?;
    for pace in [Pace::OwnLeadIn, Pace::Rested(Duration::from_millis(100))] {
        let rules = Rules { runs: many, sync: None, pace, ..synced() };
        let title = match pace {
            Pace::OwnLeadIn => "run of true by runc, right after another one",
            _ => "run of true by runc, after a rest",
        };
        tables.extend(table(context, title, &rules, &builds, |build| {
            let mut command = build.quire("objects");
            command.arg("run").arg("--runtime").arg(&runtime);
            command.args(["--writable", "memory", "image", "--", "true"]);
            Contestant::new(build.name, again(command))
        })?);
    }

    for form in ["objects", "packed"] {
        for (title, script) in [
            (format!("cold ls -lR, {form}"), "ls -lR \"$0\" > /dev/null"),
            (
                format!("cold read of all files, {form}"),
                "find \"$0\" -type f -exec cat {} + > /dev/null",
            ),
        ] {
            let rules = Rules { cold: true, sync: None, memory: Memory::WithCache, ..synced() };
            tables.extend(table(context, &title, &rules, &builds, |build| {
                let root = build.folder.join("root");
                let mut walk = Command::new("sh");
                walk.args(["-ec", script]).arg(&root);
                let mount = {
                    let root = root.clone();
                    move || {
                        std::fs::create_dir_all(&root)?;
                        quiet(build.quire(form).arg("mount").arg("image").arg(&root)).map(drop)
                    }
                };
                let unmount = move || quiet(build.quire(form).arg("umount").arg(&root)).map(drop);
                Contestant::new(build.name, again(walk)).before(mount).after(unmount)
            })?);
        }
    }
    let findings = tables.iter().filter_map(|table| {
        Some(format!("{}: {}", table.title, ratio(&table.outcomes, THIS, OTHER)?))
    });
    Ok(Report {
        name: "compare",
        about: format!(
            "Two builds of Quire in turn, each with stores of its own: this one, and {}. Debian with PostgreSQL, as in the \
             benches of the same names; files of all sizes are read to the end.",
            before_name
        ),
        findings: findings.collect(),
        tables,
        sizes: Vec::new(),
    })
}

fn table<'a>(
    context: &Context<'_>,
    title: &str,
    rules: &Rules,
    builds: &'a [Build<'a>],
    contestant: impl Fn(&'a Build<'a>) -> Contestant<'a>,
) -> Result<Option<Table>> {
    if !context.wants(title) {
        return Ok(None);
    }
    let mut contestants: Vec<_> = builds.iter().map(contestant).collect();
    let outcomes: Vec<Outcome> = measure(rules, &mut contestants)?;
    let (memory, runs) = (rules.memory, rules.runs);
    Ok(Some(Table { title: title.to_owned(), memory, runs, outcomes }))
}

/// Returns a function that builds the same command for each run.
fn again<'a>(command: Command) -> impl FnMut() -> Result<Vec<Command>> + 'a {
    move || {
        let mut same = Command::new(command.get_program());
        same.args(command.get_args());
        Ok(vec![same])
    }
}

fn aside<'a>(context: &'a Context<'_>, store: PathBuf) -> impl FnMut() -> Result<()> + 'a {
    move || {
        let name = store.strip_prefix(context.work)?;
        context.set_aside(name.to_str().context("a store's name is text")?)
    }
}
