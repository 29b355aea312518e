//! Lazy images without an index, whose layers have tables of contents.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use testing::chunked::{
    ChunkedFormat, ChunkedImage, ChunkedLayer, chunked_image, chunked_layer, sha256,
};
use testing::fake::{Server, content, reply};

use super::{last_event, lazy::names};
use crate::{Place, write};

/// Length of a chunk in bytes.
const CHUNK: usize = 300_000;

/// A registry with the image `app:1`.
struct Stage {
    server: Server,
    /// Whether the registry sends nothing any more.
    is_gone: Arc<AtomicBool>,
    /// Whether each part of a blob is wrong.
    is_lying: Arc<AtomicBool>,
    /// Whether the registry lists an index that it does not have.
    has_index: Arc<AtomicBool>,
    /// A folder with the files of the image.
    tree: std::path::PathBuf,
    layers: Vec<ChunkedLayer>,
    _folder: tempfile::TempDir,
}

fn tar(folder: &Path) -> Vec<u8> {
    let mut command = Command::new("tar");
    command.args(["--format=pax", "--sort=name", "--owner=0", "--group=0", "-cf", "-", "-C"]);
    let output = command.arg(folder).arg(".").output().unwrap();
    assert!(output.status.success());
    output.stdout
}

impl Stage {
    fn new(format: ChunkedFormat) -> Option<Self> {
        if !testing::programs(&["tar"]) {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let [tree, other] = ["tree", "other"].map(|it| folder.path().join(it));
        std::fs::create_dir_all(tree.join("usr/bin")).unwrap();
        crate::add_programs(&tree, &["/bin/cat"]);
        let noise = testing::noise(3_000_000);
        write(&tree.join("noise"), &noise, 0o644);
        write(&tree.join("replaced"), b"below", 0o644);
        write(&tree.join("removed"), b"below", 0o644);
        write(&tree.join("empty"), b"", 0o600);
        std::fs::hard_link(tree.join("noise"), tree.join("usr/hard")).unwrap();
        std::os::unix::fs::symlink("noise", tree.join("link")).unwrap();
        for number in 0..200_usize {
            write(&tree.join(format!("file-{number}")), &noise[..number * 50], 0o644);
        }
        let lower = tar(&tree);
        std::fs::create_dir(&other).unwrap();
        write(&other.join(".wh.removed"), b"", 0o644);
        write(&other.join("replaced"), b"above", 0o644);
        let layers = [lower, tar(&other)].map(|it| chunked_layer(&it, format, CHUNK, |_| ()));
        // The files of both layers together.
        write(&tree.join("replaced"), b"above", 0o644);
        std::fs::remove_file(tree.join("removed")).unwrap();
        Some(Self::serve(folder, tree, layers.to_vec()))
    }

    fn serve(
        folder: tempfile::TempDir,
        tree: std::path::PathBuf,
        layers: Vec<ChunkedLayer>,
    ) -> Self {
        let [is_gone, is_lying, has_index] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
        let all: Vec<_> = layers.iter().collect();
        let ChunkedImage { manifest, config } = chunked_image(&all, &["/bin/cat", "/replaced"]);
        let blobs: Vec<_> = layers.iter().map(|it| (sha256(&it.blob), it.blob.clone())).collect();
        let (gone, lying) = (Arc::clone(&is_gone), Arc::clone(&is_lying));
        let lists_index = Arc::clone(&has_index);
        let server = Server::start(move |request, _| {
            let name = request.path.rsplit('/').next().unwrap();
            if gone.load(Ordering::Relaxed) {
                return reply(503);
            }
            if request.path.contains("/referrers/") && lists_index.load(Ordering::Relaxed) {
                let media_type = "application/vnd.oci.image.index.v1+json";
                let listed = serde_json::json!({
                    "schemaVersion": 2,
                    "mediaType": media_type,
                    "manifests": [{
                        "mediaType": "application/vnd.oci.image.manifest.v1+json",
                        "artifactType": "application/vnd.quire.lazy.v1",
                        "digest": sha256(b"index"),
                        "size": 5,
                    }],
                });
                let listed = listed.to_string();
                return reply(200).header("content-type", media_type).body(listed.as_bytes());
            }
            if request.path.contains("/manifests/") {
                let is_it = name == "1" || name == sha256(&manifest);
                let media_type = "application/vnd.oci.image.manifest.v1+json";
                return match is_it {
                    true => reply(200).header("content-type", media_type).body(&manifest),
                    false => reply(404),
                };
            }
            if name == sha256(&config) {
                return content(request, &config);
            }
            match blobs.iter().find(|it| it.0 == name) {
                Some((_, blob)) if lying.load(Ordering::Relaxed) => {
                    let wrong: Vec<_> = blob.iter().map(|it| it ^ 0x55).collect();
                    content(request, &wrong)
                }
                Some((_, blob)) => content(request, blob),
                None => reply(404),
            }
        });
        Self { server, is_gone, is_lying, has_index, tree, layers, _folder: folder }
    }

    fn target(&self) -> String {
        format!("{}/app:1", self.server.host())
    }
}

/// Every verb that meets such an image does its work, or refuses it with a message.
fn check_verbs(to: &Place, target: &str) {
    let images: Value = serde_json::from_str(&to.out("images --json")).unwrap();
    assert_eq!(images.as_array().or_else(|| images["images"].as_array()).unwrap().len(), 1);
    assert!(to.out("ls -l app:/noise").contains("3000000"));
    assert!(to.out("tree app").contains("file-7"));
    assert!(to.out("show app").contains("tar"));
    to.out("du");
    to.out("gc");
    assert!(to.out("fsck").starts_with("sound"));
    assert!(to.out("fsck --deep").starts_with("sound"));
    assert!(to.out("fsck --repair").starts_with("sound"));
    let verified = to.run("verify app");
    assert_eq!(verified.code, Some(1), "{verified:?}");
    for (text, expect) in [
        (&verified.err, "is made from its layers' tables of contents"),
        (&verified.out, "`quire pull NAME` downloads the layers"),
    ] {
        assert!(text.contains(expect), "{verified:?}");
    }
    assert!(!verified.out.contains("--complete"), "{verified:?}");
    assert_eq!(to.out("ps --lazy --json").trim(), "[]");
    for refused in [
        "cat app:/noise",
        "export app oci:exported",
        &format!("push app {target}"),
        "diff app app:/usr",
        "index app",
        &format!("index --no-start --push {target} app"),
        "merge app app two",
        "convert app --form packed",
    ] {
        let ran = to.run(refused);
        let is_refused = ran.code == Some(2) || ran.code == Some(1);
        assert!(
            is_refused && !ran.err.contains("panicked") && !ran.err.is_empty(),
            "{refused}: {ran:?}"
        );
    }
    assert!(names(to, "lazy").iter().any(|it| it.ends_with(".index")));
}

#[test]
fn an_image_without_an_index_is_pulled_by_its_layers_tables() {
    for format in [ChunkedFormat::Estargz, ChunkedFormat::ZstdChunked] {
        let Some(stage) = Stage::new(format) else { return };
        let target = stage.target();
        let to = Place::new();
        let pulled = last_event(&to.out(&format!("pull --json --lazy=require {target} app")));
        assert_eq!((&pulled["source"], &pulled["index"]), (&"tables".into(), &Value::Null));
        assert_eq!((&pulled["layers"], &pulled["lazyDevices"]), (&2.into(), &2.into()));
        assert!(to.out(&format!("pull --lazy {target} app")).contains("up to date"));
        // Only parts of the layers were requested: the table of each.
        for layer in &stage.layers {
            let name = sha256(&layer.blob);
            let seen = stage.server.seen();
            let asked = seen.iter().filter(|it| it.path.ends_with(&name)).count();
            assert!((1..=2).contains(&asked), "{asked} requests");
        }
        check_verbs(&to, &target);
        let other = Place::new();
        // The user learns that there is an index that cannot be used.
        stage.has_index.store(true, Ordering::Relaxed);
        let pulled = other.run(&format!("pull --lazy {target} app"));
        stage.has_index.store(false, Ordering::Relaxed);
        let remark = "using the layers' own tables of contents instead";
        assert!(pulled.code == Some(0) && pulled.err.contains(remark), "{pulled:?}");
        assert!(pulled.err.contains(&sha256(b"index")), "{pulled:?}");
        assert!(pulled.out.contains("from the layers' own tables of contents"), "{pulled:?}");
        // A damaged description is found, and made again by a pull.
        let sound = names(&other, "lazy");
        let index = sound.iter().find(|it| it.ends_with(".index")).unwrap();
        let path = other.path("store/lazy").join(index);
        let good = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert_eq!(other.run("fsck").code, Some(1));
        other.run("fsck --repair");
        other.out(&format!("pull --quiet --lazy {target} app"));
        assert!(std::fs::read(&path).unwrap() == good);
        assert!(other.out("fsck").starts_with("sound"));
        // The layers replace it.
        other.out(&format!("pull --quiet --form tar {target} app"));
        other.out("export --quiet app oci:exported");
        other.out("gc");
        assert!(names(&other, "lazy").is_empty(), "{:?}", names(&other, "lazy"));
        assert!(other.out("fsck --deep").starts_with("sound"));
    }
}

#[test]
fn all_layers_are_pulled_if_one_has_no_table() {
    let Some(stage) = Stage::new(ChunkedFormat::Estargz) else { return };
    let Stage { tree, mut layers, _folder: folder, .. } = stage;
    layers[1].annotations = serde_json::json!({});
    let stage = Stage::serve(folder, tree, layers);
    let to = Place::new();
    let refused = to.run(&format!("pull --lazy=require {} app", stage.target()));
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("has no index for lazy loading"), "{}", refused.err);
    let pulled = to.run(&format!("pull --lazy {} app", stage.target()));
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    assert!(pulled.err.contains("pulling the layers instead"), "{}", pulled.err);
    assert_eq!(to.out("cat app:/replaced"), "above");
}

