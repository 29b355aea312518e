use super::*;
use crate::tree::Timestamp;

const FILE: Metadata = Metadata {
    permissions: 0o644,
    uid: 1,
    gid: 2,
    mtime: Timestamp { seconds: 9, nanoseconds: 8 },
};
const USR: Metadata = Metadata {
    permissions: 0o751,
    uid: 3,
    gid: 4,
    mtime: Timestamp { seconds: 7, nanoseconds: 6 },
};

/// Adds entries: a path ends with a slash for a directory, `A=B` is a hard link A to B, and any other path is a file
/// that contains its path.
fn draft(entries: &[&str]) -> Result<Draft, SealedTreeError> {
    let mut draft = Draft::new();
    draft.entry(b"usr", &USR, std::iter::empty(), Node::Directory)?;
    for entry in entries {
        let bytes = entry.as_bytes();
        match entry.split_once('=') {
            Some((path, target)) => draft.link(path.as_bytes(), target.as_bytes())?,
            None if entry.ends_with('/') => {
                let metadata = Metadata { permissions: 0o700, ..FILE };
                draft.entry(bytes, &metadata, std::iter::empty(), Node::Directory)?;
            }
            None => {
                let node = Node::Regular(Content::Inline(bytes));
                draft.entry(bytes, &FILE, std::iter::empty(), node)?;
            }
        }
    }
    Ok(draft)
}

/// Returns all paths below the root but /usr, with a slash behind those of directories, and `=` and the contents of
/// other files.
fn paths(draft: Draft) -> Vec<String> {
    let tree = draft.into_tree(ComposefsLayout::V1, |object| *object).unwrap();
    let mut walk = tree.walk();
    let mut found = Vec::new();
    while let Some((path, entry)) = walk.next() {
        let path = std::str::from_utf8(&path[1..]).unwrap();
        match entry.inode.node() {
            _ if path == "usr" => {}
            Node::Directory => found.push(format!("{path}/")),
            Node::Regular(Content::Inline(bytes)) => {
                found.push(format!("{path}={}", std::str::from_utf8(bytes).unwrap()));
            }
            _ => found.push(path.to_owned()),
        }
    }
    found
}

fn check(entries: &[&str], expected: &[&str]) {
    assert_eq!(paths(draft(entries).unwrap()), expected, "{entries:?}");
}

fn check_refused(entries: &[&str], expected: &str) {
    assert_eq!(draft(entries).unwrap_err().to_string(), expected, "{entries:?}");
}

#[test]
fn whiteouts_apply_in_the_order_of_entries() {
    check(&["a", ".wh.a"], &[]);
    check(&[".wh.a", "a"], &["a=a"]);
    check(&["d/", "d/a", "d/.wh..wh..opq", "d/b"], &["d/", "d/b=d/b"]);
    check(&["d/", "d/a", ".wh.d"], &[]);
    check(&["a", ".wh.", ".wh..wh.plnk", ".wh.b"], &["a=a"]);
}

#[test]
fn entries_replace_others() {
    check(&["d/", "d/a", "d"], &["d=d"]);
    check(&["d", "d/", "d/a"], &["d/", "d/a=d/a"]);
    check(&["d/", "d/a", "d/"], &["d/", "d/a=d/a"]);
}

#[test]
fn links_lead_to_earlier_files() {
    check(&["a", "b=a", ".wh.a"], &["b=a"]);
    check(&["a", "b=a", "c=b"], &["a=a", "b=a", "c=a"]);
    let text = r#""b" is a hard link to "a", which is not a file that an entry before it has made"#;
    check_refused(&["b=a", "a"], text);
    check_refused(&["a/", "b=a"], text);
    check_refused(&["b="], &text.replace("\"a\"", "\"\""));
}

#[test]
fn directories_must_be_there() {
    let text = r#""d/a" needs the directory "d", which no entry before it has made"#;
    check_refused(&["d/a"], text);
    check_refused(&["d", "d/a"], text);
    check_refused(&["d/", ".wh.d", "d/a"], text);
    let long = format!("{}a", "d/".repeat(2048));
    let text =
        format!("the path that begins with \"{}\" has 4097 bytes, more than 4095", &long[..60]);
    check_refused(&[&long], &text);
}

#[test]
fn the_first_name_of_a_walk_owns_a_file() {
    for (entries, owner) in [
        (&["d/", "d/a", "d.b=d/a"][..], "/d/a"),
        (&["d.b", "d/", "d/a=d.b"], "/d/a"),
        (&["e", "d/", "d/z=e", "d/y=e"], "/d/y"),
    ] {
        let tree =
            draft(entries).unwrap().into_tree(ComposefsLayout::V1, |object| *object).unwrap();
        let (inode, _) = tree.files().next().unwrap();
        assert_eq!(inode.path(), owner.as_bytes(), "{entries:?}");
    }
}

