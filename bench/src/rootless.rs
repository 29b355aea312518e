//! Images of unprivileged users: as trees in memory and by FUSE, compared with the kernel's mounts and other servers.

mod ways;

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::measure::{Contestant, Memory, Outcome, Pace, Rules, drop_caches, measure};
use super::report::{Report, Sizes, Table, Unit, ratio};
use super::run::{hide_cgroup2, show_cgroup2};
use crate::Context;
use crate::tree;
use rig::Skipped;
use rig::inputs;
use rig::process::{find, quiet};
use ways::{User, Way, ways};

const USER: u32 = 64_001;
const EROFS: &str = "kernel: EROFS alone";
const COMPOSEFS: &str = "kernel: root's quire mount (EROFS and overlayfs)";
const TREE: &str = "quire mount --via tree, in a user namespace";
const SERVICE: &str = "quire mount --via service, in a user namespace";
const FUSE: &str = "root's quire mount --via fuse";
const FUSE_INSIDE: &str = "quire mount --via fuse, in a user namespace";
const EROFSFUSE: &str = "erofsfuse";
const CFUSE: &str = "composefs-rs, FUSE";
/// Environment variable of a program `IMAGE OBJECTS DIRECTORY` that serves an image by the crate composefs-fuse.
const CFUSE_PROGRAM: &str = "QUIRE_BENCH_COMPOSEFS_FUSE";

/// Longest time from a server's start to its mount.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whether a way's mount is only visible in a user namespace.
fn is_inside(way: &str) -> bool {
    matches!(way, TREE | SERVICE | FUSE_INSIDE)
}

/// A command that root runs in a mounted image.
fn command(way: &Way<'_>, inside: Option<u32>, words: &[&str]) -> Command {
    let mut command = match inside {
        Some(process) => {
            let mut command = Command::new("nsenter");
            command.args(["--target", &process.to_string(), "--user", "--mount", "--"]);
            command
        }
        None => Command::new("env"),
    };
    let script = format!("cd \"$1\" && {}", words.join(" "));
    command.args(["sh", "-c", &script, "sh"]).arg(&way.point);
    command
}

/// Runs a command in all ways, cold and warm.
fn race(
    user: &User<'_>,
    title: &str,
    image: &str,
    words: &[&str],
    has_bytes: bool,
) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    let ways = ways(user, image)?;
    // The EROFS mounts lack file contents. A round of composefs-rs takes a minute, so it runs on only one of the
    // trees.
    let has_them = |way: &&Way<'_>| match &*way.name {
        EROFS | EROFSFUSE => !has_bytes,
        CFUSE => image != "developer-xattrs",
        _ => true,
    };
    for cold in [true, false] {
        let title = format!("{title}, {}", if cold { "cold" } else { "warm" });
        if !user.context.wants(&title) {
            continue;
        }
        let mut contestants = Vec::new();
        for way in ways.iter().filter(has_them) {
            let child = std::rc::Rc::new(std::cell::RefCell::new(None::<Child>));
            let (started, seen, ended) = (child.clone(), child.clone(), child);
            let call = move |inside: &std::cell::RefCell<Option<Child>>| {
                let inside =
                    inside.borrow().as_ref().map(Child::id).filter(|_| is_inside(&way.name));
                command(way, inside, words)
            };
            let contestant = Contestant::new(&way.name, move || Ok(vec![call(&seen)]));
            contestants.push(
                contestant
                    .before(move || {
                        *started.borrow_mut() = (way.mount)()?;
                        if cold {
                            return Ok(());
                        }
                        quiet(&mut call(&started)).map(drop)
                    })
                    .after(move || {
                        (way.unmount)()?;
                        if let Some(mut child) = ended.borrow_mut().take() {
                            if is_inside(&way.name) {
                                child.kill()?;
                            }
                            child.wait()?;
                        }
                        Ok(())
                    }),
            );
        }
        let runs = user.context.runs;
        let memory = if cold { Memory::WithCache } else { Memory::LargestProcess };
        let rules = Rules { runs, sync: None, cold, pace: Pace::Turns, memory };
        let outcomes = measure(&rules, &mut contestants)?;
        tables.push(Table { title, memory, runs, outcomes });
    }
    Ok(tables)
}

