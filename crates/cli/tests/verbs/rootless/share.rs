//! A store that root shares with users.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{USER, User, tree};
use crate::Ran;
use crate::container_life::runs::wait_for;

/// A user, and a store of root with an image `a`.
fn with_store() -> Option<User> {
    let user = User::new(true)?;
    let tree = tree(&user);
    user.place.out(&format!("import --quiet --form objects dir:{} a", tree.display()));
    Some(user)
}

fn own(user: &User) -> String {
    user.home().join(".local/share/quire").display().to_string()
}

/// Runs quire with both stores.
fn with_both(user: &User, words: &[&str]) -> Ran {
    let (own, roots) = (own(user), user.place.path("store").display().to_string());
    user.run(&[&["--store", &own, "--image-store", &roots], words].concat())
}

fn out(user: &User, words: &[&str]) -> String {
    let ran = with_both(user, words);
    assert_eq!(ran.code, Some(0), "{words:?}: {}", ran.err);
    ran.out
}

/// In a user namespace, the host's root has no id. The kernel shows file capabilities only if root of the namespace,
/// or of an ancestor, has set them. Source: capabilities(7), "Namespaced file capabilities".
#[test]
fn a_shared_image_is_mounted_in_a_user_namespace() {
    let Some(user) = with_store() else { return };
    let roots = user.place.path("store");
    user.place.out("share");
    let mark = roots.join("shared");
    let mount = || {
        let (own, roots) = (own(&user), roots.display().to_string());
        let quire = format!("$Q --quiet --store {own} --image-store {roots}");
        user.script(&format!(
            "mkdir -p point
             unshare --user --map-auto --map-root-user --mount sh -ec \"
                 {quire} mount a point; cat point/theirs; $Q umount point\""
        ))
    };
    let ran = mount();
    assert_eq!((ran.code, &*ran.out), (Some(0), "theirs"), "{}", ran.err);
    let set = |value: &[u8]| {
        let set = rustix::fs::XattrFlags::empty();
        rustix::fs::lsetxattr(&mark, "security.capability", value, set).unwrap();
    };
    let refused = |case: &str| {
        let ran = mount();
        let is_told = ran.err.contains("does not prove that the host's root shares it");
        assert!(ran.code != Some(0) && is_told, "{case}: {} {}", ran.out, ran.err);
    };
    // A mark with two hard links could also be the mark of another store.
    let link = user.place.path("link");
    fs::hard_link(&mark, &link).unwrap();
    refused("two names");
    fs::remove_file(&link).unwrap();
    // The mark is set as if root of another user's namespace had set it, with the id of that root. Source: Linux
    // `include/uapi/linux/capability.h`, `struct vfs_ns_cap_data`.
    let of_other = [&[0, 0, 0, 3][..], &[0; 16], &64_002_u32.to_le_bytes()].concat();
    set(&of_other);
    refused("of another user's namespace");
    rustix::fs::lremovexattr(&mark, "security.capability").unwrap();
    refused("without a proof");
    user.place.out("share");
    assert_eq!(mount().code, Some(0), "shared once more");
    // A store that another user can change is refused, even with the mark.
    fs::set_permissions(roots.join("objects"), fs::Permissions::from_mode(0o777)).unwrap();
    let ran = mount();
    assert!(ran.code != Some(0) && ran.err.contains("others can change it"), "{}", ran.err);
}

