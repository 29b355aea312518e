//! Parses the sources of images that users write.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// A file, or standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Standard input, written `-`.
    Stdin,
    /// A path. A file named `-` is written `./-`.
    File(PathBuf),
}

impl Input {
    fn from_text(text: &OsStr) -> Self {
        if text == "-" { Self::Stdin } else { Self::File(text.into()) }
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdin => f.write_str("standard input"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// The choice of one image among several in a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// The only image of the source.
    Only,
    /// The image with this name in the source: a tag or a full reference.
    Named(String),
    /// The image with this manifest.
    Digest(crate::Digest),
}

/// The source of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageSource {
    /// `oci:DIR[:TAG]` or `oci:DIR@DIGEST`: an OCI layout.
    Layout {
        /// Directory that contains `index.json`.
        directory: PathBuf,
        /// Chosen image.
        choice: Choice,
    },
    /// `docker-archive:FILE[:NAME]`: an archive of `docker save` or `podman save`.
    DockerArchive {
        /// The archive, compressed or not.
        file: Input,
        /// Chosen image.
        choice: Choice,
    },
    /// `tar:FILE`: a single layer.
    Tar(Input),
    /// `dir:DIR`: a directory with a root file system.
    Directory(PathBuf),
    /// `dump:FILE`: a composefs dump.
    Dump(Input),
    /// `erofs:FILE`: an EROFS image in a file or on a block device.
    Erofs(PathBuf),
    /// `disk:FILE`: a disk with a partition table, whose root partition is an EROFS image.
    Disk(PathBuf),
}

/// Text that is not a source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The text does not begin with a known kind and a colon.
    #[error(
        "\"{}\" is not a source: write oci:DIR[:TAG], docker-archive:FILE, tar:FILE, dir:DIR, dump:FILE, erofs:FILE or \
        disk:FILE",
        .0.display()
    )]
    Kind(OsString),
    /// Standard input for a source that is read at any offset.
    #[error(
        "\"{}\" cannot be read from standard input, because it is read at any offset: write it to a file",
        .0.display()
    )]
    Stdin(OsString),
    /// The path after the colon is missing.
    #[error("\"{}\" names no file", .0.display())]
    Empty(OsString),
    /// The text after `@` is not a digest, or the name is not UTF-8.
    #[error("\"{}\" does not end with a valid name of an image: {reason}", text.display())]
    Choice {
        /// The text.
        text: OsString,
        /// The reason.
        reason: String,
    },
}

impl ImageSource {
    /// Parses a source. Only the text decides, whether or not a file with that name exists. The first colon after the
    /// kind ends the path of an `oci:` or `docker-archive:` source.
    ///
    /// # Errors
    /// [`SourceError`] if the text is not a source.
    pub fn parse(text: &OsStr) -> Result<Self, SourceError> {
        let kind = || SourceError::Kind(text.to_owned());
        let (word, rest) = split(text, b':').ok_or_else(kind)?;
        let plain = || match rest.is_empty() {
            true => Err(SourceError::Empty(text.to_owned())),
            false => Ok(rest),
        };
        Ok(match word.as_bytes() {
            b"oci" => {
                let (directory, choice) = chosen(text, rest)?;
                Self::Layout { directory: directory.into(), choice }
            }
            b"docker-archive" => {
                let (file, choice) = chosen(text, rest)?;
                Self::DockerArchive { file: Input::from_text(file), choice }
            }
            b"tar" => Self::Tar(Input::from_text(plain()?)),
            b"dir" => Self::Directory(plain()?.into()),
            b"dump" => Self::Dump(Input::from_text(plain()?)),
            b"erofs" | b"disk" if rest == "-" => return Err(SourceError::Stdin(text.to_owned())),
            b"erofs" => Self::Erofs(plain()?.into()),
            b"disk" => Self::Disk(plain()?.into()),
            _ => return Err(kind()),
        })
    }

    /// Returns the default name for the image: the source's name for it (`found`), or else the name of the file.
    /// `None` for standard input, a file name that is not UTF-8, and an `erofs:` or `disk:` source whose file has one
    /// of these words as its name, because a verb would take `erofs:latest` for a file.
    #[must_use]
    pub fn default_name(&self, found: Option<&str>) -> Option<String> {
        let choice = match self {
            Self::DockerArchive { choice: Choice::Named(name), .. } => return Some(name.clone()),
            Self::Layout { choice: Choice::Named(name), .. } => Some(name.as_str()),
            _ => found,
        };
        let path = match self {
            Self::Erofs(path) | Self::Disk(path) => {
                let name = path.file_name()?.to_str()?;
                let suffixes = [".erofs", ".cfs", ".img", ".raw", ".disk"];
                let name = suffixes.iter().find_map(|it| name.strip_suffix(it)).unwrap_or(name);
                return (!["erofs", "disk"].contains(&name)).then(|| name.to_owned());
            }
            Self::Layout { directory, .. } | Self::Directory(directory) => {
                Some(directory.as_path())
            }
            Self::DockerArchive { file, .. } | Self::Tar(file) | Self::Dump(file) => match file {
                Input::Stdin => None,
                Input::File(path) => Some(path.as_path()),
            },
        };
        // A layout usually names an image only by a tag.
        let name = match choice {
            Some(whole) if whole.contains([':', '/']) => return Some(whole.to_owned()),
            Some(tag) => format!("{}:{tag}", stem(path?)?),
            None => stem(path?)?.to_owned(),
        };
        Some(name)
    }
}

