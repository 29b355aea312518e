//! Tests pulls without layers: which indexes are accepted, and how a false index is handled if all devices are in the
//! store.

mod mirrors;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use oci::policy::Policies;
use quire_transfer as transfer;
use serde_json::{Value, json};
use store::{Form, FsckOptions, OpenImageError, Presence, RefName, Seconds};
use transfer::import::ImportOptions;
use transfer::lazy::artifact::LazySubject;
use transfer::lazy::{LazyFetchError, TrustIndex};
use transfer::pull::{
    Indexes, Layers, LazyPullError, LazyPulled, LazySource, PullSettings, Pulled, Syncs, UseTables,
    pull_lazy,
};

use super::pulls::{Layer, MANIFEST, Served, served};
use super::updates::{parts, pull_with};
use super::*;
use crate::build::{Pack, Tar, pack};
use crate::home::{Home, usual_wishes};
use crate::lazy::id_of;
use testing::fake::{Reply, Request, Server, content, reply, wait_for};
use testing::images::patch;

/// A registry with an image, `1`, and its index.
struct Stage {
    image: Arc<Served>,
    manifest: Digest,
    artifact: Digest,
    /// Manifests by tag or digest.
    manifests: BTreeMap<String, Vec<u8>>,
    blobs: BTreeMap<String, Vec<u8>>,
    /// Digests of the index's blobs.
    of_index: Vec<String>,
}

/// A key pair made by `openssl`.
struct Key {
    private: PathBuf,
    public: PathBuf,
}

impl Key {
    fn make(folder: &Path, name: &str) -> Self {
        let [private, public] = ["key", "pub"].map(|it| folder.join(format!("{name}.{it}")));
        let curve = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out"];
        openssl(&curve, &[&private]);
        openssl(&["pkey", "-pubout", "-out"], &[&public, Path::new("-in"), &private]);
        Self { private, public }
    }

    fn sign(&self, message: &[u8]) -> Vec<u8> {
        let file = self.private.with_extension("message");
        std::fs::write(&file, message).unwrap();
        openssl(&["dgst", "-sha256", "-sign"], &[&self.private, &file])
    }
}

