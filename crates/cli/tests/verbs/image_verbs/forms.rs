//! Images with devices: `import --form`, `convert`, and every verb on their images.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::mounting::mounts::Unmount;
use crate::{Place, is_before, is_root, write};

/// Returns pseudo-random bytes of this length.
pub(crate) fn bytes(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Makes tars of two layers: files whose sizes are limits of the formats, two files with the same content, a sparse
/// file, links, and files of the lower layer that the upper layer hides, replaces, or gives another owner.
fn layers(place: &Place) {
    let (lower, upper) = (place.path("lower"), place.path("upper"));
    for tree in [&lower, &upper] {
        std::fs::create_dir_all(tree.join("usr/lib")).unwrap();
    }
    for size in [0, 1, 64, 65, 511, 512, 513, 3000, 3001, 4095, 4096, 4097, 7096, 7097, 100_000] {
        let size32 = u32::try_from(size).unwrap();
        write(&lower.join(format!("usr/lib/{size}")), &bytes(size32, size), 0o644);
    }
    write(&lower.join("usr/twice"), &bytes(100_000, 100_000), 0o755);
    let sparse = std::fs::File::create(lower.join("usr/sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &bytes(3, 9000), 1 << 20).unwrap();
    std::fs::hard_link(lower.join("usr/lib/4097"), lower.join("usr/linked")).unwrap();
    std::os::unix::fs::symlink("lib/4096", lower.join("usr/link")).unwrap();
    write(&lower.join("usr/hidden"), &bytes(7, 5000), 0o644);
    write(&upper.join("usr/.wh.hidden"), b"", 0o644);
    write(&upper.join("usr/lib/513"), &bytes(8, 20_000), 0o600);
    write(&upper.join("usr/lib/7097"), &bytes(7097, 7097), 0o640);
    for (name, tree) in [("lower.tar", &lower), ("upper.tar", &upper)] {
        let mut command = Command::new("tar");
        command.args(["--format=posix", "--sparse", "--numeric-owner", "--sort=name", "-cf"]);
        command.arg(place.path(name)).arg("-C").arg(tree).arg(".");
        assert!(command.status().unwrap().success());
    }
}

/// Makes an image `a` of those layers as an OCI layout, with the code that commits layers.
fn place() -> Place {
    let place = Place::new();
    layers(&place);
    place.out("import --form objects tar:lower.tar lower");
    place.out("import --form objects tar:upper.tar upper");
    place
}

fn json(place: &Place, line: &str) -> Value {
    serde_json::from_str(&place.out(line)).unwrap()
}

fn image(place: &Place, name: &str) -> String {
    json(place, &format!("show --json {name}"))["image"].as_str().unwrap().to_owned()
}

/// Returns a description of every file of a mounted tree, by path.
fn seen(root: &Path) -> BTreeMap<Vec<u8>, String> {
    let mut found = BTreeMap::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let stat = std::fs::symlink_metadata(&path).unwrap();
            let content = match stat.file_type() {
                kind if kind.is_dir() => {
                    open.push(path.clone());
                    String::new()
                }
                kind if kind.is_symlink() => {
                    std::fs::read_link(&path).unwrap().display().to_string()
                }
                _ => format!("{} {:?}", stat.size(), std::fs::read(&path).unwrap()),
            };
            let name = path.strip_prefix(root).unwrap().as_os_str().as_bytes().to_vec();
            let (mode, owner) = (stat.permissions().mode(), (stat.uid(), stat.gid()));
            let time = (stat.mtime(), stat.mtime_nsec());
            let links = stat.nlink();
            found.insert(name, format!("{mode:o} {owner:?} {time:?} {links} {content}"));
        }
    }
    found
}

/// Returns whether this kernel mounts native images like this one; if not, the error must say so.
pub(crate) fn mounts_native(place: &Place, name: &str) -> bool {
    if !is_before(6, 4) {
        return true;
    }
    std::fs::create_dir_all(place.path("refused")).unwrap();
    for line in ["mount", "mount --writable memory"] {
        let ran = place.run(&format!("{line} {name} refused"));
        assert_eq!(ran.code, Some(2), "{line}");
        for part in ["which needs Linux 6.4 or newer", "quire convert --form objects"] {
            assert!(ran.err.contains(part), "{line}: {}", ran.err);
        }
    }
    testing::skipped("images over devices: this kernel is older than Linux 6.4");
    false
}

/// Returns the files that a mount of an image shows.
fn mounted(place: &Place, name: &str, options: &str) -> BTreeMap<Vec<u8>, String> {
    let point = place.path("point");
    std::fs::create_dir_all(&point).unwrap();
    let guard = Unmount(point.clone());
    place.out(&format!("mount{options} {name} point"));
    let found = seen(&point);
    // Programs that other tests start may inherit this process's open files for a moment.
    place.out("umount --lazy point");
    drop(guard);
    found
}

#[test]
fn every_form_shows_the_same_files() {
    if !is_root() {
        return;
    }
    let place = place();
    for name in ["lower", "upper"] {
        let expect = mounted(&place, name, "");
        assert!(expect.len() > 3);
        for form in ["packed", "tar"] {
            place.out(&format!("import --form {form} tar:{name}.tar other"));
            if !mounts_native(&place, "other") {
                return;
            }
            assert!(mounted(&place, "other", "") == expect, "{name} as {form}");
            assert!(mounted(&place, "other", " --writable memory") == expect, "{name} as {form}");
            assert!(place.run("diff other upper").code == Some(i32::from(name != "upper")));
        }
    }
}

#[test]
fn forms_turn_into_each_other() {
    let place = place();
    let [objects, packed, tar] = ["objects", "packed", "tar"].map(|form| {
        place.out(&format!("import --form {form} tar:lower.tar {form}"));
        image(&place, form)
    });
    assert_eq!(objects, image(&place, "lower"));
    // `auto` is the best form for this kernel.
    place.out("import tar:lower.tar auto");
    let best = if is_before(7, 0) { &objects } else { &packed };
    assert_eq!(image(&place, "auto"), *best);
    place.out("export packed tar:packed.flat");
    place.out("export tar tar:tar.flat");
    place.out("export objects tar:objects.flat");
    let flat = |name: &str| std::fs::read(place.path(name)).unwrap();
    assert!(flat("packed.flat") == flat("objects.flat"));
    assert!(flat("tar.flat") == flat("objects.flat"));
    // Both native forms pack the sparse file. Its data is already in the tar image's device, and is not packed again.
    let beside_tar = {
        let other = Place::new();
        std::fs::copy(place.path("lower.tar"), other.path("lower.tar")).unwrap();
        other.out("import --form tar tar:lower.tar tar");
        other.out("import --form packed tar:lower.tar packed");
        image(&other, "packed")
    };
    assert_ne!(beside_tar, packed);
    for (from, to, expect) in [
        ("objects", "packed", &packed),
        ("objects", "tar", &tar),
        ("packed", "objects", &objects),
        ("packed", "tar", &tar),
        ("tar", "objects", &objects),
        ("tar", "packed", &beside_tar),
    ] {
        // The other store has only this form.
        let other = Place::new();
        std::fs::copy(place.path("lower.tar"), other.path("lower.tar")).unwrap();
        other.out(&format!("import --form {from} tar:lower.tar a"));
        other.out(&format!("convert --form {to} a"));
        assert_eq!(image(&other, "a"), *expect, "{from} to {to}");
        other.out("gc");
        other.out("fsck");
        assert_eq!(other.out("cat a:/usr/link").len(), {
            String::from_utf8_lossy(&bytes(4096, 4096)).len()
        });
        other.out("export a tar:a.flat");
        assert!(std::fs::read(other.path("a.flat")).unwrap() == flat("objects.flat"));
        // The export reproduces the original tar.
        other.out("export --compression none a oci:layout");
        let blobs = std::fs::read_dir(other.path("layout/blobs/sha256")).unwrap();
        let lower = flat("lower.tar");
        assert!(
            blobs.into_iter().any(|it| std::fs::read(it.unwrap().path()).unwrap() == lower),
            "{from} to {to}"
        );
        let forms: &[&str] = if to == "objects" { &[] } else { &["data"] };
        let files = |name: &str| {
            let count = |path: &Path| std::fs::read_dir(path).map_or(0, Iterator::count);
            count(&other.path("store").join(name))
        };
        assert_eq!(files("data") > 0, forms.contains(&"data"), "{from} to {to}");
    }
}

#[test]
fn what_came_without_layers_is_packed_too() {
    let place = Place::new();
    let tree = place.tree("tree", "a long line\n");
    write(&tree.join("etc/large"), &bytes(1, 50_000), 0o644);
    place.out("import --form objects dir:tree objects");
    place.out("import --form packed dir:tree packed");
    let objects = json(&place, "du --json")["objects"].clone();
    place.out("convert --form packed objects converted");
    assert_eq!(image(&place, "packed"), image(&place, "converted"));
    place.out("convert --form objects packed back");
    assert_eq!(image(&place, "back"), image(&place, "objects"));
    assert_eq!(json(&place, "du --json")["objects"], objects);
    assert_eq!(place.out("cat packed:/etc/short"), "short\n");
    let ran = place.run("import --form tar dir:tree tar");
    assert!(ran.code == Some(2) && ran.err.contains("--form packed"), "{}", ran.err);
    place.out("rmi objects back");
    place.out("gc");
    place.out("fsck");
    assert_eq!(place.out("cat packed:/etc/long"), "a long line\n".repeat(100));
}

#[test]
fn merging_and_filtering_leave_data_where_it_is() {
    if !is_root() {
        return;
    }
    let place = place();
    place.out("merge lower upper expect");
    let expect = mounted(&place, "expect", "");
    for (lower, upper) in
        [("packed", "packed"), ("tar", "tar"), ("packed", "tar"), ("tar", "objects")]
    {
        let other = Place::new();
        for (name, form) in [("lower", lower), ("upper", upper)] {
            std::fs::copy(place.path(&format!("{name}.tar")), other.path("a.tar")).unwrap();
            other.out(&format!("import --form {form} tar:a.tar {name}"));
        }
        if !mounts_native(&other, "lower") {
            return;
        }
        let devices = |place: &Place| json(place, "du --json")["data"].clone();
        let before = devices(&other);
        other.out("merge lower upper both");
        if upper != "objects" {
            assert_eq!(devices(&other), before, "{lower} and {upper}");
        }
        assert!(mounted(&other, "both", "") == expect, "{lower} and {upper}");
        other.out("filter --include usr/lib lower part");
        other.out("rmi lower upper");
        other.out("gc");
        other.out("fsck");
        assert!(mounted(&other, "both", "") == expect, "{lower} and {upper}");
        assert!(mounted(&other, "part", "").contains_key(&b"usr/lib/4097"[..]));
    }
}

/// The data of a sparse file is in its layer's tar, but not aligned to blocks with its zeros, so it is packed
/// beside the tar.
#[test]
fn a_sparse_file_of_a_tar_takes_no_zeros() {
    let place = Place::new();
    layers(&place);
    let tar = place.path("lower.tar").metadata().unwrap().len();
    place.out("import --form tar tar:lower.tar a");
    let id = json(&place, "show --json a")["image"].as_str().unwrap().to_owned();
    let image = place.path(&format!("store/images/{id}"));
    // The limit is half of the sparse file's length.
    let kept = image.metadata().unwrap().len();
    assert!(kept < 1536 << 10, "the image has {kept} bytes");
    let devices = json(&place, "du --json")["data"].clone();
    let bytes = devices.as_u64().unwrap();
    assert!(
        (tar..tar + (256 << 10)).contains(&bytes),
        "{bytes} bytes of devices, the tar has {tar}"
    );
    // The layer is reused, both when it is known and when only its tar is stored.
    for gone in ["", "a"] {
        if !gone.is_empty() {
            place.out(&format!("rmi {gone}"));
            place.out("gc");
        }
        place.out("import --form tar tar:lower.tar b");
        assert_eq!(json(&place, "show --json b")["image"].as_str(), Some(&*id));
        place.out("fsck --deep");
    }
    if is_root() && mounts_native(&place, "b") {
        let shown = mounted(&place, "b", "");
        place.out("import --form objects tar:lower.tar c");
        assert!(mounted(&place, "c", "") == shown);
    }
}

/// Each version of an image may add a device to the devices that contain its files.
#[test]
fn images_of_many_devices_are_opened_with_few_descriptors() {
    let place = Place::new();
    std::fs::create_dir(place.path("all")).unwrap();
    for number in 0..80_u32 {
        let (one, name) = (place.path("one"), format!("file-{number}"));
        std::fs::create_dir(&one).unwrap();
        write(&one.join(&name), &bytes(number, 5000), 0o644);
        place.out("import --quiet --form packed dir:one one");
        std::fs::rename(one.join(&name), place.path("all").join(&name)).unwrap();
        std::fs::remove_dir(one).unwrap();
    }
    place.out("import --quiet --form packed dir:all all");
    assert!(json(&place, "show --json all")["form"] == "packed");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_quire")]);
    command.arg("--store").arg(place.path("store")).args(["cat", "all:/file-7"]);
    let output = command.output().unwrap();
    assert!(output.stdout == bytes(7, 5000), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Without the index of a device, object names are lost, but no bytes.
#[test]
fn another_import_brings_an_index_back() {
    let place = Place::new();
    layers(&place);
    for form in ["packed", "tar"] {
        place.out(&format!("import --quiet --form {form} tar:lower.tar {form}"));
        let cat = || place.run(&format!("cat {form}:/usr/lib/4097"));
        assert_eq!(cat().code, Some(0), "{form}");
        for entry in std::fs::read_dir(place.path("store/data")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|it| it == "index") {
                std::fs::remove_file(path).unwrap();
            }
        }
        let ran = cat();
        assert!(
            ran.code == Some(2) && ran.err.contains("a new import of the image"),
            "{}",
            ran.err
        );
        place.out(&format!("import --quiet --form {form} tar:lower.tar {form}"));
        assert_eq!(cat().code, Some(0), "{form}");
        place.out(&format!("verify {form}"));
    }
}

#[test]
fn names_say_the_form_that_their_image_has() {
    let place = place();
    let form = |name: &str| json(&place, &format!("show --json {name}"))["form"].clone();
    let named = |name: &str| {
        let list = json(&place, "images --json");
        let images = list.as_array().unwrap_or_else(|| panic!("{list}"));
        let is_it = |it: &&Value| it["name"].as_str().unwrap().starts_with(name);
        images.iter().find(is_it).unwrap_or_else(|| panic!("{list}"))["form"].clone()
    };
    // This image had no name.
    place.out("import --form packed dir:upper");
    let list = std::fs::read_dir(place.path("store/images")).unwrap();
    let ids: Vec<_> = list.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    let packed = ids.iter().find(|id| form(id) == "packed").unwrap();
    place.out(&format!("tag {packed} tagged"));
    assert_eq!((named("tagged"), form("tagged")), ("packed".into(), "packed".into()));
    // The data to pack is in another image's tar already.
    place.out("import --form tar tar:lower.tar elsewhere");
    place.out("merge lower tagged both");
    assert_eq!((named("both"), form("both")), ("tar".into(), "tar".into()));
}

#[test]
fn data_of_another_packed_image_is_not_packed_again() {
    let (first, second) = (place(), Place::new());
    for tar in ["lower.tar", "upper.tar"] {
        std::fs::copy(first.path(tar), second.path(tar)).unwrap();
    }
    // This store already has some contents of the upper layer.
    second.out("import --form packed tar:lower.tar before");
    let import = |place: &Place, name: &str| {
        place.out(&format!("import --form packed tar:upper.tar {name}"));
        image(place, name)
    };
    let alone = import(&first, "alone");
    // Data in the store is not stored again, so the image has another device.
    assert_ne!(import(&second, "beside"), alone);
    assert_eq!(import(&first, "again"), alone);
}

#[test]
fn layers_that_differ_in_ends_alone_have_devices_of_their_own() {
    let place = Place::new();
    let tar = |name: &str, files: &[(&str, Vec<u8>)]| {
        let tree = place.path("tree");
        std::fs::create_dir_all(&tree).unwrap();
        for (file, bytes) in files {
            write(&tree.join(file), bytes, 0o644);
        }
        let mut command = Command::new("tar");
        command.args(["--numeric-owner", "-cf"]).arg(place.path(name)).arg("-C").arg(&tree);
        assert!(command.arg(".").status().unwrap().success());
        std::fs::remove_dir_all(&tree).unwrap();
    };
    let block = bytes(9, 32 << 10);
    // The images have files that consist only of a tail, and files with the same blocks but different tails.
    tar("a.tar", &[("a", bytes(1, 100))]);
    tar("b.tar", &[("b", bytes(2, 101))]);
    tar("c.tar", &[("c", [&block[..], b"enda"].concat())]);
    tar("d.tar", &[("d", [&block[..], b"endbb"].concat())]);
    // A file that is the whole tar of another layer.
    let inner = std::fs::read(place.path("c.tar")).unwrap();
    assert_eq!(inner.len() % 4096, 0);
    tar("e.tar", &[("e", inner)]);
    for (form, name) in
        [("tar", "c"), ("packed", "a"), ("packed", "b"), ("packed", "d"), ("packed", "e")]
    {
        place.out(&format!("import --form {form} tar:{name}.tar {name}"));
    }
    place.out("import --form packed tar:c.tar cc");
    place.out("gc");
    place.out("fsck");
    for name in ["a", "b", "c", "cc", "d", "e"] {
        place.out(&format!("export --compression none {name} docker-archive:{name}.out"));
        place.out(&format!("convert --form objects {name} objects-{name}"));
    }
    place.out("rmi a b c cc d e");
    place.out("gc");
    place.out("fsck");
}

#[test]
fn fingerprints_of_a_source_are_refused() {
    let Some(mut python) = testing::command("python3") else { return };
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let script = format!(
        "import tarfile\n\
         t = tarfile.open('x.tar', 'w', format=tarfile.PAX_FORMAT)\n\
         i = t.gettarinfo('{}/etc/long', 'long')\n\
         i.pax_headers['SCHILY.xattr.erofs.fingerprint.v1'] = 'sha256:' + 'x' * 32\n\
         t.addfile(i, open('{}/etc/long', 'rb'))\n\
         t.close()\n",
        tree.display(),
        tree.display()
    );
    python.args(["-c", &script]).current_dir(place.folder.path());
    assert!(python.status().unwrap().success());
    for form in ["packed", "tar"] {
        let ran = place.run(&format!("import --form {form} tar:x.tar a"));
        assert!(ran.code == Some(2) && ran.err.contains("fingerprint"), "{form}: {}", ran.err);
    }
    place.out("import --form objects tar:x.tar a");
    place.out("gc");
}

#[test]
fn a_device_that_was_cut_off_is_never_mounted() {
    if !is_root() {
        return;
    }
    for form in ["packed", "tar"] {
        let place = place();
        place.out(&format!("import --form {form} tar:lower.tar a"));
        if !mounts_native(&place, "a") {
            return;
        }
        let data = std::fs::read_dir(place.path("store/data")).unwrap();
        let mut devices = data.map(|it| it.unwrap().path()).filter(|it| it.extension().is_none());
        let device = devices.next().unwrap();
        // A file with fs-verity cannot be changed, but it can be replaced by another file.
        let good = std::fs::read(&device).unwrap();
        let replace = |bytes: &[u8]| {
            std::fs::remove_file(&device).unwrap();
            write(&device, bytes, 0o444);
        };
        replace(&good[..4096]);
        std::fs::create_dir(place.path("point")).unwrap();
        let _guard = Unmount(place.path("point"));
        for line in ["mount a point", "mount --writable memory a point"] {
            let ran = place.run(line);
            assert_eq!(ran.code, Some(2), "{form}: {line}");
            assert!(ran.err.contains("bytes, not") && ran.err.contains("fsck"), "{}", ran.err);
        }
        replace(&[&good[..4096], &vec![0; good.len() - 4096]].concat());
        let ran = place.run("fsck");
        assert_eq!(ran.code, Some(1), "{form}: {}", ran.err);
        assert!(ran.out.contains("a:latest"), "{form}: {}", ran.out);
    }
}

#[test]
fn what_overlayfs_would_take_for_its_own_is_not_packed() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let device = tree.join("etc/white");
    let made = Command::new("mknod").arg(&device).args(["c", "0", "0"]).status();
    assert!(made.unwrap().success());
    let ran = place.run("import --form packed dir:tree a");
    assert!(ran.code == Some(2) && ran.err.contains("etc/white"), "{}", ran.err);
    assert!(ran.err.contains("--form objects"), "{}", ran.err);
}

#[test]
fn containers_run_and_are_committed_in_their_form() {
    let Some(place) = crate::container_life::commit::place() else { return };
    let whole = place.path("whole");
    std::fs::create_dir_all(whole.join("etc")).unwrap();
    for name in ["hosts", "hostname", "resolv.conf"] {
        std::fs::write(whole.join("etc").join(name), "").unwrap();
    }
    crate::add_programs(&whole, &["/bin/cat"]);
    for form in ["packed", "tar"] {
        place.out(&format!("import --quiet --form {form} tar:base.tar a"));
        let out = place.out("run --writable memory a -- /bin/cat /proc/self/mounts");
        assert!(out.contains(" / overlay rw"), "{out}");
        // The image lacks the mount points for `/etc/hosts` and similar files (decision 15).
        let out = place.out("run --writable none a -- /bin/cat /proc/self/mounts");
        assert!(out.contains(" / overlay ro"), "{out}");
        place.out(&format!("import --quiet --form packed dir:{} whole", whole.display()));
        let out = place.out("run --writable none whole -- /bin/cat /proc/self/mounts");
        assert!(out.contains(" / erofs ro"), "{out}");
        let change = ["run", "--quiet", "--name", "one", "-d", "a", "--", "/bin/sh", "-c"];
        let ran = place.run_each(&[&change[..], &["echo new >/new; rm -r /bin/mv"]].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        place.out("wait one");
        place.out("commit --quiet one b");
        place.out("rm one");
        assert_eq!(json(&place, "show --json b")["form"], form);
        assert_eq!(place.out("cat b:/new"), "new\n");
        assert_eq!(place.out("run b -- /bin/cat /new"), "new\n");
        assert_eq!(place.run("run b -- /bin/mv").code, Some(127));
    }
}

#[test]
fn a_digest_is_demanded_of_every_form() {
    if !is_root() {
        return;
    }
    let place = place();
    std::fs::create_dir(place.path("point")).unwrap();
    let _guard = Unmount(place.path("point"));
    for form in ["packed", "tar"] {
        place.out(&format!("import --form {form} tar:lower.tar a"));
        let id = image(&place, "a");
        place.out(&format!("mount --digest {id} a point"));
        place.out("umount --lazy point");
        let other = image(&place, "lower");
        let ran = place.run(&format!("mount --digest {other} a point"));
        assert!(ran.code == Some(2) && ran.err.contains("--digest"), "{}", ran.err);
        // A byte of the image file is flipped. With `--digest`, the file is hashed, unless the kernel verifies it.
        let file = place.path("store/images").join(&id);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        let bytes = std::fs::read(&file).unwrap();
        let flipped: Vec<u8> = bytes.iter().map(|it| !it).take(1).collect();
        let at = std::fs::File::options().write(true).open(&file);
        // With fs-verity the file cannot be written.
        let Ok(at) = at else { continue };
        std::os::unix::fs::FileExt::write_all_at(&at, &flipped, 0).unwrap();
        let ran = place.run(&format!("mount --digest {id} a point"));
        assert!(ran.code == Some(2) && ran.err.contains("damaged"), "{}", ran.err);
        std::os::unix::fs::FileExt::write_all_at(&at, &bytes[..1], 0).unwrap();
    }
}

#[test]
fn a_disk_with_large_sectors_is_no_reason_for_errors() {
    let place = place();
    if !is_root() || !mounts_native(&place, "lower") {
        return;
    }
    let (file, disk) = (place.path("disk.ext4"), place.path("disk"));
    std::fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    std::fs::create_dir(&disk).unwrap();
    let run = |program: &str, options: &[&str], last: &Path| {
        let out = Command::new(program).args(options).arg(last).output().unwrap();
        assert!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let device = run("losetup", &["--find", "--show", "--sector-size", "4096"], &file);
    let device = Path::new(device.trim());
    run("mkfs.ext4", &["-q", "-F"], device);
    run("mount", &[device.to_str().unwrap()], &disk);
    let guard = Unmount(disk.clone());
    // The loop device is removed with the mount.
    run("losetup", &["--detach"], device);
    let expect = mounted(&place, "lower", "");
    std::fs::remove_dir_all(place.path("store")).unwrap();
    std::os::unix::fs::symlink(disk.join("store"), place.path("store")).unwrap();
    std::fs::create_dir(disk.join("store")).unwrap();
    for form in ["tar", "packed", "objects"] {
        place.out(&format!("import --form {form} tar:lower.tar {form}"));
        assert!(mounted(&place, form, "") == expect, "{form}");
    }
    let doctor = json(&place, "doctor --json");
    let can = |name: &str| {
        let features = doctor["features"].as_array().unwrap();
        features.iter().find(|it| it["feature"] == name).unwrap()["can"].clone()
    };
    assert_eq!(can("direct-io"), "no", "{doctor}");
    // Packed data would be in memory twice.
    let form = doctor["choices"]["form"].as_str().unwrap();
    let why = if can("erofs-page-sharing") == "yes" { "direct reads" } else { "" };
    assert!(form.starts_with("objects: ") && form.contains(why), "{form}");
    place.out("import tar:lower.tar auto");
    assert_eq!(json(&place, "show --json auto")["form"], "objects");
    drop(guard);
}
