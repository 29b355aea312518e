//! Volumes of a user's containers, and containers that share a network.

use super::fuse::user;
use super::tree;
use crate::container_life::runs::runtimes;

/// The files of a volume belong to ids of the user's range, which other containers and `volume rm` have as well.
#[test]
fn volumes_of_a_user_outlive_its_containers() {
    let Some(user) = user() else { return };
    let tree = tree(&user);
    crate::add_programs(&tree, &["/bin/chown"]);
    user.import(&tree);
    for runtime in runtimes() {
        let run = |options: &[&str], script: &str| {
            let before = ["run", "--rm", "--quiet", "--via", "fuse", "--runtime", runtime];
            user.run(&[&before[..], options, &["a", "sh", "-c", script]].concat())
        };
        let script = "echo x > /data/file && chown 33:34 /data/file && echo x > /own/file";
        let ran = run(&["-v", "data:/data", "-v", "/own"], script);
        assert_eq!(ran.code, Some(0), "{runtime}: {}{}", ran.out, ran.err);
        let ran = run(&["-u", "33", "-v", "data:/data"], "echo y >> /data/file; cat /data/file");
        assert_eq!(ran.out, "x\ny\n", "{runtime}: {}", ran.err);
        // Files of the image keep their owners, and :U changes them.
        let ran = run(&["-v", "etc:/etc", "-v", "data:/data:U", "-u", "7:8"], "ls -ln /data/file");
        assert!(
            ran.out.contains(" 7 ") && ran.out.contains(" 8 "),
            "{runtime}: {}{}",
            ran.out,
            ran.err
        );
        assert_eq!(user.out(&["volume", "ls", "-q"]), "data\netc\n", "{runtime}");
        user.out(&["volume", "rm", "data", "etc"]);
        let left = user.home().join(".local/share/quire/volumes");
        assert_eq!(std::fs::read_dir(left).unwrap().count(), 0, "{runtime}");
    }
}

/// Only the namespace of the other container has rights over its network.
#[test]
fn containers_of_a_user_share_a_network() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    for runtime in runtimes() {
        let options = ["--via", "fuse", "--runtime", runtime];
        let show = ["ls", "-l", "/proc/self/ns/net"];
        let namespace = |out: &str| out.rsplit("net:").next().unwrap_or_default().to_owned();
        let run = |more: &[&str]| {
            user.run(&[&["run", "--quiet"], &options[..], more, &["a"], &show].concat())
        };
        let start = ["run", "--quiet", "-d", "--name", "db"];
        user.out(&[&start, &options[..], &["a", "sleep", "100"]].concat());
        let of_db = namespace(&user.out(&[&["exec", "db"], &show[..]].concat()));
        let ran = run(&["--network", "container:db"]);
        assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        assert_eq!(namespace(&ran.out), of_db, "{runtime}");
        assert_ne!(namespace(&run(&[]).out), of_db, "{runtime}");
        user.out(&["rm", "--force", "db"]);
    }
}
