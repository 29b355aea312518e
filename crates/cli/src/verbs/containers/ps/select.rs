//! Chooses and sorts the containers that `ps` lists. Source: podman-ps(1), `--filter`, `--last` and `--sort`.

use std::os::unix::fs::MetadataExt as _;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use container::folder::RECORD;
use container::life::background;
use container::life::lookup::{KnownContainer, find_container};
use container::listed_settings::ListedSettings;
use regex_lite::Regex;
use store::{RefName, Store};

use crate::output::list_filter::{ListFilters, any_matches};
use crate::session::moment::{self, DurationFrom};
use crate::session::resolve::resolve;
use crate::verbs::containers::ps::row::{networks, state};

/// Keys of `--filter`.
pub(super) const KEYS: [&str; 16] = [
    "ancestor",
    "before",
    "command",
    "exited",
    "id",
    "label",
    "label!",
    "name",
    "network",
    "since",
    "status",
    "until",
    "volume",
    "pid",
    "restart-policy",
    "should-start-on-boot",
];

/// Values of the filter `status`: podman's words, docker's, and Quire's own.
const STATES: [&str; 14] = [
    "created",
    "running",
    "exited",
    "unknown",
    "paused",
    "initialized",
    "stopped",
    "stopping",
    "removing",
    "restarting",
    "dead",
    "unwatched",
    "lost",
    "damaged",
];

/// Values of the filter `restart-policy`. As in podman, `none` is `no`.
const POLICIES: [&str; 5] = ["no", "none", "always", "unless-stopped", "on-failure"];

/// Orders of a list of containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ContainerOrder {
    Command,
    /// Oldest first
    Created,
    Id,
    Image,
    Names,
    /// Newest first
    Runningfor,
    /// Size of the writable layer, smallest first
    Size,
    Status,
}

/// Filters of `ps`, ready to use.
pub(super) struct ContainerFilters {
    filters: ListFilters,
    names: Vec<Regex>,
    ids: Vec<Regex>,
    ancestors: Vec<Ancestor>,
    /// Containers must be older than one of these, if there are any.
    before: Vec<CreationTime>,
    /// Containers must be newer than one of these, if there are any.
    since: Vec<CreationTime>,
    exited: Vec<i32>,
    /// Latest time of creation, in nanoseconds since 1970.
    until: Option<i128>,
}

/// An image from which containers were made.
struct Ancestor {
    text: String,
    pattern: Regex,
    /// Id of the image that the store has by this name.
    image: Option<String>,
}

/// Time at which a container was made. Records have whole seconds, so the time of the record's file decides between
/// containers of the same second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CreationTime {
    seconds: i64,
    written: (i64, i64),
}

impl CreationTime {
    pub(super) fn of(known: &KnownContainer) -> Self {
        let written = std::fs::metadata(known.folder.join(RECORD));
        Self {
            seconds: known.record.as_ref().map_or(i64::MIN, |it| it.created.0),
            written: written.map_or((0, 0), |it| (it.mtime(), it.mtime_nsec())),
        }
    }

    fn nanoseconds(self) -> i128 {
        i128::from(self.seconds) * 1_000_000_000
    }
}

