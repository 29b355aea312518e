//! `bundle --vm`: disks for virtual machines that are hard links of the store's files.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::disk::check_mounted;
use super::erofs_layers::{TAR, layout};
use crate::mounting::mounts::Unmount;
use crate::{Place, is_before, is_memory, is_root, program, write};

/// Makes an image `a` over devices.
fn place() -> Place {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    write(&tree.join("large"), &vec![b'l'; 3_000_000], 0o4711);
    write(&tree.join("equal"), &std::fs::read(tree.join("etc/long")).unwrap(), 0o600);
    for number in 0..50_u8 {
        write(&tree.join(number.to_string()), &vec![number; 700 * usize::from(number)], 0o644);
    }
    place.out("import --quiet --form packed dir:tree a");
    place
}

fn bundle(place: &Place, line: &str) -> Value {
    serde_json::from_str(&place.out(&format!("bundle --json {line}"))).unwrap()
}

/// Bytes on disk of all files below a folder, each once.
fn allocated(folder: &Path) -> u64 {
    fn look(folder: &Path, found: &mut BTreeMap<(u64, u64), u64>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let stat = path.symlink_metadata().unwrap();
            if stat.is_dir() {
                look(&path, found);
            } else {
                found.insert((stat.dev(), stat.ino()), stat.blocks() * 512);
            }
        }
    }
    let mut found = BTreeMap::new();
    look(folder, &mut found);
    found.values().sum()
}

/// Returns the files of the report, in order.
fn files(told: &Value) -> Vec<String> {
    let disks = told["disks"].as_array().unwrap();
    disks.iter().map(|it| it["file"].as_str().unwrap().to_owned()).collect()
}

/// Joins the files to one disk.
fn flat(place: &Place, told: &Value) -> Vec<u8> {
    let read = |file: &String| std::fs::read(place.path("vm").join(file)).unwrap();
    files(told).iter().flat_map(read).collect()
}

#[test]
fn the_disks_are_the_files_of_the_store() {
    let place = place();
    let before = allocated(place.folder.path());
    let told = bundle(&place, "--vm vm --writable none a");
    // Only the texts are new.
    let new = allocated(place.folder.path()) - before;
    assert!(new <= 64 << 10, "{new} bytes");
    let (vm, store) = (place.path("vm"), place.path("store"));
    let disks = told["disks"].as_array().unwrap();
    assert!(disks.len() >= 2, "{told}");
    let mut bytes = 0;
    for disk in disks {
        let stored = match disk["device"].as_str() {
            Some(id) => store.join("data").join(id),
            None => store.join("images").join(told["image"].as_str().unwrap()),
        };
        let [ours, theirs] =
            [vm.join(disk["file"].as_str().unwrap()), stored].map(|it| it.metadata().unwrap());
        assert_eq!((ours.dev(), ours.ino()), (theirs.dev(), theirs.ino()), "{disk}");
        assert_eq!(disk["bytes"], ours.len());
        assert_eq!(ours.mode() & 0o222, 0, "{disk}");
        bytes += ours.len();
    }
    assert_eq!(told["bytes"], bytes);
    assert_eq!(vm.metadata().unwrap().mode() & 0o777, 0o700);
    let written: Value =
        serde_json::from_slice(&std::fs::read(vm.join("machine.json")).unwrap()).unwrap();
    assert_eq!(written, told);
    assert_eq!((&told["writable"], vm.join("writable.ext4").exists()), (&Value::Null, false));
    // Without --json, the arguments of QEMU are printed.
    let printed = place.out("bundle --vm again --writable none a");
    let path = place.path("again/disk.vmdk").canonicalize().unwrap();
    let expect = format!("-drive 'if=virtio,format=vmdk,read-only=on,file={}'\n", path.display());
    assert!(printed.starts_with(&expect), "{printed}");
    // The store is sound, and counts a file once.
    assert_eq!(place.run("fsck").code, Some(0));
    assert_eq!(place.run("verify a").code, Some(0));
}

