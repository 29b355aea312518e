//! Tests that idle clients and a panicking thread do not block others.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use quire_serve::lazy::{FillError, LazyService, SourcePatience};
use store::LazyDeviceState;
use testing::fake::wait_for;

use super::service::Served;
use super::{Lie, Stage, store};

#[test]
fn a_client_that_asks_on_and_on_keeps_no_other_waiting() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let client = served.service();
        client.status().unwrap();
        // Another client, which sends nothing.
        let silent = served.service();
        let asks = scope.spawn(|| {
            let client = client;
            let mut asked = 0;
            while !is_done.load(Ordering::Relaxed) && asked < 100 {
                client.status().unwrap();
                asked += 1;
                thread::sleep(Duration::from_millis(100));
            }
            asked
        });
        let device = served.lend();
        assert_eq!(served.read_device(&device, 8), 0);
        is_done.store(true, Ordering::Relaxed);
        assert!(asks.join().unwrap() < 100, "it was the other's turn only after that");
        drop((silent, device));
    });
    served.end(service);
}

#[test]
fn more_clients_than_are_listened_to_are_answered_in_turn() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let clients: Vec<LazyService> = (0..100).map(|_| served.service()).collect();
    thread::scope(|scope| {
        for client in clients {
            // The client that got its reply disconnects, so another client can connect.
            scope.spawn(move || assert!(client.status().unwrap().is_empty()));
        }
    });
    served.end(service);
}

#[test]
fn a_thread_that_panics_costs_one_reader_an_error() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let pid = served.pid("service.pid");
    let device = served.lend();
    fs::write(served.path("panic"), "").unwrap();
    assert_eq!(served.read_device(&device, 1), 1);
    assert!(!served.path("panic").exists());
    assert_eq!(served.read_device(&device, 64), 0);
    assert_eq!(served.pid("service.pid"), pid);
    drop(device);
    served.end(service);
}

#[test]
fn a_service_that_panics_ends_and_the_next_one_serves_its_readers() {
    let Some(served) = Served::new() else { return };
    let mut service = served.start();
    let pid = served.pid("service.pid");
    let device = served.lend();
    fs::write(served.path("break"), "").unwrap();
    assert_eq!(service.wait().unwrap().code(), Some(101), "a panic of the test's process");
    wait_for("the next service", || served.pid("service.pid") != pid);
    assert!(!served.path("break").exists());
    assert_eq!(served.read_device(&device, 64), 0);
    drop(device);
    served.leave();
    served.is_over();
}

#[test]
fn a_device_that_was_written_whole_is_sealed_though_nobody_reads_it() {
    let Some(served) = Served::new() else { return };
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    let full = served.path("full/data").join(served.stage.device().to_string());
    let bytes = fs::read(full).unwrap();
    // One unit is wrong, so it is fetched again.
    let mut written = bytes.clone();
    written[70_000] ^= 1;
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .map(|it| {
            std::os::unix::fs::FileExt::write_all_at(&it, &written, 0).unwrap();
        })
        .unwrap();
    let service = served.start();
    let device = served.lend();
    wait_for("the seal", || served.state() == Some(LazyDeviceState::Sealed));
    assert!(fs::read(&path).unwrap() == bytes);
    drop(device);
    served.leave();
    served.is_gone(service);
}

/// A repeated read must not wait either: the kernel reads ahead, and reads less after an error.
#[test]
fn a_reader_does_not_wait_for_ever_for_what_another_brings() {
    let Some(stage) = Stage::new() else { return };
    let lazy = store(&stage.folder.path().join("lazy"));
    let long = Duration::from_secs(3600);
    let patience = SourcePatience::new(Some(Duration::from_millis(100))).with_pauses(long, long);
    let filler = stage.filler(&lazy).with_patience(&patience);
    *stage.blob.lie.lock().unwrap() = Lie::Hangs;
    let before = stage.blob.asked.load(Ordering::Relaxed);
    thread::scope(|scope| {
        let first = scope.spawn(|| filler.ensure(0..1, |_| ()));
        stage.wait_for("a request", || stage.blob.asked.load(Ordering::Relaxed) > before);
        let second = scope.spawn(|| filler.ensure(1..2, |_| ()));
        stage.wait_for("the second reader", || second.is_finished());
        let is_denied = filler.is_denied(&(1..2));
        assert!(filler.overdue(Instant::now()).is_none());
        *stage.blob.lie.lock().unwrap() = Lie::None;
        assert!(matches!(second.join().unwrap(), Err(FillError::Silent(_))));
        first.join().unwrap().unwrap();
        assert!(is_denied);
        // The late bytes are used.
        assert!(!filler.is_denied(&(1..2)));
        filler.ensure(1..2, |_| ()).unwrap();
    });
}
