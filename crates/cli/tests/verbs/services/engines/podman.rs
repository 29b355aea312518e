//! podman, which has no snapshotters: it runs containers from a mounted root.

use super::*;

#[test]
fn podman_runs_containers_from_a_mounted_root() {
    if !is_root() || testing::program("runc").is_none() {
        return;
    }
    let Some(podman) = testing::program("podman") else { return };
    let place = EnginePlace(Place::new());
    let EnginePlace(place) = &place;
    if !place.is_on_disk() {
        return;
    }
    let tree = place.tree("tree", "long ");
    add_programs(&tree, &["/bin/cat", "/bin/sh"]);
    place.out(&format!("import dir:{} tree", tree.display()));
    fs::create_dir(place.path("root")).unwrap();
    place.out("mount -o suid,dev tree root");
    let root = format!("{}:O", place.path("root").display());
    let run = |words: &[&str]| {
        let mut command = Command::new(&podman);
        command.arg("--root").arg(place.path("podman")).arg("--runroot").arg(place.path("run"));
        command.args(["run", "--rm", "--runtime", "runc", "--network", "none"]);
        // The limits of this test cannot be raised.
        command.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
        let ran =
            Ran::from_output(&command.args(["--rootfs", &root]).args(words).output().unwrap());
        assert_eq!(ran.code, Some(0), "{words:?}: {}", ran.err);
        ran.out
    };
    assert_eq!(run(&["cat", "/etc/short"]), "short\n");
    // Changes go to podman's own layer, and are removed with the container.
    let write = "echo new > /etc/short; cat /etc/short";
    assert_eq!(run(&["sh", "-c", write]), "new\n");
    assert_eq!(run(&["cat", "/etc/short"]), "short\n");
    assert_eq!(fs::read_to_string(place.path("root/etc/short")).unwrap(), "short\n");
    place.out("umount root");
}