/// Devices are shared by the images of a store, and a machine gets whole devices.
#[test]
fn a_machine_gets_no_data_of_other_images() {
    let place = Place::new();
    let shared = testing::noise(300_000);
    let secret: Vec<u8> = shared[..50_000].iter().map(|it| !it).collect();
    for (tree, has_secret) in [("victim", true), ("attacker", false)] {
        let tree = place.tree(tree, "x");
        write(&tree.join("shared"), &shared, 0o644);
        if has_secret {
            write(&tree.join("secret"), &secret, 0o600);
        }
    }
    place.out("import --quiet --form packed dir:victim victim");
    place.out("import --quiet --form packed dir:attacker attacker");
    place.out("filter --quiet --exclude secret victim filtered");
    let has_secret = |told: &Value| {
        let disk = flat(&place, told);
        disk.windows(4096).any(|it| it == &secret[..4096])
    };
    for image in ["attacker", "filtered"] {
        let refused = place.run(&format!("bundle --vm vm {image}"));
        assert_eq!(refused.code, Some(2), "{}", refused.err);
        let told = ["data that is not in the image", "--shared-devices", "export"];
        assert!(told.iter().all(|it| refused.err.contains(it)), "{}", refused.err);
        assert!(!place.path("vm").exists());
        let told = bundle(&place, &format!("--shared-devices --writable none --vm vm {image}"));
        assert!(has_secret(&told), "{image}: the test shows nothing");
        std::fs::remove_dir_all(place.path("vm")).unwrap();
    }
    let told = bundle(&place, "--writable none --vm vm victim");
    assert!(has_secret(&told));
}

/// `gc` frees whole pages only, so small files of a removed image may stay in pages that another image needs.
#[test]
fn a_machine_gets_no_rest_of_a_removed_image() {
    let place = Place::new();
    // The last page of this file has space for the secret.
    let shared = testing::noise(300_000);
    let secret: Vec<u8> = shared[..3000].iter().map(|it| !it).collect();
    for (tree, is_victim) in [("victim", true), ("attacker", false)] {
        let tree = place.tree(tree, "x");
        write(&tree.join("shared"), &shared, 0o644);
        if is_victim {
            write(&tree.join("secret"), &secret, 0o600);
            // `gc` replaces the index only if it can free a page.
            let large: Vec<u8> = shared[..12 * 4096].iter().map(|it| it ^ 1).collect();
            write(&tree.join("large"), &large, 0o644);
        }
    }
    place.out("import --quiet --form packed dir:victim victim");
    place.out("import --quiet --form packed dir:attacker attacker");
    place.out("rmi victim");
    place.out("gc --wait");
    let told = bundle(&place, "--shared-devices --writable none --vm vm attacker");
    let has_secret = flat(&place, &told).windows(secret.len()).any(|it| it == secret);
    assert!(has_secret, "the test shows nothing");
    std::fs::remove_dir_all(place.path("vm")).unwrap();
    let refused = place.run("bundle --vm vm attacker");
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(refused.err.contains("--shared-devices"), "{}", refused.err);
}

/// The data of a layer belongs to the image, also where a layer above hides it.
#[test]
fn a_machine_gets_all_layers_of_its_image() {
    if !testing::programs(&["tar"]) {
        return;
    }
    let place = Place::new();
    for form in ["packed", "tar"] {
        let mut layers = Vec::new();
        for number in 0..2_u8 {
            let tree = place.path(&format!("{form}-{number}"));
            std::fs::create_dir(&tree).unwrap();
            let hidden: Vec<u8> = testing::noise(90_000).iter().map(|it| it ^ number).collect();
            write(&tree.join("hidden"), &hidden, 0o644);
            write(&tree.join(number.to_string()), &testing::noise(20_000), 0o644);
            let tar = place.path(&format!("{form}-{number}.tar"));
            assert!(testing::trees::run("tar", &["-cf", tar.to_str().unwrap(), "."], &tree));
            layers.push((TAR, std::fs::read(tar).unwrap()));
        }
        layout(&place, form, &layers);
        place.out(&format!("import --quiet --form {form} oci:{form} {form}"));
        let told = bundle(&place, &format!("--writable none --vm vm-{form} {form}"));
        assert!(told["disks"].as_array().unwrap().len() >= 2, "{told}");
    }
}

