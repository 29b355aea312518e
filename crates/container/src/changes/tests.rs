//! Upper layers made by hand, with contents that the kernel writes rarely or never, and a real overlay of this
//! kernel. Needs root.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use image::tar::{Kind, Reader};
use image::tree::{Builder, Content, InodeId, Link, Metadata, Node, Tree, XattrsId};
use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use store::{OpenOptions, Store};

use super::{ChangesError, Owners, Report, Upper, write};

/// An image of `/d/a`, `/d/b`, `/d/sub/far`, `/e/f` and `/file`. The contents of a file are its path.
fn image() -> Tree {
    let mut builder = Builder::new();
    for path in ["d/a", "d/b", "d/sub/far", "e/f", "file"] {
        let (mut directory, mut names) = (InodeId::ROOT, path.split('/').peekable());
        while let Some(name) = names.next() {
            let name = name.as_bytes();
            if names.peek().is_some() {
                let there = builder.lookup(directory, name);
                directory = there.unwrap_or_else(|| builder.subdirectory(directory, name).unwrap());
                continue;
            }
            let node = Node::Regular(Content::Inline(path.as_bytes()));
            let file = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
            builder.insert(directory, name, file, Link::Equal).unwrap();
        }
    }
    builder.finish()
}

struct Place {
    folder: tempfile::TempDir,
    store: Store,
    image: Tree,
}

impl Place {
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            testing::skipped("marks of overlays need root");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(
            &folder.path().join("store"),
            store::Who::this_process(),
            OpenOptions::create(),
        )
        .unwrap();
        fs::create_dir(folder.path().join("upper")).unwrap();
        Some(Self { folder, store, image: image() })
    }

    fn directory(&self, path: &str, marks: &[(&str, &str)]) {
        fs::create_dir_all(self.folder.path().join("upper").join(path)).unwrap();
        self.mark(path, marks);
    }

    fn file(&self, path: &str, content: &str, marks: &[(&str, &str)]) {
        fs::write(self.folder.path().join("upper").join(path), content).unwrap();
        self.mark(path, marks);
    }

    fn mark(&self, path: &str, marks: &[(&str, &str)]) {
        let path = self.folder.path().join("upper").join(path);
        for (name, value) in marks {
            let name = format!("trusted.overlay.{name}");
            rustix::fs::setxattr(&path, name, value.as_bytes(), XattrFlags::empty()).unwrap();
        }
    }

    fn whiteout(&self, path: &str) {
        let path = self.folder.path().join("upper").join(path);
        rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    }

    fn layer(&self, out: &mut Vec<u8>) -> Result<Report, ChangesError> {
        let directory = File::open(self.folder.path().join("upper")).unwrap();
        let upper = Upper {
            directory: directory.as_fd(),
            image: &self.image,
            store: &self.store,
            ids: &Owners::default(),
            latest: None,
            cancel: &AtomicBool::new(false),
        };
        write(&upper, out)
    }

    /// Compares the names in the layer; short files have their contents after a colon.
    #[track_caller]
    fn check(&self, expect: &[&str]) {
        let mut tar = Vec::new();
        let report = self.layer(&mut tar).unwrap();
        assert_eq!((report.bytes, report.entries), (tar.len() as u64, expect.len() as u64));
        let mut reader = Reader::new(&tar[..]);
        let mut found = Vec::new();
        while let Some(mut entry) = reader.next_entry().unwrap() {
            let mut text = String::from_utf8(entry.path.to_vec()).unwrap();
            match entry.kind {
                Kind::Directory => text.push('/'),
                Kind::Regular if entry.size > 0 => {
                    let mut bytes = vec![0; usize::try_from(entry.size).unwrap()];
                    let mut filled = 0;
                    while filled < bytes.len() {
                        filled += entry.content.read(&mut bytes[filled..]).unwrap();
                    }
                    text = format!("{text}:{}", String::from_utf8(bytes).unwrap());
                }
                _ => {}
            }
            assert_eq!(entry.xattrs.len(), 0, "{text}");
            found.push(text);
        }
        assert_eq!(found, expect);
    }
}

#[test]
fn whiteouts_hide_only_what_is_there() {
    let Some(place) = Place::new() else { return };
    place.directory("d", &[("impure", "y"), ("origin", "x")]);
    place.whiteout("d/b");
    place.whiteout("d/never");
    place.whiteout("file");
    place.check(&["/", ".wh.file", "d/", "d/.wh.b"]);
}

#[test]
fn marked_files_are_whiteouts_where_the_directory_says_so() {
    let Some(place) = Place::new() else { return };
    place.directory("d", &[("opaque", "x")]);
    place.file("d/a", "", &[("whiteout", "")]);
    place.file("d/b", "", &[]);
    place.directory("e", &[]);
    place.file("e/f", "", &[("whiteout", "")]);
    place.check(&["/", "d/", "d/.wh.a", "d/b", "e/", "e/f"]);
}

#[test]
fn opaque_directories_hide_what_is_there() {
    let Some(place) = Place::new() else { return };
    place.directory("d", &[("opaque", "y")]);
    place.file("d/new", "new", &[]);
    place.whiteout("d/a");
    place.directory("n", &[("opaque", "y")]);
    // The kernel treats this directory as opaque, because its parent is opaque.
    place.directory("d/sub", &[]);
    place.check(&["/", "d/", "d/.wh..wh..opq", "d/new:new", "d/sub/", "n/"]);
}

