//! Parses the paths of requests. Source: OCI distribution-spec 1.1, "Endpoints".

use image::digest::Digest;
use oci::policy::Repository;
use oci::reference::Reference;
use transfer::lazy::artifact::LAZY_ARTIFACT;

/// Maximum length of a path and of a query, in bytes. A name has at most 255 bytes, and a digest 135.
const PATH_MAX: usize = 1024;

/// The item that a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Route {
    /// Whether this is a registry.
    Base,
    /// A manifest, by its digest.
    Manifest(Repository, Digest),
    /// A manifest, by a tag.
    Tag(Repository, String),
    /// A blob, a config, or a layer's tar under its diff id.
    Blob(Repository, Digest),
    /// The artifacts that refer to a manifest, of all types or of another one than in [`Indexes`](Self::Indexes).
    Referrers(Repository, Digest),
    /// The indexes for lazy loading that refer to a manifest.
    Indexes(Repository, Digest),
}

/// Why a path is not a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RouteError {
    /// There is no such address.
    Absent,
    /// The name of the repository is invalid.
    Name,
    /// The digest or tag is invalid.
    Reference,
}

impl Route {
    /// Parses the path and the query of an address.
    pub(super) fn parse(path: &str, query: Option<&str>) -> Result<Self, RouteError> {
        let query = query.unwrap_or_default();
        if path.len() > PATH_MAX || query.len() > PATH_MAX {
            return Err(RouteError::Absent);
        }
        let rest = path.strip_prefix("/v2").ok_or(RouteError::Absent)?;
        if matches!(rest, "" | "/") {
            return Ok(Self::Base);
        }
        let rest = rest.strip_prefix('/').ok_or(RouteError::Absent)?;
        let (rest, reference) = rest.rsplit_once('/').ok_or(RouteError::Absent)?;
        let (name, kind) = rest.rsplit_once('/').ok_or(RouteError::Absent)?;
        if !matches!(kind, "manifests" | "blobs" | "referrers") {
            return Err(RouteError::Absent);
        }
        let repository = repository(name, parameter(query, "ns")?.as_deref())?;
        let digest = reference.parse::<Digest>();
        match (kind, digest) {
            ("manifests", Ok(digest)) => Ok(Self::Manifest(repository, digest)),
            ("manifests", Err(_)) if is_tag(reference) => {
                Ok(Self::Tag(repository, reference.to_owned()))
            }
            ("blobs", Ok(digest)) => Ok(Self::Blob(repository, digest)),
            ("referrers", Ok(digest)) => {
                let of_type = parameter(query, "artifactType").ok().flatten();
                Ok(match of_type.is_some_and(|it| it == LAZY_ARTIFACT) {
                    true => Self::Indexes(repository, digest),
                    false => Self::Referrers(repository, digest),
                })
            }
            (_, _) => Err(RouteError::Reference),
        }
    }
}

/// Returns the repository of a name in a path. Clients of a mirror name the registry by `?ns=`. Without it, the name
/// is complete as in the store, or on Docker Hub, because Docker's mirrors are only for that.
fn repository(name: &str, namespace: Option<&str>) -> Result<Repository, RouteError> {
    let full = match namespace {
        Some(registry) => format!("{registry}/{name}"),
        None => name.to_owned(),
    };
    let reference: Reference = full.parse().map_err(|_error| RouteError::Name)?;
    if reference.tag().is_some() || reference.digest().is_some() {
        return Err(RouteError::Name);
    }
    Ok(Repository::new(reference.registry(), reference.repository()))
}

fn is_tag(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let mut bytes = text.bytes();
    text.len() <= 128
        && bytes.next().is_some_and(is_word)
        && bytes.all(|byte| is_word(byte) || byte == b'.' || byte == b'-')
}

/// Returns the value of a parameter in a query.
fn parameter(query: &str, wanted: &str) -> Result<Option<String>, RouteError> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let Some((_, value)) = pairs.find(|(name, _)| *name == wanted) else { return Ok(None) };
    decode(value).map(Some).ok_or(RouteError::Name)
}

