//! References to images in registries, as users type them.
//!
//! Source of the grammar: distribution's `reference` package, `regexp.go` and `normalize.go`.

use std::fmt;
use std::str::FromStr;

use crate::Digest;

/// The default registry, for references without one.
pub const DOCKER_HUB: &str = "docker.io";
/// Host of Docker Hub's API. `docker.io` itself is a web site.
pub const DOCKER_HUB_API: &str = "registry-1.docker.io";
/// First name of Docker Hub, which its credentials still use.
const DOCKER_HUB_INDEX: &str = "index.docker.io";
/// The default tag, for references without tag and digest.
pub const LATEST: &str = "latest";

/// Maximum length of registry and repository together, in bytes. Source: `reference.go`,
/// `RepositoryNameTotalLengthMax`.
const NAME_MAX: usize = 255;
/// Maximum length of a tag, in bytes. Source: OCI distribution-spec 1.1, "Pulling manifests".
const TAG_MAX: usize = 128;

/// A reference to an image in a registry, with the name completed: `docker.io/library/alpine:3.20`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// Text that is not a reference to an image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{}\" is not an image reference: {flaw}; write it like {}", text.escape_debug(), flaw.example())]
pub struct ReferenceError {
    text: String,
    flaw: Flaw,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Flaw {
    #[error("it is empty")]
    Empty,
    #[error("the name before \"{}\" is missing", .0.escape_debug())]
    NoName(String),
    #[error("it begins with \"{}\", but a registry is named without a scheme", .0.escape_debug())]
    Scheme(String),
    #[error("it has spaces around it or within")]
    Space,
    #[error("\"{}\" is not the name of a host, or of a host and a port", .0.escape_debug())]
    Registry(String),
    #[error("the repository \"{}\" has upper-case letters", .0.escape_debug())]
    UpperCase(String),
    #[error(
        "\"{}\" is not a component of a repository's name (letters a-z and digits, with \".\", \
        \"_\", \"__\" or dashes between them)",
        .0.escape_debug()
    )]
    Component(String),
    #[error("the name has {0} bytes, more than {NAME_MAX}")]
    TooLong(usize),
    #[error(
        "\"{}\" is not a tag (at most {TAG_MAX} letters, digits, \"_\", \".\" and \"-\", not beginning with \".\" or \"-\")",
        .0.escape_debug()
    )]
    Tag(String),
    #[error("\"{}\" is not a digest", .0.escape_debug())]
    Digest(String),
    #[error("64 hexadecimal digits are an image's id, not its name")]
    Identifier,
}

impl Flaw {
    fn example(&self) -> &'static str {
        match self {
            Self::Registry(_) | Self::Scheme(_) => "ghcr.io/owner/app:1.2 or localhost:5000/app",
            Self::Tag(_) => "alpine:3.20",
            Self::Digest(_) | Self::Identifier => "alpine@sha256: and 64 hexadecimal digits",
            _ => "alpine, alpine:3.20, ghcr.io/owner/app:1.2",
        }
    }
}

impl Reference {
    /// Returns the registry: a host with an optional port; `docker.io` for Docker Hub.
    #[must_use]
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Returns the repository within the registry. Docker Hub's official images have the prefix `library/`.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Returns the tag, if there is one.
    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Returns the digest, if there is one.
    #[must_use]
    pub const fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// Returns registry and repository, such as `docker.io/library/alpine`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// Returns the host, with an optional port, that serves the registry's API unless a setting names another.
    #[must_use]
    pub fn api_host(&self) -> &str {
        api_host(&self.registry)
    }

    /// Returns a reference to the same image by digest, which no later push can replace.
    #[must_use]
    pub fn with_digest(&self, digest: Digest) -> Self {
        Self { digest: Some(digest), ..self.clone() }
    }

