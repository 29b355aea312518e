//! Checks that an image can be a system extension (sysext) or a configuration extension (confext) of systemd.
//!
//! Source: systemd 257, `man/systemd-sysext.xml`, `man/os-release.xml`; `src/shared/extension-util.c`,
//! `extension_release_validate` and `extension_has_forbidden_content`; `src/basic/os-util.c`,
//! `open_extension_release_at`; `src/basic/image-name.c` and `src/basic/architecture.c`.

use image::tree::{Inode, Node, Tree};
use image::verity::ImageId;
use store::Store;

use super::{ExportError, Options, files};

/// The suffix of the files that systemd takes for images of extensions.
const SUFFIX: &[u8] = b".raw";
/// Beginning of a release file's name.
const RELEASE: &[u8] = b"extension-release.";
/// Maximum length of a release file in bytes. Others are shorter than 1 KiB.
const RELEASE_MAX: u64 = 64 << 10;
/// Xattr of a release file. If it is false, hosts take the file for an extension of any name.
const STRICT: &[u8] = b"user.extension-release.strict";
/// Maximum length of a file's name in bytes, with the beginning of a release file.
const NAME_MAX: usize = 255;
/// The scopes in which programs of systemd take extensions: in an initrd, on a host, and for portable services.
const SCOPES: [&str; 3] = ["initrd", "system", "portable"];
/// Architectures as systemd names them, and as Go does if it knows them.
const ARCHITECTURES: [(&str, &str); 34] = [
    ("x86", "386"),
    ("x86-64", "amd64"),
    ("arm", "arm"),
    ("arm64", "arm64"),
    ("loongarch64", "loong64"),
    ("mips", "mips"),
    ("mips-le", "mipsle"),
    ("mips64", "mips64"),
    ("mips64-le", "mips64le"),
    ("ppc64", "ppc64"),
    ("ppc64-le", "ppc64le"),
    ("riscv64", "riscv64"),
    ("s390x", "s390x"),
    ("alpha", ""),
    ("arc", ""),
    ("arc-be", ""),
    ("arm-be", ""),
    ("arm64-be", ""),
    ("cris", ""),
    ("ia64", ""),
    ("m68k", ""),
    ("nios2", ""),
    ("parisc", ""),
    ("parisc64", ""),
    ("ppc", ""),
    ("ppc-le", ""),
    ("riscv32", ""),
    ("s390", ""),
    ("sh", ""),
    ("sh64", ""),
    ("sparc", ""),
    ("sparc64", ""),
    ("tilegx", ""),
    ("_any", ""),
];
/// Path of the file that would replace the host's.
const OS_RELEASE: &str = "/usr/lib/os-release";

/// The kind of an extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtensionKind {
    /// Extends `/usr` and `/opt`.
    Sysext,
    /// Extends `/etc`.
    Confext,
}

impl ExtensionKind {
    /// Returns the word of export targets.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sysext => "sysext",
            Self::Confext => "confext",
        }
    }

    /// Returns the directories that the host merges, below the root.
    const fn directories(self) -> &'static [&'static [u8]] {
        match self {
            Self::Sysext => &[b"usr", b"opt"],
            Self::Confext => &[b"etc"],
        }
    }

    /// Returns the directory of the release file.
    const fn release_directory(self) -> &'static str {
        match self {
            Self::Sysext => "/usr/lib/extension-release.d",
            Self::Confext => "/etc/extension-release.d",
        }
    }

    /// Returns the field that hosts compare instead of the version.
    const fn level(self) -> &'static str {
        match self {
            Self::Sysext => "SYSEXT_LEVEL",
            Self::Confext => "CONFEXT_LEVEL",
        }
    }

    /// Returns the field with the programs that may take the extension.
    const fn scope(self) -> &'static str {
        match self {
            Self::Sysext => "SYSEXT_SCOPE",
            Self::Confext => "CONFEXT_SCOPE",
        }
    }
}

