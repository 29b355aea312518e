//! Progress that a pull shows.

use serde_json::Value;

use crate::registry_verbs::logins::{on_a_terminal, on_a_terminal_of};
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

#[test]
fn no_progress_hides_progress_and_nothing_else() {
    let place = Place::new();
    place.tree("tree", "x");
    let mut tar = std::process::Command::new("tar");
    tar.arg("-cf").arg(place.path("a.tar")).arg("-C").arg(place.path("tree")).arg(".");
    assert!(tar.status().unwrap().success());
    let steps = ["layer 1 of 1", "writing the image", "waiting for the disk"];
    let check = |option: &str, has_steps, has_remark, has_report| {
        let _store = std::fs::remove_dir_all(place.path("store"));
        let ran = place.run(format!("{option} import tar:a.tar").trim());
        assert_eq!(ran.code, Some(0), "{option}: {}", ran.err);
        for step in steps {
            assert_eq!(ran.err.contains(step), has_steps, "{option}: {}", ran.err);
        }
        assert_eq!(ran.out.contains("1 layer, "), has_report, "{option}: {}", ran.out);
        let ran = place.run(format!("{option} rmi a").trim());
        assert_eq!(ran.code, Some(0), "{option}: {}", ran.err);
        assert_eq!(ran.err.contains("names removed"), has_remark, "{option}: {}", ran.err);
    };
    check("", true, true, true);
    check("--no-progress", false, true, true);
    check("--quiet", false, false, false);
    if program("script").is_none() {
        testing::skipped("script is not installed");
        return;
    }
    for (option, has_bars) in [("", true), ("--no-progress ", false)] {
        let _store = std::fs::remove_dir_all(place.path("store"));
        let (shown, _) = on_a_terminal(&place, &format!("import {option}dir:tree"), &[]);
        assert!(shown.contains("ended with 0") && shown.contains(" inodes"), "{shown:?}");
        // A bar is drawn with sequences that move the cursor.
        assert_eq!(shown.contains("\u{1b}["), has_bars, "{shown:?}");
        let shown = plain(&shown);
        let is_bar = |row: &str| row.starts_with("files ");
        assert_eq!(shown.split(['\r', '\n']).any(is_bar), has_bars, "{shown:?}");
    }
}

/// Lines that are longer than the terminal would wrap, and each redraw of a bar would leave a copy of it.
#[test]
fn progress_and_tables_fit_into_60_columns() {
    if program("script").is_none() {
        testing::skipped("script is not installed");
        return;
    }
    let place = place(3);
    let name = "registry.example.com:5000/department/team/application:2026-11-29";
    place.out(&format!("tag a:1 {name}"));
    let shown = |place: &Place, line: &str| {
        let (shown, _) = on_a_terminal_of(60, place, line, &[]);
        // The output of the test's own commands follows.
        let (shown, _) = shown.split_once("ended with 0").expect(&shown);
        plain(shown)
    };
    let check = |row: &str| assert!(row.trim_end().chars().count() <= 60, "{row}");
    for line in ["images", "du a:1", "ps --all", "help", "-h", "help pull", "import -h"] {
        shown(&place, line).split(['\r', '\n']).for_each(check);
    }
    // Names are whole, apart from line breaks. Without a terminal, each image has one line.
    let images = shown(&place, "images");
    for part in ["registry.example.com:", "department/team/", "application:", "2026-11-29"] {
        assert!(images.contains(part), "{part}: {images}");
    }
    assert!(place.out("images").contains(name));

    let bars = |text: &str, label: &str| {
        let rows: Vec<_> = text.split(['\r', '\n']).filter(|it| it.starts_with(label)).collect();
        assert!(!rows.is_empty(), "{text}");
        for row in rows {
            // A finished bar fills its line with spaces, so that the terminal shows the next bar below it.
            let chars: Vec<char> = row.chars().collect();
            for line in chars.chunks(60).map(|it| it.iter().collect::<String>()) {
                assert!(line.trim().is_empty() || line.starts_with(label), "{row}");
            }
        }
    };
    bars(&shown(&place, "import dir:tree b"), "files ");
    let Some(daemon) = start(&place) else { return };
    let target = format!("{}/app:1", daemon.host);
    bars(&shown(&place, &format!("push a:1 {target}")), "layer 1 ");
    bars(&shown(&Place::new(), &format!("pull {target}")), "layer 1 ");
}
