use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use image::tar::Kind;
use image::tar::write::{Member, Writer};
use image::tree::{Metadata, Timestamp};

use super::*;
use crate::changes::Owners;

fn held(path: &Path) -> OwnedFd {
    rustix::fs::open(path, HOLD, Mode::empty()).unwrap()
}

fn directory(path: &Path) -> OwnedFd {
    rustix::fs::open(path, DIRECTORY, Mode::empty()).unwrap()
}

/// Returns a destination on the host, as `quire cp` uses it.
fn on_host(root: &OwnedFd) -> Destination<'_> {
    Destination {
        root: root.as_fd(),
        directory: Vec::new(),
        links: LinkHandling::Refused,
        owner: NewOwner::Caller,
        keeps_set_ids: false,
        is_mounted_file: false,
    }
}

/// Returns a destination in a container with this root.
fn in_container<'a>(root: &'a OwnedFd, path: &str) -> Destination<'a> {
    let directory = path.as_bytes().to_vec();
    Destination { directory, links: LinkHandling::Inside, keeps_set_ids: true, ..on_host(root) }
}

fn copy(from: &Path, name: &str, to: &Destination<'_>) -> Result<Skipped, CopyError> {
    let from = held(from);
    through(
        |out| pack(&from, name.as_bytes(), &Owners::default(), out),
        |tar| unpack(tar, to, &|| {}),
    )
}