/// The hosts of an extension, by its release file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtensionRelease {
    /// Name of the extension: the file's name without `.raw`.
    pub name: String,
    /// The `ID` of hosts, or `_any`.
    pub id: String,
    /// The `SYSEXT_LEVEL` or `CONFEXT_LEVEL` of hosts. It counts for hosts that have one.
    pub level: Option<String>,
    /// The `VERSION_ID` of hosts. If it is `None` and the `id` is not `_any`, hosts that have a `VERSION_ID` and no
    /// level refuse the extension.
    pub version: Option<String>,
    /// The scopes, if hosts without an initrd are not among them.
    pub other_scopes: Option<String>,
}

/// The reason why an image cannot be an extension.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExtensionError {
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error("systemd takes only files with names like NAME.raw for extensions: name the file so")]
    Suffix,
    #[error(
        "the image has no file {directory}/extension-release.{}, but {}",
        wanted.escape_ascii(),
        files_found(found)
    )]
    NoRelease {
        directory: &'static str,
        /// The name of the file that is written, without `.raw`.
        wanted: Vec<u8>,
        /// The names of extensions for which the image has a release file.
        found: Vec<Vec<u8>>,
    },
    #[error("the name of the extension is not known on standard output: name a file")]
    NoName,
    #[error("{} is not a regular file with at most 64 KiB of text", .0.escape_ascii())]
    NotText(Vec<u8>),
    #[error(
        "hosts refuse \"{}\" as a name of an extension: use printable UTF-8 without \".#\" at its beginning, so that \
        extension-release.NAME has at most 255 bytes",
        .0.escape_ascii()
    )]
    Name(Vec<u8>),
    #[error(
        "{} has ARCHITECTURE={}, which no host has: write one of systemd's names, such as x86-64, or _any",
        path.escape_ascii(),
        architecture.escape_debug()
    )]
    NoArchitecture {
        /// Path of the release file.
        path: Vec<u8>,
        architecture: String,
    },
    #[error(
        "{} has ARCHITECTURE={architecture}, but the disk's partitions are for {disk}: choose its processor with \
        --platform linux/ARCHITECTURE",
        path.escape_ascii()
    )]
    OtherArchitecture {
        /// Path of the release file.
        path: Vec<u8>,
        architecture: String,
        /// Architecture of the disk, as in Go.
        disk: String,
    },
    #[error(
        "{} has {field}={}, but no program of systemd has such a scope: write some of {}",
        path.escape_ascii(),
        scopes.escape_debug(),
        SCOPES.join(", ")
    )]
    NoScope {
        /// Path of the release file.
        path: Vec<u8>,
        field: &'static str,
        scopes: String,
    },
    #[error("{} has no ID: hosts refuse the extension. `ID=_any` is for all hosts", .0.escape_ascii())]
    NoId(Vec<u8>),
    #[error(
        "a {} extends only {}, but the image has {}: `quire filter` leaves files out",
        kind.name(),
        list("/", kind.directories()),
        list("/", others)
    )]
    Ignored {
        kind: ExtensionKind,
        /// Names of files and of directories with content, in the root.
        others: Vec<Vec<u8>>,
    },
    #[error(
        "the image has /usr/lib/os-release, and systemd refuses such extensions: `quire filter` leaves files out"
    )]
    OsRelease,
}

fn files_found(found: &[Vec<u8>]) -> String {
    match found {
        [] => "no other one either".to_owned(),
        [one] => format!("one for {0}: name the file {0}.raw", one.escape_ascii()),
        many => format!("ones for {}", list("", many)),
    }
}

/// Lists at most five names, each behind `prefix`.
fn list(prefix: &str, names: &[impl AsRef<[u8]>]) -> String {
    let names = names.iter().map(|it| format!("{prefix}{}", it.as_ref().escape_ascii()));
    let count = names.len();
    let shown: Vec<_> = names.take(5).collect();
    let more = if count > 5 { format!(" and {} more", count - 5) } else { String::new() };
    shown.join(", ") + &more
}