/// Times a container that runs `true`.
fn starts(user: &User<'_>, root: &Path) -> Result<Option<Table>> {
    let title = "debian-base: a container that runs true";
    let Some(crun) = find("crun").filter(|_| user.context.wants(title)) else { return Ok(None) };
    let root_store = user.context.work.join("root-store");
    let (bundle, mut number) = (user.home.join("bundle"), 0);
    let mut contestants = vec![Contestant::new("root's quire run", || {
        let mut quire = Command::new(user.context.quire);
        quire.arg("--store").arg(&root_store).args(["run", "--rm", "--runtime"]).arg(&crun);
        quire.args(["--writable", "memory", "debian", "--", "true"]);
        Ok(vec![quire])
    })];
    for way in ["service", "tree", "fuse"] {
        let crun = &crun;
        contestants.push(Contestant::new(&format!("quire run --via {way}"), move || {
            let mut quire = user.quire(&["run", "--rm", "--via", way, "--runtime"]);
            quire.arg(crun).args(["debian", "--", "true"]);
            Ok(vec![quire])
        }));
    }
    // A plain folder with the config.json of the user's container, in a namespace with the same ids.
    fs::create_dir(&bundle)?;
    chown(&bundle, Some(USER), Some(USER))?;
    let (script, config) = super::run::keeper(&bundle, "crun", &crun)?;
    let mut quire = user.quire(&["run", "--rm", "--runtime"]);
    quiet(quire.arg(&script).args(["debian", "--", "true"]))?;
    let mut value = super::run::kept(&config, &user.store(), root, &bundle)?;
    value["root"] = serde_json::json!({ "path": root, "readonly": true });
    fs::write(&config, value.to_string())?;
    contestants.push(
        Contestant::new("crun alone in a user namespace, a plain folder", || {
            number += 1;
            let mut command = user.command("unshare");
            command.args(["--user", "--map-auto", "--map-root-user", "--mount"]).arg(&crun);
            command.arg("--root").arg(user.home.join("state")).args(["run", "--bundle"]);
            command.arg(&bundle).arg(format!("bench-{number}"));
            Ok(vec![command])
        })
        .before(hide_cgroup2)
        .after(show_cgroup2),
    );
    if find("podman").is_some() {
        // Podman creates links in the root, which must therefore belong to the user.
        let own = user.home.join("podman-root");
        quiet(Command::new("cp").arg("-a").arg(root).arg(&own))?;
        quiet(Command::new("chown").args(["-R", &format!("{USER}:{USER}")]).arg(&own))?;
        let (root, crun) = (format!("{}:O", own.display()), &crun);
        let podman = Contestant::new("podman run --rootfs DIR:O, crun", move || {
            let mut podman = user.command("podman");
            podman.args(["--cgroup-manager=cgroupfs", "--events-backend=none", "--runtime"]);
            podman.arg(crun).args(["run", "--rm", "--network=none", "--cgroups=disabled"]);
            podman.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
            podman.args(["--rootfs", &root, "true"]);
            Ok(vec![podman])
        });
        contestants.push(podman.before(hide_cgroup2).after(show_cgroup2));
    }
    let runs = user.context.runs.max(15);
    let memory = Memory::AllProcesses;
    let rules = Rules { runs, sync: None, cold: false, pace: Pace::Rested(REST), memory };
    let outcomes = measure(&rules, &mut contestants)?;
    Ok(Some(Table { title: title.to_owned(), memory, runs, outcomes }))
}

