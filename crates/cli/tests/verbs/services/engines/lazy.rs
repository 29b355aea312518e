//! Images that an engine starts before their layers are downloaded.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process};
use store::{OpenOptions, Store, Who};
use testing::daemon::Daemon;
use testing::fake::{Server, forward, wait_for};
use transfer::StoredImage;

use super::{
    Containerd, Engine, EnginePlace, NEWEST, Service, archive_of, engine_place, snapshotter,
};
use crate::Place;

/// Size of a file in bytes. It is more than programs read at their start, and more than is prefetched.
const LARGE: usize = 40 << 20;

/// An image in a registry with an index, and another image on top of it without one. All requests for them are
/// noted.
struct Stage {
    maker: Place,
    daemon: Daemon,
    server: Server,
}

impl Stage {
    fn new() -> Option<Self> {
        let maker = Place::new();
        let daemon = crate::registry_verbs::registries::start(&maker)?;
        let tree = maker.tree("tree", "long ");
        fs::write(tree.join("large"), testing::noise(LARGE)).unwrap();
        archive_of(&maker, &tree);
        let direct = format!("{}/team/app:1", daemon.host);
        maker.out(&format!("push image:1 {direct}"));
        maker.out(&format!("pull --quiet --form tar --keep-layers {direct}"));
        maker.out(&format!("index --push {direct} {direct}"));
        let change = ["run", "-d", "--name", "more", "image:1", "/bin/sh", "-c"];
        let ran = maker.run_each(&[&change[..], &["echo more > /etc/more"]].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        maker.out("wait more");
        maker.out("commit more image:2");
        maker.out(&format!("push image:2 {}/team/app:2", daemon.host));
        let upstream: Arc<str> = daemon.host.clone().into();
        let server = Server::start(move |request, _| forward(&upstream, request, 0).unwrap());
        Some(Self { maker, daemon, server })
    }

    fn name(&self, tag: u32) -> String {
        format!("{}/team/app:{tag}", self.server.host())
    }

    /// Returns the digests of the first image's layers.
    fn layers(&self) -> Vec<String> {
        let store = self.maker.path("store");
        let store = Store::open(&store, Who::this_process(), OpenOptions::read()).unwrap();
        let found = store.resolve(&format!("{}/team/app:1", self.daemon.host)).unwrap();
        let stored = StoredImage::load(&store, &found.manifest.unwrap()).unwrap();
        stored.manifest.layers.iter().map(|it| it.digest.to_string()).collect()
    }

    /// Returns the number of requests for a whole blob.
    fn whole(&self, digest: &str) -> usize {
        let seen = self.server.seen();
        let whole =
            seen.iter().filter(|it| it.line().starts_with("GET ") && it.line().contains(digest));
        whole.filter(|it| it.header("range").is_none()).count()
    }
}

/// Starts the service with these settings, and returns its socket.
fn start(place: &Place, settings: &str) -> (Service, PathBuf) {
    let (socket, file) = (place.path("snapshotter"), place.path("serve.toml"));
    fs::write(&file, format!("[snapshotter]\nskip = \"download\"\n{settings}")).unwrap();
    (snapshotter(place, &socket, &["--config", file.to_str().unwrap()]), socket)
}

/// Starts the service and the newest containerd.
fn engine(place: &Place, settings: &str) -> Option<(Service, Containerd)> {
    let containerd = testing::built(NEWEST, "containerd", "containerd")?;
    let (service, socket) = start(place, settings);
    let programs = containerd.parent().unwrap();
    Some((service, Containerd::start(place, Engine::NewestWithDiffer, programs, &socket)))
}

/// Settings that trust any index in the image's repository.
const TRUSTING: &str = "lazy = true\ntrust-index = \"repository\"\n";

fn pull(name: &str) -> String {
    format!("image pull --plain-http --snapshotter quire {name}")
}

/// An engine that has pulled the first image of a stage, without its layers.
struct Pulled {
    stage: Stage,
    service: Service,
    engine: Containerd,
    one: String,
    two: String,
}

impl Pulled {
    fn new(place: &Place) -> Option<Self> {
        if !crate::services::fuse_devices::can_serve() {
            return None;
        }
        let stage = Stage::new()?;
        let (service, engine) = engine(place, TRUSTING)?;
        let [one, two] = [1, 2].map(|it| stage.name(it));
        engine.out(&pull(&one));
        Some(Self { stage, service, engine, one, two })
    }
}

fn container(name: &str) -> String {
    format!("quire-test-{}-{name}", std::process::id())
}

#[test]
fn an_image_starts_before_its_layers_are_here() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let Some(Pulled { stage, mut service, engine, one, two }) = Pulled::new(place) else { return };
    let layers = stage.layers();
    assert_eq!(layers.len(), 2);
    for layer in &layers {
        assert_eq!(stage.whole(layer), 0, "{layer}: {:?}", stage.server.lines());
    }
    let run = |name: &str, container: &str, command: &str| {
        engine.out(&format!("run --rm --snapshotter quire {name} {container} {command}"))
    };
    assert_eq!(run(&one, &container("lazy"), "/bin/cat /etc/short"), "changed\n");
    assert_eq!(stage.whole(&layers[0]) + stage.whole(&layers[1]), 0);
    let listed = fs::read_dir(place.path("store/lazy")).unwrap().count();
    assert!(listed > 0);
    // The store has no name that the engine does not know, and `gc` keeps all data that a snapshot needs.
    assert_eq!(place.out("images --json").trim(), "[]");
    place.out("gc");
    place.out("fsck");
    assert_eq!(run(&one, &container("lazy"), "/bin/cat /etc/short"), "changed\n");
    // An image on top of this image has no index. Making its layers needs the lower layers, so all of them are fetched
    // now.
    engine.out(&pull(&two));
    assert_eq!(run(&two, &container("upon"), "/bin/cat /etc/more"), "more\n");
    assert_eq!(run(&two, &container("upon"), "/bin/cat /etc/short"), "changed\n");
    assert!(layers.iter().all(|it| stage.whole(it) == 1), "{:?}", stage.server.lines());
    for name in [&one, &two] {
        engine.out(&format!("image rm --sync {name}"));
    }
    let none = || engine.out("snapshot --snapshotter quire ls").lines().count() == 1;
    wait_for("no snapshot is left", none);
    assert!(service.end().success());
    place.out("serve --lazy --stop");
    place.out("gc");
    let left = |folder: &str| fs::read_dir(place.path("store").join(folder)).unwrap().count();
    assert_eq!((left("layers"), left("images")), (0, 0));
}

