//! Normalised names of repositories, and the patterns that match them.

use std::fmt;

/// Name of Docker Hub in policies, which replaces all aliases.
const DOCKER_HUB: &str = "docker.io";
/// Aliases of Docker Hub. Source: distribution's `normalize.go`; for the last alias, containerd's `hosts.go`.
const DOCKER_HUB_ALIASES: [&str; 2] = ["index.docker.io", "registry-1.docker.io"];

/// A registry and a repository, in a normalised spelling.
///
/// The registry is in lower case, without the default port of HTTPS, and Docker Hub is always `docker.io`. So a rule
/// for `ghcr.io` also covers `GHCR.io:443`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Repository(String);

impl Repository {
    /// Makes a name from a registry and a path in it.
    #[must_use]
    pub fn new(registry: &str, path: &str) -> Self {
        let registry = registry.to_ascii_lowercase();
        let host = registry.strip_suffix(":443").unwrap_or(&registry);
        let host = if DOCKER_HUB_ALIASES.contains(&host) { DOCKER_HUB } else { host };
        if host == DOCKER_HUB && !path.contains('/') {
            return Self(format!("{host}/library/{path}"));
        }
        Self(format!("{host}/{path}"))
    }

    /// Parses `registry/path`, the form in complete references.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let (registry, path) = name.split_once('/')?;
        (!registry.is_empty() && !path.is_empty()).then(|| Self::new(registry, path))
    }

    /// Parses a reference in a signature. `alpine:3` means Docker Hub, as in other references.
    #[must_use]
    pub fn from_reference(reference: &str) -> Option<Self> {
        let name = reference.split('@').next().unwrap_or_default();
        let start = name.rfind('/').map_or(0, |at| at + 1);
        let name = match name[start..].find(':') {
            Some(colon) => &name[..start + colon],
            None => name,
        };
        let is_host = |first: &str| first.contains(['.', ':']) || first == "localhost";
        match name.split_once('/') {
            Some((first, rest)) if is_host(first) => {
                (!rest.is_empty()).then(|| Self::new(first, rest))
            }
            _ => (!name.is_empty()).then(|| Self::new(DOCKER_HUB, name)),
        }
    }

    /// Returns `registry/path`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The origin of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageOrigin {
    /// The image was imported or made on this host.
    Local,
    /// The image was pulled from this repository.
    Repository(Repository),
    /// The store has no record of the origin, so no rule matches.
    Unknown,
}

impl fmt::Display for ImageOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => Pattern::LOCAL,
            Self::Repository(name) => name.as_str(),
            Self::Unknown => "unknown",
        })
    }
}

/// A pattern of the images to which a rule applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pattern {
    /// `local`: images that were imported or made on this host.
    Local,
    /// Repositories: `*` matches any text without a slash, `**` any text.
    Repository(String),
}

impl Pattern {
    /// The pattern for images that were imported or made on this host.
    pub const LOCAL: &'static str = "local";

    /// Parses a pattern.
    ///
    /// # Errors
    /// The reason why the text is not a pattern, in words for people.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == Self::LOCAL {
            return Ok(Self::Local);
        }
        let wrong = |why: &str| Err(format!("\"{}\" {why}", text.escape_debug()));
        let glob = text.bytes().all(|byte| byte.is_ascii_graphic());
        if !glob || text.is_empty() {
            return wrong("is not a repository");
        }
        if text.contains('@') {
            return wrong("has a digest: put it into digests");
        }
        let start = text.rfind('/').map_or(0, |at| at + 1);
        if text == "**" {
            return Ok(Self::Repository(text.to_owned()));
        }
        let Some((registry, path)) = text.split_once('/') else {
            return wrong(
                "has no registry: write, for example, docker.io/library/alpine, ghcr.io/**, ** \
                for all registries, or local",
            );
        };
        if text[start..].contains(':') {
            return wrong(
                "has a tag, which everyone with push rights can move: use digests or keys instead",
            );
        }
        let plain = Repository::new(registry, "a/b");
        if plain.0 != format!("{registry}/a/b") {
            let host = plain.0.trim_end_matches("/a/b");
            return wrong(&format!("has a registry whose name must be written {host}"));
        }
        if path.is_empty() || path.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return wrong("cannot match a repository, because their names are in lower case");
        }
        Ok(Self::Repository(text.to_owned()))
    }

    /// Whether images with this origin match.
    #[must_use]
    pub fn matches(&self, source: &ImageOrigin) -> bool {
        match (self, source) {
            (Self::Local, ImageOrigin::Local) => true,
            (Self::Repository(glob), ImageOrigin::Repository(name)) => {
                matches(glob.as_bytes(), name.0.as_bytes())
            }
            (Self::Local | Self::Repository(_), _) => false,
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => Self::LOCAL,
            Self::Repository(glob) => glob,
        })
    }
}

