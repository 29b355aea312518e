//! `commit`, `export changes:`, and `diff` of a container. Needs root.

use std::fs;
use std::os::unix::fs::{FileExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::container_disk::full::break_promise;
use crate::container_disk::writable::{has, is_clean, loop_devices, plain_ext4, run};
use crate::container_life::runs::{mounts, runtimes, wait_for};
use crate::mounting::mounts::Unmount;
use crate::{Place, add_programs, is_root};

pub(crate) fn python(arguments: &[&str]) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/verbs/container_life/commit.py");
    let python = testing::find_program("python3").expect("the test asked for it");
    let output = Command::new(python).arg(script).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Names may be invalid UTF-8, which Python prints as escaped bytes.
    String::from_utf8(output.stdout).unwrap()
}

/// Returns all visible metadata of a tree, except for the directories into which runtimes mount.
pub(crate) fn walk(root: &Path) -> String {
    python(&["walk", root.to_str().unwrap(), "proc", "sys", "dev", "etc"])
}

#[track_caller]
pub(crate) fn same(found: &str, expect: &str, what: &str) {
    let (mut one, mut other) = (found.lines(), expect.lines());
    loop {
        match (one.next(), other.next()) {
            (None, None) => return,
            (found, expect) => assert_eq!(found, expect, "{what}"),
        }
    }
}

const SLEEP: &str = "while :; do sleep 1000; done";

/// A store with an image `a` that has one layer, `base.tar`.
pub(crate) fn place() -> Option<Place> {
    if !is_root() || !has(&["python3", "tar", "mkfs.ext4"]) {
        return None;
    }
    if runtimes().next().is_none() {
        testing::skipped("crun is not installed");
        return None;
    }
    let place = Place::new();
    let tree = place.path("tree");
    add_programs(&tree, &["/bin/sh", "/bin/sleep", "/bin/rm", "/bin/mv", "/bin/cat", "/bin/mkdir"]);
    python(&["tree", tree.to_str().unwrap()]);
    tar(&["-cf", place.path("base.tar").to_str().unwrap(), "-C", tree.to_str().unwrap(), "."]);
    place.out("import --quiet tar:base.tar a");
    Some(place)
}

pub(crate) fn tar(arguments: &[&str]) {
    let options = ["--format=posix", "--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner"];
    run("tar", &[&options, arguments].concat());
}

/// A container that waits until it is dropped.
pub(super) struct Waiting<'a>(&'a Place, pub(super) String);

