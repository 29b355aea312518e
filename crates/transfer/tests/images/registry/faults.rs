//! Tests pulls and pushes through a proxy that simulates faults of networks, registries and proxies, according to a
//! plan made from a seed. In all cases the image is either exactly right or absent, and errors name the cause.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use quire_transfer as transfer;

use transfer::pull::{Layers, PullError, Pulled};
use transfer::push::PushError;

use super::proxy::{Proxy, is_blob};
use super::pulls::{NOW, Served, image, layer, pull_name, push_over, push_to, served};
use super::*;
use crate::home::{Home, usual_wishes};
use testing::daemon::Daemon;
use testing::fake::{Server, forward};
use testing::rounds;

/// Settings for a faulty network, where stalls must cost little time.
fn impatient() -> Settings {
    Settings { stall: Duration::from_millis(400), ..settings() }
}

/// Parts of error messages that name the cause. Each error must contain one of them.
const CAUSES: [&str; 15] = [
    "the server returned status 5",
    "limits the rate of requests",
    "the connection was lost (",
    "the content ended after ",
    "the content has more than ",
    "the server announces ",
    "but the server sent the range \"",
    "received nothing for ",
    "the registry denies access",
    "has the digest ",
    "but the server states ",
    " : their digest is ",
    "no credentials for ",
    "cannot use the server's response",
    "the registry lost the upload after ",
];

/// Checks that an error names the host, the request and the cause.
fn check_error(text: &str, host: &str) {
    assert!(text.contains(host), "which host? {text}");
    assert!(["sha256:", "manifest", "config"].iter().any(|it| text.contains(it)), "what? {text}");
    assert!(CAUSES.iter().any(|it| text.contains(it)), "why? {text}");
}

static SMALL: LazyLock<Arc<Served>> = LazyLock::new(|| {
    Arc::new(served(vec![layer("a", 2_500_000), layer("b", 10_000), layer("c", 1_200_000)]))
});
/// An image with a layer that is sent in two chunks.
static LARGE: LazyLock<Arc<Served>> =
    LazyLock::new(|| Arc::new(served(vec![layer("a", 17 << 20), layer("b", 10_000)])));

fn pull_through(
    home: &Home,
    host: &str,
    layers: Layers,
    settings: &Settings,
) -> Result<Pulled, PullError> {
    pull_name(home, &format!("{host}/app:1"), layers, settings)
}

/// Checks that all names refer to the complete image, and that the store is sound.
fn check_store(home: &Home, expected: &ImageId) {
    for (name, reference) in home.store.refs.all().unwrap() {
        assert_eq!(reference.image, *expected, "{name}");
        home.store.open_image(expected).unwrap();
    }
    assert!(home.is_sound());
}

/// Pulls through a faulty network up to three times or until success, and then without faults. Returns the number of
/// successes.
fn pulls(upstream: &Daemon, seed: u64, expected: &ImageId) -> usize {
    let proxy = Proxy::start(&upstream.host, seed);
    let host = proxy.server.host();
    let home = Home::new();
    let layers = if seed.is_multiple_of(3) { Layers::Keep } else { Layers::Forget };
    let mut successes = 0;
    for _ in 0..3 {
        match pull_through(&home, &host, layers, &impatient()) {
            Ok(pulled) => {
                successes += 1;
                assert_eq!(image(Ok(pulled)), *expected);
            }
            Err(error) => {
                println!("{seed}: {}", chain(&error));
                check_error(&chain(&error), &host);
                assert!(home.store.refs.all().unwrap().is_empty(), "{}", chain(&error));
            }
        }
        check_store(&home, expected);
        if successes > 0 {
            break;
        }
        // A garbage collection between two pulls must not remove data that the second pull uses.
        home.store.gc(NOW).unwrap();
    }
    proxy.check();
    let calm = pull_through(&home, &upstream.host, layers, &settings());
    assert_eq!(image(calm), *expected);
    check_store(&home, expected);
    let kept = if layers == Layers::Keep { 3 } else { 0 };
    let blobs = home.blobs();
    assert_eq!(blobs.iter().filter(|it| it.is_empty()).count(), kept, "{blobs:?}");
    assert!(!blobs.iter().any(|it| it == ".partial" || it == ".pull"), "{blobs:?}");
    successes
}

