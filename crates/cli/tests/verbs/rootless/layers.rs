//! Writable layers on the disk of a user's store.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};

use super::fuse::{can_set_apart, user};
use super::{User, tree};
use crate::container_life::runs::{runtimes, wait_for};
use crate::write;

/// Before Linux 6.6, a layer in memory cannot note that a directory of the image is removed. The default layer is
/// on the disk.
#[test]
fn directories_of_the_image_are_removed() {
    let Some(user) = user() else { return };
    let tree = tree(&user);
    crate::add_programs(&tree, &["/bin/rm", "/bin/mv", "/bin/mkdir", "/bin/chown", "/bin/chmod"]);
    for name in ["conf", "usr/share/deep", "moved"] {
        fs::create_dir_all(tree.join(name)).unwrap();
        write(&tree.join(name).join("file"), b"of the image", 0o644);
    }
    user.import(&tree);
    let is_old = !can_set_apart();
    let script = "rm -r conf && mkdir conf && ls conf && rm -rf usr/share && mv moved other && \
                  cat other/file && ls && mkdir d && > d/f && chown 33:33 d && chmod 700 d";
    let shown = |out: &str| out.starts_with("of the image") && !out.contains("moved");
    for runtime in runtimes() {
        let run = |options: &[&str]| {
            let before = ["run", "--via", "fuse", "--runtime", runtime];
            user.run(&[&before[..], options, &["a", "sh", "-c", script]].concat())
        };
        let ran = run(&["--rm"]);
        assert!(ran.code == Some(0) && shown(&ran.out), "{runtime}: {}{}", ran.out, ran.err);
        assert!(!ran.err.contains("Linux 6.6"), "{runtime}: {}", ran.err);
        check_gone(&user);
        let ran = run(&["--rm", "--writable", "memory"]);
        assert_eq!(ran.code == Some(0), !is_old, "{runtime}: {}{}", ran.out, ran.err);
        assert_eq!(ran.err.contains("before Linux 6.6"), is_old, "{runtime}: {}", ran.err);
        // Files on the disk remain after the container's end. They are removed with the container, even if they have
        // other owners.
        assert_eq!(run(&["-d", "--name", "c"]).code, Some(0));
        assert_eq!(user.out(&["wait", "c"]), "0\n");
        let committed = user.run(&["commit", "--quiet", "c", "b"]);
        assert_eq!(committed.code, Some(0), "{runtime}: {}", committed.err);
        assert_eq!(user.out(&["cat", "b:/other/file"]), "of the image");
        user.out(&["rmi", "b"]);
        user.out(&["rm", "c"]);
        check_gone(&user);
    }
}

/// Files of a container's other users are removed with it by any command, and even after processes were killed.
#[test]
fn a_layer_on_the_disk_is_removed_with_its_container() {
    let Some(user) = user() else { return };
    let tree = tree(&user);
    crate::add_programs(&tree, &["/bin/mkdir", "/bin/chown", "/bin/chmod", "/bin/sleep"]);
    user.import(&tree);
    for runtime in runtimes() {
        let start = |name: &str, options: &[&str], program: &str| {
            let script = format!("mkdir d && > d/f && chown 33:33 d && chmod 700 d && {program}");
            let before = ["run", "-d", "--runtime", runtime, "--name", name];
            user.out(&[&before[..], options, &["a", "sh", "-c", &script]].concat());
            let layer = user.home().join(".local/share/quire/containers").join(name).join("layer");
            wait_for("what it writes", || layer.join("upper/d/f").exists());
        };
        let kill_monitor = |name: &str| {
            let state = user.home().join(".local/share/quire/containers").join(name);
            let state = fs::read(state.join("state.json")).unwrap();
            let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
            let monitor = Pid::from_raw(i32::try_from(state["monitor"].as_i64().unwrap()).unwrap());
            kill_process(monitor.unwrap(), Signal::KILL).unwrap();
        };
        start("runs", &[], "sleep 1000");
        start("ended", &[], ":");
        user.out(&["wait", "ended"]);
        user.out(&["rm", "--force", "ended", "runs"]);
        check_gone(&user);
        start("runs", &[], "sleep 1000");
        user.out(&["rm", "--force", "runs"]);
        check_gone(&user);
        for options in [&[][..], &["--rm"]] {
            start("alone", options, "sleep 1000");
            kill_monitor("alone");
            user.out(&["rm", "--force", "alone"]);
            check_gone(&user);
        }
        start("swept", &["--rm"], "sleep 1000");
        kill_monitor("swept");
        user.out(&["ps", "--all"]);
        user.out(&["run", "--rm", "--runtime", runtime, "a", "sh", "-c", ":"]);
        check_gone(&user);
    }
}

/// Checks that containers of a user have left no files after `gc`.
#[track_caller]
fn check_gone(user: &User) {
    user.out(&["gc", "--wait"]);
    let left =
        "cd .local/share/quire && find containers tmp -mindepth 1 -type d ! -name '.*' | head";
    let ran = user.script(left);
    assert_eq!((&*ran.out, &*ran.err), ("", ""));
}

/// Only root of the user's namespace can remove files of other ids, so they remain until a command runs in that
/// namespace.
#[test]
fn what_is_left_of_a_removal_keeps_no_command_from_its_work() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let left = ".local/share/quire/tmp/work-gone-1-1";
    let ran = user.script(&format!(
        "mkdir {left}
         unshare --user --map-auto --map-root-user sh -ec '
             mkdir -p {left}/layer/upper/d; > {left}/layer/upper/d/f
             chown 33:33 {left}/layer/upper/d; chmod 700 {left}/layer/upper/d'
         $Q tag a b && $Q rmi b && $Q import --quiet dir:point c > /dev/null && $Q run --rm --quiet a sh -c :
         echo $?; $Q gc > /dev/null; ls -d {left} 2> /dev/null || echo gone"
    ));
    assert_eq!(ran.out, "0\ngone\n", "{}", ran.err);
}