#[test]
fn users_run_what_root_shares() {
    let Some(user) = with_store() else { return };
    let ran = with_both(&user, &["run", "a", "true"]);
    assert!(ran.code == Some(125) && ran.err.contains("is not shared with you"), "{}", ran.err);
    user.place.out("share");

    let noise = String::from_utf8_lossy(&testing::noise(300_000)).into_owned();
    for via in ["tree", "fuse", "fuse-objects"] {
        let ran = out(&user, &["run", "--via", via, "a", "sh", "-c", "cat large; id -u"]);
        assert!(ran == format!("{noise}0\n"), "{via}");
    }
    // No data of the image was copied.
    let store = user.home().join(".local/share/quire");
    let is_empty = |name: &str| fs::read_dir(store.join(name)).unwrap().next().is_none();
    assert!(is_empty("images") && is_empty("manifests"));
    let shards = fs::read_dir(store.join("objects")).unwrap();
    assert!(shards.map(|it| fs::read_dir(it.unwrap().path()).unwrap().count()).sum::<usize>() == 0);

    let listed: Value = serde_json::from_str(&out(&user, &["images", "--json"])).unwrap();
    assert_eq!(listed[0]["name"], "a:latest");
    assert_eq!(listed[0]["shared"], user.place.path("store").to_str().unwrap());
    assert!(out(&user, &["ls", "a:/etc"]).contains("passwd"));
    assert_eq!(out(&user, &["cat", "a:/theirs"]), "theirs");
    assert!(out(&user, &["verify", "a"]).contains("sound"));
    let ran = with_both(&user, &["tag", "a", "b"]);
    assert!(ran.err.contains("it is in the shared store"), "{}", ran.err);

    out(&user, &["run", "--detach", "--name", "c", "a", "sleep", "100"]);
    out(&user, &["exec", "c", "sh", "-c", "echo mine > /mine"]);
    let ran = with_both(&user, &["diff", "c"]);
    assert!(ran.code == Some(1) && ran.out.contains("+ /mine"), "{} {}", ran.out, ran.err);
    let file = user.home().join("changes.tar").display().to_string();
    out(&user, &["export", "c", &format!("changes:{file}")]);
    let ran = with_both(&user, &["commit", "c", "mine"]);
    assert!(
        ran.code == Some(125) && ran.err.contains("needs its layers in this store"),
        "{}",
        ran.err
    );
    // `fsck` and `gc` accept a container whose image is in another store.
    out(&user, &["gc"]);
    assert!(out(&user, &["fsck"]).contains("sound"));
    // An image in the user's own store takes precedence.
    let tar = user.place.path("tree.tar");
    let mut pack = Command::new("tar");
    pack.arg("-cf").arg(&tar).arg("-C").arg(user.place.path("tree")).arg("etc");
    assert!(pack.status().unwrap().success());
    out(&user, &["import", "--quiet", &format!("tar:{}", tar.display()), "a"]);
    assert!(with_both(&user, &["cat", "a:/theirs"]).code != Some(0));
    out(&user, &["rm", "--force", "c"]);

    // Root's store is found without an option.
    let roots = user.place.path("store");
    let prepare = format!(
        "mount -t tmpfs tmpfs /var/lib && mkdir /var/lib/quire && mount --bind {} /var/lib/quire",
        roots.display()
    );
    let quire = user.place.path("quire").display().to_string();
    let ran = user.call_after(&prepare, &[&quire, "rmi", "a"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let ran = user.call_after(&prepare, &[&quire, "run", "a", "cat", "theirs"]);
    assert_eq!(ran.out, "theirs", "{}", ran.err);

    user.place.out("share --undo");
    let ran = user.call_after(&prepare, &[&quire, "run", "--pull", "never", "a", "true"]);
    assert!(ran.code == Some(125) && ran.err.contains("there is no image"), "{}", ran.err);
}

#[test]
fn what_a_user_runs_stays_in_the_store() {
    let Some(user) = with_store() else { return };
    user.place.out("share");
    for via in ["tree", "fuse"] {
        out(&user, &["run", "--detach", "--via", via, "--name", "c", "a", "sleep", "100"]);
        user.place.out("rmi a");
        assert!(user.place.out("gc").contains("is mounted or open"), "{via}");
        let noise = String::from_utf8_lossy(&testing::noise(300_000)).into_owned();
        assert!(out(&user, &["exec", "c", "cat", "large"]) == noise, "{via}");
        out(&user, &["rm", "--force", "c"]);
        let mut freed = String::new();
        wait_for("its end", || {
            freed = user.place.out("gc");
            !freed.contains("is mounted or open")
        });
        let images = fs::read_dir(user.place.path("store/images")).unwrap();
        assert_eq!(images.count(), 0, "{via}: {freed}");
        let tree = user.place.path("tree").display().to_string();
        user.place.out(&format!("import --quiet --form objects dir:{tree} a"));
    }
}

/// A user may lock every file of the store that the user may open.
#[test]
fn no_user_holds_up_the_owner_of_a_shared_store() {
    let Some(user) = with_store() else { return };
    user.place.out("share");
    let store = user.place.path("store");
    let script = "
        cd \"$1\" && find . -name '[0-9a-f][0-9a-f]' -prune -o -print 2> /dev/null | while read -r it; do
            flock --exclusive --nonblock \"$it\" sleep 1000 2> /dev/null &
        done
        : > \"$HOME/locked\"; wait
    ";
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &USER.to_string(), "--regid", &USER.to_string(), "--clear-groups"]);
    command.args(["setsid", "sh", "-c", script, "sh"]).arg(&store).env("HOME", user.home());
    let mut locker = command.stdin(Stdio::null()).spawn().unwrap();
    wait_for("locks", || user.home().join("locked").exists());
    std::thread::sleep(Duration::from_millis(300));

    let tree = user.place.path("tree");
    fs::write(tree.join("more"), testing::noise(100_000)).unwrap();
    let since = Instant::now();
    let (sender, done) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            user.place.out(&format!("import --quiet --form objects dir:{} b", tree.display()));
            user.place.out(&format!("import --quiet --form packed dir:{} c", tree.display()));
            user.place.out("tag b d");
            user.place.out("rmi b");
            // Other users are not blocked either.
            assert_eq!(out(&user, &["cat", "a:/theirs"]), "theirs");
            let gc = user.place.run("gc");
            sender.send((gc.code, gc.err)).unwrap();
        });
        let ended = done.recv_timeout(Duration::from_secs(60));
        let id = i32::try_from(locker.id()).unwrap();
        let group = rustix::process::Pid::from_raw(id).unwrap();
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
        let (code, err) = ended.expect("the owner waits for a user");
        assert_eq!(code, Some(0), "{err}");
        // The message names the user who blocks the command.
        assert!(err.contains("another user keeps") && err.contains("lslocks"), "{err}");
    });
    locker.wait().unwrap();
    assert!(since.elapsed() > Duration::from_secs(1), "nothing was locked");
}

