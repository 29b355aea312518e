//! Images whose names a server on FUSE serves, and whose data an overlay reads in the store's objects.

use std::fs;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{LISTING, User, compare, has_getfattr, listed_by_kernel, odd_tree, sorted, tree};
use crate::container_rights::userns::set;
use crate::{add_programs, write};

/// Finds the process that holds the connection of the container `c`: `$H`. The server is its child.
const HOLDER: &str = "
    for p in $(pgrep -f \"^$Q run c\"); do
        ls -l /proc/$p/fd 2> /dev/null | grep -q /dev/fuse && { H=$p; break; }
    done
    serves() { pgrep -P $H > pid; }
    rests() { for _ in $(seq 100); do serves || return 0; sleep 0.1; done; return 1; }
";

/// The reference is the kernel's mount of the image.
#[test]
fn names_and_bytes_are_those_that_the_kernel_shows() {
    let Some(user) = User::new(true) else { return };
    if !has_getfattr() {
        return;
    }
    let tree = odd_tree(&user);
    let run = ["run", "--rm", "--quiet", "--via", "fuse-objects", "a", "sh", "-c", LISTING];
    // Users see no labels. This file has other xattrs besides.
    set(&tree.join("sticky"), LABEL, b"label");
    user.import(&tree);
    let (labels, kernel): (Vec<_>, Vec<_>) =
        listed_by_kernel(&user, "objects").into_iter().partition(|it| it.starts_with(LABEL));
    assert_eq!(labels.len(), 1, "{labels:?}");
    compare(&kernel, &sorted(&user.out(&run)));
}

const LABEL: &str = "security.selinux";

const WAYS: [&str; 3] = ["fuse-objects", "fuse", "tree"];

/// When a file is changed, an overlay copies its xattrs to the writable layer. On a disk of the host, the kernel lets
/// only root of the host set labels of security modules, except those of SELinux where SELinux is active. The root
/// directory of a container is such a copy.
#[test]
fn labels_prevent_neither_starts_nor_changes() {
    let Some(user) = User::new(true) else { return };
    if !has_getfattr() {
        return;
    }
    let tree = tree(&user);
    add_programs(&tree, &["/usr/bin/getfattr"]);
    let label = "security.ima";
    for path in ["", "etc", "large"] {
        set(&tree.join(path), label, b"label");
    }
    user.import(&tree);
    let kernel = listed_by_kernel(&user, "objects");
    // The file has two names.
    assert_eq!(kernel.iter().filter(|it| it.starts_with(label)).count(), 4, "{kernel:?}");
    let script =
        "echo new > large; cat large; echo x > etc/y; cat etc/y; getfattr -hdm- / etc large";
    for way in WAYS {
        let run = ["run", "--rm", "--quiet", "--via", way, "a", "sh", "-c", script];
        assert_eq!(user.out(&run), "new\nx\n", "{way}");
    }
}

/// An overlay does not find a device with the number 0, so it must not list it either.
#[test]
fn whiteouts_of_an_image_are_not_listed() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    fs::create_dir(tree.join("few")).unwrap();
    write(&tree.join("few/here"), b"", 0o644);
    mknodat(CWD, tree.join("few/gone"), FileType::CharacterDevice, Mode::RUSR, 0).unwrap();
    user.import(&tree);
    assert!(user.out(&["dump", "a"]).contains("/few/gone "));
    for way in WAYS {
        for access in [&[][..], &["--read-only"]] {
            let script = ["a", "sh", "-c", "ls few; ls -l few > /dev/null"];
            let run = [&["run", "--rm", "--quiet", "--via", way], access, &script].concat();
            assert_eq!(user.out(&run), "here\n", "{way} {access:?}");
        }
    }
}

/// A tree needs no process besides that of the container.
#[test]
fn this_way_is_preferred() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    for (options, holders) in [("", "1"), ("--via fuse-objects", "1"), ("--via tree", "0")] {
        let ran = user.script(&format!(
            "$Q run --quiet --detach --name c {options} a sleep 1000
             for p in $(pgrep -f \"^$Q run c\"); do pgrep -f \"^$Q run c\" -P $p > child && continue; \
                 ls -l /proc/$p/fd; done | grep -c /dev/fuse > found
             [ $(cat found) = 0 ] && echo 0 || echo 1
             $Q exec c cat /proc/self/mountinfo | grep -c datadir+
             $Q rm --force c"
        ));
        assert_eq!(ran.out, format!("c\n{holders}\n1\nc\n"), "{options}: {}", ran.err);
    }
}

