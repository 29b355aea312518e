//! Reads configuration files of engines as the engine does.

use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Read as _};
use std::path::{Component, Path, PathBuf};

use toml::{Table, Value};

use crate::verbs::services::rootfs::{HeldPath, regular};

/// Maximum size of a file, in bytes.
const BYTES_MAX: u64 = 1 << 20;
/// Maximum number of files of a configuration.
const FILES_MAX: usize = 64;

/// A file that cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unusable {
    pub(crate) path: PathBuf,
    /// Reason, in words for people.
    pub(crate) reason: String,
}

/// Returns the text of a file below `root`, or `None` if there is no such file.
pub(crate) fn text(root: &Path, path: &Path) -> Result<Option<String>, Unusable> {
    let unusable = |reason: String| Unusable { path: path.to_owned(), reason };
    let file = match regular(root, path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| unusable(format!("cannot open it: {error}")))?,
    };
    let mut text = String::new();
    let read = file.take(BYTES_MAX + 1).read_to_string(&mut text);
    read.map_err(|error| unusable(format!("cannot read it: {error}")))?;
    if text.len() as u64 > BYTES_MAX {
        return Err(unusable(format!("it has more than {BYTES_MAX} bytes")));
    }
    Ok(Some(text))
}

/// A configuration of containerd: a file and its imports, merged.
#[derive(Debug, Default)]
pub(crate) struct Containerd {
    /// The merged settings of all files.
    pub(crate) table: Table,
    /// Files that cannot be read, or that containerd refuses.
    pub(crate) unusable: Vec<Unusable>,
}

impl Containerd {
    /// Reads a file below `root` and the files that it imports; returns `None` if there is no such file. As in
    /// containerd, later files override earlier ones, tables are merged, and arrays are joined. Source:
    /// containerd's `cmd/containerd/server/config/config.go`.
    pub(crate) fn read(root: &Path, path: &Path) -> Option<Self> {
        let mut read = Self::default();
        let mut loaded = BTreeSet::new();
        let mut pending = VecDeque::from([path.to_owned()]);
        let mut first_version = None;
        while let Some(path) = pending.pop_front() {
            if !loaded.insert(path.clone()) {
                continue;
            }
            if loaded.len() > FILES_MAX {
                let reason = format!("more than {FILES_MAX} files are imported");
                read.unusable.push(Unusable { path, reason });
                break;
            }
            let table = match text(root, &path) {
                Ok(None) if loaded.len() == 1 => return None,
                Ok(None) => Err("it is imported, but does not exist".to_owned()),
                Ok(Some(text)) => text.parse::<Table>().map_err(|error| {
                    format!("it is not TOML: {}", error.to_string().replace('\n', " "))
                }),
                Err(error) => Err(error.reason),
            };
            let table = match table {
                Ok(table) => table,
                Err(reason) => {
                    read.unusable.push(Unusable { path, reason });
                    continue;
                }
            };
            let version = table.get("version").and_then(Value::as_integer).unwrap_or(1);
            let first = *first_version.get_or_insert(version);
            if version > first {
                let reason = format!(
                    "its version is {version}, but the file that imports it has version {first}: \
                    newer versions of containerd refuse that"
                );
                read.unusable.push(Unusable { path: path.clone(), reason });
            }
            let imports = table.get("imports").and_then(Value::as_array).into_iter().flatten();
            for import in imports.filter_map(Value::as_str) {
                pending.extend(matching(root, &path, import));
            }
            merge(&mut read.table, table);
        }
        Some(read)
    }

    /// Returns the value at the end of these keys.
    pub(crate) fn get(&self, keys: &[&str]) -> Option<&Value> {
        let (first, rest) = keys.split_first()?;
        rest.iter().try_fold(self.table.get(*first)?, |value, key| value.get(*key))
    }

