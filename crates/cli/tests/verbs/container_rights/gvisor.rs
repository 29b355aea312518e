//! gVisor: images for its own EROFS, and the differences of `run` for its runtime. Needs root, and `runsc`.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{place, wait_for};
use crate::container_rights::userns::{acl, set};
use crate::image_verbs::forms::bytes;
use crate::{Place, Ran, add_programs, is_root, program, write};

/// Finds gVisor's runtime, and notes a skipped test if it is missing.
fn runsc() -> Option<PathBuf> {
    if !is_root() {
        return None;
    }
    let found = program("runsc");
    if found.is_none() {
        testing::not_made("runsc", "runsc");
    }
    found
}

/// Runs a script in gVisor with this EROFS as its root, below a layer in memory.
fn boot(place: &Place, image: &str, script: &str) -> Ran {
    const READ: &str = "CAP_DAC_OVERRIDE";
    let bundle = place.path("bundle");
    fs::create_dir_all(bundle.join("rootfs")).unwrap();
    let config = json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/sh", "-c", script],
            "env": ["PATH=/usr/bin:/bin"],
            // Files of other users must be readable.
            "capabilities": {"effective": [READ], "permitted": [READ], "bounding": [READ]},
        },
        "root": {"path": "rootfs"},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "mount"}]},
        "annotations": {
            "dev.gvisor.spec.rootfs.type": "erofs",
            "dev.gvisor.spec.rootfs.source": place.path(image),
            "dev.gvisor.spec.rootfs.overlay": "memory",
        },
    });
    fs::write(bundle.join("config.json"), config.to_string()).unwrap();
    let mut command = Command::new(program("runsc").unwrap());
    command.arg("--root").arg(place.path("state"));
    command.args(["--network=none", "--ignore-cgroups", "run", "--bundle"]).arg(&bundle);
    let id = format!("quire-{}-{image}", std::process::id());
    Ran::from_output(&command.arg(id.replace('/', "-")).output().unwrap())
}

/// Prints all files of a tree, except for its root and the mounts of gVisor.
const SHOW: &str = "export LC_ALL=C
    find . -mindepth 1 ! -path './proc*' ! -path './sys*' ! -path './dev*' ! -path './tmp*' > /tmp/names
    sort /tmp/names | while read -r name; do
        find \"$name\" -maxdepth 0 -printf '%p %y %m %U %G %T@ %l'
        test -f \"$name\" && test ! -L \"$name\" && stat -c ' %s %h' \"$name\" && sha256sum < \"$name\"
        echo
    done";

/// Like [`SHOW`], in fewer processes, for large trees.
const SHOW_MANY: &str = "export LC_ALL=C
    find . -xdev -mindepth 1 ! -path './proc*' ! -path './sys*' ! -path './dev*' ! -path './tmp*' ! -type c \
        -printf '%P %y %m %U %G %T@ %l\\n' | sort
    find . -xdev -type f -printf '%P %s %n\\n' | sort
    find . -xdev -type f -exec sha256sum {} + | sort";

