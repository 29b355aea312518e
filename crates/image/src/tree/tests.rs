//! Tests of the rules in `docs/format/tree.md` that the tree enforces.

use super::*;

const FIFO: Node<'_> = Node::Fifo;

fn add(builder: &mut Builder, directory: InodeId, name: &[u8], node: Node<'_>) -> InodeId {
    let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
    builder.insert(directory, name, inode, Link::Equal).unwrap();
    inode
}

/// Lists every path with its number of links; `=` marks the names that do not own their inode.
fn paths(tree: &Tree) -> String {
    let mut out = Vec::new();
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        let mark = if entry.is_owner { "" } else { "=" };
        out.push(format!("{mark}{}:{}", path.escape_ascii(), entry.inode.nlink()));
    }
    out.join(" ")
}

#[track_caller]
fn check_name_is(name: &[u8], wrong: Option<&str>) {
    let mut builder = Builder::new();
    let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, FIFO).unwrap();
    let answer =
        builder.insert(InodeId::ROOT, name, inode, Link::Equal).map_err(|it| it.to_string());
    let expect = wrong.map(|it| format!("\"{}\" is not a file name: {it}", name.escape_ascii()));
    assert_eq!(answer.err(), expect);
}

#[test]
fn names_are_1_to_255_bytes_without_slash_and_nul() {
    for name in [&b"a"[..], b"...", b".a", b"\n", b"\xff", b"\\", b" ", &[b'n'; 255]] {
        check_name_is(name, None);
    }
    check_name_is(b"", Some("it is empty"));
    check_name_is(b".", Some("it is reserved for a directory"));
    check_name_is(b"..", Some("it is reserved for a directory"));
    check_name_is(&[b'n'; 256], Some("it has more than 255 bytes"));
    check_name_is(b"a/b", Some("it has a slash"));
    check_name_is(b"a\0", Some("it has a NUL byte"));
}

#[test]
fn a_name_is_there_once() {
    let mut builder = Builder::new();
    let file = add(&mut builder, InodeId::ROOT, b"a", FIFO);
    let exists = Err(TreeError::Exists(b"a".to_vec()));
    assert_eq!(builder.insert(InodeId::ROOT, b"a", file, Link::Equal), exists);
    let not_a_directory = Err(TreeError::NotDirectory(b"b".to_vec()));
    assert_eq!(builder.insert(file, b"b", file, Link::Equal), not_a_directory);
    assert_eq!(
        builder.subdirectory(InodeId::ROOT, b"a").unwrap_err().to_string(),
        r#""a" is not a directory"#
    );
    assert_eq!(paths(&builder.finish()), "/a:1");
}

#[test]
fn what_no_source_describes_is_a_plain_directory() {
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"a").unwrap();
    assert!(builder.is_implicit(InodeId::ROOT) && builder.is_implicit(directory));
    let described = Metadata { permissions: 0o700, ..Metadata::IMPLICIT };
    builder.describe(directory, &described, XattrsId::NONE).unwrap();
    builder.subdirectory(directory, b"b").unwrap();
    let tree = builder.finish();
    for path in [&b"/"[..], b"/a/b"] {
        let inode = tree.resolve(path).unwrap();
        let expect = Metadata {
            permissions: 0o755,
            uid: 0,
            gid: 0,
            mtime: Timestamp { seconds: 0, nanoseconds: 0 },
        };
        assert_eq!((inode.metadata(), inode.is_implicit()), (expect, true));
        assert_eq!(inode.xattrs().len(), 0);
    }
    let inode = tree.resolve(b"a").unwrap();
    assert_eq!((inode.metadata(), inode.is_implicit()), (described, false));
}

#[test]
fn metadata_is_kept_as_it_is() {
    let mut builder = Builder::new();
    let metadata = Metadata {
        permissions: 0o7777,
        uid: u32::MAX,
        gid: 70_000,
        mtime: Timestamp { seconds: i64::MIN, nanoseconds: 999_999_999 },
    };
    let inode = builder.inode(&metadata, XattrsId::NONE, FIFO).unwrap();
    builder.insert(InodeId::ROOT, b"a", inode, Link::Equal).unwrap();
    let beyond = Metadata { permissions: 0o10000, ..metadata };
    assert_eq!(
        builder.inode(&beyond, XattrsId::NONE, FIFO).unwrap_err(),
        TreeError::Permissions(0o10000)
    );
    let tree = builder.finish();
    assert_eq!(tree.resolve(b"a").unwrap().metadata(), metadata);
    assert_eq!(tree.resolve(b"a").unwrap().mode(), 0o017_777);
}

