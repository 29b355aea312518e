//! Lazy images whose start is prefetched because an earlier version was started.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use store::{OpenOptions, StartRecord, Store};
use testing::chunked::{
    ChunkedFormat, ChunkedImage, ChunkedLayer, chunked_image, chunked_layer, sha256,
};
use testing::fake::{Request, Server, content, forward, reply, wait_for};

use super::lazy::names;
use super::{last_event, start};
use crate::services::{fuse_devices, served};
use crate::{Place, write};

/// Length of a chunk in bytes.
const CHUNK: usize = 300_000;

/// The files that programs read, in this order, with their lengths in the two versions in bytes.
const READ: [(&str, [usize; 2]); 2] =
    [("usr/program", [500_000, 600_000]), ("library", [700_000; 2])];

/// Makes the trees of the layers of a version: one layer of the first version, and two of the second.
fn trees(folder: &Path, version: usize) -> Vec<PathBuf> {
    let noise = testing::noise(4_000_000);
    let [lower, upper] = ["lower", "upper"].map(|it| folder.join(format!("{it}-{version}")));
    let program = if version == 0 { &lower } else { &upper };
    fs::create_dir_all(lower.join("usr")).unwrap();
    fs::create_dir_all(program.join("usr")).unwrap();
    let [program_bytes, library_bytes] = READ.map(|it| it.1[version]);
    write(&program.join("usr/program"), &noise[version..program_bytes + version], 0o755);
    write(&lower.join("library"), &noise[9 + version..library_bytes + 9 + version], 0o644);
    write(&lower.join("unread"), &noise[..2_000_000], 0o644);
    if version == 0 {
        return vec![lower];
    }
    // This file moves the others to other places.
    write(&lower.join("a-new-file"), &noise[1_000_000..2_300_000], 0o644);
    vec![lower, upper]
}

fn tar(folders: &[PathBuf]) -> Vec<u8> {
    let mut command = Command::new("tar");
    command.args(["--format=pax", "--sort=name", "--owner=0", "--group=0", "-cf", "-"]);
    for folder in folders {
        command.arg("-C").arg(folder).arg(".");
    }
    let output = command.output().unwrap();
    assert!(output.status.success());
    output.stdout
}

/// A registry with two versions of an image, and the second one in another repository as well.
struct Versions {
    server: Server,
    /// Whether the tag has the second version.
    is_new: Arc<AtomicBool>,
    /// Whether the registry sends nothing any more.
    is_gone: Arc<AtomicBool>,
    /// Manifests of the versions.
    manifests: [String; 2],
    folder: tempfile::TempDir,
}

/// A registry with images whose layers have tables of contents.
fn with_tables(format: ChunkedFormat) -> Versions {
    let folder = tempfile::tempdir().unwrap();
    let layers = [0, 1].map(|version| {
        let trees = trees(folder.path(), version);
        let layer = |it: &[PathBuf]| chunked_layer(&tar(it), format, CHUNK, |_| ());
        trees.chunks(1).map(layer).collect::<Vec<ChunkedLayer>>()
    });
    let image = |version: usize, command: &str| {
        let layers: Vec<_> = layers[version].iter().collect();
        chunked_image(&layers, &[command])
    };
    // In the other repository, the image has another manifest.
    let images = [image(0, "/usr/program"), image(1, "/usr/program"), image(1, "/library")];
    let manifests = [0, 1].map(|it: usize| sha256(&images[it].manifest));
    let blobs: Vec<Vec<u8>> = layers.iter().flatten().map(|it| it.blob.clone()).collect();
    let [is_new, is_gone] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (new, gone) = (Arc::clone(&is_new), Arc::clone(&is_gone));
    let server = Server::start(move |request, _| {
        let name = request.path.rsplit('/').next().unwrap();
        if gone.load(Ordering::Relaxed) {
            return reply(503);
        }
        if request.path.contains("/manifests/") {
            let tagged = match request.path.contains("/other/") {
                true => 2,
                false => usize::from(new.load(Ordering::Relaxed)),
            };
            let is_it = |(number, it): &(usize, &ChunkedImage)| {
                name == sha256(&it.manifest) || name == "1" && *number == tagged
            };
            let media_type = "application/vnd.oci.image.manifest.v1+json";
            return match images.iter().enumerate().find(is_it) {
                Some((_, it)) => reply(200).header("content-type", media_type).body(&it.manifest),
                None => reply(404),
            };
        }
        let configs = images.iter().map(|it| &it.config);
        match configs.chain(&blobs).find(|it| sha256(it) == name) {
            Some(bytes) => content(request, bytes),
            None => reply(404),
        }
    });
    Versions { server, is_new, is_gone, manifests, folder }
}

