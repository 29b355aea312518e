//! Tests the recording of an image's start by `index`.

use std::fs;

use super::served::{Lazy, open};
use crate::container_life::runs::runtimes;

#[test]
fn an_index_records_the_start() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    if runtimes().next().is_none() {
        return;
    }
    fs::rename(place.path("store"), place.path("lazily")).unwrap();
    place.out("import --quiet --form tar --index tar:layer.tar.gz lazy");
    let store = open(&place.path("store"));
    let image = store.resolve("lazy").unwrap().image;
    let blocks = || {
        let traces = store.downloads.traces(&image).unwrap();
        let runs = traces.get("default").map(|it| it.runs.clone());
        runs.map(|it| it.iter().map(|it| it.blocks).sum::<u32>())
    };
    let index = |options: &[&str]| {
        let words: Vec<&str> = [&["index", "--json"], options, &["lazy"]].concat();
        let ended = place.command(&words).output().unwrap();
        let [out, err] = [ended.stdout, ended.stderr].map(|it| String::from_utf8(it).unwrap());
        let report = serde_json::from_str::<serde_json::Value>(&out).unwrap_or_default();
        (ended.status.code(), report["starts"].clone(), err)
    };
    // The image's config has no command.
    let (code, starts, err) = index(&[]);
    assert_eq!((code, starts, blocks()), (Some(0), serde_json::json!([]), None), "{err}");
    assert!(err.contains("no hot pack, because the start failed: "), "{err}");
    let (code, _, err) = index(&["--start", "/none"]);
    assert!(code != Some(0) && err.contains("--start"), "{code:?}: {err}");
    assert_eq!(blocks(), None);
    let (code, starts, err) = index(&["--start", "cat '/words'"]);
    assert_eq!((code, &starts[0]["command"]), (Some(0), &"cat '/words'".into()), "{err}");
    let words = fs::metadata(lazy.tree.join("words")).unwrap().len();
    assert!(starts[0]["bytes"].as_u64().unwrap() >= words, "{starts}");
    let first = blocks().unwrap();
    // The recorded trace stays until a command is named.
    for options in [&[][..], &["--no-start"]] {
        assert_eq!((index(options).1, blocks()), (serde_json::json!([]), Some(first)));
    }
    let (_, starts, err) = index(&["--start", "cat /words", "--start", "cat /unread"]);
    assert_eq!(starts.as_array().map(Vec::len), Some(2), "{err}");
    // A block at an end of the file may have been read before.
    assert!(blocks().unwrap() > first + 250, "{:?} {first}", blocks());
    // A program that does not end is stopped.
    let (code, starts, err) = index(&["--start", "cat /words /dev/zero"]);
    assert_eq!((code, starts.as_array().map(Vec::len)), (Some(0), Some(1)), "{err}");
    assert_eq!(place.out("ps --all --quiet"), "");
    place.out("fsck");
}
