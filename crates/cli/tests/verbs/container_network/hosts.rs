//! `/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf` of containers. Needs root.

use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{all_runtimes, in_own_mounts, place, runtimes};
use crate::{Place, add_programs, write};

/// Makes another image, whose tree is made by `change`.
fn image(place: &Place, name: &str, change: impl FnOnce(&Path)) {
    let tree = place.path(name);
    std::fs::create_dir(&tree).unwrap();
    change(&tree);
    add_programs(&tree, &["/bin/sh", "/bin/cat", "/usr/bin/stat"]);
    place.out(&format!("import --quiet dir:{} {name}", tree.display()));
}

fn run(place: &Place, options: &[&str], image: &str, script: &str) -> String {
    let tail = [image, "--", "sh", "-c", script];
    let ran = place.run_each(&[&["run", "--quiet"], options, &tail].concat());
    assert_eq!(ran.code, Some(0), "{options:?} {image} {script}: {}", ran.err);
    ran.out
}

const SHOW: &str = "cat /etc/hosts; echo --; cat /etc/hostname; echo --; cat /etc/resolv.conf";
const LOCAL: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";

#[test]
fn a_host_name_is_one_word() {
    let Some(place) = place() else { return };
    for name in ["a\n10.0.0.1 b", "a b", "\u{202e}a", "a/b", "\u{1b}[31m", ""] {
        let ran = place.run_each(&["run", "--hostname", name, "a", "true"]);
        assert!(
            ran.code == Some(125) && ran.err.contains("is not a host name"),
            "{name:?}: {}",
            ran.err
        );
    }
}

#[test]
fn a_container_has_its_names_whatever_its_root_is() {
    let Some(place) = place() else { return };
    // One image has neither the files nor their directory. The other image has all files, with different contents.
    image(&place, "bare", |_| {});
    image(&place, "full", |tree| {
        std::fs::create_dir(tree.join("etc")).unwrap();
        for name in ["hosts", "hostname", "resolv.conf"] {
            write(&tree.join("etc").join(name), b"image\n", 0o600);
        }
    });
    let none = format!("{LOCAL}10.0.0.7\tdb\n127.0.0.1\tbox\n--\nbox\n--\n");
    for runtime in all_runtimes() {
        for image in ["bare", "full"] {
            // A read-only root also needs mount points for the files.
            for more in
                [&[][..], &["--read-only"], &["--read-only", "--df"], &["--writable", "memory"]]
            {
                let options = ["--runtime", runtime, "-h", "box", "--add-host", "db:10.0.0.7"];
                let options = [&options[..], more].concat();
                let shown = run(&place, &options, image, &format!("{SHOW} 2>&-; true"));
                // In a network without DNS servers, the image's file is not replaced.
                let resolver = if image == "full" { "image\n" } else { "" };
                assert_eq!(shown, format!("{none}{resolver}"), "{runtime} {image} {more:?}");
                let options = [&options[..], &["--network", "host"]].concat();
                let shown = run(&place, &options, image, SHOW);
                let [hosts, name, resolver] = shown.split("--\n").collect::<Vec<_>>()[..] else {
                    panic!("{shown}")
                };
                assert!(hosts.contains("10.0.0.7\tdb\n"), "{runtime} {image} {more:?}: {hosts}");
                assert_eq!(name, "box\n");
                let host = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
                assert_eq!(resolver, host, "{runtime} {image} {more:?}");
            }
        }
        let stat = "stat -c '%a %u %g %F' /etc/hosts /etc/hostname";
        let expect = "644 0 0 regular file\n".repeat(2);
        for more in [&[][..], &["--userns", "auto"]] {
            let options = [&["--runtime", runtime], more].concat();
            assert_eq!(run(&place, &options, "full", stat), expect, "{runtime} {more:?}");
        }
    }
}

#[test]
fn names_of_the_host_come_along_with_its_network_alone() {
    let Some(place) = place() else { return };
    // Replace the host's file.
    write(&place.path("hosts"), b"127.0.0.1 localhost\n192.0.2.8 neighbour next # near\n", 0o644);
    for (network, is_known) in [("host", true), ("none", false)] {
        let script = "mount --bind hosts /etc/hosts && exec \"$@\"";
        let run = ["run", "--quiet", "--network", network, "a", "cat", "/etc/hosts"];
        let Some(ran) = in_own_mounts(&place, script, &run) else { break };
        assert_eq!(ran.code, Some(0), "{network}: {}", ran.err);
        assert!(ran.out.contains("localhost"), "{network}: {}", ran.out);
        let found = ran.out.contains("192.0.2.8\tneighbour next\n");
        assert!(found == is_known && ran.out.contains("neighbour") == is_known, "{}", ran.out);
    }
    let options =
        ["--network", "host", "--dns", "192.0.2.1", "--dns-search", "one", "--dns-search", "two"];
    let options = [&options[..], &["--dns-option", "ndots:3"]].concat();
    let shown = run(&place, &options, "a", "cat /etc/resolv.conf");
    assert_eq!(shown, "search one two\nnameserver 192.0.2.1\noptions ndots:3\n");
    let options = ["--network", "host", "--add-host", "me:host-gateway"];
    assert!(run(&place, &options, "a", SHOW).contains("127.0.0.1\tme\n"));
    let shown = run(&place, &["--dns-option", "ndots:3"], "a", "cat /etc/resolv.conf");
    assert_eq!(shown, "options ndots:3\n");
    for (options, said) in [
        (&["--add-host", "me:host-gateway"][..], "the host is unreachable with --network none"),
        (
            &["--network", "host", "--dns", "none", "--dns-search", "x"],
            "it takes no other --dns options",
        ),
    ] {
        let ran = place.run_each(&[&["run"], options, &["a", "--", "true"]].concat());
        assert!(ran.code == Some(125) && ran.err.contains(said), "{options:?}: {}", ran.err);
    }
}