/// Checks that an image can be an extension whose file has this name; `None` stands for standard output, on which the
/// image may have any name. `disk` is the architecture of an extension that is a disk, as in Go.
///
/// # Errors
/// An [`ExtensionError`].
pub fn check_extension(
    store: &Store,
    id: &ImageId,
    kind: ExtensionKind,
    file: Option<&[u8]>,
    disk: Option<&str>,
    options: &Options<'_>,
) -> Result<ExtensionRelease, ExtensionError> {
    let tree = files::tree(store, id)?;
    let found = find_release(&tree, kind, file)?;
    let path = found.release.path();
    let (Node::Regular(content), name) = (found.release.node(), found.name) else {
        return Err(ExtensionError::NotText(path));
    };
    if content.size() > RELEASE_MAX {
        return Err(ExtensionError::NotText(path));
    }
    // The export that follows reports the progress.
    let text = files::read(store, &path, content, options)?;
    let Ok(text) = std::str::from_utf8(&text) else { return Err(ExtensionError::NotText(path)) };
    let name = String::from_utf8_lossy(&name).into_owned();
    check_release(text, &path, name, kind, disk)
}

/// Checks the fields of a release file.
fn check_release(
    text: &str,
    path: &[u8],
    name: String,
    kind: ExtensionKind,
    disk: Option<&str>,
) -> Result<ExtensionRelease, ExtensionError> {
    let path = || path.to_vec();
    let Some(id) = field(text, "ID") else { return Err(ExtensionError::NoId(path())) };
    if let Some(architecture) = field(text, "ARCHITECTURE") {
        let known = ARCHITECTURES.iter().find(|(name, _)| *name == architecture);
        match (known, disk) {
            (None, _) => {
                return Err(ExtensionError::NoArchitecture { path: path(), architecture });
            }
            (Some((_, own)), Some(disk)) if architecture != "_any" && *own != disk => {
                let disk = disk.to_owned();
                return Err(ExtensionError::OtherArchitecture { path: path(), architecture, disk });
            }
            _ => {}
        }
    }
    // An empty field has no scope, but without the field there are two.
    let scopes = assigned(text, kind.scope());
    let has = |it: &[&str]| {
        scopes.as_ref().is_none_or(|scopes| scopes.split_whitespace().any(|one| it.contains(&one)))
    };
    if !has(&SCOPES) {
        let (field, scopes) = (kind.scope(), scopes.unwrap_or_default());
        return Err(ExtensionError::NoScope { path: path(), field, scopes });
    }
    let other_scopes = if has(&["system"]) { None } else { scopes };
    let (level, version) = (field(text, kind.level()), field(text, "VERSION_ID"));
    Ok(ExtensionRelease { name, id, level, version, other_scopes })
}

/// A release file.
#[derive(Debug)]
struct ReleaseFile<'a> {
    name: Vec<u8>,
    release: Inode<'a>,
}

/// Finds the release file, and checks that nothing else is in the way.
fn find_release<'a>(
    tree: &'a Tree,
    kind: ExtensionKind,
    file: Option<&[u8]>,
) -> Result<ReleaseFile<'a>, ExtensionError> {
    let others = tree.root().children().filter(|entry| {
        let is_merged = kind.directories().contains(&entry.name);
        !is_merged && !is_empty(&entry.inode)
    });
    let others: Vec<_> = others.map(|entry| entry.name.to_vec()).collect();
    if !others.is_empty() {
        return Err(ExtensionError::Ignored { kind, others });
    }
    if tree.resolve(OS_RELEASE.as_bytes()).is_some() {
        return Err(ExtensionError::OsRelease);
    }
    let directory = kind.release_directory();
    let releases = tree.resolve(directory.as_bytes());
    let children = releases.iter().flat_map(Inode::children);
    let found = children.filter_map(|entry| Some((entry.name.strip_prefix(RELEASE)?, entry.inode)));
    let found: Vec<_> = found.filter(|(name, _)| !name.is_empty()).collect();
    let wanted = match file {
        Some(file) => file.strip_suffix(SUFFIX).filter(|it| !it.is_empty()),
        None => match &found[..] {
            [(name, _)] => Some(*name),
            [] => Some(&b"NAME"[..]),
            _ => return Err(ExtensionError::NoName),
        },
    };
    let wanted = wanted.ok_or(ExtensionError::Suffix)?;
    if !is_name(wanted) {
        return Err(ExtensionError::Name(wanted.to_vec()));
    }
    if let Some((name, release)) = found.iter().find(|(name, _)| *name == wanted) {
        return Ok(ReleaseFile { name: name.to_vec(), release: *release });
    }
    let lax = found.iter().filter(|(name, release)| is_name(name) && is_lax(release));
    match lax.collect::<Vec<_>>()[..] {
        [(_, release)] => Ok(ReleaseFile { name: wanted.to_vec(), release: *release }),
        _ => Err(ExtensionError::NoRelease {
            directory,
            wanted: wanted.to_vec(),
            found: found.iter().map(|(name, _)| name.to_vec()).collect(),
        }),
    }
}