fn openssl(words: &[&str], files: &[&Path]) -> Vec<u8> {
    let mut openssl = testing::command("openssl").expect("the test asked for it");
    let output = openssl.args(words).args(files).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn layer(tar: &Tar) -> Layer {
    let tar = tar.bytes();
    Layer { blob: pack(&tar, Pack::Gzip), tar }
}

fn text(length: usize) -> Vec<u8> {
    noise(length).iter().flat_map(|it| format!("{} ", it % 97).into_bytes()).collect()
}

fn first_layer() -> Tar {
    Tar::from_text("d etc").file("etc/one", &text(200_000))
}

impl Stage {
    /// Makes a registry with the index of an image in which the name `two` is replaced.
    fn new(two: &[u8; 3]) -> Self {
        let image = Arc::new(served(vec![
            layer(&first_layer()),
            layer(&Tar::from_text("d empty")),
            layer(&Tar::default().file("two", &text(100_000))),
        ]));
        let (mut parts, documents) = parts(&image);
        patch(&mut parts.image, b"two", two);
        parts.id = id_of(&parts.image).into();
        let subject = LazySubject {
            digest: &documents.digest,
            bytes: &documents.manifest_bytes,
            manifest: &documents.manifest,
            config: &documents.config,
        };
        let artifact = parts.artifact(&subject).unwrap();
        let of_index = artifact.blobs.iter().map(|it| it.digest.to_string()).collect();
        let blobs = artifact.blobs.into_iter().map(|it| (it.digest.to_string(), it.bytes));
        let manifests = [
            (String::from("1"), image.manifest.clone()),
            (documents.digest.to_string(), image.manifest.clone()),
            (artifact.digest.to_string(), artifact.manifest),
        ];
        Self {
            image,
            manifest: documents.digest,
            artifact: artifact.digest,
            manifests: manifests.into(),
            blobs: blobs.collect(),
            of_index,
        }
    }

    /// Adds a signature of `signed` where the signature of `place` belongs. Source: cosign's
    /// `specs/SIGNATURE_SPEC.md`.
    fn sign(&mut self, key: &Key, host: &str, place: Digest, signed: Digest) {
        let payload = json!({
            "critical": {
                "identity": {"docker-reference": format!("{host}/app")},
                "image": {"docker-manifest-digest": signed},
                "type": "cosign container image signature",
            },
            "optional": null,
        });
        let payload = payload.to_string().into_bytes();
        let signature = STANDARD.encode(key.sign(&payload));
        let config = b"{}".to_vec();
        let named = |media_type: &str, bytes: &[u8]| -> Value {
            json!({"mediaType": media_type, "size": bytes.len(), "digest": digest(bytes)})
        };
        let mut layer = named("application/vnd.dev.cosign.simplesigning.v1+json", &payload);
        layer["annotations"] = json!({"dev.cosignproject.cosign/signature": signature});
        let config_named = named("application/vnd.oci.image.config.v1+json", &config);
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config_named, "layers": [layer]});
        for bytes in [payload, config] {
            self.blobs.insert(digest(&bytes).to_string(), bytes);
        }
        let tag = format!("{}.sig", place.to_string().replace(':', "-"));
        self.manifests.insert(tag, manifest.to_string().into_bytes());
    }

    fn answer(&self, request: &Request) -> Reply {
        let path = &request.path;
        if path.contains("/referrers/") {
            let listed = json!({
                "mediaType": MANIFEST, "digest": self.artifact,
                "size": self.manifests[&self.artifact.to_string()].len(),
                "artifactType": "application/vnd.quire.lazy.v1",
            });
            let is_of = path.contains(&self.manifest.to_string());
            let listed = if is_of { vec![listed] } else { Vec::new() };
            let body = json!({"schemaVersion": 2, "manifests": listed});
            return reply(200).body(body.to_string());
        }
        let name = path.rsplit('/').next().unwrap();
        if path.contains("/manifests/") {
            return match self.manifests.get(name) {
                Some(bytes) => reply(200).header("content-type", MANIFEST).body(bytes),
                None => reply(404),
            };
        }
        match self.blobs.get(name) {
            Some(bytes) => content(request, bytes),
            None => self.image.answer(request),
        }
    }
}

fn pull_lazily(
    home: &Home,
    reference: &str,
    policies: &Policies,
    name: &RefName,
) -> Result<LazyPulled, LazyPullError> {
    pull_trusting(home, reference, policies, name, TrustIndex::Default)
}

fn pull_trusting(
    home: &Home,
    reference: &str,
    policies: &Policies,
    name: &RefName,
    trust: TrustIndex,
) -> Result<LazyPulled, LazyPullError> {
    pull_by(home, reference, policies, name, trust, &settings())
}

fn pull_by(
    home: &Home,
    reference: &str,
    policies: &Policies,
    name: &RefName,
    trust: TrustIndex,
    settings: &Settings,
) -> Result<LazyPulled, LazyPullError> {
    let reference: Reference = reference.parse().unwrap();
    let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let options = PullSettings {
        import,
        layers: Layers::Forget,
        indexes: Indexes::Forget,
        policies,
        syncs: Syncs::AtOnce,
    };
    let registry = Registry::new(&reference, settings).unwrap();
    let environment = home.environment();
    pull_lazy(
        &home.store,
        &registry,
        &reference,
        &environment,
        &options,
        name,
        (trust, UseTables::IfNoIndex),
    )
}

