//! Images that mount(8) and fstab(5) mount.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::mounting::mounts::is_mounted_here;
use crate::{Place, Ran, program};

/// Runs a script in a namespace where `/usr/sbin/mount.quire` is this program. `$1` is the place.
fn with_helper(place: &Place, script: &str) -> Ran {
    let lower = if Path::new("/sbin").is_symlink() { "/usr/sbin" } else { "/sbin" };
    for folder in ["upper", "work", "point"] {
        std::fs::create_dir(place.path(folder)).unwrap();
    }
    symlink(env!("CARGO_BIN_EXE_quire"), place.path("upper/mount.quire")).unwrap();
    let script = format!(
        "mount -t overlay -o lowerdir={lower},upperdir=$1/upper,workdir=$1/work sbin {lower}; cd $1; {script}"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", &script, "sh"]);
    Ran::from_output(&command.arg(place.folder.path()).output().unwrap())
}

fn place() -> Option<Place> {
    if !crate::is_root() {
        return None;
    }
    for name in ["unshare", "mount", "umount"] {
        if program(name).is_none() {
            testing::skipped(&format!("{name} is not installed"));
            return None;
        }
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    Some(place)
}

#[test]
fn mount_and_fstab_mount_images() {
    let Some(place) = place() else { return };
    let store = place.path("store");
    let script = format!(
        "S={}
         mount -t quire -o store=$S,noexec a point; cat point/etc/short
         grep -o 'nosuid,nodev,noexec' /proc/self/mountinfo | head -n 1; umount point
         mount -t quire -o store=$S,writable=memory,size=1M a point
         echo new > point/new; cat point/new; umount point
         echo \"a $PWD/point quire store=$S,ro,noauto 0 0\" > fstab; mount --bind fstab /etc/fstab
         mount point; cat point/etc/short; umount point
         mount -f point; ls point
         for words in '-o store=/nowhere' '-o colour=1' \"-o store=$S,durable\"; do
             code=0; mount -t quire $words a point 2>> told || code=$?; echo $code
         done",
        store.display()
    );
    let ran = with_helper(&place, &script);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert_eq!(ran.out, "short\nnosuid,nodev,noexec\nnew\nshort\n32\n1\n1\n", "{}", ran.err);
    let told = std::fs::read_to_string(place.path("told")).unwrap();
    for expect in ["no store in /nowhere", "unknown option \"colour=1\"", "add writable=KIND"] {
        assert!(told.contains(expect), "{told}");
    }
}

/// libmount compares source and target with mountinfo. The helper is called if they differ.
#[test]
fn fstab_mounts_an_image_once() {
    let Some(place) = place() else { return };
    for form in ["objects", "packed"].into_iter().filter(|it| is_mounted_here(it)) {
        let script = format!(
            "S={}
             echo \"a $PWD/point quire store=$S 0 0\" > fstab; mount --bind fstab /etc/fstab
             mount -a -t quire; mount -a -t quire; mount -a -t quire
             upper/mount.quire a $PWD/point -o store=$S 2> told; grep -o already told
             grep \" $PWD/point \" /proc/self/mountinfo | sed 's/.* - [a-z]* //; s/ .*//'",
            place.path("store").display()
        );
        place.out(&format!("convert --quiet --form {form} a a"));
        let ran = with_helper(&place, &script);
        assert_eq!((ran.code, &*ran.out), (Some(0), "already\na\n"), "{form}: {}", ran.err);
        for folder in ["upper", "work"] {
            std::fs::remove_dir_all(place.path(folder)).unwrap();
        }
        std::fs::remove_dir(place.path("point")).unwrap();
    }
}

/// fstab may let users mount: mount(8) calls the helper as the user, without variables.
#[test]
fn a_user_mounts_what_fstab_lets() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
    const USER: u32 = 64_001;
    let Some(place) = place() else { return };
    let is_set_user_id = program("mount").and_then(|it| std::fs::metadata(it).ok());
    if is_set_user_id.is_none_or(|it| it.mode() & 0o4000 == 0) {
        testing::skipped("mount is not set-user-id here");
        return;
    }
    for name in ["setpriv", "fusermount3"] {
        if program(name).is_none() {
            assert!(std::env::var_os("CI").is_none(), "CI has no {name}");
            testing::skipped(&format!("{name} is not installed"));
            return;
        }
    }
    let home = place.path("home");
    std::fs::create_dir_all(home.join("point")).unwrap();
    for folder in [&home, &home.join("point")] {
        chown(folder, Some(USER), Some(USER)).unwrap();
    }
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.folder.path(), open).unwrap();
    testing::copy_program(env!("CARGO_BIN_EXE_quire"), &place.path("quire"));
    let script = format!(
        "ln -sf $PWD/quire upper/mount.quire
         mknod -m 666 fuse c 10 229; mount --bind fuse /dev/fuse
         cp /etc/passwd names; echo 'quire-test:x:{USER}:{USER}::{0}:/bin/sh' >> names; mount --bind names /etc/passwd
         echo \"a {0}/point quire ro,user,noauto 0 0\" > fstab; mount --bind fstab /etc/fstab
         P=$PWD
         chmod 644 tree/etc/short
         cat > as-user <<'END'
         cd
         $1/quire import --quiet dir:$1/tree a > /dev/null
         mount ~/point; cat point/etc/long | wc -c
         grep -c ' /[^ ]*/point ro,nosuid,nodev,noexec.*fuse' /proc/self/mountinfo
         umount ~/point; ls point
END
         exec setpriv --reuid={USER} --regid={USER} --clear-groups env -i PATH=/usr/bin:/bin HOME={0} sh -eu as-user $P",
        home.display()
    );
    let ran = with_helper(&place, &script);
    assert_eq!((ran.code, &*ran.out), (Some(0), "100\n1\n"), "{}", ran.err);
}
