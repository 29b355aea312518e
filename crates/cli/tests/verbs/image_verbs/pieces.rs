//! Large files in packed images: they are stored in pieces, each piece once, and zeros are not stored.

use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::Command;

use crate::image_verbs::forms::{bytes, mounts_native};
use crate::mounting::mounts::Unmount;
use crate::{Place, is_root, write};

/// Size of a piece, in bytes.
const CHUNK: usize = 64 << 10;

fn tar(place: &Place, name: &str, fill: impl Fn(&Path)) {
    let tree = place.path("tree");
    std::fs::create_dir_all(&tree).unwrap();
    fill(&tree);
    let mut command = Command::new("tar");
    command.args(["--format=posix", "--sparse", "--numeric-owner", "--sort=name", "-cf"]);
    command.arg(place.path(name)).arg("-C").arg(&tree).arg(".");
    assert!(command.status().unwrap().success());
    std::fs::remove_dir_all(tree).unwrap();
}

fn database(version: u32) -> Vec<u8> {
    let mut file = bytes(1, 3 << 20);
    // One page in the middle of a piece differs.
    let at = 20 * CHUNK + 8192;
    file[at..at + 4096].copy_from_slice(&bytes(100 + version, 4096));
    file
}

fn sparse(path: &Path) {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(40 << 20).unwrap();
    file.write_all_at(&bytes(3, 9000), 16 << 20).unwrap();
}

/// Makes tars of two images with a large file that differs in the middle; the second also has a file of almost only
/// zeros.
fn place() -> Place {
    let place = Place::new();
    for version in 1..=2 {
        tar(&place, &format!("{version}.tar"), |tree| {
            write(&tree.join("database"), &database(version), 0o644);
            write(&tree.join("small"), &bytes(version, 5000), 0o644);
            // This file consists of pieces of the first file, except for its tail.
            let parts = database(1);
            let turned = [&parts[CHUNK..6 * CHUNK], &parts[..CHUNK], b"end"].concat();
            write(&tree.join("turned"), &turned, 0o644);
            if version == 2 {
                sparse(&tree.join("sparse"));
                std::fs::File::create(tree.join("zeros")).unwrap().set_len(9 << 20).unwrap();
            }
        });
    }
    place
}

/// Returns the total length and the total disk usage of all devices.
fn devices(place: &Place) -> (u64, u64) {
    let files = std::fs::read_dir(place.path("store/data")).unwrap().map(|it| it.unwrap().path());
    let devices = files.filter(|it| it.extension().is_none()).map(|it| it.metadata().unwrap());
    devices.fold((0, 0), |(len, disk), it| (len + it.len(), disk + it.blocks() * 512))
}

fn check_files(place: &Place, name: &str, version: u32) {
    let file = |path: &str| {
        let out = place.command(&["cat", &format!("{name}:{path}")]).output().unwrap();
        assert!(out.status.success(), "{path}: {}", String::from_utf8_lossy(&out.stderr));
        out.stdout
    };
    assert!(file("/database") == database(version), "{name}");
    if version == 2 {
        let sparse = file("/sparse");
        let data = bytes(3, 9000);
        assert_eq!(sparse.len(), 40 << 20);
        assert!(sparse[16 << 20..][..9000] == data && sparse[..16 << 20].iter().all(|it| *it == 0));
        assert!(file("/zeros") == vec![0; 9 << 20]);
    }
}

#[test]
fn what_changed_is_stored_and_zeros_are_not() {
    let place = place();
    place.out("import --form packed tar:1.tar one");
    let (first, _) = devices(&place);
    // The device has the database, two pages of the small file, a block with `end`, and the description of the device,
    // and each piece only once.
    assert_eq!(first, (3 << 20) + 2 * 4096 + 512 + 512);
    place.out("import --form packed tar:2.tar two");
    let (both, _) = devices(&place);
    // The second image adds the piece with the changed page, a piece of the sparse file, the small file, and the
    // device's description.
    assert_eq!(both - first, 2 * CHUNK as u64 + 2 * 4096 + 512);
    check_files(&place, "one", 1);
    check_files(&place, "two", 2);
    place.out("fsck --deep");
    place.out("verify two");
    if !is_root() || !mounts_native(&place, "two") {
        return;
    }
    for writable in ["", " --writable memory"] {
        let point = place.path("point");
        std::fs::create_dir_all(&point).unwrap();
        let guard = Unmount(point.clone());
        place.out(&format!("mount{writable} two point"));
        assert!(std::fs::read(point.join("database")).unwrap() == database(2));
        assert!(std::fs::read(point.join("zeros")).unwrap() == vec![0; 9 << 20]);
        let file = std::fs::File::open(point.join("sparse")).unwrap();
        assert_eq!(file.metadata().unwrap().size(), 40 << 20);
        let mut read = vec![1; 20_000];
        file.read_exact_at(&mut read, (16 << 20) - 5000).unwrap();
        assert!(read[..5000].iter().all(|it| *it == 0));
        assert!(read[5000..14_000] == bytes(3, 9000)[..]);
        assert!(read[14_000..].iter().all(|it| *it == 0));
        drop(file);
        place.out("umount --lazy point");
        drop(guard);
    }
}

#[test]
fn the_first_image_goes_and_the_second_reads_on() {
    let place = place();
    place.out("import --form packed tar:1.tar one");
    place.out("import --form packed tar:2.tar two");
    let (_, before) = devices(&place);
    place.out("rmi one");
    place.out("gc");
    let (_, after) = devices(&place);
    let seals = place.run("doctor").out.contains("✓ fs-verity: ");
    // The data that only the first image needed is the piece with its page, and its small file.
    if !seals {
        assert_eq!(before - after, CHUNK as u64 + 2 * 4096);
    }
    check_files(&place, "two", 2);
    place.out("fsck --deep");
    // A new import restores all data.
    place.out("import --form packed tar:1.tar one");
    check_files(&place, "one", 1);
    place.out("rmi two");
    place.out("gc");
    check_files(&place, "one", 1);
    place.out("fsck --deep");
    place.out("rmi one");
    place.out("gc");
    assert_eq!(devices(&place), (0, 0));
}

#[test]
fn every_verb_knows_files_in_pieces() {
    let place = place();
    place.out("import --form packed tar:1.tar one");
    place.out("import --form packed tar:2.tar two");
    // The export reproduces the original tar.
    place.out("export --compression none two oci:layout");
    let wanted = std::fs::read(place.path("2.tar")).unwrap();
    let mut found = std::fs::read_dir(place.path("layout/blobs/sha256")).unwrap();
    assert!(found.any(|it| std::fs::read(it.unwrap().path()).unwrap() == wanted));
    place.out("export two tar:flat.tar");
    place.out("import --form packed tar:flat.tar flat");
    assert_eq!(place.run("diff two flat").code, Some(0));
    for form in ["objects", "tar", "packed"] {
        place.out(&format!("convert --form {form} two {form}"));
        check_files(&place, form, 2);
        assert_eq!(place.run(&format!("diff two {form}")).code, Some(0), "{form}");
    }
    place.out("convert --form packed objects again");
    place.out("merge one two merged");
    check_files(&place, "merged", 2);
    place.out("filter --include sparse --include database two part");
    assert_eq!(place.run("diff two merged").code, Some(0));
    place.out("rmi one two objects tar packed flat again");
    place.out("gc");
    check_files(&place, "merged", 2);
    let part = place.command(&["cat", "part:/database"]).output().unwrap();
    assert!(part.stdout == database(2));
    place.out("fsck --deep");
    place.out("du");
}