/// Whether a glob matches the whole name, in at most the product of their lengths in steps.
fn matches(glob: &[u8], name: &[u8]) -> bool {
    // Element N: whether the glob so far matches the first N bytes of the name.
    let mut here = vec![false; name.len() + 1];
    here[0] = true;
    let mut rest = glob;
    while let Some((&byte, after)) = rest.split_first() {
        let (stars, after) = match (byte, after.split_first()) {
            (b'*', Some((b'*', after))) => (2, after),
            (b'*', _) => (1, after),
            _ => (0, after),
        };
        let mut next = vec![false; name.len() + 1];
        for at in 0..=name.len() {
            let before = at.checked_sub(1);
            next[at] = match stars {
                0 => before.is_some_and(|it| here[it] && name[it] == byte),
                _ => {
                    let passes = |it: usize| next[it] && (stars == 2 || name[it] != b'/');
                    here[at] || before.is_some_and(passes)
                }
            };
        }
        here = next;
        rest = after;
    }
    here[name.len()]
}

#[cfg(test)]
mod tests {
    use super::{ImageOrigin, Pattern, Repository};

    #[test]
    fn globs() {
        let cases = [
            ("docker.io/library/*", "docker.io/library/alpine", true),
            ("docker.io/library/*", "docker.io/library/a/b", false),
            ("docker.io/library/*", "docker.io/libraryx/a", false),
            ("docker.io/**", "docker.io/a/b/c", true),
            ("docker.io/**", "docker.io.evil.example/a/b", false),
            ("**", "localhost:5000/a", true),
            ("*/**", "ghcr.io/a/b", true),
            ("*.example.com/**", "a.example.com/b", true),
            ("*.example.com/**", "example.com/b", false),
            ("*.example.com/**", "evil/a.example.com/b", false),
            ("ghcr.io/*/app", "ghcr.io/x/app", true),
            ("ghcr.io/*/app", "ghcr.io/x/y/app", false),
            ("ghcr.io/**/app", "ghcr.io/x/y/app", true),
            ("ghcr.io/a*c/app", "ghcr.io/abc/app", true),
            ("ghcr.io/a*c/app", "ghcr.io/ab/app", false),
            ("ghcr.io/a/b", "ghcr.io/a/b", true),
            ("ghcr.io/a/b", "ghcr.io/a/bc", false),
            ("ghcr.io/a/b", "ghcr.io/a/", false),
        ];
        for (glob, name, expect) in cases {
            let pattern = Pattern::parse(glob).unwrap();
            let name = Repository::from_name(name).unwrap();
            assert_eq!(
                pattern.matches(&ImageOrigin::Repository(name.clone())),
                expect,
                "{glob} {name}"
            );
            assert!(!pattern.matches(&ImageOrigin::Local), "{glob} is not for what is local");
            assert!(!pattern.matches(&ImageOrigin::Unknown), "{glob} is not for what is unknown");
        }
        let local = Pattern::parse("local").unwrap();
        assert!(local.matches(&ImageOrigin::Local));
        assert!(!local.matches(&ImageOrigin::Unknown));
        let name = Repository::from_name("local/a").unwrap();
        assert!(!local.matches(&ImageOrigin::Repository(name)));
    }

    #[test]
    fn a_registry_has_one_spelling() {
        let cases = [
            ("GHCR.io:443/a/b", "ghcr.io/a/b"),
            ("index.docker.io/library/a", "docker.io/library/a"),
            ("Registry-1.docker.io:443/a", "docker.io/library/a"),
            ("docker.io/a/b", "docker.io/a/b"),
            ("localhost:5000/a", "localhost:5000/a"),
        ];
        for (name, expect) in cases {
            assert_eq!(Repository::from_name(name).unwrap().as_str(), expect);
        }
        for name in ["", "a", "/a", "a/"] {
            assert_eq!(Repository::from_name(name), None, "{name}");
        }
    }

    #[test]
    fn references_of_signatures() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let cases = [
            ("alpine", Some("docker.io/library/alpine")),
            ("alpine:3", Some("docker.io/library/alpine")),
            ("user/app", Some("docker.io/user/app")),
            ("localhost:5000/a:b", Some("localhost:5000/a")),
            ("localhost:5000/a", Some("localhost:5000/a")),
            ("index.docker.io/library/a", Some("docker.io/library/a")),
            (&format!("ghcr.io/a/b:c@{digest}"), Some("ghcr.io/a/b")),
            ("", None),
            ("@", None),
            (":x", None),
            ("ghcr.io/", None),
        ];
        for (reference, expect) in cases {
            let found = Repository::from_reference(reference);
            assert_eq!(found.as_ref().map(Repository::as_str), expect, "{reference}");
        }
    }

    #[test]
    fn patterns_that_could_never_do_what_they_say_are_refused() {
        let cases = [
            ("alpine", "has no registry"),
            ("*", "has no registry"),
            ("", "is not a repository"),
            ("docker.io/a b", "is not a repository"),
            ("docker.io/library/alpine:3", "has a tag"),
            ("docker.io/library/alpine@sha256:00", "has a digest"),
            ("Docker.io/**", "must be written docker.io"),
            ("index.docker.io/**", "must be written docker.io"),
            ("ghcr.io:443/**", "must be written ghcr.io"),
            ("ghcr.io/App", "lower case"),
            ("ghcr.io/", "cannot match a"),
        ];
        for (text, expect) in cases {
            let error = Pattern::parse(text).unwrap_err();
            assert!(error.contains(expect), "{text}: {error}");
        }
    }
}
