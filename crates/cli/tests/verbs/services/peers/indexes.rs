//! Indexes for lazy loading that a peer has made and kept.

use std::fs;

use image::digest::Digest;
use serde_json::Value;
use store::{OpenOptions, Store, Who};
use transfer::lazy::{StoredIndex, stored_index};

use super::hostile::{Answer, ask, documents};
use super::{Origin, Peer};
use crate::Place;
use crate::registry_verbs::registries;
use crate::services::fuse_devices::can_serve;
use crate::services::served::{end, serve_with};

const RESOLVE: &str = "capabilities = [\"pull\", \"resolve\"]";

/// Returns a store without images that may ask these mirrors for tags and indexes.
fn place_with(origin: &Origin, mirrors: &[&str]) -> Place {
    let place = origin.place_with_mirrors(mirrors);
    let file = place.path("certs").join(origin.server.host()).join("hosts.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("capabilities = [\"pull\"]", RESOLVE)).unwrap();
    place
}

fn kept(place: &Place, name: &str) -> Option<StoredIndex> {
    let manifest = documents(place, name).digest;
    let store =
        Store::open(&place.path("store"), Who::this_process(), OpenOptions::read()).unwrap();
    stored_index(&store, &manifest).unwrap()
}

/// A node pulls an unmodified image, and the next one starts it lazily: from the node's index, and with data of the
/// registry alone once the node is gone.
#[test]
fn the_next_node_takes_the_index_from_a_peer() {
    if !can_serve() {
        return;
    }
    let Some(origin) = Origin::new() else { return };
    let first = Place::new();
    origin.pull(&first, "--keep-index ");
    let peer = Peer::start(&first);
    let next = place_with(&origin, &[&peer.host]);
    let pulled =
        next.out(&format!("pull --json --certs-dir certs --lazy=require {}", origin.image));
    let pulled: Value = serde_json::from_str(pulled.lines().last().unwrap()).unwrap();
    let index = kept(&first, &origin.image).unwrap();
    assert_eq!(pulled["index"], index.digest.to_string());
    assert_eq!(pulled["lazyDevices"], 1);
    drop(peer);
    let certs = next.path("certs");
    let mut service = serve_with(&next, &["--certs-dir", certs.to_str().unwrap()], |it| it);
    fs::create_dir(next.path("root")).unwrap();
    next.out(&format!("mount --lazy {} root", origin.image));
    let noise = fs::read(next.path("root/noise")).unwrap();
    assert!(noise == fs::read(origin.from.path("tree/noise")).unwrap());
    for at in 0..300 {
        let text = fs::read_to_string(next.path(&format!("root/file-{at}"))).unwrap();
        assert_eq!(text, format!("{at} ").repeat(99));
    }
    next.out("umount root");
    end(&next, &mut service);
}

