//! Tests FIFOs in place of files: an import waits for a FIFO that the user names, and is not blocked by other FIFOs.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{CWD, Mode, mkfifoat};

use super::{Home, chain, usual_wishes};
use crate::build::{Age, Layout, Pack, Tar, docker_archive, pack};
use quire_transfer::import::{ImportContext, ImportOptions};

fn fifo(path: &Path) {
    mkfifoat(CWD, path, Mode::RWXU).unwrap();
}

/// Imports a FIFO that may have a writer but no more data, and then cancels the import, as Ctrl-C does.
fn check_cancelled(kind: &str, first: Option<&[u8]>) {
    let home = Home::new();
    let path = home.path("pipe.tar");
    fifo(&path);
    let before = home.files();
    let cancel = AtomicBool::new(false);
    let environment = ImportContext { cancel: &cancel, ..home.environment() };
    // Only the cancellation ends the import, because the pipe stays open.
    std::thread::scope(|scope| {
        let importing = scope.spawn(|| home.import_in(kind, "pipe.tar", &environment));
        // Opening for writing waits for the reader. The writer stays open until the import ends.
        let writer = first.map(|bytes| {
            let mut writer = fs::OpenOptions::new().write(true).open(&path).unwrap();
            writer.write_all(bytes).unwrap();
            writer
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(!importing.is_finished(), "{kind}: it did not wait");
        cancel.store(true, Ordering::Relaxed);
        let error = importing.join().unwrap().unwrap_err();
        assert_eq!(chain(&error), "cancelled", "{kind}");
        drop(writer);
    });
    assert_eq!(home.files(), before, "{kind}");
}

#[test]
fn an_import_that_waits_for_its_input_ends_when_told() {
    let tar = Tar::from_text("f a 1").file("big", &vec![1; 1 << 20]).bytes();
    let gzip = pack(&tar, Pack::Gzip);
    for kind in ["tar", "docker-archive", "dump"] {
        check_cancelled(kind, None);
    }
    // The data ends before the compression can be detected, in the middle of a header, or in the middle of a file.
    check_cancelled("tar", Some(&tar[..3]));
    check_cancelled("tar", Some(&tar[..700]));
    check_cancelled("tar", Some(&tar[..5000]));
    check_cancelled("tar", Some(&gzip[..300]));
    check_cancelled("docker-archive", Some(&tar[..5000]));
    check_cancelled("dump", Some(b"/ 0 40755 "));
}

fn check_pipe(kind: &str, bytes: &[u8], expect: &str) {
    let home = Home::new();
    let path = home.path("pipe.tar");
    fifo(&path);
    let image = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut writer = fs::OpenOptions::new().write(true).open(&path).unwrap();
            for piece in bytes.chunks(bytes.len().div_ceil(3)) {
                writer.write_all(piece).unwrap();
                std::thread::sleep(Duration::from_millis(120));
            }
        });
        home.import(kind, "pipe.tar").unwrap().image
    });
    assert_eq!(home.show(&image), expect);
}

#[test]
fn a_pipe_is_as_good_as_a_file() {
    let tar = Tar::from_text("f a 1").file("big", &vec![b'x'; 2 << 20]).bytes();
    let expect = "a=1 big=x*2097152";
    check_pipe("tar", &tar, expect);
    check_pipe("tar", &pack(&tar, Pack::Gzip), expect);
    check_pipe("docker-archive", &docker_archive(&[tar], &["x:1"], Age::Old), expect);
    check_pipe("dump", b"/ 0 40755 2 0 0 0 0.0 - - -\n/a 1 100644 1 0 0 0 0.0 - 1 -\n", "a=1");
}

#[test]
fn standard_input_by_name_is_a_pipe_too() {
    // `/dev/stdin` is a symbolic link to such a path.
    let (reader, mut writer) = std::io::pipe().unwrap();
    let home = Home::new();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
    std::os::unix::fs::symlink(path, home.path("stdin.tar")).unwrap();
    writer.write_all(&Tar::from_text("f a 1").bytes()).unwrap();
    drop(writer);
    let image = home.import("tar", "stdin.tar").unwrap().image;
    assert_eq!(home.show(&image), "a=1");
}

