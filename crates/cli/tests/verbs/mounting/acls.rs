//! ACLs of native images take effect if the image has some, and are not looked up if it has none. Needs root.

use std::process::Command;

use crate::container_rights::userns::{acl, set};
use crate::mounting::mounts::Unmount;
use crate::{Place, is_root, open_to_all, write};

/// Returns the options that EROFS shows for a mount. Source: `erofs_show_options` in Linux `fs/erofs/super.c`.
fn options(point: &std::path::Path) -> String {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let at = format!(" {} ", point.display());
    let line = text.lines().find(|line| line.contains(&at)).unwrap();
    line.rsplit_once(" - erofs ").unwrap().1.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn acls_cost_only_images_that_have_some() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    open_to_all(&place);
    for (name, has_acl) in [("plain", false), ("listed", true)] {
        let tree = place.path(name);
        std::fs::create_dir(&tree).unwrap();
        write(&tree.join("file"), b"text\n", 0o640);
        set(&tree.join("file"), "user.note", b"x");
        if has_acl {
            set(&tree.join("file"), "system.posix_acl_access", &acl(54_321));
        }
        let point = place.path(&format!("on-{name}"));
        std::fs::create_dir(&point).unwrap();
        for form in ["packed", "tar"] {
            let tar = place.path("tree.tar");
            let mut command = Command::new("tar");
            command.args(["--format=posix", "--acls", "--numeric-owner", "-cf"]);
            let command = command.arg(&tar).arg("-C").arg(&tree).arg(".");
            assert!(command.status().unwrap().success());
            place.out(&format!("import --quiet --form {form} tar:tree.tar {name}"));
            let guard = Unmount(point.clone());
            place.out(&format!("mount --quiet {name} {}", point.display()));
            let found = options(&point);
            let words: Vec<_> = found.split(',').collect();
            assert_eq!(words.contains(&"noacl"), !has_acl, "{form}: {found}");
            assert_eq!(words.contains(&"acl"), has_acl, "{form}: {found}");
            for (user, reads) in [("54321", has_acl), ("54322", false)] {
                let mut command = Command::new("setpriv");
                command.args(["--reuid", user, "--regid", user, "--clear-groups", "cat"]);
                let output = command.arg(point.join("file")).output().unwrap();
                assert_eq!(output.status.success(), reads, "{form} {name} {user}: {output:?}");
            }
            // Programs that other tests start may inherit our open files for a moment.
            place.out(&format!("umount --lazy {}", point.display()));
            drop(guard);
        }
    }
}