impl<'a> Waiting<'a> {
    pub(super) fn start(place: &'a Place, name: &str, options: &[&str], image: &str) -> Self {
        let before = ["run", "--quiet", "-d", "--name", name, "-u", "0"];
        let after = [image, "--", "sh", "-c", SLEEP];
        let ran = place.run_each(&[&before, options, &after].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        Self(place, name.to_owned())
    }

    /// Returns the path of the container's root on the host.
    pub(super) fn root(&self) -> PathBuf {
        let state = self.0.path(&format!("store/containers/{}/state.json", self.1));
        let state: Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
        PathBuf::from(format!("/proc/{}/root", state["pid"]))
    }

    /// Returns whether the container is paused.
    pub(super) fn is_paused(&self) -> bool {
        let is_not = |cgroup: &str, file: &str, text: &str| {
            fs::read_to_string(format!("{cgroup}/{file}")).is_ok_and(|it| it.trim() != text)
        };
        crate::container_life::runs::cgroups(&self.1)
            .iter()
            .any(|it| is_not(it, "freezer.state", "THAWED") || is_not(it, "cgroup.freeze", "0"))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.run_each(&["rm", "--container", "--force", &self.1]);
    }
}

/// Returns all visible metadata of a mounted image.
fn walk_image(place: &Place, image: &str) -> String {
    let point = place.path("point");
    fs::create_dir_all(&point).unwrap();
    let _guard = Unmount(point.clone());
    place.out(&format!("mount --quiet --verity off {image} point"));
    let seen = walk(&point);
    place.out("umount point");
    seen
}

fn image_id(place: &Place, name: &str) -> String {
    let shown: Value = serde_json::from_str(&place.out(&format!("show --json {name}"))).unwrap();
    shown["image"].as_str().unwrap().to_owned()
}

/// Returns the lines about an image's layers, with their digests.
fn layers(place: &Place, name: &str) -> Vec<String> {
    let shown = place.out(&format!("show {name}"));
    shown.lines().filter(|it| it.starts_with("layer")).map(str::to_owned).collect()
}

#[test]
fn what_is_committed_is_what_the_container_saw() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("dir")).unwrap();
    let kinds = ["memory", "self,size=200m", "dir=dir", "dir"];
    let runtimes: Vec<_> = runtimes().collect();
    for (at, kind) in kinds.iter().enumerate() {
        let runtime = runtimes[at % runtimes.len()];
        let options = ["--writable", kind, "--runtime", runtime];
        let container = Waiting::start(&place, "seen", &options, "a");
        let root = container.root();
        python(&["change", root.to_str().unwrap()]);
        let expect = walk(&root);
        place.out("commit --quiet seen b");
        same(&walk_image(&place, "b"), &expect, kind);
        place.out("export --quiet --force seen changes:layer.tar");
        applied_by_others(&place, &expect);
        // A commit adds the same changes that diff shows.
        let shown = place.run("diff seen");
        assert_eq!(shown.code, Some(1));
        assert_eq!(shown.out, place.run("diff a b").out);

        // Commits are made again from the same container, and from a container of the new image, which adds another
        // layer.
        python(&["again", root.to_str().unwrap()]);
        place.out("commit --quiet seen b2");
        same(&walk_image(&place, "b2"), &walk(&root), kind);
        assert_eq!([layers(&place, "b").len(), layers(&place, "b2").len()], [2, 2]);
        assert!(!container.is_paused());
        place.out("export --quiet --force seen changes:layer.tar");
        place.out("stop -t 0 seen");
        if *kind == "memory" {
            let ran = place.run("commit seen b3");
            assert!(
                ran.code == Some(125)
                    && ran.err.contains("was in memory, and was lost when it ended"),
                "{}",
                ran.err
            );
        } else {
            // The changes are the same after the container's end.
            place.out("export --quiet seen changes:after.tar");
            assert_eq!(
                fs::read(place.path("layer.tar")).unwrap(),
                fs::read(place.path("after.tar")).unwrap()
            );
            fs::remove_file(place.path("after.tar")).unwrap();
            place.out("commit --quiet seen b3");
            assert_eq!(image_id(&place, "b3"), image_id(&place, "b2"), "{kind}");
        }
        drop(container);

        let container = Waiting::start(&place, "seen-2", &["--runtime", runtime], "b");
        python(&["again", container.root().to_str().unwrap()]);
        let expect = walk(&container.root());
        place.out("commit --quiet seen-2 b4");
        same(&walk_image(&place, "b4"), &expect, kind);
        assert_eq!(layers(&place, "b4").len(), 3);
        drop(container);
    }
    // An import of the exported layers makes the same image.
    place.out("export --quiet b4 oci:layout:b4");
    place.out("import --quiet oci:layout:b4 other");
    assert_eq!(image_id(&place, "other"), image_id(&place, "b4"));
    for name in ["b", "b2", "b4"] {
        place.out(&format!("verify {name}"));
    }
    place.out("gc");
    place.out("fsck");
    wait_for("nothing to be left", || is_clean(&place));
    assert!(!mounts().contains(place.path("").to_str().unwrap()));
}

