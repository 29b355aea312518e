//! Images whose names a server on FUSE serves, and whose data an overlay reads in the store's objects.

use std::fs;

use super::{LISTING, User, compare, has_getfattr, listed_by_kernel, odd_tree, sorted, tree};
use crate::container_rights::userns::set;

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
    // The second image has ACLs, and labels, which not all of its files have.
    for label in [None, Some("security.selinux")] {
        if let Some(label) = label {
            set(&tree.join("large"), label, b"label");
        }
        user.import(&tree);
        compare(&listed_by_kernel(&user, "objects"), &sorted(&user.out(&run)));
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
        assert_eq!(ran.out, format!("c\n{holders}\n1\n"), "{options}: {}", ran.err);
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
    let expect = "c\nrests\ntheirs\nrests\n1\nrests\nended\n";
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