/// Replaces a file of a layout by a FIFO, which would block a reader.
fn check_layout(place: &dyn Fn(&Layout<'_>, &str) -> String) {
    let home = Home::new();
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let (image, blobs) = layout.image(&[(Tar::from_text("f a 1").bytes(), Pack::Gzip)]);
    layout.add(image, None, None);
    let file = place(&layout, &blobs[0].to_string().replace(':', "/"));
    let file = path.join(file);
    fs::remove_file(&file).unwrap();
    fifo(&file);
    let error = chain(&home.import("oci", "layout").unwrap_err());
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    assert!(error.ends_with(": it is a FIFO, not a regular file"), "{error}");
}

#[test]
fn a_layout_has_files_only() {
    check_layout(&|_, _| "oci-layout".to_owned());
    check_layout(&|_, _| "index.json".to_owned());
    check_layout(&|_, blob| format!("blobs/{blob}"));
}

#[test]
fn a_directory_in_the_place_of_a_file_and_the_reverse() {
    let home = Home::new();
    fs::create_dir(home.path("a")).unwrap();
    fifo(&home.path("b"));
    let check = |kind: &str, name: &str, expect: &str| {
        let error = chain(&home.import(kind, name).unwrap_err());
        assert_eq!(error.replace(home.folder.path().to_str().unwrap(), "DIR"), expect);
    };
    check("tar", "a", "cannot read DIR/a: Is a directory (os error 21)");
    check("docker-archive", "a", "cannot read DIR/a: Is a directory (os error 21)");
    check("dump", "a", "cannot read DIR/a: Is a directory (os error 21)");
    check("dir", "b", "cannot read DIR/b: Not a directory (os error 20)");
}

#[test]
fn an_object_of_a_dump_is_a_file() {
    let home = Home::new();
    fs::create_dir(home.path("objects")).unwrap();
    fifo(&home.path("objects/pipe"));
    let dump = "/ 0 40755 2 0 0 0 0.0 - - -\n/a 100 100644 1 0 0 0 0.0 pipe - -\n";
    fs::write(home.path("a.dump"), dump).unwrap();
    let objects = home.path("objects");
    let options = ImportOptions { objects: Some(&objects), ..usual_wishes() };
    let error = chain(&home.import_with("dump", "a.dump", &options).unwrap_err());
    let expect =
        format!("cannot read {}: it is a FIFO, not a regular file", objects.join("pipe").display());
    assert_eq!(error, expect);
}

#[test]
fn objects_of_a_dump_are_in_their_folder() {
    let home = Home::new();
    let objects = home.path("objects");
    fs::create_dir(&objects).unwrap();
    fs::write(home.path("secret"), [b's'; 100]).unwrap();
    fs::write(objects.join("inside"), [b'i'; 100]).unwrap();
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, objects.join(name)).unwrap();
    link("../secret", "up");
    link(home.path("secret").to_str().unwrap(), "absolute");
    link("..", "folder");
    link("/proc/self/root", "magic");
    link("inside", "within");
    let options = ImportOptions { objects: Some(&objects), ..usual_wishes() };
    let import = |place: &str| {
        let line = format!("/a 100 100644 1 0 0 0 0.0 {place} - -\n");
        fs::write(home.path("a.dump"), format!("/ 0 40755 2 0 0 0 0.0 - - -\n{line}")).unwrap();
        home.import_with("dump", "a.dump", &options)
    };
    let before = home.files();
    let secret = format!("magic{}", home.path("secret").display());
    for place in ["up", "absolute", "folder/secret", &secret] {
        let error = chain(&import(place).unwrap_err());
        assert!(error.contains(place), "{error}");
        assert!(error.contains("it is a link that leads out of the directory"), "{error}");
    }
    assert_eq!(home.files(), before);
    assert_eq!(home.show(&import("within").unwrap().image), "a=i*100");
}

#[test]
fn a_dump_means_what_it_says() {
    let home = Home::new();
    let refused = |line: &str, expect: &str| {
        fs::write(home.path("a.dump"), format!("/ 0 40755 2 0 0 0 0.0 - - -\n{line}\n")).unwrap();
        let before = home.files();
        let error = chain(&home.import("dump", "a.dump").unwrap_err());
        assert!(error.ends_with(&format!("line 2 of the dump is invalid: {expect}")), "{error}");
        assert_eq!(home.files(), before);
    };
    let word = "which is not from 0 to 4294967295";
    refused(
        "/f 0 100644 1 4294967296 0 0 0.0 - - -",
        &format!("UID has the number \"4294967296\", {word}"),
    );
    refused("/n\\x00evil 0 100644 1 0 0 0 0.0 - - -", "a name in PATH contains a NUL byte");
}
