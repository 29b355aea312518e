//! `--mount`: what a container has besides its root. Needs root.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use crate::containers::{Rm, ps, start};
use crate::runs::{place, runtimes, wait_for};
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
            // Nothing of ext4's own is to be seen.
            assert_eq!(words[4..6], [["host"], ["host"]], "{}", ran.out);
            let big = words.last().unwrap();
            assert!((8 << 20..16 << 20).contains(&big[4].parse::<u64>().unwrap()), "{big:?}");
            assert!(ran.err.matches("ead-only file system").count() == 2, "{}", ran.err);
        }
    }
    wait_for("nothing to be left", || crate::writable::is_clean(&place));
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
    wait_for("nothing to be left", || crate::writable::is_clean(&place));
}

#[test]
fn mounts_that_make_no_sense_are_refused_with_the_reason() {
    let Some(place) = place() else { return };
    let cases: [(&[&str], &str); 13] = [
        (&["--volume", "/tmp:/proc"], "cannot mount on /proc in a container: it is the kernel's"),
        (&["--volume", "/tmp:/sys/"], "cannot mount on /sys "),
        (&["--volume", "/tmp:/dev"], "it has the container's devices"),
        (&["--volume", "/tmp:/"], "it is the root itself"),
        (&["--volume", "/tmp:/a/../proc"], "without \"..\""),
        (&["--volume", "/tmp:/x", "--volume", "/run:/x//"], "two mounts are to be on /x"),
        (&["--volume", "/tmp:/x", "--mount", "type=memory,dst=/x"], "two mounts are to be on /x"),
        (&["--mount", "type=memory,dst=x"], "\"x\" is not a path in a container"),
        (&["--mount", "type=memory,dst=/proc/sys"], "cannot mount on /proc/sys"),
        (&["--mount", "type=memory"], "it needs dst=PATH"),
        (&["--mount", "type=volume,dst=/x"], "there is no type=\"volume\""),
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
    wait_for("nothing to be left", || crate::writable::is_clean(&place));
}