#[test]
fn renamed_directories_come_whole() {
    let Some(place) = Place::new() else { return };
    place.whiteout("d");
    place.directory("x/y", &[("redirect", "/d")]);
    place.whiteout("x/y/a");
    place.directory("x/y/zub", &[("redirect", "sub")]);
    place.whiteout("x/y/sub");
    // The redirected directory replaces an existing one.
    place.directory("e", &[("redirect", "/d/sub")]);
    place.file("e/f", "other", &[]);
    place.check(&[
        "/",
        ".wh.d",
        "e/",
        "e/.wh..wh..opq",
        "e/f:other",
        "e/far:d/sub/far",
        "x/",
        "x/y/",
        "x/y/b:d/b",
        "x/y/zub/",
        "x/y/zub/far:d/sub/far",
    ]);
}

#[test]
fn metadata_alone_takes_its_bytes_from_the_image() {
    let Some(place) = Place::new() else { return };
    place.directory("d", &[]);
    let empty = [("metacopy", "")];
    place.file("d/a", "", &empty);
    place.file("d/here", "", &[("metacopy", ""), ("redirect", "b")]);
    place.file("there", "", &[("metacopy", ""), ("redirect", "/e/f")]);
    place.check(&["/", "d/", "d/a:d/a", "d/here:d/b", "there:e/f"]);
    for (redirect, from) in [
        ("/no/such", "/no/such"),
        ("/d", "/d"),
        ("/../../etc/passwd", "/../../etc/passwd"),
        ("..", ".."),
    ] {
        place.file("there", "", &[("metacopy", ""), ("redirect", redirect)]);
        let error = place.layer(&mut Vec::new()).unwrap_err().to_string();
        let expect = format!("refers to the content of \"{from}\" in the image");
        assert!(error.contains("\"/there\"") && error.contains(&expect), "{error}");
    }
}

#[test]
fn a_redirect_that_leads_nowhere_shows_nothing() {
    let Some(place) = Place::new() else { return };
    for redirect in ["/no/such", "/file", "/..", "/d/../e", "."] {
        place.directory("d", &[("redirect", redirect)]);
        place.check(&["/", "d/", "d/.wh..wh..opq"]);
    }
}

#[test]
fn a_name_that_no_whiteout_can_say() {
    let Some(mut place) = Place::new() else { return };
    let long = "n".repeat(252);
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"d").unwrap();
    for name in ["kept", &long] {
        let node = Node::Regular(Content::Inline(b"x"));
        let file = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
        builder.insert(directory, name.as_bytes(), file, Link::Equal).unwrap();
    }
    place.image = builder.finish();
    place.directory("d", &[]);
    place.whiteout(&format!("d/{long}"));
    place.check(&["/", "d/", "d/.wh..wh..opq", "d/kept:x"]);
}

/// Compares a layer with the marks that this kernel's overlay writes, and with the files that it shows.
#[test]
fn marks_of_this_kernel_are_understood() {
    let Some(place) = Place::new() else { return };
    let lower = place.folder.path().join("lower");
    for (path, content) in [
        ("d/a", "d/a"),
        ("d/b", "d/b"),
        ("d/sub/far", "d/sub/far"),
        ("e/f", "e/f"),
        ("file", "file"),
    ] {
        let path = lower.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    fs::create_dir(place.folder.path().join("work")).unwrap();
    let open = |name: &str| File::open(place.folder.path().join(name)).unwrap();
    let (upper, work, data) = (open("upper"), open("work"), open("store"));
    let mount = kernel::mount::overlay(&kernel::mount::OverlayOptions {
        name: "quire:test",
        lower: &[open("lower").as_fd()],
        data: &[data.as_fd()],
        upper: Some(kernel::mount::Upper {
            upper: upper.as_fd(),
            work: work.as_fd(),
            durability: kernel::mount::Durability::Volatile,
        }),
        verity: kernel::mount::Verity::Off,
        xattrs: kernel::mount::XattrNamespace::Trusted,
        credentials: kernel::mount::Credentials::Mounter,
    });
    let Ok(mount) = mount else {
        testing::skipped(&format!("no overlay on this directory: {mount:?}"));
        return;
    };
    let root = Path::new("/proc/self/fd")
        .join(std::os::fd::AsRawFd::as_raw_fd(&mount.as_fd()).to_string());
    let at = |path: &str| root.join(path);
    rustix::fs::rename(at("d"), at("renamed")).unwrap();
    fs::remove_file(at("renamed/a")).unwrap();
    fs::remove_dir_all(at("e")).unwrap();
    fs::create_dir(at("e")).unwrap();
    fs::write(at("e/new"), "new").unwrap();
    fs::set_permissions(at("file"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    rustix::fs::rename(at("file"), at("renamed/elif")).unwrap();
    place.check(&[
        "/",
        ".wh.d",
        ".wh.file",
        "e/",
        "e/.wh..wh..opq",
        "e/new:new",
        "renamed/",
        "renamed/b:d/b",
        "renamed/elif:file",
        "renamed/sub/",
        "renamed/sub/far:d/sub/far",
    ]);
}

#[test]
fn no_file_of_a_layer_is_later_than_asked_for() {
    let Some(place) = Place::new() else { return };
    place.file("late", "late", &[]);
    let directory = File::open(place.folder.path().join("upper")).unwrap();
    let latest = image::tree::Timestamp { seconds: 5, nanoseconds: 7 };
    let upper = Upper {
        directory: directory.as_fd(),
        image: &place.image,
        store: &place.store,
        ids: &Owners::default(),
        latest: Some(latest),
        cancel: &AtomicBool::new(false),
    };
    let mut tar = Vec::new();
    write(&upper, &mut tar).unwrap();
    let mut reader = Reader::new(&tar[..]);
    let mut times = Vec::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        times.push(entry.metadata.mtime);
    }
    assert_eq!(times, [latest, latest]);
}