/// Returns bytes and filled bytes of all lazy devices.
#[cfg(feature = "serve")]
fn filled(place: &Place) -> (u64, u64) {
    let listed: Value = serde_json::from_str(&place.out("ps --lazy --json")).unwrap();
    let sum =
        |name: &str| listed.as_array().unwrap().iter().map(|it| it[name].as_u64().unwrap()).sum();
    (sum("bytes"), sum("filled"))
}

#[cfg(feature = "serve")]
#[test]
fn files_of_an_image_without_an_index_are_fetched_when_they_are_read() {
    if !crate::services::fuse_devices::can_serve() {
        return;
    }
    for format in [ChunkedFormat::Estargz, ChunkedFormat::ZstdChunked] {
        let Some(stage) = Stage::new(format) else { return };
        let to = Place::new();
        let mut service = crate::services::served::serve(&to);
        to.out(&format!("pull --quiet --lazy=require {} app", stage.target()));
        std::fs::create_dir(to.path("root")).unwrap();
        // The kernel cannot verify a device that is not complete.
        let refused = to.run("mount --lazy --verity require app root");
        assert_eq!(refused.code, Some(2), "{}", refused.err);
        to.out("mount --lazy app root");
        let read = |name: &str| std::fs::read(to.path("root").join(name));
        let right = |name: &str| std::fs::read(stage.tree.join(name)).unwrap();
        assert!(read("file-7").unwrap() == right("file-7"));
        let (bytes, some) = filled(&to);
        assert!(some > 0 && some < bytes / 2, "{some} of {bytes}");
        assert_eq!(read("replaced").unwrap(), b"above");
        assert!(read("removed").is_err() && read("empty").unwrap().is_empty());
        // Wrong bytes are an error, and heal.
        stage.is_lying.store(true, Ordering::Relaxed);
        assert!(read("noise").is_err());
        let failure = to.out("ps --lazy --json");
        assert!(failure.contains("table of contents") || failure.contains("inflate"), "{failure}");
        stage.is_lying.store(false, Ordering::Relaxed);
        testing::fake::wait_for("the right bytes", || {
            read("noise").is_ok_and(|it| it == right("noise"))
        });
        assert!(read("usr/hard").unwrap() == right("noise"));
        to.out("umount root");
        crate::services::served::end(&to, &mut service);

        // Another service uses the bytes that it finds, and fetches the rest.
        let mut service = crate::services::served::serve(&to);
        to.out("mount --lazy --complete app root");
        testing::fake::wait_for("all chunks", || {
            let (bytes, filled) = filled(&to);
            bytes > 0 && bytes == filled
        });
        stage.is_gone.store(true, Ordering::Relaxed);
        for name in (0..200).map(|it| format!("file-{it}")).chain(["noise".to_owned()]) {
            assert!(read(&name).unwrap() == right(&name), "{name}");
        }
        // It does not count as complete.
        assert_eq!(to.run("export app oci:exported").code, Some(2));
        stage.is_gone.store(false, Ordering::Relaxed);
        // A pull of the layers makes it complete, while the old one is still mounted.
        to.out(&format!("pull --quiet --form tar {} app", stage.target()));
        assert!(read("file-9").unwrap() == right("file-9"));
        to.out("cat app:/noise > /dev/null".split(" >").next().unwrap());
        to.out("umount root");
        crate::services::served::end(&to, &mut service);
        to.out("gc");
        assert!(names(&to, "lazy").is_empty(), "{:?}", names(&to, "lazy"));
        to.out("mount app root");
        assert!(read("noise").unwrap() == right("noise"));
        to.out("umount root");
    }
}

