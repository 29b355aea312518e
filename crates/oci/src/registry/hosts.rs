//! Finds a registry's hosts and their connection settings, in containerd's `hosts.toml` layout.
//!
//! For `ghcr.io` the file is `DIR/ghcr.io/hosts.toml`, else `DIR/_default/hosts.toml`. If a directory has no such
//! file, its `*.crt` are CAs and its `*.cert` with `*.key` are client certificates, as with Docker. Source:
//! containerd's `docs/hosts.md`.
//!
//! Two things differ from containerd: a mirror that does not list its capabilities gets no pushes, and an unknown
//! setting is an error, because it may be a restriction.

mod duration;
mod protection;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::Url;
use serde::Deserialize;

use super::credentials::Secret;
use crate::reference::{DOCKER_HUB, api_host};
pub use protection::Protection;

/// A kind of request that a host may receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Capability {
    /// Fetching content by its digest.
    Pull,
    /// Resolving a tag.
    Resolve,
    /// Uploading.
    Push,
}

/// TLS settings of a connection.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tls {
    /// Files with CA certificates, in addition to the system's.
    pub ca: Vec<PathBuf>,
    /// Files with a client certificate chain, each with its key file unless the chain file contains the key. A server
    /// gets the first chain that is signed by a CA that the server names.
    pub client: Vec<(PathBuf, Option<PathBuf>)>,
    /// Whether to accept any certificate of the server.
    pub skip_verify: bool,
}

/// Connection settings of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// TLS settings.
    pub tls: Tls,
    /// Timeout for connecting, if one is set.
    pub dial_timeout: Option<Duration>,
    /// Proxy, which overrides those in other settings. It may contain a password.
    pub proxy: Option<Secret>,
}

impl Route {
    /// Returns the route to another host to which this host redirects. It has the same CAs, because one of them may
    /// have signed that host's certificate, but no client certificate.
    pub(super) fn elsewhere(&self) -> Self {
        Self { tls: Tls { ca: self.tls.ca.clone(), ..Tls::default() }, ..self.clone() }
    }
}

/// A host that serves a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Base address of its API, without a trailing slash: `https://ghcr.io/v2`.
    pub base: String,
    /// Host, with the port unless it is the scheme's default.
    pub host: String,
    /// Kinds of requests that it may get.
    pub capabilities: Vec<Capability>,
    /// Settings of connections to the host.
    pub route: Route,
    /// Headers for each request to the host.
    pub headers: Vec<(String, Secret)>,
    /// Registry that it mirrors, if it is a mirror. Requests name the registry by `?ns=`.
    pub mirror_of: Option<String>,
    /// Whether HTTP is used if the host does not respond to HTTPS.
    pub may_use_http: bool,
}

/// An error of reading a registry's settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// A file or directory cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file or directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file cannot be parsed.
    #[error("cannot use {}: {reason}", path.display())]
    Toml {
        /// Path of the file.
        path: PathBuf,
        /// Reason in one line, with the line's number if it is known. The text of the parser's error has a picture of the line.
        reason: String,
    },
    /// A value is not the address of a host.
    #[error(
        "{} names the host \"{}\": write, for example, https://mirror.example.com",
        path.display(), text.escape_debug()
    )]
    Url {
        /// Path of the file.
        path: PathBuf,
        /// Invalid value.
        text: String,
    },
    /// A value is not a duration.
    #[error(
        "{} has the invalid dial_timeout \"{}\": write, for example, 500ms or 1m30s",
        path.display(), text.escape_debug()
    )]
    Duration {
        /// Path of the file.
        path: PathBuf,
        /// Invalid value.
        text: String,
    },
    /// A value is not the address of a proxy. It is not shown, because it may contain a password.
    #[error(
        "{} has an invalid proxy: write, for example, http://proxy.example.com:3128 (or https, \
        socks5 or socks5h)",
        path.display()
    )]
    Proxy {
        /// Path of the file.
        path: PathBuf,
    },
    /// The settings have an address by HTTP, and the caller requires HTTPS.
    #[error(
        "{} names {registry} by http://, but --tls-verify requires HTTPS: leave --tls-verify out, or change the file",
        path.display()
    )]
    Http {
        /// Path of the file.
        path: PathBuf,
        /// The registry.
        registry: String,
    },
    /// A value is not a known capability.
    #[error(
        "{} has the unknown capability \"{}\": use pull, resolve or push",
        path.display(), text.escape_debug()
    )]
    Capability {
        /// Path of the file.
        path: PathBuf,
        /// Invalid value.
        text: String,
    },
}

