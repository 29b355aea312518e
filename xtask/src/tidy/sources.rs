//! Reads the sources of the crates for the tests in this directory, without comments and without the crates' own
//! tests.

use std::collections::BTreeSet;

use super::{text, tracked};

/// A source file of a crate.
pub(super) struct SourceFile {
    pub(super) path: String,
    pub(super) package: String,
    /// Modules below the crate's root; empty for the root itself.
    pub(super) module: Vec<String>,
    pub(super) text: String,
}

/// Returns all sources of the crates that are released.
pub(super) fn sources() -> Vec<SourceFile> {
    let mut found = Vec::new();
    let mut tests = BTreeSet::new();
    for path in tracked() {
        let parts: Vec<_> = path.trim_end_matches(".rs").split('/').collect();
        let ["crates", package, "src", inner @ ..] = &parts[..] else { continue };
        if !path.ends_with(".rs") || *package == "testing" {
            continue;
        }
        let is_folder = matches!(inner.last(), Some(&("mod" | "lib" | "main")));
        let module: Vec<_> = inner[..inner.len() - usize::from(is_folder)]
            .iter()
            .map(|it| (*it).to_owned())
            .collect();
        let (text, modules) = without_tests(&text(&path).unwrap_or_default());
        for name in modules {
            tests.insert((package.to_owned().to_owned(), [&module[..], &[name]].concat()));
        }
        let package = (*package).to_owned();
        found.push(SourceFile { path, package, module, text });
    }
    found.retain(|it| {
        let within = |depth| tests.contains(&(it.package.clone(), it.module[..depth].to_vec()));
        !(1..=it.module.len()).any(within)
    });
    found
}

/// Returns a source without comments and without items only for tests, and the modules in other files that are only
/// for tests.
fn without_tests(text: &str) -> (String, Vec<String>) {
    let lines = text.lines().filter(|it| !it.trim_start().starts_with("//"));
    let text: String = lines.flat_map(|it| [it, "\n"]).collect();
    let (mut kept, mut modules) = (String::new(), Vec::new());
    let mut rest = &text[..];
    while let Some((before, item)) = rest.split_once("#[cfg(test)]") {
        kept += before;
        let end = item.find([';', '{']).unwrap_or(item.len());
        let head = item[..end].trim();
        if item[end..].starts_with('{') && !head.contains("use ") {
            let indent = before.len() - before.trim_end_matches(' ').len();
            let close = format!("\n{}}}", " ".repeat(indent));
            rest = item.split_once(&close).map_or("", |it| it.1);
        } else {
            rest = item.split_once(';').map_or("", |it| it.1);
            let name = head.rsplit_once("mod ").map(|it| it.1.trim().to_owned());
            modules.extend(name);
        }
    }
    (kept + rest, modules)
}

#[test]
fn items_for_tests_are_left_out() {
    let text = "use a;\n// crate::b\n#[cfg(test)]\nuse crate::{c, d};\n#[cfg(test)]\nmod x;\nfn f() {\n    \
        #[cfg(test)]\n    {\n        crate::e();\n    }\n    g();\n}\n#[cfg(test)]\nmod tests {\n    h\n}\n";
    let (kept, modules) = without_tests(text);
    assert_eq!(kept.split_whitespace().collect::<Vec<_>>().join(" "), "use a; fn f() { g(); }");
    assert_eq!(modules, ["x"]);
}
