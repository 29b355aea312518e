//! Checks that files of a crate depend on each other in one direction, so that there are no cycles.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{SourceFile, sources};

/// The modules that each module uses. Each module is a file, named by its path below the crate's root.
type Graph<'a> = BTreeMap<&'a [String], BTreeSet<&'a [String]>>;

#[test]
fn files_have_no_circles() {
    let all = sources();
    let packages: BTreeSet<_> = all.iter().map(|it| it.package.as_str()).collect();
    let mut found: Vec<(&str, String)> = Vec::new();
    for package in packages {
        let own: Vec<_> = all.iter().filter(|it| it.package == package).collect();
        found.extend(circles(&graph(&own)).into_iter().map(|it| (package, it.join(" "))));
    }
    assert_eq!(found, [], "files that lead to each other, by crate");
}

/// Returns the edges of paths that begin with `crate`, `self` or `super`. A crate's root uses all modules and is left
/// out.
fn graph<'a>(sources: &[&'a SourceFile]) -> Graph<'a> {
    let modules: BTreeSet<&[String]> = sources.iter().map(|it| &it.module[..]).collect();
    let mut graph = Graph::new();
    for source in sources {
        let uses = graph.entry(&source.module).or_default();
        for path in paths(source) {
            let longest = (1..=path.len()).rev().find_map(|it| modules.get(&path[..it]));
            uses.extend(longest.filter(|it| **it != source.module));
        }
    }
    graph
}

/// Returns the paths in a source, from the crate's root on.
fn paths(source: &SourceFile) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for start in ["crate", "self", "super"] {
        for (at, _) in source.text.match_indices(start) {
            let rest = &source.text[at + start.len()..];
            let is_name = |it: char| it == '_' || it == ':' || it.is_alphanumeric();
            if source.text[..at].ends_with(is_name) || !rest.starts_with("::") {
                continue;
            }
            let mut base = match start {
                "crate" => Vec::new(),
                _ => source.module.clone(),
            };
            if start == "super" {
                base.pop();
            }
            expand(&rest[2..], &base, &mut found);
        }
    }
    found
}

/// Expands a path or a tree of `use`. Returns the text after it.
fn expand<'t>(tree: &'t str, base: &[String], found: &mut Vec<Vec<String>>) -> &'t str {
    let tree = tree.trim_start();
    if let Some(mut rest) = tree.strip_prefix('{') {
        loop {
            rest = expand(rest, base, found).trim_start();
            rest = match rest.strip_prefix(',') {
                Some(rest) => rest,
                None => return rest.strip_prefix('}').unwrap_or(rest),
            };
        }
    }
    let end = tree.find(|it: char| it != '_' && !it.is_alphanumeric()).unwrap_or(tree.len());
    let (name, rest) = tree.split_at(end);
    let mut path = base.to_vec();
    match name {
        "super" => drop(path.pop()),
        "self" | "" => {}
        _ => path.push(name.to_owned()),
    }
    if let Some(rest) = rest.strip_prefix("::") {
        return expand(rest, &path, found);
    }
    found.push(path);
    match rest.strip_prefix(" as ") {
        Some(renamed) => renamed.trim_start_matches(|it: char| it == '_' || it.is_alphanumeric()),
        None => rest,
    }
}

/// Returns the modules that a module uses, directly or through others.
fn reached<'a>(graph: &Graph<'a>, from: &'a [String]) -> BTreeSet<&'a [String]> {
    let mut seen = BTreeSet::new();
    let mut next = vec![from];
    while let Some(module) = next.pop() {
        next.extend(graph.get(module).into_iter().flatten().filter(|it| seen.insert(**it)));
    }
    seen
}

/// Returns the sets of modules that depend on each other.
fn circles(graph: &Graph<'_>) -> Vec<Vec<String>> {
    let reach: BTreeMap<_, _> = graph.keys().map(|it| (*it, reached(graph, it))).collect();
    let mut circles = BTreeSet::new();
    for (module, seen) in &reach {
        if seen.contains(module) {
            let both =
                seen.iter().filter(|it| reach.get(**it).is_some_and(|it| it.contains(module)));
            circles.insert(both.map(|it| it.join("::")).collect::<Vec<_>>());
        }
    }
    circles.into_iter().collect()
}

#[test]
fn circles_are_found() {
    let source = |module: &str, text: &str| SourceFile {
        path: String::new(),
        package: String::new(),
        module: module.split("::").filter(|it| !it.is_empty()).map(String::from).collect(),
        text: text.to_owned(),
    };
    let sources = [
        source("", "mod a;\npub use self::c::Exported;"),
        source("a", "use crate::{b::inner::{X as Y, Z}, d};"),
        source("b", "mod inner; use self::inner::X;"),
        source("b::inner", "use super::super::c::{self, f as _};"),
        source("c", "fn f() { super::a::g() }"),
        source("d", "use super::e; use crate::d::own; fn f() { superb::a() }"),
        source("e", "use super::d::{Deep, own};"),
    ];
    let graph = graph(&sources.each_ref());
    assert_eq!(circles(&graph), [vec!["a", "b::inner", "c"], vec!["d", "e"]]);
}