/// The settings of a host in `hosts.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Host {
    /// Address of the registry itself. Only at the top level.
    server: Option<String>,
    /// Mirrors, in the order in which they are tried. Only at the top level.
    #[serde(default)]
    host: toml::Table,
    #[serde(default)]
    capabilities: Vec<String>,
    ca: Option<Texts>,
    client: Option<Client>,
    #[serde(default)]
    skip_verify: bool,
    #[serde(default)]
    override_path: bool,
    #[serde(default)]
    header: std::collections::BTreeMap<String, Texts>,
    dial_timeout: Option<String>,
    proxy: Option<Secret>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Client {
    Plain(Texts),
    Pairs(Vec<(String, String)>),
}

/// Maximum size of `hosts.toml`, in bytes.
const FILE_MAX: u64 = 1 << 20;

/// Returns the hosts of `registry` in the order in which to try them: its mirrors, then the registry itself.
/// `protection` applies only to the registry itself.
///
/// # Errors
/// [`HostsError`] if settings exist but are unusable.
pub fn endpoints(
    registry: &str,
    directories: &[PathBuf],
    protection: Protection,
) -> Result<Vec<Endpoint>, HostsError> {
    let Some(directory) = find_hosts_file(registry, directories) else {
        return Ok(vec![own(registry, Tls::default(), protection)]);
    };
    let path = directory.join("hosts.toml");
    let text = crate::files::read_settings(&path, FILE_MAX).and_then(|bytes| {
        String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    });
    match text {
        Ok(text) => parse(registry, &path, &text, protection),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(vec![own(registry, docker_certificates(&directory)?, protection)])
        }
        Err(source) => Err(HostsError::Read { path, source }),
    }
}

fn find_hosts_file(registry: &str, directories: &[PathBuf]) -> Option<PathBuf> {
    // containerd also accepts the port between underscores, for file systems that do not allow colons.
    let underscored = registry.rsplit_once(':').map(|(host, port)| format!("{host}_{port}_"));
    let names = [underscored.as_deref(), Some(registry), Some("_default")];
    names.into_iter().flatten().find_map(|name| {
        directories.iter().map(|directory| directory.join(name)).find(|path| path.is_dir())
    })
}

/// Returns the registry's own host with default settings.
fn own(registry: &str, tls: Tls, protection: Protection) -> Endpoint {
    let host = api_host(registry);
    let scheme = default_scheme(host, &tls, protection);
    let tls = protected(tls, protection);
    Endpoint {
        base: format!("{scheme}://{host}/v2"),
        host: host.to_owned(),
        capabilities: vec![Capability::Pull, Capability::Resolve, Capability::Push],
        route: Route { tls, ..Route::default() },
        headers: Vec::new(),
        mirror_of: None,
        may_use_http: protection == Protection::Unverified,
    }
}

/// Returns the default scheme of a host. For loopback it is HTTP, because loopback needs no encryption and registries
/// there seldom have a certificate, unless there are TLS settings.
fn default_scheme(host: &str, tls: &Tls, protection: Protection) -> &'static str {
    let loopback = is_loopback(host) && !host.ends_with(":443") && *tls == Tls::default();
    match protection {
        Protection::None => "http",
        Protection::Usual if loopback => "http",
        Protection::Usual | Protection::Verified | Protection::Unverified => "https",
    }
}

/// Returns the TLS settings of the registry itself.
fn protected(tls: Tls, protection: Protection) -> Tls {
    match protection {
        Protection::Usual | Protection::None => tls,
        Protection::Verified => Tls { skip_verify: false, ..tls },
        Protection::Unverified => Tls { skip_verify: true, ..tls },
    }
}

/// Whether a host, with an optional port, is a loopback address.
#[must_use]
pub(super) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let v4 = name.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback());
    let v6 = name.parse::<Ipv6Addr>().is_ok_and(|address| address.is_loopback());
    name == "localhost" || v4 || v6
}

