//! Tests the snapshot service as an engine uses it: through its socket, with mounted roots.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod bring;
mod collect;
mod compare;
mod faults;
mod heal;
mod lies;
mod limits;
mod metrics;
mod roots;
mod store;

use std::collections::HashMap;
use std::fs;
use std::num::NonZeroUsize;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use ::store::{Form, FsckOptions, Moment, OpenOptions, Reference, Seconds, Store, Who};
use containerd_api::diff::diff_client::DiffClient;
use containerd_api::snapshots::snapshots_client::SnapshotsClient;
use containerd_api::snapshots::{
    CleanupRequest, CommitSnapshotRequest, Info, Kind, ListSnapshotsRequest, MountsRequest,
    PrepareSnapshotRequest, RemoveSnapshotRequest, StatSnapshotRequest, UpdateSnapshotRequest,
    UsageRequest, ViewSnapshotRequest,
};
use image::digest::Digest;
use kernel::mount::{Reach, Unmount, bind, mounted, unmount};
use oci::policy::Policies;
use oci::source::{ImageSource, Input};
use quire_serve::snapshots::{
    PATIENCE, SkipLayers, SnapshotResources, Snapshotter, SnapshotterError, serve_snapshots,
};
use testing::skipped;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use transfer::import::{BUDGET, ImportContext, ImportOptions, import};

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped("mounts need root");
    }
    root
}

/// A store on the disk of the build, whose roots are unmounted at the end; the timeout for the engine's content
/// store; and a folder for the service's socket.
struct Stage(tempfile::TempDir, Duration, tempfile::TempDir);

impl Stage {
    fn new() -> Self {
        Self::with(PATIENCE)
    }

    fn with(patience: Duration) -> Self {
        let store = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self(store, patience, tempfile::tempdir().unwrap())
    }

    /// Socket of the service. The folder of the build may belong to another user, and the service refuses to listen
    /// there.
    fn socket(&self) -> PathBuf {
        self.2.path().join("socket")
    }

    /// Socket of the engine.
    fn engine(&self) -> PathBuf {
        self.0.path().join("engine")
    }

    fn store(&self) -> Store {
        let path = self.0.path().join("store");
        Store::open(&path, Who::this_process(), OpenOptions::create()).unwrap()
    }

    fn open(
        &self,
        policy: Option<&Path>,
        skip: SkipLayers,
    ) -> Result<Snapshotter, SnapshotterError> {
        self.open_instance("test", policy, skip)
    }

    fn open_instance(
        &self,
        instance: &str,
        policy: Option<&Path>,
        skip: SkipLayers,
    ) -> Result<Snapshotter, SnapshotterError> {
        Snapshotter::open(self.store(), instance, self.environment(policy, skip))
    }

    fn environment(&self, policy: Option<&Path>, skip: SkipLayers) -> SnapshotResources {
        let files: Vec<PathBuf> = policy.map(Path::to_owned).into_iter().collect();
        let clock = AtomicU32::new(0);
        SnapshotResources {
            policies: Box::new(move || Policies::load(&files).map_err(|it| testing::chain(&it))),
            now: Box::new(move || {
                let nanoseconds = clock.fetch_add(1, Ordering::Relaxed);
                Moment { seconds: 1_700_000_000, nanoseconds }
            }),
            in_an_hour: Box::new(|| "2030-01-01T00:00:00Z".to_owned()),
            threads: NonZeroUsize::new(2).unwrap(),
            scratch: self.0.path().to_owned(),
            search: "/usr/sbin:/sbin".into(),
            skip,
            lazy: None,
            collect: None,
            patience: self.1,
        }
    }

    fn mounts(&self) -> Vec<PathBuf> {
        let here = self.0.path().canonicalize().unwrap();
        let all = mounted().unwrap().into_iter().map(|it| it.point);
        all.filter(|it| it.starts_with(&here)).collect()
    }

    /// Returns the shared mounts of images, and all other mounts.
    fn images_and_roots(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let shared = self.0.path().canonicalize().unwrap().join("store/snapshots/test/shared");
        self.mounts().into_iter().partition(|it| it.starts_with(&shared))
    }