/// Whether this is a directory with only such directories.
fn is_empty(inode: &Inode<'_>) -> bool {
    let mut rest = vec![*inode];
    while let Some(inode) = rest.pop() {
        if !inode.is_directory() {
            return false;
        }
        rest.extend(inode.children().map(|entry| entry.inode));
    }
    true
}

/// Whether hosts accept the name of an extension.
fn is_name(name: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(name) else { return false };
    !text.starts_with(".#")
        && !text.contains(|it: char| it.is_ascii_control() || it == '/')
        && RELEASE.len() + name.len() <= NAME_MAX
}

/// Whether hosts take the release file for an extension of any name, if no other file has that name.
fn is_lax(release: &Inode<'_>) -> bool {
    const FALSE: [&str; 6] = ["0", "no", "n", "false", "f", "off"];
    let mut values = release.xattrs().filter(|(name, _)| *name == STRICT).map(|it| it.1);
    let value = values.next().and_then(|it| std::str::from_utf8(it).ok());
    let is_false = |it: &str| FALSE.iter().any(|word| word.eq_ignore_ascii_case(it));
    matches!(release.node(), Node::Regular(_)) && value.is_some_and(is_false)
}

/// Returns the value of a field that is not empty.
fn field(text: &str, name: &str) -> Option<String> {
    assigned(text, name).filter(|it| !it.is_empty())
}

/// Returns the value of a field. Source: os-release(5).
fn assigned(text: &str, name: &str) -> Option<String> {
    let lines = text.lines().map(str::trim).filter(|it| !it.starts_with('#'));
    let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    // As in a shell, the last assignment counts.
    let value = values.next_back()?.trim();
    let quoted = ['"', '\''].into_iter().find_map(|quote| {
        let inner = value.strip_prefix(quote)?;
        inner.strip_suffix(quote)
    });
    Some(quoted.unwrap_or(value).to_owned())
}

#[cfg(test)]
mod tests {
    use image::tree::{Builder, Content, InodeId, Link, Metadata, XattrsId};

    use super::*;

    /// Makes a tree of these files, which are empty. Paths that end with a slash are directories.
    fn tree(paths: &[&str]) -> Tree {
        tree_with(paths, None)
    }

    /// Makes the same tree, whose files have this xattr.
    fn tree_with(paths: &[&str], strict: Option<&[u8]>) -> Tree {
        let mut builder = Builder::new();
        for path in paths {
            let is_directory = path.ends_with('/');
            let mut names: Vec<_> = path.split('/').filter(|it| !it.is_empty()).collect();
            let last = if is_directory { None } else { names.pop() };
            let mut directory = InodeId::ROOT;
            for name in names {
                directory = builder.subdirectory(directory, name.as_bytes()).unwrap();
            }
            if let Some(name) = last {
                let node = Node::Regular(Content::Inline(&[]));
                let xattrs = match strict {
                    Some(value) => builder.xattrs([(STRICT, value)]).unwrap(),
                    None => XattrsId::NONE,
                };
                let file = builder.inode(&Metadata::IMPLICIT, xattrs, node).unwrap();
                builder.insert(directory, name.as_bytes(), file, Link::Owner).unwrap();
            }
        }
        builder.finish()
    }

    const TOOLS: &str = "/usr/lib/extension-release.d/extension-release.tools";