#[test]
fn roots_are_like_usr_and_run_is_empty() {
    let mut made = draft(&["run/", "run/a"]).unwrap();
    made.transform().unwrap();
    let tree = made.into_tree(ComposefsLayout::V1, |object| *object).unwrap();
    assert_eq!(tree.root().metadata(), USR);
    let run = tree.resolve(b"run").unwrap();
    assert_eq!(run.metadata(), Metadata { mtime: USR.mtime, permissions: 0o700, ..FILE });
    assert_eq!(run.children().count(), 0);

    let transformed = |entries| draft(entries).unwrap().transform().unwrap_err().to_string();
    let text = "the image has no directory /usr, which composefs-rs requires";
    assert_eq!(transformed(&["usr"]), text);
    assert_eq!(transformed(&[".wh.usr"]), text);
    let text = "/run is not a directory of the image, and composefs-rs refuses such images";
    assert_eq!(transformed(&["run"]), text);
}

#[test]
fn a_boot_needs_its_directories() {
    let mut made = draft(&["boot/", "boot/a", "sysroot/", "sysroot/b"]).unwrap();
    made.transform_for_boot().unwrap();
    let tree = made.into_tree(ComposefsLayout::V1, |object| *object).unwrap();
    for name in ["boot", "sysroot"] {
        let directory = tree.resolve(name.as_bytes()).unwrap();
        assert_eq!(directory.children().count(), 0);
        assert_eq!(directory.metadata().mtime, Timestamp { seconds: 7, nanoseconds: 8 });
    }
    let error = draft(&["usr/lib", "boot/", "sysroot/"]).unwrap().transform_for_boot();
    assert_eq!(error, Err(SealedTreeError::NotDirectory("usr/lib/modules".to_owned())));
    let error = draft(&["boot/"]).unwrap().transform_for_boot().unwrap_err();
    assert_eq!(error, SealedTreeError::Required("sysroot"));
}

/// The xattr of an entry, and that of a directory that the entry describes again.
#[test]
fn only_capabilities_are_kept() {
    let mut made = draft(&["d/"]).unwrap();
    let xattrs: [(&[u8], &[u8]); 3] =
        [(b"user.a", b"1"), (b"security.capability", b"2"), (b"security.selinux", b"3")];
    let node = Node::Regular(Content::Inline(b"x"));
    made.entry(b"x", &FILE, xattrs.into_iter(), node).unwrap();
    made.entry(b"d", &FILE, xattrs.into_iter(), Node::Directory).unwrap();
    let tree = made.into_tree(ComposefsLayout::V1, |object| *object).unwrap();
    for path in [&b"x"[..], b"d"] {
        let kept: Vec<_> = tree.resolve(path).unwrap().xattrs().collect();
        assert_eq!(kept, [(&b"security.capability"[..], &b"2"[..])]);
    }
}

fn policy(contexts: &[&str], substitutions: &str) -> Result<LabelPolicy, LabelError> {
    LabelPolicy::parse(&PolicyText {
        contexts: contexts.iter().map(|it| it.as_bytes().to_vec()).collect(),
        substitutions: vec![substitutions.as_bytes().to_vec()],
    })
}

fn label(policy: &mut LabelPolicy, path: &str, letter: u8) -> String {
    let found = policy.label(path.as_bytes(), letter).unwrap();
    let found = found.map(|it| policy.labels()[it as usize].clone()).unwrap_or_default();
    String::from_utf8(found).unwrap()
}

#[test]
fn the_last_line_that_matches_decides() {
    let first = "# comment\n/.* all\n/a -- file\n/a(/.*)?\t-d directory\n /none <<none>>\n";
    let mut policy = policy(&[first, "/a/b last\n"], "").unwrap();
    for (path, letter, expected) in [
        ("/a", b'-', "file"),
        ("/a", b'd', "directory"),
        ("/a", b'l', "all"),
        ("/a/b", b'd', "last"),
        ("/none", b'-', ""),
        ("/new\nline", b'-', "all"),
        ("x", b'-', ""),
    ] {
        assert_eq!(label(&mut policy, path, letter), expected, "{path}");
    }
}