/// Anyone who may push could add a referrer to an image that is named by its digest, so only a signature of the index
/// counts.
#[test]
fn an_index_of_an_image_that_is_named_by_its_digest_has_to_be_signed() {
    if testing::program("openssl").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [key, stranger] = ["key", "stranger"].map(|it| Key::make(folder.path(), it));
    let check = |signs: &dyn Fn(&mut Stage, &str), expect: Option<&str>| {
        let stage = Arc::new(std::sync::Mutex::new(Stage::new(b"two")));
        let served = Arc::clone(&stage);
        let server = Server::start(move |request, _| served.lock().unwrap().answer(request));
        let host = server.host();
        let policies = signed_by(folder.path(), &host, &key);
        let (manifest, artifact) = {
            let mut stage = stage.lock().unwrap();
            let manifest = stage.manifest;
            stage.sign(&key, &host, manifest, manifest);
            signs(&mut stage, &host);
            (manifest, stage.artifact)
        };
        let (home, name) = (Home::new(), "app".parse().unwrap());
        let pulled = pull_lazily(&home, &format!("{host}/app@{manifest}"), &policies, &name);
        // Services accept only signed indexes, regardless of the name.
        let (service, tag) = (Home::new(), format!("{host}/app:1"));
        let of_service = pull_trusting(&service, &tag, &policies, &name, TrustIndex::Signed);
        let Some(expect) = expect else {
            for pulled in [pulled, of_service] {
                let LazyPulled::Image { source: LazySource::Index(index), devices, .. } =
                    pulled.unwrap()
                else {
                    panic!()
                };
                assert_eq!((&index, devices), (&artifact, 2));
            }
            return;
        };
        assert!(chain(&of_service.unwrap_err()).contains(expect));
        let error = pulled.unwrap_err();
        let is_it = matches!(&error, LazyPullError::Index(LazyFetchError::Untrusted { .. }));
        assert!(is_it, "{error}");
        assert!(chain(&error).contains(expect), "{}", chain(&error));
        // Blobs of an untrusted index are not downloaded.
        let of_index = stage.lock().unwrap().of_index.clone();
        let is_of_index = |it: &Request| of_index.iter().any(|blob| it.path.ends_with(blob));
        assert!(!server.seen().iter().any(is_of_index));
        assert!(home.store.refs.get(&name).unwrap().is_none());
    };
    check(&|_, _| {}, Some("the store has no signature of the image"));
    check(
        &|stage, host| stage.sign(&key, host, stage.artifact, stage.manifest),
        Some("but for other images"),
    );
    check(
        &|stage, host| stage.sign(&stranger, host, stage.artifact, stage.artifact),
        Some("none by"),
    );
    check(&|stage, host| stage.sign(&key, host, stage.artifact, stage.artifact), None);
}

fn signed_by(folder: &Path, host: &str, key: &Key) -> Policies {
    let file = folder.join("policy.toml");
    let text = format!(
        "default = \"none\"\n[[rule]]\nmatch = \"{host}/**\"\naccept = \"signed\"\nkeys = [{:?}]\n",
        key.public
    );
    std::fs::write(&file, text).unwrap();
    Policies::load(&[file]).unwrap()
}

