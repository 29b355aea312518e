//! `commit`, `snapshot`, and `diff` of a container. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::mounts::Unmount;
use crate::runs::{mounts, runtimes, wait_for};
use crate::writable::{has, is_clean, run};
use crate::{Place, add_programs, is_root};

fn python(arguments: &[&str]) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/verbs/commit.py");
    let output = Command::new("python3").arg(script).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Other programs' names may be no UTF-8; Python shows those as bytes.
    String::from_utf8(output.stdout).unwrap()
}

/// What can be seen of a tree, but for what runtimes mount into it.
fn walk(root: &Path) -> String {
    python(&["walk", root.to_str().unwrap(), "proc", "sys", "dev"])
}

#[track_caller]
fn same(found: &str, expect: &str, what: &str) {
    let (mut one, mut other) = (found.lines(), expect.lines());
    loop {
        match (one.next(), other.next()) {
            (None, None) => return,
            (found, expect) => assert_eq!(found, expect, "{what}"),
        }
    }
}

const SLEEP: &str = "while :; do sleep 1000; done";

/// A store with an image `a` that was made of one layer, `base.tar`.
fn place() -> Option<Place> {
    if !is_root() || !has(&["python3", "tar", "mkfs.ext4"]) {
        return None;
    }
    if runtimes().next().is_none() {
        eprintln!("SKIPPED: no crun and no runc");
        return None;
    }
    let place = Place::new();
    let tree = place.path("tree");
    add_programs(&tree, &["/bin/sh", "/bin/sleep", "/bin/rm", "/bin/mv", "/bin/cat", "/bin/mkdir"]);
    python(&["tree", tree.to_str().unwrap()]);
    tar(&["-cf", place.path("base.tar").to_str().unwrap(), "-C", tree.to_str().unwrap(), "."]);
    place.out("import -q tar:base.tar a");
    Some(place)
}

fn tar(arguments: &[&str]) {
    let options = ["--format=posix", "--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner"];
    run("tar", &[&options, arguments].concat());
}

/// A container that waits, until it is dropped.
struct Waiting<'a>(&'a Place, String);

