//! Lazy images behind files on FUSE: `serve --lazy --door fuse`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;

use kernel::version::KernelVersion;
use rustix::process::{Signal, kill_process};
use testing::fake::wait_for;

use crate::runs::runtimes;
use crate::served::{Lazy, end, keeper_of, serve_folder, serve_with};

/// Native images have long prefixes and blocks of 512 bytes (docs/format/erofs-profile.md).
const NATIVE: KernelVersion = KernelVersion { major: 6, minor: 4 };

/// A store with a lazy image, and its service. `None`, after saying so, where no such image can be mounted.
fn served() -> Option<(Lazy, Child)> {
    if KernelVersion::running().unwrap() < NATIVE {
        testing::skipped("native images: this kernel is older than Linux 6.4");
        return None;
    }
    let lazy = Lazy::behind_any_door()?;
    let service = serve(&lazy);
    Some((lazy, service))
}

fn serve(lazy: &Lazy) -> Child {
    serve_with(&lazy.place, &["--door", "fuse"], |command| command)
}

/// Ends a service and its keeper at the same moment: neither can replace the other.
fn kill_both(lazy: &Lazy, service: &mut Child) {
    let keeper = keeper_of(&serve_folder(&lazy.place));
    kill_process(keeper, Signal::STOP).unwrap();
    service.kill().unwrap();
    service.wait().unwrap();
    kill_process(keeper, Signal::KILL).unwrap();
    let process = PathBuf::from(format!("/proc/{}", keeper.as_raw_nonzero()));
    wait_for("its end", || !process.exists());
}

#[test]
fn files_on_fuse_stand_for_devices() {
    let Some((lazy, mut service)) = served() else { return };
    let place = &lazy.place;
    fs::create_dir(place.path("root")).unwrap();
    place.out("mount --lazy lazy root");
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    assert!(place.out("ps --lazy").contains("fuse"));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(" - fuse quire"), "they are attached somewhere");
    // gc keeps what is in use, also without a name.
    place.out("rmi lazy");
    place.out("gc");
    let long = fs::read(place.path("root/etc/long")).unwrap();
    assert!(long == fs::read(lazy.tree.join("etc/long")).unwrap());
    place.out("umount root");
    end(place, &mut service);
    place.out("gc");
    let sparse = fs::read_dir(place.path("store/sparse")).unwrap();
    assert_eq!(sparse.count(), 0, "the device is gone");
}

#[test]
fn containers_run_from_files_on_fuse() {
    let Some((lazy, mut service)) = served() else { return };
    let words = String::from_utf8(lazy.words()).unwrap();
    for runtime in runtimes() {
        let line = format!("run --rm --lazy --runtime {runtime} lazy cat /words");
        assert!(lazy.place.out(&line) == words, "{runtime}");
    }
    end(&lazy.place, &mut service);
}

#[test]
fn a_mount_on_fuse_never_reads_zeros_though_all_others_are_killed() {
    let Some((lazy, mut service)) = served() else { return };
    let place = &lazy.place;
    let read = |root: &str| fs::read(place.path(root).join("words"));
    for root in ["root", "again"] {
        fs::create_dir(place.path(root)).unwrap();
    }
    place.out("mount --lazy --prefetch none lazy root");
    kill_both(&lazy, &mut service);
    let error = read("root").map(|it| it.len()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    // Mounted again, it can be read. What was mounted before stays as it is.
    let mut service = serve(&lazy);
    place.out("mount --lazy lazy again");
    assert!(read("again").unwrap() == lazy.words());
    read("root").unwrap_err();
    place.out("umount root");
    place.out("umount again");
    end(place, &mut service);
    assert!(!Path::new(&serve_folder(place)).exists());
}

#[test]
fn settings_choose_the_door_too() {
    let Some((lazy, mut service)) = served() else { return };
    let place = &lazy.place;
    end(place, &mut service);
    fs::write(place.path("serve.toml"), "door = \"fuse\"\n").unwrap();
    let config = place.path("serve.toml");
    let mut service = serve_with(place, &["--config", config.to_str().unwrap()], |command| command);
    fs::create_dir(place.path("root")).unwrap();
    place.out("mount --lazy lazy root");
    assert!(place.out("ps --lazy --json").contains("\"fuse\""));
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    place.out("umount root");
    end(place, &mut service);
}
