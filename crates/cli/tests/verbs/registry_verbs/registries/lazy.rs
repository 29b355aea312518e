//! Images that are pulled without their layers.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use store::{OpenOptions, Store, Trace, TraceRun, Traces};
use testing::fake::{Server, forward};

use super::{Daemon, last_event, place, start};
use crate::Place;

/// An image in a registry, and its index.
pub(super) struct Stage {
    pub(super) from: Place,
    pub(super) daemon: Daemon,
    pub(super) target: String,
    pub(super) manifest: String,
}

fn open(place: &Place) -> Store {
    Store::open(&place.path("store"), store::Who::this_process(), OpenOptions::read()).unwrap()
}

/// Returns the id of an image, which may lack data.
fn image(place: &Place, name: &str) -> String {
    open(place).resolve(name).unwrap().image.to_string()
}

impl Stage {
    fn new() -> Option<Self> {
        Self::pushed_with("")
    }

    /// Pushes the image with these options, each after a space.
    fn pushed_with(options: &str) -> Option<Self> {
        let from = place(50);
        let daemon = start(&from)?;
        let target = format!("{}/team/app:1", daemon.host);
        let pushed = last_event(&from.out(&format!("push --json{options} a:1 {target}")));
        let manifest = pushed["manifest"].as_str().unwrap().to_owned();
        from.out(&format!("pull --quiet --form tar --keep-layers {target}"));
        Some(Self { from, daemon, target, manifest })
    }

    /// Makes the index, and an empty place in which programs can wait for data.
    #[cfg(feature = "serve")]
    pub(super) fn to_wait_for() -> Option<(Self, Place)> {
        if !crate::services::fuse_devices::can_serve() {
            return None;
        }
        let stage = Self::new()?;
        stage.index();
        // The place has no store yet.
        Some((stage, Place::new()))
    }

    fn pinned(&self) -> String {
        format!("{}/team/app@{}", self.daemon.host, self.manifest)
    }

    /// Makes the index of the image and pushes it.
    fn index(&self) -> Value {
        let Self { from, target, .. } = self;
        let made = from.out(&format!("index --json --push {target} {target}"));
        serde_json::from_str::<Value>(&made).unwrap()["pushed"].take()
    }
}