impl ContainerFilters {
    /// Prepares filters. `store` is `None` if there is none, so that there are no containers.
    pub(super) fn new(filters: ListFilters, store: Option<&Store>) -> anyhow::Result<Self> {
        for word in filters.values("status") {
            if !STATES.contains(&word) {
                bail!("--filter status={word}: use one of {}", STATES.join(", "));
            }
        }
        for word in filters.values("restart-policy") {
            if !POLICIES.contains(&word) {
                bail!("--filter restart-policy={word}: use one of {}", POLICIES.join(", "));
            }
        }
        if let Some(word) =
            filters.values("should-start-on-boot").find(|it| !["true", "false"].contains(it))
        {
            bail!("--filter should-start-on-boot={word}: use true or false");
        }
        let code = |text: &str| {
            let code = text.parse::<i32>();
            code.with_context(|| format!("--filter exited={text}: not an exit code"))
        };
        let exited = filters.values("exited").map(code).collect::<anyhow::Result<Vec<_>>>()?;
        let now = moment::now();
        let until = filters.values("until").map(|text| {
            moment::parse(text, now, DurationFrom::Past)
                .with_context(|| format!("--filter until={text}"))
        });
        let until: Vec<_> = until.collect::<anyhow::Result<_>>()?;
        let created = |key: &str| -> anyhow::Result<Vec<_>> {
            let Some(store) = store else { return Ok(Vec::new()) };
            let time = |name: &str| -> anyhow::Result<CreationTime> {
                Ok(CreationTime::of(&find_container(store, name)?))
            };
            filters.values(key).map(time).collect()
        };
        let ancestor = |text: &str| Ancestor::new(text, store);
        let ancestors = filters.values("ancestor").map(ancestor);
        let ancestors = ancestors.collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Self {
            names: filters.patterns("name")?,
            ids: filters.patterns("id")?,
            ancestors,
            before: created("before")?,
            since: created("since")?,
            exited,
            until: until.into_iter().max(),
            filters,
        })
    }

    /// Returns whether the filters name states, so that containers which do not run are listed.
    pub(super) fn name_states(&self) -> bool {
        self.filters.has("status")
    }

    /// Returns whether a filter needs [`ListedSettings`].
    pub(super) fn need_settings(&self) -> bool {
        ["label", "label!", "network", "volume", "restart-policy", "should-start-on-boot"]
            .iter()
            .any(|it| self.filters.has(it))
    }

    pub(super) fn fit(&self, known: &KnownContainer, settings: &ListedSettings) -> bool {
        let filters = &self.filters;
        let created = CreationTime::of(known);
        // As in podman and Docker, where a pattern may begin with a slash.
        (any_matches(&self.names, &known.id) || any_matches(&self.names, &format!("/{}", known.id)))
            && any_matches(&self.ids, &known.id)
            && filters.fits("status", |word| {
                let word = if word == "stopped" { "exited" } else { word };
                word == state(known) || word == known.status()
            })
            && (self.exited.is_empty()
                || known.code().is_some_and(|code| self.exited.contains(&code)))
            && (self.ancestors.is_empty() || self.ancestors.iter().any(|it| it.made(known)))
            && (self.before.is_empty() || self.before.iter().any(|it| created < *it))
            && (self.since.is_empty() || self.since.iter().any(|it| created > *it))
            && self.until.is_none_or(|until| created.nanoseconds() <= until)
            && filters.fits("command", |it| known.command().first().is_some_and(|args| args == it))
            && filters.fits("pid", |it| {
                let state = known.state.as_ref().filter(|_| known.is_running());
                state.is_some_and(|state| state.pid.to_string() == it)
            })
            && filters.fit_labels(&settings.labels)
            && filters.fits("network", |it| {
                settings.network.as_deref() == Some(it) || networks(settings).contains(&it)
            })
            && filters.fits("volume", |it| has_volume(settings, it))
            && filters.fits("restart-policy", |it| {
                settings.restart.name() == if it == "none" { "no" } else { it }
            })
            && filters.fits("should-start-on-boot", |it| {
                let is_stopped = background::is_stopped_by_user(&known.folder);
                settings.restart.wants_boot(is_stopped) == (it == "true")
            })
    }
}

/// Returns whether a container has a volume: a source, a path in the container, or `SOURCE:PATH`.
fn has_volume(settings: &ListedSettings, wanted: &str) -> bool {
    settings.mounts.iter().any(|mount| {
        let source = mount.source.as_deref();
        let is_both = wanted
            .split_once(':')
            .is_some_and(|(from, to)| source == Some(from) && mount.destination == to);
        is_both || source == Some(wanted) || mount.destination == wanted
    })
}