    fn roots(&self) -> Vec<PathBuf> {
        self.images_and_roots().1
    }

    fn count(&self, folder: &str) -> usize {
        fs::read_dir(self.0.path().join("store").join(folder)).unwrap().count()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for root in self.mounts().into_iter().rev() {
            unmount(&root, Unmount::Lazy).unwrap();
        }
    }
}

fn connect(socket: &Path) -> (Runtime, Channel) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
    let channel = runtime.block_on(endpoint.connect()).unwrap();
    (runtime, channel)
}

/// An engine that is connected to a service.
struct Engine {
    runtime: Runtime,
    client: SnapshotsClient<Channel>,
    differ: DiffClient<Channel>,
    stop: Sender<()>,
    service: JoinHandle<()>,
}

impl Engine {
    fn start(stage: &Stage, policy: Option<&Path>) -> Self {
        Self::serve(stage, stage.open(policy, SkipLayers::Unpack).unwrap())
    }

    fn serve(stage: &Stage, snapshotter: Snapshotter) -> Self {
        Self::serve_with(stage, snapshotter, None)
    }

    /// Ends the service; its mounts stay.
    fn end(self) {
        let Self { runtime, client, differ, stop, service } = self;
        // The client and the runtime are dropped first, because the connection does not notice its end without a
        // running runtime.
        drop((client, differ, runtime));
        stop.send(()).unwrap();
        service.join().unwrap();
    }

