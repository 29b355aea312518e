//! Disks for virtual machines, read by other programs and by the kernel.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{Place, program, write};

const MIB: usize = 1 << 20;

/// An image `a` whose configuration does not name an architecture.
fn place() -> Place {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    std::fs::hard_link(tree.join("etc/short"), tree.join("etc/again")).unwrap();
    write(&tree.join("large"), &[b'l'; 3_000_000], 0o4711);
    place.out("import --quiet dir:tree a");
    place
}

/// Finds a program of this machine, including those for root.
fn tool(name: &str) -> Option<PathBuf> {
    let sbin = PathBuf::from("/usr/sbin").join(name);
    let found = program(name).or_else(|| sbin.is_file().then_some(sbin));
    if found.is_none() {
        testing::skipped(&format!("{name} is not installed"));
    }
    found
}

/// Returns another program's output about the disk; `None` if the program is not installed.
fn ask(place: &Place, name: &str, line: &str) -> Option<String> {
    let mut command = Command::new(tool(name)?);
    let output = command.args(line.split(' ')).current_dir(place.folder.path()).output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {line}: {out}{err}");
    Some(out)
}

#[test]
fn a_partition_is_the_image_that_needs_no_store() {
    let place = place();
    place.out("export --quiet a erofs:a.erofs");
    let text = place.out("export --platform linux/arm64 --json a disk:a.disk");
    let told: Value = serde_json::from_str(&text).unwrap();
    let disk = std::fs::read(place.path("a.disk")).unwrap();
    let image = std::fs::read(place.path("a.erofs")).unwrap();
    assert_eq!((&told["bytes"], &told["imageBytes"]), (&disk.len().into(), &image.len().into()));
    assert_eq!((&told["architecture"], &told["inodes"]), (&"arm64".into(), &7.into()));
    assert_eq!(disk.len() % MIB, 0);
    assert!(disk[MIB..].starts_with(&image));
    // A second export, to a file or a pipe, writes the same bytes.
    place.out("export --quiet --force --platform linux/arm64 a disk:a.disk");
    assert!(std::fs::read(place.path("a.disk")).unwrap() == disk);
    let arguments = ["export", "--platform", "linux/arm64", "a", "disk:-"];
    let output = place.command(&arguments).stderr(Stdio::null()).output().unwrap();
    assert!(output.stdout == disk);
    // For another processor architecture, the partition has another type and other ids.
    place.out("export --quiet --force --platform linux/amd64 a disk:b.disk");
    let other = std::fs::read(place.path("b.disk")).unwrap();
    assert!(other[MIB..].starts_with(&image));
    assert_ne!(other[1024..1056], disk[1024..1056]);
}

#[test]
fn partitioning_tools_find_nothing_wrong() {
    let place = place();
    let text = place.out("export --platform linux/amd64 --json a disk:a.disk");
    let told: Value = serde_json::from_str(&text).unwrap();
    let id = told["partition"].as_str().unwrap();
    if let Some(said) = ask(&place, "sfdisk", "--verify a.disk") {
        assert!(said.contains("No errors detected"), "{said}");
    }
    if let Some(said) = ask(&place, "sfdisk", "--json a.disk") {
        let table: Value = serde_json::from_str(&said).unwrap();
        let table = &table["partitiontable"];
        assert_eq!((&table["label"], &table["sectorsize"]), (&"gpt".into(), &512.into()));
        let partitions = table["partitions"].as_array().unwrap();
        assert_eq!(partitions.len(), 1);
        let one = &partitions[0];
        assert_eq!((&one["start"], &one["size"]), (&2048.into(), &(3 * 2048).into()));
        assert_eq!(one["type"], "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709");
        assert_eq!(one["uuid"], id.to_uppercase());
        // The partition is read-only and must not be grown.
        assert_eq!((&one["name"], &one["attrs"]), (&"root".into(), &"GUID:60".into()));
    }
    if let Some(said) = ask(&place, "sgdisk", "--verify a.disk") {
        assert!(said.contains("No problems found"), "{said}");
        assert!(!said.contains("Caution"), "{said}");
    }
    if let Some(said) = ask(&place, "sgdisk", "--info 1 a.disk") {
        assert!(said.contains("Linux x86-64 root"), "{said}");
    }
    // The backup table works, so the disk survives the loss of its first table.
    let mut bytes = std::fs::read(place.path("a.disk")).unwrap();
    bytes[512..34 * 512].fill(0);
    std::fs::write(place.path("a.disk"), bytes).unwrap();
    if let Some(said) = ask(&place, "sfdisk", "--json a.disk") {
        assert!(said.contains(&id.to_uppercase()), "{said}");
    }
}