#[test]
fn gvisor_shows_what_was_imported() {
    if runsc().is_none() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let programs = [
        "/bin/sh",
        "/usr/bin/find",
        "/usr/bin/sort",
        "/usr/bin/stat",
        "/usr/bin/sha256sum",
        "/bin/cat",
    ];
    add_programs(&tree, &programs);
    fs::create_dir_all(tree.join("usr/many")).unwrap();
    // The tree has directories of several blocks, and lengths around those of a block and of an inline tail.
    for number in 0..150_u32 {
        let name = format!("usr/many/{number}-{}", "n".repeat(40));
        write(&tree.join(name), &bytes(number, number as usize % 7), 0o644);
    }
    for size in [0, 1, 64, 3399, 3400, 3401, 4063, 4095, 4096, 4097, 8191, 100_000] {
        write(&tree.join(format!("etc/{size}")), &bytes(9, size), 0o640);
    }
    fs::hard_link(tree.join("etc/4097"), tree.join("etc/linked")).unwrap();
    write(&tree.join("etc/again"), &bytes(9, 4097), 0o4755);
    symlink("t".repeat(200), tree.join("etc/far")).unwrap();
    std::os::unix::fs::chown(tree.join("etc/64"), Some(70_000), Some(3)).unwrap();
    fs::create_dir(tree.join("etc/sticky")).unwrap();
    fs::set_permissions(tree.join("etc/sticky"), fs::Permissions::from_mode(0o1777)).unwrap();
    assert!(Command::new("mkfifo").arg(tree.join("etc/pipe")).status().unwrap().success());
    let mut here = Command::new("sh");
    let show = SHOW.replace("/tmp/names", &place.path("names").display().to_string());
    let expect =
        Ran::from_output(&here.args(["-c", &show]).current_dir(&tree).output().unwrap()).out;
    assert!(expect.lines().count() > 400, "{expect}");
    for form in ["objects", "packed"] {
        place.out(&format!("import --quiet --form {form} dir:tree {form}"));
        place.out(&format!("export --quiet {form} gvisor:{form}.img"));
        let ran = boot(&place, &format!("{form}.img"), SHOW);
        assert_eq!(ran.code, Some(0), "{form}: {}", ran.err);
        for (line, shown) in expect.lines().zip(ran.out.lines()) {
            assert_eq!(line, shown, "{form}");
        }
        assert_eq!(expect.len(), ran.out.len(), "{form}");
    }
    let written = "echo new > /etc/short && cat /etc/short && echo more > /usr/many/more";
    let ran = boot(&place, "objects.img", written);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "new\n"), "{}", ran.err);
}

/// Images that gVisor refuses or misreads, according to decision 13.
#[test]
fn gvisor_refuses_other_images() {
    if runsc().is_none() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    add_programs(&tree, &["/bin/sh", "/bin/cat"]);
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(place.path("tree.tar")).arg("-C").arg(&tree).arg(".");
    assert!(tar.status().unwrap().success());
    place.out("import --quiet --form objects tar:tree.tar objects");
    place.out("export --quiet objects gvisor:good");
    let good = fs::read(place.path("good")).unwrap();
    // The tail of a program is behind its inode, where gVisor does not map it.
    place.out("export --quiet objects erofs:inline");
    let mut damaged = good.clone();
    // This byte is in the superblock, which has a checksum.
    damaged[1024 + 30] ^= 1;
    fs::write(place.path("damaged"), damaged).unwrap();
    fs::write(place.path("cut"), &good[..8192]).unwrap();
    fs::write(place.path("empty"), "").unwrap();
    for form in ["objects", "packed", "tar"] {
        place.out(&format!("import --quiet --form {form} tar:tree.tar {form}"));
        let shown: serde_json::Value =
            serde_json::from_str(&place.out(&format!("show --json {form}"))).unwrap();
        let id = shown["image"].as_str().unwrap().rsplit(':').next().unwrap().to_owned();
        fs::copy(place.path(&format!("store/images/{id}")), place.path(&format!("of-{form}")))
            .unwrap();
    }
    for (image, expect) in [
        ("inline", "bad address"),
        ("damaged", "invalid checksum"),
        ("cut", "failed to load /bin/sh"),
        ("empty", "sandbox"),
        // The images have xattrs of overlayfs, or blocks of 512 bytes.
        ("of-objects", "operation not supported"),
        ("of-packed", "image size is too small"),
        ("of-tar", "image size is too small"),
    ] {
        let ran = boot(&place, image, "cat /etc/short");
        assert_eq!(ran.code, Some(128), "{image}: {} {}", ran.out, ran.err);
        assert!(ran.err.contains(expect), "{image}: {}", ran.err);
    }
    let ran = boot(&place, "good", "cat /etc/short");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "short\n"), "{}", ran.err);
}