fn parse(
    registry: &str,
    path: &Path,
    text: &str,
    protection: Protection,
) -> Result<Vec<Endpoint>, HostsError> {
    let wrong = |error: toml::de::Error| {
        let line =
            error.span().and_then(|it| text.get(..it.start)).map(|it| it.matches('\n').count() + 1);
        let line = line.map(|it| format!("line {it}: ")).unwrap_or_default();
        HostsError::Toml { path: path.to_owned(), reason: line + error.message() }
    };
    let mut root: Host = toml::from_str(text).map_err(wrong)?;
    let mirrors = std::mem::take(&mut root.host).into_iter().map(|(address, table)| {
        let host: Host = table.try_into().map_err(wrong)?;
        // containerd does not support mirrors of mirrors either.
        if let Some(field) = [("server", host.server.is_some()), ("host", !host.host.is_empty())]
            .into_iter()
            .find_map(|(name, is_there)| is_there.then_some(name))
        {
            let within = format!(
                "[host.\"{address}\"] has \"{field}\", which is allowed only at the top \
                    of the file"
            );
            return Err(wrong(serde::de::Error::custom(within)));
        }
        endpoint(
            registry,
            Some(&address),
            host,
            &[Capability::Pull, Capability::Resolve],
            path,
            Protection::Usual,
        )
    });
    let mut endpoints = mirrors.collect::<Result<Vec<_>, _>>()?;
    let server = root.server.take().filter(|server| !server.is_empty());
    let all = [Capability::Pull, Capability::Resolve, Capability::Push];
    let own = endpoint(registry, server.as_deref(), root, &all, path, protection)?;
    if protection == Protection::Verified && own.base.starts_with("http:") {
        let (path, registry) = (path.to_owned(), registry.to_owned());
        return Err(HostsError::Http { path, registry });
    }
    endpoints.push(own);
    Ok(endpoints)
}

/// Makes a host from the file's settings. `capabilities` are its defaults if it lists none.
fn endpoint(
    registry: &str,
    address: Option<&str>,
    settings: Host,
    capabilities: &[Capability],
    path: &Path,
    protection: Protection,
) -> Result<Endpoint, HostsError> {
    let listed = settings.capabilities.iter().map(|word| match word.to_lowercase().as_str() {
        "pull" => Ok(Capability::Pull),
        "resolve" => Ok(Capability::Resolve),
        "push" => Ok(Capability::Push),
        _ => Err(HostsError::Capability { path: path.to_owned(), text: word.clone() }),
    });
    let mut listed = listed.collect::<Result<Vec<_>, _>>()?;
    if listed.is_empty() {
        listed = capabilities.to_vec();
    }
    let directory = path.parent().unwrap_or(path);
    let file = |name: String| directory.join(name);
    let client = match settings.client {
        None => Vec::new(),
        Some(Client::Plain(files)) => {
            files.into_vec().into_iter().map(|both| (file(both), None)).collect()
        }
        Some(Client::Pairs(pairs)) => pairs
            .into_iter()
            .map(|(chain, key)| (file(chain), Some(key).filter(|key| !key.is_empty()).map(file)))
            .collect(),
    };
    let ca =
        settings.ca.map_or_else(Vec::new, |files| files.into_vec().into_iter().map(file).collect());
    let tls = Tls { ca, client, skip_verify: settings.skip_verify };
    let headers = settings.header.into_iter().flat_map(|(name, values)| {
        values.into_vec().into_iter().map(move |value| (name.clone(), Secret::new(value)))
    });
    let headers = headers.collect();
    let dial_timeout = match settings.dial_timeout {
        None => None,
        Some(text) => match duration::parse(&text) {
            Some(duration) => Some(duration).filter(|it| !it.is_zero()),
            None => return Err(HostsError::Duration { path: path.to_owned(), text }),
        },
    };
    if settings.proxy.as_ref().is_some_and(|proxy| !is_proxy(proxy)) {
        return Err(HostsError::Proxy { path: path.to_owned() });
    }
    let route = |tls: Tls| Route { tls, dial_timeout, proxy: settings.proxy.clone() };
    let Some(address) = address else {
        let mut own = own(registry, tls, protection);
        own.route = route(own.route.tls);
        own.headers = headers;
        own.capabilities = listed;
        return Ok(own);
    };
    let wrong = || HostsError::Url { path: path.to_owned(), text: address.to_owned() };
    let whole = match address.contains("://") {
        true => address.to_owned(),
        false => format!("{}://{address}", default_scheme(address, &tls, protection)),
    };
    let may_use_http = protection == Protection::Unverified && !address.contains("://");
    let tls = protected(tls, protection);
    let mut url = Url::parse(&whole).map_err(|_error| wrong())?;
    let has_user = !url.username().is_empty() || url.password().is_some();
    if !matches!(url.scheme(), "http" | "https") || has_user || url.query().is_some() {
        return Err(wrong());
    }
    // docker.io is a web site, but users often write it here for Docker Hub's API.
    if url.host_str() == Some(DOCKER_HUB) {
        url.set_host(Some(api_host(DOCKER_HUB))).map_err(|_error| wrong())?;
    }
    let host = authority(&url).ok_or_else(wrong)?;
    let mut at = url.path().trim_end_matches('/').to_owned();
    if !settings.override_path && !at.ends_with("/v2") {
        at.push_str("/v2");
    }
    let base = format!("{}://{host}{at}", url.scheme());
    let mirror_of = (host != api_host(registry)).then(|| registry.to_owned());
    Ok(Endpoint {
        base,
        host,
        capabilities: listed,
        route: route(tls),
        headers,
        mirror_of,
        may_use_http,
    })
}

