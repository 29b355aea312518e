//! Tests complete devices, which need no service if they have a mark instead of a file on FUSE.

use std::fs;

use quire_serve::lazy::{Brought, DoorKind};
use rustix::process::{Signal, kill_process};
use store::LazyDeviceState;
use testing::fake::wait_for;

use super::service::{Served, words};

#[test]
fn a_device_that_is_filled_is_sealed_and_needs_nobody() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    fs::write(served.path("complete"), "").unwrap();
    let mut service = served.start();
    let mount = served.mount();
    served.wait_for_all();
    // The file may exist before its content was written.
    let sealed = || fs::read_to_string(served.path("sealed")).unwrap();
    wait_for("the device's id", || sealed() == served.stage.device().to_string());
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    let full = served.path("full/data").join(served.stage.device().to_string());
    assert!(fs::read(path).unwrap() == fs::read(full).unwrap());
    assert!(served.service().status().unwrap().is_empty());
    assert_eq!(served.read(&mount, 64), 0);
    // A client that requests the device after it was sealed gets it.
    let lent = served.service().lend(&served.stage.device()).unwrap();
    drop(lent);
    // Without any process that holds the group, a lazy device would return zeros. Most of this file was not read
    // before.
    let keeper = served.pid("keeper.pid");
    kill_process(keeper, Signal::STOP).unwrap();
    served.signal("service.pid", Signal::KILL);
    served.signal("keeper.pid", Signal::KILL);
    service.wait().unwrap();
    assert!(fs::read(words(&mount)).unwrap() == served.expect);
    // The next service hands the device out at once, although it is mounted.
    let service = served.start();
    let again = served.mount();
    assert_eq!(served.read(&again, 64), 0);
    drop((again, mount));
    served.leave();
    served.is_gone(service);
}

#[test]
fn a_mount_that_lives_needs_no_keeper_once_all_is_here() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    fs::write(served.path("complete"), "").unwrap();
    let service = served.start();
    let mount = served.mount();
    served.wait_for_all();
    served.leave();
    served.is_gone(service);
    assert!(fs::read(words(&mount)).unwrap() == served.expect);
}

#[test]
fn a_service_that_dies_between_seal_and_keeper_is_succeeded() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let mut service = served.start();
    let mount = served.mount();
    let keeper = served.pid("keeper.pid");
    // The keeper receives no more messages.
    kill_process(keeper, Signal::STOP).unwrap();
    assert_eq!(served.service().bring(&served.stage.image, Some("all")).unwrap(), Brought::Trace);
    wait_for("the seal", || served.state() == Some(LazyDeviceState::Sealed));
    assert!(!served.path("sealed").exists());
    served.signal("service.pid", Signal::KILL);
    kill_process(keeper, Signal::CONT).unwrap();
    served.wait_for_service();
    service.wait().unwrap();
    assert!(fs::read(words(&mount)).unwrap() == served.expect);
    served.wait_for_all();
    // The new service has no work for the mount.
    served.leave();
    wait_for("the keeper's end", || !served.path("run/keeper").exists());
    assert_eq!(served.read(&mount, 64), 0);
}
