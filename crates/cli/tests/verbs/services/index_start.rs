//! Tests the recording of an image's start by `index`.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use image::digest::Digest;
use image::erofs::read::{Image, RunPlace};
use image::lazy::hot::BLOCK;
use serde_json::Value;

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
    assert_eq!(starts[0]["isOwn"], false);
    let recorded = || store.downloads.traces(&image).unwrap().get("default").unwrap().start.clone();
    assert_eq!(recorded().unwrap().commands, ["cat '/words'"]);
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

/// Changes the command of the only image in a layout.
fn edit_config(layout: &Path, command: &Value) {
    let blob = |digest: &Value| layout.join("blobs/sha256").join(&digest.as_str().unwrap()[7..]);
    let read = |path: &Path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    let write = |descriptor: &mut Value, document: &Value| {
        let bytes = document.to_string();
        descriptor["digest"] = Digest::sha256(bytes.as_bytes()).to_string().into();
        descriptor["size"] = bytes.len().into();
        fs::write(blob(&descriptor["digest"]), bytes).unwrap();
    };
    let mut index = read(&layout.join("index.json"));
    let descriptor = &mut index["manifests"][0];
    let mut manifest = read(&blob(&descriptor["digest"]));
    let mut config = read(&blob(&manifest["config"]["digest"]));
    config["config"]["Cmd"] = command.clone();
    write(&mut manifest["config"], &config);
    write(descriptor, &manifest);
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
}

/// Several images with the same layers are one image in the store, but their commands differ.
#[test]
fn an_image_with_another_command_gets_its_own_start() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    if runtimes().next().is_none() {
        return;
    }
    fs::rename(place.path("store"), place.path("lazily")).unwrap();
    place.out("import --quiet --form tar --index tar:layer.tar.gz lazy");
    // The same layers, with the commands `cat /words` and `cat /unread`.
    for (name, file) in [("words", "/words"), ("unread", "/unread")] {
        let layout = place.path(name);
        place.out(&format!("export lazy oci:{name}"));
        let command = serde_json::json!(["cat", file]);
        edit_config(&layout, &command);
        place.out(&format!("import --quiet --form tar --index oci:{name} {name}"));
    }
    let store = open(&place.path("store"));
    let image = |name: &str| store.resolve(name).unwrap().image;
    assert_eq!(image("words"), image("unread"));
    let start = |name: &str| {
        let report: serde_json::Value =
            serde_json::from_str(&place.out(&format!("index --json {name}"))).unwrap();
        report["starts"].clone()
    };
    let recorded = || {
        let traces = store.downloads.traces(&image("words")).unwrap();
        traces.get("default").unwrap().start.clone().unwrap().commands
    };
    assert_eq!(start("words")[0]["command"], "cat /words");
    assert_eq!(
        (start("words"), recorded()),
        (serde_json::json!([]), vec!["cat /words".to_owned()])
    );
    let starts = start("unread");
    assert_eq!((&starts[0]["command"], &starts[0]["isOwn"]), (&"cat /unread".into(), &true.into()));
    assert_eq!(recorded(), ["cat /unread"]);
    // Commands that the user has named stay.
    let named = place.command(&["index", "--start", "cat /words", "unread"]).output().unwrap();
    assert!(named.status.success(), "{named:?}");
    assert_eq!(
        (start("words"), recorded()),
        (serde_json::json!([]), vec!["cat /words".to_owned()])
    );
}

/// Makes each ELF file of a tree one for another machine: for aarch64, or for x86-64 on aarch64. Source: elf(5),
/// `e_machine`, and the processor supplements of the System V ABI.
fn make_foreign(tree: &Path) {
    let machine: u16 = if cfg!(target_arch = "aarch64") { 62 } else { 183 };
    let mut folders = vec![tree.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                let mut bytes = fs::read(entry.path()).unwrap();
                if bytes.starts_with(b"\x7fELF") {
                    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
                    fs::write(entry.path(), bytes).unwrap();
                }
            }
        }
    }
}

/// Returns the libraries and the loader of a program of this host, as its loader finds them.
fn needed(program: &str) -> Vec<String> {
    let ended = std::process::Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(ended.stdout).unwrap();
    let path =
        |line: &str| line.split_whitespace().find(|it| it.starts_with('/')).map(String::from);
    text.lines().filter_map(path).collect()
}

/// An image for another platform cannot run, so its pack has the files that the start needs in any case.
#[test]
fn a_start_that_cannot_run_is_replaced_by_its_program_and_libraries() {
    let Some(lazy) = Lazy::with(make_foreign, |_| ()) else { return };
    let place = &lazy.place;
    if runtimes().next().is_none() {
        return;
    }
    fs::rename(place.path("store"), place.path("lazily")).unwrap();
    place.out("import --quiet --form tar tar:layer.tar.gz lazy");
    place.out("export lazy oci:foreign");
    edit_config(&place.path("foreign"), &serde_json::json!(["cat", "/words"]));
    place.out("import --quiet --form tar --index oci:foreign foreign");
    let ended = place.command(&["index", "--json", "foreign"]).output().unwrap();
    let err = String::from_utf8_lossy(&ended.stderr);
    let report: Value = serde_json::from_slice(&ended.stdout).unwrap();
    let start = &report["starts"][0];
    assert_eq!((&start["isClosure"], &start["command"]), (&true.into(), &"cat /words".into()));
    assert!(err.contains("the start is not recorded, because the start failed: "), "{err}");
    let store = open(&place.path("store"));
    let image = store.resolve("foreign").unwrap().image;
    let trace = store.downloads.traces(&image).unwrap().get("default").unwrap().clone();
    let found: BTreeSet<u32> =
        trace.runs.iter().flat_map(|it| it.block..it.block + it.blocks).collect();
    assert_eq!(start["bytes"], found.len() as u64 * BLOCK);
    let opened = store.open_image(&image).unwrap();
    let read = Image::open(&opened.image).unwrap();
    let blocks = |path: &str| {
        let path = lazy.tree.join(&path[1..]).canonicalize().unwrap();
        let mut inode = read.root().unwrap();
        for name in path.strip_prefix(lazy.tree.canonicalize().unwrap()).unwrap() {
            let nid = read.lookup(&inode, name.as_bytes()).unwrap().unwrap();
            inode = read.inode(nid).unwrap();
        }
        let mut blocks = BTreeSet::new();
        let mut extents = read.extents(&inode);
        while let Some(extent) = extents.next().transpose().unwrap() {
            let RunPlace::Data(_, start) = extent.place else { continue };
            let end = (start.0 + extent.len).div_ceil(BLOCK);
            blocks.extend((start.0 / BLOCK..end).map(|it| u32::try_from(it).unwrap()));
        }
        blocks
    };
    let libraries = needed("/bin/cat");
    assert!(libraries.len() >= 2, "{libraries:?}");
    for path in libraries.iter().map(String::as_str).chain(["/bin/cat"]) {
        let first = blocks(path).first().copied().unwrap();
        assert!(found.contains(&first), "{path}: {first} of {found:?}");
    }
    // Neither another program nor data.
    for path in ["/usr/bin/md5sum", "/unread", "/words"] {
        assert!(!blocks(path).is_subset(&found), "{path}");
    }
    // It is found once.
    let again: Value = serde_json::from_str(&place.out("index --json --no-start foreign")).unwrap();
    assert_eq!(again["starts"], serde_json::json!([]));
}