/// Whether a text is the address of a proxy.
fn is_proxy(address: &Secret) -> bool {
    Url::parse(address.expose()).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https" | "socks5" | "socks5h")
            && url.host_str().is_some_and(|host| !host.is_empty())
            && matches!(url.path(), "" | "/")
            && url.query().is_none()
            && url.fragment().is_none()
    })
}

/// Returns the host of an address, with the port unless it is the scheme's default.
pub(super) fn authority(url: &Url) -> Option<String> {
    let host = url.host_str()?;
    Some(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")))
}

/// Reads certificates in Docker's layout: `*.crt` are CAs, `NAME.cert` and `NAME.key` are client certificates.
fn docker_certificates(directory: &Path) -> Result<Tls, HostsError> {
    let failed = |source| HostsError::Read { path: directory.to_owned(), source };
    let mut tls = Tls::default();
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        files.push(entry.map_err(failed)?.path());
    }
    files.sort();
    for file in files {
        match file.extension().and_then(std::ffi::OsStr::to_str) {
            Some("crt") => tls.ca.push(file),
            Some("cert") => {
                let key = file.with_extension("key");
                tls.client.push((file, Some(key)));
            }
            _ => {}
        }
    }
    Ok(tls)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(endpoints: &[Endpoint]) -> String {
        let lines = endpoints.iter().map(|endpoint| {
            let can = endpoint.capabilities.iter().map(|one| match one {
                Capability::Pull => 'p',
                Capability::Resolve => 'r',
                Capability::Push => 'w',
            });
            let mut line = format!("{} {}", endpoint.base, can.collect::<String>());
            if let Some(registry) = &endpoint.mirror_of {
                line += &format!(" of {registry}");
            }
            let Route { tls, dial_timeout, proxy } = &endpoint.route;
            for ca in &tls.ca {
                line += &format!(" ca {}", ca.display());
            }
            for (chain, key) in &tls.client {
                line += &format!(" client {} {key:?}", chain.display());
            }
            if tls.skip_verify {
                line += " unverified";
            }
            if let Some(duration) = dial_timeout {
                line += &format!(" in {duration:?}");
            }
            if let Some(proxy) = proxy {
                line += &format!(" by {}", proxy.expose());
            }
            for (name, value) in &endpoint.headers {
                line += &format!(" {name}={}", value.expose());
            }
            line
        });
        lines.collect::<Vec<_>>().join("; ")
    }

    fn check(registry: &str, text: &str, expect: &str) {
        let got = match parse(registry, Path::new("/d/hosts.toml"), text, Protection::Usual) {
            Ok(endpoints) => show(&endpoints),
            Err(error) => error.to_string(),
        };
        assert_eq!(got, expect, "{text}");
    }

    /// The files are those of containerd's `docs/hosts.md`, or similar to them.
    #[test]
    fn files() {
        check("docker.io", "", "https://registry-1.docker.io/v2 prw");
        check(
            "docker.io",
            "server = \"https://docker.io\"\n[host.\"https://z.example\"]\n[host.\"http://a.example:80\"]",
            "https://z.example/v2 pr of docker.io; http://a.example/v2 pr of docker.io; https://registry-1.docker.io/v2 prw",
        );
        check(
            "a.io",
            "[host.\"https://m\"]\ncapabilities = [\"pull\"]\nca = \"m.pem\"\nskip_verify = true\n\
             [host.\"https://m\".header]\nx-a = \"1\"\nx-b = [\"2\", \"3\"]",
            "https://m/v2 p of a.io ca /d/m.pem unverified x-a=1 x-b=2 x-b=3; https://a.io/v2 prw",
        );
        check(
            "a.io",
            "ca = [\"/x/a.pem\", \"b.pem\"]\nclient = [[\"c.cert\", \"c.key\"], [\"d.cert\", \"\"]]",
            "https://a.io/v2 prw ca /x/a.pem ca /d/b.pem client /d/c.cert Some(\"/d/c.key\") client /d/d.cert None",
        );
        check(
            "a.io",
            "client = [\"c.pem\", \"/x/d.pem\"]",
            "https://a.io/v2 prw client /d/c.pem None client /x/d.pem None",
        );
        check(
            "a.io",
            "dial_timeout = \"1s\"\nproxy = \"socks5h://u:p@x:1\"\n[host.\"https://m\"]\ndial_timeout = \"1m0.5s\"\n\
             proxy = \"http://y:3128/\"\n[host.\"https://n\"]\ndial_timeout = \"0s\"",
            "https://m/v2 pr of a.io in 60.5s by http://y:3128/; https://n/v2 pr of a.io; https://a.io/v2 prw in 1s by \
             socks5h://u:p@x:1",
        );
        check("a.io", "client = \"c.pem\"", "https://a.io/v2 prw client /d/c.pem None");
        check("a.io", "client = [[\"c.pem\", \"\"]]", "https://a.io/v2 prw client /d/c.pem None");
        check("a.io", "server = \"b.io/x\"", "https://b.io/x/v2 prw of a.io");
        check("a.io", "server = \"https://b.io/v2/\"", "https://b.io/v2 prw of a.io");
        check(
            "a.io",
            "server = \"https://b.io/p\"\noverride_path = true\ncapabilities = [\"pull\", \"resolve\"]",
            "https://b.io/p pr of a.io",
        );
        check("localhost:5000", "", "http://localhost:5000/v2 prw");
        check("localhost:5000", "ca = \"x\"", "https://localhost:5000/v2 prw ca /d/x");
        check("a.io", "server = \"http://a.io\"", "http://a.io/v2 prw");
        let capability =
            "/d/hosts.toml has the unknown capability \"fly\": use pull, resolve or push";
        check("a.io", "capabilities = [\"fly\"]", capability);
        let url = |text| {
            format!(
                "/d/hosts.toml names the host \"{text}\": write, for example, \
                 https://mirror.example.com"
            )
        };
        check("a.io", "server = \"ftp://a\"", &url("ftp://a"));
        check("a.io", "server = \"https://u:p@a\"", &url("https://u:p@a"));
        check("a.io", "[host.\"https://\"]", &url("https://"));
        for text in ["1", "-1s", "", "s", "1 s", "1d"] {
            let expect = format!(
                "/d/hosts.toml has the invalid dial_timeout \"{text}\": write, for example, 500ms \
                 or 1m30s"
            );
            check("a.io", &format!("dial_timeout = \"{text}\""), &expect);
        }
        for text in ["proxy:3128", "ftp://p", "http://", "http://p/x", "http://p?x", "//u:secret@p"]
        {
            let text = format!("[host.\"https://m\"]\nproxy = \"{text}\"");
            let expect = "/d/hosts.toml has an invalid proxy: write, for example, \
                http://proxy.example.com:3128 (or https, socks5 or socks5h)";
            check("a.io", &text, expect);
        }
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        let check = |text: &str, expect: &str| {
            let error =
                parse("a.io", Path::new("/d/hosts.toml"), text, Protection::Usual).unwrap_err();
            let error = error.to_string();
            assert!(error.starts_with("cannot use /d/hosts.toml: "), "{text}: {error}");
            assert!(error.contains(expect) && !error.contains('\n'), "{text}: {error}");
        };
        check("\nserver = ", "line 2: ");
        check("skip_verify = 1", "line 1: invalid type");
        check("skip_verfy = true", "unknown field `skip_verfy`");
        check("[host.\"https://m\"]\nca_file = \"x\"", "unknown field `ca_file`");
        check("[host.\"https://m\"]\nserver = \"x\"", "[host.\"https://m\"] has \"server\"");
        check("[host.\"https://m\".host.\"https://n\"]", "[host.\"https://m\"] has \"host\"");
    }

    #[test]
    fn schemes() {
        for (host, expect) in [
            ("a.io", "https"),
            ("localhost", "http"),
            ("localhost:5000", "http"),
            ("127.3.4.5:80", "http"),
            ("[::1]:5000", "http"),
            ("localhost:443", "https"),
            ("localhost.a.io", "https"),
            ("128.0.0.1", "https"),
            ("127.0.0.1.a.io", "https"),
            ("[::2]:5000", "https"),
        ] {
            assert_eq!(default_scheme(host, &Tls::default(), Protection::Usual), expect, "{host}");
            assert_eq!(default_scheme(host, &Tls::default(), Protection::None), "http", "{host}");
        }
    }

    /// An option decides about the registry itself, and never about its mirrors.
    #[test]
    fn protection_is_that_of_the_registry_itself() {
        let check = |registry: &str, text: &str, protection, expect: &str| {
            let got = match parse(registry, Path::new("/d/hosts.toml"), text, protection) {
                Ok(endpoints) => {
                    let http = endpoints.last().unwrap().may_use_http;
                    show(&endpoints) + if http { " or http" } else { "" }
                }
                Err(error) => error.to_string(),
            };
            assert_eq!(got, expect, "{text} {protection:?}");
        };
        let mirror = "[host.\"https://m\"]";
        let (verified, unverified) = (Protection::Verified, Protection::Unverified);
        check(
            "a.io",
            mirror,
            unverified,
            "https://m/v2 pr of a.io; https://a.io/v2 prw unverified or http",
        );
        check("localhost:5000", "", unverified, "https://localhost:5000/v2 prw unverified or http");
        check("localhost:5000", "", verified, "https://localhost:5000/v2 prw");
        check("a.io", "skip_verify = true", verified, "https://a.io/v2 prw");
        check(
            "a.io",
            "server = \"https://b.io\"",
            unverified,
            "https://b.io/v2 prw of a.io unverified",
        );
        check("a.io", "server = \"http://a.io\"", unverified, "http://a.io/v2 prw unverified");
        check("a.io", "server = \"b.io\"", Protection::None, "http://b.io/v2 prw of a.io");
        let http = "/d/hosts.toml names a.io by http://, but --tls-verify requires HTTPS: leave --tls-verify out, or \
            change the file";
        check("a.io", "server = \"http://a.io\"", verified, http);
    }

    #[test]
    fn folders() {
        let root = tempfile::tempdir().unwrap();
        let (user, system) = (root.path().join("user"), root.path().join("system"));
        let put = |path: PathBuf, text: &str| {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put(user.join("_default/hosts.toml"), "[host.\"https://user\"]");
        put(system.join("a.io/hosts.toml"), "[host.\"https://system\"]");
        put(system.join("b.io_5000_/hosts.toml"), "[host.\"https://underscored\"]");
        put(system.join("c.io/ca.crt"), "");
        put(system.join("c.io/me.cert"), "");
        let directories = [user, system.clone()];
        let bases = |registry: &str| {
            let endpoints = endpoints(registry, &directories, Protection::Usual).unwrap();
            endpoints.into_iter().map(|one| one.base).collect::<Vec<_>>()
        };
        assert_eq!(bases("a.io"), ["https://system/v2", "https://a.io/v2"]);
        assert_eq!(bases("b.io:5000"), ["https://underscored/v2", "https://b.io:5000/v2"]);
        assert_eq!(bases("z.io"), ["https://user/v2", "https://z.io/v2"]);
        let docker = endpoints("c.io", &directories, Protection::Usual).unwrap();
        assert_eq!(docker[0].route.tls.ca, [system.join("c.io/ca.crt")]);
        let pair = (system.join("c.io/me.cert"), Some(system.join("c.io/me.key")));
        assert_eq!(docker[0].route.tls.client, [pair]);
        assert_eq!(show(&endpoints("a.io", &[], Protection::None).unwrap()), "http://a.io/v2 prw");
    }
}
