//! Images of unprivileged users: as trees in memory and by FUSE, compared with the kernel's mounts and other servers.

mod ways;

use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::{Child, Command};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Result, bail};

use super::command::{cmd, more, run};
use super::measure::{Contestant, Memory, Rules, drop_caches, warmth};
use super::proc::bytes;
use super::report::{Report, Sizes, Table, Unit};
use super::run::{RESTED, hide_cgroup2, keeper, kept, show_cgroup2};
use crate::{Context, tree};
use rig::process::{find_program, quiet};
use rig::{Skipped, inputs};
use ways::{User, Way, ways};

const USER: u32 = 64_001;
const EROFS: &str = "kernel: EROFS alone";
const COMPOSEFS: &str = "kernel: root's quire mount (EROFS and overlayfs)";
const TREE: &str = "quire mount --via tree, in a user namespace";
const SERVICE: &str = "quire mount --via service, in a user namespace";
const FUSE: &str = "root's quire mount --via fuse";
const FUSE_OBJECTS: &str = "quire mount --via fuse-objects, in a user namespace";
const FUSE_INSIDE: &str = "quire mount --via fuse, in a user namespace";
const EROFSFUSE: &str = "erofsfuse";
const CFUSE: &str = "composefs-rs, FUSE";
/// Ways of Quire for users.
const VIA: [&str; 4] = ["service", "fuse-objects", "fuse", "tree"];

/// Longest time from a server's start to its mount.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whether a way's mount is only visible in a user namespace.
fn is_inside(way: &str) -> bool {
    matches!(way, TREE | SERVICE | FUSE_OBJECTS | FUSE_INSIDE)
}
/// A command that root runs in a mounted image.
fn command(way: &Way<'_>, inside: Option<u32>, words: &[&str]) -> Command {
    let command = match inside.map(|it| it.to_string()) {
        Some(process) => cmd!("nsenter --target {process} --user --mount --"),
        None => Command::new("env"),
    };
    let (script, point) = (format!("cd \"$1\" && {}", words.join(" ")), &way.point);
    more!(command, "sh -c {script} sh {point}")
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
    let has_them = |way: &&Way<'_>| match way.name {
        EROFS | EROFSFUSE => !has_bytes,
        CFUSE => image != "developer-xattrs",
        _ => true,
    };
    for cold in [true, false] {
        let title = format!("{title}, {}", warmth(cold));
        if !user.context.wants(&title) {
            continue;
        }
        let mut contestants = Vec::new();
        for way in ways.iter().filter(has_them) {
            let child = Rc::new(RefCell::new(None::<Child>));
            let (started, seen, ended) = (child.clone(), child.clone(), child);
            let call = move |inside: &RefCell<Option<Child>>| {
                let inside =
                    inside.borrow().as_ref().map(Child::id).filter(|_| is_inside(way.name));
                command(way, inside, words)
            };
            let before = move || {
                *started.borrow_mut() = (way.mount)()?;
                if cold { Ok(()) } else { quiet(&mut call(&started)).map(drop) }
            };
            let after = move || -> Result<()> {
                (way.unmount)()?;
                if let Some(mut child) = ended.borrow_mut().take() {
                    if is_inside(way.name) {
                        child.kill()?;
                    }
                    child.wait()?;
                }
                Ok(())
            };
            let contestant = Contestant::new(way.name, move || call(&seen));
            contestants.push(contestant.before(before).after(after));
        }
        tables.push(Rules::reads(user.context.runs, cold).race(title, contestants)?);
    }
    Ok(tables)
}

/// The rules for whole processes, each after a rest.
fn rested(user: &User<'_>) -> Rules {
    let (pace, memory) = (RESTED, Memory::AllProcesses);
    Rules { pace, memory, ..Rules::new(user.context.runs.max(15)) }
}

