//! Parses the targets of an export, as users write them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use image::erofs::Flavor;
use store::{RefName, RefNameError};

use super::ExtensionKind;

/// A file, or standard output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Standard output, written as `-`.
    Stdout,
    /// Any other path. A file named `-` is written as `./-`.
    File(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `oci:DIR[:TAG]`: a new or existing OCI layout.
    Layout {
        directory: PathBuf,
        /// Tag of the image in the layout.
        tag: Option<String>,
    },
    /// `docker-archive:FILE[:NAME]`: an archive for `docker load` and `podman load`.
    DockerArchive {
        file: Output,
        /// Name of the image in the archive.
        name: Option<RefName>,
    },
    /// `tar:FILE`: the root file system as one tar.
    Tar(Output),
    /// `disk:FILE`: a raw disk with a partition table and one EROFS image with all files in it.
    Disk(Output),
    /// `sysext:FILE` or `confext:FILE`: an extension of a host's file system.
    Extension { kind: ExtensionKind, file: Output },
    /// `erofs:FILE` or `gvisor:FILE`: one EROFS image with all files in it.
    Erofs {
        /// Linux or gVisor.
        flavor: Flavor,
        file: Output,
    },
}

/// Text that is not a target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The text does not begin with a known kind and a colon.
    #[error(
        "\"{}\" is not an export target: write oci:DIR[:TAG], docker-archive:FILE[:NAME], tar:FILE, \
         erofs:FILE, gvisor:FILE, disk:FILE, sysext:FILE, confext:FILE, or changes:FILE for a container",
        .0.display()
    )]
    Kind(OsString),
    /// The text has no path after the colon.
    #[error("\"{}\" names no file", .0.display())]
    Empty(OsString),
    #[error("\"{}\" does not end with a valid tag", .0.display())]
    Tag(OsString),
    #[error("\"{}\" does not end with a valid image name", text.display())]
    Name { text: OsString, source: Option<RefNameError> },
}

impl Target {
    /// Parses a target, without access to files. As in sources, the first colon after the kind ends the path of an
    /// `oci:` or `docker-archive:` target.
    pub fn parse(text: &OsStr) -> Result<Self, TargetError> {
        let (word, rest) = split(text).ok_or_else(|| TargetError::Kind(text.to_owned()))?;
        let named = |path: &OsStr| match path.is_empty() {
            true => Err(TargetError::Empty(text.to_owned())),
            false => Ok(PathBuf::from(path)),
        };
        let output = |path: &OsStr| {
            Ok(if path == "-" { Output::Stdout } else { Output::File(named(path)?) })
        };
        let (path, name) = split(rest).map_or((rest, None), |(path, name)| (path, Some(name)));
        match word.as_bytes() {
            b"oci" => {
                let directory = named(path)?;
                let tag = name.map(|tag| {
                    let tag = tag.to_str().filter(|it| !it.is_empty());
                    tag.map(str::to_owned).ok_or_else(|| TargetError::Tag(text.to_owned()))
                });
                Ok(Self::Layout { directory, tag: tag.transpose()? })
            }
            b"docker-archive" => {
                let file = output(path)?;
                let wrong = |source| TargetError::Name { text: text.to_owned(), source };
                let name = name.map(|name| {
                    let name = name.to_str().ok_or_else(|| wrong(None))?;
                    name.parse().map_err(|error| wrong(Some(error)))
                });
                Ok(Self::DockerArchive { file, name: name.transpose()? })
            }
            b"tar" => Ok(Self::Tar(output(rest)?)),
            b"disk" => Ok(Self::Disk(output(rest)?)),
            b"erofs" => Ok(Self::Erofs { flavor: Flavor::Linux, file: output(rest)? }),
            b"sysext" => Ok(Self::Extension { kind: ExtensionKind::Sysext, file: output(rest)? }),
            b"confext" => Ok(Self::Extension { kind: ExtensionKind::Confext, file: output(rest)? }),
            b"gvisor" => Ok(Self::Erofs { flavor: Flavor::Gvisor, file: output(rest)? }),
            _ => Err(TargetError::Kind(text.to_owned())),
        }
    }
}

/// Splits a text at its first colon.
fn split(text: &OsStr) -> Option<(&OsStr, &OsStr)> {
    let bytes = text.as_bytes();
    let at = bytes.iter().position(|byte| *byte == b':')?;
    Some((OsStr::from_bytes(&bytes[..at]), OsStr::from_bytes(&bytes[at + 1..])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: &str) {
        let got = match Target::parse(OsStr::new(text)) {
            Ok(target) => format!("{target:?}"),
            Err(error) => error.to_string(),
        };
        assert_eq!(got, expect, "{text}");
    }

    #[test]
    fn targets() {
        check("oci:a/b", "Layout { directory: \"a/b\", tag: None }");
        check("oci:a/b:c/d:e", "Layout { directory: \"a/b\", tag: Some(\"c/d:e\") }");
        check("docker-archive:-", "DockerArchive { file: Stdout, name: None }");
        let name: RefName = "debian:12".parse().unwrap();
        let expect = format!("DockerArchive {{ file: File(\"a\"), name: {:?} }}", Some(&name));
        check("docker-archive:a:debian:12", &expect);
        check("tar:-", "Tar(Stdout)");
        check("tar:./-", "Tar(File(\"./-\"))");
        check("tar:a:b", "Tar(File(\"a:b\"))");
        check("erofs:a:b", "Erofs { flavor: Linux, file: File(\"a:b\") }");
        check("disk:a:b", "Disk(File(\"a:b\"))");
        check("disk:", "\"disk:\" names no file");
        check("sysext:a.raw", "Extension { kind: Sysext, file: File(\"a.raw\") }");
        check("confext:-", "Extension { kind: Confext, file: Stdout }");
        check("confext:", "\"confext:\" names no file");
        check("gvisor:-", "Erofs { flavor: Gvisor, file: Stdout }");
        let kinds = "is not an export target: write oci:DIR[:TAG], docker-archive:FILE[:NAME], tar:FILE, erofs:FILE, \
                     gvisor:FILE, disk:FILE, sysext:FILE, confext:FILE, or changes:FILE for a container";
        check("a.tar", &format!("\"a.tar\" {kinds}"));
        check("dir:a", &format!("\"dir:a\" {kinds}"));
        check("oci:", "\"oci:\" names no file");
        check("oci::a", "\"oci::a\" names no file");
        check("tar:", "\"tar:\" names no file");
        check("erofs:", "\"erofs:\" names no file");
        check("oci:a:", "\"oci:a:\" does not end with a valid tag");
        check(
            "docker-archive:a:B!",
            "\"docker-archive:a:B!\" does not end with a valid image name",
        );
    }
}
