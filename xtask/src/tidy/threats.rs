//! Checks the threat model, which names a test for each barrier: each name must be that of a test, a module, a fuzz
//! target or a file, with its whole path.

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
    /// Full paths of modules and tests, which begin with the package.
    items: Vec<Vec<String>>,
}

/// Returns the path of the module that a file is, without `src`: `store::gc::sweep` for
/// `crates/store/src/gc/sweep.rs`.
fn module_of(file: &str) -> Vec<String> {
    let path = file.strip_prefix("crates/").unwrap_or(file).trim_end_matches(".rs");
    let mut parts: Vec<_> = path.split('/').collect();
    if matches!(parts.last(), Some(&("mod" | "lib" | "main"))) {
        parts.pop();
    }
    parts.into_iter().filter(|it| *it != "src").map(str::to_owned).collect()
}

/// Returns the modules and tests of a formatted source file, with their paths. Tests are functions with an attribute
/// that ends in `test`, and the names that a macro of the file gets, one per line. Other functions are left out.
fn items(file: &str, source: &str) -> Vec<Vec<String>> {
    let module = module_of(file);
    let mut items: Vec<_> = (1..=module.len()).map(|it| module[..it].to_vec()).collect();
    // Modules in the file that contain the line, each with its indentation.
    let mut inner: Vec<(usize, String)> = Vec::new();
    let (mut is_test, mut is_in_macro) = (false, false);
    for line in source.lines() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        if code == "}" && inner.last().is_some_and(|it| it.0 == indent) {
            inner.pop();
        }
        if code.starts_with("#[") {
            is_test |= code.contains("test]") || code.contains("::test(");
            continue;
        }
        let path = |last: &str| {
            let inner = inner.iter().map(|it| it.1.clone());
            module.iter().cloned().chain(inner).chain([last.to_owned()]).collect()
        };
        if indent == 0 {
            is_in_macro = code.ends_with("! {") && !code.starts_with("macro_rules!");
        } else if is_in_macro && code.chars().all(|it| it.is_ascii_alphanumeric() || it == '_') {
            items.push(path(code));
        }
        let name_after = |word: &str| {
            let (before, rest) = code.split_once(word)?;
            let is_item =
                before.split_whitespace().all(|it| it.starts_with("pub") || it == "async");
            let end = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_');
            is_item.then(|| &rest[..end.unwrap_or(rest.len())])
        };
        if let Some(name) = name_after("mod ") {
            items.push(path(name));
            if code.ends_with('{') {
                inner.push((indent, name.to_owned()));
            }
        } else if is_test && let Some(name) = name_after("fn ") {
            items.push(path(name));
        }
        if !code.is_empty() && !code.starts_with("//") {
            is_test = false;
        }
    }
    items
}

impl Known {
    fn add(&mut self, path: String, source: &str) {
        self.items.extend(items(&path, source));
        self.files.push(path);
    }

    /// Whether a name exists. It has the form `a/path`, `a/path*.rs`, `module::test`, `test_that_begins…` or
    /// `module::`. A path of modules may begin at any module, but all the rest of it must follow in this order.
    fn has(&self, name: &str) -> bool {
        if let Some((start, end)) = name.split_once('*') {
            let is_like = |it: &String| it.starts_with(start) && it.ends_with(end);
            return self.files.iter().any(is_like);
        }
        if name.contains('/') {
            let is_in = |it: &str| it.is_empty() || it.starts_with('/');
            return self.files.iter().any(|it| it.strip_prefix(name).is_some_and(is_in));
        }
        let parts: Vec<&str> = name.trim_end_matches("::").split("::").collect();
        let is_part = |actual: &String, part: &&str| match part.strip_suffix('…') {
            Some(start) => actual.starts_with(start),
            None => actual == part,
        };
        self.items.iter().any(|item| {
            let tail = item.len().checked_sub(parts.len()).map(|it| &item[it..]);
            tail.is_some_and(|it| it.iter().zip(&parts).all(|(actual, part)| is_part(actual, part)))
        })
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
    let source = r"
mod other;
mod inner {
    #[test]
    fn a_test_of_it() {}
    fn a_helper() {}
}
#[test]
fn outer() {}
each! {
    by_macro
}
fn b() {
    not_by_macro
}
";
    known.add("crates/a/tests/b.rs".to_owned(), source);
    known.add("crates/a/src/c/mod.rs".to_owned(), "");
    for name in [
        "a",
        "a::tests::b",
        "b::",
        "a::c",
        "b::other",
        "inner::a_test_of_it",
        "b::inner::a_test…",
        "b::outer",
        "b::by_macro",
        "crates/a/tests",
        "crates/a/tests/b*.rs",
    ] {
        assert!(known.has(name), "{name}");
    }
    for name in [
        "b::a_test_of_it",
        "inner::outer",
        "a::b",
        "c::b",
        "a_tests…",
        "b::a_test…",
        "a_helper",
        "not_by_macro",
        "other::a_test…",
        "d",
        "crates/b",
        "crates/a/test",
        "crates/a/tests/b*.txt",
    ] {
        assert!(!known.has(name), "{name}");
    }
}
