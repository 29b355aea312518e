//! `fsck --repair` fetches damaged or lost data from the registry that the image was pulled from.

use std::fs;
use std::path::{Path, PathBuf};

use testing::daemon::Daemon;

use super::{place, start};
use crate::Place;

/// Returns all files below a folder, the largest first.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![folder.to_owned()];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            match entry.file_type().unwrap().is_dir() {
                true => left.push(entry.path()),
                false => found.push(entry.path()),
            }
        }
    }
    found.retain(|it| it.extension().is_none());
    found.sort_by_key(|it| std::cmp::Reverse(fs::metadata(it).unwrap().len()));
    found
}

/// Flips a bit of the largest file below a folder.
#[cfg(feature = "serve")]
pub(crate) fn flip_largest(folder: &Path) {
    flip(&files(folder)[0]);
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    replace(path, &bytes);
}

fn cut(path: &Path) {
    let bytes = fs::read(path).unwrap();
    replace(path, &bytes[..bytes.len() / 2]);
}

/// Replaces a file by a new one, because the old one may be sealed.
fn replace(path: &Path, bytes: &[u8]) {
    remove(path);
    fs::write(path, bytes).unwrap();
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

/// Returns a store with an image of a registry in this form, the image's name, and the registry with its folder.
fn pulled(form: &str) -> Option<(Place, String, (Daemon, Place))> {
    let from = place(3);
    let daemon = start(&from)?;
    let name = format!("{}/team/app:1", daemon.host);
    from.out(&format!("push --quiet a:1 {name}"));
    let to = Place::new();
    to.out(&format!("pull --quiet --form {form} {name}"));
    Some((to, name, (daemon, from)))
}

/// Damages the largest file of a folder by `harm`, and repairs the store.
fn check(place: &Place, name: &str, folder: &str, harm: Harm) {
    let of = format!("{folder} {}", harm.0);
    (harm.1)(&files(&place.path("store").join(folder))[0]);
    assert_eq!(place.run("fsck").code, Some(1), "{of}");
    let repaired = place.run("fsck --repair");
    assert_eq!(repaired.code, Some(1), "{of}: {}", repaired.err);
    assert!(repaired.err.contains(&format!("{name} is complete again")), "{of}: {}", repaired.err);
    // The parts of an image that was replaced by another image are removed.
    place.out("gc");
    let again = place.run("fsck");
    assert_eq!(again.code, Some(0), "{of}: {}", again.out);
    assert_eq!(place.out(&format!("cat {name}:/file-2")), "2 ".repeat(99), "{of}");
}

/// The name of a kind of damage, and the function that causes it.
type Harm = (&'static str, fn(&Path));

const WAYS: [Harm; 3] = [("flipped", flip), ("cut", cut), ("gone", remove)];

#[test]
fn damage_is_fetched_again() {
    for (form, folders) in [
        ("objects", &["objects", "layers", "images", "manifests"][..]),
        ("packed", &["data", "images"]),
        ("tar", &["data", "layers"]),
    ] {
        let Some((place, name, _daemon)) = pulled(form) else { return };
        for folder in folders {
            for harm in WAYS {
                check(&place, &name, folder, harm);
            }
        }
    }
}

#[test]
fn a_pull_brings_what_is_lost() {
    let Some((place, name, _daemon)) = pulled("objects") else { return };
    let pull = format!("pull {name}");
    assert!(place.out(&pull).contains("up to date: sha256:"));
    for folder in ["objects", "layers", "images"] {
        for harm in [cut, remove] {
            harm(&files(&place.path("store").join(folder))[0]);
            assert!(!place.out(&pull).contains("up to date: sha256:"), "{folder}");
            assert!(place.out(&pull).contains("up to date: sha256:"), "{folder}");
        }
    }
    place.out("gc");
    place.out("fsck");
}

#[test]
fn without_the_registry_the_way_out_is_named() {
    let Some((place, name, (daemon, _from))) = pulled("objects") else { return };
    flip(&files(&place.path("store/objects"))[0]);
    let found = place.run("fsck");
    assert!(found.out.contains("quire fsck --repair"), "{}", found.out);
    let repaired = place.run("fsck --repair --no-fetch");
    let how = format!("`quire pull {}/team/app@sha256:", daemon.host);
    assert!(repaired.err.contains(&how), "{}", repaired.err);
    drop(daemon);
    // The error names the file, and a remedy.
    let refused = place.run(&format!("bundle {name} bundle"));
    assert!(
        refused.err.contains("\"/noise\"") && refused.err.contains("fsck --repair"),
        "{}",
        refused.err
    );
    let repaired = place.run("fsck --repair");
    assert!(repaired.err.contains(&how), "{}", repaired.err);
    assert!(repaired.err.contains("cannot be fetched now"), "{}", repaired.err);
}
