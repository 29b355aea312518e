//! Volumes of the store: `--volume NAME:PATH`, `--volume PATH`, volumes of images, and `volume`. Needs root.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use serde_json::Value;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{all_runtimes, place, runtimes, wait_for};
use crate::{Place, Ran};

/// Returns a place with an image `v` that has the volume `/var/data` with files, and one at `/absent`.
fn with_volume() -> Option<Place> {
    let place = place()?;
    let tree = place.path("tree");
    fs::create_dir_all(tree.join("var/data/sub")).unwrap();
    fs::write(tree.join("var/data/file"), "image\n").unwrap();
    fs::set_permissions(tree.join("var/data"), fs::Permissions::from_mode(0o2770)).unwrap();
    std::os::unix::fs::chown(tree.join("var/data"), Some(5), Some(6)).unwrap();
    image(&place, "v", "VOLUME /var/data /absent");
    Some(place)
}

/// Makes an image of the tree with a change.
fn image(place: &Place, name: &str, change: &str) {
    place.out(&format!("import --quiet dir:{} b", place.path("tree").display()));
    place.out("export b tar:b.tar");
    place.out("import --quiet tar:b.tar b");
    place.out("run --quiet -d --name made b true");
    place.out("wait made");
    let ran = place.run_each(&["commit", "--quiet", "made", name, "--change", change]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    place.out("rm made");
}

/// Runs a shell script.
fn script(place: &Place, options: &[&str], image: &str, script: &str) -> Ran {
    let before = ["run", "--quiet", "-u", "0"];
    place.run_each(&[&before, options, &[image, "--", "sh", "-c", script]].concat())
}

fn names(place: &Place) -> Vec<String> {
    place.out("volume ls -q").lines().map(ToOwned::to_owned).collect()
}

#[test]
fn a_named_volume_outlives_its_containers() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let run = |options: &[&str], line: &str| {
            script(&place, &[&["--runtime", runtime], options].concat(), "a", line)
        };
        let ran = run(&["-v", "data:/data"], "echo kept > /data/file");
        assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        let ran = run(&["-v", "data:/other:ro"], "cat /other/file; echo x > /other/file");
        assert_eq!(ran.out, "kept\n", "{runtime}: {}", ran.err);
        assert_ne!(ran.code, Some(0), "{runtime}");
        assert_eq!(names(&place), ["data"], "{runtime}");
        let path = place.path("store/volumes/data/data");
        assert_eq!(fs::read_to_string(path.join("file")).unwrap(), "kept\n");
        place.out("volume rm data");
        assert!(!path.exists() && names(&place).is_empty());
    }
}

/// Source: podman, `test/system/160-volumes.bats`.
#[test]
fn programs_of_a_volume_are_not_executed_with_noexec() {
    let Some(place) = place() else { return };
    place.out("volume create data");
    let file = place.path("store/volumes/data/data/script");
    testing::script(&file, "#!/bin/sh\necho ran\n");
    for runtime in runtimes() {
        let run = |volume: &str| {
            place.run_each(&[
                "run",
                "--quiet",
                "--runtime",
                runtime,
                "-v",
                volume,
                "a",
                "/data/script",
            ])
        };
        assert_eq!(run("data:/data").out, "ran\n", "{runtime}");
        let ran = run("data:/data:noexec,z");
        assert!(
            matches!(ran.code, Some(125 | 126)) && ran.out.is_empty(),
            "{runtime}: {}",
            ran.err
        );
    }
}

/// Neither running containers nor those at rest lose a volume.
#[test]
fn a_volume_in_use_is_not_removed() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "web");
    start(&place, &["--name", "web", "-v", "data:/data"], "echo x > /data/file; sleep 60");
    let refused = |line: &str| {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains("container web uses volume data"), "{line}: {}", ran.err);
    };
    refused("volume rm data");
    assert_eq!(place.out("volume prune --force"), "");
    place.out("gc");
    place.out("stop -t 0 web");
    refused("volume rm data");
    assert_eq!(place.out("volume rm --all"), "");
    place.out("start web");
    wait_for("the effect", || ps(&place, "web").is_some_and(|it| it["status"] == "running"));
    assert_eq!(place.out("exec web cat /data/file"), "x\n");
    place.out("rm --force --volumes web");
    // A name that a user chose ends only with `volume rm`.
    assert_eq!(names(&place), ["data"]);
    assert_eq!(place.out("volume prune --force"), "");
    assert_eq!(place.out("volume prune --force --all"), "data\n");
    start(&place, &["--name", "web", "-v", "data:/data"], "sleep 60");
    assert_eq!(place.out("volume rm --force data nothing"), "data\n");
    assert_eq!(place.out("ps -aq"), "");
}

