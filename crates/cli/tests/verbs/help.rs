//! Help, completions, man pages, and mistakes.

use crate::Place;

#[test]
fn every_verb_has_help() {
    let place = Place::new();
    let help = place.out("help");
    let verbs = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let verbs: Vec<&str> = verbs
        .take_while(|line| line.starts_with("  "))
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(verbs.len() > 15, "{help}");
    for verb in verbs {
        let text = place.out(&format!("help {verb}"));
        assert!(text.contains("Usage: quire"), "{verb}: {text}");
    }
}

#[test]
fn man_pages_and_completions_are_written() {
    let place = Place::new();
    std::fs::create_dir(place.path("man")).unwrap();
    place.out("man man");
    let page = std::fs::read_to_string(place.path("man/quire-import.1")).unwrap();
    assert!(page.contains(".TH"), "{page}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(place.out(&format!("completions {shell}")).contains("quire"));
    }
}

#[test]
fn mistakes_are_told_with_what_was_meant() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} debian", tree.display()));
    let cases = [
        ("imoprt x", 2, "'import'"),
        ("import x:y", 2, "does not say what it is"),
        ("import dir:/no/such/place", 2, "/no/such/place"),
        ("show debain", 2, "did you mean debian:latest?"),
        ("cat debian:/etc/none", 2, "there is no \"/etc/none\" in the image"),
        ("cat debian:/etc", 2, "is not a regular file"),
        ("tag debian Not/A/Name!", 2, "is not an image name"),
        ("rm nothing", 2, "there is no image"),
        ("umount .", 2, "nothing is mounted"),
    ];
    for (line, code, text) in cases {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(code), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
        assert!(!ran.err.contains("panicked"), "{line}: {}", ran.err);
    }
}

#[test]
fn a_store_that_is_not_there_is_not_made_by_looking() {
    let place = Place::new();
    let ran = place.run("images");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("quire import"), "{}", ran.err);
    assert!(!place.path("store").exists());
}

#[test]
fn doctor_answers_everywhere() {
    let place = Place::new();
    assert!(place.out("doctor").contains("kernel"));
    let json: serde_json::Value = serde_json::from_str(&place.out("doctor --json")).unwrap();
    assert!(json["features"].as_array().is_some_and(|it| it.len() >= 8), "{json}");
}