#[test]
fn times_are_ordered_by_time() {
    let time = |seconds, nanoseconds| Timestamp { seconds, nanoseconds };
    let sorted = [time(-2, 0), time(-2, 5), time(-1, 0), time(0, 0), time(0, 1), time(1, 0)];
    assert!(sorted.is_sorted_by(|a, b| a < b));
}

#[test]
fn links_are_counted() {
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"d").unwrap();
    for name in [&b"e"[..], b"f"] {
        builder.subdirectory(directory, name).unwrap();
    }
    let file = add(&mut builder, directory, b"x", FIFO);
    builder.insert(InodeId::ROOT, b"y", file, Link::Equal).unwrap();
    let tree = builder.finish();
    assert_eq!(paths(&tree), "/d:4 /d/e:2 /d/f:2 /d/x:2 =/y:2");
    assert_eq!(tree.root().nlink(), 3);
    assert_eq!(tree.inode_count(), 5);
}

#[test]
fn stated_links_are_kept_but_not_of_directories() {
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"d").unwrap();
    builder.state_nlink(directory, 9);
    let file = add(&mut builder, directory, b"x", FIFO);
    builder.state_nlink(file, 0);
    let other = add(&mut builder, directory, b"y", FIFO);
    builder.state_nlink(other, 7);
    assert_eq!(paths(&builder.finish()), "/d:2 /d/x:0 /d/y:7");
}

#[test]
fn files_are_met_once_and_by_the_name_that_owns_them() {
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"d").unwrap();
    let file = add(&mut builder, directory, b"x", Node::Regular(Content::Inline(b"bytes")));
    builder.insert(InodeId::ROOT, b"a", file, Link::Owner).unwrap();
    builder.insert(InodeId::ROOT, b"b", file, Link::Equal).unwrap();
    add(&mut builder, directory, b"z", Node::Regular(Content::Inline(b"")));
    add(&mut builder, directory, b"y", FIFO);
    let tree = builder.finish();
    let files: Vec<_> = tree.files().map(|(file, content)| (file.path(), content.size())).collect();
    assert_eq!(files, [(b"/a".to_vec(), 5), (b"/d/z".to_vec(), 0)]);
}

/// `claims` are the names that the source states as owners of the inode.
#[track_caller]
fn check_owner(names: &[&str], claims: &[&str], expect: &str) {
    let mut builder = Builder::new();
    let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, FIFO).unwrap();
    for path in names {
        let (parents, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut directory = InodeId::ROOT;
        for parent in components(parents.as_bytes()) {
            directory = builder.subdirectory(directory, parent).unwrap();
        }
        let link = if claims.contains(path) { Link::Owner } else { Link::Equal };
        builder.insert(directory, name.as_bytes(), inode, link).unwrap();
    }
    let tree = builder.finish();
    assert_eq!(String::from_utf8(tree.inode(inode).path()).unwrap(), expect);
    let (parent, _) = expect.rsplit_once('/').unwrap();
    let parent = tree.resolve(parent.as_bytes()).unwrap();
    assert_eq!(tree.inode(inode).parent().id(), parent.id());
}

#[test]
fn an_inode_belongs_to_the_declared_name_or_to_the_first_path() {
    check_owner(&["b", "a", "c"], &[], "/a");
    check_owner(&["b", "a", "c"], &["c"], "/c");
    // Names are ordered by the bytes of whole paths, where `.` is before `/`, which is before `0`.
    check_owner(&["a/b", "a.b"], &[], "/a.b");
    check_owner(&["a0", "a/b"], &[], "/a/b");
    check_owner(&["z", "a/z/z", "a/z0"], &[], "/a/z/z");
    check_owner(&["z", "a/z/z", "a/z0"], &["z"], "/z");
}

/// Comparing whole paths would take hours, and storing them 10 GB.
#[test]
fn links_in_deep_directories_cost_no_paths() {
    let mut builder = Builder::new();
    let mut directory = InodeId::ROOT;
    let mut files = Vec::new();
    for _ in 0..100_000 {
        let file = add(&mut builder, directory, b"b", FIFO);
        builder.insert(directory, b"c", file, Link::Equal).unwrap();
        files.push(file);
        directory = builder.subdirectory(directory, b"d").unwrap();
    }
    let tree = builder.finish();
    assert_eq!(tree.inode(files[2]).path(), b"/d/d/b");
    assert!(tree.inode(files[99_999]).path().ends_with(b"/d/d/b"));
}

#[test]
fn a_directory_has_one_name() {
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"a").unwrap();
    let refused = Err(TreeError::LinkToDirectory(b"b".to_vec()));
    assert_eq!(builder.insert(InodeId::ROOT, b"b", directory, Link::Equal), refused);
    assert_eq!(builder.insert(directory, b"b", directory, Link::Equal), refused);
    assert_eq!(builder.insert(directory, b"b", InodeId::ROOT, Link::Equal), refused);
}

