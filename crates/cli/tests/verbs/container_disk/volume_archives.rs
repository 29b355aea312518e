//! `volume import`, `export`, `mount` and `exists`, and the questions of `volume prune`. Needs root.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};

use crate::container_disk::writable::has;
use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::place;
use crate::{Place, Ran};

/// Runs a command line with this text on standard input.
fn with_input(place: &Place, line: &str, input: &[u8]) -> Ran {
    let words: Vec<_> = line.split(' ').collect();
    let mut command = place.command(&words);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that fails early does not read its input.
    drop(child.stdin.take().unwrap().write_all(input));
    Ran::from_output(&child.wait_with_output().unwrap())
}

/// Runs tar on the host, and returns its output.
fn tar(place: &Place, arguments: &[&str]) -> Vec<u8> {
    let tar = testing::find_program("tar").expect("the test asked for it");
    let output = Command::new(tar).current_dir(place.path("")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn files_of_a_volume_are_exported_and_imported() {
    let Some(place) = place() else { return };
    if !has(&["tar", "gzip"]) {
        return;
    }
    place.out("volume create one");
    let filled = place.path("store/volumes/one/data");
    fs::create_dir(filled.join("sub")).unwrap();
    crate::write(&filled.join("sub/file"), b"hello\n", 0o640);
    std::os::unix::fs::chown(filled.join("sub/file"), Some(7), Some(8)).unwrap();
    place.out("volume export one --output one.tar");
    assert_eq!(tar(&place, &["-tf", "one.tar"]), b"sub/\nsub/file\n");
    let exported = place.command(&["volume", "export", "one"]).output().unwrap();
    assert_eq!(exported.stdout, fs::read(place.path("one.tar")).unwrap());
    // From a file, from standard input, and compressed.
    fs::create_dir(place.path("files")).unwrap();
    tar(&place, &["-xf", "one.tar", "-C", "files"]);
    tar(&place, &["-czf", "one.tar.gz", "-C", "files", "."]);
    for (name, file) in [("two", "one.tar"), ("three", "-"), ("four", "one.tar.gz"), ("five", "")] {
        place.out(&format!("volume create {name}"));
        let line = format!("volume import {name} {file}");
        let ran = with_input(&place, line.trim(), &exported.stdout);
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{name}: {}", ran.err);
        let file = place.path("store/volumes").join(name).join("data/sub/file");
        assert_eq!(fs::read_to_string(&file).unwrap(), "hello\n", "{name}");
        let found = fs::metadata(&file).unwrap();
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o777), (7, 8, 0o640), "{name}");
    }
    // A later container does not copy the files of its image over them.
    let ran = place.run("run -v two:/bin a cat /bin/sub/file");
    assert_ne!(ran.code, Some(0), "{}", ran.out);
    assert!(!place.path("store/volumes/two/data/sh").exists());
    for (line, expect) in [
        ("volume import none one.tar", "no volume with name \"none\" found"),
        ("volume export none", "no volume with name \"none\" found"),
        ("volume import two absent.tar", "absent.tar"),
        ("volume import", "use `quire volume import NAME [FILE]`"),
        ("volume export", "use `quire volume export NAME"),
        ("volume ls --output x", "--output is for `quire volume export`"),
        ("volume create -o type=tmpfs -o device=tmpfs x", "volumes have no options -o"),
    ] {
        let ran = place.run(line);
        assert!(ran.code != Some(0) && ran.err.contains(expect), "{line}: {}", ran.err);
    }
    let ran = with_input(&place, "volume import two", b"no tar");
    assert!(ran.code != Some(0) && ran.err.contains("cannot read the tar"), "{}", ran.err);
}

#[test]
fn a_volume_stays_new_if_the_tar_does_not_exist() {
    let Some(place) = place() else { return };
    place.out("volume create fresh");
    let ran = place.run("volume import fresh absent.tar");
    assert!(ran.code != Some(0) && ran.err.contains("absent.tar"), "{}", ran.err);
    // The container copies the files of its image, without which it could not start.
    place.out("run --quiet -v fresh:/bin a true");
    assert!(place.path("store/volumes/fresh/data/sh").exists());
}

/// A hostile tar must not write outside of the volume.
#[test]
fn a_tar_stays_inside_the_volume() {
    let Some(place) = place() else { return };
    if !has(&["tar"]) {
        return;
    }
    fs::create_dir_all(place.path("outside")).unwrap();
    fs::create_dir_all(place.path("tree/link")).unwrap();
    fs::write(place.path("tree/link/file"), "x").unwrap();
    let outside = place.path("outside").display().to_string();
    std::os::unix::fs::symlink(&outside, place.path("link")).unwrap();
    tar(&place, &["-cf", "evil.tar", "link"]);
    tar(&place, &["-rf", "evil.tar", "-C", "tree", "link/file"]);
    place.out("volume create one");
    let ran = place.run("volume import one evil.tar");
    assert_ne!(ran.code, Some(0), "{}", ran.out);
    assert_eq!(fs::read_dir(place.path("outside")).unwrap().count(), 0);
}

#[test]
fn prune_asks_and_keeps_chosen_names() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "web");
    start(&place, &["--name", "web", "-v", "used:/data"], "sleep 60");
    for name in ["one", "two"] {
        place.out(&format!("volume create --driver local --label l={name} {name}"));
    }
    let ran = with_input(&place, "volume prune", b"N\n");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{}", ran.err);
    assert_eq!(ran.err.lines().nth(1), Some("No dangling anonymous volumes found"));
    assert_eq!(place.out("volume prune --force"), "");
    let random = place.out("volume create");
    for (input, is_removed) in [("n\n", false), ("\n", false), ("y\n", true)] {
        let ran = with_input(&place, "volume prune", input.as_bytes());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        assert_eq!(ran.err.lines().nth(1), Some(random.trim()), "{}", ran.err);
        assert_eq!(ran.out == random, is_removed, "{input:?}: {}", ran.out);
    }
    // Without an answer, as in a script, nothing is removed.
    let ran = place.run("volume prune --all");
    assert!(ran.code == Some(0) && ran.err.contains("--force"), "{}", ran.err);
    let ran = place.run("--json volume prune --all");
    assert_eq!(ran.out.trim(), "[]", "{}", ran.err);
    assert_eq!(place.out("volume prune --all --force --filter label=l=one"), "one\n");
    assert_eq!(place.out("volume prune --all --force"), "two\n");
    assert_eq!(place.out("volume ls -q"), "used\n");
}

#[test]
fn scripts_of_podman_find_a_volume() {
    let Some(place) = place() else { return };
    place.out("volume create --label a=1 --label b=2 one");
    assert_eq!(place.run("volume exists one").code, Some(0));
    assert_eq!(place.run("volume exists two").code, Some(1));
    let path = place.path("store/volumes/one/data").display().to_string();
    assert_eq!(place.out("volume mount one"), format!("{path}\n"));
    assert_eq!(place.out("volume unmount one"), "one\n");
    assert_eq!(place.out("volume ls --format {{.Labels}}"), "a=1,b=2\n");
    assert_eq!(place.out("volume inspect --format {{.Labels.a}}{{.NeedsCopyUp}} one"), "1true\n");
    place.out("run --rm -v one:/bin a true");
    assert_eq!(place.out("volume inspect --format {{.NeedsCopyUp}} one"), "false\n");
}
