//! Services that die with their keeper, or again and again.

use std::fs;
use std::path::PathBuf;
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
    // As long as one of the two lives, it does nothing.
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
    // Another service has another group, and does not lend what is mounted.
    let service = served.start();
    assert!(errors() > 0);
    assert!(served.service().lend(&served.stage.device()).is_err());
    // First the mount, then its watcher, as when a container ends. Then nothing is left of the old group.
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
    // The last one may have died this moment.
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
