//! Checks the texts of errors.

use super::sources::sources;

/// An error is printed with its sources. If its text contained its source, the source would be printed twice.
#[test]
fn no_error_shows_its_source() {
    let mut found = Vec::new();
    for source in sources() {
        found.extend(twice(&source.text).into_iter().map(|it| format!("{}: {it}", source.path)));
    }
    assert_eq!(found, Vec::<String>::new());
}

/// Returns the texts of variants and structs that show a field which is their source.
fn twice(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (start, _) in source.match_indices("#[error(") {
        let rest = &source[start..];
        let Some((text, item)) = rest.split_once(")]") else { continue };
        let end = item.find("#[error(").unwrap_or(item.len());
        let item = &item[..end];
        let shows =
            |name: &str| [":", "}"].iter().any(|it| text.contains(&format!("{{{name}{it}")));
        let marks = ["#[source]", "#[from]"];
        let fields = marks.iter().flat_map(|mark| item.split(mark).skip(1));
        let names = fields.filter_map(|it| Some(it.split_once(':')?.0.trim()));
        let is_tuple = marks.iter().any(|mark| item.contains(&format!("({mark}")));
        if shows("source") || is_tuple && shows("0") || names.into_iter().any(shows) {
            found.push(text.to_owned());
        }
    }
    found
}

#[test]
fn sources_in_texts_are_found() {
    let check = |source: &str, count: usize| assert_eq!(twice(source).len(), count, "{source}");
    check("#[error(\"cannot: {source}\")] A { source: E }", 1);
    check("#[error(\"cannot: {0}\")]\nA(#[from] E),", 1);
    check("#[error(\"cannot: {why:?}\")] A { #[source] why: E }", 1);
    check("#[error(\"cannot {0}\")] A(P, #[source] E), #[error(\"b\")] B(#[source] E)", 0);
    check("#[error(\"cannot\")] A { source: E }", 0);
}
