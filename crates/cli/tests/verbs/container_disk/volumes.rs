//! `--mount` and `--volume`: mounts in a container besides its root. Needs root.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{all_runtimes, place, runtimes, wait_for};
use crate::{Place, add_programs, program};

fn with_programs() -> Option<Place> {
    let place = place()?;
    if program("mkfs.ext4").is_none() {
        testing::skipped("mkfs.ext4 is not installed");
        return None;
    }
    add_programs(&place.path("tree"), &["/bin/ls", "/bin/dd"]);
    place.out(&format!("import --quiet dir:{} a", place.path("tree").display()));
    Some(place)
}

#[test]
fn every_kind_is_mounted_with_its_limit_and_mode() {
    let Some(place) = with_programs() else { return };
    fs::create_dir(place.path("host")).unwrap();
    fs::write(place.path("host/file"), "host\n").unwrap();
    let host = place.path("host").display().to_string();
    for runtime in runtimes() {
        for userns in ["host", "0:700000:65536"] {
            let mounts = [
                "type=memory,dst=/m,size=1m,mode=0700".to_owned(),
                "type=tmpfs,target=/any".to_owned(),
                "type=self,dst=/deep/s,size=16m,mode=750".to_owned(),
                "type=self,dst=/deep,size=16m".to_owned(),
                format!("type=dir,src={host},dst=/h"),
                format!("type=bind,source={host}/file,destination=/f,readonly"),
                "type=memory,dst=/dev/shm,size=64k,ro".to_owned(),
            ];
            let mut arguments = vec!["run", "--quiet", "--runtime", runtime, "--userns", userns];
            arguments.extend(["-u", "0"]);
            arguments.extend(mounts.iter().flat_map(|it| ["--mount", it]));
            let script = "for d in /m /any /deep /deep/s; do ls -ldn $d; done
                ls /deep/s; cat /f /h/file; echo x > /f; echo x > /dev/shm/x
                for d in /m /deep/s; do dd if=/dev/zero of=$d/big bs=1M count=99 2>/dev/null && exit 9; done
                ls -ln /deep/s; exit 7";
            arguments.extend(["a", "--", "sh", "-c", script]);
            let ran = place.run_each(&arguments);
            assert_eq!(ran.code, Some(7), "{runtime}: {} {}", ran.out, ran.err);
            let words: Vec<Vec<&str>> =
                ran.out.lines().map(|it| it.split_whitespace().collect()).collect();
            let expect = [
                ("drwx------", "/m"),
                ("drwxrwxrwt", "/any"),
                ("drwxr-xr-x", "/deep"),
                ("drwxr-x---", "/deep/s"),
            ];
            for (line, (mode, path)) in words.iter().zip(expect) {
                assert_eq!((line[0], line[2], line[3], line[8]), (mode, "0", "0", path));
            }
            // Directories of ext4, such as lost+found, are not visible.
            assert_eq!(words[4..6], [["host"], ["host"]], "{}", ran.out);
            let big = words.last().unwrap();
            assert!((8 << 20..16 << 20).contains(&big[4].parse::<u64>().unwrap()), "{big:?}");
            assert!(ran.err.matches("ead-only file system").count() == 2, "{}", ran.err);
        }
    }
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
    place.out("fsck");
}

