//! Tests services that die together with their keeper, or repeatedly.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;

use container::life::monitor::Watch as _;
use quire_serve::lazy::{DoorKind, LazyService};
use rustix::process::{Signal, kill_process};
use testing::fake::wait_for;

use super::service::Served;

#[test]
fn with_a_watcher_nobody_sees_bytes_that_are_not_there() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let mut service = served.start();
    let watch = served.service().watch(&served.path("run")).unwrap();
    let mount = served.mount();
    // As long as service or keeper lives, the watch does nothing.
    let wait = watch.look();
    served.signal("service.pid", Signal::KILL);
    service.wait().unwrap();
    assert_eq!(watch.look(), wait);
    served.wait_for_service();
    assert_eq!((served.read(&mount, 8), watch.look()), (0, wait));

    let keeper = served.pid("keeper.pid");
    kill_process(keeper, Signal::STOP).unwrap();
    let unread = served.service().status().unwrap()[0].filled;
    let last = served.signal("service.pid", Signal::KILL);
    served.signal("keeper.pid", Signal::KILL);
    for pid in [last, keeper] {
        wait_for("their end", || {
            !PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero())).exists()
        });
    }
    let errors = || {
        thread::scope(|scope| {
            let readers = scope.spawn(|| served.read(&mount, 64));
            while !readers.is_finished() {
                assert!(watch.look() < wait);
                thread::sleep(std::time::Duration::from_millis(10));
            }
            readers.join().unwrap()
        })
    };
    let units = served.stage.index.head.units.len() as u64;
    assert!(unread < units && errors() > 0);
    // The new service has another group, and does not hand out a device that is mounted.
    let service = served.start();
    assert!(errors() > 0);
    assert!(served.service().lend(&served.stage.device()).is_err());
    // The mount is dropped before its watcher, as when a container ends. Then the old group has no marks left.
    drop(mount);
    drop(watch);
    assert_eq!(served.read(&served.mount(), 8), 0);
    served.end(service);
}

#[test]
fn a_reader_that_each_service_dies_of_gets_an_error_and_others_go_on() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let mut service = served.start();
    let device = served.lend();
    fs::write(served.path("die"), "").unwrap();
    assert_eq!(served.read_device(&device, 1), 1);
    fs::remove_file(served.path("die")).unwrap();
    service.wait().unwrap();
    // The last service may have died a moment ago.
    wait_for("a service", || {
        let service = LazyService::connect(&served.path("run")).ok().flatten();
        service.is_some_and(|it| it.status().is_ok())
    });
    assert_eq!(served.read_device(&device, 64), 0);
    drop(device);
    wait_for("the last service's note", || served.path("service.pid").exists());
    served.leave();
    served.is_over();
}

#[test]
fn bytes_that_the_disk_has_lost_are_errors_and_no_zeros() {
    a_disk_loses_bytes(DoorKind::Fanotify);
}

#[test]
fn bytes_that_the_disk_has_lost_are_errors_behind_fuse() {
    a_disk_loses_bytes(DoorKind::Fuse);
}

/// Uses a disk in a file on another disk that is full, so that written data is lost at the writeback.
fn a_disk_loses_bytes(door: DoorKind) {
    // These tests sync all disks of the host, so they run one at a time.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(served) = Served::new(door) else { return };
    if !testing::programs(&["mount", "umount", "mkfs.ext4", "cp"]) {
        return;
    }
    let [room, disk] = ["room", "disk"].map(|it| served.path(it));
    let run = |program: &str, arguments: &[&str]| {
        let ran = Command::new(program).args(arguments).output().unwrap();
        assert!(ran.status.success(), "{program}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    let text = |it: &Path| it.to_str().unwrap().to_owned();
    [&room, &disk].iter().for_each(|it| fs::create_dir(it).unwrap());
    run("mount", &["-t", "tmpfs", "-o", "size=40m", "tmpfs", &text(&room)]);
    let _room = Unmount(room.clone());
    let image = room.join("image");
    File::create(&image).unwrap().set_len(256 << 20).unwrap();
    // All metadata of the file system is allocated in advance.
    run(
        "mkfs.ext4",
        &["-q", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", &text(&image)],
    );
    run("mount", &["-o", "loop", &text(&image), &text(&disk)]);
    let _disk = Unmount(disk.clone());
    let store = served.path("lazy");
    run("cp", &["-a", &text(&store), &text(&disk)]);
    fs::remove_dir_all(&store).unwrap();
    std::os::unix::fs::symlink(disk.join("lazy"), &store).unwrap();
    rustix::fs::sync();

    let service = served.start();
    let device = served.lend();
    let filler = room.join("filler");
    let mut full = File::create(&filler).unwrap();
    while full.write_all(&[1; 1 << 16]).is_ok() {}
    assert_eq!(served.read_device(&device, 64), 0);
    // Until the loss is reported, reads return the right data from memory.
    let forget = || fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    wait_for("errors", || {
        rustix::fs::sync();
        if door == DoorKind::Fuse {
            // The page cache of the file on FUSE still contains the right data, so it is dropped.
            forget();
        }
        served.read_device(&device, 64) > 0
    });
    // After this, reads must go to the disk.
    forget();
    assert_eq!(served.read_device(&device, 64), 64);
    drop(device);
    served.leave();
    served.is_gone(service);
}

struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ended = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}