/// Times a container that runs `true`.
fn starts(user: &User<'_>, root: &Path) -> Result<Option<Table>> {
    let title = "debian-base: a container that runs true";
    let Some(crun) = find_program("crun").filter(|_| user.context.wants(title)) else {
        return Ok(None);
    };
    let (crun, quire, work, home) = (&crun, user.context.quire, user.context.work, &user.home);
    let (bundle, mut number) = (home.join("bundle"), 0);
    let mut contestants = vec![Contestant::new("root's quire run", || {
        cmd!(
            "{quire} --store {work}/root-store run --rm --runtime {crun}",
            "--writable memory debian -- true"
        )
    })];
    contestants.extend(VIA.map(|way| {
        Contestant::new(format!("quire run --via {way}"), move || {
            more!(user.quire(), "run --rm --via {way} --runtime {crun} debian -- true")
        })
    }));
    // A plain folder with the config.json of the user's container, in a namespace with the same ids.
    fs::create_dir(&bundle)?;
    chown(&bundle, Some(USER), Some(USER))?;
    let (script, config) = keeper(&bundle, "crun", crun)?;
    quiet(&mut more!(user.quire(), "run --rm --runtime {script} debian -- true"))?;
    let mut value = kept(&config, &user.store(), root, &bundle)?;
    value["root"] = serde_json::json!({ "path": root, "readonly": true });
    fs::write(&config, value.to_string())?;
    contestants.push(
        Contestant::new("crun alone in a user namespace, a plain folder", || {
            number += 1;
            let number = number.to_string();
            let run = more!(user.in_namespace(), "{crun} --root {home}/state run --bundle");
            more!(run, "{bundle} bench-{number}")
        })
        .before(hide_cgroup2)
        .after(show_cgroup2),
    );
    if find_program("podman").is_some() {
        // Podman creates links in the root, which must therefore belong to the user.
        let (own, owner) = (home.join("podman-root"), format!("{USER}:{USER}"));
        run!("cp -a {root} {own}")?;
        run!("chown -R {owner} {own}")?;
        let podman = Contestant::new("podman run --rootfs DIR:O, crun", move || {
            more!(
                user.command("podman"),
                "--cgroup-manager=cgroupfs --events-backend=none --runtime {crun}",
                "run --rm --network=none --cgroups=disabled",
                "--ulimit nofile=1024:1024 --ulimit nproc=1024:1024 --rootfs {own}:O true"
            )
        });
        contestants.push(podman.before(hide_cgroup2).after(show_cgroup2));
    }
    Ok(Some(rested(user).race(title, contestants)?))
}

/// Times mounts in a user namespace, by the service and as a tree.
fn mounts(user: &User<'_>) -> Result<Vec<Table>> {
    let (mut tables, quire) = (Vec::new(), &user.quire);
    for image in ["debian", "developer"] {
        let title = format!("{image}: a mount in a user namespace");
        if !user.context.wants(&title) {
            continue;
        }
        let point = user.folder("point")?;
        let call =
            |way: &str| more!(user.in_namespace(), "{quire} mount --via {way} {image} {point}");
        let contestants = vec![
            Contestant::new("nothing: the namespace, and quire --version", || {
                more!(user.in_namespace(), "{quire} --version")
            }),
            Contestant::new("--via service, the first time", || call("service"))
                .before(|| user.service_again()),
            Contestant::new("--via service, again", || call("service"))
                .before(|| quiet(&mut call("service"))),
            Contestant::new("--via fuse-objects", || call("fuse-objects")),
            Contestant::new("--via tree", || call("tree")),
        ];
        tables.push(rested(user).race(title, contestants)?);
    }
    Ok(tables)
}

/// The script that reads all files of a container.
const READ: &str = "find / -xdev -type f -exec cat {} + > /dev/null";