    fn prepare(&mut self, key: &str, parent: &str) -> Result<PathBuf, Status> {
        let (key, parent) = (key.to_owned(), parent.to_owned());
        let request = PrepareSnapshotRequest { key, parent, ..PrepareSnapshotRequest::default() };
        let answer = self.runtime.block_on(self.client.prepare(request))?.into_inner();
        let [mount] = answer.mounts.try_into().unwrap();
        assert_eq!(
            (&*mount.r#type, &*mount.options[0], &*mount.options[1]),
            ("bind", "rbind", "rw")
        );
        Ok(mount.source.into())
    }

    /// Sends the request that containerd sends before it fetches a layer.
    fn prepare_layer(&mut self, parent: &str, chain: &Digest, blob: &Digest) -> Result<(), Status> {
        self.prepare_layers(parent, chain, &[blob])
    }

    /// Does the same with the digests of the blobs of this layer and of the layers above it.
    fn prepare_layers(
        &mut self,
        parent: &str,
        chain: &Digest,
        blobs: &[&Digest],
    ) -> Result<(), Status> {
        let all: Vec<_> = blobs.iter().map(ToString::to_string).collect();
        let labels = [
            ("containerd.io/snapshot.ref", chain.to_string()),
            ("containerd.io/snapshot/cri.layer-digest", blobs[0].to_string()),
            ("containerd.io/snapshot/cri.image-layers", all.join(",")),
        ];
        let labels = labels.map(|(name, value)| (name.to_owned(), value));
        let request = PrepareSnapshotRequest {
            key: format!("default/1/extract-1 {chain}"),
            parent: parent.to_owned(),
            labels: labels.into(),
            ..PrepareSnapshotRequest::default()
        };
        self.runtime.block_on(self.client.prepare(request)).map(drop)
    }

    fn view(&mut self, key: &str, parent: &str) -> Result<PathBuf, Status> {
        let (key, parent) = (key.to_owned(), parent.to_owned());
        let request = ViewSnapshotRequest { key, parent, ..ViewSnapshotRequest::default() };
        let answer = self.runtime.block_on(self.client.view(request))?.into_inner();
        let [mount] = answer.mounts.try_into().unwrap();
        assert_eq!((&*mount.r#type, &*mount.options[1]), ("bind", "ro"));
        Ok(mount.source.into())
    }

    fn mounts(&mut self, key: &str) -> Result<PathBuf, Status> {
        let request = MountsRequest { key: key.to_owned(), ..MountsRequest::default() };
        let answer = self.runtime.block_on(self.client.mounts(request))?.into_inner();
        Ok(answer.mounts.into_iter().next().unwrap().source.into())
    }

    fn commit(&mut self, name: &str, key: &str) -> Result<(), Status> {
        let (name, key) = (name.to_owned(), key.to_owned());
        let request = CommitSnapshotRequest { name, key, ..CommitSnapshotRequest::default() };
        self.runtime.block_on(self.client.commit(request)).map(drop)
    }

    fn remove(&mut self, key: &str) -> Result<(), Status> {
        let request =
            RemoveSnapshotRequest { key: key.to_owned(), ..RemoveSnapshotRequest::default() };
        self.runtime.block_on(self.client.remove(request)).map(drop)
    }

    fn stat(&mut self, key: &str) -> Result<Info, Status> {
        let request = StatSnapshotRequest { key: key.to_owned(), ..StatSnapshotRequest::default() };
        Ok(self.runtime.block_on(self.client.stat(request))?.into_inner().info.unwrap())
    }

    fn usage(&mut self, key: &str) -> (i64, i64) {
        let request = UsageRequest { key: key.to_owned(), ..UsageRequest::default() };
        let answer = self.runtime.block_on(self.client.usage(request)).unwrap().into_inner();
        (answer.size, answer.inodes)
    }

    fn cleanup(&mut self) {
        self.runtime.block_on(self.client.cleanup(CleanupRequest::default())).unwrap();
    }

    fn list(&mut self, filters: &[&str]) -> Result<Vec<String>, Status> {
        let filters = filters.iter().map(|it| (*it).to_owned()).collect();
        let request = ListSnapshotsRequest { filters, ..ListSnapshotsRequest::default() };
        self.runtime.block_on(async {
            let mut answers = self.client.list(request).await?.into_inner();
            let mut names = Vec::new();
            while let Some(answer) = answers.message().await? {
                names.extend(answer.info.into_iter().map(|it| it.name));
            }
            Ok(names)
        })
    }
}

fn code<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, text: &str) {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(text), "{status}");
}

/// Returns a name that containerd would give to a snapshot for unpacking.
fn unpacked(text: &str) -> String {
    format!("default/7/extract-{text} {}", Digest::sha256(text.as_bytes()))
}

/// Makes a layer with a hard link, and one above it that removes and adds a file.
fn two_layers(engine: &mut Engine) {
    let root = engine.prepare(&unpacked("1"), "").unwrap();
    fs::create_dir(root.join("etc")).unwrap();
    fs::write(root.join("etc/old"), "old").unwrap();
    fs::write(root.join("etc/kept"), "kept".repeat(5000)).unwrap();
    fs::hard_link(root.join("etc/kept"), root.join("link")).unwrap();
    fs::set_permissions(root.join("etc/kept"), fs::Permissions::from_mode(0o4755)).unwrap();
    engine.commit("sha256:a", &unpacked("1")).unwrap();
    let root = engine.prepare(&unpacked("2"), "sha256:a").unwrap();
    assert_eq!(fs::read_to_string(root.join("etc/old")).unwrap(), "old");
    fs::remove_file(root.join("etc/old")).unwrap();
    fs::write(root.join("etc/new"), "new").unwrap();
    engine.commit("sha256:b", &unpacked("2")).unwrap();
}

#[test]
fn layers_become_roots_that_share_one_image() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    assert_eq!(stage.roots(), [] as [PathBuf; 0]);
    let roots = ["one", "two"].map(|key| engine.prepare(key, "sha256:b").unwrap());
    let view = engine.view("view", "sha256:b").unwrap();
    for root in roots.iter().chain([&view]) {
        assert_eq!(fs::read_to_string(root.join("etc/kept")).unwrap(), "kept".repeat(5000));
        let found = fs::metadata(root.join("etc/kept")).unwrap();
        assert_eq!((found.mode() & 0o7777, found.nlink()), (0o4755, 2));
        assert!(!root.join("etc/old").exists());
        assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
    }
    // Other users cannot reach a root, because it may contain set-user-id programs of root.
    let above = stage.0.path().join("store/snapshots");
    assert_eq!(fs::metadata(above).unwrap().permissions().mode() & 0o777, 0o700);
    // Changes of one root are not visible in others.
    fs::write(roots[0].join("etc/new"), "mine").unwrap();
    assert_eq!(fs::read_to_string(roots[1].join("etc/new")).unwrap(), "new");
    assert_eq!(
        fs::write(view.join("x"), "x").unwrap_err().kind(),
        std::io::ErrorKind::ReadOnlyFilesystem
    );
    let options = mounted().unwrap();
    let of_roots: Vec<_> = options.iter().filter(|it| roots.contains(&it.point)).collect();
    assert!(of_roots.iter().all(|it| it.kind == "overlay"), "{of_roots:?}");
    for key in ["one", "two", "view", "sha256:b", "sha256:a"] {
        engine.remove(key).unwrap();
    }
    assert_eq!(stage.mounts(), [] as [PathBuf; 0]);
    assert_eq!(engine.list(&[]).unwrap(), [] as [&str; 0]);
    engine.cleanup();
    assert_eq!((stage.count("snapshots/test"), stage.count("tmp")), (0, 0));
    engine.end();
}

