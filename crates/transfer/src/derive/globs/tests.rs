//! Tests globs on trees of a few paths. The expected matches are those of `.gitignore`: each row of `matches` was
//! compared with `git check-ignore` (2.39), and the test compares them again if git is installed.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use image::tree::{Builder, InodeId, Link, Metadata, Node, XattrsId};

use super::*;

fn globs(include: &[&str], exclude: &[&str]) -> Globs {
    let parse = |globs: &[&str]| globs.iter().map(|it| it.parse().unwrap()).collect();
    Globs::new(parse(include), parse(exclude))
}

/// Makes a tree of paths. Paths that end with a slash, and the parents of others, are directories.
fn tree(paths: &[&str]) -> Tree {
    let mut builder = Builder::new();
    for path in paths {
        let mut above = InodeId::ROOT;
        let (directories, name) = path.rsplit_once('/').unwrap_or(("", path));
        for name in image::tree::components(directories.as_bytes()) {
            above = builder.subdirectory(above, name).unwrap();
        }
        if !name.is_empty() {
            let fifo = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Fifo).unwrap();
            builder.insert(above, name.as_bytes(), fifo, Link::Equal).unwrap();
        }
    }
    builder.finish()
}

const PATHS: [&str; 14] = [
    "a.txt",
    "b/a.txt",
    "b/c/a.txt",
    "b/c/d/a.txt",
    "b/c/\u{e9}",
    "b/[x]",
    "empty/",
    "etc/passwd",
    "usr/etc/hosts",
    "usr/share/doc/x/README",
    "usr/share/man/",
    "usr/share/info",
    ".hidden",
    "!odd",
];

/// Returns the paths of [`PATHS`] that are kept.
fn kept(include: &[&str], exclude: &[&str]) -> Vec<String> {
    let whole = tree(&PATHS);
    let globs = globs(include, exclude);
    let mut matcher = globs.matcher();
    let mut builder = Builder::new();
    builder.lay_some(&whole, |path, entry| matcher.choose(path, entry)).unwrap();
    let tree = builder.finish();
    let (mut paths, mut walk) = (Vec::new(), tree.walk());
    while let Some((path, entry)) = walk.next() {
        let slash = if entry.inode.is_directory() { "/" } else { "" };
        paths.push(format!("{}{slash}", std::str::from_utf8(&path[1..]).unwrap()));
    }
    paths
}

#[track_caller]
fn check(include: &[&str], exclude: &[&str], expect: &str) {
    let expect: Vec<&str> = expect.split_whitespace().collect();
    assert_eq!(kept(include, exclude), expect, "{include:?} {exclude:?}");
}

/// Returns the paths that one `exclude` glob leaves out, apart from paths below other such paths.
fn matches(glob: &str) -> Vec<String> {
    let (all, left) = (kept(&[], &[]), kept(&[], &[glob]));
    let mut gone: Vec<String> = Vec::new();
    for path in all.into_iter().filter(|path| !left.contains(path)) {
        if !gone.iter().any(|above| above.ends_with('/') && path.starts_with(above.as_str())) {
            gone.push(path);
        }
    }
    gone
}

#[test]
fn globs_mean_what_gitignore_says() {
    let rows = [
        ("a.txt", "a.txt b/a.txt b/c/a.txt b/c/d/a.txt"),
        ("/a.txt", "a.txt"),
        ("*.txt", "a.txt b/a.txt b/c/a.txt b/c/d/a.txt"),
        ("/*.txt", "a.txt"),
        ("b/*.txt", "b/a.txt"),
        ("b/**/a.txt", "b/a.txt b/c/a.txt b/c/d/a.txt"),
        ("b/**/d", "b/c/d/"),
        ("**/c/a.txt", "b/c/a.txt"),
        ("usr/**", "usr/etc/ usr/share/"),
        ("etc", "etc/ usr/etc/"),
        ("/etc", "etc/"),
        ("etc/", "etc/ usr/etc/"),
        ("passwd/", ""),
        ("etc/passwd", "etc/passwd"),
        ("/etc/passwd", "etc/passwd"),
        ("share/doc", ""),
        ("c", "b/c/"),
        ("b/c/??", "b/c/\u{e9}"),
        ("b/\\[x\\]", "b/[x]"),
        ("[!b]", "b/c/ usr/share/doc/x/"),
        ("?", "b/ usr/share/doc/x/"),
        (".*", ".hidden"),
        ("*hidden", ".hidden"),
        ("\\!odd", "!odd"),
        ("/!odd", "!odd"),
        ("\\a.\\txt", "a.txt b/a.txt b/c/a.txt b/c/d/a.txt"),
        ("usr/**/x", "usr/share/doc/x/"),
        ("b/c**", "b/c/"),
        ("/**/passwd", "etc/passwd"),
        ("[^a-z]x]", "b/[x]"),
        ("usr/share/[a-i]*", "usr/share/doc/ usr/share/info"),
        ("usr*doc", ""),
        ("*", "!odd .hidden a.txt b/ empty/ etc/ usr/"),
        ("**", "!odd .hidden a.txt b/ empty/ etc/ usr/"),
    ];
    let rows: Vec<(&str, Vec<&str>)> =
        rows.map(|(glob, expect)| (glob, expect.split_whitespace().collect())).into();
    for (glob, expect) in &rows {
        assert_eq!(matches(glob), *expect, "{glob}");
    }
    // `.gitignore` has no equivalent of these cases.
    assert_eq!(matches("./a.txt"), ["a.txt"]);
    assert_eq!(matches("*.{txt,md}"), matches("*.txt"));
    assert_eq!(matches("{etc,b}/*s*"), ["etc/passwd"]);
    if let Some(program) = testing::program("git") {
        git(&program, &rows);
    }
}

