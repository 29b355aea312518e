//! Tests content stores that lie, hang or do not respond.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use containerd_api::diff::{ApplyRequest, ApplyResponse};
use containerd_api::types::{Descriptor, Mount};
use image::digest::Digest;
use testing::fake::wait_for;
use tonic::{Code, Status};

use crate::compare::{TAR, request, roots};
use crate::store::{FakeStore, Lie};
use crate::{Engine, Stage, code, is_root, unpacked};

/// Returns a request to unpack a blob on a root.
pub(crate) fn apply(root: &Path, digest: &Digest, size: usize) -> ApplyRequest {
    let mount = Mount {
        r#type: "bind".to_owned(),
        source: root.to_str().unwrap().to_owned(),
        ..Mount::default()
    };
    let diff = Descriptor {
        media_type: TAR.to_owned(),
        digest: digest.to_string(),
        size: i64::try_from(size).unwrap(),
        ..Descriptor::default()
    };
    ApplyRequest { diff: Some(diff), mounts: vec![mount] }
}

impl Engine {
    pub(crate) fn apply(&mut self, request: ApplyRequest) -> Result<ApplyResponse, Status> {
        let answer = self.runtime.block_on(self.differ.apply(request));
        answer.map(tonic::Response::into_inner)
    }
}

/// Returns a tar with a file.
fn tar(stage: &Stage) -> Vec<u8> {
    let tree = stage.0.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("file"), "file".repeat(5000)).unwrap();
    let mut command = std::process::Command::new("tar");
    let made = command.args(["-cf", "-", "-C"]).arg(&tree).arg(".").output().unwrap();
    assert!(made.status.success());
    made.stdout
}

/// An engine with a layer in its content store.
pub(crate) struct Bringer {
    pub(crate) store: FakeStore,
    pub(crate) engine: Engine,
    /// The layer: a tar with a file.
    pub(crate) bytes: Vec<u8>,
    pub(crate) digest: Digest,
}

impl Bringer {
    pub(crate) fn start(stage: &Stage) -> Self {
        let store = FakeStore::start(stage);
        let engine = Engine::start(stage, None);
        let bytes = tar(stage);
        let digest = store.add(&bytes);
        Self { store, engine, bytes, digest }
    }
}

#[test]
fn no_lie_of_a_content_store_becomes_a_layer() {
    if !is_root() {
        return;
    }
    let stage = Stage::with(Duration::from_secs(1));
    let Bringer { store, mut engine, bytes, digest } = Bringer::start(&stage);
    let key = unpacked("1");
    let root = engine.prepare(&key, "").unwrap();
    let socket = stage.engine().display().to_string();
    for (lie, expect) in [
        (Lie::Short, ""),
        (Lie::Long, ""),
        (Lie::Wrong, "digest"),
        (Lie::Order, "sent bytes from"),
        (Lie::Empty, "no reply for"),
        (Lie::Stuck, "no reply for"),
        (Lie::Silent, "no reply for"),
    ] {
        store.lie(lie);
        for size in [0, bytes.len()] {
            let error = engine.apply(apply(&root, &digest, size)).unwrap_err();
            assert_ne!(error.code(), Code::Unimplemented, "{lie:?}: {error}");
            let text = error.message();
            assert!(text.contains(expect) && text.contains(&digest.to_string()), "{lie:?}: {text}");
            let is_of_the_store = matches!(expect, "no reply for" | "sent bytes from");
            assert!(!is_of_the_store || text.contains(&socket), "{lie:?}: {text}");
        }
        wait_for(&format!("{lie:?} is over"), || store.open.load(Ordering::SeqCst) == 0);
    }
    store.lie(Lie::None);
    let absent = Digest::sha256(b"a blob that is not there");
    let error = engine.apply(apply(&root, &absent, 0)).unwrap_err();
    assert!(error.message().contains("no such blob"), "{error}");
    // The failed calls have added no layer to the store, and it accepts the right blob.
    let layers = || fs::read_dir(stage.0.path().join("store/layers")).unwrap().count();
    // The layer of the empty image.
    assert_eq!(layers(), 1);
    let applied = engine.apply(apply(&root, &digest, bytes.len())).unwrap().applied.unwrap();
    assert_eq!(applied.digest, digest.to_string());
    engine.commit("layer", &key).unwrap();
    assert_eq!(layers(), 2);
    drop(store);
    // The content store has closed its socket.
    let root = engine.prepare(&unpacked("2"), "").unwrap();
    code(engine.apply(apply(&root, &absent, 0)), Code::Unavailable, "--engine");
    engine.end();
}

