//! `--filter` of lists, in the form of podman: `KEY=VALUE`. Values of the same key are alternatives, except labels: a
//! listed item has all of them.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail};
use regex_lite::Regex;

/// The filters of a command line, whose keys are known.
#[derive(Debug, Default)]
pub(crate) struct ListFilters(Vec<ListFilter>);

#[derive(Debug)]
struct ListFilter {
    key: String,
    value: String,
}

impl ListFilters {
    /// Parses filters. Each key is one of `keys`.
    pub(crate) fn parse(texts: &[String], keys: &[&str]) -> anyhow::Result<Self> {
        let parse = |text: &String| {
            let Some((key, value)) = text.split_once('=') else {
                bail!("--filter {text}: write KEY=VALUE, with one of the keys {}", keys.join(", "))
            };
            if !keys.contains(&key) {
                bail!(
                    "--filter {text}: there is no filter \"{key}\": use one of {}",
                    keys.join(", ")
                )
            }
            Ok(ListFilter { key: key.to_owned(), value: value.to_owned() })
        };
        Ok(Self(texts.iter().map(parse).collect::<anyhow::Result<_>>()?))
    }

    /// Returns whether a filter has the key.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.iter().any(|it| it.key == key)
    }

    /// Returns the values of a key.
    pub(crate) fn values(&self, key: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |it| it.key == key).map(|it| it.value.as_str())
    }

    /// Returns whether there is no filter with the key, or one of its values is `is_so`.
    pub(crate) fn fits(&self, key: &str, is_so: impl Fn(&str) -> bool) -> bool {
        !self.has(key) || self.values(key).any(is_so)
    }

    /// Returns the values of a key as regular expressions, which match any part of a text.
    pub(crate) fn patterns(&self, key: &str) -> anyhow::Result<Vec<Regex>> {
        let pattern = |value: &str| {
            Regex::new(value)
                .with_context(|| format!("--filter {key}={value}: not a regular expression"))
        };
        self.values(key).map(pattern).collect()
    }

    /// Returns whether labels have all values of `label`, and none of `label!`. A value is `NAME` or `NAME=VALUE`.
    pub(crate) fn fit_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        let has = |wanted: &str| match wanted.split_once('=') {
            Some((name, value)) => labels.get(name).is_some_and(|it| it == value),
            None => labels.contains_key(wanted),
        };
        self.values("label").all(has) && !self.values("label!").any(has)
    }
}

/// Returns whether no pattern was given, or one of them matches.
pub(crate) fn any_matches(patterns: &[Regex], text: &str) -> bool {
    patterns.is_empty() || patterns.iter().any(|it| it.is_match(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filters(texts: &[&str]) -> anyhow::Result<ListFilters> {
        let texts: Vec<_> = texts.iter().map(|&it| it.to_owned()).collect();
        ListFilters::parse(&texts, &["label", "label!", "name"])
    }

    #[test]
    fn values_of_a_key_are_alternatives() {
        let all = filters(&["name=a", "name=b=c"]).unwrap();
        assert!(all.fits("name", |it| it == "b=c") && !all.fits("name", |it| it == "b"));
        assert!(all.fits("label", |_| false), "no filter");
        let patterns = filters(&["name=^we", "name=b$"]).unwrap().patterns("name").unwrap();
        for (text, expect) in [("web", true), ("we", true), ("db", true), ("awe", false)] {
            assert_eq!(any_matches(&patterns, text), expect, "{text}");
        }
        assert!(any_matches(&[], "x"));
    }

    /// Source: podman-ps(1), `--filter`.
    #[test]
    fn all_labels_must_fit() {
        let labels =
            [("a", "1"), ("b", "x=y"), ("c", "")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let labels = BTreeMap::from(labels);
        for (texts, expect) in [
            (&["label=a"][..], true),
            (&["label=a=1"], true),
            (&["label=a=2"], false),
            (&["label=a", "label=d"], false),
            (&["label=a", "label=b=x=y", "label=c="], true),
            (&["label!=d"], true),
            (&["label!=a"], false),
            (&["label!=a=2", "label=a"], true),
            (&[], true),
        ] {
            assert_eq!(filters(texts).unwrap().fit_labels(&labels), expect, "{texts:?}");
        }
    }

    #[test]
    fn other_filters_are_refused() {
        for (text, expect) in [
            ("name", "write KEY=VALUE, with one of the keys label, label!, name"),
            ("", "write KEY=VALUE"),
            ("nam=a", "there is no filter \"nam\": use one of label, label!, name"),
        ] {
            let error = filters(&[text]).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        }
        let error = filters(&["name=("]).unwrap().patterns("name").unwrap_err().to_string();
        assert!(error.contains("name=(") && error.contains("regular expression"), "{error}");
    }
}