/// Does the same with pushes of the blobs that `home` keeps of `pulled`.
fn pushes(upstream: &Daemon, seed: u64, home: &Home, pulled: &str, what: &Served) -> usize {
    let proxy = Proxy::start(&upstream.host, seed);
    let host = proxy.server.host();
    let repository = format!("push/{seed}");
    let there: Reference = format!("{}/{repository}", upstream.host).parse().unwrap();
    let there = Registry::new(&there, &settings()).unwrap();
    let blobs: BTreeSet<_> =
        what.layers.iter().map(|it| &it.blob).chain([&what.config]).map(|it| digest(it)).collect();
    let is_there = || {
        let manifest = match there.manifest("1") {
            Err(error) if error.is_not_found() => return false,
            manifest => manifest.unwrap(),
        };
        assert_eq!(manifest.bytes, what.manifest);
        for blob in &blobs {
            let bytes = read(there.blob(blob, None, 0)).unwrap();
            assert_eq!(digest(&bytes), *blob, "a manifest is there before its blobs");
        }
        true
    };
    let mut successes = 0;
    for _ in 0..3 {
        let target = format!("{host}/{repository}:1");
        match push_over(home, pulled, &target, &impatient()) {
            Ok(pushed) => {
                assert_eq!((pushed.digest, pushed.is_unchanged), (digest(&what.manifest), true));
                assert!(is_there());
                successes += 1;
                break;
            }
            Err(PushError::Registry { target, source }) => {
                let error = PushError::Registry { target, source };
                println!("{seed}: {}", chain(&error));
                check_error(&chain(&error), &host);
                // The registry may have the manifest, because perhaps only the last response was lost.
                is_there();
            }
            Err(other) => panic!("{}", chain(&other)),
        }
    }
    proxy.check();
    push_to(home, pulled, &format!("{}/{repository}:1", upstream.host));
    assert!(is_there());
    successes
}

