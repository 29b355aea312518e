//! Pulls and pushes, with Debian's docker-registry on loopback.

pub(crate) mod heals;
mod kills;
mod lazy;
#[cfg(feature = "serve")]
mod lazy_connect;
#[cfg(feature = "serve")]
mod lazy_layers;
mod lazy_windows;
mod no_room;
#[cfg(feature = "serve")]
mod outlived;
#[cfg(feature = "serve")]
mod previous;
mod pushes;
mod tables;

use std::process::Command;

use serde_json::Value;

use crate::{Place, write};
use testing::daemon::{Daemon, PROGRAM};

/// Starts a registry; returns `None`, with a note, if it is not installed.
pub(crate) fn start(place: &Place) -> Option<Daemon> {
    start_with(place, "")
}

/// Like [`start`], with settings in YAML.
pub(crate) fn start_with(place: &Place, settings: &str) -> Option<Daemon> {
    let daemon = Daemon::start(place.folder.path(), settings).unwrap();
    if daemon.is_none() {
        testing::skipped(&format!("{PROGRAM} is not installed"));
    }
    daemon
}

/// A place with the image `a:1`: a gzip layer of about 8 MB of incompressible data, and `count` small files.
pub(crate) fn place(count: usize) -> Place {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let mut state = 88_172_645_463_325_252_u64;
    let noise = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    });
    write(&tree.join("noise"), &noise.take(8 << 20).collect::<Vec<_>>(), 0o644);
    for at in 0..count {
        write(&tree.join(format!("file-{at}")), format!("{at} ").repeat(99).as_bytes(), 0o644);
    }
    let mut command = Command::new("tar");
    command.args(["--format=posix", "-czf"]).arg(place.path("a.tar.gz")).arg("-C").arg(&tree);
    assert!(command.arg(".").status().unwrap().success());
    place.out("import tar:a.tar.gz a:1");
    place
}

fn image(place: &Place, name: &str) -> String {
    let shown: Value = serde_json::from_str(&place.out(&format!("show --json {name}"))).unwrap();
    shown["image"].as_str().unwrap().to_owned()
}

/// Returns the last event that `--json` prints.
fn last_event(text: &str) -> Value {
    let events: Vec<Value> = text.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
    events.last().unwrap().clone()
}

/// Policies are evaluated with the noted origin, which stays with the image under each name.
#[test]
fn a_pulled_image_knows_where_it_came_from() {
    let from = place(1);
    let Some(daemon) = start(&from) else { return };
    let target = format!("{}/team/app:1", daemon.host);
    from.out(&format!("push --quiet a:1 {target}"));
    let origins = |place: &Place, name: &str| {
        let store = store::Store::open(
            &place.path("store"),
            store::Who::this_process(),
            store::OpenOptions::read(),
        )
        .unwrap();
        let found = store.resolve(name).unwrap();
        let origins = store.downloads.origins(&found.image).unwrap();
        origins.into_iter().map(|it| it.repository).collect::<Vec<_>>()
    };
    let pulled = Some(format!("{}/team/app", daemon.host));
    assert_eq!(origins(&from, "a:1"), [None]);
    let to = Place::new();
    to.out(&format!("pull --quiet {target} b:1"));
    assert_eq!(origins(&to, "b:1"), std::slice::from_ref(&pulled));
    to.out("tag b:1 c:1");
    to.out("rmi b:1");
    assert_eq!(origins(&to, "c:1"), std::slice::from_ref(&pulled));
    // Then both origins are noted.
    from.out(&format!("pull --quiet {target} b:1"));
    let found = origins(&from, "b:1");
    assert!(found.contains(&pulled), "{found:?}");
}

#[test]
fn an_image_goes_to_a_registry_and_comes_back() {
    let from = place(10);
    let Some(daemon) = start(&from) else { return };
    let target = format!("{}/team/app:1", daemon.host);
    let pushed = last_event(&from.out(&format!("push --json a:1 {target}")));
    assert_eq!((&pushed["event"], &pushed["name"]), (&"pushed".into(), &target.as_str().into()));
    assert!(pushed["layers"][0]["sent"].as_u64().unwrap() > 8 << 20);
    let again = last_event(&from.out(&format!("push --json a:1 {target}")));
    assert_eq!(again["manifest"], pushed["manifest"], "compressing is deterministic");
    assert_eq!(again["layers"][0]["sent"], 0);

    let to = Place::new();
    let pulled = last_event(&to.out(&format!("pull --json {target}")));
    assert_eq!((&pulled["event"], &pulled["manifest"]), (&"pulled".into(), &pushed["manifest"]));
    assert_eq!(image(&to, &target), image(&from, "a:1"));
    assert!(to.out(&format!("pull {target}")).contains("up to date"));
    // Pull by digest, which then replaces the tag.
    let by_digest = format!("{}/team/app@{}", daemon.host, pushed["manifest"].as_str().unwrap());
    to.out(&format!("pull {by_digest}"));
    assert_eq!(image(&to, &by_digest), image(&from, "a:1"));
    let nothing = to.run(&format!("pull {}/team/nothing:1", daemon.host));
    assert_eq!(nothing.code, Some(3));
    assert!(nothing.err.contains("team/nothing"), "{}", nothing.err);
}

#[test]
fn a_short_name_is_completed_as_docker_does() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import dir:tree docker.io/library/thing:latest");
    place.out("import dir:tree docker.io/team/thing:2");
    assert_eq!(image(&place, "thing"), image(&place, "docker.io/library/thing:latest"));
    assert_eq!(place.out("cat team/thing:2:/etc/short"), "short\n");
    assert_eq!(place.run("show team/thing").code, Some(3), "the tag is another");
    place.out("rmi thing");
    assert_eq!(place.run("show docker.io/library/thing:latest").code, Some(3));
}

#[test]
fn a_damaged_name_does_not_keep_others_from_being_pushed() {
    let place = place(1);
    let Some(daemon) = start(&place) else { return };
    place.out("tag a:1 broken:1");
    let refs = std::fs::read_dir(place.path("store/refs")).unwrap();
    let mut refs = refs.map(|it| it.unwrap().path());
    let broken = refs.find(|it| it.to_string_lossy().contains("broken")).unwrap();
    std::fs::remove_file(&broken).unwrap();
    write(&broken, b"not a record", 0o644);
    assert_eq!(place.run("show broken:1").code, Some(2), "it is damaged");
    place.out(&format!("push a:1 {}/app:1", daemon.host));
}