/// A table need not describe its layer truthfully, so other hosts get no bytes of a device that was filled by it.
#[cfg(feature = "serve")]
#[test]
fn peers_get_no_parts_of_layers_that_are_known_by_their_tables() {
    use crate::services::peers::{Peer, hostile::ask};
    if !crate::services::fuse_devices::can_serve() {
        return;
    }
    for format in [ChunkedFormat::Estargz, ChunkedFormat::ZstdChunked] {
        let Some(stage) = Stage::new(format) else { return };
        let (to, target) = (Place::new(), stage.target());
        let mut service = crate::services::served::serve(&to);
        to.out(&format!("pull --quiet --lazy=require {target}"));
        std::fs::create_dir(to.path("root")).unwrap();
        to.out(&format!("mount --lazy --complete {target} root"));
        testing::fake::wait_for("all chunks", || {
            let (bytes, filled) = filled(&to);
            bytes > 0 && bytes == filled
        });
        let check = |status: u16, method: &str| {
            let peer = Peer::start(&to);
            let ns = stage.server.host().replace(':', "%3A");
            for layer in &stage.layers {
                let name = sha256(&layer.tar);
                let path = format!("/v2/app/blobs/{name}?ns={ns}");
                let found = ask(&peer.host, method, &path, "range: bytes=0-9\r\n");
                assert_eq!(found.status, status, "{method} {path}");
                if status == 206 {
                    assert_eq!(found.body, layer.tar[..10]);
                }
            }
        };
        check(404, "GET");
        check(404, "HEAD");
        to.out("umount root");
        crate::services::served::end(&to, &mut service);
        // After a pull of the layers, the same requests get their bytes.
        to.out(&format!("pull --quiet --form tar {target}"));
        check(206, "GET");
    }
}