/// Returns a file's name without suffixes of packing formats.
fn stem(path: &Path) -> Option<&str> {
    let mut name = path.file_name()?.to_str()?;
    for suffix in [".gz", ".zst", ".tgz", ".tar", ".dump"] {
        name = name.strip_suffix(suffix).unwrap_or(name);
    }
    Some(name)
}

/// Splits a text at the first `byte`.
fn split(text: &OsStr, byte: u8) -> Option<(&OsStr, &OsStr)> {
    let bytes = text.as_bytes();
    let at = bytes.iter().position(|other| *other == byte)?;
    Some((OsStr::from_bytes(&bytes[..at]), OsStr::from_bytes(&bytes[at + 1..])))
}

fn chosen<'a>(text: &OsStr, rest: &'a OsStr) -> Result<(&'a OsStr, Choice), SourceError> {
    let wrong = |reason: String| SourceError::Choice { text: text.to_owned(), reason };
    let (path, choice) = match (split(rest, b'@'), split(rest, b':')) {
        (Some((path, digest)), _) if digest.as_bytes().starts_with(b"sha") => {
            let digest = digest.to_str().ok_or_else(|| wrong("it is not UTF-8".to_owned()))?;
            let digest =
                digest.parse().map_err(|error: crate::DigestError| wrong(error.to_string()))?;
            (path, Choice::Digest(digest))
        }
        (_, Some((path, name))) => {
            let name = name.to_str().ok_or_else(|| wrong("it is not UTF-8".to_owned()))?;
            if name.is_empty() {
                return Err(wrong("the name after the colon is missing".to_owned()));
            }
            (path, Choice::Named(name.to_owned()))
        }
        _ => (rest, Choice::Only),
    };
    if path.is_empty() {
        return Err(SourceError::Empty(text.to_owned()));
    }
    Ok((path, choice))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: &str) {
        let got = match ImageSource::parse(OsStr::new(text)) {
            Ok(source) => format!("{source:?}"),
            Err(error) => error.to_string(),
        };
        assert_eq!(got, expect, "{text}");
    }

    #[test]
    fn sources() {
        check("oci:a/b", "Layout { directory: \"a/b\", choice: Only }");
        check("oci:a/b:12", "Layout { directory: \"a/b\", choice: Named(\"12\") }");
        check("oci:a:b/c:d", "Layout { directory: \"a\", choice: Named(\"b/c:d\") }");
        check("oci:a@b", "Layout { directory: \"a@b\", choice: Only }");
        check("oci:a@b:c", "Layout { directory: \"a@b\", choice: Named(\"c\") }");
        check("docker-archive:-", "DockerArchive { file: Stdin, choice: Only }");
        check(
            "docker-archive:x.tar:debian:12",
            "DockerArchive { file: File(\"x.tar\"), choice: Named(\"debian:12\") }",
        );
        check("tar:-", "Tar(Stdin)");
        check("tar:./-", "Tar(File(\"./-\"))");
        check("tar:a:b", "Tar(File(\"a:b\"))");
        check("dir:/", "Directory(\"/\")");
        check("dump:x", "Dump(File(\"x\"))");
        check("erofs:a:b.erofs", "Erofs(\"a:b.erofs\")");
        check("disk:/dev/vdb", "Disk(\"/dev/vdb\")");
        check("disk:./-", "Disk(\"./-\")");
        let text = "cannot be read from standard input, because it is read at any offset: write it to a file";
        check("erofs:-", &format!("\"erofs:-\" {text}"));
        check("disk:-", &format!("\"disk:-\" {text}"));
        let kinds = "is not a source: write oci:DIR[:TAG], docker-archive:FILE, tar:FILE, dir:DIR, dump:FILE, \
            erofs:FILE or disk:FILE";
        check("debian", &format!("\"debian\" {kinds}"));
        check("docker://debian", &format!("\"docker://debian\" {kinds}"));
        check("", &format!("\"\" {kinds}"));
        check("oci:", "\"oci:\" names no file");
        check("tar:", "\"tar:\" names no file");
        check("erofs:", "\"erofs:\" names no file");
        check("oci::x", "\"oci::x\" names no file");
        check(
            "oci:a:",
            "\"oci:a:\" does not end with a valid name of an image: the name after \
            the colon is missing",
        );
        let source = ImageSource::parse(OsStr::new("oci:a@sha256:12")).unwrap_err();
        assert!(source.to_string().contains("is not a digest"), "{source}");
    }
}
