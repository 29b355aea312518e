//! Images of users who are not root: as trees in memory and by FUSE, beside the kernel's own mounts and other servers.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use super::measure::{Contestant, Memory, Outcome, Pace, Rules, drop_caches, measure};
use super::report::{Report, Sizes, Table, Unit, ratio};
use super::run::{hide_cgroup2, show_cgroup2};
use super::walk::mount_erofs;
use crate::Context;
use crate::tree;
use rig::Skipped;
use rig::inputs;
use rig::process::{find, need, quiet};

const USER: u32 = 64_001;
const EROFS: &str = "kernel: EROFS alone";
const COMPOSEFS: &str = "kernel: root's quire mount (EROFS and overlayfs)";
const TREE: &str = "quire mount --via tree, in a user namespace";
const FUSE: &str = "quire mount --via fuse";
const EROFSFUSE: &str = "erofsfuse";
const CFUSE: &str = "composefs-rs, FUSE";
/// A program `IMAGE OBJECTS DIRECTORY` that serves an image by the crate composefs-fuse.
const CFUSE_PROGRAM: &str = "QUIRE_BENCH_COMPOSEFS_FUSE";

/// How long a server may take until its mount is there.
const PATIENCE: Duration = Duration::from_secs(20);

/// A user of the bench's own mount namespace, with ids besides its own.
struct User<'a> {
    context: &'a Context<'a>,
    quire: PathBuf,
    home: PathBuf,
}

impl<'a> User<'a> {
    fn new(context: &'a Context<'_>) -> Result<Self> {
        for program in ["setpriv", "unshare", "nsenter", "newuidmap", "newgidmap", "fusermount3"] {
            need(program)?;
        }
        let place = |name: &str| context.work.join(name);
        // Everybody has to get to the user's home.
        for folder in context.work.ancestors().take(2) {
            fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        }
        let (quire, home) = (place("quire"), place("home"));
        fs::copy(context.quire, &quire)?;
        fs::create_dir(&home)?;
        chown(&home, Some(USER), Some(USER))?;
        let names = fs::read_to_string("/etc/passwd")?;
        let own = format!("quire-bench:x:{USER}:{USER}::{}:/bin/sh\n", home.display());
        fs::write(place("passwd"), names + &own)?;
        fs::write(place("ids"), "quire-bench:6400000:65536\n")?;
        let mode = Mode::from_raw_mode(0o666);
        mknodat(CWD, place("fuse"), FileType::CharacterDevice, mode, makedev(10, 229))?;
        fs::set_permissions(place("fuse"), Permissions::from_mode(0o666))?;
        for (file, at) in [
            ("passwd", "/etc/passwd"),
            ("ids", "/etc/subuid"),
            ("ids", "/etc/subgid"),
            ("fuse", "/dev/fuse"),
        ] {
            mount_bind(place(file), at).with_context(|| format!("cannot mount on {at}"))?;
        }
        Ok(Self { context, quire, home })
    }

    /// A program that the user calls.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("setpriv");
        let id = USER.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program);
        command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", &self.home);
        command.env("XDG_RUNTIME_DIR", &self.home).current_dir(&self.home);
        command
    }

    fn quire(&self, words: &[&str]) -> Command {
        let mut command = self.command(&self.quire);
        command.args(words);
        command
    }

    fn store(&self) -> PathBuf {
        self.home.join(".local/share/quire")
    }

    /// The file of an image of the user's.
    fn image(&self, name: &str) -> Result<PathBuf> {
        let shown = quiet(&mut self.quire(&["show", "--json", name]))?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        let id = shown["image"].as_str().context("`show` names no image")?;
        Ok(self.store().join("images").join(id))
    }
}

/// A way to mount an image: the folder, and how a command gets to see it.
struct Way<'a> {
    name: String,
    point: PathBuf,
    mount: Box<dyn Fn() -> Result<Option<Child>> + 'a>,
    unmount: Box<dyn Fn() -> Result<()> + 'a>,
}