#[test]
fn only_images_are_shared() {
    let Some(user) = with_store() else { return };
    let store = user.place.path("store");
    let tree = user.place.path("tree").display().to_string();
    user.place.out(&format!("import --quiet --form packed dir:{tree} packed"));
    let mode = |name: &str| fs::metadata(store.join(name)).unwrap().mode() & 0o7777;
    user.place.out("share");
    for name in ["containers", "tmp"] {
        assert_eq!(mode(name), 0o700, "{name}");
    }
    assert_eq!(mode("gc.lock"), 0o600);
    for name in ["", "refs", "data", "images", "objects"] {
        assert_eq!(mode(name), 0o755, "{name}");
    }
    // Commands that write keep the modes, and images of each form can be used.
    user.place.out("tag packed more");
    assert_eq!((mode(""), mode("refs"), mode("data")), (0o755, 0o755, 0o755));
    assert_eq!(out(&user, &["run", "packed", "cat", "theirs"]), "theirs");
    // A deliberately shared store causes no warning.
    let ran = user.place.run("images");
    assert!(!ran.err.contains("others can read"), "{}", ran.err);
    // Sharing again has no effect.
    user.place.out("share");
    user.place.out("share --undo");
    for name in ["", "refs", "data"] {
        assert_eq!(mode(name), 0o700, "{name}");
    }
    assert!(!store.join("shared").exists());
    user.place.out("share --undo");
}

/// A store of a third user could change while its images are used.
#[test]
fn a_store_of_another_user_is_not_used() {
    let Some(user) = with_store() else { return };
    user.place.out("share");
    let store = user.place.path("store");
    chown(&store, Some(USER + 1), Some(USER + 1)).unwrap();
    let ran = with_both(&user, &["run", "a", "true"]);
    assert!(ran.err.contains("belongs to user 64002"), "{}", ran.err);
    chown(&store, Some(0), Some(0)).unwrap();
    fs::set_permissions(&store, fs::Permissions::from_mode(0o777)).unwrap();
    let ran = with_both(&user, &["run", "a", "true"]);
    assert!(ran.err.contains("mode 0777") && ran.err.contains("chmod go-w"), "{}", ran.err);
    fs::set_permissions(&store, fs::Permissions::from_mode(0o755)).unwrap();
    // Now only a part of the store belongs to another user.
    chown(store.join("objects"), Some(USER + 1), Some(USER + 1)).unwrap();
    let ran = with_both(&user, &["run", "a", "true"]);
    assert!(
        ran.code == Some(125) && ran.err.contains("objects belongs to user 64002"),
        "{}",
        ran.err
    );
    chown(store.join("objects"), Some(0), Some(0)).unwrap();
    // A user cannot share root's store.
    let ran = user.run(&["--store", store.to_str().unwrap(), "share"]);
    assert!(ran.code == Some(2) && ran.err.contains("only root "), "{}", ran.err);
}