/// Page cache and memory after two containers have read all files, and memory of the servers.
fn memory(user: &User<'_>) -> Result<Vec<Sizes>> {
    let title = "debian-base: memory after two containers have read all files";
    if !user.context.wants(title) {
        return Ok(Vec::new());
    }
    let call = |command: Command| quiet(&mut { command });
    let mut rows = Vec::new();
    for way in VIA {
        drop_caches()?;
        let before = cached()?;
        let names = ["one", "two"];
        for name in names {
            let run = more!(user.quire(), "run --detach --rm --via {way} --name {name}");
            call(more!(run, "debian -- sleep 100000"))?;
            call(more!(user.quire(), "exec {name} sh -c {READ}"))?;
        }
        rows.push((format!("quire run --via {way}"), vec![cached()?.saturating_sub(before)]));
        for name in names {
            call(more!(user.quire(), "rm --force {name}"))?;
        }
    }
    let page_cache = Sizes::new(title, Unit::Megabytes, ["page cache"], rows);
    let point = user.home.join("fuse");
    call(more!(user.quire(), "mount developer {point}"))?;
    call(more!(user.command("ls"), "-lR {point}"))?;
    let pattern = format!("^{} mount developer", user.quire.display());
    let found = run!("pgrep -f {pattern}")?;
    let mut rows = Vec::new();
    for (pid, name) in found.split_whitespace().zip(["holder", "server"]) {
        let of = |field| bytes(format!("/proc/{pid}/status"), &[field]);
        rows.push((name.to_owned(), vec![of("RssAnon")?, of("VmRSS")?]));
    }
    call(more!(user.quire(), "umount {point}"))?;
    let title = "developer: processes of a mount after `ls -lR`";
    let columns = ["own memory", "with pages of the program"];
    Ok(vec![page_cache, Sizes::new(title, Unit::Megabytes, columns, rows)])
}

/// Page cache in bytes, without shared memory and tmpfs.
fn cached() -> Result<u64> {
    let of = |field| bytes("/proc/meminfo", &[field]);
    Ok(of("Cached")?.saturating_sub(of("Shmem")?))
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let (quire, work) = (context.quire, context.work);
    if !rig::process::is_root() {
        bail!(Skipped(String::from("to become another user takes root")));
    }
    let user = User::new(context)?;
    let tar = tree::pack(context)?;
    let root = inputs::base_root(context.cache)?;
    let layout = inputs::debian_base(context.cache)?;
    let tar = format!("tar:{}", tar.display());
    let oci = format!("oci:{}:latest", layout.display());
    let sources: [(&str, &str, &[&str]); 3] = [
        (&tar, "developer-xattrs", &[]),
        (&tar, "developer", &["--skip-xattrs"]),
        (&oci, "debian", &[]),
    ];
    for (source, name, skip) in sources {
        let own = cmd!("{quire} --store {work}/root-store");
        for quire in [user.quire(), own] {
            quiet(&mut more!(quire, "import --form objects {skip...} {source} {name}"))?;
        }
    }
    let list = ["ls", "-lR", "."];
    // Empty files are left out, because composefs-rs cannot open them.
    let read = ["find", ".", "-xdev", "-type", "f", "-size", "+0", "-exec", "cat", "{}", "+"];
    let mut tables = Vec::new();
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
            "Images without the kernel's EROFS, as users who are not root have them. Root runs all listings and \
             reads, so that all of them see the same. *developer*: a root of 64,246 entries, whose files are full of \
             zeros; four of them have xattrs, which one of the two images leaves out. *debian-base*: 6,700 entries, \
             119 MB. Mounts are made before the clock starts. The tree and what the mount service lends are in a \
             user namespace, into which `nsenter` brings the command. *A mount in a user namespace*: whole \
             processes; the first time, the service has just been started. composefs-rs is a program of a few lines \
             around the crate composefs-fuse 0.9.4, which also serves data. It compares no digests of data here. *A \
             container that runs true*: whole processes, after a rest of 100 ms.",
        ),
        findings,
        tables,
        sizes,
    })
}

fn findings(table: &Table) -> Vec<String> {
    let ours = [SERVICE, FUSE_OBJECTS, FUSE, FUSE_INSIDE, TREE];
    let pairs = [EROFS, COMPOSEFS, CFUSE].into_iter().flat_map(|it| ours.map(|ours| (ours, it)));
    let mut found: Vec<_> =
        pairs.filter_map(|(ours, theirs)| table.titled_ratio(ours, theirs)).collect();
    for way in VIA {
        if let (Some(total), Some(alone)) =
            (table.find(&format!("quire run --via {way}")), table.find("crun alone"))
        {
            let (share, title) = (total.milliseconds() - alone.milliseconds(), &table.title);
            found.push(format!("{title}: by {way}, {share:.1} ms more than crun alone"));
        }
    }
    found
}
