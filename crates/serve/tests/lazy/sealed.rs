//! Tests complete devices: new mounts use the sealed file itself, and need no service.

use std::fs;

use quire_serve::lazy::{Brought, DeviceServer, Unread};
use rustix::process::{Signal, kill_process};
use store::LazyDeviceState;
use testing::fake::wait_for;

use super::service::{Served, words};
use super::{Stage, store};

#[test]
fn a_device_that_is_filled_is_sealed_and_new_mounts_need_nobody() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("complete"), "").unwrap();
    let mut service = served.start();
    let before = served.mount();
    served.wait_for_all();
    // The file may exist before its content was written.
    let sealed = || fs::read_to_string(served.path("sealed")).unwrap();
    wait_for("the device's id", || sealed() == served.stage.device().to_string());
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    let full = served.path("full/data").join(served.stage.device().to_string());
    assert!(fs::read(path).unwrap() == fs::read(full).unwrap());
    assert!(served.service().status().unwrap().is_empty());
    assert_eq!(served.read(&before, 64), 0);
    let after = served.mount();
    let keeper = served.pid("keeper.pid");
    kill_process(keeper, Signal::STOP).unwrap();
    served.signal("service.pid", Signal::KILL);
    served.signal("keeper.pid", Signal::KILL);
    service.wait().unwrap();
    wait_for("errors", || fs::read(words(&before)).is_err());
    assert!(fs::read(words(&after)).unwrap() == served.expect);
    // The next service hands the device out at once, although it is mounted.
    let service = served.start();
    let again = served.mount();
    assert_eq!(served.read(&again, 64), 0);
    drop((before, after, again));
    served.leave();
    served.is_gone(service);
}

#[test]
fn a_service_that_dies_between_seal_and_keeper_is_succeeded() {
    let Some(served) = Served::new() else { return };
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
    drop(mount);
    served.leave();
    wait_for("the keeper's end", || !served.path("run/keeper").exists());
}

#[test]
fn a_device_that_is_being_sealed_is_not_complete_and_stays() {
    let Some(stage) = Stage::new() else { return };
    let lazy = store(&stage.folder.path().join("lazy"));
    let filler = stage.filler(&lazy);
    filler.ensure(0..stage.index.head.device_bytes, |_| ()).unwrap();
    let file = filler.device().file().try_clone().unwrap();
    let server = DeviceServer::new().unwrap();
    server.fill(filler).unwrap();
    let gone = |unread| {
        let mut gone = Vec::new();
        let left = server.remove_unused(|it| gone.push(*it), unread);
        (gone, left)
    };
    let filler = server.take_full().unwrap();
    assert!(server.take_full().is_none());
    assert!(!server.is_complete(&file).unwrap());
    // A mount may ask for the device at this moment.
    assert_eq!(gone(Unread::Stay), (vec![], 1));
    // Then no thread can complete the device any more.
    drop(filler);
    assert_eq!(gone(Unread::Stay), (vec![stage.device()], 0));
}