    fn check(kind: ExtensionKind, paths: &[&str], file: Option<&str>, expect: Result<&str, &str>) {
        let tree = tree(paths);
        let found = find_release(&tree, kind, file.map(str::as_bytes));
        let found = found.map(|it| it.name.escape_ascii().to_string());
        match (found, expect) {
            (Ok(name), Ok(expect)) => assert_eq!(name, expect, "{paths:?}"),
            (Err(error), Err(expect)) => {
                assert!(error.to_string().contains(expect), "{paths:?}: {error}");
            }
            (found, expect) => panic!("{paths:?}: {found:?}, not {expect:?}"),
        }
    }

    #[test]
    fn names_are_those_of_the_release_files() {
        let sysext = ExtensionKind::Sysext;
        check(sysext, &[TOOLS], Some("tools.raw"), Ok("tools"));
        check(sysext, &[TOOLS, "/opt/a", "/etc/", "/var/lib/"], Some("tools.raw"), Ok("tools"));
        check(sysext, &[TOOLS], None, Ok("tools"));
        check(sysext, &[TOOLS], Some("other.raw"), Err("one for tools: name the file tools.raw"));
        check(sysext, &[TOOLS], Some("tools"), Err("name the file so"));
        check(sysext, &[TOOLS], Some(".raw"), Err("name the file so"));
        check(sysext, &["/usr/bin/a"], Some("a.raw"), Err("but no other one either"));
        check(sysext, &["/usr/bin/a"], None, Err("extension-release.NAME"));
        let other = TOOLS.replace("tools", "other");
        check(sysext, &[TOOLS, &other], Some("a.raw"), Err("ones for other, tools"));
        check(sysext, &[TOOLS, &other], Some("other.raw"), Ok("other"));
        check(sysext, &[TOOLS, &other], None, Err("name a file"));
        let confext = ExtensionKind::Confext;
        let release = "/etc/extension-release.d/extension-release.tools";
        check(confext, &[release], Some("tools.raw"), Ok("tools"));
        check(
            confext,
            &[TOOLS],
            Some("tools.raw"),
            Err("extends only /etc, but the image has /usr"),
        );
    }

    #[test]
    fn an_extension_has_nothing_that_hosts_ignore_or_refuse() {
        let sysext = ExtensionKind::Sysext;
        check(
            sysext,
            &[TOOLS, "/etc/a"],
            None,
            Err("extends only /usr, /opt, but the image has /etc"),
        );
        let many = [TOOLS, "/a", "/b", "/c", "/d", "/e", "/f"];
        check(sysext, &many, None, Err("/a, /b, /c, /d, /e and 1 more"));
        check(sysext, &[TOOLS, "/usr/lib/os-release"], None, Err("/usr/lib/os-release"));
    }

    /// Source: systemd, `src/basic/os-util.c`, `open_extension_release_at`.
    #[test]
    fn a_release_file_that_is_not_strict_is_for_any_name() {
        let check = |paths: &[&str], value: &[u8], expect: Option<&str>| {
            let tree = tree_with(paths, Some(value));
            let found = find_release(&tree, ExtensionKind::Sysext, Some(b"new.raw"));
            let name = found.ok().map(|it| (it.name, it.release.path()));
            let expect = expect.map(|it| (b"new".to_vec(), it.as_bytes().to_vec()));
            assert_eq!(name, expect, "{paths:?} {value:?}");
        };
        for value in ["0", "no", "N", "false", "F", "off"] {
            check(&[TOOLS], value.as_bytes(), Some(TOOLS));
        }
        for value in ["1", "yes", "true", "", "none", "0\0"] {
            check(&[TOOLS], value.as_bytes(), None);
        }
        // Hosts take none of two such files, unless one of them has the name.
        let other = TOOLS.replace("tools", "other");
        check(&[TOOLS, &other], b"0", None);
        let new = TOOLS.replace("tools", "new");
        check(&[TOOLS, &new], b"0", Some(&new));
        check(&[TOOLS, &TOOLS.replace("tools", ".#a")], b"0", Some(TOOLS));
    }