#[test]
fn invalid_policies_are_refused() {
    for (line, expected) in [
        ("/a", "the SELinux policy has the line \"/a\", which composefs-rs refuses"),
        ("/a -x b", "the SELinux policy has the line \"/a -x b\", which composefs-rs refuses"),
        ("/a b c", "the SELinux policy has the line \"/a b c\", which composefs-rs refuses"),
        ("/a(?!b) c", "which needs PCRE2"),
        ("/(a{2000}){2000} b", "the patterns of the SELinux policy are too large"),
    ] {
        let error = policy(&[line], "").unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(matches!(policy(&[], "/a"), Err(LabelError::Line(_))));
    assert!(matches!(
        LabelPolicy::parse(&PolicyText { contexts: vec![vec![0xff]], ..PolicyText::default() }),
        Err(LabelError::NotUtf8)
    ));
}

#[test]
fn the_config_names_the_policy() {
    let name = |config: &str| policy_name(config.as_bytes()).unwrap();
    assert_eq!(
        name("SELINUX=enforcing\nSelinuxType = a b \nSELINUXTYPE=c"),
        Some("a b".to_owned())
    );
    assert_eq!(name("#SELINUXTYPE=a\nSELINUXTYPE"), None);
    assert!(matches!(policy_name(b"SELINUXTYPE=../a"), Err(LabelError::Name(_))));
}

/// A substitute replaces a whole path, also for the names below it; two labels of one file make two files.
#[test]
fn files_are_labelled_by_their_paths() {
    let contexts = "/b(/.*)? b\n/usr/x x\n/usr/y x\n/usr/z z\n/usr/w w\n";
    let mut policy = policy(&[contexts], "/a /b\n").unwrap();
    let mut made =
        draft(&["a/", "a/one", "usr/x", "usr/y=usr/x", "usr/z=usr/x", "usr/w=usr/x"]).unwrap();
    made.relabel(&mut policy, &|| false).unwrap();
    let tree = made.into_tree(ComposefsLayout::V1, |object| *object).unwrap();
    let label = |path: &str| {
        let inode = tree.resolve(path.as_bytes()).unwrap();
        let value = inode.xattrs().next().map(|(_, value)| value.to_vec()).unwrap_or_default();
        (String::from_utf8(value).unwrap(), inode.nlink())
    };
    assert_eq!(label("a").0, "b");
    assert_eq!(label("a/one"), ("b".to_owned(), 1));
    assert_eq!(label("usr/w"), ("w".to_owned(), 1));
    assert_eq!(label("usr/x"), ("x".to_owned(), 1));
    assert_eq!(label("usr").0, "");
}

#[test]
fn labelling_ends_when_it_is_time_to_stop() {
    let calls = std::cell::Cell::new(0);
    let mut policy = policy(&["/.* x\n"], "").unwrap();
    let mut made = draft(&["a", "b", "c", "d"]).unwrap();
    let stopped = made.relabel(&mut policy, &|| {
        calls.set(calls.get() + 1);
        calls.get() == 3
    });
    assert!(matches!(stopped, Err(LabelError::Stopped)));
    assert_eq!(calls.get(), 3);
}

#[test]
fn a_device_without_a_number_has_one_name() {
    let make = |number: u64, is_linked: bool| {
        let mut made = draft(&["d/"]).unwrap();
        let node = Node::CharDevice(number);
        made.entry(b"d/a", &FILE, std::iter::empty(), node).unwrap();
        made.entry(b"b", &FILE, std::iter::empty(), node).unwrap();
        if is_linked {
            made.link(b"c", b"d/a").unwrap();
        }
        made.check_devices()
    };
    assert_eq!(make(0, false), Ok(()));
    assert_eq!(make(0x501, true), Ok(()));
    for number in [0, 1 << 32] {
        let error = make(number, true).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("is another name of a device 0:0, which composefs-rs does not write")
        );
    }
}

/// Fields of layout V2 have fewer bits than a tree may need.
#[test]
fn images_that_layout_2_cannot_describe_are_refused() {
    use crate::tree::{Builder, Link};
    let write = |count: usize, length: usize, files: &[&[u8]]| {
        let mut builder = Builder::new();
        let names: Vec<_> = (0..count).map(|it| format!("user.{it:04}").into_bytes()).collect();
        let value = vec![b'x'; length];
        for file in files {
            let pairs = names.iter().map(|it| (&it[..], &value[..]));
            let xattrs = builder.xattrs(pairs).unwrap();
            let inode = builder.inode(&FILE, xattrs, Node::Fifo).unwrap();
            builder.insert(InodeId::ROOT, file, inode, Link::Owner).unwrap();
        }
        write_layout2(&builder.finish(), &mut Vec::new()).map_err(|it| it.to_string())
    };
    assert_eq!(write(255, 1, &[b"a", b"b"]), Ok(()));
    let error = write(256, 1, &[b"a", b"b"]).unwrap_err();
    assert!(error.contains("255 xattrs"), "{error}");
    assert_eq!(write(256, 1, &[b"a"]), Ok(()));
    let error = write(6, 65_000, &[b"a"]).unwrap_err();
    assert!(error.contains("256 KiB of xattrs"), "{error}");
}
