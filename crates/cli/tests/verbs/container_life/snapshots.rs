//! `snapshot`, `fork`, `rollback` and `run --from`. Needs root.

use std::fs;

use serde_json::Value;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{place, runtimes, wait_for};
use crate::{Place, add_programs};

const PROGRAMS: [&str; 10] = [
    "/bin/ls",
    "/bin/rm",
    "/bin/mv",
    "/bin/mkdir",
    "/bin/chmod",
    "/bin/ln",
    "/bin/chown",
    "/usr/bin/find",
    "/usr/bin/sha256sum",
    "/usr/bin/sort",
];

/// A store whose image `a` has a shell and programs that change files, and a directory `/data`.
pub(super) fn with_programs() -> Option<Place> {
    let place = place()?;
    let tree = place.path("tree");
    add_programs(&tree, &PROGRAMS);
    for name in ["data/old/deep", "data/gone", "data/kept"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    for number in 0..20 {
        fs::write(tree.join(format!("data/old/deep/{number}")), format!("old {number}\n")).unwrap();
        fs::write(tree.join(format!("data/kept/{number}")), "k".repeat(5000)).unwrap();
    }
    fs::write(tree.join("data/gone/file"), "gone\n").unwrap();
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    Some(place)
}

/// Changes of every kind: removed, renamed, changed, metadata alone, links, opaque directories.
const CHANGES: &str = "cd /data && rm -r gone && mkdir gone && echo new > gone/new && mv old renamed && \
    echo more >> renamed/deep/3 && rm renamed/deep/4 && chmod 600 kept/5 && chown 33:44 kept/6 && ln kept/7 kept/seven && \
    ln -s nowhere link && echo x > plain && ln plain hard && mv kept/8 renamed/deep/eight";

/// Lists names, kinds, modes, owners, sizes and contents of everything that a container may have changed.
pub(super) const LISTING: &str = "cd /data && find . ! -type d -printf '%p %y %m %U:%G %s %l %n\\n' -o -printf '%p %y %m %U:%G\\n' | \
    sort && find . -type f -exec sha256sum {} + | sort";

pub(super) fn exec(place: &Place, name: &str, script: &str) -> String {
    let ran = place.run_each(&["exec", "-u", "0", name, "sh", "-c", script]);
    assert_eq!(ran.code, Some(0), "{script}: {}", ran.err);
    ran.out
}

/// Removes containers at the end of a test.
fn guards<'a>(place: &'a Place, names: &'a [String]) -> Vec<Rm<'a>> {
    names.iter().map(|it| Rm(place, it)).collect()
}

pub(super) fn snapshots(place: &Place, options: &str) -> Vec<Value> {
    let listed = place.out(format!("snapshot list --json {options}").trim_end());
    let all: Value = serde_json::from_str(&listed).unwrap();
    all.as_array().unwrap().clone()
}

/// Starts a container that only sleeps, and makes changes of every kind in it. Returns the listing.
pub(super) fn changed(place: &Place, options: &[&str]) -> String {
    start(place, options, "sleep 600");
    let name = options[1];
    exec(place, name, CHANGES);
    let listing = exec(place, name, LISTING);
    assert!(listing.contains("renamed/deep/3") && !listing.contains("gone/file"), "{listing}");
    listing
}

#[test]
fn forks_have_the_root_of_their_parent_and_their_own_changes() {
    let Some(place) = with_programs() else { return };
    for runtime in runtimes() {
        for kind in ["dir", "self,size=64m", "memory"] {
            let parent = format!("parent-{runtime}-{}", &kind[..3]);
            let children: Vec<_> = (1..=3).map(|it| format!("{parent}-child-{it}")).collect();
            let _guards = (Rm(&place, &parent), guards(&place, &children));
            let expect =
                changed(&place, &["--name", &parent, "--runtime", runtime, "--writable", kind]);
            let pattern = format!("{parent}-child-{{}}");
            let hook = "echo $QUIRE_FORK > /number";
            let ran =
                place.run_each(&["fork", "-n", "3", "--name", &pattern, "--hook", hook, &parent]);
            assert_eq!(ran.code, Some(0), "{}", ran.err);
            assert_eq!(ran.out.lines().collect::<Vec<_>>(), children);
            for (child, number) in children.iter().zip(1..) {
                assert_eq!(exec(&place, child, "cat /number"), format!("{number}\n"));
            }
            exec(&place, &parent, "echo parent > /data/plain");
            exec(&place, &children[0], "echo child > /data/plain; rm -r /data/kept");
            assert_eq!(exec(&place, &children[1], LISTING), expect, "{runtime} {kind}");
            assert_eq!(exec(&place, &children[0], "cat /data/plain"), "child\n");
            assert_eq!(exec(&place, &parent, "cat /data/plain"), "parent\n");
            assert_eq!(exec(&place, &children[2], "cat /data/hard"), "x\n");
            // The second generation has the changes of the first one as well.
            let grandchild = format!("{parent}-grandchild");
            let _guard = Rm(&place, &grandchild);
            exec(&place, &children[1], "mv /data/renamed /data/again; rm /data/again/deep/3");
            let expect = exec(&place, &children[1], LISTING);
            place.out(&format!("fork --name {grandchild} {}", children[1]));
            assert_eq!(exec(&place, &grandchild, LISTING), expect, "{runtime} {kind}");
            assert_eq!(exec(&place, &grandchild, "cat /number"), "2\n");
        }
    }
    place.out("fsck");
    // The snapshots are not needed any more.
    place.out("gc");
    assert_eq!(snapshots(&place, "--all"), Vec::<Value>::new());
}

#[test]
fn a_container_goes_back_and_keeps_its_settings() {
    let Some(place) = with_programs() else { return };
    fs::create_dir(place.path("volume")).unwrap();
    let volume = format!("{}:/volume", place.path("volume").display());
    for runtime in runtimes() {
        for kind in ["dir", "self,size=64m", "memory"] {
            let name = format!("back-{runtime}-{}", &kind[..3]);
            let _guard = Rm(&place, &name);
            let options = ["--name", &name, "--runtime", runtime, "--writable", kind];
            let more = ["-e", "VALUE=set", "--hostname", "box", "-v", &volume];
            let expect = changed(&place, &[&options[..], &more].concat());
            let before = ps(&place, &name).unwrap();
            assert_eq!(
                place.out(&format!("snapshot create {name} first-{name}")),
                format!("first-{name}\n")
            );
            exec(&place, &name, "rm -r /data; echo later > /volume/file");
            assert_eq!(place.out(&format!("snapshot create {name}")), format!("{name}-1\n"));
            let ran = place.run(&format!("rollback --time 0 {name} first-{name}"));
            assert_eq!((ran.code, ran.out), (Some(0), format!("{name}\n")), "{}", ran.err);
            assert_eq!(exec(&place, &name, LISTING), expect, "{runtime} {kind}");
            assert_eq!(exec(&place, &name, "echo $VALUE; cat /volume/file"), "set\nlater\n");
            let after = ps(&place, &name).unwrap();
            assert_eq!(after["status"], "running");
            assert_ne!(after["pid"], before["pid"]);
            // By default to the newest, which is of the time without the directory.
            place.out(&format!("rollback --time 0 {name}"));
            assert!(place.run_each(&["exec", &name, "ls", "/data"]).code != Some(0));
            // A container at rest stays at rest.
            place.out(&format!("stop --time 0 {name}"));
            place.out(&format!("rollback {name} first-{name}"));
            assert_eq!(ps(&place, &name).unwrap()["status"], "exited");
            place.out(&format!("start {name}"));
            assert_eq!(exec(&place, &name, LISTING), expect, "{runtime} {kind}");
            // Snapshots can be removed in any order, and the data below the container stays.
            place.out(&format!("snapshot rm first-{name} {name}-1"));
            assert_eq!(exec(&place, &name, LISTING), expect, "{runtime} {kind}");
            assert_eq!(snapshots(&place, ""), Vec::<Value>::new());
            assert_eq!(snapshots(&place, "--all").len(), 1);
            place.out(&format!("rollback --time 0 --image {name}"));
            assert_eq!(exec(&place, &name, "cat /data/gone/file"), "gone\n");
            place.out(&format!("rm --force {name}"));
            fs::remove_file(place.path("volume/file")).unwrap();
        }
    }
    place.out("gc");
    assert_eq!(snapshots(&place, "--all"), Vec::<Value>::new());
    place.out("fsck");
}

/// The files of a snapshot belong to ids of the host, which must not become those of an unrelated container, also after
/// the container is gone of which it was taken.
#[test]
fn ids_of_a_snapshot_are_not_given_to_others() {
    let Some(place) = with_programs() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let _guards = ["mapped", "other", "child"].map(|it| Rm(&place, it));
    let ids = |name: &str| {
        let folder = place.path("store/containers").join(name);
        fs::read_to_string(folder.join(container::folder::USERNS)).unwrap()
    };
    let options = ["--runtime", runtime, "--userns", "auto,size=1000"];
    start(&place, &[&["--name", "mapped"][..], &options].concat(), "echo x > /mine; sleep 600");
    wait_for("the file", || place.run_each(&["exec", "mapped", "cat", "/mine"]).code == Some(0));
    let own = ids("mapped");
    place.out("snapshot create mapped point");
    place.out("rm --force mapped");
    wait_for("its end", || !place.path("store/containers/mapped").exists());
    start(&place, &[&["--name", "other"][..], &options].concat(), "sleep 600");
    assert_ne!(ids("other"), own);
    let child =
        ["run", "--quiet", "-d", "--name", "child", "--runtime", runtime, "--from", "point"];
    let ran = place.run_each(&[&child[..], &["--", "sh", "-c", "sleep 600"]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(ids("child"), own);
    let ran =
        place.run_each(&["exec", "-u", "0", "child", "sh", "-c", "test -O /mine && cat /mine"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "x\n"), "{}", ran.err);
}

#[test]
fn run_begins_with_a_snapshot() {
    let Some(place) = with_programs() else { return };
    let _guard = Rm(&place, "source");
    let expect = changed(&place, &["--name", "source"]);
    place.out("snapshot create source point");
    place.out("rm --force source");
    let ran = place.run_each(&["run", "-u", "0", "--from", "point", "--", "sh", "-c", LISTING]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), &*expect), "{}", ran.err);
    let ran =
        place.run_each(&["run", "-u", "0", "--read-only", "--from", "point", "sh", "-c", LISTING]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), &*expect), "{}", ran.err);
    // The image of a snapshot stays.
    place.out("rmi a");
    place.out("gc");
    let ran = place.run_each(&["run", "-u", "0", "--from", "point", "--", "sh", "-c", LISTING]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), &*expect), "{}", ran.err);
    let ran = place.run("run --from none -- true");
    assert!(ran.code == Some(125) && ran.err.contains("none"), "{}", ran.err);
    place.out("snapshot rm point");
    place.out("gc");
    assert!(place.run("run --from point -- true").code != Some(0));
}

