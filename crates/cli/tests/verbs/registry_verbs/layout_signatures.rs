//! Signatures that travel with OCI layouts, with skopeo and openssl as the other programs.

use std::path::Path;

use serde_json::{Value, json};

use super::signatures::{P256, check_accepted, check_refused, json, key, policy, verified_at};
use crate::{Place, write};

const NAME: &str = "ghcr.io/ours/app";

/// Imports an image whose manifest an export does not change, and signs it with two keys.
fn signed() -> (Place, String) {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let mut tar = testing::command("tar").unwrap();
    tar.args(["--format=posix", "-cf"]).arg(place.path("a.tar")).arg("-C").arg(&tree).arg(".");
    assert!(tar.status().unwrap().success());
    place.out("import --quiet tar:a.tar a:1");
    for name in ["ours", "theirs", "third"] {
        key(&place, name, &P256);
    }
    for name in ["ours", "theirs"] {
        place.out(&format!("sign a:1 --key {name}.key --identity {NAME}"));
    }
    let shown = json(&place.out("show --json a:1"));
    (place, shown["manifestDigest"].as_str().unwrap().to_owned())
}

/// Returns another host with the public keys.
fn other_host(from: &Place) -> Place {
    let to = Place::new();
    for name in ["ours.pub", "theirs.pub", "third.pub"] {
        std::fs::copy(from.path(name), to.path(name)).unwrap();
    }
    to
}

fn index(layout: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(layout.join("index.json")).unwrap()).unwrap()
}

/// Returns the entries of a kind.
fn entries(layout: &Path, kind: &str) -> Vec<Value> {
    let index = index(layout);
    let entries = index["manifests"].as_array().unwrap().iter();
    entries.filter(|it| it["annotations"]["kind"] == kind).cloned().collect()
}

fn blob(layout: &Path, digest: &Value) -> std::path::PathBuf {
    layout.join("blobs/sha256").join(digest.as_str().unwrap().strip_prefix("sha256:").unwrap())
}

const SIGNATURES: &str = "dev.cosignproject.cosign/sigs";

#[test]
fn an_image_that_was_signed_on_one_host_is_accepted_on_another() {
    if !testing::programs(&["openssl", "skopeo"]) {
        return;
    }
    let (from, digest) = signed();
    let exported = json(&from.out("export --json a:1 oci:out:1"));
    assert_eq!((&exported["unchanged"], &exported["signatures"]), (&true.into(), &4.into()));
    let layout = from.path("out");
    // Cosign finds both by their kinds. Source: cosign, `pkg/oci/layout/index.go`.
    let image = entries(&layout, "dev.cosignproject.cosign/image");
    assert_eq!((image.len(), &image[0]["digest"]), (1, &digest.clone().into()));
    assert_eq!(entries(&layout, SIGNATURES).len(), 1);
    // Other programs find them by the tag.
    let source = format!("oci:{}", layout.display());
    for (public, expect) in [("ours.pub", 1), ("theirs.pub", 1), ("third.pub", 0)] {
        let found = verified_at(&from, &source, NAME, &digest, &from.path(public));
        assert_eq!(found, expect, "{public}");
    }
    // An export into the same layout adds nothing.
    let before = index(&layout);
    assert_eq!(json(&from.out("export --json a:1 oci:out:1"))["blobsAdded"], 0);
    assert_eq!(index(&layout), before);

    let to = other_host(&from);
    let source = layout.display();
    policy(&to, "local", "ours.pub", "");
    let imported = json(&to.out(&format!("import --json oci:{source}:1 app")));
    assert_eq!((&imported["signatures"], &imported["manifest"]), (&4.into(), &digest.into()));
    check_accepted(&to, "app");
    policy(&to, "local", "theirs.pub", &format!("identity = \"{NAME}\""));
    check_accepted(&to, "app");
    policy(&to, "local", "third.pub", "");
    check_refused(&to, "app", "signature(s), but none by third.pub");
    // From there, they travel on. Without a tag, the layout has one image, beside its signatures.
    to.out("export --quiet app oci:on");
    let third = other_host(&from);
    policy(&third, "local", "ours.pub", "");
    third.out(&format!("import --quiet oci:{} app", to.path("on").display()));
    check_accepted(&third, "app");
    to.out("export --quiet app oci:on");
}