fn until_mounted(point: &Path) -> Result<()> {
    let since = Instant::now();
    while !super::mounts::is_mounted(point)? {
        if since.elapsed() > PATIENCE {
            bail!("{} is not mounted", point.display());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn ways<'a>(user: &'a User<'a>, image: &'a str) -> Result<Vec<Way<'a>>> {
    let file = user.image(image)?;
    let objects = user.store().join("objects");
    let point = |name: &str| -> Result<PathBuf> {
        let point = user.home.join(name);
        fs::create_dir_all(&point)?;
        chown(&point, Some(USER), Some(USER))?;
        Ok(point)
    };
    let by_kernel = |at: &PathBuf| -> Box<dyn Fn() -> Result<()> + 'a> {
        let at = at.clone();
        Box::new(move || Ok(unmount(&at, UnmountFlags::DETACH)?))
    };
    let mut ways = Vec::new();
    let at = point("erofs")?;
    ways.push(Way {
        name: EROFS.to_owned(),
        unmount: by_kernel(&at),
        point: at.clone(),
        mount: Box::new({
            let file = file.clone();
            move || mount_erofs(&file, &at).map(|()| None)
        }),
    });
    // Root's own store, which has the same objects and the same image.
    let at = point("composefs")?;
    let root_store = user.context.work.join("root-store");
    ways.push(Way {
        name: COMPOSEFS.to_owned(),
        unmount: by_kernel(&at),
        point: at.clone(),
        mount: Box::new(move || {
            let mut quire = Command::new(user.context.quire);
            quire.arg("--store").arg(&root_store).args(["mount", image]).arg(&at);
            quiet(&mut quire).map(|_| None)
        }),
    });
    let at = point("tree")?;
    ways.push(Way {
        name: TREE.to_owned(),
        point: at.clone(),
        mount: Box::new(move || {
            let ready = user.home.join("ready");
            let _earlier = fs::remove_file(&ready);
            let script = "\"$1\" mount --via tree \"$2\" \"$3\" && : > \"$4\" && exec sleep 100000";
            let mut command = user.command("unshare");
            command.args([
                "--user",
                "--map-auto",
                "--map-root-user",
                "--mount",
                "sh",
                "-c",
                script,
                "sh",
            ]);
            command.arg(&user.quire).arg(image).arg(&at).arg(&ready);
            let child = command.stdin(Stdio::null()).spawn()?;
            let since = Instant::now();
            while !ready.exists() && since.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(Some(child))
        }),
        unmount: Box::new(|| Ok(())),
    });
    let at = point("fuse")?;
    let root_store = user.context.work.join("root-store");
    ways.push(Way {
        name: FUSE.to_owned(),
        unmount: by_kernel(&at),
        point: at.clone(),
        mount: Box::new(move || {
            let mut quire = Command::new(user.context.quire);
            quire.arg("--store").arg(&root_store).args(["mount", "--via", "fuse", image]).arg(&at);
            quiet(&mut quire).map(|_| None)
        }),
    });
    let others = [
        (EROFSFUSE, find("erofsfuse"), false),
        (CFUSE, std::env::var_os(CFUSE_PROGRAM).map(PathBuf::from), true),
    ];
    for (name, program, has_objects) in others {
        let Some(program) = program else { continue };
        let at = point(if has_objects { "cfuse" } else { "erofsfuse" })?;
        let (file, objects) = (file.clone(), objects.clone());
        ways.push(Way {
            name: name.to_owned(),
            point: at.clone(),
            mount: Box::new({
                let at = at.clone();
                move || {
                    let mut server = Command::new(&program);
                    if has_objects {
                        server.arg(&file).arg(&objects).arg(&at);
                    } else {
                        server.arg("-f").arg(&file).arg(&at);
                    }
                    server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                    let server = server.spawn()?;
                    until_mounted(&at)?;
                    Ok(Some(server))
                }
            }),
            unmount: Box::new(move || Ok(unmount(&at, UnmountFlags::DETACH)?)),
        });
    }
    Ok(ways)
}

/// What root runs in a mounted image.
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

/// Runs the same in all ways, cold and warm.
fn race(
    user: &User<'_>,
    title: &str,
    image: &str,
    words: &[&str],
    has_bytes: bool,
) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    let ways = ways(user, image)?;
    // Neither has the bytes of files. One round of composefs-rs takes a minute, so one tree is enough.
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
                let inside = inside.borrow().as_ref().map(Child::id).filter(|_| way.name == TREE);
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
                            if way.name == TREE {
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

/// A container that runs `true`.
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
    for way in ["tree", "fuse"] {
        let crun = &crun;
        contestants.push(Contestant::new(&format!("quire run --via {way}"), move || {
            let mut quire = user.quire(&["run", "--rm", "--via", way, "--runtime"]);
            quire.arg(crun).args(["debian", "--", "true"]);
            Ok(vec![quire])
        }));
    }
    // The same config.json as the user's container has, on a plain folder, in a namespace with the same ids.
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
        // Podman makes links in it, which takes a root of the user's own.
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

/// Longer than the grace period of a busy machine.
const REST: Duration = Duration::from_millis(100);

/// What two containers that have read all files leave in memory, and what servers take.
fn memory(user: &User<'_>) -> Result<Vec<Sizes>> {
    let title = "debian-base: memory after two containers have read all files";
    if !user.context.wants(title) {
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for way in ["tree", "fuse"] {
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

/// The number of a line such as `Cached:  12 kB`, in bytes.
fn field(text: &str, name: &str) -> Result<u64> {
    let line = text.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|it| it.split_whitespace().next()?.parse::<u64>().ok());
    Ok(number.with_context(|| format!("there is no {name}"))? * 1024)
}

/// Pages of files, without those of file systems in memory.
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
    // composefs-rs cannot open empty files.
    let read = ["find", ".", "-xdev", "-type", "f", "-size", "+0", "-exec", "cat", "{}", "+"];
    tables.extend(race(&user, "developer: ls -lR", "developer", &list, false)?);
    tables.extend(race(&user, "developer with xattrs: ls -lR", "developer-xattrs", &list, false)?);
    tables.extend(race(&user, "debian-base: all files read", "debian", &read, true)?);
    tables.extend(starts(&user, &root)?);
    let sizes = memory(&user)?;
    let findings = tables.iter().flat_map(findings).collect();
    Ok(Report {
        name: "rootless",
        about: String::from(
            "Images without the kernel's EROFS, as users who are not root have them. Root runs all listings and reads, so that \
             all of them see the same. *developer*: a root of 64,246 entries, whose files are full of zeros; four of \
             them have xattrs, which one of the two images leaves out. *debian-base*: 6,700 entries, 119 MB. Mounts are made \
             before the clock starts. The tree is in a user namespace, into which `nsenter` brings the command. \
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
        .flat_map(|theirs| [of(FUSE, theirs), of(TREE, theirs)])
        .flatten()
        .collect();
    for way in ["tree", "fuse"] {
        if let (Some(total), Some(alone)) =
            (find(&format!("quire run --via {way}")), find("crun alone"))
        {
            let share = milliseconds(total) - milliseconds(alone);
            found.push(format!("by {way}, {share:.1} ms more than crun alone"));
        }
    }
    found.into_iter().map(|it| format!("{}: {it}", table.title)).collect()
}