pub(super) fn names(place: &Place, folder: &str) -> Vec<String> {
    let Ok(files) = std::fs::read_dir(place.path("store").join(folder)) else {
        return Vec::new();
    };
    let mut names: Vec<_> =
        files.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn no_layer_is_fetched_and_the_image_is_the_same() {
    let Some(stage) = Stage::new() else { return };
    let pushed = stage.index();
    assert!(pushed["sent"].as_u64().unwrap() > 0);
    let again = stage.index();
    assert_eq!((&again["sent"], &again["artifact"]), (&0.into(), &pushed["artifact"]));
    let listed: Value =
        serde_json::from_str(&stage.from.out(&format!("referrers --json {}", stage.pinned())))
            .unwrap();
    assert_eq!(listed["referrers"].as_array().unwrap().len(), 1);
    assert_eq!(listed["referrers"][0]["artifactType"], "application/vnd.quire.lazy.v1");

    let to = Place::new();
    let pulled = last_event(&to.out(&format!("pull --json --lazy=require {}", stage.target)));
    assert_eq!(
        (&pulled["event"], &pulled["manifest"]),
        (&"pulled".into(), &stage.manifest.as_str().into())
    );
    assert_eq!(pulled["index"], pushed["artifact"]);
    assert_eq!((&pulled["layers"], &pulled["lazyDevices"]), (&1.into(), &1.into()));
    assert!(pulled["lazyBytes"].as_u64().unwrap() > 8 << 20);
    // A pull with all layers makes the same image with the same device as the lazy pull.
    assert_eq!(image(&to, &stage.target), image(&stage.from, &stage.target));
    assert_eq!(names(&to, "data"), [""; 0]);
    let device = names(&stage.from, "data").remove(0);
    assert!(names(&to, "lazy").contains(&device));
    // The store takes less than an eighth of the layer's size.
    let store = open(&to);
    let used: u64 = store.du().unwrap().data;
    assert!(used < 1 << 20, "{used} bytes");
    to.out("fsck");
    let refused = to.run(&format!("bundle --vm vm {}", stage.target)).err;
    assert!(refused.contains("is not completely downloaded"), "{refused}");
    to.out("gc");
    assert!(to.out(&format!("pull --lazy {}", stage.target)).contains("up to date"));
    let id = store.resolve(&stage.target).unwrap().image;
    let sources = transfer::lazy::sources(&store, &id).unwrap();
    assert_eq!(sources.iter().map(ToString::to_string).collect::<Vec<_>>(), [stage.pinned()]);
}

/// A layer of several zstd frames can be read in parts.
#[test]
fn a_layer_of_zstd_frames_is_pulled_lazily() {
    let Some(stage) = Stage::pushed_with(" --compression zstd") else { return };
    let Stage { from, target, .. } = &stage;
    let made = from.out(&format!("index --json --no-start --push {target} {target}"));
    let made: Value = serde_json::from_str(&made).unwrap();
    let layer = &made["layers"][0];
    assert!(layer["reason"].is_null() && layer["spans"].as_u64().unwrap() >= 4, "{made}");
    let to = Place::new();
    let pulled = last_event(&to.out(&format!("pull --json --lazy=require {target}")));
    assert_eq!(pulled["index"], made["pushed"]["artifact"]);
    assert_eq!((&pulled["layers"], &pulled["lazyDevices"]), (&1.into(), &1.into()));
    assert!(pulled["lazyBytes"].as_u64().unwrap() > 8 << 20);
    assert_eq!(image(&to, target), image(from, target));
    to.out("fsck");
    // A pull that makes the index itself makes the same one.
    let other = Place::new();
    other.out(&format!("pull --quiet --form tar --index {target}"));
    let index = |place: &Place| {
        let device = names(place, "data").remove(0);
        std::fs::read(place.path("store/lazy").join(format!("{device}.index"))).unwrap()
    };
    assert!(index(&other) == index(from));
}

/// Returns the length of the longest chain of requests that had to wait for each other, and all requests to a
/// registry.
fn chain_of(upstream: &str, ask: impl FnOnce(&str)) -> (usize, Vec<String>) {
    // For each request: whether it was answered, and the length of the longest chain of requests that were answered
    // before it.
    let asked: Arc<Mutex<Vec<(bool, usize)>>> = Arc::default();
    let (seen, upstream) = (Arc::clone(&asked), upstream.to_owned());
    let server = Server::start(move |request, _| {
        let number = {
            let mut all = seen.lock().unwrap();
            let before = all.iter().filter(|it| it.0).map(|it| it.1).max().unwrap_or(0);
            all.push((false, before + 1));
            all.len() - 1
        };
        // The wait is so long that independent requests arrive before the first reply.
        std::thread::sleep(Duration::from_millis(300));
        let reply = forward(&upstream, request, 0).unwrap();
        seen.lock().unwrap()[number].0 = true;
        reply
    });
    ask(&server.host());
    let longest = asked.lock().unwrap().iter().map(|it| it.1).max().unwrap_or(0);
    (longest, server.lines())
}

/// Asserts that one of several lazy pulls of this image has a chain of at most `most` requests, and that its requests
/// are right. On a busy machine chains get longer, but never shorter.
#[track_caller]
pub(super) fn check_chain(stage: &Stage, name: &str, most: impl Fn(&[String]) -> usize) {
    let mut seen = Vec::new();
    for _ in 0..3 {
        let found = chain_of(&stage.daemon.host, |host| {
            Place::new().out(&format!("pull --lazy=require {host}/team/app{name}"));
        });
        if found.0 <= most(&found.1) {
            return;
        }
        seen.push(found);
    }
    panic!("{seen:?}");
}

/// Decision 33: the image's manifest and that of the index, then the config and the blob for starts.
#[test]
fn a_lazy_pull_waits_for_two_answers() {
    let Some(stage) = Stage::new() else { return };
    stage.index();
    check_chain(&stage, ":1", |lines| {
        assert_eq!(lines.len(), 4, "{lines:?}");
        2
    });
    // The name of the index's tag is unknown. The chain consists of the manifest, the referrers, the index, and its
    // parts. If a registry does not list the referrers of a manifest, a tag is requested in addition.
    let pinned = format!("@{} --trust-index repository", stage.manifest);
    check_chain(&stage, &pinned, |lines| {
        assert!(lines.iter().any(|it| it.contains("/referrers/")), "{lines:?}");
        4 + lines.iter().filter(|it| it.contains("manifests/sha256-")).count()
    });
}

/// The tag of an index can outlive the image to which the index belongs.
#[test]
fn an_index_that_the_tag_of_another_image_has_is_not_used() {
    let Some(stage) = Stage::new() else { return };
    let before = stage.index();
    let Stage { from, target, .. } = &stage;
    from.out(&format!("push --quiet a:1 {}/team/app:2", stage.daemon.host));
    std::fs::write(from.path("tree/more"), "another image").unwrap();
    let mut pack = std::process::Command::new("tar");
    pack.arg("-czf").arg(from.path("b.tar.gz")).arg("-C").arg(from.path("tree")).arg(".");
    assert!(pack.status().unwrap().success());
    from.out("import --quiet tar:b.tar.gz other:1");
    from.out(&format!("push --quiet other:1 {target}"));
    let to = Place::new();
    let refused = to.run(&format!("pull --lazy=require {target}"));
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("has no index for lazy loading"), "{}", refused.err);
    // The list of referrers still has the index of the first image, also under another tag.
    let second = format!("{}/team/app:2", stage.daemon.host);
    let pulled = last_event(&to.out(&format!("pull --json --lazy=require {second}")));
    assert_eq!(pulled["index"], before["artifact"]);
}