/// The service is killed in between. When everything was read, the image is like others, and no data is fetched
/// twice.
#[test]
fn a_container_reads_all_of_an_image_that_came_without_its_layers() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let Some(Pulled { stage, mut service, engine, one, two }) = Pulled::new(place) else { return };
    let reader = container("reader");
    engine.out(&format!("run --detach --snapshotter quire {one} {reader} /bin/sleep 600"));
    service.0.kill().unwrap();
    service.0.wait().unwrap();
    let (mut service, _) = start(place, TRUSTING);
    let read = engine.output(&format!("task exec --exec-id a {reader} /bin/cat /large"));
    assert!(read.stdout == testing::noise(LARGE), "{}", String::from_utf8_lossy(&read.stderr));
    assert_eq!(engine.read_in(&reader, "/etc/short"), "changed\n");
    let layers = || fs::read_dir(place.path("store/layers")).unwrap().count();
    wait_for("the image is compared with its layers", || layers() >= 2);
    engine.out(&pull(&two));
    let upon = container("upon-all");
    let run = format!("run --rm --snapshotter quire {two} {upon} /bin/cat /etc/more");
    assert_eq!(engine.out(&run), "more\n");
    assert!(stage.layers().iter().all(|it| stage.whole(it) == 0), "{:?}", stage.server.lines());
    engine.out(&format!("task kill --signal SIGKILL {reader}"));
    let gone = || engine.ctr(&format!("task delete {reader}")).code == Some(0);
    wait_for("the container has ended", gone);
    engine.out(&format!("container delete {reader}"));
    for name in [&one, &two] {
        engine.out(&format!("image rm --sync {name}"));
    }
    assert!(service.end().success());
    place.out("fsck");
    place.out("serve --lazy --stop");
}