/// The variable counts for each verb that pulls. A pull that cannot end in such an image says so.
#[test]
fn each_verb_that_pulls_keeps_indexes() {
    let Some(origin) = Origin::new() else { return };
    let image = &origin.image;
    for (words, is_kept) in [
        (&["pull", "--quiet", image][..], true),
        (&["mount", "--pull", "missing", image, "root"], true),
        (&["run", image, "true"], true),
        (&["pull", "--form", "objects", image], false),
    ] {
        let place = Place::new();
        fs::create_dir(place.path("root")).unwrap();
        let mut command = place.command(words);
        // The work after the pull may be impossible on this machine, or end with an error of the program.
        let output = command.env("QUIRE_KEEP_INDEX", "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(kept(&place, image).is_some(), is_kept, "{words:?}: {text}");
        assert_eq!(text.contains("keeping no index"), !is_kept, "{words:?}: {text}");
        let _unmounted = place.command(&["umount", "root"]).output().unwrap();
    }
}

/// The paths of an index at a peer.
struct Paths {
    tag: String,
    list: String,
    manifest: String,
    blobs: Vec<String>,
}

impl Paths {
    fn of(origin: &Origin, place: &Place) -> Self {
        let image = documents(place, &origin.image);
        let index = kept(place, &origin.image).unwrap();
        let ns = origin.server.host().replace(':', "%3A");
        let path = |rest: &str| format!("/v2/team/app/{rest}?ns={ns}");
        let of_type = "artifactType=application%2Fvnd.quire.lazy.v1";
        let (os, architecture) = (&image.config.os, &image.config.architecture);
        let blobs = index.blobs.iter().chain([&index.config]);
        Self {
            tag: path(&format!("manifests/1.{os}-{architecture}.quire")),
            list: path(&format!("referrers/{}", image.digest)) + "&" + of_type,
            manifest: path(&format!("manifests/{}", index.digest)),
            blobs: blobs.map(|it| path(&format!("blobs/{}", it.digest))).collect(),
        }
    }

    fn all(&self) -> impl Iterator<Item = &String> {
        [&self.tag, &self.list, &self.manifest].into_iter().chain(&self.blobs)
    }

    /// Returns the status of each.
    #[track_caller]
    fn check(&self, peer: &Peer, expect: u16) {
        for path in self.all() {
            assert_eq!(ask(&peer.host, "GET", path, "").status, expect, "{path}");
        }
    }
}

#[test]
fn an_index_is_served_as_a_registry_would() {
    let Some(origin) = Origin::new() else { return };
    let place = Place::new();
    origin.pull(&place, "--keep-index ");
    let index = kept(&place, &origin.image).unwrap();
    let peer = Peer::start(&place);
    let paths = Paths::of(&origin, &place);
    paths.check(&peer, 200);
    let get = |path: &str, headers: &str| ask(&peer.host, "GET", path, headers);
    let by_tag: Answer = get(&paths.tag, "");
    assert!(by_tag.body == index.manifest);
    assert_eq!(by_tag.header("docker-content-digest"), Some(&*index.digest.to_string()));
    let listed = get(&paths.list, "");
    assert_eq!(listed.header("oci-filters-applied"), Some("artifactType"));
    let listed: Value = serde_json::from_slice(&listed.body).unwrap();
    let listed = &listed["manifests"][0];
    assert_eq!(listed["digest"], index.digest.to_string());
    assert_eq!(listed["size"], index.manifest.len());
    assert_eq!(listed["artifactType"], "application/vnd.quire.lazy.v1");
    // Other referrers are only at the registry.
    let (all, _) = paths.list.split_once("&artifactType").unwrap();
    assert_eq!(get(all, "").status, 404);
    for (path, blob) in paths.blobs.iter().zip(index.blobs.iter().chain([&index.config])) {
        let whole = get(path, "").body;
        assert!(blob.digest == Digest::sha256(&whole));
        let head = ask(&peer.host, "HEAD", path, "");
        assert_eq!(head.header("content-length"), Some(&*blob.size.to_string()));
        if blob != &index.config {
            let part = get(path, "range: bytes=1-\r\n");
            assert!(part.status == 206 && part.body == whole[1..]);
        }
    }
    // After a second pull, the index is the same.
    origin.pull(&place, "--keep-index ");
    assert_eq!(kept(&place, &origin.image), Some(index));
    // It goes with its image.
    place.out(&format!("rmi {}", origin.image));
    place.out("gc");
    let names =
        ["manifests", "blobs"].map(|it| fs::read_dir(place.path("store").join(it)).unwrap());
    let left: Vec<_> = names.into_iter().flatten().map(|it| it.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    drop(peer);
    paths.check(&Peer::start(&place), 404);
}

/// An index has names and data of all layers.
#[test]
fn the_index_of_a_private_image_is_not_served() {
    let Some(origin) = Origin::new() else { return };
    let place = Place::new();
    origin.pull(&place, "--keep-index ");
    let paths = Paths::of(&origin, &place);
    let start = |pattern: &str| {
        Peer::start_with(&place, &["--listen", "127.0.0.1:0", "--repository", pattern])
    };
    let (own, other) = (format!("{}/team/*", origin.server.host()), "docker.io/library/*");
    paths.check(&start(&own), 200);
    paths.check(&start(other), 404);
    // Another name is private, so its data is.
    place.out(&format!("tag {} corp.example/secret/app:1", origin.image));
    paths.check(&start(&own), 404);
    place.out("rmi corp.example/secret/app:1");
    paths.check(&start(&own), 200);
    // A policy that refuses the image.
    fs::write(place.path("none.toml"), "default = \"none\"\n").unwrap();
    let mut command = place.command(&["serve", "--registry", "--listen", "127.0.0.1:0"]);
    command.args(["--repository", &own, "--policy", "none.toml"]);
    paths.check(&Peer::of(command), 404);
}

/// Damage costs the next node its lazy start, and nothing else.
#[test]
fn a_damaged_index_is_found_and_made_again() {
    let Some(origin) = Origin::new() else { return };
    let place = Place::new();
    origin.pull(&place, "--keep-index ");
    let index = kept(&place, &origin.image).unwrap();
    registries::heals::flip_largest(&place.path("store/blobs"));
    let peer = Peer::start(&place);
    let next = place_with(&origin, &[&peer.host]);
    let pull = |how: &str| {
        let words = ["pull", "--quiet", "--certs-dir", "certs", how, &origin.image];
        next.command(&words).output().unwrap()
    };
    assert!(!pull("--lazy=require").status.success());
    assert!(pull("--lazy").status.success());
    drop(peer);
    let checked = place.command(&["fsck"]).output().unwrap();
    assert_eq!(checked.status.code(), Some(1));
    place.command(&["fsck", "--repair"]).output().unwrap();
    assert_eq!(kept(&place, &origin.image), None);
    origin.pull(&place, "--keep-index ");
    assert_eq!(kept(&place, &origin.image), Some(index));
    place.out("fsck");
}