impl<'a> Waiting<'a> {
    fn start(place: &'a Place, name: &str, options: &[&str], image: &str) -> Self {
        let before = ["run", "-q", "-d", "--name", name, "-u", "0"];
        let after = [image, "--", "sh", "-c", SLEEP];
        let ran = place.run_each(&[&before, options, &after].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        Self(place, name.to_owned())
    }

    /// Its root, as seen from here.
    fn root(&self) -> PathBuf {
        let state = self.0.path(&format!("store/containers/{}/state.json", self.1));
        let state: Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
        PathBuf::from(format!("/proc/{}/root", state["pid"]))
    }

    /// Whether it stands still.
    fn is_paused(&self) -> bool {
        let freezer = format!("/sys/fs/cgroup/freezer/quire-{}/freezer.state", self.1);
        let unified = format!("/sys/fs/cgroup/quire-{}/cgroup.freeze", self.1);
        let is =
            |path: &str, text: &str| fs::read_to_string(path).is_ok_and(|it| it.trim() != text);
        is(&freezer, "THAWED") || is(&unified, "0")
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.run_each(&["rm", "--container", "--force", &self.1]);
    }
}

/// What can be seen of an image, mounted.
fn walk_image(place: &Place, image: &str) -> String {
    let point = place.path("point");
    fs::create_dir_all(&point).unwrap();
    let _guard = Unmount(point.clone());
    place.out(&format!("mount -q --verity off {image} point"));
    let seen = walk(&point);
    place.out("umount point");
    seen
}

fn image_id(place: &Place, name: &str) -> String {
    let shown: Value = serde_json::from_str(&place.out(&format!("show --json {name}"))).unwrap();
    shown["image"].as_str().unwrap().to_owned()
}

/// The layers of an image, by their digests.
fn layers(place: &Place, name: &str) -> Vec<String> {
    let shown = place.out(&format!("show {name}"));
    shown.lines().filter(|it| it.starts_with("layer")).map(str::to_owned).collect()
}

#[test]
fn what_is_committed_is_what_the_container_saw() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("dir")).unwrap();
    let kinds = ["memory", "self,size=200m", "dir=dir"];
    let runtimes: Vec<_> = runtimes().collect();
    for (at, kind) in kinds.iter().enumerate() {
        let runtime = runtimes[at % runtimes.len()];
        let options = ["--writable", kind, "--runtime", runtime];
        let container = Waiting::start(&place, "c", &options, "a");
        let root = container.root();
        python(&["change", root.to_str().unwrap()]);
        let expect = walk(&root);
        place.out("commit -q c b");
        same(&walk_image(&place, "b"), &expect, kind);
        place.out("snapshot -q --force c layer.tar");
        applied_by_others(&place, &expect);
        // What a commit adds is what diff shows.
        let shown = place.run("diff c");
        assert_eq!(shown.code, Some(1));
        assert_eq!(shown.out, place.run("diff a b").out);

        // Once more in the same container, and in one of the new image: one layer more.
        python(&["again", root.to_str().unwrap()]);
        place.out("commit -q c b2");
        same(&walk_image(&place, "b2"), &walk(&root), kind);
        assert_eq!([layers(&place, "b").len(), layers(&place, "b2").len()], [2, 2]);
        assert!(!container.is_paused());
        place.out("snapshot -q --force c layer.tar");
        place.out("stop -t 0 c");
        if *kind == "memory" {
            let ran = place.run("commit c b3");
            assert!(ran.code == Some(2) && ran.err.contains("gone with its end"), "{}", ran.err);
        } else {
            // After its end it is the same.
            place.out("snapshot -q c after.tar");
            assert_eq!(
                fs::read(place.path("layer.tar")).unwrap(),
                fs::read(place.path("after.tar")).unwrap()
            );
            fs::remove_file(place.path("after.tar")).unwrap();
            place.out("commit -q c b3");
            assert_eq!(image_id(&place, "b3"), image_id(&place, "b2"), "{kind}");
        }
        drop(container);

        let container = Waiting::start(&place, "d", &["--runtime", runtime], "b");
        python(&["again", container.root().to_str().unwrap()]);
        let expect = walk(&container.root());
        place.out("commit -q d b4");
        same(&walk_image(&place, "b4"), &expect, kind);
        assert_eq!(layers(&place, "b4").len(), 3);
        drop(container);
    }
    // Who has the layers only has the same image.
    place.out("export -q b4 oci:layout:b4");
    place.out("import -q oci:layout:b4 other");
    assert_eq!(image_id(&place, "other"), image_id(&place, "b4"));
    for name in ["b", "b2", "b4"] {
        place.out(&format!("verify {name}"));
    }
    place.out("gc");
    place.out("fsck");
    wait_for("nothing to be left", || is_clean(&place));
    assert!(!mounts().contains(place.path("").to_str().unwrap()));
}

/// The snapshot on the image's tree, and the image unpacked, by programs of others.
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
        place.out("export -q b oci:unpacked:b");
        let (image, bundle) = (place.path("unpacked"), place.path("bundle"));
        let image = format!("{}:b", image.display());
        run("umoci", &["unpack", "--image", &image, bundle.to_str().unwrap()]);
        // umoci knows no ACLs of tars.
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

/// A config, by the name of an image.
fn config(place: &Place, name: &str) -> Value {
    place.out(&format!("export -q {name} oci:config:x"));
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
    let arguments = ["run", "-q", "-d", "--name", "step", "-u", "0", "a", "--", "sh", "-c", script];
    assert_eq!(place.run_each(&arguments).code, Some(0));
    assert_eq!(place.out("wait step"), "3\n");
    // The image may be gone by its name, and its layers are still needed.
    place.out("rm a");
    place.out("gc");
    let arguments = [
        "commit",
        "-q",
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
    assert_eq!(place.out("run -q built"), "built\n");
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