#[test]
fn commit_and_diff_see_the_changes_of_a_chain() {
    let Some(place) = with_programs() else { return };
    let _guards = ["chain", "other"].map(|it| Rm(&place, it));
    // `commit` needs an image with layers.
    let file = place.path("a.tar");
    place.out(&format!("export --quiet a tar:{}", file.display()));
    place.out(&format!("import --quiet tar:{} a", file.display()));
    changed(&place, &["--name", "chain"]);
    place.out("snapshot create chain");
    place.out("rollback --time 0 chain");
    exec(
        &place,
        "chain",
        "mv /data/renamed /data/third; rm /data/kept/1; echo z > /data/third/deep/z",
    );
    let expect = exec(&place, "chain", LISTING);
    let diff = place.run("diff chain").out;
    for line in ["+ /data/third", "+ /data/gone/new", "- /data/kept/1", "- /data/old"] {
        assert!(diff.contains(line), "{line}: {diff}");
    }
    place.out("commit chain committed");
    let ran = place.run_each(&["run", "-u", "0", "committed", "--", "sh", "-c", LISTING]);
    let without_links = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(without_links(&ran.out), without_links(&expect), "{}", ran.err);
}

#[test]
fn a_long_chain_is_merged() {
    let Some(place) = with_programs() else { return };
    let _guard = Rm(&place, "long");
    changed(&place, &["--name", "long"]);
    for round in 0..18 {
        // Numbers 3 and 4 have changed already.
        let (moved, removed) = (round % 2 + 10 + round / 2, round / 2);
        let change = format!(
            "cd /data; echo {round} > round-{round}; mv renamed/deep/{moved} kept/r{round}; rm -f round-{removed}"
        );
        let _some_are_gone = place.run_each(&["exec", "-u", "0", "long", "sh", "-c", &change]);
        let expect = exec(&place, "long", LISTING);
        place.out("snapshot create long");
        place.out("rollback --time 0 long");
        assert_eq!(exec(&place, "long", LISTING), expect, "{round}");
    }
    let all = snapshots(&place, "--all");
    assert!(all.iter().any(|it| it["below"].is_null() && it["name"] == "long-17"), "{all:?}");
}