/// If service and keeper die, readers get errors. Only the containers of these readers must end before the image can
/// be used again.
#[test]
fn an_image_starts_again_after_all_that_fills_it_has_died() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    if !crate::services::fuse_devices::can_serve() {
        return;
    }
    let Some(stage) = Stage::new() else { return };
    let lazy = || crate::services::served::serve(place);
    let Some((mut service, engine)) = engine(place, TRUSTING) else { return };
    let mut filler = lazy();
    let name = stage.name(1);
    engine.out(&pull(&name));
    let reader = container("dying");
    engine.out(&format!("run --detach --snapshotter quire {name} {reader} /bin/sleep 600"));
    let keeper = crate::services::served::keeper_of(&crate::services::served::serve_folder(place));
    let process = Pid::from_raw(filler.id().cast_signed()).unwrap();
    // Stop both first, because each would restart the other one.
    for signal in [Signal::STOP, Signal::KILL] {
        for process in [process, keeper] {
            kill_process(process, signal).unwrap();
        }
    }
    filler.wait().unwrap();
    let read = || engine.ctr(&format!("task exec --exec-id a {reader} /bin/cat /large"));
    let failed = read();
    assert_ne!(failed.code, Some(0), "{}", failed.out.len());
    // The container may have died because a page could not be read.
    engine.ctr(&format!("task kill --signal SIGKILL {reader}"));
    let gone = || engine.ctr(&format!("task delete {reader}")).code == Some(0);
    wait_for("the container has ended", gone);
    engine.out(&format!("container delete {reader}"));
    let filler = lazy();
    let run = format!("run --rm --snapshotter quire {name} {}", container("again"));
    // The engine removes the root of the previous container with a delay.
    wait_for("it starts again", || {
        engine.ctr(&format!("{run} /bin/cat /etc/short")).code == Some(0)
    });
    let large = engine.output(&format!("{run} /bin/cat /large"));
    assert!(large.stdout == testing::noise(LARGE), "{large:?}");
    engine.out(&format!("image rm --sync {name}"));
    assert!(service.end().success());
    drop(filler);
    place.out("serve --lazy --stop");
}

/// Any user who may push to the repository may have pushed the index.
#[test]
fn an_index_that_nobody_has_signed_is_not_used() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let Some(stage) = Stage::new() else { return };
    let Some((mut service, engine)) = engine(place, "lazy = true\n") else { return };
    let name = stage.name(1);
    engine.out(&pull(&name));
    assert!(stage.layers().iter().all(|it| stage.whole(it) == 1));
    let container = container("signed");
    let run = format!("run --rm --snapshotter quire {name} {container} /bin/cat /etc/short");
    assert_eq!(engine.out(&run), "changed\n");
    // There is also the empty layer of the first root.
    assert_eq!(fs::read_dir(place.path("store/layers")).unwrap().count(), 3);
    engine.out(&format!("image rm --sync {name}"));
    assert!(service.end().success());
}

#[test]
fn lazy_starts_need_an_engine_that_does_not_download() {
    let place = Place::new();
    fs::write(place.path("serve.toml"), "[snapshotter]\nlazy = true\n").unwrap();
    let ran = place.run("serve --snapshotter --config serve.toml --socket s");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("serve.toml: lazy = true below [snapshotter]"), "{}", ran.err);
    assert!(ran.err.contains("needs skip = \"download\""), "{}", ran.err);
}
