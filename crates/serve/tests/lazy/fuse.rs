//! Tests behaviour that is specific to files on FUSE.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;

use rustix::process::{Signal, kill_process};
use testing::fake::wait_for;

use super::service::{Served, words};

/// Kills service and keeper at the same moment, so that neither can replace the other.
fn kill_both(served: &Served, service: &mut Child) {
    let keeper = served.pid("keeper.pid");
    kill_process(keeper, Signal::STOP).unwrap();
    served.signal("service.pid", Signal::KILL);
    served.signal("keeper.pid", Signal::KILL);
    service.wait().unwrap();
    wait_for("the keeper's end", || {
        !PathBuf::from(format!("/proc/{}", keeper.as_raw_nonzero())).exists()
    });
}

#[test]
fn nobody_sees_bytes_that_are_not_there_whoever_dies() {
    let Some(served) = Served::new() else { return };
    let mut service = served.start();
    let mount = served.mount();
    assert_eq!(served.read(&mount, 1), 0);
    // Some readers already wait when both die, and others come later.
    fs::write(served.path("wait"), "").unwrap();
    thread::scope(|scope| {
        let readers = scope.spawn(|| served.read(&mount, 64));
        thread::sleep(std::time::Duration::from_millis(50));
        kill_both(&served, &mut service);
        assert!(readers.join().unwrap() > 0);
    });
    fs::remove_file(served.path("wait")).unwrap();
    assert!(served.read(&mount, 64) > 0);
    // The device is handed out again at once, and new readers get all of its data. The old mount stays broken.
    let service = served.start();
    let another = served.mount();
    assert_eq!(served.read(&another, 64), 0);
    assert!(fs::read(words(&another)).unwrap() == served.expect);
    assert!(fs::read(words(&mount)).is_err());
    drop((mount, another));
    served.end(service);
}

#[test]
fn a_device_that_is_sealed_is_served_until_it_is_unmounted() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("complete"), "").unwrap();
    let mut service = served.start();
    let mount = served.mount();
    served.wait_for_all();
    assert!(served.service().status().unwrap().is_empty());
    assert_eq!(served.read(&mount, 64), 0);
    // The next service continues to serve the device, even if the file has lost its name.
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    let link = path.with_extension("link");
    fs::hard_link(&path, &link).unwrap();
    fs::remove_file(&path).unwrap();
    served.signal("service.pid", Signal::KILL);
    served.wait_for_service();
    service.wait().unwrap();
    fs::hard_link(&link, &path).unwrap();
    fs::remove_file(&link).unwrap();
    assert!(fs::read(words(&mount)).unwrap() == served.expect);
    // New mounts use the file itself, and need no service.
    let plain = served.mount();
    let (plain_reads, lazy_reads) = {
        let keeper = served.pid("keeper.pid");
        let last = served.signal("service.pid", Signal::STOP);
        fs::write(served.path("service.pid"), last.as_raw_nonzero().to_string()).unwrap();
        let plain_reads = fs::read(words(&plain)).unwrap() == served.expect;
        kill_process(last, Signal::CONT).unwrap();
        let _lives = kill_process(keeper, Signal::CONT);
        (plain_reads, fs::read(words(&mount)).unwrap() == served.expect)
    };
    assert!(plain_reads && lazy_reads);
    drop((mount, plain));
    served.leave();
    wait_for("the keeper's end", || !served.path("run/keeper").exists());
}

#[test]
fn bytes_that_changed_on_the_disk_are_errors() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let device = served.lend();
    assert_eq!(served.read_device(&device, 1), 0);
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    let file = fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(b"other bytes", 100).unwrap();
    drop(file);
    assert_eq!(served.read_device(&device, 1), 1);
    assert_eq!(served.state(), Some(store::LazyDeviceState::Condemned));
    drop(device);
    served.leave();
    served.is_gone(service);
}

#[test]
fn readers_without_a_service_get_errors_after_a_while() {
    if !testing::long_tests() {
        return;
    }
    let Some(served) = Served::new() else { return };
    let mut service = served.start();
    let mount = served.mount();
    served.leave();
    assert!(service.wait().unwrap().success());
    // The keeper waits ten seconds for a service.
    assert!(served.read(&mount, 8) > 0);
    let service = served.start();
    wait_for("the bytes", || served.read(&mount, 8) == 0);
    drop(mount);
    served.end(service);
}

#[test]
fn a_reader_that_waits_can_be_killed() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let mount = served.mount();
    let pid = served.pid("service.pid");
    kill_process(pid, Signal::STOP).unwrap();
    let path = words(&mount).display().to_string().replace("self", &std::process::id().to_string());
    let mut reader = Command::new("/bin/cat").arg(path).stdout(Stdio::null()).spawn().unwrap();
    thread::sleep(std::time::Duration::from_millis(200));
    assert!(reader.try_wait().unwrap().is_none());
    reader.kill().unwrap();
    let mut status = None;
    wait_for("its end", || {
        status = reader.try_wait().unwrap();
        status.is_some()
    });
    kill_process(pid, Signal::CONT).unwrap();
    assert!(!status.unwrap().success());
    assert_eq!(served.read(&mount, 8), 0);
    drop(mount);
    served.end(service);
}