/// A hypervisor that guesses the format would take this device for a QCOW2, whose backing file may be any file of the
/// host.
#[test]
fn every_configuration_states_the_format() {
    let place = Place::new();
    let mut file = b"QFI\xfb\0\0\0\x02".to_vec();
    file.resize(100_000, 0);
    std::fs::create_dir(place.path("tree")).unwrap();
    write(&place.path("tree/file"), &file, 0o644);
    place.out("import --quiet --form packed dir:tree a");
    let told = bundle(&place, "--vm vm --writable self,size=1g a");
    let device = std::fs::read(place.path("vm/device-1")).unwrap();
    assert!(device.starts_with(b"QFI\xfb"), "otherwise this test shows nothing");

    let folder = place.path("vm").canonicalize().unwrap();
    let names = ["image.erofs", "device-1", "writable.ext4"];
    let paths = names.map(|it| folder.join(it).display().to_string());
    // Each configuration has the files in order, and only the last one is writable.
    let words = |field: &str| {
        let list = told[field].as_array().unwrap();
        list.iter().map(|it| it.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let drives: Vec<_> = words("qemuDisks").into_iter().filter(|it| it.contains("file=")).collect();
    let disks = words("cloudHypervisorArguments")[1..4].to_vec();
    for (number, path) in paths.iter().enumerate() {
        let is_last = number == 2;
        assert!(drives[number].ends_with(&format!("file={path}")), "{drives:?}");
        assert!(drives[number].contains("format=raw"), "{drives:?}");
        assert_eq!(drives[number].contains("read-only=on"), !is_last, "{drives:?}");
        let access = if is_last { "off" } else { "on" };
        assert_eq!(disks[number], format!("path={path},readonly={access},image_type=raw"));
        let disk = &told["cloudHypervisor"]["disks"][number];
        assert_eq!((&disk["path"], &disk["image_type"]), (&(**path).into(), &"Raw".into()));
        assert_eq!(disk["readonly"], !is_last, "{disk}");
        // Firecracker has no other format.
        let drive = &told["firecracker"]["drives"][number];
        assert_eq!(
            (&drive["path_on_host"], &drive["is_read_only"]),
            (&(**path).into(), &(!is_last).into())
        );
    }
    // Nor does QEMU guess the format of the files in the VMDK.
    if let Some(qemu) = program("qemu-img") {
        let run = |words: &[&str]| {
            let mut command = Command::new(&qemu);
            let output = command.args(words).current_dir(&folder).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        };
        // It is a damaged QCOW2 for a program that guesses.
        let mut guess = Command::new(&qemu);
        let guessed = guess.args(["info", "device-1"]).current_dir(&folder).output().unwrap();
        assert!(!guessed.status.success(), "otherwise this test shows nothing");
        run(&["convert", "-f", "vmdk", "-O", "raw", "disk.vmdk", "../converted"]);
        let files = [names[0], names[1]].map(|it| std::fs::read(folder.join(it)).unwrap());
        assert!(std::fs::read(place.path("converted")).unwrap() == files.concat());
        let info: Value =
            serde_json::from_slice(&run(&["info", "--output=json", "disk.vmdk"])).unwrap();
        assert_eq!(info["backing-filename"], Value::Null, "{info}");
    } else {
        testing::skipped("qemu-img is not installed");
    }
    // Kata Containers joins the image and its devices as flat extents of a VMDK.
    let mounts = told["kataMounts"].as_array().unwrap();
    assert_eq!((&mounts[0]["type"], &mounts[0]["source"]), (&"ext4".into(), &(*paths[2]).into()));
    assert_eq!((&mounts[1]["type"], &mounts[1]["source"]), (&"erofs".into(), &(*paths[0]).into()));
    let device = Value::from(format!("device={}", paths[1]));
    assert!(mounts[1]["options"].as_array().unwrap().contains(&device), "{mounts:?}");
}

#[test]
fn the_disks_outlive_the_image() {
    let place = place();
    let told = bundle(&place, "--vm vm a");
    let before = flat(&place, &told);
    place.out("rmi a");
    let gc: Value = serde_json::from_str(&place.out("gc --json")).unwrap();
    let image = place.path("store/images").join(told["image"].as_str().unwrap());
    assert!(!image.exists(), "{gc}");
    let garbage = gc["garbage"].as_array().unwrap();
    let of_disks: Vec<_> = garbage
        .iter()
        .filter(|it| ["image", "device"].contains(&it["kind"].as_str().unwrap()))
        .map(|it| it["bytes"].as_u64().unwrap())
        .collect();
    assert!(of_disks.len() >= 2 && of_disks.iter().all(|it| *it == 0), "{gc}");
    assert!(flat(&place, &told) == before);
}

/// The kernel finds the devices at the addresses of the device table, if it gets none at the mount.
#[test]
fn the_kernel_mounts_all_files_as_one_disk() {
    let place = place();
    let told = bundle(&place, "--vm vm a");
    let disk = flat(&place, &told);
    write(&place.path("flat"), &disk, 0o644);
    let vmdk = std::fs::read_to_string(place.path("vm/disk.vmdk")).unwrap();
    let extents = vmdk.lines().filter_map(|it| it.strip_prefix("RW ")?.split_once(' '));
    let (mut sectors, mut names) = (0_usize, Vec::new());
    for (length, rest) in extents {
        sectors += length.parse::<usize>().unwrap();
        names.push(rest.split('"').nth(1).unwrap().to_owned());
    }
    assert_eq!((sectors * 512, names), (disk.len(), files(&told)));
    match program("qemu-img") {
        Some(qemu) => {
            let mut command = Command::new(qemu);
            command.args(["convert", "-f", "vmdk", "-O", "raw", "vm/disk.vmdk", "converted"]);
            let output = command.current_dir(place.folder.path()).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(std::fs::read(place.path("converted")).unwrap() == disk);
        }
        None => testing::skipped("qemu-img is not installed"),
    }
    let can_mount = std::fs::read_to_string("/proc/filesystems").unwrap().contains("erofs");
    if !is_root() || !can_mount || is_before(6, 4) || program("unshare").is_none() {
        return testing::skipped("what the kernel shows of a flat disk: it cannot be mounted here");
    }
    check_mounted(&place, "mount -t erofs -o ro,loop flat m");
}

#[test]
fn changes_go_to_a_sparse_ext4_with_a_journal() {
    let place = place();
    if program("mkfs.ext4").is_none() && !Path::new("/usr/sbin/mkfs.ext4").is_file() {
        return testing::skipped("mkfs.ext4 is not installed");
    }
    let told = bundle(&place, "--vm vm --writable self,size=1g a");
    let path = place.path("vm/writable.ext4");
    let stat = path.metadata().unwrap();
    assert_eq!((told["writableBytes"].as_u64(), stat.len()), (Some(1 << 30), 1 << 30));
    assert_eq!(stat.mode() & 0o777, 0o600);
    assert!(stat.blocks() * 512 < 16 << 20, "{} blocks", stat.blocks());
    // Source: Linux Documentation/filesystems/ext4/super.rst: s_magic, and bit 2 of s_feature_compat, has_journal.
    let superblock = std::fs::read(&path).unwrap()[1024..2048].to_vec();
    assert_eq!(superblock[0x38..0x3a], [0x53, 0xef]);
    assert_eq!(superblock[0x5c] & 4, 4);
    // Two virtual machines have two disks.
    bundle(&place, "--vm other --writable self,size=1g a");
    assert_ne!(place.path("other/writable.ext4").metadata().unwrap().ino(), stat.ino());
}

#[test]
fn options_of_containers_are_refused_by_name() {
    let place = place();
    for (options, named) in [
        ("--env A=b", "--env"),
        ("--volume /:/host", "--volume"),
        ("--network host", "--network"),
        ("--hostname h", "--hostname"),
        ("--userns auto", "--userns"),
        ("--memory 1g", "--memory"),
        ("--tty", "--tty"),
        ("--writable memory", "--writable memory"),
        ("--writable dir", "--writable dir"),
    ] {
        let ran = place.run(&format!("bundle --vm vm {options} a"));
        assert_eq!(ran.code, Some(2), "{options}: {}", ran.err);
        assert!(ran.err.contains(named) && ran.err.contains("--vm"), "{options}: {}", ran.err);
        assert!(!place.path("vm").exists(), "{options}");
    }
    let ran = place.run("bundle --vm vm a bundle sh");
    assert!(ran.code == Some(2) && !place.path("vm").exists(), "{}", ran.err);
    let ran = place.run("bundle a");
    assert_eq!(ran.code, Some(2), "{}", ran.err);
}

#[test]
fn what_cannot_be_a_disk_is_refused() {
    let place = place();
    let check = |line: &str, why: &str| {
        let ran = place.run(line);
        assert!(ran.code == ran.failure() && ran.err.contains(why), "{line}: {}", ran.err);
        ran
    };
    place.out("import --quiet --form objects dir:tree o");
    check("bundle --vm vm o", "`quire convert --form packed o`");
    check("bundle --vm vm none", "there is no image");
    check("bundle --vm vm --writable self,size=1k a", "16 MiB to 16 TiB");
    let other = "0".repeat(64);
    check(&format!("bundle --vm vm --digest {other} a"), "as --digest requires");
    assert!(!place.path("vm").exists(), "a failure leaves no directory");
    // After a failure, a directory that was there is as it was.
    std::fs::create_dir(place.path("vm")).unwrap();
    check("bundle --vm vm --writable self,size=1k a", "16 MiB to 16 TiB");
    assert_eq!(std::fs::read_dir(place.path("vm")).unwrap().count(), 0);
    write(&place.path("vm/file"), b"", 0o644);
    check("bundle --vm vm a", "is not empty");
    place.out("convert --quiet --form packed o");
    bundle(&place, "--vm converted o");

    write(&place.path("policy.toml"), b"default = \"none\"\n", 0o644);
    let ran = place.run("--policy policy.toml bundle --vm refused a");
    assert_eq!(ran.code, Some(4), "{}", ran.err);
    assert!(!place.path("refused").exists());
}

/// A person who can write to the directory could replace a disk by any file of the host, and one who can enter it reads
/// the files of the store.
#[test]
fn a_directory_of_others_or_open_to_them() {
    let place = place();
    let open = place.path("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o1777)).unwrap();
    // A link is not followed, because another user may have made it.
    std::os::unix::fs::symlink("open", place.path("link")).unwrap();
    let ran = place.run("bundle --vm link --writable none a");
    assert!(ran.code == Some(2) && ran.err.contains("is a link"), "{}", ran.err);
    assert_eq!(open.metadata().unwrap().mode() & 0o7777, 0o1777);
    let ran = place.run("bundle --vm open --writable none a");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("set the mode of"), "{}", ran.err);
    assert_eq!(open.metadata().unwrap().mode() & 0o7777, 0o700);
    if !is_root() {
        testing::skipped("only root can give a directory to another user");
        return;
    }
    let theirs = place.path("theirs");
    std::fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(1234), None).unwrap();
    let ran = place.run("bundle --vm theirs a");
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(ran.err.contains("belongs to user 1234"), "{}", ran.err);
    assert_eq!(std::fs::read_dir(&theirs).unwrap().count(), 0);
}

#[test]
fn another_file_system_is_refused_with_the_way_out() {
    let place = place();
    if !is_root() {
        testing::skipped("only root can mount a file system");
        return;
    }
    let at = place.path("memory");
    std::fs::create_dir(&at).unwrap();
    let mut mount = Command::new("mount");
    assert!(mount.args(["-t", "tmpfs", "vm"]).arg(&at).status().unwrap().success());
    let _guard = Unmount(at.clone());
    assert!(is_memory(&at));
    let ran = place.run("bundle --vm memory/vm a");
    let way_out = "choose a directory beside the store";
    assert!(ran.code == Some(2) && ran.err.contains(way_out), "{}", ran.err);
    assert!(!at.join("vm").exists());
    // A directory that was there is as it was.
    std::fs::create_dir(at.join("kept")).unwrap();
    std::fs::set_permissions(at.join("kept"), std::fs::Permissions::from_mode(0o751)).unwrap();
    let ran = place.run("bundle --vm memory/kept a");
    assert!(ran.code == Some(2) && ran.err.contains(way_out), "{}", ran.err);
    assert_eq!(at.join("kept").metadata().unwrap().mode() & 0o7777, 0o751);
    assert_eq!(std::fs::read_dir(at.join("kept")).unwrap().count(), 0);
}
