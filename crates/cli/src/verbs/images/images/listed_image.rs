//! Images in lists: filters, orders, and podman's words for `images --format`. Source: podman-images(1).

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use image::verity::ImageId;
use serde_json::{Value, json};
use store::{RefName, Reference, Store};
use transfer::StoredImage;

use crate::output::list_filter::ListFilters;
use crate::output::podman_text::{go_time, human_duration, human_size};
use crate::output::report;
use crate::session::moment::{self, DurationFrom};
use crate::session::resolve::resolve;

/// Keys of `--filter`.
pub(super) const KEYS: [&str; 10] = [
    "before",
    "dangling",
    "digest",
    "id",
    "label",
    "label!",
    "readonly",
    "reference",
    "since",
    "until",
];

/// Titles of fields that differ from their names.
pub(super) const TITLES: [(&str, &str); 2] = [("ID", "IMAGE ID"), ("ReadOnly", "R/O")];

/// Podman's word for a name, a tag or a digest that an image does not have.
const NONE: &str = "<none>";

/// Orders of a list of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageOrder {
    /// Newest first
    Created,
    Id,
    Repository,
    /// Smallest first
    Size,
    Tag,
}

/// A name with its image.
pub(super) struct ListedImage {
    pub(super) name: RefName,
    pub(super) reference: Reference,
    pub(super) store: Rc<Store>,
    config: OnceCell<Value>,
}

impl ListedImage {
    pub(super) fn new(name: RefName, reference: Reference, store: Rc<Store>) -> Self {
        Self { name, reference, store, config: OnceCell::new() }
    }

    /// Returns the image's configuration. Null if it has none that can be read.
    fn config(&self) -> &Value {
        self.config.get_or_init(|| {
            let load =
                |manifest| StoredImage::load(&self.store, &manifest).ok()?.config_json().ok();
            self.reference.manifest.and_then(load).unwrap_or_default()
        })
    }

    /// Returns the time at which the image was made, from its configuration.
    pub(super) fn made(&self) -> Option<i64> {
        report::seconds(self.config()["created"].as_str()?)
    }

    /// Returns the time at which the image was made, or else imported.
    fn created(&self) -> i64 {
        self.made().unwrap_or(self.reference.created.0)
    }

    fn labels(&self) -> BTreeMap<String, String> {
        let labels = self.config()["config"]["Labels"].as_object();
        let text =
            |(name, value): (&String, &Value)| Some((name.clone(), value.as_str()?.to_owned()));
        labels.into_iter().flatten().filter_map(text).collect()
    }

    fn digest(&self) -> Option<String> {
        self.reference.manifest.map(|it| it.to_string())
    }

    /// Whether the image has no name.
    fn is_dangling(&self) -> bool {
        self.name.is_unnamed()
    }

    /// Returns the name for people.
    pub(super) fn shown_name(&self) -> &str {
        if self.is_dangling() { NONE } else { self.name.as_str() }
    }

    /// Returns the names, of which an image without a name has none.
    fn names(&self) -> Vec<&str> {
        Some(self.name.as_str()).filter(|_| !self.is_dangling()).into_iter().collect()
    }

    /// Returns the name without its tag, and the tag.
    fn repository_and_tag(&self) -> (&str, &str) {
        if self.is_dangling() {
            return (NONE, NONE);
        }
        repository_and_tag(self.name.as_str())
    }

    /// Returns whether a pattern matches the name, as the filter `reference` does.
    pub(super) fn is_named(&self, pattern: &str) -> bool {
        !self.is_dangling() && matches(pattern, self.name.as_str(), self.digest().as_deref())
    }

    /// Returns the fields for templates, at the time `now` in seconds since 1970. `bytes` is the size.
    pub(super) fn fields(&self, is_whole: bool, now: i64, bytes: Option<u64>) -> Value {
        let (repository, tag) = self.repository_and_tag();
        let (id, created) = (self.reference.image.to_string(), self.created());
        let since = format!("{} ago", human_duration(now.saturating_sub(created)));
        let size = bytes.map_or_else(|| "?".to_owned(), |it| human_size(it, " "));
        let shown_id = if is_whole { id.clone() } else { report::short(&id) };
        let digest = self.digest();
        let named = digest.as_ref().filter(|_| !self.is_dangling());
        let by_digest = named.map(|digest| format!("{repository}@{digest}"));
        json!({
            "ID": shown_id,
            "Id": id,
            "Repository": repository,
            "Tag": tag,
            "Digest": digest.unwrap_or_else(|| NONE.to_owned()),
            "Created": since,
            "CreatedSince": since,
            "CreatedAt": go_time(created),
            "CreatedTime": go_time(created),
            "Size": size,
            "VirtualSize": size,
            "Labels": self.labels(),
            "Names": self.names(),
            "RepoTags": self.names(),
            "RepoDigests": by_digest.into_iter().collect::<Vec<_>>(),
            "Arch": self.config()["architecture"].as_str().unwrap_or_default(),
            "Os": self.config()["os"].as_str().unwrap_or_default(),
            "ReadOnly": !self.store.is_own(),
            "Dangling": self.is_dangling(),
            "ParentId": "",
        })
    }
}