#[test]
fn what_is_mounted_there_wins() {
    let Some(place) = place() else { return };
    image(&place, "full", |tree| {
        std::fs::create_dir(tree.join("etc")).unwrap();
        write(&tree.join("etc/hosts"), b"image\n", 0o644);
    });
    let etc = place.path("mine");
    std::fs::create_dir(&etc).unwrap();
    write(&etc.join("hosts"), b"mine\n", 0o644);
    for runtime in runtimes() {
        let runtime = ["--runtime", runtime];
        for volume in ["./mine/hosts:/etc/hosts", "./mine:/etc"] {
            let options = [&runtime[..], &["-v", volume]].concat();
            assert_eq!(run(&place, &options, "full", "cat /etc/hosts"), "mine\n", "{volume}");
        }
        // No mount points were made in the volume.
        assert_eq!(std::fs::read_dir(&etc).unwrap().count(), 1);
        let options =
            [&runtime[..], &["--mount", "type=memory,dst=/etc", "--hostname", "box"]].concat();
        assert_eq!(run(&place, &options, "full", "cat /etc/hostname"), "box\n");
        let options = [&runtime[..], &["--no-hosts"]].concat();
        assert_eq!(run(&place, &options, "full", "cat /etc/hosts"), "image\n");
        let options = [&runtime[..], &["--network", "host", "--dns", "none"]].concat();
        assert_eq!(run(&place, &options, "full", "cat /etc/resolv.conf 2>&-; true"), "");
    }
}

#[test]
fn links_of_an_image_lead_nowhere_else() {
    let Some(place) = place() else { return };
    let outside = place.path("outside");
    write(&outside, b"outside\n", 0o666);
    let up = format!("{}{}", "../".repeat(20), outside.display());
    image(&place, "links", |tree| {
        std::fs::create_dir(tree.join("etc")).unwrap();
        symlink(&up, tree.join("etc/hosts")).unwrap();
        symlink("../run/systemd/resolve/stub-resolv.conf", tree.join("etc/resolv.conf")).unwrap();
        symlink("/proc/self/cwd/../../x", tree.join("etc/hostname")).unwrap();
    });
    image(&place, "odd", |tree| {
        std::fs::create_dir_all(tree.join("etc/hosts/inner")).unwrap();
        symlink("resolv.conf", tree.join("etc/resolv.conf")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            tree.join("etc/hostname"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o644),
            0,
        )
        .unwrap();
    });
    // Paths below files, and paths that cannot be files.
    for (name, hosts, hostname) in [("above", "/x/y", "/x"), ("below", "/x", "/x/y")] {
        image(&place, name, |tree| {
            std::fs::create_dir(tree.join("etc")).unwrap();
            symlink(hosts, tree.join("etc/hosts")).unwrap();
            symlink(hostname, tree.join("etc/hostname")).unwrap();
            symlink(format!("/none/{}", "n".repeat(256)), tree.join("etc/resolv.conf")).unwrap();
        });
    }
    for runtime in all_runtimes() {
        for more in [&[][..], &["--read-only"], &["--userns", "auto"]] {
            let options =
                [&["--runtime", runtime, "--network", "host", "--dns", "192.0.2.1"], more].concat();
            for image in ["above", "below"] {
                let shown = run(&place, &options, image, "cat /etc/hosts");
                assert!(shown.contains("localhost"), "{runtime} {more:?} {image}: {shown}");
            }
            let script =
                "cat /etc/resolv.conf; cat /etc/hosts; echo 10.9.9.9 x >> /etc/hosts; true";
            let shown = run(&place, &options, "links", script);
            assert!(shown.starts_with("nameserver 192.0.2.1\n"), "{runtime} {more:?}: {shown}");
            assert!(shown.contains("localhost"), "{runtime} {more:?}: {shown}");
            assert_eq!(std::fs::read_to_string(&outside).unwrap(), "outside\n");
            run(&place, &options, "odd", "test -d /etc/hosts/inner && test -p /etc/hostname");
        }
    }
}

