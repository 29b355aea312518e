//! Checks that an image can be a system extension (sysext) or a configuration extension (confext) of systemd.
//!
//! Source: systemd `man/systemd-sysext.xml`; `src/shared/extension-util.c`, `extension_release_validate` and
//! `extension_has_forbidden_content`.

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
}

/// The hosts of an extension, by its release file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtensionRelease {
    /// Name of the extension: the file's name without `.raw`.
    pub name: String,
    /// The `ID` of hosts, or `_any`.
    pub id: String,
    /// The `SYSEXT_LEVEL` or `CONFEXT_LEVEL` of hosts, otherwise their `VERSION_ID`. If it is `None` and the `id` is
    /// not `_any`, hosts with a `VERSION_ID` refuse the extension.
    pub level: Option<String>,
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
    #[error("{} is not a text file of at most 64 KiB", .0.escape_ascii())]
    NotText(Vec<u8>),
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
/// image may have any name.
///
/// # Errors
/// An [`ExtensionError`].
pub fn check_extension(
    store: &Store,
    id: &ImageId,
    kind: ExtensionKind,
    file: Option<&[u8]>,
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
    let Some(id) = field(text, "ID") else { return Err(ExtensionError::NoId(path)) };
    let level = field(text, kind.level()).or_else(|| field(text, "VERSION_ID"));
    let name = String::from_utf8_lossy(&name).into_owned();
    Ok(ExtensionRelease { name, id, level })
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
        let is_empty = entry.inode.is_directory() && entry.inode.children().len() == 0;
        !is_merged && !is_empty
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
    match found.iter().find(|(name, _)| *name == wanted) {
        Some((name, release)) => Ok(ReleaseFile { name: name.to_vec(), release: *release }),
        None => Err(ExtensionError::NoRelease {
            directory,
            wanted: wanted.to_vec(),
            found: found.iter().map(|(name, _)| name.to_vec()).collect(),
        }),
    }
}

/// Returns the value of a field that is not empty. Source: os-release(5).
fn field(text: &str, name: &str) -> Option<String> {
    let lines = text.lines().map(str::trim).filter(|it| !it.starts_with('#'));
    let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    // As in a shell, the last assignment counts.
    let value = values.next_back()?.trim();
    let quoted = ['"', '\''].into_iter().find_map(|quote| {
        let inner = value.strip_prefix(quote)?;
        inner.strip_suffix(quote)
    });
    let value = quoted.unwrap_or(value);
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use image::tree::{Builder, Content, InodeId, Link, Metadata, XattrsId};

    use super::*;

    /// Makes a tree of these files, which are empty. Paths that end with a slash are directories.
    fn tree(paths: &[&str]) -> Tree {
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
                let file = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
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
        check(sysext, &[TOOLS, "/opt/a", "/etc/", "/proc/"], Some("tools.raw"), Ok("tools"));
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