#[test]
fn volumes_of_an_image_have_its_files() {
    let Some(place) = with_volume() else { return };
    for runtime in runtimes() {
        for userns in ["host", "0:700000:65536"] {
            let options = ["--runtime", runtime, "--userns", userns];
            let line = "cat /var/data/file; echo new > /var/data/file; > /absent/x; exit 9";
            let ran = script(&place, &options, "v", line);
            assert_eq!(ran.code, Some(9), "{runtime} {userns}: {}", ran.err);
            assert_eq!(ran.out, "image\n", "{runtime} {userns}: {}", ran.err);
            assert!(names(&place).is_empty(), "{runtime}");
            // A container that is kept has its volumes again.
            let _guard = Rm(&place, "db");
            let before = ["run", "--quiet", "-u", "0", "-d", "--name", "db"];
            let run = ["v", "sh", "-c", "cat /var/data/file; echo new > /var/data/file"];
            let ran = place.run_each(&[&before, &options[..], &run].concat());
            assert_eq!(ran.code, Some(0), "{runtime} {userns}: {}", ran.err);
            place.out("wait db");
            assert_eq!(names(&place).len(), 2);
            place.out("start db");
            place.out("wait db");
            assert_eq!(place.out("logs db"), "image\nnew\n", "{runtime} {userns}");
            let first = names(&place)[0].clone();
            assert!(first.len() == 64 && first.bytes().all(|it| it.is_ascii_hexdigit()), "{first}");
            let owner = if userns == "host" { (5, 6) } else { (700_005, 700_006) };
            let found = names(&place).into_iter().find_map(|name| {
                let path = place.path("store/volumes").join(name).join("data");
                path.join("file").exists().then(|| fs::metadata(path).unwrap())
            });
            let found = found.unwrap();
            assert_eq!((found.uid(), found.gid()), owner, "{runtime} {userns}");
            assert_eq!(found.mode() & 0o7777, 0o2770);
            place.out("rm --volumes db");
            assert!(names(&place).is_empty(), "{runtime} {userns}");
        }
    }
    // Without --volumes they stay, but not as those of a container.
    let _guard = Rm(&place, "db");
    place.out("run --quiet -d --name db v true");
    place.out("wait db");
    place.out("rm db");
    place.out("gc");
    assert_eq!(names(&place).len(), 2);
    place.out("volume prune --force");
    let ran = script(&place, &["--image-volume", "ignore"], "v", "cat /var/data/file; sleep 0");
    assert_eq!(ran.out, "image\n", "{}", ran.err);
    let ran = script(&place, &["-v", "own:/var/data"], "v", "cat /var/data/file");
    assert_eq!((ran.out.as_str(), names(&place)), ("image\n", vec!["own".to_owned()]));
}

/// A hostile image must not get files of the host into a volume, or have a volume elsewhere.
#[test]
fn links_of_an_image_do_not_lead_to_the_host() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("secret")).unwrap();
    fs::write(place.path("secret/file"), "host\n").unwrap();
    let tree = place.path("tree");
    symlink(place.path("secret"), tree.join("absolute")).unwrap();
    symlink("../../../../../../../../../etc", tree.join("relative")).unwrap();
    fs::create_dir(tree.join("links")).unwrap();
    symlink(place.path("secret/file"), tree.join("links/file")).unwrap();
    image(&place, "v", "VOLUME /absolute /relative /links /sys/fs/cgroup /proc/1 /");
    let line = "for d in /absolute /links; do cat $d/file; done; > /absolute/new; echo end";
    let ran = script(&place, &["-d", "--name", "c"], "v", line);
    let _guard = Rm(&place, "c");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    place.out("wait c");
    let log = place.out("logs c");
    assert!(log.ends_with("end\n") && !log.contains("host"), "{log}");
    assert_eq!(fs::read_dir(place.path("secret")).unwrap().count(), 1);
    for name in names(&place) {
        let path = place.path("store/volumes").join(name).join("data");
        assert!(!path.join("passwd").exists(), "{}", path.display());
        let link = path.join("file");
        assert!(!link.exists() || link.is_symlink());
    }
}