/// At rest, a container has no server. Listings and reads start one again.
#[test]
fn a_server_rests_and_is_started_again() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let ran = user.script(&format!(
        "$Q run --quiet --detach --name c a sleep 1000
         {HOLDER}
         rests && echo rests
         $Q exec c cat theirs; echo
         rests && echo rests
         $Q exec c sh -c 'ls -lR /etc; cat etc/again' | grep -a -c again
         rests && echo rests
         $Q rm --force c
         for _ in $(seq 100); do [ -e /proc/$H/exe ] || break; sleep 0.1; done
         [ -e /proc/$H/exe ] && echo left || echo ended"
    ));
    let expect = "c\nrests\ntheirs\nrests\n1\nrests\nc\nended\n";
    assert_eq!(ran.out, expect, "{}", ran.err);
}

/// If a server is killed during a listing, the listing is complete.
#[test]
fn listings_outlive_servers() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    fs::create_dir(tree.join("many")).unwrap();
    for number in 0..2000 {
        fs::write(tree.join(format!("many/{number}")), testing::noise(100 + number)).unwrap();
    }
    user.import(&tree);
    let ran = user.script(&format!(
        "$Q run --quiet --detach --name c a sleep 1000
         {HOLDER}
         $Q exec c sh -c 'ls -l /many; cat /many/*' | wc -l > first
         $Q exec c ls -l /many | sha256sum > listed
         $Q rm --force c > /dev/null
         for _ in 1 2 3; do
             $Q run --quiet --detach --name c a sleep 1000 > /dev/null
             {HOLDER}
             $Q exec c ls -l /many > out &
             for _ in 1 2 3 4 5; do serves && kill -9 $(cat pid); sleep 0.02; done 2> /dev/null
             wait $!
             sha256sum < out | cmp - listed && echo same
             $Q rm --force c > /dev/null
         done"
    ));
    assert_eq!(ran.out, "c\nsame\nsame\nsame\n", "{}", ran.err);
}

/// A user may have as many processes, or a process as many open files, as allowed. Then the holder serves the files.
#[test]
fn a_container_outlives_a_lack_of_processes() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    // With two free descriptors, a pipe to a server can be made, but the server cannot be opened.
    let files = "nofile=$(n=3; free=0; while [ $free -lt 2 ]; do
            [ -L /proc/$H/fd/$n ] || free=$((free + 1)); n=$((n + 1)); done; echo $n):";
    for limit in ["nproc=1:", files] {
        let ran = user.script(&format!(
            "$Q run --quiet --detach --name c a sleep 1000
             {HOLDER}
             rests && echo rests
             set -- $(prlimit --pid $H --noheadings --raw --output SOFT --nproc) \
                 $(prlimit --pid $H --noheadings --raw --output SOFT --nofile)
             prlimit --pid $H --{limit}
             for _ in 1 2; do
                 $Q exec c cat theirs; echo
                 serves || echo alone
                 sleep 2
             done
             prlimit --pid $H --nproc=$1: --nofile=$2:
             for _ in $(seq 20); do
                 $Q exec c cat theirs > /dev/null
                 serves && echo serves && break
                 sleep 1.5
             done
             $Q rm --force c
             for _ in $(seq 100); do [ -e /proc/$H/exe ] || break; sleep 0.1; done
             [ -e /proc/$H/exe ] && echo left || echo ended"
        ));
        let expect = "c\nrests\ntheirs\nalone\ntheirs\nalone\nserves\nc\nended\n";
        assert_eq!(ran.out, expect, "{limit}: {}", ran.err);
    }
}

/// A server whose holder was killed does not rest, because no process would start another one.
#[test]
fn a_server_without_a_holder_continues() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let ran = user.script(&format!(
        "$Q run --quiet --detach --name c a sleep 1000
         {HOLDER}
         for _ in $(seq 20); do
             $Q exec c cat theirs > /dev/null
             serves && kill -9 $H && S=$(cat pid) && [ -e /proc/$S/exe ] && break
         done
         sleep 3
         $Q exec c cat theirs; echo
         $Q rm --force c
         for _ in $(seq 100); do [ -e /proc/$S/exe ] || break; sleep 0.1; done
         [ -e /proc/$S/exe ] && echo left || echo ended"
    ));
    assert_eq!(ran.out, "c\ntheirs\nc\nended\n", "{}", ran.err);
}
