//! Images with only some files of another image.

use serde_json::Value;

use crate::{Place, write};

/// Makes a store with an image `a`.
fn place() -> Place {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    for directory in ["usr/share/doc/x", "usr/share/man", "var/empty"] {
        std::fs::create_dir_all(tree.join(directory)).unwrap();
    }
    write(&tree.join("usr/share/doc/x/README"), &[b'r'; 1000], 0o644);
    write(&tree.join("usr/share/man/x.1"), b"man\n", 0o644);
    for name in ["etc/again", "usr/again"] {
        std::fs::hard_link(tree.join("etc/long"), tree.join(name)).unwrap();
    }
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o750);
    std::fs::set_permissions(tree.join("usr"), permissions).unwrap();
    place.out("import --quiet dir:tree a");
    place
}

fn names(place: &Place, image: &str) -> String {
    place.out(&format!("ls -R {image}")).lines().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_part_is_an_image() {
    let place = place();
    let out = place.out("filter a part --include usr --exclude doc --exclude man/");
    assert_eq!(out.lines().next(), Some("3 of 16 entries kept"), "{out}");
    assert_eq!(names(&place, "part"), "usr usr/again usr/share");
    let dump = place.out("dump part");
    let usr = dump.lines().find(|line| line.starts_with("/usr ")).unwrap();
    assert_eq!(usr.split(' ').nth(2), Some("40750"), "{usr}");
    // The file had three names. The first name was in another directory.
    let again = dump.lines().find(|line| line.starts_with("/usr/again ")).unwrap();
    assert_eq!((again.split(' ').nth(2), again.split(' ').nth(3)), (Some("100644"), Some("1")));
    place.out("rmi --quiet a");
    place.out("gc");
    assert_eq!(place.out("cat part:/usr/again"), "x".repeat(100));
    place.out("fsck");
    let objects = std::fs::read_dir(place.path("store/objects")).unwrap();
    let left = objects.flat_map(|it| std::fs::read_dir(it.unwrap().path()).unwrap()).count();
    assert_eq!(left, 1, "README is gone");
}

#[test]
fn without_globs_it_is_the_same_image() {
    let place = place();
    let told: Value = serde_json::from_str(&place.out("filter --json a b")).unwrap();
    let shown: Value = serde_json::from_str(&place.out("show --json a")).unwrap();
    assert_eq!((&told["image"], &told["from"]), (&shown["image"], &shown["image"]));
    assert_eq!((&told["kept"], &told["of"]), (&16.into(), &16.into()));
    assert_eq!(told["unmatched"], serde_json::json!([]));
    assert_eq!((&told["objectsAdded"], &told["objectsReused"]), (&0.into(), &2.into()));
}

#[test]
fn nothing_may_be_left() {
    let place = place();
    let ran = place.run("filter a none --include nowhere --exclude *.pyc --exclude etc/**");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.out.starts_with("0 of 16 entries kept\n"), "{}", ran.out);
    assert!(ran.err.contains("\"nowhere\" matches no file in a"), "{}", ran.err);
    assert!(ran.err.contains("\"*.pyc\" matches no file in a"), "{}", ran.err);
    assert!(!ran.err.contains("etc/**"), "{}", ran.err);
    assert_eq!(names(&place, "none"), "");
}

#[test]
fn mistakes_are_told_and_change_nothing() {
    let place = place();
    let cases = [
        ("filter a new --include !etc", "does not negate"),
        ("filter a new --include [", "is not a glob"),
        ("filter a new --exclude /", "names only the root"),
        ("filter a new --exclude ../etc", "no . or .."),
        ("filter a", "required arguments were not provided"),
        ("filter none new", "there is no image"),
        ("filter a Not/A/Name!", "is not an image name"),
    ];
    for (line, text) in cases {
        let ran = place.run(line);
        assert_eq!(ran.code, ran.failure(), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
    }
    assert_eq!(place.run("show new").code, Some(3));
}
