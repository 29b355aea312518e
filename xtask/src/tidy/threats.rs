//! Checks the threat model, which names a test for each barrier: each name must be that of a test, a module, a fuzz
//! target or a file.

use std::collections::BTreeSet;

use super::{text, tracked};

const PAGE: &str = "docs/threat-model.md";

/// Returns the names in backquotes in the column "shown by", row by row.
fn shown_by(page: &str) -> Vec<String> {
    let rows = page.lines().filter(|it| it.starts_with('|'));
    let columns = rows.filter_map(|it| it.trim_end_matches(['|', ' ']).rsplit_once(" | "));
    let named = columns.flat_map(|(_, column)| column.split('`').skip(1).step_by(2));
    named.map(str::to_owned).collect()
}

/// The names that exist.
#[derive(Default)]
struct Known {
    files: Vec<String>,
    functions: BTreeSet<String>,
    /// Modules, packages and targets, by the names of files and directories.
    modules: BTreeSet<String>,
}

impl Known {
    fn add(&mut self, path: String, source: &str) {
        let is_of_name = |it: char| it.is_ascii_alphanumeric() || it == '_';
        let names = |word: &str| -> Vec<String> {
            let behind = source.split(word).skip(1);
            let names = behind.map(|it| it.chars().take_while(|it| is_of_name(*it)).collect());
            names.collect()
        };
        self.functions.extend(names("fn "));
        self.modules.extend(names("mod "));
        self.modules.extend(path.split('/').map(|it| it.trim_end_matches(".rs").to_owned()));
        self.files.push(path);
    }

    /// Whether a name exists. It has the form `a/path*`, `module::test`, `test_that_begins…` or `module`.
    fn has(&self, name: &str) -> bool {
        if name.contains('/') {
            let start = name.split('*').next().unwrap_or_default();
            return self.files.iter().any(|it| it.starts_with(start));
        }
        let mut parts = name.trim_end_matches("::").rsplit("::");
        let last = parts.next().unwrap_or_default();
        let is_known = match last.strip_suffix('…') {
            Some(start) => self.functions.iter().any(|it| it.starts_with(start)),
            None => self.functions.contains(last) || self.modules.contains(last),
        };
        is_known && parts.all(|it| self.modules.contains(it))
    }
}

#[test]
fn what_the_threat_model_names_is_there() {
    let mut known = Known::default();
    for path in tracked().into_iter().filter(|it| it.ends_with(".rs")) {
        let source = text(&path).unwrap_or_default();
        known.add(path, &source);
    }
    let named = shown_by(&text(PAGE).expect("the page is there"));
    assert!(named.len() > 50, "{} names", named.len());
    let absent: Vec<_> = named.iter().filter(|it| !known.has(it)).collect();
    assert_eq!(absent, Vec::<&String>::new());
}

#[test]
fn other_names_are_absent() {
    let page =
        "| who | what | `no` | `a::b` tests, fuzz `c` |\n|---|---|\ntext `d` | `e`\n| x | `f…` |";
    assert_eq!(shown_by(page), ["a::b", "c", "f…"]);
    let mut known = Known::default();
    known.add("crates/a/tests/b.rs".to_owned(), "mod inner { fn a_test_of_it() {} }");
    for name in [
        "a::b",
        "b::",
        "inner::a_test_of_it",
        "b::a_test…",
        "crates/a/tests",
        "crates/a/tests/b*.rs",
    ] {
        assert!(known.has(name), "{name}");
    }
    for name in ["b::a_test", "a_tests…", "other::a_test…", "c", "crates/b"] {
        assert!(!known.has(name), "{name}");
    }
}