/// Runs `round` with many seeds, and reports which seed failed.
fn weather(first: u64, few: u64, round: impl Fn(u64) -> usize) {
    let mut successes = 0;
    for seed in first..first + rounds(few) {
        let since = Instant::now();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| round(seed)));
        match outcome {
            Ok(count) => {
                successes += count;
                println!("{seed}: {count} after {:.1} s", since.elapsed().as_secs_f64());
            }
            Err(panic) => {
                println!("the seed is {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(successes > 0, "the weather is too bad to learn anything");
}

#[test]
fn pulls_in_bad_weather() {
    if !testing::long_tests() {
        return;
    }
    let Some(daemon) = real::start("") else { return };
    SMALL.put(&daemon.host);
    let expected = Home::new().imported(&SMALL);
    weather(0, 8, |seed| pulls(&daemon, seed, &expected));
}

#[test]
fn pulls_in_bad_weather_from_crane() {
    if !testing::long_tests() {
        return;
    }
    let Some(daemon) = real::start_crane() else { return };
    SMALL.put(&daemon.host);
    let expected = Home::new().imported(&SMALL);
    weather(1000, 4, |seed| pulls(&daemon, seed, &expected));
}

/// The registry itself compensates for all faults of a mirror.
#[test]
fn pulls_past_a_bad_mirror() {
    if !testing::long_tests() {
        return;
    }
    let Some(daemon) = real::start("") else { return };
    SMALL.put(&daemon.host);
    let expected = Home::new().imported(&SMALL);
    weather(4000, 6, |seed| {
        let mirror = Proxy::start(&daemon.host, seed);
        let text = format!(
            "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
            daemon.host,
            mirror.server.host()
        );
        let hosts = Hosts::new(&daemon.host, &text);
        let settings = Settings { hosts: hosts.settings().hosts, ..impatient() };
        let home = Home::new();
        let pulled = pull_through(&home, &daemon.host, Layers::Forget, &settings);
        assert_eq!(image(pulled), expected);
        check_store(&home, &expected);
        assert!(mirror.server.seen().len() > 1);
        mirror.check();
        1
    });
}

/// Pushes two versions of an image whose layer has a table of contents, as `app:1` and `app:2`. Returns the image of
/// the second version, imported by way of a layout.
pub(super) fn estargz(daemon: &Daemon) -> Option<ImageId> {
    let crane = testing::crane()?;
    let folder = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| {
        let output = Command::new(&crane).args(words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let name = |kind: &str, version| format!("{}/{kind}:{version}", daemon.host);
    for version in [1, 2] {
        let tree = folder.path().join(format!("tree-{version}"));
        std::fs::create_dir(&tree).unwrap();
        for number in 0..40 {
            // Every eighth file differs in the second version.
            let is_new = version == 2 && number % 8 == 0;
            let bytes = &noise(200_000 + number)[number + usize::from(is_new)..];
            std::fs::write(tree.join(format!("file-{number:02}")), bytes).unwrap();
        }
        let tar = folder.path().join(format!("{version}.tar"));
        let mut command = Command::new("tar");
        command.args(["--format=posix", "--sort=name", "-cf"]).arg(&tar).arg("-C").arg(&tree);
        assert!(command.arg(".").status().unwrap().success());
        run(&["append", "-f", tar.to_str().unwrap(), "-t", &name("plain", version)]);
        run(&["optimize", &name("plain", version), &name("app", version)]);
    }
    let layout = folder.path().join("layout");
    run(&["pull", "--format=oci", &name("app", 2), layout.to_str().unwrap()]);
    let source = format!("oci:{}", layout.display());
    let source = oci::source::ImageSource::parse(source.as_ref()).unwrap();
    let home = Home::new();
    Some(
        transfer::import::import(&home.store, &source, &home.environment(), &usual_wishes())
            .unwrap()
            .image,
    )
}

/// Ranges of a blob cannot be verified before the layer is complete.
#[test]
fn pulls_of_a_part_in_bad_weather() {
    let Some(daemon) = real::start("") else { return };
    let Some(expected) = estargz(&daemon) else { return };
    let (old, new) = (format!("{}/app:1", daemon.host), format!("{}/app:2", daemon.host));
    let parts = std::cell::Cell::new(0);
    weather(5000, 6, |seed| {
        let proxy = Proxy::start(&daemon.host, seed);
        let home = Home::new();
        let first = image(pull_name(&home, &old, Layers::Forget, &settings()));
        let mut successes = 0;
        let through = format!("{}/app:2", proxy.server.host());
        for _ in 0..3 {
            let pulled = pull_name(&home, &through, Layers::Forget, &impatient());
            for (_, reference) in home.store.refs.all().unwrap() {
                assert!([first, expected].contains(&reference.image));
            }
            assert!(home.is_sound());
            match pulled {
                Ok(pulled) => {
                    assert_eq!(image(Ok(pulled)), expected);
                    successes += 1;
                    break;
                }
                Err(error) => {
                    println!("{seed}: {}", chain(&error));
                    check_error(&chain(&error), &proxy.server.host());
                    assert_eq!(home.store.refs.all().unwrap().len(), 1);
                }
            }
        }
        proxy.check();
        assert_eq!(image(pull_name(&home, &new, Layers::Forget, &settings())), expected);
        let ranges = proxy.server.seen().iter().filter(|it| it.header("range").is_some()).count();
        parts.set(parts.get() + ranges);
        successes
    });
    assert!(parts.get() > 0);
}

#[test]
fn parts_that_a_mirror_spoils() {
    let Some(daemon) = real::start("") else { return };
    let Some(expected) = estargz(&daemon) else { return };
    let upstream = daemon.host.clone();
    let mirror = Server::start(move |request, _| {
        let mut answer = forward(&upstream, request, 0).unwrap();
        if let (true, Some(byte)) = (is_blob(request), answer.body.get_mut(300)) {
            *byte ^= 1;
        }
        answer
    });
    let hosts = Hosts::new(&daemon.host, &format!("[host.\"http://{}\"]", mirror.host()));
    let home = Home::new();
    for version in [1, 2] {
        let name = format!("{}/app:{version}", daemon.host);
        let pulled = image(pull_name(&home, &name, Layers::Forget, &hosts.settings()));
        assert!(version == 1 || pulled == expected);
    }
    assert!(mirror.seen().iter().any(|it| it.header("range").is_some()));
    assert!(home.is_sound());
}

#[test]
fn pushes_in_bad_weather() {
    if !testing::long_tests() {
        return;
    }
    let Some(daemon) = real::start("") else { return };
    pushes_to(&daemon, 2000, 4);
}

#[test]
fn pushes_in_bad_weather_to_crane() {
    if !testing::long_tests() {
        return;
    }
    let Some(daemon) = real::start_crane() else { return };
    // This registry stores the blobs of all repositories together, so only the manifest is sent after the first
    // round.
    pushes_to(&daemon, 3000, 2);
}

fn pushes_to(daemon: &Daemon, first: u64, few: u64) {
    let truths = [Arc::clone(&SMALL), Arc::clone(&LARGE)];
    let kept = truths.map(|truth| {
        let (home, answers) = (Home::new(), Arc::clone(&truth));
        let server = Server::start(move |request, _| answers.answer(request));
        image(home.pull_as(&server.host(), Layers::Keep));
        (truth, home, format!("{}/app:1", server.host()))
    });
    weather(first, few, |seed| {
        let (truth, home, name) = &kept[usize::from(seed.is_multiple_of(4))];
        pushes(daemon, seed, home, name, truth)
    });
}