#[test]
fn a_layer_is_given_to_no_liar() {
    if !is_root() {
        return;
    }
    let stage = Stage::with(Duration::from_secs(1));
    let store = FakeStore::start(&stage);
    let mut engine = Engine::start(&stage, None);
    let (left, right) = roots(&mut engine);
    fs::write(right.join("file"), testing::noise(16 << 20)).unwrap();
    let socket = stage.engine().display().to_string();
    for (lie, expect) in [
        (Lie::Taken, "it has"),
        (Lie::Ended, "ended"),
        (Lie::Digest, "has the digest"),
        (Lie::Length, "it has"),
        (Lie::Refusal, "not today"),
        (Lie::Stuck, "no reply for"),
        (Lie::Silent, "no reply for"),
    ] {
        store.lie(lie);
        store.kept.lock().unwrap().blobs.clear();
        let error = engine.diff(request(&left, &right, TAR)).unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{lie:?}: {error}");
        let text = error.message();
        assert!(text.contains(expect) && text.contains(&socket), "{lie:?}: {text}");
        wait_for(&format!("{lie:?} is over"), || store.open.load(Ordering::SeqCst) == 0);
        wait_for("nothing is left", || store.kept.lock().unwrap().begun.is_empty());
    }
    store.lie(Lie::None);
    engine.diff(request(&left, &right, TAR)).unwrap();
    engine.end();
}

/// When the engine cancels a call, as after Ctrl-C of a pull, its work and its connections must end.
#[test]
fn a_call_that_is_given_up_ends_its_work() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let Bringer { store, mut engine, bytes, digest } = Bringer::start(&stage);
    let (left, right) = roots(&mut engine);
    fs::write(right.join("file"), testing::noise(16 << 20)).unwrap();
    let key = unpacked("1");
    let root = engine.prepare(&key, "").unwrap();
    for lie in [Lie::Stuck, Lie::Silent] {
        store.lie(lie);
        let is_open = || store.open.load(Ordering::SeqCst) > 0;
        for call in ["apply", "diff"] {
            let (mut differ, mut other) = (engine.differ.clone(), engine.differ.clone());
            let apply = apply(&root, &digest, bytes.len());
            let diff = request(&left, &right, TAR);
            // A cancelled upload that the store begins only after its abort would stay, as in containerd.
            let is_begun = || !store.kept.lock().unwrap().begun.is_empty();
            let needs_upload = call == "diff" && lie == Lie::Stuck;
            let until_open = async {
                while !is_open() || (needs_upload && !is_begun()) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            engine.runtime.block_on(async {
                tokio::select! {
                    answer = other.apply(apply), if call == "apply" => panic!("{answer:?}"),
                    answer = differ.diff(diff), if call == "diff" => panic!("{answer:?}"),
                    () = until_open => {}
                }
                // Gives the service time to notice the closed connection.
                tokio::time::sleep(Duration::from_millis(50)).await;
            });
            wait_for(&format!("{call} has ended: {lie:?}"), || !is_open());
            wait_for("nothing is left", || store.kept.lock().unwrap().begun.is_empty());
        }
    }
    // A later call gets the snapshot.
    store.lie(Lie::None);
    engine.apply(apply(&root, &digest, bytes.len())).unwrap();
    engine.commit("layer", &key).unwrap();
    engine.end();
}