    /// Whether a runtime of CRI has this snapshotter, so that only pods of a runtime class use it.
    pub(crate) fn has_class(&self, snapshotter: &str) -> bool {
        let runtimes = match self.form() {
            ..=2 => self.get(&["plugins", "io.containerd.grpc.v1.cri", "containerd", "runtimes"]),
            _ => self.get(&["plugins", "io.containerd.cri.v1.runtime", "containerd", "runtimes"]),
        };
        let mut runtimes = runtimes.and_then(Value::as_table).into_iter().flatten();
        runtimes.any(|(_, it)| it.get("snapshotter").and_then(Value::as_str) == Some(snapshotter))
    }

    /// Returns the form of the file, which is its `version`.
    pub(crate) fn form(&self) -> i64 {
        self.get(&["version"]).and_then(Value::as_integer).unwrap_or(1)
    }
}

/// Returns a path of the host below another root.
#[cfg(test)]
pub(crate) fn below(root: &Path, path: &Path) -> PathBuf {
    let path = clean(path);
    root.join(path.strip_prefix("/").unwrap_or(&path))
}

/// Removes `.` and `..` from a path, like containerd.
fn clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(part) => clean.push(part),
            // The parent of the root is the root.
            Component::ParentDir => drop(clean.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    clean
}

/// Returns the files that an import names. A pattern has stars in the last component of its path.
fn matching(root: &Path, parent: &Path, import: &str) -> Vec<PathBuf> {
    let path = clean(&parent.parent().unwrap_or(Path::new("/")).join(import));
    let (Some(folder), Some(pattern)) =
        (path.parent(), path.file_name().and_then(|it| it.to_str()))
    else {
        return Vec::new();
    };
    if !pattern.contains('*') {
        return vec![path];
    }
    let held = HeldPath::new(root, folder).ok();
    let entries = held.and_then(|it| it.reached().read_dir().ok()).into_iter().flatten().flatten();
    let names = entries.filter_map(|it| it.file_name().into_string().ok());
    let mut found: Vec<_> = names.filter(|it| is_match(pattern, it)).collect();
    found.sort_unstable();
    found.truncate(FILES_MAX + 1);
    found.into_iter().map(|it| folder.join(it)).collect()
}

/// Returns whether a name matches a pattern, in which each star matches any text.
fn is_match(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(start) else { return false };
    let mut parts: Vec<_> = rest.split('*').collect();
    let end = parts.pop().unwrap_or_default();
    for part in parts {
        let Some((_, after)) = name.split_once(part) else { return false };
        name = after;
    }
    name.ends_with(end)
}