/// The entries that `cosign save` writes have no name.
#[test]
fn signatures_without_a_tag_are_found_by_their_kind() {
    if !testing::programs(&["openssl"]) {
        return;
    }
    let (from, _) = signed();
    from.out("export --quiet a:1 oci:out");
    let file = from.path("out/index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for entry in index["manifests"].as_array_mut().unwrap() {
        entry["annotations"].as_object_mut().unwrap().remove("org.opencontainers.image.ref.name");
    }
    write(&file, index.to_string().as_bytes(), 0o644);
    let to = other_host(&from);
    policy(&to, "local", "ours.pub", "");
    to.out(&format!("import --quiet oci:{} app", from.path("out").display()));
    check_accepted(&to, "app");
    // The next image without a tag is refused as before, and one with a tag is added.
    from.out("export --quiet a:1 oci:out:2");
}

#[test]
fn changed_signatures_of_a_layout_count_for_nothing() {
    if !testing::programs(&["openssl"]) {
        return;
    }
    let (from, digest) = signed();
    let check = |change: &dyn Fn(&Path), signatures: u64| {
        let _old = std::fs::remove_dir_all(from.path("out"));
        from.out("export --quiet a:1 oci:out:1");
        change(&from.path("out"));
        let to = other_host(&from);
        policy(&to, "local", "ours.pub", "");
        let layout = from.path("out");
        let imported = json(&to.out(&format!("import --json oci:{}:1 app", layout.display())));
        assert_eq!(imported["signatures"], signatures);
        check_refused(&to, "app", "rule 1 of policy.toml");
    };
    let list = |layout: &Path| {
        let path = blob(layout, &entries(layout, SIGNATURES)[0]["digest"]);
        let list: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        (path, list)
    };
    // A payload, or the list itself, has another byte, or is gone.
    let payload = |layout: &Path| blob(layout, &list(layout).1["layers"][0]["digest"]);
    let flip = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        let last = bytes.len() - 3;
        bytes[last] ^= 1;
        write(path, &bytes, 0o644);
    };
    check(&|it| flip(&payload(it)), 2);
    check(&|it| std::fs::remove_file(payload(it)).unwrap(), 2);
    check(&|it| flip(&list(it).0), 2);
    check(&|it| std::fs::remove_file(list(it).0).unwrap(), 2);
    // The list names the signatures of another manifest, and thousands of blobs that are none.
    let replace = |layout: &Path, change: &dyn Fn(&mut Value)| {
        let (_, mut list) = list(layout);
        change(&mut list);
        let bytes = list.to_string().into_bytes();
        let digest = oci::Digest::sha256(&bytes).to_string();
        write(&blob(layout, &json!(digest)), &bytes, 0o644);
        let mut index = index(layout);
        for entry in index["manifests"].as_array_mut().unwrap() {
            if entry["annotations"]["kind"] == SIGNATURES {
                (entry["digest"], entry["size"]) = (digest.clone().into(), bytes.len().into());
            }
        }
        write(&layout.join("index.json"), index.to_string().as_bytes(), 0o644);
    };
    let other = "0".repeat(64);
    check(
        &|layout| {
            let text = std::fs::read_to_string(payload(layout)).unwrap();
            let hex = digest.strip_prefix("sha256:").unwrap();
            let bytes = text.replace(hex, &other).into_bytes();
            let new = oci::Digest::sha256(&bytes).to_string();
            write(&blob(layout, &json!(new)), &bytes, 0o644);
            replace(layout, &|list| {
                for layer in list["layers"].as_array_mut().unwrap() {
                    (layer["digest"], layer["size"]) = (new.clone().into(), bytes.len().into());
                }
            });
        },
        2,
    );
    check(
        &|layout| {
            replace(layout, &|list| {
                let layer = &list["layers"][0];
                let mut none = layer.clone();
                none["digest"] = list["config"]["digest"].clone();
                none["size"] = list["config"]["size"].clone();
                let mut layers = vec![none; 5000];
                layers.push(layer.clone());
                list["layers"] = layers.into();
            });
        },
        // The signatures of the id have separate limits, so those two are found.
        2,
    );
}