/// Compares each glob and path with git.
fn git(program: &Path, rows: &[(&str, Vec<&str>)]) {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut git = Command::new(program);
        git.args(arguments).current_dir(folder.path());
        git.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let started = run(&["init", "-q"]).wait_with_output().unwrap();
    assert!(started.status.success());
    let all = kept(&[], &[]);
    for path in &all {
        let place = folder.path().join(path);
        match path.ends_with('/') {
            true => std::fs::create_dir_all(place).unwrap(),
            false => std::fs::write(place, "").unwrap(),
        }
    }
    for (glob, expect) in rows {
        std::fs::write(folder.path().join(".git/info/exclude"), format!("{glob}\n")).unwrap();
        let mut asked = run(&["check-ignore", "-z", "--stdin", "--no-index"]);
        // git finds out itself which paths are directories.
        let bare = |path: &str| path.trim_end_matches('/').to_owned();
        let given: Vec<String> = all.iter().map(|path| bare(path)).collect();
        asked.stdin.take().unwrap().write_all(given.join("\0").as_bytes()).unwrap();
        let answer = String::from_utf8(asked.wait_with_output().unwrap().stdout).unwrap();
        let named = |path: &&String| answer.split_terminator('\0').any(|it| it == bare(path));
        let mut gone: Vec<&str> = Vec::new();
        for path in all.iter().filter(named) {
            if !gone.iter().any(|above| above.ends_with('/') && path.starts_with(above)) {
                gone.push(path);
            }
        }
        assert_eq!(gone, *expect, "git: {glob}");
    }
}

#[test]
fn what_is_included_brings_what_is_above_and_below() {
    check(&["/etc"], &[], "etc/ etc/passwd");
    check(&["passwd", "/usr/share/man"], &[], "etc/ etc/passwd usr/ usr/share/ usr/share/man/");
    check(&["usr/share"], &["doc"], "usr/ usr/share/ usr/share/info usr/share/man/");
    // Directories without included entries are left out.
    check(&["*.txt"], &["d"], "a.txt b/ b/a.txt b/c/ b/c/a.txt");
    check(&["nothing"], &[], "");
    // `exclude` wins over an `include` glob that matches a path below.
    check(&["etc/passwd", "hosts"], &["/etc"], "usr/ usr/etc/ usr/etc/hosts");
    check(&["*"], &["*"], "");
}

#[test]
fn globs_that_match_nothing_are_told() {
    let told = |include: &[&str], exclude: &[&str]| {
        let whole = tree(&PATHS);
        let globs = globs(include, exclude);
        let mut matcher = globs.matcher();
        let mut builder = Builder::new();
        builder.lay_some(&whole, |path, entry| matcher.choose(path, entry)).unwrap();
        let told: Vec<_> = matcher.unmatched(&whole).iter().map(ToString::to_string).collect();
        told.join(" ")
    };
    assert_eq!(told(&["a.txt"], &[]), "");
    assert_eq!(told(&["a.text", "b"], &["hosts/"]), "a.text hosts/");
    // A glob counts as matched even if its only match is below an excluded directory.
    assert_eq!(told(&["passwd"], &["etc", "etc/passwd", "etc/shadow"]), "etc/shadow");
}

#[test]
fn names_are_bytes() {
    let mut builder = Builder::new();
    let fifo = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Fifo).unwrap();
    builder.insert(InodeId::ROOT, b"\xff\n.x", fifo, Link::Equal).unwrap();
    let whole = builder.finish();
    for glob in ["*.x", "??.x", "[!a]*", "**/*.x"] {
        let globs = globs(&[glob], &[]);
        assert!(globs.matcher().unmatched(&whole).is_empty(), "{glob}");
    }
}

#[test]
fn what_is_no_glob_is_told() {
    let check = |text: &str, expect: &str| {
        let error = text.parse::<Glob>().unwrap_err();
        assert!(error.to_string().contains(expect), "{text}: {error}");
    };
    check("", "names only the root");
    check("/", "names only the root");
    check("//", "names only the root");
    check(".", "no . or ..");
    check("a/../b", "no . or ..");
    check("a//b", "no . or ..");
    check("!a", "does not negate");
    check("a[", "is not a glob");
    check("{a", "is not a glob");
    check("a\\", "is not a glob");
    check(&"{a,b,c}".repeat(7), "too many alternatives");
    check(&format!("{{{}}}", ",".repeat(2000)), "too many alternatives");
    assert!("{a,b}".repeat(10).parse::<Glob>().is_ok());
}