/// A tar with empty files of these kinds. Regular files contain their path.
fn tar(members: &[(&str, Kind<'_>, u16)]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for (path, kind, permissions) in members {
        let mtime = Timestamp { seconds: 1_000_000_000, nanoseconds: 0 };
        let metadata = Metadata { permissions: *permissions, mtime, ..Metadata::IMPLICIT };
        let is_regular = *kind == Kind::Regular;
        let content = if is_regular { path.as_bytes() } else { b"" };
        let (path, size) = (path.as_bytes(), content.len() as u64);
        writer.member(&Member { path, kind: *kind, metadata, size, xattrs: &[] }).unwrap();
        writer.content(content).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn a_tree_arrives_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("from");
    fs::create_dir_all(from.join("a/b/empty")).unwrap();
    fs::write(from.join("a/program"), "text").unwrap();
    fs::set_permissions(from.join("a/program"), fs::Permissions::from_mode(0o751)).unwrap();
    fs::hard_link(from.join("a/program"), from.join("a/b/same")).unwrap();
    symlink("../elsewhere", from.join("a/link")).unwrap();
    let mut holes = File::create(from.join("holes")).unwrap();
    holes.set_len(5 << 20).unwrap();
    holes.write_all(b"begin").unwrap();
    rustix::fs::mknodat(
        directory(&from),
        "fifo",
        rustix::fs::FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let _socket = UnixListener::bind(from.join("socket")).unwrap();
    fs::set_permissions(from.join("a/b"), fs::Permissions::from_mode(0o500)).unwrap();
    let to = folder.path().join("to");
    fs::create_dir(&to).unwrap();
    let root = directory(&to);
    // The socket is the only file that is left out.
    let skipped = copy(&from, "new", &on_host(&root)).unwrap();
    assert_eq!(skipped.count, 1);
    assert_eq!(skipped.first, Some((b"new/socket".to_vec(), "it is a socket")));
    let new = to.join("new");
    assert_eq!(fs::read_to_string(new.join("a/program")).unwrap(), "text");
    let [program, same] = ["a/program", "a/b/same"].map(|it| fs::metadata(new.join(it)).unwrap());
    assert_eq!((program.mode() & 0o7777, program.ino()), (0o751, same.ino()));
    let before = fs::metadata(from.join("a/program")).unwrap();
    assert_eq!((program.mtime(), program.mtime_nsec()), (before.mtime(), before.mtime_nsec()));
    assert_eq!(fs::metadata(new.join("a/b")).unwrap().mode() & 0o7777, 0o500);
    assert!(fs::metadata(new.join("a/b/empty")).unwrap().is_dir());
    assert_eq!(fs::read_link(new.join("a/link")).unwrap(), Path::new("../elsewhere"));
    assert!(fs::symlink_metadata(new.join("fifo")).unwrap().file_type().is_fifo());
    let holes = fs::metadata(new.join("holes")).unwrap();
    assert_eq!(holes.len(), 5 << 20);
    assert_eq!(fs::read(new.join("holes")).unwrap(), fs::read(from.join("holes")).unwrap());
    // Without a name, only the contents are copied.
    copy(&from.join("a/b"), "", &on_host(&root)).unwrap();
    assert!(to.join("same").is_file() && to.join("empty").is_dir());
}

/// A tar that first makes a link, and then files behind it.
#[test]
fn on_the_host_no_link_of_a_tar_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (outside, to) = (folder.path().join("outside"), folder.path().join("to"));
    for path in [&outside, &to] {
        fs::create_dir(path).unwrap();
    }
    fs::write(outside.join("old"), "old").unwrap();
    let root = directory(&to);
    let target = outside.to_str().unwrap();
    let check = |members: &[(&str, Kind<'_>, u16)]| {
        let made = unpack(&*tar(members), &on_host(&root), &|| {});
        assert!(made.is_err(), "{members:?}");
        let names: Vec<_> =
            fs::read_dir(&outside).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!((names, fs::read_to_string(outside.join("old")).unwrap()), {
            (vec!["old".into()], "old".to_owned())
        });
    };
    let link = ("x", Kind::Symlink(target.as_bytes()), 0o777);
    check(&[link, ("x/new", Kind::Regular, 0o644)]);
    check(&[link, ("x", Kind::Directory, 0o755), ("x/new", Kind::Regular, 0o644)]);
    check(&[link, ("x/new", Kind::Symlink(b"old"), 0o777)]);
    check(&[link, ("x/new", Kind::Hardlink(b"x/old"), 0o644)]);
    check(&[link, ("new", Kind::Hardlink(b"x/old"), 0o644)]);
    check(&[("../new", Kind::Regular, 0o644)]);
    check(&[("a", Kind::Symlink(b".."), 0o777), ("a/outside/new", Kind::Regular, 0o644)]);
    // A link at the name of a file is replaced, and not followed.
    let over = [("x", Kind::Symlink(b"../outside/old"), 0o777), ("x", Kind::Regular, 0o644)];
    unpack(&*tar(&over), &on_host(&root), &|| {}).unwrap();
    assert!(fs::symlink_metadata(to.join("x")).unwrap().is_file());
    assert_eq!(fs::read_to_string(outside.join("old")).unwrap(), "old");
}

#[test]
fn in_a_container_links_lead_to_places_inside() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("root");
    fs::create_dir_all(inside.join("usr/bin")).unwrap();
    symlink("/usr/bin", inside.join("bin")).unwrap();
    symlink("../../../..", inside.join("up")).unwrap();
    let root = directory(&inside);
    let members = [
        ("bin", Kind::Directory, 0o700),
        ("bin/program", Kind::Regular, 0o4755),
        ("up/file", Kind::Regular, 0o644),
    ];
    unpack(&*tar(&members), &in_container(&root, "/"), &|| {}).unwrap();
    assert_eq!(fs::read_to_string(inside.join("usr/bin/program")).unwrap(), "bin/program");
    assert_eq!(fs::metadata(inside.join("usr/bin/program")).unwrap().mode() & 0o7777, 0o4755);
    assert_eq!(fs::read_to_string(inside.join("file")).unwrap(), "up/file");
    assert!(!folder.path().join("file").exists());
    // A directory that existed keeps its mode.
    assert_ne!(fs::metadata(inside.join("usr/bin")).unwrap().mode() & 0o777, 0o700);
    // The destination itself is behind a link.
    let members = [("other", Kind::Regular, 0o644)];
    unpack(&*tar(&members), &in_container(&root, "up/../bin"), &|| {}).unwrap();
    assert!(inside.join("usr/bin/other").is_file());
}

/// A container exchanges a directory and a link to the host as fast as it can.
#[test]
fn a_racing_container_redirects_nothing_to_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let (inside, outside) = (folder.path().join("root"), folder.path().join("outside"));
    fs::create_dir_all(inside.join("a/b")).unwrap();
    fs::create_dir(&outside).unwrap();
    symlink("../../outside", inside.join("a/other")).unwrap();
    let root = directory(&inside);
    let above = directory(&inside.join("a"));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            while !is_over.load(Ordering::Relaxed) {
                let _exchanged = rustix::fs::renameat_with(&above, "b", &above, "other", flags);
            }
        });
        let names: Vec<_> = (0..20).map(|it| format!("a/b/{it}")).collect();
        let members: Vec<_> = names.iter().map(|it| (&**it, Kind::Regular, 0o644)).collect();
        let bytes = tar(&members);
        let mut made = 0;
        for _ in 0..200 {
            // A link to a directory that does not exist inside is an error.
            made += u32::from(unpack(&*bytes, &in_container(&root, "/"), &|| {}).is_ok());
            let _found = find(root.as_fd(), b"/a/b/1");
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(made > 0, "no copy got through");
    });
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}