impl Versions {
    fn target(&self) -> String {
        format!("{}/team/app:1", self.server.host())
    }

    /// Returns the bytes of a file of a version.
    fn right(&self, version: usize, name: &str) -> Vec<u8> {
        let trees = ["lower", "upper"].map(|it| self.folder.path().join(format!("{it}-{version}")));
        trees.iter().find_map(|it| fs::read(it.join(name)).ok()).unwrap()
    }
}

fn devices(place: &Place) -> Vec<Value> {
    serde_json::from_str(&place.out("ps --lazy --json")).unwrap()
}

fn sum(place: &Place, field: &str) -> u64 {
    devices(place).iter().map(|it| it[field].as_u64().unwrap()).sum()
}

/// Returns the manifests of images whose start is recorded.
fn starts(place: &Place) -> Vec<String> {
    let names = names(place, "blobs").into_iter();
    let names = names.filter_map(|it| Some(it.strip_suffix(".start")?.replacen('-', ":", 1)));
    names.collect()
}

/// Starts the first version, updates the image, and checks that the second version has the files before any program
/// reads them.
fn check_update(versions: &Versions) {
    let (to, target) = (Place::new(), versions.target());
    // Only reads and starts fetch data.
    fs::write(to.path("serve.toml"), "complete-after = \"never\"").unwrap();
    let mut service = served::serve_with(&to, &["--config", "serve.toml"], |it| it);
    fs::create_dir(to.path("root")).unwrap();
    let read = |name: &str| fs::read(to.path("root").join(name));
    to.out(&format!("pull --quiet --lazy=require {target}"));
    to.out(&format!("mount --lazy {target} root"));
    for (name, _) in READ {
        assert!(read(name).unwrap() == versions.right(0, name), "{name}");
    }
    assert_eq!(devices(&to)[0]["startOf"], Value::Null);
    to.out("umount root");
    wait_for("the record of the start", || starts(&to) == [versions.manifests[0].clone()]);

    // An image of another repository does not get this start.
    let other = format!("{}/other/app:1", versions.server.host());
    to.out(&format!("pull --quiet --lazy=require {other}"));
    assert_eq!(starts(&to).len(), 1);
    to.out(&format!("rmi {other}"));

    // The update gets it, although the first version is garbage then.
    versions.is_new.store(true, Ordering::Relaxed);
    to.out(&format!("pull --quiet --lazy=require {target}"));
    wait_for("the first version's end", || {
        to.out("gc");
        starts(&to) == [versions.manifests[1].clone()]
    });
    // It can be turned off.
    to.out(&format!("mount --lazy --prefetch none {target} root"));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!((sum(&to, "prefetched"), &devices(&to)[0]["startOf"]), (0, &Value::Null));
    to.out("umount root");
    to.out(&format!("mount --lazy {target} root"));
    let lengths: usize = READ.iter().map(|it| it.1[0]).sum();
    let mut before = 0;
    wait_for("the files that the first version read", || {
        std::thread::sleep(Duration::from_millis(300));
        let now = sum(&to, "prefetched");
        let is_over = now >= lengths as u64 && now == before;
        before = now;
        is_over
    });
    assert_eq!((sum(&to, "reads"), sum(&to, "needed")), (0, 0));
    // The other files were not fetched.
    assert!(sum(&to, "filled") < 2 * lengths as u64, "{:?}", devices(&to));
    for device in devices(&to) {
        assert_eq!(device["startOf"], versions.manifests[0].as_str());
    }
    // The files can be read without the registry, up to the length that the first version read.
    versions.is_gone.store(true, Ordering::Relaxed);
    for (name, [length, _]) in READ {
        let length = length / 4096 * 4096;
        let path = to.path("root").join(name);
        let file = fs::File::open(path).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        let mut bytes = vec![0; length];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
        assert!(bytes == versions.right(1, name)[..length], "{name}");
    }
    assert_eq!(sum(&to, "needed"), 0);
    versions.is_gone.store(false, Ordering::Relaxed);
    to.out("umount root");
    served::end(&to, &mut service);
    assert!(to.out("fsck").starts_with("sound"));
    // The records go with the image.
    to.out(&format!("rmi {target}"));
    wait_for("the image's end", || {
        to.out("gc");
        starts(&to).is_empty()
    });
}

