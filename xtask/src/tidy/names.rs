//! Checks that names can be found by a search, and that results say what they are.

use std::collections::BTreeMap;

use super::sources::sources;
use super::{GENERATED, text};

/// Maximum number of modules with a public type of the same name.
const MODULES_MAX: usize = 3;

/// Nested results, by file. An enum with a name for each case is clearer.
const NESTED_RESULTS: &[(&str, usize)] = &[
    ("crates/container/src/root/filestore.rs", 1),
    ("crates/store/src/check/check_error.rs", 1),
    ("crates/store/src/check/fsck.rs", 2),
    ("crates/store/src/check/fsck/data.rs", 1),
    ("crates/store/src/disk/room.rs", 1),
    ("crates/store/src/shelf/containers.rs", 1),
    ("crates/store/src/shelf/devices/catalog.rs", 2),
];

#[test]
fn public_types_say_their_kind() {
    let mut modules: BTreeMap<String, usize> = BTreeMap::new();
    let is_ours = |path: &str| !text(path).unwrap_or_default().starts_with(GENERATED);
    for source in sources().into_iter().filter(|it| is_ours(&it.path)) {
        for line in source.text.lines().filter(|it| it.starts_with("pub")) {
            let words: Vec<_> = line.split_whitespace().collect();
            if let [_, "struct" | "enum" | "trait" | "union" | "type", name, ..] = &words[..] {
                let end = name.find(|it: char| !it.is_alphanumeric()).unwrap_or(name.len());
                *modules.entry(name[..end].to_owned()).or_default() += 1;
            }
        }
    }
    modules.retain(|_, count| *count > MODULES_MAX);
    assert!(modules.is_empty(), "types with the name of others, and their number: {modules:?}");
}

#[test]
fn no_result_is_in_a_result() {
    let mut found = Vec::new();
    for source in sources() {
        let count = source.text.matches(concat!("Result<", "Result<")).count();
        if count > 0 {
            found.push((source.path, count));
        }
    }
    let listed: Vec<_> =
        NESTED_RESULTS.iter().map(|(path, it)| ((*path).to_owned(), *it)).collect();
    assert_eq!(found, listed, "left: the sources; right: NESTED_RESULTS in {}", file!());
}