#[test]
fn wishes_that_are_refused() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    engine.prepare("active", "sha256:b").unwrap();
    code(engine.prepare("active", "sha256:b"), Code::AlreadyExists, "active");
    code(engine.view("sha256:a", ""), Code::AlreadyExists, "sha256:a");
    code(engine.prepare("x", "none"), Code::NotFound, "none");
    code(engine.prepare("x", "active"), Code::InvalidArgument, "not committed");
    code(engine.prepare("", ""), Code::InvalidArgument, "1 to 4096");
    code(engine.mounts("sha256:a"), Code::FailedPrecondition, "committed");
    code(engine.mounts("none"), Code::NotFound, "none");
    code(engine.commit("sha256:a", "active"), Code::AlreadyExists, "sha256:a");
    code(engine.commit("c", "sha256:a"), Code::FailedPrecondition, "not active");
    code(engine.commit("c", "none"), Code::NotFound, "none");
    code(engine.remove("sha256:a"), Code::FailedPrecondition, "sha256:b");
    code(engine.remove("none"), Code::NotFound, "none");
    code(engine.stat("none"), Code::NotFound, "none");
    code(engine.list(&["kind=active"]), Code::InvalidArgument, "character 5");
    // The refused calls have changed nothing.
    assert_eq!(engine.list(&[]).unwrap(), ["sha256:a", "sha256:b", "active"]);
    let root = engine.mounts("active").unwrap();
    assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
    // A second service is refused: for a socket in use, a file that is not a socket, a directory that others can
    // write to, and an instance in use.
    let socket = stage.socket();
    let at = |socket: &Path| {
        let stage = Stage::new();
        let snapshotter = stage.open(None, SkipLayers::Unpack).unwrap();
        let error = serve_snapshots(snapshotter, socket, socket, None, || {}, || {}).unwrap_err();
        testing::chain(&error)
    };
    let other = || at(&socket);
    // The socket is in use.
    assert!(other().contains("--socket"));
    // Other users could replace the socket.
    let folder = stage.2.path().join("open");
    for (mode, owner, expect) in [(0o777, 0, "others can write"), (0o755, 65534, "user 65534")] {
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
        chown(&folder, Some(owner), None).unwrap();
        let error = at(&folder.join("socket"));
        assert!(error.contains(expect) && error.contains("--socket"), "{error}");
        fs::remove_dir(&folder).unwrap();
    }
    std::os::unix::fs::symlink(stage.2.path(), &folder).unwrap();
    std::os::unix::fs::lchown(&folder, Some(65534), None).unwrap();
    assert!(at(&folder.join("other")).contains("user 65534"));
    assert!(engine.stat("active").is_ok());
    let error = stage.open(None, SkipLayers::Unpack).unwrap_err().to_string();
    assert!(error.contains("--instance"), "{error}");
    engine.end();
    fs::write(&socket, "mine").unwrap();
    assert!(other().contains("not a socket"));
    assert_eq!(fs::read_to_string(&socket).unwrap(), "mine");
}