/// Times mounts in a user namespace, by the service and as a tree.
fn mounts(user: &User<'_>) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    for image in ["debian", "developer"] {
        let title = format!("{image}: a mount in a user namespace");
        if !user.context.wants(&title) {
            continue;
        }
        let point = user.home.join("point");
        fs::create_dir_all(&point)?;
        chown(&point, Some(USER), Some(USER))?;
        let call = |way: &str| {
            let mut command = user.in_namespace();
            command.arg(&user.quire).args(["mount", "--via", way, image]).arg(&point);
            command
        };
        let mut contestants = vec![
            Contestant::new("nothing: the namespace, and quire --version", || {
                let mut command = user.in_namespace();
                command.arg(&user.quire).arg("--version");
                Ok(vec![command])
            }),
            Contestant::new("--via service, the first time", || Ok(vec![call("service")]))
                .before(|| user.service_again()),
            Contestant::new("--via service, again", || Ok(vec![call("service")]))
                .before(|| quiet(&mut call("service")).map(drop)),
            Contestant::new("--via tree", || Ok(vec![call("tree")])),
        ];
        let runs = user.context.runs.max(15);
        let memory = Memory::AllProcesses;
        let rules = Rules { runs, sync: None, cold: false, pace: Pace::Rested(REST), memory };
        let outcomes = measure(&rules, &mut contestants)?;
        tables.push(Table { title, memory, runs, outcomes });
    }
    Ok(tables)
}

/// A pause longer than the RCU grace period of a busy machine.
const REST: Duration = Duration::from_millis(100);

/// Page cache and memory after two containers have read all files, and memory of the servers.
fn memory(user: &User<'_>) -> Result<Vec<Sizes>> {
    let title = "debian-base: memory after two containers have read all files";
    if !user.context.wants(title) {
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for way in ["service", "tree", "fuse"] {
        drop_caches()?;
        let before = cached()?;
        let names = ["one", "two"];
        for name in names {
            let mut run = user.quire(&["run", "--detach", "--rm", "--via", way, "--name", name]);
            quiet(run.args(["debian", "--", "sleep", "100000"]))?;
            let read = "find / -xdev -type f -exec cat {} + > /dev/null";
            quiet(&mut user.quire(&["exec", name, "sh", "-c", read]))?;
        }
        rows.push((format!("quire run --via {way}"), vec![cached()?.saturating_sub(before)]));
        for name in names {
            quiet(&mut user.quire(&["rm", "--force", name]))?;
        }
    }
    let page_cache =
        Sizes { title: title.to_owned(), unit: Unit::Megabytes, columns: vec!["page cache"], rows };
    let point = user.home.join("fuse");
    quiet(user.quire(&["mount", "developer"]).arg(&point))?;
    quiet(user.command("ls").arg("-lR").arg(&point))?;
    let pattern = format!("^{} mount developer", user.quire.display());
    let found = quiet(Command::new("pgrep").arg("-f").arg(pattern))?;
    let mut rows = Vec::new();
    for (pid, name) in found.split_whitespace().zip(["holder", "server"]) {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        rows.push((name.to_owned(), vec![field(&status, "RssAnon")?, field(&status, "VmRSS")?]));
    }
    quiet(user.quire(&["umount"]).arg(&point))?;
    let servers = Sizes {
        title: String::from("developer: processes of a mount after `ls -lR`"),
        unit: Unit::Megabytes,
        columns: vec!["own memory", "with pages of the program"],
        rows,
    };
    Ok(vec![page_cache, servers])
}

/// Value of a line such as `Cached:  12 kB`, in bytes.
fn field(text: &str, name: &str) -> Result<u64> {
    let line = text.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|it| it.split_whitespace().next()?.parse::<u64>().ok());
    Ok(number.with_context(|| format!("there is no {name}"))? * 1024)
}

