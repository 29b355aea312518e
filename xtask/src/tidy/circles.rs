//! Modules have one direction: what a module uses does not use it, whatever is between.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{Source, sources};

/// Who uses whom.
type Graph = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_circle_among_top_level_modules() {
    let all = sources();
    let packages: BTreeSet<_> = all.iter().map(|it| it.package.as_str()).collect();
    let mut found: Vec<(&str, String)> = Vec::new();
    for package in packages {
        let own: Vec<_> = all.iter().filter(|it| it.package == package).collect();
        found.extend(circles(&graph(&own)).into_iter().map(|it| (package, it.join(" "))));
    }
    assert!(found.is_empty(), "modules that lead to each other, by crate: {found:#?}");
}

fn graph(sources: &[&Source]) -> Graph {
    let modules: BTreeSet<_> = sources.iter().filter_map(|it| it.module.first()).collect();
    let root = sources.iter().find(|it| it.module.is_empty());
    let exported = root.map(|it| exported(&it.text)).unwrap_or_default();
    let mut graph = Graph::new();
    for source in sources {
        let Some(top) = source.module.first() else { continue };
        let uses = graph.entry(top.clone()).or_default();
        for depth in 0..=source.module.len() {
            let prefix = match depth {
                0 => String::from("crate::"),
                depth => "super::".repeat(depth),
            };
            // `super` is the root only as often as the module is deep.
            if depth != 0 && depth != source.module.len() {
                continue;
            }
            for name in names_after(&source.text, &prefix) {
                let module = exported.get(&name).unwrap_or(&name);
                if module != top && modules.contains(module) {
                    uses.insert(module.clone());
                }
            }
        }
    }
    graph
}

/// The names that follow a path's beginning, in braces too.
fn names_after(text: &str, prefix: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, _) in text.match_indices(prefix) {
        if text[..at].ends_with(|it: char| it == ':' || it == '_' || it.is_alphanumeric()) {
            continue;
        }
        names.extend(first_names(&text[at + prefix.len()..]));
    }
    names
}

/// The first name of each path in a tree of `use`.
fn first_names(tree: &str) -> Vec<String> {
    let name = |it: &str| {
        let it = it.trim_start();
        it.split(|it: char| it != '_' && !it.is_alphanumeric())
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let Some(inner) = tree.strip_prefix('{') else { return vec![name(tree)] };
    let (mut depth, mut names, mut start) = (0, vec![name(inner)], true);
    for (at, letter) in inner.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => start = false,
            _ => {}
        }
        if !std::mem::replace(&mut start, true) {
            names.push(name(&inner[at + 1..]));
        }
    }
    names
}

/// What the root takes out of modules, and the module of each.
fn exported(root: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for statement in root.split("use ").skip(1) {
        let path = statement.split(';').next().unwrap_or_default().trim();
        let path = path.trim_start_matches("self::").trim_start_matches("crate::");
        let Some((module, rest)) = path.split_once("::") else { continue };
        for item in rest.split([',', '{', '}']) {
            let name = item.rsplit(" as ").next().unwrap_or(item).rsplit("::").next();
            found.insert(name.unwrap_or_default().trim().to_owned(), module.to_owned());
        }
    }
    // What stands between the last comma and its brace is no name, but `super::*` would be taken for it.
    found.remove("");
    found
}

/// What a module uses, and what that uses, and so on.
fn reached<'a>(graph: &'a Graph, from: &'a String) -> BTreeSet<&'a String> {
    let mut seen = BTreeSet::new();
    let mut next = vec![from];
    while let Some(module) = next.pop() {
        next.extend(graph.get(module).into_iter().flatten().filter(|it| seen.insert(*it)));
    }
    seen
}

/// Sets of modules each of which leads to each other.
fn circles(graph: &Graph) -> Vec<Vec<String>> {
    let reach: BTreeMap<_, _> = graph.keys().map(|it| (it, reached(graph, it))).collect();
    let mut circles = BTreeSet::new();
    for (module, seen) in &reach {
        if seen.contains(module) {
            let both =
                seen.iter().filter(|it| reach.get(**it).is_some_and(|it| it.contains(module)));
            circles.insert(both.map(|it| (*it).clone()).collect::<Vec<_>>());
        }
    }
    circles.into_iter().collect()
}

#[test]
fn circles_are_found() {
    let source = |module: &str, text: &str| Source {
        path: String::new(),
        package: String::new(),
        module: module.split("::").filter(|it| !it.is_empty()).map(String::from).collect(),
        text: text.to_owned(),
    };
    let sources = [
        source("", "mod a;\npub use self::c::{Exported, Other as Renamed};"),
        source("a", "use crate::{b::{X, Y}, d};"),
        source("b::inner", "use super::super::Renamed; super::within();"),
        source("c", "fn f() { super::a::g() }"),
        source("d", "use super::e; use crate::d::own;"),
    ];
    let graph = graph(&sources.each_ref());
    assert_eq!(circles(&graph), [["a", "b", "c"]]);
}
