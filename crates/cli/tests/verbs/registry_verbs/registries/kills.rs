//! Pulls and pushes that are killed.

#![expect(clippy::print_stderr, reason = "how many were killed is for people")]

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{image, start};
use crate::{Place, write};
use testing::daemon::Daemon;
use testing::fake::{Request, Server, forward};
use testing::rounds;

/// Returns noise that depends only on the seed.
fn noise(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = 88_172_645_463_325_252 ^ (seed << 20);
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// A place with the image `a:1`, whose layers differ in length and number of files. Also returns the diff ids.
pub(super) fn place() -> (Place, Vec<String>) {
    let (place, mut diff_ids) = (Place::new(), Vec::new());
    let tar = |folder: &str, to: &str| {
        let mut command = Command::new("tar");
        command
            .args(["--format=posix", "-cf"])
            .arg(place.path(to))
            .arg("-C")
            .arg(place.path(folder));
        assert!(command.arg(".").status().unwrap().success());
        std::fs::read(place.path(to)).unwrap()
    };
    std::fs::create_dir(place.path("archive")).unwrap();
    for (at, (megabytes, files)) in [(6, 1), (1, 300), (3, 40), (0, 200), (2, 1)].iter().enumerate()
    {
        let tree = place.path(&format!("tree-{at}"));
        std::fs::create_dir(&tree).unwrap();
        let bytes: Vec<u8> =
            noise(at as u64).take(megabytes << 17).flat_map(u64::to_le_bytes).collect();
        write(&tree.join(format!("noise-{at}")), &bytes, 0o644);
        for number in 0..*files {
            let text = format!("{at} {number} ").repeat(99);
            write(&tree.join(format!("file-{at}-{number}")), text.as_bytes(), 0o644);
        }
        diff_ids.push(digest(&tar(&format!("tree-{at}"), &format!("archive/{at}.tar"))));
    }
    let config = json!({ "os": "linux", "architecture": "amd64",
        "rootfs": { "type": "layers", "diff_ids": diff_ids } });
    let layers: Vec<_> = (0..diff_ids.len()).map(|at| format!("{at}.tar")).collect();
    let manifest = json!([{ "Config": "config.json", "RepoTags": ["a:1"], "Layers": layers }]);
    write(&place.path("archive/config.json"), config.to_string().as_bytes(), 0o644);
    write(&place.path("archive/manifest.json"), manifest.to_string().as_bytes(), 0o644);
    tar("archive", "a.tar");
    place.out("import --platform linux/amd64 docker-archive:a.tar a:1");
    (place, diff_ids)
}

/// Returns the manifest in a registry, if there is one.
fn manifest(host: &str, name: &str) -> Option<Value> {
    let mut request = get(host, &format!("/v2/{name}/manifests/1"));
    let accept = "application/vnd.oci.image.manifest.v1+json".to_owned();
    request.headers.insert("accept".to_owned(), accept);
    let answer = forward(host, &request, 0).unwrap();
    (answer.status == 200).then(|| serde_json::from_slice(&answer.body).unwrap())
}

fn get(host: &str, path: &str) -> Request {
    let headers = BTreeMap::from([("host".to_owned(), host.to_owned())]);
    Request { method: "GET".to_owned(), path: path.to_owned(), headers, ..Request::default() }
}

fn blobs(manifest: &Value) -> Vec<String> {
    let layers = manifest["layers"].as_array().unwrap();
    layers.iter().map(|it| it["digest"].as_str().unwrap().to_owned()).collect()
}

/// Returns the diff ids of the layers that are complete in the place's store.
fn complete(place: &Place) -> Vec<String> {
    let path = place.path("store");
    // If a pull is killed early, the store is missing or incomplete.
    let Ok(store) =
        store::Store::open(&path, store::Who::this_process(), store::OpenOptions::read())
    else {
        return Vec::new();
    };
    store.layers.diff_ids().unwrap().iter().map(ToString::to_string).collect()
}

/// Starts a command, and kills it after the given time. Returns its duration if it ended well before that.
fn kill(place: &Place, arguments: &[&str], after: Duration) -> Option<Duration> {
    let mut command = place.command(arguments);
    let since = Instant::now();
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while since.elapsed() < after {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success());
            return Some(since.elapsed());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap().success().then_some(after)
}

fn check_sound(place: &Place, round: u64) {
    let sound = place.run("fsck --deep");
    let absent = sound.err.contains("there is no store");
    assert!(absent || sound.code == Some(0), "round {round}: {}{}", sound.out, sound.err);
}

#[test]
fn a_killed_pull_leaves_a_sound_store_and_nothing_to_fetch_twice() {
    if !testing::long_tests() {
        return;
    }
    let (from, diff_ids) = place();
    let Some(daemon) = start(&from) else { return };
    from.out(&format!("push a:1 {}/app:1", daemon.host));
    let upstream = daemon.host.clone();
    // The transfer is slowed down, so that a layer is being transferred when the pull is killed.
    let pace = Duration::from_millis(1);
    let proxy = Server::start(move |request, _| {
        forward(&upstream, request, request.body.len()).unwrap().pace(pace)
    });
    let target = format!("{}/app:1", proxy.host());
    let blobs = blobs(&manifest(&daemon.host, "app").unwrap());
    let whole = Instant::now();
    Place::new().out(&format!("pull {target}"));
    let mut whole = whole.elapsed();

    let mut to = Place::new();
    let mut random = noise(std::process::id().into());
    let (mut unfinished, mut finished, mut resumed) = (0, 0, 0);
    for round in 1.. {
        if unfinished == rounds(12) {
            break;
        }
        assert!(round < rounds(60), "few are killed in time");
        let before = complete(&to);
        proxy.settle();
        let seen = proxy.seen().len();
        // Every fourth pull is not killed. Data from earlier pulls makes later pulls shorter.
        let part = u32::try_from(random.next().unwrap() % 1000).unwrap();
        let missing = u32::try_from(diff_ids.len() - before.len()).unwrap().max(1);
        let after = whole * missing / 5 * part / 1000;
        let is_done = match round % 4 {
            0 => {
                to.out(&format!("pull {target}"));
                true
            }
            _ => match kill(&to, &["--quiet", "pull", &target], after) {
                Some(took) => {
                    // The machine was busy when the time was measured.
                    whole = whole.min(took * 5 / missing);
                    true
                }
                None => false,
            },
        };
        proxy.settle();
        for request in proxy.seen().split_off(seen) {
            let layer = blobs.iter().position(|blob| request.path.ends_with(blob));
            let Some(layer) = layer else { continue };
            assert!(
                !before.contains(&diff_ids[layer]),
                "round {round}, {part}/1000: layer {layer} is fetched again"
            );
            resumed += usize::from(request.header("range").is_some());
        }
        check_sound(&to, round);
        // A killed pull may have completed all work before it was killed.
        if is_done || to.run("images").out.contains("app") {
            assert_eq!(image(&to, &target), image(&from, "a:1"), "round {round}");
            to.out("gc");
            check_sound(&to, round);
            assert_eq!(std::fs::read_dir(to.path("store/tmp")).unwrap().count(), 0);
            to = Place::new();
            finished += 1;
        } else {
            let kept = complete(&to);
            to.run("gc");
            assert_eq!(
                complete(&to),
                kept,
                "round {round}: gc keeps what the next pull goes on with"
            );
            unfinished += 1;
        }
    }
    eprintln!("{unfinished} killed, {finished} finished, {resumed} blobs gone on with");
    assert!(finished > 0);
}

/// Checks that all blobs that a manifest names are in the registry. Returns whether there is a manifest.
fn check_pushed(daemon: &Daemon, name: &str) -> bool {
    let Some(manifest) = manifest(&daemon.host, name) else { return false };
    let config = manifest["config"]["digest"].as_str().unwrap().to_owned();
    for blob in blobs(&manifest).into_iter().chain([config]) {
        let request = get(&daemon.host, &format!("/v2/{name}/blobs/{blob}"));
        let answer = forward(&daemon.host, &request, 0).unwrap();
        assert_eq!((answer.status, digest(&answer.body)), (200, blob), "{name}");
    }
    true
}

#[test]
fn a_killed_push_leaves_no_manifest_without_its_blobs() {
    if !testing::long_tests() {
        return;
    }
    let (from, _) = place();
    let Some(daemon) = start(&from) else { return };
    let target = |name: &str| format!("{}/{name}:1", daemon.host);
    let whole = Instant::now();
    from.out(&format!("push a:1 {}", target("first")));
    let whole = whole.elapsed();
    let mut random = noise(std::process::id().into());
    let mut unfinished = 0;
    for round in 1..=rounds(4) {
        let name = format!("push-{round}");
        let part = u32::try_from(random.next().unwrap() % 1000).unwrap();
        let after = whole * part / 1000;
        let is_done = kill(&from, &["push", "a:1", &target(&name)], after).is_some();
        assert!(check_pushed(&daemon, &name) || !is_done, "round {round}, {part}/1000");
        unfinished += usize::from(!is_done);
        from.out(&format!("push a:1 {}", target(&name)));
        assert!(check_pushed(&daemon, &name), "round {round}, {part}/1000");
        check_sound(&from, round);
    }
    eprintln!("{unfinished} killed");
    let to = Place::new();
    to.out(&format!("pull {}", target("push-1")));
    assert_eq!(image(&to, &target("push-1")), image(&from, "a:1"));
}