/// Divides a name at its tag. A colon before a slash is that of a port.
fn repository_and_tag(name: &str) -> (&str, &str) {
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, tag),
        _ => (name, "latest"),
    }
}

/// Returns the objects of `--format json`: one for each image and manifest, with all of its listed names. `bytes` returns
/// the size.
pub(super) fn json_of(
    all: &[ListedImage],
    mut bytes: impl FnMut(&ListedImage) -> Option<u64>,
) -> Vec<Value> {
    let mut groups: Vec<Vec<&ListedImage>> = Vec::new();
    let mut places: BTreeMap<(ImageId, Option<String>), usize> = BTreeMap::new();
    for it in all {
        let place = *places.entry((it.reference.image, it.digest())).or_insert(groups.len());
        match groups.get_mut(place) {
            Some(group) => group.push(it),
            None => groups.push(vec![it]),
        }
    }
    let object = |group: Vec<&ListedImage>| {
        let first = group.first()?;
        let digests = group
            .iter()
            .filter(|it| !it.is_dangling())
            .filter_map(|it| Some(format!("{}@{}", it.repository_and_tag().0, it.digest()?)));
        let names: Vec<_> = group.iter().flat_map(|it| it.names()).collect();
        let size = bytes(first);
        Some(json!({
            "Id": first.reference.image.to_string(),
            "ParentId": "",
            "RepoTags": names,
            "RepoDigests": digests.collect::<Vec<_>>(),
            "Names": names,
            "Digest": first.digest(),
            "Created": first.created(),
            "CreatedAt": report::rfc3339(first.created()),
            "Size": size,
            "VirtualSize": size,
            "SharedSize": 0,
            "Labels": first.labels(),
            "Arch": first.config()["architecture"],
            "Os": first.config()["os"],
            "ReadOnly": !first.store.is_own(),
            "Dangling": first.is_dangling(),
        }))
    };
    groups.into_iter().filter_map(object).collect()
}

/// Filters of `images`, ready to use.
pub(super) struct ImageFilters {
    filters: ListFilters,
    /// Images must be older than one of these times, if there are any.
    before: Vec<i64>,
    /// Images must be newer than one of these times, if there are any.
    since: Vec<i64>,
    until: Option<i128>,
    dangling: Option<bool>,
    readonly: Option<bool>,
}

impl ImageFilters {
    /// Prepares filters of all images.
    pub(super) fn new(filters: ListFilters, all: &[ListedImage]) -> anyhow::Result<Self> {
        let now = moment::now();
        let until = filters.values("until").map(|text| {
            moment::parse(text, now, DurationFrom::Past)
                .with_context(|| format!("--filter until={text}"))
        });
        let until = until.collect::<anyhow::Result<Vec<_>>>()?.into_iter().max();
        let times = |key: &str| {
            filters.values(key).map(|name| created(all, name)).collect::<anyhow::Result<Vec<_>>>()
        };
        let (before, since) = (times("before")?, times("since")?);
        let flag = |key: &str| -> anyhow::Result<Option<bool>> {
            match filters.values(key).last() {
                None => Ok(None),
                Some("true" | "1") => Ok(Some(true)),
                Some("false" | "0") => Ok(Some(false)),
                Some(other) => bail!("--filter {key}={other}: use true or false"),
            }
        };
        let (dangling, readonly) = (flag("dangling")?, flag("readonly")?);
        Ok(Self { filters, before, since, until, dangling, readonly })
    }