#[test]
fn labels_are_changed_and_found() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    engine.prepare("a", "").unwrap();
    let map = |all: &[(&str, &str)]| -> HashMap<String, String> {
        all.iter().map(|it| (it.0.to_owned(), it.1.to_owned())).collect()
    };
    let mut update = |labels: HashMap<String, String>, paths: &[&str]| {
        let info =
            Info { name: "a".to_owned(), parent: "other".to_owned(), labels, ..Info::default() };
        let paths = paths.iter().map(|it| (*it).to_owned()).collect();
        let update_mask = Some(prost_types::FieldMask { paths });
        let request = UpdateSnapshotRequest {
            info: Some(info),
            update_mask,
            ..UpdateSnapshotRequest::default()
        };
        let answer = engine.runtime.block_on(engine.client.update(request));
        answer.map(|it| it.into_inner().info.unwrap())
    };
    let first = update(map(&[("l1", "v1"), ("l2", "v2")]), &[]).unwrap();
    assert_eq!((first.kind(), &*first.parent), (Kind::Active, ""));
    assert_eq!(first.labels, map(&[("l1", "v1"), ("l2", "v2")]));
    assert!(first.updated_at.unwrap().nanos > first.created_at.unwrap().nanos);
    let second = update(map(&[("l1", "new"), ("l3", "v3")]), &["labels.l1", "labels.l2"]).unwrap();
    assert_eq!(second.labels, map(&[("l1", "new")]));
    code(update(map(&[]), &["labels.l1", "parent"]), Code::InvalidArgument, "parent");
    code(update(map(&[("x", &"y".repeat(4096))]), &[]), Code::InvalidArgument, "4096");
    let many: HashMap<_, _> = (0..40).map(|it| (it.to_string(), "y".repeat(4000))).collect();
    code(update(many, &[]), Code::InvalidArgument, "all labels");
    assert_eq!(engine.list(&["kind==active,labels.l1==new"]).unwrap(), ["a"]);
    assert_eq!(engine.list(&["kind==view", "labels.l2"]).unwrap(), [] as [&str; 0]);
    engine.end();
    // The labels are stored on the disk.
    let mut engine = Engine::start(&stage, None);
    assert_eq!(engine.stat("a").unwrap().labels, map(&[("l1", "new")]));
    engine.end();
}

#[test]
fn roots_outlive_their_service() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    let root = engine.prepare("running", "sha256:b").unwrap();
    fs::write(root.join("written"), "before").unwrap();
    let gone = engine.prepare("removed behind its back", "sha256:b").unwrap();
    engine.end();
    fs::write(root.join("written"), "meanwhile").unwrap();
    // A crash may leave a torn record, and a mount in a folder without a record.
    let number = gone.parent().unwrap();
    fs::write(number.join("snapshot.json"), "torn").unwrap();
    let stray = stage.0.path().join("store/snapshots/test/99");
    fs::create_dir(&stray).unwrap();
    bind(fs::File::open(&root).unwrap().as_fd(), Reach::One).unwrap().attach_at(&stray).unwrap();
    let mut engine = Engine::start(&stage, None);
    assert_eq!(stage.roots(), [&*root]);
    assert_eq!(engine.list(&["kind==active"]).unwrap(), ["running"]);
    assert_eq!(engine.mounts("running").unwrap(), root);
    assert_eq!(fs::read_to_string(root.join("written")).unwrap(), "meanwhile");
    engine.end();
    // Simulates a reboot of the host: the root is not mounted, but its changes still exist.
    unmount(&root, Unmount::Now).unwrap();
    let mut engine = Engine::start(&stage, None);
    assert_eq!(engine.mounts("running").unwrap(), root);
    assert_eq!(fs::read_to_string(root.join("written")).unwrap(), "meanwhile");
    assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
    engine.remove("running").unwrap();
    // A record that cannot be read must not be overwritten.
    let torn = fs::read_to_string(number.join("snapshot.json")).unwrap();
    engine.prepare("new", "").unwrap();
    engine.remove("new").unwrap();
    engine.cleanup();
    assert_eq!(fs::read_to_string(number.join("snapshot.json")).unwrap(), torn);
    engine.end();
    let store = stage.store();
    assert!(store.plan_gc(Seconds(0)).unwrap_err().to_string().contains("fsck --repair"));
    let report = store.fsck(FsckOptions::default()).unwrap();
    assert_eq!(report.damage.len(), 2, "{report:?}");
    assert_eq!(store.remove_damaged(&report).unwrap(), 2);
    assert!(store.fsck(FsckOptions::default()).unwrap().is_sound());
}

