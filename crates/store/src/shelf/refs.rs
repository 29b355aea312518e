//! Refs: names of images, chosen by users.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use image::verity::ImageId;
use serde::{Deserialize, Serialize};

use crate::disk::{Directory, DiskError};
use crate::record::{self, RECORD_MAX, RecordError};
use image::digest::Digest;

/// Seconds since 1970 in UTC. Callers pass the time, because the library reads no clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seconds(pub i64);

/// Storage form of an image's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Whole files in `objects/`, used through a composefs image.
    Objects,
    /// Packed devices, used through EROFS without overlayfs.
    Packed,
    /// Tars of layers, used through EROFS without overlayfs.
    Tar,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Objects => "objects",
            Self::Packed => "packed",
            Self::Tar => "tar",
        })
    }
}

/// A valid image name: `[host[:port]/]path[:tag]`, in the grammar of OCI references. A name without a tag gets
/// `latest`, so `debian` and `debian:latest` are the same ref.
///
/// An image that has no name, but is kept, has a ref such as `<none>@sha256:…`, which no user can give as a name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RefName(String);

/// The rule that a name breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RefNameFlaw {
    #[error("it has a digest")]
    Digest,
    #[error("the tag after the colon is empty")]
    EmptyTag,
    #[error("the tag has characters other than letters, digits, _ . and -, or begins with . or -")]
    Tag,
    #[error("the tag has more than 128 characters")]
    TagTooLong,
    #[error("it is too long")]
    TooLong,
    #[error(
        "it has characters other than lower-case letters and digits, with . _ __ or - between them"
    )]
    Component,
}

/// The reason why a name is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{}\" is not an image name: {}", .name.escape_debug(), .reason)]
pub struct RefNameError {
    pub name: String,
    pub reason: RefNameFlaw,
}

impl FromStr for RefName {
    type Err = RefNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match check_name(text) {
            Ok(tagged) => Ok(Self(if tagged { text.to_owned() } else { format!("{text}:latest") })),
            Err(reason) => Err(RefNameError { name: text.to_owned(), reason }),
        }
    }
}

/// Checks a name, and returns whether it has a tag. Source of the grammar: the `distribution` project,
/// `reference/regexp.go`.
fn check_name(text: &str) -> Result<bool, RefNameFlaw> {
    if text.contains('@') {
        return Err(RefNameFlaw::Digest);
    }
    let last = text.rfind('/').map_or(0, |at| at + 1);
    let (path, tag) = match text[last..].find(':') {
        Some(at) => (&text[..last + at], Some(&text[last + at + 1..])),
        None => (text, None),
    };
    if let Some(tag) = tag {
        let mut bytes = tag.bytes();
        let first = bytes.next().ok_or(RefNameFlaw::EmptyTag)?;
        let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if !word(first) || !bytes.all(|it| word(it) || it == b'.' || it == b'-') {
            return Err(RefNameFlaw::Tag);
        }
        if tag.len() > 128 {
            return Err(RefNameFlaw::TagTooLong);
        }
    }
    // The ref's file name, with "/" as "%2F", has at most 255 bytes.
    let implied = if tag.is_some() { 0 } else { ":latest".len() };
    if text.len() + implied + 2 * text.matches('/').count() > 255 {
        return Err(RefNameFlaw::TooLong);
    }
    for (at, component) in path.split('/').enumerate() {
        let host = at == 0 && path.contains('/') && is_host(component);
        if !host && !is_component(component) {
            return Err(RefNameFlaw::Component);
        }
    }
    Ok(tag.is_some())
}

