//! Checks that no folder of a crate has so many files that a reader cannot survey them.

use std::collections::BTreeMap;

use super::tracked;

/// Maximum number of files in a folder, including `mod.rs`.
const FILES_MAX: usize = 20;

#[test]
fn folders_of_crates_have_few_files() {
    let mut folders: BTreeMap<String, usize> = BTreeMap::new();
    let is_source =
        |it: &str| it.starts_with("crates/") && it.contains("/src/") && it.ends_with(".rs");
    for path in tracked().iter().filter(|it| is_source(it)) {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *folders.entry(folder.to_owned()).or_default() += 1;
    }
    folders.retain(|_, count| *count > FILES_MAX);
    assert!(folders.is_empty(), "group related modules in folders below: {folders:?}");
}