/// Compares a whole distribution with the kernel's mount of it.
#[test]
fn gvisor_boots_debian() {
    let cache = std::env::var_os("QUIRE_CACHE").map(|it| Path::new(&it).join("debian-small"));
    let Some(layout) = cache.filter(|it| it.is_dir()) else {
        testing::not_made("an image of Debian", "debian-small");
        return;
    };
    if runsc().is_none() {
        return;
    }
    let place = Place::new();
    place.out(&format!("import --quiet --form objects oci:{} a", layout.display()));
    let told: serde_json::Value =
        serde_json::from_str(&place.out("export --json a gvisor:a.img")).unwrap();
    let ran = boot(&place, "a.img", SHOW_MANY);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let point = place.path("point");
    fs::create_dir(&point).unwrap();
    let _guard = crate::mounting::mounts::Unmount(point.clone());
    place.out("mount a point");
    // gVisor cannot read the numbers of devices.
    let mut find = Command::new("find");
    let devices = Ran::from_output(
        &find.arg(&point).args(["-type", "c", "-o", "-type", "b"]).output().unwrap(),
    );
    assert!(devices.out.contains("/srv/kinds/device"), "{}", devices.out);
    assert_eq!(told["withoutNumbers"], devices.out.lines().count(), "{told}");
    let mut here = Command::new("sh");
    here.args(["-c", SHOW_MANY]).current_dir(&point);
    let expect = Ran::from_output(&here.output().unwrap());
    // Files of the image at paths where gVisor mounts its own.
    let hidden = |line: &&str| {
        !["dev/", "./dev/", "proc/", "sys/", "tmp/"]
            .iter()
            .any(|it| line.contains(&format!("  {it}")) || line.starts_with(it))
    };
    let expect: Vec<_> = expect.out.lines().filter(hidden).collect();
    let shown: Vec<_> = ran.out.lines().filter(hidden).collect();
    assert!(expect.len() > 15_000, "{}", expect.len());
    for (line, shown) in expect.iter().zip(&shown) {
        assert_eq!(line, shown);
    }
    assert_eq!(expect.len(), shown.len());
    place.out("umount point");
}

#[test]
fn rights_are_those_that_were_asked_for() {
    let Some(place) = place() else { return };
    if runsc().is_none() {
        return;
    }
    let status = |options: &str, field: &str| {
        let line = format!("run --quiet --runtime runsc {options} a -- cat /proc/self/status");
        let said = place.out(&line);
        let value = said.lines().find_map(|it| it.strip_prefix(field)).unwrap();
        u64::from_str_radix(value.trim(), 16).unwrap()
    };
    // Source: `linux/capability.h`.
    const CHOWN: u64 = 1;
    const SYS_ADMIN: u64 = 1 << 21;
    assert_eq!(status("-u 0", "CapEff:") & (CHOWN | SYS_ADMIN), CHOWN);
    assert_eq!(status("-u 0 --cap-drop CHOWN", "CapEff:") & CHOWN, 0);
    assert_eq!(status("-u 0 --cap-drop ALL", "CapBnd:"), 0);
    assert_eq!(status("-u 0 --cap-drop ALL --cap-add SYS_ADMIN", "CapEff:"), SYS_ADMIN);
    assert_eq!(status("-u 5:6", "CapEff:"), 0);
    assert_eq!(status("-u 0", "NoNewPrivs:"), 0);
    assert_eq!(status("-u 0 --security-opt no-new-privileges", "NoNewPrivs:"), 1);
    let limit = "run --quiet --runtime runsc --ulimit nofile=77:88 a -- sh -c";
    let limit: Vec<_> = limit.split(' ').chain(["ulimit -Sn; ulimit -Hn"]).collect();
    assert_eq!(place.run_each(&limit).out, "77\n88\n");
    // gVisor's kernel supports `/dev/null`. It would only list `/dev/loop-control`, so Quire refuses that device.
    let device = "run --quiet --runtime runsc --device /dev/null:/dev/mine a -- cat /dev/mine";
    assert_eq!(place.out(device), "");
    let ran = place.run("run --quiet --runtime runsc --device /dev/loop-control a -- true");
    if std::path::Path::new("/dev/loop-control").exists() {
        assert!(
            ran.code == Some(125) && ran.err.contains("does not support the device"),
            "{}",
            ran.err
        );
    }
    let ran = place.run("run --quiet --runtime runsc --cap-add NONE_SUCH a -- true");
    assert!(ran.code == Some(125) && ran.err.contains("NONE_SUCH"), "{}", ran.err);
}