#[test]
fn traces_travel_with_the_index() {
    let Some(stage) = Stage::new() else { return };
    let without = stage.index();
    let from =
        Store::open(&stage.from.path("store"), store::Who::this_process(), OpenOptions::write());
    let from = from.unwrap();
    let id = from.resolve(&stage.target).unwrap().image;
    let device = from.open_image(&id).unwrap().devices[0].id;
    let mut traces = Traces::default();
    let runs =
        vec![TraceRun { device, block: 3, blocks: 2 }, TraceRun { device, block: 0, blocks: 1 }];
    traces.set(Trace { name: "default".to_owned(), runs, start: None }).unwrap();
    from.downloads.set_traces(&id, &traces).unwrap();
    let with = stage.index();
    assert_ne!(with["artifact"], without["artifact"]);
    // The config names the hot pack of the trace.
    assert_ne!(with["index"], without["index"]);
    // The registry has both indexes, and the index with traces is used.
    let to = Place::new();
    let pulled = last_event(&to.out(&format!("pull --json --lazy=require {}", stage.target)));
    assert_eq!(pulled["index"], with["artifact"]);
    assert_eq!(open(&to).downloads.traces(&id).unwrap(), traces);
    let manifest = stage.manifest.parse().unwrap();
    let pack = open(&to).downloads.hot_pack(&manifest).unwrap().unwrap();
    let blocks: Vec<_> = pack.frames().iter().flat_map(|it| it.blocks()).collect();
    assert_eq!(blocks, [3, 4, 0]);
    to.out("gc");
    assert!(
        open(&to).downloads.hot_pack(&manifest).unwrap().is_some(),
        "it goes with the manifest"
    );
    to.out("fsck");
}