    /// Returns whether an image fits all filters.
    pub(super) fn fit(&self, image: &ListedImage) -> bool {
        let filters = &self.filters;
        let id = image.reference.image.to_string();
        let needs_time = !self.before.is_empty() || !self.since.is_empty() || self.until.is_some();
        // Reading the configuration takes longer than all other filters.
        let created = if needs_time { image.created() } else { 0 };
        let needs_labels = filters.has("label") || filters.has("label!");
        self.dangling.is_none_or(|it| it == image.is_dangling())
            && self.readonly.is_none_or(|it| it != image.store.is_own())
            && filters.fits("id", |it| id.starts_with(it))
            && filters.fits("digest", |it| image.digest().is_some_and(|has| has.starts_with(it)))
            && filters.fits("reference", |it| image.is_named(it))
            && (self.before.is_empty() || self.before.iter().any(|it| created < *it))
            && (self.since.is_empty() || self.since.iter().any(|it| created > *it))
            && self.until.is_none_or(|it| i128::from(created) * 1_000_000_000 <= it)
            && (!needs_labels || filters.fit_labels(&image.labels()))
    }
}

/// Returns the time at which a named image was made.
fn created(all: &[ListedImage], name: &str) -> anyhow::Result<i64> {
    let mut stores: Vec<&Rc<Store>> = Vec::new();
    for image in all {
        if !stores.iter().any(|it| Rc::ptr_eq(it, &image.store)) {
            stores.push(&image.store);
        }
    }
    let mut error = None;
    for store in stores {
        match resolve(store, name) {
            Ok(found) => {
                let is_it = |it: &&ListedImage| it.reference.image == found.image;
                if let Some(image) = all.iter().find(is_it) {
                    return Ok(image.created());
                }
            }
            Err(absent) => error = Some(absent),
        }
    }
    match error {
        Some(error) => Err(error.into()),
        None => bail!("there is no image \"{name}\""),
    }
}

/// Returns whether a pattern matches a name: the whole name or its end after a slash, with its tag, with the digest of
/// its manifest, or without both. `*` matches no slash.
fn matches(pattern: &str, name: &str, digest: Option<&str>) -> bool {
    let (repository, tag) = repository_and_tag(name);
    let starts = repository.match_indices('/').map(|(at, _)| at + 1);
    let mut ends = std::iter::once(0).chain(starts).map(|at| &repository[at..]);
    let is_match = |text: &str| fast_glob::glob_match(pattern, text);
    ends.any(|end| {
        is_match(end)
            || is_match(&format!("{end}:{tag}"))
            || digest.is_some_and(|digest| is_match(&format!("{end}@{digest}")))
    })
}

/// Sorts images. `bytes` returns the size.
pub(super) fn sort(
    all: &mut [ListedImage],
    order: ImageOrder,
    mut bytes: impl FnMut(&ListedImage) -> Option<u64>,
) {
    match order {
        ImageOrder::Created => all.sort_by_cached_key(|it| std::cmp::Reverse(it.created())),
        ImageOrder::Id => all.sort_by_cached_key(|it| it.reference.image.to_string()),
        ImageOrder::Repository => all.sort_by_cached_key(|it| it.repository_and_tag().0.to_owned()),
        ImageOrder::Tag => all.sort_by_cached_key(|it| it.repository_and_tag().1.to_owned()),
        ImageOrder::Size => all.sort_by_cached_key(|it| bytes(it)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source: podman-images(1), `--filter reference`, and the tests of containers/common, `libimage/filters_test.go`.
    #[test]
    fn references_match_ends_of_names() {
        let name = "docker.io/library/debian:12";
        let digest = "sha256:00";
        for (pattern, expect) in [
            ("debian", true),
            ("debian:12", true),
            ("library/debian", true),
            ("docker.io/library/debian:12", true),
            ("deb*", true),
            ("*", true),
            ("*/debian", true),
            ("docker.io/*", false),
            ("docker.io/library/*", true),
            ("docker.io/**", true),
            ("debian:1?", true),
            ("debian@sha256:00", true),
            ("debian:13", false),
            ("ebian", false),
            ("io/library/debian", false),
            ("", false),
        ] {
            assert_eq!(matches(pattern, name, Some(digest)), expect, "{pattern}");
        }
        assert!(!matches("debian@sha256:00", name, None));
    }

    #[test]
    fn names_are_divided_at_the_tag() {
        for (name, expect) in [
            ("a:1", ("a", "1")),
            ("localhost:5000/a/b:latest", ("localhost:5000/a/b", "latest")),
            ("localhost:5000/a", ("localhost:5000/a", "latest")),
            ("a", ("a", "latest")),
        ] {
            assert_eq!(repository_and_tag(name), expect);
        }
    }
}