#[test]
fn gc_keeps_what_snapshots_need() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    let store = stage.store();
    store.gc(Seconds(0)).unwrap();
    let root = engine.prepare("a", "sha256:b").unwrap();
    assert_eq!(fs::read_to_string(root.join("link")).unwrap(), "kept".repeat(5000));
    // Also the empty image, which records do not name.
    let root = engine.prepare("b", "").unwrap();
    fs::write(root.join("file"), "file").unwrap();
    engine.remove("a").unwrap();
    engine.commit("c", "b").unwrap();
    for key in ["c", "sha256:b", "sha256:a"] {
        engine.remove(key).unwrap();
    }
    store.gc(Seconds(0)).unwrap();
    engine.prepare("d", "").unwrap();
    engine.remove("d").unwrap();
    engine.end();
    store.gc(Seconds(0)).unwrap();
    let left = ["images", "layers", "tmp"].map(|it| stage.count(it));
    assert_eq!(left, [0, 0, 0]);
}

/// An image that was pulled without its layers has a temporary name until a record names it.
#[test]
fn names_that_a_killed_service_has_left_are_removed() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    engine.end();
    let store = stage.store();
    let image = store.images.ids().unwrap()[0];
    let of = |instance: &str| {
        let hash = Digest::sha256(instance.as_bytes()).to_string();
        format!("quire-engine/{}:sha256-00-1", hash.replace("sha256:", ""))
    };
    let names = ["app:1".to_owned(), of("other"), of("test")];
    for name in &names {
        let reference =
            Reference { image, manifest: None, form: Form::Objects, created: Seconds(0) };
        store.set_ref(&name.parse().unwrap(), &reference).unwrap();
    }
    Engine::start(&stage, None).end();
    let left: Vec<_> = store.refs.all().unwrap().iter().map(|it| it.0.to_string()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(!left.contains(&names[2]), "{left:?}");
}

#[test]
fn a_policy_is_asked_before_something_runs() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let policy = stage.0.path().join("policy.toml");
    fs::write(&policy, "default = \"none\"\n").unwrap();
    let mut engine = Engine::start(&stage, Some(&policy));
    // Unpacking is allowed despite the policy.
    two_layers(&mut engine);
    // Names that only look like names for unpacking do not bypass the policy.
    for key in ["container", "extract-container", "default/8/extract-1-sha256", "extract-x y"] {
        let way_out = "Only default = \"any\" accepts it";
        code(engine.prepare(key, "sha256:b"), Code::PermissionDenied, way_out);
    }
    code(engine.view("view", "sha256:b"), Code::PermissionDenied, "");
    // The policy that the error message recommends.
    let others = "[[rule]]\nmatch = [\"**\", \"local\"]\naccept = \"none\"\n";
    fs::write(&policy, format!("default = \"any\"\n{others}")).unwrap();
    engine.prepare("accepted", "sha256:b").unwrap();
    engine.remove("accepted").unwrap();
    fs::write(&policy, "default = \"none\"\n").unwrap();
    code(engine.prepare("container", "sha256:b"), Code::PermissionDenied, "");
    assert_eq!(engine.list(&["kind!=committed"]).unwrap(), [] as [&str; 0]);
    fs::write(&policy, "default = \"any\"\n").unwrap();
    engine.prepare("container", "sha256:b").unwrap();
    fs::write(&policy, "default = ").unwrap();
    code(engine.prepare("other", "sha256:b"), Code::PermissionDenied, "policies");
    fs::write(&policy, "default = \"any\"\nrul = 1\n").unwrap();
    // The message contains the cause as well.
    code(engine.prepare("other", "sha256:b"), Code::PermissionDenied, "\"rul\"");
    engine.end();
}