#[test]
fn an_image_without_an_index_is_pulled_whole_or_refused() {
    let Some(stage) = Stage::new() else { return };
    let to = Place::new();
    let refused = to.run(&format!("pull --lazy=require {}", stage.target));
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("has no index for lazy loading"), "{}", refused.err);
    assert_eq!(names(&to, "images"), [""; 0]);
    let pulled = to.run(&format!("pull --lazy {}", stage.target));
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    assert!(pulled.err.contains("has no index for lazy loading"), "{}", pulled.err);
    assert!(pulled.err.contains("pulling the layers"), "{}", pulled.err);
    assert_eq!(to.out(&format!("cat {}:/file-7", stage.target)), "7 ".repeat(99));
    // Layers without compression cannot have an index, so the hint does not advise one.
    let plain = format!("{}/team/plain:1", stage.daemon.host);
    stage.from.out(&format!("push --quiet --compression none a:1 {plain}"));
    let refused = to.run(&format!("pull --lazy=require {plain}"));
    assert!(refused.code == Some(2) && !refused.err.contains("index --push"), "{}", refused.err);
    assert!(refused.err.contains("not compressed with gzip"), "{}", refused.err);
}

#[test]
fn a_digest_needs_an_index_that_is_named() {
    let Some(stage) = Stage::new() else { return };
    let pushed = stage.index();
    let pinned = stage.pinned();
    let to = Place::new();
    let refused = to.run(&format!("pull --lazy=require {pinned}"));
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("anyone with push rights"), "{}", refused.err);
    let other = oci::Digest::sha256(b"other");
    let refused = to.run(&format!("pull --lazy=require --trust-index {other} {pinned}"));
    assert!(refused.err.contains("--trust-index names another index"), "{}", refused.err);
    let refused = to.run(&format!("pull --lazy --trust-index all {pinned}"));
    assert!(refused.err.contains("is neither a digest nor"), "{}", refused.err);
    let digest = |which: &str| pushed[which].as_str().unwrap();
    for trust in ["repository", digest("artifact"), digest("index")] {
        let to = Place::new();
        to.out(&format!("pull --lazy=require --trust-index {trust} {pinned} b:1"));
        assert_eq!(image(&to, "b:1"), image(&stage.from, &stage.target));
    }
    // Neither a tag nor an option satisfies a policy that requires signatures.
    let policy = to.path("policy.toml");
    let repository = format!("{}/team/app", stage.daemon.host);
    let text = format!(
        "default = \"none\"\n[[rule]]\nmatch = \"{repository}\"\naccept = \"any\"\ndigests = [\"{}\"]\n",
        stage.manifest
    );
    std::fs::write(&policy, text).unwrap();
    for options in ["", " --trust-index repository"] {
        let run =
            format!("--policy {} pull --lazy=require{options} {}", policy.display(), stage.target);
        let refused = to.run(&run);
        assert_eq!(refused.code, Some(4));
        assert!(refused.err.contains("a policy refuses it"), "{}", refused.err);
    }
    // A policy that refuses the image itself has the same exit code.
    std::fs::write(&policy, "default = \"none\"\n").unwrap();
    let refused = to.run(&format!("--policy {} pull {}", policy.display(), stage.target));
    assert_eq!(refused.code, Some(4), "{}", refused.err);
}

#[test]
fn an_index_of_other_bytes_changes_nothing_in_the_store() {
    let Some(stage) = Stage::new() else { return };
    let pushed = stage.index();
    // Change the registry's copy of an index's head.
    let data = stage.daemon.folder().join("data/docker/registry/v2/blobs/sha256");
    let mut flipped = 0;
    for file in walk(&data) {
        let mut bytes = std::fs::read(&file).unwrap();
        if let Some(head) = bytes.windows(8).position(|it| it == b"quirelzy") {
            bytes[head + 300] ^= 1;
            std::fs::write(&file, bytes).unwrap();
            flipped += 1;
        }
    }
    assert_eq!(flipped, 1);
    let to = Place::new();
    let refused = to.run(&format!("pull --lazy=require {}", stage.target));
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains(pushed["artifact"].as_str().unwrap()), "{}", refused.err);
    assert!(refused.err.contains("is damaged"), "{}", refused.err);
    assert_eq!((names(&to, "images"), names(&to, "lazy")), (Vec::new(), Vec::new()));
    to.out(&format!("pull --quiet --lazy {}", stage.target));
    to.out("fsck");
}