/// Whether the text, which a slash follows, is a host with an optional port: `localhost`, or a name with a dot, a
/// colon or an upper-case letter. Any other text is the beginning of the path. Source: `splitDockerDomain` of the
/// `distribution` project, `reference/normalize.go`.
fn is_host(text: &str) -> bool {
    let has_upper_case = text.bytes().any(|it| it.is_ascii_uppercase());
    if text != "localhost" && !text.contains(['.', ':']) && !has_upper_case {
        return false;
    }
    let digits = |port: &str| !port.is_empty() && port.bytes().all(|it| it.is_ascii_digit());
    if let Some((address, after)) = text.strip_prefix('[').and_then(|it| it.split_once(']')) {
        let is_port = after.is_empty() || after.strip_prefix(':').is_some_and(digits);
        return is_port && address.parse::<std::net::Ipv6Addr>().is_ok();
    }
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    let label = |label: &str| {
        let good = label.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'-');
        good && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
    };
    name.split('.').all(label) && port.is_none_or(digits)
}

/// Whether the text is runs of `a-z0-9`, with one separator between any two: `.`, `_`, `__` or any number of `-`.
fn is_component(text: &str) -> bool {
    let plain = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit();
    let ends = text.starts_with(plain) && text.ends_with(plain);
    ends && text.split(plain).all(|between| {
        matches!(between, "" | "." | "_" | "__") || between.bytes().all(|it| it == b'-')
    })
}

/// Begin of the refs of images without a name.
const UNNAMED: &str = "<none>@";

impl RefName {
    /// Returns the ref of an image without a name, by its manifest, or else by its id. With it, `gc` keeps the image.
    #[must_use]
    pub fn unnamed(image: &ImageId, manifest: Option<&Digest>) -> Self {
        Self(match manifest {
            Some(manifest) => format!("{UNNAMED}{manifest}"),
            None => format!("{UNNAMED}{image}"),
        })
    }

    /// Whether this is the ref of an image without a name.
    #[must_use]
    pub fn is_unnamed(&self) -> bool {
        self.0.starts_with(UNNAMED)
    }

    /// Returns the whole name with its tag.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name of the ref's file in `refs/`. This is unique, because names have no percent sign.
    pub(crate) fn file_name(&self) -> String {
        match self.0.strip_prefix(UNNAMED) {
            Some(id) => format!("@{}", id.replace(':', "-")),
            None => self.0.replace('/', "%2F"),
        }
    }

    pub(crate) fn from_file_name(name: &str) -> Option<Self> {
        if let Some(id) = name.strip_prefix('@') {
            let is_known = match id.split_once('-') {
                Some((algorithm, hex)) => format!("{algorithm}:{hex}").parse::<Digest>().is_ok(),
                // Only one text stands for an id.
                None => id.parse::<ImageId>().is_ok_and(|it| it.to_string() == id),
            };
            if !is_known {
                return None;
            }
            let parsed = Self(format!("{UNNAMED}{}", id.replace('-', ":")));
            return (parsed.file_name() == name).then_some(parsed);
        }
        let text = name.replace("%2F", "/");
        let parsed: Self = text.parse().ok()?;
        (parsed.file_name() == name).then_some(parsed)
    }
}

impl fmt::Display for RefName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Contents of a ref.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    pub image: ImageId,
    /// The OCI manifest that the image was made from, if any.
    pub manifest: Option<Digest>,
    /// Storage form of the image's data.
    pub form: Form,
    /// Time at which the ref was created.
    pub created: Seconds,
}

/// The ref as written.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    /// Name of the ref, to detect renamed files.
    name: String,
    image: String,
    manifest: Option<Digest>,
    form: Form,
    created: Seconds,
}

/// An error while a ref is read or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RefError {
    #[error("the store has no image named {0}")]
    Absent(RefName),
    #[error("the ref {} is damaged", .name.escape_debug())]
    Damaged {
        /// The ref, or the name of its file.
        name: String,
        source: RecordError,
    },
    /// The file contains the name of another ref, or an invalid image id.
    #[error("the ref {} is damaged: it names {}", .name.escape_debug(), .says.escape_debug())]
    Wrong {
        /// The ref, or the name of its file.
        name: String,
        /// The wrong name or id in the file.
        says: String,
    },
    /// The name belongs to something other than a regular file.
    #[error("the ref {name} is damaged")]
    NotAFile { name: RefName, source: DiskError },
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(std::path::PathBuf),
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// A ref that cannot be read. It has no image until it is set again, and may be removed.
#[derive(Debug)]
pub struct BadRef {
    /// Name of the ref, from its file name.
    pub name: RefName,
    pub error: RefError,
}

