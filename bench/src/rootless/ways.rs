//! The unprivileged user, and the ways to mount an image.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use super::{
    CFUSE, CFUSE_PROGRAM, COMPOSEFS, EROFS, EROFSFUSE, FUSE, FUSE_INSIDE, PATIENCE, SERVICE, TREE,
    USER,
};
use crate::Context;
use crate::walk::mount_erofs;
use rig::Skipped;
use rig::process::{find, need, quiet};

/// A user in the bench's mount namespace, with subordinate ids.
pub(super) struct User<'a> {
    pub(super) context: &'a Context<'a>,
    pub(super) quire: PathBuf,
    pub(super) home: PathBuf,
    /// Root's mount service, which listens on `socket`.
    service: std::cell::RefCell<Child>,
    socket: PathBuf,
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        let mut service = self.service.borrow_mut();
        // Errors do not matter any more, because the bench is over.
        let _ended = service.kill().and_then(|()| service.wait());
    }
}

impl<'a> User<'a> {
    pub(super) fn new(context: &'a Context<'_>) -> Result<Self> {
        for program in ["setpriv", "unshare", "nsenter", "newuidmap", "newgidmap", "fusermount3"] {
            need(program)?;
        }
        let place = |name: &str| context.work.join(name);
        // Each user must be able to reach the user's home.
        for folder in context.work.ancestors().take(2) {
            fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        }
        for folder in context.work.ancestors() {
            if fs::metadata(folder)?.permissions().mode() & 0o001 == 0 {
                bail!(Skipped(format!(
                    "other users do not get to {}: QUIRE_CACHE names a folder to which they do",
                    folder.display()
                )));
            }
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
        let socket = place("sock/mounts.sock");
        let service = std::cell::RefCell::new(start_service(context, &socket)?);
        Ok(Self { context, quire, home, service, socket })
    }

    /// Restarts the service, so that it has no copies of images.
    pub(super) fn service_again(&self) -> Result<()> {
        let mut service = self.service.borrow_mut();
        service.kill()?;
        service.wait()?;
        *service = start_service(self.context, &self.socket)?;
        Ok(())
    }

    /// A command that runs as the user.
    pub(super) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("setpriv");
        let id = USER.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program);
        command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", &self.home);
        command.env("XDG_RUNTIME_DIR", &self.home).env("QUIRE_MOUNT_SERVICE", &self.socket);
        command.current_dir(&self.home);
        command
    }

    pub(super) fn quire(&self, words: &[&str]) -> Command {
        let mut command = self.command(&self.quire);
        command.args(words);
        command
    }

    /// The beginning of a command that runs as the user in a new user namespace.
    pub(super) fn in_namespace(&self) -> Command {
        let mut command = self.command("unshare");
        command.args(["--user", "--map-auto", "--map-root-user", "--mount"]);
        command
    }

    pub(super) fn store(&self) -> PathBuf {
        self.home.join(".local/share/quire")
    }

    /// Path of an image in the user's store.
    pub(super) fn image(&self, name: &str) -> Result<PathBuf> {
        let shown = quiet(&mut self.quire(&["show", "--json", name]))?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        let id = shown["image"].as_str().context("`show` names no image")?;
        Ok(self.store().join("images").join(id))
    }
}

fn start_service(context: &Context<'_>, socket: &Path) -> Result<Child> {
    let config = context.work.join("serve.toml");
    let copies = context.work.join("copies");
    fs::write(&config, format!("[mounts]\ncopies = {copies:?}\n"))?;
    let mut service = Command::new(context.quire);
    service.args(["serve", "--mounts", "--config"]).arg(config).arg("--socket").arg(socket);
    let streams = service.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let service = streams.spawn()?;
    let since = Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        if since.elapsed() > PATIENCE {
            bail!("the mount service has not started");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(service)
}

/// A way to mount an image, with its mount point.
pub(super) struct Way<'a> {
    pub(super) name: String,
    pub(super) point: PathBuf,
    pub(super) mount: Box<dyn Fn() -> Result<Option<Child>> + 'a>,
    pub(super) unmount: Box<dyn Fn() -> Result<()> + 'a>,
}

fn until_mounted(point: &Path) -> Result<()> {
    let since = Instant::now();
    while !crate::mounts::is_mounted(point)? {
        if since.elapsed() > PATIENCE {
            bail!("{} is not mounted", point.display());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

pub(super) fn ways<'a>(user: &'a User<'a>, image: &'a str) -> Result<Vec<Way<'a>>> {
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
    // Root's store has the same objects and the same image.
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
    for (name, way) in [(TREE, "tree"), (SERVICE, "service"), (FUSE_INSIDE, "fuse")] {
        let at = point(&format!("inside-{way}"))?;
        ways.push(Way {
            name: name.to_owned(),
            point: at.clone(),
            mount: Box::new(move || {
                let ready = user.home.join("ready");
                let _earlier = fs::remove_file(&ready);
                let script =
                    "\"$1\" mount --via $5 \"$2\" \"$3\" && : > \"$4\" && exec sleep 100000";
                let mut command = user.in_namespace();
                command.args(["sh", "-c", script, "sh"]);
                command.arg(&user.quire).arg(image).arg(&at).arg(&ready).arg(way);
                let child = command.stdin(Stdio::null()).spawn()?;
                let since = Instant::now();
                while !ready.exists() && since.elapsed() < PATIENCE {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(Some(child))
            }),
            unmount: Box::new(|| Ok(())),
        });
    }
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