/// Applies the exported changes to the image's tree, and unpacks the image, with other programs.
fn applied_by_others(place: &Place, expect: &str) {
    let (tree, layer, base) =
        (place.path("applied"), place.path("layer.tar"), place.path("base.tar"));
    let [tree, layer, base] = [&tree, &layer, &base].map(|it| it.to_str().unwrap());
    for applier in ["python", "tar"] {
        fs::create_dir(tree).unwrap();
        tar(&["-C", tree, "-xpf", base]);
        if applier == "python" {
            python(&["apply", layer, tree]);
        } else {
            python(&["hide", layer, tree]);
            tar(&["-C", tree, "--exclude=.wh.*", "-xpf", layer]);
        }
        same(&walk(Path::new(tree)), expect, applier);
        fs::remove_dir_all(tree).unwrap();
    }
    if has(&["umoci"]) {
        place.out("export --quiet b oci:unpacked:b");
        let (image, bundle) = (place.path("unpacked"), place.path("bundle"));
        let image = format!("{}:b", image.display());
        run("umoci", &["unpack", "--image", &image, bundle.to_str().unwrap()]);
        // umoci ignores ACLs in tars.
        let without_acls = |text: &str| {
            let lines = text.lines().map(|line| match line.find(" ('system.posix_acl") {
                Some(at) => &line[..at],
                None => line,
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        let found =
            without_acls(&walk(&bundle.join("rootfs"))).replace(" ('user.of_directory', b'1')", "");
        same(&found, &without_acls(expect), "umoci");
        fs::remove_dir_all(place.path("unpacked")).unwrap();
        fs::remove_dir_all(bundle).unwrap();
    }
}

/// Returns the config of an image by its name.
fn config(place: &Place, name: &str) -> Value {
    place.out(&format!("export --quiet {name} oci:config:x"));
    let read = |digest: &Value| -> Value {
        let digest = digest.as_str().unwrap().replace(':', "/");
        let blob = place.path("config/blobs").join(digest);
        serde_json::from_slice(&fs::read(blob).unwrap()).unwrap()
    };
    let index: Value =
        serde_json::from_slice(&fs::read(place.path("config/index.json")).unwrap()).unwrap();
    let manifest = read(&index["manifests"][0]["digest"]);
    let config = read(&manifest["config"]["digest"]);
    fs::remove_dir_all(place.path("config")).unwrap();
    config
}

#[test]
fn a_build_step_ends_and_is_committed_with_another_command() {
    let Some(place) = place() else { return };
    let script = "echo built > /made; rm /plain0; exit 3";
    let arguments =
        ["run", "--quiet", "-d", "--name", "step", "-u", "0", "a", "--", "sh", "-c", script];
    assert_eq!(place.run_each(&arguments).code, Some(0));
    assert_eq!(place.out("wait step"), "3\n");
    // The name of the image may be removed, but its layers are still needed.
    place.out("rmi a");
    place.out("gc");
    let arguments = [
        "commit",
        "--quiet",
        "step",
        "built",
        "-m",
        "why",
        "-a",
        "me",
        "-c",
        "CMD [\"cat\", \"/made\"]",
        "-c",
        "ENV A=1 B=\"2 3\"",
        "--change",
        "LABEL x=y",
        "--change",
        "WORKDIR /kept",
    ];
    let ran = place.run_each(&arguments);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(place.out("run --quiet built"), "built\n");
    let config = config(&place, "built");
    assert_eq!(
        config["config"],
        json!({"Cmd": ["cat", "/made"], "Env": ["A=1", "B=2 3"], "Labels": {"x": "y"}, "WorkingDir": "/kept"})
    );
    let history = config["history"].as_array().unwrap();
    assert_eq!((history.len(), config["rootfs"]["diff_ids"].as_array().unwrap().len()), (2, 2));
    assert_eq!(history[1]["comment"], "why");
    assert_eq!(history[1]["author"], "me");
    assert_eq!(history[1]["created_by"], format!("sh -c {script}"));
    let shown = place.run("diff step --json");
    let shown: Value = serde_json::from_str(&shown.out).unwrap();
    let paths: Vec<_> =
        shown.as_array().unwrap().iter().map(|it| (&it["path"], &it["change"])).collect();
    assert_eq!(
        paths,
        [
            (&json!("/"), &json!("changed")),
            (&json!("/made"), &json!("added")),
            (&json!("/plain0"), &json!("removed"))
        ]
    );
    assert_eq!(place.run("diff step:/made").out, "+ /made\n");
}

#[test]
fn hostile_names_and_depths() {
    let Some(place) = place() else { return };
    let container = Waiting::start(&place, "hostile", &[], "a");
    let root = container.root();
    // Sockets are left out, with a remark.
    python(&["socket", root.join("kept/socket").to_str().unwrap()]);
    let ran = place.run("export hostile changes:1.tar");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(
        ran.err.contains("leaving out a socket, which layers cannot contain: /kept/socket"),
        "{}",
        ran.err
    );
    let ran = place.run("export --json hostile changes:2.tar");
    let told: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(told["skipped"], json!(["/kept/socket"]));
    assert_eq!(told["bytes"], fs::metadata(place.path("2.tar")).unwrap().len());
    // Pipes are not opened, so the export does not wait for a writer, and readers of the pipe notice nothing.
    run("mkfifo", &[root.join("kept/pipe").to_str().unwrap()]);
    // A symlink in the place of a directory of the image is exported as a symlink.
    fs::rename(root.join("deep"), root.join("elsewhere")).unwrap();
    symlink("/etc", root.join("deep")).unwrap();
    // The nested directories are longer than any path.
    python(&["nest", root.to_str().unwrap(), "2000", "d"]);
    place.out("commit --quiet hostile b");
    let listed = Command::new("tar").args(["-tf"]).arg(place.path("1.tar")).output().unwrap();
    assert!(listed.status.success());
    assert!(place.out("ls b:/").contains("deep"));
    python(&["nest", root.to_str().unwrap(), "30", &"e".repeat(200)]);
    let ran = place.run("commit hostile b");
    assert!(ran.code == Some(125) && ran.err.contains("more than 4095 bytes"), "{}", ran.err);
    python(&["unnest", root.to_str().unwrap(), &"e".repeat(200)]);
    // A layer cannot hold these names.
    for name in [".wh.file", ".wh..wh..opq", ".wh."] {
        let path = root.join("kept").join(name);
        fs::write(&path, "").unwrap();
        let ran = place.run("commit hostile b");
        let text = format!("\"/kept/{name}\" of the container has a name that marks removed files");
        assert!(ran.code == Some(125) && ran.err.contains(&text), "{}", ran.err);
        fs::remove_file(path).unwrap();
    }
    place.out("commit --quiet hostile b");
    place.out("fsck");
}

/// Like `python`, run as root of the container that has this root.
fn python_inside(root: &Path, arguments: &[&str]) -> String {
    let pid = root.iter().nth(2).unwrap();
    let script = fs::File::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/verbs/container_life/commit.py"
    ));
    let mut command = Command::new("nsenter");
    command.arg("--user").arg("--target").arg(pid).args(["--setuid", "0", "--setgid", "0"]);
    command.args(["python3", "-"]).args(arguments).current_dir("/").stdin(script.unwrap());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn owners_in_a_user_namespace_are_mapped_back() {
    let Some(place) = place() else { return };
    if !has(&["nsenter"]) {
        return;
    }
    for runtime in runtimes() {
        let options = ["--userns", "0:300000:100000", "--runtime", runtime, "--writable"];
        for kind in ["memory", "self"] {
            let container =
                Waiting::start(&place, "mapped", &[&options[..], &[kind]].concat(), "a");
            let root = container.root();
            let path = root.to_str().unwrap();
            python_inside(&root, &["change", path, "mapped"]);
            let expect = python_inside(&root, &["walk", path, "proc", "sys", "dev", "etc"]);
            assert!(expect.contains("b'./plain2' -rw-r--r-- 12 34 "), "{expect}");
            place.out("commit --quiet mapped b");
            same(&walk_image(&place, "b"), &expect, kind);
            if kind == "self" {
                place.out("stop -t 0 mapped");
                place.out("commit --quiet mapped c");
                assert_eq!(image_id(&place, "b"), image_id(&place, "c"));
            }
        }
    }
}

#[test]
fn owners_are_those_that_the_container_sees() {
    let Some(place) = place() else { return };
    let container = Waiting::start(&place, "owned", &["--writable", "memory"], "a");
    let path = place.path("store/containers/owned/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let map = json!([{"containerID": 1000, "hostID": 0, "size": 10}]);
    config["linux"]["uidMappings"] = map.clone();
    config["linux"]["gidMappings"] = map;
    fs::write(&path, config.to_string()).unwrap();
    let file = container.root().join("kept/mine");
    fs::write(&file, "").unwrap();
    chown(&file, Some(2), Some(3)).unwrap();
    place.out("export --quiet owned changes:1.tar");
    let listed =
        Command::new("tar").args(["--numeric-owner", "-tvf"]).arg(place.path("1.tar")).output();
    let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
    let line = listed.lines().find(|it| it.ends_with("kept/mine")).unwrap();
    assert!(line.contains(" 1002/1003 "), "{listed}");
    chown(&file, Some(10), Some(3)).unwrap();
    let ran = place.run("export owned changes:2.tar");
    assert!(ran.err.contains("the owner of \"/kept/mine\": user 10 of the host"), "{}", ran.err);
    assert!(!place.path("2.tar").exists());
}

#[test]
fn what_is_killed_or_damaged_is_told() {
    let Some(place) = place() else { return };
    let container = Waiting::start(&place, "orphan", &["--writable", "self"], "a");
    fs::write(container.root().join("new"), "new").unwrap();
    let state = place.path("store/containers/orphan/state.json");
    let state: Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
    let monitor = i32::try_from(state["monitor"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(monitor).unwrap(), Signal::KILL).unwrap();
    wait_for("its lock to be free", || place.out("ps -a").contains("unwatched"));
    // The kernel unmounted the filestore cleanly when all processes had ended.
    place.out("commit --quiet orphan b");
    assert_eq!(place.out("cat b:/new"), "new");
    let store = place.path("store");
    let is_over = || loop_devices(store.to_str().unwrap()).is_empty();
    wait_for("the loop device to be gone", is_over);
    // Imitate a crash of the host. `s_state` is at 0x3a. Source: the kernel's documentation of ext4's superblock.
    let filestore = place.path("store/containers/orphan/filestore");
    let file = fs::File::options().read(true).write(true).open(&filestore).unwrap();
    file.write_all_at(&[0, 0], 1024 + 0x3a).unwrap();
    drop(file);
    let ran = place.run("diff orphan");
    assert!(ran.code == Some(2) && ran.err.contains("e2fsck -f"), "{}", ran.err);
    if has(&["e2fsck"]) {
        let mended = Command::new("e2fsck").arg("-fy").arg(&filestore).output().unwrap();
        assert!(mended.status.code().unwrap() < 4, "{mended:?}");
        assert!(place.run("diff orphan").out.contains("+ /new"));
    }
    drop(container);
    wait_for("nothing to be left", || is_clean(&place));
}

#[test]
fn what_was_lost_is_not_committed() {
    let Some(place) = place() else { return };
    if !place.is_on_disk() {
        return;
    }
    let (small, _guard) = plain_ext4(&place, "small", 90 << 20, &["-m", "0"]);
    let store = Place::new();
    fs::create_dir(small.join("store")).unwrap();
    symlink(small.join("store"), store.path("store")).unwrap();
    store.out(&format!("import --quiet tar:{} a", place.path("base.tar").display()));
    // The disk with the container's data fails. The flags are on another disk.
    let flags = place.path("flags");
    fs::create_dir(&flags).unwrap();
    let script = "while ! [ -e /flags/go ]; do :; done; cat /dev/zero > /big; echo > /flags/gone; \
                  while ! [ -e /flags/on ]; do :; done; exit 0";
    let volume = format!("--volume={}:/flags", flags.display());
    let command = ["--writable", "self", &volume, "-u", "0", "a", "--", "sh", "-c", script];
    let ran = store.run_each(&[&["run", "--quiet", "-d", "--name", "full"], &command[..]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    break_promise(&small);
    fs::write(flags.join("go"), "").unwrap();
    wait_for("nothing is written", || flags.join("gone").exists());
    // The kernel would do this by itself some seconds later.
    rustix::fs::sync();
    fs::write(flags.join("on"), "").unwrap();
    store.out("wait full");
    let ran = store.run("commit full b");
    assert!(
        ran.code == Some(125) && ran.err.contains("some of its writes are lost"),
        "{}",
        ran.err
    );
    // The test frees the disk space again.
    fs::remove_file(small.join("filler")).unwrap();
    fs::write(small.join("file"), vec![1; 20 << 20]).unwrap();
    fs::remove_file(small.join("file")).unwrap();
    assert!(store.run("logs full").err.contains("was lost while it ran"));
    store.out("rm --container full");
    store.out("fsck");
    wait_for("nothing to be left", || is_clean(&store));
}

/// Source: podman-diff(1).
#[test]
fn differences_of_the_latest_container_are_lists_of_paths() {
    let Some(place) = place() else { return };
    let ran = place.run("diff --latest");
    assert!(ran.code != Some(0) && ran.err.contains("there is no container"), "{}", ran.err);
    place.out("create --name old a sh");
    let container = Waiting::start(&place, "new", &[], "a");
    let script = "mkdir /made && echo x > /made/file && rm /bin/mv";
    assert_eq!(place.run_each(&["exec", "new", "sh", "-c", script]).code, Some(0));
    let lists: Value = serde_json::from_str(&place.out("diff --format json -l")).unwrap();
    assert_eq!(lists["added"], json!(["/made", "/made/file"]));
    assert_eq!(lists["deleted"], json!(["/bin/mv"]));
    assert_eq!(lists["changed"], json!(["/bin"]));
    drop(container);
    assert_eq!(place.out("diff --format json --latest"), "{}\n");
}

#[test]
fn mistakes_are_told() {
    let Some(place) = place() else { return };
    place.out(&format!("import --quiet dir:{} plain", place.path("tree").display()));
    let _plain = Waiting::start(&place, "plain-c", &[], "plain");
    let _fixed = Waiting::start(&place, "fixed", &["--read-only"], "a");
    let _gone = Waiting::start(&place, "gone", &["--writable", "memory"], "a");
    place.out("stop -t 0 gone");
    fs::write(place.path("there"), "mine").unwrap();
    for (line, expect) in [
        ("commit nothing b", "there is no container \"nothing\"\n  `quire ps --all` lists"),
        ("commit pla b", "there is no container \"pla\"\n  did you mean plain-c?"),
        ("logs fxed", "did you mean fixed?"),
        ("commit gone b", "was in memory, and was lost when it ended"),
        ("export gone changes:x", "--writable dir"),
        ("export plain changes:x", "there is no container \"plain\""),
        ("export plain tar:x --no-pause", "needs changes:FILE"),
        ("export plain-c tar:x", "`quire export plain-c changes:FILE` writes its changes"),
        ("export --compression gzip plain-c changes:x", "pipe it into a compressor"),
        ("export --platform linux/amd64 plain-c changes:x", "needs disk:FILE"),
        ("commit fixed b", "read-only"),
        ("commit plain-c b", "its image plain:latest has no layers"),
        ("commit plain-c B!", "is not an image name"),
        ("commit --change RUN plain-c b", "is not one of CMD"),
        ("export plain-c changes:there", "--force overwrites it"),
        ("export --json plain-c changes:-", "name a file"),
        ("diff none", "there is no container"),
        ("diff a", "diff compares two"),
        ("diff --no-pause a a", "cannot be used with"),
        ("diff plain-c:/none", "has \"/none\""),
    ] {
        let ran = place.run(line);
        let is_of_containers = ["commit", "logs"].iter().any(|it| line.starts_with(it));
        let code = if is_of_containers { Some(125) } else { ran.failure() };
        assert_eq!(ran.code, code, "{line}: {}", ran.err);
        assert!(ran.err.contains(expect), "{line}: {}", ran.err);
    }
    assert_eq!(fs::read(place.path("there")).unwrap(), b"mine");
    // Images without layers also have changes.
    place.out("export --force plain-c changes:there");
    assert_eq!(place.run("diff plain-c").code, Some(0));
}