/// Another file in its place would have another owner, and other mounts and links of it would keep the old text.
#[test]
fn the_source_of_a_mount_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    fs::write(&from, "new").unwrap();
    fs::write(&to, "old text").unwrap();
    fs::set_permissions(&to, fs::Permissions::from_mode(0o640)).unwrap();
    fs::hard_link(&to, folder.path().join("other")).unwrap();
    let root = directory(folder.path());
    let destination = Destination { is_mounted_file: true, ..in_container(&root, "") };
    assert_eq!(copy(&from, "to", &destination).unwrap(), Skipped::default());
    assert_eq!(fs::read_to_string(folder.path().join("other")).unwrap(), "new");
    assert_eq!(fs::metadata(&to).unwrap().mode() & 0o7777, 0o640);
}

#[test]
fn set_ids_do_not_reach_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let root = directory(folder.path());
    let members = [("f", Kind::Regular, 0o6755), ("d", Kind::Directory, 0o7777)];
    unpack(&*tar(&members), &on_host(&root), &|| {}).unwrap();
    let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().mode() & 0o7777;
    assert_eq!((mode("f"), mode("d")), (0o755, 0o1777));
}

#[test]
fn what_cannot_be_copied_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let root = directory(folder.path());
    let check = |made: Result<Skipped, CopyError>, expect: &str| {
        let error = made.unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    let kernels = "file system of the kernel";
    check(copy(Path::new("/proc/self/status"), "x", &on_host(&root)), kernels);
    check(copy(Path::new("/dev/null"), "x", &on_host(&root)), "it is a device");
    let proc = directory(Path::new("/proc"));
    check(unpack(&*tar(&[("x", Kind::Regular, 0o644)]), &on_host(&proc), &|| {}), kernels);
    fs::create_dir(folder.path().join("d")).unwrap();
    let file = [("d", Kind::Regular, 0o644)];
    check(unpack(&*tar(&file), &on_host(&root), &|| {}), "has a directory of this name");
    fs::write(folder.path().join("f"), "").unwrap();
    let over = [("f", Kind::Directory, 0o755)];
    check(unpack(&*tar(&over), &on_host(&root), &|| {}), "another file in place of");
    check(unpack(&b"no tar"[..], &on_host(&root), &|| {}), "cannot read the tar");
    let deep = vec!["d"; 300].join("/");
    let deep = [(&*deep, Kind::Directory, 0o755)];
    check(unpack(&*tar(&deep), &on_host(&root), &|| {}), "below too many directories");
    // Directories that were made before the error have their modes.
    assert_eq!(fs::metadata(folder.path().join("d/d")).unwrap().mode() & 0o777, 0o755);
}

#[test]
fn paths_end_inside_the_root() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("root");
    fs::create_dir_all(inside.join("a/b")).unwrap();
    fs::write(inside.join("a/file"), "").unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    for (target, name) in [
        ("/a", "absolute"),
        ("a/file", "relative"),
        ("../../file", "out"),
        ("a/new", "dangling"),
        ("loop", "loop"),
        ("/proc/self/root", "magic"),
    ] {
        symlink(target, inside.join(name)).unwrap();
    }
    let root = directory(&inside);
    let check = |path: &str, expect: Result<(&str, Option<FileType>), Errno>| {
        let found = find(root.as_fd(), path.as_bytes());
        let found = found.map(|it| (String::from_utf8(it.path()).unwrap(), it.kind));
        assert_eq!(found, expect.map(|it| (it.0.to_owned(), it.1)), "{path}");
    };
    let (file, tree) = (Some(FileType::RegularFile), Some(FileType::Directory));
    check("/", Ok(("/", tree)));
    check("", Ok(("", tree)));
    check("a/file", Ok(("a/file", file)));
    check("/a/b/../file", Ok(("/a/b/../file", file)));
    check("/../../a", Ok(("/../../a", tree)));
    check("a/.", Ok(("a/.", tree)));
    check("absolute/", Ok(("/a", tree)));
    check("absolute/file", Ok(("absolute/file", file)));
    check("relative", Ok(("a/file", file)));
    check("a/new", Ok(("a/new", None)));
    check("dangling", Ok(("a/new", None)));
    check("no/new", Err(Errno::NOENT));
    check("a/file/new", Err(Errno::NOTDIR));
    check("loop", Err(Errno::LOOP));
    check("magic", Err(Errno::NOENT));
    // Above the root is only the root.
    check("out", Ok(("../../file", None)));
}