pub(crate) fn encode(name: &RefName, reference: &Reference) -> Vec<u8> {
    record::encode(&Raw {
        name: name.to_string(),
        image: reference.image.to_string(),
        manifest: reference.manifest,
        form: reference.form,
        created: reference.created,
    })
}

fn decode(name: &RefName, bytes: &[u8]) -> Result<Reference, RefError> {
    let raw: Raw = record::decode(bytes)
        .map_err(|source| RefError::Damaged { name: name.to_string(), source })?;
    let wrong = |says: &String| RefError::Wrong { name: name.to_string(), says: says.clone() };
    if raw.name != name.0 {
        return Err(wrong(&raw.name));
    }
    let image = raw.image.parse().ok().ok_or_else(|| wrong(&raw.image))?;
    Ok(Reference { image, manifest: raw.manifest, form: raw.form, created: raw.created })
}

/// The directory `refs/`, with one record per name.
#[derive(Debug)]
pub struct RefShelf {
    pub(crate) directory: Directory,
}

impl RefShelf {
    /// Returns all refs, in byte order of their names.
    ///
    /// # Errors
    /// [`RefError`] if a ref is damaged or not readable. [`readable`](Self::readable) returns the others.
    pub fn all(&self) -> Result<Vec<(RefName, Reference)>, RefError> {
        let mut refs = Vec::new();
        for name in self.names()? {
            // A ref that was removed after it was listed is not an error.
            if let Some(reference) = self.get(&name)? {
                refs.push((name, reference));
            }
        }
        Ok(refs)
    }

    /// Returns all refs that can be read, in byte order of their names, and the errors of the others.
    ///
    /// # Errors
    /// [`DiskError`] if the refs cannot be listed.
    pub fn readable(&self) -> Result<(BTreeMap<RefName, Reference>, Vec<BadRef>), DiskError> {
        let mut refs = BTreeMap::new();
        let mut bad = Vec::new();
        for name in self.names()? {
            match self.get(&name) {
                Ok(Some(reference)) => drop(refs.insert(name, reference)),
                // The ref was removed after it was listed.
                Ok(None) => {}
                Err(error) => bad.push(BadRef { name, error }),
            }
        }
        Ok((refs, bad))
    }