/// Decodes `%3A`. Source: RFC 3986, 2.1.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))?);
        rest = rest.get(2..)?;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(address: &str, expect: Result<(&str, &str, &str), RouteError>) {
        let (path, query) = match address.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (address, None),
        };
        let got = Route::parse(path, query).map(|route| match route {
            Route::Base => ("base", String::new(), String::new()),
            Route::Manifest(name, digest) => ("manifest", name.to_string(), digest.to_string()),
            Route::Tag(name, tag) => ("tag", name.to_string(), tag),
            Route::Blob(name, digest) => ("blob", name.to_string(), digest.to_string()),
            Route::Referrers(name, digest) => ("referrers", name.to_string(), digest.to_string()),
            Route::Indexes(name, digest) => ("indexes", name.to_string(), digest.to_string()),
        });
        let expect = expect.map(|(kind, name, which)| (kind, name.to_owned(), which.to_owned()));
        assert_eq!(got, expect, "{address}");
    }

    #[test]
    fn addresses() {
        let digest = format!("sha256:{}", "a".repeat(64));
        check("/v2/", Ok(("base", "", "")));
        check("/v2", Ok(("base", "", "")));
        let alpine = "docker.io/library/alpine";
        for name in ["library/alpine", "alpine", "docker.io/library/alpine"] {
            check(&format!("/v2/{name}/blobs/{digest}"), Ok(("blob", alpine, &digest)));
            check(&format!("/v2/{name}/manifests/{digest}"), Ok(("manifest", alpine, &digest)));
            check(&format!("/v2/{name}/referrers/{digest}"), Ok(("referrers", alpine, &digest)));
            check(&format!("/v2/{name}/manifests/3.20"), Ok(("tag", alpine, "3.20")));
        }
        for (of_type, kind) in [
            ("application/vnd.quire.lazy.v1", "indexes"),
            ("application%2Fvnd.quire.lazy.v1", "indexes"),
            ("application/vnd.quire.lazy.v2", "referrers"),
            ("", "referrers"),
        ] {
            let address = format!("/v2/alpine/referrers/{digest}?artifactType={of_type}");
            check(&address, Ok((kind, alpine, &digest)));
        }
        check("/v2/a/b/manifests/x?ns=ghcr.io", Ok(("tag", "ghcr.io/a/b", "x")));
        check("/v2/a/manifests/x?x=y&ns=Host%3A5000&z", Ok(("tag", "host:5000/a", "x")));
        check("/v2/a/manifests/x?ns=ghcr.io%3a443", Ok(("tag", "ghcr.io/a", "x")));
        check(
            "/v2/manifests/manifests/manifests",
            Ok(("tag", "docker.io/library/manifests", "manifests")),
        );
    }

    #[test]
    fn hostile_addresses() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for path in [
            "",
            "/",
            "/v1/",
            "/v2x/",
            "/v2/_catalog",
            "/v2//",
            "/v2/a/tags/list",
            "/v2/blobs/x",
            "v2/a/blobs/x",
        ] {
            check(path, Err(RouteError::Absent));
        }
        check(&format!("/v2/{}/manifests/x", "a/".repeat(600)), Err(RouteError::Absent));
        check(&format!("/v2/a/manifests/x?ns={}", "a".repeat(2000)), Err(RouteError::Absent));
        for name in [
            "..",
            "a/..",
            "../../etc",
            ".",
            "a//b",
            "%2e%2e",
            "a%2Fb",
            "A",
            "a@b",
            "a:1",
            "-",
            "a\0",
        ] {
            check(&format!("/v2/{name}/blobs/{digest}"), Err(RouteError::Name));
        }
        for query in
            ["ns=..", "ns=a/../b", "ns=%2", "ns=%zz", "ns=%+1", "ns=%ff", "ns=https://a.io", "ns="]
        {
            check(&format!("/v2/a/blobs/{digest}?{query}"), Err(RouteError::Name));
        }
        for reference in
            ["x", "sha256:", "sha256:aa", "..", "", "md5:aa", &digest.to_uppercase(), &digest[..70]]
        {
            check(&format!("/v2/a/blobs/{reference}"), Err(RouteError::Reference));
            check(&format!("/v2/a/referrers/{reference}"), Err(RouteError::Reference));
        }
        for tag in ["..", ".a", "-a", "a/", "a b", "", &"a".repeat(129), "a:b"] {
            let tag = format!("/v2/a/manifests/{tag}");
            assert!(Route::parse(&tag, None).is_err(), "{tag}");
        }
    }
}
