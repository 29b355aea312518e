//! Snapshots, forks and rollbacks of a user's containers, which can be frozen only in a delegated cgroup.

use serde_json::Value;

use super::{User, tree};
use crate::container_life::runs::{runtimes, wait_for};

fn snapshots(user: &User) -> Vec<String> {
    let all = user.out(&["snapshot", "list", "--all", "--json"]);
    let all: Value = serde_json::from_str(&all).unwrap();
    all.as_array().unwrap().iter().map(|it| it["name"].to_string()).collect()
}

#[test]
fn a_user_takes_snapshots_of_stopped_containers() {
    for has_ids in [true, false] {
        let Some(user) = User::new(has_ids) else { return };
        user.import(&tree(&user));
        for runtime in runtimes() {
            let new = ["create", "--quiet", "--runtime", runtime, "--name", "base"];
            user.out(&[&new[..], &["a", "sh", "-c", "exec sleep 1000"]].concat());
            user.out(&["start", "base"]);
            let exec = |name: &str, script: &str| user.out(&["exec", name, "sh", "-c", script]);
            exec(
                "base",
                "echo one > new; echo changed > large; umask 077; echo deep > etc/deep/file",
            );
            if has_ids {
                user.out(&["exec", "--user", "me", "base", "sh", "-c", "echo mine > theirs"]);
            }
            let read = "cat new large etc/deep/file; find new large theirs -printf '%U %m %s\\n'";
            let expect = exec("base", read);
            assert!(expect.starts_with("one\nchanged\ndeep\n0 644 4\n"), "{expect}");
            for words in [&["snapshot", "create", "base"][..], &["fork", "base"]] {
                let ran = user.run(words);
                assert!(ran.code != Some(0), "{words:?}");
                for part in ["no cgroup was delegated", "quire stop base", "quire start base"] {
                    assert!(ran.err.contains(part), "{words:?}: {}", ran.err);
                }
            }
            assert_eq!(snapshots(&user), Vec::<String>::new());
            assert_eq!(exec("base", "cat new"), "one\n");
            user.out(&["stop", "--time", "0", "base"]);
            assert_eq!(user.out(&["snapshot", "create", "base", "point"]), "point\n");
            let from = ["run", "--quiet", "--rm", "--from", "point", "--", "sh", "-c", read];
            assert_eq!(user.out(&from), expect, "{runtime} {has_ids}");
            let forked = user.out(&["fork", "-n", "2", "--name", "child", "base"]);
            assert_eq!(forked, "child-1\nchild-2\n");
            exec("child-1", "echo other > new");
            assert_eq!(exec("child-2", read), expect, "{runtime} {has_ids}");
            user.out(&["start", "base"]);
            exec("base", "echo two > new; echo > large");
            assert_eq!(user.out(&["rollback", "--time", "0", "base", "point"]), "base\n");
            assert_eq!(exec("base", read), expect, "{runtime} {has_ids}");
            let listed = user.out(&["ps", "--tree"]);
            assert!(listed.contains("├─ child-1") && listed.contains("└─ child-2"), "{listed}");
            user.out(&["rm", "--force", "base", "child-1", "child-2"]);
            assert_eq!(snapshots(&user), ["\"point\""], "{runtime} {has_ids}");
            user.out(&["snapshot", "rm", "point"]);
            assert_eq!(snapshots(&user), Vec::<String>::new());
            // Files of other ids are removed as well.
            let left = || {
                let folder = user.home().join(".local/share/quire/tmp");
                let left = std::fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
                left.filter(|it| it.is_dir()).count()
            };
            wait_for("the files of the snapshots to be removed", || left() == 0);
        }
        user.out(&["fsck"]);
    }
}
