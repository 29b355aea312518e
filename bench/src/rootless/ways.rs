//! The unprivileged user, and the ways to mount an image.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use super::{
    CFUSE, COMPOSEFS, EROFS, EROFSFUSE, FUSE, FUSE_INSIDE, FUSE_OBJECTS, PATIENCE, SERVICE, TREE,
    USER,
};
use crate::Context;
use crate::command::{cmd, more, run, wait_until};
use crate::mounts::is_mounted;
use crate::walk::mount_erofs;
use rig::Skipped;
use rig::process::{find_program, need, quiet};

/// Environment variable of a program `IMAGE OBJECTS DIRECTORY` that serves an image by the crate composefs-fuse.
const CFUSE_PROGRAM: &str = "QUIRE_BENCH_COMPOSEFS_FUSE";

/// A user in the bench's mount namespace, with subordinate ids.
pub(super) struct User<'a> {
    pub(super) context: &'a Context<'a>,
    pub(super) quire: PathBuf,
    pub(super) home: PathBuf,
    /// Root's mount service, which listens on `socket`.
    service: RefCell<Child>,
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
        let service = RefCell::new(start_service(context, &socket)?);
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
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let (id, home) = (USER.to_string(), &self.home);
        let mut command = cmd!("setpriv --reuid {id} --regid {id} --clear-groups -- {program}");
        command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", home);
        command.env("XDG_RUNTIME_DIR", home).env("QUIRE_MOUNT_SERVICE", &self.socket);
        command.current_dir(home);
        command
    }

    pub(super) fn quire(&self) -> Command {
        self.command(&self.quire)
    }

    /// The beginning of a command that runs as the user in a new user namespace.
    pub(super) fn in_namespace(&self) -> Command {
        more!(self.command("unshare"), "--user --map-auto --map-root-user --mount")
    }

    pub(super) fn store(&self) -> PathBuf {
        self.home.join(".local/share/quire")
    }

    /// A folder of the user, which is made.
    pub(super) fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.home.join(name);
        fs::create_dir_all(&folder)?;
        chown(&folder, Some(USER), Some(USER))?;
        Ok(folder)
    }

    /// Path of an image in the user's store.
    pub(super) fn image(&self, name: &str) -> Result<PathBuf> {
        let shown = quiet(&mut more!(self.quire(), "show --json {name}"))?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        let id = shown["image"].as_str().context("`show` names no image")?;
        Ok(self.store().join("images").join(id))
    }
}

/// Starts a server, whose output is of no interest, and waits until it serves.
fn serve(mut server: Command, serves: impl FnMut() -> Result<bool>) -> Result<Child> {
    let streams = server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = streams.spawn()?;
    wait_until("a server", PATIENCE, Duration::from_millis(5), serves)?;
    Ok(child)
}

fn start_service(context: &Context<'_>, socket: &Path) -> Result<Child> {
    let (quire, config) = (context.quire, context.work.join("serve.toml"));
    let copies = context.work.join("copies");
    fs::write(&config, format!("[mounts]\ncopies = {copies:?}\n"))?;
    serve(cmd!("{quire} serve --mounts --config {config} --socket {socket}"), || {
        Ok(std::os::unix::net::UnixStream::connect(socket).is_ok())
    })
}

/// Mounts an image at a folder, and returns the process that keeps the mount.
type Mount<'a> = Box<dyn Fn(&Path) -> Result<Option<Child>> + 'a>;

/// A way to mount an image, with its mount point.
pub(super) struct Way<'a> {
    pub(super) name: &'static str,
    pub(super) point: PathBuf,
    pub(super) mount: Box<dyn Fn() -> Result<Option<Child>> + 'a>,
    pub(super) unmount: Box<dyn Fn() -> Result<()> + 'a>,
}

/// $1 quire, $2 image, $3 mount point, $4 a file that is made then, $5 way. Mounts the image and keeps the mount.
const INSIDE: &str = r#""$1" mount --via $5 "$2" "$3" && : > "$4" && exec sleep 100000"#;

pub(super) fn ways<'a>(user: &'a User<'a>, image: &'a str) -> Result<Vec<Way<'a>>> {
    let (quire, work) = (user.context.quire, user.context.work);
    let (file, objects) = (user.image(image)?, user.store().join("objects"));
    let mut ways = Vec::new();
    // A way whose mount is the kernel's, of this namespace.
    let mut add = |name, folder: &str, mount: Mount<'a>| {
        let point = user.folder(folder)?;
        let (at, away) = (point.clone(), point.clone());
        ways.push(Way {
            name,
            point,
            mount: Box::new(move || mount(&at)),
            unmount: match name {
                TREE | SERVICE | FUSE_OBJECTS | FUSE_INSIDE => Box::new(|| Ok(())),
                _ => Box::new(move || Ok(unmount(&away, UnmountFlags::DETACH)?)),
            },
        });
        anyhow::Ok(())
    };
    let erofs = file.clone();
    add(EROFS, "erofs", Box::new(move |at| mount_erofs(&erofs, at).map(|()| None)))?;
    // Root's store has the same objects and the same image.
    let composefs =
        move |at: &Path| run!("{quire} --store {work}/root-store mount {image} {at}").map(|_| None);
    add(COMPOSEFS, "composefs", Box::new(composefs))?;
    let inside = [
        (TREE, "tree"),
        (SERVICE, "service"),
        (FUSE_OBJECTS, "fuse-objects"),
        (FUSE_INSIDE, "fuse"),
    ];
    for (name, way) in inside {
        let mount = move |at: &Path| {
            let (ready, quire) = (user.home.join("ready"), &user.quire);
            let _earlier = fs::remove_file(&ready);
            let words = [quire.as_os_str(), image.as_ref(), at.as_ref(), ready.as_ref()];
            let mut command = more!(user.in_namespace(), "sh -c {INSIDE} sh {words...} {way}");
            let child = command.stdin(Stdio::null()).spawn()?;
            // Without the mount, the timed command fails.
            let _late =
                wait_until("a mount", PATIENCE, Duration::from_millis(5), || Ok(ready.exists()));
            Ok(Some(child))
        };
        add(name, &format!("inside-{way}"), Box::new(mount))?;
    }
    let fuse = move |at: &Path| {
        run!("{quire} --store {work}/root-store mount --via fuse {image} {at}").map(|_| None)
    };
    add(FUSE, "fuse", Box::new(fuse))?;
    if let Some(program) = find_program("erofsfuse") {
        let file = file.clone();
        let mount =
            move |at: &Path| serve(cmd!("{program} -f {file} {at}"), || is_mounted(at)).map(Some);
        add(EROFSFUSE, "erofsfuse", Box::new(mount))?;
    }
    if let Some(program) = std::env::var_os(CFUSE_PROGRAM) {
        let mount = move |at: &Path| {
            serve(cmd!("{program} {file} {objects} {at}"), || is_mounted(at)).map(Some)
        };
        add(CFUSE, "cfuse", Box::new(mount))?;
    }
    Ok(ways)
}
