//! When a process is killed, the kernel releases its mounts and loop devices.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};

use kernel::mount::{
    self, Backing, Credentials, ErofsOptions, OverlayOptions, Propagation, TmpfsOptions, Verity,
    XattrNamespace,
};
use kernel::process::{Exit, Setup, Signal, spawn};

use crate::stage::{Stage, open_directory};
use crate::{lease, loopdev};

/// The child of [`nothing_survives_a_kill`], which runs in the stage's directory.
#[test]
#[ignore = "started by nothing_survives_a_kill"]
fn child_that_mounts_and_waits() {
    kernel::process::own_mounts(Propagation::Private).unwrap();
    let tmpfs = TmpfsOptions { name: "quire:doomed", bytes: None, inodes: None, mode: 0o755 };
    mount::tmpfs(&tmpfs).unwrap().attach_at(Path::new("tmpfs")).unwrap();
    fs::copy("hello.erofs", "tmpfs/image").unwrap();

    let image = File::open("composefs.erofs").unwrap();
    let image = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap().mount;
    let looped = File::open("tmpfs/image").unwrap();
    let looped = mount::erofs(looped.as_fd(), &ErofsOptions::default()).unwrap();
    assert_eq!(looped.backing, Backing::Loop);
    let objects = open_directory(Path::new("objects"));
    let overlay = mount::overlay(&OverlayOptions {
        name: "quire:doomed",
        lower: &[image.as_fd()],
        data: &[objects.as_fd()],
        upper: None,
        verity: Verity::Off,
        xattrs: XattrNamespace::Trusted,
        credentials: Credentials::Mounter,
    });
    overlay.unwrap().attach_at(Path::new("at")).unwrap();
    looped.mount.attach_at(Path::new("at2")).unwrap();
    assert!(Path::new("at/big").exists() && Path::new("at2/hello").exists());
    println!("mounted");
    loop {
        std::thread::park();
    }
}

#[test]
fn nothing_survives_a_kill() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    stage.hello();
    for name in ["tmpfs", "at", "at2"] {
        stage.dir(name);
    }
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["--exact", "death::child_that_mounts_and_waits", "--ignored", "--nocapture"])
        .current_dir(stage.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let setup = Setup { die_with_parent: Some(Signal::KILL), ..Setup::default() };
    let mut child = spawn(command, &setup).unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("mounted")));

    let in_use = || kernel::lease::in_use(File::open(&composefs.image).unwrap().as_fd()).unwrap();
    assert!(in_use());
    assert_eq!(loopdev::backed_by(Path::new("/image")).len(), 1);
    assert!(crate::stage::mountinfo("quire:doomed").is_empty());
    child.process.signal(Signal::KILL).unwrap();
    assert_eq!(child.process.wait().unwrap(), Exit::Signal(9));

    lease::wait_until_free(&composefs.image);
    loopdev::wait_until_free(Path::new("/image"));
    // Checks the mounts of all processes.
    for entry in fs::read_dir("/proc").unwrap() {
        let table = fs::read_to_string(entry.unwrap().path().join("mountinfo"));
        assert!(!table.unwrap_or_default().contains("quire:doomed"));
    }
}