#[test]
fn an_image_without_an_index_is_prefetched_as_its_previous_version_was_read() {
    if !fuse_devices::can_serve() || !testing::programs(&["tar"]) {
        return;
    }
    for format in [ChunkedFormat::Estargz, ChunkedFormat::ZstdChunked] {
        check_update(&with_tables(format));
    }
}

/// The layers have indexes that were made without a start.
#[test]
fn layers_of_gzip_are_prefetched_as_their_previous_version_was_read() {
    if !fuse_devices::can_serve() || !testing::programs(&["tar"]) {
        return;
    }
    let from = Place::new();
    let Some(daemon) = start(&from) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut manifests = Vec::new();
    for (version, tag) in [(0, "old"), (1, "new")] {
        fs::write(from.path("layer.tar"), tar(&trees(folder.path(), version))).unwrap();
        from.out("import --quiet tar:layer.tar app");
        for repository in ["team/app", "other/app"] {
            let target = format!("{}/{repository}:{tag}", daemon.host);
            let pushed = last_event(&from.out(&format!("push --json app {target}")));
            from.out(&format!("pull --quiet --form tar --keep-layers {target}"));
            from.out(&format!("index --json --no-start --push {target} {target}"));
            manifests.push(pushed["manifest"].as_str().unwrap().to_owned());
        }
    }
    let [is_new, is_gone] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (new, gone, upstream) = (Arc::clone(&is_new), Arc::clone(&is_gone), daemon.host.clone());
    let server = Server::start(move |request, _| {
        if gone.load(Ordering::Relaxed) {
            return reply(503);
        }
        let is_new = new.load(Ordering::Relaxed) || request.path.contains("/other/");
        let tag = if is_new { "new" } else { "old" };
        let path = request.path.replace("/manifests/1", &format!("/manifests/{tag}"));
        forward(&upstream, &Request { path, ..request.clone() }, 0).unwrap()
    });
    let manifests = [manifests[0].clone(), manifests[2].clone()];
    check_update(&Versions { server, is_new, is_gone, manifests, folder });
}

/// Other hosts must not learn which files programs read on this one.
#[test]
fn a_recorded_start_is_in_no_index_and_no_push() {
    let from = super::place(50);
    let Some(daemon) = start(&from) else { return };
    let target = format!("{}/team/app:1", daemon.host);
    let pushed = last_event(&from.out(&format!("push --json a:1 {target}")));
    let manifest = pushed["manifest"].as_str().unwrap().parse().unwrap();
    from.out(&format!("pull --quiet --form tar --keep-layers --keep-index {target}"));
    let kept = || names(&from, "blobs").into_iter().filter(|it| !it.ends_with(".start"));
    let index = || {
        let made = from.out(&format!("index --json --no-start --push {target} {target}"));
        let made: Value = serde_json::from_str(&made).unwrap();
        (made["pushed"]["artifact"].clone(), made["pushed"]["index"].clone())
    };
    let (before, files) = (index(), kept().collect::<Vec<_>>());
    let store = from.path("store");
    let open = || Store::open(&store, store::Who::this_process(), OpenOptions::write()).unwrap();
    let mut start = StartRecord::new(manifest, true);
    let file = start.add_file(b"/a-secret-program").unwrap();
    assert!(start.add_part(file, 0..4096));
    open().downloads.set_start(&manifest, &start).unwrap();
    assert_eq!(index(), before);
    from.out(&format!("pull --quiet --form tar --keep-layers --keep-index {target}"));
    assert_eq!(kept().collect::<Vec<_>>(), files);
    let again = last_event(&from.out(&format!("push --json a:1 {}/team/copy:1", daemon.host)));
    assert_eq!(again["manifest"], pushed["manifest"]);
    assert_eq!(open().downloads.start(&manifest).unwrap(), Some(start));
}