/// A pull for a container that starts at once leaves the syncs to the service. An ordinary commit would leave none.
#[test]
fn a_pull_can_leave_its_syncs_for_later() {
    let stage = Arc::new(Stage::new(b"two"));
    let server = Server::start(move |request, _| stage.answer(request));
    let (home, policies) = (Home::new(), Policies::load(&[]).unwrap());
    let reference: Reference = format!("{}/app:1", server.host()).parse().unwrap();
    let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let (layers, syncs) = (Layers::Forget, Syncs::Later);
    let options =
        PullSettings { import, layers, indexes: Indexes::Forget, policies: &policies, syncs };
    let registry = Registry::new(&reference, &settings()).unwrap();
    let (environment, name) = (home.environment(), "app".parse().unwrap());
    let trust = (TrustIndex::Default, UseTables::IfNoIndex);
    let pulled =
        pull_lazy(&home.store, &registry, &reference, &environment, &options, &name, trust);
    let LazyPulled::Image { image, .. } = pulled.unwrap() else { panic!() };
    assert!(home.store.has_unsynced().unwrap());
    assert_eq!(home.store.presence(&image).unwrap(), Presence::Partial);
    assert!(home.store.settle().unwrap() && !home.store.has_unsynced().unwrap());
    assert!(home.store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
}

/// Sets a flag at the end of a test, even if it fails, so that the server's threads go on.
struct Release<'f>(&'f AtomicBool);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The registry does not answer the request for the tag of the index, so the index is found in the list of referrers.
#[test]
fn a_pull_does_not_wait_for_a_guess_that_has_no_answer() {
    let stage = Arc::new(Stage::new(b"two"));
    let [is_asked, is_over] = [false; 2].map(|it| Arc::new(AtomicBool::new(it)));
    let (answering, asked, over) = (Arc::clone(&stage), Arc::clone(&is_asked), is_over.clone());
    let server = Server::start(move |request, _| {
        if request.path.ends_with(".quire") {
            asked.store(true, Ordering::SeqCst);
            while !over.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        answering.answer(request)
    });
    let (home, name) = (Home::new(), "app".parse().unwrap());
    let (policies, reference) = (Policies::load(&[]).unwrap(), format!("{}/app:1", server.host()));
    // No timeout of the client ends the request.
    let long = Duration::from_secs(3600);
    let settings = Settings { stall: long, patience: long, ..settings() };
    let (home, reference, policies) = (&home, &reference, &policies);
    let (name, settings) = (&name, &settings);
    let pulled = std::thread::scope(|scope| {
        let _release = Release(&is_over);
        let trust = TrustIndex::Default;
        let pulling =
            scope.spawn(move || pull_by(home, reference, policies, name, trust, settings));
        wait_for("the pull", || pulling.is_finished());
        assert!(is_asked.load(Ordering::SeqCst), "the tag was not requested");
        pulling.join().unwrap()
    });
    let LazyPulled::Image { source: LazySource::Index(index), .. } = pulled.unwrap() else {
        panic!()
    };
    assert_eq!(index, stage.artifact);
}

/// The image must be compared at once, because there is no device left that would be filled later.
#[test]
fn an_image_of_which_all_is_here_is_compared_at_once() {
    for two in [b"two", b"tow"] {
        let stage = Arc::new(Stage::new(two));
        let answering = Arc::clone(&stage);
        let server = Server::start(move |request, _| answering.answer(request));
        let home = Home::new();
        let store = &home.store;
        let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
        pull_with(&home, &server.host(), "1", Layers::Forget, import);
        let whole = store.refs.get(&"app".parse().unwrap()).unwrap().unwrap();
        let (policies, name) = (Policies::load(&[]).unwrap(), "again".parse().unwrap());
        let before = server.seen().len();
        let pulled = pull_lazily(&home, &format!("{}/app:1", server.host()), &policies, &name);
        let LazyPulled::Image { image, devices, .. } = pulled.unwrap() else { panic!() };
        assert_eq!((image, devices), (whole.image, 0));
        let named = store.refs.get(&name).unwrap().unwrap();
        assert_eq!(
            (named.image, named.manifest, named.form),
            (whole.image, Some(stage.manifest), Form::Tar)
        );
        assert_eq!(store.presence(&image).unwrap(), Presence::Complete);
        // Both layers with files were read from their devices.
        let seen = server.seen().split_off(before);
        let asked = |at: usize| seen.iter().filter(|it| it.path == stage.image.path(at)).count();
        assert_eq!([asked(0), asked(2)], [0, 0]);
        assert!(store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
    }
}

/// Starts two registries: one has an image with an index, and the other has an image with the same third layer.
fn with_another(two: &[u8; 3]) -> (Arc<Stage>, Server, Server) {
    let stage = Arc::new(Stage::new(two));
    let answering = Arc::clone(&stage);
    let server = Server::start(move |request, _| answering.answer(request));
    let Layer { tar, blob } = stage.image.layers.last().unwrap();
    let shared = Layer { tar: tar.clone(), blob: blob.clone() };
    let other = served(vec![layer(&Tar::from_text("d other")), shared]);
    let other = Server::start(move |request, _| other.answer(request));
    (stage, server, other)
}

/// Pulls the image lazily while the store lacks only the third layer's device, which an ordinary pull of the other
/// image then adds.
fn pulled_around(home: &Home, server: &Server, other: &Server, name: &RefName) -> ImageId {
    let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let first = served(vec![layer(&first_layer())]);
    let first = Server::start(move |request, _| first.answer(request));
    pull_with(home, &first.host(), "1", Layers::Forget, import);
    let policies = Policies::load(&[]).unwrap();
    let pulled = pull_lazily(home, &format!("{}/app:1", server.host()), &policies, name);
    let LazyPulled::Image { image, devices, .. } = pulled.unwrap() else { panic!() };
    assert_eq!(devices, 1);
    assert_eq!(home.store.presence(&image).unwrap(), Presence::Partial);
    pull_with(home, &other.host(), "1", Layers::Forget, import);
    assert_eq!(home.store.lazy_devices(&image).unwrap(), []);
    image
}

/// Only the index describes the content of the image, and no device is left whose filling would start the comparison.
#[test]
fn an_image_whose_last_device_another_pull_brings_is_compared_before_it_is_used() {
    for two in [b"two", b"tow"] {
        let (stage, server, other) = with_another(two);
        let (home, name) = (Home::new(), "lazy".parse().unwrap());
        let store = &home.store;
        let false_or_not = pulled_around(&home, &server, &other, &name);
        let refused = store.open_image(&false_or_not).unwrap_err();
        assert!(matches!(refused, OpenImageError::Unproven(it) if it == false_or_not), "{refused}");

        // The expected image is made from the layers, in an empty store.
        let whole = Home::new();
        let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
        pull_with(&whole, &server.host(), "1", Layers::Forget, import);
        let right = whole.store.refs.get(&"app".parse().unwrap()).unwrap().unwrap().image;
        assert_eq!(right == false_or_not, two == b"two");

        let before = server.seen().len();
        let policies = Policies::load(&[]).unwrap();
        let pulled = pull_lazily(&home, &format!("{}/app:1", server.host()), &policies, &name);
        let LazyPulled::UpToDate { image, .. } = pulled.unwrap() else { panic!() };
        assert_eq!(image, right);
        assert_eq!(store.refs.get(&name).unwrap().unwrap().image, right);
        assert_eq!(store.open_image(&right).unwrap().presence, Presence::Complete);
        assert!(!store.downloads.is_unproven(&right).unwrap());
        // Data in the store was not downloaded again.
        let seen = server.seen().split_off(before);
        let asked = |at: usize| seen.iter().filter(|it| it.path == stage.image.path(at)).count();
        assert_eq!([asked(0), asked(2)], [0, 0]);
        assert!(store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
        store.gc(Seconds(1_700_000_000)).unwrap();
        let there = store.images.ids().unwrap();
        assert_eq!(there.contains(&false_or_not), two == b"two");
    }
}

/// Otherwise an ordinary pull would report the image as up to date.
#[test]
fn an_ordinary_pull_compares_it_too() {
    let (_, server, other) = with_another(b"tow");
    let (home, name) = (Home::new(), "app".parse().unwrap());
    let before = pulled_around(&home, &server, &other, &"lazy".parse().unwrap());
    let reference = home.store.refs.get(&"lazy".parse().unwrap()).unwrap().unwrap();
    home.store.set_ref(&name, &reference).unwrap();
    let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let Pulled::UpToDate { image, .. } =
        pull_with(&home, &server.host(), "1", Layers::Forget, import)
    else {
        panic!("it was here")
    };
    assert_ne!(image, before);
    // All names of this manifest refer to the correct image.
    for name in ["app", "lazy"] {
        assert_eq!(home.store.refs.get(&name.parse().unwrap()).unwrap().unwrap().image, image);
    }
    home.store.open_image(&image).unwrap();
}