#[test]
fn usage_is_what_was_written() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    let root = engine.prepare("a", "").unwrap();
    let before = engine.usage("a");
    fs::write(root.join("file"), vec![7; 1 << 20]).unwrap();
    fs::hard_link(root.join("file"), root.join("link")).unwrap();
    let file = fs::File::open(root.join("file")).unwrap();
    rustix::fs::syncfs(&file).unwrap();
    let after = engine.usage("a");
    assert_eq!(after.1 - before.1, 1);
    assert!((1 << 20..2 << 20).contains(&(after.0 - before.0)), "{after:?} {before:?}");
    drop(file);
    engine.commit("c", "a").unwrap();
    let committed = engine.usage("c");
    assert!((1 << 20..2 << 20).contains(&committed.0), "{committed:?}");
    engine.view("v", "c").unwrap();
    assert_eq!(engine.usage("v"), (0, 0));
    engine.end();
}

/// Imports a layer with one file from a tar, which is its blob.
fn layer(stage: &Stage, name: &str) -> Digest {
    let tree = stage.0.path().join(name);
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join(name), name).unwrap();
    let tar = stage.0.path().join(format!("{name}.tar"));
    let mut command = std::process::Command::new("tar");
    let status = command.arg("-cf").arg(&tar).arg("-C").arg(&tree).arg(".").status().unwrap();
    assert!(status.success());
    let digest = Digest::sha256(&fs::read(&tar).unwrap());
    let name = name.parse().unwrap();
    let options = ImportOptions { name: Some(&name), ..ImportOptions::default() };
    let environment = ImportContext {
        now: Seconds(0),
        threads: NonZeroUsize::MIN,
        budget: BUDGET,
        scratch: stage.0.path(),
        progress: &|_| {},
        cancel: &AtomicBool::new(false),
    };
    import(&stage.store(), &ImageSource::Tar(Input::File(tar)), &environment, &options).unwrap();
    digest
}

/// A manifest may name arbitrary blobs and chains. A layer is only used for the blob that it was read from.
#[test]
fn labels_give_nobody_a_layer() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let [lower, upper] = ["lower", "upper"].map(|name| layer(&stage, name));
    let chain = |below: &Digest, it: &Digest| Digest::sha256(format!("{below} {it}").as_bytes());
    let mut engine = Engine::serve(&stage, stage.open(None, SkipLayers::Download).unwrap());
    let other = Digest::sha256(b"a blob that nobody has hashed");
    let below = format!("quire/{lower}");
    for (chain, blob) in [(&lower, &other), (&other, &lower), (&upper, &lower)] {
        engine.prepare_layer("", chain, blob).unwrap();
        engine.remove(&format!("default/1/extract-1 {chain}")).unwrap();
    }
    code(engine.prepare_layer("", &lower, &lower), Code::AlreadyExists, &below);
    // containerd finds the snapshot by these two fields.
    let filter = format!("labels.\"containerd.io/snapshot.ref\"=={lower},parent==\"\"");
    assert_eq!(engine.list(&[&filter]).unwrap(), [&*below]);
    let top = chain(&lower, &upper);
    for (chain, blob) in [(&top, &other), (&chain(&upper, &upper), &upper), (&upper, &upper)] {
        engine.prepare_layer(&below, chain, blob).unwrap();
        engine.remove(&format!("default/1/extract-1 {chain}")).unwrap();
    }
    let above = format!("quire/{top}");
    code(engine.prepare_layer(&below, &top, &upper), Code::AlreadyExists, &above);
    // A repeated request gets the same snapshot.
    code(engine.prepare_layer(&below, &top, &upper), Code::AlreadyExists, &above);
    let root = engine.prepare("container", &above).unwrap();
    for name in ["lower", "upper"] {
        assert_eq!(fs::read_to_string(root.join(name)).unwrap(), name);
    }
    engine.end();
    // With `SkipLayers::Unpack`, the engine must download each blob.
    let mut engine = Engine::start(&stage, None);
    engine.remove("container").unwrap();
    engine.remove(&above).unwrap();
    engine.prepare_layer(&below, &top, &upper).unwrap();
    engine.end();
}
