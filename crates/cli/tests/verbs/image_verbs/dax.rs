//! Exports that a virtual machine maps by DAX, read by other programs and by the kernel.

use std::process::Command;

use serde_json::Value;

use super::disk::check_mounted;
use crate::{Place, is_root, program, write};

const MIB: usize = 1 << 20;

/// Files whose names state their lengths, the last with a hole.
const LENGTHS: [u64; 8] = [0, 1, 65, 4095, 4096, 4097, 70_000, 5_000_000];

/// Makes an image `a` with files of all these lengths, a hard link, and two equal files.
fn place() -> Place {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    for length in LENGTHS {
        let bytes: Vec<u8> = (0..251).cycle().take(length.min(100_000) as usize).collect();
        write(&tree.join(length.to_string()), &bytes, 0o644);
        let file = std::fs::OpenOptions::new().write(true).open(tree.join(length.to_string()));
        file.unwrap().set_len(length).unwrap();
    }
    write(&tree.join("equal"), &std::fs::read(tree.join("65")).unwrap(), 0o600);
    std::fs::hard_link(tree.join("65"), tree.join("again")).unwrap();
    let long = "t".repeat(200);
    std::os::unix::fs::symlink(&long, tree.join("target")).unwrap();
    place.out("import --quiet --form objects dir:tree a");
    place
}

/// Returns the layout that `dump.erofs` shows for a path: 0 for blocks, 2 for blocks and a tail.
fn layout(place: &Place, image: &str, path: &str) -> Option<u32> {
    let mut command = Command::new(program("dump.erofs")?);
    let output = command.arg(format!("--path={path}")).arg(image);
    let output = output.current_dir(place.folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let number = text.split_once("Layout: ").and_then(|(_, rest)| rest.split_whitespace().next());
    Some(number.and_then(|it| it.parse().ok()).unwrap_or_else(|| panic!("{path}: {text}")))
}

#[test]
fn every_file_is_in_blocks() {
    let place = place();
    place.out("export --quiet a erofs:plain.erofs");
    let told: Value =
        serde_json::from_str(&place.out("export --dax --json a erofs:a.erofs")).unwrap();
    let bytes = std::fs::read(place.path("a.erofs")).unwrap();
    assert_eq!((&told["bytes"], bytes.len() % (2 * MIB)), (&bytes.len().into(), 0));
    // The same bytes again, also in a pipe.
    place.out("export --quiet --dax --force a erofs:a.erofs");
    assert!(std::fs::read(place.path("a.erofs")).unwrap() == bytes);
    let output = place.command(&["export", "--dax", "a", "erofs:-"]).output().unwrap();
    assert!(output.stdout == bytes);
    place.out("export --quiet --dax --platform linux/amd64 a disk:a.disk");
    let disk = std::fs::read(place.path("a.disk")).unwrap();
    assert_eq!(disk.len() % (2 * MIB), 0);
    let blocks = u32::from_le_bytes(bytes[1060..1064].try_into().unwrap()) as usize;
    assert!(disk[MIB..].starts_with(&bytes[..blocks * 4096]));
    // A disk with another layout has other ids.
    place.out("export --quiet --platform linux/amd64 a disk:b.disk");
    let other = std::fs::read(place.path("b.disk")).unwrap();
    assert_eq!(disk[1024..1040], other[1024..1040], "the type of the partition");
    assert_ne!(disk[1040..1056], other[1040..1056], "the partition's id");

    if program("dump.erofs").is_none() {
        return testing::skipped("dump.erofs is not installed");
    }
    let mut inline = 0;
    for name in
        LENGTHS.map(|it| it.to_string()).iter().map(String::as_str).chain(["equal", "again"])
    {
        let path = format!("/{name}");
        assert_eq!(layout(&place, "a.erofs", &path), Some(0), "{path}");
        inline += u32::from(layout(&place, "plain.erofs", &path) == Some(2));
    }
    assert!(inline > 0, "without --dax, files have tails, so the assertion above can fail");
}

#[test]
fn an_import_gives_the_same_image() {
    let place = place();
    let image = |name: &str| {
        let shown: Value =
            serde_json::from_str(&place.out(&format!("show --json {name}"))).unwrap();
        shown["image"].as_str().unwrap().to_owned()
    };
    place.out("export --quiet --dax a erofs:a.erofs");
    place.out("export --quiet --dax --platform linux/amd64 a disk:a.disk");
    for source in ["erofs:a.erofs", "disk:a.disk"] {
        place.out(&format!("import --quiet --form objects {source} b"));
        assert_eq!(image("b"), image("a"), "{source}");
    }
    place.out("import --quiet --form packed dir:tree p");
    place.out("export --quiet --dax p erofs:p.erofs");
    place.out("import --quiet --form packed erofs:p.erofs q");
    assert_eq!(image("p"), image("q"));
}

#[test]
fn the_kernel_shows_the_same_bytes() {
    let place = place();
    place.out("export --quiet --dax a erofs:a.erofs");
    let can_mount = std::fs::read_to_string("/proc/filesystems").unwrap().contains("erofs");
    let tools = ["unshare", "mount"].iter().all(|it| program(it).is_some());
    if !is_root() || !can_mount || !tools {
        return testing::skipped(
            "what the kernel shows of an export for DAX: it cannot be mounted",
        );
    }
    check_mounted(&place, "mount -t erofs -o ro,loop a.erofs m");
}

#[test]
fn other_targets_refuse_it() {
    let place = place();
    for (target, why) in [
        ("gvisor:x", "--dax does not work with gvisor:FILE"),
        ("tar:x", "--dax needs erofs:FILE or disk:FILE"),
        ("oci:x", "--dax needs erofs:FILE or disk:FILE"),
        ("docker-archive:x", "--dax needs erofs:FILE or disk:FILE"),
        ("changes:x", "--dax needs erofs:FILE or disk:FILE"),
    ] {
        let ran = place.run(&format!("export --dax a {target}"));
        assert!(ran.code == Some(2) && ran.err.contains(why), "{target}: {}", ran.err);
        assert!(!place.path("x").exists(), "{target}");
    }
}