fn walk(folder: &std::path::Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.append(&mut walk(&path)),
            false => files.push(path),
        }
    }
    files
}

#[cfg(feature = "serve")]
#[test]
fn what_is_read_is_fetched_from_the_registry() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let mut service = crate::services::served::serve(&to);
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    // The windows are fetched with the first data of their device.
    let has = |suffix: &str| names(&to, "lazy").iter().any(|it| it.ends_with(suffix));
    assert!(has(".windows-digest") && !has(".windows"), "{:?}", names(&to, "lazy"));
    std::fs::create_dir(to.path("root")).unwrap();
    to.out("mount --lazy app root");
    let listed = stage.from.out(&format!("ls -R {}", stage.target));
    let mut files = 0;
    for name in listed.lines() {
        let path = to.path("root").join(name);
        if !path.symlink_metadata().unwrap().is_file() {
            continue;
        }
        let expect = stage.from.out(&format!("cat {}:/{name}", stage.target));
        assert!(String::from_utf8_lossy(&std::fs::read(&path).unwrap()) == expect, "{name}");
        files += 1;
    }
    assert!(files > 10, "{files}");
    // The service stores windows in the background.
    testing::fake::wait_for("the windows", || has(".windows-digest") && has(".windows"));
    // Downloaded data needs no registry, even after a restart.
    to.out("umount root");
    crate::services::served::end(&to, &mut service);
    let Stage { from, daemon, target, .. } = stage;
    drop(daemon);
    let mut service = crate::services::served::serve(&to);
    to.out("mount --lazy app root");
    let name = listed.lines().find(|it| to.path("root").join(it).is_file()).unwrap();
    let read = std::fs::read(to.path("root").join(name)).unwrap();
    assert!(String::from_utf8_lossy(&read) == from.out(&format!("cat {target}:/{name}")));
    to.out("umount root");
    crate::services::served::end(&to, &mut service);
}

#[cfg(feature = "serve")]
#[test]
fn a_damaged_name_keeps_no_other_image_from_its_bytes() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    to.out("tag app damaged");
    let file = to.path("store/refs/damaged:latest");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[0] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let mut service = crate::services::served::serve(&to);
    std::fs::create_dir(to.path("root")).unwrap();
    let refused = to.run("mount --lazy damaged root");
    assert!(refused.code == Some(2) && refused.err.contains("damaged"), "{}", refused.err);
    to.out("mount --lazy app root");
    let read = std::fs::read_to_string(to.path("root/file-7")).unwrap();
    assert_eq!(read, "7 ".repeat(99));
    to.out("umount root");
    crate::services::served::end(&to, &mut service);
}

#[cfg(feature = "serve")]
#[test]
fn a_lazy_image_becomes_complete_while_it_is_mounted() {
    use std::os::unix::fs::MetadataExt as _;

    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let mut service = crate::services::served::serve(&to);
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    std::fs::create_dir(to.path("root")).unwrap();
    let refused = to.run("mount --complete app root");
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("--lazy"), "{}", refused.err);
    let device = names(&stage.from, "data").remove(0);
    let inode = std::fs::metadata(to.path("store/lazy").join(&device)).unwrap().ino();
    to.out("mount --lazy --complete app root");
    let id = image(&to, "app");
    testing::fake::wait_for("all of the image", || names(&to, "data").contains(&device));
    // The mounted file is still the same file, and equals the file that a pull with layers makes.
    let path = to.path("store/data").join(&device);
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), inode);
    let full = stage.from.path("store/data").join(&device);
    assert!(std::fs::read(&path).unwrap() == std::fs::read(full).unwrap());
    assert_eq!(image(&to, "app"), id);
    assert!(to.out("fsck --deep").starts_with("sound"));
    testing::fake::wait_for("the listing", || to.out("ps --lazy --json").trim() == "[]");
    // The registry is no longer needed. The service is needed until the image is unmounted.
    drop(stage.daemon);
    let expect = "7 ".repeat(99);
    assert_eq!(std::fs::read_to_string(to.path("root/file-7")).unwrap(), expect);
    to.out("umount root");
    crate::services::served::end(&to, &mut service);
    to.out("mount app root");
    assert_eq!(std::fs::read_to_string(to.path("root/file-7")).unwrap(), expect);
    to.out("umount root");
    to.out("rmi app");
    to.out("gc");
    assert_eq!((names(&to, "data"), names(&to, "lazy")), (Vec::new(), Vec::new()));
}

