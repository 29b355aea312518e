//! Tests the metrics that a service serves by HTTP.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use ::store::{FsckOptions, Who};
use containerd_api::diff::diff_client::DiffClient;
use containerd_api::snapshots::snapshots_client::SnapshotsClient;
use quire_serve::metrics::{MetricsAddress, MetricsListener};
use quire_serve::snapshots::{CollectChoices, SkipLayers, Snapshotter, serve_snapshots};
use tonic::Code;

use crate::lies::{Bringer, apply};
use crate::{Engine, Stage, code, connect, is_root, two_layers, unpacked};

impl Engine {
    /// Starts a service that also serves metrics at `metrics`.
    pub(crate) fn serve_with(
        stage: &Stage,
        snapshotter: Snapshotter,
        metrics: Option<MetricsListener>,
    ) -> Self {
        let socket = stage.socket();
        let (stop, stopped) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let (path, engine) = (socket.clone(), stage.engine());
        let service = thread::spawn(move || {
            let stop = move || {
                let _stopped = stopped.recv();
            };
            let ready = || ready.send(()).unwrap();
            serve_snapshots(snapshotter, &path, &engine, metrics, stop, ready).unwrap();
        });
        is_ready.recv().unwrap();
        assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        let (runtime, channel) = connect(&socket);
        let differ = DiffClient::new(channel.clone());
        Self { runtime, client: SnapshotsClient::new(channel), differ, stop, service }
    }
}

/// A service with metrics, at a socket beside that of the engine.
fn start(stage: &Stage) -> (Engine, std::path::PathBuf) {
    let path = stage.socket().with_file_name("metrics");
    let address = MetricsAddress::parse(path.to_str().unwrap()).unwrap();
    let listener = MetricsListener::bind(&address, Who::this_process()).unwrap();
    let mut environment = stage.environment(None, SkipLayers::Unpack);
    environment.collect = Some(CollectChoices { apart: Duration::ZERO, at_once_above: 100 });
    let snapshotter = Snapshotter::open(stage.store(), "test", environment).unwrap();
    (Engine::serve_with(stage, snapshotter, Some(listener)), path)
}

/// Requests a page. Returns the status and the body.
fn get(socket: &Path, page: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let request = format!("GET {page} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Returns the value of a metric with these labels; `None` if it is not among the metrics.
fn value(metrics: &str, name: &str) -> Option<f64> {
    let mut lines = metrics.lines().filter_map(|it| it.rsplit_once(' '));
    lines.find(|it| it.0 == name).map(|it| it.1.parse().unwrap())
}

/// Waits until a metric has a value.
fn eventually(socket: &Path, name: &str, is_so: impl Fn(f64) -> bool) -> String {
    let begun = Instant::now();
    loop {
        let (status, metrics) = get(socket, "/metrics");
        assert_eq!(status, 200, "{metrics}");
        if value(&metrics, name).is_some_and(&is_so) {
            return metrics;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{name}\n{metrics}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_node_has_metrics_without_names_of_images() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let (mut engine, socket) = start(&stage);
    assert_eq!(get(&socket, "/healthz"), (200, "ok\n".to_owned()));
    two_layers(&mut engine);
    engine.prepare("secret-container", "sha256:b").unwrap();
    engine.view("secret-view", "sha256:b").unwrap();
    code(engine.stat("none"), Code::NotFound, "none");
    let used = "quire_store_bytes{kind=\"layers\"}";
    let metrics = eventually(&socket, used, |it| it > 0.0);
    for (name, expect) in [
        ("quire_snapshotter_up", 1.0),
        ("quire_snapshotter_mounted_roots{instance=\"test\",kind=\"active\"}", 1.0),
        ("quire_snapshotter_mounted_roots{instance=\"test\",kind=\"view\"}", 1.0),
        ("quire_snapshotter_calls_total{instance=\"test\",call=\"Prepare\",code=\"OK\"}", 3.0),
        ("quire_snapshotter_calls_total{instance=\"test\",call=\"Stat\",code=\"NotFound\"}", 1.0),
        ("quire_snapshotter_damaged_snapshots{instance=\"test\"}", 0.0),
        ("quire_snapshotter_last_collection_timestamp_seconds{instance=\"test\"}", 0.0),
        ("quire_store_damaged_images", 0.0),
        ("quire_store_unreadable_files", 0.0),
        ("quire_lazy_up", 0.0),
        ("quire_lazy_reads_total", 0.0),
    ] {
        assert_eq!(value(&metrics, name), Some(expect), "{name}\n{metrics}");
    }
    for name in ["quire_store_disk_available_bytes", "quire_store_images"] {
        assert!(value(&metrics, name).unwrap() > 0.0, "{metrics}");
    }
    // Other users of the host may read metrics.
    assert!(!metrics.contains("secret") && !metrics.contains("sha256"), "{metrics}");
    // Every metric is described.
    for line in metrics.lines().filter(|it| !it.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let is_part = ["_bucket", "_sum", "_count"].iter().find_map(|it| name.strip_suffix(it));
        let name = is_part.unwrap_or(name);
        assert!(metrics.contains(&format!("# TYPE {name} ")), "{line}");
    }

    for key in ["secret-container", "secret-view", "sha256:b", "sha256:a"] {
        engine.remove(key).unwrap();
    }
    engine.cleanup();
    let collected = "quire_snapshotter_collections_total{instance=\"test\"}";
    let metrics = eventually(&socket, collected, |it| it > 0.0);
    // The clock of the test.
    let last = "quire_snapshotter_last_collection_timestamp_seconds{instance=\"test\"}";
    assert_eq!(value(&metrics, last), Some(1_700_000_000.0), "{metrics}");
    engine.end();
    assert!(!socket.exists());
}

/// Damage that `quire fsck --repair` has found, and layers that the service has read again.
#[test]
fn damage_is_in_the_metrics() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let Bringer { store, mut engine, bytes, digest } = Bringer::start(&stage);
    let root = engine.prepare(&unpacked("1"), "").unwrap();
    engine.apply(apply(&root, &digest, bytes.len())).unwrap();
    engine.commit("layer", &unpacked("1")).unwrap();
    engine.prepare("container", "layer").unwrap();
    engine.remove("container").unwrap();
    engine.end();
    let object = crate::heal::file(&stage.0.path().join("store/objects"), 1);
    fs::remove_file(object).unwrap();
    let report = stage.store().fsck(FsckOptions::default()).unwrap();
    stage.store().remove_damaged(&report).unwrap();

    let (mut engine, socket) = start(&stage);
    eventually(&socket, "quire_store_damaged_images", |it| it == 1.0);
    // The engine has no blob at first.
    let kept = std::mem::take(&mut store.kept.lock().unwrap().blobs);
    code(engine.prepare("container", "layer"), Code::FailedPrecondition, "lacks the data");
    store.kept.lock().unwrap().blobs = kept;
    engine.prepare("container", "layer").unwrap();
    let repaired = "quire_snapshotter_repaired_layers_total{instance=\"test\"}";
    let metrics = eventually(&socket, repaired, |it| it > 0.0);
    let failed = "quire_snapshotter_failed_repairs_total{instance=\"test\"}";
    for name in [repaired, failed] {
        assert_eq!(value(&metrics, name), Some(1.0), "{name}\n{metrics}");
    }
    engine.end();
}
