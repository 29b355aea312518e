//! An image that has lost data is not used as if its files did not exist.

use std::fs;

use crate::{Place, is_root};

/// Removes the object of `etc/long`, the only one of the tree.
fn lose(place: &Place) {
    let mut shards = fs::read_dir(place.path("store/objects")).unwrap();
    let object = shards.find_map(|it| fs::read_dir(it.unwrap().path()).unwrap().next());
    fs::remove_file(object.unwrap().unwrap().path()).unwrap();
}

#[test]
fn a_root_without_a_file_is_refused() {
    let place = Place::new();
    place.tree("tree", "long");
    place.out("import --form objects dir:tree a:1");
    lose(&place);
    let found = place.run("fsck");
    assert_eq!(found.code, Some(1), "{}", found.err);
    assert!(found.out.contains("fsck --repair"), "{}", found.out);
    let repaired = place.run("fsck --repair");
    assert_eq!(repaired.code, Some(1), "{}", repaired.err);
    assert!(repaired.err.contains("a:1 lacks data") && repaired.err.contains("import it again"));
    let mut uses = vec!["bundle a:1 bundle"];
    if is_root() {
        fs::create_dir(place.path("mount")).unwrap();
        uses.extend(["mount a:1 mount", "mount --via fuse a:1 mount", "run --rm a:1 /bin/true"]);
        uses.push("run --rm --userns auto a:1 /bin/true");
    }
    for line in uses {
        let refused = place.run(line);
        assert_ne!(refused.code, Some(0), "{line}");
        for text in ["lacks the data of 1 file", "etc/long", "import the image again"] {
            assert!(refused.err.contains(text), "{line}: {}", refused.err);
        }
    }
    // What is there can be had, and what is not there is not taken for nothing.
    assert_eq!(place.out("cat a:1:/etc/short"), "short\n");
    assert_eq!(place.run("cat a:1:/etc/long").code, Some(2));
    assert_eq!(place.run("export a:1 dir:out").code, Some(2));
    place.out("import --form objects dir:tree a:1");
    place.out("fsck");
    if is_root() {
        place.out("mount a:1 mount");
        let long = fs::read_to_string(place.path("mount/etc/long"));
        place.out("umount mount");
        assert_eq!(long.unwrap(), "long".repeat(100));
        // The first use has looked.
        let marks = fs::read_dir(place.path("store/blobs")).unwrap();
        let mut marks = marks.map(|it| it.unwrap().file_name().into_string().unwrap());
        assert!(!marks.any(|it| it.ends_with(".lacking")));
    }
}
