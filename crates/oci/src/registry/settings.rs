//! Settings for registries, from the caller or the environment.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::credentials::{Keyring, Secret};
use super::hosts::Protection;
use super::peers::KnownPeers;
use super::retry::Pauses;

/// Settings for the client of a registry.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Directories like containerd's `certs.d`. The first one that contains the registry is used.
    pub hosts: Vec<PathBuf>,
    /// Sources of credentials.
    pub keyring: Keyring,
    /// Protection of connections to the registry itself. For a mirror, `hosts.toml` decides.
    pub protection: Protection,
    /// Number of further rounds over all hosts without progress.
    pub retries: u32,
    /// Pause before the second round. It doubles each time, and is reduced by up to a half at random.
    pub backoff: Duration,
    /// Maximum time without any bytes from a connection.
    pub stall: Duration,
    /// Time limit for all attempts to fetch a small document from one host. Each 16 KiB that arrive extend the
    /// remaining time by a second, up to this limit. For a layer, the limit applies to each attempt, and each KiB
    /// extends the remaining time by a second.
    pub patience: Duration,
    /// Callback for each pause before hosts are tried again.
    pub pauses: Pauses,
    /// Proxies for all hosts without a proxy in `hosts.toml`.
    pub proxies: Proxies,
    /// The mirrors that are known to be stores of Quire, or not to be.
    pub peers: Arc<KnownPeers>,
    /// Flag that cancels all calls soon after it is set.
    pub cancel: Arc<AtomicBool>,
}

/// Addresses of proxies, with `http://`, `https://`, `socks5://` or `socks5h://`. They may contain passwords.
/// Loopback addresses are always reached directly.
#[derive(Debug, Clone, Default)]
pub struct Proxies {
    /// Proxy for `http:` addresses.
    pub http: Option<Secret>,
    /// Proxy for `https:` addresses.
    pub https: Option<Secret>,
    /// Proxy for both.
    pub all: Option<Secret>,
    /// Hosts, domains and networks that are reached directly, separated by commas.
    pub except: String,
}

impl Default for Settings {
    /// The defaults, without files, credentials and proxies.
    fn default() -> Self {
        Self {
            hosts: Vec::new(),
            keyring: Keyring { helper_timeout: Duration::from_secs(60), ..Keyring::default() },
            protection: Protection::default(),
            retries: 5,
            backoff: Duration::from_millis(500),
            stall: Duration::from_secs(30),
            patience: Duration::from_secs(60),
            pauses: Pauses::default(),
            proxies: Proxies::default(),
            peers: Arc::default(),
            cancel: Arc::default(),
        }
    }
}

impl Settings {
    /// Returns the settings that other tools use for this user. `variable` returns environment variables.
    #[must_use]
    pub fn from_environment(user: u32, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let filled = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| filled(name).map(PathBuf::from);
        let home = path("HOME");
        let in_home = |rest: &str| home.as_ref().map(|home| home.join(rest));
        let configuration = path("XDG_CONFIG_HOME").or_else(|| in_home(".config"));
        let hosts = [
            configuration.as_ref().map(|folder| folder.join("quire/certs.d")),
            Some("/etc/quire/certs.d".into()),
            Some("/etc/containerd/certs.d".into()),
        ];
        let containers = match path("REGISTRY_AUTH_FILE") {
            Some(file) => vec![Some(file)],
            // Source: containers-auth.json(5), and for the default path containers/image, `pkg/docker/config`.
            None => vec![
                Some(match path("XDG_RUNTIME_DIR") {
                    Some(folder) => folder.join("containers/auth.json"),
                    None => format!("/run/containers/{user}/auth.json").into(),
                }),
                configuration.map(|folder| folder.join("containers/auth.json")),
            ],
        };
        let docker = path("DOCKER_CONFIG").or_else(|| in_home(".docker"));
        let docker = docker.map(|folder| folder.join("config.json"));
        let either = |name: &str| {
            let value = filled(&name.to_lowercase()).or_else(|| filled(name))?;
            value.into_string().ok()
        };
        // curl also accepts addresses without a scheme.
        let proxy = |name: &str| {
            let text = either(name)?;
            Some(Secret::new(if text.contains("://") { text } else { format!("http://{text}") }))
        };
        let default = Self::default();
        Self {
            hosts: hosts.into_iter().flatten().collect(),
            keyring: Keyring {
                files: containers.into_iter().chain([docker]).flatten().collect(),
                helpers: filled("PATH")
                    .map(|path| {
                        std::env::split_paths(&path).filter(|one| one.is_absolute()).collect()
                    })
                    .unwrap_or_default(),
                ..default.keyring
            },
            proxies: Proxies {
                http: proxy("HTTP_PROXY"),
                https: proxy("HTTPS_PROXY"),
                all: proxy("ALL_PROXY"),
                except: either("NO_PROXY").unwrap_or_default(),
            },
            ..default
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(variables: &[(&str, &str)], expect: &str) {
        let settings = Settings::from_environment(7, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        });
        let paths = |paths: &[PathBuf]| {
            paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
        };
        let Proxies { http, https, all, except } = &settings.proxies;
        let proxies = [http, https, all].map(|one| one.as_ref().map_or("-", Secret::expose));
        let got = format!(
            "{} | {} | {} | {} {except}",
            paths(&settings.hosts),
            paths(&settings.keyring.files),
            paths(&settings.keyring.helpers),
            proxies.join(" ")
        );
        assert_eq!(got.trim(), expect, "{variables:?}");
    }

    #[test]
    fn environments() {
        let system = "/etc/quire/certs.d /etc/containerd/certs.d";
        let run = "/run/containers/7/auth.json";
        check(&[], &format!("{system} | {run} |  | - - -"));
        check(
            &[("HOME", "/h"), ("PATH", "/a::b:/c"), ("XDG_RUNTIME_DIR", "/r")],
            &format!(
                "/h/.config/quire/certs.d {system} | /r/containers/auth.json /h/.config/containers/auth.json \
                 /h/.docker/config.json | /a /c | - - -"
            ),
        );
        check(
            &[("XDG_CONFIG_HOME", "/x"), ("REGISTRY_AUTH_FILE", "/f"), ("DOCKER_CONFIG", "/d")],
            &format!("/x/quire/certs.d {system} | /f /d/config.json |  | - - -"),
        );
        check(
            &[
                ("HTTP_PROXY", "http://upper"),
                ("http_proxy", "lower:8080"),
                ("HTTPS_PROXY", "socks5h://s:1080"),
                ("all_proxy", ""),
                ("NO_PROXY", "a.io,10.0.0.0/8"),
            ],
            &format!("{system} | {run} |  | http://lower:8080 socks5h://s:1080 - a.io,10.0.0.0/8"),
        );
        let settings = Settings::from_environment(7, |name| {
            name.ends_with("_PROXY").then(|| "http://u:secret@p".into())
        });
        assert_eq!(settings.proxies.http.as_ref().map(Secret::expose), Some("http://u:secret@p"));
        assert!(!format!("{:?}", settings.proxies.http).contains("secret"));
    }
}