fn pairs(tree: &Tree, path: &[u8]) -> Vec<String> {
    let show =
        |(name, value): (&[u8], &[u8])| format!("{}={}", name.escape_ascii(), value.escape_ascii());
    tree.resolve(path).unwrap().xattrs().map(show).collect()
}

#[test]
fn xattrs_of_any_name_are_kept_in_order() {
    let mut builder = Builder::new();
    let set: [(&[u8], &[u8]); 5] = [
        (b"user.z", b"1"),
        (b"system.posix_acl_access", b"\x02\0\0\0"),
        (b"trusted.overlay.opaque", b"y"),
        (b"\xff", b""),
        (b"user.z", b"2"),
    ];
    let xattrs = builder.xattrs(set).unwrap();
    let inode = builder.inode(&Metadata::IMPLICIT, xattrs, FIFO).unwrap();
    builder.insert(InodeId::ROOT, b"a", inode, Link::Equal).unwrap();
    let same = builder.xattrs(set).unwrap();
    assert_eq!(same, xattrs, "equal sets are one");
    let tree = builder.finish();
    let expect = [
        "user.z=2",
        r"system.posix_acl_access=\x02\x00\x00\x00",
        "trusted.overlay.opaque=y",
        r"\xff=",
    ];
    assert_eq!(pairs(&tree, b"a"), expect);
    assert_eq!(pairs(&tree, b"/"), [""; 0]);
}

#[track_caller]
fn check_xattr_refused(name: &[u8], value_len: usize, expect: &str) {
    let value = vec![0; value_len];
    let error = Builder::new().xattrs([(name, &*value)]).unwrap_err();
    assert_eq!(error.to_string(), expect);
}

#[test]
fn xattrs_that_no_image_holds_are_refused() {
    let name = "it must have 1 to 255 bytes and no NUL";
    check_xattr_refused(b"", 0, &format!("\"\" is not an xattr name: {name}"));
    check_xattr_refused(b"a\0", 0, &format!("\"a\\x00\" is not an xattr name: {name}"));
    let long = "n".repeat(256);
    let expect = format!("\"{long}\" is not an xattr name: {name}");
    check_xattr_refused(long.as_bytes(), 0, &expect);
    check_xattr_refused(b"a", 65536, "xattr \"a\" has a value of 65536 bytes, more than 65535");
    Builder::new().xattrs([([b'n'; 255].as_slice(), [0; 65535].as_slice())]).unwrap();
}

#[track_caller]
fn check_node(node: Node<'_>, expect: Result<(), TreeError>) {
    let mut builder = Builder::new();
    let added = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node);
    assert_eq!(added.as_ref().err(), expect.err().as_ref());
    if let Ok(inode) = added {
        builder.insert(InodeId::ROOT, b"a", inode, Link::Equal).unwrap();
        let tree = builder.finish();
        assert_eq!(tree.resolve(b"a").unwrap().node(), node);
    }
}

#[test]
fn every_type_of_file() {
    check_node(Node::Directory, Ok(()));
    check_node(Node::Regular(Content::Inline(b"")), Ok(()));
    check_node(Node::Regular(Content::Inline(&[7; 5001])), Ok(()));
    check_node(Node::CharDevice(0), Ok(()));
    check_node(Node::CharDevice(u64::MAX), Ok(()));
    check_node(Node::BlockDevice(0x800), Ok(()));
    check_node(Node::Fifo, Ok(()));
    check_node(Node::Socket, Ok(()));
}

#[test]
fn symlinks_have_1_to_4095_bytes() {
    check_node(Node::Symlink(b"/"), Ok(()));
    check_node(Node::Symlink(&[b'x'; 4095]), Ok(()));
    check_node(Node::Symlink(b""), Err(TreeError::SymlinkTarget(0)));
    check_node(Node::Symlink(&[b'x'; 4096]), Err(TreeError::SymlinkTarget(4096)));
    check_node(Node::Symlink(b"a\0"), Err(TreeError::SymlinkTarget(2)));
}

#[test]
fn external_files_have_1_byte_to_8_eib() {
    let object = Some(ObjectId::from_bytes(&[0xab; 32]).unwrap());
    let path = format!("ab/{}", "ab".repeat(31));
    let external =
        |size, object, location| Node::Regular(Content::External { size, object, location });
    let most = (1 << 63) - 1;
    check_node(external(1, None, Location::None), Ok(()));
    check_node(external(most, object, Location::Object), Ok(()));
    check_node(external(1, object, Location::None), Ok(()));
    check_node(external(1, None, Location::Path(path.as_bytes())), Ok(()));
    check_node(external(1, object, Location::Path(b"elsewhere")), Ok(()));
    check_node(external(0, None, Location::None), Err(TreeError::Size(0)));
    check_node(external(most + 1, None, Location::None), Err(TreeError::Size(1 << 63)));
    let nowhere = Err(TreeError::Location(Vec::new()));
    check_node(external(1, None, Location::Object), nowhere.clone());
    check_node(external(1, object, Location::Path(b"")), nowhere);
    let nul = Err(TreeError::Location(b"a\0".to_vec()));
    check_node(external(1, None, Location::Path(b"a\0")), nul);
}