    fn parse(text: &str) -> Result<Self, Flaw> {
        if text.is_empty() {
            return Err(Flaw::Empty);
        }
        if text.contains(char::is_whitespace) {
            return Err(Flaw::Space);
        }
        if let Some((scheme, _)) = text.split_once("://") {
            return Err(Flaw::Scheme(format!("{scheme}://")));
        }
        if text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(Flaw::Identifier);
        }
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                let digest = digest.parse().map_err(|_error| Flaw::Digest(digest.to_owned()))?;
                (rest, Some(digest))
            }
            None => (text, None),
        };
        // A colon in the last component begins the tag. Any other colon belongs to the registry's port or address.
        let start = rest.rfind('/').map_or(0, |at| at + 1);
        let (name, tag) = match rest[start..].split_once(':') {
            Some((_, tag)) => (&rest[..rest.len() - tag.len() - 1], Some(tag)),
            None => (rest, None),
        };
        if let Some(tag) = tag {
            check_tag(tag)?;
        }
        if name.is_empty() {
            return Err(Flaw::NoName(text.to_owned()));
        }
        let (registry, path) = match name.split_once('/') {
            Some((first, path)) if is_registry(first) => (first, path),
            _ => (DOCKER_HUB, name),
        };
        let registry = if registry == DOCKER_HUB_INDEX { DOCKER_HUB } else { registry };
        check_registry(registry)?;
        check_repository(path)?;
        let repository = match registry {
            DOCKER_HUB if !path.contains('/') => format!("library/{path}"),
            _ => path.to_owned(),
        };
        let length = registry.len() + 1 + repository.len();
        if length > NAME_MAX {
            return Err(Flaw::TooLong(length));
        }
        Ok(Self { registry: registry.to_owned(), repository, tag: tag.map(str::to_owned), digest })
    }
}

/// Returns the host of a registry's API.
pub(crate) fn api_host(registry: &str) -> &str {
    if registry == DOCKER_HUB { DOCKER_HUB_API } else { registry }
}

/// Whether Docker treats `text`, the part before the first slash, as a registry: `user/app` is on Docker Hub.
fn is_registry(text: &str) -> bool {
    let has_upper_case = text.bytes().any(|byte| byte.is_ascii_uppercase());
    text == "localhost" || text.contains(['.', ':']) || has_upper_case
}

fn check_registry(text: &str) -> Result<(), Flaw> {
    let wrong = || Flaw::Registry(text.to_owned());
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, after) = rest.split_once(']').ok_or_else(wrong)?;
            address.parse::<std::net::Ipv6Addr>().map_err(|_error| wrong())?;
            match after.strip_prefix(':') {
                None if after.is_empty() => return Ok(()),
                None => return Err(wrong()),
                Some(port) => ("", Some(port)),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let is_label = |label: &str| {
        let inner = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        inner && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
    };
    let is_port = |port: &str| {
        port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|n| n > 0)
    };
    let host_is_good = text.starts_with('[') || host.split('.').all(is_label);
    if host_is_good && port.is_none_or(is_port) { Ok(()) } else { Err(wrong()) }
}

fn check_repository(path: &str) -> Result<(), Flaw> {
    if path.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(Flaw::UpperCase(path.to_owned()));
    }
    match path.split('/').find(|component| !is_component(component)) {
        Some(component) => Err(Flaw::Component(component.to_owned())),
        None => Ok(()),
    }
}

/// Whether a text consists of runs of letters and digits, separated by `.`, `_`, `__` or any number of dashes.
fn is_component(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let mut rest = text.as_bytes();
    loop {
        let run = rest.iter().take_while(|byte| is_plain(**byte)).count();
        let between = rest[run..].iter().take_while(|byte| !is_plain(**byte)).count();
        let separator = &rest[run..run + between];
        match separator {
            _ if run == 0 => return false,
            [] => return true,
            b"." | b"_" | b"__" => {}
            dashes if dashes.iter().all(|byte| *byte == b'-') => {}
            _ => return false,
        }
        rest = &rest[run + between..];
    }
}

fn check_tag(tag: &str) -> Result<(), Flaw> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let good = tag.len() <= TAG_MAX
        && tag.bytes().all(|byte| is_word(byte) || byte == b'.' || byte == b'-')
        && tag.bytes().next().is_some_and(is_word);
    if good { Ok(()) } else { Err(Flaw::Tag(tag.to_owned())) }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text).map_err(|flaw| ReferenceError { text: text.to_owned(), flaw })
    }
}

