//! Test suites of other projects for file systems, on roots of users' containers: tests that fail there must also
//! fail on a plain tmpfs of the same container.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use super::{USER, User};
use crate::{add_programs, write};

/// Tests with a character device differ from tmpfs: the suite makes the device with the number 0, which is
/// overlayfs's mark of a removed file. docs/containers.md documents this.
const DIFFERENT: &str = "::char";

/// Optional tests of the suite, for all features of Linux.
const SETTINGS: &str = "
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.01
[dummy_auth]
entries = [[\"nobody\", \"nobody\"], [\"tests\", \"tests\"]]
";

fn pjdfstest() -> Option<PathBuf> {
    testing::built("pjdfstest-0.2.2", "pjdfstest", "pjdfstest")
}

/// A user with an image that has the suite.
fn user_with_suite(program: &Path) -> Option<User> {
    let user = User::new(true)?;
    let tree = user.place.path("suite");
    add_programs(&tree, &[program.to_str().unwrap()]);
    fs::rename(tree.join(program.strip_prefix("/").unwrap()), tree.join("pjdfstest")).unwrap();
    fs::create_dir_all(tree.join("etc")).unwrap();
    let names = [("root", 0), ("nobody", 65_534), ("tests", 1000)];
    let passwd = names.map(|(name, id)| format!("{name}:x:{id}:{id}::/:/\n")).concat();
    let group = names.map(|(name, id)| format!("{name}:x:{id}:\n")).concat();
    write(&tree.join("etc/passwd"), passwd.as_bytes(), 0o644);
    write(&tree.join("etc/group"), group.as_bytes(), 0o644);
    write(&tree.join("etc/suite.toml"), SETTINGS.as_bytes(), 0o644);
    for folder in ["root", "plain"] {
        fs::create_dir_all(tree.join(folder)).unwrap();
        fs::set_permissions(tree.join(folder), fs::Permissions::from_mode(0o755)).unwrap();
    }
    user.import(&tree);
    Some(user)
}

/// Returns the result of each test of the suite in this folder of a container.
fn results(user: &User, options: &[&str], folder: &str) -> BTreeMap<String, String> {
    let plain = ["run", "--quiet", "--rm", "--mount", "type=memory,dst=/plain,mode=755"];
    let suite = ["a", "--", "/pjdfstest", "-c", "/etc/suite.toml", "-p", folder];
    let ran = user.run(&[&plain, options, &suite].concat());
    let lines = ran.out.lines().filter(|it| !it.starts_with([' ', '\t']));
    let results: BTreeMap<_, _> = lines
        .filter_map(|it| it.split_once(' '))
        .map(|(name, how)| (name.to_owned(), how.trim().to_owned()))
        .filter(|(_, how)| ["ok", "FAILED", "skipped"].contains(&how.as_str()))
        .collect();
    assert!(results.len() > 200, "{options:?} {folder}: {}{}", ran.out, ran.err);
    results
}

fn check(user: &User, options: &[&str]) {
    let (plain, root) = (results(user, options, "/plain"), results(user, options, "/root"));
    let passed = root.values().filter(|it| *it == "ok").count();
    assert!(passed > 200, "{root:?}");
    let different: Vec<_> = root.iter().filter(|(name, how)| plain[*name] != **how).collect();
    let (known, unknown): (Vec<_>, Vec<_>) = different
        .into_iter()
        .partition(|(name, how)| name.ends_with(DIFFERENT) && *how == "FAILED");
    assert_eq!(unknown, [], "{options:?}");
    // If no test differs, the documentation is outdated.
    assert!(!known.is_empty(), "{options:?}");
}

#[test]
fn a_users_root_passes_what_a_tmpfs_passes() {
    let Some(program) = pjdfstest() else { return };
    let Some(user) = user_with_suite(&program) else { return };
    for via in ["tree", "fuse", "fuse-objects"] {
        check(&user, &["--via", via, "--writable", "memory"]);
    }
    let upper = user.home().join("upper");
    fs::create_dir(&upper).unwrap();
    chown(&upper, Some(USER), Some(USER)).unwrap();
    check(&user, &["--via", "tree", "--writable", "dir=upper"]);
    let service = super::mounts::Service::start_with_ids(&user.place);
    let socket = service.socket.to_str().unwrap();
    check(&user, &["--mount-service", socket, "--via", "service", "--writable", "memory"]);
}