#[test]
fn the_path_of_the_object_itself_is_no_other_place() {
    let object = ObjectId::from_bytes(&[0xab; 32]).unwrap();
    let path = object.path();
    let location = Location::Path(path.as_bytes());
    let node = Node::Regular(Content::External { size: 1, object: Some(object), location });
    let mut builder = Builder::new();
    add(&mut builder, InodeId::ROOT, b"a", node);
    let tree = builder.finish();
    let location = Location::Object;
    let expect = Node::Regular(Content::External { size: 1, object: Some(object), location });
    assert_eq!(tree.resolve(b"a").unwrap().node(), expect);
}

#[test]
fn siblings_are_in_byte_order() {
    let mut builder = Builder::new();
    for name in [&b"b"[..], b"\xff", b"a", b"-", b"A", b"a0", b"a-", b"\x01"] {
        add(&mut builder, InodeId::ROOT, name, FIFO);
    }
    let tree = builder.finish();
    assert_eq!(paths(&tree), r"/\x01:1 /-:1 /A:1 /a:1 /a-:1 /a0:1 /b:1 /\xff:1");
    assert!(tree.root().lookup(b"a-").is_some() && tree.root().lookup(b"a.").is_none());
}

#[test]
fn what_has_no_name_is_not_in_the_tree() {
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"d").unwrap();
    let file = add(&mut builder, directory, b"x", FIFO);
    builder.insert(InodeId::ROOT, b"y", file, Link::Equal).unwrap();
    builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, FIFO).unwrap();
    assert_eq!(builder.remove(InodeId::ROOT, b"d"), Some(directory));
    assert_eq!(builder.remove(InodeId::ROOT, b"d"), None);
    assert_eq!(builder.lookup(InodeId::ROOT, b"d"), None);
    let tree = builder.finish();
    assert_eq!(paths(&tree), "/y:1");
    assert_eq!(tree.inode_count(), 2);
}

#[test]
fn paths_go_through_directories_only() {
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"d").unwrap();
    let file = add(&mut builder, directory, b"x", FIFO);
    add(&mut builder, InodeId::ROOT, b"l", Node::Symlink(b"d"));
    assert_eq!(builder.resolve(b"//d/./x"), None);
    assert_eq!(builder.resolve(b"//d//x/"), Some(file));
    assert_eq!(builder.resolve(b"l/x"), None);
    assert_eq!(builder.resolve(b""), Some(InodeId::ROOT));
    let tree = builder.finish();
    assert_eq!(tree.resolve(b"/d/x").unwrap().id(), file);
    assert!(tree.resolve(b"l/x").is_none() && tree.resolve(b"d/x/x").is_none());
}

/// Returns the rows with this number of cells from the tables of a document.
fn rows<const CELLS: usize>(document: &str) -> Vec<[&str; CELLS]> {
    document
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"))
        .filter_map(|line| line.split(" | ").collect::<Vec<_>>().try_into().ok())
        .collect()
}

#[test]
fn every_rule_has_a_test_that_is_there() {
    let document = include_str!("../../../../docs/format/tree.md");
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files: std::collections::BTreeMap<_, _> = rows::<2>(document)
        .into_iter()
        .filter_map(|[word, file]| Some((word, file.strip_prefix('`')?.strip_suffix('`')?)))
        .collect();
    assert!(files.len() > 5, "{files:?}");
    let rules: Vec<_> = rows::<3>(document).into_iter().filter(|row| row[0] != "id").collect();
    for (number, [id, rule, tests]) in (1..).zip(&rules) {
        assert_eq!(*id, format!("T{number}"), "{rule}");
        for test in tests.split(", ") {
            let (word, function) = test.split_once(": `").expect(id);
            let function = function.strip_suffix('`').expect(id);
            let file = files.get(word).unwrap_or_else(|| panic!("{id}: where is {word}?"));
            let source = std::fs::read_to_string(root.join(file))
                .unwrap_or_else(|error| panic!("{id}: {file}: {error}"));
            assert!(source.contains(&format!("fn {function}(")), "{id}: {file} has no {function}");
        }
    }
    assert!(rules.len() >= 28, "{} rules", rules.len());
}
