//! `--userns`: a container's users are other users on the host. Needs root.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::container_life::containers::{Rm, ps, start, superblock};
use crate::container_life::runs::{place, runtimes, wait_for};
use crate::mounting::mounts::Unmount;
use crate::{Place, write};

/// Returns a POSIX ACL that lets one more user read. Source: Linux `include/uapi/linux/posix_acl_xattr.h`.
pub(crate) fn acl(user: u32) -> Vec<u8> {
    const NOBODY: u32 = u32::MAX;
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, NOBODY), (2, 4, user), (4, 0, NOBODY), (0x10, 4, NOBODY), (0x20, 0, NOBODY)];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// `CAP_CHOWN`, effective. Source: Linux `include/uapi/linux/capability.h`, `VFS_CAP_REVISION_2`.
const CAN_CHOWN: [u32; 5] = [0x0200_0001, 1, 0, 0, 0];

pub(crate) fn set(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(path, name, value, XattrFlags::empty()).unwrap();
}

/// A place with an image with files of several owners.
fn with_owners() -> Option<Place> {
    let place = place()?;
    let tree = place.path("tree");
    crate::add_programs(&tree, &["/bin/ls", "/bin/chown", "/bin/df"]);
    for (name, user, group) in [("mine", 0, 0), ("theirs", 1000, 1001), ("far", 300_000, 0)] {
        write(&tree.join(name), b"text\n", 0o644);
        chown(tree.join(name), Some(user), Some(group)).unwrap();
    }
    write(&tree.join("listed"), b"listed\n", 0o600);
    set(&tree.join("listed"), "system.posix_acl_access", &acl(1000));
    fs::copy("/bin/cat", tree.join("bin/capable")).unwrap();
    let capability = CAN_CHOWN.map(u32::to_le_bytes).concat();
    set(&tree.join("bin/capable"), "security.capability", &capability);
    place.out(&format!("import --quiet dir:{} owners", tree.display()));
    // Only root can pass through the folder above the store.
    fs::set_permissions(place.folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    Some(place)
}

fn run_in(place: &Place, runtime: &str, options: &[&str], script: &str) -> String {
    let before = ["run", "--quiet", "--runtime", runtime];
    let ran = place.run_each(&[&before, options, &["owners", "--", "sh", "-c", script]].concat());
    assert_eq!(ran.code, Some(0), "{runtime} {options:?}: {} {}", ran.out, ran.err);
    ran.out
}

/// crun changes the owner of a program's standard streams to the program's user, which must not happen to files of
/// the host.
#[test]
fn files_of_the_host_keep_their_owner_as_standard_streams() {
    let Some(place) = place() else { return };
    fs::write(place.path("input"), "said\n").unwrap();
    let owner = |path: &Path| fs::metadata(path).map(|it| (it.uid(), it.gid())).unwrap();
    let null = Path::new("/dev/null");
    let before = owner(null);
    let users: [&[&str]; 4] = [
        &["--userns", "0:700000:65536"],
        &["--user", "5:6"],
        &[],
        &["--userns", "0:700000:65536", "--user", "5:6"],
    ];
    for (runtime, user) in runtimes().flat_map(|it| users.map(|user| (it, user))) {
        let name = format!("streams-{runtime}-{}", std::process::id());
        let _guard = Rm(&place, &name);
        let map = [&["--runtime", runtime], user].concat();
        let output = place.path("output");
        let file = fs::File::create(&output).unwrap();
        // The file belongs to another user, as if root's container wrote to a user's log.
        std::os::unix::fs::chown(&output, Some(1234), Some(1235)).unwrap();
        let status = place
            .command(&[&["run", "--quiet"], &map[..], &["a", "--", "cat"]].concat())
            .stdin(fs::File::open(place.path("input")).unwrap())
            .stdout(file.try_clone().unwrap())
            .stderr(std::process::Stdio::null())
            .status();
        assert_eq!(status.unwrap().code(), Some(0), "{runtime} {user:?}");
        assert_eq!(fs::read_to_string(&output).unwrap(), "said\n", "{runtime} {user:?}");
        let owners = (owner(&output), owner(&place.path("input")));
        assert_eq!(owners, ((1234, 1235), (0, 0)), "{runtime} {user:?}");
        place.out(&format!("run -d --name {name} {} a -- sleep 60", map.join(" ")));
        place.out(&format!("exec {name} true"));
        place.out(&format!("exec --user 7:8 {name} true"));
        for stream in ["in", "out", "err"] {
            fs::write(place.path(stream), "").unwrap();
        }
        let open =
            |stream: &str| fs::File::options().read(true).write(true).open(place.path(stream));
        let status = place
            .command(&["exec", "--user", "7:8", &name, "sh", "-c", "echo out; echo err >&2"])
            .stdin(open("in").unwrap())
            .stdout(open("out").unwrap())
            .stderr(open("err").unwrap())
            .status();
        assert_eq!(status.unwrap().code(), Some(0), "{runtime} {user:?}");
        for (stream, text) in [("in", ""), ("out", "out\n"), ("err", "err\n")] {
            assert_eq!(fs::read_to_string(place.path(stream)).unwrap(), text, "{runtime} {user:?}");
            assert_eq!(owner(&place.path(stream)), (0, 0), "{runtime} {user:?} {stream}");
        }
        place.out(&format!("rm --force {name}"));
        assert_eq!(owner(null), before, "{runtime} {user:?}");
    }
}

#[test]
fn owners_are_mapped_and_what_is_written_lands_with_ids_of_the_host() {
    let Some(place) = with_owners() else { return };
    for runtime in runtimes() {
        let upper = place.path(&format!("upper-{runtime}"));
        fs::create_dir(&upper).unwrap();
        let dir = format!("dir={}", upper.display());
        let map = ["--userns", "0:500000:65536", "--writable", &dir];
        let script = "cat /proc/self/uid_map; cd /; ls -ln mine theirs far; echo new > new; echo 1 > etc/two; \
                      chown 5:6 etc/two; echo more >> theirs; chown 7 mine; cat listed; echo > far";
        let refused = format!("({script}) 2>&1; exit 0");
        let out = run_in(&place, runtime, &map, &refused);
        let words: Vec<Vec<&str>> = out.lines().map(|it| it.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["0", "500000", "65536"]);
        let owners = |line: &[&str]| (line[2].to_owned(), line[3].to_owned(), line[8].to_owned());
        let expect = [("65534", "0", "far"), ("0", "0", "mine"), ("1000", "1001", "theirs")];
        for (line, (user, group, name)) in words[1..].iter().zip(expect) {
            assert_eq!(owners(line), (user.into(), group.into(), name.into()), "{out}");
        }
        assert!(out.contains("\nlisted\n"), "{out}");
        // A program cannot become a user that is not in the map.
        assert!(out.contains("cannot create far"), "{out}");
        let owner = |path: &str| {
            let found = fs::symlink_metadata(upper.join("upper").join(path)).unwrap();
            (found.uid(), found.gid())
        };
        let expect = [
            (".", (500_000, 500_000)),
            ("new", (500_000, 500_000)),
            ("etc/two", (500_005, 500_006)),
            ("theirs", (501_000, 501_001)),
            ("mine", (500_007, 500_000)),
        ];
        for (path, ids) in expect {
            assert_eq!(owner(path), ids, "{runtime} {path}");
        }
        assert_eq!(fs::metadata(upper.join("work")).unwrap().uid(), 0);
        // With the same map, the layer can be used again. With another map, the owners would be wrong.
        assert_eq!(
            run_in(&place, runtime, &map, "cat /new; ls -ln /new | (read a b u g x; echo $u $g)"),
            "new\n0 0\n"
        );
        for other in [&["--userns", "0:600000:65536"][..], &[]] {
            let more = ["run", "--quiet", "--writable", &dir];
            let ran = place.run_each(&[&more, other, &["owners", "--", "true"]].concat());
            assert_eq!(ran.code, Some(125));
            assert!(ran.err.contains("--uidmap 0:500000:65536"), "{}", ran.err);
        }
    }
    // The image is unchanged.
    place.out("verify owners");
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn rights_of_an_image_hold_for_the_users_of_the_container() {
    let Some(place) = with_owners() else { return };
    for runtime in runtimes() {
        for writable in ["memory", "none"] {
            let options = |user| ["--userns", "auto", "--writable", writable, "-u", user];
            // The ACL names user 1000 of the image.
            assert_eq!(run_in(&place, runtime, &options("1000:5"), "cat /listed"), "listed\n");
            let other = run_in(&place, runtime, &options("1001:5"), "cat /listed || echo no");
            assert_eq!(other, "no\n");
            // File capabilities of a program belong to the container's root.
            let script = "capable /proc/self/status";
            let status = run_in(&place, runtime, &options("1000:5"), script);
            assert!(status.contains("CapEff:\t0000000000000001\n"), "{status}");
        }
        // When the file is copied up, its ACL is mapped.
        let script = "echo more >> /listed; cat /listed";
        let out = run_in(&place, runtime, &["--userns", "auto", "-u", "0"], script);
        assert_eq!(out, "listed\nmore\n");
    }
    let point = place.path("point");
    fs::create_dir(&point).unwrap();
    let _guard = Unmount(point.clone());
    place.out("mount --quiet --userns 0:500000:65536 --writable memory owners point");
    for _ in 0..2 {
        let mut value = [0; 64];
        let name = "system.posix_acl_access";
        let length = rustix::fs::getxattr(point.join("listed"), name, &mut value[..]).unwrap();
        assert_eq!(value[..length], acl(501_000));
        // Repeat the check with the file in the upper layer.
        fs::File::options().append(true).open(point.join("listed")).unwrap();
    }
    place.out("umount point");
}

/// Returns the first id on the host of a container's users and groups, and the number of ids.
fn range(place: &Place, name: &str) -> (u64, u64) {
    let config = place.path(&format!("store/containers/{name}/config.json"));
    let config: Value = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
    let map = &config["linux"]["uidMappings"];
    assert_eq!(map.as_array().unwrap().len(), 1);
    assert_eq!(map[0]["containerID"], 0);
    (map[0]["hostID"].as_u64().unwrap(), map[0]["size"].as_u64().unwrap())
}

#[test]
fn auto_gives_every_container_ids_of_its_own() {
    let Some(place) = place() else { return };
    let names = ["ns-one", "ns-two", "ns-three", "ns-four"];
    let _guards = names.map(|name| Rm(&place, name));
    let script = "echo up >> /dev/stdout; while :; do sleep 0.05; done";
    // All start at the same time; one has fewer ids.
    std::thread::scope(|scope| {
        for name in names {
            let who = if name == "ns-two" { "auto,size=1000" } else { "auto,size=2000" };
            let place = &place;
            scope.spawn(move || start(place, &["--name", name, "--userns", who], script));
        }
    });
    let mut ranges = names.map(|name| range(&place, name));
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{ranges:?}");
    }
    let mut sizes = ranges.map(|(_, size)| size);
    sizes.sort_unstable();
    assert_eq!(sizes, [1000, 2000, 2000, 2000]);
    for name in names {
        // A program may open its own output.
        wait_for("what it wrote", || place.out(&format!("logs {name}")) == "up\n");
        let ran = place.run_each(&["exec", name, "cat", "/proc/self/uid_map"]);
        let numbers: Vec<u64> = ran.out.split_whitespace().map(|it| it.parse().unwrap()).collect();
        let (first, size) = range(&place, name);
        assert_eq!(numbers, [0, first, size], "{}", ran.err);
        let ran = place.run_each(&["exec", "-u", "5:6", name, "id", "-u"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "5\n"), "{}", ran.err);
        let ran = place.run_each(&["exec", "-u", "2000", name, "id"]);
        let expect = "user 2000 is not in its map";
        assert!(ran.code == Some(125) && ran.err.contains(expect), "{}", ran.err);
    }
    // The ids of a dead container are free, even if it was killed.
    let state = fs::read(place.path("store/containers/ns-one/state.json")).unwrap();
    let state: Value = serde_json::from_slice(&state).unwrap();
    let pid = i32::try_from(state["monitor"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait_for("its lock to be free", || ps(&place, "ns-one").unwrap()["status"] == "unwatched");
    let was = ranges.map(|(first, _)| first);
    place.out("stop --time 0 ns-two");
    let dead = [range(&place, "ns-one").0, range(&place, "ns-two").0];
    for name in ["ns-one", "ns-two"] {
        place.out(&format!("rm --force {name}"));
        start(&place, &["--name", name, "--userns", "auto,size=9"], script);
        let (first, _) = range(&place, name);
        assert!(first <= *dead.iter().max().unwrap(), "{first} of {was:?}");
    }
    assert_eq!(place.run("fsck").code, Some(0));
}

#[test]
fn mapped_containers_share_the_superblock_with_others() {
    let Some(place) = place() else { return };
    let _guards = ["ns-plain", "ns-mapped"].map(|name| Rm(&place, name));
    let script = "while :; do sleep 0.05; done";
    start(&place, &["--name", "ns-mapped", "--userns", "auto"], script);
    if crate::container_life::containers::is_before_shared_mounts() {
        return;
    }
    start(&place, &["--name", "ns-plain"], script);
    assert_eq!(superblock(&place, "ns-plain"), superblock(&place, "ns-mapped"));
    let ran = place.run_each(&["exec", "ns-plain", "ls", "-ldn", "/etc/short"]);
    assert!(ran.code != Some(0) || ran.out.contains(" 0 0 "), "{}", ran.out);
}

#[test]
fn everything_else_works_in_a_user_namespace() {
    let Some(place) = with_owners() else { return };
    fs::create_dir(place.path("host")).unwrap();
    write(&place.path("host/open"), b"open\n", 0o644);
    write(&place.path("host/closed"), b"closed\n", 0o600);
    let volume = format!("{}:/v", place.path("host").display());
    for runtime in runtimes() {
        // The path to the volume is also accessible.
        let options = ["--userns", "auto", "--volume", &volume];
        let out = run_in(&place, runtime, &options, "cat /v/*; echo > /v/new; exit 0");
        assert_eq!(out, "open\n", "{runtime}");
        assert!(!place.path("host/new").exists());
        let map = run_in(&place, runtime, &options, "cat /proc/self/uid_map");
        let numbers: Vec<u64> = map.split_whitespace().map(|it| it.parse().unwrap()).collect();
        assert!(numbers[0] == 0 && numbers[1] >= 65_536 && numbers[2] == 65_536, "{map}");
        let options = ["--userns", "auto", "--network", "host"];
        let script = "for d in /sys/fs/cgroup /sys/fs/cgroup/*; do test -e $d/cgroup.procs || continue; \
                      echo > $d/quire-test && exit 9; done; ls /sys/kernel > /dev/null";
        run_in(&place, runtime, &options, script);
        if Path::new("/etc/resolv.conf").exists() {
            let out = run_in(&place, runtime, &options, "cat /etc/resolv.conf");
            assert_eq!(out, fs::read_to_string("/etc/resolv.conf").unwrap());
        }
        // This map lacks the group of terminals.
        let out = run_in(
            &place,
            runtime,
            &["--uidmap", "0:500000:3", "--gidmap", "0:600000:2"],
            "cat /proc/self/uid_map /proc/self/gid_map",
        );
        let numbers: Vec<&str> = out.split_whitespace().collect();
        assert_eq!(numbers, ["0", "500000", "3", "0", "600000", "2"]);
        // As in `containers`, the runtime's own threads count as well.
        let options = ["--userns", "auto", "--pids-limit", "40"];
        let forks = crate::container_life::containers::FORKS;
        let ran = place.run_each(
            &[
                &["run", "--quiet", "--runtime", runtime],
                &options[..],
                &["owners", "--", "sh", "-c", forks],
            ]
            .concat(),
        );
        assert!(ran.err.to_lowercase().contains("fork"), "{runtime}: {}", ran.err);
        let ran = place.run_each(&[
            "run",
            "--quiet",
            "--runtime",
            runtime,
            "--userns",
            "auto",
            "owners",
            "--",
            "no-such",
        ]);
        assert_eq!(ran.code, Some(127), "{}", ran.err);
    }
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn a_map_that_cannot_be_is_refused_by_name() {
    let Some(place) = place() else { return };
    let cases: [(&[&str], &str); 10] = [
        (&["--userns", "keep-id"], "leave this out"),
        (&["--userns", "0:1000:10,5:3000:10"], "0:1000:10 and 5:3000:10 overlap"),
        (&["--userns", "0:1000:0"], "0:1000:0 is empty"),
        (&["--userns", "0:4294967000:65536"], "exceeds the last id"),
        (&["--userns", "1:1000:10"], "lacks id 0 of the container"),
        (&["--userns", "auto,size=4294967295"], "consecutive free ids"),
        (&["--userns", "auto", "--uidmap", "0:1:1"], "cannot be used with"),
        (&["--uidmap", "0:1:1,"], "is not a range of ids"),
        (&["--userns", "0:1000:10", "-u", "10"], "user 10 is not in its map"),
        (&["--userns", "0:1000:10", "-u", "1:99"], "group 99 is not in its map"),
    ];
    for (options, expect) in cases {
        let ran = place.run_each(&[&["run", "--quiet"], options, &["a", "--", "true"]].concat());
        assert_eq!(ran.code, Some(125), "{options:?}: {}", ran.err);
        assert!(ran.err.contains(expect), "{options:?}: {}", ran.err);
    }
    for (line, expect) in [
        ("mount --userns auto a tree", "--userns auto works only with `run`"),
        ("bundle --userns auto a b", "--userns auto works only with `run`"),
        ("mount --userns 1:1:5 --writable memory a tree", "belongs to user 0 and group 0"),
    ] {
        let ran = place.run(line);
        assert!(ran.code == Some(2) && ran.err.contains(expect), "{line}: {}", ran.err);
    }
    assert_eq!(place.run("run --quiet --userns host a -- true").code, Some(0));
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn a_bundle_says_its_map_and_has_a_root_of_its_owners() {
    let Some(place) = with_owners() else { return };
    let bundle = place.path("b").display().to_string();
    let _guard = Unmount(place.path("b/rootfs"));
    let maps = ["--uidmap", "0:500000:10,10:700000:2000", "--gidmap", "0:600000:65536"];
    let mount = ["--mount", "type=memory,dst=/m,size=1m"];
    let ran =
        place.run_each(&[&["bundle"], &maps[..], &mount, &["owners", &bundle, "true"]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("cannot traverse"), "{}", ran.err);
    let config: Value =
        serde_json::from_slice(&fs::read(place.path("b/config.json")).unwrap()).unwrap();
    let users = serde_json::json!([{"containerID": 0, "hostID": 500_000, "size": 10},
                                   {"containerID": 10, "hostID": 700_000, "size": 2000}]);
    assert_eq!(config["linux"]["uidMappings"], users);
    assert_eq!(config["linux"]["gidMappings"][0]["hostID"], 600_000);
    let namespaces = config["linux"]["namespaces"].as_array().unwrap();
    assert!(namespaces.contains(&serde_json::json!({"type": "user"})));
    let mounts = config["mounts"].as_array().unwrap();
    assert!(mounts.iter().any(|it| it["destination"] == "/m" && it["type"] == "tmpfs"));
    for (name, ids) in [("mine", (500_000, 600_000)), ("theirs", (700_990, 601_001))] {
        let found = fs::metadata(place.path("b/rootfs").join(name)).unwrap();
        assert_eq!((found.uid(), found.gid()), ids, "{name}");
    }
    place.out(&format!("umount {bundle}/rootfs"));
}

#[test]
fn a_limit_of_namespaces_is_no_full_disk() {
    let Some(place) = place() else { return };
    if crate::program("unshare").is_none() {
        testing::skipped("unshare is not installed");
        return;
    }
    // The limit applies to the user namespace in which it is set.
    let script = "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$@\"";
    let mut command = std::process::Command::new("unshare");
    command.args(["--user", "--map-root-user", "sh", "-c", script, "sh"]);
    command.arg(env!("CARGO_BIN_EXE_quire")).arg("--store").arg(place.path("store")).arg("doctor");
    let ran = crate::Ran::from_output(&command.output().unwrap());
    let row = ran.out.lines().find(|it| it.contains("user-namespaces"));
    let row = row.unwrap_or_else(|| panic!("{} {}", ran.out, ran.err));
    assert!(row.contains("the limit is reached"), "{row}");
}