impl Ancestor {
    fn new(text: &str, store: Option<&Store>) -> anyhow::Result<Self> {
        let pattern = Regex::new(text)
            .with_context(|| format!("--filter ancestor={text}: not a regular expression"))?;
        let image = store.and_then(|store| resolve(store, text).ok());
        Ok(Self { text: text.to_owned(), pattern, image: image.map(|it| it.image.to_string()) })
    }

    fn made(&self, known: &KnownContainer) -> bool {
        let Some(record) = &known.record else { return false };
        let id = record.image.to_string();
        let is_digest = record.manifest.is_some_and(|it| it.to_string() == self.text);
        let is_id = self.text.len() >= Store::ID_DIGITS_MIN && id.starts_with(&self.text);
        let name = record.name.as_deref().unwrap_or_default();
        is_digest || is_id || self.image.as_ref() == Some(&id) || self.matches(name)
    }

    /// Returns whether the expression matches a name. As in podman, it also matches the name without the tag `latest`.
    fn matches(&self, name: &str) -> bool {
        let whole = name.parse::<RefName>().ok();
        let whole = whole.as_ref().map_or(name, RefName::as_str);
        let untagged = whole.strip_suffix(":latest");
        [Some(name), Some(whole), untagged]
            .into_iter()
            .flatten()
            .any(|it| self.pattern.is_match(it))
    }
}

/// Sorts containers. `written` returns the size of the writable layer.
pub(super) fn sort(
    found: &mut [KnownContainer],
    order: ContainerOrder,
    written: impl Fn(&KnownContainer) -> Option<u64>,
) {
    let image = |it: &KnownContainer| {
        let record = it.record.as_ref();
        record.map(|it| (it.name.clone(), it.image.to_string()))
    };
    // Containers that are equal stay in the order in which they were made.
    found.sort_by_cached_key(CreationTime::of);
    match order {
        ContainerOrder::Created => {}
        ContainerOrder::Runningfor => found.reverse(),
        ContainerOrder::Command => found.sort_by_cached_key(KnownContainer::command),
        ContainerOrder::Id | ContainerOrder::Names => found.sort_by(|a, b| a.id.cmp(&b.id)),
        ContainerOrder::Image => found.sort_by_cached_key(image),
        ContainerOrder::Size => found.sort_by_cached_key(written),
        ContainerOrder::Status => found.sort_by_key(|it| (state(it), it.code())),
    }
}

#[cfg(test)]
mod tests {
    use container::listed_settings::ListedMount;

    use super::*;

    #[test]
    fn volumes_are_found_by_both_ends() {
        let mount = |source: Option<&str>, destination: &str| ListedMount {
            source: source.map(str::to_owned),
            destination: destination.to_owned(),
        };
        let settings = ListedSettings {
            mounts: vec![mount(Some("data"), "/var/lib"), mount(None, "/tmp")],
            ..ListedSettings::default()
        };
        for (wanted, expect) in [
            ("data", true),
            ("/var/lib", true),
            ("data:/var/lib", true),
            ("/tmp", true),
            ("data:/tmp", false),
            ("dat", false),
            ("/var", false),
            ("", false),
        ] {
            assert_eq!(has_volume(&settings, wanted), expect, "{wanted}");
        }
    }

    #[test]
    fn images_are_found_by_expressions() {
        for (text, name, expect) in [
            ("debian", "docker.io/library/debian:latest", true),
            ("debian:latest", "debian", true),
            ("^debian$", "debian", true),
            ("^debian$", "debian:12", false),
            ("debian:1[23]", "debian:12", true),
            ("alpine", "debian", false),
        ] {
            let ancestor = Ancestor::new(text, None).unwrap();
            assert_eq!(ancestor.matches(name), expect, "{text} {name}");
        }
        assert!(Ancestor::new("(", None).is_err());
    }
}