#[test]
fn the_kernel_mounts_the_partition() {
    let place = place();
    place.out("export --quiet --platform linux/amd64 a disk:a.disk");
    let disk = std::fs::read(place.path("a.disk")).unwrap();
    std::fs::write(place.path("partition"), &disk[MIB..]).unwrap();
    ask(&place, "fsck.erofs", "partition");
    let can_mount = std::fs::read_to_string("/proc/filesystems").unwrap().contains("erofs");
    let tools = ["unshare", "mount", "losetup"].iter().all(|it| tool(it).is_some());
    if !crate::is_root() || !can_mount || !tools {
        testing::skipped("what the kernel shows of an exported disk: it cannot be mounted here");
        return;
    }
    check_mounted(
        &place,
        &format!(
            "device=$(losetup --show -rf -o {MIB} a.disk); trap 'losetup -d $device' EXIT
            mount -t erofs -o ro $device m"
        ),
    );
}

/// Imports the tree that `mount`, a script, mounts on `m` in a separate namespace, and compares it with the image `a`.
pub(super) fn check_mounted(place: &Place, mount: &str) {
    let script = format!(
        "set -e; mkdir m; {mount}
        {} --store store import --quiet dir:m mounted; umount m",
        env!("CARGO_BIN_EXE_quire")
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    let output = command.current_dir(place.folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let ran = place.run("diff a mounted");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{}", ran.err);
}

#[test]
fn the_image_says_for_which_processor_it_is() {
    let place = place();
    let ran = place.run("export a disk:a.disk");
    assert_eq!(ran.code, Some(0));
    assert!(ran.err.contains("does not state its processor"), "{}", ran.err);
    place.out("export --quiet a tar:a.tar");
    place.out("import --quiet tar:a.tar layered");
    place.out("export --quiet layered oci:layout:1");
    // Make the same image for another processor.
    let read = |path: &str| std::fs::read_to_string(place.path(path)).unwrap();
    let index: Value = serde_json::from_str(&read("layout/index.json")).unwrap();
    let blob = |value: &Value| {
        let digest = value["digest"].as_str().unwrap();
        format!("layout/blobs/{}", digest.replace(':', "/"))
    };
    let manifest: Value = serde_json::from_str(&read(&blob(&index["manifests"][0]))).unwrap();
    let config: Value = serde_json::from_str(&read(&blob(&manifest["config"]))).unwrap();
    let told = |line: &str| {
        let told: Value = serde_json::from_str(&place.out(line)).unwrap();
        told["architecture"].clone()
    };
    assert_eq!(told("export --json layered disk:b.disk"), config["architecture"]);
    assert_eq!(told("export --json --platform linux/s390x layered disk:c.disk"), "s390x");
}

#[test]
fn mistakes_leave_no_disk() {
    let place = place();
    let cases = [
        ("export a disk:", "names no file"),
        ("export --json a disk:-", "name a file"),
        ("export --platform linux/pdp11 a disk:new", "one of 386, amd64"),
        ("export --platform windows/amd64 a disk:new", "disks support only linux"),
        ("export --platform amd64 a disk:new", "amd64"),
        ("export --platform linux/amd64 a tar:new", "--platform needs disk:FILE"),
        ("export --compression zstd a disk:new", "cannot be compressed"),
        ("export a disk:/dev/null", "not a regular file"),
        ("export a disk:tree/large", "--force overwrites it"),
    ];
    for (line, text) in cases {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
    }
    assert!(!place.path("new").exists());
}