#[test]
fn a_store_of_lazy_images_alone_is_repaired_and_pulled_again() {
    let Some(stage) = Stage::new() else { return };
    stage.index();
    let to = Place::new();
    let pull = format!("pull --quiet --lazy=require {} app", stage.target);
    to.out(&pull);
    let sound = names(&to, "lazy");
    let index = sound.iter().find(|it| it.ends_with(".index")).unwrap();
    let path = to.path("store/lazy").join(index);
    let good = std::fs::read(&path).unwrap();
    for repairs in [0, 3] {
        let mut bytes = good.clone();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let found = to.run("fsck --deep");
        assert!(
            found.code == Some(1) && found.out.contains("quire pull --lazy NAME"),
            "{}",
            found.out
        );
        for _ in 0..repairs {
            let ran = to.run("fsck --repair --deep");
            assert!(ran.code < Some(2), "{}{}", ran.out, ran.err);
        }
        assert_eq!(path.exists(), repairs == 0);
        to.out(&pull);
        assert_eq!(names(&to, "lazy"), sound);
        assert!(std::fs::read(&path).unwrap() == good);
        assert!(to.out("fsck --deep").starts_with("sound"));
    }
}

#[cfg(feature = "serve")]
#[test]
fn a_service_is_stopped_unless_it_is_needed() {
    use rustix::process::{Pid, Signal, kill_process};
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let missing = to.run("serve --lazy --stop");
    assert_eq!(missing.code, Some(3), "{}", missing.err);
    assert!(!to.path("store").exists());
    let id = to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    assert_eq!(id.trim(), image(&to, "app"));
    assert_eq!(to.out(&format!("pull --quiet --lazy {} app", stage.target)), id);
    let none = to.run("serve --lazy --stop");
    assert!(none.code == Some(0) && none.err.contains("no service"), "{}", none.err);
    let mut service = crate::services::served::serve(&to);
    std::fs::create_dir(to.path("root")).unwrap();
    to.out("mount --lazy app root");
    let listed: Value = serde_json::from_str(&to.out("ps --lazy --json")).unwrap();
    assert_eq!(listed[0]["images"], serde_json::json!(["app:latest"]));
    assert!(to.out("ps --lazy").contains("app:latest"));
    let used = to.run("serve --lazy --stop");
    assert_eq!(used.code, Some(2));
    assert!(used.err.contains("in use") && used.err.contains("unmount"), "{}", used.err);
    assert_eq!(std::fs::read_to_string(to.path("root/file-7")).unwrap(), "7 ".repeat(99));
    // The service also ends while it completes an image that no program reads, even if the registry is silent.
    let registry = Pid::from_raw(stage.daemon.process().try_into().unwrap()).unwrap();
    kill_process(registry, Signal::STOP).unwrap();
    std::fs::create_dir(to.path("other")).unwrap();
    to.out("mount --lazy --complete app other");
    to.out("umount other");
    to.out("umount root");
    // A container of another test has copies of all mounts that existed at its start.
    testing::fake::wait_for("its end", || to.run("serve --lazy --stop").code == Some(0));
    assert!(service.wait().unwrap().success());
    kill_process(registry, Signal::CONT).unwrap();
}