fn merge(to: &mut Table, from: Table) {
    for (key, value) in from {
        match (to.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => merge(old, new),
            (Some(Value::Array(old)), Value::Array(new)) => old.extend(new),
            (_, value) => drop(to.insert(key, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(files: &[(&str, &str)]) -> Containerd {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = below(folder.path(), Path::new(path));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Containerd::read(folder.path(), Path::new("/etc/containerd/config.toml")).unwrap()
    }

    fn reasons(read: &Containerd) -> Vec<(&str, &str)> {
        let all = read.unusable.iter();
        all.map(|it| (it.path.to_str().unwrap(), it.reason.as_str())).collect()
    }

    #[test]
    fn imports_are_followed_and_win() {
        let read = read(&[
            (
                "/etc/containerd/config.toml",
                "version = 3\nimports = [\"conf.d/*.toml\", \"/opt/one\"]\nroot = \"a\"\n[plugins.x]\na = 1\nl = [1]",
            ),
            (
                "/etc/containerd/conf.d/1.toml",
                "version = 3\nroot = \"b\"\n[plugins.x]\nb = 2\nl = [2]",
            ),
            (
                "/etc/containerd/conf.d/2.toml",
                "version = 3\nroot = \"c\"\nimports = [\"../config.toml\"]",
            ),
            ("/etc/containerd/conf.d/3.txt", "root = \"d\""),
            ("/opt/one", "version = 2\n[plugins.y]"),
        ]);
        assert_eq!(read.get(&["root"]).unwrap().as_str(), Some("c"));
        assert_eq!(read.get(&["plugins", "x", "a"]).unwrap().as_integer(), Some(1));
        assert_eq!(read.get(&["plugins", "x", "b"]).unwrap().as_integer(), Some(2));
        assert_eq!(read.get(&["plugins", "x", "l"]).unwrap().as_array().unwrap().len(), 2);
        assert!(read.get(&["plugins", "y"]).is_some());
        assert_eq!(read.get(&["plugins", "x", "a", "deeper"]), None);
        assert_eq!(reasons(&read), []);
    }

    #[test]
    fn odd_files_are_named_with_the_reason() {
        let main = "/etc/containerd/config.toml";
        let cases = [
            ("version = ", "it is not TOML: "),
            ("imports = [\"gone\"]", "it is imported, but does not exist"),
            ("imports = [\"/etc\"]", "cannot open it: it is a directory, not a regular file"),
            (
                "imports = [\"other\"]",
                "its version is 3, but the file that imports it has version 1",
            ),
        ];
        for (text, reason) in cases {
            let read = read(&[(main, text), ("/etc/containerd/other", "version = 3")]);
            assert_eq!(read.unusable.len(), 1, "{text}: {:?}", read.unusable);
            assert!(read.unusable[0].reason.starts_with(reason), "{:?}", read.unusable);
        }
        let long = format!("# {}", "x".repeat(1 << 20));
        let read = self::read(&[(main, &long)]);
        assert!(read.unusable[0].reason.contains("more than 1048576 bytes"), "{:?}", read.unusable);
        // Values of wrong types are ignored.
        for text in [
            "imports = 3",
            "imports = [3]",
            "version = []",
            "plugins = 1",
            "imports = [\"\", \"/\", \"..\"]",
        ] {
            let read = self::read(&[(main, text)]);
            assert_eq!((read.form(), read.get(&["plugins", "x"])), (1, None), "{text}");
        }
        let deep = format!("a = {}{}", "[".repeat(5_000), "]".repeat(5_000));
        assert_eq!(self::read(&[(main, &deep)]).unusable.len(), 1);
    }

    #[test]
    fn runtimes_with_a_snapshotter_are_found() {
        let of = |version: u32, plugin: &str| {
            let text = format!(
                "version = {version}\n[plugins.\"{plugin}\".containerd.runtimes.runc]\nsnapshotter = \"\"\n\
                 [plugins.\"{plugin}\".containerd.runtimes.own]\nsnapshotter = \"quire\""
            );
            let read = read(&[("/etc/containerd/config.toml", &text)]);
            (read.has_class("quire"), read.has_class("other"))
        };
        assert_eq!(of(2, "io.containerd.grpc.v1.cri"), (true, false));
        assert_eq!(of(3, "io.containerd.cri.v1.runtime"), (true, false));
        // In the third form, containerd does not read this table.
        assert_eq!(of(3, "io.containerd.grpc.v1.cri"), (false, false));
        let odd = read(&[("/etc/containerd/config.toml", "version = 3\nplugins = 1")]);
        assert!(!odd.has_class("quire"));
    }

    #[test]
    fn a_pipe_keeps_nobody_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = text(folder.path(), Path::new("/pipe")).unwrap_err();
        assert!(error.reason.contains("not a regular file"), "{error:?}");
        assert_eq!(text(folder.path(), Path::new("/none")), Ok(None));
    }

    #[test]
    fn many_imports_come_to_an_end() {
        let mut files: Vec<_> =
            (0..100).map(|it| (format!("/etc/containerd/d/{it:03}.toml"), String::new())).collect();
        files.push(("/etc/containerd/config.toml".to_owned(), "imports = [\"d/*\"]".to_owned()));
        let files: Vec<_> =
            files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
        let read = read(&files);
        assert_eq!(reasons(&read).len(), 1);
        assert_eq!(read.unusable[0].reason, "more than 64 files are imported");
    }

    #[test]
    fn patterns_have_stars() {
        for (pattern, name, expect) in [
            ("*.toml", "a.toml", true),
            ("*.toml", "a.toml~", false),
            ("*", "", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
            ("x", "x", true),
        ] {
            assert_eq!(is_match(pattern, name), expect, "{pattern} {name}");
        }
    }
}