#[test]
fn a_file_system_of_a_detached_container_goes_when_it_ends() {
    let Some(place) = with_programs() else { return };
    let _guard = Rm(&place, "stored");
    let file = place.path("store/containers/stored/filestore-0");
    let mount = "type=self,dst=/s,size=32m";
    let script = "dd if=/dev/zero of=/s/big bs=1M count=8 2>/dev/null; echo done; while :; do sleep 0.05; done";
    start(&place, &["--name", "stored", "--writable", "memory", "--mount", mount], script);
    wait_for("its file", || place.out("logs stored") == "done\n");
    let found = fs::metadata(&file).unwrap();
    assert_eq!((found.len(), found.mode() & 0o777), (32 << 20, 0o600));
    place.out("stop --time 0 stored");
    assert_eq!(ps(&place, "stored").unwrap()["status"], "exited");
    wait_for("its end", || !file.exists());
    place.out("rm stored");
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn mounts_that_make_no_sense_are_refused_with_the_reason() {
    let Some(place) = place() else { return };
    let cases: [(&[&str], &str); 13] = [
        (
            &["--volume", "/tmp:/proc"],
            "cannot mount on /proc in a container: the kernel provides it",
        ),
        (&["--volume", "/tmp:/sys/"], "cannot mount on /sys "),
        (&["--volume", "/tmp:/dev"], "it holds the container's devices"),
        (&["--volume", "/tmp:/"], "it is the root"),
        (&["--volume", "/tmp:/a/../proc"], "without \"..\""),
        (&["--volume", "/tmp:/x", "--volume", "/run:/x//"], "two mounts have the destination /x"),
        (
            &["--volume", "/tmp:/x", "--mount", "type=memory,dst=/x"],
            "two mounts have the destination /x",
        ),
        (&["--mount", "type=memory,dst=x"], "\"x\" is not a path in a container"),
        (&["--mount", "type=memory,dst=/proc/sys"], "cannot mount on /proc/sys"),
        (&["--mount", "type=memory"], "dst=PATH, the path in the container, is missing"),
        (&["--mount", "type=volumes,dst=/x"], "there is no type=\"volumes\""),
        (&["--mount", "type=memory,dst=/x,colour=red"], "there is no key \"colour\""),
        (&["--mount", "type=self,dst=/x,size=1m"], "16 MiB to 16 TiB"),
    ];
    for (options, expect) in cases {
        let ran = place.run_each(&[&["run", "--quiet"], options, &["a", "--", "true"]].concat());
        assert_eq!(ran.code, Some(125), "{options:?}: {}", ran.err);
        assert!(ran.err.contains(expect), "{options:?}: {}", ran.err);
    }
    let ran = place.run("bundle --mount type=self,dst=/x a b");
    assert!(ran.code == Some(2) && ran.err.contains("which only `run` makes"), "{}", ran.err);
    assert!(!place.path("b").exists());
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

/// A tree with one static program and no mount points, like images `FROM scratch`.
pub(crate) fn from_scratch(place: &Place) -> Option<std::path::PathBuf> {
    let Some(compiler) = program("gcc").or_else(|| program("cc")) else {
        testing::skipped("no C compiler for a static program");
        return None;
    };
    let (tree, source) = (place.path("scratch"), place.path("scratch.c"));
    fs::create_dir(&tree).unwrap();
    // The program examines each argument, and tries to write next to each of them and in the root.
    let text = r#"
        #include <errno.h>
        #include <fcntl.h>
        #include <stdio.h>
        #include <sys/stat.h>
        #include <unistd.h>
        int main(int count, char **paths) {
            char here[4096];
            printf("in %s\n", getcwd(here, sizeof here));
            for (int i = 1; i < count; i++) {
                struct stat it;
                printf("%s %s\n", paths[i], stat(paths[i], &it) ? "absent" : S_ISDIR(it.st_mode) ? "directory" : "file");
            }
            printf("write %d\n", open("/fresh", O_CREAT | O_WRONLY, 0600) < 0 ? errno : 0);
            printf("make %d\n", mkdir("/etc/new", 0700) < 0 ? errno : 0);
            return 0;
        }"#;
    fs::write(&source, text).unwrap();
    let mut compile = std::process::Command::new(compiler);
    compile.args(["-static", "-o"]).arg(tree.join("look")).arg(&source);
    assert!(compile.status().unwrap().success());
    Some(tree)
}

/// The program's output in a read-only root with these mounts. The number is EROFS. Source: errno(3).
pub(crate) const LOOKED: &str = "in /new/work
/proc/self directory
/sys/kernel directory
/dev/null file
/etc/hosts file
/data directory
/deep/file file
/cache/inner directory
write 30
make 30
";

/// Docker and podman make mount points in a layer of the container.
#[test]
fn a_read_only_root_needs_no_mount_points() {
    let Some(place) = place() else { return };
    let Some(tree) = from_scratch(&place) else { return };
    fs::create_dir(place.path("host")).unwrap();
    fs::write(place.path("host/file"), "host\n").unwrap();
    let host = place.path("host").display().to_string();
    let (data, file) = (format!("{host}:/data"), format!("{host}/file:/deep/file:ro"));
    let mounts = [
        "--volume",
        &data,
        "--volume",
        &file,
        "--mount",
        "type=memory,dst=/cache/inner",
        "--workdir",
        "/new/work",
    ];
    let looks = [
        "/look",
        "/proc/self",
        "/sys/kernel",
        "/dev/null",
        "/etc/hosts",
        "/data",
        "/deep/file",
        "/cache/inner",
    ];
    let mut tar = std::process::Command::new("tar");
    tar.args(["--create", "--file"])
        .arg(place.path("scratch.tar"))
        .arg("--directory")
        .arg(&tree)
        .arg(".");
    assert!(tar.status().unwrap().success());
    for form in ["objects", "packed", "tar"] {
        place.out(&format!("import --quiet --form {form} tar:scratch.tar scratch-{form}"));
        let image = format!("scratch-{form}");
        for runtime in all_runtimes() {
            for more in [&[][..], &["--df"], &["--userns", "0:700000:65536"]] {
                if runtime == "runsc" && more.contains(&"--userns") {
                    continue;
                }
                let before = ["run", "--quiet", "--read-only", "--runtime", runtime];
                // Without volumes, the root has only the program.
                let ran = place.run_each(&[&before, more, &[&image, "--", "/look"]].concat());
                assert_eq!(
                    ran.out, "in /\nwrite 30\nmake 30\n",
                    "{form} {runtime} {more:?}: {}",
                    ran.err
                );
                let all = [&before, more, &mounts, &[&*image, "--"], &looks].concat();
                let ran = place.run_each(&all);
                assert_eq!(ran.out, LOOKED, "{form} {runtime} {more:?}: {}", ran.err);
            }
        }
    }
    let bundle =
        [&["bundle", "--quiet", "--read-only"], &mounts[..], &["scratch-tar", "b", "--"], &looks];
    assert_eq!(place.run_each(&bundle.concat()).code, Some(0));
    for runtime in runtimes() {
        let mut command = std::process::Command::new(program(runtime).unwrap());
        command
            .args(["run", "--bundle"])
            .arg(place.path("b"))
            .arg(format!("scratch-{}", std::process::id()));
        let ran =
            crate::Ran::from_output(&command.stdin(std::process::Stdio::null()).output().unwrap());
        // crun 1.8 refuses hosts with both versions of cgroups.
        if !ran.err.contains("hybrid mode") {
            assert_eq!(ran.out, LOOKED, "{runtime}: {}", ran.err);
        }
    }
    place.out("umount b/rootfs");
}

/// Symlinks of an image may redirect a mount within the root, but not to a path where it hides another mount, nor
/// into the kernel's directories.
#[test]
fn mounts_go_where_links_of_the_image_lead() {
    let Some(place) = place() else { return };
    let tree = place.path("tree");
    for (link, target) in [
        ("var", "usr/var"),
        ("lock", "/dev/shm"),
        ("null", "/dev/null"),
        ("kernel", "/proc/sys"),
        ("top", "/"),
        ("gone", "/nowhere/deep"),
        ("loop", "loop"),
        ("terminals", "dev/pts"),
        ("cgroups", "/sys/fs"),
        ("firmware", "sys/firmware"),
    ] {
        std::os::unix::fs::symlink(target, tree.join(link)).unwrap();
    }
    fs::create_dir_all(tree.join("usr/var/run")).unwrap();
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    for name in ["one", "two"] {
        fs::create_dir(place.path(name)).unwrap();
        fs::write(place.path(name).join("file"), name).unwrap();
    }
    let volume = |name: &str, to: &str| format!("{}:{to}", place.path(name).display());
    for runtime in all_runtimes() {
        for access in ["--read-only", "--writable=memory"] {
            let run = |volumes: &[String], script: &str| {
                let mut arguments = vec!["run", "--quiet", "--runtime", runtime, access];
                arguments.extend(volumes.iter().flat_map(|it| ["--volume", it]));
                arguments.extend(["a", "--", "sh", "-c", script]);
                place.run_each(&arguments)
            };
            for (volumes, script, expect) in [
                (vec![volume("one", "/var/run")], "cat /usr/var/run/file", "one"),
                (vec![volume("one", "/gone/x")], "cat /nowhere/deep/x/file", "one"),
                (vec![volume("one", "/lock/x")], "cat /dev/shm/x/file", "one"),
                // The mounts are made in the order of their resolved paths.
                (
                    vec![volume("one", "/var"), volume("two", "/usr")],
                    "cat /usr/file /usr/var/file",
                    "twoone",
                ),
            ] {
                let ran = run(&volumes, script);
                assert_eq!(
                    (&*ran.out, ran.code),
                    (expect, Some(0)),
                    "{runtime} {volumes:?}: {}",
                    ran.err
                );
            }
            for (volumes, expect) in [
                (
                    vec![volume("one", "/kernel/x")],
                    "redirects /kernel/x to /proc/sys/x: the kernel provides it",
                ),
                (vec![volume("one/file", "/null")], "one of the container's own devices"),
                (vec![volume("one", "/terminals/x")], "it holds the container's terminals"),
                (
                    vec![volume("one", "/cgroups")],
                    "redirects /cgroups to /sys/fs: the kernel provides it",
                ),
                (
                    vec![volume("one", "/firmware/x")],
                    "redirects /firmware/x to /sys/firmware/x: the",
                ),
                (vec![volume("one", "/sys/fs")], "would hide the one on /sys/fs/cgroup"),
                (vec![volume("one", "/sys/firmware")], "the container hides /sys/firmware and"),
                (vec![volume("one", "/top")], "it is the root"),
                (vec![volume("one", "/loop")], "cannot look up /loop"),
                (
                    vec![volume("one", "/var"), volume("two", "/usr/var")],
                    "would hide the one on /usr/var",
                ),
            ] {
                let ran = run(&volumes, "true");
                assert_eq!(ran.code, Some(125), "{runtime} {volumes:?}: {}", ran.err);
                assert!(ran.err.contains(expect), "{runtime} {volumes:?}: {}", ran.err);
            }
        }
    }
}