#[cfg(feature = "serve")]
#[test]
fn gc_asks_the_service_what_is_in_use() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let mut service = crate::services::served::serve(&to);
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    std::fs::create_dir(to.path("root")).unwrap();
    to.out("mount --lazy app root");
    to.out("rmi app");
    to.out("gc");
    assert!(!names(&to, "lazy").is_empty(), "it is mounted");
    assert_eq!(std::fs::read_to_string(to.path("root/file-7")).unwrap(), "7 ".repeat(99));
    to.out("umount root");
    // `gc` removes it at once, although the service checks only every two seconds.
    to.out("gc");
    assert_eq!(names(&to, "lazy"), [""; 0]);
    crate::services::served::end(&to, &mut service);
}

#[cfg(feature = "serve")]
#[test]
fn a_registry_that_says_nothing_does_not_keep_readers() {
    use rustix::process::{Pid, Signal, kill_process};
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let mut service = crate::services::served::serve_with(&to, &["--lazy-timeout", "1"], |it| it);
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    std::fs::create_dir(to.path("root")).unwrap();
    to.out("mount --lazy app root");
    let registry = Pid::from_raw(stage.daemon.process().try_into().unwrap()).unwrap();
    kill_process(registry, Signal::STOP).unwrap();
    let path = to.path("root/file-7");
    let reader = std::thread::spawn({
        let path = path.clone();
        move || std::fs::read(path).map(|it| it.len())
    });
    // The read fails long before the connection times out.
    testing::fake::wait_for("the reader", || reader.is_finished());
    let error = reader.join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    let listed = to.run("ps --lazy");
    assert!(listed.err.contains("got an I/O error: no source has sent data for"), "{}", listed.err);
    let listed: Value = serde_json::from_str(&to.out("ps --lazy --json")).unwrap();
    assert!(listed[0]["lastFailure"].is_string() && listed[0]["lastFailureAge"].is_u64());
    kill_process(registry, Signal::CONT).unwrap();
    let mut read = None;
    testing::fake::wait_for("its bytes", || {
        read = std::fs::read_to_string(&path).ok();
        read.is_some()
    });
    assert_eq!(read.unwrap(), "7 ".repeat(99));
    to.out("umount root");
    // Requests that were sent before the registry stopped may be answered only now.
    testing::fake::wait_for("the end of all", || to.out("ps --lazy --json").trim() == "[]");
    crate::services::served::end(&to, &mut service);
}

#[test]
fn an_index_is_pushed_to_the_image_that_it_is_of() {
    let Some(stage) = Stage::new() else { return };
    let Stage { from, daemon, target, .. } = &stage;
    let elsewhere = from.run(&format!("index --push {}/other:1 {target}", daemon.host));
    assert_eq!(elsewhere.code, Some(3));
    assert!(elsewhere.err.contains("push the image first"), "{}", elsewhere.err);
    let text = from.out(&format!("index --push {target} {target}"));
    assert!(text.contains("pushed sha256:"), "{text}");
}