/// Mounts of the caller take precedence over the files that Quire adds, even if symlinks of the image redirect these
/// files.
#[test]
fn links_of_an_image_take_no_place_from_the_caller() {
    let Some(place) = place() else { return };
    image(&place, "trap", |tree| {
        std::fs::create_dir(tree.join("etc")).unwrap();
        symlink("../vol", tree.join("etc/hosts")).unwrap();
        symlink("/node/null", tree.join("etc/hostname")).unwrap();
        symlink("../start", tree.join("etc/resolv.conf")).unwrap();
        symlink("vol", tree.join("way")).unwrap();
    });
    image(&place, "below", |tree| {
        std::fs::create_dir(tree.join("etc")).unwrap();
        symlink("/node/null", tree.join("etc/hosts")).unwrap();
    });
    std::fs::create_dir(place.path("host")).unwrap();
    write(&place.path("host/file"), b"host\n", 0o644);
    let host = place.path("host").display().to_string();
    let (directory, file) = (format!("{host}:/vol/data"), format!("{host}/file:/vol/data/file"));
    let memory = ["--mount", "type=memory,dst=/vol/data"];
    let (device, dns) = (["--device", "/dev/null:/node/null"], ["--dns", "192.0.2.1"]);
    for runtime in runtimes() {
        for more in [&[][..], &["--read-only"], &["--writable", "memory"], &["--userns", "auto"]] {
            let run = |wanted: &[&str], script: &str| {
                let before = ["--runtime", runtime, "--network", "host"];
                run(&place, &[&before[..], &dns, more, wanted].concat(), "trap", script)
            };
            for volume in [&directory, &file] {
                let shown = run(&["--volume", volume], "cat /vol/data/file");
                assert_eq!(shown, "host\n", "{runtime} {more:?} {volume}");
            }
            run(&memory, ": >/vol/data/new");
            let by_link = ["--volume", &format!("{host}:/way/data")];
            assert_eq!(run(&by_link, "cat /vol/data/file"), "host\n", "{runtime} {more:?}");
            assert_eq!(run(&["--workdir", "/start/inner"], "pwd"), "/start/inner\n");
            // A device needs a file as its mount point, which cannot be created in a read-only root.
            if more != ["--read-only"] {
                run(&device, "echo >/node/null && test ! -s /node/null");
                let above = ["--runtime", runtime, "--device", "/dev/null:/node"];
                let above = [&above[..], more].concat();
                self::run(&place, &above, "below", "echo >/node && test -c /node");
            }
            // Without these options, the symlinks work as usual.
            let shown = run(&[], "cat /vol /start");
            assert!(shown.contains("localhost") && shown.contains("192.0.2.1"), "{shown}");
        }
    }
}

#[test]
fn a_container_writes_its_own_and_no_more() {
    let Some(place) = place() else { return };
    image(&place, "bare", |_| {});
    for runtime in runtimes() {
        let name = format!("writes-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "echo 10.9.9.9 late >> /etc/hosts && cat /etc/hosts; \
                      while echo 0123456789abcdef0123456789abcdef 2>&-; do :; done >> /etc/hosts; \
                      cat /proc/self/mountinfo; sleep 60";
        start(&place, &["--name", &name, "--runtime", runtime], script);
        crate::container_life::runs::wait_for("an end of the file", || {
            place.out(&format!("logs {name}")).contains("/etc/hostname")
        });
        let log = place.out(&format!("logs {name}"));
        assert!(log.contains("10.9.9.9 late\n"), "{runtime}: {log}");
        // The container cannot find out the path of the files on the host.
        assert!(!log.contains(place.path("store").to_str().unwrap()), "{runtime}: {log}");
        place.out(&format!("rm --force {name}"));
        // Mount points that were made for the files are not changes of the container.
        let options = ["run", "--quiet", "-d", "--runtime", runtime, "--name", &name];
        let ran =
            place.run_each(&[&options[..], &["bare", "--", "sh", "-c", ": > /made"]].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        place.out(&format!("wait {name}"));
        let diff = place.run(&format!("diff {name}"));
        assert!(
            diff.out.contains("/made") && !diff.out.contains("/etc/"),
            "{runtime}: {}",
            diff.out
        );
        place.out(&format!("rm {name}"));
    }
}

#[test]
fn a_bundle_has_them_beside_its_configuration() {
    let Some(place) = place() else { return };
    for (more, name) in [("", "one"), ("--userns 0:100000:65536 ", "two")] {
        place.out(&format!("bundle --hostname box {more}a {name} -- cat /etc/hostname"));
        let folder = place.path(name);
        assert_eq!(std::fs::read_to_string(folder.join("hostname")).unwrap(), "box\n");
        let config = std::fs::read(folder.join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let mounts = config["mounts"].as_array().unwrap();
        let hosts = mounts.iter().find(|it| it["destination"] == "/etc/hosts").unwrap();
        assert_eq!(hosts["source"], folder.join("hosts").to_str().unwrap());
        place.out(&format!("umount {name}/rootfs"));
    }
}
