//! Tests that missing layers are downloaded when a layer or an image is made from them.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use containerd_api::snapshots::CommitSnapshotRequest;
use containerd_api::snapshots::snapshots_client::SnapshotsClient;
use image::digest::Digest;
use oci::policy::Policies;
use oci::registry::Settings;
use quire_serve::lazy::{ImportResources, Program, Starter};
use quire_serve::snapshots::{
    EngineChoices, EngineImages, LazyChoices, LazyError, SkipLayers, Snapshotter,
};
use store::{LazySnapshot, Seconds, SnapshotKind, Store, Who};
use tonic::{Code, Status};
use transfer::lazy::TrustIndex;

use crate::{Engine, Stage, code, connect, is_root, two_layers, unpacked};

/// Returns the source of an engine's images in a store, which downloads layers by this function.
fn images(
    store: &Store,
    download: impl Fn() -> Result<(), LazyError> + Send + Sync + 'static,
) -> EngineImages {
    let choices = EngineChoices {
        policies: Box::new(|| Ok(Policies::load(&[])?)),
        registries: Box::new(|_| Ok(Settings::default())),
        has_credentials: false,
        trust: TrustIndex::Signed,
        starter: Starter {
            program: Program { path: "/usr/bin/false".into(), arguments: Vec::new() },
            options: Vec::new(),
            who: Who::this_process(),
            remark: Box::new(|_| ()),
        },
        resources: ImportResources {
            now: || Seconds(1_700_000_000),
            threads: NonZeroUsize::MIN,
            scratch: std::env::temp_dir(),
        },
    };
    EngineImages::new(store, choices).with_download(move |_| download())
}

/// Makes the snapshot of the upper layer look as if its layer were not downloaded. Returns the path of the layer.
fn forget_layer(stage: &Stage) -> PathBuf {
    let store = stage.store();
    let bytes = br#"{"schemaVersion":2,"layers":[]}"#;
    let manifest = Digest::sha256(bytes);
    let transaction = store.begin().unwrap();
    transaction.manifest(&manifest, bytes).unwrap();
    transaction.commit().unwrap();
    let instance = store.open_snapshots("test").unwrap();
    let (records, _) = instance.read().unwrap();
    let (number, record) = records.iter().find(|it| it.1.name == "sha256:b").unwrap();
    let mut content = record.content().unwrap().clone();
    content.lazy = Some(LazySnapshot { manifest, image: content.image.unwrap() });
    let layer = content.layer.to_string().trim_start_matches("sha256:").to_owned();
    let mut record = record.clone();
    record.kind = SnapshotKind::Committed(content);
    store.settle_snapshot(&instance, *number, &record).unwrap();
    let folder = stage.0.path().join("store/layers");
    let mut files = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
    files.find(|it| it.to_string_lossy().contains(&layer)).unwrap()
}

/// Commits a root, as another client of the service.
fn commit(socket: &Path, text: &str) -> Result<(), Status> {
    let (runtime, channel) = connect(socket);
    let (name, key) = (format!("sha256:of-{text}"), unpacked(text));
    let request = CommitSnapshotRequest { name, key, ..CommitSnapshotRequest::default() };
    runtime.block_on(SnapshotsClient::new(channel).commit(request)).map(drop)
}

/// A download may take minutes. During that time, engines can use the lower layers, and a second commit does not
/// download the layers again.
#[test]
fn nobody_else_waits_while_layers_are_brought() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    engine.view("view", "sha256:b").unwrap();
    engine.remove("view").unwrap();
    engine.end();
    let here = forget_layer(&stage);
    let there = stage.0.path().join("far-away");
    rustix::fs::rename(&here, &there).unwrap();

    let ((asked, is_asked), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
    let (times, goes_on) = (Arc::new(AtomicUsize::new(0)), Mutex::new(goes_on));
    let of_download = Arc::clone(&times);
    // A registry with one layer, which it returns when the test allows it.
    let download = move || {
        of_download.fetch_add(1, Ordering::Relaxed);
        asked.send(())?;
        goes_on.lock().unwrap().recv()?;
        Ok(rustix::fs::rename(&there, &here)?)
    };
    let images = Arc::new(images(&stage.store(), download));
    let mut environment = stage.environment(None, SkipLayers::Unpack);
    environment.lazy = Some(LazyChoices { images, starts: false, image_service: None });
    let snapshotter = Snapshotter::open(stage.store(), "test", environment).unwrap();
    let mut engine = Engine::serve(&stage, snapshotter);
    for text in ["3", "4"] {
        engine.prepare(&unpacked(text), "sha256:b").unwrap();
        // Usually the differ applies layers, and needs no root.
        let root = engine.mounts(&unpacked(text)).unwrap();
        fs::write(root.join("etc").join(text), text).unwrap();
    }
    let socket = stage.socket();
    thread::scope(|scope| {
        let commits = ["3", "4"].map(|it| scope.spawn(|| commit(&socket, it)));
        is_asked.recv().unwrap();
        code(engine.remove("sha256:b"), Code::FailedPrecondition, "sha256:b");
        let root = engine.prepare("container", "sha256:b").unwrap();
        assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
        go_on.send(()).unwrap();
        for commit in commits {
            commit.join().unwrap().unwrap();
        }
    });
    // The second commit found the layer that the first one had downloaded.
    assert_eq!(times.load(Ordering::Relaxed), 1);
    let root = engine.prepare("upon", "sha256:of-3").unwrap();
    assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
    assert_eq!(fs::read_to_string(root.join("etc/3")).unwrap(), "3");
    for key in ["upon", "container", "sha256:of-3", "sha256:of-4", "sha256:b", "sha256:a"] {
        engine.remove(key).unwrap();
    }
    engine.end();
}