/// The writers replace files by `rename`, append lines, and store through a mapping; each line and each file is whole
/// in every fork.
#[test]
fn snapshots_have_whole_writes() {
    let Some(place) = with_programs() else { return };
    let _guard = Rm(&place, "busy");
    // Each generation writes two files with the same number; the second one comes later.
    let script = "mkdir /w; i=0; while :; do i=$((i+1)); echo $i > /w/.new; mv /w/.new /w/first; \
        echo line $i of the log >> /w/log; echo $i > /w/.new; mv /w/.new /w/second; done";
    start(&place, &["--name", "busy"], script);
    wait_for("the writer", || {
        place.run_each(&["exec", "busy", "cat", "/w/second"]).code == Some(0)
    });
    for round in 0..testing::rounds(10) {
        let point = format!("point-{round}");
        place.out(&format!("snapshot create busy {point}"));
        let read = "cat /w/first /w/second; cat /w/log";
        let ran = place.run_each(&["run", "-u", "0", "--from", &point, "--", "sh", "-c", read]);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let mut lines = ran.out.lines();
        let first: u64 = lines.next().unwrap().parse().unwrap();
        let second: u64 = lines.next().unwrap().parse().unwrap();
        assert!(first == second || first == second + 1, "{first} {second}");
        let count = lines.clone().count() as u64;
        assert!(count == first || count + 1 == first, "{count} {first}");
        for (line, number) in lines.zip(1..) {
            assert_eq!(line, format!("line {number} of the log"));
        }
    }
}

