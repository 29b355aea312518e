//! `quire --version`.

use crate::Place;

/// Returns whether the text is `quire VERSION`, or `quire VERSION (COMMIT)` with 12 digits, and `-dirty` if the build
/// had changed files.
fn is_version(text: &str) -> bool {
    let Some(rest) = text.strip_prefix(concat!("quire ", env!("CARGO_PKG_VERSION"))) else {
        return false;
    };
    let commit = rest.strip_prefix(" (").and_then(|it| it.strip_suffix(")\n"));
    let hash = commit.map(|it| it.strip_suffix("-dirty").unwrap_or(it));
    rest == "\n"
        || hash.is_some_and(|it| it.len() == 12 && it.bytes().all(|it| it.is_ascii_hexdigit()))
}

/// The text is the same before clap starts as from clap.
#[test]
fn the_version_may_name_a_commit() {
    let place = Place::new();
    let text = place.out("--version");
    assert!(is_version(&text), "{text}");
    for line in ["-V", "--version -V", "-V images", "--verbose --version"] {
        assert_eq!(place.out(line), text, "{line}");
    }
    assert!(place.out("images --version").starts_with("quire-images "));
}

#[test]
fn other_versions_are_found() {
    let version = env!("CARGO_PKG_VERSION");
    let check = |rest: &str, expected| {
        assert_eq!(is_version(&format!("quire {version}{rest}")), expected, "{rest:?}");
    };
    check("\n", true);
    check(" (0123456789ab)\n", true);
    check(" (0123456789ab-dirty)\n", true);
    check("", false);
    check(" (0123456789a)\n", false);
    check(" (0123456789ag)\n", false);
    check(" 0123456789ab\n", false);
}
