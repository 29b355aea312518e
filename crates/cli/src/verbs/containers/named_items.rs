//! The common part of the verbs `network` and `volume`, whose things have names and labels, and are used by containers:
//! options of single actions, filters, lists, and removal.

use std::collections::BTreeMap;

use anyhow::{anyhow, bail};
use clap::ValueEnum;
use regex_lite::Regex;
use serde::Serialize;

use crate::Answer;
use crate::output::list_filter::{ListFilters, any_matches};
use crate::output::{report, template};
use crate::session::context::Context;

/// A thing of the store that containers use by its name.
pub(crate) trait NamedItem {
    fn name(&self) -> &str;
    fn labels(&self) -> &BTreeMap<String, String>;
    /// Whether a container uses it, running or stopped.
    fn is_used(&self) -> bool;
}

/// Labels of a thing whose record is damaged.
pub(crate) fn no_labels() -> &'static BTreeMap<String, String> {
    static NONE: BTreeMap<String, String> = BTreeMap::new();
    &NONE
}

/// An option that only some actions of a verb have.
pub(crate) struct ActionOption<'a, A> {
    pub(crate) option: &'static str,
    pub(crate) is_given: bool,
    pub(crate) actions: &'a [A],
}

/// Refuses options that another action of the verb has.
pub(crate) fn check_options<A: ValueEnum + PartialEq>(
    verb: &str,
    action: &A,
    options: &[ActionOption<'_, A>],
) -> anyhow::Result<()> {
    for ActionOption { option, is_given, actions } in options {
        if *is_given && !actions.contains(action) {
            let names = actions.iter().filter_map(ValueEnum::to_possible_value);
            let names: Vec<_> =
                names.map(|it| format!("`quire {verb} {}`", it.get_name())).collect();
            bail!("{option} is for {}", names.join(" and "));
        }
    }
    Ok(())
}

/// The filters `name`, `dangling`, `label` and `label!`, and those that only the verb knows.
#[derive(Debug)]
pub(crate) struct ItemFilters {
    pub(crate) filters: ListFilters,
    names: Vec<Regex>,
    dangling: Vec<bool>,
}

impl ItemFilters {
    pub(crate) fn parse(texts: &[String], keys: &[&str]) -> anyhow::Result<Self> {
        let filters = ListFilters::parse(texts, keys)?;
        let names = filters.patterns("name")?;
        let dangling =
            |it| crate::args::boolean(it).map_err(|why| anyhow!("--filter dangling={it}: {why}"));
        let dangling = filters.values("dangling").map(dangling).collect::<anyhow::Result<_>>()?;
        Ok(Self { names, dangling, filters })
    }

    /// Whether an item fits the common filters.
    pub(crate) fn fit(&self, item: &impl NamedItem) -> bool {
        any_matches(&self.names, item.name())
            && (self.dangling.is_empty() || self.dangling.contains(&!item.is_used()))
            && self.filters.fit_labels(item.labels())
    }
}

/// Returns the items with these names, in the order of the names; a repeated name gives one item. `absent` makes the
/// error of an unknown name.
pub(crate) fn choose<T: NamedItem>(
    mut all: Vec<T>,
    names: &[String],
    absent: impl Fn(&str) -> anyhow::Error,
) -> anyhow::Result<Vec<T>> {
    let mut chosen: Vec<T> = Vec::new();
    for name in names {
        if chosen.iter().any(|it| it.name() == name) {
            continue;
        }
        let at = all.iter().position(|it| it.name() == name);
        chosen.push(all.swap_remove(at.ok_or_else(|| absent(name))?));
    }
    Ok(chosen)
}

/// Prints items by a template of `--format`, or as a list in JSON.
pub(crate) fn print_formatted<T: Serialize>(
    format: &str,
    all: &[T],
    titles: &[(&str, &str)],
    has_no_titles: bool,
) -> anyhow::Result<Answer> {
    if template::is_json(format) {
        report::json(&all)?;
        return Ok(Answer::Yes);
    }
    let rows = all.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    template::print_list(format, &rows, titles, has_no_titles)?;
    Ok(Answer::Yes)
}

/// Prints the names of removed items. `of_one` makes the report of `--json` on one of them.
pub(crate) fn tell_removed<T: Serialize>(
    context: &Context,
    names: Vec<String>,
    of_one: impl Fn(String) -> T,
) -> anyhow::Result<Answer> {
    if context.json {
        report::json(&names.into_iter().map(of_one).collect::<Vec<_>>())?;
        return Ok(Answer::Yes);
    }
    report::lines(names.iter().map(String::as_str))
}