    #[test]
    fn names_are_those_that_hosts_accept() {
        for (name, expect) in [
            ("tools", true),
            ("a b\u{e4}", true),
            ("a#", true),
            (".#a", false),
            ("a\n", false),
            ("a\u{7f}", false),
            (&"a".repeat(237), true),
            (&"a".repeat(238), false),
        ] {
            assert_eq!(is_name(name.as_bytes()), expect, "{name}");
        }
        assert!(!is_name(b"\xff"));
        let sysext = ExtensionKind::Sysext;
        check(sysext, &[TOOLS], Some(".#tools.raw"), Err("hosts refuse \".#tools\""));
    }

    /// Source: systemd, `src/shared/extension-util.c`, `extension_release_validate`.
    #[test]
    fn release_files_that_no_host_accepts_are_refused() {
        let sysext = ExtensionKind::Sysext;
        let check = |kind: ExtensionKind, text: &str, disk: Option<&str>, expect: &str| {
            let found = check_release(text, b"/release", "a".to_owned(), kind, disk);
            let found = match found {
                Ok(it) => format!("{:?} {:?} {:?}", it.level, it.version, it.other_scopes),
                Err(error) => error.to_string(),
            };
            assert!(found.contains(expect), "{text}: {found}");
        };
        check(sysext, "", None, "/release has no ID");
        check(sysext, "ID=a\nVERSION_ID=1\nSYSEXT_LEVEL=2", None, "Some(\"2\") Some(\"1\") None");
        check(sysext, "ID=a\nVERSION_ID=1\nCONFEXT_LEVEL=2", None, "None Some(\"1\") None");
        check(ExtensionKind::Confext, "ID=a\nCONFEXT_LEVEL=2", None, "Some(\"2\") None None");
        let good = "None None None";
        for text in ["", "ARCHITECTURE=", "ARCHITECTURE=_any", "ARCHITECTURE=\"x86-64\""] {
            check(sysext, &format!("ID=_any\n{text}"), None, good);
            check(sysext, &format!("ID=_any\n{text}"), Some("amd64"), good);
        }
        check(sysext, "ID=a\nARCHITECTURE=amd64", None, "ARCHITECTURE=amd64, which no host has");
        check(sysext, "ID=a\nARCHITECTURE=riscv64", Some("riscv64"), good);
        check(sysext, "ID=a\nARCHITECTURE=arm64", Some("amd64"), "partitions are for amd64");
        check(sysext, "ID=a\nARCHITECTURE=alpha", Some("amd64"), "partitions are for amd64");
        check(sysext, "ID=a\nARCHITECTURE=alpha", None, good);
        for scopes in ["system", "portable system", "\"initrd system\""] {
            check(sysext, &format!("ID=a\nSYSEXT_SCOPE={scopes}"), None, good);
        }
        check(sysext, "ID=a\nSYSEXT_SCOPE=initrd", None, "None None Some(\"initrd\")");
        check(sysext, "ID=a\nCONFEXT_SCOPE=none", None, good);
        check(sysext, "ID=a\nSYSEXT_SCOPE=", None, "has SYSEXT_SCOPE=, but no program");
        check(sysext, "ID=a\nSYSEXT_SCOPE=host", None, "has SYSEXT_SCOPE=host, but no program");
        let confext = ExtensionKind::Confext;
        check(confext, "ID=a\nCONFEXT_SCOPE=host", None, "has CONFEXT_SCOPE=host, but no program");
    }

    #[test]
    fn every_root_type_has_a_name_in_release_files() {
        for it in &crate::root_types::ROOT_TYPES {
            let known = ARCHITECTURES.iter().any(|(_, own)| *own == it.architecture);
            assert!(known, "{}", it.architecture);
        }
    }

    #[test]
    fn fields_are_those_of_a_shell() {
        for (text, expect) in [
            ("ID=debian\nVERSION_ID=13\n", Some("debian")),
            ("ID=\"a b\"", Some("a b")),
            ("ID='a'", Some("a")),
            ("ID=a\nID=b", Some("b")),
            ("  ID=a  ", Some("a")),
            ("#ID=a\nXID=b\nIDX=c", None),
            ("ID=", None),
            ("ID=\"\"", None),
            ("ID=\"", Some("\"")),
            ("", None),
        ] {
            assert_eq!(field(text, "ID").as_deref(), expect, "{text}");
        }
    }
}
