//! Notes of a push that the next push uses.

use std::os::unix::fs::chown;
use std::process::Command;

use serde_json::Value;

use super::{Daemon, image, last_event, start};
use crate::mounting::mounts::Unmount;
use crate::{Place, is_root};

/// Pushes `b:1`, and returns the last event.
fn push(place: &Place, daemon: &Daemon, name: &str) -> Value {
    last_event(&place.out(&format!("push --json b:1 {}/{name}:1", daemon.host)))
}

/// Returns for each layer the origin of its bytes, the number of sent bytes, and whether the registry mounted it.
fn layers(pushed: &Value) -> Vec<(&str, u64, bool)> {
    let mut all = Vec::new();
    for layer in pushed["layers"].as_array().unwrap() {
        let (bytes, sent) = (layer["bytes"].as_str().unwrap(), layer["sent"].as_u64().unwrap());
        all.push((bytes, sent, layer["mounted"] == true));
    }
    all
}

/// Returns the repositories that the records of all layers name.
fn noted(place: &Place) -> Vec<String> {
    let store = store::Store::open(
        &place.path("store"),
        store::Who::this_process(),
        store::OpenOptions::read(),
    )
    .unwrap();
    let layers = store.layers.diff_ids().unwrap();
    let blobs =
        layers.iter().flat_map(|it| store.layers.open(it).unwrap().unwrap().info().blobs.clone());
    blobs.flat_map(|it| it.repositories).collect()
}

/// A place with the image `b:1`, which has one layer that was imported as a plain tar.
fn plain() -> Place {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let mut command = Command::new("tar");
    command.arg("-cf").arg(place.path("a.tar")).arg("-C").arg(&tree);
    assert!(command.arg(".").status().unwrap().success());
    place.out("import --quiet tar:a.tar b:1");
    place
}

#[test]
fn what_was_compressed_and_sent_is_taken_from_there() {
    let place = plain();
    let (Some(daemon), Some(other)) = (start(&place), start(&place)) else { return };
    let first = push(&place, &daemon, "team/one");
    let [("compressed", sent, false)] = layers(&first)[..] else { panic!("{first}") };
    assert!(sent > 0);
    let mounted = [("reused", 0, true)];
    let second = push(&place, &daemon, "team/two");
    assert_eq!((&layers(&second)[..], &second["manifest"]), (&mounted[..], &first["manifest"]));
    // A third registry has no blobs, and gets the same blobs.
    let third = push(&place, &other, "team/one");
    assert_eq!(layers(&third), layers(&first));
    assert_eq!(third["manifest"], first["manifest"]);
    assert_eq!(layers(&push(&place, &other, "two")), mounted);
    assert_eq!(noted(&place), [&other, &daemon].map(|it| format!("{}/team/one", it.host)));
    place.out("fsck");
    place.out("gc");
    assert_eq!(layers(&push(&place, &daemon, "three")), mounted);
    place.out("fsck");
    let to = Place::new();
    to.out(&format!("pull --quiet {}/three:1 c:1", daemon.host));
    assert_eq!(image(&to, "c:1"), image(&place, "b:1"));
    // The uncompressed tar is another blob of the layer, which is recorded in the same way.
    let as_it_was = |name: &str| {
        let name = format!("{}/{name}:1", daemon.host);
        last_event(&place.out(&format!("push --json --compression as-it-was b:1 {name}")))
    };
    let [("made again", _, false)] = layers(&as_it_was("plain/one"))[..] else { panic!() };
    assert_eq!(layers(&as_it_was("plain/two")), mounted);
    assert_eq!(push(&place, &daemon, "plain/three")["layers"][0]["sent"], 0);
    place.out("rmi b:1");
    place.out("gc");
    assert_eq!(noted(&place), [""; 0]);
}

#[test]
fn a_committed_layer_is_sent_once() {
    let Some(place) = crate::container_life::commit::place() else { return };
    let Some(daemon) = start(&place) else { return };
    place.out(&format!("push --quiet a {}/base:1", daemon.host));
    place.out("run --quiet --detach --name made a -- /bin/mkdir /new");
    assert_eq!(place.out("wait made").trim(), "0");
    place.out("commit --quiet made b:1");
    place.out("rm --container made");
    let first = push(&place, &daemon, "team/one");
    let [("reused", 0, true), ("compressed", 1.., false)] = layers(&first)[..] else {
        panic!("{first}")
    };
    let second = push(&place, &daemon, "team/two");
    assert_eq!(layers(&second), [("reused", 0, true); 2]);
    assert_eq!(second["manifest"], first["manifest"]);
    place.out("fsck");
}

#[test]
fn a_store_that_cannot_be_changed_is_pushed() {
    if !is_root() {
        return;
    }
    let place = plain();
    let Some(daemon) = start(&place) else { return };
    let store = place.path("store");
    // Root leaves no files in a store of another user.
    chown(&store, Some(65_534), None).unwrap();
    let first = push(&place, &daemon, "one");
    chown(&store, Some(0), None).unwrap();
    assert_eq!(noted(&place), [""; 0]);
    let mount = |options: &[&str]| {
        assert!(Command::new("mount").args(options).arg(&store).status().unwrap().success());
    };
    mount(&["--bind", store.to_str().unwrap()]);
    let mounted = Unmount(store.clone());
    mount(&["-o", "remount,bind,ro"]);
    let second = push(&place, &daemon, "two");
    assert_eq!(second["manifest"], first["manifest"]);
    assert_eq!(layers(&second), layers(&first), "it has to be made and sent again");
    drop(mounted);
    assert_eq!(noted(&place), [""; 0]);
    // If a push compressed the layer and then found the blob in the registry, it also records the blob.
    push(&place, &daemon, "two");
    assert_eq!(noted(&place), [format!("{}/two", daemon.host)]);
    assert_eq!(layers(&push(&place, &daemon, "three")), [("reused", 0, true)]);
}