#[test]
fn owners_of_files_can_be_those_of_the_program() {
    let Some(place) = place() else { return };
    fs::create_dir_all(place.path("host/sub")).unwrap();
    fs::write(place.path("host/sub/file"), "").unwrap();
    symlink("/etc/hostname", place.path("host/link")).unwrap();
    let before = fs::metadata("/etc/hostname").map(|it| (it.uid(), it.gid())).ok();
    let host = format!("{}:/h:U", place.path("host").display());
    let own = ["--userns", "0:700000:65536", "-u", "7:8", "-v", &host, "-v", "data:/data:U"];
    let ran = place.run_each(&[&["run", "--quiet"], &own[..], &["a", "true"]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    for path in ["host", "host/sub/file", "host/link", "store/volumes/data/data"] {
        let found = fs::symlink_metadata(place.path(path)).unwrap();
        assert_eq!((found.uid(), found.gid()), (700_007, 700_008), "{path}");
    }
    assert_eq!(fs::metadata("/etc/hostname").map(|it| (it.uid(), it.gid())).ok(), before);
    let ran = place.run("run --quiet -v /etc:/x:U a true");
    assert!(ran.code == Some(125) && ran.err.contains("leave U out"), "{}", ran.err);
}

/// A killed monitor, and a container that never starts, leave no volume that only they had.
#[test]
fn no_crash_leaves_a_volume_behind() {
    let Some(place) = place() else { return };
    let ran = place.run("run --quiet -v /own a /no/such/program");
    assert_eq!(ran.code, Some(127), "{}", ran.err);
    assert!(names(&place).is_empty());
    for options in [&["--rm"][..], &["--rm", "-t"]] {
        let _guard = Rm(&place, "c");
        start(&place, &[&["--name", "c", "-v", "/own"], options].concat(), "sleep 60");
        assert_eq!(names(&place).len(), 1);
        place.out("stop -t 0 c");
        wait_for("the effect", || names(&place).is_empty());
    }
    let _guard = Rm(&place, "c");
    start(&place, &["--rm", "--name", "c", "-v", "/own"], "sleep 60");
    let state = place.path("store/containers/c/state.json");
    let state: Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
    let monitor = i32::try_from(state["monitor"].as_u64().unwrap()).unwrap();
    let monitor = rustix::process::Pid::from_raw(monitor).unwrap();
    rustix::process::kill_process(monitor, rustix::process::Signal::KILL).unwrap();
    wait_for("the effect", || {
        place.out("gc");
        names(&place).is_empty()
    });
    assert_eq!(place.out("ps -aq"), "");
}

#[test]
fn forks_share_only_named_volumes() {
    let Some(place) = place() else { return };
    let _guards = ["base", "child"].map(|it| Rm(&place, it));
    start(
        &place,
        &["--name", "base", "-v", "data:/data", "-v", "/own"],
        "echo base > /data/file; echo base > /own/file; sleep 60",
    );
    wait_for("the effect", || place.run("exec base cat /own/file").out == "base\n");
    place.out("stop -t 0 base");
    place.out("fork --name child base");
    wait_for("the effect", || place.run("exec child cat /own/file").out == "base\n");
    assert_eq!(names(&place).len(), 3);
    place.out("rm --force --volumes child");
    assert_eq!(names(&place).len(), 2);
    place.out("rm --force --volumes base");
    assert_eq!(names(&place), ["data"]);
}

#[test]
fn volumes_are_described_counted_and_checked() {
    let Some(place) = place() else { return };
    assert_eq!(place.out("volume ls"), "DRIVER  VOLUME NAME\n");
    assert_eq!(place.out("volume create --label a=b --label c one"), "one\n");
    let ran = place.run("volume create one");
    assert!(ran.code == Some(125) && ran.err.contains("already exists"), "{}", ran.err);
    assert_eq!(place.out("volume create --ignore one"), "one\n");
    let random = place.out("volume create");
    assert_eq!(random.trim().len(), 64, "{random}");
    place.out(&format!("volume rm {}", random.trim()));
    for name in ["", ".a", "a/b", "-a"] {
        let ran = place.run_each(&["volume", "create", "--", name]);
        assert!(
            ran.code == Some(125) && ran.err.contains("is not a name of a volume"),
            "{}",
            ran.err
        );
    }
    let ran = script(
        &place,
        &["-v", "one:/x"],
        "a",
        "head -c 99999 /dev/zero > /x/f 2>&1; echo x > /x/g",
    );
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let shown: Value = serde_json::from_str(&place.out("volume inspect one")).unwrap();
    let path = place.path("store/volumes/one/data").display().to_string();
    assert_eq!(shown[0]["Name"], "one");
    assert_eq!(shown[0]["Mountpoint"], path);
    assert_eq!(shown[0]["Labels"], serde_json::json!({"a": "b", "c": ""}));
    assert_eq!(place.out("volume inspect --format {{.Mountpoint}} one"), format!("{path}\n"));
    // A repeated name is not an absent one.
    assert_eq!(place.out("volume inspect --format {{.Mountpoint}} one one"), format!("{path}\n"));
    let listed: Value = serde_json::from_str(&place.out("volume ls --json")).unwrap();
    assert_eq!((&listed[0]["volume"], &listed[0]["container"]), (&"one".into(), &Value::Null));
    assert_eq!(place.out("volume ls -q --filter label=a=b --filter dangling=true"), "one\n");
    assert_eq!(place.out("volume ls -q --filter dangling=false"), "");
    let ran = place.run("volume rm one two");
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    assert!(ran.err.contains("no volume with name \"two\" found: no such volume"), "{}", ran.err);
    let used: Value = serde_json::from_str(&place.out("du --json")).unwrap();
    assert!(used["volumes"].as_u64().unwrap() > 0, "{used}");
    place.out("fsck");
    // The files of a volume survive the damage of its record.
    let record = place.path("store/volumes/one/volume.json");
    fs::remove_file(&record).unwrap();
    fs::write(&record, "damaged").unwrap();
    let ran = place.run("fsck");
    assert!(ran.code == Some(1) && ran.out.contains("volume one"), "{} {}", ran.out, ran.err);
    place.run("fsck --repair");
    place.out("fsck");
    assert!(place.path("store/volumes/one/data/g").exists());
    place.out("volume rm one");
    let ran = place.run("volume ls --force");
    assert!(ran.code == Some(125) && ran.err.contains("--force is for"), "{}", ran.err);
}

/// `system prune` and `volume rm --force` remove containers, but not the volumes that only these have: see `rm`.
#[test]
fn volumes_of_pruned_containers_stay() {
    let Some(place) = with_volume() else { return };
    let begin = |name: &str| {
        let run = ["run", "--quiet", "-d", "--name", name, "-v", "shared:/shared", "v"];
        let ran =
            place.run_each(&[&run[..], &["--", "sh", "-c", "echo kept > /var/data/new"]].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        place.out(&format!("wait {name}"));
    };
    let files = || {
        let path = |name: String| place.path("store/volumes").join(name).join("data/new");
        names(&place).into_iter().filter(|it| path(it.clone()).exists()).count()
    };
    begin("one");
    assert_eq!((names(&place).len(), files()), (3, 1));
    place.out("container prune --force");
    place.out("system prune --force");
    place.out("gc");
    assert_eq!((names(&place).len(), files(), place.out("ps -aq")), (3, 1, String::new()));
    begin("two");
    place.out("volume rm --force shared");
    place.out("gc");
    assert_eq!((names(&place).len(), files(), place.out("ps -aq")), (4, 2, String::new()));
    // The record of a damaged container does not say which volumes it has; its settings do.
    begin("three");
    fs::write(place.path("store/containers/three/container.json"), "damaged").unwrap();
    place.out("container prune --force");
    assert!(place.path("store/containers/three").exists(), "gc keeps it as well");
    place.out("rm --force three");
    place.out("gc");
    assert_eq!(files(), 3);
    begin("four");
    place.out("rm --volumes four");
    assert_eq!(files(), 3);
    // Also of a running container, which its monitor removes.
    start(&place, &["--name", "five", "-v", "/own"], "echo kept > /own/new; sleep 60");
    wait_for("the file", || files() == 4);
    place.out("rm --force five");
    wait_for("the removal", || !place.path("store/containers/five").exists());
    place.out("gc");
    assert_eq!(files(), 4);
}

/// A container that is not made, or does not start, leaves no volumes behind.
#[test]
fn failed_starts_leave_no_volumes() {
    let Some(place) = with_volume() else { return };
    let _guard = Rm(&place, "taken");
    start(&place, &["--name", "taken"], "sleep 60");
    for line in [
        // The name is taken, which is found after the volumes are made.
        "run --quiet --name taken v true",
        "run --quiet -d --name taken v true",
        "run --quiet -v /own -v named:/n --init --init-path /no/such a true",
        "create --quiet --name taken v true",
        // The runtime does not find the program.
        "run --quiet v /no/such",
        "run --quiet -d --name kept v /no/such",
        "run --quiet -d --name kept -v /own a /no/such",
    ] {
        let ran = place.run(line);
        assert!(ran.code.is_some_and(|it| it >= 125), "{line}: {:?} {}", ran.code, ran.err);
        wait_for("the end", || names(&place).iter().all(|it| it == "named"));
        assert_eq!(ps(&place, "kept"), None, "{line}");
    }
    assert_eq!(names(&place), ["named"]);
}

/// `--replace` keeps the volumes of the container that it removes, and needs them for the new one.
#[test]
fn a_container_with_volumes_is_replaced() {
    let Some(place) = with_volume() else { return };
    let _guard = Rm(&place, "c");
    for text in ["one", "two"] {
        let line = format!("cat /shared/file; echo {text} > /shared/file; sleep 60");
        let options = ["--replace", "--name", "c", "-v", "shared:/shared"];
        let run = ["run", "--quiet", "-d", "-u", "0"];
        let ran = place.run_each(&[&run, &options[..], &["v", "--", "sh", "-c", &line]].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let file = place.path("store/volumes/shared/data/file");
        wait_for("the file", || {
            fs::read_to_string(&file).is_ok_and(|it| it == format!("{text}\n"))
        });
    }
    assert_eq!(place.out("logs c"), "one\n");
    // The volumes of the first container stay, as with `rm`.
    assert_eq!(names(&place).len(), 5);
}