#[cfg(feature = "serve")]
#[test]
fn an_image_is_pulled_by_who_uses_it_first() {
    if !crate::services::fuse_devices::can_serve() {
        return;
    }
    let Some(stage) = Stage::new() else { return };
    let Stage { target, .. } = &stage;
    let to = Place::new();
    std::fs::create_dir(to.path("root")).unwrap();
    // The registry has no index yet.
    let refused = to.run(&format!("mount --lazy=require {target} root"));
    assert_eq!(refused.code, Some(2));
    for part in ["cannot pull", "has no index for lazy loading"] {
        assert!(refused.err.contains(part), "{}", refused.err);
    }
    for verb in ["mount --pull never --lazy", "mount"] {
        let refused = to.run(&format!("{verb} {target} root"));
        assert!(refused.code == Some(3) && refused.err.contains("quire pull"), "{}", refused.err);
    }
    assert_eq!(names(&to, "images"), [""; 0]);
    stage.index();
    let pinned = stage.pinned();
    let refused = to.run(&format!("mount --lazy=require {pinned} root"));
    assert!(refused.err.contains("anyone with push rights"), "{}", refused.err);

    let mut service = crate::services::served::serve(&to);
    let mounted = to.run(&format!("--quiet mount --lazy=require {target} root"));
    assert!(mounted.code == Some(0) && mounted.out.is_empty(), "{}{}", mounted.out, mounted.err);
    let read = || std::fs::read_to_string(to.path("root/file-7")).unwrap();
    assert_eq!(read(), "7 ".repeat(99));
    assert_eq!(names(&to, "data"), [""; 0]);
    to.out("umount root");
    to.out(&format!("mount --lazy --trust-index repository {pinned} root"));
    assert_eq!(read(), "7 ".repeat(99));
    to.out("umount root");
    crate::services::served::end(&to, &mut service);

    // The registry is asked only if the store lacks the name, or with `--pull always`.
    let other = format!("{}/team/other:1", stage.daemon.host);
    stage.from.out(&format!("push --quiet a:1 {other}"));
    to.out(&format!("mount --pull missing {other} root"));
    assert_eq!(read(), "7 ".repeat(99));
    to.out("umount root");
    let Stage { daemon, .. } = stage;
    drop(daemon);
    to.out(&format!("mount --pull missing {other} root"));
    to.out("umount root");
    let refused = to.run(&format!("mount --pull always {other} root"));
    assert!(refused.code == Some(5) && refused.err.contains("cannot pull"), "{}", refused.err);
    let id = image(&to, &other);
    let refused = to.run(&format!("mount --pull always {id} root"));
    assert!(refused.err.contains("not the name of an image of a registry"), "{}", refused.err);
    to.out(&format!("mount --pull missing {id} root"));
    to.out("umount root");
}

#[cfg(feature = "serve")]
#[test]
fn a_container_starts_from_a_registry() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let mut service = crate::services::served::serve(&to);
    for runtime in crate::container_life::runs::runtimes() {
        // The image has no program, so the error comes from the runtime.
        let ran = to.run(&format!("run --rm --lazy --runtime {runtime} {} /none", stage.target));
        assert!(ran.code == Some(127) && ran.out.is_empty(), "{}{}", ran.out, ran.err);
    }
    // The pull synced nothing. The service has synced it after the start, or the end of `run` has.
    let unsynced = std::fs::read(to.path("store/unsynced")).unwrap();
    assert!(unsynced.is_empty(), "{unsynced:?}");
    to.out("fsck");
    assert_eq!(names(&to, "data"), [""; 0]);
    let traced = to.run(&format!("trace --pull missing {} -- /none", stage.target));
    assert!(traced.code == Some(125) && traced.err.contains("--pull"), "{}", traced.err);
    crate::services::served::end(&to, &mut service);
}

/// A remark about the options of a service is only printed if they differ.
#[cfg(feature = "serve")]
#[test]
fn a_service_with_the_same_options_needs_no_remark() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    std::fs::write(to.path("auth.json"), "{}").unwrap();
    std::fs::write(to.path("other.json"), "{}").unwrap();
    let run = |options: &str| {
        let ran = to.run(&format!("run --rm --lazy {options} {} /none", stage.target));
        assert!(ran.code == Some(127), "{}{}", ran.out, ran.err);
        ran.err
    };
    let (started, same) = (run("--authfile auth.json"), run("--authfile auth.json"));
    let other = run("--authfile other.json");
    // A container of another test has copies of all mounts that existed at its start.
    testing::fake::wait_for("its end", || to.run("serve --lazy --stop").code == Some(0));
    assert!(started.contains("started `quire serve --lazy`"), "{started}");
    assert!(!same.contains("--replace"), "{same}");
    assert!(other.contains("--replace --authfile") && other.contains("other.json"), "{other}");
}
