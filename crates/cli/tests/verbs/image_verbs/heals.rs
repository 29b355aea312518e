//! An image that has lost data is not used as if its files did not exist.

use std::fs;

use image::verity::{Algorithm, ObjectId, digest};
use rustix::io::Errno;

use crate::{Place, add_programs, is_root};

/// Removes the object of `etc/long` in [`Place::tree`], which is the only object.
pub(crate) fn lose(place: &Place) {
    let mut shards = fs::read_dir(place.path("store/objects")).unwrap();
    let object = shards.find_map(|it| fs::read_dir(it.unwrap().path()).unwrap().next());
    fs::remove_file(object.unwrap().unwrap().path()).unwrap();
}

/// Returns the error of reading a file whose object is missing: overlayfs finds the symlinks in the last data
/// layer.
fn error_of(path: &std::path::Path) -> Errno {
    Errno::from_io_error(&fs::read(path).unwrap_err()).unwrap()
}

/// `fsck` was not run, so the image is not marked as damaged.
#[test]
fn what_vanishes_is_an_error_and_not_absent() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "long");
    add_programs(&tree, &["/bin/cat"]);
    place.out("import --form objects dir:tree a:1");
    let bytes = fs::read(tree.join("etc/long")).unwrap();
    let object = ObjectId::new(digest(Algorithm::Sha256, &bytes));
    fs::remove_file(place.path("store/objects").join(object.path())).unwrap();
    fs::create_dir(place.path("mount")).unwrap();
    fs::create_dir(place.path("kept")).unwrap();
    for way in ["", "--writable dir=kept "] {
        place.out(&format!("mount {way}a:1 mount"));
        let long = place.path("mount/etc/long");
        let read = error_of(&long);
        let written = fs::OpenOptions::new().append(true).open(&long).map(drop);
        let size = fs::metadata(&long).map(|it| it.len());
        place.out("umount mount");
        assert_eq!(read, Errno::LOOP, "{way}");
        assert_eq!(size.unwrap(), 400);
        let expect = if way.is_empty() { Errno::ROFS } else { Errno::LOOP };
        assert_eq!(Errno::from_io_error(&written.unwrap_err()), Some(expect), "{way}");
    }
    place.out("mount --via fuse a:1 mount");
    let read = error_of(&place.path("mount/etc/long"));
    place.out("umount mount");
    assert_eq!(read, Errno::IO);
    place.out("bundle a:1 bundle -- /bin/cat");
    let read = error_of(&place.path("bundle/rootfs/etc/long"));
    place.out("umount bundle/rootfs");
    assert_eq!(read, Errno::LOOP);
    for flags in ["", "--read-only ", "--userns auto ", "--via fuse "] {
        let line = format!("run --rm {flags}a:1 /bin/cat /etc/long");
        let ran = place.run(&line);
        assert_ne!(ran.code, Some(0), "{line}");
        assert!(ran.err.contains("/etc/long"), "{line}: {}", ran.err);
        assert!(!ran.err.contains("No such file"), "{line}: {}", ran.err);
    }
    // Mounts by the specification have the same layer.
    let data = place.out("mount --specification a:1");
    assert!(data.contains("store/absent\""), "{data}");
    // A restored file can be read at once, even through an existing mount.
    place.out("mount a:1 mount");
    assert_eq!(error_of(&place.path("mount/etc/long")), Errno::LOOP);
    place.out("import --form objects dir:tree a:2");
    let long = fs::read_to_string(place.path("mount/etc/long"));
    place.out("umount mount");
    assert_eq!(long.unwrap(), "long".repeat(100));
}

/// Such a store was made by an earlier version, or has also lost the directory with the symlinks.
#[test]
fn a_store_that_cannot_tell_what_vanishes_is_looked_at() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    place.tree("tree", "long");
    place.out("import --form objects dir:tree a:1");
    fs::create_dir(place.path("mount")).unwrap();
    let absent = place.path("store/absent");
    let harms: [&dyn Fn(); 3] = [
        &|| fs::remove_file(absent.join("a7")).unwrap(),
        &|| fs::create_dir(absent.join("a7")).unwrap(),
        &|| fs::remove_dir_all(&absent).unwrap(),
    ];
    for harm in harms {
        harm();
        // An image without missing data is mounted.
        place.out("mount a:1 mount");
        place.out("umount mount");
    }
    lose(&place);
    let refused = place.run("mount a:1 mount");
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(refused.err.contains("lacks the data of 1 file"), "{}", refused.err);
    // The next verb that writes to the store makes the directory again.
    let ran = place.run("run --rm a:1 /bin/true");
    assert!(!ran.err.contains("lacks the data"), "{}", ran.err);
    assert_eq!(fs::read_dir(&absent).unwrap().count(), 256);
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
    // Existing data can be read, and reading missing data is an error, and does not return an empty file.
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
        // The first use checked the image and removed the mark.
        let marks = fs::read_dir(place.path("store/blobs")).unwrap();
        let mut marks = marks.map(|it| it.unwrap().file_name().into_string().unwrap());
        assert!(!marks.any(|it| it.ends_with(".lacking")));
    }
}
