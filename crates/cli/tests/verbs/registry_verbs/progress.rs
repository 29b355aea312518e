//! Progress that a pull shows.

use serde_json::Value;

use crate::registry_verbs::logins::on_a_terminal;
use crate::registry_verbs::registries::{place, start};
use crate::{Place, program};

/// Returns a terminal's output without escape sequences.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        out += before;
        let end = after.find(|it: char| it.is_ascii_alphabetic()).map_or(after.len(), |it| it + 1);
        // A sequence may leave the line, so begin a new one.
        out.push('\r');
        rest = &after[end..];
    }
    out + rest
}

#[test]
fn a_pull_tells_programs_and_people_how_far_it_is() {
    let from = place(1);
    let Some(daemon) = start(&from) else { return };
    let target = format!("{}/app:1", daemon.host);
    from.out(&format!("push a:1 {target}"));

    let events = Place::new().out(&format!("pull --json {target}"));
    let events: Vec<Value> = events.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
    let names: Vec<_> = events.iter().map(|it| it["event"].as_str().unwrap()).collect();
    assert_eq!(names[..2], ["layers", "started"]);
    assert_eq!(names[names.len() - 3..], ["writing", "committing", "pulled"]);
    let read: Vec<_> = events.iter().filter(|it| it["event"] == "read").collect();
    let bytes: Vec<_> = read.iter().map(|it| it["bytes"].as_u64().unwrap()).collect();
    assert!(bytes.windows(2).all(|it| it[0] < it[1]), "each says something new: {bytes:?}");
    assert_eq!(bytes.last().copied(), events[0]["bytes"][0].as_u64());

    let lines = Place::new().run(&format!("pull {target}")).err;
    // A new store first prints remarks.
    let first = lines.lines().find(|it| !it.starts_with("quire: "));
    assert!(first.is_some_and(|it| it.starts_with("layer 1 of 1, 8.")), "{lines}");

    if program("script").is_none() {
        testing::skipped("script is not installed");
        return;
    }
    let to = Place::new();
    to.tree("tree", "x");
    let (shown, _) = on_a_terminal(&to, &format!("pull {target}"), &[]);
    // After the summary, no bar is drawn again.
    let (_, after) = shown.rsplit_once("already in the store").expect("the summary");
    assert!(!after.contains("layer"), "{after:?}");
    let shown = plain(&shown);
    let columns = |line: &str| line.trim_end().chars().count();
    let bars: Vec<_> = shown.split(['\r', '\n']).filter(|it| it.contains('[')).collect();
    assert!(!bars.is_empty(), "{shown}");
    for bar in bars {
        let whole = bar.starts_with("layer 1   [") && bar.trim_end().ends_with("left");
        assert!(whole && columns(bar) <= 80, "{bar}");
    }
    assert!(shown.contains("1 layer, 0 already in the store"), "{shown}");

    // An import of a tree has files instead of layers.
    let (shown, _) = on_a_terminal(&to, "import dir:tree plain", &[]);
    assert!(plain(&shown).contains("files "), "{shown}");
}