/// Writes the full form: `docker.io/library/alpine:latest`. A reference with a digest gets no default tag.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        match (&self.tag, &self.digest) {
            (Some(tag), _) => write!(f, ":{tag}")?,
            (None, None) => write!(f, ":{LATEST}")?,
            (None, Some(_)) => {}
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn check(text: &str, expect: &str) {
        let text = text.replace("HASH", HASH);
        let reference: Reference = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(reference.to_string(), expect.replace("HASH", HASH), "{text}");
        // The full form parses to itself.
        assert_eq!(
            reference.to_string().parse::<Reference>().unwrap().to_string(),
            expect.replace("HASH", HASH)
        );
    }

    /// The expected values are those of `reference.ParseNormalizedNamed` and `TagNameOnly`. Some rows are from
    /// `normalize_test.go`.
    #[test]
    fn references() {
        check("alpine", "docker.io/library/alpine:latest");
        check("alpine:3.20", "docker.io/library/alpine:3.20");
        check("user/x", "docker.io/user/x:latest");
        check("docker.io/alpine", "docker.io/library/alpine:latest");
        check("docker.io/user/x", "docker.io/user/x:latest");
        check("index.docker.io/alpine", "docker.io/library/alpine:latest");
        check("ghcr.io/a/b:tag", "ghcr.io/a/b:tag");
        check("host:5000/x", "host:5000/x:latest");
        check("host:5000/x@HASH", "host:5000/x@HASH");
        check("localhost/x", "localhost/x:latest");
        check("localhost:5000/x:1", "localhost:5000/x:1");
        check("Host/x", "Host/x:latest");
        check("localhost", "docker.io/library/localhost:latest");
        check("x:tag@HASH", "docker.io/library/x:tag@HASH");
        check("x@HASH", "docker.io/library/x@HASH");
        check("127.0.0.1:5000/library/debian", "127.0.0.1:5000/library/debian:latest");
        check("[::1]:5000/x:y", "[::1]:5000/x:y");
        check("[2001:db8::1]/x", "[2001:db8::1]/x:latest");
        check("a__b/c---d/e.f_g", "docker.io/a__b/c---d/e.f_g:latest");
        check("x:_a.B-c", "docker.io/library/x:_a.B-c");
        check("xn--n3h.com/myimage", "xn--n3h.com/myimage:latest");
        check(
            &format!("x:{}", "a".repeat(128)),
            &format!("docker.io/library/x:{}", "a".repeat(128)),
        );
    }

    fn check_refused(text: &str, reason: &str, example: &str) {
        let error = text.parse::<Reference>().expect_err(text).to_string();
        assert!(error.contains(reason), "{error}");
        assert!(error.ends_with(example), "{error}");
    }

    #[test]
    fn what_is_no_reference() {
        let names = "write it like alpine, alpine:3.20, ghcr.io/owner/app:1.2";
        let hosts = "write it like ghcr.io/owner/app:1.2 or localhost:5000/app";
        let tags = "write it like alpine:3.20";
        let digests = "write it like alpine@sha256: and 64 hexadecimal digits";
        check_refused("", "it is empty", names);
        check_refused(":tag", "the name before \":tag\" is missing", names);
        check_refused("a b", "it has spaces", names);
        check_refused("https://ghcr.io/x", "it begins with \"https://\"", hosts);
        check_refused("Alpine", "the repository \"Alpine\" has upper-case letters", names);
        check_refused("ghcr.io/Owner/x", "upper-case", names);
        check_refused("ghcr.io/", "\"\" is not a component", names);
        check_refused("/x", "\"\" is not a component", names);
        check_refused("a//b", "\"\" is not a component", names);
        check_refused("a/_b", "\"_b\" is not a component", names);
        check_refused("a/b_", "\"b_\" is not a component", names);
        check_refused("a/b___c", "\"b___c\" is not a component", names);
        check_refused("a/b..c", "\"b..c\" is not a component", names);
        check_refused("a/b.-c", "\"b.-c\" is not a component", names);
        check_refused("a/../b", "\"..\" is not a component", names);
        check_refused("ghcr.io/ü", "\"ü\" is not a component", names);
        check_refused("a.b:c/x", "\"a.b:c\" is not the name of a host", hosts);
        check_refused("a.b:/x", "\"a.b:\" is not the name of a host", hosts);
        check_refused("a.b:70000/x", "\"a.b:70000\" is not the name of a host", hosts);
        check_refused("-a.b/x", "\"-a.b\" is not the name of a host", hosts);
        check_refused("a..b/x", "\"a..b\" is not the name of a host", hosts);
        check_refused("[::1/x", "is not the name of a host", hosts);
        check_refused("[::1%lo]/x", "is not the name of a host", hosts);
        check_refused("[::1]x/x", "is not the name of a host", hosts);
        check_refused("x:", "\"\" is not a tag", tags);
        check_refused("x:-a", "\"-a\" is not a tag", tags);
        check_refused("x:a:b", "\"a:b\" is not a tag", tags);
        check_refused(&format!("x:{}", "a".repeat(129)), "is not a tag", tags);
        check_refused("x@sha256:12", "\"sha256:12\" is not a digest", digests);
        check_refused("x@", "\"\" is not a digest", digests);
        check_refused(&"0".repeat(64), "an image's id", digests);
        check_refused(&"a/".repeat(127).replace("a/", "aa/"), "is not a component", names);
        check_refused(&format!("a.b/{}", "a".repeat(252)), "has 256 bytes", names);
    }
}