/// gVisor keeps separate file positions, which begin at 0.
#[test]
fn files_as_streams_are_written_where_they_should_be() {
    let Some(place) = place() else { return };
    if runsc().is_none() {
        return;
    }
    let text = |file: &mut File| {
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    };
    let _guard = Rm(&place, "alive");
    start(&place, &["--name", "alive", "--runtime", "runsc"], "while :; do sleep 0.05; done");
    for verb in
        [&["run", "--quiet", "--runtime", "runsc", "-u", "0", "a", "--"][..], &["exec", "alive"]]
    {
        let mut file = tempfile::tempfile().unwrap();
        let mut input = tempfile::tempfile().unwrap();
        file.write_all(b"before\n").unwrap();
        input.write_all(b"skipped\nread\n").unwrap();
        input.seek(std::io::SeekFrom::Start(8)).unwrap();
        let mut command = place.command(verb);
        command.args(["sh", "-c", "cat; echo out; echo err >&2; exit 3"]).stdin(input);
        command.stdout(file.try_clone().unwrap()).stderr(file.try_clone().unwrap());
        assert_eq!(command.status().unwrap().code(), Some(3), "{verb:?}: {}", text(&mut file));
        file.write_all(b"after\n").unwrap();
        assert_eq!(text(&mut file), "before\nread\nout\nerr\nafter\n", "{verb:?}");
    }
}

/// By default, gVisor would put a writable layer on top.
#[test]
fn what_is_written_goes_to_the_containers_layer() {
    let Some(place) = place() else { return };
    if runsc().is_none() {
        return;
    }
    fs::create_dir(place.path("kept")).unwrap();
    for writable in ["memory", "self", "dir=kept"] {
        let _guard = Rm(&place, "writer");
        let options = ["--name", "writer", "--runtime", "runsc", "--writable", writable];
        let script =
            "echo new > /etc/new; echo 2 > /etc/short; echo done; while :; do sleep 0.05; done";
        start(&place, &options, script);
        wait_for("what it says", || place.out("logs writer") == "done\n");
        let ran = place.run("diff writer");
        assert_eq!(ran.code, Some(1), "{writable}: {}", ran.err);
        for expect in ["+ /etc/new", "~ /etc/short"] {
            assert!(ran.out.lines().any(|it| it == expect), "{writable}: {}", ran.out);
        }
        assert!(!ran.out.contains("gvisor"), "{writable}: {}", ran.out);
        place.out("export --force writer changes:layer.tar");
        for (file, expect) in [("etc/new", "new\n"), ("etc/short", "2\n")] {
            let mut tar = Command::new("tar");
            tar.arg("-xOf").arg(place.path("layer.tar")).arg(file);
            assert_eq!(Ran::from_output(&tar.output().unwrap()).out, expect, "{writable}");
        }
        place.out("stop --time 0 writer");
        // Unlike Linux, gVisor kills its process 1 by signals that it does not handle.
        assert_eq!(ps(&place, "writer").unwrap()["code"], 143);
        place.out("rm writer");
    }
    assert_eq!(fs::read_to_string(place.path("kept/upper/etc/new")).unwrap(), "new\n");
    let ran = place.run("run --quiet --runtime runsc --read-only a -- sh -c echo>/etc/x");
    assert_ne!(ran.code, Some(0));
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

/// gVisor ignores ACLs when it decides who may read a file.
#[test]
fn who_relies_on_acls_is_told_that_gvisor_does_not_obey_them() {
    if runsc().is_none() {
        return;
    }
    let place = Place::new();
    crate::open_to_all(&place);
    for (name, has_acl) in [("plain", false), ("listed", true)] {
        let tree = place.tree(name, "x");
        add_programs(&tree, &["/bin/sh", "/bin/cat"]);
        write(&tree.join("file"), b"text\n", 0o600);
        if has_acl {
            set(&tree.join("file"), "system.posix_acl_access", &acl(54_321));
        }
        for form in ["objects", "packed"] {
            place.out(&format!("import --quiet --form {form} dir:{name} {name}"));
            let ran = place.run(&format!("run --runtime runsc -u 54321:54321 {name} -- cat /file"));
            assert_ne!(ran.code, Some(0), "{form} {name}: {}", ran.out);
            assert_eq!(ran.err.contains("POSIX ACLs"), has_acl, "{form} {name}: {}", ran.err);
        }
    }
}