    pub(crate) fn names(&self) -> Result<Vec<RefName>, DiskError> {
        let listed = self.directory.list()?;
        let mut names: Vec<_> =
            listed.iter().filter_map(|it| RefName::from_file_name(it.text()?)).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Returns one ref, if it exists.
    ///
    /// # Errors
    /// [`RefError`] if the ref is damaged or not readable.
    pub fn get(&self, name: &RefName) -> Result<Option<Reference>, RefError> {
        let bytes = match self.directory.read_all(name.file_name(), RECORD_MAX) {
            Err(source) if source.is_not_a_file() => {
                return Err(RefError::NotAFile { name: name.clone(), source });
            }
            other => other?,
        };
        bytes.map(|bytes| decode(name, &bytes)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::{Form, RefError, RefName, Reference, Seconds, decode, encode};
    use crate::Digest;

    fn check(text: &str, expected: Result<&str, &str>) {
        match (text.parse::<RefName>(), expected) {
            (Ok(name), Ok(full)) => {
                assert_eq!(name.as_str(), full);
                assert_eq!(RefName::from_file_name(&name.file_name()), Some(name));
            }
            (Err(error), Err(reason)) => {
                assert!(error.to_string().contains(reason), "{text}: {error}");
            }
            (found, _) => panic!("{text}: {found:?}"),
        }
    }

    #[test]
    fn names_follow_the_grammar_of_references() {
        check("debian", Ok("debian:latest"));
        check("debian:12", Ok("debian:12"));
        check("debian:Bookworm_1.2-x", Ok("debian:Bookworm_1.2-x"));
        check("library/debian", Ok("library/debian:latest"));
        check("docker.io/library/debian:12", Ok("docker.io/library/debian:12"));
        check("localhost:5000/a/b", Ok("localhost:5000/a/b:latest"));
        check("Example.COM/a", Ok("Example.COM/a:latest"));
        check("localhost/a", Ok("localhost/a:latest"));
        check("[::1]:5000/a:b", Ok("[::1]:5000/a:b"));
        check("[2001:db8::1]/a", Ok("[2001:db8::1]/a:latest"));
        check("a__b-c---d.e_f", Ok("a__b-c---d.e_f:latest"));
        check(&"a".repeat(248), Ok(&format!("{}:latest", "a".repeat(248))));
        check(&format!("{}:x", "a".repeat(253)), Ok(&format!("{}:x", "a".repeat(253))));
        for bad in [
            "",
            "Debian",
            "-a",
            "a-",
            "a..b",
            "a___b",
            "a._b",
            "a/",
            "/a",
            "a//b",
            "a b",
            "a\0b",
            "..",
            "a%2Fb",
            "é",
            "exa_mple.com:80:1/a",
            "localhost:/a",
            "[::1/a",
            "[::1]5000/a",
            "[::1]:/a",
            "[x]/a",
            "a/Host/b",
        ] {
            check(bad, Err("it has characters other than lower-case"));
        }
        check("a:", Err("after the colon"));
        check("a:.b", Err("the tag has characters other"));
        check("a:b c", Err("the tag has characters other"));
        check("a:b:c", Err("the tag has characters other"));
        check(&format!("a:{}", "b".repeat(129)), Err("128"));
        check(&"a".repeat(249), Err("too long"));
        check(&format!("{}:x", "a".repeat(254)), Err("too long"));
        check(&"a/".repeat(100), Err("too long"));
        check("a@sha256:00", Err("digest"));
    }

    #[test]
    fn file_names_of_others_are_no_refs() {
        for name in ["debian", "a%2fb:latest", ".hidden", "%2F:latest", "lost+found"] {
            assert_eq!(RefName::from_file_name(name), None, "{name}");
        }
    }

    #[test]
    fn images_without_a_name_have_refs_that_no_user_can_give() {
        let (id, digest) = ("ab".repeat(32), Digest::sha256(b"x"));
        let image = id.parse().unwrap();
        for (name, file) in [
            (RefName::unnamed(&image, None), format!("@{id}")),
            (RefName::unnamed(&image, Some(&digest)), format!("@{digest}").replace(':', "-")),
        ] {
            assert!(name.is_unnamed() && !"none".parse::<RefName>().unwrap().is_unnamed());
            assert_eq!(name.file_name(), file);
            assert_eq!(RefName::from_file_name(&file), Some(name.clone()));
            assert!(name.as_str().parse::<RefName>().is_err());
        }
        for file in ["@", "@abc", "@<none>", "@sha256-00", &format!("@{}", id.to_uppercase())] {
            assert_eq!(RefName::from_file_name(file), None, "{file}");
        }
    }

    #[test]
    fn a_ref_says_its_own_name() {
        let name: RefName = "debian".parse().unwrap();
        let reference = Reference {
            image: "ab".repeat(32).parse().unwrap(),
            manifest: Some(Digest::sha256(b"x")),
            form: Form::Objects,
            created: Seconds(-5),
        };
        let bytes = encode(&name, &reference);
        assert_eq!(decode(&name, &bytes).unwrap(), reference);
        let other = decode(&"ubuntu".parse().unwrap(), &bytes);
        assert!(matches!(other, Err(RefError::Wrong { .. })), "{other:?}");
    }
}
