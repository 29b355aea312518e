//! Tests that the service frees the space of data that an engine has dropped.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use containerd_api::counts::GetCountsResponse;
use quire_serve::snapshots::{CollectChoices, SkipLayers, Snapshotter, ask_counts};

use crate::{Engine, Stage, is_root, two_layers, unpacked};

const HOUR: Duration = Duration::from_secs(3600);
const NEVER: u8 = 100;

fn start(stage: &Stage, choices: CollectChoices) -> Engine {
    let mut environment = stage.environment(None, SkipLayers::Unpack);
    environment.collect = Some(choices);
    Engine::serve(stage, Snapshotter::open(stage.store(), "test", environment).unwrap())
}

fn counts(stage: &Stage) -> GetCountsResponse {
    ask_counts(&stage.socket()).unwrap().unwrap()
}

/// Waits until the service's thread has done its work.
fn eventually(mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "not so after a minute");
        thread::sleep(Duration::from_millis(10));
    }
}

fn left(stage: &Stage) -> [usize; 2] {
    ["images", "layers"].map(|it| stage.count(it))
}

/// Removes the snapshots of `two_layers`, as the garbage collection of an engine does.
fn drop_layers(engine: &mut Engine) {
    for key in ["sha256:b", "sha256:a"] {
        engine.remove(key).unwrap();
    }
    engine.cleanup();
}

#[test]
fn what_an_engine_has_dropped_is_freed() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let choices = CollectChoices { apart: HOUR, at_once_above: NEVER };
    let mut engine = start(&stage, choices);
    two_layers(&mut engine);
    engine.view("view", "sha256:b").unwrap();
    engine.remove("view").unwrap();
    let before = left(&stage);
    assert!(before[1] >= 2, "{before:?}");
    // Engines hold a lock while they remove snapshots, so `remove` must not free anything.
    engine.remove("sha256:b").unwrap();
    assert_eq!(left(&stage), before);
    engine.remove("sha256:a").unwrap();
    engine.cleanup();
    eventually(|| counts(&stage).collections == 1);
    assert_eq!(left(&stage), [0, 0]);
    let counted = counts(&stage);
    assert!(counted.collected_items > 4 && counted.collected_bytes > 0, "{counted:?}");
    // Requests within the hour are merged into one collection.
    two_layers(&mut engine);
    let before = left(&stage);
    drop_layers(&mut engine);
    engine.cleanup();
    // Another thread collects, and begins within milliseconds if it begins at all.
    for _ in 0..30 {
        thread::sleep(Duration::from_millis(10));
        assert_eq!((counts(&stage).collections, left(&stage)), (1, before));
    }
    engine.end();
}

/// kubelet measures the disk directly after it has removed images.
#[test]
fn a_disk_that_is_nearly_full_does_not_wait() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = start(&stage, CollectChoices { apart: HOUR, at_once_above: 0 });
    for collections in 1..3 {
        two_layers(&mut engine);
        drop_layers(&mut engine);
        assert_eq!((counts(&stage).collections, left(&stage)), (collections, [0, 0]));
    }
    engine.end();
}

/// Such a layer remains after a failed pull.
#[test]
fn a_layer_that_nothing_stands_on_is_freed() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let choices = CollectChoices { apart: Duration::ZERO, at_once_above: NEVER };
    let mut engine = start(&stage, choices);
    two_layers(&mut engine);
    let key = unpacked("3");
    let root = engine.prepare(&key, "sha256:b").unwrap();
    fs::write(root.join("half"), "half".repeat(5000)).unwrap();
    engine.commit("sha256:c", &key).unwrap();
    assert!(left(&stage)[1] > 2);
    engine.remove("sha256:c").unwrap();
    engine.cleanup();
    eventually(|| left(&stage)[1] == 2);
    let root = engine.prepare("container", "sha256:b").unwrap();
    assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
    engine.end();
}

/// A failed collection must only cost space.
#[test]
fn a_collection_that_fails_stops_nothing() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let choices = CollectChoices { apart: Duration::ZERO, at_once_above: NEVER };
    let mut engine = start(&stage, choices);
    let bad = stage.0.path().join("store/refs/bad:latest");
    fs::write(&bad, "damaged").unwrap();
    two_layers(&mut engine);
    let before = left(&stage);
    drop_layers(&mut engine);
    eventually(|| counts(&stage).failed_collections > 0);
    assert_eq!(left(&stage), before);
    fs::remove_file(&bad).unwrap();
    engine.cleanup();
    eventually(|| left(&stage) == [0, 0]);
    two_layers(&mut engine);
    engine.end();
}