/// Page cache in bytes, without shared memory and tmpfs.
fn cached() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    Ok(field(&text, "Cached")?.saturating_sub(field(&text, "Shmem")?))
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    if !rig::process::is_root() {
        bail!(Skipped(String::from("to become another user takes root")));
    }
    let user = User::new(context)?;
    let folder = context.work.join("tree");
    tree::unpack(&fs::read(inputs::dump(context.cache, "cs9-developer")?)?, &folder)?;
    let tar = context.work.join("tree.tar");
    let mut pack = Command::new("tar");
    pack.args(["--xattrs", "--xattrs-include=*", "-cf"]).arg(&tar).arg("-C").arg(&folder).arg(".");
    quiet(&mut pack)?;
    let root = inputs::base_root(context.cache)?;
    let layout = inputs::debian_base(context.cache)?;
    let sources = [
        (vec![format!("tar:{}", tar.display()), String::from("developer-xattrs")], false),
        (vec![format!("tar:{}", tar.display()), String::from("developer")], true),
        (vec![format!("oci:{}:latest", layout.display()), String::from("debian")], false),
    ];
    for (words, skips) in &sources {
        let skip = if *skips { &["--skip-xattrs"][..] } else { &[] };
        quiet(user.quire(&["import", "--form", "objects"]).args(skip).args(words))?;
        let mut own = Command::new(context.quire);
        own.arg("--store").arg(context.work.join("root-store"));
        quiet(own.args(["import", "--form", "objects"]).args(skip).args(words))?;
    }
    let mut tables = Vec::new();
    let list = ["ls", "-lR", "."];
    // Empty files are left out, because composefs-rs cannot open them.
    let read = ["find", ".", "-xdev", "-type", "f", "-size", "+0", "-exec", "cat", "{}", "+"];
    tables.extend(race(&user, "developer: ls -lR", "developer", &list, false)?);
    tables.extend(race(&user, "developer with xattrs: ls -lR", "developer-xattrs", &list, false)?);
    tables.extend(race(&user, "debian-base: all files read", "debian", &read, true)?);
    tables.extend(mounts(&user)?);
    tables.extend(starts(&user, &root)?);
    let sizes = memory(&user)?;
    let findings = tables.iter().flat_map(findings).collect();
    Ok(Report {
        name: "rootless",
        about: String::from(
            "Images without the kernel's EROFS, as users who are not root have them. Root runs all listings and reads, so that \
             all of them see the same. *developer*: a root of 64,246 entries, whose files are full of zeros; four of \
             them have xattrs, which one of the two images leaves out. *debian-base*: 6,700 entries, 119 MB. Mounts are made \
             before the clock starts. The tree and what the mount service lends are in a user namespace, into which \
             `nsenter` brings the command. *A mount in a user namespace*: whole processes; the first time, the service has just been \
             started. \
             composefs-rs is a program of a few lines around the crate composefs-fuse 0.9.4, for data, too. It compares no \
             digests of data here. *A container that runs true*: whole processes, after a rest of 100 ms.",
        ),
        findings,
        tables,
        sizes,
    })
}

fn findings(table: &Table) -> Vec<String> {
    let of = |ours: &str, theirs: &str| ratio(&table.outcomes, ours, theirs);
    let milliseconds = |it: &Outcome| it.median.as_secs_f64() * 1e3;
    let find = |name: &str| table.outcomes.iter().find(|it| it.name.starts_with(name));
    let mut found: Vec<_> = [EROFS, COMPOSEFS, CFUSE]
        .iter()
        .flat_map(|theirs| [SERVICE, FUSE, FUSE_INSIDE, TREE].map(|ours| of(ours, theirs)))
        .flatten()
        .collect();
    for way in ["service", "tree", "fuse"] {
        if let (Some(total), Some(alone)) =
            (find(&format!("quire run --via {way}")), find("crun alone"))
        {
            let share = milliseconds(total) - milliseconds(alone);
            found.push(format!("by {way}, {share:.1} ms more than crun alone"));
        }
    }
    found.into_iter().map(|it| format!("{}: {it}", table.title)).collect()
}