#[test]
fn what_cannot_be_is_told() {
    let Some(place) = with_programs() else { return };
    let _guards = ["told", "gone", "fixed"].map(|it| Rm(&place, it));
    start(&place, &["--name", "told"], "sleep 600");
    let check = |line: &str, expect: &str| {
        let ran = place.run(line);
        assert!(ran.code != Some(0) && ran.err.contains(expect), "{line}: {} {}", ran.out, ran.err);
    };
    check("snapshot create", "quire snapshot create CONTAINER");
    check("snapshot create none", "none");
    check("snapshot create told -x", "-x");
    check("snapshot rm", "quire snapshot list");
    check("snapshot rm none", "none");
    check("rollback told", "quire snapshot create told");
    check("rollback told none", "none");
    check("fork --name told told", "already exists");
    check("fork -n 0 told", "0");
    place.out("snapshot create told one");
    check("snapshot create told one", "one");
    // These names are refused before the changes are copied, which these containers do not have.
    start(&place, &["--name", "fixed", "--read-only"], "sleep 600");
    check("snapshot create fixed", "read-only");
    check("snapshot create fixed a/b", "is not a name of a snapshot");
    check("snapshot create fixed one", "another snapshot has the name one");
    start(&place, &["--name", "gone", "--rm"], "sleep 600");
    check("rollback gone one", "removed when it ends");
    check("fork --from one gone", "is of container told");
    let listed = place.out("snapshot list");
    assert!(listed.contains("SNAPSHOT") && listed.contains("one"), "{listed}");
    assert_eq!(place.out("snapshot list -q"), "one\n");
    let found = &snapshots(&place, "told")[0];
    assert_eq!((&found["name"], &found["container"]), (&"one".into(), &"told".into()));
    wait_for("the snapshot to be on the disk", || snapshots(&place, "told")[0]["durable"] == true);
    // Another container, of another image, gets the name.
    place.out("rm --force told");
    wait_for("its end", || !place.path("store/containers/told").exists());
    let tree = place.path("tree");
    fs::write(tree.join("data/more"), "").unwrap();
    place.out(&format!("import --quiet dir:{} b", tree.display()));
    let ran =
        place.run_each(&["run", "--quiet", "-d", "--name", "told", "b", "sh", "-c", "sleep 600"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    exec(&place, "told", "echo mine > /mine");
    check("rollback --time 0 told", "has no snapshot");
    check("rollback --time 0 told one", "quire run --from one");
    check("fork --from one told", "earlier container");
    assert_eq!(exec(&place, "told", "cat /mine"), "mine\n");
    // A container without a monitor keeps running.
    let monitor = fs::read(place.path("store/containers/told/state.json")).unwrap();
    let monitor: Value = serde_json::from_slice(&monitor).unwrap();
    let monitor = i32::try_from(monitor["monitor"].as_i64().unwrap()).unwrap();
    let monitor = rustix::process::Pid::from_raw(monitor).unwrap();
    rustix::process::kill_process(monitor, rustix::process::Signal::KILL).unwrap();
    wait_for("the end of its monitor", || ps(&place, "told").unwrap()["status"] == "unwatched");
    check("snapshot create told", "monitor");
    assert_eq!(exec(&place, "told", "cat /mine"), "mine\n");
}

/// Returns the first column of `ps`, without the title.
fn tree(place: &Place, options: &str) -> Vec<String> {
    let shown = place.out(format!("ps --tree {options}").trim_end());
    let column = |line: &str| line.split(" a:latest").next().unwrap().trim_end().to_owned();
    shown.lines().skip(1).map(column).collect()
}

#[test]
fn forks_are_shown_below_their_origins() {
    let Some(place) = with_programs() else { return };
    let names = ["origin", "one-1", "one-2", "a", "b", "other"];
    let _guards = names.map(|it| Rm(&place, it));
    for name in ["origin", "other"] {
        start(&place, &["--name", name], "sleep 600");
    }
    place.out("fork -n 2 --name one origin");
    place.out("fork --name a one-1");
    place.out("snapshot create one-1 point");
    let from = ["run", "--quiet", "-d", "--name", "b", "--from", "point", "--", "sleep", "600"];
    assert_eq!(place.run_each(&from).code, Some(0));
    // Containers of the same second are sorted by name.
    let whole = ["origin", "├─ one-1", "│  ├─ a", "│  └─ b", "└─ one-2", "other"];
    assert_eq!(tree(&place, ""), whole);
    let origins = ["origin", "one-1", "a", "b", "other"].map(|it| {
        let found = ps(&place, it).unwrap();
        assert_eq!(found["snapshot"].is_null(), found["origin"].is_null(), "{it}");
        found["origin"].as_str().map(str::to_owned)
    });
    let origins = origins.each_ref().map(Option::as_deref);
    assert_eq!(origins, [None, Some("origin"), Some("one-1"), Some("one-1"), None]);
    // A container that does not run is not shown, but its forks are.
    place.out("stop --time 0 one-1");
    let found = tree(&place, "");
    assert!(!found.iter().any(|it| it.contains("one-1")), "{found:?}");
    assert!(found.iter().any(|it| it == "├─ a" || it == "└─ a"), "{found:?}");
    assert!(tree(&place, "--all").iter().any(|it| it.ends_with("one-1")));
    // A container with the name of a removed one is no origin.
    place.out("rm --force origin");
    wait_for("its end", || !place.path("store/containers/origin").exists());
    std::thread::sleep(std::time::Duration::from_secs(1));
    start(&place, &["--name", "origin"], "sleep 600");
    assert!(tree(&place, "").contains(&"one-2".to_owned()));
    assert_eq!(ps(&place, "one-2").unwrap()["origin"], "origin");
}

#[test]
fn the_last_container_takes_its_state_with_it() {
    let Some(place) = with_programs() else { return };
    let _guards = ["origin", "child", "grandchild"].map(|it| Rm(&place, it));
    start(&place, &["--name", "origin"], "sleep 600");
    place.out("fork --name child origin");
    place.out("fork --name grandchild child");
    let count = || snapshots(&place, "--all").len();
    assert_eq!(count(), 2);
    place.out("rm --force child");
    assert_eq!(count(), 2);
    place.out("rm --force grandchild");
    wait_for("the snapshots to be removed", || count() == 0);
    // A snapshot with a name stays, and one that lost its name goes with the container.
    place.out("snapshot create origin named");
    place.out("snapshot create origin other");
    place.out("rollback --time 0 origin other");
    place.out("snapshot rm other");
    assert_eq!(count(), 2);
    place.out("rollback --time 0 --image origin");
    wait_for("the snapshot to be removed", || count() == 1);
    place.out("rm --force origin");
    assert_eq!(snapshots(&place, "")[0]["name"], "named");
    place.out("fsck");
}

#[test]
fn a_container_goes_back_only_to_its_own_snapshots() {
    let Some(place) = with_programs() else { return };
    let _guards = ["own", "odd"].map(|it| Rm(&place, it));
    start(&place, &["--name", "own"], "sleep 600");
    exec(&place, "own", "echo old > /old");
    place.out("snapshot create own old");
    place.out("rm --force own");
    wait_for("its end", || !place.path("store/containers/own").exists());
    // Times of creation have whole seconds.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    for name in ["own", "odd"] {
        start(&place, &["--name", name], "sleep 600");
        exec(&place, name, &format!("echo {name} > /name"));
    }
    // Without a name, the snapshot of an earlier container is not taken, although it fits.
    let ran = place.run("rollback --time 0 own");
    assert!(ran.code != Some(0) && ran.err.contains("has no snapshot"), "{}", ran.err);
    assert_eq!(exec(&place, "own", "cat /name"), "own\n");
    // A snapshot may have the id of another one as its name.
    place.out("snapshot create own new");
    let all = snapshots(&place, "");
    let id = all.iter().find(|it| it["name"] == "new").unwrap()["snapshot"].as_str().unwrap();
    place.out(&format!("snapshot create odd {id}"));
    place.out("rollback --time 0 own");
    assert_eq!(exec(&place, "own", "cat /name"), "own\n");
    // A snapshot that was chosen by its name is one of the container's from then on.
    place.out("snapshot rm new");
    place.out("rollback --time 0 own old");
    exec(&place, "own", "rm /old");
    place.out("rollback --time 0 own");
    assert_eq!(exec(&place, "own", "cat /old"), "old\n");
}

#[test]
fn a_snapshot_whose_name_cannot_be_printed_gets_to_the_disk() {
    let Some(place) = with_programs() else { return };
    let _guard = Rm(&place, "web");
    start(&place, &["--name", "web"], "sleep 600");
    let full = fs::File::create("/dev/full").unwrap();
    let status = place.command(&["snapshot", "create", "web"]).stdout(full).status().unwrap();
    assert!(!status.success());
    wait_for("the snapshot to be on the disk", || snapshots(&place, "web")[0]["durable"] == true);
}

/// Such a snapshot may be gone after a crash, so no changes are removed for it.
#[test]
fn a_rollback_to_a_snapshot_that_the_disk_did_not_write_stops_nothing() {
    let Some(place) = with_programs() else { return };
    let _guard = Rm(&place, "web");
    start(&place, &["--name", "web"], "sleep 600");
    exec(&place, "web", "echo mine > /mine");
    place.out("snapshot create web one");
    wait_for("the snapshot to be on the disk", || snapshots(&place, "web")[0]["durable"] == true);
    let before = ps(&place, "web").unwrap();
    let id = snapshots(&place, "web")[0]["snapshot"].as_str().unwrap().to_owned();
    let path = place.path("store/container-snapshots").join(id).join("snapshot.json");
    let record = fs::read_to_string(&path).unwrap();
    let mut record: Value = serde_json::from_str(record.lines().next().unwrap()).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    record["boot"] = format!("{} failed", boot.trim()).into();
    let line = format!("{record}\n");
    let check = store::Digest::sha256(line.as_bytes());
    fs::write(&path, format!("{line}{check}\n")).unwrap();
    let ran = place.run("rollback --time 0 web one");
    assert!(ran.code != Some(0) && ran.err.contains("quire commit"), "{}", ran.err);
    let after = ps(&place, "web").unwrap();
    assert_eq!((&after["status"], &after["pid"]), (&"running".into(), &before["pid"]));
    assert_eq!(exec(&place, "web", "cat /mine"), "mine\n");
}

/// The commands that list snapshots remove nothing.
#[test]
fn a_container_that_is_removed_at_its_end_takes_its_state_with_it() {
    let Some(place) = with_programs() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let _guards = ["source", "front", "behind"].map(|it| Rm(&place, it));
    let program = testing::find_program(runtime).unwrap();
    fs::create_dir(place.path("bin")).unwrap();
    let copy = place.path("bin").join(runtime);
    fs::copy(program, &copy).unwrap();
    let path = copy.to_str().unwrap();
    start(&place, &["--name", "source", "--runtime", path], "sleep 600");
    let count = || snapshots(&place, "--all").len();
    let runs = |name: &str| ps(&place, name).is_some_and(|it| it["status"] == "running");

    place.out("snapshot create source point");
    let new = ["run", "--quiet", "--runtime", runtime, "--from", "point", "--name"];
    let command = ["--", "sh", "-c", "read line"];
    let mut front = place.command(&[&new[..], &["front"], &command].concat());
    let mut front = front.stdin(std::process::Stdio::piped()).spawn().unwrap();
    wait_for("the start", || runs("front"));
    place.out("snapshot rm point");
    assert_eq!(count(), 1);
    drop(front.stdin.take());
    front.wait().unwrap();
    wait_for("the snapshot to be removed", || count() == 0);

    place.out("snapshot create source point");
    let ran = place.run_each(&[&new[..], &["behind", "-d", "--rm", "--", "sleep", "600"]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    place.out("snapshot rm point");
    assert_eq!(count(), 1);
    place.out("stop --time 0 behind");
    wait_for("the snapshot to be removed", || count() == 0);

    // A fork that does not start needs no snapshot.
    let away = place.path("away");
    fs::rename(&copy, &away).unwrap();
    wait_for("the snapshot of the fork to be removed", || {
        let ran = place.run("fork --name child source");
        assert!(ran.code != Some(0), "{}", ran.out);
        count() == 0
    });
    fs::rename(&away, &copy).unwrap();
    place.out("rm --force source");
    place.out("fsck");
}
