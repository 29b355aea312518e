//! Tests a disk that loses bytes.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use testing::fake::wait_for;

use super::service::Served;

/// Uses a disk in a file on another disk that is full, so that written data is lost at the writeback.
#[test]
fn bytes_that_the_disk_has_lost_are_errors_and_no_zeros() {
    let Some(served) = Served::new() else { return };
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
        // The page cache of the device still contains the right data, so it is dropped.
        forget();
        served.read_device(&device, 64) > 0
    });
    // After this, reads must go to the disk.
    forget();
    assert_eq!(served.read_device(&device, 64), 64);
    // If read-ahead has filled the device, the disk's failure is found when the device is synced.
    let is_cause = |it: &str| it == "the disk lost data of it" || it.starts_with("cannot ");
    wait_for("the cause", || {
        let listed = served.service().status().unwrap();
        matches!(&listed[..], [it] if it.broken.as_deref().is_some_and(is_cause))
    });
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
